"""Groups of jobs of equal shape: nodes for them now, and their earliest start.

A `ShapeGroup` has the jobs of one shape in one partition (and reservation). Its `Openings` have the times at which each node
can hold a share of such a job. Groups with equal shares on the same nodes use the same `Openings`. A shape is *alike* if any of
those nodes will do; then it is enough to count nodes. Other shapes have tasks or GPUs to distribute over the free resources of
nodes; for them, seats are tried. Each component of a heterogeneous job has a group of its own, and `ComponentGroup` combines
them.

`Openings` are updated when shares are taken. Each node has *spans* ``[from, until)`` in which one share fits all the time. A
job of `length_s` can begin on the node at any `t` with ``from <= t`` and ``t + length_s <= until``. Two sorted indices over all
spans answer the question for a gang: from which time on can a number of nodes hold it? One index has the spans that never end,
the other the spans that end (*holes*).

During a pass, shares are usually only taken, so spans only shrink. A search for as many or more nodes and as long or longer a
time than an earlier search can begin at the result of the earlier search. When a slot is released, earlier results are
discarded.

Knows nothing of order, policies and wait reasons.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush, merge
from itertools import islice

from hpcsched.model.node import ANY_GPU
from hpcsched.model.reservation import NEVER_S, Closed, Interval, without
from hpcsched.sched.place.fragmentation import Mix
from hpcsched.sched.place.gang import choose, seats_apart
from hpcsched.sched.place.gpus import GpuSlot
from hpcsched.sched.place.node_fit import (
    Fit,
    NodePart,
    Seat,
    Seating,
    fit_of,
    parts_of,
    seat_at,
    seat_of,
    tasks_that_fit,
)
from hpcsched.sched.place.request import Shape
from hpcsched.sched.place.timeline import NodeResources, Timeline, least
from hpcsched.sched.snapshot import PendingJob, Snapshot, allows

LAST = 1 << 62  # after every node's number


class Floors:
    """The results of earlier searches, by number of nodes and length.

    A search for more nodes or a longer time finds no earlier time.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[list[float], list[float]]] = {}  # by nodes: lengths and times found, ascending

    def floor(self, count: int, length_s: float) -> float:
        """Return the latest time found for at most `count` nodes and at most `length_s`."""
        floor_s = -NEVER_S
        for nodes, (lengths_s, found_s) in self._found.items():
            if nodes <= count:
                at = bisect_right(lengths_s, length_s)
                if at and found_s[at - 1] > floor_s:
                    floor_s = found_s[at - 1]
        return floor_s

    def remember(self, count: int, length_s: float, at_s: float) -> None:
        """Record that nothing was found for `count` nodes and `length_s` before `at_s`."""
        lengths_s, found_s = self._found.setdefault(count, ([], []))
        at = end = bisect_left(lengths_s, length_s)
        while end < len(lengths_s) and found_s[end] <= at_s:  # searches for longer start no earlier than this
            end += 1
        lengths_s[at:end] = [length_s]
        found_s[at:end] = [at_s]


