"""The policy `default`: short jobs first by predicted run time, with a bound on every job's wait."""
