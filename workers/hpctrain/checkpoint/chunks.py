"""Tensors in chunks, as manifests have them.

Pure values and their JSON; knows neither files nor what a manifest is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hpctrain.checkpoint.pack import Packing

CHUNK_BYTES = 1 << 20
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a tensor: its length and hash, and where its bytes are if it is not the parent's."""

    bytes: int
    hash: str
    packing: Packing
    at: int = 0
    stored: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor in chunks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        """The length of the tensor's content."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def tensor_to_json(tensor: TensorEntry) -> dict[str, object]:
    """This will give what a manifest says of a tensor."""
    chunks = []
    for chunk in tensor.chunks:
        entry: dict[str, object] = {"bytes": chunk.bytes, "hash": chunk.hash, "as": str(chunk.packing)}
        if chunk.packing is not Packing.SAME:
            entry |= {"at": chunk.at, "stored": chunk.stored}
        chunks.append(entry)
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "chunks": chunks}


def tensor_from_json(entry: dict[str, Any]) -> TensorEntry:
    """This will read what a manifest says of a tensor.

    Raises:
        ValueError, KeyError, TypeError: a field is missing or wrong, or the chunks do not add up.
    """
    if entry["dtype"] not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {entry['dtype']!r}")
    chunks = tuple(
        Chunk(
            bytes=int(chunk["bytes"]),
            hash=str(chunk["hash"]),
            packing=Packing(chunk["as"]),
            at=int(chunk.get("at", 0)),
            stored=int(chunk.get("stored", 0)),
        )
        for chunk in entry["chunks"]
    )
    shape = tuple(int(size) for size in entry["shape"])
    tensor = TensorEntry(name=str(entry["name"]), dtype=entry["dtype"], shape=shape, chunks=chunks)
    if sum(chunk.bytes for chunk in chunks) != tensor.bytes:
        raise ValueError(f"the chunks of {tensor.name!r} do not add up to its shape {shape}")
    return tensor
