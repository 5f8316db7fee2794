"""Jobs over their time limit that no shepherd ends: allocations without a script, and jobs of nodes that are silent.

A shepherd ends its own job at the limit, by its node's clock; from here that is done only when it has not, a while later.
"""

from __future__ import annotations

from hpcsched.lifecycle.clocks import limit_at_s
from hpcsched.lifecycle.events import EndRequested
from hpcsched.model.job import Job, JobState
from hpcsched.store.world import Transaction, World

LIMIT_SLACK_S = 15.0  # after its limit and grace, a job whose node did not end it is ended from here


def end_overdue(tx: Transaction) -> None:
    """End the jobs whose time is over."""
    for job in tx.world.active_jobs():
        due_s = overdue_at_s(tx.world, job)
        if due_s is not None and due_s <= tx.now_s:
            why = "its time limit was reached"
            tx.record(EndRequested(job_id=job.id, at_s=tx.now_s, outcome=JobState.TIMEOUT, by_uid=None, why=why))


def overdue_at_s(world: World, job: Job) -> float | None:
    """Return when the job is to be ended from here, None: never."""
    due_s = limit_at_s(job) if job.state is JobState.RUNNING else None
    if due_s is None:
        return None
    slack_s = LIMIT_SLACK_S + world.config.controller.kill_wait_s if job.spec.script else 0.0
    return due_s + slack_s
