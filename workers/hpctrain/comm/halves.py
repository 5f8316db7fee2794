"""The sum of numbers of half precision: in float32, in the order given, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

HALVES = (torch.float16, torch.bfloat16)


class HalfSum:
    """Sums halves with a buffer that is reused: touching fresh memory costs more than the sum."""

    def __init__(self) -> None:
        self._total = torch.empty(0, dtype=torch.float32)

    def sum(self, parts: Sequence[torch.Tensor], into_L: torch.Tensor) -> None:
        """This will put the sum of `parts` into `into_L`, which may be one of them."""
        if self._total.numel() < into_L.numel():
            self._total = torch.empty(into_L.numel(), dtype=torch.float32)
        total = self._total[: into_L.numel()]
        total.copy_(parts[0])
        for part in parts[1:]:
            total += part
        into_L.copy_(total)
