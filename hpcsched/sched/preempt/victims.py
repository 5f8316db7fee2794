"""Victims: which running jobs may be preempted for a waiting job, how, and the choice with the least lost work.

By QOS, a job outranks another job if its QOS lists the QOS of the other, and not the other way round. By partition, it outranks
the other if its partition has the higher priority tier. So a job is never preempted by a job of its own or a lower rank, or by
a job that it could preempt itself, because the configuration rejects circles of QOS. Sources: preempt.html of Slurm's
documentation, sacctmgr(1) Preempt, GraceTime.

No job is preempted without effect. The plan itself is asked whether the job fits without some running jobs, with a snapshot
without them. So every rule of the plan counts: reservations, limits, licences, promises to jobs ahead.

The candidates are sorted in a few orders. Of each order, the shortest prefix that suffices is taken, and every job that is not
needed is dropped from it. So every victim is needed for the start. The set with the least lost work is chosen; of equal sets,
the smallest. If there are few candidates, every set with less lost work is tried too, so the choice is optimal. In a large
cluster, the nodes that are cheapest to free are tried first, and the resulting set is verified in the whole snapshot.

Pure: a snapshot and rules in, jobs out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hpcsched.model.accounting import PreemptMode, PreemptType
from hpcsched.model.ids import JobId
from hpcsched.model.node import Partition
from hpcsched.model.resources import without_cpus
from hpcsched.sched.decisions import Start
from hpcsched.sched.plan import Make, start_behind
from hpcsched.sched.policy import Policy, PreemptRules
from hpcsched.sched.snapshot import PendingJob, RunningJob, Snapshot

FEW_NODES = 16  # nodes that are tried first, unless the job needs more
FEW_CANDIDATES = 8  # up to this number of candidates, every set that loses less is tried
MAX_PRUNED = 64  # number of victims that are tested one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimSet:
    """The jobs that are preempted so that a job can start, and the start of that job."""

    victims: tuple[RunningJob, ...]
    start: Start


def choose(
    snapshot: Snapshot, policy: Policy, job: PendingJob, ahead: Sequence[PendingJob], make: Make
) -> VictimSet | None:
    """Choose victims for `job`; None if preemption does not help.

    `ahead`: jobs that it must not delay. No job is preempted for a job that already fits and only waits for its turn.
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
    """Return the victims with the least lost work.

    None: all candidates together do not suffice.
    """
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
    """Return the part of the snapshot with the `count` nodes that are cheapest to free.

    This may be a guess, because a set found there is verified in the whole snapshot.
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
    """Return the running jobs that may be preempted for `job`.

    Only jobs that hold something on nodes that it may use are included.
    """
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
    """Return the snapshot as it is after the victims have ended or are suspended."""
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
    """Return the job as suspended. Other jobs may use its cpus; it keeps its memory and GPUs."""
    return replace(job, runs=False, shares=without_cpus(job.shares), lent_shares=job.shares)


class _Trial:
    """A trial of whether the job starts without some running jobs. Each set is tested once."""

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
        """Return the start of the job without `victims`; None if it does not start."""
        victims = tuple(victims)
        key = frozenset(victim.id for victim in victims)
        if key not in self._known:
            self._known[key] = self._start(victims)
        return self._known[key]

    def _start(self, victims: tuple[RunningJob, ...]) -> Start | None:
        rest = without(self._snapshot, self._policy, victims)
        return start_behind(rest, self._policy, self._job, self._ahead, self._make)

    def needed(self, enough: list[RunningJob]) -> VictimSet:
        """Return the victims of `enough` that are needed. Costly victims are dropped first."""
        start = self.start(enough)
        assert start is not None
        nodes = {share.node for share in start.shares}
        near = [victim for victim in enough if any(share.node in nodes for share in victim.shares)]
        if len(near) < len(enough) and (near_start := self.start(near)) is not None:
            enough, start = near, near_start
        for victim in reversed(enough[-MAX_PRUNED:]):
            fewer = [other for other in enough if other is not victim]
            fewer_start = self.start(fewer)
            if fewer_start is not None:
                enough, start = fewer, fewer_start
        return VictimSet(victims=tuple(enough), start=start)


def _enough(trial: _Trial, order: list[RunningJob]) -> list[RunningJob]:
    """Return the shortest prefix of `order` that suffices; all of `order` does."""
    counts = range(1, len(order))
    shortest = order[: 1 + bisect_left(counts, True, key=lambda count: trial.start(order[:count]) is not None)]
    return shortest if trial.start(shortest) is not None else order


def _orders(candidates: list[RunningJob], snapshot: Snapshot, policy: Policy) -> list[list[RunningJob]]:
    """Return the candidates in several orders.

    The orders are: by loss, by loss per weight, by weight, and by the cheapest node.
    """
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


def outranks(job: PendingJob, other: RunningJob, rules: PreemptRules, partitions: Mapping[str, Partition]) -> bool:
    """Say whether `job` may preempt `other` at all."""
    match rules.type:
        case PreemptType.QOS:
            own, others = rules.qos.get(job.qos), rules.qos.get(other.qos)
            listed = own is not None and other.qos in own.preempt
            return listed and not (others is not None and job.qos in others.preempt)
        case PreemptType.PARTITION:
            own_in, other_in = partitions.get(job.partition), partitions.get(other.partition)
            return own_in is not None and other_in is not None and own_in.priority_tier > other_in.priority_tier
        case PreemptType.NONE:
            return False


def mode_of(victim: RunningJob, rules: PreemptRules) -> PreemptMode:
    """Return the preemption mode of `victim`. A job that cannot be requeued is cancelled."""
    mode = _configured_mode(victim, rules)
    again = victim.may_run_again if victim.may_run_again is not None else rules.requeue
    if mode in (PreemptMode.REQUEUE, PreemptMode.CHECKPOINT) and not again:
        return PreemptMode.CANCEL
    return mode


def grace_s(victim: RunningJob, rules: PreemptRules) -> float | None:
    """Return the grace period of `victim`, in which it can save its work.

    None: it is ended like a cancelled job.
    """
    qos = rules.qos.get(victim.qos)
    if qos is not None and qos.grace_time_s > 0:
        return qos.grace_time_s
    checkpoints = _configured_mode(victim, rules) is PreemptMode.CHECKPOINT
    return rules.grace_s if checkpoints and rules.grace_s > 0 else None


def answer_s(qos_name: str, rules: PreemptRules) -> float:
    """Return how long an elastic job of this QOS has to give back requested nodes."""
    qos = rules.qos.get(qos_name)
    return qos.grace_time_s if qos is not None and qos.grace_time_s > 0 else rules.grace_s


def _configured_mode(victim: RunningJob, rules: PreemptRules) -> PreemptMode:
    qos = rules.qos.get(victim.qos)
    return qos.preempt_mode if qos is not None and qos.preempt_mode is not None else rules.mode


def may_be_preempted(victim: RunningJob, rules: PreemptRules, now_s: float) -> bool:
    """Say whether `victim` may be preempted now.

    It runs, is past its exempt time, and has a mode that allows preemption.
    """
    if not victim.runs or mode_of(victim, rules) is PreemptMode.OFF:
        return False
    return now_s - victim.began_at_s >= exempt_s(victim.qos, rules)


def exempt_s(qos_name: str, rules: PreemptRules) -> float:
    """Return the time after its start in which a job of this QOS is exempt from preemption."""
    qos = rules.qos.get(qos_name)
    return qos.exempt_time_s if qos is not None and qos.exempt_time_s > 0 else rules.exempt_s


def lost_s(victim: RunningJob, rules: PreemptRules, now_s: float) -> float:
    """Return the work that is lost with `victim`, in seconds times its `weight`.

    That is its work since its last reported checkpoint. It is all its work if it is not requeued, and none if it is suspended.
    """
    mode = mode_of(victim, rules)
    if mode is PreemptMode.SUSPEND:
        return 0.0
    saved_at_s = victim.saved_at_s if mode is not PreemptMode.CANCEL else None
    since_s = max(victim.began_at_s, saved_at_s if saved_at_s is not None else victim.began_at_s)
    return max(0.0, now_s - since_s) * weight(victim)


def weight(victim: RunningJob) -> float:
    """Return the weight of the job: its cpus, where a GPU counts as eight."""
    return sum(share.cpus for share in victim.shares) + 8 * sum(share.gpu_amount for share in victim.shares)
