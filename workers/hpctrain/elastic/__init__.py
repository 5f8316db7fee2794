"""Elastic runs: ranks may be lost, leave and join, and the others continue.

    roster     generations of members, as a state machine
    serve      the roster's connections, and what faults cost (goodput)
    launch     the ranks' processes: on this host, or as steps of a job
    __main__   python -m hpctrain.elastic: all of that for one run
    member     a rank's side: heartbeats, and the roster's requests

The exchange between members is `hpctrain.comm.elastic_group`.  Nothing here needs torch.
"""
