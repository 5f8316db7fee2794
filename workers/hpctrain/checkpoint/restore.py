"""From a directory to the newest state that can be proved whole.

Writes nothing.
Rules: a candidate counts only if every manifest of its chain and every chunk in it verifies, and steps of logged gradients
lead to the numbers that were noted; else the one before it is taken, and the damage is named.  Newest is by step, then by
attempt.  LATEST is only one more name to look at.  Tensors are read by several threads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from hpctrain.checkpoint.buffers import lay_out
from hpctrain.checkpoint.chunks import ITEM_BYTES, Chunk, TensorEntry, hashes_of
from hpctrain.checkpoint.listing import checkpoint_names
from hpctrain.checkpoint.manifest import SUFFIX, Manifest, checksum_of, from_bytes
from hpctrain.checkpoint.pack import Packing, digest, unpack_into
from hpctrain.checkpoint.packer import threads
from hpctrain.checkpoint.snapshot import Layout, Snapshot, compare
from hpctrain.checkpoint.write import Published
from hpctrain.errors import DamagedError, NoCheckpointError

T = TypeVar("T")
# Brings live tensors and the snapshot from what was read to the checkpoint, through `logs`; raises DamagedError.
Replay = Callable[[Path, Published], None]
AGAIN_S = (0.0, 0.01, 0.1, 1.0)  # what is waited before it is read again
STRETCH_BYTES = 16 << 20  # what a thread reads at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A verified checkpoint, and the names of newer ones that were damaged."""

    published: Published
    damaged: tuple[str, ...]


def restore_newest(
    directory: Path, live: Layout | None, warn: Callable[[str], None], replay: Replay | None = None
) -> Restored | None:
    """This will read the newest checkpoint that verifies; None if there has never been one. `live` is what it has to be like.

    `replay` takes the steps of logged gradients again; without it a checkpoint that has some cannot be used.

    Raises:
        NoCheckpointError: there are checkpoints, and every one is damaged.
        MismatchError: the newest whole one is of another model.
    """
    damages: list[tuple[str, str]] = []
    for name in checkpoint_names(directory):
        try:
            published = read_checkpoint(directory, name, live)
            if published.logs:
                published = _replayed(directory, published, replay)
        except DamagedError as error:
            damages.append((name, str(error)))
            warn(f"checkpoint {name} cannot be used: {error}; trying the one before")
            continue
        return Restored(published=published, damaged=tuple(name for name, _ in damages))
    if damages:
        raise NoCheckpointError(
            f"cannot resume from {directory}: all {len(damages)} checkpoints are damaged (newest: {damages[0][1]}); "
            "repair the share, or start anew with another --out"
        )
    return None


def _replayed(directory: Path, published: Published, replay: Replay | None) -> Published:
    if replay is None:
        raise DamagedError("it is a log of gradients, and there is no optimizer here to take its steps again")
    replay(directory, published)
    return replace(published, logs=())


def read_checkpoint(directory: Path, name: str, live: Layout | None = None) -> Published:
    """This will read one checkpoint with its chain, verifying everything but logs of gradients: these are in `logs`.

    Raises:
        DamagedError: says which file, and which chunk of which tensor.
        MismatchError: its tensors are not those of `live`.
    """
    chain = read_chain(directory, name)
    newest, checksum = chain[-1]
    logs = tuple(manifest for manifest, _ in chain if manifest.log is not None)
    states = chain[: len(chain) - len(logs)]
    if any(manifest.log is not None for manifest, _ in states):
        raise DamagedError(f"{name} is made of changes to a log of gradients, which no program writes")
    layout = lay_out((entry.name, entry.dtype, entry.shape) for entry in states[-1][0].tensors)
    if live is not None:
        compare(layout, live, f"{directory}/{name}")
    snapshot = Snapshot(layout)
    before: dict[str, TensorEntry] = {}
    with ThreadPoolExecutor(threads(), "restore") as pool:
        for manifest, _ in chain:
            _apply(directory, manifest, before, snapshot, pool)
            before = {entry.name: entry for entry in manifest.tensors}
    return Published(manifest=newest, checksum=checksum, snapshot=snapshot, logs=logs)


