"""Intervals of time, ``[from, until)``: lists of them are ascending, and no two in one list overlap."""

from __future__ import annotations

from collections.abc import Sequence

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
