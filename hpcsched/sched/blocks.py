"""Intervals in which nodes are set aside (reservations): closed to all but the jobs that were let in.

Who may use a reservation is judged before (`eligible`); here is only when which nodes are open to whom.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpcsched.model.ids import NodeName
from hpcsched.sched.intervals import NEVER_S, Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """These nodes are set aside over ``[start_s, end_s)`` for the jobs of reservation `name`."""

    name: str
    nodes: tuple[NodeName, ...]
    start_s: float
    end_s: float


def closed_to(reservation: str, blocks: Iterable[Block], index: Mapping[NodeName, int]) -> dict[int, list[Interval]]:
    """Return when which nodes (by their `index`) are closed to the jobs of `reservation` (empty: to those of none)."""
    own: dict[int, list[Interval]] = {node: [] for node in index.values()} if reservation else {}
    closed: dict[int, list[Interval]] = {}
    for block in blocks:
        for name in block.nodes:
            node = index.get(name)
            if node is not None:
                into = own if block.name == reservation else closed
                into.setdefault(node, []).append((block.start_s, block.end_s))
    for node, open_s in own.items():
        closed.setdefault(node, []).extend(_outside(sorted(open_s)))
    return closed


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
