"""Products of hidden states with a matrix, as fast as this machine can.

Does not know layers.  A `Linear` is a function from [tokens, in] to [tokens, out]; it takes float32 or bfloat16, and returns the
type in which it computes.
Rules: fp32 is always F.linear, so that results are the same everywhere.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcserve.weights import Int4Weight, Int8Weight

Linear = Callable[[Tensor], Tensor]
Weight = Tensor | Int8Weight | Int4Weight


class WeightKind(enum.StrEnum):
    """The numbers that a rank keeps its matrices in."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The type of keys, values and embeddings."""
        return torch.float32 if self is WeightKind.FP32 else torch.bfloat16


def floats(weight: Weight) -> Tensor:
    """Return a weight as a tensor of floats."""
    return weight if isinstance(weight, Tensor) else weight.floats()


def stacked(weights: Sequence[Weight]) -> Weight:
    """Return the rows of several matrices as one matrix; of different kinds as floats."""
    if all(isinstance(weight, Int8Weight) for weight in weights):
        eights = [weight for weight in weights if isinstance(weight, Int8Weight)]
        return Int8Weight(
            values=torch.cat([one.values for one in eights]), scale=torch.cat([one.scale for one in eights])
        )
    if all(isinstance(weight, Int4Weight) for weight in weights):
        fours = [weight for weight in weights if isinstance(weight, Int4Weight)]
        return Int4Weight(
            values=torch.cat([one.values for one in fours]),
            scales=torch.cat([one.scales for one in fours]),
            zeros=torch.cat([one.zeros for one in fours]),
        )
    return torch.cat([floats(weight) for weight in weights])


def make_linear(weight: Weight, bias: Tensor | None, kind: WeightKind) -> Linear:
    """Return the product with a matrix [out, in], and a bias added, in numbers of a kind."""
    dtype = kind.hidden_dtype
    matrix = floats(weight).to(dtype)
    added = None if bias is None else bias.to(dtype)

    def plain(hidden: Tensor) -> Tensor:
        return F.linear(hidden.to(dtype), matrix, added)

    return plain
