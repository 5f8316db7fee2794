"""What a link needs of the way onto a node, whichever way it is: bytes in, bytes out, an end that says why.

`Dial` opens one: `ssh` over a network, `local` on this machine. Both block; a link runs them in threads of its own and
ends them from outside through `Abort`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from hpcsched.errors import UnavailableError


class LinkError(UnavailableError):
    """The node cannot be reached, or no longer; the text says why and what to do."""


class Pipe(Protocol):
    """Bytes to and from the command that runs on the node."""

    def receive(self, limit: int) -> bytes:
        """Wait for at most `limit` bytes and return them; b"" is the end."""

    def send_all(self, data: bytes) -> None:
        """Wait until all of `data` is taken. Raises OSError once the pipe has ended."""

    def epitaph(self) -> str:
        """After the end: how the command ended, and the last it had to say."""

    def close(self) -> None:
        """End it and free what it holds."""


class Abort:
    """Ends a connection, or the attempt at one, from any thread, without waiting for anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._enders: list[Callable[[], None]] = []
        self._done = False

    def also(self, end: Callable[[], None]) -> None:
        """Have `end` called at the abort: at once if that has been already. It must not block."""
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
    """Told what is being done at the moment, so that a timeout can name it; each stage has the whole time limit."""

    def __call__(self, stage: str) -> None: ...


class Dial(Protocol):
    """Opens a pipe to the bootstrap on a node. Raises LinkError."""

    def __call__(self, abort: Abort, progress: LinkProgress) -> Pipe: ...
