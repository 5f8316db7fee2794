"""htun: TCP connections through a step's standard input and output, for htunnel.

Both ends have a `Tunnel`. The head's end gets accepted connections; the node's end makes a connection to HOST and PORT for each.
A frame is the connection's number, a letter, a length and that many bytes.

Rules: of one connection at most WINDOW bytes are on their way, so a slow reader delays only its own writer, and memory is
bounded. A closed connection is closed in both directions, including one that was shut down for writing only.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import Callable, Dict, Optional, Sequence

from hpcnode.os.loop import READ, Loop, Stream

READY, OPEN, DATA, TAKEN, CLOSE = b"r", b"o", b"d", b"t", b"c"
WINDOW = 256 << 10
CONNECT_S = 10.0
_HEADER = struct.Struct("!IcI")
_COUNT = struct.Struct("!I")

Connect = Callable[[], socket.socket]  # raises OSError


class TunnelError(Exception):
    """The other end violates the protocol."""


class _Connection:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.untaken = 0  # bytes sent that the other end has not delivered
        self.received = 0
        self.reported = 0  # delivered bytes that the other end knows of


class Tunnel:
    """One end. `send` gets bytes for the other end, `feed` takes bytes from there."""

    def __init__(self, loop: Loop, send: Callable[[bytes], None], connect: Optional[Connect] = None) -> None:
        self._loop = loop
        self._send = send
        self._connect = connect
        self._data = bytearray()
        self._connections: Dict[int, _Connection] = {}
        self._last = 0
        self.on_ready: Callable[[], None] = lambda: None
        self.on_refused: Callable[[str], None] = lambda why: None
        loop.after_turn = self._send_taken

    def send_ready(self) -> None:
        """Tell the other end that it may open connections."""
        self._send_frame(0, READY)

    def add(self, sock: socket.socket) -> None:
        """Add a connection that was accepted here."""
        self._last += 1
        self._send_frame(self._last, OPEN)
        self._keep(self._last, sock)

    def feed(self, data: bytes) -> None:
        """Handle bytes of the other end. Raises TunnelError."""
        self._data += data
        while len(self._data) >= _HEADER.size:
            number, kind, length = _HEADER.unpack_from(self._data)
            if length > WINDOW:
                raise TunnelError("a frame of %d bytes is too long" % length)
            end = _HEADER.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_HEADER.size : end])
            del self._data[:end]
            self._take(number, kind, body)

    def _take(self, number: int, kind: bytes, body: bytes) -> None:
        connection = self._connections.get(number)
        if kind == READY:
            self.on_ready()
        elif kind == OPEN and self._connect is not None:
            self._open(number, self._connect)
        elif connection is None:
            if kind == CLOSE and body:
                self.on_refused(body.decode("utf-8", "replace"))
        elif kind == DATA:
            connection.received += len(body)
            connection.stream.send(body)
            connection.stream.flush()
        elif kind == TAKEN:
            connection.untaken -= _COUNT.unpack(body)[0]
            connection.stream.pause(connection.untaken >= WINDOW)
        elif kind == CLOSE:
            del self._connections[number]
            connection.stream.close_when_sent()
            if body:
                self.on_refused(body.decode("utf-8", "replace"))

    def _open(self, number: int, connect: Connect) -> None:
        try:
            sock = connect()
        except OSError as error:
            self._send_frame(number, CLOSE, (error.strerror or str(error)).encode())
        else:
            self._keep(number, sock)

    def _keep(self, number: int, sock: socket.socket) -> None:
        connection = _Connection(Stream(self._loop, sock, lambda data: self._received(number, data)))
        self._connections[number] = connection

    def _received(self, number: int, data: bytes) -> None:
        connection = self._connections.get(number)
        if connection is None:
            return
        if not data:
            del self._connections[number]
            self._send_frame(number, CLOSE)
            return
        connection.untaken += len(data)
        for at in range(0, len(data), WINDOW):
            self._send_frame(number, DATA, data[at : at + WINDOW])
        connection.stream.pause(connection.untaken >= WINDOW)

    def _send_taken(self) -> None:
        """Send the number of bytes that were delivered since the last call."""
        for number, connection in self._connections.items():
            taken = connection.received - connection.stream.unsent - connection.reported
            if taken > 0:
                connection.reported += taken
                self._send_frame(number, TAKEN, _COUNT.pack(taken))

    def _send_frame(self, number: int, kind: bytes, body: bytes = b"") -> None:
        self._send(_HEADER.pack(number, kind, len(body)) + body)


def main(argv: Sequence[str]) -> int:
    """Serve the node's end on standard input and output until the input ends: htun HOST PORT."""
    host, port = argv[0], int(argv[1])
    loop = Loop()
    tunnel = Tunnel(loop, _write, lambda: socket.create_connection((host, port), CONNECT_S))

    def read(_events: int) -> None:
        data = os.read(0, WINDOW)
        if data:
            tunnel.feed(data)
        else:
            loop.stopped = True

    loop.watch(0, READ, read)
    tunnel.send_ready()
    loop.run()
    return 0


def _write(data: bytes) -> None:
    """Write to the head's end, which always reads, so that blocking is safe."""
    left = memoryview(data)
    while left:
        left = left[os.write(1, left) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
