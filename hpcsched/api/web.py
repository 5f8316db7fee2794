"""Serve HTTP/1.1 over a unix socket: routes, requests and responses, parsed by httptools.

A framework would add a tenth of a second to each start of the controller, and most of the cost of a small request. Supported:
connections that are kept or closed, pipelined requests (answered one after the other), ``Expect: 100-continue`` (curl sends it
with large bodies). Not supported: TLS, and sockets other than unix sockets. The module does not know the requests: handlers
answer them, and turn their own errors into responses.

Sources: RFC 9112 (messages), RFC 9110 (status codes).
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

import httptools

from hpcnode.os.durable import write_all
from hpcnode.wire import gate
from hpcsched.api import splitbody
from hpcsched.api.connection_limits import (
    UNPARSED_BYTES,
    AnswerPauses,
    AnswerSlots,
    Listener,
    SocketLimits,
    read_less,
    retry_after,
)
from hpcsched.api.identity import peer_uid
from hpcsched.errors import HpcschedError, RequestError, UnauthenticatedError, UnavailableError, report_fault

log = logging.getLogger("hpcsched.api")

MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = UNPARSED_BYTES
IDLE_S = 30.0  # also the limit for a request to arrive completely
MAX_AHEAD = 100  # unanswered requests that a client may have sent
UNCOUNTED_BYTES = 16 << 10  # of unanswered requests on a connection
REQUEST_BYTES = 1 << 10  # of each of them, besides its text


class BadRequestError(Exception):
    """The data is not a supported request; the connection ends after the answer."""

    def __init__(self, status: int, why: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(why)
        self.status = status
        self.headers = headers or {}


# Functions: an exception that is raised again keeps the frames, and so the connections, of all earlier times.


def _too_long() -> BadRequestError:
    return BadRequestError(431, "cannot read the request: its head is too long")


def _too_slow() -> BadRequestError:
    return BadRequestError(408, f"cannot read the request: it did not come whole within {IDLE_S:g} s")


def _too_large() -> BadRequestError:
    return BadRequestError(413, f"cannot read the request: its body has more than {MAX_BODY_BYTES} bytes")


@dataclass(slots=True)
class Request:
    """One request.

    `peer`: its socket, None for a request that a node passed on. `match_info`: the values of the names in its route's path.
    """

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]  # names in lower case
    body: bytes
    peer: socket.socket | None
    uid: int | None = None  # caller of a request that came another way: by a node or by the gateway
    # Of a request that the gateway forwards: what its credential allows, and the client's address. None: not forwarded.
    scopes: tuple[str, ...] | None = None
    source: str = ""
    credential_id: str = ""
    match_info: dict[str, str] = field(default_factory=dict)
    held_bytes: int = 0  # of memory, approximately
    waits: bool = False  # its body is to be read: nothing has begun yet


@dataclass(frozen=True, slots=True)
class Response:
    """The answer to a request."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Request], Awaitable[Response]]
Identify = Callable[[Request, int], None]
Refusal = Callable[[int, str], Response]


class Route(NamedTuple):
    """The handler of a method and path.

    ``{name}`` in the path matches anything, ``{name:a|b}`` only these values.
    """

    method: str
    path: str
    handler: Handler


def get(path: str, handler: Handler) -> Route:
    return Route("GET", path, handler)


def post(path: str, handler: Handler) -> Route:
    return Route("POST", path, handler)


