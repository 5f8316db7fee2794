"""When planning has its turn: it takes a quarter of the time, however much the world gives it to do.

A plan is made in slices. After each of them others have as much time as it took; after the last one three times as long as the
whole plan took, with the picture of the world that was made for it and all that was made of its outcome.
"""

from __future__ import annotations

from collections.abc import Callable

PAUSE_MAX_S = 0.5


class Pace:
    """The turns of planning on a clock that knows no steps."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._next_s = 0.0
        self._began_s = 0.0
        self._spent_s = 0.0  # on the plan under way

    def begin_turn(self) -> float:
        """Begin a turn and return 0.0, or return in how many seconds it is time for one."""
        self._began_s = self._monotonic_s()
        return max(0.0, self._next_s - self._began_s)

    def turn_s(self) -> float:
        """Return for how long the turn has lasted."""
        return self._monotonic_s() - self._began_s

    def end_turn(self, *, whole: bool = False) -> float:
        """End the turn, after which the plan is `whole` or not, and return in how many seconds the next one may begin."""
        pause_s = self.turn_s()
        self._spent_s += pause_s
        if whole:
            pause_s, self._spent_s = min(3 * self._spent_s, PAUSE_MAX_S), 0.0
        self._next_s = self._monotonic_s() + pause_s
        return pause_s
