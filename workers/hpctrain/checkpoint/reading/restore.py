"""Restore the newest checkpoint of a directory that verifies.

Writes nothing.
Rules: a checkpoint counts only if every manifest and chunk of its chain verifies, and its logged steps lead to the recorded
numbers.  Else the damage is printed, and the checkpoint before it is tried.  Newest is by step, then by attempt.  LATEST only
adds a name.  Several threads read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hpctrain.checkpoint.format.chunks import TensorEntry
from hpctrain.checkpoint.format.manifest import SUFFIX, Manifest, checkpoint_names, checksum_of, from_bytes
from hpctrain.checkpoint.reading.reader import ChunkReader, ReadProgress, patiently
from hpctrain.checkpoint.writing.buffers import lay_out
from hpctrain.checkpoint.writing.publish import Published
from hpctrain.checkpoint.writing.snapshot import Layout, LiveMemory, TensorSnapshot, compare
from hpctrain.errors import DamagedError, NoCheckpointError


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
    directory: Path, live: Layout | None, warn: Callable[[str], None], replay: Replay | None = None
) -> RestoredCheckpoint | None:
    """Read the newest checkpoint that verifies, of layout `live`.

    None if the directory has no checkpoint.

    `replay` replays logged gradients; without it, checkpoints with a log cannot be used.

    Raises:
        NoCheckpointError: all checkpoints are damaged.
        MismatchError: the newest undamaged one is of another model.
    """
    damages: list[tuple[str, str]] = []
    for name in checkpoint_names(directory):
        try:
            published = read_checkpoint(directory, name, live, warn, replay)
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
    tell: Callable[[str], None] = lambda _: None,
    replay: Replay | None = None,
) -> Published:
    """Read and verify one checkpoint with its chain, except for gradients.

    Their manifests are in `logs`.

    `tell` gets lines about the progress of a long read.  The parent of logs is read into `replay.memory`, if that returns some.

    Raises:
        DamagedError: names the file, and the chunk of the tensor.
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
    memory = replay.memory(logs) if replay is not None and logs else None
    into: LiveMemory | TensorSnapshot = memory if memory is not None else TensorSnapshot(layout)
    before: dict[str, TensorEntry] = {}
    with ChunkReader(directory, ReadProgress(tell, f"reading checkpoint {name}", [one for one, _ in states])) as reader:
        for manifest, _ in chain:
            reader.apply(manifest, before, into)
            before = {entry.name: entry for entry in manifest.tensors}
    return Published(
        manifest=newest, checksum=checksum, snapshot=into if isinstance(into, TensorSnapshot) else None, logs=logs
    )


class Gradients:
    """Reads the gradients of logged steps, the next ones while the current ones are in use."""

    def __init__(self, directory: Path, manifests: tuple[Manifest, ...]) -> None:
        self._directory = directory
        self._wanted = [
            (manifest, step.flats) for manifest in manifests for step in (manifest.log.steps if manifest.log else ())
        ]
        self._spare: list[TensorSnapshot] = []

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        """Yield each step's flat gradients, which are valid until the next ones.

        Raises:
            DamagedError: they are not what was written.
        """
        with ThreadPoolExecutor(1, "next") as ahead, ChunkReader(self._directory) as reader:
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


def verify_log(directory: Path, logs: tuple[Manifest, ...]) -> None:
    """Verify the gradients of logs; only an optimizer can verify their result.

    Raises:
        DamagedError: they are not what was written.
    """
    for _ in Gradients(directory, logs):
        pass


def read_chain(directory: Path, name: str) -> list[tuple[Manifest, str]]:
    """Read the manifests from the base to this one, each with its checksum.

    Raises:
        DamagedError: one is missing, damaged, or not the parent of the next.
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
        raise DamagedError(f"{path.name} has the name of {manifest.name}")
    return manifest, checksum