class Router:
    """Finds the handler of a request: the first route that matches its path and method."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[tuple[str, str], Handler] = {}
        self._patterns: list[tuple[str, tuple[_Part, ...], Handler]] = []
        for route in routes:
            if "{" in route.path:
                self._patterns.append((route.method, _parts(route.path), route.handler))
            else:
                self._exact[route.method, route.path] = route.handler

    def find(self, request: Request) -> Handler:
        """Return the handler; set `request.match_info`. Raises BadRequestError: 404, 405."""
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
    """One part of a route's path: fixed text, or the name of a value."""

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
    """Serves an application (a `Router` and the format of refusals) until it is closed."""

    def __init__(
        self,
        router: Router,
        refusal: Refusal,
        socket_limits: SocketLimits | None = None,
        identify: Identify | None = None,
    ) -> None:
        """Make a server.

        `identify` sets the caller of requests that a gateway forwards, or raises HpcschedError.
        """
        self.router = router
        self.refusal = refusal
        self.identify = identify
        self.connections: set[Connection] = set()
        self.socket_limits = socket_limits or SocketLimits()
        self._listener: Listener | None = None
        self._refusals: dict[str, bytes] = {}  # only the last one: a flood has thousands in a second

    async def serve(self, listener: socket.socket) -> None:
        """Answer the clients of the listening unix socket."""
        self._listener = Listener(listener, lambda: Connection(self), self.socket_limits, self._refused)

    def _refused(self, uid: int) -> bytes:
        """Return the answer to an account that connects too often."""
        why = self.socket_limits.too_often(uid)
        if why not in self._refusals:
            response = self.refusal(429, why)
            self._refusals = {why: head_of(replace(response, headers={"Retry-After": "1"}), keep=False) + response.body}
        return self._refusals[why]

    @property
    def unread_bytes(self) -> int:
        """Return the number of answer bytes that clients have not read yet."""
        return sum(connection.unread_bytes for connection in self.connections)

    async def close(self) -> None:
        """Accept no more requests, and end all connections."""
        if self._listener is not None:
            self._listener.close()
        tasks = [connection.close() for connection in list(self.connections)]
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)