class Openings:
    """The spans of `nodes` for one share.

    `closed`: intervals in which a node cannot be used, even if it is free.
    """

    def __init__(
        self, timeline: Timeline, share: Shape, nodes: Sequence[int], closed: Mapping[int, Sequence[Interval]]
    ) -> None:
        self.until_s: dict[int, float] = {}  # by node that can hold a share now: the end of that time
        self._timeline = timeline
        self._share = share
        self._closed = closed
        choosy = {slots for slots in set(timeline.types) if _has_choice(share, slots)}
        self._choosy = {at for at, slots in enumerate(timeline.types) if slots in choosy} if choosy else set()
        self._fits: list[dict[NodeResources, bool]] = [{} for _ in range(max(timeline.kinds, default=-1) + 1)]
        self._spans: dict[int, list[Interval]] = {}
        self._seen = len(timeline.taken)
        self._seen_given = len(timeline.given)
        self._floors = Floors()
        self._endless: list[tuple[float, int]] = []  # begin and node of the spans that never end, ascending
        self._holes: list[tuple[float, float, int]] = []  # end, begin and node of the others, ascending
        for node in nodes:
            self._spans[node] = without(self._spans_of(node), closed.get(node, ()))
        self._index_spans()

    def _index_spans(self) -> None:
        now_s = self._timeline.now_s
        for node, spans in self._spans.items():
            if spans and spans[0][0] <= now_s:
                self.until_s[node] = spans[0][1]
            for from_s, until_s in spans:
                if until_s == NEVER_S:
                    self._endless.append((from_s, node))
                else:
                    self._holes.append((until_s, from_s, node))
        self._endless.sort()
        self._holes.sort()

    def catch_up(self) -> None:
        """Apply the shares that were taken and the slots that were released since the last call."""
        taken, given = self._timeline.taken, self._timeline.given
        if len(given) > self._seen_given:
            self._floors = Floors()
            for node in set(given[self._seen_given :]) & self._spans.keys():
                self._recompute(node)
            self._seen_given = len(given)
        for node, start_s, end_s in taken[self._seen :]:
            if node in self._spans:
                self._narrow(node, start_s, end_s)
        self._seen = len(taken)

    def has_now(self, count: int, end_s: float) -> bool:
        """Say whether `count` nodes can hold a share from now until `end_s`."""
        if len(self.until_s) < count:
            return False
        for until_s in self.until_s.values():
            if until_s >= end_s:
                count -= 1
                if count <= 0:
                    return True
        return False

    def now_until_s(self, count: int) -> float:
        """Return the time until which `count` nodes can hold a share from now on.

        Return now if fewer than `count` nodes can.
        """
        if len(self.until_s) < count:
            return self._timeline.now_s
        return sorted(self.until_s.values(), reverse=True)[count - 1]

    def earliest(self, count: int, length_s: float) -> float:
        """Return the first time from which `count` nodes can hold a share for `length_s`."""
        floor_s = max(self._timeline.now_s, self._floors.floor(count, length_s))
        found_s = self.earliest_from(count, length_s, floor_s)
        self._floors.remember(count, length_s, found_s)
        return found_s

    def earliest_from(self, count: int, length_s: float, from_s: float) -> float:
        """Return the first time from which `count` nodes can hold a share for `length_s`.

        The time is not before `from_s`.
        """
        if from_s == NEVER_S:
            return NEVER_S
        endless = self._endless
        open_now = bisect_right(endless, (from_s, LAST))
        if open_now >= count:
            return from_s
        holes = sorted(self._holes_for(length_s, from_s))
        begun = 0
        while begun < len(holes) and holes[begun][0] <= from_s:
            begun += 1
        until = [hole[1] for hole in holes[:begun]]
        if open_now + len(until) >= count:
            return from_s
        heapify(until)
        opening, more = open_now, len(endless)
        while opening < more or begun < len(holes):
            if begun == len(holes) or (opening < more and endless[opening][0] <= holes[begun][0]):
                at_s = endless[opening][0]
                opening += 1
            else:
                at_s = holes[begun][0]
                heappush(until, holes[begun][1])
                begun += 1
            while until and until[0] < at_s + length_s:
                heappop(until)
            if opening + len(until) >= count:
                return at_s
        return NEVER_S

    def is_open(self, node: int, start_s: float, end_s: float) -> bool:
        """Say whether `node` is open during ``[start_s, end_s)``, even if it is occupied."""
        if node not in self._spans:
            return False
        return all(opens_s <= start_s or closed_s >= end_s for closed_s, opens_s in self._closed.get(node, ()))

    def able(self, start_s: float, length_s: float) -> list[int]:
        """Return the nodes that can hold a share from `start_s` for `length_s`."""
        return [node for _, node in self.open_at(start_s, length_s)]

    def open_at(self, start_s: float, length_s: float) -> list[tuple[float, int]]:
        """Return the nodes that can hold a share from `start_s` for `length_s`, with the ends.

        Each item is the time until which the node can hold the share, and the node.
        """
        endless, holes = self._endless, self._holes
        found = [(NEVER_S, node) for _, node in endless[: bisect_right(endless, (start_s, LAST))]]
        later = holes[bisect_left(holes, (start_s + length_s,)) :]
        return found + [(until_s, node) for until_s, from_s, node in later if from_s <= start_s]

    def beginning_after(self, start_s: float, length_s: float) -> Iterator[tuple[float, float, int]]:
        """Yield the spans of at least `length_s` that begin after `start_s`, in order.

        A span is (begin, end, node).
        """
        endless, holes = self._endless, self._holes
        begin = bisect_right(endless, (start_s, LAST))
        later = holes[bisect_left(holes, (start_s + length_s,)) :]
        closing = [(at_s, until_s, node) for until_s, at_s, node in later if start_s < at_s <= until_s - length_s]
        closing.sort()
        return merge(closing, ((at_s, NEVER_S, node) for at_s, node in islice(endless, begin, None)))

    def _spans_of(self, node: int) -> list[Interval]:
        profile, fits = self._timeline.profiles[node], self._fits[self._timeline.kinds[node]]
        if not profile.dips:  # a share that fits once fits from then on
            for at_s, room in zip(profile.times_s, profile.rooms, strict=True):
                if fits[room] if room in fits else self._fit(node, room):
                    return [(at_s, NEVER_S)]
            return []
        if node in self._choosy:
            return self._spans_with_choice(node)
        spans: list[Interval] = []
        began_s: float | None = None
        for at_s, room in zip(profile.times_s, profile.rooms, strict=True):
            fit = fits.get(room)
            if fit is None:
                fit = self._fit(node, room)
            if fit:
                if began_s is None:
                    began_s = at_s
            elif began_s is not None:
                spans.append((began_s, at_s))
                began_s = None
        if began_s is not None:
            spans.append((began_s, NEVER_S))
        return spans

    def _spans_with_choice(self, node: int) -> list[Interval]:
        """Return spans in each of which the same GPUs fit all the time.

        Each step may also allow other GPUs. The spans do not overlap. A choice that fits across the
        end of a span is missed, which is safe.
        """
        profile = self._timeline.profiles[node]
        spans: list[Interval] = []
        began_s: float | None = None
        common: NodeResources | None = None
        for at_s, room in zip(profile.times_s, profile.rooms, strict=True):
            both = least((common, room)) if common is not None else room
            if began_s is not None and self._fit(node, both):
                common = both
                continue
            if began_s is not None:
                spans.append((began_s, at_s))
            began_s, common = (at_s, room) if self._fit(node, room) else (None, None)
        if began_s is not None:
            spans.append((began_s, NEVER_S))
        return spans

    def _fit(self, node: int, room: NodeResources) -> bool:
        timeline = self._timeline
        fit = tasks_that_fit(self._share, timeline.nodes[node], timeline.types[node], room) > 0
        self._fits[timeline.kinds[node]][room] = fit
        return fit

    def _narrow(self, node: int, start_s: float, end_s: float) -> None:
        """Remove from the node's spans the parts in which a share no longer fits.

        Only ``[start_s, end_s)`` is tested.
        """
        spans = self._spans[node]
        if not spans or spans[-1][1] <= start_s:
            return
        if node in self._choosy:
            self._recompute(node)
            return
        profile = self._timeline.profiles[node]
        fits = self._fits[self._timeline.kinds[node]]
        times_s, rooms = profile.times_s, profile.rooms
        at = bisect_left(times_s, start_s)
        full_from_s: float | None = None
        while at < len(times_s) and times_s[at] < end_s:
            fit = fits.get(rooms[at])
            if fit is None:
                fit = self._fit(node, rooms[at])
            if not fit:
                if full_from_s is None:
                    full_from_s = times_s[at]
            elif full_from_s is not None:
                self._cut(node, spans, full_from_s, times_s[at])
                full_from_s = None
            at += 1
        if full_from_s is not None:
            self._cut(node, spans, full_from_s, times_s[at] if at < len(times_s) else NEVER_S)

    def _cut(self, node: int, spans: list[Interval], full_from_s: float, full_until_s: float) -> None:
        """Remove ``[full_from_s, full_until_s)`` from the node's `spans`."""
        at = bisect_right(spans, (full_from_s, NEVER_S))
        if at and spans[at - 1][1] > full_from_s:
            at -= 1
        while at < len(spans) and spans[at][0] < full_until_s:
            span = spans[at]
            from_s, until_s = span
            left: list[Interval] = []
            if from_s < full_from_s:
                left.append((from_s, full_from_s))
            if full_until_s < until_s:
                left.append((full_until_s, until_s))
            spans[at : at + 1] = left
            at += len(left)
            self._drop(span, node)
            for piece in left:
                self._add(piece, node)
            if from_s <= self._timeline.now_s:
                if left and left[0][0] <= from_s:
                    self.until_s[node] = left[0][1]
                else:
                    del self.until_s[node]

    def _recompute(self, node: int) -> None:
        """Compute all spans of the node again."""
        for span in self._spans[node]:
            self._drop(span, node)
        spans = self._spans[node] = without(self._spans_of(node), self._closed.get(node, ()))
        for span in spans:
            self._add(span, node)
        if spans and spans[0][0] <= self._timeline.now_s:
            self.until_s[node] = spans[0][1]
        else:
            self.until_s.pop(node, None)

    def _add(self, span: Interval, node: int) -> None:
        if _endless(span):
            insort(self._endless, (span[0], node))
        else:
            insort(self._holes, (span[1], span[0], node))

    def _drop(self, span: Interval, node: int) -> None:
        if _endless(span):
            del self._endless[bisect_left(self._endless, (span[0], node))]
        else:
            del self._holes[bisect_left(self._holes, (span[1], span[0], node))]

    def _holes_for(self, length_s: float, from_s: float) -> list[Interval]:
        """Return the holes of at least `length_s` that can hold a share at `from_s` or later.

        They end no earlier than `length_s` after `from_s`.
        """
        holes = self._holes
        return [
            (begins_s, until_s)
            for until_s, begins_s, _ in holes[bisect_left(holes, (from_s + length_s,)) :]
            if begins_s + length_s <= until_s
        ]


