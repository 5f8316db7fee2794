"""Data-parallel training on unequal machines: ring all-reduce, incremental checkpoints, restarts that lose nothing."""
