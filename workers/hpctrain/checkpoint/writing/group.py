"""The processes that write one checkpoint together: each tells the first what it has written, and hears whether it is published.

Knows neither files nor what is told.  The first one listens; the trainers tell the others where, and the secret.
Rules: one question, one answer, for each checkpoint; who cannot be reached, or says nothing for a while, costs the checkpoint
and not the run: it is left out from then on, until it joins again.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

LENGTH = struct.Struct("!Q")
SECRET_BYTES = 32
TRY_S = 3.0
JOIN_S = 60.0
SILENT_S = 600.0  # a part that is not told within this time is not coming
MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where one rank's writer finds the first one."""

    rank: int
    addresses: tuple[str, ...]
    port: int
    secret: bytes


class Lost(OSError):
    """Another writer is gone, or silent."""


class First:
    """The one that collects what all have written, and says what became of it."""

    def __init__(self, size: int, listener: socket.socket, secret: bytes) -> None:
        self._size, self._listener, self._secret = size, listener, secret
        self._others: dict[int, socket.socket] = {}

    def collect(self, step: int) -> list[dict[str, Any]]:
        """Wait for what the others have to say of the checkpoint of a step, by rank.

        Raises:
            Lost: one says nothing.
        """
        self._welcome()
        return [self._hear(rank, step) for rank in range(1, self._size)]

    def announce(self, what: dict[str, Any]) -> None:
        """Tell all others."""
        for rank, one in list(self._others.items()):
            try:
                _send(one, what)
            except OSError:
                self._drop(rank)

    def close(self) -> None:
        """End all connections."""
        self._listener.close()
        for rank in list(self._others):
            self._drop(rank)

    def _welcome(self) -> None:
        """Take in who wants to join, until all are there."""
        until_s = time.monotonic() + JOIN_S
        while True:
            missing = self._size - 1 - len(self._others)
            self._listener.settimeout(max(0.001, until_s - time.monotonic()) if missing else 0.001)
            try:
                one, _ = self._listener.accept()
            except TimeoutError:
                if missing:
                    raise Lost(f"{missing} of {self._size} ranks' writers have not joined") from None
                return
            try:
                one.settimeout(TRY_S)
                if not hmac.compare_digest(_exactly(one, SECRET_BYTES), self._secret):
                    raise Lost("a stranger")
                rank = _receive(one)["rank"]
                _send(one, {"joined": True})
            except (OSError, ValueError, KeyError):
                one.close()
                continue
            self._drop(rank)
            self._others[rank] = one

    def _hear(self, rank: int, step: int) -> dict[str, Any]:
        one = self._others[rank]
        one.settimeout(SILENT_S)
        try:
            while (said := _receive(one))["step"] != step:
                pass  # of a checkpoint that has failed meanwhile
        except (OSError, ValueError, KeyError) as error:
            self._drop(rank)
            raise Lost(f"rank {rank}'s writer is gone: {error}") from error
        return said

    def _drop(self, rank: int) -> None:
        if rank in self._others:
            self._others.pop(rank).close()


class Other:
    """One that tells the first what it has written."""

    def __init__(self, seat: Endpoint) -> None:
        self._seat = seat
        self._line: socket.socket | None = None

    def tell(self, what: dict[str, Any]) -> dict[str, Any]:
        """Tell the first one, and return what it says when all have told.

        Raises:
            Lost: it is not there any more.
        """
        try:
            line = self._line = self._line or self._joined()
            line.settimeout(SILENT_S)
            _send(line, what)
            return _receive(line)
        except (OSError, ValueError) as error:
            self.close()
            raise Lost(f"the first rank's writer is gone: {error}") from error

    def close(self) -> None:
        """End the connection."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def _joined(self) -> socket.socket:
        for address in self._seat.addresses:
            try:
                line = socket.create_connection((address, self._seat.port), TRY_S)
                line.sendall(self._seat.secret)
                _send(line, {"rank": self._seat.rank})
                line.settimeout(JOIN_S)
                _receive(line)
            except (OSError, ValueError):
                continue  # another host may have the same address
            return line
        raise Lost(f"nobody answers at {', '.join(self._seat.addresses)}, port {self._seat.port}")


def _send(line: socket.socket, what: dict[str, Any]) -> None:
    content = json.dumps(what, separators=(",", ":")).encode()
    line.sendall(LENGTH.pack(len(content)) + content)


def _receive(line: socket.socket) -> dict[str, Any]:
    (length,) = LENGTH.unpack(_exactly(line, LENGTH.size))
    if length > MOST_BYTES:
        raise ValueError(f"a message of {length} bytes")
    said = json.loads(_exactly(line, length))
    if not isinstance(said, dict):
        raise ValueError("no object")
    return said


def _exactly(line: socket.socket, length: int) -> bytes:
    content = bytearray()
    while len(content) < length:
        part = line.recv(min(length - len(content), 1 << 20))
        if not part:
            raise Lost("the connection has ended")
        content += part
    return bytes(content)