def _has_choice(share: Shape, slots: Sequence[GpuSlot]) -> bool:
    """Say whether different GPUs of a node with these slots can satisfy a share."""
    kinds = [kind for counts in (share.gpus_per_node, share.gpus_per_task, share.gpus_total) for kind, _ in counts]
    if len(slots) < 2 or not (kinds or share.shards):
        return False
    return bool(share.shards) or ANY_GPU in kinds or len({slot.type for slot in slots}) < len(slots)


def _endless(span: Interval) -> bool:
    return span[1] == NEVER_S


# ----- the earliest start of a gang with tasks or GPUs to spread, if running jobs run to their limits
# For a gang with equal shares, `Openings` is enough. Other gangs need the seat of each node over the window ``[t, t + limit)``.
# As `t` advances, a seat grows only when a step of the node's profile begins, or when the node opens. It shrinks once the window
# reaches a step with less. So only the times of growth are tried, beginning with the first time at which enough nodes have
# room, and only the seats of changed nodes are computed again.


def earliest_start(
    timeline: Timeline, shape: Shape, openings: Openings, required: frozenset[int], limit_s: float, from_s: float
) -> tuple[float, list[NodePart]] | None:
    """Return the earliest start of `shape`, at `from_s` or later, and its parts.

    `limit_s`: its run time. None: it never fits. The nodes with the least free resources now are
    taken, so that nodes that are free now stay available to other jobs.
    """
    window = _Window(timeline, shape, limit_s)
    coming = openings.beginning_after(from_s, limit_s)
    opening = next(coming, None)
    for until_s, node in openings.open_at(from_s, limit_s):
        window.open(node, from_s, until_s)
    at_s = from_s
    while True:
        chosen = choose(shape, sorted(window.seats.values()), required) if window.may_suffice() else None
        if chosen is not None:
            rooms = [timeline.profiles[seat.node].free_over(at_s, at_s + limit_s) for seat in chosen]
            return at_s, parts_of(shape, chosen, timeline.nodes, timeline.types, rooms)
        times_s = [window.grows[0][0]] if window.grows else []
        if opening is not None:
            times_s.append(opening[0])
        if not times_s:
            return None
        at_s = min(times_s)
        window.move_to(at_s)
        while opening is not None and opening[0] <= at_s:
            window.open(opening[2], at_s, opening[1])
            opening = next(coming, None)