class Connection(asyncio.Protocol):
    """One client. Its requests are answered in order, each after the previous one's answer.

    The parser calls `on_...` while it is fed.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._coming: _Coming | None = None  # the request that is being received
        self._waiting: deque[Request | BadRequestError] = deque()  # received, and not yet answered
        self._task: asyncio.Task[None] | None = None
        self._answered: Request | None = None  # whose handler is the task
        self._heard_s = 0.0
        self._asks_no_more = False
        self._began_s: float | None = None  # when the request that is being received began
        self._reads = True  # we read from the client
        # Set while reading is paused, because the client sends too fast.
        self._throttle: asyncio.TimerHandle | None = None
        self._held_bytes = 0  # of unanswered requests
        self._counted_bytes = 0  # the part of these that `SocketLimits` has counted
        self._unread = False  # the client reads slower than it sends requests
        self._unread_before_bytes = 0  # when progress of the client's reading was last checked
        self._refused = False  # the data was not HTTP: nothing more is read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._peer: socket.socket = transport.get_extra_info("socket")
        self._uid = peer_uid(self._peer)
        read_less(transport)
        self._limits = self._server.socket_limits.limits
        self._server.connections.add(self)
        self._heard_s = self._loop.time()
        if not self._limits.comes(self._uid, self):
            self._transport.abort()
        self._idle_timer = self._loop.call_later(IDLE_S, self._look_idle)

    def connection_lost(self, error: Exception | None) -> None:
        self._idle_timer.cancel()
        if self._throttle is not None:
            self._throttle.cancel()
        self._server.connections.discard(self)
        self._limits.goes(self._uid, self)
        # A handler that changes something is not cancelled: its request is completed.
        asked = self._answered
        if self._task is not None and asked is not None and (asked.method == "GET" or asked.waits):
            self._task.cancel()
        # it refers to us: without this, bodies stay in memory until the next garbage collection
        del self._parser
        self._coming = None
        self._waiting.clear()

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    @property
    def is_lasting(self) -> bool:
        return False

    @property
    def unread_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def drop(self) -> None:
        """End the connection now; its running handler continues."""
        self._transport.abort()

    def pause_writing(self) -> None:
        self._unread = True

    def resume_writing(self) -> None:
        self._unread = False
        if self._task is None:
            self._next()

    def close(self) -> asyncio.Task[None] | None:
        """End the connection now; return its running handler, cancelled."""
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
                raise _too_long()
        except BadRequestError as error:
            self._refuse(error)
        except httptools.HttpParserUpgrade:  # unsupported: the request is answered, and no more
            self._refused = True
            if self._waiting and isinstance(self._waiting[-1], Request):
                self._waiting[-1].headers["connection"] = "close"
        except httptools.HttpParserError as error:
            why = error.__context__ if isinstance(error.__context__, BadRequestError) else None
            self._refuse(why or BadRequestError(400, f"cannot read the request: it is not HTTP/1.1 ({error})"))
        self._count()
        if self._task is None:
            self._next()
        pause_s = self._server.socket_limits.pause_s(self._uid, len(data))
        if pause_s is not None and self._throttle is None:
            self._throttle = self._loop.call_later(pause_s, self._throttled)
        self._regulate()

    def _throttled(self) -> None:
        self._throttle = None
        self._regulate()

    def _regulate(self) -> None:
        """Read from the client, unless it sends too fast or has too many unanswered requests."""
        wanted = self._throttle is None and len(self._waiting) <= MAX_AHEAD
        if wanted == self._reads or self._transport.is_closing():
            return
        self._reads = wanted
        if wanted:
            self._began_s = None if self._began_s is None else self._loop.time()
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _count(self) -> None:
        """Update the account's number of unanswered bytes in `SocketLimits`."""
        held_bytes = self._held_bytes + (0 if self._coming is None else self._coming.bytes)
        if held_bytes <= UNCOUNTED_BYTES:
            held_bytes = 0
        if held_bytes == self._counted_bytes:
            return
        self._counted_bytes = held_bytes
        if not self._limits.may_hold(self._uid, self, held_bytes) and not self._refused:
            why = f"cannot read the request: uid {self._uid} sends more than {UNPARSED_BYTES >> 20} MiB at once"
            self._refuse(BadRequestError(429, why, {"Retry-After": "1"}))

    def _hear(self) -> None:
        self._heard_s = self._loop.time()
        self._limits.is_heard(self._uid, self)

    def eof_received(self) -> bool:
        """Handle the end of the client's data: it may still read, so its requests are answered."""
        self._asks_no_more = True
        if _has_disconnected(self._peer):
            self.drop()
        return self._task is not None or bool(self._waiting)

    # ----- called by the parser

    def on_message_begin(self) -> None:
        self._coming = _Coming()
        self._began_s = self._loop.time()

    def on_url(self, part: bytes) -> None:
        assert self._coming is not None
        self._coming.url += part

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._coming is not None
        self._coming.headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        self._coming.found_bytes += len(name) + len(value)
        if self._coming.found_bytes > MAX_HEAD_BYTES:
            raise _too_long()

    def on_headers_complete(self) -> None:
        assert self._coming is not None
        self._coming.in_head = False
        if int(self._coming.headers.get("content-length", "0")) > MAX_BODY_BYTES:  # int: the parser has read it
            raise _too_large()
        if self._coming.headers.get("expect", "").lower() == "100-continue" and self._task is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        assert self._coming is not None
        if len(self._coming.body) + len(part) > MAX_BODY_BYTES:
            raise _too_large()
        self._coming.body += part

    def on_message_complete(self) -> None:
        assert self._coming is not None
        coming, self._coming = self._coming, None
        self._began_s = None
        if not self._parser.should_keep_alive():
            coming.headers["connection"] = "close"
        path, _, query = coming.url.decode("latin-1").partition("?")
        try:
            values = read_query(query)
            unquote(path, errors="strict")
        except ValueError as error:
            self._refuse(BadRequestError(400, f"cannot read the request: {error}"))
            return
        self._waiting.append(
            Request(
                method=self._parser.get_method().decode("latin-1"),
                path=path,
                query=values,
                headers=coming.headers,
                body=bytes(coming.body),
                peer=self._peer,
                held_bytes=coming.bytes,
            )
        )
        self._held_bytes += coming.bytes

    # ----- answers

    def _refuse(self, error: BadRequestError) -> None:
        self._refused = True
        self._coming = self._began_s = None
        error.__traceback__ = error.__context__ = None  # they refer to us, and we to the error
        self._waiting.append(error)
        self._count()

    def _look_idle(self) -> None:
        now_s = self._loop.time()
        quiet_s = now_s - self._heard_s
        if self._task is None and quiet_s >= IDLE_S:
            if not self.unread_bytes:
                self._transport.close()
                return
            if self.unread_bytes == self._unread_before_bytes:
                self.drop()
                return
        began_s = self._began_s if self._reads and self._began_s is not None else now_s
        if now_s - began_s >= IDLE_S:
            self._refuse(_too_slow())
            if self._task is None:
                self._next()
        self._unread_before_bytes = self.unread_bytes
        wait_s = IDLE_S - max(quiet_s, now_s - began_s)
        self._idle_timer = self._loop.call_later(max(1.0, wait_s), self._look_idle)

    def _next(self) -> None:
        """Start to answer the next request, if any, once the last answer has almost been read."""
        if not self._waiting or self._unread:
            return
        request = self._waiting.popleft()
        if isinstance(request, Request):
            refused = self._why_refused(request)
            if refused is None:
                self._answered = request
                self._task = self._loop.create_task(self._answer(request))
                return
            if request.scopes is not None:  # the connection also has requests of other users
                keep = request.headers.get("connection", "").lower() != "close"
                self._held_bytes -= request.held_bytes
                self._count()
                self._send(
                    replace(self._server.refusal(refused.status, str(refused)), headers=refused.headers), keep=keep
                )
                self._loop.call_soon(self._next)
                return
            request = refused
        self._refused = True
        response = self._server.refusal(request.status, str(request))
        self._send(replace(response, headers=request.headers), keep=False)

    def _why_refused(self, request: Request) -> BadRequestError | None:
        """Find out who asks, and count the request; None: it may be answered."""
        if self._server.identify is not None:
            try:
                self._server.identify(request, self._uid)
            except HpcschedError as error:
                status = 401 if isinstance(error, UnauthenticatedError) else 403
                return BadRequestError(status, str(error))
        uid = self._uid if request.uid is None else request.uid
        limits = self._server.socket_limits
        wait_s = limits.request_wait_s(uid)
        return (
            None
            if wait_s is None
            else BadRequestError(429, limits.too_often(uid), {"Retry-After": retry_after(wait_s)})
        )

    async def _answer(self, request: Request) -> None:
        keep = request.headers.get("connection", "").lower() != "close"
        try:
            response = await self._server.router.find(request)(request)
        except asyncio.CancelledError:
            # Its error refers to us: without this, all that it held waits for a garbage collection.
            self._task = self._answered = None
            raise
        except BadRequestError as error:
            response = self._server.refusal(error.status, f"cannot {request.method} {request.path}: {error}")
        except Exception as error:  # handlers convert their errors; this one did not
            wrong = report_fault(error, f"answer {request.method} {request.path[:200]!r}")
            response = self._server.refusal(500, str(wrong))
        if request.credential_id:  # the gateway counts by user
            response = replace(response, headers={**response.headers, "X-Hpcsched-Uid": str(request.uid)})
        self._task = self._answered = None
        self._held_bytes -= request.held_bytes
        self._count()
        self._send(response, keep=keep)
        if keep and not self._transport.is_closing():
            self._hear()
            self._regulate()
            self._next()
            if self._asks_no_more and self._task is None and not self._waiting:
                self._transport.close()

    def _send(self, response: Response, *, keep: bool) -> None:
        if self._transport.is_closing():
            return
        head = head_of(response, keep=keep)
        if not self._limits.may_send(self._uid, self, len(head) + len(response.body)):
            log.warning("uid %d does not read its answers: one of its connections is ended", self._uid)
            self.drop()
            return
        if len(response.body) < MAX_HEAD_BYTES:
            self._transport.write(head + response.body)
        else:
            self._transport.write(head)
            self._transport.write(response.body)
        if not keep:
            self._transport.close()


