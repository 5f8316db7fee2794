"""A copy of all tensors of a training state, in one buffer that is used again and again.

The training loop waits for this copy only.  Does not know files.
Rules: the buffer is used again, see `buffers`.  Every tensor begins at a multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hpctrain.checkpoint.buffers import Buffer, Layout, Slot, lay_out
from hpctrain.checkpoint.chunks import ITEM_BYTES
from hpctrain.errors import MismatchError, TrainError


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """This will lay the tensors out one after another."""
    return lay_out([(name, dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()])


def dtype_name(tensor: torch.Tensor) -> str:
    """This will name a tensor's dtype as manifests do.

    Raises:
        TrainError: the format has no name for it.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise TrainError(f"cannot keep a tensor of dtype {tensor.dtype} in a checkpoint")
    return name


class Snapshot(Buffer):
    """A buffer whose content is tensors."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._buffer = torch.frombuffer(self.shared, dtype=torch.uint8)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """This will copy the tensors into the buffer; they have to be those of the layout."""
        for slot in self.layout:
            self._view(slot).copy_(tensors[slot.name].detach())

    def pour(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """This will copy the buffer into live tensors."""
        with torch.no_grad():
            for slot in self.layout:
                tensors[slot.name].copy_(self._view(slot))

    def tensors(self) -> list[torch.Tensor]:
        """This will give the buffer as tensors, without a copy."""
        return [self._view(slot) for slot in self.layout]

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
