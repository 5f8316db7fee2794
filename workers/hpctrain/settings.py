"""How a run is trained: options, and what the script's optimizer and data say, as values.

Rules: an option that is given wins over the script, and the script over defaults.  By default the learning rate is the
optimizer's own and constant, and gradients are not clipped: what a script does without hpctrain.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from hpctrain.errors import TrainError
from hpctrain.optim.precision import Precision
from hpctrain.optim.schedule import Batches, BatchRamp, Course, EpochEnd, LrRule, LrScale, LrSchedule

DEFAULT_BATCH = 32
DEFAULT_EVAL_EVERY = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How a task is trained. `steps` may be None if `target_s` is given."""

    steps: int | None
    target_s: float | None
    batch: int
    seed: int
    lr: float  # at its peak
    warmup_steps: int
    clip_norm: float  # 0: none
    checkpoint_every: int | None  # steps; 0: never, None: as it is best
    eval_every: int | None  # steps; 0: never, None: at the end of each epoch
    patience: int | None = None  # validations without a lower loss, after which training stops
    weights: tuple[float, ...]  # samples per rank, relatively; empty: equal shares
    balance: bool  # shares follow the ranks' measured speeds
    course: Course = Course.CONSTANT
    floor: float = 0.05
    lr_scale: LrScale = LrScale()
    own_schedule: str = ""  # the kind of the script's own schedule, which then sets the learning rate
    batches: Batches
    precision: Precision = Precision.FP32
    micro_batch: int | None = None  # samples that a rank takes at once at the most

    def lr_at(self, step: int, batch: int, total_steps: int | None) -> float:
        """Return the learning rate of a step (the first is 0) with a batch of so many samples."""
        schedule = LrSchedule(
            peak_lr=self.lr * self.lr_scale.factor(batch),
            warmup_steps=self.warmup_steps,
            total_steps=total_steps or 10**9,
            course=self.course,
            floor=self.floor,
        )
        return schedule.lr_at(step)

    def told(self) -> dict[str, str]:
        """What decides the course of the training, in words, for people."""
        course = self.own_schedule or self.course.value
        if not self.own_schedule and self.course is not Course.CONSTANT:
            course += f" to {self.floor:.3g} of it"
        if self.warmup_steps:
            course += f", {self.warmup_steps} steps warm-up"
        if self.lr_scale.rule is not LrRule.NONE:
            course += f", {self.lr_scale.rule.value} with the batch from {self.lr_scale.base}"
        ramp = self.batches.ramp
        told = {
            "lr": f"{lr_text(self.lr)} ({course})",
            "clip": f"{self.clip_norm:g}" if self.clip_norm else "none",
            "batch": f"{self.batch}" + (f" (from {ramp.first}, within {ramp.steps} steps)" if ramp.steps else ""),
            "seed": str(self.seed),
        }
        return told | ({"precision": self.precision.value} if self.precision is not Precision.FP32 else {})

    def described(self, total_steps: int | None) -> str:
        """One line for people: what decides the course of the training, and how long it is."""
        told = self.told()
        del told["seed"]
        length = (
            f"steps for {self.target_s:g} s" if total_steps is None else f"{total_steps} step{'s' * (total_steps != 1)}"
        )
        epochs = self.batches.epochs or (self.batches.epochs_in(total_steps) if total_steps is not None else None)
        if epochs is not None:
            text = epochs_text(epochs)
            length += f" = {text} epoch{'s' * (text != '1')}"
        return ", ".join([*(f"{name} {value}" for name, value in told.items()), length])


def lr_text(lr: float) -> str:
    """A learning rate as people write it: 1e-3, 0.1."""
    if lr == 0 or lr >= 0.01:
        return f"{lr:g}"
    digits, _, exponent = f"{lr:.6e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def epochs_text(number: float) -> str:
    """A number of epochs as people write it: 3, 2.5, 0.02."""
    return f"{number:.1f}".removesuffix(".0") if number >= 0.1 else f"{number:.1g}"


