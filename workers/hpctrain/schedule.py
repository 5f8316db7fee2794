"""The learning rate and the batch, step by step: a pure function of the step's number, so a restart changes nothing.

Does not know optimizers or ranks.
Rules: the first step is 0.  A learning rate that was found for one batch is carried over to another by the user's word only.
Sources: Loshchilov and Hutter, "SGDR", 2017 (cosine); Goyal et al., "Accurate, large minibatch SGD", 2017 (linear scaling);
Malladi et al., "On the SDEs and scaling rules for adaptive gradient algorithms", 2022 (square root for Adam); McCandlish et al.,
"An empirical model of large-batch training", 2018 (small batches first).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class Course(enum.Enum):
    """How the learning rate goes down after the warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"


class LrRule(enum.Enum):
    """How the learning rate grows with the batch."""

    NONE = "none"
    LINEAR = "linear"
    SQRT = "sqrt"


@dataclass(frozen=True, slots=True, kw_only=True)
class LrScale:
    """A learning rate is meant for batches of `base` samples; others get it by the rule."""

    rule: LrRule = LrRule.NONE
    base: int = 1

    def factor(self, batch: int) -> float:
        """This will give what the learning rate is multiplied by in a batch of so many samples."""
        match self.rule:
            case LrRule.NONE:
                return 1.0
            case LrRule.LINEAR:
                return batch / self.base
            case LrRule.SQRT:
                return math.sqrt(batch / self.base)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up to `peak_lr`, then down to `floor` times it at `total_steps`, and no further."""

    peak_lr: float
    warmup_steps: int
    total_steps: int
    course: Course = Course.COSINE
    floor: float = 0.05

    def lr_at(self, step: int) -> float:
        """This will give the learning rate of the step with this number."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        span = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / span)
        return self.peak_lr * (self.floor + (1 - self.floor) * self._left(done))

    def _left(self, done: float) -> float:
        match self.course:
            case Course.COSINE:
                return 0.5 * (1 + math.cos(math.pi * done))
            case Course.LINEAR:
                return 1 - done
            case Course.CONSTANT:
                return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRamp:
    """Batches that grow evenly from `first` to `full` samples within `steps` steps; 0 steps: they are full at once."""

    full: int
    first: int = 1
    steps: int = 0

    def samples_at(self, step: int) -> int:
        """This will give the samples of the step with this number, of all ranks together."""
        if step >= self.steps:
            return self.full
        return self.first + (self.full - self.first) * step // self.steps
