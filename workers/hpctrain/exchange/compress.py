"""Gradients sent in fewer bits.

The loss of a step is added to the next step's gradients (error feedback).

`Exact` sends all bits; `Rounded` sends bfloat16 or float16; `Blockwise` sends int8 with a scale for each block; `TopK`
sends the largest numbers of each bucket with their indexes; `PowerSgd` sends a low-rank factorization of matrices.  All but
the first are lossy, and chosen only by the user.  Does not know the order or overlap of buckets: it gets one flat tensor at
a time, by its index.
Rules: every rank ends with the same bits.  What a rank could not send stays in its own residual of that bucket.  A number
that is not finite is sent as it is, so that the loop sees it.
Sources: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014 (error feedback); Dettmers, "8-bit approximations
for parallelism in deep learning", ICLR 2016; Lin et al., "Deep gradient compression", ICLR 2018; Vogels, Karimireddy, Jaggi,
"PowerSGD", NeurIPS 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch

from hpctrain.comm import Communicator, Work
from hpctrain.errors import TrainError

BLOCK = 256  # numbers that share a scale
SMALL = 4096  # a bucket with fewer numbers is sent exactly
KEPT_SHARE = 0.01
RANK = 4
STRETCH = 1 << 16  # numbers that are rounded at once, to stay in the cache

NAMES = ("exact", "bf16", "fp16", "int8", "topk", "powersgd")


class Compressor(Protocol):
    """A way to sum a bucket over the ranks."""

    def sum(self, index: int, flat_L: torch.Tensor) -> None:
        """Replace `flat_L` (float32, one dimension) by about its sum over all ranks.

        `index`: the bucket.
        """

    def accumulator(self, index: int, flat_L: torch.Tensor) -> torch.Tensor:
        """Return the tensor in which `begin`'s input is added up.

        `flat_L` set to zero, or the residual.
        """

    def ready(self, index: int, low: int, high: int) -> None:
        """Tell that these numbers are complete and in the cache.

        Optional, at most once each before `begin`.
        """

    def begin(self, index: int, flat_L: torch.Tensor) -> Work:
        """Put the sum into `flat_L` in the background.

        All ranks begin the same buckets in the same order.
        """

    def rescale(self, factor: float) -> None:
        """Multiply residuals by `factor`, because gradients are that much larger from now on."""

    def forget_what_is_not_finite(self) -> None:
        """Clear residuals after a sum that was not finite."""


def compressor(name: str, comm: Communicator, shapes: Callable[[int], list[torch.Size]]) -> Compressor:
    """Return the compressor of that name.

    `shapes` returns the shapes of a bucket's parameters in order.

    Raises:
        TrainError: the name is unknown, or its number is out of range.
    """
    kind, _, number = name.partition(":")
    try:
        match kind:
            case "exact" if not number:
                return Exact(comm)
            case "bf16" if not number:
                return Rounded(comm, torch.bfloat16)
            case "fp16" if not number:
                return Rounded(comm, torch.float16)
            case "int8" if not number:
                return Blockwise(comm)
            case "topk":
                return TopK(comm, _between(float(number or KEPT_SHARE), 0.0, 1.0))
            case "powersgd":
                return PowerSgd(comm, int(_between(int(number or RANK), 0, 1024)), shapes)
    except ValueError:
        pass
    raise TrainError(
        f"cannot compress gradients by {name!r}: known are {', '.join(NAMES)}, topk:SHARE and powersgd:RANK"
    )


class _Uncompressed:
    """Adds gradients up in the bucket itself."""

    def accumulator(self, index: int, flat_L: torch.Tensor) -> torch.Tensor:
        return flat_L.zero_()

    def ready(self, index: int, low: int, high: int) -> None:
        """Do nothing."""


class Exact(_Uncompressed):
    """All bits; in the background only this rank's part is summed, if `own_part` allows that."""

    def __init__(self, comm: Communicator, *, own_part: bool = False) -> None:
        self._comm = comm
        self._own_part = own_part

    def sum(self, index: int, flat_L: torch.Tensor) -> None:
        self._comm.all_reduce(flat_L)

    def begin(self, index: int, flat_L: torch.Tensor) -> Work:
        return self._comm.begin(flat_L, own_part=self._own_part)

    def rescale(self, factor: float) -> None:
        """Do nothing: there is no residual."""

    def forget_what_is_not_finite(self) -> None:
        """Do nothing: there is no residual."""


