"""The policy `default`: short jobs first by predicted run time, with bounded waits."""
