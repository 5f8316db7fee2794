"""Keys and values of a rank's layers, in blocks of positions.

Block b of a layer is the positions b * BLOCK_POSITIONS and on of one tensor [positions, groups, head_dim], so that blocks in a
row need no copy to be read.  Does not know sequences: batching.py says which blocks belong to which.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcserve.config import ModelConfig
from hpcserve.split import ModelPart
from hpcserve.steps import BLOCK_POSITIONS


def block_bytes(config: ModelConfig, part: ModelPart, dtype: torch.dtype) -> int:
    """Return the bytes of one block in all layers of a part, keys and values together."""
    row = len(part.kv_groups) * config.head_dim * dtype.itemsize
    return 2 * len(part.layers) * BLOCK_POSITIONS * row


class KvCache:
    """Keys and values of a part's layers; layers are numbered from the first of the part."""

    def __init__(
        self, config: ModelConfig, part: ModelPart, blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.blocks = blocks
        shape = (blocks * BLOCK_POSITIONS, len(part.kv_groups), config.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in part.layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in part.layers]

    def write(self, layer: int, slots: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        """Store new keys and values [tokens, groups, head_dim] at these positions of the cache."""
        if isinstance(slots, slice):
            self.keys[layer][slots] = keys
            self.values[layer][slots] = values
        else:
            self.keys[layer].index_copy_(0, slots, keys.to(self.keys[layer].dtype))
            self.values[layer].index_copy_(0, slots, values.to(self.values[layer].dtype))

    def read(self, layer: int, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return keys and values [groups, positions, head_dim] of these positions."""
        if isinstance(slots, slice):
            first, count = slots.start, slots.stop - slots.start
            keys, values = self.keys[layer].narrow(0, first, count), self.values[layer].narrow(0, first, count)
            return keys.transpose(0, 1), values.transpose(0, 1)
        # Several times faster than an index in brackets.
        keys, values = self.keys[layer].index_select(0, slots), self.values[layer].index_select(0, slots)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def read_rows(self, layer: int, slots: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [rows, groups, positions, head_dim] of equally long rows."""
        keys, values = self.keys[layer].index_select(0, slots), self.values[layer].index_select(0, slots)
        return keys.unflatten(0, (rows, -1)).transpose(1, 2), values.unflatten(0, (rows, -1)).transpose(1, 2)


def run_of(blocks: Sequence[int], start: int, stop: int) -> tuple[int, int] | None:
    """Return the places in the cache of positions `start` to `stop`, from and up to.

    None: their blocks do not follow each other.
    """
    first, last = start // BLOCK_POSITIONS, (stop - 1) // BLOCK_POSITIONS
    used = blocks[first : last + 1]
    if any(block != used[0] + index for index, block in enumerate(used)):
        return None
    place = used[0] * BLOCK_POSITIONS + start - first * BLOCK_POSITIONS
    return place, place + stop - start
