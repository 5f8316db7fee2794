"""Listen on a unix socket, and accept a few connections in each turn of the event loop.

asyncio's servers accept all waiting connections in one turn, and log a traceback for each one if
the process has no file left. This listener pauses in that case. It closes connections of accounts
that connect too often, before it creates objects for them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from hpcsched.api.connection_limits import Doors
from hpcsched.api.identity import peer_uid
from hpcsched.errors import ConfigError

log = logging.getLogger("hpcsched.api")

BACKLOG = 1024
AT_ONCE = 32  # connections that are accepted in one turn
REFUSED_AT_ONCE = 512  # of accounts that connect too often: other clients wait behind them
PAUSE_S = 0.2  # when no file is left


def listening_socket(path: Path, mode: int) -> socket.socket:
    """Return the API's socket.

    Clients that connect while the database is read must wait, not be refused.
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot serve at {path}: {error.strerror or error}") from None
    path.chmod(mode)
    listener.listen(BACKLOG)
    return listener


class Listener:
    """Serves each connection with its own protocol object, until it is closed."""

    def __init__(
        self,
        sock: socket.socket,
        protocol_of: Callable[[], asyncio.BaseProtocol],
        doors: Doors,
        refusal: Callable[[int], bytes],
    ) -> None:
        """Listen on `sock`; `refusal` is the answer to accounts that connect too often."""
        self._sock = sock
        self._protocol_of = protocol_of
        self._doors = doors
        self._refusal = refusal
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more connections."""
        if self._closed:
            return
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        else:
            self._loop.remove_reader(self._sock.fileno())
        for task in self._tasks:
            task.cancel()

    def _accept(self) -> None:
        taken = 0
        for _ in range(REFUSED_AT_ONCE):
            if taken == AT_ONCE:
                return
            try:
                sock = self._accepted()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("cannot take a connection: %s; trying again", error.strerror)
                self._loop.remove_reader(self._sock.fileno())
                self._pause = self._loop.call_later(PAUSE_S, self._again)
                return
            taken += self._take(sock)

    def _accepted(self) -> socket.socket:
        """Return the next connection.

        `socket.accept` takes 1.5 times as long, which delays other clients in a flood.
        """
        fd, _ = self._sock._accept()  # type: ignore[attr-defined]
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd)

    def _again(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _take(self, sock: socket.socket) -> bool:
        """Serve or refuse the connection; return whether it is served."""
        uid = peer_uid(sock)
        if not self._doors.lets_in(uid):
            try:
                sock.send(self._refusal(uid), socket.MSG_DONTWAIT)
            except OSError:
                pass  # the client has disconnected
            sock.close()
            return False
        sock.setblocking(False)
        task = self._loop.create_task(self._loop.connect_accepted_socket(self._protocol_of, sock))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return True

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("cannot serve a connection: %s", task.exception())
