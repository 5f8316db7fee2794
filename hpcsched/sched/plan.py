"""The plan: which waiting jobs start now and where, and why the other jobs wait.

Jobs are considered in order (see `queue.priority`). A job that fits starts. The first job of a
partition that does not fit is its *head*. It gets a reserved slot at its *shadow time*: the earliest
time at which it fits if every running job runs to its limit. With EASY backfill, a later job starts
if it fits now and leaves every reserved slot untouched: it ends before the slot, or uses resources
that the heads do not need. On one pool of equal processors this is EASY as Lifka and Feitelson define
it, job by job.

    none          nothing behind a head starts on the nodes of its partition
    easy          one slot for each partition
    easy-sjbf     as easy, and the later jobs are tried shortest first
    slurm-like    the first `Policy.promises` jobs get slots
    conservative  the first `Policy.conservative_depth` jobs get slots, which later plans keep (see `promises`)
    default       see `guard`

Pure and deterministic: equal snapshots and policies give equal plans. The state of a pass is in
`scheduling_pass`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace

from hpcsched.model.ids import JobId
from hpcsched.model.job import Hold, Reason
from hpcsched.sched.decisions import Plan, Wait
from hpcsched.sched.explain.reasons import behind_head, shortfall
from hpcsched.sched.guard.on_nodes import guarded
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.promises import keep_promises
from hpcsched.sched.queue.priority import order_in_steps, scale_of
from hpcsched.sched.queue.queues import PartitionQueue, eligible_jobs
from hpcsched.sched.scheduling_pass import SchedulingPass
from hpcsched.sched.snapshot import PendingJob, Snapshot


def plan(snapshot: Snapshot, policy: Policy) -> Plan:
    """Return the jobs that start now, and the reasons why the other jobs wait."""
    current = SchedulingPass(snapshot, policy)
    for _ in steps_of(current):
        pass
    return current.result()


def steps_of(current: SchedulingPass) -> Iterator[None]:
    """Take all decisions of a pass, in steps.

    A step takes a few milliseconds at most, except the one that sorts a long queue.
    """
    policy = current.policy
    queue = yield from _queue_in_order(current)
    if policy.backfill is Backfill.CONSERVATIVE:
        yield from keep_promises(current, queue)
    if policy.backfill is Backfill.DEFAULT:
        yield from guarded(current, queue)
        current.starts_are_final = True
    backfill = _Backfill(current)
    shortest_first: list[PendingJob] = []
    for job in queue:
        if policy.backfill is Backfill.EASY_SJBF and current.queues.of(job).head is not None:
            shortest_first.append(job)
        else:
            backfill.look_at(job)
            yield
    for job in sorted(shortest_first, key=current.run_times.limit_s):  # stable: equal jobs keep their order
        backfill.look_at(job)
        yield
    yield from backfill.expect_backlog()


def _queue_in_order(current: SchedulingPass) -> Generator[None, None, list[PendingJob]]:
    """Return, in steps, the eligible jobs in the order in which they are considered."""
    snapshot, policy = current.snapshot, current.policy
    eligible = yield from eligible_jobs(snapshot, policy, current.placement.reservations, current.waits)
    scale = scale_of(snapshot)
    eligible_ids = {job.id for job in eligible}
    others = [job for job in snapshot.pending if job.id not in eligible_ids and job.hold is Hold.NONE]
    if others:  # jobs that wait for a begin time, a dependency or a limit have a priority too
        yield from order_in_steps(others, snapshot.partitions, scale, policy, current.priorities)
    return (yield from order_in_steps(eligible, snapshot.partitions, scale, policy, current.priorities))


class _Backfill:
    """Backfill: considers the jobs of the queue in order.

    A job starts, gets a reserved slot, or gets a reason why it waits.
    """

    def __init__(self, current: SchedulingPass) -> None:
        policy = current.policy
        self._current = current
        self._keeps_promises = policy.backfill is Backfill.CONSERVATIVE
        self._slots_wanted = {  # for each partition: one for the head, and with some policies more
            Backfill.CONSERVATIVE: policy.conservative_depth,
            Backfill.SLURM_LIKE: policy.promises,
        }.get(policy.backfill, 1)
        self._backlog: list[PendingJob] = []  # jobs without a slot; the first few get an expected start
        self._multi_partition = {job.id for job in current.snapshot.pending if job.others}
        self._started_multi: set[JobId] = set()

    def look_at(self, job: PendingJob) -> None:
        """Start `job`, or record why it waits.

        A job that requests several partitions is considered in each.
        """
        self._current.looked_at += 1
        if job.id in self._current.started_ids:
            return
        if self._multi_partition and job.id in self._multi_partition:
            self._look_at_multi(job)
        else:
            self._look_at(job)

    def expect_backlog(self) -> Iterator[None]:
        """Give the jobs of the backlog an expected start, as if each had its own slot."""
        for job in self._backlog:
            if job.id in self._current.waits:  # else it has started since, in another of its partitions
                self._expect(job, firm=False)
                yield

    def _look_at_multi(self, job: PendingJob) -> None:
        """Consider a job in one of its partitions.

        If it waits in two, the wait that ends earlier is kept.
        """
        if job.id in self._started_multi:
            return
        waits = self._current.waits
        before = waits.pop(job.id, None)
        self._look_at(job)
        after = waits.get(job.id)
        if after is None:
            self._started_multi.add(job.id)
        elif before is not None:
            waits[job.id] = min(before, after, key=_end_of_wait)

    def _look_at(self, job: PendingJob) -> None:
        current = self._current
        wait = current.limits.why_not(job)
        if wait is not None:
            current.waits[job.id] = wait
        elif (current.starts_are_final or not current.start_if_it_fits(job)) and job.id not in current.waits:
            self._wait_for_resources(job)

    def _wait_for_resources(self, job: PendingJob) -> None:
        """Record that `job` waits for resources.

        It waits as the head of its partition, which gets a slot, or behind the head.
        """
        current = self._current
        queue = current.queues.of(job)
        if queue.head is None:
            self._make_head(job, queue)
            return
        if queue.wait_behind_head is None:
            queue.wait_behind_head = behind_head(queue.head.display_id, job.partition)
        current.waits[job.id] = current.placement.short_of_licenses(job) or queue.wait_behind_head
        if queue.slots < self._slots_wanted or current.placement.slots.of(job) is not None:
            queue.slots += 1
            self._expect(job, firm=self._keeps_promises)
        elif len(self._backlog) < current.policy.estimate_depth:
            self._backlog.append(job)

    def _make_head(self, job: PendingJob, queue: PartitionQueue) -> None:
        current, placement = self._current, self._current.placement
        reserved = placement.wait_for_reservation(job, queue)
        short = placement.short_of_licenses(job)
        start_s = current.reserve(job, firm=self._keeps_promises)
        wait = reserved or short or Wait(reason=Reason.RESOURCES, detail=_shortfall(current, job))
        current.waits[job.id] = replace(wait, expected_start_s=placement.sure(start_s))
        queue.head = job
        queue.slots = 1
        if current.policy.backfill is Backfill.NONE:
            for other in current.queues.sharing_nodes(queue):
                if other.head is None:
                    other.head = job

    def _expect(self, job: PendingJob, *, firm: bool) -> None:
        """Reserve a slot for `job`, which waits behind a head, and record its expected start."""
        current = self._current
        start_s = current.placement.sure(current.reserve(job, firm=firm))
        known = current.waits.get(job.id)
        if start_s is not None and known is not None:
            current.waits[job.id] = min(known, replace(known, expected_start_s=start_s), key=_end_of_wait)


def _shortfall(current: SchedulingPass, job: PendingJob) -> str:
    """Describe the needs of `job`, and how much of them is free or promised to others."""
    snapshot, placement = current.snapshot, current.placement
    group = placement.group(job)
    seats = group.seats_now()
    missing = group.required.difference(seat.node for seat in seats)
    names = sorted(snapshot.nodes[node].name for node in missing)
    end_s = placement.least_end_s(job, placement.timeline.now_s)
    others = set(placement.slots.in_the_way(job, {seat.node for seat in seats}, end_s))
    promised = [other for other in snapshot.pending if other.id in others] if others else []
    promised_to = [other.display_id for other in sorted(promised, key=lambda other: other.id)]
    return shortfall(group.shape, seats, names, promised_to)


def _end_of_wait(wait: Wait) -> tuple[bool, float]:
    """Return the sort key of the waits of one job.

    Waits that can end precede those that cannot; then the expected start decides.
    """
    cannot_end = wait.reason in (Reason.NODES_UNAVAILABLE, Reason.PARTITION_DOWN, Reason.PARTITION_INACTIVE)
    return cannot_end, wait.expected_start_s if wait.expected_start_s is not None else float("inf")
