"""The policy `default`: short jobs first by predicted run time, with bounded waits.

The *bound* is the longest wait so far under plain EASY backfill for the same jobs (`ShadowEasy`). It is certain, and it only
grows. A job that has waited for a part of the bound is *overdue*. Wide jobs count as having waited longer, in proportion to the
part of the machine that they need, because they wait longest under plain EASY. Jobs start in this order:

(1) *Short* jobs request very little work (`ShortJobs`). They start ahead of all others, even of
promises, while no job has waited nearly as long as the bound. A promise can be late because of
them. The delay is limited, because short jobs hold a small part of the machine.

(2) *Overdue* jobs follow, the longest counted wait first. Jobs that fit start. The first few that
do not fit are promised the earliest start that the requests of the running jobs allow. The others
start if they delay no promise.

(3) *Recent* jobs follow, by the ratio of wait to predicted run time (see `experience`), weighted by
size. So every waiting job moves up, and a short one moves up fast. They start if they fit and delay
no promise.

Jobs wait because others overtake them. So the nearer the longest wait is to the bound, the shorter a job must be to be
preferred: predicted times beyond `WaitBound.long_s` count alike, and such jobs keep their order of arrival.

A few recent jobs are promised a start too: the first in the queue get a late start, and the first wide one gets an early start.
Without these promises, running jobs would still be in their way when they become overdue. In the first days of a machine there
is not a bound. Then a job is overdue after a fixed time, and the first recent job is promised a start.

A prediction only orders jobs. Promises are computed from requests, so a wrong prediction delays no promise. If the requests of
a machine are not trusted (`Guard.distrusts`), promises are computed from `experience.Needed`, and a job that outlasts its
prediction may delay them.

Proven: the schedule equals plain EASY's if all jobs are overdue (`Guard.overdue_part` and `least_easy_wait_s` are 0, and width
does not count), with one promise and no short jobs. Not proven: that the longest wait stays below plain EASY's. See
man/adr/0011-the-guard-of-the-default-policy.md for how often it does not.

`decide` knows nothing of nodes: the simulator applies its decisions to a pool of equal processors, `guarded` to a scheduling
pass. If there are several queues, each with a part of the machine, then the rules about first jobs apply to each queue.

In a pass, a job counts as the number of processors that equals its largest fraction of cpus, memory or GPUs. An exclusive job
counts by its nodes. Partitions of a higher tier come first, each tier by itself. A queue is in the order of priorities.
Priorities may depend on more than age. Then, while jobs of lower priority wait in a queue, its first jobs are treated as under
EASY: they start while they fit, and the first that does not fit is promised its start before other jobs are considered, even
short ones. So jobs that an administrator or fair share puts first stay first. Among equals, only the guard decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Generic, NamedTuple, Protocol, TypeVar

from hpcsched.model.accounting import CPU, GPU, MEM
from hpcsched.model.ids import NodeName
from hpcsched.sched.policy import Guard
from hpcsched.sched.priority import scale_of, without_age
from hpcsched.sched.scheduling_pass import SchedulingPass
from hpcsched.sched.snapshot import NodeView, PendingJob, RunningJob
from hpcsched.sched.tres import Held, all_of, held_by, least_of

SHORTEST_S = 10.0  # the floor of bounded slowdown: a shorter run time does not help

Job = TypeVar("Job")


UNLIMITED = float("inf")
QueueKey = tuple[str, str]  # partition, reservation


class Candidate(NamedTuple, Generic[Job]):
    """The properties of a waiting job that the guard uses."""

    number: int  # its place in the queue, which orders equal jobs
    since_s: float  # start of its wait
    limit_s: float
    user: int  # negative: unknown
    amount: float  # processors that it needs, or the equivalent of its largest other resource
    part: float  # part of the machine of its queue, 0..1
    is_short: bool
    queue: Hashable
    job: Job


class Capacity(Protocol[Job]):
    """The resources that are free for the decisions of one pass; tracks starts and promises."""

    def most(self) -> float:
        """Return the largest amount that is worth trying."""

    def has_for_short(self, candidate: Candidate[Job]) -> bool:
        """Say whether the part of the machine for short jobs has room for `candidate`."""

    def start(self, candidate: Candidate[Job]) -> bool:
        """Start `candidate` if it fits now and delays no promise; say whether it starts."""

    def promise(self, candidate: Candidate[Job], from_s: float) -> None:
        """Reserve a slot for `candidate`, which does not fit now.

        The slot begins at `from_s`, or at the first time after it at which the candidate fits.
        """


class WaitBound:
    """The state of the guard at one time: when a job is overdue, and how jobs are ranked.

    `easy_wait_s`: longest wait so far under plain EASY. `learning`: the history is too short for that bound. `first_waited_s`:
    the wait of the first job in the queue. `longest_s`: longest of each user's last runs.
    """

    def __init__(
        self,
        guard: Guard,
        now_s: float,
        easy_wait_s: float,
        *,
        learning: bool,
        first_waited_s: float,
        longest_s: Mapping[int, float],
    ) -> None:
        self.guard = guard
        self.now_s = now_s
        self.learning = learning
        self.easy_max_wait_s = max(guard.least_easy_wait_s, easy_wait_s)
        self.overdue_after_s = guard.overdue_part * self.easy_max_wait_s
        self.bonus_s = guard.wide_bonus * self.overdue_after_s
        patience_s = self.easy_max_wait_s
        if learning:
            self.long_s = guard.learning_long_s
            self.overdue_after_s, self.bonus_s = max(self.overdue_after_s, guard.learning_overdue_s), 0.0
            patience_s = max(patience_s, guard.learning_overdue_s)
        else:
            calm_s = max(0.0, guard.calm_part * self.easy_max_wait_s - first_waited_s)
            self.long_s = min(guard.long_s, guard.long_least_s + guard.long_per_calm * calm_s)
        self.short_jobs_go_ahead = first_waited_s <= guard.short.wait_part * patience_s
        self._longest_s = longest_s

    def split(self, queue: Iterable[Candidate[Job]]) -> tuple[list[Candidate[Job]], list[Candidate[Job]]]:
        """Return the overdue candidates and the recent ones.

        Overdue ones are ordered by counted wait, the longest first; recent ones keep the order of `queue`.
        """
        since_s, bonus_s = self.now_s - self.overdue_after_s, self.bonus_s
        overdue: list[tuple[float, int, Candidate[Job]]] = []
        recent: list[Candidate[Job]] = []
        for candidate in queue:
            counted_s = candidate[1] - bonus_s * candidate[5]  # indices: this loop is hot
            if counted_s <= since_s:
                overdue.append((counted_s, candidate[0], candidate))
            else:
                recent.append(candidate)
        overdue.sort()
        return [candidate for _, _, candidate in overdue], recent

    def ranked(self, candidates: Iterable[Candidate[Job]], power: float) -> list[Candidate[Job]]:
        """Return `candidates` by the ratio of wait to predicted run time, the largest first.

        The predicted run time is multiplied by the size to the `power`.
        """
        now_s, long_s, longest_s = self.now_s, self.long_s, self._longest_s
        ranked = []
        for candidate in candidates:
            number, since_s, limit_s, user, amount = candidate[:5]
            expected_s = min(limit_s, longest_s.get(user, limit_s))
            expected_s = min(long_s, max(SHORTEST_S, expected_s))
            ranked.append(((since_s - now_s) / (expected_s * amount**power), expected_s, number, candidate))
        ranked.sort()  # of jobs that have not waited yet, the shortest is first
        return [candidate for _, _, _, candidate in ranked]

    def promised(self, recent: Sequence[Candidate[Job]]) -> Iterator[tuple[Candidate[Job], float]]:
        """Yield the recent candidates that are promised a start, with the earliest time for it.

        Of each queue these are the first wide one and the first few.
        """
        guard = self.guard
        wide: dict[Hashable, Candidate[Job]] = {}
        first: dict[Hashable, list[Candidate[Job]]] = {}
        for candidate in recent:
            of_queue = first.setdefault(candidate.queue, [])
            if len(of_queue) < guard.first:
                of_queue.append(candidate)
            if candidate.part >= guard.wide and candidate.queue not in wide:
                wide[candidate.queue] = candidate
        for queue, candidates in first.items():
            widest = wide.get(queue)
            if widest is not None:
                yield widest, self._late_s(widest, guard.wide_part)
            for candidate in candidates:
                if candidate is not widest:
                    yield candidate, self._late_s(candidate, guard.first_part * (1 - guard.wide_bonus * candidate.part))

    def _late_s(self, candidate: Candidate[Job], part: float) -> float:
        return max(self.now_s, candidate.since_s + part * self.easy_max_wait_s)


def decide(queue: Sequence[Candidate[Job]], bound: WaitBound, capacity: Capacity[Job]) -> Iterator[None]:
    """Start candidates of `queue` in `capacity`, and promise others a start.

    Each step decides about one candidate.
    """
    started: set[int] = set()
    if bound.short_jobs_go_ahead:
        yield from _start_short(queue, bound, capacity, started)
    overdue, recent = bound.split(
        [candidate for candidate in queue if candidate.number not in started] if started else queue
    )
    promises: Counter[Hashable] = Counter()
    yield from _start_in_order(overdue, bound, capacity, promises, bound.guard.promises)
    if capacity.most() <= 0:
        return
    if bound.learning:
        worth_trying = [each for each in recent if each.amount <= capacity.most() or not promises[each.queue]]
        ranked = bound.ranked(worth_trying, bound.guard.learning_power)
        yield from _start_in_order(ranked, bound, capacity, promises, 1)
    else:
        yield from _start_recent(recent, bound, capacity)


def _start_short(
    queue: Sequence[Candidate[Job]], bound: WaitBound, capacity: Capacity[Job], started: set[int]
) -> Iterator[None]:
    """Start short jobs, and add their numbers to `started`."""
    short = [candidate for candidate in queue if candidate.is_short and candidate.amount <= capacity.most()]
    for candidate in bound.ranked(short, bound.guard.size_power):
        if capacity.has_for_short(candidate) and capacity.start(candidate):
            started.add(candidate.number)
        yield


def _start_in_order(
    candidates: Sequence[Candidate[Job]],
    bound: WaitBound,
    capacity: Capacity[Job],
    promises: Counter[Hashable],
    most_promises: int,
) -> Iterator[None]:
    """Start candidates in this order, and promise a start to the first ones that do not fit.

    At most `most_promises` in each queue are promised a start.
    """
    for candidate in candidates:
        if capacity.most() <= 0:
            return
        if not capacity.start(candidate) and promises[candidate.queue] < most_promises:
            promises[candidate.queue] += 1
            capacity.promise(candidate, bound.now_s)
        yield


def _start_recent(recent: Sequence[Candidate[Job]], bound: WaitBound, capacity: Capacity[Job]) -> Iterator[None]:
    """Promise some recent candidates a start, then start those that fit, in order of rank."""
    worth_trying = [candidate for candidate in recent if candidate.amount <= capacity.most()]
    ranked = bound.ranked(worth_trying, bound.guard.size_power)
    if not ranked:
        return
    for candidate, from_s in bound.promised(recent):
        capacity.promise(candidate, from_s)
        yield
    for candidate in ranked:
        if capacity.most() <= 0:
            return
        capacity.start(candidate)
        yield


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
        key = queue_key(job)
        least[key] = min(worth, least.get(key, worth))
    open_queues = set(least)
    for job, worth in zip(jobs, worths, strict=True):
        key = queue_key(job)
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


def queue_key(job: PendingJob) -> QueueKey:
    return job.partition, job.reservation


class _NodeCapacity:
    """The free resources in a pass; see `Capacity`."""

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
        current, queue = self._current, queue_key(job)
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
        return held + candidate.amount <= self._current.guard.short.share * self._machine(queue_key(candidate.job))[CPU]

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
        queue, shape = queue_key(job), job.request.shape
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
