"""A copy of all tensors of a training state, in one reused buffer.

The training loop waits for this copy only.  Does not know files.
Rules: every tensor begins at a multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from hpctrain.checkpoint.chunks import CHUNK_BYTES, ITEM_BYTES
from hpctrain.checkpoint.writing.buffers import Buffer, Layout, TensorSlot, lay_out_pieces
from hpctrain.errors import MismatchError, TrainError

STRETCH_BYTES = 16 << 20  # copied bytes between two progress messages
MOST_STRETCHES = 64  # at most so many progress messages per copy


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """One rank's piece of a tensor of shape `whole`: its numbers from `low` on, flat."""

    part: torch.Tensor
    low: int
    whole: tuple[int, ...]


State = Mapping[str, torch.Tensor | TensorPiece]


def layout_of(state: State) -> Layout:
    """Return the layout of tensors and pieces, one after another.

    Raises:
        TrainError: the format has no name for a tensor's dtype.
    """
    return lay_out_pieces(_kind(name, value) for name, value in state.items())


def _kind(name: str, value: torch.Tensor | TensorPiece) -> tuple[str, str, tuple[int, ...], int, tuple[int, ...]]:
    if isinstance(value, TensorPiece):
        return name, _dtype_name(name, value.part), tuple(value.part.shape), value.low, tuple(value.whole)
    return name, _dtype_name(name, value), tuple(value.shape), 0, tuple(value.shape)


def share_of(tensors: Mapping[str, torch.Tensor], rank: int, size: int, of_first: Collection[str] = ()) -> State:
    """Return this rank's share of tensors that are equal on all ranks.

    Tensors are cut between chunks, so that chunks do not depend on the number of ranks.  `of_first`: tensors that the first
    rank writes as a whole.
    """
    shared = {name: tensor for name, tensor in tensors.items() if name not in of_first}
    total = sum(tensor.nbytes for tensor in shared.values())
    low, high = total * rank // size, total * (rank + 1) // size
    state: dict[str, torch.Tensor | TensorPiece] = {}
    if rank == 0:
        state |= {name: tensor for name, tensor in tensors.items() if name in of_first}
    at = 0
    for name, tensor in shared.items():
        end = at + tensor.nbytes
        first, last = (_cut(bound - at, tensor) for bound in (low, high))
        if not tensor.nbytes:
            whole = rank == 0
        else:
            whole = first <= 0 and last >= tensor.numel()
        if whole:
            state[name] = tensor
        elif last > first:
            state[name] = TensorPiece(
                part=tensor.detach().reshape(-1)[first:last], low=first, whole=tuple(tensor.shape)
            )
        at = end
    return state


def _cut(at_bytes: int, tensor: torch.Tensor) -> int:
    """Return the first number after a bound, moved to the begin of a chunk or the end."""
    if at_bytes >= tensor.nbytes:
        return tensor.numel()
    return max(0, at_bytes) // CHUNK_BYTES * CHUNK_BYTES // tensor.element_size()


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    """Return a tensor's dtype as in manifests."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise TrainError(f"cannot save {name} in a checkpoint: it is of dtype {dtype}; convert it")
    return dtype


class TensorSnapshot(Buffer):
    """A buffer of tensors."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._buffer = torch.frombuffer(self.shared, dtype=torch.uint8)

    def fill(self, state: State, reached: Callable[[int], None] = lambda _: None) -> None:
        """Copy a state of this layout into the buffer.

        `reached` gets the number of copied bytes now and then, but not at the end.
        """
        stretch_bytes = max(STRETCH_BYTES, len(self.shared) // MOST_STRETCHES)
        reported = 0
        for slot in self.layout:
            tensor = state[slot.name]
            at = slot.at
            for there, source in _stretches(
                self._view(slot), tensor.part if isinstance(tensor, TensorPiece) else tensor, stretch_bytes
            ):
                there.copy_(source)
                at += there.nbytes
                if at - reported >= stretch_bytes:
                    reached(reported := at)

    def pour(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the buffer into live tensors."""
        with torch.no_grad():
            for slot in self.layout:
                tensors[slot.name].copy_(self._view(slot))

    def tensors(self) -> list[torch.Tensor]:
        """Return the buffer as tensors, without a copy."""
        return [self._view(slot) for slot in self.layout]

    def named(self) -> dict[str, torch.Tensor]:
        """Return the buffer as tensors by name, without a copy."""
        return {slot.name: self._view(slot) for slot in self.layout}

    def _view(self, slot: TensorSlot) -> torch.Tensor:
        flat = self._buffer[slot.at : slot.at + slot.bytes]
        return flat.view(getattr(torch, slot.dtype)).view(slot.shape)


class LiveMemory:
    """Live tensors as a buffer, to read a checkpoint into them directly."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Wrap `tensors`, for which `in_one_piece` is true."""
        self.layout = layout_of(tensors)
        self._flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}

    def content(self, slot: TensorSlot) -> memoryview:
        """Return the bytes of a tensor, writable, without a copy."""
        return self._flat[slot.name].view(torch.uint8).numpy().data

    def named(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, flat."""
        return self._flat


def in_one_piece(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether all tensors are contiguous on the CPU, and share no memory."""
    if not all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors.values()):
        return False
    places = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors.values() if tensor.nbytes
    )
    return all(end <= begin for (_, end), (begin, _) in pairwise(places))


def _stretches(
    there: torch.Tensor, source: torch.Tensor, stretch_bytes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of target and source, in stretches if the tensor is long and contiguous."""
    if source.nbytes <= stretch_bytes or not source.is_contiguous():
        return iter([(there, source.detach())])
    numbers = stretch_bytes // source.element_size()
    return zip(there.view(-1).split(numbers), source.detach().view(-1).split(numbers), strict=True)


def of_model(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model's tensors, by its own names."""
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}


def compare(saved: Layout, live: Layout, source: str) -> None:
    """Check that a checkpoint's tensors are those of the model, in any order.

    Raises:
        MismatchError: names the first tensor that differs.
    """
    there = {slot.name: slot for slot in saved}
    for new in live:
        old = there.pop(new.name, None)
        if old is None or (old.dtype, old.shape) != (new.dtype, new.shape):
            has = "has no such tensor" if old is None else f"has it as {old.dtype}{list(old.shape)}"
            raise MismatchError(
                f"cannot resume from {source}: this model has {new.name!r} {new.dtype}{list(new.shape)}, the checkpoint "
                f"{has}; give the options of the first run, or another --out"
            )
    if there:
        raise MismatchError(
            f"cannot resume from {source}: it has {next(iter(there))!r}, which this model does not have; give the options of the "
            "first run, or another --out"
        )
