"""Learning rate and batch size as pure functions of the step number.

Does not know optimizers or ranks.
Rules: the first step is 0.  A learning rate is scaled to another batch size only if the user asks for it.
Sources: Loshchilov and Hutter, "SGDR", 2017 (cosine); Goyal et al., "Accurate, large minibatch SGD", 2017 (linear scaling);
Malladi et al., "On the SDEs and scaling rules for adaptive gradient algorithms", 2022 (square root for Adam); McCandlish et al.,
"An empirical model of large-batch training", 2018 (small batches first).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from hpctrain.errors import TrainError


class Course(enum.Enum):
    """The course of the learning rate after the warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"


class LrRule(enum.Enum):
    """The growth of the learning rate with the batch size."""

    NONE = "none"
    LINEAR = "linear"
    SQRT = "sqrt"


@dataclass(frozen=True, slots=True, kw_only=True)
class LrScale:
    """A learning rate for batches of `base` samples, scaled to other sizes by a rule."""

    rule: LrRule = LrRule.NONE
    base: int = 1

    def factor(self, batch: int) -> float:
        """Return the factor of the learning rate for a batch of so many samples."""
        match self.rule:
            case LrRule.NONE:
                return 1.0
            case LrRule.LINEAR:
                return batch / self.base
            case LrRule.SQRT:
                return math.sqrt(batch / self.base)


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSchedule:
    """Linear warm-up to `peak_lr`, then decay to `floor * peak_lr` at `total_steps`."""

    peak_lr: float
    warmup_steps: int
    total_steps: int
    course: Course = Course.CONSTANT
    floor: float = 0.05

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step (0: the first)."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        if self.course is Course.CONSTANT:
            return self.peak_lr  # exact to the bit
        span = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / span)
        return self.peak_lr * (self.floor + (1 - self.floor) * self._left(done))

    def _left(self, done: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * done)) if self.course is Course.COSINE else 1 - done


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRamp:
    """Batches that grow linearly from `first` to `full` samples in `steps` steps.

    0 steps: full at once.
    """

    full: int
    first: int = 1
    steps: int = 0

    def samples_at(self, step: int) -> int:
        """Return the number of samples of a step, summed over all ranks."""
        if step >= self.steps:
            return self.full
        return self.first + (self.full - self.first) * step // self.steps


class EpochEnd(enum.Enum):
    """The batch at the end of an epoch, if fewer samples are left than a full batch has."""

    CROSS = "cross"  # fill the batch with samples of the next epoch
    SHORT = "short"  # a smaller batch, as in a DataLoader
    DROP = "drop"  # skip the remaining samples, as in a DataLoader with drop_last


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The samples of each step by global index.

    Sample 0 of epoch 1 has the index `epoch_samples`.
    """

    ramp: BatchRamp
    epoch_samples: int | None = None  # None: not known
    epoch_end: EpochEnd = EpochEnd.CROSS
    epochs: int | None = None  # length of the run, if it is given in epochs; the last batch may be smaller

    def __post_init__(self) -> None:
        if self.epochs and not self.epoch_samples:
            raise TrainError(
                "cannot count epochs: the number of samples of an epoch is not known; give run.steps data that has a length, "
                "or samples=NUMBER, or train for a number of --steps"
            )
        if self.epoch_end is EpochEnd.DROP and self.epoch_samples and self.ramp.full > self.epoch_samples:
            raise TrainError(
                f"cannot make batches of {self.ramp.full}: there are {self.epoch_samples} samples, and drop_last=True leaves "
                "out a smaller batch; give a smaller --batch, or drop_last=False"
            )

    def span(self, step: int, low: int) -> tuple[int, int]:
        """Return the first sample and the number of samples of a step (0: the first).

        `low`: samples already taken.
        """
        size = self.ramp.samples_at(step)
        left = self._left_of_epoch(low)
        if left is not None and left < size:
            low, size = (low + left, size) if self.epoch_end is EpochEnd.DROP else (low, left)
        if self._end is not None:
            size = min(size, self._end - low)
        return low, size

    def steps_left(self, step: int, low: int) -> int | None:
        """Return the steps until the last epoch ends.

        None: the run's length is not given in epochs.
        """
        if self._end is None:
            return None
        assert self.epoch_samples is not None
        count, full, end = 0, self.ramp.full, self._end
        while low < end:
            at_full = step + count >= self.ramp.steps
            if at_full and self.epoch_end is EpochEnd.CROSS:
                return count - (low - end) // full
            if at_full and low % self.epoch_samples == 0:
                dropped = self.epoch_end is EpochEnd.DROP
                per_epoch = self.epoch_samples // full if dropped else -(-self.epoch_samples // full)
                return count + per_epoch * ((end - low) // self.epoch_samples)
            low, size = self.span(step + count, low)
            count, low = count + (size > 0), low + size
        return count

    def epochs_in(self, steps: int) -> float | None:
        """Return the epochs in so many steps from the start; None: not known, or batches grow."""
        samples, full = self.epoch_samples, self.ramp.full
        if not samples or self.ramp.steps:
            return None
        if self.epoch_end is EpochEnd.CROSS:
            return steps * full / samples
        per_epoch = samples // full if self.epoch_end is EpochEnd.DROP else -(-samples // full)
        return steps // per_epoch + min(1.0, steps % per_epoch * full / samples)

    @property
    def _end(self) -> int | None:
        return self.epochs * self.epoch_samples if self.epochs and self.epoch_samples else None

    def _left_of_epoch(self, low: int) -> int | None:
        if self.epoch_end is EpochEnd.CROSS or not self.epoch_samples:
            return None
        return self.epoch_samples - low % self.epoch_samples
