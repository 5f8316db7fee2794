"""What a run reports: lines of output, metrics, heartbeats to the scheduler, profiles."""
