"""Limits of accounts, users, QOS and partitions, resources under Slurm's names (TRES), and licences."""