class _Window:
    """The seats of the nodes over a window that advances in time."""

    def __init__(self, timeline: Timeline, shape: Shape, limit_s: float) -> None:
        self.seats: dict[int, Seat] = {}
        self.grows: list[tuple[float, int]] = []  # when a seat may grow, and its node
        self._shrinks: list[tuple[float, int]] = []  # after which time a seat may shrink, and its node
        self._until_s: dict[int, float] = {}  # by node: how long it is open
        self._tasks = 0
        self._timeline = timeline
        self._shape = shape
        self._limit_s = limit_s

    def open(self, node: int, at_s: float, until_s: float) -> None:
        """Add `node`, which can hold a share until `until_s`."""
        self._until_s[node] = until_s
        self._see(node, at_s)

    def move_to(self, at_s: float) -> None:
        """Advance the window to begin at `at_s`."""
        changed: set[int] = set()
        while self.grows and self.grows[0][0] <= at_s:
            changed.add(heappop(self.grows)[1])
        while self._shrinks and self._shrinks[0][0] < at_s:
            changed.add(heappop(self._shrinks)[1])
        for node in changed:
            if node in self._until_s:
                self._see(node, at_s)

    def may_suffice(self) -> bool:
        """Say whether there may be enough seats. This is a cheap test before they are sorted."""
        shape = self._shape
        return len(self.seats) >= shape.nodes_min and (shape.ntasks is None or self._tasks >= shape.ntasks)

    def _see(self, node: int, at_s: float) -> None:
        """Compute the seat of the node again, and the time of its next possible change."""
        old = self.seats.pop(node, None)
        if old is not None:
            self._tasks -= old.tasks
        end_s = at_s + self._limit_s
        if end_s > self._until_s[node]:
            del self._until_s[node]
            return
        timeline, profile = self._timeline, self._timeline.profiles[node]
        room = profile.free_over(at_s, end_s)
        seat = seat_of(self._shape, node, timeline.nodes[node], timeline.types[node], room)
        if seat is not None:
            self.seats[node] = seat._replace(preference=timeline.scarcity[node])
            self._tasks += seat.tasks
        times_s = profile.times_s
        after = bisect_right(times_s, at_s)
        if after < len(times_s):
            heappush(self.grows, (times_s[after], node))
        reached = bisect_left(times_s, end_s)
        if reached < len(times_s):
            heappush(self._shrinks, (times_s[reached] - self._limit_s, node))


