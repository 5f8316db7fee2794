"""The wish to stop after the present step, with a checkpoint: SIGTERM or SIGUSR1, or the script's own word.

Rules: the handler only notes the signal; a second one of the same kind does nothing more (SIGKILL is what follows when
we are too slow).  Python lets the main thread alone handle signals: in another one (of a notebook, say) they are left as
they are.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Notes a stop signal while it is entered as a context; old handlers come back afterwards."""

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
