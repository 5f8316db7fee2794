"""Reserved intervals: nodes that are closed to all jobs outside a reservation.

Permission to use a reservation is checked at submission. This module has only the times at which nodes are open to a
reservation. A job can use the nodes of its reservation only during that reservation, and not while another reservation has
them. If its reservation is for maintenance or has the flag OVERLAP, other reservations do not close any node to it. Source:
reservations.html of Slurm's documentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpcsched.model.ids import NodeName
from hpcsched.model.reservation import MAX_PERIOD_S, Reservation, occurrences

NEVER_S = float("inf")

Interval = tuple[float, float]  # [from, until); lists of intervals are ascending and do not overlap


def without(spans: Sequence[Interval], closed: Sequence[Interval]) -> list[Interval]:
    """Return `spans` without the intervals `closed`, which may overlap and have any order."""
    left = list(spans)
    for closed_s, opens_s in closed:
        open_parts: list[Interval] = []
        for from_s, until_s in left:
            if until_s <= closed_s or from_s >= opens_s:
                open_parts.append((from_s, until_s))
                continue
            if from_s < closed_s:
                open_parts.append((from_s, closed_s))
            if opens_s < until_s:
                open_parts.append((opens_s, until_s))
        left = open_parts
    return left


# A job that overlaps any occurrence of a repeating reservation overlaps one within two periods, regardless of its length.
HORIZON_S = 2 * MAX_PERIOD_S + 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedInterval:
    """The nodes that are reserved over ``[start_s, end_s)`` for reservation `name`.

    If it `overrides` other reservations, they do not close its nodes to its jobs.
    """

    name: str
    nodes: tuple[NodeName, ...]
    start_s: float
    end_s: float
    overrides: bool = False


def reserved_intervals_of(reservations: Iterable[Reservation], now_s: float) -> tuple[ReservedInterval, ...]:
    """Return the reserved intervals from `now_s` on.

    Of repeating reservations, only the intervals within `HORIZON_S` are included.
    """
    return tuple(
        ReservedInterval(name=each.name, nodes=each.nodes, start_s=start_s, end_s=end_s, overrides=each.may_overlap)
        for each in reservations
        for start_s, end_s in occurrences(each, now_s, now_s + HORIZON_S if each.repeats else NEVER_S)
    )


def closed_to(
    reservation: str, intervals: Iterable[ReservedInterval], index: Mapping[NodeName, int]
) -> dict[int, list[Interval]]:
    """Return the intervals in which each node is closed to the jobs of `reservation`.

    Nodes are given by their `index`. "": jobs without a reservation.
    """
    own: dict[int, list[Interval]] = {node: [] for node in index.values()} if reservation else {}
    closed: dict[int, list[Interval]] = {}
    intervals = tuple(intervals)
    alone = any(interval.overrides for interval in intervals if interval.name == reservation)
    for interval in intervals:
        for name in () if alone and interval.name != reservation else interval.nodes:
            node = index.get(name)
            if node is not None:
                into = own if interval.name == reservation else closed
                into.setdefault(node, []).append((interval.start_s, interval.end_s))
    for node, open_s in own.items():
        closed.setdefault(node, []).extend(_outside(sorted(open_s)))
    return closed


class Closed:
    """The intervals in which nodes are closed, during one pass.

    They are computed once for each reservation, when a job needs them.
    """

    def __init__(self, intervals: Iterable[ReservedInterval], index: Mapping[NodeName, int]) -> None:
        self._blocks = tuple(intervals)
        self._index = index
        self._known: dict[str, Mapping[int, Sequence[Interval]]] = {}

    def to(self, reservation: str) -> Mapping[int, Sequence[Interval]]:
        """Return the intervals in which each node is closed to the jobs of `reservation`."""
        if reservation not in self._known:
            self._known[reservation] = closed_to(reservation, self._blocks, self._index)
        return self._known[reservation]


def _outside(intervals: list[Interval]) -> list[Interval]:
    """Return the intervals between and around `intervals` (ascending)."""
    outside = []
    from_s = -NEVER_S
    for start_s, end_s in intervals:
        if start_s > from_s:
            outside.append((from_s, start_s))
        from_s = max(from_s, end_s)
    if from_s < NEVER_S:
        outside.append((from_s, NEVER_S))
    return outside
