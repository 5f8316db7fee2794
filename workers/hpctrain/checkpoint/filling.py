"""How far a buffer is filled, while one fills it in order and others read what is there already.

Does not know what is in it.
Rules: memory that nobody is filling is full; whoever waits for what will not come any more gets an error.
"""

from __future__ import annotations

import sys
import threading

from hpctrain.errors import PublishError

FULL = sys.maxsize
BROKEN = -1  # it will not be filled


class Filling:
    """Counts the bytes that are there, from the beginning."""

    def __init__(self) -> None:
        self._there = FULL
        self._changed = threading.Condition()

    def begin(self) -> None:
        """This will forget what is there: it is filled anew."""
        self.reach(0)

    def reach(self, there: int) -> None:
        """This will let those go on who wait for these bytes; `FULL` and `BROKEN` are the ends."""
        with self._changed:
            self._there = there
            self._changed.notify_all()

    def wait(self, until: int) -> None:
        """This will return when the bytes before `until` are there; `FULL`: when all are.

        Raises:
            PublishError: they will not be.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._there >= until or self._there == BROKEN)
            if self._there == BROKEN:
                raise PublishError("the state was not copied to its end")
