"""When the next tick is: at the earliest of the times that were asked for. Knows the event loop, not what a tick does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Has `tick` called by the event loop when it was asked for, once for all who asked for the same time or a later one."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._timer: asyncio.TimerHandle | None = None
        self._soon = False

    def wake(self, after_s: float) -> None:
        """Tick as soon as the loop has taken in what is there now, or in `after_s` seconds, whichever is earlier."""
        loop = asyncio.get_running_loop()
        if after_s <= 0.0:
            if not self._soon:
                self._soon = True
                loop.call_soon(self._go)
            return
        due = loop.time() + after_s
        if self._timer is None or self._timer.when() > due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(due, self._rang)

    def _rang(self) -> None:
        self._timer = None
        self.wake(0.0)

    def _go(self) -> None:
        self._soon = False
        self._tick()
