"""Carry bytes between the gateway and a job: steps, and connections through a step.

A step is opened at the controller's steps socket with the key that the API gave for it
(`hpcsched.controller.requests.reaches`). It knows neither HTTP nor terminals nor users.

Rules: a peer that does not read delays only its own connection. What waits in memory is bounded: of a connection `WINDOW` in
each direction, of a step `INPUT_WINDOW` besides. If a step ends, all its connections end with the reason.

Sources: the launch protocol in hpcnode.wire.protocol; the frames of hpcnode.commands.tunnel.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from hpcnode.commands.step_client import INPUT_WINDOW
from hpcnode.commands.tunnel import CLOSE, COUNT, DATA, OPEN, READY, TAKEN, WINDOW, TunnelError, frame_of, frames
from hpcnode.wire import protocol
from hpcsched.client.aio import connected
from hpcsched.gateway.upstream import is_controllers

OPEN_S = 30.0  # for a step to start and be ready
PIECE_BYTES = 64 << 10
MOST_CONNECTIONS = 64  # through one step
MAX_SAID_CHARS = 500  # of a step's standard error


SILENT_S = 3600.0  # of a WebSocket in both directions
WRITE_S = 60.0  # without progress of a reader


class StreamError(Exception):
    """A step or a connection has ended, or cannot be opened. The text is for the user."""


async def until_one_ends(
    directions: Sequence[Coroutine[Any, Any, None]], heard_s: Callable[[], float]
) -> list[BaseException | None]:
    """Run both directions of a WebSocket until one ends, or both are silent too long.

    Return their results. `heard_s`: when something came last.
    """
    tasks = [asyncio.create_task(one) for one in directions]
    try:
        done: set[asyncio.Task[None]] = set()
        while not done and time.monotonic() - heard_s() < SILENT_S:
            done, _ = await asyncio.wait(tasks, timeout=WRITE_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    return results


class JobStep(asyncio.Protocol):
    """A step with one task.

    Its output goes to `on_output`, the reason of its end to `on_end`, once. `holds`: more output comes only after `acknowledge`.
    """

    def __init__(self, key: str, path: str, *, holds: bool = False) -> None:
        self._key, self._path, self._holds = key, path, holds
        self.on_output: Callable[[bytes], None] = lambda data: None
        self.on_end: Callable[[str], None] = lambda why: None
        self.why_over: str | None = None
        self._framer = protocol.Framer()
        self._token = ""
        self._received = {1: 0, 2: 0}  # by descriptor
        self._said = b""
        self._kept = bytearray()  # input that the task has not taken
        self._sent = 0
        self._room = asyncio.Event()
        self._room.set()

    @classmethod
    async def open(cls, path: str, key: str, *, holds: bool = False) -> JobStep:
        """Return the step of a key. Raises StreamError."""
        loop = asyncio.get_running_loop()
        try:
            sock = await connected(path, OPEN_S)
            _, step = await loop.create_unix_connection(lambda: cls(key, path, holds=holds), sock=sock)
        except OSError as error:
            raise StreamError(f"cannot reach the job: the controller is not reached: {error.strerror}") from None
        return step

    # ----- for users of the step

    def send(self, data: bytes) -> None:
        """Send input to the task. Wait for `drained` before more than a little."""
        if self.why_over is not None:
            return
        self._kept += data
        self._sent += len(data)
        if len(self._kept) >= INPUT_WINDOW:
            self._room.clear()
        if self._token:
            self._send_input(self._sent - len(data), data)

    async def drained(self) -> None:
        """Wait until the task has taken most of its input, or has ended."""
        await self._room.wait()

    def acknowledge(self) -> None:
        """Tell the node that the output was taken, so that more may come."""
        if self.why_over is None and self._token:
            for fd, offset in self._received.items():
                self._send(protocol.OutputAck(self._token, 0, fd, offset))

    def close(self) -> None:
        """End the step."""
        self._over("it was closed")

    # ----- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass of it
        if not is_controllers(transport.get_extra_info("socket"), self._path):
            self._over("the controller's socket is served by another account")
            return
        self._send(protocol.PreparedStep(self._key))

    def connection_lost(self, error: Exception | None) -> None:
        self._over("the connection to the controller was lost")

    def data_received(self, data: bytes) -> None:
        try:
            for message, blob in self._framer.feed(data):
                self._take(message, blob)
        except protocol.WireError as error:
            self._over(str(error))

    def _take(self, message: protocol.Message, blob: bytes) -> None:
        match message:
            case protocol.Output():
                self._take_output(message, blob)
            case protocol.InputAck():
                del self._kept[: max(0, message.offset - (self._sent - len(self._kept)))]
                if len(self._kept) < INPUT_WINDOW:
                    self._room.set()
            case protocol.StepStarted() if not self._token:
                self._token = message.tasks[0][3]
                self._send_input(0, bytes(self._kept))
            case protocol.StepWaiting() if self._token:  # its node is back: what was on its way may be lost
                self._ask_again()
                self._send_input(self._sent - len(self._kept), bytes(self._kept))
            case protocol.StepEnded():
                self._over(message.error or self._said.decode("utf-8", "replace").strip() or "it has ended")
            case protocol.Goodbye():
                self._over(message.why)
            case protocol.CloseStream():
                self._over("the controller has closed it")

    def _take_output(self, message: protocol.Output, blob: bytes) -> None:
        if message.task == protocol.ALL_TASKS or message.fd not in self._received:
            return
        begun = self._received[message.fd]
        if message.offset > begun:
            self._ask_again()
            return
        new = blob[begun - message.offset :]
        self._received[message.fd] += len(new)
        if message.fd == 2:
            self._said = (self._said + new)[-MAX_SAID_CHARS:]
        elif new:
            self.on_output(new)
        if self.why_over is None and not self._holds:
            self._send(protocol.OutputAck(self._token, message.task, message.fd, self._received[message.fd]))

    def _ask_again(self) -> None:
        for fd, offset in self._received.items():
            self._send(protocol.OutputAck(self._token, 0, fd, offset, again=True))

    def _send_input(self, offset: int, data: bytes) -> None:
        for begin in range(0, len(data), PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            self._send(protocol.Input(token=self._token, task=0, offset=offset + begin, eof=False), piece)

    def _send(self, message: protocol.Message, blob: bytes = b"") -> None:
        self._transport.write(protocol.encode(message, blob))

    def _over(self, why: str) -> None:
        if self.why_over is not None:
            return
        self.why_over = why
        self._room.set()
        self._transport.close()
        self.on_end(why)


class JobTunnel:
    """Connections to what a job serves, through one step.

    `on_idle` is called when the last connection has closed, `on_end` when the step has ended.
    """

    def __init__(self, on_idle: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._on_idle, self._on_end = on_idle, on_end
        self._step: JobStep | None = None
        self._data = bytearray()
        self._connections: dict[int, TunnelConnection] = {}
        self._last = 0
        self._opened = asyncio.Event()
        self.why_over: str | None = None

    @property
    def is_idle(self) -> bool:
        return not self._connections

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return len(self._connections)

    async def open(self, path: str, key: str) -> None:
        """Open the step of a key. Raises StreamError."""
        step = await JobStep.open(path, key)
        if self.why_over is not None:  # closed meanwhile
            step.close()
            return
        self._step, step.on_output, step.on_end = step, self._feed, self.end
        if step.why_over is not None:
            self.end(step.why_over)

    async def opened(self) -> None:
        """Wait until the node takes connections. Raises StreamError."""
        try:
            async with asyncio.timeout(OPEN_S):
                await self._opened.wait()
        except TimeoutError:
            self.end(f"the node has not started the step within {OPEN_S:g} s")
        if self.why_over is not None:
            raise StreamError(f"cannot reach the job: {self.why_over}")

    def connect(self) -> TunnelConnection:
        """Return a new connection to what the job serves. Raises StreamError."""
        if self.why_over is not None:
            raise StreamError(f"cannot reach the job: {self.why_over}")
        if len(self._connections) >= MOST_CONNECTIONS:
            raise StreamError(f"cannot reach the job now: {MOST_CONNECTIONS} connections to it are open")
        self._last += 1
        made = self._connections[self._last] = TunnelConnection(self, self._last)
        self.send(self._last, OPEN)
        return made

    def end(self, why: str) -> None:
        """End the step and all connections."""
        if self.why_over is not None:
            return
        self.why_over = why
        self._opened.set()
        for connection in list(self._connections.values()):
            connection.ended(why)
        self._connections.clear()
        if self._step is not None:
            self._step.close()
        self._on_end()

    # ----- for connections

    def send(self, number: int, kind: bytes, body: bytes = b"") -> None:
        if self._step is not None:
            self._step.send(frame_of(number, kind, body))

    async def drained(self) -> None:
        if self._step is not None:
            await self._step.drained()

    def forget(self, number: int, *, tell: bool) -> None:
        """Remove a connection, and `tell` the node unless that has closed it."""
        if self._connections.pop(number, None) is None:
            return
        if tell:
            self.send(number, CLOSE)
        if not self._connections and self.why_over is None:
            self._on_idle()

    # ----- frames of the node, which may send anything

    def _feed(self, data: bytes) -> None:
        self._data += data
        try:
            for number, kind, body in frames(self._data):
                if self.why_over is not None:
                    return
                self._take(number, kind, body)
        except TunnelError:
            self.end("the node sends what is no frame")

    def _take(self, number: int, kind: bytes, body: bytes) -> None:
        connection = self._connections.get(number)
        if kind == READY:
            self._opened.set()
        elif connection is None:
            return
        elif kind == DATA:
            if not connection.received(body):
                self.end("the node sends more than it may")
        elif kind == TAKEN and len(body) == COUNT.size:
            connection.delivered(COUNT.unpack(body)[0])
        elif kind == CLOSE:
            self.forget(number, tell=False)
            connection.ended(body.decode("utf-8", "replace")[:MAX_SAID_CHARS])


class TunnelConnection:
    """One connection to what a job serves."""

    def __init__(self, tunnel: JobTunnel, number: int) -> None:
        self._tunnel, self._number = tunnel, number
        self._parts: deque[bytes] = deque()
        self._unread = 0
        self._undelivered = 0
        self._has_data, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self.why_ended: str | None = None  # "": the job has closed it

    async def read(self) -> bytes:
        """Return the next bytes, b"" at the end."""
        while not self._parts:
            if self.why_ended is not None:
                return b""
            self._has_data.clear()
            await self._has_data.wait()
        data = self._parts.popleft()
        self._unread -= len(data)
        if self.why_ended is None:
            self._tunnel.send(self._number, TAKEN, COUNT.pack(len(data)))
        return data

    async def write(self, data: bytes) -> None:
        """Send bytes as fast as the job takes them. Raises StreamError."""
        for begin in range(0, len(data), PIECE_BYTES):
            await self._tunnel.drained()
            await self._has_room.wait()
            if self.why_ended is not None:
                raise StreamError(f"cannot send more to the job: {self.why_ended or 'it has closed the connection'}")
            piece = data[begin : begin + PIECE_BYTES]
            self._undelivered += len(piece)
            if self._undelivered >= WINDOW:
                self._has_room.clear()
            self._tunnel.send(self._number, DATA, piece)

    def close(self) -> None:
        """Close the connection."""
        self._tunnel.forget(self._number, tell=True)
        self.ended("it was closed")

    # ----- for the tunnel

    def received(self, data: bytes) -> bool:
        """Keep data of the job; return False if that is more than the window allows."""
        self._parts.append(data)
        self._unread += len(data)
        self._has_data.set()
        return self._unread <= 2 * WINDOW and len(self._parts) <= WINDOW // 16

    def delivered(self, count: int) -> None:
        self._undelivered -= count
        if self._undelivered < WINDOW:
            self._has_room.set()

    def ended(self, why: str) -> None:
        if self.why_ended is None:
            self.why_ended = why
        self._has_data.set()
        self._has_room.set()