class Gradients:
    """Reads the gradients of logged steps, the next one's while somebody uses the present one's."""

    def __init__(self, directory: Path, manifests: tuple[Manifest, ...]) -> None:
        self._directory = directory
        self._wanted = [
            (manifest, step.flats) for manifest in manifests for step in (manifest.log.steps if manifest.log else ())
        ]
        self._spare: list[Snapshot] = []

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        """Each step's flat gradients, which are only there until the next are asked for.

        Raises:
            DamagedError: they are not what was written.
        """
        with ThreadPoolExecutor(1, "next") as ahead, ThreadPoolExecutor(threads(), "restore") as pool:
            coming: Future[Snapshot] | None = None
            for index in range(len(self._wanted)):
                read = coming.result() if coming is not None else self._read(index, pool)
                coming = ahead.submit(self._read, index + 1, pool) if index + 1 < len(self._wanted) else None
                yield read.tensors()
                self._spare.append(read)

    def _read(self, index: int, pool: ThreadPoolExecutor) -> Snapshot:
        manifest, flats = self._wanted[index]
        layout = lay_out((flat.name, flat.dtype, flat.shape) for flat in flats)
        spare = self._spare.pop() if self._spare else None
        read = spare if spare is not None and spare.layout == layout else Snapshot(layout)
        with _opened(self._directory, manifest) as descriptors:
            works = [
                work
                for slot, flat in zip(read.layout, flats, strict=True)
                for work in _stretches(descriptors, manifest, flat, None, read.content(slot), pool)
            ]
            _finish(works)
        return read


def verify_log(directory: Path, logs: tuple[Manifest, ...]) -> None:
    """This will return if all gradients of these logs are what was written; where they lead only an optimizer can say.

    Raises:
        DamagedError: they are not.
    """
    for _ in Gradients(directory, logs):
        pass


def read_chain(directory: Path, name: str) -> list[tuple[Manifest, str]]:
    """This will read the manifests from the base to this one, each with its checksum.

    Raises:
        DamagedError: one is missing, damaged, or not the one that its child stands on.
    """
    chain = [_read_manifest(directory, name)]
    while (parent := chain[-1][0].parent) is not None:
        manifest, checksum = _read_manifest(directory, parent.name)
        if checksum != parent.checksum:
            raise DamagedError(f"{parent.name}{SUFFIX} is not the one that {chain[-1][0].name} was made from")
        if manifest.depth != chain[-1][0].depth - 1:
            raise DamagedError(f"{parent.name}{SUFFIX} has depth {manifest.depth}, its child {chain[-1][0].depth}")
        chain.append((manifest, checksum))
    return chain[::-1]


def patiently(call: Callable[[], T]) -> T:
    """This will read, and again if the share fails: a handle that is stale, or one error, is no damage.

    Raises:
        OSError: it fails each time, or there is nothing.
    """
    for wait_s in AGAIN_S:
        try:
            return call()
        except FileNotFoundError:
            raise
        except OSError:
            time.sleep(wait_s)
    return call()


def _read_manifest(directory: Path, name: str) -> tuple[Manifest, str]:
    path = directory / (name + SUFFIX)
    try:
        content = patiently(path.read_bytes)
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror})") from error
    try:
        manifest, checksum = from_bytes(content), checksum_of(content)
    except DamagedError as error:
        raise DamagedError(f"{path.name}: {error}") from error
    if manifest.name != name:
        raise DamagedError(f"{path.name} says that it is {manifest.name}")
    return manifest, checksum


