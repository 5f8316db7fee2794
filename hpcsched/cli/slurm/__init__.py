"""Slurm's names for the commands: sbatch, squeue, scancel, sacct, sinfo, scontrol and the rest.

The same code as our own commands with other defaults: Slurm's formats, its texts on standard error, its exit statuses.
They are found only by those who put the directory of ``hpcsched slurm-path`` on their PATH.
"""
