"""Who may become what: the only home of a job's transitions, and of the effects that its state asks for.

Knows no clock, disk, network or log: values in, values out.
"""
