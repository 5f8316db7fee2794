"""A data set: a directory of shards, with one file that says which they are.  Format: hpcsched-data(5).

Does not know samples' order, nor where the directory lies.
Rules: `dataset.json` bears a checksum of itself and the hash of each shard's head, so everything below it is proved by it; it is
written into a directory that gets its name when all is there.
"""

from __future__ import annotations

import bisect
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hpctrain.checkpoint.format.pack import digest
from hpctrain.checkpoint.writing.files import sync_directory, to_json, write_new
from hpctrain.data.shards import DTYPES, Shard, write_shard
from hpctrain.errors import DamagedError, TrainError

FORMAT = "hpctrain-dataset"
VERSION = 1
INDEX = "dataset.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """What the index says of a shard."""

    file: str
    rows: int
    head: str


class Split:
    """The shards of one split, one after another: `split[low:high]` and `split[rows]` give rows of one array, the first."""

    def __init__(self, shards: list[Shard], name: str) -> None:
        self._shards, self._name = shards, name
        self._begins = np.cumsum([0, *(shard.rows for shard in shards)]).tolist()
        self.size: int = self._begins[-1]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        if isinstance(rows, np.ndarray):
            return np.concatenate([self._read(row, row + 1) for row in rows.tolist()])
        return self._read(rows.start, rows.stop)

    def arrays(self) -> dict[str, Split]:
        """This will give each array of the rows by its name, for `Rows`."""
        return {name: Split(self._shards, name) for name in self._shards[0].fields}

    def _read(self, low: int, high: int) -> np.ndarray:
        number = bisect.bisect_right(self._begins, low) - 1
        if high <= self._begins[number + 1]:
            return self._shards[number].read(self._name, low - self._begins[number], high - self._begins[number])
        border = self._begins[number + 1]
        return np.concatenate([self._read(low, border), self._read(border, high)])


class Dataset:
    """An open data set.

    Raises:
        DamagedError: it is not whole, or of another version.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        body = _checked(directory / INDEX)
        self.digest: str = body["checksum"]
        self.kind: str = body["kind"]
        self.vocabulary: int | None = body["vocabulary"]
        self._tokenizer: str | None = body["tokenizer"]
        self.splits = {name: [ShardEntry(**entry) for entry in entries] for name, entries in body["splits"].items()}

    def split(self, name: str) -> Split:
        """This will open a split.

        Raises:
            TrainError: there is none of this name.
        """
        if not self.splits.get(name):
            raise TrainError(f"cannot use {self.directory}: it has no split {name!r}, only {', '.join(self.splits)}")
        shards = [_open(self.directory, entry) for entry in self.splits[name]]
        return Split(shards, next(iter(shards[0].fields)))

    def shards(self) -> Iterator[Shard]:
        """This will open each shard in turn."""
        for entries in self.splits.values():
            for entry in entries:
                yield _open(self.directory, entry)

    def tokenizer(self) -> bytes | None:
        """This will give the tokenizer's file, if there is one."""
        if self._tokenizer is None:
            return None
        content = _read(self.directory / TOKENIZER)
        if digest(content) != self._tokenizer:
            raise DamagedError(f"cannot use {self.directory / TOKENIZER}: it does not have its hash")
        return content


class DatasetWriter:
    """Writes the shards of a new data set."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._splits: dict[str, list[ShardEntry]] = {}

    def add(self, split: str, arrays: Mapping[str, np.ndarray]) -> None:
        """This will write one shard."""
        for name, array in arrays.items():
            if array.dtype.name not in DTYPES:
                raise TrainError(f"cannot keep {name!r}: numbers of type {array.dtype.name} have no place in a shard")
        entries = self._splits.setdefault(split, [])
        file = f"{split}-{len(entries):05d}.shard"
        head = write_shard(self._directory / file, arrays)
        entries.append(ShardEntry(file=file, rows=len(next(iter(arrays.values()))), head=head))

    def finish(self, kind: str, vocabulary: int | None = None, tokenizer: bytes | None = None) -> dict[str, int]:
        """This will write the index, and return the rows of each split."""
        if tokenizer is not None:
            write_new(self._directory / TOKENIZER, [tokenizer])
        body = {
            "format": FORMAT,
            "version": VERSION,
            "kind": kind,
            "vocabulary": vocabulary,
            "tokenizer": digest(tokenizer) if tokenizer is not None else None,
            "splits": {name: [asdict(entry) for entry in entries] for name, entries in self._splits.items()},
        }
        write_new(self._directory / INDEX, [to_json(body | {"checksum": digest(to_json(body))}), b"\n"])
        return {name: sum(entry.rows for entry in entries) for name, entries in self._splits.items()}


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """This will give a directory to fill, which gets the name `path` if the body ends well, and is removed otherwise.

    Raises:
        TrainError: the name is taken, or there is no place for it.
    """
    if path.exists():
        raise TrainError(f"cannot make {path}: it exists; remove it or give another name")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        draft.mkdir(parents=True)
        yield draft
        sync_directory(draft)
        os.rename(draft, path)
        sync_directory(path.parent)
    except OSError as error:
        raise TrainError(f"cannot make {path}: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _open(directory: Path, entry: ShardEntry) -> Shard:
    shard = Shard(directory / entry.file)
    if shard.head_hash != entry.head or shard.rows != entry.rows:
        raise DamagedError(f"cannot use {shard.path}: it is not the shard that {INDEX} was written for")
    return shard


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedError(f"cannot read {path}: {error.strerror}") from error


def _checked(path: Path) -> dict:
    try:
        body = json.loads(_read(path))
    except ValueError as error:
        raise DamagedError(f"cannot use {path}: it is not whole ({error})") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise DamagedError(f"cannot use {path}: it is no index of a data set")
    if body.get("version") != VERSION:
        raise DamagedError(f"cannot use {path}: it is of version {body.get('version')}, this program reads {VERSION}")
    rest = {name: value for name, value in body.items() if name != "checksum"}
    if digest(to_json(rest)) != body.get("checksum"):
        raise DamagedError(f"cannot use {path}: its checksum does not fit its content")
    return body
