"""Chunks to bytes and back: byte planes, integer differences, zstd.

Pure functions on bytes; knows neither files nor tensors.
Rules: every packing is exact, bit for bit.  A difference is taken between the integers that have the numbers' bits, so
that a small change of a float is a small integer; then all first bytes, all second bytes ... are put together.
Sources: blosc's shuffle filter; Protocol Buffers' zigzag encoding.
"""

from __future__ import annotations

import enum

import blake3
import numpy as np
import zstandard

from hpctrain.errors import DamagedError

ZSTD_LEVEL = 1
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
    """This will choose the smallest storage of a chunk of numbers of `item_bytes` (1, 2, 4, 8) each."""
    if parent is not None:
        delta = _compress(_planes(_zigzag_difference(chunk, parent, item_bytes)))
        if len(delta) < WORTH * len(chunk):
            return Packing.DELTA, delta
    planes = _compress(_planes(_integers(chunk, item_bytes)))
    if len(planes) < WORTH * len(chunk):
        return Packing.PLANES, planes
    return Packing.RAW, chunk


class Unpacker:
    """Unpacks one chunk after another in memory that it uses again; for one thread."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor()
        self._planes = bytearray()

    def unpack_into(self, out: memoryview, packing: Packing, stored: bytes | memoryview, item_bytes: int) -> None:
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
                self._unplane(_integers(out, item_bytes), stored)
            case Packing.DELTA:
                target = _integers(out, item_bytes)
                zigzag = np.empty_like(target)
                self._unplane(zigzag, stored)
                target += _unzigzag(zigzag)

    def _unplane(self, numbers: np.ndarray, stored: bytes | memoryview) -> None:
        planes = self._decompressed(stored, numbers.nbytes).reshape(numbers.itemsize, -1)
        bytes_of = numbers.view(np.uint8).reshape(-1, numbers.itemsize)
        for place, plane in enumerate(planes):
            bytes_of[:, place] = plane

    def _decompressed(self, stored: bytes | memoryview, length: int) -> np.ndarray:
        """The content, which is there until the next chunk's."""
        if len(self._planes) < length:
            self._planes = bytearray(length)
        try:
            whole = zstandard.frame_content_size(stored)
            if whole != length:
                raise DamagedError(f"unpacks to {whole} bytes instead of {length}")
            with self._zstd.stream_reader(stored) as stream, memoryview(self._planes) as planes:
                got = stream.readinto(planes[:length])
        except zstandard.ZstdError as error:
            raise DamagedError(f"cannot be decompressed ({error})") from error
        if got != length:
            raise DamagedError(f"unpacks to {got} bytes instead of {length}")
        return np.frombuffer(self._planes, np.uint8, length)


def _integers(chunk: memoryview, item_bytes: int) -> np.ndarray:
    return np.frombuffer(chunk, dtype=f"<u{item_bytes}")


def _zigzag_difference(chunk: memoryview, parent: memoryview, item_bytes: int) -> np.ndarray:
    signed = (_integers(chunk, item_bytes) - _integers(parent, item_bytes)).view(f"<i{item_bytes}")
    return ((signed << 1) ^ (signed >> (8 * item_bytes - 1))).view(f"<u{item_bytes}")


def _unzigzag(values: np.ndarray) -> np.ndarray:
    one = values.dtype.type(1)
    return (values >> one) ^ (~(values & one) + one)


def _planes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.dtype.itemsize).T)


def _compress(planes: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(planes.reshape(-1).data)
