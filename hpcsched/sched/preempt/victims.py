"""Which running jobs make room for one that waits: as little lost work as can be, and nobody in vain.

Whether the job fits once some others are gone is not worked out here: the plan itself is asked, with a snapshot in which they are
gone. So all that a plan heeds (reservations, limits, licences, the promises to jobs ahead) is heeded. The candidates are put
into a few orders; of each the shortest beginning that is enough is taken, and from it all that is not needed is dropped
again: so every victim is needed for the job to start. The set that loses least is chosen, of equals the smallest. Of a few
candidates every set that would lose less is tried as well, so that there is none. In a large world the nodes that are
cheapest to free are looked at first, and what is found there is tried in all of it.

Pure: a snapshot and rules in, names out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hpcsched.model.accounting import PreemptMode
from hpcsched.model.ids import JobId
from hpcsched.model.resources import without_cpus
from hpcsched.sched.decisions import Start
from hpcsched.sched.explain.what_would_start import Make, start_behind
from hpcsched.sched.policy import Policy
from hpcsched.sched.preempt.rules import lost_s, may_be_preempted, mode_of, outranks, weight
from hpcsched.sched.snapshot import PendingJob, RunningJob, Snapshot

FEW_NODES = 16  # as many are looked at first, if the job does not need more
FEW_CANDIDATES = 8  # of so many every set is tried that loses less than what was found
MAX_PRUNED = 64  # beyond this, victims on the nodes that the job gets are not tried one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimSet:
    """Who has to go so that the job can start, and how it does then."""

    victims: tuple[RunningJob, ...]
    start: Start


def choose(
    snapshot: Snapshot, policy: Policy, job: PendingJob, ahead: Sequence[PendingJob], make: Make
) -> VictimSet | None:
    """Return a good choice of victims for `job`, None if it would be in vain. `ahead`: whom it must not delay.

    Nor is anybody preempted for a job that fits as it is, and is held back by its place in the line alone.
    """
    candidates = candidates_for(snapshot, policy, job)
    if not candidates:
        return None
    trial = _Trial(snapshot, policy, job, ahead, make)
    if trial.start(candidates) is None or trial.start(()) is not None:
        return None
    count = max(FEW_NODES, 4 * max(job.request.shape.nodes_min, len(job.request.shape.nodelist)))
    while True:
        near = _nearby(snapshot, policy, job, candidates, count)
        whole = len(near.nodes) == len(snapshot.nodes)
        best = _best(near, policy, job, ahead, make)
        start = None if best is None else best.start if whole else trial.start(best.victims)
        if whole or start is not None:
            break
        count *= 4
    if best is None or start is None:
        return None
    victims = tuple(sorted(best.victims, key=lambda victim: victim.id))
    return VictimSet(victims=victims, start=start)


def _best(
    snapshot: Snapshot, policy: Policy, job: PendingJob, ahead: Sequence[PendingJob], make: Make
) -> VictimSet | None:
    """Return the choice of victims that loses least, None if all candidates are not enough."""
    candidates = candidates_for(snapshot, policy, job)
    trial = _Trial(snapshot, policy, job, ahead, make)
    if not candidates or trial.start(candidates) is None:
        return None
    now_s, rules = snapshot.now_s, policy.preempt

    def loses(victims: Sequence[RunningJob]) -> tuple[float, int, list[JobId]]:
        ids = sorted(victim.id for victim in victims)
        return sum(lost_s(victim, rules, now_s) for victim in victims), len(victims), ids

    found = [trial.needed(_enough(trial, order)) for order in _orders(candidates, snapshot, policy)]
    best = min(found, key=lambda choice: loses(choice.victims))
    if len(candidates) > FEW_CANDIDATES:
        return best
    sets = [some for count in range(1, len(candidates)) for some in combinations(candidates, count)]
    for some in sorted([some for some in sets if loses(some) < loses(best.victims)], key=loses):
        if (start := trial.start(some)) is not None:
            return VictimSet(victims=some, start=start)
    return best


def _nearby(
    snapshot: Snapshot, policy: Policy, job: PendingJob, candidates: Sequence[RunningJob], count: int
) -> Snapshot:
    """Return the part of the world where it is worth looking: the `count` nodes that are made free with least loss.

    What is found there is tried in the whole world before it counts; so this may guess.
    """
    rules, shape = policy.preempt, job.request.shape
    held: dict[str, int] = {}
    lost: dict[str, float] = {}
    able = {victim.id for victim in candidates}
    for other in snapshot.running:
        for share in other.shares:
            if other.id in able:
                lost[share.node] = lost.get(share.node, 0.0) + lost_s(other, rules, snapshot.now_s)
            else:
                held[share.node] = held.get(share.node, 0) + share.cpus
    least = max(1, shape.cpus_per_task * shape.tasks_min)
    useful = [node for node in snapshot.nodes if node.usable and node.cpus - held.get(node.name, 0) >= least]
    ranked = sorted(useful, key=lambda node: (node.name not in shape.nodelist, lost.get(node.name, 0.0), node.name))
    if len(ranked) <= count:
        return snapshot
    names = {node.name for node in ranked[:count]}
    return replace(
        snapshot,
        nodes=tuple(node for node in snapshot.nodes if node.name in names),
        running=tuple(other for other in snapshot.running if any(share.node in names for share in other.shares)),
    )


def candidates_for(snapshot: Snapshot, policy: Policy, job: PendingJob) -> list[RunningJob]:
    """Return the running jobs that may be preempted for `job` and hold something where it may run."""
    rules = policy.preempt
    views = (job, *job.others)
    parts = [snapshot.partitions[view.partition] for view in views if view.partition in snapshot.partitions]
    nodes = {name for partition in parts for name in partition.nodes}
    return [
        other
        for other in snapshot.running
        if may_be_preempted(other, rules, snapshot.now_s)
        and any(outranks(view, other, rules, snapshot.partitions) for view in views)
        and any(share.node in nodes for share in other.shares)
    ]


def without(snapshot: Snapshot, policy: Policy, victims: Iterable[RunningJob]) -> Snapshot:
    """Return the snapshot as it is when the victims have gone, or stand still."""
    modes = {victim.id: mode_of(victim, policy.preempt) for victim in victims}
    running: list[RunningJob] = []
    for job in snapshot.running:
        mode = modes.get(job.id)
        if mode is None:
            running.append(job)
        elif mode is PreemptMode.SUSPEND:
            running.append(lent(job))
    return replace(snapshot, running=tuple(running))


def lent(job: RunningJob) -> RunningJob:
    """Return the job standing still: others may have its cpus, its memory and GPUs stay its own."""
    return replace(job, runs=False, shares=without_cpus(job.shares), lent_shares=job.shares)


class _Trial:
    """Asks the plan whether the job starts when some are gone."""

    def __init__(
        self, snapshot: Snapshot, policy: Policy, job: PendingJob, ahead: Sequence[PendingJob], make: Make
    ) -> None:
        self._snapshot = snapshot
        self._ahead = tuple(ahead)
        self._known: dict[frozenset[int], Start | None] = {}
        self._policy = policy
        self._job = job
        self._make = make

    def start(self, victims: Iterable[RunningJob]) -> Start | None:
        """Return how the job starts then; None: it does not. Jobs ahead that the victims would make room for do not count."""
        victims = tuple(victims)
        key = frozenset(victim.id for victim in victims)
        if key not in self._known:
            self._known[key] = self._start(victims)
        return self._known[key]

    def _start(self, victims: tuple[RunningJob, ...]) -> Start | None:
        world = without(self._snapshot, self._policy, victims)
        return start_behind(world, self._policy, self._job, self._ahead, self._make)

    def needed(self, enough: list[RunningJob]) -> VictimSet:
        """Return the choice that is left of `enough` when whoever is not needed has been dropped, the costly ones first."""
        start = self.start(enough)
        assert start is not None
        nodes = {share.node for share in start.shares}
        near = [victim for victim in enough if any(share.node in nodes for share in victim.shares)]
        if len(near) < len(enough) and (its := self.start(near)) is not None:
            enough, start = near, its
        for victim in reversed(enough[-MAX_PRUNED:]):
            fewer = [other for other in enough if other is not victim]
            its = self.start(fewer)
            if its is not None:
                enough, start = fewer, its
        return VictimSet(victims=tuple(enough), start=start)


def _enough(trial: _Trial, order: list[RunningJob]) -> list[RunningJob]:
    """Return the shortest beginning of `order`, all of which is enough, that is."""
    counts = range(1, len(order))
    shortest = order[: 1 + bisect_left(counts, True, key=lambda count: trial.start(order[:count]) is not None)]
    return shortest if trial.start(shortest) is not None else order


def _orders(candidates: list[RunningJob], snapshot: Snapshot, policy: Policy) -> list[list[RunningJob]]:
    """Return the candidates by what is lost with each; for what each gives back; the large ones first; node by node."""
    rules, now_s = policy.preempt, snapshot.now_s
    lost = {job.id: lost_s(job, rules, now_s) for job in candidates}
    of_node: dict[str, float] = {}
    for job in candidates:
        for share in job.shares:
            of_node[share.node] = of_node.get(share.node, 0.0) + lost[job.id]

    def cheapest_node(job: RunningJob) -> tuple[float, str]:
        return min((of_node[share.node], share.node) for share in job.shares)

    return [
        sorted(candidates, key=lambda job: (lost[job.id], -weight(job), job.id)),
        sorted(candidates, key=lambda job: (lost[job.id] / max(1, weight(job)), job.id)),
        sorted(candidates, key=lambda job: (-weight(job), lost[job.id], job.id)),
        sorted(candidates, key=lambda job: (*cheapest_node(job), lost[job.id], job.id)),
    ]
