"""Where a run stands, which life of it this is, and what a step did.

Values; a checkpoint keeps the first, people and programs are told the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.checkpoint import CheckpointReport
from hpctrain.exchange.scaling import RankTimes
from hpctrain.optim.precision import LossScale, Precision, loss_scale_for
from hpctrain.settings import TrainSettings


@dataclass(slots=True, kw_only=True)
class TrainingProgress:
    """Where a run stands: what a checkpoint keeps beside tensors."""

    step: int = 0
    next_sample: int = 0
    total_steps: int | None = None
    skipped: int = 0  # steps that moved nothing
    loss_scale: LossScale = field(default_factory=LossScale)
    lr_schedule: object = None  # state of the script's own schedule, as JSON values
    best_loss: float = math.inf  # the lowest of the validations
    best_step: int = 0
    validations_since_best: int = 0

    def validated(self, loss: float) -> bool:
        """Count a validation after the present step; returns whether its loss is the lowest so far."""
        best = loss < self.best_loss
        if best:
            self.best_loss, self.best_step = loss, self.step
        self.validations_since_best = 0 if best else self.validations_since_best + 1
        return best

    def to_state(self, settings: TrainSettings) -> dict[str, object]:
        """Return the manifest's `state`."""
        return {
            "sampler": {"seed": settings.seed, "next_sample": self.next_sample, "batch": settings.batch},
            "rng": {"scheme": "seed-step-rank", "seed": settings.seed},
            "schedule": {"total_steps": self.total_steps, "skipped": self.skipped},
            "loss_scale": self.loss_scale.to_state(),
            "validation": {
                "best_loss": self.best_loss if self.best_step else None,
                "best_step": self.best_step,
                "since_best": self.validations_since_best,
            },
            "lr_schedule": self.lr_schedule,
            "settings": settings.told(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Which life of which run this is."""

    attempt: int
    generation: int
    job: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step did; times in seconds, on this rank."""

    step: int
    total_steps: int | None
    loss: float
    val_loss: float | None
    lr: float
    grad_norm: float
    samples_per_s: float
    step_s: float
    comm_s: float
    checkpoint: CheckpointReport | None
    checkpoint_copy_s: float
    shares: list[int]  # samples of each rank
    loss_scale: float | None  # for the next step; None: the loss is not scaled
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    wait_s: float = 0.0  # at the exchange
    exchanged_bytes: int = 0  # of gradients, before any compression
    samples: int = 0  # seen so far, of all ranks
    times: RankTimes | None = None  # of all ranks; None: they did not meet in this step
    is_best: bool = False  # no validation before had a lower loss
    changed: str = ""  # what is otherwise from the next step on, shares or how ranks exchange, in words


def progress_from(state: Mapping[str, object], step: int, precision: Precision) -> TrainingProgress:
    """Read back what `TrainingProgress.to_state` gave, for a run in `precision`."""
    sampler, schedule = state["sampler"], state["schedule"]
    assert isinstance(sampler, dict)
    assert isinstance(schedule, dict)
    validation = state.get("validation")
    best = validation if isinstance(validation, dict) and validation["best_step"] else {}
    return TrainingProgress(
        lr_schedule=state.get("lr_schedule"),
        best_loss=best.get("best_loss", math.inf),
        best_step=best.get("best_step", 0),
        validations_since_best=best.get("since_best", 0),
        step=step,
        next_sample=int(sampler["next_sample"]),
        total_steps=schedule["total_steps"],
        skipped=int(schedule.get("skipped", 0)),
        loss_scale=loss_scale_for(precision, state.get("loss_scale")),
    )
