"""A copy of all tensors of a training state, in one buffer that is used again and again.

The training loop waits for this copy only.  Does not know files.
Rules: the buffer is allocated once: fresh memory is touched at a fraction of the speed of a copy.  Every tensor begins
at a multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hpctrain.checkpoint.manifest import ITEM_BYTES
from hpctrain.errors import MismatchError, TrainError

ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a tensor lies in the buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    bytes: int


Layout = tuple[Slot, ...]


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """This will lay the tensors out one after another."""
    return lay_out([(name, dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()])


def lay_out(kinds: list[tuple[str, str, tuple[int, ...]]]) -> Layout:
    """This will lay out tensors of which name, dtype and shape are known."""
    slots, at = [], 0
    for name, dtype, shape in kinds:
        size_bytes = torch.Size(shape).numel() * ITEM_BYTES[dtype]
        slots.append(Slot(name=name, dtype=dtype, shape=shape, at=at, bytes=size_bytes))
        at += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return tuple(slots)


def dtype_name(tensor: torch.Tensor) -> str:
    """This will name a tensor's dtype as manifests do.

    Raises:
        TrainError: the format has no name for it.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise TrainError(f"cannot keep a tensor of dtype {tensor.dtype} in a checkpoint")
    return name


class Snapshot:
    """A buffer and what lies where in it."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        end = layout[-1].at + layout[-1].bytes if layout else 0
        self._buffer = torch.zeros(end, dtype=torch.uint8)
        self._memory = memoryview(self._buffer.numpy())

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """This will copy the tensors into the buffer; they have to be those of the layout."""
        for slot in self.layout:
            self._view(slot).copy_(tensors[slot.name].detach())

    def pour(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """This will copy the buffer into live tensors."""
        with torch.no_grad():
            for slot in self.layout:
                tensors[slot.name].copy_(self._view(slot))

    def content(self, slot: Slot) -> memoryview:
        """This will give the bytes of a tensor, writable, without a copy."""
        return self._memory[slot.at : slot.at + slot.bytes]

    def _view(self, slot: Slot) -> torch.Tensor:
        flat = self._buffer[slot.at : slot.at + slot.bytes]
        return flat.view(getattr(torch, slot.dtype)).view(slot.shape)


def compare(saved: Layout, live: Layout, source: str) -> None:
    """This will return if a checkpoint's tensors are those of the model.

    Raises:
        MismatchError: names the first tensor that differs.
    """
    for old, new in zip(saved, live, strict=False):
        if (old.name, old.dtype, old.shape) != (new.name, new.dtype, new.shape):
            raise MismatchError(
                f"cannot resume from {source}: it holds {old.name!r} {old.dtype}{list(old.shape)} where this model has "
                f"{new.name!r} {new.dtype}{list(new.shape)}; give the options of the first run, or another --out"
            )
    if len(saved) != len(live):
        raise MismatchError(f"cannot resume from {source}: it holds {len(saved)} tensors, this model has {len(live)}")
