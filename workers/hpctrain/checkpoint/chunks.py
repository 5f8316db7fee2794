"""Tensors in chunks: the manifest's entries, and the packing of chunks.

Pure functions on values and bytes; does not know files.
Rules: every packing is exact, bit for bit.  A difference is taken between the integers with the numbers' bits, so that a
small change of a float is a small integer; then all first bytes, all second bytes, and so on are grouped.
Sources: Blosc's shuffle filter; Protocol Buffers' zigzag encoding.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import blake3
import numpy as np
from numcodecs import blosc

from hpctrain.errors import DamagedError, PublishError

CHUNK_BYTES = 1 << 20
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex128": 16, "complex64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A stretch of a tensor: its length, hash and place (of the parent's if unchanged)."""

    bytes: int
    hash: str
    packing: Packing
    at: int = 0
    stored: int = 0
    file: int = 0  # index of the manifest's data file
    number: int = 0  # of the message in an encrypted data file


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor in chunks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        """The bytes of the tensor's content."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceEntry:
    """One rank's piece of a tensor, in chunks: its bytes from `low` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    low: int
    chunks: tuple[Chunk, ...]


def joined(parts: Sequence[Sequence[PieceEntry]]) -> tuple[TensorEntry, ...]:
    """Join the pieces of all ranks; the n-th rank's chunks are in the n-th data file.

    Raises:
        PublishError: a stretch of a tensor is missing or doubled.
    """
    found: dict[str, list[PieceEntry]] = {}
    for number, pieces in enumerate(parts):
        for piece in pieces:
            chunks = tuple(replace(chunk, file=number) for chunk in piece.chunks)
            found.setdefault(piece.name, []).append(replace(piece, chunks=chunks))
    tensors = []
    for name, pieces in found.items():
        pieces.sort(key=lambda piece: piece.low)
        first, at = pieces[0], 0
        for piece in pieces:
            if piece.low != at or (piece.dtype, piece.shape) != (first.dtype, first.shape):
                raise PublishError(
                    f"cannot join the pieces of {name!r}: a piece begins at byte {piece.low} instead of {at}"
                )
            at += sum(chunk.bytes for chunk in piece.chunks)
        chunks = tuple(chunk for piece in pieces for chunk in piece.chunks)
        tensors.append(TensorEntry(name=name, dtype=first.dtype, shape=first.shape, chunks=chunks))
        if at != tensors[-1].bytes:
            raise PublishError(
                f"cannot join the pieces of {name!r}: the ranks have {at} of its {tensors[-1].bytes} bytes"
            )
    return tuple(tensors)


def hashes_of(tensor: TensorEntry) -> dict[int, str]:
    """Return the hash of each chunk by its offset."""
    found, low = {}, 0
    for chunk in tensor.chunks:
        found[low] = chunk.hash
        low += chunk.bytes
    return found


def tensor_to_json(tensor: TensorEntry) -> dict[str, object]:
    """Return a tensor's entry in a manifest."""
    chunks = [chunk_to_json(chunk) for chunk in tensor.chunks]
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "chunks": chunks}


def piece_to_json(piece: PieceEntry) -> dict[str, object]:
    """Return a rank's message about its piece of a tensor."""
    chunks = [chunk_to_json(chunk) for chunk in piece.chunks]
    shape = list(piece.shape)
    return {"name": piece.name, "dtype": piece.dtype, "shape": shape, "low": piece.low, "chunks": chunks}


def piece_from_json(entry: dict[str, Any]) -> PieceEntry:
    """Return the piece in a rank's message."""
    return PieceEntry(
        name=entry["name"],
        dtype=entry["dtype"],
        shape=tuple(entry["shape"]),
        low=entry["low"],
        chunks=tuple(chunk_from_json(chunk) for chunk in entry["chunks"]),
    )


def chunk_to_json(chunk: Chunk) -> dict[str, object]:
    """Return a chunk's entry in a manifest."""
    entry: dict[str, object] = {"bytes": chunk.bytes, "hash": chunk.hash, "as": str(chunk.packing)}
    if chunk.packing is not Packing.SAME:
        entry |= {"at": chunk.at, "stored": chunk.stored}
        if chunk.file:
            entry["in"] = chunk.file
        if chunk.number:
            entry["number"] = chunk.number
    return entry


def chunk_from_json(chunk: dict[str, Any]) -> Chunk:
    """Return the chunk of a manifest's entry.

    Raises: as `tensor_from_json`.
    """
    return Chunk(
        bytes=int(chunk["bytes"]),
        hash=str(chunk["hash"]),
        packing=Packing(chunk["as"]),
        at=int(chunk.get("at", 0)),
        stored=int(chunk.get("stored", 0)),
        file=int(chunk.get("in", 0)),
        number=int(chunk.get("number", 0)),
    )


