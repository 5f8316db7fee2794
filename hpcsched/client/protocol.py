"""The protocol between a client and the controller, without input and output.

A request is a generator (`Flow`): it yields `Send` and `Pause` steps, is sent the reply of each `Send`, and returns the
result. `hpcsched.client` performs the steps with a blocking socket, `hpcsched.client.aio` with asyncio. Parsing, retries,
rate limits and errors are therefore written once.

Knows no sockets, no addresses and, except for logs, no routes. Commands import this module, so it imports nothing that is
slow to import (`dataclasses`, `typing`, `http.client`).

Sources: RFC 9112 (messages with Content-Length), RFC 9110 (Retry-After).
"""

from __future__ import annotations

import json
import os
import time
from collections import namedtuple

from hpcsched import errors

TYPE_CHECKING = False  # for type checkers; importing typing takes a tenth of a command's start
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any, TypeVar

    T = TypeVar("T")
    Flow = Generator["Send | Pause", Any, T]

Json = dict[str, "Any"]

TIMEOUT_S = 60.0
READ_BYTES = 256 << 10
MAX_HEAD_BYTES = 64 << 10
MAX_ANSWER_BYTES = 256 << 20
RETRY_S = 10.0  # retry time while the controller restarts, for requests that may be repeated
RETRY_PAUSE_S = 0.1
TOO_OFTEN = 429  # status: the account sends requests too often
UNAVAILABLE = 503
PATIENCE_S = 60.0  # retry time for TOO_OFTEN


class Send(namedtuple("Send", "method path body timeout_s")):
    """A request to send: the step's result is its `HttpReply`."""

    __slots__ = ()

    method: str
    path: str
    body: Json | None
    timeout_s: float


class Pause(namedtuple("Pause", "seconds")):
    """A time to wait."""

    __slots__ = ()

    seconds: float


class HttpReply(namedtuple("HttpReply", "status headers body")):
    """An HTTP answer."""

    __slots__ = ()

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


class LogChunk(namedtuple("LogChunk", "data offset size path ended")):
    """A piece of a job's output file. `ended`: the job has ended and this is the file's end."""

    __slots__ = ()

    data: bytes
    offset: int  # of the first byte in the file
    size: int  # of the file, now
    path: str
    ended: bool


class BrokenConnectionError(errors.UnavailableError):
    """The connection ended before the answer. It is unknown whether the request took effect."""


def late(timeout_s: float) -> BrokenConnectionError:
    """Return the error for an answer that does not come in time."""
    return BrokenConnectionError(
        f"no answer from the hpcsched controller within {timeout_s:g} s; 'hpcsched doctor' says why"
    )


def lost(error: OSError) -> BrokenConnectionError:
    """Return the error for a connection that broke."""
    return BrokenConnectionError(f"lost the connection to the hpcsched controller: {error.strerror or error}")


def exchange(
    method: str,
    path: str,
    body: Json | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    again: bool = False,
) -> Flow[HttpReply]:
    """Send one request and return the whole answer; retry after a rate limit.

    `again`: the request may be repeated, so that it is also retried after a broken connection. The controller may then be
    restarting, so its absence is retried as well. Raises the first BrokenConnectionError if that takes too long.
    """
    patient_until_s = time.monotonic() + PATIENCE_S
    broken: BrokenConnectionError | None = None
    retry_until_s = 0.0
    while True:
        try:
            reply: HttpReply = yield Send(method, path, body, timeout_s)
        except BrokenConnectionError as error:
            if not again:
                raise
            if broken is None:
                broken, retry_until_s = error, time.monotonic() + RETRY_S
        except errors.UnavailableError:
            if broken is None:
                raise
        else:
            if reply.status == TOO_OFTEN:
                wait_s = retry_after_s(reply)
                if time.monotonic() + wait_s > patient_until_s:
                    return reply
                yield Pause(wait_s)
                continue
            if reply.status != UNAVAILABLE or broken is None:
                return reply
        if time.monotonic() > retry_until_s:
            raise broken
        yield Pause(RETRY_PAUSE_S)


def ask(
    method: str, path: str, body: Json | None = None, *, timeout_s: float = TIMEOUT_S, again: bool = False
) -> Flow[Json]:
    """Send a request as `exchange`, and return its JSON object.

    Raises the error that the controller answered.
    """
    return read_answer((yield from exchange(method, path, body, timeout_s=timeout_s, again=again)))


def ask_text(path: str, *, timeout_s: float = TIMEOUT_S, again: bool = False) -> Flow[str]:
    """Return the text at `path` of the API. Raises as `ask`."""
    reply = yield from exchange("GET", path, timeout_s=timeout_s, again=again)
    if reply.status != 200:
        raise read_error(reply)
    return reply.body.decode("utf-8", "replace")


