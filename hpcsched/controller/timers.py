"""When the next plan is due though nothing happens: begin times, time limits, deadlines, promises and other times come round.

Knows no clock, and nothing of how a plan is made.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcsched.controller import reserving
from hpcsched.controller.overdue import overdue_at_s
from hpcsched.controller.preemption import exempt_until_s, unanswered_at_s
from hpcsched.model.job import Job, Reason
from hpcsched.sched.policy import Policy
from hpcsched.sched.snapshot import Promise, switches_matter_until_s, time_min_s
from hpcsched.store.world import World

TIMED = frozenset({Reason.DEPENDENCY, Reason.RESERVATION})  # waits whose expected start is a time to plan again


def next_time_s(world: World, policy: Policy, promises: Iterable[Promise], now_s: float) -> float | None:
    """Return when the next begin time, time limit, last moment to make a deadline or promised start comes round, if any."""
    waiting = [world.jobs[job_id] for job_id in world.pending]
    begins = (job.not_before_s for job in waiting)
    ends = (overdue_at_s(world, job) for job in world.active_jobs())
    lasts = (_too_late_at_s(job) for job in waiting)
    spread = (_spreads_at_s(job, policy.max_switch_wait_s) for job in waiting)
    turns = (wait.expected_start_s for wait in world.waits.values() if wait.reason in TIMED)
    reserved = reserving.next_turn_s(world, now_s)
    exempt = exempt_until_s(world, policy.preempt)
    unanswered = unanswered_at_s(world, policy.preempt)
    promised = (promise.start_s for promise in promises)
    due = [
        at_s
        for at_s in (*begins, *promised, *ends, *lasts, *spread, *turns, *exempt, *unanswered, reserved)
        if at_s is not None and at_s > now_s
    ]
    return min(due, default=None)


def _too_late_at_s(job: Job) -> float | None:
    """Return from when on the waiting job cannot end by its deadline any more; None: it has none."""
    if job.deadline_at_s is None:
        return None
    least_s = time_min_s(job)
    return job.deadline_at_s - (least_s if least_s is not None else job.time_limit_s or 0) + 0.001


def _spreads_at_s(job: Job, max_switch_wait_s: float) -> float | None:
    """Return from when on the waiting job takes nodes on more switches than it asked for; None: it does not care."""
    if not job.spec.switches:
        return None
    return switches_matter_until_s(job.eligible_at_s, job.spec.switches_wait_s, max_switch_wait_s)