def is_alike(shape: Shape, required: frozenset[int]) -> bool:
    """Say whether `shape` takes equal shares, so that any nodes with room for one will do."""
    if (required and len(required) < shape.nodes_max) or not shape.any_nodes:
        return False
    return shape.nodes_max == 1 or (shape.ntasks is None and not shape.gpus_total)


def share_of(shape: Shape) -> Shape:
    """Return the least share of each node, as a shape for one node."""
    single = shape.nodes_max == 1
    return replace(
        shape,
        nodes_min=1,
        nodes_max=1,
        ntasks=None,
        tasks_min=shape.ntasks if single and shape.ntasks is not None else shape.tasks_min,
        gpus_per_node=shape.gpus_total if single and shape.gpus_total else shape.gpus_per_node,
        gpus_total=() if single else shape.gpus_total,
        features=(),
        alike=(),
        counts=(),
        prefer=(),
        mincpus=0,
        tmp_mib=0,
        switches=0,
        contiguous=False,
        spread=False,
        synchronous=False,
        comm_bound=False,
        constraint="",
        nodelist=(),
        exclude=(),
    )


class ShapeGroups:
    """The groups of one pass. A group is made when a job first needs it."""

    def __init__(self, snapshot: Snapshot, timeline: Timeline, closed: Closed, mix: Mix | None) -> None:
        self._snapshot = snapshot
        self._timeline = timeline
        self._closed = closed
        self._mix = mix
        self._groups: dict[tuple[int, str, str], ShapeGroup | ComponentGroup] = {}
        self._openings: dict[tuple[object, ...], Openings] = {}  # by all properties that they depend on

    def __len__(self) -> int:
        return len(self._groups)

    def of(self, job: PendingJob, nodes: Sequence[int]) -> ShapeGroup | ComponentGroup:
        """Return the group of `job`; `nodes` are the nodes of its partition that answer."""
        shape = job.request.shape
        group = self._groups.get((id(shape), job.partition, job.reservation))
        if group is None:
            made = [self._made(component, job, nodes) for component in shape.each]
            group = ComponentGroup(self._timeline, shape, made) if shape.components else made[0]
            self._groups[id(shape), job.partition, job.reservation] = group
        return group

    def _made(self, shape: Shape, job: PendingJob, nodes: Sequence[int]) -> ShapeGroup:
        timeline = self._timeline
        if shape.features or shape.exclude or shape.mincpus or shape.tmp_mib:
            nodes = [at for at in nodes if allows(shape, self._snapshot.nodes[at])]
        required = frozenset([timeline.index.get(name, -1) for name in shape.nodelist])
        bound = required if len(required) == shape.nodes_max else frozenset()
        if bound:  # it uses exactly these nodes
            nodes = [at for at in nodes if at in bound]
        share = share_of(shape)
        floors = shape.mincpus, shape.tmp_mib
        key = share, job.partition, job.reservation, shape.features, floors, shape.exclude, bound
        openings = self._openings.get(key)
        if openings is None:
            openings = self._openings[key] = Openings(timeline, share, nodes, self._closed.to(job.reservation))
        return ShapeGroup(timeline, shape, nodes, required, openings, self._mix)


