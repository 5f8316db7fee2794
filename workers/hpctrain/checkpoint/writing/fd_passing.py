"""Messages between a trainer and its keeper: Python values, in which buffers go by number, each sent once as a descriptor.

Knows neither what is said nor torch.
Rules: both ends are one program of one user on one machine; a message that ends in the middle is the end of the other one.
Sources: cmsg(3), SCM_RIGHTS.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from typing import Any

from hpctrain.checkpoint.writing.buffers import Buffer

HEAD = struct.Struct("<QI")  # length of the value, number of descriptors
AT_ONCE = 64  # descriptors in one packet


class Handing:
    """One end of the socket."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._sent: set[int] = set()
        self._known: dict[int, Buffer] = {}

    def fileno(self) -> int:
        """The descriptor, for select."""
        return self._line.fileno()

    def send(self, value: object) -> None:
        """This will send a value.

        Raises:
            OSError: the other end is gone.
        """
        fresh: list[Buffer] = []
        stream = io.BytesIO()
        _Pickler(stream, self._sent, fresh).dump(value)
        content = stream.getvalue()
        self._line.sendall(HEAD.pack(len(content), len(fresh)))
        for low in range(0, len(fresh), AT_ONCE):
            part = fresh[low : low + AT_ONCE]
            socket.send_fds(self._line, [b"\0"], [buffer.descriptor for buffer in part])
        self._sent.update(buffer.number for buffer in fresh)
        self._line.sendall(content)

    def receive(self) -> Any:
        """This will wait for a value.

        Raises:
            EOFError: the other end is gone.
        """
        length, count = HEAD.unpack(self._exactly(HEAD.size))
        descriptors: list[int] = []
        while len(descriptors) < count:
            mark, got, _, _ = socket.recv_fds(self._line, 1, AT_ONCE)
            if not mark:
                raise EOFError
            descriptors += got
        return _Unpickler(io.BytesIO(self._exactly(length)), self._known, descriptors).load()

    def close(self) -> None:
        """This will close this end."""
        self._line.close()

    def _exactly(self, length: int) -> bytes:
        content = bytearray()
        while len(content) < length:
            try:
                part = self._line.recv(min(length - len(content), 1 << 20))
            except ConnectionError:
                part = b""
            if not part:
                raise EOFError
            content += part
        return bytes(content)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, sent: set[int], fresh: list[Buffer]) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._sent, self._fresh = sent, fresh

    def persistent_id(self, value: object) -> object:
        if not isinstance(value, Buffer):
            return None
        known = {buffer.number: at for at, buffer in enumerate(self._fresh)}
        if value.number in self._sent:
            return value.number, None, None
        if value.number not in known:
            self._fresh.append(value)
        return value.number, known.get(value.number, len(known)), value.layout


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, known: dict[int, Buffer], descriptors: list[int]) -> None:
        super().__init__(stream)
        self._buffers, self._descriptors = known, descriptors

    def persistent_load(self, key: tuple[int, int | None, Any]) -> Buffer:
        number, at, layout = key
        if number not in self._buffers:
            assert at is not None
            self._buffers[number] = Buffer(layout, self._descriptors[at], number)
        return self._buffers[number]
