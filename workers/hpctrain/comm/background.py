"""What is under way while the rank does something else, and a thread in which calls that wait are made in their order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from hpctrain.errors import TrainError


class Work:
    """A sum that is under way."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: Exception | None = None

    def wait(self) -> None:
        """This will return when the sum is there.

        Raises:
            TrainError: it will never be.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error

    def end(self, error: Exception | None = None) -> None:
        """This will let the one who waits go on: with the sum, or with the reason why there is none."""
        self._error = error
        self._over.set()


def done() -> Work:
    """This will give what is over already."""
    work = Work()
    work.end()
    return work


class Background:
    """One thread; it starts with the first call."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Work] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, call: Callable[[], None]) -> Work:
        """This will make a call after those that were begun before it; after one that failed none is made."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
            self._thread.start()
        work = Work()
        self._calls.put((call, work))
        return work

    def close(self) -> None:
        """This will end the thread after what was begun."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        failed: Exception | None = None
        while (item := self._calls.get()) is not None:
            call, work = item
            if failed is None:
                try:
                    call()
                except Exception as error:  # the outermost edge of a thread: it is raised where the sum is waited for
                    failed = error if isinstance(error, TrainError) else TrainError(f"cannot sum: {error!r}")
            work.end(failed)
