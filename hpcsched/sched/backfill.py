"""The earliest time at which a gang that has tasks or GPUs to spread will fit, if all that runs lasts to its limit.

Of a gang whose shares are all alike `Openings` alone can tell; here each node's seat counts, what it could take over the
window ``[t, t + limit)``. As `t` moves on a seat grows only when a step of the node's time begins, or the node opens at all;
it shrinks once the window reaches a step with less. So only the times of growth are tried, from where enough nodes could take
something, and only the seats of nodes that changed are worked out anew.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import heappop, heappush

from hpcsched.sched.gang import choose
from hpcsched.sched.openings import Openings
from hpcsched.sched.placement import Part, Seat, parts_of, seat_of
from hpcsched.sched.request import Shape
from hpcsched.sched.timeline import Timeline


def earliest_start(
    timeline: Timeline, shape: Shape, openings: Openings, required: frozenset[int], limit_s: float, from_s: float
) -> tuple[float, list[Part]] | None:
    """Return when, `from_s` at the earliest, `shape` can run for `limit_s`, and what it would take; None: never.

    It takes nodes that have least free now, so that what is free now stays open to others meanwhile.
    """
    window = _Window(timeline, shape, limit_s)
    coming = openings.beginning_after(from_s, limit_s)
    opening = next(coming, None)
    for until_s, node in openings.open_at(from_s, limit_s):
        window.open(node, from_s, until_s)
    at_s = from_s
    while True:
        chosen = choose(shape, sorted(window.seats.values()), required) if window.may_do() else None
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
    """The seats of the nodes over a window that moves on in time."""

    def __init__(self, timeline: Timeline, shape: Shape, limit_s: float) -> None:
        self.seats: dict[int, Seat] = {}
        self.grows: list[tuple[float, int]] = []  # when the seat of which node may get larger
        self._shrinks: list[tuple[float, int]] = []  # after which time that of which node may get smaller
        self._until_s: dict[int, float] = {}  # so long the node is open
        self._tasks = 0
        self._timeline = timeline
        self._shape = shape
        self._limit_s = limit_s

    def open(self, node: int, at_s: float, until_s: float) -> None:
        """Let `node` take part from now on: it could hold something until `until_s`."""
        self._until_s[node] = until_s
        self._see(node, at_s)

    def move_to(self, at_s: float) -> None:
        """Let the window begin at `at_s`."""
        changed: set[int] = set()
        while self.grows and self.grows[0][0] <= at_s:
            changed.add(heappop(self.grows)[1])
        while self._shrinks and self._shrinks[0][0] < at_s:
            changed.add(heappop(self._shrinks)[1])
        for node in changed:
            if node in self._until_s:
                self._see(node, at_s)

    def may_do(self) -> bool:
        """Say quickly that there are too few seats, before they are sorted."""
        shape = self._shape
        return len(self.seats) >= shape.nodes_min and (shape.ntasks is None or self._tasks >= shape.ntasks)

    def _see(self, node: int, at_s: float) -> None:
        """Work out the node's seat anew, and when it may change next."""
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
