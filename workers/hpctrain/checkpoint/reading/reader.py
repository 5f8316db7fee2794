"""Read chunks from data files in several threads: read, unpack and verify.

Does not choose a checkpoint.
Rules: a chunk counts only if it matches its hash.  If the share fails, the read is repeated before it counts as damage.  Each
thread reuses its own memory, because touching new memory is much slower than a copy.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from hpctrain.checkpoint.format.chunks import (
    CHUNK_BYTES,
    ITEM_BYTES,
    Chunk,
    Packing,
    TensorEntry,
    digest,
    hashes_of,
    unpack_into,
)
from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.checkpoint.writing.buffers import Buffer
from hpctrain.checkpoint.writing.packer import threads
from hpctrain.checkpoint.writing.snapshot import LiveMemory
from hpctrain.errors import DamagedError

T = TypeVar("T")
AGAIN_S = (0.0, 0.01, 0.1, 1.0)  # waiting times before the read is repeated
STRETCH_BYTES = 16 << 20  # bytes that a thread reads at a time
TOLD_S = 5.0  # between two progress messages
TOLD_BYTES = 64 << 20  # smaller reads print no progress


def patiently(call: Callable[[], T]) -> T:
    """Call a reading function, and again if the share fails.

    A stale handle or a single error is not damage.

    Raises:
        OSError: every attempt failed, or the file does not exist.
    """
    for wait_s in AGAIN_S:
        try:
            return call()
        except FileNotFoundError:
            raise
        except OSError:
            time.sleep(wait_s)
    return call()


Placed = tuple[int, int, Chunk]  # a chunk with its number in its tensor, and its offset in memory


class _Own(threading.local):
    """The memory and decompressor of each thread."""

    def __init__(self) -> None:
        self.stored = bytearray()
        self.memory = bytearray()

    def read(self, descriptor: int, chunk: Chunk) -> memoryview:
        """Return the stored bytes of a chunk; valid until the next call."""
        if len(self.stored) < chunk.stored:
            self.stored = bytearray(max(chunk.stored, CHUNK_BYTES))
        stored = memoryview(self.stored)[: chunk.stored]
        return stored[: os.preadv(descriptor, [stored], chunk.at)]


class ReadProgress:
    """Prints the progress of a long read now and then."""

    def __init__(self, tell: Callable[[str], None], what: str, manifests: Iterable[Manifest]) -> None:
        self._tell, self._what = tell, what
        self._total_bytes = sum(data.bytes for manifest in manifests for data in manifest.data)
        self._done_bytes = 0
        self._due_s = time.monotonic() + TOLD_S
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        """Count bytes that a thread has read."""
        with self._lock:
            self._done_bytes += size_bytes
            if self._total_bytes < TOLD_BYTES or time.monotonic() < self._due_s:
                return
            self._due_s = time.monotonic() + TOLD_S
            part = 100 * self._done_bytes // self._total_bytes
            self._tell(f"{self._what}: {part} % of {self._total_bytes / 1e6:.0f} MB")


class ChunkReader:
    """Several threads that read chunks of a directory."""

    def __init__(self, directory: Path, progress: ReadProgress | None = None) -> None:
        self._directory, self._progress = directory, progress
        self.pool = ThreadPoolExecutor(threads(), "restore")
        self._own = _Own()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.shutdown(cancel_futures=True)

    def memory(self, length: int) -> memoryview:
        """Return memory of the calling thread, the same each time."""
        if len(self._own.memory) < length:
            self._own.memory = bytearray(length)
        return memoryview(self._own.memory)[:length]

    def apply(self, manifest: Manifest, before: Mapping[str, TensorEntry], snapshot: Buffer | LiveMemory) -> None:
        """Bring a state from the parent's content (`before`) to a manifest's, without its log.

        Raises:
            DamagedError: a chunk is not what was written.
        """
        slots = {slot.name: slot for slot in snapshot.layout}
        if manifest.log is None and set(slots) != {entry.name for entry in manifest.tensors}:
            raise DamagedError(f"{manifest.name} does not have the tensors of its increment")
        wanted = []
        for entry in manifest.tensors:
            slot = slots.get(entry.name)
            if slot is None or (entry.dtype, entry.shape) != (slot.dtype, slot.shape):
                raise DamagedError(f"{manifest.name} has a tensor {entry.name!r} that differs from its increment's")
            wanted.append((entry, snapshot.content(slot)))
        self.fill(manifest, wanted, before)

    def fill(
        self,
        manifest: Manifest,
        wanted: Iterable[tuple[TensorEntry, memoryview]],
        before: Mapping[str, TensorEntry] | None = None,
    ) -> None:
        """Read tensors of a manifest into memory that has the content of `before`.

        Raises:
            DamagedError: a chunk is not what was written.
        """
        with self.opened(manifest) as descriptors:
            works = []
            for entry, content in wanted:
                known = hashes_of(before[entry.name]) if before and entry.name in before else {}
                for chunks in _stretches(entry):
                    works.append(self.pool.submit(self.read, descriptors, manifest, entry, chunks, content, known))
            finish(works)

    @contextmanager
    def opened(self, manifest: Manifest) -> Iterator[list[int]]:
        """Open a manifest's data files, and yield their descriptors in its order.

        Raises:
            DamagedError: a file does not exist, or has another length.
        """
        with ExitStack() as stack:
            yield [stack.enter_context(_opened(self._directory / data.file, data.bytes)) for data in manifest.data]

    def read(
        self,
        descriptors: list[int],
        manifest: Manifest,
        entry: TensorEntry,
        chunks: Iterable[Placed],
        content: memoryview,
        known: Mapping[int, str],
    ) -> None:
        """Read chunks into `content` in one thread.

        `known`: hashes of the present content by offset.

        Raises:
            DamagedError: names the chunk that is not what was written.
        """
        for number, low, chunk in chunks:
            if chunk.packing is Packing.SAME:
                if known.get(low) != chunk.hash:
                    raise DamagedError(f"chunk {number} of {entry.name!r} in {manifest.name} is not the parent's")
                continue
            out = content[low : low + chunk.bytes]
            try:
                self._read_chunk(descriptors[chunk.file], chunk, ITEM_BYTES[entry.dtype], out)
            except DamagedError as error:
                file, end = manifest.data[chunk.file].file, chunk.at + chunk.stored
                raise DamagedError(
                    f"chunk {number} of {entry.name!r} in {file} (bytes {chunk.at} to {end}) {error}"
                ) from error

    def _read_chunk(self, descriptor: int, chunk: Chunk, item_bytes: int, out: memoryview) -> None:
        if chunk.packing is Packing.RAW and chunk.stored == chunk.bytes:
            if os.preadv(descriptor, [out], chunk.at) != chunk.bytes:
                raise DamagedError("ends early")
        else:
            unpack_into(out, chunk.packing, self._own.read(descriptor, chunk), item_bytes)
        if digest(out) != chunk.hash:
            raise DamagedError("does not match its hash")
        if self._progress is not None:
            self._progress.add(chunk.stored)


def placed(entry: TensorEntry) -> Iterator[Placed]:
    """Yield a tensor's chunks with their numbers and offsets."""
    low = 0
    for number, chunk in enumerate(entry.chunks):
        yield number, low, chunk
        low += chunk.bytes


def finish(works: list[Future[None]]) -> None:
    """Wait for all works, so that none reads from closed files; then raise the first error."""
    errors = [work.exception() for work in works]
    for error in errors:
        if error is not None:
            raise error


def _stretches(entry: TensorEntry) -> Iterator[list[Placed]]:
    """Yield a tensor's chunks in groups for several threads."""
    chunks: list[Placed] = []
    for one in placed(entry):
        chunks.append(one)
        (_, first, _), (_, last, chunk) = chunks[0], one
        if last + chunk.bytes - first >= STRETCH_BYTES:
            yield chunks
            chunks = []
    if chunks:
        yield chunks


@contextmanager
def _opened(path: Path, length: int) -> Iterator[int]:
    try:
        with patiently(lambda: path.open("rb")) as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            if size_bytes != length:
                raise DamagedError(f"{path.name} has {size_bytes} bytes instead of {length}")
            yield stream.fileno()
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror})") from error
