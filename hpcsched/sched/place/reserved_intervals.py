"""Intervals in which nodes are set aside (reservations): closed to all but the jobs that were let in.

Who may use a reservation is judged when a job is submitted; here is only when which nodes are open to whom. Of nodes that two
reservations have in common a job may use those of its own alone, unless its own is for maintenance or says OVERLAP: then no
other keeps anything from it. Source: reservations.html of Slurm's documentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpcsched.model.ids import NodeName
from hpcsched.model.reservation import MAX_PERIOD_S, Reservation, occurrences

# ----- intervals of time, ``[from, until)``: lists of them are ascending, and no two in one list overlap


NEVER_S = float("inf")

Interval = tuple[float, float]


def without(spans: Sequence[Interval], closed: Sequence[Interval]) -> list[Interval]:
    """Return `spans` without the intervals `closed` (these may overlap, and come in any order)."""
    left = list(spans)
    for closed_s, opens_s in closed:
        kept: list[Interval] = []
        for from_s, until_s in left:
            if until_s <= closed_s or from_s >= opens_s:
                kept.append((from_s, until_s))
                continue
            if from_s < closed_s:
                kept.append((from_s, closed_s))
            if opens_s < until_s:
                kept.append((opens_s, until_s))
        left = kept
    return left


# A job that starts within one period of what repeats, however long it is, meets an occurrence within another if it meets any.
HORIZON_S = 2 * MAX_PERIOD_S + 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedInterval:
    """These nodes are set aside over ``[start_s, end_s)`` for the jobs of reservation `name`.

    If it `overrides` the others, its jobs are kept from no node of it.
    """

    name: str
    nodes: tuple[NodeName, ...]
    start_s: float
    end_s: float
    overrides: bool = False


def reserved_intervals_of(reservations: Iterable[Reservation], now_s: float) -> tuple[ReservedInterval, ...]:
    """Return the blocks that reservations make from `now_s` on: of those that repeat within the `HORIZON_S`."""
    return tuple(
        ReservedInterval(name=one.name, nodes=one.nodes, start_s=start_s, end_s=end_s, overrides=one.may_overlap)
        for one in reservations
        for start_s, end_s in occurrences(one, now_s, now_s + HORIZON_S if one.repeats else NEVER_S)
    )


def closed_to(
    reservation: str, blocks: Iterable[ReservedInterval], index: Mapping[NodeName, int]
) -> dict[int, list[Interval]]:
    """Return when which nodes (by their `index`) are closed to the jobs of `reservation` (empty: to those of none)."""
    own: dict[int, list[Interval]] = {node: [] for node in index.values()} if reservation else {}
    closed: dict[int, list[Interval]] = {}
    blocks = tuple(blocks)
    alone = any(block.overrides for block in blocks if block.name == reservation)
    for block in blocks:
        for name in () if alone and block.name != reservation else block.nodes:
            node = index.get(name)
            if node is not None:
                into = own if block.name == reservation else closed
                into.setdefault(node, []).append((block.start_s, block.end_s))
    for node, open_s in own.items():
        closed.setdefault(node, []).extend(_outside(sorted(open_s)))
    return closed


class Closed:
    """When which nodes are closed, in one plan: worked out once for each reservation, as jobs ask for it."""

    def __init__(self, blocks: Iterable[ReservedInterval], index: Mapping[NodeName, int]) -> None:
        self._blocks = tuple(blocks)
        self._index = index
        self._known: dict[str, Mapping[int, Sequence[Interval]]] = {}

    def to(self, reservation: str) -> Mapping[int, Sequence[Interval]]:
        """Return `closed_to` the jobs of `reservation`."""
        if reservation not in self._known:
            self._known[reservation] = closed_to(reservation, self._blocks, self._index)
        return self._known[reservation]


def _outside(intervals: list[Interval]) -> list[Interval]:
    """Return all times that are in none of `intervals` (ascending)."""
    outside = []
    from_s = -NEVER_S
    for start_s, end_s in intervals:
        if start_s > from_s:
            outside.append((from_s, start_s))
        from_s = max(from_s, end_s)
    if from_s < NEVER_S:
        outside.append((from_s, NEVER_S))
    return outside
