"""Memory for snapshots that another process can read: who copies and who writes need not be one.

Knows no torch: the process that writes starts without it.
Rules: a buffer is allocated once and used again: fresh memory is touched at a fraction of the speed of a copy.  It is a
file without a name, so it is gone when the last process that has it ends.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import tempfile
import weakref
from dataclasses import dataclass

from hpctrain.checkpoint.chunks import ITEM_BYTES

ALIGN_BYTES = 64
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a tensor lies in the buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    bytes: int


Layout = tuple[Slot, ...]


def lay_out(kinds: list[tuple[str, str, tuple[int, ...]]]) -> Layout:
    """This will lay out tensors of which name, dtype and shape are known."""
    slots, at = [], 0
    for name, dtype, shape in kinds:
        size_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        slots.append(Slot(name=name, dtype=dtype, shape=shape, at=at, bytes=size_bytes))
        at += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return tuple(slots)


class Buffer:
    """Memory, and what lies where in it."""

    def __init__(self, layout: Layout, descriptor: int | None = None, number: int | None = None) -> None:
        """`descriptor` and `number` are those of a buffer that another process has made."""
        self.layout = layout
        self.number = next(_numbers) if number is None else number
        length = max(1, layout[-1].at + layout[-1].bytes if layout else 0)
        self.descriptor = _nameless_file(length) if descriptor is None else descriptor
        self.shared = mmap.mmap(self.descriptor, length)
        self._memory = memoryview(self.shared)
        weakref.finalize(self, os.close, self.descriptor)

    @property
    def bytes(self) -> int:
        """The length of all tensors' content."""
        return sum(slot.bytes for slot in self.layout)

    def content(self, slot: Slot) -> memoryview:
        """This will give the bytes of a tensor, writable, without a copy."""
        return self._memory[slot.at : slot.at + slot.bytes]


def _nameless_file(length: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, length)
    return descriptor
