"""htun: connections through a step's standard streams, for htunnel and the gateway.

Usage: htun HOST PORT, htun served, htun socket.

Both ends have a `Tunnel`. The head's end gets accepted connections. For each of them the node's end makes a connection: to HOST
and PORT, or with `served` to the job's own socket. A frame is the connection's number, a letter, a length and that many bytes.

The job's own socket is what the web pages open. It is a unix socket in a directory that only the user can enter, so that other
users of the node cannot reach it, and the server behind it needs no password. `htun socket` makes the directory and prints the
path; its name is made of the key of the job's attempt, so that no other user can make it first.

Rules: of one connection at most WINDOW bytes are on their way, so a slow reader delays only its own writer, and memory is
bounded. A closed connection is closed in both directions, including one that was shut down for writing only.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import stat
import struct
import sys
from typing import Callable, Dict, Iterator, Mapping, Optional, Sequence, Tuple

from hpcnode.os import mounts
from hpcnode.os.loop import READ, Loop, Stream

READY, OPEN, DATA, TAKEN, CLOSE = b"r", b"o", b"d", b"t", b"c"
WINDOW = 256 << 10
CONNECT_S = 10.0
SOCKET = "http"
HEADER = struct.Struct("!IcI")
COUNT = struct.Struct("!I")

Connect = Callable[[], socket.socket]  # raises OSError


class TunnelError(Exception):
    """The other end violates the protocol."""


def frames(data: bytearray) -> Iterator[Tuple[int, bytes, bytes]]:
    """Take the whole frames from the front of `data`.

    Yield the number of the connection, the letter and the bytes of each. Raises TunnelError.
    """
    while len(data) >= HEADER.size:
        number, kind, length = HEADER.unpack_from(data)
        if length > WINDOW:
            raise TunnelError("a frame of %d bytes is too long" % length)
        end = HEADER.size + length
        if len(data) < end:
            return
        body = bytes(data[HEADER.size : end])
        del data[:end]
        yield number, kind, body


def frame_of(number: int, kind: bytes, body: bytes = b"") -> bytes:
    """Return a frame."""
    return HEADER.pack(number, kind, len(body)) + body


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
        for number, kind, body in frames(self._data):
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
            connection.untaken -= COUNT.unpack(body)[0]
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
                self._send_frame(number, TAKEN, COUNT.pack(taken))

    def _send_frame(self, number: int, kind: bytes, body: bytes = b"") -> None:
        self._send(frame_of(number, kind, body))


# ----- the job's own socket


def own_directory(environ: Mapping[str, str], folder: str = mounts.TMP) -> str:
    """Return the directory of the job's own socket. Raises OSError: it is not known."""
    key = environ.get("HPCSCHED_JOB_KEY", "")
    if not key:
        raise OSError("HPCSCHED_JOB_KEY is not set: run this in a job")
    return os.path.join(folder, "hpcsched-" + hmac.new(key.encode(), b"served", hashlib.sha256).hexdigest()[:32])


def make_own_directory(environ: Mapping[str, str], folder: str = mounts.TMP) -> str:
    """Make the directory of the job's own socket; return the socket's path. Raises OSError."""
    path = own_directory(environ, folder)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    _check_own(path)
    return os.path.join(path, SOCKET)


def connect_own(environ: Mapping[str, str], folder: str = mounts.TMP) -> socket.socket:
    """Return a connection to the job's own socket. Raises OSError."""
    path = own_directory(environ, folder)
    _check_own(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(os.path.join(path, SOCKET))
    except OSError:
        sock.close()
        raise
    return sock


def _check_own(path: str) -> None:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError("%s is not a directory that only its user can enter" % path)


def main(argv: Sequence[str]) -> int:
    """Serve the node's end on standard input and output until the input ends; see the module."""
    if list(argv) == ["socket"]:
        try:
            print(make_own_directory(os.environ))
        except OSError as error:
            print("htun: error: cannot make the job's socket: %s" % error, file=sys.stderr)
            return 1
        return 0
    if list(argv) == ["served"]:
        return _serve(lambda: connect_own(os.environ))
    host, port = argv[0], int(argv[1])
    return _serve(lambda: socket.create_connection((host, port), CONNECT_S))


def _serve(connect: Connect) -> int:
    loop = Loop()
    tunnel = Tunnel(loop, _write, connect)

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
