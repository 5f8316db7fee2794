"""Connections to the sockets of agents and of the controller, for step commands.

Sources: unix(7).
"""

from __future__ import annotations

import os
import socket
import time

AGENT_BACK_S = 20.0  # one that is replaced at an upgrade, or was killed, is there again within moments


def connect_to_agent(path: str) -> socket.socket:
    """Return a connection to this node's agent; one that is away at the moment is waited for. Raises OSError."""
    deadline_s = time.monotonic() + AGENT_BACK_S
    while True:
        try:
            return connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() >= deadline_s:
                raise
        time.sleep(0.05)


def connect(path: str) -> socket.socket:
    """Return a connection to the unix socket at `path`, however long that is. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _connect(sock, path)
    except OSError:
        sock.close()
        raise
    return sock


def _connect(sock: socket.socket, path: str) -> None:
    try:
        sock.connect(path)
    except OSError as error:
        if "too long" not in str(error):
            raise
        directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)  # a socket's path has 107 bytes at most
        try:
            sock.connect("/proc/self/fd/%d/%s" % (directory, os.path.basename(path)))
        finally:
            os.close(directory)