def tensor_from_json(entry: dict[str, Any]) -> TensorEntry:
    """Return the tensor of a manifest's entry.

    Raises:
        ValueError, KeyError, TypeError: a field is missing or wrong, or the chunks do not add up.
    """
    if entry["dtype"] not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {entry['dtype']!r}")
    chunks = tuple(chunk_from_json(chunk) for chunk in entry["chunks"])
    shape = tuple(int(size) for size in entry["shape"])
    tensor = TensorEntry(name=str(entry["name"]), dtype=entry["dtype"], shape=shape, chunks=chunks)
    if sum(chunk.bytes for chunk in chunks) != tensor.bytes:
        raise ValueError(f"the chunks of {tensor.name!r} do not add up to its shape {shape}")
    return tensor


ZSTD_LEVEL = 1
LONGEST = 8  # bytes of an integer; a longer item (a complex number of two doubles) is several integers
LENGTHS = struct.Struct("<4xI4xI")  # of Blosc's header: of the content, and of the whole
# A packed chunk must be smaller than this fraction of the chunk.
WORTH = 0.95


class Packing(enum.StrEnum):
    """The way in which a chunk is stored."""

    SAME = "same"  # not stored: equal to the parent's chunk
    RAW = "raw"  # unchanged
    PLANES = "planes"  # byte planes, zstd
    DELTA = "delta"  # zigzag of the integer difference to the parent's chunk, byte planes, zstd


def digest(chunk: memoryview | bytes) -> str:
    """Return the BLAKE3 hash (256 bit, hexadecimal) of a chunk."""
    return blake3.blake3(chunk).hexdigest()


def pack(chunk: memoryview, item_bytes: int, parent: memoryview | None) -> tuple[Packing, bytes | memoryview]:
    """Return the smallest packing of a chunk of numbers of 1, 2, 4, 8 or 16 bytes."""
    if parent is not None:
        delta = _compress(_zigzag_difference(chunk, parent, item_bytes))
        if len(delta) < WORTH * len(chunk):
            return Packing.DELTA, delta
    planes = _compress(_integers(chunk, item_bytes))
    if len(planes) < WORTH * len(chunk):
        return Packing.PLANES, planes
    return Packing.RAW, chunk


def unpack_into(out: memoryview, packing: Packing, stored: bytes | memoryview, item_bytes: int) -> None:
    """Unpack a chunk into `out`, which has the parent's chunk if the packing is a difference.

    Raises:
        DamagedError: the stored bytes cannot be unpacked to this length.
    """
    match packing:
        case Packing.SAME:
            return
        case Packing.RAW:
            if len(stored) != len(out):
                raise DamagedError(f"{len(stored)} bytes stored for a chunk of {len(out)}")
            out[:] = stored
        case Packing.PLANES:
            _decompress(stored, _integers(out, item_bytes))
        case Packing.DELTA:
            target = _integers(out, item_bytes)
            zigzag = np.empty_like(target)
            _decompress(stored, zigzag)
            target += _unzigzag(zigzag)


def _integers(chunk: memoryview, item_bytes: int) -> np.ndarray:
    return np.frombuffer(chunk, dtype=f"<u{min(item_bytes, LONGEST)}")


def _zigzag_difference(chunk: memoryview, parent: memoryview, item_bytes: int) -> np.ndarray:
    difference = _integers(chunk, item_bytes) - _integers(parent, item_bytes)
    signed = difference.view(difference.dtype.str.replace("u", "i"))
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(difference.dtype)


def _unzigzag(values: np.ndarray) -> np.ndarray:
    unit = values.dtype.type(1)
    return (values >> unit) ^ (~(values & unit) + unit)


def _compress(numbers: np.ndarray) -> bytes:
    # In one block: Blosc's own shorter blocks mix several kinds of bytes, and zstd compresses them badly.
    return blosc.compress(numbers, b"zstd", ZSTD_LEVEL, blosc.SHUFFLE, numbers.nbytes)


def _decompress(stored: bytes | memoryview, numbers: np.ndarray) -> None:
    whole, length = LENGTHS.unpack_from(stored) if len(stored) >= LENGTHS.size else (0, 0)
    if whole != numbers.nbytes or length != len(stored):  # Blosc does not check them
        raise DamagedError(f"{len(stored)} bytes that unpack to {whole} instead of {numbers.nbytes}")
    try:
        blosc.decompress(stored, numbers)
    except RuntimeError as error:
        raise DamagedError(f"cannot be decompressed ({error})") from error
