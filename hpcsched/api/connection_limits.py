"""Accept connections on a unix socket, and limit what each account may use.

Limits are on files, memory and time of the event loop.

One `SocketLimits` limits the API's socket and the steps socket together. `AnswerSlots` limits how many long answers
of an account are built at once. asyncio's servers accept all waiting connections in one turn of the event loop, and
log a traceback for each one if the process has no file left. `Listener` accepts a few in each turn, and pauses in
that case. It closes connections of accounts that connect too often, before it creates objects for them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from hpcnode.wire.connection_limits import Bounds, ConnectionLimits, Rates
from hpcsched.api.identity import peer_uid
from hpcsched.errors import ConfigError

log = logging.getLogger("hpcsched.api")


MAX_CONNECTIONS = 512  # of one account
UNREAD_BYTES = 32 << 20  # of one account; a single answer may be larger
ALL_UNREAD_BYTES = 64 << 20
UNPARSED_BYTES = 32 << 20  # of one account
ALL_UNPARSED_BYTES = 64 << 20
REQUESTS_PER_S = 50.0
BURST = 500
BYTES_PER_S = 8 << 20  # read from one account
BYTES_AT_ONCE = 8 << 20
READ_BYTES = 16 << 10  # of one connection in one turn of the event loop


def bounds(files: int | None = None) -> Bounds:
    """Return the limits on connections.

    Half of the files that this process may open are reserved for nodes and the database.
    """
    files = files or resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Bounds(
        connections=max(1, min(MAX_CONNECTIONS, files // 8)),
        all_connections=max(1, files // 2),
        unread_bytes=UNREAD_BYTES,
        all_unread_bytes=ALL_UNREAD_BYTES,
        unparsed_bytes=UNPARSED_BYTES,
        all_unparsed_bytes=ALL_UNPARSED_BYTES,
    )


class SocketLimits:
    """Admits connections and counts requests. No limits for root and our own account."""

    def __init__(
        self,
        limits: Bounds | None = None,
        *,
        exempt: frozenset[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = ConnectionLimits(limits or bounds())
        self._exempt = frozenset({0, os.getuid()}) if exempt is None else exempt
        self._clock = clock
        self._bytes = Rates(BYTES_PER_S, BYTES_AT_ONCE, clock)
        self.set_rate(REQUESTS_PER_S, BURST)

    def set_rate(self, per_s: float, burst: float) -> None:
        """Allow every account `burst` requests at once, then `per_s` per second; 0: no limit."""
        self._requests = Rates(per_s, burst, self._clock)
        self._connects = Rates(per_s, burst, self._clock)

    def request_wait_s(self, uid: int, cost: float = 1.0) -> float | None:
        """Count a request, as `cost` requests.

        Return None if it may be answered, else the seconds to wait.
        """
        return None if uid in self._exempt else self._requests.wait_s(uid, cost)

    def pause_s(self, uid: int, size: int) -> float | None:
        """Count bytes that were read.

        Return the seconds for which to pause reading, if the account sends too fast.
        """
        return None if uid in self._exempt else self._bytes.wait_s(uid, size)

    def lets_in(self, uid: int) -> bool:
        """Count a connection, and return whether the account connects slowly enough."""
        return uid in self._exempt or self._connects.wait_s(uid) is None

    def too_often(self, uid: int) -> str:
        """Return the error text for an account that sends requests too often."""
        return (
            f"cannot answer now: uid {uid} asks more than {self._requests.per_s:g} times per second; wait and ask again. "
            "An array, or several jobs submitted at once, count as one"
        )


def read_less(transport: asyncio.Transport) -> None:
    """Limit each read of the connection.

    Many fast senders must not make a turn of the event loop long.
    """
    transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # of asyncio's own transports


def retry_after(wait_s: float) -> str:
    """Return the value of the header Retry-After: whole seconds, at least one."""
    return str(max(1, math.ceil(wait_s)))


class AnswerSlots:
    """Limits how many answers of each account are built at once, so that others come between.

    In total, `most_in_all` are built at once: each may use a time slice in every turn of the event loop.
    """

    def __init__(self, most: int, most_in_all: int) -> None:
        self._most = most
        self._all = asyncio.Semaphore(most_in_all)
        # By uid, with the number of running and waiting answers.
        self._of: dict[int, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def turn(self, uid: int) -> AsyncIterator[None]:
        """Wait for a turn of the account; it lasts until the end of the block."""
        turns, count = self._of.get(uid) or (asyncio.Semaphore(self._most), 0)
        self._of[uid] = turns, count + 1
        try:
            async with turns, self._all:
                try:
                    yield
                finally:
                    await asyncio.sleep(0)  # a hundred short ones must not run in one turn of the loop
        finally:
            _, count = self._of[uid]
            if count == 1:
                del self._of[uid]
            else:
                self._of[uid] = turns, count - 1


# ----- long answers are built in slices, so that other requests are answered in between


SLICE_S = 0.005


class AnswerPauses:
    """Says when a slice is over: then call `await breaks.take()`.

    State may have changed after the break.
    """

    def __init__(self, slice_s: float | None = None) -> None:
        self._slice_s = SLICE_S if slice_s is None else slice_s
        self._until_s = time.monotonic() + self._slice_s

    def due(self) -> bool:
        """Return whether it is time for a break."""
        return time.monotonic() > self._until_s

    async def take(self) -> None:
        """Let other tasks run."""
        await asyncio.sleep(0)
        self._until_s = time.monotonic() + self._slice_s

    async def between(self) -> None:
        """Let other tasks run if it is time for that."""
        if self.due():
            await self.take()


# ----- the listening socket


# In a flood, connections of all accounts wait here. Our clients wait before it, in the order in which they came.
BACKLOG = 32
AT_ONCE = 32  # connections that are accepted in one turn
REFUSED_AT_ONCE = 512  # of accounts that connect too often: other clients wait behind them
ACCEPT_S = 0.005  # in one turn
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
        socket_limits: SocketLimits,
        refusal: Callable[[int], bytes],
    ) -> None:
        """Listen on `sock`; `refusal` is the answer to accounts that connect too often."""
        self._sock = sock
        self._protocol_of = protocol_of
        self._socket_limits = socket_limits
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
        taken, until_s = 0, time.monotonic() + ACCEPT_S
        for _ in range(REFUSED_AT_ONCE):
            if taken == AT_ONCE or time.monotonic() > until_s:
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
        if not self._socket_limits.lets_in(uid):
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
