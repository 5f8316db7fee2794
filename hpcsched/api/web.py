"""HTTP/1.1 over a unix socket: a server, routes, requests and responses, around the parser of httptools.

A framework would cost a tenth of a second whenever the controller starts, while people wait for it, and most of what a
small request costs. Spoken here: connections that are kept or closed, pipelined requests (answered one after the other),
``Expect: 100-continue`` (curl sends it with large bodies). Not spoken: TLS, other than unix sockets. Knows nothing of what is
asked: handlers do, and they turn their own errors into responses.

Source: RFC 9112 (messages), RFC 9110 (status codes).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import select
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

import httptools

from hpcsched.api.crowd import Crowd
from hpcsched.api.identity import peer_uid

log = logging.getLogger("hpcsched.api")

MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 64 << 20
IDLE_S = 30.0
BACKLOG = 1024
MAX_AHEAD = 100  # requests that a client may have sent before they are answered
MAX_UNSENT_BYTES = 256 << 20  # that one account has not read; an answer that is all that it has not read may be larger


class BadRequestError(Exception):
    """What came is no request that we speak; the connection ends after the answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


TOO_LONG = BadRequestError(431, "cannot read the request: its head is too long")
TOO_LARGE = BadRequestError(413, f"cannot read the request: its body has more than {MAX_BODY_BYTES} bytes")


@dataclass(slots=True)
class Request:
    """One request. `peer`: the socket that it came by, None of one that a node passed on. `match_info`: the parts of the
    path that its route names."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]  # names in lower case
    body: bytes
    peer: socket.socket | None
    uid: int | None = None  # of one that came another way: who asks, and is no admin
    match_info: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Response:
    """What is answered."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Request], Awaitable[Response]]
Refusal = Callable[[int, str], Response]


class Route(NamedTuple):
    """Who answers a method and path; a part ``{name}`` of the path takes anything, ``{name:a|b}`` one of these."""

    method: str
    path: str
    handler: Handler


def get(path: str, handler: Handler) -> Route:
    return Route("GET", path, handler)


def post(path: str, handler: Handler) -> Route:
    return Route("POST", path, handler)


class Router:
    """Finds the handler of a request: the first route that takes its path and method."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[tuple[str, str], Handler] = {}
        self._patterns: list[tuple[str, tuple[_Part, ...], Handler]] = []
        for route in routes:
            if "{" in route.path:
                self._patterns.append((route.method, _parts(route.path), route.handler))
            else:
                self._exact[route.method, route.path] = route.handler

    def find(self, request: Request) -> Handler:
        """Return the handler, and note what the path names in `request`. Raises BadRequestError: 404, 405."""
        method, path = request.method, request.path
        handler = self._exact.get((method, path))
        if handler is not None:
            return handler
        words = path.split("/")
        other_method = any(known == path for _, known in self._exact)
        for known, parts, handler in self._patterns:
            found = _matched(parts, words)
            if found is not None:
                if known == method:
                    request.match_info = found
                    return handler
                other_method = True
        status = 405 if other_method else 404
        raise BadRequestError(status, HTTPStatus(status).phrase)


class _Part(NamedTuple):
    """One part of a route's path: the text itself, or a name for what stands there."""

    text: str
    name: str
    choices: frozenset[str]  # empty: anything


def _parts(path: str) -> tuple[_Part, ...]:
    parts = []
    for word in path.split("/"):
        if word.startswith("{"):
            name, _, choices = word[1:-1].partition(":")
            parts.append(_Part("", name, frozenset(choices.split("|")) if choices else frozenset()))
        else:
            parts.append(_Part(word, "", frozenset()))
    return tuple(parts)


def _matched(parts: tuple[_Part, ...], words: list[str]) -> dict[str, str] | None:
    if len(parts) != len(words):
        return None
    found = {}
    for part, word in zip(parts, words, strict=True):
        if not part.name:
            if part.text != word:
                return None
            continue
        value = unquote(word)
        if not value or (part.choices and value not in part.choices):
            return None
        found[part.name] = value
    return found


