"""How a run trains: the settings of options, optimizer and data, as values.

Rules: a given option overrides the script, and the script overrides defaults.  By default the learning rate is the
optimizer's own and constant, and gradients are not clipped, as in a script without hpctrain.
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
    lr: float  # peak
    warmup_steps: int
    clip_norm: float  # 0: none
    checkpoint_every: int | None  # steps; 0: never, None: chosen by cost and interruptions
    eval_every: int | None  # steps; 0: never, None: at the end of each epoch
    patience: int | None = None  # validations without a lower loss before training stops
    weights: tuple[float, ...]  # relative samples per rank; empty: equal shares
    balance: bool  # shares follow the ranks' measured speeds
    course: Course = Course.CONSTANT
    floor: float = 0.05
    lr_scale: LrScale = LrScale()
    own_schedule: str = ""  # class name of the script's own schedule, which then sets the learning rate
    batches: Batches
    precision: Precision = Precision.FP32
    micro_batch: int | None = None  # at most so many samples at once on a rank

    def lr_at(self, step: int, batch: int, total_steps: int | None) -> float:
        """Return the learning rate of a step (0: the first) with `batch` samples."""
        schedule = LrSchedule(
            peak_lr=self.lr * self.lr_scale.factor(batch),
            warmup_steps=self.warmup_steps,
            total_steps=total_steps or 10**9,
            course=self.course,
            floor=self.floor,
        )
        return schedule.lr_at(step)

    def as_texts(self) -> dict[str, str]:
        """Return the settings that decide the course of the training, as text by name."""
        course = self.own_schedule or self.course.value
        if not self.own_schedule and self.course is not Course.CONSTANT:
            course += f" to {self.floor:.3g} of it"
        if self.warmup_steps:
            course += f", {self.warmup_steps} steps warm-up"
        if self.lr_scale.rule is not LrRule.NONE:
            course += f", {self.lr_scale.rule.value} with the batch from {self.lr_scale.base}"
        ramp = self.batches.ramp
        texts = {
            "lr": f"{lr_text(self.lr)} ({course})",
            "clip": f"{self.clip_norm:g}" if self.clip_norm else "none",
            "batch": f"{self.batch}" + (f" (from {ramp.first}, within {ramp.steps} steps)" if ramp.steps else ""),
            "seed": str(self.seed),
        }
        return texts | ({"precision": self.precision.value} if self.precision is not Precision.FP32 else {})

    def described(self, total_steps: int | None) -> str:
        """Return one line: the settings that decide the training, and its length."""
        texts = self.as_texts()
        del texts["seed"]
        length = (
            f"steps for {self.target_s:g} s" if total_steps is None else f"{total_steps} step{'s' * (total_steps != 1)}"
        )
        epochs = self.batches.epochs or (self.batches.epochs_in(total_steps) if total_steps is not None else None)
        if epochs is not None:
            text = epochs_text(epochs)
            length += f" = {text} epoch{'s' * (text != '1')}"
        return ", ".join([*(f"{name} {value}" for name, value in texts.items()), length])


def lr_text(lr: float) -> str:
    """Return a learning rate as text: 1e-3, 0.1."""
    if lr == 0 or lr >= 0.01:
        return f"{lr:g}"
    digits, _, exponent = f"{lr:.6e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def epochs_text(number: float) -> str:
    """Return a number of epochs as text: 3, 2.5, 0.02."""
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
    """Return the settings for options.

    `lr` and `batch` are the optimizer's and the data's, used by default.

    Raises:
        TrainError: options do not fit together, or do not fit the data.
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
    """Reject options that an elastic run does not support.

    Raises:
        TrainError: names the option and the reason.
    """
    if options.zero or options.sync.startswith("local"):
        which = "--zero" if options.zero else f"--sync {options.sync}"
        raise TrainError(
            f"cannot train with {which} in an elastic run: a lost rank would take its own part of the state with it"
        )
    if not isinstance(options.shares, str):
        raise TrainError("cannot use fixed shares in an elastic run, because ranks come and go; use --shares auto")


def check_own_schedule(options: argparse.Namespace) -> None:
    """Reject options that set the learning rate if the script passes its own schedule.

    Raises:
        TrainError: names the options.
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
            f"cannot train with {' and '.join(names)}: the script gives run.steps its own schedule, which sets the learning "
            "rate; use one of them"
        )


def check_validation(options: argparse.Namespace, *, validates: bool) -> str:
    """Return a note if an option has no effect, else "".

    Raises:
        TrainError: training could never stop early as requested.
    """
    if options.patience and not (validates and options.eval_every != 0):
        why = "the script gives run.steps no validation" if not validates else "--eval-every 0 turns validation off"
        raise TrainError(f"cannot stop early (--patience {options.patience}): {why}")
    if options.eval_every and not validates:
        return f"--eval-every {options.eval_every} has no effect: the script gives run.steps no validation"
    return ""


def check_options(options: argparse.Namespace) -> None:
    """Reject options that do not fit together.

    Raises:
        TrainError: names the options.
    """
    if options.precision == "fp16" and options.sync.startswith("local"):
        raise TrainError(
            f"cannot train with --precision fp16 and --sync {options.sync}: ranks between two exchanges would scale the "
            "loss differently; use bf16, which needs no scale"
        )
    if options.zero and options.sync.startswith("local"):
        raise TrainError(
            f"cannot shard the optimizer's state (--zero) with --sync {options.sync}: between two exchanges each rank "
            "needs moments of its own"
        )
