"""The policy `default` in a scheduling pass, for jobs that need more than processors.

The decisions are in `decide`. A job counts as the number of processors that equals its largest fraction of cpus, memory or
GPUs. An exclusive job counts by its nodes. Partitions of a higher tier come first, each tier by itself. A queue is in the order
of priorities.

Priorities may depend on more than age. Then, while jobs of lower priority wait in a queue, its first jobs are treated as under
EASY: they start while they fit, and the first that does not fit is promised its start before other jobs are considered, even
short ones. So jobs that an administrator or fair share puts first stay first. Among equals, only the guard decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from hpcsched.model.accounting import CPU, GPU, MEM
from hpcsched.model.ids import NodeName
from hpcsched.sched.guard.decide import Candidate, WaitBound, decide
from hpcsched.sched.priority import scale_of, without_age
from hpcsched.sched.scheduling_pass import SchedulingPass
from hpcsched.sched.snapshot import NodeView, PendingJob, RunningJob
from hpcsched.sched.tres import Held, all_of, held_by, least_of

UNLIMITED = float("inf")
QueueKey = tuple[str, str]  # partition, reservation


def guarded(current: SchedulingPass, queue: Sequence[PendingJob]) -> Iterator[None]:
    """Start jobs of `queue`, and promise others a start; each step decides about one job.

    `queue` is in the order of priorities.
    """
    capacity = _NodeCapacity(current)
    partitions = current.snapshot.partitions
    within_limits = [job for job in queue if current.limits.why_not(job) is None]  # the others delay no job
    for _, jobs in groupby(within_limits, lambda job: partitions[job.partition].priority_tier):
        tier = tuple(jobs)
        yield from _start_first_by_priority(current, tier)
        candidates = [capacity.candidate(number, job) for number, job in enumerate(tier)]
        yield
        yield from decide(candidates, _wait_bound(current, candidates), capacity)


def _start_first_by_priority(current: SchedulingPass, jobs: Sequence[PendingJob]) -> Iterator[None]:
    """Start the jobs that are first by more than their age, or promise them a start."""
    policy, scale = current.policy, scale_of(current.snapshot)
    worths = [without_age(job, current.priorities[job.id], scale, policy) for job in jobs]
    least: dict[QueueKey, int] = {}
    for job, worth in zip(jobs, worths, strict=True):
        key = _queue_key(job)
        least[key] = min(worth, least.get(key, worth))
    open_queues = set(least)
    for job, worth in zip(jobs, worths, strict=True):
        key = _queue_key(job)
        if key not in open_queues:
            continue
        waits = worth > least[key] and not current.start_now(job)
        if worth <= least[key] or (waits and current.reserve_from(job, current.snapshot.now_s)):
            open_queues.discard(key)
        yield


def _wait_bound(current: SchedulingPass, candidates: Sequence[Candidate[PendingJob]]) -> WaitBound:
    now_s, guard, experience = current.snapshot.now_s, current.guard, current.snapshot.experience
    return WaitBound(
        guard,
        now_s,
        experience.easy_wait_s,
        learning=experience.began_s is None or now_s < experience.began_s + guard.learning_s,
        first_waited_s=now_s - min(candidate.since_s for candidate in candidates),
        longest_s=experience.longest_runs_s,
    )


def _queue_key(job: PendingJob) -> QueueKey:
    return job.partition, job.reservation


class _NodeCapacity:
    """The free resources in a pass; see `decide.Capacity`."""

    def __init__(self, current: SchedulingPass) -> None:
        self._current = current
        self._machines: dict[QueueKey, Held] = {}  # all nodes of the queue together
        self._amounts: dict[tuple[str, str, int], float] = {}  # by queue and shape
        self._held_by_short: dict[str, float] = {}  # by partition
        nodes = {node.name: node for node in current.snapshot.nodes}
        for job in current.snapshot.running:
            self._count_if_short(job, nodes)

    def candidate(self, number: int, job: PendingJob) -> Candidate[PendingJob]:
        """Return the candidate for `job`; `number` is its place in the queue."""
        current, queue = self._current, _queue_key(job)
        amount = self._amount(job)
        part = amount / max(1.0, self._machine(queue)[CPU])
        limit_s = current.run_times.limit_s(job)
        length_s = limit_s if current.needed is None else current.run_times.needed_s(job, current.snapshot.now_s)
        return Candidate(
            number=number,
            since_s=job.since_s if job.since_s is not None else current.snapshot.now_s,
            limit_s=limit_s,
            user=job.uid,
            amount=amount,
            part=part,
            is_short=current.guard.short.is_short(length_s, part),
            queue=queue,
            job=job,
        )

    def most(self) -> float:
        return UNLIMITED

    def has_for_short(self, candidate: Candidate[PendingJob]) -> bool:
        held = self._held_by_short.get(candidate.job.partition, 0)
        return (
            held + candidate.amount <= self._current.guard.short.share * self._machine(_queue_key(candidate.job))[CPU]
        )

    def start(self, candidate: Candidate[PendingJob]) -> bool:
        job = candidate.job
        if job.id in self._current.started_ids:  # it has started in another of its partitions, or by another plan
            return True
        started = self._current.start_now(job)
        if started and candidate.is_short:
            self._held_by_short[job.partition] = self._held_by_short.get(job.partition, 0) + candidate.amount
        return started

    def promise(self, candidate: Candidate[PendingJob], from_s: float) -> None:
        self._current.reserve_from(candidate.job, from_s)

    def _machine(self, queue: QueueKey) -> Held:
        """Return the resources of all nodes of `queue` together."""
        machine = self._machines.get(queue)
        if machine is None:
            nodes = self._current.snapshot.nodes
            machine = self._machines[queue] = all_of(nodes[at] for at in self._current.queues.at(*queue).nodes)
        return machine

    def _amount(self, job: PendingJob) -> float:
        queue, shape = _queue_key(job), job.request.shape
        key = *queue, id(shape)
        amount = self._amounts.get(key)
        if amount is None:
            machine = self._machine(queue)
            amount = amount_of(least_of(shape), machine)
            empty = sum(component.nodes_min for component in shape.each if component.exclusive)
            if empty:
                nodes = len(self._current.queues.at(*queue).nodes)
                amount = max(amount, machine[CPU] * empty / max(1, nodes))
            self._amounts[key] = amount
        return amount

    def _count_if_short(self, job: RunningJob, nodes: Mapping[NodeName, NodeView]) -> None:
        current = self._current
        needed, no_limit_s = current.needed, current.policy.default_time_limit_s
        if job.partition not in current.snapshot.partitions:
            return
        length_s = job.ends_at_s - job.began_at_s if job.ends_at_s is not None else float(no_limit_s)
        if needed is not None:
            length_s = needed.length_s(job.uid, length_s)
        machine = self._machine((job.partition, ""))
        amount = amount_of(held_by(job.shares, nodes), machine)
        if current.guard.short.is_short(length_s, amount / max(1.0, machine[CPU])):
            self._held_by_short[job.partition] = self._held_by_short.get(job.partition, 0) + amount


def amount_of(held: Held, machine: Held) -> float:
    """Return the largest part of one resource of `machine` that `held` takes.

    The unit is cpus of the machine.
    """
    others = [
        amount / machine[name] * machine[CPU]
        for name, amount in held.items()
        if (name == MEM or name.startswith(GPU)) and machine.get(name)
    ]
    return max(held[CPU], *others, 0)
