"""What every command uses to talk to the controller: HTTP/1.1 and JSON over its unix socket.

Commands must start fast, so this speaks the little of HTTP that our own server needs (RFC 9112: a request with
Content-Length, an answer until the connection ends) instead of importing http.client, which costs as much as Python's start.

The server must be root or ourselves (SO_PEERCRED): a socket that somebody else planted is not talked to.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hpcsched import errors, paths

Json = dict[str, Any]

TIMEOUT_S = 60.0
READ_BYTES = 256 << 10
MAX_ANSWER_BYTES = 256 << 20
RETRY_S = 5.0  # how long to try again while the controller restarts, for requests that may be repeated
_UCRED = struct.Struct("iII")


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


def socket_path() -> Path:
    """Return the path of the controller's socket: HPCSCHED_API, or what the configuration says."""
    given = os.environ.get("HPCSCHED_API", "")
    return Path(given) if given else paths.api_socket(os.environ, os.getuid())


def call(method: str, path: str, body: Json | None = None, *, timeout_s: float = TIMEOUT_S) -> Json:
    """Ask the controller and return its answer.

    Raises UnavailableError if there is no controller, else the error that it answered.
    """
    response = request(method, path, body, timeout_s=timeout_s)
    try:
        answer = json.loads(response.body)
    except ValueError:
        raise errors.ProtocolError(f"cannot read the controller's answer (status {response.status})") from None
    if response.status != 200:
        raise _error(answer)
    return answer


def call_again(method: str, path: str, body: Json | None = None, *, timeout_s: float = TIMEOUT_S) -> Json:
    """Ask as `call` does, and once more while the connection fails: for requests that are safe to repeat."""
    deadline_s = time.monotonic() + RETRY_S
    while True:
        try:
            return call(method, path, body, timeout_s=timeout_s)
        except BrokenConnectionError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


class BrokenConnectionError(errors.UnavailableError):
    """The connection ended before the answer came: whether the request took effect is not known."""


def request(method: str, path: str, body: Json | None = None, *, timeout_s: float = TIMEOUT_S) -> Response:
    """Send one request and return the whole answer. Raises UnavailableError."""
    where = socket_path()
    data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode("utf-8", "surrogateescape")
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: hpcsched\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with _connect(where, timeout_s) as sock:
        try:
            sock.sendall(head.encode("ascii") + data)
            return _read(sock)
        except TimeoutError:
            raise BrokenConnectionError(f"no answer from the hpcsched controller within {timeout_s:g} s") from None
        except OSError as error:
            raise BrokenConnectionError(f"lost the connection to the hpcsched controller: {error.strerror}") from None


def query(path: str, **parameters: object) -> str:
    """Return `path` with the parameters that are not None or empty."""
    pairs = [f"{name}={quote(str(value), safe='')}" for name, value in parameters.items() if value not in (None, "")]
    return path + "?" + "&".join(pairs) if pairs else path


def _connect(where: Path, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(str(where))
    except OSError as error:
        sock.close()
        why = error.strerror or str(error)
        raise errors.UnavailableError(
            f"Unable to contact hpcsched controller ({where}: {why}): start it with 'hpcsched up'"
        ) from None
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid not in (0, os.getuid()):
        sock.close()
        raise errors.UnavailableError(
            f"Unable to contact hpcsched controller ({where}: it is served by uid {uid}, which is neither root nor you)"
        )
    return sock


def _read(sock: socket.socket) -> Response:
    received = bytearray()
    while data := sock.recv(READ_BYTES):
        received += data
        if len(received) > MAX_ANSWER_BYTES:
            raise errors.ProtocolError("cannot read the controller's answer: it is too long")
    head, found, body = bytes(received).partition(b"\r\n\r\n")
    if not found:
        raise BrokenConnectionError("lost the connection to the hpcsched controller before it answered")
    lines = head.decode("latin-1").split("\r\n")
    status = int(lines[0].split(" ", 2)[1])
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if len(body) < int(headers.get("content-length", len(body))):
        raise BrokenConnectionError("lost the connection to the hpcsched controller in the middle of its answer")
    return Response(status=status, headers=headers, body=body)


def _error(answer: object) -> errors.HpcschedError:
    """Return the error that the controller answered."""
    if not isinstance(answer, dict):
        return errors.ProtocolError("cannot read the controller's answer")
    kind = getattr(errors, str(answer.get("kind")), errors.RequestError)
    if not (isinstance(kind, type) and issubclass(kind, errors.HpcschedError)):
        kind = errors.RequestError
    return kind(str(answer.get("error")))
