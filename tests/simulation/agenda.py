"""The simulated clock, and what is to happen next, in order of time; ties in the order of their making."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Process:
    """Something that can be killed: what it was going to do does not happen then."""

    kind = "?"
    alive = True

    def __str__(self) -> str:
        return self.kind


class Crash(BaseException):
    """The running process is killed here. Not an Exception: production code must not be able to catch it."""

    def __init__(self, point: str) -> None:
        super().__init__(point)
        self.point = point


class Agenda:
    """Calls, each owned by a process (or by nobody: the world itself), at their times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.steps = 0
        self.running: Process | None = None
        self.last: Process | None = None  # whose step was the last
        self._queue: list[tuple[float, int, Process | None, Callable[..., Any], tuple[Any, ...]]] = []
        self._made = 0

    def at(self, at_s: float, owner: Process | None, call: Callable[..., Any], *args: Any) -> None:
        """Call at that time, unless the owner is dead by then."""
        self._made += 1
        heapq.heappush(self._queue, (max(at_s, self.now_s), self._made, owner, call, args))

    def later(self, delay_s: float, owner: Process | None, call: Callable[..., Any], *args: Any) -> None:
        """Call after `delay_s`, unless the owner is dead by then."""
        self.at(self.now_s + delay_s, owner, call, *args)

    def step(self) -> Crash | None:
        """Do the next thing; return the crash that it ended in, if it did. Raises IndexError if there is nothing to do."""
        at_s, _, owner, call, args = heapq.heappop(self._queue)
        if owner is not None and not owner.alive:
            return None
        self.now_s = at_s
        self.steps += 1
        self.running = self.last = owner
        try:
            call(*args)
        except Crash as crash:
            return crash
        finally:
            self.running = None
        return None

    @property
    def next_at_s(self) -> float | None:
        """When the next thing is to happen."""
        return self._queue[0][0] if self._queue else None
