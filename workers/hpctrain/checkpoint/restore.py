"""From a directory to the newest state that can be proved whole.

Writes nothing.
Rules: a candidate counts only if every manifest of its chain and every chunk in it verifies, and steps of logged gradients
lead to the numbers that were noted; else the one before it is taken, and the damage is named.  Newest is by step, then by
attempt.  LATEST is only one more name to look at.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hpctrain.checkpoint.chunks import ITEM_BYTES, TensorEntry
from hpctrain.checkpoint.listing import checkpoint_names
from hpctrain.checkpoint.manifest import SUFFIX, Manifest, checksum_of, from_bytes
from hpctrain.checkpoint.pack import Packing, digest, unpack_into
from hpctrain.checkpoint.snapshot import Layout, Snapshot, compare, lay_out
from hpctrain.checkpoint.write import Published
from hpctrain.errors import DamagedError, NoCheckpointError

# Brings live tensors and the snapshot from what was read to the checkpoint, through `logs`; raises DamagedError.
Replay = Callable[[Path, Published], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A verified checkpoint, and the names of newer ones that were damaged."""

    published: Published
    damaged: tuple[str, ...]


def restore_newest(
    directory: Path, live: Layout, warn: Callable[[str], None], replay: Replay | None = None
) -> Restored | None:
    """This will read the newest checkpoint that verifies; None if there has never been one.

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
    layout = lay_out([(entry.name, entry.dtype, entry.shape) for entry in states[-1][0].tensors])
    if live is not None:
        compare(layout, live, f"{directory}/{name}")
    snapshot = Snapshot(layout)
    before: dict[str, TensorEntry] = {}
    for manifest, _ in chain:
        _apply(directory, manifest, before, snapshot)
        before = {entry.name: entry for entry in manifest.tensors}
    return Published(manifest=newest, checksum=checksum, snapshot=snapshot, stored_bytes=0, logs=logs)


def read_gradients(directory: Path, manifest: Manifest, index: int) -> list[torch.Tensor]:
    """This will read the gradients of one step of a log.

    Raises:
        DamagedError: they are not what was written.
    """
    assert manifest.log is not None
    flats = manifest.log.steps[index].flats
    read = Snapshot(lay_out([(flat.name, flat.dtype, flat.shape) for flat in flats]))
    with _opened(directory, manifest) as descriptor:
        for slot, flat in zip(read.layout, flats, strict=True):
            _apply_tensor(descriptor, manifest, flat, None, read.content(slot))
    return read.tensors()


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


def _read_manifest(directory: Path, name: str) -> tuple[Manifest, str]:
    path = directory / (name + SUFFIX)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror})") from error
    try:
        manifest, checksum = from_bytes(content), checksum_of(content)
    except DamagedError as error:
        raise DamagedError(f"{path.name}: {error}") from error
    if manifest.name != name:
        raise DamagedError(f"{path.name} says that it is {manifest.name}")
    return manifest, checksum


def _apply(directory: Path, manifest: Manifest, before: Mapping[str, TensorEntry], snapshot: Snapshot) -> None:
    """Bring the snapshot from the parent's content to this manifest's; a log's own steps are left."""
    slots = {slot.name: slot for slot in snapshot.layout}
    if manifest.log is None and set(slots) != {entry.name for entry in manifest.tensors}:
        raise DamagedError(f"{manifest.name} has not the tensors of the one that stands on it")
    with _opened(directory, manifest) as descriptor:
        for entry in manifest.tensors:
            slot = slots.get(entry.name)
            if slot is None or (entry.dtype, entry.shape) != (slot.dtype, slot.shape):
                raise DamagedError(f"{manifest.name} has a tensor {entry.name!r} unlike the one that stands on it")
            _apply_tensor(descriptor, manifest, entry, before.get(entry.name), snapshot.content(slot))


@contextmanager
def _opened(directory: Path, manifest: Manifest) -> Iterator[int]:
    path = directory / manifest.data_file
    try:
        with path.open("rb") as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            if size_bytes != manifest.data_bytes:
                raise DamagedError(f"{path.name} has {size_bytes} bytes instead of {manifest.data_bytes}")
            yield stream.fileno()
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror})") from error


def _apply_tensor(
    descriptor: int, manifest: Manifest, entry: TensorEntry, before: TensorEntry | None, content: memoryview
) -> None:
    low = 0
    for index, chunk in enumerate(entry.chunks):
        end = chunk.at + chunk.stored
        where = f"chunk {index} of {entry.name!r} in {manifest.data_file} (bytes {chunk.at} to {end})"
        out = content[low : low + chunk.bytes]
        low += chunk.bytes
        if chunk.packing is Packing.SAME:
            if before is None or before.chunks[index].hash != chunk.hash:
                raise DamagedError(f"chunk {index} of {entry.name!r} in {manifest.name} is not its parent's")
            continue
        stored = os.pread(descriptor, chunk.stored, chunk.at)
        try:
            unpack_into(out, chunk.packing, stored, ITEM_BYTES[entry.dtype])
        except DamagedError as error:
            raise DamagedError(f"{where} {error}") from error
        if digest(out) != chunk.hash:
            raise DamagedError(f"{where} does not have its hash")
