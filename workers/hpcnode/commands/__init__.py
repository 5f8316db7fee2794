"""The commands that run in jobs: hrun, hrsh, and Slurm's names for them."""
