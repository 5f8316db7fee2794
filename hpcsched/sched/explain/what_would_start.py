"""Starts that a job would get: now, later, and with a smaller request.

The jobs ahead of it are planned as `plan` does. At its turn, the questions are asked instead of
planning the job. So the answers are the scheduler's own, not a separate estimate. `easy-sjbf` tries
jobs behind the first one out of order; here, the jobs ahead are still those of higher priority.
`default` promises starts out of order; here, all other jobs count as ahead.

To test a smaller request, a plan is made with that request in place of the job. In a large cluster
that takes too long. There, the request is tested at the turn of the job: if it starts there, it
really starts, but its effect on the order and on promises is ignored. With `default`, a request
that would start may be missed. With other policies that is rare.

A smaller request differs in one thing only: less time, fewer nodes, tasks, cpus or GPUs, less
memory, or a requirement dropped. If there are few counts, all are tried. If there are many,
bisection finds the largest count that starts, because a job that fits usually also fits with less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.reservation import Reservation
from hpcsched.model.resources import Share
from hpcsched.model.units import MINUTE_S, UNLIMITED_S, format_mem, format_time_s, known_limit_s
from hpcsched.sched.decisions import Plan, Start
from hpcsched.sched.place.request import GpuCounts, ResourceRequest, Shape
from hpcsched.sched.place.reserved_intervals import NEVER_S
from hpcsched.sched.plan import steps_of
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.queue.priority import in_order, scale_of
from hpcsched.sched.queue.reservations import cut_short_s
from hpcsched.sched.scheduling_pass import SchedulingPass
from hpcsched.sched.snapshot import PendingJob, RunningJob, Snapshot

LONGEST_MINUTES = 30 * 24 * 60  # the longest time limit that is tried for a job without a time limit
_COARSE_MIB, _FINE_MIB = 1024, 128
FEW = 100  # jobs and nodes: a plan of this size takes a few milliseconds
FEW_OUT_OF_ORDER = 200  # the same with `default`, where the turn of a job is less significant
FEW_COUNTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedPlace:
    """The earliest possible start of a job, and its nodes.

    `until_ended`: running jobs that must end before, the last one first.
    """

    start_s: float
    partition: str
    nodes: tuple[NodeName, ...]
    cpus: int
    until_ended: tuple[tuple[str, float], ...] = ()  # display id, end by its time limit


class WhatIf:
    """A scheduling pass at the turn of `job`. Not thread-safe."""

    def __init__(self, snapshot: Snapshot, policy: Policy, job: PendingJob) -> None:
        self._snapshot = snapshot
        self._policy = policy
        self._job = job
        self._views = [view for view in (job, *job.others) if view.partition in snapshot.partitions]
        waiting = [view for other in snapshot.pending for view in (other, *other.others)]
        waiting = [view for view in waiting if view.partition in snapshot.partitions]
        queue = in_order(waiting, snapshot.partitions, scale_of(snapshot), policy)
        first = next((at for at, view in enumerate(queue) if view.id == job.id), len(queue))
        in_order_of_starts = policy.backfill is not Backfill.DEFAULT
        before = {view.id for view in (queue[:first] if in_order_of_starts else queue)} - {job.id}
        before |= snapshot.promises.keys() - {job.id}  # slots promised to jobs behind it are not free for it either
        ahead = tuple(other for other in snapshot.pending if other.id in before)
        self._current = SchedulingPass(replace(snapshot, pending=ahead), policy)
        for _ in steps_of(self._current):
            pass

    def place(self) -> ExpectedPlace | None:
        """Return the earliest start of the job and its nodes; None if unknown.

        Running jobs are assumed to run to their time limits.
        """
        found = [place for view in self._views if (place := self._place(view)) is not None]
        return min(found, key=lambda place: place.start_s, default=None)

    def starts(self, request: ResourceRequest) -> bool:
        """Say whether the job would start now with this request."""
        few = FEW_OUT_OF_ORDER if self._policy.backfill is Backfill.DEFAULT else FEW
        if len(self._snapshot.pending) + len(self._snapshot.running) + len(self._snapshot.nodes) <= few:
            return self._starts_in_a_plan(request)
        return any(self._current.offer(replace(view, request=request)) is not None for view in self._views)

    def _starts_in_a_plan(self, request: ResourceRequest) -> bool:
        mine = self._job
        others = tuple(replace(view, request=request) for view in mine.others)
        changed = replace(mine, request=request, others=others)
        pending = tuple(changed if job.id == mine.id else job for job in self._snapshot.pending)
        current = SchedulingPass(replace(self._snapshot, pending=pending), self._policy)
        final = (
            not others and self._policy.backfill is not Backfill.DEFAULT
        )  # the first decision about the job is final
        for _ in steps_of(current):
            if current.starts and current.starts[-1].job_id == mine.id:
                return True
            if current.starts_are_final or (final and mine.id in current.waits):
                break
        return any(start.job_id == mine.id for start in current.starts)

    def _place(self, view: PendingJob) -> ExpectedPlace | None:
        found = self._current.expected(view)
        if found is None:
            return None
        start_s, parts = found
        return ExpectedPlace(
            start_s=start_s,
            partition=view.partition,
            nodes=tuple(self._snapshot.nodes[part.node].name for part in parts),
            cpus=sum(part.use[0] for part in parts),
            until_ended=self._ends({self._snapshot.nodes[part.node].name for part in parts}, start_s),
        )

    def _ends(self, nodes: set[NodeName], start_s: float) -> tuple[tuple[str, float], ...]:
        """Return the running jobs on these nodes that must end by `start_s`, the last first."""
        if start_s <= self._snapshot.now_s:
            return ()
        timeline = self._current.placement.timeline
        held = [job for job in self._snapshot.running if any(share.node in nodes for share in job.shares)]
        ends = sorted(((timeline.end_of(job), job.display_id) for job in held), reverse=True)
        return tuple((display_id, end_s) for end_s, display_id in ends if end_s <= start_s)


def smaller_requests(what_if: WhatIf, request: ResourceRequest) -> tuple[str, ...]:
    """Return the smaller requests that would start now, as options to change.

    For example ``--time=30:00`` or ``--nodes=1``.
    """
    found = [_less_time(what_if, request)]
    found += [option for option in _fewer(what_if, request)]
    found += [
        f"without {what}" for what, shape in _dropped(request.shape) if what_if.starts(replace(request, shape=shape))
    ]
    return tuple(option for option in found if option)


def _less_time(what_if: WhatIf, request: ResourceRequest) -> str:
    limit_s = request.time_limit_s if request.time_limit_s else UNLIMITED_S
    most = min(-(-limit_s // MINUTE_S) - 1, LONGEST_MINUTES)
    minutes = _largest(most, lambda count: what_if.starts(replace(request, time_limit_s=count * MINUTE_S)))
    return f"--time={format_time_s(minutes * MINUTE_S)}" if minutes else ""


def _fewer(what_if: WhatIf, request: ResourceRequest) -> Iterator[str]:
    """Yield each option that has a count, with the largest count that would start now."""
    for option, most, made in _counts(request.shape):
        count = _largest(most, partial(_starts_with, what_if, request, made))
        if count:
            yield option(count)


def _starts_with(what_if: WhatIf, request: ResourceRequest, made: Callable[[int], Shape], count: int) -> bool:
    return what_if.starts(replace(request, shape=made(count)))


_Count = tuple[Callable[[int], str], int, Callable[[int], Shape]]


def _counts(shape: Shape) -> Iterator[_Count]:
    """Yield each count of a shape.

    Each item has the spelling of the option, the largest count below the present one, and a
    function from a count to a shape.
    """
    if shape.components:  # an option would not say which component it is for
        return
    if shape.nodes_min > 1 and shape.ntasks is None:
        yield _option("nodes"), shape.nodes_min - 1, lambda n: replace(shape, nodes_min=n, nodes_max=n)
    if shape.ntasks is not None and shape.ntasks > 1:
        yield _option("ntasks"), shape.ntasks - 1, lambda n: _with_tasks(shape, n)
    if shape.cpus_per_task > 1:
        yield _option("cpus-per-task"), shape.cpus_per_task - 1, lambda n: replace(shape, cpus_per_task=n)
    for name, field in (("gpus-per-node", shape.gpus_per_node), ("gpus", shape.gpus_total)):
        if len(field) == 1 and field[0][1] > 1:
            yield _gpus_option(name, field), field[0][1] - 1, _gpus_maker(shape, name, field)
    mem_mib = shape.mem_per_node_mib
    if mem_mib and not shape.mem_all:
        step = _COARSE_MIB if mem_mib > 2 * _COARSE_MIB else _FINE_MIB
        most = (mem_mib - 1) // step
        yield lambda n: f"--mem={format_mem(n * step)}", most, lambda n: replace(shape, mem_per_node_mib=n * step)


def _option(name: str) -> Callable[[int], str]:
    return lambda count: f"--{name}={count}"


def _gpus_option(name: str, gpus: GpuCounts) -> Callable[[int], str]:
    kind = f"{gpus[0][0]}:" if gpus[0][0] else ""
    return lambda count: f"--{name}={kind}{count}"


def _gpus_maker(shape: Shape, name: str, gpus: GpuCounts) -> Callable[[int], Shape]:
    kind = gpus[0][0]
    if name == "gpus":
        return lambda count: replace(shape, gpus_total=((kind, count),), nodes_max=max(1, min(shape.nodes_max, count)))
    return lambda count: replace(shape, gpus_per_node=((kind, count),))


def _with_tasks(shape: Shape, count: int) -> Shape:
    low, high = min(shape.nodes_min, count), min(shape.nodes_max, count)
    return replace(shape, ntasks=count, nodes_min=low, nodes_max=high)


def _dropped(shape: Shape) -> Iterator[tuple[str, Shape]]:
    """Yield each requirement of a shape that could be dropped, with the shape without it."""
    if shape.components:
        return
    if shape.exclusive:
        yield "--exclusive", replace(shape, exclusive=False)
    if shape.nodelist:
        yield "--nodelist", replace(shape, nodelist=())
    if shape.exclude:
        yield "--exclude", replace(shape, exclude=())
    if shape.features:
        yield "--constraint", replace(shape, features=(), constraint="")


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest count from 1 to `most` that fits; 0 if none fits."""
    if most <= FEW_COUNTS:
        return next((count for count in range(most, 0, -1) if fits(count)), 0)
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


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
    lowered_s: int | None = None,
) -> RunningJob:
    """Return the job as a running job that starts now on `shares`.

    `lowered_s`: its time limit. It is exempt from immediate preemption.
    """
    limit_s = lowered_s if lowered_s is not None else known_limit_s(job.request.time_limit_s)
    limit_ends_s = now_s + limit_s if limit_s is not None else NEVER_S
    ends_s = min(limit_ends_s, cut_short_s(job, {each.name: each for each in reservations}))
    alike = {name: getattr(job, name) for name in _ALIKE}
    return RunningJob(
        **alike,
        shares=shares,
        began_at_s=now_s,
        ends_at_s=ends_s if ends_s < NEVER_S else None,
    )


def started(snapshot: Snapshot, job: PendingJob, start: Start) -> RunningJob:
    """Return the pending `job` of `snapshot` as it is after `start`."""
    return as_running(job, start.shares, snapshot.now_s, snapshot.reservations, start.time_limit_s)


_ALIKE = {field.name for field in fields(PendingJob)} & {field.name for field in fields(RunningJob)}
