"""ElasticSize jobs: which running jobs are asked to give nodes back for others that wait, and which get idle nodes.

A job with `--elastic` and `--nodes=MIN-MAX` starts with what is free, MIN nodes at least. While others wait in line it may
be asked to make do with fewer, never below MIN, if one of them can start then: the last nodes first, of the job that began last.
It is free to keep them. It is not asked again for the same job, and until it has answered, or had time to, neither is anybody
else, nor is anybody preempted for that job. When nobody is in line it gets idle nodes, up to MAX; what it was asked for is
withdrawn.

Whether a job fits is asked of the plan itself, see `trial`. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.resources import Share
from hpcsched.sched.decisions import Resize, Start
from hpcsched.sched.explain.what_would_start import Make, start_behind, started
from hpcsched.sched.policy import Policy, PreemptRules
from hpcsched.sched.preempt.rules import answer_s
from hpcsched.sched.snapshot import ElasticSize, PendingJob, RunningJob, Snapshot

Gift = tuple[RunningJob, Share]  # what a job could give back


def elastic_jobs(world: Snapshot) -> list[RunningJob]:
    """Return the running jobs that may change in size."""
    return [job for job in world.running if job.elastic is not None and job.runs]


class Shrinking:
    """Room that elastic jobs make for one waiting job after the other.

    `world` is as it will be when they have given back what they were asked for, and who waited for that has started.
    """

    def __init__(self, world: Snapshot, policy: Policy, make: Make) -> None:
        rules, now_s, jobs = policy.preempt, world.now_s, elastic_jobs(world)
        donors = sorted(
            (job for job in jobs if _can_give(job, rules, now_s)), key=lambda job: (-job.began_at_s, -job.id)
        )
        self.world = _without(world, [gift for job in jobs for gift in _promised(job, rules, now_s)])
        self._policy = policy
        self._make = make
        self._gifts = [gift for job in donors for gift in _spare(job)]
        self._given: dict[JobId, list[Gift]] = {}
        self._for: dict[JobId, JobId] = {}

    def make_room(self, waiting: PendingJob, ahead: Sequence[PendingJob]) -> bool:
        """Say whether `waiting` starts without delaying those `ahead` once nodes are given back; ask for what that takes."""

        def start(taken: Sequence[Gift]) -> Start | None:
            return start_behind(_without(self.world, taken), self._policy, waiting, ahead, self._make)

        needed: list[Gift] = []
        found = start(())
        if found is None and self._gifts and start(self._gifts) is not None:
            needed = _needed(self._gifts, start)
            found = start(needed)
        if found is None:
            return False
        for job, share in needed:
            self._given.setdefault(job.id, []).append((job, share))
            self._for.setdefault(job.id, waiting.id)
        self._gifts = [gift for gift in self._gifts if gift not in needed]
        world = _without(self.world, needed)
        pending = tuple(other for other in world.pending if other.id != waiting.id)
        self.world = replace(world, running=(*world.running, started(world, waiting, found)), pending=pending)
        return True

    def resizes(self) -> list[Resize]:
        """Return what is asked of whom."""
        found = []
        for job_id, gifts in self._given.items():
            gone = {share.node for _, share in gifts}
            keep = tuple(name for name in _kept(gifts[0][0]) if name not in gone)
            found.append(Resize(job_id=job_id, keep=keep, for_job=self._for[job_id]))
        return found


def withdrawn(world: Snapshot) -> list[Resize]:
    """Return that nobody is asked for anything any more."""
    return [Resize(job_id=job.id, keep=_names(job.shares)) for job in elastic_jobs(world) if _of(job).wanted]


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


def grows(world: Snapshot, policy: Policy, make: Make) -> list[Resize]:
    """Return which idle nodes elastic jobs get, the one that began first before the others."""
    found = []
    for job in sorted(elastic_jobs(world), key=lambda job: (job.began_at_s, job.id)):
        elastic = _of(job)
        room = elastic.nodes_max - len(job.shares)
        if room <= 0 or elastic.moving or elastic.leaving or elastic.wanted:
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


def _is_answering(job: RunningJob, rules: PreemptRules, now_s: float) -> bool:
    """Say whether `job` has been asked to give nodes back and still has time to answer."""
    elastic = _of(job)
    asked_at_s = elastic.wanted_at_s if elastic.wanted_at_s is not None else job.began_at_s
    return bool(elastic.wanted) and now_s < asked_at_s + answer_s(job.qos, rules)


def _can_give(job: RunningJob, rules: PreemptRules, now_s: float) -> bool:
    elastic = _of(job)
    return not elastic.moving and (not elastic.wanted or _is_answering(job, rules, now_s))


def _kept(job: RunningJob) -> tuple[NodeName, ...]:
    """Return the nodes that `job` will have when it has given back what it was asked for."""
    elastic = _of(job)
    names = elastic.wanted or _names(job.shares)
    return tuple(name for name in names if name not in elastic.leaving)


def _spare(job: RunningJob) -> list[Gift]:
    """Return what else `job` can do without, the last node first."""
    spare = _kept(job)[max(1, _of(job).nodes_min) :]
    return [(job, share) for share in reversed(job.shares) if share.node in spare]


def _promised(job: RunningJob, rules: PreemptRules, now_s: float) -> list[Gift]:
    """Return what `job` is giving back, or may yet be about to."""
    kept = _kept(job) if _is_answering(job, rules, now_s) else ()
    leaving = _of(job).leaving
    return [(job, share) for share in job.shares if share.node in leaving or (kept and share.node not in kept)]


def _without(world: Snapshot, gifts: Sequence[Gift]) -> Snapshot:
    gone = {(job.id, share.node) for job, share in gifts}
    running = tuple(
        replace(job, shares=tuple(share for share in job.shares if (job.id, share.node) not in gone))
        for job in world.running
    )
    return replace(world, running=running)


def _names(shares: Sequence[Share]) -> tuple[NodeName, ...]:
    return tuple(share.node for share in shares)


def _of(job: RunningJob) -> ElasticSize:
    assert job.elastic is not None
    return job.elastic
