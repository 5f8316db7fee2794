"""Connect commands to the controller: HTTP/1.1 and JSON over its unix socket.

Commands must start fast. This package therefore implements only the part of HTTP that our own server
needs (`protocol`: a request and an answer, both with Content-Length). http.client is not imported:
that costs as much as Python's start. For the same reason values are plain tuples (`dataclasses`
costs 6 ms), paths are text, and the socket is the interpreter's own (`socket` first creates
enumerations of some hundred constants). It knows no routes except those of logs, of the history and of one's name.

With HPCSCHED_URL the same requests go to a gateway (`https`).

`Client` (`blocking`) and `AsyncClient` (`aio`) are for programs: `from hpcsched import Client`.

The server must be root, our own account, or the account to which root gave the socket's directory (SO_PEERCRED, unix(7)): a
socket that another user created is refused.
"""

from __future__ import annotations

import os
import sys
import time
from _socket import AF_UNIX, SO_PEERCRED, SO_SNDTIMEO, SOCK_STREAM, SOL_SOCKET, socket
from _struct import pack

from hpcsched import errors, paths
from hpcsched.client import protocol
from hpcsched.client.protocol import (
    READ_BYTES,
    TIMEOUT_S,
    BrokenConnectionError,
    HttpReply,
    Json,
    LogChunk,
    Pause,
    ReplyReader,
    Send,
    job_path,
    query,
)

PAGE_JOBS = 5_000

TYPE_CHECKING = False  # for type checkers; importing typing takes a tenth of a command's start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from os import PathLike
    from typing import Any, TypeVar

    from hpcsched.client.protocol import Flow

    T = TypeVar("T")

__all__ = [
    "BrokenConnectionError",
    "HttpReply",
    "Json",
    "LogChunk",
    "NoControllerError",
    "call",
    "call_again",
    "fetch_log",
    "fetch_text",
    "history",
    "job_path",
    "query",
    "request",
]

_UCRED_BYTES = 12  # struct ucred: pid, uid, gid
_NOBODY_LISTENS = (FileNotFoundError, ConnectionRefusedError)


class NoControllerError(errors.UnavailableError):
    """No process listens at the controller's socket."""


def socket_path() -> str:
    """Return the path of the controller's socket: HPCSCHED_API, or from the configuration."""
    given = os.environ.get("HPCSCHED_API", "")
    return given or paths.api_socket(os.environ, os.getuid())


def is_remote() -> bool:
    """Return whether HPCSCHED_URL names a gateway.

    Then no file and no account of this machine is the cluster's.
    """
    return bool(os.environ.get("HPCSCHED_URL", ""))


def must_be_local(name: str) -> None:
    """Raise ConfigError if HPCSCHED_URL is set: the command `name` connects to a node."""
    if is_remote():
        raise errors.ConfigError(
            f"cannot run {name} on this machine: HPCSCHED_URL names a cluster elsewhere, and {name} connects to its head and "
            "nodes; log in to the head and run it there"
        )


def my_name() -> str:
    """Return the account's name, or its number if it has none, as the controller does."""
    if is_remote():
        return str(call("GET", "/v1/me")["user"])
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
    return protocol.read_answer(request(method, path, body, timeout_s=timeout_s, where=where))


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
    return run(protocol.ask_text(path, timeout_s=timeout_s), perform)


def call_again(method: str, path: str, body: Json | None = None, *, timeout_s: float = TIMEOUT_S) -> Json:
    """Send a request as `call`, and retry after broken connections, if it is safe to repeat.

    After a broken connection the controller may be restarting, so its absence is also retried.
    Raises the first BrokenConnectionError if that takes too long.
    """
    return run(protocol.ask(method, path, body, timeout_s=timeout_s, again=True), perform)


def history(most: int | None = None, **filters: object) -> Json:
    """Return the jobs of the history that match, of all pages of the answer.

    With `most`, no page is asked for once there are as many; then the answer has the cursor of the next one. Raises as `call`.
    """
    jobs: list[Json] = []
    for answer in _pages_of_history(**filters):
        jobs += answer["jobs"]
        if most is not None and len(jobs) >= most:
            break
    return {**answer, "jobs": jobs}


def each_of_history(**filters: object) -> Iterator[Json]:
    """Yield the jobs of the history that match, page by page, so that few are in memory.

    While the jobs of a page are used, a thread reads the next page. Raises as `call`.
    """
    from concurrent.futures import ThreadPoolExecutor  # takes long; few commands need it

    pages = _pages_of_history(**filters, limit=PAGE_JOBS)
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, pages, None)
        while (answer := coming.result()) is not None:
            coming = reader.submit(next, pages, None)
            yield from answer["jobs"]


def _pages_of_history(**filters: object) -> Iterator[Json]:
    after = None
    while True:
        answer = call("GET", query("/v1/history", **filters, after=after))
        yield answer
        after = answer.get("next_cursor")
        if not after:
            return


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
    asked = protocol.ask_log(
        reference, stream=stream, offset=offset, limit_bytes=limit_bytes, wait_s=wait_s, timeout_s=timeout_s
    )
    return run(asked, perform)


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
    asked = protocol.exchange(method, path, body, timeout_s=timeout_s)
    return run(asked, lambda step: perform(step, where))


