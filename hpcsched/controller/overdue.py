"""Jobs whose time is over and that no shepherd ends.

A shepherd ends its own job at the time limit, by its node's clock. From here are ended: allocations without a script; a while
later the jobs of nodes that are silent; and jobs whose reservation, or time until the deadline, is over before their limit is up.
"""

from __future__ import annotations

from hpcsched.lifecycle.clocks import cut_at_s, limit_at_s
from hpcsched.lifecycle.events import EndRequested
from hpcsched.model.job import Job, JobState
from hpcsched.store.world import Transaction, World

LIMIT_SLACK_S = 15.0  # after its limit and grace, a job whose node did not end it is ended from here
_GOING_ON = frozenset({JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED})


def end_overdue(tx: Transaction) -> None:
    """End the jobs whose time is over."""
    for job in tx.world.active_jobs():
        due_s = overdue_at_s(tx.world, job)
        if due_s is not None and due_s <= tx.now_s:
            outcome, why = _end(tx.world, job, due_s)
            tx.record(EndRequested(job_id=job.id, at_s=tx.now_s, outcome=outcome, by_uid=None, why=why))


def overdue_at_s(world: World, job: Job) -> float | None:
    """Return when the job is to be ended from here, None: never."""
    limit_s = limit_at_s(job) if job.state is JobState.RUNNING else None
    if limit_s is not None and job.spec.script:
        limit_s += LIMIT_SLACK_S + world.config.controller.kill_wait_s
    cut_s = _cut_s(world, job)
    return min((due_s for due_s in (limit_s, cut_s) if due_s is not None), default=None)


def _cut_s(world: World, job: Job) -> float | None:
    if job.state not in _GOING_ON or not (job.reservation or job.deadline_at_s):
        return None
    return cut_at_s(job, world.reservations.get(job.reservation))


def _end(world: World, job: Job, due_s: float) -> tuple[JobState, str]:
    """Return as what the job ends that is due, and why."""
    if due_s != _cut_s(world, job):
        return JobState.TIMEOUT, "its time limit was reached"
    if due_s == job.deadline_at_s:
        return JobState.DEADLINE, "its deadline was reached"
    return JobState.TIMEOUT, f"its reservation {job.reservation!r} ended"
