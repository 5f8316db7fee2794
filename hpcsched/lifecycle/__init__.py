"""The transitions of jobs and nodes, and the effects that a job's state requires: the only place that changes either.

Knows no clock, disk, network or log: values in, values out.
"""
