"""Limits of accounts, users, QOS and partitions; TRES and licences."""
