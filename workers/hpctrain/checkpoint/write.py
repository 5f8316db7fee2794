"""One checkpoint from a snapshot, or from a log of gradients, to a published manifest.

Knows its parent by its manifest and its content; does not know torch, threads, models or when to write.
Rules: the data file is durable before the manifest that names it appears; the fence is asked in between; a chunk that
did not change is not written, one that did is stored in the smallest of the packings, each content once.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint import fence, files
from hpctrain.checkpoint.buffers import Buffer, Slot
from hpctrain.checkpoint.chunks import CHUNK_BYTES, ITEM_BYTES, Chunk, TensorEntry
from hpctrain.checkpoint.listing import LATEST
from hpctrain.checkpoint.manifest import (
    SUFFIX,
    Facts,
    Manifest,
    Parent,
    checkpoint_name,
    checksum_of,
    to_bytes,
)
from hpctrain.checkpoint.pack import Packing, digest, pack
from hpctrain.checkpoint.steplog import StepEntry, StepLog, Taken

DATA_MAGIC = b"HPCTDAT1"
SAMPLED = 8  # one chunk of so many is packed to estimate what all would take
Pieces = Generator[bytes | memoryview, None, TensorEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A checkpoint that readers can find, with its content for the next one to stand on.

    `snapshot` is None after a log of gradients was written: nobody copied the state then.  `logs` are the steps that have
    still to be taken, on top of the snapshot, to come to the checkpoint: only after reading.
    """

    manifest: Manifest
    checksum: str
    snapshot: Buffer | None
    stored_bytes: int
    logs: tuple[Manifest, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLog:
    """A log of gradients ready to be written."""

    log: StepLog
    tensors: tuple[TensorEntry, ...]
    pieces: list[bytes | memoryview]

    @property
    def bytes(self) -> int:
        """What it takes in the data file."""
        return sum(len(piece) for piece in self.pieces)


class _Packer:
    """Chunks on their way into the data file: where each one went."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._stored_before: dict[str, Chunk] = {}
        self._at = len(DATA_MAGIC)

    def tensor(self, slot: Slot, content: memoryview, entry: TensorEntry | None, old: memoryview | None) -> Pieces:
        """This will give what belongs into the data file; `entry` and `old` are the parent's."""
        chunks: list[Chunk] = []
        for index, low in enumerate(range(0, slot.bytes, self._chunk_bytes)):
            before = old[low : low + self._chunk_bytes] if old is not None else None
            hash_before = entry.chunks[index].hash if entry is not None else None
            now = content[low : low + self._chunk_bytes]
            chunk, stored = self._store(now, ITEM_BYTES[slot.dtype], hash_before, before)
            chunks.append(chunk)
            if stored is not None:
                yield stored
        return TensorEntry(name=slot.name, dtype=slot.dtype, shape=slot.shape, chunks=tuple(chunks))

    def _store(
        self, content: memoryview, item_bytes: int, hash_before: str | None, before: memoryview | None
    ) -> tuple[Chunk, bytes | memoryview | None]:
        hash_now = digest(content)
        if hash_now == hash_before:
            return Chunk(bytes=len(content), hash=hash_now, packing=Packing.SAME), None
        known = self._stored_before.get(hash_now)
        if known is not None and known.bytes == len(content):
            return known, None
        packing, stored = pack(content, item_bytes, before)
        chunk = Chunk(bytes=len(content), hash=hash_now, packing=packing, at=self._at, stored=len(stored))
        self._at += len(stored)
        if packing is Packing.RAW:  # the others depend on the kind of number, or on the parent
            self._stored_before[hash_now] = chunk
        return chunk, stored


def pack_log(taken: Taken, parent: Published, chunk_bytes: int) -> PackedLog:
    """This will pack the gradients of steps, and the tensors that no optimizer moves where they differ from the parent's."""
    packer, pieces = _Packer(chunk_bytes), []
    before = {entry.name: entry for entry in parent.manifest.tensors}
    tensors = []
    for slot in taken.loose.layout:
        entry = _collect(packer.tensor(slot, taken.loose.content(slot), before.get(slot.name), None), pieces)
        tensors.append(entry)
    steps = []
    for step in taken.steps:
        flats = [
            _collect(packer.tensor(slot, step.flats.content(slot), None, None), pieces) for slot in step.flats.layout
        ]
        steps.append(StepEntry(number=step.number, lr=step.lr, factor=step.factor, flats=tuple(flats)))
    log = StepLog(order=taken.order, device=taken.device, probe=taken.probe, steps=tuple(steps))
    return PackedLog(log=log, tensors=tuple(tensors), pieces=pieces)


def estimated_bytes(snapshot: Buffer, parent: Published, chunk_bytes: int) -> int:
    """This will estimate what an increment of packed changes would take, from some of its chunks."""
    assert parent.snapshot is not None
    number, raw, stored, whole = 0, 0, 0, 0
    for slot in snapshot.layout:
        content, old = snapshot.content(slot), parent.snapshot.content(slot)
        whole += slot.bytes
        for low in range(0, slot.bytes, chunk_bytes):
            number += 1
            if number % SAMPLED != 1:
                continue
            now, before = content[low : low + chunk_bytes], old[low : low + chunk_bytes]
            raw += len(now)
            stored += 0 if now == before else len(pack(now, ITEM_BYTES[slot.dtype], before)[1])
    return whole * stored // max(1, raw)


def write_checkpoint(
    claim: fence.Claim,
    snapshot: Buffer,
    facts: Facts,
    parent: Published | None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Published:
    """This will write and publish a checkpoint: an increment on `parent`, or a base without one.

    Raises:
        PublishError: the share failed; nothing was published.
        StaleAttemptError: a later attempt has taken over; nothing was published.
    """
    packer, tensors = _Packer(chunk_bytes), []

    def pieces() -> Generator[bytes | memoryview, None, None]:
        for number, slot in enumerate(snapshot.layout):
            entry = parent.manifest.tensors[number] if parent else None
            old = parent.snapshot.content(slot) if parent and parent.snapshot else None
            tensors.append((yield from packer.tensor(slot, snapshot.content(slot), entry, old)))

    return _write(claim, "delta" if parent else "base", facts, parent, chunk_bytes, pieces(), tensors, None, snapshot)


def write_log(
    claim: fence.Claim, packed: PackedLog, facts: Facts, parent: Published, chunk_bytes: int = CHUNK_BYTES
) -> Published:
    """This will write and publish an increment that is a log of gradients on `parent`.

    Raises: as `write_checkpoint`.
    """
    tensors = list(packed.tensors)
    return _write(claim, "gradients", facts, parent, chunk_bytes, packed.pieces, tensors, packed.log, None)


def _write(
    claim: fence.Claim,
    kind: str,
    facts: Facts,
    parent: Published | None,
    chunk_bytes: int,
    pieces: Iterable[bytes | memoryview],
    tensors: list[TensorEntry],  # complete when all pieces have been asked for
    log: StepLog | None,
    snapshot: Buffer | None,
) -> Published:
    directory, name = claim.directory, checkpoint_name(facts.step, facts.attempt)
    fence.check(claim)
    data_path = directory / f"data-{name}-{secrets.token_hex(6)}.bin"
    data_bytes = files.write_new(data_path, _after_magic(pieces))
    files.sync_directory(directory)
    manifest = Manifest(
        facts=facts,
        kind=kind,
        parent=Parent(name=parent.manifest.name, checksum=parent.checksum) if parent else None,
        base=parent.manifest.base if parent else name,
        depth=parent.manifest.depth + 1 if parent else 0,
        chunk_bytes=chunk_bytes,
        data_file=data_path.name,
        data_bytes=data_bytes,
        tensors=tuple(tensors),
        log=log,
    )
    content = to_bytes(manifest)
    _publish(claim, directory / (name + SUFFIX), content)
    stored_bytes = data_bytes + len(content)
    return Published(manifest=manifest, checksum=checksum_of(content), snapshot=snapshot, stored_bytes=stored_bytes)


def _after_magic(pieces: Iterable[bytes | memoryview]) -> Generator[bytes | memoryview, None, None]:
    yield DATA_MAGIC
    yield from pieces


def _collect(made: Pieces, into: list[bytes | memoryview]) -> TensorEntry:
    """Run a packer's generator to its end, and return what it returns."""
    while True:
        try:
            into.append(next(made))
        except StopIteration as end:
            return end.value


def _publish(claim: fence.Claim, path: Path, content: bytes) -> None:
    draft = files.write_draft(path, content)
    try:
        fence.check(claim)
        files.commit(draft, path)
    finally:
        files.remove(draft)
    files.replace_hint(path.with_name(LATEST), path.name.encode() + b"\n")
