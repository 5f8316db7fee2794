"""Connect commands to the controller: HTTP/1.1 and JSON over its unix socket.

Commands must start fast. This module therefore implements only the part of HTTP that our own server
needs (RFC 9112: a request and an answer, both with Content-Length). http.client is not imported:
that costs as much as Python's start. For the same reason values are plain tuples (`dataclasses`
costs 6 ms), paths are text, and the socket is the interpreter's own (`socket` first creates
enumerations of some hundred constants). It knows no routes except that of logs.

The server must be root, our own account, or the account to which root gave the socket's directory (SO_PEERCRED, unix(7)): a
socket that another user created is refused.
"""

from __future__ import annotations

import json
import os
import sys
import time
from _socket import AF_UNIX, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET, socket
from collections import namedtuple

from hpcsched import errors, paths

TYPE_CHECKING = False  # for type checkers; importing typing takes a tenth of a command's start
if TYPE_CHECKING:
    from os import PathLike
    from typing import Any

Json = dict[str, "Any"]

TIMEOUT_S = 60.0
READ_BYTES = 256 << 10
MAX_ANSWER_BYTES = 256 << 20
RETRY_S = 10.0  # retry time while the controller restarts, for requests that may be repeated
TOO_OFTEN = 429  # status: the account sends requests too often
PATIENCE_S = 60.0  # retry time for that status
CROWDED_S = 0.02  # pause before the next attempt to connect if the socket's queue is full
_UCRED_BYTES = 12  # struct ucred: pid, uid, gid
_NOBODY_LISTENS = (FileNotFoundError, ConnectionRefusedError)


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


class NoControllerError(errors.UnavailableError):
    """No process listens at the controller's socket."""


def socket_path() -> str:
    """Return the path of the controller's socket: HPCSCHED_API, or from the configuration."""
    given = os.environ.get("HPCSCHED_API", "")
    return given or paths.api_socket(os.environ, os.getuid())


def my_name() -> str:
    """Return the account's name, or its number if it has none, as the controller does."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def call(
    method: str,
    path: str,
    body: Json | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    where: str | PathLike[str] | None = None,
) -> Json:
    """Send a request to the controller and return its answer.

    `where` is the socket, None for the default. Raises UnavailableError if there is no controller,
    else the error that it answered.
    """
    response = request(method, path, body, timeout_s=timeout_s, where=where)
    if response.status != 200:
        raise _error(response)
    answer = _json(response)
    if not isinstance(answer, dict):
        raise errors.ProtocolError("cannot read the controller's answer: it is no JSON object")
    return answer


def controller_pid() -> int:
    """Return the pid of the process that listens at the controller's socket.

    It works even if that process is busy. 0: it is in another pid namespace.
    Raises NoControllerError if there is none, UnavailableError if it cannot be reached.
    """
    sock = _connect(os.fspath(socket_path()), TIMEOUT_S)
    try:
        return _peer(sock)[0]
    finally:
        sock.close()


def fetch_text(path: str, *, timeout_s: float = TIMEOUT_S) -> str:
    """Return the text at `path` of the API. Raises as `call`."""
    response = request("GET", path, timeout_s=timeout_s)
    if response.status != 200:
        raise _error(response)
    return response.body.decode("utf-8", "replace")


def call_again(method: str, path: str, body: Json | None = None, *, timeout_s: float = TIMEOUT_S) -> Json:
    """Send a request as `call`, and retry after broken connections, if it is safe to repeat.

    After a broken connection the controller may be restarting, so its absence is also retried.
    Raises the first BrokenConnectionError if that takes too long.
    """
    broken: BrokenConnectionError | None = None
    deadline_s = 0.0
    while True:
        try:
            return call(method, path, body, timeout_s=timeout_s)
        except BrokenConnectionError as error:
            if broken is None:
                broken, deadline_s = error, time.monotonic() + RETRY_S
        except errors.UnavailableError:
            if broken is None:
                raise
        if time.monotonic() > deadline_s:
            raise broken
        time.sleep(0.1)


def fetch_log(
    reference: str,
    *,
    stream: str = "out",
    offset: int = 0,
    limit_bytes: int | None = None,
    wait_s: float = 0,
    timeout_s: float = TIMEOUT_S,
) -> LogChunk:
    """Return a piece of a job's output, ``out`` or ``err``, from `offset` on.

    A negative offset counts from the end. It waits up to `wait_s` for data after `offset`. Raises as `call`.
    """
    path = query("/v1/log", job=reference, stream=stream, offset=offset, limit=limit_bytes, wait_s=wait_s or None)
    response = request("GET", path, timeout_s=timeout_s + wait_s)
    if response.status != 200:
        raise _error(response)
    headers = response.headers
    try:
        return LogChunk(
            data=response.body,
            offset=int(headers["x-offset"]),
            size=int(headers["x-size"]),
            path=str(json.loads(headers["x-path"])),
            ended=headers["x-ended"] == "1",
        )
    except (KeyError, ValueError) as error:
        raise errors.ProtocolError(f"cannot read the controller's answer: {error}") from None


def request(
    method: str,
    path: str,
    body: Json | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    where: str | PathLike[str] | None = None,
) -> HttpReply:
    """Send one request and return the whole answer; retry after a rate limit.

    Raises UnavailableError.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        response = _request(method, path, body, timeout_s, where)
        if response.status != TOO_OFTEN:
            return response
        wait_s = _retry_after_s(response)
        if time.monotonic() + wait_s > deadline_s:
            return response
        time.sleep(wait_s)