def _apply(
    directory: Path,
    manifest: Manifest,
    before: Mapping[str, TensorEntry],
    snapshot: Snapshot,
    pool: ThreadPoolExecutor,
) -> None:
    """Bring the snapshot from the parent's content to this manifest's; a log's own steps are left."""
    slots = {slot.name: slot for slot in snapshot.layout}
    if manifest.log is None and set(slots) != {entry.name for entry in manifest.tensors}:
        raise DamagedError(f"{manifest.name} has not the tensors of the one that stands on it")
    with _opened(directory, manifest) as descriptors:
        works: list[Future[None]] = []
        for entry in manifest.tensors:
            slot = slots.get(entry.name)
            if slot is None or (entry.dtype, entry.shape) != (slot.dtype, slot.shape):
                raise DamagedError(f"{manifest.name} has a tensor {entry.name!r} unlike the one that stands on it")
            content = snapshot.content(slot)
            works += _stretches(descriptors, manifest, entry, before.get(entry.name), content, pool)
        _finish(works)


@contextmanager
def _opened(directory: Path, manifest: Manifest) -> Iterator[list[int]]:
    """The descriptors of a manifest's data files, in its order."""
    with ExitStack() as stack:
        yield [stack.enter_context(_opened_one(directory / data.file, data.bytes)) for data in manifest.data]


@contextmanager
def _opened_one(path: Path, length: int) -> Iterator[int]:
    try:
        with patiently(lambda: path.open("rb")) as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            if size_bytes != length:
                raise DamagedError(f"{path.name} has {size_bytes} bytes instead of {length}")
            yield stream.fileno()
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror})") from error


def _finish(works: list[Future[None]]) -> None:
    """Wait for all, so that nobody reads on from what is closed; then say what the first one found."""
    errors = [work.exception() for work in works]
    for error in errors:
        if error is not None:
            raise error


def _stretches(
    descriptors: list[int],
    manifest: Manifest,
    entry: TensorEntry,
    before: TensorEntry | None,
    content: memoryview,
    pool: ThreadPoolExecutor,
) -> list[Future[None]]:
    """Begin to read a tensor, cut so that several threads have something to do."""
    known = hashes_of(before) if before is not None else {}
    works: list[Future[None]] = []
    low = size = 0
    chunks: list[tuple[int, int, Chunk]] = []  # number, offset
    for number, chunk in enumerate(entry.chunks):
        chunks.append((number, low, chunk))
        low, size = low + chunk.bytes, size + chunk.bytes
        if size >= STRETCH_BYTES or number + 1 == len(entry.chunks):
            works.append(pool.submit(_read, descriptors, manifest, entry, chunks, known, content))
            chunks, size = [], 0
    return works


def _read(
    descriptors: list[int],
    manifest: Manifest,
    entry: TensorEntry,
    chunks: list[tuple[int, int, Chunk]],
    known: Mapping[int, str],
    content: memoryview,
) -> None:
    for number, low, chunk in chunks:
        if chunk.packing is Packing.SAME:
            if known.get(low) != chunk.hash:
                raise DamagedError(f"chunk {number} of {entry.name!r} in {manifest.name} is not its parent's")
            continue
        out = content[low : low + chunk.bytes]
        try:
            _read_chunk(descriptors[chunk.file], chunk, ITEM_BYTES[entry.dtype], out)
        except DamagedError as error:
            file, end = manifest.data[chunk.file].file, chunk.at + chunk.stored
            raise DamagedError(
                f"chunk {number} of {entry.name!r} in {file} (bytes {chunk.at} to {end}) {error}"
            ) from error


def _read_chunk(descriptor: int, chunk: Chunk, item_bytes: int, out: memoryview) -> None:
    if chunk.packing is Packing.RAW and chunk.stored == chunk.bytes:
        if os.preadv(descriptor, [out], chunk.at) != chunk.bytes:
            raise DamagedError("ends early")
    else:
        unpack_into(out, chunk.packing, os.pread(descriptor, chunk.stored, chunk.at), item_bytes)
    if digest(out) != chunk.hash:
        raise DamagedError("does not have its hash")
