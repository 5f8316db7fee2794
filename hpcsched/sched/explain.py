"""An explanation of why a job waits, in sentences with numbers.

The explanation has the needs of the job, the jobs ahead of it, the resources that each node lacks, and the expected start with
its cause.

Reads a snapshot and the plan of that snapshot; decides nothing. For each node it shows the resources that are free now. A node
that is free for a waiting job is reserved for a job ahead of it.

`WhatIf` answers where and when the job starts, and which smaller request would start now. The jobs ahead of it are planned as
`plan` does. At its turn, the questions are asked instead of planning the job. So the answers are the scheduler's own, not a
separate estimate. `easy-sjbf` tries jobs behind the first one out of order; here, the jobs ahead are still those of higher
priority. `default` promises starts out of order; here, all other jobs count as ahead.

To test a smaller request, a plan is made with that request in place of the job. In a large cluster that takes too long. There,
the request is tested at the turn of the job: if it starts there, it really starts, but its effect on the order and on promises
is ignored. With `default`, a request that would start may be missed. With other policies that is rare.

A smaller request differs in one thing only: less time, fewer nodes, tasks, cpus or GPUs, less memory, or a requirement dropped.
If there are few counts, all are tried. If there are many, bisection finds the largest count that starts, because a job that
fits usually also fits with less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Reason
from hpcsched.model.reservation import ReservedInterval
from hpcsched.model.units import MINUTE_S, UNLIMITED_S, format_mem, format_time_s
from hpcsched.sched.decisions import Plan
from hpcsched.sched.energy import advice
from hpcsched.sched.place.request import GpuCounts, ResourceRequest, Shape
from hpcsched.sched.place.timeline import Timeline
from hpcsched.sched.plan import steps_of
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.priority import in_order, scale_of
from hpcsched.sched.scheduling_pass import SchedulingPass
from hpcsched.sched.sentences import lacks, listed, needs
from hpcsched.sched.snapshot import NodeView, PendingJob, Snapshot

_IN_QUEUE = frozenset({Reason.RESOURCES, Reason.PRIORITY, Reason.RESERVATION})
NEAREST = 3
# Reasons that do not apply to every request of the user.
_DEPENDS_ON_REQUEST = frozenset({*_IN_QUEUE, Reason.NODES_UNAVAILABLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The explanation of one waiting job.

    `position`: its place among the jobs that wait for resources in its partition (0: none).
    """

    job_id: JobId
    reason: Reason
    detail: str
    needs: str
    position: int = 0
    ahead: tuple[str, ...] = ()  # display ids, in order
    nodes: Mapping[str, str]  # the resources that each node that it may use lacks now; "": the node has room
    nearest: tuple[str, ...] = ()  # the nodes that lack the least
    expected_start_s: float | None = None
    firm: bool = False  # it starts no later if running jobs run to their time limits
    place: ExpectedPlace | None = None  # the nodes of that start, and the jobs that end before it
    cheaper: str = ""  # what a later start would save, as a sentence
    smaller: tuple[str, ...] | None = None  # smaller requests that would start now; None: its size is not the reason


def explain(snapshot: Snapshot, policy: Policy, the_plan: Plan, job_id: JobId) -> Explanation | None:
    """Explain why job `job_id` waits, by `the_plan` of `snapshot`; None if it does not wait."""
    wait, job = the_plan.waits.get(job_id), _pending(snapshot, job_id)
    if wait is None or job is None:
        return None
    reason = None if _is_early(job, snapshot) else wait.reason
    ahead = _ahead(snapshot, policy, the_plan, job) if reason in _IN_QUEUE else None
    what_if = WhatIf(snapshot, policy, job) if reason in _DEPENDS_ON_REQUEST else None
    place = what_if.place() if what_if is not None else None
    lacking = _lacking(snapshot, policy, job)
    expected_s = wait.expected_start_s
    if expected_s is None and place is not None:
        expected_s = place.start_s
    return Explanation(
        job_id=job_id,
        reason=wait.reason,
        detail=wait.detail,
        needs=_needs(job.request),
        position=len(ahead) + 1 if ahead is not None else 0,
        ahead=tuple(map(_display_id, ahead or ())),
        nodes={name: listed(missing) for name, missing in lacking.items()},
        nearest=tuple(sorted(lacking, key=lambda name: len(lacking[name]))[:NEAREST]),
        expected_start_s=expected_s,
        firm=wait.reason is Reason.RESOURCES and policy.backfill is not Backfill.DEFAULT,
        place=place,
        smaller=smaller_requests(what_if, job.request) if what_if is not None else None,
        cheaper=advice(snapshot, job, job.request.time_limit_s),
    )


def in_words(explanation: Explanation, now_s: float) -> str:
    """Return the explanation as text: one line for each fact, nodes last."""
    lines = [f"{explanation.reason}: {explanation.detail}.", f"It needs {explanation.needs}."]
    if explanation.position:
        ahead = f", behind {listed(explanation.ahead)}" if explanation.ahead else ", the first"
        lines.append(f"Number {explanation.position} in line for its partition{ahead}.")
    lines.append(_start_words(explanation, now_s))
    if explanation.smaller:
        lines.append(f"It would start now {_either(explanation.smaller)}.")
    elif explanation.smaller is not None:
        lines.append("Nothing that is smaller in one thing alone would start now.")
    lines += [explanation.cheaper] if explanation.cheaper else []
    lines += [f"  {name} {verdict or 'has room now'}" for name, verdict in explanation.nodes.items()]
    return "\n".join(lines)