class Server:
    """Serves an application, a `Router` and how refusals look, until it is closed."""

    def __init__(self, router: Router, refusal: Refusal, most_connections: int | None = None) -> None:
        """`most_connections` of one account; by default a quarter of the files that this process may have open."""
        self.router = router
        self.refusal = refusal
        self.connections: set[Connection] = set()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.crowd = Crowd(most_connections or max(1, files // 4), MAX_UNSENT_BYTES)
        self._server: asyncio.Server | None = None

    async def serve(self, listener: socket.socket) -> None:
        """Answer those who connect to the listening unix socket."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Connection(self), sock=listener, backlog=BACKLOG)

    @property
    def unsent_bytes(self) -> int:
        """So much of the answers has not been taken by those who asked."""
        return sum(connection.unsent_bytes for connection in self.connections)

    async def close(self) -> None:
        """Take no more requests, and end all connections."""
        if self._server is not None:
            self._server.close()
        tasks = [connection.close() for connection in list(self.connections)]
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)


class Connection(asyncio.Protocol):
    """One client: its requests are answered in order, the next one only when the one before it has been.

    The parser calls `on_...` while it is fed.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._coming: _Coming | None = None  # the request that is being read
        self._waiting: deque[Request | BadRequestError] = deque()  # read, and not yet answered
        self._task: asyncio.Task[None] | None = None
        self._reads_only = False  # what it does is of use to nobody but the client
        self._heard_s = 0.0
        self._asks_no_more = False
        self._unread = False  # the client does not read as fast as it asks
        self._unsent_bytes = 0  # when it was last looked whether the client reads
        self._refused = False  # what came is no HTTP: nothing more is read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._peer: socket.socket = transport.get_extra_info("socket")
        self._uid = peer_uid(self._peer)
        self._server.connections.add(self)
        self._server.crowd.comes(self._uid, self)
        self._heard_s = self._loop.time()
        self._idle_timer = self._loop.call_later(IDLE_S, self._look_idle)

    def connection_lost(self, error: Exception | None) -> None:
        self._idle_timer.cancel()
        self._server.connections.discard(self)
        self._server.crowd.goes(self._uid, self)
        if self._task is not None and self._reads_only:
            self._task.cancel()
        # Another task ends by itself: what it was asked for is done all the same.

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def drop(self) -> None:
        """End the connection now; what still works for it goes on."""
        self._transport.abort()

    def pause_writing(self) -> None:
        self._unread = True

    def resume_writing(self) -> None:
        self._unread = False
        if self._task is None:
            self._next()

    def close(self) -> asyncio.Task[None] | None:
        """End the connection now; return what still works for it, cancelled."""
        self._transport.abort()
        if self._task is not None:
            self._task.cancel()
        return self._task

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._hear()
        try:
            self._parser.feed_data(data)
            if self._coming is not None and self._coming.grows_too_long(len(data)):
                raise TOO_LONG
        except BadRequestError as error:
            self._refuse(error)
        except httptools.HttpParserUpgrade:  # to what is not spoken here: the request is answered, and that is all
            self._refused = True
            if self._waiting and isinstance(self._waiting[-1], Request):
                self._waiting[-1].headers["connection"] = "close"
        except httptools.HttpParserError as error:
            why = error.__context__ if isinstance(error.__context__, BadRequestError) else None
            self._refuse(why or BadRequestError(400, f"cannot read the request: it is not HTTP/1.1 ({error})"))
        if self._task is None:
            self._next()
        if len(self._waiting) > MAX_AHEAD:
            self._transport.pause_reading()  # it sends ahead of its answers: they come first

    def _hear(self) -> None:
        self._heard_s = self._loop.time()
        self._server.crowd.is_heard(self._uid, self)

    def eof_received(self) -> bool:
        """The client sends no more, and may still read: what it has asked for is answered before the connection ends."""
        self._asks_no_more = True
        if _has_gone(self._peer):
            self.drop()
        return self._task is not None or bool(self._waiting)

    # ----- what the parser finds

    def on_message_begin(self) -> None:
        self._coming = _Coming()

    def on_url(self, part: bytes) -> None:
        assert self._coming is not None
        self._coming.url += part

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._coming is not None
        self._coming.headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        self._coming.found_bytes += len(name) + len(value)
        if self._coming.found_bytes > MAX_HEAD_BYTES:
            raise TOO_LONG

    def on_headers_complete(self) -> None:
        assert self._coming is not None
        self._coming.in_head = False
        if int(self._coming.headers.get("content-length", "0")) > MAX_BODY_BYTES:  # the parser has read it as a number
            raise TOO_LARGE
        if self._coming.headers.get("expect", "").lower() == "100-continue" and self._task is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        assert self._coming is not None
        if len(self._coming.body) + len(part) > MAX_BODY_BYTES:
            raise TOO_LARGE
        self._coming.body += part

    def on_message_complete(self) -> None:
        assert self._coming is not None
        coming, self._coming = self._coming, None
        if not self._parser.should_keep_alive():
            coming.headers["connection"] = "close"
        path, _, query = coming.url.decode("latin-1").partition("?")
        values = dict(parse_qsl(query, keep_blank_values=True, errors="surrogateescape")) if query else {}
        self._waiting.append(
            Request(
                method=self._parser.get_method().decode("latin-1"),
                path=path,
                query=values,
                headers=coming.headers,
                body=bytes(coming.body),
                peer=self._peer,
            )
        )

    # ----- answering

    def _refuse(self, error: BadRequestError) -> None:
        self._refused = True
        self._waiting.append(error)

    def _look_idle(self) -> None:
        quiet_s = self._loop.time() - self._heard_s
        if self._task is None and quiet_s >= IDLE_S:
            if not self.unsent_bytes:
                self._transport.close()
                return
            if self.unsent_bytes == self._unsent_bytes:
                self.drop()
                return
        self._unsent_bytes = self.unsent_bytes
        self._idle_timer = self._loop.call_later(max(1.0, IDLE_S - quiet_s), self._look_idle)

    def _next(self) -> None:
        """Begin to answer the next request if one is there, and what was answered before has been read, nearly."""
        if not self._waiting or self._unread:
            return
        request = self._waiting.popleft()
        if isinstance(request, BadRequestError):
            self._send(self._server.refusal(request.status, str(request)), keep=False)
        else:
            self._reads_only = request.method == "GET"
            self._task = self._loop.create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        keep = request.headers.get("connection", "").lower() != "close"
        try:
            response = await self._server.router.find(request)(request)
        except BadRequestError as error:
            response = self._server.refusal(error.status, f"cannot {request.method} {request.path}: {error}")
        except Exception:  # handlers answer for their errors; this is one that did not
            log.exception("cannot answer %s %s", request.method, request.path)
            response = self._server.refusal(500, "the controller failed at this request: see its log")
        self._task = None
        self._send(response, keep=keep)
        if keep and not self._transport.is_closing():
            self._hear()
            self._transport.resume_reading()
            self._next()
            if self._asks_no_more and self._task is None and not self._waiting:
                self._transport.close()

    def _send(self, response: Response, *, keep: bool) -> None:
        if self._transport.is_closing():
            return
        lines = [
            f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}",
            f"Content-Type: {response.content_type}",
            f"Content-Length: {len(response.body)}",
            *(f"{name}: {value}" for name, value in response.headers.items()),
        ]
        if not keep:
            lines.append("Connection: close")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")
        if len(response.body) < MAX_HEAD_BYTES:
            self._transport.write(head + response.body)
        elif self._server.crowd.may_leave(self._uid, len(response.body)):
            self._transport.write(head)
            self._transport.write(response.body)
        else:
            log.warning("uid %d does not read its answers: one of its connections is ended", self._uid)
            self.drop()
        if not keep:
            self._transport.close()


def _has_gone(peer: socket.socket) -> bool:
    """Return whether the client, that sends no more, does not read any more either."""
    looking = select.poll()
    looking.register(peer.fileno(), 0)
    return any(what & select.POLLHUP for _, what in looking.poll(0))


class _Coming:
    """A request that is being read."""

    __slots__ = ("body", "came_bytes", "found_bytes", "headers", "in_head", "url")

    def __init__(self) -> None:
        self.url = b""
        self.headers: dict[str, str] = {}  # names in lower case
        self.body = bytearray()
        self.in_head = True
        self.came_bytes = 0  # in pieces that did not end the head
        self.found_bytes = 0  # in headers that are whole

    def grows_too_long(self, more_bytes: int) -> bool:
        """Count what came while the head has not ended, and say whether that is too much."""
        self.came_bytes += more_bytes if self.in_head else 0
        return self.came_bytes > MAX_HEAD_BYTES
