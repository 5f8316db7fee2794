"""hpcsched: Slurm's job model for the machines people already own.

Follow one job through the code:

1. ``hsub job.sh``           cli/thin.c (or cli/thin.py) sends words, script and environment to the controller
2. they become a job         api/command.py runs commands/submit.py, jobscript/ reads the options;
                             api/identity.py (who asks), controller/views/backend.py
3. it becomes an event       controller/requests/jobs.py, inside a tick: controller/tick.py
4. the event changes the job lifecycle/job.py, the only table of what may become what
5. it goes on disk           store/store.py, one commit for all that came in; then the id is answered
6. a plan gives it nodes     sched/plan.py, pure: snapshot in, plan out
7. its launch is sent        lifecycle/effects.py says what must be true, controller/messages.py says it on the wire
8. over one SSH connection   launch/link.py, launch/ssh.py; the node's code comes along: launch/bundle.py
9. a node runs it            workers/hpcnode/agent/agent.py claims it in workers/hpcnode/spool.py;
                             workers/hpcnode/shepherd/shepherd.py supervises it
10. its end comes back       controller/reports.py, matched by token; `hacct` reads store/ again
"""

__version__ = "0.1.0"