def _either(options: tuple[str, ...]) -> str:
    """Return ``with --nodes=1, --time=30:00 or without --exclusive``."""
    less = [option for option in options if not option.startswith("without")]
    more = [option for option in options if option.startswith("without")]
    words = ([f"with {less[0]}", *less[1:]] if less else []) + more
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _pending(snapshot: Snapshot, job_id: JobId) -> PendingJob | None:
    return next((job for job in snapshot.pending if job.id == job_id), None)


def _display_id(job: PendingJob) -> str:
    return job.display_id


def _needs(request: ResourceRequest) -> str:
    limit_s = request.time_limit_s
    return f"{needs(request.shape)} for {format_time_s(limit_s)}" if limit_s else needs(request.shape)


def _start_words(explanation: Explanation, now_s: float) -> str:
    if explanation.expected_start_s is None:
        return "When it will start is not known."
    in_s = max(0.0, explanation.expected_start_s - now_s)
    basis = "at the latest" if explanation.firm else "or so"
    place = explanation.place
    if explanation.reason not in _IN_QUEUE or (explanation.reason is Reason.RESERVATION and place is None):
        return f"It may start in {format_time_s(in_s)}."
    if place is not None and place.start_s == explanation.expected_start_s:
        return f"It starts in {format_time_s(in_s)} {basis}, on {listed(place.nodes)}, {_basis(place, explanation, now_s)}."
    return f"It starts in {format_time_s(in_s)} {basis}, if running jobs last to their time limits."


def _basis(place: ExpectedPlace, explanation: Explanation, now_s: float) -> str:
    """Name the jobs that must end before the start."""
    ids = [display_id for display_id, _ in place.until_ended]
    if not ids:
        if explanation.ahead:
            return "when its turn comes, if all jobs last to their time limits"
        return "when they are not reserved any more"
    jobs = f"job {ids[0]} has" if len(ids) == 1 else f"jobs {listed(ids)} have"
    last_s = place.until_ended[0][1]
    then = f", the last in {format_time_s(max(0.0, last_s - now_s))}" if len(ids) > 1 else ""
    return f"when {jobs} ended by {'its' if len(ids) == 1 else 'their'} time limit{'s' if len(ids) > 1 else ''}{then}"


def _is_early(job: PendingJob, snapshot: Snapshot) -> bool:
    """Say whether the job is in a reservation that has not begun.

    Until the reservation begins, no request starts.
    """
    own = next((each for each in snapshot.reservations if each.name == job.reservation), None)
    return bool(job.reservation) and (own is None or not own.is_active(snapshot.now_s))


def _ahead(snapshot: Snapshot, policy: Policy, the_plan: Plan, job: PendingJob) -> list[PendingJob]:
    in_line = [
        other
        for other in snapshot.pending
        if (other.partition, other.reservation) == (job.partition, job.reservation)
        and (wait := the_plan.waits.get(other.id)) is not None
        and wait.reason in _IN_QUEUE
    ]
    ordered = in_order(in_line, snapshot.partitions, scale_of(snapshot), policy)
    return ordered[: next(at for at, other in enumerate(ordered) if other.id == job.id)]


def _lacking(snapshot: Snapshot, policy: Policy, job: PendingJob) -> dict[str, list[str]]:
    """Return the resources that each node that the job may use lacks for one share."""
    timeline = Timeline(snapshot, policy)
    found: dict[str, list[str]] = {}
    for view in (job, *job.others):
        partition = snapshot.partitions.get(view.partition)
        names = set(partition.nodes) if partition is not None else set()
        if len(view.request.shape.nodelist) == view.request.shape.nodes_max:
            names &= set(view.request.shape.nodelist)  # it cannot use another node
        for at, node in enumerate(snapshot.nodes):
            if node.name in names and node.name not in found:
                missing = lacks(view.request.shape, node, timeline.types[at], timeline.profiles[at].rooms[0])
                found[node.name] = [node.why_not] if node.why_not else missing + _reserved(view, node, snapshot)
    return found


def _reserved(job: PendingJob, node: NodeView, snapshot: Snapshot) -> list[str]:
    """Return the reservation that keeps the job off the node, in words.

    The result is a list of one sentence; it is empty if no reservation does.
    """
    now_s = snapshot.now_s
    own = [interval for interval in snapshot.reserved_intervals if interval.name == job.reservation]
    if job.reservation and (text := _outside_own(job, node, own, now_s)):
        return [text]
    if any(interval.overrides for interval in own):
        return []
    ends_s = min([now_s + (job.request.time_limit_s or UNLIMITED_S), *(interval.end_s for interval in own)])
    others = [
        interval
        for interval in snapshot.reserved_intervals
        if interval.name != job.reservation and node.name in interval.nodes and interval.start_s < ends_s
    ]
    if not others:
        return []
    first = min(others, key=lambda interval: interval.start_s)
    if first.start_s <= now_s:
        return [f"is reserved ({first.name}) for another {format_time_s(int(first.end_s - now_s))}"]
    in_s = format_time_s(int(first.start_s - now_s))
    return [f"is reserved ({first.name}) in {in_s}, before the job would have ended"]


def _outside_own(job: PendingJob, node: NodeView, own: Sequence[ReservedInterval], now_s: float) -> str:
    """Explain why the node is not in the job's `own` reservation, or not yet; "" if it is."""
    if not any(node.name in interval.nodes for interval in own):
        return f"is not in reservation {job.reservation}"
    begins_s = min((i.start_s for i in own if node.name in i.nodes and i.end_s > now_s), default=now_s)
    return f"is not reserved for it yet: in {format_time_s(int(begins_s - now_s))}" if begins_s > now_s else ""


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

    Each item has the spelling of the option, the largest count below the present one, and a function from a count to a shape.
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
