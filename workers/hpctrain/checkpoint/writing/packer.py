"""The content of a data file.

Chunks are hashed and packed in several threads, and placed one after another.

Does not know files, checkpoints, or readers.
Rules: an unchanged chunk is not stored, a changed one in the smallest packing, each content once.  A base is packed only if
that is faster than writing the saved bytes; every so many chunks both are measured.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from hpctrain.checkpoint.format.chunks import ITEM_BYTES, Chunk, Packing, PieceEntry, digest, pack
from hpctrain.checkpoint.writing.buffers import CopyProgress, TensorSlot

THREADS = 4
AHEAD = 2 * THREADS  # chunks that are being packed
SAMPLED = 16  # one chunk of so many is packed at any cost, to measure
KNOWN_BYTES = 32 << 20  # written bytes after which the write speed is known
Pieces = Generator[bytes | memoryview, None, tuple[PieceEntry, ...]]


def threads() -> int:
    """Return the number of packing threads: one per core of this process, up to a limit."""
    return max(1, min(THREADS, len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A tensor or piece to store; `hashes` (by offset) and `old` are the parent's content."""

    slot: TensorSlot
    content: memoryview
    copy_progress: CopyProgress  # of the buffer
    hashes: Mapping[int, str] = field(default_factory=dict)
    old: memoryview | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    chunk: Chunk
    stored: bytes | memoryview | None
    cpu_s: float  # of packing, without hashing
    alike: tuple[object, ...] = ()  # chunks with an equal value have the same stored bytes


class Packer:
    """Packs the content of one data file, which begins with `at` other bytes."""

    def __init__(self, chunk_bytes: int, at: int, pool: Executor, *, frugal: bool = True) -> None:
        """Prepare a packer; `frugal`: pack every chunk that gets smaller, at any cost of time."""
        self._chunk_bytes, self._at, self._pool = chunk_bytes, at, pool
        self._stored_before: dict[tuple[object, ...], Chunk] = {}
        self._worth = None if frugal else _Worth()

    def run(self, wanted: Iterable[Wanted]) -> Pieces:
        """Yield the content of the data file in order, and return the entries of the pieces."""
        heads: list[TensorSlot] = []
        chunks: list[list[Chunk]] = []
        waiting: deque[tuple[int, Future[_Packed]]] = deque()
        for one, low in self._tasks(wanted, heads, chunks):
            waiting.append((len(heads) - 1, self._begin(one, low)))
            if len(waiting) > AHEAD:
                yield from self._finish(waiting.popleft(), chunks)
        while waiting:
            yield from self._finish(waiting.popleft(), chunks)
        return tuple(
            PieceEntry(name=slot.name, dtype=slot.dtype, shape=slot.whole, low=slot.low_bytes, chunks=tuple(found))
            for slot, found in zip(heads, chunks, strict=True)
        )

    def _tasks(
        self, wanted: Iterable[Wanted], heads: list[TensorSlot], chunks: list[list[Chunk]]
    ) -> Iterator[tuple[Wanted, int]]:
        for one in wanted:
            heads.append(one.slot)
            chunks.append([])
            for low in range(0, one.slot.bytes, self._chunk_bytes):
                one.copy_progress.wait(one.slot.at + min(low + self._chunk_bytes, one.slot.bytes))
                yield one, low

    def _begin(self, one: Wanted, low: int) -> Future[_Packed]:
        high = low + self._chunk_bytes
        before = one.old[low:high] if one.old is not None else None
        known = one.hashes.get(one.slot.low_bytes + low)
        plain = self._worth is not None and not self._worth.asks()
        return self._pool.submit(_packed, one.content[low:high], ITEM_BYTES[one.slot.dtype], known, before, plain)

    def _finish(
        self, waiting: tuple[int, Future[_Packed]], chunks: list[list[Chunk]]
    ) -> Generator[bytes | memoryview, None, None]:
        index, future = waiting
        packed = future.result()
        chunk, stored = self._placed(packed)
        chunks[index].append(chunk)
        if stored is None:
            return
        started_s = time.perf_counter()
        yield stored
        if self._worth is not None:
            self._worth.note(packed, len(stored), time.perf_counter() - started_s)

    def _placed(self, packed: _Packed) -> tuple[Chunk, bytes | memoryview | None]:
        chunk, stored = packed.chunk, packed.stored
        if stored is None:
            return chunk, None
        known = self._stored_before.get(packed.alike)
        if known is not None:
            return known, None
        placed = Chunk(bytes=chunk.bytes, hash=chunk.hash, packing=chunk.packing, at=self._at, stored=len(stored))
        self._at += len(stored)
        if packed.alike:
            self._stored_before[packed.alike] = placed
        return placed, stored


class _Worth:
    """Decides whether packing saves more writing time than it takes."""

    def __init__(self) -> None:
        self._number = 0
        self._raw_bytes = self._saved_bytes = self._written_bytes = 0
        self._cpu_s = self._write_s = 0.0

    def asks(self) -> bool:
        """Return whether to pack the next chunk."""
        self._number += 1
        if self._number % SAMPLED == 1 or self._written_bytes < KNOWN_BYTES or not self._raw_bytes:
            return True
        per_byte_s = self._write_s / self._written_bytes
        return self._saved_bytes * per_byte_s > self._cpu_s

    def note(self, packed: _Packed, stored_bytes: int, write_s: float) -> None:
        """Learn from a chunk that was written."""
        self._written_bytes += stored_bytes
        self._write_s += write_s
        if packed.cpu_s:
            self._raw_bytes += packed.chunk.bytes
            self._saved_bytes += packed.chunk.bytes - stored_bytes
            self._cpu_s += packed.cpu_s


def _packed(
    content: memoryview, item_bytes: int, hash_before: str | None, before: memoryview | None, plain: bool
) -> _Packed:
    hash_now = digest(content)
    if hash_now == hash_before:
        return _Packed(chunk=Chunk(bytes=len(content), hash=hash_now, packing=Packing.SAME), stored=None, cpu_s=0.0)
    started_s = time.thread_time()
    packing, stored = (Packing.RAW, content) if plain else pack(content, item_bytes, before)
    spent_s = 0.0 if plain else time.thread_time() - started_s
    chunk = Chunk(bytes=len(content), hash=hash_now, packing=packing)
    return _Packed(chunk=chunk, stored=stored, cpu_s=spent_s, alike=_alike(chunk, item_bytes, hash_before))


def _alike(chunk: Chunk, item_bytes: int, hash_before: str | None) -> tuple[object, ...]:
    """Return what the stored bytes depend on, so that tied tensors are stored once.

    Empty: unknown.
    """
    match chunk.packing:
        case Packing.RAW:
            return chunk.hash, chunk.bytes, chunk.packing
        case Packing.PLANES:
            return chunk.hash, chunk.bytes, chunk.packing, item_bytes
        case Packing.DELTA if hash_before is not None:
            return chunk.hash, chunk.bytes, chunk.packing, item_bytes, hash_before
    return ()
