"""Memory that two processes share, its copy progress, and a channel to pass it.

Knows no torch: the process that writes starts without it.
Rules: a buffer is reused, because touching new memory is much slower than a copy.  It is a file without a name, so it is
freed when the last process that has it ends.  The channel carries pickled values between two processes of one program and
user; a buffer is sent once, as a descriptor, and by its number after that.  A message that ends early is the end of the peer.
Sources: cmsg(3), SCM_RIGHTS.
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

from hpctrain.checkpoint.chunks import ITEM_BYTES
from hpctrain.errors import PublishError

# ----- the copy progress of a buffer: one thread fills it in order, others read the filled part
# Rules: a buffer that is not being filled is full.  A reader of bytes that will not come gets an error.


FULL = sys.maxsize
BROKEN = -1  # the copy has failed


class CopyProgress:
    """The number of bytes that are copied, from the beginning."""

    def __init__(self) -> None:
        self._there = FULL
        self._changed = threading.Condition()

    def begin(self) -> None:
        """Reset: the buffer is filled again."""
        self.reach(0)

    def reach(self, there: int) -> None:
        """Set the number of copied bytes, and wake readers; `FULL` and `BROKEN` end the copy."""
        with self._changed:
            self._there = there
            self._changed.notify_all()

    def wait(self, until: int) -> None:
        """Wait until the bytes before `until` are copied; `FULL`: all.

        Raises:
            PublishError: the copy has failed.
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
    """The place of a tensor, or of a piece of one, in the buffer.

    A piece is flat: numbers of a tensor of shape `whole`, from number `low` on.
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
        """The offset of the piece in its tensor, in bytes."""
        return self.low * ITEM_BYTES[self.dtype]


Layout = tuple[TensorSlot, ...]


def lay_out(kinds: Iterable[tuple[str, str, tuple[int, ...]]]) -> Layout:
    """Return the layout of tensors with these names, dtypes and shapes."""
    return lay_out_pieces((name, dtype, shape, 0, shape) for name, dtype, shape in kinds)


def lay_out_pieces(kinds: Iterable[tuple[str, str, tuple[int, ...], int, tuple[int, ...]]]) -> Layout:
    """Return the layout of pieces.

    Name, dtype, shape, first number, and shape of the whole tensor.
    """
    slots, at = [], 0
    for name, dtype, shape, low, whole in kinds:
        size_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        slots.append(TensorSlot(name=name, dtype=dtype, shape=shape, at=at, bytes=size_bytes, low=low, whole=whole))
        at += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return tuple(slots)


class Buffer:
    """Shared memory with a layout of tensors."""

    def __init__(self, layout: Layout, descriptor: int | None = None, number: int | None = None) -> None:
        """Allocate a buffer, or open one by `descriptor` and `number` of another process."""
        self.layout = layout
        self.number = next(_numbers) if number is None else number
        self.copy_progress = CopyProgress()
        length = max(1, layout[-1].at + layout[-1].bytes if layout else 0)
        self.descriptor = _nameless_file(length) if descriptor is None else descriptor
        self.shared = mmap.mmap(self.descriptor, length)
        self._memory = memoryview(self.shared)
        weakref.finalize(self, os.close, self.descriptor)

    def touch(self) -> None:
        """Make the kernel allocate all pages now, so that a copy does not wait for them.

        Another thread may write meanwhile; old kernels without this feature do nothing.
        """
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.shared))
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(len(self.shared)), POPULATE_WRITE)

    @property
    def bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(slot.bytes for slot in self.layout)

    def content(self, slot: TensorSlot) -> memoryview:
        """Return the memory of a tensor, writable, without a copy."""
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
AT_ONCE = 64  # descriptors per packet


class BufferChannel:
    """One end of a socket that passes values and buffers."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._sent: set[int] = set()
        self._known: dict[int, Buffer] = {}

    def fileno(self) -> int:
        """Return the descriptor, for select."""
        return self._line.fileno()

    def send(self, value: object) -> None:
        """Send a value.

        Raises:
            OSError: the other process has ended.
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
        """Wait for a value, and return it.

        Raises:
            EOFError: the other process has ended.
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
