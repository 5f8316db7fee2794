"""Simulation: what a policy would have done with the log of a real machine, or does with a saved queue.

`swf` reads a log, `policies` replays it and computes metrics, `forecast` continues a snapshot, `plot` draws the results. The
decisions are those of `hpcsched.sched`, the code that the daemon runs.
"""
