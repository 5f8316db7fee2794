"""The processes that write one checkpoint together.

Each reports its part to the first one, and gets the result.

Knows neither files nor the content of messages.  The first one listens; the trainers pass its address and secret to the others.
Rules: one request and one answer for each checkpoint.  A process that cannot be reached, or is silent for long, costs the
checkpoint, not the run: it is left out until it joins again.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from hpctrain.peers import (
    Messages,
    Session,
    encryption_wanted,
    job_key,
    keyed,
    prove_as_guest,
    prove_as_host,
)
from hpctrain.values import travels

LENGTH = struct.Struct("!Q")
SECRET_BYTES = 32
TRY_S = 3.0
JOIN_S = 60.0
SILENT_S = 600.0  # a part that is not reported within this time counts as lost
MOST_BYTES = 1 << 30


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of the first rank's writer, for one other rank."""

    rank: int
    addresses: tuple[str, ...]
    port: int
    secret: bytes


class Lost(OSError):
    """Another writer has ended, or is silent."""


class First:
    """The first writer, which collects the parts of all and announces the result."""

    def __init__(self, size: int, listener: socket.socket, secret: bytes) -> None:
        self._size, self._listener, self._key = size, listener, _key_of(secret)
        self._others: dict[int, _Line] = {}

    def collect(self, step: int) -> list[dict[str, Any]]:
        """Return the other writers' messages about the checkpoint of a step, by rank.

        Raises:
            Lost: one is silent.
        """
        self._welcome()
        return [self._received_from(rank, step) for rank in range(1, self._size)]

    def announce(self, what: dict[str, Any]) -> None:
        """Send the result to all others."""
        for rank, connection in list(self._others.items()):
            try:
                connection.send(what)
            except OSError:
                self._drop(rank)

    def close(self) -> None:
        """End all connections."""
        self._listener.close()
        for rank in list(self._others):
            self._drop(rank)

    def _welcome(self) -> None:
        """Accept writers until all have joined."""
        until_s = time.monotonic() + JOIN_S
        while True:
            missing = self._size - 1 - len(self._others)
            self._listener.settimeout(max(0.001, until_s - time.monotonic()) if missing else 0.001)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if missing:
                    raise Lost(f"{missing} of {self._size} ranks' writers have not joined") from None
                return
            try:
                connection.settimeout(TRY_S)
                session = prove_as_host(connection, self._key, encrypted=encryption_wanted(os.environ))
                if session is None:
                    raise Lost("a stranger")
                line = _Line(connection, session)
                rank = line.receive()["rank"]
                line.send({"joined": True})
            except (OSError, ValueError, KeyError):
                connection.close()
                continue
            self._drop(rank)
            self._others[rank] = line

    def _received_from(self, rank: int, step: int) -> dict[str, Any]:
        connection = self._others[rank]
        connection.settimeout(SILENT_S)
        try:
            while (message := connection.receive())["step"] != step:
                pass  # about an earlier checkpoint, which has failed
        except (OSError, ValueError, KeyError) as error:
            self._drop(rank)
            raise Lost(f"rank {rank}'s writer is gone: {error}") from error
        return message

    def _drop(self, rank: int) -> None:
        if rank in self._others:
            self._others.pop(rank).close()


class Other:
    """A writer that reports its part to the first one."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._line: _Line | None = None

    def report(self, what: dict[str, Any]) -> dict[str, Any]:
        """Report to the first writer, and return the result.

        Raises:
            Lost: the first writer has ended.
        """
        try:
            line = self._line = self._line or self._joined()
            line.settimeout(SILENT_S)
            line.send(what)
            return line.receive()
        except (OSError, ValueError) as error:
            self.close()
            raise Lost(f"the first rank's writer is gone: {error}") from error

    def close(self) -> None:
        """End the connection."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def _joined(self) -> _Line:
        key, encrypted = _key_of(self._endpoint.secret), encryption_wanted(os.environ)
        for address in self._endpoint.addresses:
            try:
                connection = socket.create_connection((address, self._endpoint.port), TRY_S)
                # The first writer may accept late: it accepts when it needs the others' parts.
                connection.settimeout(JOIN_S)
                session = prove_as_guest(connection, key, encrypted=encrypted)
                if session is None:
                    connection.close()
                    continue
                line = _Line(connection, session)
                line.send({"rank": self._endpoint.rank})
                line.receive()
            except (OSError, ValueError):
                continue  # another host may have the same address
            return line
        raise Lost(f"no answer at {', '.join(self._endpoint.addresses)}, port {self._endpoint.port}")


def _key_of(secret: bytes) -> bytes:
    """Return the key of the writers' connections.

    The secret may have been overheard, the job's key not.
    """
    return keyed(job_key(os.environ), b"writers", secret)


class _Line:
    """A connection whose messages are authenticated."""

    def __init__(self, connection: socket.socket, session: Session) -> None:
        self._connection, self._messages = connection, Messages(session)
        self.settimeout, self.close = connection.settimeout, connection.close

    def send(self, what: dict[str, Any]) -> None:
        """Send a message. Raises OSError."""
        content = self._messages.wrapped(json.dumps(what, separators=(",", ":")).encode())
        self._connection.sendall(LENGTH.pack(len(content)) + content)

    def receive(self) -> dict[str, Any]:
        """Return the next message. Raises OSError, ValueError."""
        (length,) = LENGTH.unpack(_exactly(self._connection, LENGTH.size))
        if length > MOST_BYTES:
            raise ValueError(f"a message of {length} bytes")
        message = json.loads(self._messages.unwrapped(_exactly(self._connection, length)))
        if not isinstance(message, dict):
            raise ValueError("no object")
        return message


def _exactly(line: socket.socket, length: int) -> bytes:
    content = bytearray()
    while len(content) < length:
        part = line.recv(min(length - len(content), 1 << 20))
        if not part:
            raise Lost("the connection has ended")
        content += part
    return bytes(content)
