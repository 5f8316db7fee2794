"""hpcsched: Slurm's job model for the machines people already own.

Follow one job through the code:

1. ``hsub job.sh``           cli/thin.c (or cli/thin.py) sends words, script and environment to the controller
2. they become a job         api/web.py and api/identity.py (who asks), controller/views/routes.py, api/command.py;
                             commands/submit.py reads the options by jobscript/script.py; jobscript/build.py
3. it becomes an event       controller/views/backend.py puts it into a tick, controller/tick.py;
                             controller/requests/submission.py
4. the event changes the job lifecycle/job.py, the only table of what may become what; state/transaction.py
5. it goes on disk           store/store.py, one commit for all that came in; then the id is answered
6. a plan gives it nodes     controller/planning.py: when; sched/plan.py, pure: snapshot in, plan out;
                             sched/scheduling_pass.py: what is free
7. its launch is sent        lifecycle/job.py says what must be true on nodes, controller/nodes/messages.py puts it on the wire
8. over one SSH connection   controller/nodes/links.py, launch/link.py, launch/ssh.py
9. a node runs it            workers/hpcnode/agent/agent.py gets it, workers/hpcnode/agent/ledger.py claims it in
                             workers/hpcnode/spool.py;
                             workers/hpcnode/agent/shepherds.py gives it to a shepherd,
                             workers/hpcnode/shepherd/shepherd.py, which supervises workers/hpcnode/shepherd/task.py
10. its end comes back       controller/nodes/messages.py again, matched by token; `hacct` reads store/ again
"""

__version__ = "0.1.0"

_OF_CLIENT = {"Client": "blocking", "AsyncClient": "aio"}


def __getattr__(name: str) -> object:
    """Import the clients for programs when they are used: commands must start fast."""
    if name not in _OF_CLIENT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"hpcsched.client.{_OF_CLIENT[name]}"), name)