def _retry_after_s(response: HttpReply) -> float:
    """Return how long to wait: the server's time, randomly up to half more or less.

    The waiting clients must not all return at once.
    """
    text = response.headers.get("retry-after", "")
    wait_s = int(text) if text.isdigit() and len(text) < 3 else 1
    return wait_s * (0.5 + os.urandom(1)[0] / 255)


def _request(
    method: str, path: str, body: Json | None, timeout_s: float, where: str | PathLike[str] | None
) -> HttpReply:
    data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode("utf-8", "surrogateescape")
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: hpcsched\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    try:
        sock = _connect(os.fspath(where or socket_path()), timeout_s)
    except errors.UnavailableError:
        job_id = os.environ.get("HPCSCHED_JOB_ID", "") or os.environ.get("SLURM_JOB_ID", "")
        agent = os.environ.get("HPCSCHED_SOCKET", "")
        if where is not None or not agent or not job_id.isdigit():
            raise
        return _by_agent(agent, int(job_id), method, path, data, timeout_s)
    try:
        try:
            sock.sendall(head.encode("ascii") + data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it did not read all, and may have sent the reason
        return _read(sock)
    except TimeoutError:
        raise BrokenConnectionError(f"no answer from the hpcsched controller within {timeout_s:g} s") from None
    except OSError as error:
        raise BrokenConnectionError(f"lost the connection to the hpcsched controller: {error.strerror}") from None
    finally:
        sock.close()


def _by_agent(agent: str, job_id: int, method: str, path: str, data: bytes, timeout_s: float) -> HttpReply:
    """Send the request through the agent, from a node without the controller's socket.

    The agent vouches for the job in which the command runs. The controller answers as to that job's owner, never as to an admin.
    Neither end of the relay knows the API's routes. See `hpcsched.controller.relay`.
    """
    from hpcnode.wire import protocol  # slow to import, and needed only here

    sock = socket(AF_UNIX, SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(agent)
        _, uid = _peer(sock)
        if uid not in (0, os.getuid()):
            raise errors.UnavailableError(f"cannot ask the node's agent ({agent}): it is served by uid {uid}")
        sock.sendall(protocol.encode(protocol.ApiRequest(job_id=job_id, method=method, path=path), data))
        framer = protocol.Framer()
        while received := sock.recv(READ_BYTES):
            for message, blob in framer.feed(received):
                if isinstance(message, protocol.ApiAnswer):
                    return HttpReply(message.status, message.headers, blob)
                why = getattr(message, "error", "") or getattr(message, "why", "") or type(message).__name__
                raise errors.UnavailableError(f"cannot ask the controller by this node's agent: {why}")
        raise errors.UnavailableError("cannot ask the controller by this node's agent: it closed the connection")
    except OSError as error:
        raise BrokenConnectionError(f"lost the connection to this node's agent: {error}") from None
    finally:
        sock.close()


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


def _other_cluster() -> str:
    """Return how to reach this machine's cluster if the user's own one hides it; else ""."""
    system, own = paths.SYSTEM_CONFIG, str(paths.find_config_dir(os.environ, os.getuid()))
    if os.environ.get("HPCSCHED_CONFIG") or own == system or not os.path.exists(f"{system}/{paths.CONFIG_FILE}"):
        return ""
    return f". Your own cluster, of {own}, is meant; for that of this machine: export HPCSCHED_CONFIG={system}"


def _connect(where: str, timeout_s: float) -> socket:
    sock = socket(AF_UNIX, SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        _reach(sock, where, timeout_s)
    except OSError as error:
        sock.close()
        why = error.strerror or str(error)
        todo = f"start it with 'hpcsched up'{_other_cluster()}"
        if isinstance(error, BlockingIOError):
            todo = "too many ask it at once; try again"
        if isinstance(error, PermissionError):
            todo = "an admin can set run_dir, in hpcsched.toml, to a directory that lets other users in"
        kind = NoControllerError if isinstance(error, _NOBODY_LISTENS) else errors.UnavailableError
        raise kind(f"Unable to contact hpcsched controller ({where}: {why}): {todo}") from None
    _, uid = _peer(sock)
    if uid not in (0, os.getuid()) and not _is_given_by_root(where, uid):
        sock.close()
        raise errors.UnavailableError(
            f"Unable to contact hpcsched controller ({where}: it is served by uid {uid}, which is neither root nor you, nor "
            "the account that root gave this directory)"
        )
    return sock


def _is_given_by_root(where: str, uid: int) -> bool:
    """Return whether root gave the socket's directory to `uid` alone.

    Only root could have made it in its parent. Further above, others may write under a sticky bit.
    """
    folder = os.path.dirname(os.path.realpath(where))
    found = os.lstat(folder)
    if found.st_uid != uid or found.st_mode & 0o022:
        return False
    excused = 0
    while folder != "/":
        folder = os.path.dirname(folder)
        found = os.lstat(folder)
        if found.st_uid != 0 or (found.st_mode & 0o022 and not found.st_mode & excused):
            return False
        excused = 0o1000
    return True


def _peer(sock: socket) -> tuple[int, int]:
    """Return pid and uid of the peer process."""
    credentials = sock.getsockopt(SOL_SOCKET, SO_PEERCRED, _UCRED_BYTES)
    return int.from_bytes(credentials[:4], sys.byteorder), int.from_bytes(credentials[4:8], sys.byteorder)


def _reach(sock: socket, where: str, timeout_s: float) -> None:
    """Connect, and retry while the queue of the controller's socket is full (EAGAIN, unix(7))."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            sock.connect(where)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(CROWDED_S)


def _read(sock: socket) -> HttpReply:
    """Return the answer as soon as it is complete.

    It does not wait until the controller closes the connection.
    """
    received = bytearray()
    head: tuple[int, dict[str, str]] | None = None
    missing = 1
    while missing > 0:
        data = sock.recv(READ_BYTES)
        if not data:
            where = "before it answered" if head is None else "in the middle of its answer"
            raise BrokenConnectionError(f"lost the connection to the hpcsched controller {where}")
        received += data
        if len(received) > MAX_ANSWER_BYTES:
            raise errors.ProtocolError("cannot read the controller's answer: it is too long")
        if head is None and (end := received.find(b"\r\n\r\n")) >= 0:
            status, headers, length = _head(bytes(received[:end]))
            head = status, headers
            del received[: end + 4]
        if head is not None:
            missing = length - len(received)
    assert head is not None  # else data is missing
    status, headers = head
    return HttpReply(status=status, headers=headers, body=bytes(received[:length]))


def _head(text: bytes) -> tuple[int, dict[str, str], int]:
    """Return status, headers and body length from the head of an answer."""
    lines = text.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    try:
        return int(lines[0].split(" ", 2)[1]), headers, int(headers["content-length"])
    except (IndexError, KeyError, ValueError):
        raise errors.ProtocolError("cannot read the controller's answer: it is not the HTTP that we speak") from None


def _json(response: HttpReply) -> object:
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError):
        raise errors.ProtocolError(f"cannot read the controller's answer (status {response.status})") from None


def _error(response: HttpReply) -> errors.HpcschedError:
    """Return the error of the controller's answer."""
    answer = _json(response)
    if not isinstance(answer, dict):
        return errors.ProtocolError(f"cannot read the controller's answer (status {response.status})")
    return errors.error_of(answer)
