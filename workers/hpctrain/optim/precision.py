"""Half precision: autocast for forward, and for float16 a loss that is scaled so that small gradients are not lost.

The weights, the optimizer's state and the gradients stay float32.  Does not know ranks: the loop hands it what all of them
found, so the scale is the same on all.
Rules: the scale is a power of two, so that scaling costs no bit; gradients that are not finite skip the step and halve it, a
long stretch of finite ones doubles it; it is part of the checkpoint.  bfloat16 has float32's range and needs none.
Sources: Micikevicius et al., "Mixed precision training", ICLR 2018.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hpctrain.errors import TrainError

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000  # finite steps in a row after which the scale is doubled
LARGEST_SCALE = 2.0**24
LEAST_SCALE = 2.0**-6  # gradients that overflow even so are not too small, but wrong


class Precision(enum.Enum):
    """What forward computes in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def dtype(self) -> torch.dtype:
        """The type of torch."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.value]

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the context in which forward runs; without effect for float32."""
        if self is Precision.FP32:
            return torch.autocast(device.type, enabled=False)
        return torch.autocast(device.type, dtype=self.dtype)


@dataclass(slots=True, kw_only=True)
class LossScale:
    """What the loss is multiplied by; 1 and fixed unless forward computes in float16."""

    value: float = 1.0
    finite_steps: int = 0  # in a row
    dynamic: bool = False

    def learn(self, finite: bool) -> str:
        """Take note of whether a step's gradients were finite, and return what that changes, in words.

        Raises:
            TrainError: they are not, and no scale could help.
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
        """Return what a checkpoint keeps; None: nothing."""
        return {"value": self.value, "finite_steps": self.finite_steps} if self.dynamic else None


def loss_scale_for(precision: Precision, state: object) -> LossScale:
    """Make the loss scale, as a checkpoint has it in `state` or a fresh one.

    A run that goes on in float16 after another precision begins with a fresh one.
    """
    if precision is not Precision.FP16:
        return LossScale()
    if isinstance(state, Mapping):
        return LossScale(value=float(state["value"]), finite_steps=int(state["finite_steps"]), dynamic=True)
    return LossScale(value=FIRST_SCALE, dynamic=True)
