"""Restore the newest checkpoint of a directory that verifies.

Writes nothing.
Rules: a checkpoint counts only if every manifest and chunk of its chain verifies, and its logged steps lead to the recorded
numbers.  Else the damage is printed, and the checkpoint before it is tried.  Newest is by step, then by attempt.  LATEST only
adds a name.  Several threads read, unpack and verify; if the share fails, the read is repeated before it counts as damage.  Each
thread reuses its own memory, because touching new memory is much slower than a copy.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch

from hpctrain.checkpoint.chunks import (
    CHUNK_BYTES,
    ITEM_BYTES,
    Chunk,
    Packing,
    TensorEntry,
    digest,
    hashes_of,
    unpack_into,
)
from hpctrain.checkpoint.encryption import CheckpointKey, opened_chunk
from hpctrain.checkpoint.manifest import SUFFIX, DataFile, Manifest, check_key, checkpoint_names, with_checksum
from hpctrain.checkpoint.writing.buffers import Buffer, lay_out
from hpctrain.checkpoint.writing.publish import Published, magic_of, threads
from hpctrain.checkpoint.writing.snapshot import Layout, LiveMemory, TensorSnapshot, compare
from hpctrain.errors import CheckpointKeyError, DamagedError, NoCheckpointError

T = TypeVar("T")
AGAIN_S = (0.0, 0.01, 0.1, 1.0)  # waiting times before the read is repeated
STRETCH_BYTES = 16 << 20  # bytes that a thread reads at a time
PROGRESS_EVERY_S = 5.0  # between two progress messages
PROGRESS_LEAST_BYTES = 64 << 20  # smaller reads print no progress


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

    def __init__(self, print_line: Callable[[str], None], what: str, manifests: Iterable[Manifest]) -> None:
        self._print, self._what = print_line, what
        self._total_bytes = sum(data.bytes for manifest in manifests for data in manifest.data)
        self._done_bytes = 0
        self._due_s = time.monotonic() + PROGRESS_EVERY_S
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        """Count bytes that a thread has read."""
        with self._lock:
            self._done_bytes += size_bytes
            if self._total_bytes < PROGRESS_LEAST_BYTES or time.monotonic() < self._due_s:
                return
            self._due_s = time.monotonic() + PROGRESS_EVERY_S
            part = 100 * self._done_bytes // self._total_bytes
            self._print(f"{self._what}: {part} % of {self._total_bytes / 1e6:.0f} MB")


class ChunkReader:
    """Several threads that read chunks of a directory."""

    def __init__(self, directory: Path, progress: ReadProgress | None = None, key: CheckpointKey | None = None) -> None:
        self._directory, self._progress, self._key = directory, progress, key
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
            yield [stack.enter_context(_opened(self._directory, data)) for data in manifest.data]

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
                salt = manifest.data[chunk.file].salt
                self._read_chunk(descriptors[chunk.file], salt, chunk, ITEM_BYTES[entry.dtype], out)
            except DamagedError as error:
                file, end = manifest.data[chunk.file].file, chunk.at + chunk.stored
                raise DamagedError(
                    f"chunk {number} of {entry.name!r} in {file} (bytes {chunk.at} to {end}) {error}"
                ) from error

    def _read_chunk(self, descriptor: int, salt: str, chunk: Chunk, item_bytes: int, out: memoryview) -> None:
        if self._key is not None:
            stored = opened_chunk(self._key, salt, chunk.number, self._own.read(descriptor, chunk))
            unpack_into(out, chunk.packing, stored, item_bytes)
        elif chunk.packing is Packing.RAW and chunk.stored == chunk.bytes:
            if os.preadv(descriptor, [out], chunk.at) != chunk.bytes:
                raise DamagedError("ends early")
        else:
            unpack_into(out, chunk.packing, self._own.read(descriptor, chunk), item_bytes)
        if (self._key.digest(out) if self._key else digest(out)) != chunk.hash:
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
    for piece in placed(entry):
        chunks.append(piece)
        (_, first, _), (_, last, chunk) = chunks[0], piece
        if last + chunk.bytes - first >= STRETCH_BYTES:
            yield chunks
            chunks = []
    if chunks:
        yield chunks


@contextmanager
def _opened(directory: Path, data: DataFile) -> Iterator[int]:
    path = directory / data.file
    try:
        with patiently(lambda: path.open("rb")) as stream:
            size_bytes, magic = os.fstat(stream.fileno()).st_size, magic_of(data.salt)
            if size_bytes != data.bytes:
                raise DamagedError(f"{path.name} has {size_bytes} bytes instead of {data.bytes}")
            if os.pread(stream.fileno(), len(magic), 0) != magic:
                raise DamagedError(f"{path.name} does not begin with {magic.decode()}")
            yield stream.fileno()
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How logged steps are replayed.

    `take` brings the snapshot, if there is one, and live tensors through the `logs` of a checkpoint; raises DamagedError.
    `memory` may return live tensors to read the logs' parent into, instead of a snapshot.
    """

    take: Callable[[Path, Published], None]
    memory: Callable[[tuple[Manifest, ...]], LiveMemory | None] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredCheckpoint:
    """A verified checkpoint, and the names of newer ones that were damaged."""

    published: Published  # without a snapshot if it was read into live tensors
    damaged: tuple[str, ...]

    def pour(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the checkpoint to live tensors, if they do not have it already."""
        if self.published.snapshot is not None:
            assert isinstance(self.published.snapshot, TensorSnapshot)
            self.published.snapshot.pour(tensors)


def restore_newest(
    directory: Path,
    live: Layout | None,
    warn: Callable[[str], None],
    replay: Replay | None = None,
    key: CheckpointKey | None = None,
) -> RestoredCheckpoint | None:
    """Read the newest checkpoint that verifies, of layout `live`.

    None if the directory has no checkpoint.

    `replay` replays logged gradients; without it, checkpoints with a log cannot be used.

    Raises:
        NoCheckpointError: all checkpoints are damaged.
        MismatchError: the newest undamaged one is of another model.
        CheckpointKeyError: the key does not fit one of them.
    """
    check_key(directory, key)
    damages: list[tuple[str, str]] = []
    for name in checkpoint_names(directory):
        try:
            published = read_checkpoint(directory, name, live, warn, replay, key)
            if published.logs:
                published = _replayed(directory, published, replay)
        except DamagedError as error:
            damages.append((name, str(error)))
            warn(f"checkpoint {name} cannot be used: {error}; trying the one before")
            continue
        return RestoredCheckpoint(published=published, damaged=tuple(name for name, _ in damages))
    if damages:
        raise NoCheckpointError(
            f"cannot resume from {directory}: all {len(damages)} checkpoints are damaged (newest: {damages[0][1]}); "
            "repair the share, or start a new run with another --out"
        )
    return None


def _replayed(directory: Path, published: Published, replay: Replay | None) -> Published:
    if replay is None:
        raise DamagedError("it is a log of gradients, and there is no optimizer here to replay its steps")
    replay.take(directory, published)
    return replace(published, logs=())


def read_checkpoint(
    directory: Path,
    name: str,
    live: Layout | None = None,
    print_line: Callable[[str], None] = lambda _: None,
    replay: Replay | None = None,
    key: CheckpointKey | None = None,
) -> Published:
    """Read and verify one checkpoint with its chain, except for gradients.

    Their manifests are in `logs`.

    `print_line` gets lines about the progress of a long read.
    The parent of logs is read into `replay.memory`, if that returns some.

    Raises:
        DamagedError: names the file, and the chunk of the tensor.
        MismatchError: its tensors are not those of `live`.
        CheckpointKeyError: the key does not fit.
    """
    chain = read_chain(directory, name, key)
    newest, checksum = chain[-1]
    logs = tuple(manifest for manifest, _ in chain if manifest.log is not None)
    states = chain[: len(chain) - len(logs)]
    if any(manifest.log is not None for manifest, _ in states):
        raise DamagedError(f"{name} is made of changes to a log of gradients, which no program writes")
    layout = lay_out((entry.name, entry.dtype, entry.shape) for entry in states[-1][0].tensors)
    if live is not None:
        compare(layout, live, f"{directory}/{name}")
    memory = replay.memory(logs) if replay is not None and logs else None
    into: LiveMemory | TensorSnapshot = memory if memory is not None else TensorSnapshot(layout)
    before: dict[str, TensorEntry] = {}
    with ChunkReader(
        directory, ReadProgress(print_line, f"reading checkpoint {name}", [state for state, _ in states]), key
    ) as reader:
        for manifest, _ in chain:
            reader.apply(manifest, before, into)
            before = {entry.name: entry for entry in manifest.tensors}
    return Published(
        manifest=newest, checksum=checksum, snapshot=into if isinstance(into, TensorSnapshot) else None, logs=logs
    )


class Gradients:
    """Reads the gradients of logged steps, the next ones while the current ones are in use."""

    def __init__(self, directory: Path, manifests: tuple[Manifest, ...], key: CheckpointKey | None = None) -> None:
        self._directory, self._key = directory, key
        self._wanted = [
            (manifest, step.flats) for manifest in manifests for step in (manifest.log.steps if manifest.log else ())
        ]
        self._spare: list[TensorSnapshot] = []

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        """Yield each step's flat gradients, which are valid until the next ones.

        Raises:
            DamagedError: they are not what was written.
        """
        with ThreadPoolExecutor(1, "next") as ahead, ChunkReader(self._directory, key=self._key) as reader:
            coming: Future[TensorSnapshot] | None = None
            for index in range(len(self._wanted)):
                read = coming.result() if coming is not None else self._read(index, reader)
                coming = ahead.submit(self._read, index + 1, reader) if index + 1 < len(self._wanted) else None
                yield read.tensors()
                self._spare.append(read)

    def _read(self, index: int, reader: ChunkReader) -> TensorSnapshot:
        manifest, flats = self._wanted[index]
        layout = lay_out((flat.name, flat.dtype, flat.shape) for flat in flats)
        spare = self._spare.pop() if self._spare else None
        read = spare if spare is not None and spare.layout == layout else TensorSnapshot(layout)
        reader.fill(manifest, [(flat, read.content(slot)) for slot, flat in zip(read.layout, flats, strict=True)])
        return read


def verify_log(directory: Path, logs: tuple[Manifest, ...], key: CheckpointKey | None = None) -> None:
    """Verify the gradients of logs; only an optimizer can verify their result.

    Raises:
        DamagedError: they are not what was written.
    """
    for _ in Gradients(directory, logs, key):
        pass


def read_chain(directory: Path, name: str, key: CheckpointKey | None = None) -> list[tuple[Manifest, str]]:
    """Read the manifests from the base to this one, each with its checksum.

    Raises:
        DamagedError: one is missing, damaged, or not the parent of the next.
        CheckpointKeyError: the key does not fit one of them.
    """
    chain = [_read_manifest(directory, name, key)]
    while (parent := chain[-1][0].parent) is not None:
        manifest, checksum = _read_manifest(directory, parent.name, key)
        if checksum != parent.checksum:
            raise DamagedError(f"{parent.name}{SUFFIX} is not the one that {chain[-1][0].name} was made from")
        if manifest.depth != chain[-1][0].depth - 1:
            raise DamagedError(f"{parent.name}{SUFFIX} has depth {manifest.depth}, its child {chain[-1][0].depth}")
        chain.append((manifest, checksum))
    return chain[::-1]


def _read_manifest(directory: Path, name: str, key: CheckpointKey | None) -> tuple[Manifest, str]:
    path = directory / (name + SUFFIX)
    try:
        content = patiently(path.read_bytes)
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror})") from error
    try:
        return with_checksum(name, content, key)
    except DamagedError as error:
        raise DamagedError(f"{path.name}: {error}") from error
    except CheckpointKeyError as error:
        raise CheckpointKeyError(f"cannot use {path}: {error}") from None