def settings_of(
    options: argparse.Namespace,
    lr: float,
    *,
    batch: int | None = None,
    epoch_samples: int | None = None,
    epoch_end: EpochEnd = EpochEnd.CROSS,
    own_schedule: str = "",
) -> TrainSettings:
    """Translate the options; `lr` is the optimizer's own and `batch` the data's own, for where no option says otherwise.

    Raises:
        TrainError: options do not go together, or not with the data.
    """
    full = options.batch or batch or DEFAULT_BATCH
    first, ramp_steps = options.ramp or (full, 0)
    if first > full:
        raise TrainError(f"cannot ramp the batch: it would begin at {first} samples, over --batch {full}")
    ramp = BatchRamp(full=full, first=first, steps=ramp_steps)
    return TrainSettings(
        steps=options.steps,
        target_s=options.target_seconds if options.steps is None and options.epochs is None else None,
        batch=full,
        seed=options.seed,
        lr=lr if options.lr is None else options.lr,
        warmup_steps=options.warmup,
        clip_norm=options.clip,
        checkpoint_every=options.checkpoint_every,
        eval_every=(None if options.epochs else DEFAULT_EVAL_EVERY)
        if options.eval_every is None
        else options.eval_every,
        patience=options.patience,
        weights=() if isinstance(options.shares, str) else options.shares,
        balance=options.shares == "auto",
        course=Course(options.schedule),
        floor=options.floor,
        lr_scale=options.scale_lr,
        own_schedule=own_schedule,
        batches=Batches(ramp=ramp, epoch_samples=epoch_samples or None, epoch_end=epoch_end, epochs=options.epochs),
        precision=Precision(options.precision),
        micro_batch=options.micro_batch,
    )


def check_elastic(options: argparse.Namespace) -> None:
    """Refuse what a run cannot do whose ranks come and go.

    Raises:
        TrainError: says which option, and why.
    """
    if options.zero or options.sync.startswith("local"):
        which = "--zero" if options.zero else f"--sync {options.sync}"
        raise TrainError(f"cannot train with {which} in an elastic run: what a lost rank alone had would be lost")
    if not isinstance(options.shares, str):
        raise TrainError("cannot give each rank its share in an elastic run, they come and go: say --shares auto")


def check_own_schedule(options: argparse.Namespace) -> None:
    """Refuse options that set the learning rate where the script's own schedule does.

    Raises:
        TrainError: says which options.
    """
    given = {
        "--lr": options.lr is not None,
        "--warmup": options.warmup > 0,
        "--schedule": options.schedule != Course.CONSTANT.value,
        "--scale-lr": options.scale_lr.rule is not LrRule.NONE,
    }
    names = [name for name, is_given in given.items() if is_given]
    if names:
        raise TrainError(
            f"cannot train with {' and '.join(names)}: the script gives run.steps a schedule of its own, which sets the learning "
            "rate; leave one of both away"
        )


def check_validation(options: argparse.Namespace, *, validates: bool) -> str:
    """Return a note for people if an option has no effect, or "".

    Raises:
        TrainError: training would never stop early as it was asked to.
    """
    if options.patience and not (validates and options.eval_every != 0):
        why = "the script gives run.steps no validation" if not validates else "--eval-every 0 switches validation off"
        raise TrainError(f"cannot stop early (--patience {options.patience}): {why}")
    if options.eval_every and not validates:
        return f"--eval-every {options.eval_every} has no effect: the script gives run.steps no validation"
    return ""


def check_options(options: argparse.Namespace) -> None:
    """Refuse what does not go together.

    Raises:
        TrainError: says which options.
    """
    if options.precision == "fp16" and options.sync.startswith("local"):
        raise TrainError(
            f"cannot train with --precision fp16 and --sync {options.sync}: ranks that go their own ways would scale the "
            "loss differently; bf16 needs no scale"
        )
    if options.zero and options.sync.startswith("local"):
        raise TrainError(
            f"cannot share the optimizer's state (--zero) with --sync {options.sync}: each rank goes its own way meanwhile, "
            "with moments of its own"
        )