class _Lossy(_Uncompressed):
    """The common part of lossy compressors: residuals, and small buckets in full."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._residuals: dict[int, torch.Tensor] = {}

    def sum(self, index: int, flat_L: torch.Tensor) -> None:
        if flat_L.numel() <= SMALL:
            self._comm.all_reduce(flat_L)
            return
        residual = self._residual(index, flat_L)
        flat_L += residual
        self._send(index, flat_L, residual)

    def begin(self, index: int, flat_L: torch.Tensor) -> Work:
        return self._comm.run(lambda: self.sum(index, flat_L))

    def _residual(self, index: int, flat_L: torch.Tensor) -> torch.Tensor:
        residual_L = self._residuals.get(index)
        if residual_L is None:
            residual_L = self._residuals[index] = torch.zeros_like(flat_L)
        return residual_L

    def rescale(self, factor: float) -> None:
        """Scale the residual to the next gradients."""
        for residual in self._residuals.values():
            residual.mul_(factor)

    def forget_what_is_not_finite(self) -> None:
        """Clear residuals that are not finite; they would spoil every later step."""
        for residual in self._residuals.values():
            residual.nan_to_num_(0.0, 0.0, 0.0)

    def _send(self, index: int, flat_L: torch.Tensor, residual_L: torch.Tensor) -> None:
        """Put the sum into `flat_L`, and the unsent rest into `residual_L`."""
        raise NotImplementedError


class Rounded(_Lossy):
    """Half the bits: bfloat16 (the range of float32) or float16 (finer, with a smaller range).

    In the background, gradients are added to the residual and rounded there while they are in the cache.  The rounding of the
    sum itself is not fed back, because no rank has it.
    """

    def __init__(self, comm: Communicator, dtype: torch.dtype) -> None:
        super().__init__(comm)
        self._dtype = dtype
        self._halves: dict[int, torch.Tensor] = {}
        self._rounded: dict[
            int, list[tuple[int, int]]
        ] = {}  # parts of a bucket that are rounded already, for the next `begin`
        self._stretches: dict[tuple[int, int, int], list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        self._back = torch.empty(STRETCH)

    def accumulator(self, index: int, flat_L: torch.Tensor) -> torch.Tensor:
        return flat_L.zero_() if flat_L.numel() <= SMALL else self._residual(index, flat_L)

    def ready(self, index: int, low: int, high: int) -> None:
        residual_L = self._residuals.get(index)
        if residual_L is not None and residual_L.device.type == "cpu":
            self._round(index, low, high)
            self._rounded.setdefault(index, []).append((low, high))

    def sum(self, index: int, flat_L: torch.Tensor) -> None:
        if flat_L.numel() <= SMALL:
            self._comm.all_reduce(flat_L)
            return
        self._residual(index, flat_L).add_(flat_L)
        self._round(index, 0, flat_L.numel())
        half_L = self._half(index)
        self._comm.all_reduce(half_L)
        flat_L.copy_(half_L)

    def begin(self, index: int, flat_L: torch.Tensor) -> Work:
        if flat_L.numel() <= SMALL:
            return self._comm.begin(flat_L)
        for low, high in _gaps(self._rounded.pop(index, []), flat_L.numel()):
            self._round(index, low, high)
        half_L = self._half(index)

        def back() -> None:
            flat_L.copy_(half_L)

        return self._comm.begin(half_L, back)

    def _half(self, index: int) -> torch.Tensor:
        """Return the buffer to send of a bucket."""
        half_L = self._halves.get(index)
        if half_L is None:
            half_L = self._halves[index] = self._comm.empty(self._residuals[index].numel(), self._dtype)
        return half_L

    def _round(self, index: int, low: int, high: int) -> None:
        """Move the numbers, rounded, from the residual to the buffer to send."""
        for left, half, back in self._stretches.get((index, low, high)) or self._cut(index, low, high):
            half.copy_(left)
            back.copy_(half)  # faster on a CPU than subtracting mixed dtypes
            left.sub_(back)

    def _cut(self, index: int, low: int, high: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return a part in stretches: of the residual, of the buffer to send, and scratch.

        Cached, as views cost time.
        """
        left_L, half_L = self._residuals[index][low:high], self._half(index)[low:high]
        on_cpu = left_L.device.type == "cpu"
        length = STRETCH if on_cpu else high - low
        pairs = zip(left_L.split(length), half_L.split(length), strict=True)
        cut = [(left, half, self._back[: left.numel()] if on_cpu else half) for left, half in pairs]
        self._stretches[index, low, high] = cut
        return cut


