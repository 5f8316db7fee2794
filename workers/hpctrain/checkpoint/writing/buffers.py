"""Memory for snapshots that another process can read: who copies and who writes need not be one.

Knows no torch: the process that writes starts without it.
Rules: a buffer is allocated once and used again: fresh memory is touched at a fraction of the speed of a copy.  It is a
file without a name, so it is gone when the last process that has it ends.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import math
import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpctrain.checkpoint.format.chunks import ITEM_BYTES
from hpctrain.errors import PublishError

# ----- how far a buffer is filled, while one fills it in order and others read what is there already
# Does not know what is in it.
# Rules: memory that nobody is filling is full; whoever waits for what will not come any more gets an error.


FULL = sys.maxsize
BROKEN = -1  # it will not be filled


class CopyProgress:
    """Counts the bytes that are there, from the beginning."""

    def __init__(self) -> None:
        self._there = FULL
        self._changed = threading.Condition()

    def begin(self) -> None:
        """Forget what is there: it is filled anew."""
        self.reach(0)

    def reach(self, there: int) -> None:
        """Let those go on who wait for these bytes; `FULL` and `BROKEN` are the ends."""
        with self._changed:
            self._there = there
            self._changed.notify_all()

    def wait(self, until: int) -> None:
        """Return when the bytes before `until` are there; `FULL`: when all are.

        Raises:
            PublishError: they will not be.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._there >= until or self._there == BROKEN)
            if self._there == BROKEN:
                raise PublishError("the state was not copied to its end")


ALIGN_BYTES = 64
POPULATE_WRITE = 23  # madvise(2), Linux 5.14
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlot:
    """Where a tensor, or a piece of one, lies in the buffer.

    A piece is flat: the numbers of a tensor of shape `whole` from the number `low` on.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    bytes: int
    low: int = 0
    whole: tuple[int, ...]

    @property
    def low_bytes(self) -> int:
        """Where the piece begins in its tensor."""
        return self.low * ITEM_BYTES[self.dtype]


Layout = tuple[TensorSlot, ...]


def lay_out(kinds: Iterable[tuple[str, str, tuple[int, ...]]]) -> Layout:
    """Lay out tensors of which name, dtype and shape are known."""
    return lay_out_pieces((name, dtype, shape, 0, shape) for name, dtype, shape in kinds)


def lay_out_pieces(kinds: Iterable[tuple[str, str, tuple[int, ...], int, tuple[int, ...]]]) -> Layout:
    """Lay out pieces: name, dtype, shape, first number, and the shape of the whole tensor."""
    slots, at = [], 0
    for name, dtype, shape, low, whole in kinds:
        size_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        slots.append(TensorSlot(name=name, dtype=dtype, shape=shape, at=at, bytes=size_bytes, low=low, whole=whole))
        at += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return tuple(slots)


class Buffer:
    """Memory, and what lies where in it."""

    def __init__(self, layout: Layout, descriptor: int | None = None, number: int | None = None) -> None:
        """`descriptor` and `number` are those of a buffer that another process has made."""
        self.layout = layout
        self.number = next(_numbers) if number is None else number
        self.filling = CopyProgress()
        length = max(1, layout[-1].at + layout[-1].bytes if layout else 0)
        self.descriptor = _nameless_file(length) if descriptor is None else descriptor
        self.shared = mmap.mmap(self.descriptor, length)
        self._memory = memoryview(self.shared)
        weakref.finalize(self, os.close, self.descriptor)

    def touch(self) -> None:
        """Have the kernel give all of the memory now, not page by page while somebody waits for a copy.

        Another thread may write into it meanwhile; kernels that cannot leave it as it was.
        """
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.shared))
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(len(self.shared)), POPULATE_WRITE)

    @property
    def bytes(self) -> int:
        """The length of all tensors' content."""
        return sum(slot.bytes for slot in self.layout)

    def content(self, slot: TensorSlot) -> memoryview:
        """Return the bytes of a tensor, writable, without a copy."""
        return self._memory[slot.at : slot.at + slot.bytes]


def _nameless_file(length: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, length)
    return descriptor


HEAD = struct.Struct("<QI")  # length of the value, number of descriptors
AT_ONCE = 64  # descriptors in one packet


class BufferChannel:
    """One end of the socket."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._sent: set[int] = set()
        self._known: dict[int, Buffer] = {}

    def fileno(self) -> int:
        """The descriptor, for select."""
        return self._line.fileno()

    def send(self, value: object) -> None:
        """Send a value.

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
        """Wait for a value.

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
        """Close this end."""
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
