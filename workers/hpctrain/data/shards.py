"""A shard: arrays in a file that is mapped into memory and proves that it is whole.  Format: hpcsched-data(5).

Knows one file at a time; does not know samples.
Rules: the head has a hash of itself and of each chunk of the content; a file of another version, length or head is refused when
it is opened, a chunk when it is first read.  A shard is written once and never changed.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.checkpoint.format.pack import digest
from hpctrain.checkpoint.writing.files import to_json, write_new
from hpctrain.errors import DamagedError

MAGIC = b"HPCSHARD"
VERSION = 1
PRELUDE = struct.Struct("<8sII32s16x")  # magic, version, length of the head, its hash
CHUNK_BYTES = 1 << 20
PAGE_BYTES = 4096
ALIGN_BYTES = 64
DTYPES = frozenset(
    ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """An array of a shard: where its bytes are in the content."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int

    @property
    def row_bytes(self) -> int:
        """The length of one of its rows."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * np.dtype(self.dtype).itemsize


def write_shard(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """This will write arrays with the same number of rows as a new file, and return the hash of its head.

    Raises:
        PublishError: it cannot be written.
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
        DamagedError: the file is not what it was when it was written, or of another version; names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self._read_head(stream.fileno())
                self._memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DamagedError(f"cannot read {path}: {error.strerror}") from error
        self._seen = bytearray(len(self._hashes))  # chunks that have their hash
        self._arrays = {field.name: self._array(field) for field in self.fields.values()}

    @property
    def rows(self) -> int:
        """How many rows each of its arrays has."""
        return next(iter(self.fields.values())).shape[0]

    @property
    def file_bytes(self) -> int:
        """The length of the file."""
        return self._at + self._bytes

    def read(self, name: str, low: int, high: int) -> np.ndarray:
        """This will give the rows [low, high) of an array, as they lie in the file, after checking them once.

        Raises:
            DamagedError: names the file and the chunk.
        """
        field = self.fields[name]
        self._check(field.at + low * field.row_bytes, field.at + high * field.row_bytes)
        return self._arrays[name][low:high]

    def pieces(self) -> Iterator[bytes]:
        """This will give the whole file piece by piece, each checked, reading it once from where it lies."""
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
        """This will check every chunk."""
        self._check(0, self._bytes)

    def _read_head(self, descriptor: int) -> None:
        begin = os.pread(descriptor, PRELUDE.size, 0)
        magic, version, head_bytes, head_hash = PRELUDE.unpack(begin.ljust(PRELUDE.size, b"\0"))
        if magic != MAGIC:
            raise DamagedError(f"cannot use {self.path}: it is no shard of training data")
        if version != VERSION:
            raise DamagedError(f"cannot use {self.path}: it is of version {version}, this program reads {VERSION}")
        head = os.pread(descriptor, head_bytes, PRELUDE.size)
        self.head_hash = digest(head)
        if bytes.fromhex(self.head_hash) != head_hash:
            raise DamagedError(f"cannot use {self.path}: its head does not have its hash")
        body = json.loads(head)
        self.fields = {
            field["name"]: Field(
                name=field["name"], dtype=field["dtype"], shape=tuple(field["shape"]), at=int(field["at"])
            )
            for field in body["fields"]
        }
        self._bytes, self._chunk_bytes, self._hashes = int(body["bytes"]), int(body["chunk_bytes"]), body["hashes"]
        self._at = _content_at(head_bytes)
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes != self.file_bytes:
            raise DamagedError(f"cannot use {self.path}: it has {size_bytes} bytes instead of {self.file_bytes}")

    def _array(self, field: Field) -> np.ndarray:
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
                f"cannot use {self.path}: chunk {number} (from byte {first} on) does not have its hash; make it again, or "
                "remove it if it is a node's copy"
            )


def _content_at(head_bytes: int) -> int:
    return -(-(PRELUDE.size + head_bytes) // PAGE_BYTES) * PAGE_BYTES
