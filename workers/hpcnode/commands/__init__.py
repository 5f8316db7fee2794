"""The step commands and Slurm's commands that run on nodes."""
