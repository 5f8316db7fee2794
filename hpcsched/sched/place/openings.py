"""Openings: the times at which each node can hold one share of a shape.

They are updated when shares are taken. Each node has *spans* ``[from, until)`` in which one share fits all the time. A job of
`length_s` can begin on the node at any `t` with ``from <= t`` and ``t + length_s <= until``. Two sorted indices over all spans
answer the question for a gang: from which time on can a number of nodes hold it? One index has the spans that never end, the
other the spans that end (*holes*).

During a pass, shares are usually only taken, so spans only shrink. A search for as many or more nodes and as long or longer a
time than an earlier search can begin at the result of the earlier search. When a slot is released, earlier results are
discarded.

Knows nothing of jobs, order and promises, nor of the nodes that a job finally gets.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, merge
from itertools import islice

from hpcsched.model.resources import ANY_GPU
from hpcsched.sched.place.gpus import GpuSlot
from hpcsched.sched.place.node_fit import tasks_that_fit
from hpcsched.sched.place.request import Shape
from hpcsched.sched.place.reserved_intervals import NEVER_S, Interval, without
from hpcsched.sched.place.timeline import NodeResources, Timeline, least

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
