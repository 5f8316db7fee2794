"""Our own policy (see `guard`) on the nodes of a plan: the very same decisions, where jobs need more than processors.

A job needs so many processors of its line's machine as the largest part of cpus, memory or GPUs that it asks for; an exclusive
one counts by its nodes. Partitions of a higher tier come first, each tier by itself. The order of a line is that of priorities.
Where these are more than age, while somebody waits in a line who is worth less, the first of the others have EASY's promise:
they start while they fit, the first that does not is promised its start before anything else is tried, quick or not. So
what an administrator or a fair share puts first stays first; among equals the guard decides alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Protocol

from hpcsched.model.accounting import CPU, GPU, MEM
from hpcsched.model.ids import JobId, NodeName
from hpcsched.sched.guard.decide import Candidate, WaitBound, decide
from hpcsched.sched.guard.predict import Needed
from hpcsched.sched.limits.quota import LimitCounts
from hpcsched.sched.limits.tres import Held, all_of, held_by, least_of
from hpcsched.sched.policy import Backfill, Guard, Policy
from hpcsched.sched.queue.priority import scale_of, without_age
from hpcsched.sched.queue.queues import PartitionQueues
from hpcsched.sched.run_time import RunTimes
from hpcsched.sched.snapshot import NodeView, PendingJob, RunningJob, Snapshot

ALL = float("inf")


class PlanUnderWay(Protocol):
    """What the policy uses of the plan that it decides for."""

    snapshot: Snapshot
    policy: Policy
    guard: Guard
    needed: Needed | None
    priorities: dict[JobId, int]
    lanes: PartitionQueues
    lasting: RunTimes
    tally: LimitCounts
    gone: set[JobId]

    def start_now(self, job: PendingJob) -> bool:
        """Start `job` if it fits and touches no promise but its own; say whether it does."""

    def keep_from(self, job: PendingJob, from_s: float) -> bool:
        """Keep room for `job` from the first time at or after `from_s` at which it fits; say whether some is kept."""


def guarded(planner: PlanUnderWay, queue: Sequence[PendingJob]) -> Iterator[None]:
    """Start jobs of `queue`, in the order of priorities, and promise others a start; each step is a look at one job."""
    room = _PlanRoom(planner)
    partitions = planner.snapshot.partitions
    within_limits = [job for job in queue if planner.tally.why_not(job) is None]  # the others hold nobody up
    for _, jobs in groupby(within_limits, lambda job: partitions[job.partition].priority_tier):
        tier = tuple(jobs)
        yield from _those_ahead(planner, tier)
        line = [room.candidate(number, job) for number, job in enumerate(tier)]
        yield
        yield from decide(line, _moment(planner, line), room)


def trusting(snapshot: Snapshot, policy: Policy) -> tuple[Guard, Needed | None]:
    """Return the guard of a plan, and what jobs are expected to need if their requests are not to be trusted."""
    guard, experience = policy.guard, snapshot.experience
    if policy.backfill is not Backfill.DEFAULT or not guard.distrusts(experience.request_use):
        return guard, None
    return guard.where_distrusted(), Needed(experience.longest_runs_s, guard.distrust_times)


def _those_ahead(planner: PlanUnderWay, queue: Sequence[PendingJob]) -> Iterator[None]:
    """Start, or promise a start to, those of each line that are first in it by more than their age."""
    policy, scale = planner.policy, scale_of(planner.snapshot)
    worth = [without_age(job, planner.priorities[job.id], scale, policy) for job in queue]
    least: dict[tuple[str, str], int] = {}
    for job, its in zip(queue, worth, strict=True):
        line = _line(job)
        least[line] = min(its, least.get(line, its))
    open_lines = set(least)
    for job, its in zip(queue, worth, strict=True):
        line = _line(job)
        if line not in open_lines:
            continue
        waits = its > least[line] and not planner.start_now(job)
        if its <= least[line] or (waits and planner.keep_from(job, planner.snapshot.now_s)):
            open_lines.discard(line)
        yield


def _moment(planner: PlanUnderWay, line: Sequence[Candidate[PendingJob]]) -> WaitBound:
    now_s, guard, experience = planner.snapshot.now_s, planner.guard, planner.snapshot.experience
    return WaitBound(
        guard,
        now_s,
        experience.easy_wait_s,
        learning=experience.began_s is None or now_s < experience.began_s + guard.learning_s,
        first_waited_s=now_s - min(one.since_s for one in line),
        longest_s=experience.longest_runs_s,
    )


def _line(job: PendingJob) -> tuple[str, str]:
    return job.partition, job.reservation


class _PlanRoom:
    """What a plan has to give; see `guard.Room`."""

    def __init__(self, planner: PlanUnderWay) -> None:
        self._planner = planner
        self._machines: dict[tuple[str, str], Held] = {}  # by line: its nodes together
        self._amounts: dict[tuple[str, str, int], float] = {}  # by line and shape
        self._quick_held: dict[str, float] = {}  # by partition
        nodes = {node.name: node for node in planner.snapshot.nodes}
        for job in planner.snapshot.running:
            self._count_if_quick(job, nodes)

    def candidate(self, number: int, job: PendingJob) -> Candidate[PendingJob]:
        """Return `job`, the one of this number, as the guard sees it."""
        planner, line = self._planner, _line(job)
        amount = self._amount(job)
        part = amount / max(1.0, self._machine(line)[CPU])
        limit_s = planner.lasting.limit_s(job)
        length_s = limit_s if planner.needed is None else planner.lasting.needed_s(job, planner.snapshot.now_s)
        return Candidate(
            number=number,
            since_s=job.since_s if job.since_s is not None else planner.snapshot.now_s,
            limit_s=limit_s,
            user=job.uid,
            amount=amount,
            part=part,
            is_quick=planner.guard.quick.is_quick(length_s, part),
            line=line,
            job=job,
        )

    def most(self) -> float:
        return ALL

    def has_for_quick(self, one: Candidate[PendingJob]) -> bool:
        held = self._quick_held.get(one.job.partition, 0)
        return held + one.amount <= self._planner.guard.quick.share * self._machine(_line(one.job))[CPU]

    def start(self, one: Candidate[PendingJob]) -> bool:
        if one.job.id in self._planner.gone:  # in another of its partitions, or by another plan
            return True
        started = self._planner.start_now(one.job)
        if started and one.is_quick:
            self._quick_held[one.job.partition] = self._quick_held.get(one.job.partition, 0) + one.amount
        return started

    def promise(self, one: Candidate[PendingJob], from_s: float) -> None:
        self._planner.keep_from(one.job, from_s)

    def _machine(self, line: tuple[str, str]) -> Held:
        """Return what the nodes of `line` have together."""
        machine = self._machines.get(line)
        if machine is None:
            nodes = self._planner.snapshot.nodes
            machine = self._machines[line] = all_of(nodes[at] for at in self._planner.lanes.at(*line).nodes)
        return machine

    def _amount(self, job: PendingJob) -> float:
        line, shape = _line(job), job.request.shape
        key = *line, id(shape)
        amount = self._amounts.get(key)
        if amount is None:
            machine = self._machine(line)
            amount = amount_of(least_of(shape), machine)
            empty = sum(one.nodes_min for one in shape.each if one.exclusive)
            if empty:
                amount = max(amount, machine[CPU] * empty / max(1, len(self._planner.lanes.at(*line).nodes)))
            self._amounts[key] = amount
        return amount

    def _count_if_quick(self, job: RunningJob, nodes: Mapping[NodeName, NodeView]) -> None:
        needed, no_limit_s = self._planner.needed, self._planner.policy.default_time_limit_s
        if job.partition not in self._planner.snapshot.partitions:
            return
        length_s = job.ends_at_s - job.began_at_s if job.ends_at_s is not None else float(no_limit_s)
        if needed is not None:
            length_s = needed.length_s(job.uid, length_s)
        machine = self._machine((job.partition, ""))
        amount = amount_of(held_by(job.shares, nodes), machine)
        if self._planner.guard.quick.is_quick(length_s, amount / max(1.0, machine[CPU])):
            self._quick_held[job.partition] = self._quick_held.get(job.partition, 0) + amount


def amount_of(held: Held, machine: Held) -> float:
    """Return how many cpus of `machine` the largest part is that `held` is of one of its resources."""
    others = [
        its / machine[name] * machine[CPU]
        for name, its in held.items()
        if (name == MEM or name.startswith(GPU)) and machine.get(name)
    ]
    return max(held[CPU], *others, 0)
