"""What if: whether a job would start in a world that is not as it is. The plan itself is asked, so that all it heeds is heeded.

Pure: a snapshot and a policy in, a start out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace

from hpcsched.model.ids import JobId
from hpcsched.model.reservation import Reservation
from hpcsched.model.resources import Share
from hpcsched.model.units import known_limit_s
from hpcsched.sched.decisions import Plan, Start
from hpcsched.sched.intervals import NEVER_S
from hpcsched.sched.policy import Policy
from hpcsched.sched.reservations import cut_short_s
from hpcsched.sched.snapshot import PendingJob, RunningJob, Snapshot

Make = Callable[[Snapshot, Policy], Plan]


def start_of(made: Plan, job_id: JobId) -> Start | None:
    """Return how the job starts by this plan; None: it does not."""
    return next((start for start in made.starts if start.job_id == job_id), None)


def start_behind(
    world: Snapshot, policy: Policy, job: PendingJob, ahead: Sequence[PendingJob], make: Make
) -> Start | None:
    """Return how `job` would start in `world` without delaying those `ahead`; None: it would not.

    Who of these would start there as well does not count: what is made free is not meant for them.
    """
    ahead = tuple(ahead)
    while True:
        made = make(replace(world, pending=(*ahead, job)), policy)
        started = {start.job_id for start in made.starts}
        others = tuple(other for other in ahead if other.id not in started)
        if job.id in started or len(others) == len(ahead):
            return start_of(made, job.id)
        ahead = others


def as_running(
    job: PendingJob,
    shares: tuple[Share, ...],
    now_s: float,
    reservations: Iterable[Reservation] = (),
    lowered_s: int | None = None,
) -> RunningJob:
    """Return the job as it is when it starts now on `shares`, its time limit `lowered_s`. It cannot be preempted at once."""
    limit_s = lowered_s if lowered_s is not None else known_limit_s(job.request.time_limit_s)
    limit_ends_s = now_s + limit_s if limit_s is not None else NEVER_S
    ends_s = min(limit_ends_s, cut_short_s(job, {one.name: one for one in reservations}))
    alike = {name: getattr(job, name) for name in _ALIKE}
    return RunningJob(
        **alike,
        shares=shares,
        began_at_s=now_s,
        ends_at_s=ends_s if ends_s < NEVER_S else None,
    )


def started(world: Snapshot, job: PendingJob, start: Start) -> RunningJob:
    """Return `job`, which waits in `world`, as it is when it has started so."""
    return as_running(job, start.shares, world.now_s, world.reservations, start.time_limit_s)


_ALIKE = {field.name for field in fields(PendingJob)} & {field.name for field in fields(RunningJob)}
