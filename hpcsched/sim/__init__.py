"""A trace of a real machine and a virtual clock around the scheduler: what would this policy have done there?

`swf` reads the trace, `world` lets the events happen one at a time, `metrics` says how it went, `plot` draws it. The
decisions are those of `hpcsched.sched`, the code that the daemon runs.
"""
