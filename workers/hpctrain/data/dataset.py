"""A data set: a directory of shards and an index file.  Format: hpcsched-data(5).

A shard is a file of arrays that is mapped into memory.  Does not know the order of samples.
Rules: `dataset.json` has a checksum of itself and the hash of each shard's head; the head has a hash of each chunk of the
content.  So the index vouches for all data.  An index or head that does not match, or has another version or length, is
rejected when it is opened, a chunk when it is first read.  A data set is written into a draft directory, which gets its
name when all files are there; a shard is written once and never changed.
A data set is copied to the node's own disk (`staged`), so that the share is read once per node.  One rank of each host copies,
and the others wait for it; jobs that want the same data on the same disk wait for a lock, and copy once.  Each chunk is verified
while it is copied.  A copy has the checksum of the data set in its name, and gets this name when it is complete.  If the disk is
full or read-only, the run reads the share, and prints a line.
"""

from __future__ import annotations

import bisect
import fcntl
import json
import mmap
import os
import secrets
import shutil
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hpctrain.checkpoint.chunks import digest
from hpctrain.checkpoint.writing.files import sync_directory, to_json, write_new
from hpctrain.comm import Communicator
from hpctrain.comm.hosts import identity
from hpctrain.errors import DamagedError, PublishError, TrainError

FORMAT = "hpctrain-dataset"
VERSION = 1
INDEX = "dataset.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """The index's entry of a shard."""

    file: str
    rows: int
    head: str


class Split:
    """The shards of one split in sequence.

    `split[low:high]` and `split[rows]` return rows of the first array.
    """

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
        """Return a view of each array by its name, for `Rows`."""
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
        DamagedError: it is incomplete, altered, or of another version.
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
        """Return a split.

        Raises:
            TrainError: the data set has no split of this name.
        """
        if not self.splits.get(name):
            raise TrainError(f"cannot use {self.directory}: it has no split {name!r}, only {', '.join(self.splits)}")
        shards = [_open(self.directory, entry) for entry in self.splits[name]]
        return Split(shards, next(iter(shards[0].fields)))

    def shards(self) -> Iterator[Shard]:
        """Open and yield each shard."""
        for entries in self.splits.values():
            for entry in entries:
                yield _open(self.directory, entry)

    def tokenizer(self) -> bytes | None:
        """Return the content of the tokenizer's file; None if the data set has none."""
        if self._tokenizer is None:
            return None
        content = _read(self.directory / TOKENIZER)
        if digest(content) != self._tokenizer:
            raise DamagedError(f"cannot use {self.directory / TOKENIZER}: it does not match its hash")
        return content


class DatasetWriter:
    """Writes the shards of a new data set."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._splits: dict[str, list[ShardEntry]] = {}

    def add(self, split: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Write one shard."""
        for name, array in arrays.items():
            if array.dtype.name not in DTYPES:
                raise TrainError(f"cannot write {name!r}: shards do not support numbers of type {array.dtype.name}")
        entries = self._splits.setdefault(split, [])
        file = f"{split}-{len(entries):05d}.shard"
        head = write_shard(self._directory / file, arrays)
        entries.append(ShardEntry(file=file, rows=len(next(iter(arrays.values()))), head=head))

    def finish(self, kind: str, vocabulary: int | None = None, tokenizer: bytes | None = None) -> dict[str, int]:
        """Write the index, and return the rows of each split."""
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
    """Yield a draft directory that gets the name `path` unless the body fails.

    Raises:
        TrainError: the name is taken, or the directory cannot be created.
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
        raise DamagedError(f"cannot use {path}: it is incomplete ({error})") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise DamagedError(f"cannot use {path}: it is not an index of a data set")
    if body.get("version") != VERSION:
        raise DamagedError(f"cannot use {path}: it is of version {body.get('version')}, this program reads {VERSION}")
    rest = {name: value for name, value in body.items() if name != "checksum"}
    if digest(to_json(rest)) != body.get("checksum"):
        raise DamagedError(f"cannot use {path}: its checksum does not match its content")
    return body


MAGIC = b"HPCSHARD"
PRELUDE = struct.Struct("<8sII32s16x")  # magic, version, length of the head, its hash
CHUNK_BYTES = 1 << 20
PAGE_BYTES = 4096
ALIGN_BYTES = 64
DTYPES = frozenset(
    ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayField:
    """An array of a shard: its dtype, its shape, and its offset in the content."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * np.dtype(self.dtype).itemsize


