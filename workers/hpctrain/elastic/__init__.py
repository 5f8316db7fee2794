"""Ranks that may come and go: whoever is lost is missed within moments, and the others take the very next step.

    roster     who takes part: generations of members, as a state machine
    account    what faults cost, and goodput
    serve      the roster's connections
    launch     the ranks' processes: beside it, or as steps of a job
    __main__   python -m hpctrain.elastic: all of that for one run
    member     a rank's side: heartbeat, and what the roster wants of it

The exchange between members is `hpctrain.comm.elastic_group`.  Nothing here needs torch.
"""
