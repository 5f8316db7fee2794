"""A state on the node's own disk while the share takes none, and its publication.

Each rank that writes keeps its part of the newest checkpoint in a local directory: a data file in the format of the share, and a
record of it.  As soon as the share takes files again, the rank copies both to it.  When the parts of all ranks are there, the
process that may publish joins them to one checkpoint.  A run of one writer has checkpoints of one part.

Rules: each rank keeps its newest part only.  Parts that are not newer than the newest checkpoint on the share are
removed.  A record has a checksum; readers of checkpoints ignore it.  The local directory belongs to the user alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.checkpoint.chunks import CHUNK_BYTES
from hpctrain.checkpoint.encryption import CheckpointKey
from hpctrain.checkpoint.manifest import (
    SUFFIX,
    CheckpointFacts,
    check_key,
    checked_to_bytes,
    checkpoint_name,
    checkpoint_names,
    facts_from_json,
    facts_to_json,
    from_bytes,
    order_of,
    read_json,
    take_checksum,
)
from hpctrain.checkpoint.writing import files
from hpctrain.checkpoint.writing.buffers import Buffer
from hpctrain.checkpoint.writing.files import Claim
from hpctrain.checkpoint.writing.publish import (
    WrittenPart,
    data_file_name,
    part_from_json,
    part_to_json,
    publish,
    write_part,
)
from hpctrain.errors import CheckpointKeyError, DamagedError, PublishError

PIECE_BYTES = 1 << 20
RECORD = re.compile(r"part-(step-\d{10,}\.a\d{4,})\.r(\d+)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPart:
    """One rank's part of a checkpoint that `ranks` of them write together."""

    facts: CheckpointFacts
    rank: int
    ranks: int
    chunk_bytes: int
    part: WrittenPart

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint."""
        return checkpoint_name(self.facts.step, self.facts.attempt)

    @property
    def record_name(self) -> str:
        """The name of the file that describes this part."""
        return _record_name(self.checkpoint, self.rank)


# ----- called by the run


def bring_host_parts(directory: Path, key: CheckpointKey | None = None) -> None:
    """Copy the parts that this host has kept to the checkpoint directory.

    All ranks call it before any rank reads from there.

    Raises:
        CheckpointKeyError: the key does not fit them.
    """
    try:
        local = local_directory(directory)
        if local.exists() and is_ours(local) and _records(local):
            check_key(local, key)
            check_key(directory, key)
        bring_parts(local, directory, key=key)
    except (OSError, PublishError) as error:
        print(f"checkpoint: cannot copy a part that this host has kept to the share: {error}", flush=True)


def publish_local_parts(mine: Claim, key: CheckpointKey | None = None) -> None:
    """Publish the newest checkpoint that hosts have kept, if the share has no newer status.

    Raises:
        CheckpointKeyError: the key does not fit them.
    """
    try:
        bring_parts(local_directory(mine.directory), mine.directory, key=key)
        names = join_parts(mine, key)
    except (OSError, PublishError) as error:
        print(f"checkpoint: cannot publish on the share what hosts have kept: {error}", flush=True)
        return
    for name in names:
        print(f"checkpoint: published {name} on the share; the run's hosts had kept it", flush=True)


# ----- the local directory


def local_directory(directory: Path) -> Path:
    """Return the local directory for the checkpoints in a directory on the share.

    One per user, host and run.
    """
    digest = hashlib.sha256(os.fsencode(os.path.abspath(directory))).hexdigest()[:16]
    top = Path(os.environ.get("HPCTRAIN_FALLBACK_DIR") or Path(tempfile.gettempdir(), f"hpctrain-{os.getuid()}"))
    return top / digest


def prepare(local: Path) -> None:
    """Create the local directory if it does not exist.

    Raises:
        OSError: this disk takes no directory, or other users may write to it.
    """
    for folder in _private(local):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_ours(local):
        raise PermissionError(f"other users may write to {local}, or to its parent directory")


def is_ours(local: Path) -> bool:
    """Return whether the directory is this user's alone.

    Others could guess its name and create it first.
    """
    found = [os.lstat(folder) for folder in _private(local)]
    return all(
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022 for status in found
    )


def _private(local: Path) -> tuple[Path, ...]:
    """Return the directories that must be this user's.

    The parent too, unless the user has named it.
    """
    return (local,) if os.environ.get("HPCTRAIN_FALLBACK_DIR") else (local.parent, local)


# ----- a part: kept here, copied to the share, joined there


def keep_part(
    local: Path,
    rank: int,
    ranks: int,
    snapshot: Buffer,
    facts: CheckpointFacts,
    pool: Executor,
    chunk_bytes: int = CHUNK_BYTES,
    key: CheckpointKey | None = None,
) -> None:
    """Write a rank's part to the local directory, in place of its last status.

    Raises:
        OSError, PublishError: this disk does not take it either.
    """
    prepare(local)
    before = [name for name, of in _records(local) if of == rank]
    if _record_name(checkpoint_name(facts.step, facts.attempt), rank) in before:
        return  # the same step once more
    part = write_part(Claim(directory=local, attempt=facts.attempt), snapshot, facts, None, pool, chunk_bytes, key)
    local_part = LocalPart(facts=facts, rank=rank, ranks=ranks, chunk_bytes=chunk_bytes, part=part)
    record = local / local_part.record_name
    files.commit(files.write_draft(record, _to_bytes(local_part, key)), record)
    for name in before:
        _remove(local, name, key)


def bring_parts(local: Path, directory: Path, rank: int | None = None, key: CheckpointKey | None = None) -> None:
    """Move parts of one rank, or of all ranks of this host, from here to the share.

    Raises:
        PublishError, OSError: the share still takes no files; the parts stay here.
    """
    if not local.exists() or not is_ours(local):
        return
    for name, of in _records(local):
        if rank is None or of == rank:
            with suppress(DamagedError):  # this disk has lost it, or another rank of this host has moved it
                _bring(local, name, directory, key)
            _remove(local, name, key)


def join_parts(mine: Claim, key: CheckpointKey | None = None) -> list[str]:
    """Publish the newest checkpoint with all parts on the share, unless it is outdated.

    Returns the names of the published checkpoints, and removes the parts that are not needed any more.

    Raises:
        PublishError, OSError: the share failed.
        StaleAttemptError: a later attempt has taken over.
    """
    joined: list[str] = []
    _refresh_listing(mine)
    for parts in _complete(mine.directory, key):
        newest = _newest(mine.directory)
        if newest is None or _order(parts[0].checkpoint) > newest:
            first = parts[0]
            publish(mine, first.facts, [local_part.part for local_part in parts], None, None, first.chunk_bytes, key)
            joined.append(first.checkpoint)
    newest = _newest(mine.directory)
    for name, _ in _records(mine.directory):
        if newest is not None and _order(_checkpoint_of(name)) <= newest:
            _remove(mine.directory, name, key)
    return joined


def _refresh_listing(mine: Claim) -> None:
    """Make this client of the share list the directory anew.

    The attempt that this one replaces may have brought a part just now. A client drops its cache of a directory when it
    changes the directory itself. Retention removes such a file of a killed process.
    """
    files.remove(files.write_draft(mine.directory / (checkpoint_name(0, mine.attempt) + SUFFIX), b""))


def has_waiting_parts(directory: Path) -> bool:
    """Return whether the share has parts that are neither joined nor superseded."""
    return bool(_records(directory))


def _complete(directory: Path, key: CheckpointKey | None) -> list[list[LocalPart]]:
    """Return the complete checkpoints, newest first, each as its parts by rank."""
    found: dict[str, dict[int, LocalPart]] = {}
    for name, _ in _records(directory):
        with suppress(DamagedError):
            local_part = _read(directory / name, key)
            found.setdefault(local_part.checkpoint, {})[local_part.rank] = local_part
    names = sorted(found, key=_order, reverse=True)
    whole = [found[name] for name in names if set(found[name]) == set(range(next(iter(found[name].values())).ranks))]
    return [[parts[rank] for rank in sorted(parts)] for parts in whole]


def _bring(local: Path, name: str, directory: Path, key: CheckpointKey | None) -> None:
    local_part = _read(local / name, key)
    newest = _newest(directory)
    if newest is not None and _order(local_part.checkpoint) <= newest:
        return
    data = replace(local_part.part.data, file=data_file_name(local_part.checkpoint))
    try:
        pieces = pieces_of(local / local_part.part.data.file, data.bytes)
        files.write_new(directory / data.file, pieces, direct=True)
        files.sync_directory(directory)
        moved = replace(local_part, part=replace(local_part.part, data=data))
        draft = files.write_draft(directory / name, _to_bytes(moved, key))
        try:
            files.commit(draft, directory / name)
        finally:
            files.remove(draft)
    except (DamagedError, PublishError, OSError):
        if not (directory / name).exists() or data.file not in _files_of(directory / name, key):
            files.remove(directory / data.file)
        if not (directory / name).exists():
            raise  # else another rank of this host was quicker


def pieces_of(path: Path, length: int) -> Iterator[bytes]:
    """Yield the content of a file of `length` bytes, in pieces of 1 MiB.

    Raises:
        DamagedError: the file does not exist, or is shorter.
    """
    try:
        with path.open("rb") as stream:
            for low in range(0, length, PIECE_BYTES):
                piece = stream.read(min(PIECE_BYTES, length - low))
                if len(piece) != min(PIECE_BYTES, length - low):
                    raise DamagedError(f"{path} ends early")
                yield piece
    except FileNotFoundError as error:
        raise DamagedError(f"{path} does not exist") from error


def _remove(directory: Path, name: str, key: CheckpointKey | None) -> None:
    """Remove a record, and its data file unless a published checkpoint refers to it."""
    data = set(_files_of(directory / name, key))
    checkpoint = _checkpoint_of(name)
    with suppress(DamagedError, FileNotFoundError):
        manifest = from_bytes(checkpoint, (directory / (checkpoint + SUFFIX)).read_bytes(), key)
        data -= {entry.file for entry in manifest.data}
    files.remove(directory / name)
    for file in data:
        files.remove(directory / file)


def _newest(directory: Path) -> tuple[int, int] | None:
    names = checkpoint_names(directory)
    return _order(names[0]) if names else None


def _order(checkpoint: str) -> tuple[int, int]:
    order = order_of(checkpoint)
    assert order is not None
    return order


# ----- records: files that describe a part


def _records(directory: Path) -> list[tuple[str, int]]:
    """Return the names of the records in a directory, each with its rank."""
    found = ((RECORD.fullmatch(name), name) for name in os.listdir(directory))
    return [(name, int(match[2])) for match, name in found if match]


def _record_name(checkpoint: str, rank: int) -> str:
    return f"part-{checkpoint}.r{rank}.json"


def _checkpoint_of(record: str) -> str:
    match = RECORD.fullmatch(record)
    assert match is not None
    return match[1]


def _files_of(record: Path, key: CheckpointKey | None) -> list[str]:
    try:
        return [_read(record, key).part.data.file]
    except DamagedError:
        return []


def _to_bytes(local_part: LocalPart, key: CheckpointKey | None) -> bytes:
    body = {
        "facts": facts_to_json(local_part.facts),
        "rank": local_part.rank,
        "ranks": local_part.ranks,
        "chunk_bytes": local_part.chunk_bytes,
        "part": part_to_json(local_part.part),
    }
    return checked_to_bytes(local_part.record_name.removesuffix(SUFFIX), body, key)


def _read(path: Path, key: CheckpointKey | None) -> LocalPart:
    try:
        body = read_json(path.name.removesuffix(SUFFIX), path.read_bytes(), key)
        take_checksum(body, key)
        local_part = LocalPart(
            facts=facts_from_json(body["facts"]),
            rank=int(body["rank"]),
            ranks=int(body["ranks"]),
            chunk_bytes=int(body["chunk_bytes"]),
            part=part_from_json(body["part"]),
        )
    except CheckpointKeyError as error:
        raise CheckpointKeyError(f"cannot use {path}: {error}") from None
    except (DamagedError, FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path.name} is not a record of a part ({error})") from error
    file = local_part.part.data.file
    if local_part.record_name != path.name or "/" in file or file.startswith("."):
        raise DamagedError(f"{path.name} describes another file")
    return local_part
