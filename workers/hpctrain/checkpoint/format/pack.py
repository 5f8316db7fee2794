"""Chunks to bytes and back: byte planes and integer differences, compressed by Blosc with zstd.

Pure functions on bytes; knows neither files nor tensors.
Rules: every packing is exact, bit for bit.  A difference is taken between the integers that have the numbers' bits, so
that a small change of a float is a small integer; then all first bytes, all second bytes ... are put together.
Sources: Blosc's shuffle filter; Protocol Buffers' zigzag encoding.
"""

from __future__ import annotations

import enum
import struct

import blake3
import numpy as np
from numcodecs import blosc

from hpctrain.errors import DamagedError

ZSTD_LEVEL = 1
LONGEST = 8  # bytes of an integer; what is longer (a complex number of two doubles) is several of them
LENGTHS = struct.Struct("<4xI4xI")  # of Blosc's header: of the content, and of the whole
# A packing has to save at least this much of a chunk to be worth its unpacking.
WORTH = 0.95


class Packing(enum.StrEnum):
    """How a chunk is stored."""

    SAME = "same"  # not at all: the parent's chunk
    RAW = "raw"  # as it is
    PLANES = "planes"  # byte planes, zstd
    DELTA = "delta"  # zigzag of the integer difference to the parent's chunk, byte planes, zstd


def digest(chunk: memoryview | bytes) -> str:
    """This will give the BLAKE3 hash (256 bit, hexadecimal) of a chunk."""
    return blake3.blake3(chunk).hexdigest()


def pack(chunk: memoryview, item_bytes: int, parent: memoryview | None) -> tuple[Packing, bytes | memoryview]:
    """This will choose the smallest storage of a chunk of numbers of `item_bytes` (1, 2, 4, 8; 16 for a pair of 8) each."""
    if parent is not None:
        delta = _compress(_zigzag_difference(chunk, parent, item_bytes))
        if len(delta) < WORTH * len(chunk):
            return Packing.DELTA, delta
    planes = _compress(_integers(chunk, item_bytes))
    if len(planes) < WORTH * len(chunk):
        return Packing.PLANES, planes
    return Packing.RAW, chunk


def unpack_into(out: memoryview, packing: Packing, stored: bytes | memoryview, item_bytes: int) -> None:
    """This will write the chunk into `out`, which for a difference holds the parent's chunk before.

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
    one = values.dtype.type(1)
    return (values >> one) ^ (~(values & one) + one)


def _compress(numbers: np.ndarray) -> bytes:
    # In one block: in shorter ones, as Blosc would choose, zstd has several kinds of bytes before it, and finds nothing.
    return blosc.compress(numbers, b"zstd", ZSTD_LEVEL, blosc.SHUFFLE, numbers.nbytes)


def _decompress(stored: bytes | memoryview, numbers: np.ndarray) -> None:
    whole, length = LENGTHS.unpack_from(stored) if len(stored) >= LENGTHS.size else (0, 0)
    if whole != numbers.nbytes or length != len(stored):  # Blosc would believe them
        raise DamagedError(f"{len(stored)} bytes that unpack to {whole} instead of {numbers.nbytes}")
    try:
        blosc.decompress(stored, numbers)
    except RuntimeError as error:
        raise DamagedError(f"cannot be decompressed ({error})") from error