def head_of(response: Response, *, keep: bool) -> bytes:
    """Return the bytes before an answer's body; `keep`: the connection stays open."""
    lines = [
        f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}",
        f"Content-Type: {response.content_type}",
        f"Content-Length: {len(response.body)}",
        *(f"{name}: {value}" for name, value in response.headers.items()),
    ]
    if not keep:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def _has_disconnected(peer: socket.socket) -> bool:
    """Return whether the client, which has ended sending, has also stopped reading."""
    looking = select.poll()
    looking.register(peer.fileno(), 0)
    return any(what & select.POLLHUP for _, what in looking.poll(0))


def read_query(query: str) -> dict[str, str]:
    """Return the values of a query by name. Raises ValueError (also UnicodeDecodeError).

    The error is for bytes that no text may contain.
    """
    values = dict(parse_qsl(query, keep_blank_values=True, errors="strict")) if query else {}
    gate.check_texts(values)
    return values


class _Coming:
    """A request that is being received."""

    __slots__ = ("body", "came_bytes", "found_bytes", "headers", "in_head", "url")

    def __init__(self) -> None:
        self.url = b""
        self.headers: dict[str, str] = {}  # names in lower case
        self.body = bytearray()
        self.in_head = True
        self.came_bytes = 0  # in pieces that did not end the head
        self.found_bytes = 0  # in complete headers

    @property
    def bytes(self) -> int:
        """Return its approximate memory."""
        return REQUEST_BYTES + len(self.url) + self.found_bytes + len(self.body)

    def grows_too_long(self, more_bytes: int) -> bool:
        """Count bytes of an unfinished head, and return whether they are too many."""
        self.came_bytes += more_bytes if self.in_head else 0
        return self.came_bytes > MAX_HEAD_BYTES


