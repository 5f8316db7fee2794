"""From a directory to the newest state that can be proved whole.

Writes nothing.
Rules: a candidate counts only if every manifest of its chain and every chunk in it verifies; else the one before it is
taken, and the damage is named.  Newest is by step, then by attempt.  LATEST is only one more name to look at.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.manifest import ITEM_BYTES, SUFFIX, Manifest, checksum_of, from_bytes, order_of
from hpctrain.checkpoint.pack import Packing, digest, unpack_into
from hpctrain.checkpoint.snapshot import Layout, Slot, Snapshot, compare, lay_out
from hpctrain.checkpoint.write import LATEST, Published
from hpctrain.errors import DamagedError, NoCheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A verified checkpoint, and the names of newer ones that were damaged."""

    published: Published
    damaged: tuple[str, ...]


def checkpoint_names(directory: Path) -> list[str]:
    """This will list the checkpoints by name, the newest first."""
    try:
        names = {name.removesuffix(SUFFIX) for name in os.listdir(directory) if name.endswith(SUFFIX)}
    except FileNotFoundError:
        return []
    names.update(_hinted(directory))
    return sorted((name for name in names if order_of(name)), key=lambda name: order_of(name) or (), reverse=True)


def restore_newest(directory: Path, live: Layout, warn: Callable[[str], None]) -> Restored | None:
    """This will read the newest checkpoint that verifies; None if there has never been one.

    Raises:
        NoCheckpointError: there are checkpoints, and every one is damaged.
        MismatchError: the newest whole one is of another model.
    """
    damages: list[tuple[str, str]] = []
    for name in checkpoint_names(directory):
        try:
            published = read_checkpoint(directory, name, live)
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


def read_checkpoint(directory: Path, name: str, live: Layout | None = None) -> Published:
    """This will read one checkpoint with its chain, verifying everything.

    Raises:
        DamagedError: says which file, and which chunk of which tensor.
        MismatchError: its tensors are not those of `live`.
    """
    chain = read_chain(directory, name)
    newest, checksum = chain[-1]
    layout = lay_out([(entry.name, entry.dtype, entry.shape) for entry in newest.tensors])
    if live is not None:
        compare(layout, live, f"{directory}/{name}")
    snapshot = Snapshot(layout)
    for link, (manifest, _) in enumerate(chain):
        _apply(directory, manifest, chain[link - 1][0] if link else None, snapshot)
    return Published(manifest=newest, checksum=checksum, snapshot=snapshot, stored_bytes=0)


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


def _apply(directory: Path, manifest: Manifest, before: Manifest | None, snapshot: Snapshot) -> None:
    """Bring the snapshot from the parent's content to this manifest's."""
    path = directory / manifest.data_file
    try:
        with path.open("rb") as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            if size_bytes != manifest.data_bytes:
                raise DamagedError(f"{path.name} has {size_bytes} bytes instead of {manifest.data_bytes}")
            for number, slot in enumerate(snapshot.layout):
                _apply_tensor(stream.fileno(), path.name, manifest, before, number, slot, snapshot)
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror})") from error


def _apply_tensor(
    descriptor: int,
    file_name: str,
    manifest: Manifest,
    before: Manifest | None,
    number: int,
    slot: Slot,
    snapshot: Snapshot,
) -> None:
    entry = manifest.tensors[number] if number < len(manifest.tensors) else None
    if entry is None or (entry.name, entry.dtype, entry.shape) != (slot.name, slot.dtype, slot.shape):
        raise DamagedError(f"{manifest.name} has no tensor {slot.name!r} like the one that stands on it")
    content, low = snapshot.content(slot), 0
    for index, chunk in enumerate(entry.chunks):
        where = f"chunk {index} of {slot.name!r} in {file_name} (bytes {chunk.at} to {chunk.at + chunk.stored})"
        out = content[low : low + chunk.bytes]
        low += chunk.bytes
        if chunk.packing is Packing.SAME:
            if before is None or before.tensors[number].chunks[index].hash != chunk.hash:
                raise DamagedError(f"chunk {index} of {slot.name!r} in {manifest.name} is not its parent's")
            continue
        stored = os.pread(descriptor, chunk.stored, chunk.at)
        try:
            unpack_into(out, chunk.packing, stored, ITEM_BYTES[entry.dtype])
        except DamagedError as error:
            raise DamagedError(f"{where} {error}") from error
        if digest(out) != chunk.hash:
            raise DamagedError(f"{where} does not have its hash")


def _hinted(directory: Path) -> list[str]:
    """A client may list an old directory and yet read a new file: so the hint can only add a name."""
    try:
        name = (directory / LATEST).read_text(errors="replace").strip().removesuffix(SUFFIX)
    except OSError:
        return []
    return [name] if (directory / (name + SUFFIX)).exists() else []