class Blockwise(_Lossy):
    """A quarter of the bits: int8 with one float32 scale per block."""

    def _send(self, index: int, flat_L: torch.Tensor, residual_L: torch.Tensor) -> None:
        size = self._comm.size
        bounds = [flat_L.numel() // BLOCK * rank // size * BLOCK for rank in range(size)] + [flat_L.numel()]
        chunks = _split(flat_L, bounds)
        packed = [quantized(chunk) for chunk in chunks]
        for chunk, pieces, left in zip(chunks, packed, _split(residual_L, bounds), strict=True):
            torch.sub(chunk, dequantized(*pieces), out=left)
        mine = chunks[self._comm.rank]
        total = torch.zeros_like(mine)
        for part in self._comm.all_to_all([_joined(*pieces) for pieces in packed]):
            total += dequantized(*_parted(part, mine.numel()))
        sent = quantized(total)
        lengths = [codes.numel() + 4 * scale.numel() for codes, scale in packed]
        # The rounding error of the sum goes to its owner's residual, because no other rank knows it.
        left = residual_L[bounds[self._comm.rank] : bounds[self._comm.rank + 1]]
        left += total - dequantized(*sent)
        for chunk, part in zip(chunks, self._comm.all_gather(_joined(*sent), lengths), strict=True):
            chunk.copy_(dequantized(*_parted(part, chunk.numel())))


class TopK(_Lossy):
    """The largest numbers, a share of the bucket.

    The rest waits in the residual until it is large.
    """

    def __init__(self, comm: Communicator, share: float) -> None:
        super().__init__(comm)
        self._share = share

    def _send(self, index: int, flat_L: torch.Tensor, residual_L: torch.Tensor) -> None:
        count = max(1, int(flat_L.numel() * self._share))
        places = torch.topk(flat_L.abs(), count, sorted=False).indices
        values = flat_L[places]
        residual_L.copy_(flat_L)
        residual_L[places] = 0.0
        sent = torch.cat([places.to(torch.int32).view(torch.uint8), values.view(torch.uint8)])
        flat_L.zero_()
        for part in self._comm.all_gather(sent, [sent.numel()] * self._comm.size):
            where, what = part[: 4 * count].view(torch.int32).long(), part[4 * count :].view(torch.float32)
            flat_L.index_add_(0, where, what)


class PowerSgd(_Lossy):
    """Matrices as the product of two thin ones, by a step of power iteration."""

    def __init__(self, comm: Communicator, rank: int, shapes: Callable[[int], list[torch.Size]]) -> None:
        super().__init__(comm)
        self._thin = rank
        self._shapes = shapes
        self._rights: dict[int, list[torch.Tensor]] = {}

    def _send(self, index: int, flat_L: torch.Tensor, residual_L: torch.Tensor) -> None:
        matrices, low = [], 0
        rest = torch.ones_like(flat_L, dtype=torch.bool)
        for shape in self._shapes(index):
            length = math.prod(shape)
            if len(shape) >= 2 and min(shape[0], length // shape[0]) > 2 * self._thin:
                matrices.append((low, flat_L[low : low + length].view(shape[0], -1)))
                rest[low : low + length] = False
            low += length
        rights = self._rights.get(index)
        if rights is None or not all(
            q.isfinite().all() for q in rights
        ):  # equal on all ranks, because it came from a sum
            generator = torch.Generator().manual_seed(index)  # equal on every rank
            rights = [torch.randn(m.shape[1], self._thin, generator=generator) for _, m in matrices]
            self._rights[index] = rights
        residual_L.copy_(flat_L)
        full = flat_L[rest]
        lefts = [matrix_MN @ q_NR for (_, matrix_MN), q_NR in zip(matrices, rights, strict=True)]
        self._sum_together([*lefts, full])
        for at, (_, matrix_MN) in enumerate(matrices):
            lefts[at], _ = torch.linalg.qr(lefts[at])
            rights[at] = matrix_MN.T @ lefts[at]
        self._sum_together(rights)
        # The sum over the ranks is P (sum of M^T P)^T; this rank contributed P P^T M, and the rest is its residual.
        residual_L[rest] = 0.0
        for (low, matrix_MN), p_MR, q_NR in zip(matrices, lefts, rights, strict=True):
            left = residual_L[low : low + matrix_MN.numel()].view_as(matrix_MN)
            left -= p_MR @ (p_MR.T @ matrix_MN)
            matrix_MN.copy_(p_MR @ q_NR.T)
        flat_L[rest] = full

    def _sum_together(self, tensors: list[torch.Tensor]) -> None:
        joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._comm.all_reduce(joined)
        low = 0
        for tensor in tensors:
            tensor.copy_(joined[low : low + tensor.numel()].view_as(tensor))
            low += tensor.numel()


def quantized(flat_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to int8 (L,), with a scale per BLOCK numbers (blocks,).

    A block that is not finite has scale nan.
    """
    blocks = -(-flat_L.numel() // BLOCK)
    padded = torch.nn.functional.pad(flat_L, (0, blocks * BLOCK - flat_L.numel())).view(blocks, BLOCK)
    scale = padded.abs().amax(dim=1) / 127.0
    codes = (padded / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)).round_().nan_to_num_(0.0)
    scale[~torch.isfinite(scale)] = math.nan
    return codes.to(torch.int8).view(-1)[: flat_L.numel()], scale


def dequantized(codes_L: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the numbers of `quantized`, without the rounded-off part."""
    blocks = scale.numel()
    padded = torch.nn.functional.pad(codes_L, (0, blocks * BLOCK - codes_L.numel())).view(blocks, BLOCK)
    return (padded.float() * scale.unsqueeze(1)).view(-1)[: codes_L.numel()]


def _gaps(spans: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Return the parts of [0, length) outside of `spans`, which do not overlap."""
    ends = [0, *(high for _, high in sorted(spans))]
    begins = [*(low for low, _ in sorted(spans)), length]
    return [(low, high) for low, high in zip(ends, begins, strict=True) if low < high]


def _joined(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)])


def _parted(joined: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    cut = 4 * -(-length // BLOCK)
    return joined[cut:].view(torch.int8), joined[:cut].clone().view(torch.float32)


def _split(flat_L: torch.Tensor, bounds: list[int]) -> list[torch.Tensor]:
    return [flat_L[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]


def _between(value: float, low: float, high: float) -> float:
    if not low < value <= high:
        raise ValueError(value)
    return value
