"""One rank's part of a checkpoint on its node's own disk, while the share does not take it.

What one process has is in `refuge`.  Of ranks that write together each keeps its part, a base's, and brings it to the share
as soon as that is possible: the data, and a record of what is in them.  Who may publish joins the parts when those of all ranks
are there.
Rules: of each rank the newest part alone; what is older than the newest checkpoint on the share is removed; a record has a hash,
and means nothing to who reads checkpoints.
"""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.checkpoint.format.chunks import CHUNK_BYTES
from hpctrain.checkpoint.format.manifest import (
    SUFFIX,
    Facts,
    checkpoint_name,
    facts_from_json,
    facts_to_json,
    from_bytes,
    order_of,
)
from hpctrain.checkpoint.format.pack import digest
from hpctrain.checkpoint.reading.listing import checkpoint_names
from hpctrain.checkpoint.writing import files, local_fallback
from hpctrain.checkpoint.writing.buffers import Buffer
from hpctrain.checkpoint.writing.fence import Claim
from hpctrain.checkpoint.writing.publish import Part, data_file_name, part_from_json, part_to_json, publish, write_part
from hpctrain.errors import DamagedError, PublishError

RECORD = re.compile(r"part-(step-\d{10,}\.a\d{4,})\.r(\d+)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A rank's part of a checkpoint that `ranks` of them write together."""

    facts: Facts
    rank: int
    ranks: int
    chunk_bytes: int
    part: Part

    @property
    def name(self) -> str:
        """The name of the checkpoint."""
        return checkpoint_name(self.facts.step, self.facts.attempt)

    @property
    def record(self) -> str:
        """The name of the file that says this."""
        return _record(self.name, self.rank)


def keep_part(
    place: Path,
    rank: int,
    ranks: int,
    snapshot: Buffer,
    facts: Facts,
    pool: Executor,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """This will keep a rank's part here, instead of its one before.

    Raises:
        OSError, PublishError: this disk does not take it either.
    """
    local_fallback.prepare(place)
    before = [name for name, of in _records(place) if of == rank]
    if _record(checkpoint_name(facts.step, facts.attempt), rank) in before:
        return  # the same step once more
    part = write_part(Claim(directory=place, attempt=facts.attempt), snapshot, facts, None, pool, chunk_bytes)
    kept = Kept(facts=facts, rank=rank, ranks=ranks, chunk_bytes=chunk_bytes, part=part)
    files.commit(files.write_draft(place / kept.record, _to_bytes(kept)), place / kept.record)
    for name in before:
        _remove(place, name)


def bring_parts(place: Path, directory: Path, rank: int | None = None) -> None:
    """This will bring to the share what is here of one rank, or of all ranks of this host, and leave nothing of it here.

    Raises:
        PublishError, OSError: the share still does not take it; it stays here.
    """
    if not place.exists() or not local_fallback.is_ours(place):
        return
    for name, of in _records(place):
        if rank is None or of == rank:
            with suppress(DamagedError):  # this disk has lost it, or another rank of this host has brought it
                _bring(place, name, directory)
            _remove(place, name)


def join_parts(mine: Claim) -> list[str]:
    """This will publish the newest checkpoint of which all parts have been brought, unless something newer is there.

    Returns its name, if there is one; removes what will not be wanted.

    Raises:
        PublishError, OSError: the share failed.
        StaleAttemptError: a later attempt has taken over.
    """
    joined: list[str] = []
    for kept in _complete(mine.directory):
        newest = _newest(mine.directory)
        if newest is None or _order(kept[0].name) > newest:
            first = kept[0]
            publish(mine, first.facts, [one.part for one in kept], None, None, first.chunk_bytes)
            joined.append(first.name)
    newest = _newest(mine.directory)
    for name, _ in _records(mine.directory):
        if newest is not None and _order_of_record(name) <= newest:
            _remove(mine.directory, name)
    return joined


def awaited(directory: Path) -> bool:
    """This will say whether parts have been brought that are not joined, nor superseded."""
    return bool(_records(directory))


def _complete(directory: Path) -> list[list[Kept]]:
    """The checkpoints of which the parts of all ranks are here, by rank; the newest first."""
    found: dict[str, dict[int, Kept]] = {}
    for name, _ in _records(directory):
        with suppress(DamagedError):
            kept = _read(directory / name)
            found.setdefault(kept.name, {})[kept.rank] = kept
    names = sorted(found, key=_order, reverse=True)
    whole = [found[name] for name in names if set(found[name]) == set(range(next(iter(found[name].values())).ranks))]
    return [[parts[rank] for rank in sorted(parts)] for parts in whole]


def _bring(place: Path, name: str, directory: Path) -> None:
    kept = _read(place / name)
    newest = _newest(directory)
    if newest is not None and _order(kept.name) <= newest:
        return
    data = replace(kept.part.data, file=data_file_name(kept.name))
    try:
        pieces = local_fallback.pieces_of(place / kept.part.data.file, data.bytes)
        files.write_new(directory / data.file, pieces, direct=True)
        files.sync_directory(directory)
        draft = files.write_draft(directory / name, _to_bytes(replace(kept, part=replace(kept.part, data=data))))
        try:
            files.commit(draft, directory / name)
        finally:
            files.remove(draft)
    except (DamagedError, PublishError, OSError):
        if not (directory / name).exists() or data.file not in _files_of(directory / name):
            files.remove(directory / data.file)
        if not (directory / name).exists():
            raise  # else another rank of this host was quicker


def _remove(directory: Path, name: str) -> None:
    """Remove a record, and its data unless a checkpoint has them."""
    data = set(_files_of(directory / name))
    with suppress(DamagedError, FileNotFoundError):
        manifest = from_bytes((directory / (_checkpoint_of(name) + SUFFIX)).read_bytes())
        data -= {one.file for one in manifest.data}
    files.remove(directory / name)
    for file in data:
        files.remove(directory / file)


def _files_of(record: Path) -> list[str]:
    try:
        return [_read(record).part.data.file]
    except DamagedError:
        return []


def _records(directory: Path) -> list[tuple[str, int]]:
    """The names of records in a directory, each with its rank."""
    found = ((RECORD.fullmatch(name), name) for name in os.listdir(directory))
    return [(name, int(match[2])) for match, name in found if match]


def _record(name: str, rank: int) -> str:
    return f"part-{name}.r{rank}.json"


def _checkpoint_of(record: str) -> str:
    match = RECORD.fullmatch(record)
    assert match is not None
    return match[1]


def _order_of_record(name: str) -> tuple[int, int]:
    return _order(_checkpoint_of(name))


def _order(name: str) -> tuple[int, int]:
    order = order_of(name)
    assert order is not None
    return order


def _newest(directory: Path) -> tuple[int, int] | None:
    names = checkpoint_names(directory)
    return _order(names[0]) if names else None


def _to_bytes(kept: Kept) -> bytes:
    body = {
        "facts": facts_to_json(kept.facts),
        "rank": kept.rank,
        "ranks": kept.ranks,
        "chunk_bytes": kept.chunk_bytes,
        "part": part_to_json(kept.part),
    }
    return files.to_json(body | {"checksum": digest(files.to_json(body))}) + b"\n"


def _read(path: Path) -> Kept:
    try:
        body = json.loads(path.read_bytes())
        checksum = body.pop("checksum")
        if digest(files.to_json(body)) != checksum:
            raise ValueError("its checksum does not fit")
        kept = Kept(
            facts=facts_from_json(body["facts"]),
            rank=int(body["rank"]),
            ranks=int(body["ranks"]),
            chunk_bytes=int(body["chunk_bytes"]),
            part=part_from_json(body["part"]),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path.name} is no record of a part ({error})") from error
    file = kept.part.data.file
    if kept.record != path.name or "/" in file or file.startswith("."):
        raise DamagedError(f"{path.name} is the record of something else")
    return kept
