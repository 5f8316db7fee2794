"""Reservations: nodes that only some users may use over an interval, which may repeat.

A repeating reservation is stored as its current or next occurrence, and advances when that is over. Days are those of the local
calendar: a reservation that begins at nine begins at nine also after the clocks change.

*Reserved intervals* close nodes to all jobs outside a reservation. A job can use the nodes of its reservation only during that
reservation, and not while another reservation has them. If its reservation is for maintenance or has the flag OVERLAP, other
reservations do not close any node to it. Permission to use a reservation is checked at submission.

Knows nothing of waiting jobs (`hpcsched.sched.queues`) or of who may create one. Source: scontrol(1),
"RESERVATIONS"; reservations.html of Slurm's documentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from hpcsched.model.ids import NodeName

Interval = tuple[float, float]  # [start, end) in Unix seconds
NEVER_S = float("inf")


class Flag(StrEnum):
    MAINT = "MAINT"  # for maintenance: may overlap others, and its nodes are shown as MAINT
    OVERLAP = "OVERLAP"  # may overlap others
    IGNORE_JOBS = "IGNORE_JOBS"  # is made although jobs run into it
    DAILY = "DAILY"
    WEEKLY = "WEEKLY"
    WEEKDAY = "WEEKDAY"  # Monday to Friday
    WEEKEND = "WEEKEND"  # Saturday and Sunday


REPEATS = frozenset({Flag.DAILY, Flag.WEEKLY, Flag.WEEKDAY, Flag.WEEKEND})
MAY_OVERLAP = frozenset({Flag.MAINT, Flag.OVERLAP})
MAX_PERIOD_S = 7 * 86_400  # every repeating reservation comes again within so long (an hour more when clocks change)
# A job that overlaps any occurrence of a repeating reservation overlaps one within two periods, regardless of its length.
HORIZON_S = 2 * MAX_PERIOD_S + 86_400
_SATURDAY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Nodes over ``[start_s, end_s)``.

    Whole nodes: they were named, or chosen when it was made, and stay the same.
    """

    name: str
    start_s: int
    end_s: int
    nodes: tuple[NodeName, ...]
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    partition: str = ""
    features: str = ""
    node_count: int = 0  # as asked for; 0: the nodes were named
    flags: tuple[Flag, ...] = ()
    made_by: str = ""
    made_at_s: float = 0.0

    @property
    def duration_s(self) -> int:
        return self.end_s - self.start_s

    @property
    def repeats(self) -> bool:
        return not REPEATS.isdisjoint(self.flags)

    @property
    def may_overlap(self) -> bool:
        return not MAY_OVERLAP.isdisjoint(self.flags)

    @property
    def is_maintenance(self) -> bool:
        return Flag.MAINT in self.flags

    def is_active(self, now_s: float) -> bool:
        """Say whether its current occurrence is active."""
        return self.start_s <= now_s < self.end_s

    def is_over(self, now_s: float) -> bool:
        """Say whether it is over and does not repeat."""
        return self.end_s <= now_s and not self.repeats


def may_use(reservation: Reservation, user: str, account: str) -> bool:
    """Say whether jobs of `user` charged to `account` may run in it.

    No users, or no accounts, means all.
    """
    if reservation.users and user not in reservation.users:
        return False
    return not reservation.accounts or account in reservation.accounts


def at(reservation: Reservation, now_s: float) -> Reservation:
    """Return the reservation at its current or next occurrence; unchanged if it is over."""
    if not reservation.repeats or reservation.end_s > now_s:
        return reservation
    start_s = reservation.start_s
    while start_s + reservation.duration_s <= now_s:
        start_s = _next_start_s(reservation, start_s)
    return replace(reservation, start_s=start_s, end_s=start_s + reservation.duration_s)


def occurrences(reservation: Reservation, from_s: float, until_s: float) -> Iterator[Interval]:
    """Yield the reservation's intervals that overlap [`from_s`, `until_s`), in order."""
    here = at(reservation, from_s)
    start_s = here.start_s
    while start_s < until_s and start_s + here.duration_s > from_s:
        yield start_s, start_s + here.duration_s
        if not here.repeats:
            return
        start_s = _next_start_s(here, start_s)


def clash(reservation: Reservation, other: Reservation, from_s: float) -> Interval | None:
    """Return the first interval after `from_s` in which both reserve a common node, or None.

    For two that repeat, a fortnight is enough.
    """
    if set(reservation.nodes).isdisjoint(other.nodes):
        return None
    latest_s = min((last_s for last_s in (_last_s(reservation), _last_s(other)) if last_s is not None), default=None)
    until_s = latest_s if latest_s is not None else max(reservation.start_s, other.start_s, from_s) + 2 * MAX_PERIOD_S
    others = list(occurrences(other, from_s, until_s))
    for start_s, end_s in occurrences(reservation, from_s, until_s):
        for other_start_s, other_end_s in others:
            if start_s < other_end_s and other_start_s < end_s:
                return max(start_s, other_start_s), min(end_s, other_end_s)
    return None


def first_day(reservation: Reservation) -> Reservation:
    """Return the reservation moved to the first day on which one that repeats so can be."""
    if _is_day(reservation, datetime.fromtimestamp(reservation.start_s)):
        return reservation
    start_s = _next_start_s(reservation, reservation.start_s)
    return replace(reservation, start_s=start_s, end_s=start_s + reservation.duration_s)


def _last_s(reservation: Reservation) -> float | None:
    return None if reservation.repeats else reservation.end_s


def _next_start_s(reservation: Reservation, start_s: float) -> int:
    """Return when the occurrence after that of `start_s` begins, at the same local time."""
    begins = datetime.fromtimestamp(start_s)
    step = timedelta(days=7 if Flag.WEEKLY in reservation.flags else 1)
    begins += step
    while not _is_day(reservation, begins):
        begins += step
    return int(begins.timestamp())  # int: a number


def _is_day(reservation: Reservation, begins: datetime) -> bool:
    """Say whether the reservation has an occurrence on the weekday of `begins`."""
    if Flag.WEEKDAY in reservation.flags:
        return begins.weekday() < _SATURDAY
    return Flag.WEEKEND not in reservation.flags or begins.weekday() >= _SATURDAY


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
