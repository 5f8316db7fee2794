"""The plan with preemption and elastic jobs, in this order:

    1. Jobs with reserved shares (`PendingJob.reserved_shares`) start as soon as they fit. Other jobs were preempted for them.
       Until the start, no other job gets these shares. If the job can no longer start there (it is held, or a node is down),
       the shares are released.
    2. Suspended jobs resume when their cpus are free again: after the jobs that could preempt them, before all others.
    3. All other jobs are planned.
    4. Elastic jobs give nodes back for jobs that wait for resources (`Shrinking`): for the first few in the queue, and for
       jobs that may preempt.
    5. Running jobs are preempted for jobs that may preempt and still wait (`choose`): for the first few in the queue.
    6. Elastic jobs grow, if no job waits.

Steps 4 to 6 do nothing until all nodes have answered after the controller's start, because waiting jobs may fit on them.

A running job is preempted for at most one waiting job at a time. No job is preempted without effect. The plan itself is asked
whether the job fits without some running jobs, with a snapshot without them. So every rule of the plan counts: reservations,
limits, licences, promises to jobs ahead. Pure and deterministic, like `plan`, which places all jobs.

Elastic jobs: a job with `--elastic` and `--nodes=MIN-MAX` starts with the free nodes, at least MIN. While other jobs wait for
resources, it may be asked to continue with fewer nodes, never below MIN, if a waiting job can start then. The job that began
last is asked first, for its last nodes first. It may keep the nodes; then it is not asked again for the same waiting job. Until
it has answered, or its time to answer is over, no other job is asked or preempted for that waiting job. When no job waits,
elastic jobs get idle nodes, up to MAX, and requests to give nodes back are withdrawn.

Victims: by QOS, a job outranks another job if its QOS lists the QOS of the other, and not the other way round. By partition, it
outranks the other if its partition has the higher priority tier. So a job is never preempted by a job of its own or a lower
rank, or by a job that it could preempt itself, because the configuration rejects circles of QOS.

The candidates are sorted in a few orders. Of each order, the shortest prefix that suffices is taken, and every job that is not
needed is dropped from it. So every victim is needed for the start. The set with the least lost work is chosen; of equal sets,
the smallest. If there are few candidates, every set with less lost work is tried too, so the choice is optimal. In a large
cluster, the nodes that are cheapest to free are tried first, and the resulting set is verified in the whole snapshot.

Sources: preempt.html of Slurm's documentation, sacctmgr(1) Preempt, GraceTime.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hpcsched.model.accounting import PreemptMode, PreemptType
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Reason
from hpcsched.model.node import Partition, Share, without_cpus
from hpcsched.sched.decisions import Plan, Preemption, Resize, Start, Victim, Wait
from hpcsched.sched.energy import has_power
from hpcsched.sched.plan import Make, as_running, plan, start_behind, start_of, started
from hpcsched.sched.policy import Policy, PreemptRules
from hpcsched.sched.priority import in_order, scale_of
from hpcsched.sched.sentences import listed
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


IN_QUEUE = frozenset({Reason.RESOURCES, Reason.PRIORITY})
MAX_TRIES = 5  # number of jobs of the queue that are considered in one plan


def full_plan(snapshot: Snapshot, policy: Policy, make: Make = plan) -> Plan:
    """Return the starts, waits, preemptions, resumes and resizes of one pass."""
    if is_plain(snapshot, policy):
        return make(snapshot, policy)
    return _Stages(snapshot, policy, make).plan()


def is_plain(snapshot: Snapshot, policy: Policy) -> bool:
    """Say whether nothing is, or can be, preempted or resized.

    Then `full_plan` is the same as `plan`.
    """
    reserved = any(job.reserved_shares for job in snapshot.pending)
    lent = any(job.lent_shares or job.elastic is not None for job in snapshot.running)
    return policy.preempt.type is PreemptType.NONE and not reserved and not lent


@dataclass(slots=True)
class _Stages:
    """The stages of one plan; `snapshot` includes the decisions so far."""

    snapshot: Snapshot
    policy: Policy
    make: Make

    def plan(self) -> Plan:
        starts, waits, given_up = self._start_reserved()
        resumes = self._resume_suspended()
        made = self.make(self.snapshot, self.policy)
        waits = {**made.waits, **waits}
        self.snapshot = self._with_starts(self.snapshot, made)
        queue = self._waiting_for_resources(made)
        able = self._first_able(queue)
        resizes = self._resizes(made, queue, able)
        preemptions = self._preempt(made, queue, able)
        for preemption in preemptions:
            waits[preemption.job_id] = self._making_room(preemption, waits[preemption.job_id])
        return Plan(
            starts=(*starts, *made.starts),
            waits=waits,
            preemptions=tuple(preemptions),
            resumes=tuple(resumes),
            given_up=tuple(given_up),
            resizes=tuple(resizes),
            priorities=made.priorities,
            promises=made.promises,
        )

    def _start_reserved(self) -> tuple[list[Start], dict[JobId, Wait], list[JobId]]:
        starts: list[Start] = []
        waits: dict[JobId, Wait] = {}
        given_up: list[JobId] = []
        reserved = {job.id: job for job in self._in_order(job for job in self.snapshot.pending if job.reserved_shares)}
        now_s = self.snapshot.now_s
        reserved_for = {
            job.id: as_running(job, job.reserved_shares, now_s, self.snapshot.reservations) for job in reserved.values()
        }
        others = tuple(job for job in self.snapshot.pending if job.id not in reserved)
        running = self.snapshot.running
        for job in reserved.values():
            block = reserved_for.pop(job.id)
            snapshot = replace(self.snapshot, running=(*running, *reserved_for.values()), pending=(job,))
            start = start_of(self.make(snapshot, self.policy), job.id)
            if start is not None:
                starts.append(start)
                running = (*running, started(self.snapshot, job, start))
            elif self._will_fit(snapshot, job):
                waits[job.id] = self._waits_for_ends(job)
                reserved_for[job.id] = block
            else:
                given_up.append(job.id)
                others = (*others, job)
        self.snapshot = replace(self.snapshot, running=(*running, *reserved_for.values()), pending=others)
        return starts, waits, given_up

    def _will_fit(self, snapshot: Snapshot, job: PendingJob) -> bool:
        """Say whether `job` starts once all ending jobs have ended."""
        after = replace(snapshot, running=tuple(other for other in snapshot.running if not other.ending))
        return start_of(self.make(after, self.policy), job.id) is not None

    def _waits_for_ends(self, job: PendingJob) -> Wait:
        nodes = {share.node for share in job.reserved_shares}
        ending = [
            other.display_id
            for other in self.snapshot.running
            if other.ending and any(share.node in nodes for share in other.shares)
        ]
        jobs = f"job {ending[0]}" if len(ending) == 1 else f"{len(ending)} jobs"
        detail = f"{jobs} {'makes' if len(ending) == 1 else 'make'} room for it on {listed(sorted(nodes))}"
        return Wait(reason=Reason.RESOURCES, detail=detail, expected_start_s=self.snapshot.now_s)

    def _resume_suspended(self) -> list[JobId]:
        found: list[JobId] = []
        rules = self.policy.preempt
        for job in sorted(
            (job for job in self.snapshot.running if job.lent_shares), key=lambda job: (job.began_at_s, job.id)
        ):
            rivals = tuple(
                other
                for other in self.snapshot.pending
                if any(outranks(view, job, rules, self.snapshot.partitions) for view in (other, *other.others))
            )
            snapshot = self.snapshot
            if rivals:
                snapshot = self._with_starts(snapshot, self.make(replace(snapshot, pending=rivals), self.policy))
            if _has_room(snapshot, job) and has_power(snapshot, job, job.lent_shares):
                found.append(job.id)
                back = replace(job, shares=job.lent_shares, lent_shares=(), runs=True)
                running = tuple(back if other is job else other for other in self.snapshot.running)
                self.snapshot = replace(self.snapshot, running=running)
        return found

    def _resizes(self, made: Plan, queue: Sequence[PendingJob], able: Collection[JobId]) -> list[Resize]:
        """Return the resizes of elastic jobs.

        Jobs that wait for the returned nodes then count as started in `snapshot`.
        """
        if not elastic_jobs(self.snapshot) or self._is_early():
            return []
        if not queue:
            return [*withdrawn(self.snapshot), *grows(self.snapshot, self.policy, self.make)]
        shrinking = Shrinking(self.snapshot, self.policy, self.make)
        ahead: list[PendingJob] = []
        for at, job in enumerate(queue):
            if (at < MAX_TRIES or job.id in able) and shrinking.make_room(job, ahead):
                continue
            if self._is_promised(made, job):
                ahead.append(job)
        self.snapshot = shrinking.snapshot
        return shrinking.resizes()

    def _preempt(self, made: Plan, queue: Sequence[PendingJob], able: Collection[JobId]) -> list[Preemption]:
        found: list[Preemption] = []
        ahead: list[PendingJob] = []
        waiting = {job.id for job in self.snapshot.pending}
        for job in queue:
            if job.id not in waiting:
                continue  # elastic jobs make room for it
            choice = choose(self.snapshot, self.policy, job, ahead, self.make) if job.id in able else None
            if choice is not None:
                found.append(self._preemption(job, choice))
            elif self._is_promised(made, job):
                ahead.append(job)
        return found

    def _first_able(self, queue: Sequence[PendingJob]) -> set[JobId]:
        """Return the first few jobs of the queue that may preempt a running job."""
        found: set[JobId] = set()
        known: dict[tuple[tuple[str, str], ...], bool] = {}
        for job in queue if self.policy.preempt.type is not PreemptType.NONE else ():
            rank = tuple((view.qos, view.partition) for view in (job, *job.others))
            if rank not in known:
                known[rank] = bool(candidates_for(self.snapshot, self.policy, job))
            if known[rank]:
                found.add(job.id)
            if len(found) == MAX_TRIES:
                break
        return found

    def _is_promised(self, made: Plan, job: PendingJob) -> bool:
        """Say whether the waiting `job` has a promised start, as the head of a partition has."""
        return made.waits[job.id].reason is Reason.RESOURCES or job.id in made.promises

    def _preemption(self, job: PendingJob, choice: VictimSet) -> Preemption:
        """Return the preemption of the victims for `job`, and include it in `snapshot`."""
        rules = self.policy.preempt
        block = as_running(job, choice.start.shares, self.snapshot.now_s, self.snapshot.reservations)
        after = without(self.snapshot, self.policy, choice.victims)
        pending = tuple(other for other in self.snapshot.pending if other.id != job.id)
        self.snapshot = replace(after, running=(*after.running, block), pending=pending)
        victims = []
        for victim in choice.victims:
            mode = mode_of(victim, rules)
            save_s = None if mode is PreemptMode.SUSPEND else grace_s(victim, rules)
            victims.append(Victim(job_id=victim.id, mode=mode, save_s=save_s))
        return Preemption(job_id=job.id, shares=choice.start.shares, victims=tuple(victims))

    def _making_room(self, preemption: Preemption, wait: Wait) -> Wait:
        names = {job.id: job.display_id for job in self.snapshot.running}
        jobs = [f"job {names.get(victim.job_id, victim.job_id)}" for victim in preemption.victims]
        longest_s = max((victim.save_s or 0.0 for victim in preemption.victims), default=0.0)
        detail = f"{listed(jobs)} {'makes' if len(jobs) == 1 else 'make'} room for it"
        return replace(wait, reason=Reason.RESOURCES, detail=detail, expected_start_s=self.snapshot.now_s + longest_s)

    def _waiting_for_resources(self, made: Plan) -> list[PendingJob]:
        """Return the jobs that wait only for resources, in order.

        The list is empty until all nodes have answered.
        """
        not_needed = self.policy.preempt.type is PreemptType.NONE and not elastic_jobs(self.snapshot)
        if not_needed or self._is_early():
            return []
        waits = made.waits
        return self._in_order(
            job for job in self.snapshot.pending if job.id in waits and waits[job.id].reason in IN_QUEUE
        )

    def _is_early(self) -> bool:
        """Say whether some nodes have not answered yet since the controller started."""
        return any(node.awaited for node in self.snapshot.nodes)

    def _in_order(self, jobs: Iterable[PendingJob]) -> list[PendingJob]:
        return in_order(list(jobs), self.snapshot.partitions, scale_of(self.snapshot), self.policy)

    def _with_starts(self, snapshot: Snapshot, made: Plan) -> Snapshot:
        starts = {start.job_id: start for start in made.starts}
        running = [started(snapshot, job, starts[job.id]) for job in snapshot.pending if job.id in starts]
        pending = tuple(job for job in snapshot.pending if job.id not in starts)
        return replace(snapshot, running=(*snapshot.running, *running), pending=pending)


def _has_room(snapshot: Snapshot, job: RunningJob) -> bool:
    """Say whether the cpus of suspended `job` are free on all of its nodes."""
    cpus = {node.name: node.cpus for node in snapshot.nodes}
    for other in snapshot.running:
        for share in other.shares:
            if share.node in cpus:
                cpus[share.node] -= share.cpus
    return all(cpus.get(share.node, 0) >= share.cpus for share in job.lent_shares)
