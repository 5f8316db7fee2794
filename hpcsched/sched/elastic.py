"""Elastic jobs: which running jobs are asked to give nodes back for others that wait, and which get idle nodes.

A job with `--elastic` and `--nodes=MIN-MAX` starts with what is free, MIN nodes at least. While others wait in line it may
be asked to make do with fewer, never below MIN, if one of them can start then: the last nodes first, of the job that began last.
It is free to keep them; it is not asked again, and nobody else is asked for the same job, until it has answered. When nobody
is in line it gets idle nodes, up to MAX; what it was asked for is withdrawn.

As in `victims`, whether a job fits is asked of the plan itself. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from hpcsched.model.ids import JobId
from hpcsched.model.resources import Share
from hpcsched.sched.decisions import Plan, Resize, Start
from hpcsched.sched.policy import Policy
from hpcsched.sched.snapshot import Elastic, PendingJob, RunningJob, Snapshot

MAX_TRIES = 5  # so many jobs in line are looked at in one plan

Make = Callable[[Snapshot, Policy], Plan]
Gift = tuple[RunningJob, Share]  # what a job could give back


def resizes(world: Snapshot, policy: Policy, in_line: Sequence[PendingJob], make: Make) -> tuple[Resize, ...]:
    """Return what elastic jobs are asked for, or get. `in_line`: who waits for resources alone, first one first."""
    jobs = [job for job in world.running if job.elastic is not None and job.runs]
    if not jobs:
        return ()
    if in_line:
        return tuple(_shrinks(world, policy, in_line, jobs, make))
    withdrawn = [Resize(job_id=job.id, keep=_names(job.shares)) for job in jobs if _of(job).wanted]
    return (*withdrawn, *_grows(world, policy, jobs, make))


def _shrinks(
    world: Snapshot, policy: Policy, in_line: Sequence[PendingJob], jobs: list[RunningJob], make: Make
) -> list[Resize]:
    promised = [gift for job in jobs for gift in _asked(job)]
    donors = sorted((job for job in jobs if _can_give(job)), key=lambda job: (-job.began_at_s, -job.id))
    gifts = [gift for job in donors for gift in _spare(job)]
    found: dict[JobId, Resize] = {}
    for waiting in in_line[:MAX_TRIES]:

        def start(taken: Sequence[Gift], waiting: PendingJob = waiting) -> Start | None:
            made = make(replace(_without(world, [*promised, *taken]), pending=(waiting,)), policy)
            return next(iter(made.starts), None)

        if not gifts or start(()) is not None or start(gifts) is None:
            continue  # it can start on what has been asked for already, or not even on all that there is
        needed = _needed(gifts, start)
        for job in donors:
            mine = {share.node for giver, share in needed if giver is job}
            if mine:
                keep = tuple(share.node for share in job.shares if share.node not in mine)
                found[job.id] = Resize(job_id=job.id, keep=keep, for_job=waiting.id)
        gifts = [gift for gift in gifts if gift[0].id not in found]
    return list(found.values())


def _needed(gifts: Sequence[Gift], start: Callable[[Sequence[Gift]], Start | None]) -> list[Gift]:
    """Return the fewest of the first of `gifts` that are enough, without those that are not needed. All of them are enough."""
    counts = range(1, len(gifts))
    fewest = 1 + bisect_left(counts, True, key=lambda count: start(gifts[:count]) is not None)
    enough = list(gifts[:fewest])
    for gift in list(enough):
        fewer = [other for other in enough if other is not gift]
        if start(fewer) is not None:
            enough = fewer
    return enough


def _grows(world: Snapshot, policy: Policy, jobs: list[RunningJob], make: Make) -> list[Resize]:
    found = []
    for job in sorted(jobs, key=lambda job: (job.began_at_s, job.id)):
        elastic = _of(job)
        room = elastic.nodes_max - len(job.shares)
        if room <= 0 or elastic.moving or elastic.wanted:
            continue
        made = make(replace(world, pending=(_more_of(job, room, world.now_s),)), policy)
        if made.starts:
            shares = made.starts[0].shares
            found.append(Resize(job_id=job.id, add=shares))
            grown = replace(job, shares=job.shares + shares)
            world = replace(world, running=tuple(grown if other is job else other for other in world.running))
    return found


def _more_of(job: RunningJob, room: int, now_s: float) -> PendingJob:
    """Return a job that asks for `room` nodes at most, as `job` has them, for as long as it still runs."""
    elastic = _of(job)
    barred = tuple(dict.fromkeys((*elastic.view.request.shape.exclude, *_names(job.shares), *elastic.barred)))
    shape = replace(elastic.view.request.shape, nodes_min=1, nodes_max=room, nodelist=(), exclude=barred)
    left_s = None if job.ends_at_s is None else max(1, int(job.ends_at_s - now_s))
    request = replace(elastic.view.request, shape=shape, time_limit_s=left_s)
    return replace(elastic.view, request=request, licenses=())  # those it has already


def _can_give(job: RunningJob) -> bool:
    elastic = _of(job)
    return not elastic.moving and not elastic.wanted and len(job.shares) > elastic.nodes_min


def _spare(job: RunningJob) -> list[Gift]:
    """Return what `job` can do without, the last node first."""
    return [(job, share) for share in reversed(job.shares[max(1, _of(job).nodes_min) :])]


def _asked(job: RunningJob) -> list[Gift]:
    wanted = _of(job).wanted
    return [(job, share) for share in job.shares if wanted and share.node not in wanted]


def _without(world: Snapshot, gifts: Sequence[Gift]) -> Snapshot:
    gone = {(job.id, share.node) for job, share in gifts}
    running = tuple(
        replace(job, shares=tuple(share for share in job.shares if (job.id, share.node) not in gone))
        for job in world.running
    )
    return replace(world, running=running)


def _names(shares: Sequence[Share]) -> tuple[str, ...]:
    return tuple(share.node for share in shares)


def _of(job: RunningJob) -> Elastic:
    assert job.elastic is not None
    return job.elastic