def write_shard(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Write arrays of equal length to a new file, and return the hash of its head.

    Raises:
        PublishError: the file cannot be written.
    """
    fields, content, at = [], bytearray(), 0
    for name, array in arrays.items():
        content.extend(b"\0" * (at - len(content)))
        fields.append({"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "at": at})
        content.extend(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data.cast("B"))
        at = -(-len(content) // ALIGN_BYTES) * ALIGN_BYTES
    whole = memoryview(content)
    hashes = [digest(whole[low : low + CHUNK_BYTES]) for low in range(0, len(content), CHUNK_BYTES)]
    head = to_json({"fields": fields, "bytes": len(content), "chunk_bytes": CHUNK_BYTES, "hashes": hashes})
    begin = PRELUDE.pack(MAGIC, VERSION, len(head), bytes.fromhex(digest(head))) + head
    write_new(path, [begin.ljust(_content_at(len(head)), b"\0"), whole])
    return digest(head)


class Shard:
    """An open shard.

    Raises:
        DamagedError: the file is altered, or of another version; names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self._read_head(stream.fileno())
                self._memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DamagedError(f"cannot read {path}: {error.strerror}") from error
        self._seen = bytearray(len(self._hashes))  # chunks that were verified
        self._arrays = {field.name: self._array(field) for field in self.fields.values()}

    @property
    def rows(self) -> int:
        """The number of rows of each array."""
        return next(iter(self.fields.values())).shape[0]

    @property
    def file_bytes(self) -> int:
        """The length of the file in bytes."""
        return self._at + self._bytes

    def read(self, name: str, low: int, high: int) -> np.ndarray:
        """Return the rows [low, high) of an array without a copy, after verifying them once.

        Raises:
            DamagedError: names the file and the chunk.
        """
        field = self.fields[name]
        self._check(field.at + low * field.row_bytes, field.at + high * field.row_bytes)
        return self._arrays[name][low:high]

    def pieces(self) -> Iterator[bytes]:
        """Yield the whole file in verified pieces, reading it once."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield os.pread(descriptor, self._at, 0)
            for number in range(len(self._hashes)):
                low = number * self._chunk_bytes
                piece = os.pread(descriptor, min(self._chunk_bytes, self._bytes - low), self._at + low)
                self._compare(number, piece)
                yield piece
        except OSError as error:
            raise DamagedError(f"cannot read {self.path}: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def check_all(self) -> None:
        """Verify every chunk."""
        self._check(0, self._bytes)

    def _read_head(self, descriptor: int) -> None:
        begin = os.pread(descriptor, PRELUDE.size, 0)
        magic, version, head_bytes, head_hash = PRELUDE.unpack(begin.ljust(PRELUDE.size, b"\0"))
        if magic != MAGIC:
            raise DamagedError(f"cannot use {self.path}: it is not a shard of training data")
        if version != VERSION:
            raise DamagedError(f"cannot use {self.path}: it is of version {version}, this program reads {VERSION}")
        head = os.pread(descriptor, head_bytes, PRELUDE.size)
        self.head_hash = digest(head)
        if bytes.fromhex(self.head_hash) != head_hash:
            raise DamagedError(f"cannot use {self.path}: its head does not match its hash")
        body = json.loads(head)
        self.fields = {
            field["name"]: ArrayField(
                name=field["name"], dtype=field["dtype"], shape=tuple(field["shape"]), at=int(field["at"])
            )
            for field in body["fields"]
        }
        self._bytes, self._chunk_bytes, self._hashes = int(body["bytes"]), int(body["chunk_bytes"]), body["hashes"]
        self._at = _content_at(head_bytes)
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes != self.file_bytes:
            raise DamagedError(f"cannot use {self.path}: it has {size_bytes} bytes instead of {self.file_bytes}")

    def _array(self, field: ArrayField) -> np.ndarray:
        kind = np.dtype(field.dtype).newbyteorder("<")
        count = int(np.prod(field.shape, dtype=np.int64))
        return np.frombuffer(self._memory, kind, count, self._at + field.at).reshape(field.shape)

    def _check(self, low: int, high: int) -> None:
        for number in range(low // self._chunk_bytes, -(-high // self._chunk_bytes)):
            if not self._seen[number]:
                first = self._at + number * self._chunk_bytes
                last = min(first + self._chunk_bytes, self.file_bytes)
                self._compare(number, self._memory[first:last])
                self._seen[number] = 1

    def _compare(self, number: int, piece: bytes) -> None:
        if digest(piece) != self._hashes[number]:
            first = self._at + number * self._chunk_bytes
            raise DamagedError(
                f"cannot use {self.path}: chunk {number} (from byte {first} on) does not match its hash; prepare the data again, "
                "or remove the file if it is a node's copy"
            )


def _content_at(head_bytes: int) -> int:
    return -(-(PRELUDE.size + head_bytes) // PAGE_BYTES) * PAGE_BYTES


SPARE_BYTES = 64 << 20  # to leave free on the disk


def staged(directory: Path, disk: Path | None, comm: Communicator) -> tuple[Path, list[str]]:
    """Return the directory from which this rank reads, and lines to print; all ranks call it.

    Raises:
        DamagedError: the data set is damaged.
    """
    if disk is None:
        return directory, []
    hosts = comm.all_gather_object(identity())
    leads = hosts.index(identity()) == comm.rank
    mine = stage(directory, disk) if leads else (directory, "")
    answers = comm.all_gather_object((mine[0].as_posix(), mine[1]))
    path, _ = answers[hosts.index(identity())]
    return Path(path), [line for _, line in answers if line]


def stage(directory: Path, disk: Path) -> tuple[Path, str]:
    """Copy the data set to a disk of this node if it is not there.

    Return the directory and a line to print.
    """
    wanted = Dataset(directory)
    home = disk / f"hpctrain-{wanted.digest[:32]}"
    where = f"on {socket.gethostname()}"
    try:
        disk.mkdir(parents=True, exist_ok=True)
        with _alone(disk / f".{home.name}.lock"):
            if _is_whole(home, wanted.digest):
                return home, f"data: {home} {where} is used again"
            shutil.rmtree(home, ignore_errors=True)
            _remove_drafts(home)
            copied_bytes = _copy(wanted, home)
    except DamagedError:
        raise
    except (OSError, TrainError) as error:
        return directory, f"data: read from {directory} {where}, not from {disk}: {error}"
    return home, f"data: {copied_bytes / 1e6:.1f} MB copied to {home} {where}"


def _copy(wanted: Dataset, home: Path) -> int:
    need_bytes = sum(shard.file_bytes for shard in wanted.shards())
    room = os.statvfs(home.parent)
    free_bytes = room.f_bavail * room.f_frsize
    if need_bytes + SPARE_BYTES > free_bytes:
        raise PublishError(f"{need_bytes / 1e6:.1f} MB do not fit, {free_bytes / 1e6:.1f} MB are free")
    with new_directory(home) as draft:
        for shard in wanted.shards():
            write_new(draft / shard.path.name, shard.pieces())
        tokenizer = wanted.tokenizer()
        if tokenizer is not None:
            write_new(draft / TOKENIZER, [tokenizer])
        write_new(draft / INDEX, [(wanted.directory / INDEX).read_bytes()])
    return need_bytes


def _is_whole(home: Path, digest: str) -> bool:
    """Return whether the copy exists.

    Heads and lengths are checked here, chunks when they are read.
    """
    try:
        there = Dataset(home)
        return there.digest == digest and all(shard.rows >= 0 for shard in there.shards())
    except DamagedError:
        return False


def _remove_drafts(home: Path) -> None:
    """Remove the drafts of killed copies; the lock excludes other writers."""
    for draft in home.parent.glob(f".{home.name}.*.part"):
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock among the processes of this node; the kernel frees it when the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
