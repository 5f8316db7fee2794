"""Transitions of jobs and nodes, and the effects that a state requires.

Nothing else changes the state of a job or a node.

Knows no clock, disk, network or log: values in, values out.
"""