class ShapeGroup:
    """The jobs of one shape on some nodes.

    `nodes`: the nodes that it may use. `required`: the nodes that it must use.
    """

    def __init__(
        self,
        timeline: Timeline,
        shape: Shape,
        nodes: Sequence[int],
        required: frozenset[int],
        openings: Openings,
        mix: Mix | None,
    ) -> None:
        self.shape = shape
        self.nodes = nodes
        self.required = required
        self.fails_beyond_s = NEVER_S  # a job that ends later than this does not fit now
        self._timeline = timeline
        self._openings = openings
        self._alike = is_alike(shape, required)
        self._count = max(shape.nodes_min, len(required))
        self._floors = Floors()
        self._seating: Seating | None = None
        self._given = len(timeline.given)
        self._seen = 0  # the number of changes of the timeline that `_seating` includes
        self._window = (-1, -1)  # of `_seating`: number of reservations, and of dips before the end of the job
        self._uses: dict[tuple[int, NodeResources], NodeResources] = {}
        self._mix = mix
        self._fits: dict[tuple[int, NodeResources], Fit | None] = {}

    def place(self, end_s: float) -> list[NodePart] | None:
        """Return the parts of a job of this group that starts now and ends by `end_s`.

        None: it does not fit.
        """
        timeline = self._timeline
        self._forget_if_given()
        if end_s > self.fails_beyond_s:
            return None
        self._openings.catch_up()
        if not self._openings.has_now(self._count, end_s):
            self.fails_beyond_s = self._openings.now_until_s(self._count)
            return None
        chosen = choose(self.shape, self._seats(end_s), self.required)
        if chosen is None:
            self.fails_beyond_s = self._less_in_the_way(end_s)
            return None
        rooms = [timeline.free_until(seat.node, end_s) for seat in chosen]
        return parts_of(self.shape, chosen, timeline.nodes, timeline.types, rooms, self._mix)

    def place_with(self, own: Sequence[NodePart], own_from_s: float, end_s: float) -> list[NodePart] | None:
        """Return the parts of a job that starts now if its own slot is given up.

        The slot has the `own` parts from `own_from_s` on. None: the job does not fit. If the shape is not alike, only the nodes
        of the slot are tried. That is exact if `place` has found nothing.
        """
        if own_from_s >= end_s:
            return None
        timeline = self._timeline
        mine = [part for part in own if self.could_have(part, own_from_s, end_s)]
        if len(mine) == len(own):
            return list(own)
        if not self._alike or not mine:
            return None
        self._openings.catch_up()
        nodes = {part.node for part in mine}
        others = [seat for seat in self._seats(end_s) if seat.node not in nodes]
        others = others[: max(0, self.shape.nodes_max - len(mine))]
        if len(mine) + len(others) < self._count:
            return None
        rooms = [timeline.free_until(seat.node, end_s) for seat in others]
        parts = parts_of(self.shape, others, timeline.nodes, timeline.types, rooms, self._mix) if others else []
        return sorted([*mine, *parts], key=lambda part: part.node)

    def earliest(self, limit_s: float, from_s: float) -> tuple[float, list[NodePart]] | None:
        """Return the earliest start of a job of this group, and its parts; None if never.

        The job starts at `from_s` or later and runs for `limit_s`.
        """
        self._forget_if_given()
        self._openings.catch_up()
        start_s = self._openings.earliest(self._count, limit_s)
        if start_s < from_s:
            start_s = self._openings.earliest_from(self._count, limit_s, from_s)
        if start_s == NEVER_S:
            return None
        if self._alike:
            return start_s, self._shares(start_s, limit_s)
        start_s = max(start_s, self._floors.floor(1, limit_s))
        found = earliest_start(self._timeline, self.shape, self._openings, self.required, limit_s, start_s)
        if from_s <= self._timeline.now_s:
            self._floors.remember(1, limit_s, found[0] if found is not None else NEVER_S)
        return found

    def seats_from(self, start_s: float, limit_s: float) -> Sequence[Seat]:
        """Return the seats of the nodes with room from `start_s` for `limit_s`, in order.

        The order is the order of preference.
        """
        self._forget_if_given()
        self._openings.catch_up()
        if start_s <= self._timeline.now_s:
            return self._seats(start_s + limit_s)
        timeline, end_s, seats = self._timeline, start_s + limit_s, []
        for at in self._openings.able(start_s, limit_s):
            room = timeline.profiles[at].free_over(start_s, end_s)
            seat = seat_of(self.shape, at, timeline.nodes[at], timeline.types[at], room)
            seats += [seat] if seat is not None else []
        return sorted(seats)

    def parts_on(self, seats: Sequence[Seat], start_s: float, end_s: float) -> list[NodePart]:
        """Return the parts of a job of this group on exactly these `seats`."""
        timeline = self._timeline
        rooms = [timeline.profiles[seat.node].free_over(start_s, end_s) for seat in seats]
        return parts_of(self.shape, seats, timeline.nodes, timeline.types, rooms, self._mix)

    def next_opening_s(self, after_s: float, limit_s: float) -> float:
        """Return the time after `after_s` at which a node opens or has more free.

        A node counts if it is open for `limit_s`. `NEVER_S`: never.
        """
        times_s = [opens_s for opens_s, _, _ in islice(self._openings.beginning_after(after_s, limit_s), 1)]
        for node in self.nodes:
            grows_s = self._timeline.profiles[node].times_s
            times_s += grows_s[bisect_right(grows_s, after_s) :][:1]
        return min(times_s, default=NEVER_S)

    def seats_now(self) -> list[Seat]:
        """Return the seats of the nodes with room now, for any length of time."""
        self._openings.catch_up()
        seats = (self._seat(at, None) for at in self._openings.until_s)
        return [seat for seat in seats if seat is not None]

    def _seats(self, end_s: float) -> Sequence[Seat]:
        """Return the seats for a job that starts now and ends by `end_s`, in order of preference.

        For an alike shape, preference depends only on the resources that are free now. Then seats
        change only where a job starts.
        """
        timeline, until_s = self._timeline, self._openings.until_s
        if self._alike:
            window, within_s = (0, 0), None
        else:
            window, within_s = (timeline.reservations, bisect_left(timeline.dips_s, end_s)), end_s
        if self._seating is None or self._window != window:
            seats = (self._seat(at, within_s) for at in until_s)
            self._seating, self._window = Seating([seat for seat in seats if seat is not None]), window
        else:
            for at in timeline.changed[self._seen :]:
                self._seating.replace(at, self._seat(at, within_s))
        self._seen = len(timeline.changed)
        return [seat for seat in self._seating.ordered if until_s.get(seat.node, 0.0) >= end_s]

    def could_have(self, own: NodePart, own_from_s: float, end_s: float) -> bool:
        """Say whether the part is free from now until `own_from_s`.

        The node must also be open to the job until `end_s`.
        """
        timeline = self._timeline
        now_s = timeline.now_s
        free = own_from_s <= now_s or timeline.profiles[own.node].earliest(own.use, own_from_s - now_s, now_s) <= now_s
        return free and self._openings.is_open(own.node, now_s, end_s)

    def _forget_if_given(self) -> None:
        """Discard the results of failed searches if a slot has been released since."""
        given = len(self._timeline.given)
        if given > self._given:
            self._given = given
            self.fails_beyond_s = NEVER_S
            self._floors = Floors()
            self._seating = None

    def _less_in_the_way(self, end_s: float) -> float:
        """Return the latest end before `end_s` at which some node has more free resources.

        Until that end, more is free on some nodes than until `end_s`.
        """
        crossed = bisect_left(self._timeline.dips_s, end_s)
        dip_s = self._timeline.dips_s[crossed - 1] if crossed else self._timeline.now_s
        return max(dip_s, *[at_s for at_s in self._openings.until_s.values() if at_s < end_s], self._timeline.now_s)

    def _seat(self, at: int, end_s: float | None) -> Seat | None:
        """Return the seat of node `at`; None if no share fits.

        The free resources are those of now, or those from now until `end_s`.
        """
        timeline = self._timeline
        profile = timeline.profiles[at]
        room = profile.rooms[0]
        if room[0] < self.shape.cpus_per_task:
            return None
        if end_s is not None and profile.dips:
            room = profile.free_over(timeline.now_s, end_s)
        key = timeline.kinds[at], room
        if key in self._fits:
            fit = self._fits[key]
        else:
            fit = self._fits[key] = fit_of(self.shape, timeline.nodes[at], timeline.types[at], room, self._mix)
        return seat_at(self.shape, at, timeline.nodes[at], fit) if fit is not None else None

    def _shares(self, start_s: float, limit_s: float) -> list[NodePart]:
        able = self._openings.able(start_s, limit_s)
        chosen = self._timeline.least_free(able, self.shape.nodes_max)
        tasks = self.shape.ntasks if self.shape.ntasks is not None else self.shape.tasks_min
        return [NodePart(node=node, tasks=tasks, use=self._use(node, start_s, start_s + limit_s)) for node in chosen]

    def _use(self, node: int, start_s: float, end_s: float) -> NodeResources:
        """Return the resources that one share takes of `node`.

        They are computed once for each kind of node and free resources.
        """
        timeline = self._timeline
        types = timeline.types[node]
        room = timeline.profiles[node].free_over(start_s, end_s)
        key = timeline.kinds[node], room
        use = self._uses.get(key)
        if use is None:
            seat = seat_of(self.shape, node, timeline.nodes[node], types, room)
            seats = [seat] if seat is not None else []
            use = self._uses[key] = parts_of(self.shape, seats, timeline.nodes, timeline.types, [room])[0].use
        return use


