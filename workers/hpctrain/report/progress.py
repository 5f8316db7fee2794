"""The progress of a run, its identity, and the report of a step, as values.

A checkpoint saves the progress; people and programs get the reports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.checkpoint.writing.maker import CheckpointReport
from hpctrain.exchange.balance import RankTimes
from hpctrain.optim.precision import LossScale, Precision, loss_scale_for
from hpctrain.settings import TrainSettings
from hpctrain.values import travels


@travels
@dataclass(slots=True, kw_only=True)
class TrainingProgress:
    """The progress of a run: what a checkpoint saves besides tensors."""

    step: int = 0
    next_sample: int = 0
    total_steps: int | None = None
    skipped: int = 0  # steps that moved no weights
    loss_scale: LossScale = field(default_factory=LossScale)
    lr_schedule: object = None  # state of the script's own schedule, as JSON values
    best_loss: float = math.inf  # the lowest validation loss
    best_step: int = 0
    validations_since_best: int = 0

    def validated(self, loss: float) -> bool:
        """Record a validation after the current step.

        Return whether its loss is the lowest so far.
        """
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
            "settings": settings.as_texts(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """The job, attempt and generation of a run."""

    attempt: int
    generation: int
    job: str | None


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of a step; times in seconds, on this rank."""

    step: int
    total_steps: int | None
    loss: float
    lr: float
    grad_norm: float
    samples_per_s: float
    step_s: float
    comm_s: float
    shares: list[int]  # samples per rank
    loss_scale: float | None  # for the next step; None: the loss is not scaled
    val_loss: float | None = None
    checkpoint: CheckpointReport | None = None  # a checkpoint that was finished since the last step
    checkpoint_copy_s: float = 0.0
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    wait_s: float = 0.0  # waiting at the exchange
    exchanged_bytes: int = 0  # of gradients, before any compression
    samples: int = 0  # seen so far, of all ranks
    times: RankTimes | None = None  # of all ranks; None: the ranks did not exchange in this step
    is_best: bool = False  # the validation loss is the lowest so far
    changed: str = ""  # changes from the next step on (shares, exchange), as text


def progress_from(state: Mapping[str, object], step: int, precision: Precision) -> TrainingProgress:
    """Return the progress that `TrainingProgress.to_state` saved, for a run in `precision`."""
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
