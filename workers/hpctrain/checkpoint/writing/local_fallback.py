"""A place on this node's own disk for the newest state, while the share does not take it.

Holds one checkpoint, a base, in the format of the share; it is brought there when that is possible again.
Rules: of each run on this host one directory, of its user alone; the checkpoint before is removed when the new one is whole; what
is brought back keeps its name, and is published by the rules of `write`.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from hpctrain.checkpoint.format.chunks import CHUNK_BYTES
from hpctrain.checkpoint.format.manifest import SUFFIX, Facts, from_bytes, order_of, to_bytes
from hpctrain.checkpoint.reading.listing import LATEST, checkpoint_names
from hpctrain.checkpoint.writing import fence, files
from hpctrain.checkpoint.writing.buffers import Buffer
from hpctrain.checkpoint.writing.fence import Claim
from hpctrain.checkpoint.writing.publish import data_file_name, publish, write_part
from hpctrain.errors import DamagedError, PublishError

PIECE_BYTES = 1 << 20


def place_for(directory: Path) -> Path:
    """This will name the refuge of the checkpoints in a directory."""
    digest = hashlib.sha256(os.fsencode(os.path.abspath(directory))).hexdigest()[:16]
    top = Path(os.environ.get("HPCTRAIN_REFUGE") or Path(tempfile.gettempdir(), f"hpctrain-{os.getuid()}"))
    return top / digest


def keep(place: Path, snapshot: Buffer, facts: Facts, pool: Executor, chunk_bytes: int = CHUNK_BYTES) -> None:
    """This will keep a state here, instead of the one before.

    Raises:
        OSError, PublishError: this disk does not take it either.
    """
    prepare(place)
    before = checkpoint_names(place)
    here = Claim(directory=place, attempt=facts.attempt)
    part = write_part(here, snapshot, facts, None, pool, chunk_bytes)
    publish(here, facts, [part], None, None, chunk_bytes)
    for name in before:
        _remove(place, name)


def prepare(place: Path) -> None:
    """This will make the refuge, if it is not there.

    Raises:
        OSError: this disk does not take it, or others may change what it has.
    """
    for folder in _private(place):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_ours(place):
        raise PermissionError(f"others may change {place}, or what it is in")


def _private(place: Path) -> tuple[Path, ...]:
    """Return which directories must be ours alone: where the user has not named the outer one, that as well."""
    return (place,) if os.environ.get("HPCTRAIN_REFUGE") else (place.parent, place)


def is_ours(place: Path) -> bool:
    """This will say whether nobody else can have made the refuge, or put another one in its place: its name is easily guessed."""
    found = [os.lstat(folder) for folder in _private(place)]
    return all(stat.S_ISDIR(one.st_mode) and one.st_uid == os.getuid() and not one.st_mode & 0o022 for one in found)


def bring_back(place: Path, mine: Claim) -> list[str]:
    """This will publish what is here on the share, unless something newer is there; and leave nothing here.

    Returns the names of what was published.

    Raises:
        PublishError, OSError: the share still does not take it; it stays here.
        StaleAttemptError: a later attempt has taken over.
    """
    published: list[str] = []
    if not place.exists() or not is_ours(place):  # what others may have put there is no state of ours
        return published
    for name in checkpoint_names(place):
        there = checkpoint_names(mine.directory)
        if not there or (order_of(name) or ()) > (order_of(there[0]) or ()):
            try:
                _publish(place, name, mine)
            except DamagedError:
                pass  # this disk has lost it
            else:
                published.append(name)
        _remove(place, name)
    return published


def _publish(place: Path, name: str, mine: Claim) -> None:
    fence.check(mine)
    kept = from_bytes((place / (name + SUFFIX)).read_bytes())
    # Under names of their own: a process of another attempt on this node may be bringing the same files.
    brought = tuple(replace(data, file=data_file_name(name)) for data in kept.data)
    path = mine.directory / (name + SUFFIX)
    try:
        for here, there in zip(kept.data, brought, strict=True):
            files.write_new(mine.directory / there.file, pieces_of(place / here.file, here.bytes), direct=True)
        files.sync_directory(mine.directory)
        draft = files.write_draft(path, to_bytes(replace(kept, data=brought)))
    except (DamagedError, PublishError, OSError):
        for data in brought:
            files.remove(mine.directory / data.file)
        raise
    try:
        fence.check(mine)
        files.commit(draft, path)  # it may fail after it happened: from here on the data stay
    finally:
        files.remove(draft)
    files.replace_hint(mine.directory / LATEST, path.name.encode() + b"\n")


def pieces_of(path: Path, length: int) -> Iterator[bytes]:
    """This will give a file's content, piece by piece.

    Raises:
        DamagedError: it is not there, or not as long.
    """
    try:
        with path.open("rb") as stream:
            for low in range(0, length, PIECE_BYTES):
                piece = stream.read(min(PIECE_BYTES, length - low))
                if len(piece) != min(PIECE_BYTES, length - low):
                    raise DamagedError(f"{path} ends early")
                yield piece
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is not there") from error


def _remove(place: Path, name: str) -> None:
    path = place / (name + SUFFIX)
    try:
        data = [one.file for one in from_bytes(path.read_bytes()).data]
    except (DamagedError, FileNotFoundError):
        data = []
    files.remove(path)
    for file in data:
        files.remove(place / file)