class ComponentGroup:
    """Heterogeneous jobs of one shape. There is a `ShapeGroup` for each component.

    Components get separate nodes.
    """

    def __init__(self, timeline: Timeline, shape: Shape, groups: Sequence[ShapeGroup]) -> None:
        self.shape = shape
        self.nodes = sorted({node for group in groups for node in group.nodes})
        self.required = frozenset([node for group in groups for node in group.required])
        self._timeline = timeline
        self._groups = groups

    def place(self, end_s: float) -> list[NodePart] | None:
        """Return the parts of a job of these components that starts now and ends by `end_s`.

        None: it does not fit.
        """
        now_s = self._timeline.now_s
        return self._at(now_s, end_s - now_s)

    def place_with(self, own: Sequence[NodePart], own_from_s: float, end_s: float) -> list[NodePart] | None:
        """Return the `own` parts of the slot of a job if it can have them now; else None.

        The slot begins at `own_from_s`.
        """
        if own_from_s >= end_s:
            return None
        fits = all(self._groups[part.component].could_have(part, own_from_s, end_s) for part in own)
        return list(own) if fits else None

    def earliest(self, limit_s: float, from_s: float) -> tuple[float, list[NodePart]] | None:
        """Return the earliest start of a job of these components, and its parts.

        The job starts at `from_s` or later and runs for `limit_s`. None: it never fits.
        """
        at_s = from_s
        while at_s < NEVER_S:
            alone = [group.earliest(limit_s, at_s) for group in self._groups]
            starts_s = [found[0] for found in alone if found is not None]
            if len(starts_s) < len(alone):
                return None
            at_s = max(at_s, *starts_s)
            parts = self._at(at_s, limit_s)
            if parts is not None:
                return at_s, parts
            at_s = min(group.next_opening_s(at_s, limit_s) for group in self._groups)
        return None

    def seats_now(self) -> list[Seat]:
        """Return the seats of the nodes with room for part of a component now."""
        return list({seat.node: seat for group in self._groups for seat in group.seats_now()}.values())

    def _at(self, start_s: float, limit_s: float) -> list[NodePart] | None:
        """Return the parts of all components from `start_s` for `limit_s`, in their order.

        None: they do not all fit.
        """
        seats = [group.seats_from(start_s, limit_s) for group in self._groups]

        def pick(at: int, taken: frozenset[int]) -> list[Seat] | None:
            group = self._groups[at]
            return choose(group.shape, [seat for seat in seats[at] if seat.node not in taken], group.required)

        chosen = seats_apart(self.shape.components, pick)
        if chosen is None:
            return None
        return [
            replace(part, component=at)
            for at, group in enumerate(self._groups)
            for part in group.parts_on(chosen[at], start_s, start_s + limit_s)
        ]
