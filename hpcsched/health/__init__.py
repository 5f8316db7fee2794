"""Health checks of the cluster. Each gives a status, one line and numbers.

`hpcsched.cli.hhealth` runs them. Modules: report (result of a check); head (database, share,
clock, controller: on this machine); nodes (from the controller's data on each node; drain and
resume).
"""
