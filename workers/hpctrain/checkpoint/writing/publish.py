"""Write a rank's part of a checkpoint, and publish the parts of all ranks.

Knows the parent by its name and its chunks' hashes; does not know torch, threads or models.
Rules: data files are durable before the manifest that names them appears; the fence is checked in between.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from hpctrain.checkpoint.format.chunks import (
    CHUNK_BYTES,
    ITEM_BYTES,
    PieceEntry,
    hashes_of,
    joined,
    pack,
    piece_from_json,
    piece_to_json,
)
from hpctrain.checkpoint.format.manifest import (
    LATEST,
    SUFFIX,
    CheckpointFacts,
    DataFile,
    Manifest,
    Parent,
    checkpoint_name,
    checksum_of,
    to_bytes,
)
from hpctrain.checkpoint.format.step_log import StepEntry, StepLog, Taken
from hpctrain.checkpoint.writing import fence, files
from hpctrain.checkpoint.writing.buffers import Buffer
from hpctrain.checkpoint.writing.packer import Packer, Wanted

DATA_MAGIC = b"HPCTDAT1"
SAMPLED = 8  # one chunk of so many is packed to estimate the size of all


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A checkpoint that was read, with its content as parent of the next one.

    `logs` are the steps to replay on the snapshot.
    """

    manifest: Manifest
    checksum: str
    snapshot: Buffer | None
    logs: tuple[Manifest, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Footing:
    """A published checkpoint as parent of the next one.

    Its name, and this rank's part of its content.
    """

    name: str
    checksum: str
    step: int
    kind: str
    base: str
    depth: int
    snapshot: Buffer | None
    hashes: Mapping[str, Mapping[int, str]]  # of chunks, by tensor and offset


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPart:
    """One rank's written part of a checkpoint."""

    data: DataFile
    parent_name: str | None  # name of the parent
    pieces: tuple[PieceEntry, ...]
    steps: tuple[tuple[PieceEntry, ...], ...]  # gradients per logged step


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLog:
    """A packed log of gradients."""

    pieces: tuple[PieceEntry, ...]
    steps: tuple[tuple[PieceEntry, ...], ...]
    content: list[bytes | memoryview]

    @property
    def bytes(self) -> int:
        """The bytes in the data file."""
        return sum(len(piece) for piece in self.content)


def footing_of(published: Published) -> Footing:
    """Return a checkpoint that was read, as parent of the next one."""
    manifest = published.manifest
    return Footing(
        name=manifest.name,
        checksum=published.checksum,
        step=manifest.facts.step,
        kind=manifest.kind,
        base=manifest.base,
        depth=manifest.depth,
        snapshot=published.snapshot,
        hashes={tensor.name: hashes_of(tensor) for tensor in manifest.tensors},
    )


def next_footing(
    name: str,
    checksum: str,
    facts: CheckpointFacts,
    kind: str,
    parent: Footing | None,
    part: WrittenPart,
    snapshot: Buffer | None,
) -> Footing:
    """Return a checkpoint that was just published, as parent of the next one."""
    hashes: dict[str, dict[int, str]] = {}
    for piece in part.pieces:
        low = piece.low
        for chunk in piece.chunks:
            hashes.setdefault(piece.name, {})[low] = chunk.hash
            low += chunk.bytes
    base, depth = (name, 0) if parent is None else (parent.base, parent.depth + 1)
    return Footing(
        name=name,
        checksum=checksum,
        step=facts.step,
        kind=kind,
        base=base,
        depth=depth,
        snapshot=snapshot,
        hashes=hashes,
    )


def pack_log(taken: Taken, parent: Footing | None, pool: Executor, chunk_bytes: int = CHUNK_BYTES) -> PackedLog:
    """Pack the gradients of steps, and the changed tensors that no optimizer moves."""
    at = len(DATA_MAGIC)
    content: list[bytes | memoryview] = []

    def packed(wanted: Iterable[Wanted]) -> tuple[PieceEntry, ...]:
        nonlocal at
        made = _collect(Packer(chunk_bytes, at, pool).run(wanted), content)
        at = len(DATA_MAGIC) + sum(len(piece) for piece in content)
        return made

    loose = packed(_wanted(taken.loose, parent.hashes if parent else {}, None))
    steps = tuple(packed(_wanted(step.flats, {}, None)) for step in taken.steps)
    return PackedLog(pieces=loose, steps=steps, content=content)


def estimated_bytes(snapshot: Buffer, old: Buffer, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Estimate the bytes of an increment of packed changes from some of its chunks."""
    number, raw, stored, whole = 0, 0, 0, 0
    for slot in snapshot.layout:
        content, before = snapshot.content(slot), old.content(slot)
        whole += slot.bytes
        for low in range(0, slot.bytes, chunk_bytes):
            number += 1
            if number % SAMPLED != 1:
                continue
            now, then = content[low : low + chunk_bytes], before[low : low + chunk_bytes]
            raw += len(now)
            stored += 0 if now == then else len(pack(now, ITEM_BYTES[slot.dtype], then)[1])
    return whole * stored // max(1, raw)


def write_part(
    claim: fence.Claim,
    snapshot: Buffer,
    facts: CheckpointFacts,
    parent: Footing | None,
    pool: Executor,
    chunk_bytes: int = CHUNK_BYTES,
) -> WrittenPart:
    """Write this rank's part of an increment on `parent`, or of a base if that is None.

    Raises:
        PublishError: the share failed.
        StaleAttemptError: a later attempt has taken over.
    """
    packer = Packer(chunk_bytes, len(DATA_MAGIC), pool, frugal=parent is not None)
    old = parent.snapshot if parent else None
    found: list[PieceEntry] = []

    def content() -> Generator[bytes | memoryview, None, None]:
        found.extend((yield from packer.run(_wanted(snapshot, parent.hashes if parent else {}, old))))

    data = _write(claim, facts, content())
    return WrittenPart(data=data, parent_name=parent.name if parent else None, pieces=tuple(found), steps=())


def write_log(claim: fence.Claim, packed: PackedLog, facts: CheckpointFacts, parent: Footing) -> WrittenPart:
    """Write this rank's part of an increment that is a log of gradients on `parent`.

    Raises: as `write_part`.
    """
    data = _write(claim, facts, packed.content)
    return WrittenPart(data=data, parent_name=parent.name, pieces=packed.pieces, steps=packed.steps)


def publish(
    claim: fence.Claim,
    facts: CheckpointFacts,
    parts: Sequence[WrittenPart],
    parent: Footing | None,
    taken: Taken | None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[str, str, int]:
    """Publish the parts of all ranks as one checkpoint; `taken`: as a log of gradients.

    Returns the manifest's name, checksum and length in bytes.

    Raises: as `write_part`; then nothing was published.
    """
    kind = "base" if parent is None else "delta" if taken is None else "gradients"
    name = checkpoint_name(facts.step, facts.attempt)
    manifest = Manifest(
        facts=facts,
        kind=kind,
        parent=Parent(name=parent.name, checksum=parent.checksum) if parent else None,
        base=parent.base if parent else name,
        depth=parent.depth + 1 if parent else 0,
        chunk_bytes=chunk_bytes,
        data=tuple(part.data for part in parts),
        tensors=joined([part.pieces for part in parts]),
        log=_log_of(taken, parts) if taken is not None else None,
    )
    content = to_bytes(manifest)
    path = claim.directory / (name + SUFFIX)
    draft = files.write_draft(path, content)
    try:
        fence.check(claim)
        files.commit(draft, path)
    finally:
        files.remove(draft)
    files.replace_hint(path.with_name(LATEST), path.name.encode() + b"\n")
    return name, checksum_of(content), len(content)


def data_file_name(name: str) -> str:
    """Return a new name for a data file of a checkpoint."""
    return f"data-{name}-{secrets.token_hex(6)}.bin"


def part_to_json(part: WrittenPart) -> dict[str, object]:
    """Return a part as a rank reports it to the publishing one."""
    return {
        "file": part.data.file,
        "bytes": part.data.bytes,
        "parent": part.parent_name,
        "pieces": [piece_to_json(piece) for piece in part.pieces],
        "steps": [[piece_to_json(piece) for piece in step] for step in part.steps],
    }


def part_from_json(body: dict[str, Any]) -> WrittenPart:
    """Return the part that `part_to_json` described."""
    return WrittenPart(
        data=DataFile(file=body["file"], bytes=body["bytes"]),
        parent_name=body["parent"],
        pieces=tuple(piece_from_json(piece) for piece in body["pieces"]),
        steps=tuple(tuple(piece_from_json(piece) for piece in step) for step in body["steps"]),
    )


def _log_of(taken: Taken, parts: Sequence[WrittenPart]) -> StepLog:
    steps = [
        StepEntry(
            number=step.number,
            lr=step.lr,
            factor=step.factor,
            flats=joined([part.steps[index] for part in parts]),
        )
        for index, step in enumerate(taken.steps)
    ]
    return StepLog(
        order=taken.order,
        tied=taken.tied,
        device=taken.device,
        optimizer=taken.optimizer,
        probe=taken.probe,
        steps=tuple(steps),
    )


def _wanted(snapshot: Buffer, hashes: Mapping[str, Mapping[int, str]], old: Buffer | None) -> Iterator[Wanted]:
    for slot in snapshot.layout:
        before = old.content(slot) if old is not None else None
        yield Wanted(
            slot=slot,
            content=snapshot.content(slot),
            copy_progress=snapshot.copy_progress,
            hashes=hashes.get(slot.name, {}),
            old=before,
        )


def _write(claim: fence.Claim, facts: CheckpointFacts, content: Iterable[bytes | memoryview]) -> DataFile:
    fence.check(claim)
    path = claim.directory / data_file_name(checkpoint_name(facts.step, facts.attempt))
    size_bytes = files.write_new(path, _after_magic(content), direct=True)
    files.sync_directory(claim.directory)
    return DataFile(file=path.name, bytes=size_bytes)


def _after_magic(content: Iterable[bytes | memoryview]) -> Generator[bytes | memoryview, None, None]:
    yield DATA_MAGIC
    yield from content


def _collect(
    made: Generator[bytes | memoryview, None, tuple[PieceEntry, ...]], into: list[bytes | memoryview]
) -> tuple[PieceEntry, ...]:
    """Run a packer's generator to its end, and return its result."""
    while True:
        try:
            into.append(next(made))
        except StopIteration as end:
            return end.value
