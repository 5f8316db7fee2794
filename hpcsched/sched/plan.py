"""The plan: which waiting jobs start now and where, and why the other jobs wait.

Jobs are considered in order (see `priority`). A job that fits starts. The first job of a partition that does not fit is
its *head*. It gets a reserved slot at its *shadow time*: the earliest time at which it fits if every running job runs to its
limit. With EASY backfill, a later job starts if it fits now and leaves every reserved slot untouched: it ends before the slot,
or uses resources that the heads do not need. On one pool of equal processors this is EASY as Lifka and Feitelson define it, job
by job.

    none          nothing behind a head starts on the nodes of its partition
    easy          one slot for each partition
    easy-sjbf     as easy, and the later jobs are tried shortest first
    slurm-like    the first `Policy.promises` jobs get slots
    conservative  the first `Policy.conservative_depth` jobs get slots, which later plans keep: promises
    default       see `guard`

A promise is a start time, and the parts of nodes that the job gets then. A pass begins with all promises of the previous pass,
in the order of their starts, before it starts other jobs. So no promise is delayed while running jobs keep to their limits: a
job starts at the promised time, or as soon as it fits beside the promises to other jobs. If a job outlasts its limit, or ends
slowly, a promise moves to a later time on the same nodes. Its original start is remembered, so that the delay ends with its
cause. A promise lapses if its job changes its request, if the job waits for another reason, or if one of its nodes is removed.

Pure and deterministic: equal snapshots and policies give equal plans. The state of a pass is in `scheduling_pass`. Sources:
Lifka, "The ANL/IBM SP scheduling system" (1995); Mu'alem and Feitelson, "Utilization, predictability, workloads, and user
runtime estimates in scheduling the IBM SP2 with backfilling" (2001), where freed resources are assigned in the order of
arrival, here in the order of the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import fields, replace

from hpcsched.model.ids import JobId
from hpcsched.model.job import Hold, Reason
from hpcsched.model.node import Share
from hpcsched.model.reservation import NEVER_S, Interval, Reservation
from hpcsched.model.units import known_limit_s
from hpcsched.sched.decisions import Plan, Start, Wait
from hpcsched.sched.energy import cheap_start, clock, money
from hpcsched.sched.guard import guarded, queue_key
from hpcsched.sched.place.node_fit import NodePart, Seat
from hpcsched.sched.place.request import ResourceRequest, Shape
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.priority import order_in_steps, scale_of
from hpcsched.sched.queues import PartitionQueue, cut_short_s, eligible_jobs
from hpcsched.sched.scheduling_pass import SUM_ERROR_S, Placement, SchedulingPass
from hpcsched.sched.sentences import listed, needs
from hpcsched.sched.snapshot import NodeView, PendingJob, Promise, RunningJob, Snapshot, allows

MOST_PRICE_SLOTS = 10  # of jobs that wait for cheap hours, in each queue: finding a slot takes long


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
        yield from _keep_promises(current, queue)
    queue = yield from _hold_for_price(current, queue)
    yield
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


def _hold_for_price(current: SchedulingPass, queue: Sequence[PendingJob]) -> Generator[None, None, list[PendingJob]]:
    """Return, in steps, the queue without the jobs that wait for cheap hours.

    Their waits are recorded.
    """
    if not current.snapshot.tariff.kwh.windows:
        return list(queue)
    waits = _PriceWaits(current, queue)
    for job in queue if waits else ():
        waits.look_at(job)
        yield
    current.waits.update(waits.held)
    return [job for job in queue if job.id not in waits.held and job.id not in current.started_ids]


class _PriceWaits:
    """The jobs with `--cheap-by` in one pass: those that wait for their price or get a slot.

    A queue is *open* from its first job to its last one with `--cheap-by`, or to the first job that other jobs keep waiting.
    In an open queue, jobs are treated as under EASY: they start while they fit. A job with `--cheap-by` gets a slot there, at
    its cheap hours, or as early as possible if it has missed them. So jobs of lower priority do not delay it.
    """

    def __init__(self, current: SchedulingPass, queue: Iterable[PendingJob]) -> None:
        self.held: dict[JobId, Wait] = {}
        self._current = current
        self._cheap_left = Counter(queue_key(job) for job in queue if job.cheap_by_s is not None)
        self._slots_left = dict.fromkeys(self._cheap_left, MOST_PRICE_SLOTS)
        self._known: dict[tuple[object, ...], Wait | None] = {}

    def __bool__(self) -> bool:
        return bool(self._cheap_left)

    def look_at(self, job: PendingJob) -> None:
        """Hold `job` for its price, start it, or leave it to the policy."""
        current, key, is_cheap = self._current, queue_key(job), job.cheap_by_s is not None
        is_open = self._cheap_left[key] > 0 and self._slots_left[key] > 0
        self._cheap_left[key] -= is_cheap
        if job.id in self.held or job.id in current.started_ids:
            return
        wait = self._wait(job, is_open) if is_cheap and job.since_s is None else None
        if wait is not None:
            self.held[job.id] = wait
            if is_open and wait.expected_start_s is not None and current.reserve_from(job, wait.expected_start_s):
                self._slots_left[key] -= 1
        elif is_open and not self._try_to_start(job):
            self._slots_left[key] = 0
            if is_cheap:
                current.reserve_from(job, current.snapshot.now_s)

    def _try_to_start(self, job: PendingJob) -> bool:
        """Start `job` if it can start; return False if other jobs prevent it."""
        current = self._current
        return current.limits.why_not(job) is not None or current.start_now(job) or job.id in current.waits

    def _wait(self, job: PendingJob, is_open: bool) -> Wait | None:
        """Return the wait of `job` for cheap hours; None: it does not wait for them.

        Jobs without a slot share the answer for equal jobs.
        """
        key = job.request, job.partition, job.reservation, job.licenses, job.cheap_by_s, job.gpu_power
        if is_open or key not in self._known:
            self._known[key] = _wait_for_price(self._current, job, job.cheap_by_s or 0.0)
        return self._known[key]


def _wait_for_price(current: SchedulingPass, job: PendingJob, by_s: float) -> Wait | None:
    snapshot, placement, limit_s = current.snapshot, current.placement, current.run_times.limit_s(job)

    def start_from(at_s: float) -> float | None:
        found = placement.earliest(job, at_s)
        return None if found is None else found[0]

    found = cheap_start(snapshot.tariff, limit_s, snapshot.now_s, by_s - limit_s, start_from)
    if found is None:
        return None
    saved, at = money(snapshot, job, found), clock(found.start_s, snapshot.now_s)
    text = f"it starts at {at}, when energy is cheap, which saves {saved}"
    return Wait(reason=Reason.BEGIN_TIME, detail=text, expected_start_s=found.start_s)


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
        current.waits[job.id] = current.short_of(job) or queue.wait_behind_head
        if queue.slots < self._slots_wanted or current.placement.slots.of(job) is not None:
            queue.slots += 1
            self._expect(job, firm=self._keeps_promises)
        elif len(self._backlog) < current.policy.estimate_depth:
            self._backlog.append(job)

    def _make_head(self, job: PendingJob, queue: PartitionQueue) -> None:
        current, placement = self._current, self._current.placement
        reserved = placement.wait_for_reservation(job, queue)
        short = current.short_of(job)
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


def behind_head(display_id: str, partition: str) -> Wait:
    """Return the wait that all jobs behind a head share."""
    return Wait(reason=Reason.PRIORITY, detail=f"behind job {display_id} in partition {partition!r}")


def shortfall(shape: Shape, seats: Sequence[Seat], missing: Sequence[str], promised_to: Sequence[str] = ()) -> str:
    """Return the needs of a head, and how much of them is free.

    `seats`: nodes that it could have now. `missing`: required nodes that are not free. `promised_to`: jobs with slots there.
    """
    if promised_to:
        jobs = f"job {promised_to[0]}" if len(promised_to) == 1 else f"jobs {listed(promised_to)}"
        return f"{_what_is_free(shape, seats, missing, enough=True)}, but promised to {jobs}"
    return _what_is_free(shape, seats, missing, enough=False)


def _what_is_free(shape: Shape, seats: Sequence[Seat], missing: Sequence[str], *, enough: bool) -> str:
    if missing:
        return f"needs {needs(shape)}; {listed(missing)} {'is' if len(missing) == 1 else 'are'} not free"
    if shape.gpus_total:
        free = sum(sorted(seat.gpus for seat in seats)[-shape.nodes_max :])
        return f"needs {needs(shape)}; {_are(free)} free"
    if shape.ntasks is not None and shape.ntasks > 1:
        room = sum(sorted(seat.tasks for seat in seats)[-shape.nodes_max :])
        if len(seats) >= shape.nodes_min:
            together = "" if enough or room < shape.ntasks else _not_together(shape)
            most = room if enough or together else min(room, shape.ntasks - 1)
            return f"needs {needs(shape)}; there is room for {most}{together}"
    together = "" if enough or len(seats) < shape.nodes_min else _not_together(shape)
    return f"needs {needs(shape)}; {_are(len(seats))} free{together}"


def _not_together(shape: Shape) -> str:
    """Return the requirement on all nodes together that keeps `shape` waiting.

    "" if there is none. Enough nodes are free, but not together.
    """
    if shape.counts or shape.alike:
        return f", but not as {shape.constraint} asks for"
    if shape.contiguous:
        return ", but not next to each other"
    if shape.switches:
        return f", but not on {shape.switches} {'switch' if shape.switches == 1 else 'switches'}"
    return ""


def _are(count: int) -> str:
    return f"{count or 'none'} {'are' if count > 1 else 'is'}"


def _end_of_wait(wait: Wait) -> tuple[bool, float]:
    """Return the sort key of the waits of one job.

    Waits that can end precede those that cannot; then the expected start decides.
    """
    cannot_end = wait.reason in (Reason.NODES_UNAVAILABLE, Reason.PARTITION_DOWN, Reason.PARTITION_INACTIVE)
    return cannot_end, wait.expected_start_s if wait.expected_start_s is not None else float("inf")


def _keep_promises(current: SchedulingPass, queue: Sequence[PendingJob]) -> Iterator[None]:
    """Reserve the promises of the previous pass for the jobs of `queue`.

    Jobs with a promise that is due start.
    """
    promises = current.snapshot.promises.values()
    views = {(job.id, job.partition): job for job in queue} if promises else {}
    for promise in sorted(promises, key=lambda promise: (promise.start_s, promise.job_id)):
        job = views.get((promise.job_id, promise.partition))
        if job is not None and job.id not in current.started_ids and current.limits.why_not(job) is None:
            _keep(current, job, promise)
            yield


def _keep(current: SchedulingPass, job: PendingJob, promise: Promise) -> None:
    placement, now_s = current.placement, current.snapshot.now_s
    due_s = max(promise.start_s, now_s)
    limit_s = placement.least_end_s(job, due_s) - due_s
    found = _still_possible(placement, current.snapshot.nodes, job, promise, limit_s)
    if found is None:
        return
    start_s, parts = found
    end_s = placement.least_end_s(job, start_s)
    if end_s > start_s + limit_s + SUM_ERROR_S:
        return  # the promise assumed that a reservation cuts the job short, and this is no longer true
    if start_s <= now_s and not job.lowers:  # a job with --time-min is considered in its turn: it may get more
        if current.give(job, parts, end_s):
            current.started_ids.add(job.id)
    elif placement.sure(start_s) is not None:
        placement.slots.reserve(job, start_s, end_s, parts)
        placement.slots.promises[job.id] = promise


def _still_possible(
    placement: Placement, nodes: Sequence[NodeView], job: PendingJob, promise: Promise, limit_s: float
) -> tuple[float, list[NodePart]] | None:
    """Return the time at which the promise to `job` can be kept, and the parts.

    The time is not before the promised start. None: the promise cannot be kept.
    """
    if not _asks_the_same(job.request, promise.request):
        return None
    index, types = placement.timeline.index, placement.timeline.types
    usable = placement.queues.nodes_of(job)
    parts = []
    for promised in promise.parts:
        node = index.get(promised.node, -1)
        if node not in usable or types[node] != promised.slots:
            return None
        if not allows(job.request.shape.each[promised.component], nodes[node]):
            return None
        parts.append(NodePart(node=node, tasks=promised.tasks, use=promised.use, component=promised.component))
    start_s = _free_from(placement, job, parts, limit_s, max(promise.start_s, placement.timeline.now_s))
    return (start_s, parts) if start_s < NEVER_S else None


def _free_from(
    placement: Placement, job: PendingJob, parts: Sequence[NodePart], limit_s: float, from_s: float
) -> float:
    """Return the first time at which `job` can have exactly these parts and licences.

    There is power for them, too. The time is not before `from_s`. `NEVER_S`: never.
    """
    closed, profiles = placement.closed.to(job.reservation), placement.timeline.profiles
    start_s = from_s
    while start_s < NEVER_S:
        found_s = start_s
        for part in parts:
            found_s = profiles[part.node].earliest(part.use, limit_s, found_s)
            found_s = _opens_s(closed.get(part.node, ()), limit_s, found_s)
        found_s = placement.licenses.earliest(placement.power.counts_of(job, parts), limit_s, found_s)
        if found_s == start_s:
            break
        start_s = found_s
    return start_s


def _asks_the_same(asked: ResourceRequest, promised: ResourceRequest) -> bool:
    """Say whether the `promised` request satisfies `asked`.

    After some time, a waiting job accepts more switches.
    """
    if asked is promised or asked == promised:
        return True
    return asked.time_limit_s == promised.time_limit_s and asked.shape == replace(promised.shape, switches=0)


def _opens_s(closed: Sequence[Interval], length_s: float, from_s: float) -> float:
    """Return the first time from which `length_s` seconds overlap no interval of `closed`.

    The time is not before `from_s`.
    """
    for closed_s, opens_s in sorted(closed):
        if closed_s < from_s + length_s and opens_s > from_s:
            from_s = opens_s
    return from_s


# ----- tests of whether a job starts in a changed snapshot: the plan itself decides, so all its rules count

Make = Callable[[Snapshot, Policy], Plan]


def start_of(made: Plan, job_id: JobId) -> Start | None:
    """Return the start of the job in this plan; None if it does not start."""
    return next((start for start in made.starts if start.job_id == job_id), None)


def start_behind(
    snapshot: Snapshot, policy: Policy, job: PendingJob, ahead: Sequence[PendingJob], make: Make
) -> Start | None:
    """Return the start of `job` in `snapshot` that delays no job in `ahead`; None if none.

    Jobs ahead that would start there too are left out, because resources are not freed for them.
    """
    ahead = tuple(ahead)
    while True:
        made = make(replace(snapshot, pending=(*ahead, job)), policy)
        started = {start.job_id for start in made.starts}
        others = tuple(other for other in ahead if other.id not in started)
        if job.id in started or len(others) == len(ahead):
            return start_of(made, job.id)
        ahead = others


def as_running(
    job: PendingJob,
    shares: tuple[Share, ...],
    now_s: float,
    reservations: Iterable[Reservation] = (),
    time_limit_s: int | None = None,
) -> RunningJob:
    """Return the job as a running job that starts now on `shares`.

    `time_limit_s`: its time limit. It is exempt from immediate preemption.
    """
    limit_s = time_limit_s if time_limit_s is not None else known_limit_s(job.request.time_limit_s)
    limit_ends_s = now_s + limit_s if limit_s is not None else NEVER_S
    ends_s = min(limit_ends_s, cut_short_s(job, {each.name: each for each in reservations}))
    alike = {name: getattr(job, name) for name in _ALIKE}
    return RunningJob(**alike, shares=shares, began_at_s=now_s, ends_at_s=ends_s if ends_s < NEVER_S else None)


def started(snapshot: Snapshot, job: PendingJob, start: Start) -> RunningJob:
    """Return the pending `job` of `snapshot` as it is after `start`."""
    return as_running(job, start.shares, snapshot.now_s, snapshot.reservations, start.time_limit_s)


_ALIKE = {field.name for field in fields(PendingJob)} & {field.name for field in fields(RunningJob)}
