"""Half precision: autocast, and for float16 a scaled loss.

The weights, the optimizer's state and the gradients stay float32.  Does not know ranks: the loop passes the result of all
ranks, so the scale is equal on all.
Rules: the scale is a power of two, so that scaling is exact.  Gradients that are not finite skip the step and halve the scale;
a long series of finite ones doubles it.  The scale is saved in checkpoints.  bfloat16 has float32's range and needs no scale.
Sources: Micikevicius et al., "Mixed precision training", ICLR 2018.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hpctrain.errors import TrainError
from hpctrain.values import travels

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000  # consecutive finite steps after which the scale doubles
LARGEST_SCALE = 2.0**24
LEAST_SCALE = 2.0**-6  # if gradients overflow at this scale, they are wrong


class Precision(enum.Enum):
    """The precision of the forward pass."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.value]

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the context of the forward pass; without effect for float32."""
        if self is Precision.FP32:
            return torch.autocast(device.type, enabled=False)
        return torch.autocast(device.type, dtype=self.dtype)


@travels
@dataclass(slots=True, kw_only=True)
class LossScale:
    """The factor of the loss; fixed at 1 unless the forward pass computes in float16."""

    value: float = 1.0
    finite_steps: int = 0  # consecutive
    dynamic: bool = False

    def learn(self, finite: bool) -> str:
        """Adapt the scale to whether a step's gradients were finite.

        Return the change as text, or "".

        Raises:
            TrainError: the gradients are not finite, and no scale helps.
        """
        if not self.dynamic and not finite:
            raise TrainError("the gradient is not finite; try a lower learning rate or --clip")
        if not self.dynamic:
            return ""
        if not finite:
            if self.value <= LEAST_SCALE:
                raise TrainError(
                    f"gradients are not finite even with the loss scaled by {self.value:g}; try bf16 or fp32"
                )
            self.value, self.finite_steps = self.value / 2, 0
            return f"skipped, its gradient is not finite in float16; the loss is scaled by {self.value:g} from now on"
        self.finite_steps += 1
        if self.finite_steps >= GROWTH_STEPS and self.value < LARGEST_SCALE:
            self.value, self.finite_steps = 2 * self.value, 0
        return ""

    def to_state(self) -> dict[str, object] | None:
        """Return the state for a checkpoint; None: the scale is fixed."""
        return {"value": self.value, "finite_steps": self.finite_steps} if self.dynamic else None


def loss_scale_for(precision: Precision, state: object) -> LossScale:
    """Return the loss scale of a checkpoint's `state`, or a new one.

    A run that continues in float16 after another precision gets a new one.
    """
    if precision is not Precision.FP16:
        return LossScale()
    if isinstance(state, Mapping):
        return LossScale(value=float(state["value"]), finite_steps=int(state["finite_steps"]), dynamic=True)
    return LossScale(value=FIRST_SCALE, dynamic=True)
