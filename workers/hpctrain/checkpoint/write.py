"""One checkpoint from a snapshot to a published manifest.

Knows its parent by its manifest and its content; does not know threads, models or when to write.
Rules: the data file is durable before the manifest that names it appears; the fence is asked in between; a chunk that
did not change is not written, one that did is stored in the smallest of the packings, each content once.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint import fence, files
from hpctrain.checkpoint.manifest import (
    CHUNK_BYTES,
    ITEM_BYTES,
    SUFFIX,
    Chunk,
    Facts,
    Manifest,
    Parent,
    TensorEntry,
    checkpoint_name,
    checksum_of,
    to_bytes,
)
from hpctrain.checkpoint.pack import Packing, digest, pack
from hpctrain.checkpoint.snapshot import Slot, Snapshot

DATA_MAGIC = b"HPCTDAT1"
LATEST = "LATEST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A checkpoint that readers can find, with its content for the next one to stand on."""

    manifest: Manifest
    checksum: str
    snapshot: Snapshot
    stored_bytes: int


class _Packer:
    """Chunks on their way into the data file: where each one went."""

    def __init__(self, snapshot: Snapshot, parent: Published | None, chunk_bytes: int) -> None:
        self._snapshot = snapshot
        self._parent = parent
        self._chunk_bytes = chunk_bytes
        self._stored_before: dict[str, Chunk] = {}
        self._at = len(DATA_MAGIC)
        self.tensors: list[TensorEntry] = []

    def pieces(self) -> Iterator[bytes | memoryview]:
        """This will give what belongs into the data file, and fill `tensors` on the way."""
        yield DATA_MAGIC
        for number, slot in enumerate(self._snapshot.layout):
            chunks: list[Chunk] = []
            for low in range(0, slot.bytes, self._chunk_bytes):
                chunk, stored = self._store(number, slot, low)
                chunks.append(chunk)
                if stored is not None:
                    yield stored
            entry = TensorEntry(name=slot.name, dtype=slot.dtype, shape=slot.shape, chunks=tuple(chunks))
            self.tensors.append(entry)

    def _store(self, number: int, slot: Slot, low: int) -> tuple[Chunk, bytes | memoryview | None]:
        content = self._snapshot.content(slot)[low : low + self._chunk_bytes]
        hash_now = digest(content)
        before = None
        if self._parent is not None:
            parent_chunk = self._parent.manifest.tensors[number].chunks[low // self._chunk_bytes]
            if parent_chunk.hash == hash_now:
                return Chunk(bytes=len(content), hash=hash_now, packing=Packing.SAME), None
            before = self._parent.snapshot.content(slot)[low : low + self._chunk_bytes]
        known = self._stored_before.get(hash_now)
        if known is not None and known.bytes == len(content):
            return known, None
        packing, stored = pack(content, ITEM_BYTES[slot.dtype], before)
        chunk = Chunk(bytes=len(content), hash=hash_now, packing=packing, at=self._at, stored=len(stored))
        self._at += len(stored)
        if packing is Packing.RAW:  # the others depend on the kind of number, or on the parent
            self._stored_before[hash_now] = chunk
        return chunk, stored


def write_checkpoint(
    claim: fence.Claim,
    snapshot: Snapshot,
    facts: Facts,
    parent: Published | None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Published:
    """This will write and publish a checkpoint: an increment on `parent`, or a base without one.

    Raises:
        PublishError: the share failed; nothing was published.
        StaleAttemptError: a later attempt has taken over; nothing was published.
    """
    directory, name = claim.directory, checkpoint_name(facts.step, facts.attempt)
    fence.check(claim)
    data_path = directory / f"data-{name}-{secrets.token_hex(6)}.bin"
    packer = _Packer(snapshot, parent, chunk_bytes)
    data_bytes = files.write_new(data_path, packer.pieces())
    files.sync_directory(directory)
    manifest = Manifest(
        facts=facts,
        kind="delta" if parent else "base",
        parent=Parent(name=parent.manifest.name, checksum=parent.checksum) if parent else None,
        base=parent.manifest.base if parent else name,
        depth=parent.manifest.depth + 1 if parent else 0,
        chunk_bytes=chunk_bytes,
        data_file=data_path.name,
        data_bytes=data_bytes,
        tensors=tuple(packer.tensors),
    )
    content = to_bytes(manifest)
    _publish(claim, directory / (name + SUFFIX), content)
    stored_bytes = data_bytes + len(content)
    return Published(manifest=manifest, checksum=checksum_of(content), snapshot=snapshot, stored_bytes=stored_bytes)


def _publish(claim: fence.Claim, path: Path, content: bytes) -> None:
    draft = files.write_draft(path, content)
    try:
        fence.check(claim)
        files.commit(draft, path)
    finally:
        files.remove(draft)
    files.replace_hint(path.with_name(LATEST), path.name.encode() + b"\n")
