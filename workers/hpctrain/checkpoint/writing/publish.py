"""Write a rank's part of a checkpoint, publish all parts, remove old checkpoints.

Knows the parent by its name and its chunks' hashes; does not know torch, threads or models.
Rules: data files are durable before the manifest that names them appears; the fence is checked in between.
Packing: chunks are hashed and packed in several threads, and placed one after another.  An unchanged chunk is not stored, a
changed one in the smallest packing, each content once.  A base is packed only if that is faster than writing the saved bytes;
every so many chunks both are measured.
Retention: a chain is a base with all its increments, and is removed as a whole, in two phases.  First a manifest is renamed, so
that no reader starts on it; the next pass, at least one base later, removes its data and then the renamed manifest.  A crash
leaves work for the next pass, but never a manifest without its data.  Leftovers of dead writers are removed too, if their
attempt is fenced and two passes have seen them.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.chunks import (
    CHUNK_BYTES,
    ITEM_BYTES,
    Chunk,
    Packing,
    PieceEntry,
    digest,
    hashes_of,
    joined,
    pack,
    piece_from_json,
    piece_to_json,
)
from hpctrain.checkpoint.encryption import CheckpointKey, FileSealer
from hpctrain.checkpoint.manifest import (
    LATEST,
    SUFFIX,
    CheckpointFacts,
    DataFile,
    Manifest,
    Parent,
    StepEntry,
    StepLog,
    Taken,
    checkpoint_name,
    checkpoint_names,
    data_from_json,
    data_to_json,
    from_bytes,
    order_of,
    read_json,
    take_checksum,
    to_bytes,
)
from hpctrain.checkpoint.writing import files
from hpctrain.checkpoint.writing.buffers import Buffer, CopyProgress, TensorSlot
from hpctrain.errors import CheckpointKeyError, DamagedError

DATA_MAGIC, SEALED_MAGIC = b"HPCTDAT1", b"HPCTENC1"  # of the same length
SAMPLED = 8  # one chunk of so many is packed to estimate the size of all


THREADS = 4
AHEAD = 2 * THREADS  # chunks that are being packed
PACKED_ANYWAY = 16  # one chunk of so many is packed at any cost, to measure
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

    def __init__(
        self, chunk_bytes: int, at: int, pool: Executor, sealer: FileSealer | None = None, *, frugal: bool = True
    ) -> None:
        """Prepare a packer; `frugal`: pack every chunk that gets smaller, at any cost of time."""
        self._chunk_bytes, self._at, self._pool, self._sealer = chunk_bytes, at, pool, sealer
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
        for part in wanted:
            heads.append(part.slot)
            chunks.append([])
            for low in range(0, part.slot.bytes, self._chunk_bytes):
                part.copy_progress.wait(part.slot.at + min(low + self._chunk_bytes, part.slot.bytes))
                yield part, low

    def _begin(self, wanted: Wanted, low: int) -> Future[_Packed]:
        high = low + self._chunk_bytes
        before = wanted.old[low:high] if wanted.old is not None else None
        known = wanted.hashes.get(wanted.slot.low_bytes + low)
        plain = self._worth is not None and not self._worth.packs_next()
        task = _Task(wanted.content[low:high], ITEM_BYTES[wanted.slot.dtype], known, before, plain)
        sealer = self._sealer
        return self._pool.submit(_packed, task, sealer, sealer.next_number() if sealer else 0)

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
        placed = replace(chunk, at=self._at, stored=len(stored))
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

    def packs_next(self) -> bool:
        """Return whether to pack the next chunk."""
        self._number += 1
        if self._number % PACKED_ANYWAY == 1 or self._written_bytes < KNOWN_BYTES or not self._raw_bytes:
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


@dataclass(frozen=True, slots=True)
class _Task:
    """A chunk to pack; `before` is the parent's content, `plain`: do not compress."""

    content: memoryview
    item_bytes: int
    hash_before: str | None
    before: memoryview | None
    plain: bool


def _packed(task: _Task, sealer: FileSealer | None, number: int) -> _Packed:
    content, hash_before = task.content, task.hash_before
    hash_now = sealer.digest(content) if sealer else digest(content)
    if hash_now == hash_before:
        return _Packed(chunk=Chunk(bytes=len(content), hash=hash_now, packing=Packing.SAME), stored=None, cpu_s=0.0)
    started_s = time.thread_time()
    packing, stored = (Packing.RAW, content) if task.plain else pack(content, task.item_bytes, task.before)
    spent_s = 0.0 if task.plain else time.thread_time() - started_s
    chunk = Chunk(bytes=len(content), hash=hash_now, packing=packing, number=number)
    if sealer is not None:
        stored = sealer.seal(number, stored)
    return _Packed(chunk=chunk, stored=stored, cpu_s=spent_s, alike=_alike(chunk, task.item_bytes, hash_before))


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
    salt: str = ""  # if it is encrypted

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


