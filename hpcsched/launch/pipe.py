"""The interface of a link to its connection: bytes in, bytes out, an end with a reason.

`Dial` opens one: `ssh` over a network, `local` on this machine. Both block. A link runs them in its
own threads and ends them from outside through `Abort`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from hpcsched.errors import UnavailableError


class LinkError(UnavailableError):
    """The node cannot be reached, or is lost; the text says why and what to do."""


class Pipe(Protocol):
    """Bytes to and from the command that runs on the node."""

    def receive(self, limit: int) -> bytes:
        """Wait for at most `limit` bytes and return them; b"" is the end."""

    def send_all(self, data: bytes) -> None:
        """Wait until all of `data` is accepted. Raises OSError once the pipe has ended."""

    def epitaph(self) -> str:
        """Return, after the end, how the command ended and its last output."""

    def close(self) -> None:
        """End the command and free its resources."""


class Abort:
    """Ends a connection or an attempt from any thread, without waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._enders: list[Callable[[], None]] = []
        self._done = False

    def also(self, end: Callable[[], None]) -> None:
        """Call `end` at the abort, or now if it has already happened. `end` must not block."""
        with self._lock:
            if not self._done:
                self._enders.append(end)
                return
        end()

    def now(self) -> None:
        """Abort. A second call does nothing."""
        with self._lock:
            self._done = True
            enders, self._enders = self._enders, []
        for end in reversed(enders):
            end()


class LinkProgress(Protocol):
    """Receives the current stage, for the text of a timeout; each stage has the whole limit."""

    def __call__(self, stage: str) -> None: ...


class Dial(Protocol):
    """Opens a pipe to the bootstrap on a node. Raises LinkError."""

    def __call__(self, abort: Abort, progress: LinkProgress) -> Pipe: ...
