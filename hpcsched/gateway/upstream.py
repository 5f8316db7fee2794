"""Send requests to the controller over its unix socket, on connections that are kept open.

It checks who serves the socket, bounds the time and the connections, and knows no routes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import NamedTuple, cast

import httptools

from hpcnode.os.trust import is_made_by
from hpcsched.client.aio import connected

MOST = 400  # connections; the controller allows an account 512
IDLE_S = 20.0  # then a connection is not used again; the controller closes it after 30 s
TIMEOUT_S = 60.0
MAX_ANSWER_BYTES = 256 << 20
_UCRED = struct.Struct("iII")


class UpstreamError(Exception):
    """The controller did not answer. `status`: of our own answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class UpstreamReply(NamedTuple):
    """An answer of the controller."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes


def is_controllers(sock: socket.socket, path: str) -> bool:
    """Return whether the account that serves this socket is the controller's."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return uid in (0, os.getuid()) or is_made_by(path, uid)


class Upstream:
    """The controller's socket."""

    def __init__(self, path: str, most: int = MOST) -> None:
        self._path = path
        self._idle: list[_UpstreamConnection] = []
        self._places = asyncio.Semaphore(most)

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"", timeout_s: float = TIMEOUT_S
    ) -> UpstreamReply:
        """Return the answer to a request. Raises UpstreamError."""
        lines = [f"{method} {path} HTTP/1.1", "host: hpcsched", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        data = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
        try:
            async with asyncio.timeout(timeout_s), self._places:
                return await self._asked(data, may_repeat=method == "GET")
        except TimeoutError:
            raise UpstreamError(504, f"cannot answer: the controller did not answer within {timeout_s:g} s") from None

    async def _asked(self, data: bytes, *, may_repeat: bool) -> UpstreamReply:
        while True:
            connection, is_new = await self._connection()
            try:
                reply = await connection.ask(data)
            except ConnectionError:
                if is_new or not may_repeat:
                    raise UpstreamError(502, "cannot answer: the controller closed the connection") from None
                continue  # it was idle for too long, or the controller was restarted
            except BaseException:
                connection.close()
                raise
            if connection.is_open:
                self._idle.append(connection)
            return reply

    async def _connection(self) -> tuple[_UpstreamConnection, bool]:
        now_s = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now_s - connection.used_s < IDLE_S:
                return connection, False
            connection.close()
        try:
            sock = await connected(self._path, TIMEOUT_S)
        except OSError as error:
            why = error.strerror or str(error)
            raise UpstreamError(502, f"cannot answer: the controller does not run, or is not reached: {why}") from None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(lambda: _UpstreamConnection(self._path), sock=sock)
        return connection, True

    def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().close()


class _UpstreamConnection(asyncio.Protocol):
    """One connection to the controller; one request at a time. The parser calls `on_...`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.is_open = False
        self.used_s = 0.0
        self._answer: asyncio.Future[UpstreamReply] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass of it
        self.is_open = is_controllers(transport.get_extra_info("socket"), self._path)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError())

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    async def ask(self, data: bytes) -> UpstreamReply:
        if not self.is_open:
            self.close()
            raise UpstreamError(502, "cannot answer: the controller's socket is served by another account")
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._size = 0
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()
            return
        self._size += len(data)
        try:
            if self._size > MAX_ANSWER_BYTES:
                raise UpstreamError(502, "cannot answer: the controller's answer is too long")
            self._parser.feed_data(data)
        except (httptools.HttpParserError, UpstreamError) as error:
            self.is_open = False
            self._answer.set_exception(error if isinstance(error, UpstreamError) else ConnectionResetError())
            self._transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, part: bytes) -> None:
        self._body.append(part)

    def on_message_complete(self) -> None:
        assert self._answer is not None
        self.used_s = time.monotonic()
        if not self._parser.should_keep_alive():
            self.is_open = False
        if not self._answer.done():
            self._answer.set_result(UpstreamReply(self._parser.get_status_code(), self._headers, b"".join(self._body)))