def ask_log(
    reference: str,
    *,
    stream: str = "out",
    offset: int = 0,
    limit_bytes: int | None = None,
    wait_s: float = 0,
    timeout_s: float = TIMEOUT_S,
) -> Flow[LogChunk]:
    """Return a piece of a job's output, ``out`` or ``err``, from `offset` on.

    A negative offset counts from the end. It waits up to `wait_s` for data after `offset`. Raises as `ask`.
    """
    path = query("/v1/log", job=reference, stream=stream, offset=offset, limit=limit_bytes, wait_s=wait_s or None)
    reply = yield from exchange("GET", path, timeout_s=timeout_s + wait_s)
    if reply.status != 200:
        raise read_error(reply)
    headers = reply.headers
    try:
        return LogChunk(
            data=reply.body,
            offset=int(headers["x-offset"]),
            size=int(headers["x-size"]),
            path=str(json.loads(headers["x-path"])),
            ended=headers["x-ended"] == "1",
        )
    except (KeyError, ValueError) as error:
        raise errors.ProtocolError(f"cannot read the controller's answer: {error}") from None


def retry_after_s(reply: HttpReply) -> float:
    """Return how long to wait: the server's time, randomly up to half more or less.

    The waiting clients must not all return at once.
    """
    text = reply.headers.get("retry-after", "")
    wait_s = int(text) if text.isdigit() and len(text) < 3 else 1
    return wait_s * (0.5 + os.urandom(1)[0] / 255)


# ----- messages


def request_bytes(
    method: str, path: str, body: Json | None, *, host: str = "hpcsched", headers: tuple[str, ...] = ()
) -> bytes:
    """Return a request as it is sent. `headers`: further lines."""
    data = body_bytes(body)
    lines = (
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *headers,
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii") + data


def body_bytes(body: Json | None) -> bytes:
    """Return a request's body as JSON text."""
    return b"" if body is None else json.dumps(body, separators=(",", ":")).encode("utf-8", "surrogateescape")


class ReplyReader:
    """Reads an answer from the pieces in which it arrives.

    The answer is complete when its last byte has arrived; the server need not close the connection.
    """

    def __init__(self) -> None:
        self._received = bytearray()
        self._head: tuple[int, dict[str, str]] | None = None
        self._length = 0

    def feed(self, data: bytes) -> HttpReply | None:
        """Take a piece, b"" at the end of the connection; return the answer if it is complete.

        Raises BrokenConnectionError, ProtocolError.
        """
        if not data:
            where = "before it answered" if self._head is None else "in the middle of its answer"
            raise BrokenConnectionError(f"lost the connection to the hpcsched controller {where}")
        received = self._received
        received += data
        if len(received) > MAX_ANSWER_BYTES:
            raise errors.ProtocolError("cannot read the controller's answer: it is too long")
        if self._head is None:
            end = received.find(b"\r\n\r\n")
            if end < 0 and len(received) > MAX_HEAD_BYTES:
                raise errors.ProtocolError("cannot read the controller's answer: its head is too long")
            if end < 0:
                return None
            status, headers, self._length = _read_head(bytes(received[:end]))
            self._head = status, headers
            del received[: end + 4]
        if len(received) < self._length:
            return None
        status, headers = self._head
        return HttpReply(status=status, headers=headers, body=bytes(received[: self._length]))


def _read_head(text: bytes) -> tuple[int, dict[str, str], int]:
    """Return status, headers and body length from the head of an answer."""
    lines = text.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    try:
        length = int(headers["content-length"])
        if length < 0:
            raise ValueError(length)
        return int(lines[0].split(" ", 2)[1]), headers, length
    except (IndexError, KeyError, ValueError):
        raise errors.ProtocolError("cannot read the controller's answer: it is not the HTTP that we speak") from None


def read_answer(reply: HttpReply) -> Json:
    """Return the JSON object of an answer.

    Raises the error that the controller answered, ProtocolError.
    """
    if reply.status != 200:
        raise read_error(reply)
    answer = _read_json(reply)
    if not isinstance(answer, dict):
        raise errors.ProtocolError("cannot read the controller's answer: it is not a JSON object")
    return answer


def read_error(reply: HttpReply) -> errors.HpcschedError:
    """Return the error of the controller's answer."""
    answer = _read_json(reply)
    if not isinstance(answer, dict):
        return errors.ProtocolError(f"cannot read the controller's answer (status {reply.status})")
    return errors.error_of(answer)


def _read_json(reply: HttpReply) -> object:
    try:
        return json.loads(reply.body)
    except (ValueError, RecursionError):
        raise errors.ProtocolError(f"cannot read the controller's answer (status {reply.status})") from None


# ----- paths


def _quoted(text: str) -> str:
    from urllib.parse import quote  # hsub never needs it, and its import takes a tenth of Python's start

    return quote(text, safe="")


def query(path: str, **parameters: object) -> str:
    """Return `path` with the parameters that are not None or empty."""
    pairs = [f"{name}={_quoted(str(value))}" for name, value in parameters.items() if value not in (None, "")]
    return path + "?" + "&".join(pairs) if pairs else path


def job_path(reference: str, below: str = "") -> str:
    """Return the path of a job's page: ``/v1/job/10_3``; with `below`, ``/v1/job/10_3/why``."""
    return f"/v1/job/{_quoted(reference)}" + (f"/{below}" if below else "")
