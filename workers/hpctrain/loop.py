"""The training loop: data-parallel over the ranks of a communicator; one rank is the same code.

A task is a model, an optimizer and losses over global sample indexes; the rest is here.  Does not know the backend, nor
how a checkpoint is stored.
Rules:
- The gradient equals that of one process on the same global batch: each rank's mean loss is weighted by its samples.
- Everything that a step depends on is the checkpoint's tensors and (seed, step, rank): random numbers are seeded anew
  for each step, samples are addressed by index.  So a run that was killed goes on bit for bit.
- Only rank 0 writes; ranks agree at each step whether to stop.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hpctrain.balance import Balance
from hpctrain.checkpoint import BackgroundWriter, Facts, Report
from hpctrain.comm import Communicator
from hpctrain.data import shares
from hpctrain.errors import TrainError
from hpctrain.localsteps import LocalSteps
from hpctrain.optim import AdamW, Schedule, clip_by_global_norm
from hpctrain.signals import StopRequest
from hpctrain.sync import Sync

# With a target time, this many steps are measured before the number of steps is fixed.
MEASURED_STEPS = 20


class Task(Protocol):
    """What is trained."""

    model: torch.nn.Module
    optimizer: AdamW

    def loss(self, low: int, high: int) -> torch.Tensor:
        """The mean loss over the training samples with global indexes [low, high)."""

    def validation(self, part: int, parts: int) -> tuple[float, int]:
        """The sum of losses over one part of the validation samples, and how many they are."""


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
    checkpoint_every: int
    eval_every: int
    weights: tuple[float, ...]  # samples per rank, relatively; empty: equal shares
    balance: bool  # shares follow the ranks' measured speeds


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a run stands: what a checkpoint keeps beside tensors."""

    step: int = 0
    next_sample: int = 0
    total_steps: int | None = None

    def to_state(self, settings: Settings) -> dict[str, object]:
        """This will give the manifest's `state`."""
        return {
            "sampler": {"seed": settings.seed, "next_sample": self.next_sample, "batch": settings.batch},
            "rng": {"scheme": "seed-step-rank", "seed": settings.seed},
            "schedule": {"total_steps": self.total_steps},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
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
    checkpoint: Report | None
    checkpoint_copy_s: float
    shares: list[int]  # samples of each rank
    changed: str  # what is otherwise from the next step on, shares or how ranks exchange, in words


def progress_from(state: Mapping[str, object], step: int) -> Progress:
    """This will read back what `Progress.to_state` gave."""
    sampler, schedule = state["sampler"], state["schedule"]
    assert isinstance(sampler, dict)
    assert isinstance(schedule, dict)
    return Progress(step=step, next_sample=int(sampler["next_sample"]), total_steps=schedule["total_steps"])


def live_tensors(task: Task) -> dict[str, torch.Tensor]:
    """This will name every tensor that a restart needs: weights, buffers and the optimizer's moments."""
    model = {f"model.{name}": tensor for name, tensor in task.model.state_dict().items()}
    return model | {f"optim.{name}": tensor for name, tensor in task.optimizer.tensors().items()}


def broadcast_state(tensors: Mapping[str, torch.Tensor], comm: Communicator) -> None:
    """This will give every rank the tensors of rank 0."""
    for tensor in tensors.values():
        comm.broadcast(tensor)


class Loop:
    """One run of a task, from `progress` to its end or a stop signal."""

    def __init__(
        self,
        task: Task,
        settings: Settings,
        comm: Communicator,
        progress: Progress,
        identity: Identity,
        sync: Sync,
        writer: BackgroundWriter | None,
        on_step: Callable[[StepReport], None],
    ) -> None:
        self._task, self._settings, self._comm = task, settings, comm
        self.progress = progress
        self._identity = identity
        self._writer = writer
        self._on_step = on_step
        self._sync = sync
        self._buckets = sync.buckets
        weights = settings.weights or (1.0,) * comm.size
        if len(weights) != comm.size:
            raise TrainError(f"cannot divide the batch: {len(weights)} share weights given for {comm.size} ranks")
        self._counts = shares(settings.batch, weights)
        self._balance = Balance(settings.batch, self._counts) if settings.balance and comm.size > 1 else None
        self._recent_s: list[float] = []
        self.late_reports: list[Report] = []  # of checkpoints that ended after the last step
        self._due = False

    def run(self, stop: StopRequest) -> bool:
        """This will train to the end and return True, or False after a stop signal; both publish the state."""
        stopped = False
        while not stopped and not self._finished():
            stopped = self._step(stop)
        self._buckets.close()
        self._publish_last()
        return not stopped or self._finished()

    def _finished(self) -> bool:
        total = self.progress.total_steps
        return total is not None and self.progress.step >= total

    def _step(self, stop: StopRequest) -> bool:
        progress, settings, task = self.progress, self._settings, self._task
        started_s = time.perf_counter()
        seed_step(settings.seed, progress.step, self._comm.rank)
        lr = self._schedule().lr_at(progress.step)
        local_loss = self._backward()
        own_s = time.perf_counter() - started_s
        local, met = self._sync.local, self._meets_after(progress.step + 1)
        comm_s, waited_s = self._buckets.exchange() if local is None else (0.0, 0.0)
        grad_norm = clip_by_global_norm(self._buckets.flats, settings.clip_norm)
        task.optimizer.step(progress.step + 1, lr)
        if local is not None and met:
            comm_s = self._meet(local)
        done = self._counts
        own_part = done[self._comm.rank] / settings.batch
        loss, stops, said = (
            local_loss / own_part if own_part else 0.0,
            False,
            "",
        )  # until they meet: of this rank's samples
        if met:
            loss, stops, each_s = self._agree(local_loss, stop.received is not None, own_s)
            said = "; ".join(filter(None, (self._rebalance(each_s), self._sync.measured(own_s, waited_s))))
        progress.step += 1
        progress.next_sample += settings.batch
        step_s = time.perf_counter() - started_s
        self._fix_total(step_s)
        checkpoint, copy_s = self._checkpoint()
        self._on_step(
            StepReport(
                step=progress.step,
                total_steps=progress.total_steps,
                loss=loss,
                val_loss=self._validate(),
                lr=lr,
                grad_norm=grad_norm,
                samples_per_s=settings.batch / step_s,
                step_s=step_s,
                comm_s=comm_s,
                checkpoint=checkpoint,
                checkpoint_copy_s=copy_s,
                shares=done,
                changed=said,
            )
        )
        return stops

    def _backward(self) -> float:
        """Gradients of this rank's part of the global mean loss, and that part."""
        self._buckets.zero()
        count = self._counts[self._comm.rank]
        if count == 0:
            return 0.0
        low = self.progress.next_sample + sum(self._counts[: self._comm.rank])
        loss = self._task.loss(low, low + count)
        part = count / self._settings.batch
        # With local steps this rank goes its own way meanwhile, by the mean of its own samples.
        (loss if self._sync.local is not None else loss * part).backward()
        return float(loss.detach()) * part

    def _meets_after(self, step: int) -> bool:
        """Whether ranks agree after the step of this number: after each, or with local steps when they meet, and at the end."""
        local, total = self._sync.local, self.progress.total_steps
        return local is None or local.due(step) or step == total

    def _meet(self, local: LocalSteps) -> float:
        started_s = time.perf_counter()
        local.meet(self._counts[self._comm.rank] / self._settings.batch)
        return time.perf_counter() - started_s

    def _rebalance(self, each_s: list[float]) -> str:
        """Give the next step's samples to the ranks by what each took for this one's."""
        if self._balance is None:
            return ""
        said = self._balance.note(each_s)
        self._counts = list(self._balance.counts)
        return said

    def _agree(self, local_loss: float, stop: bool, own_s: float) -> tuple[float, bool, list[float]]:
        """The global loss, whether any rank was asked to stop, and how long each rank's own work took."""
        facts = torch.zeros(2 + self._comm.size, dtype=torch.float64)
        facts[0], facts[1], facts[2 + self._comm.rank] = local_loss, float(stop), own_s
        self._comm.all_reduce(facts)
        loss, stops = float(facts[0]), float(facts[1]) > 0
        if not math.isfinite(loss):
            parts = self._comm.all_gather_object(local_loss)
            bad = [rank for rank, part in enumerate(parts) if not math.isfinite(part)]  # type: ignore[arg-type]
            low = self.progress.next_sample
            raise TrainError(
                f"cannot go on: the loss is not finite at step {self.progress.step + 1} (samples {low} to "
                f"{low + self._settings.batch}) on rank {', '.join(map(str, bad))}; try a lower learning rate"
            )
        return loss, stops, facts[2:].tolist()

    def _schedule(self) -> Schedule:
        total = self.progress.total_steps or 10**9
        return Schedule(peak_lr=self._settings.lr, warmup_steps=self._settings.warmup_steps, total_steps=total)

    def _fix_total(self, step_s: float) -> None:
        """With a target time, rank 0's measured median decides the number of steps, for all ranks."""
        if self.progress.total_steps is not None or self._settings.target_s is None:
            return
        self._recent_s.append(step_s)
        if len(self._recent_s) < MEASURED_STEPS:
            return
        settled_s = sorted(self._recent_s[MEASURED_STEPS // 2 :])  # the first steps warm caches up
        median_s = settled_s[len(settled_s) // 2]
        chosen = torch.tensor([self.progress.step + int(self._settings.target_s / median_s)], dtype=torch.int64)
        self._comm.broadcast(chosen)
        self.progress.total_steps = int(chosen)

    def _checkpoint(self) -> tuple[Report | None, float]:
        """Begin one if it is due and none is in flight; else it stays due for the next step."""
        if self._writer is None:
            return None, 0.0
        report = self._writer.collect()
        every = self._settings.checkpoint_every
        self._due |= every > 0 and self.progress.step % every == 0
        if not self._due or not self._meets_after(self.progress.step) or not self._writer.idle():
            return report, 0.0
        self._due = False
        return report, self._writer.begin(self._tensors(), self._facts())

    def _publish_last(self) -> None:
        """The state as it is now has to be on the share before a rank leaves."""
        writer = self._writer
        if writer is not None:
            reports = [writer.wait()]
            if writer.last_step != self.progress.step and self._settings.checkpoint_every > 0:
                writer.begin(self._tensors(), self._facts())
                reports.append(writer.wait())
            writer.close()
            self.late_reports = [report for report in reports if report is not None]
            if self.late_reports and writer.last_step != self.progress.step:
                raise TrainError(
                    f"cannot keep the last state (step {self.progress.step}): {self.late_reports[-1].error}"
                )
        self._comm.barrier()

    def _tensors(self) -> dict[str, torch.Tensor]:
        return live_tensors(self._task) | self._sync.tensors()

    def _facts(self) -> Facts:
        return Facts(
            step=self.progress.step,
            attempt=self._identity.attempt,
            generation=self._identity.generation,
            world=self._comm.size,
            job=self._identity.job,
            written_at_s=round(time.time(), 3),
            state=self.progress.to_state(self._settings) | {"exchange": self._comm.plan()},
        )

    def _validate(self) -> float | None:
        every, step = self._settings.eval_every, self.progress.step
        if every <= 0 or (step % every and step != 1 and not self._finished()):
            return None
        return validation_loss(self._task, self._comm)


@torch.no_grad()
def validation_loss(task: Task, comm: Communicator) -> float:
    """This will give the mean loss over the validation samples; all ranks take a part of them."""
    task.model.eval()
    total, count = task.validation(comm.rank, comm.size)
    task.model.train()
    facts = torch.tensor([total, float(count)], dtype=torch.float64)
    comm.all_reduce(facts)
    return float(facts[0] / facts[1])


def seed_step(seed: int, step: int, rank: int) -> None:
    """This will seed Python's, NumPy's and torch's generators for one step of one rank."""
    number = (seed * 1_000_003 + step) * 4099 + rank
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number % 2**63)
