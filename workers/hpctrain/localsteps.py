"""Local steps: ranks train alone for H steps, then move together by what they have learned (DiLoCo).

Each rank's weights have gone from a common point, the *anchor*, to somewhere else; the mean of these ways is taken for a gradient
of the anchor, and an outer SGD with Nesterov momentum moves it.  So ranks talk once in H steps, at the price of another
course of training: it is never chosen silently.  Does not know the inner optimizer.
Rules: after a meeting all ranks have the same weights, to the bit; the ways may be compressed (see `compress`).
Sources: Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hpctrain.comm import Communicator
from hpctrain.compress import Compressor

# The paper's 0.7 and 0.9 are for many ranks that meet many times.  Of two that meet 80 times the momentum of the steep first
# ways is still felt at the end: a loss 5 % over that of exact steps, and 1 % with these (`make bench BENCH=local`).
OUTER_LR = 0.8
MOMENTUM = 0.5
PIECE_NUMBERS = 1 << 20


class LocalSteps:
    """The anchor and the outer momentum of a model's trainable parameters."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], comm: Communicator, compressor: Compressor, every: int
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._compressor = compressor
        self.every = every
        length = sum(p.numel() for p in self._parameters)
        self._anchor_L = self._joined(torch.empty(length))
        self._momentum_L = torch.zeros(length)
        self._way_L = comm.empty(length, torch.float32)

    def due(self, step: int) -> bool:
        """Whether the ranks meet after the step of this number (from 1)."""
        return step % self.every == 0

    @torch.no_grad()
    def meet(self, weight: float) -> None:
        """This will move all ranks to the next anchor; all take part.

        `weight` is this rank's part of all samples since the last meeting; the weights of all ranks add up to 1.
        """
        torch.sub(self._anchor_L, self._joined(self._way_L), out=self._way_L).mul_(weight)
        for index, low in enumerate(range(0, self._way_L.numel(), PIECE_NUMBERS)):
            self._compressor.sum(index, self._way_L[low : low + PIECE_NUMBERS])
        self._momentum_L.mul_(MOMENTUM).add_(self._way_L)
        self._anchor_L.sub_(self._way_L.add_(self._momentum_L, alpha=MOMENTUM), alpha=OUTER_LR)
        low = 0
        for parameter in self._parameters:
            parameter.copy_(self._anchor_L[low : low + parameter.numel()].view_as(parameter))
            low += parameter.numel()

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps: the same on all ranks."""
        return {"anchor": self._anchor_L, "momentum": self._momentum_L}

    def _joined(self, into_L: torch.Tensor) -> torch.Tensor:
        low = 0
        for parameter in self._parameters:
            into_L[low : low + parameter.numel()] = parameter.detach().reshape(-1)
            low += parameter.numel()
        return into_L
