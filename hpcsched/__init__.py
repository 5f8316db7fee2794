"""hpcsched: Slurm's job model for the machines people already own."""

__version__ = "0.1.0"
