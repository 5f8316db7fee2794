"""What a run tells: lines, metrics, the scheduler, plots."""
