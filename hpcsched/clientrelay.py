"""Access to the API from a node without the controller's socket, through the node's agent.

The agent vouches for the job in which the command runs. The controller answers as to that job's
owner, never as to an admin. Neither end of the relay knows the API's routes. See
`hpcsched.controller.relay`.
"""

from __future__ import annotations

import os
import sys
from _socket import AF_UNIX, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET, socket

from hpcnode.wire import protocol
from hpcsched.errors import UnavailableError

READ_BYTES = 256 << 10
_UCRED_BYTES = 12  # struct ucred: pid, uid, gid


def ask(
    agent: str, job_id: int, method: str, path: str, data: bytes, timeout_s: float
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the answer.

    Raises UnavailableError, and OSError if the connection breaks.
    """
    sock = socket(AF_UNIX, SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(agent)
        uid = int.from_bytes(sock.getsockopt(SOL_SOCKET, SO_PEERCRED, _UCRED_BYTES)[4:8], sys.byteorder)
        if uid not in (0, os.getuid()):
            raise UnavailableError(f"cannot ask the node's agent ({agent}): it is served by uid {uid}")
        sock.sendall(protocol.encode(protocol.ApiRequest(job_id=job_id, method=method, path=path), data))
        return _answer(sock)
    finally:
        sock.close()


def _answer(sock: socket) -> tuple[int, dict[str, str], bytes]:
    framer = protocol.Framer()
    while received := sock.recv(READ_BYTES):
        for message, blob in framer.feed(received):
            if isinstance(message, protocol.ApiAnswer):
                return message.status, message.headers, blob
            why = getattr(message, "error", "") or getattr(message, "why", "") or type(message).__name__
            raise UnavailableError(f"cannot ask the controller by this node's agent: {why}")
    raise UnavailableError("cannot ask the controller by this node's agent: it closed the connection")
