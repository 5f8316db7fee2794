"""How fast the network between two nodes is: one gives zeros over TCP for a second, the other counts what comes.

The giver listens on a port of the kernel's choice, to one who knows the token that both were told, and not for long. The
first part of a second does not count: TCP starts slowly (RFC 5681). The figure is what programs get, headers not counted: 941 of
1000 Mbit/s on Ethernet. It knows nothing of the agent, and of nodes only an address.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any, Dict, Optional

from hpcnode.os import process

CHUNK_BYTES = 1 << 20
GIVE_S = 1.2
WARM_UP_S = 0.2
PATIENCE_S = 10.0  # for the other to come, and for each word of it
TOKEN_BYTES = 64  # at most


def found(token: str, host: str, port: int) -> Dict[str, Any]:
    """Return the `link_port` where we give, or, if there is a `host` that does, the `rate_mbps` from there. Raises OSError."""
    return {"rate_mbps": rate_mbps(host, port, token)} if host else {"link_port": give(token)}


def give(token: str) -> int:
    """Give to the one who comes with `token`, from a process of its own, and return the port where. Raises OSError."""
    with _listener() as listener:
        port = int(listener.getsockname()[1])
        if os.fork() == 0:
            try:
                os.setsid()
                signal.alarm(int(2 * PATIENCE_S))
                process.close_all_but([listener.fileno()])
                give_once(listener, token)
            finally:
                os._exit(0)
    return port


def give_once(listener: socket.socket, token: str, for_s: float = GIVE_S) -> None:
    """Wait at `listener` for one who shows `token`, and give zeros for so long; others are turned away. Raises OSError."""
    import hmac  # in a process of its own: no agent need have it in memory

    listener.settimeout(PATIENCE_S)
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(PATIENCE_S)
            if hmac.compare_digest(_line(connection), token.encode()):
                zeros = bytes(CHUNK_BYTES)
                until_s = time.monotonic() + for_s
                while time.monotonic() < until_s:
                    connection.sendall(zeros)
                return


def rate_mbps(host: str, port: int, token: str, warm_up_s: float = WARM_UP_S) -> int:
    """Return how many Mbit/s come from the giver there. Raises OSError; ValueError if it turned us away."""
    buffer = bytearray(CHUNK_BYTES)
    with socket.create_connection((host, port), PATIENCE_S) as connection:
        connection.sendall(token.encode() + b"\n")
        came, last_s = 0, 0.0
        counted_from_s: Optional[float] = None  # before that it warms up
        first_s = time.monotonic()
        while True:
            count = connection.recv_into(buffer)
            if not count:
                break
            last_s = time.monotonic()
            if counted_from_s is None:
                if last_s - first_s >= warm_up_s:
                    counted_from_s = last_s
            else:
                came += count
    if counted_from_s is None or last_s <= counted_from_s:
        raise ValueError("nothing came from %s port %d" % (host, port))
    return max(1, round(came * 8 / 1e6 / (last_s - counted_from_s)))


def _listener() -> socket.socket:
    """Return a socket that listens on all addresses of this node, of both families where there are two."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError:
            pass  # the kernel has no IPv6 now
    return socket.create_server(("", 0))


def _line(connection: socket.socket) -> bytes:
    """Return the first line that comes, as much of it as a token may have."""
    got = b""
    while not got.endswith(b"\n") and len(got) <= TOKEN_BYTES:
        try:
            more = connection.recv(TOKEN_BYTES + 1 - len(got))
        except OSError:  # gone, or silent: not the one
            return b""
        if not more:
            return b""
        got += more
    return got.rstrip(b"\n")
