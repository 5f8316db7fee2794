"""Elastic jobs: requests to give nodes back for waiting jobs, and grants of idle nodes.

A job with `--elastic` and `--nodes=MIN-MAX` starts with the free nodes, at least MIN. While other jobs wait for resources, it
may be asked to continue with fewer nodes, never below MIN, if a waiting job can start then. The job that began last is asked
first, for its last nodes first. It may keep the nodes; then it is not asked again for the same waiting job. Until it has
answered, or its time to answer is over, no other job is asked or preempted for that waiting job. When no job waits, elastic
jobs get idle nodes, up to MAX, and requests to give nodes back are withdrawn.

The plan itself tests whether a job fits, see `sched.plan`. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.resources import Share
from hpcsched.sched.decisions import Resize, Start
from hpcsched.sched.plan import Make, start_behind, started
from hpcsched.sched.policy import Policy, PreemptRules
from hpcsched.sched.preempt.victims import answer_s
from hpcsched.sched.snapshot import ElasticSize, PendingJob, RunningJob, Snapshot

Gift = tuple[RunningJob, Share]  # a running job and a share that it can give back


def elastic_jobs(snapshot: Snapshot) -> list[RunningJob]:
    """Return the running elastic jobs."""
    return [job for job in snapshot.running if job.elastic is not None and job.runs]


class Shrinking:
    """The elastic jobs that give nodes back, for one waiting job after another.

    `snapshot` includes the returned nodes, and the waiting jobs that start there.
    """

    def __init__(self, snapshot: Snapshot, policy: Policy, make: Make) -> None:
        rules, now_s, jobs = policy.preempt, snapshot.now_s, elastic_jobs(snapshot)
        donors = sorted(
            (job for job in jobs if _can_give(job, rules, now_s)), key=lambda job: (-job.began_at_s, -job.id)
        )
        self.snapshot = _without(snapshot, [gift for job in jobs for gift in _promised(job, rules, now_s)])
        self._policy = policy
        self._make = make
        self._gifts = [gift for job in donors for gift in _spare(job)]
        self._given: dict[JobId, list[Gift]] = {}
        self._for: dict[JobId, JobId] = {}

    def make_room(self, waiting: PendingJob, ahead: Sequence[PendingJob]) -> bool:
        """Ask for the nodes that `waiting` needs to start; say whether it starts then.

        Jobs in `ahead` are not delayed.
        """

        def start(taken: Sequence[Gift]) -> Start | None:
            return start_behind(_without(self.snapshot, taken), self._policy, waiting, ahead, self._make)

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
        snapshot = _without(self.snapshot, needed)
        pending = tuple(other for other in snapshot.pending if other.id != waiting.id)
        self.snapshot = replace(
            snapshot, running=(*snapshot.running, started(snapshot, waiting, found)), pending=pending
        )
        return True

    def resizes(self) -> list[Resize]:
        """Return the requests to elastic jobs."""
        found = []
        for job_id, gifts in self._given.items():
            given = {share.node for _, share in gifts}
            keep = tuple(name for name in _nodes_after(gifts[0][0]) if name not in given)
            found.append(Resize(job_id=job_id, keep=keep, for_job=self._for[job_id]))
        return found


def withdrawn(snapshot: Snapshot) -> list[Resize]:
    """Return the withdrawals of all requests to elastic jobs."""
    return [Resize(job_id=job.id, keep=_names(job.shares)) for job in elastic_jobs(snapshot) if _of(job).wanted]


def _needed(gifts: Sequence[Gift], start: Callable[[Sequence[Gift]], Start | None]) -> list[Gift]:
    """Return the shortest prefix of `gifts` that suffices, without unneeded gifts.

    All gifts together suffice.
    """
    counts = range(1, len(gifts))
    fewest = 1 + bisect_left(counts, True, key=lambda count: start(gifts[:count]) is not None)
    enough = list(gifts[:fewest])
    for gift in list(enough):
        fewer = [other for other in enough if other is not gift]
        if start(fewer) is not None:
            enough = fewer
    return enough


def grows(snapshot: Snapshot, policy: Policy, make: Make) -> list[Resize]:
    """Return the idle nodes that elastic jobs get. The job that began first comes first."""
    found = []
    for job in sorted(elastic_jobs(snapshot), key=lambda job: (job.began_at_s, job.id)):
        elastic = _of(job)
        room = elastic.nodes_max - len(job.shares)
        if room <= 0 or elastic.moving or elastic.leaving or elastic.wanted:
            continue
        made = make(replace(snapshot, pending=(_more_of(job, room, snapshot.now_s),)), policy)
        if made.starts:
            shares = made.starts[0].shares
            found.append(Resize(job_id=job.id, add=shares))
            grown = replace(job, shares=job.shares + shares)
            snapshot = replace(snapshot, running=tuple(grown if other is job else other for other in snapshot.running))
    return found


def _more_of(job: RunningJob, room: int, now_s: float) -> PendingJob:
    """Return a pending job that requests at most `room` nodes like those of `job`.

    Its time limit is the remaining time of `job`.
    """
    elastic = _of(job)
    barred = tuple(dict.fromkeys((*elastic.view.request.shape.exclude, *_names(job.shares), *elastic.barred)))
    shape = replace(elastic.view.request.shape, nodes_min=1, nodes_max=room, nodelist=(), exclude=barred)
    left_s = None if job.ends_at_s is None else max(1, int(job.ends_at_s - now_s))
    request = replace(elastic.view.request, shape=shape, time_limit_s=left_s)
    return replace(elastic.view, request=request, licenses=())  # it has its licences already


def _is_answering(job: RunningJob, rules: PreemptRules, now_s: float) -> bool:
    """Say whether `job` still has time to answer a request to give nodes back."""
    elastic = _of(job)
    asked_at_s = elastic.wanted_at_s if elastic.wanted_at_s is not None else job.began_at_s
    return bool(elastic.wanted) and now_s < asked_at_s + answer_s(job.qos, rules)


def _can_give(job: RunningJob, rules: PreemptRules, now_s: float) -> bool:
    elastic = _of(job)
    return not elastic.moving and (not elastic.wanted or _is_answering(job, rules, now_s))


def _nodes_after(job: RunningJob) -> tuple[NodeName, ...]:
    """Return the nodes that `job` has after it has given back the requested nodes."""
    elastic = _of(job)
    names = elastic.wanted or _names(job.shares)
    return tuple(name for name in names if name not in elastic.leaving)


def _spare(job: RunningJob) -> list[Gift]:
    """Return the other shares that `job` can give back, the last node first."""
    spare = _nodes_after(job)[max(1, _of(job).nodes_min) :]
    return [(job, share) for share in reversed(job.shares) if share.node in spare]


def _promised(job: RunningJob, rules: PreemptRules, now_s: float) -> list[Gift]:
    """Return the shares that `job` is giving back, or may still give back on request."""
    nodes_after = _nodes_after(job) if _is_answering(job, rules, now_s) else ()
    leaving = _of(job).leaving
    return [
        (job, share) for share in job.shares if share.node in leaving or (nodes_after and share.node not in nodes_after)
    ]


def _without(snapshot: Snapshot, gifts: Sequence[Gift]) -> Snapshot:
    given = {(job.id, share.node) for job, share in gifts}
    running = tuple(
        replace(job, shares=tuple(share for share in job.shares if (job.id, share.node) not in given))
        for job in snapshot.running
    )
    return replace(snapshot, running=running)


def _names(shares: Sequence[Share]) -> tuple[NodeName, ...]:
    return tuple(share.node for share in shares)


def _of(job: RunningJob) -> ElasticSize:
    assert job.elastic is not None
    return job.elastic