def pack_log(
    taken: Taken,
    parent: Footing | None,
    pool: Executor,
    chunk_bytes: int = CHUNK_BYTES,
    key: CheckpointKey | None = None,
) -> PackedLog:
    """Pack the gradients of steps, and the changed tensors that no optimizer moves."""
    at = len(DATA_MAGIC)
    sealer = FileSealer(key) if key else None
    content: list[bytes | memoryview] = []

    def packed(wanted: Iterable[Wanted]) -> tuple[PieceEntry, ...]:
        nonlocal at
        made = _collect(Packer(chunk_bytes, at, pool, sealer).run(wanted), content)
        at = len(DATA_MAGIC) + sum(len(piece) for piece in content)
        return made

    loose = packed(_wanted(taken.loose, parent.hashes if parent else {}, None))
    steps = tuple(packed(_wanted(step.flats, {}, None)) for step in taken.steps)
    return PackedLog(pieces=loose, steps=steps, content=content, salt=sealer.salt if sealer else "")


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
    claim: files.Claim,
    snapshot: Buffer,
    facts: CheckpointFacts,
    parent: Footing | None,
    pool: Executor,
    chunk_bytes: int = CHUNK_BYTES,
    key: CheckpointKey | None = None,
) -> WrittenPart:
    """Write this rank's part of an increment on `parent`, or of a base if that is None.

    Raises:
        PublishError: the share failed.
        StaleAttemptError: a later attempt has taken over.
    """
    sealer = FileSealer(key) if key else None
    packer = Packer(chunk_bytes, len(DATA_MAGIC), pool, sealer, frugal=parent is not None)
    old = parent.snapshot if parent else None
    found: list[PieceEntry] = []

    def content() -> Generator[bytes | memoryview, None, None]:
        found.extend((yield from packer.run(_wanted(snapshot, parent.hashes if parent else {}, old))))

    data = _write(claim, facts, content(), sealer.salt if sealer else "")
    return WrittenPart(data=data, parent_name=parent.name if parent else None, pieces=tuple(found), steps=())


def write_log(claim: files.Claim, packed: PackedLog, facts: CheckpointFacts, parent: Footing) -> WrittenPart:
    """Write this rank's part of an increment that is a log of gradients on `parent`.

    Raises: as `write_part`.
    """
    data = _write(claim, facts, packed.content, packed.salt)
    return WrittenPart(data=data, parent_name=parent.name, pieces=packed.pieces, steps=packed.steps)