def run(flow: Flow[T], send: Callable[[Send], HttpReply]) -> T:
    """Perform the steps of a flow, one after the other, and return its result."""
    try:
        step = next(flow)
        while True:
            if isinstance(step, Pause):
                time.sleep(step.seconds)
                step = flow.send(None)
                continue
            try:
                reply = send(step)
            except errors.HpcschedError as error:
                step = flow.throw(error)
            else:
                step = flow.send(reply)
    except StopIteration as done:
        result: T = done.value
        return result


def perform(step: Send, where: str | PathLike[str] | None = None) -> HttpReply:
    """Send one request and return the answer.

    `where`: the socket; None for the gateway of HPCSCHED_URL, else for the default socket.
    """
    if where is None and is_remote():
        from hpcsched.client import https  # its imports take longer than Python's start

        return https.perform(https.find_endpoint(), step)
    try:
        sock = _connect(os.fspath(where or socket_path()), step.timeout_s)
    except errors.UnavailableError:
        job_id = os.environ.get("HPCSCHED_JOB_ID", "") or os.environ.get("SLURM_JOB_ID", "")
        agent = os.environ.get("HPCSCHED_SOCKET", "")
        if where is not None or not agent or not job_id.isdigit():
            raise
        data = protocol.body_bytes(step.body)
        return _by_agent(agent, int(job_id), step.method, step.path, data, step.timeout_s)
    try:
        try:
            sock.sendall(protocol.request_bytes(step.method, step.path, step.body))
        except (BrokenPipeError, ConnectionResetError):
            pass  # it did not read all, and may have sent the reason
        return _read(sock)
    except TimeoutError:
        raise protocol.late(step.timeout_s) from None
    except OSError as error:
        raise protocol.lost(error) from None
    finally:
        sock.close()


def _by_agent(agent: str, job_id: int, method: str, path: str, data: bytes, timeout_s: float) -> HttpReply:
    """Send the request through the agent, from a node without the controller's socket.

    The agent vouches for the job in which the command runs. The controller answers as to that job's owner, never as to an admin.
    Neither end of the relay knows the API's routes. See `hpcsched.controller.relay`.
    """
    from hpcnode.wire import protocol, sockets  # slow to import, and needed only here

    try:
        sock = sockets.connect(agent, timeout_s)
    except PermissionError as error:
        raise errors.UnavailableError(f"cannot ask the node's agent ({agent}): {error.strerror}") from None
    except OSError as error:
        raise BrokenConnectionError(f"lost the connection to this node's agent: {error}") from None
    try:
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


def _other_cluster() -> str:
    """Return how to reach this machine's cluster if the user's own one hides it; else ""."""
    system, own = paths.SYSTEM_CONFIG, str(paths.find_config_dir(os.environ, os.getuid()))
    if os.environ.get("HPCSCHED_CONFIG") or own == system or not os.path.exists(f"{system}/{paths.CONFIG_FILE}"):
        return ""
    return f". Your own cluster, of {own}, is meant; for that of this machine: export HPCSCHED_CONFIG={system}"


def _connect(where: str, timeout_s: float) -> socket:
    sock = socket(AF_UNIX, SOCK_STREAM)
    try:
        reach(sock, where, timeout_s)
        check_server(sock, where)
    except OSError as error:
        sock.close()
        raise unreachable(error, where) from None
    except errors.UnavailableError:
        sock.close()
        raise
    return sock


def unreachable(error: OSError, where: str) -> errors.UnavailableError:
    """Return the error for a socket that cannot be connected to."""
    why = error.strerror or str(error)
    todo = f"start it with 'hpcsched up'{_other_cluster()}; 'hpcsched doctor' says what is wrong"
    if isinstance(error, BlockingIOError):
        todo = "too many ask it at once; try again"
    if isinstance(error, PermissionError):
        todo = "an admin can set run_dir, in hpcsched.toml, to a directory that lets other users in"
    kind = NoControllerError if isinstance(error, _NOBODY_LISTENS) else errors.UnavailableError
    return kind(f"Unable to contact hpcsched controller ({where}: {why}): {todo}")


def check_server(sock: Any, where: str) -> None:
    """Raise UnavailableError if the server is neither root, ourselves nor of a safe directory."""
    _, uid = _peer(sock)
    if uid in (0, os.getuid()):
        return
    from hpcnode.os.trust import is_made_by  # its imports are needed only here

    if not is_made_by(where, uid):
        raise errors.UnavailableError(
            f"Unable to contact hpcsched controller ({where}: it is served by uid {uid}, which is neither root nor you, nor "
            "the account that root gave this directory)"
        )


def _peer(sock: Any) -> tuple[int, int]:
    """Return pid and uid of the peer process."""
    credentials = sock.getsockopt(SOL_SOCKET, SO_PEERCRED, _UCRED_BYTES)
    return int.from_bytes(credentials[:4], sys.byteorder), int.from_bytes(credentials[4:8], sys.byteorder)


def reach(sock: socket, where: str, timeout_s: float) -> None:
    """Connect. While the queue of the controller's socket is full, wait in line in the kernel.

    A socket that does not block gets EAGAIN instead (unix(7)). Those who ask again and again would get in before it.
    Raises BlockingIOError after `timeout_s`.
    """
    sock.settimeout(None)
    sock.setsockopt(SOL_SOCKET, SO_SNDTIMEO, pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6)))  # a timeval
    sock.connect(where)
    sock.settimeout(timeout_s)


def _read(sock: socket) -> HttpReply:
    """Return the answer as soon as it is complete."""
    reader = ReplyReader()
    while (reply := reader.feed(sock.recv(READ_BYTES))) is None:
        pass
    return reply
