"""How a run is trained: the options of the command line as values, checked for what does not go together."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from hpctrain.errors import TrainError
from hpctrain.precision import Precision
from hpctrain.schedule import BatchRamp, Course, LrScale, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a task is trained. `steps` may be None if `target_s` is given."""

    steps: int | None
    target_s: float | None
    batch: int
    seed: int
    lr: float
    warmup_steps: int
    clip_norm: float
    checkpoint_every: int | None  # steps; 0: never, None: as it is best
    eval_every: int
    weights: tuple[float, ...]  # samples per rank, relatively; empty: equal shares
    balance: bool  # shares follow the ranks' measured speeds
    course: Course = Course.COSINE
    floor: float = 0.05
    lr_scale: LrScale = LrScale()
    ramp: BatchRamp
    precision: Precision = Precision.FP32
    micro_batch: int | None = None  # samples that a rank takes at once at the most

    def lr_at(self, step: int, batch: int, total_steps: int | None) -> float:
        """This will give the learning rate of a step (the first is 0) with a batch of so many samples."""
        schedule = Schedule(
            peak_lr=self.lr * self.lr_scale.factor(batch),
            warmup_steps=self.warmup_steps,
            total_steps=total_steps or 10**9,
            course=self.course,
            floor=self.floor,
        )
        return schedule.lr_at(step)


def settings_of(options: argparse.Namespace) -> Settings:
    """This will translate the options."""
    return Settings(
        steps=options.steps,
        target_s=options.target_seconds if options.steps is None else None,
        batch=options.batch,
        seed=options.seed,
        lr=options.lr,
        warmup_steps=options.warmup,
        clip_norm=options.clip,
        checkpoint_every=options.checkpoint_every,
        eval_every=options.eval_every,
        weights=() if isinstance(options.shares, str) else options.shares,
        balance=options.shares == "auto",
        course=Course(options.schedule),
        floor=options.floor,
        lr_scale=options.scale_lr,
        ramp=ramp_of(options),
        precision=Precision(options.precision),
        micro_batch=options.micro_batch,
    )


def ramp_of(options: argparse.Namespace) -> BatchRamp:
    """This will say how the batch grows."""
    first, steps = options.ramp or (options.batch, 0)
    return BatchRamp(full=options.batch, first=first, steps=steps)


def check_elastic(options: argparse.Namespace) -> None:
    """This will refuse what a run cannot do whose ranks come and go.

    Raises:
        TrainError: says which option, and why.
    """
    if options.zero or options.sync.startswith("local"):
        which = "--zero" if options.zero else f"--sync {options.sync}"
        raise TrainError(f"cannot train with {which} in an elastic run: what a lost rank alone had would be lost")
    if not isinstance(options.shares, str):
        raise TrainError("cannot give each rank its share in an elastic run, they come and go: say --shares auto")


def check_options(options: argparse.Namespace) -> None:
    """This will refuse what does not go together.

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
    if ramp_of(options).first > options.batch:
        raise TrainError(
            f"cannot ramp the batch: it would begin at {options.ramp[0]} samples, over --batch {options.batch}"
        )
