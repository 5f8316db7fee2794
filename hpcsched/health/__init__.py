"""Is the cluster well? Checks that each give a status, one line and numbers; `hpcsched.cli.hhealth` runs them.

report (what a check says) - head (database, share, clock, controller: on this machine) - nodes (from what the controller
knows of each) - remedy (drain and resume).
"""