# ----- JSON bodies, parsed without delaying other clients for long
# A small body is parsed at once. Larger ones are parsed one after the other for each account. A body of more than `LARGE_BYTES`,
# or with very many values, is checked and split into its jobs by a separate process (`splitbody`). This process parses the parts,
# with breaks. Threads would not help: the JSON parser holds the GIL from a body's first byte to its last.


SMALL_BYTES = 16 << 10
LARGE_BYTES = 1 << 20
MANY_VALUES = 100_000  # they are parsed within about 10 ms
MAX_VALUES = 1_000_000
MAX_VALUES_OF_PART = 250_000
AT_ONCE = 2  # of all accounts
PATIENCE_S = 30.0


class Bodies:
    """Parses bodies; `parse` makes an object from JSON text, or raises RequestError."""

    def __init__(self, parse: Callable[[bytes], Any], max_jobs: int) -> None:
        self._parse = parse
        self._max_jobs = max_jobs
        self._turns = AnswerSlots(1, AT_ONCE)
        self._here = asyncio.Semaphore(1)

    async def read(self, uid: int, request: Request) -> Any:
        """Return the parsed body of the account `uid`. Raises RequestError, UnavailableError."""
        body = request.body
        if len(body) <= SMALL_BYTES:
            return self._parse(body)
        request.waits = True
        async with self._turns.turn(uid):
            request.waits = False
            if len(body) <= LARGE_BYTES and body.count(b",") + body.count(b"[") + body.count(b"{") <= MANY_VALUES:
                async with self._here:
                    await asyncio.sleep(0)
                    return self._parse(body)
            out = await asyncio.to_thread(self._split, body)
            return await self._joined(out)

    def _split(self, body: bytes) -> int:
        """Return an open file with the parts of the body."""
        given = os.memfd_create("body")
        out = os.memfd_create("parts")
        try:
            write_all(given, body)
            os.lseek(given, 0, os.SEEK_SET)
            numbers = (MAX_VALUES, MAX_VALUES_OF_PART, self._max_jobs)
            done = subprocess.run(
                [sys.executable, "-I", "-S", splitbody.__file__, *map(str, numbers)],
                stdin=given,
                stdout=out,
                stderr=subprocess.PIPE,
                timeout=PATIENCE_S,
                check=False,
                cwd="/",
                env={},
            )
            if done.returncode == 1:
                why = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
                raise RequestError(f"cannot read the request: {why[:300]}")
            if done.returncode:
                raise RequestError(f"cannot read the request: it takes too long or too much memory ({len(body)} bytes)")
        except subprocess.TimeoutExpired:
            os.close(out)
            raise RequestError(f"cannot read the request: it takes more than {PATIENCE_S:g} s") from None
        except OSError as error:
            os.close(out)
            raise UnavailableError(f"cannot read the request: {error.strerror}; try again") from None
        except RequestError:
            os.close(out)
            raise
        finally:
            os.close(given)
        return out

    async def _joined(self, out: int) -> Any:
        """Return the object whose parts are in the file."""
        with closing(os.fdopen(out, "rb")) as file:
            file.seek(0)
            breaks = AnswerPauses()
            parts = []
            while length := file.read(splitbody.LENGTH.size):
                parts.append(self._parse(file.read(splitbody.LENGTH.unpack(length)[0])))
                if breaks.due():
                    await breaks.take()
        found, *jobs = parts
        return {**found, "jobs": jobs} if jobs else found
