"""A request to stop after the current step, with a checkpoint.

SIGTERM, SIGUSR1, or the script's call of `run.stop()`.

Rules: the handler only records the signal; a second one has no further effect (SIGKILL follows if the step takes too
long).  Python delivers signals to the main thread; in another thread, for example of a notebook, the handlers are not
changed.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """A context that records stop signals, and restores the old handlers at its end."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.by_script = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
