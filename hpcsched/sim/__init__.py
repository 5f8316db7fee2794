"""Simulation of a policy on the log of a real machine, or on a saved queue.

`swf` reads a log, `policies` replays it and computes metrics, `forecast` continues a snapshot, `plot` draws the results. The
decisions are those of `hpcsched.sched`, the code that the daemon runs.
"""
