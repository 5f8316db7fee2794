"""Long work that cannot be cut into steps by itself, done in turns: a thread does it, and runs only while it is waited for.

Never do both at once, so nothing needs a lock and the outcome is that of a plain call. The work says between its parts that it
can be interrupted; it is, once a turn has lasted long enough. One that nobody goes on with ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Semaphore, Thread

Pause = Callable[[], None]


class _DroppedError(BaseException):
    """Nobody waits for the work any more. Not for `except Exception` to catch."""


class Turns:
    """`work` is called with a function to call between its parts. A turn lasts `turn_s` of the clock, or a part longer."""

    def __init__(self, work: Callable[[Pause], None], monotonic_s: Callable[[], float], turn_s: float) -> None:
        self._work = work
        self._monotonic_s = monotonic_s
        self._turn_s = turn_s
        self._until_s = 0.0
        self._go, self._stopped = Semaphore(0), Semaphore(0)
        self._ended = self._dropped = False
        self._error: BaseException | None = None

    def steps(self) -> Iterator[None]:
        """Take a turn at each step; raise at the last one what the work raised."""
        thread = Thread(target=self._run, name="plan", daemon=True)
        thread.start()
        try:
            while self._turn():
                yield
        finally:
            self._dropped = True
            self._go.release()
            thread.join()
        if self._error is not None:
            raise self._error

    def _turn(self) -> bool:
        """Let the work go on for a while; say whether there is more of it."""
        self._until_s = self._monotonic_s() + self._turn_s
        self._go.release()
        self._stopped.acquire()
        return not self._ended

    def _run(self) -> None:
        try:
            self._wait()
            self._work(self._pause)
        except _DroppedError:
            pass
        except BaseException as error:
            self._error = error  # raised where the work is waited for
        self._ended = True
        self._stopped.release()

    def _pause(self) -> None:
        if self._monotonic_s() >= self._until_s:
            self._stopped.release()
            self._wait()

    def _wait(self) -> None:
        self._go.acquire()
        if self._dropped:
            raise _DroppedError
