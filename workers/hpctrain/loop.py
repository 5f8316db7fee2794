"""The training loop: data-parallel over the ranks of a communicator; one rank is the same code.

It gives each step's batch away to be learned from; the rest is here.  Does not know the backend, nor how a checkpoint is
stored, nor what is trained.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

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


# The sum of losses over one part (of so many) of the validation samples, and how many samples that part has.
Validation = Callable[[int, int], tuple[float, int]]


class Batch:
    """A rank's part of a step's batch: the training samples with global indexes [low, high)."""

    def __init__(self, low: int, high: int, step: int, scale: float) -> None:
        self.low, self.high, self.step = low, high, step
        self._scale = scale
        self.loss: float | None = None

    def __len__(self) -> int:
        return self.high - self.low

    def backward(self, loss: torch.Tensor) -> None:
        """This will compute gradients of `loss`, the mean over this rank's samples; called once."""
        if self.loss is not None:
            raise TrainError(f"cannot compute gradients of step {self.step} twice: call backward once for each batch")
        (loss * self._scale).backward()
        self.loss = float(loss.detach())


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


def live_tensors(model: torch.nn.Module, optimizer: AdamW) -> dict[str, torch.Tensor]:
    """This will name every tensor that a restart needs: weights, buffers and the optimizer's moments."""
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return weights | {f"optim.{name}": tensor for name, tensor in optimizer.tensors().items()}


def broadcast_state(tensors: Mapping[str, torch.Tensor], comm: Communicator) -> None:
    """This will give every rank the tensors of rank 0."""
    for tensor in tensors.values():
        comm.broadcast(tensor)


class Loop:
    """One run of a task, from `progress` to its end or a stop signal."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: AdamW,
        validation: Validation | None,
        settings: Settings,
        comm: Communicator,
        progress: Progress,
        identity: Identity,
        sync: Sync,
        writer: BackgroundWriter | None,
        on_step: Callable[[StepReport], None],
    ) -> None:
        self._model, self._optimizer, self._validation = model, optimizer, validation
        self._settings, self._comm = settings, comm
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

    def steps(self, stop: StopRequest) -> Iterator[Batch]:
        """This will train to the end, or until a stop signal, and publish the state; what it gives is to be learned from."""
        stopped = False
        while not stopped and not self.finished:
            started_s = time.perf_counter()
            batch = self._begin()
            if len(batch):
                yield batch
                if batch.loss is None:
                    raise TrainError(f"cannot take step {batch.step}: batch.backward(loss) was not called")
            stopped = self._take_step(batch, stop, started_s)
        self._buckets.close()
        self._publish_last()

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        total = self.progress.total_steps
        return total is not None and self.progress.step >= total

    def _begin(self) -> Batch:
        """Make ready for a step: its random numbers, zero gradients, and this rank's samples."""
        progress, settings, rank = self.progress, self._settings, self._comm.rank
        seed_step(settings.seed, progress.step, rank)
        self._buckets.zero()
        low = progress.next_sample + sum(self._counts[:rank])
        # With local steps this rank goes its own way meanwhile, by the mean of its own samples.
        scale = 1.0 if self._sync.local is not None else self._part
        return Batch(low, low + self._counts[rank], progress.step + 1, scale)

    @property
    def _part(self) -> float:
        """This rank's part of the batch."""
        return self._counts[self._comm.rank] / self._settings.batch

    def _take_step(self, batch: Batch, stop: StopRequest, started_s: float) -> bool:
        """Exchange gradients, move the weights and report; returns whether any rank was asked to stop."""
        progress, settings = self.progress, self._settings
        own_s = time.perf_counter() - started_s
        lr = self._schedule().lr_at(progress.step)
        local, met = self._sync.local, self._meets_after(batch.step)
        comm_s, waited_s = self._buckets.exchange() if local is None else (0.0, 0.0)
        grad_norm = clip_by_global_norm(self._buckets.flats, settings.clip_norm)
        self._optimizer.step(batch.step, lr)
        if local is not None and met:
            comm_s = self._meet(local)
        done = self._counts
        loss, stops, said = batch.loss or 0.0, False, ""  # until they meet: of this rank's samples
        if met:
            loss, stops, each_s = self._agree(loss * self._part, stop.received is not None, own_s)
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

    def _meets_after(self, step: int) -> bool:
        """Whether ranks agree after the step of this number: after each, or with local steps when they meet, and at the end."""
        local, total = self._sync.local, self.progress.total_steps
        return local is None or local.due(step) or step == total

    def _meet(self, local: LocalSteps) -> float:
        started_s = time.perf_counter()
        local.meet(self._part)
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
        return live_tensors(self._model, self._optimizer) | self._sync.tensors()

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
        if self._validation is None or every <= 0 or (step % every and step != 1 and not self.finished):
            return None
        return validation_loss(self._model, self._validation, self._comm)


@torch.no_grad()
def validation_loss(model: torch.nn.Module, validation: Validation, comm: Communicator) -> float:
    """This will give the mean loss over the validation samples; all ranks take a part of them."""
    model.eval()
    total, count = validation(comm.rank, comm.size)
    model.train()
    facts = torch.tensor([total, float(count)], dtype=torch.float64)
    comm.all_reduce(facts)
    return float(facts[0] / facts[1])


def seed_step(seed: int, step: int, rank: int) -> None:
    """This will seed Python's, NumPy's and torch's generators for one step of one rank."""
    number = (seed * 1_000_003 + step) * 4099 + rank
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number % 2**63)