def publish(
    claim: files.Claim,
    facts: CheckpointFacts,
    parts: Sequence[WrittenPart],
    parent: Footing | None,
    taken: Taken | None,
    chunk_bytes: int = CHUNK_BYTES,
    key: CheckpointKey | None = None,
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
    content = to_bytes(manifest, key)
    path = claim.directory / (name + SUFFIX)
    draft = files.write_draft(path, content)
    try:
        files.check_claim(claim)
        files.commit(draft, path)
    finally:
        files.remove(draft)
    files.replace_hint(path.with_name(LATEST), path.name.encode() + b"\n")
    return name, take_checksum(read_json(name, content, key), key), len(content)


def data_file_name(name: str) -> str:
    """Return a new name for a data file of a checkpoint."""
    return f"data-{name}-{secrets.token_hex(6)}.bin"


def part_to_json(part: WrittenPart) -> dict[str, object]:
    """Return a part as a rank reports it to the publishing one."""
    return {
        **data_to_json(part.data),
        "parent": part.parent_name,
        "pieces": [piece_to_json(piece) for piece in part.pieces],
        "steps": [[piece_to_json(piece) for piece in step] for step in part.steps],
    }


def part_from_json(body: dict[str, Any]) -> WrittenPart:
    """Return the part that `part_to_json` described."""
    return WrittenPart(
        data=data_from_json(body),
        parent_name=body["parent"],
        pieces=tuple(piece_from_json(piece) for piece in body["pieces"]),
        steps=tuple(tuple(piece_from_json(piece) for piece in step) for step in body["steps"]),
    )


def _log_of(taken: Taken, parts: Sequence[WrittenPart]) -> StepLog:
    steps = [
        StepEntry(
            number=step.number, lr=step.lr, factor=step.factor, flats=joined([part.steps[index] for part in parts])
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


def _write(claim: files.Claim, facts: CheckpointFacts, content: Iterable[bytes | memoryview], salt: str) -> DataFile:
    files.check_claim(claim)
    path = claim.directory / data_file_name(checkpoint_name(facts.step, facts.attempt))
    size_bytes = files.write_new(path, itertools.chain([magic_of(salt)], content), direct=True)
    files.sync_directory(claim.directory)
    return DataFile(file=path.name, bytes=size_bytes, salt=salt)


def magic_of(salt: str) -> bytes:
    """Return how a data file begins."""
    return SEALED_MAGIC if salt else DATA_MAGIC


def _collect(
    made: Generator[bytes | memoryview, None, tuple[PieceEntry, ...]], into: list[bytes | memoryview]
) -> tuple[PieceEntry, ...]:
    """Run a packer's generator to its end, and return its result."""
    while True:
        try:
            into.append(next(made))
        except StopIteration as end:
            return end.value


DOOMED = ".doomed"
# Data files and drafts have the attempt in their names.
LEFTOVER = re.compile(
    r"(?:data-|part-)?(step-\d{10,}\.a(\d{4,}))(?:-[0-9a-f]+\.bin|\.r\d+\.json|(?:\.r\d+)?\.json\.[0-9a-f]+\.tmp)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """The chains to keep: the newest `keep`, and one per `every_s` seconds (0: none)."""

    keep: int
    every_s: float = 0.0

    def bases_to_keep(self, written_at_s: Mapping[str, float]) -> set[str]:
        """Return the chains to keep, given newest first with the time of their base."""
        names = list(written_at_s)
        bases = names[: max(1, self.keep)]
        if self.every_s > 0:
            first_of: dict[float, str] = {}
            for name in reversed(names):
                first_of.setdefault(written_at_s[name] // self.every_s, name)
            bases += first_of.values()
        return set(bases)


class Retention:
    """Applies the policy: one pass after each base."""

    def __init__(
        self,
        claim: files.Claim,
        policy: RetentionPolicy,
        distrusted: Collection[str] = (),
        key: CheckpointKey | None = None,
    ) -> None:
        self._claim, self._key = claim, key
        self._policy = policy
        self._distrusted = frozenset(distrusted)  # damaged at the start: they do not count as kept
        self._seen_unused: frozenset[str] = frozenset()

    def sweep(self) -> list[str]:
        """Finish the last pass, begin the next one, and return the names of removed files.

        Raises:
            StaleAttemptError: a later attempt has taken over; nothing was changed.
        """
        files.check_claim(self._claim)
        directory = self._claim.directory
        removed = remove_doomed(directory, self._key)
        doom(directory, self._policy, self._distrusted, self._key)
        unused = self._leftovers(directory)
        removed += [name for name in sorted(unused & self._seen_unused) if files.remove(directory / name)]
        self._seen_unused = unused
        return removed

    def _leftovers(self, directory: Path) -> frozenset[str]:
        """Return files that no manifest can refer to: of checkpoints that were never published."""
        names = os.listdir(directory)
        published = {name.removesuffix(DOOMED).removesuffix(SUFFIX) for name in names}
        found = ((LEFTOVER.fullmatch(name), name) for name in names)
        return frozenset(
            name for match, name in found if match and match[1] not in published and int(match[2]) < self._claim.attempt
        )


def prune(
    directory: Path, policy: RetentionPolicy, damaged: Collection[str], key: CheckpointKey | None = None
) -> list[str]:
    """Remove now what the policy does not keep, and return the names of removed files.

    `damaged` chains do not count as kept.  For people: readers begin with the newest chains, which stay.
    """
    doom(directory, policy, damaged, key)
    return remove_doomed(directory, key)


def doom(
    directory: Path, policy: RetentionPolicy, distrusted: Collection[str], key: CheckpointKey | None = None
) -> None:
    """Rename the manifests that the policy does not keep, so that no reader starts on them."""
    manifests = _readable(directory, key)
    newest: dict[str, tuple[int, int]] = {}
    for name, manifest in manifests.items():
        if name not in distrusted:
            newest[manifest.base] = max(newest.get(manifest.base, (-1, -1)), order_of(name) or (-1, -1))
    bases = sorted(newest, key=lambda base: newest[base], reverse=True)
    times = {base: manifests[base].facts.written_at_s if base in manifests else 0.0 for base in bases}
    to_keep = policy.bases_to_keep(times)
    # Newest first, so that no manifest ever lacks its parent.
    for name in sorted(manifests, key=lambda name: order_of(name) or (), reverse=True):
        if manifests[name].base in newest and manifests[name].base not in to_keep:
            with suppress(FileNotFoundError):  # another process does the same
                os.rename(directory / (name + SUFFIX), directory / (name + SUFFIX + DOOMED))
    files.sync_directory(directory)


def remove_doomed(directory: Path, key: CheckpointKey | None = None) -> list[str]:
    """Remove renamed manifests, and those of their files that no other one refers to."""
    doomed = sorted(name for name in os.listdir(directory) if name.endswith(DOOMED))
    used = {data.file for manifest in _readable(directory, key).values() for data in manifest.data} if doomed else set()
    removed = []
    for name in doomed:
        try:
            manifest = from_bytes(name.removesuffix(SUFFIX + DOOMED), (directory / name).read_bytes(), key)
            data = [data_file.file for data_file in manifest.data]
        except (DamagedError, CheckpointKeyError, FileNotFoundError):
            data = []  # its data files become leftovers
        removed += [file for file in (*data, name) if file not in used and files.remove(directory / file)]
    return removed


def _readable(directory: Path, key: CheckpointKey | None) -> dict[str, Manifest]:
    manifests = {}
    for name in checkpoint_names(directory):
        try:
            manifests[name] = from_bytes(name, (directory / (name + SUFFIX)).read_bytes(), key)
        except (DamagedError, CheckpointKeyError, FileNotFoundError):
            continue  # unreadable: neither use nor remove it
    return manifests
