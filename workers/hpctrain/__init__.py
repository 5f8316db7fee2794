"""Data-parallel training on unequal machines.

Ring all-reduce, incremental checkpoints, restarts that lose nothing.
"""
