"""The training loop: data-parallel over the ranks of a communicator.

One process runs the same code.

It yields each batch of a step to the script, and does the rest.  Does not know the backend, the format of checkpoints, or
the model.
Rules:
- The gradient equals that of one process on the same global batch: each rank's mean loss is weighted by its samples.
- A step depends only on the checkpoint's tensors and on (seed, step, rank): random numbers are seeded for each step, and
  samples are addressed by index.  So a run that was killed continues bit for bit.
- In each step the ranks agree whether to stop, and what the next checkpoint is made of.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.batch import Batch, Passes, Phases, StepBatch, Validation, pieces_of, validation_loss
from hpctrain.checkpoint.manifest import CheckpointFacts
from hpctrain.checkpoint.writing.gradient_log import GradientLog, own_of_first
from hpctrain.checkpoint.writing.maker import CheckpointReport
from hpctrain.checkpoint.writing.snapshot import State, share_of
from hpctrain.checkpoint.writing.writer import CheckpointWriter, Interval, NextCheckpoint
from hpctrain.comm import Communicator
from hpctrain.data import shares
from hpctrain.data.prefetch import Prefetcher, Span
from hpctrain.env import StopRequest
from hpctrain.errors import PeerLost, TrainError
from hpctrain.exchange.agreement import Replicas
from hpctrain.exchange.balance import Balance, RankTimes, TimesSinceMeeting
from hpctrain.exchange.buckets import GradientBuckets
from hpctrain.exchange.sync import LocalSteps, Sync
from hpctrain.optim.adamw import clip_factor, multiply
from hpctrain.optim.precision import LossScale, Precision, loss_scale_for
from hpctrain.optim.torch_optim import Optimizer, TorchSchedule
from hpctrain.optim.zero import ShardedOptimizer
from hpctrain.settings import TrainSettings
from hpctrain.values import travels

# With a target time, so many steps are measured before the number of steps is fixed.
MEASURED_STEPS = 20


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSetup:
    """The parts that a loop works with, once its ranks have met and have the same state."""

    model: torch.nn.Module
    optimizer: Optimizer
    validation: Validation | None = None
    settings: TrainSettings
    comm: Communicator
    progress: TrainingProgress  # the loop advances it
    identity: RunIdentity
    sync: Sync
    writer: CheckpointWriter | None = None  # None: this rank writes nothing
    writes_own_part: bool = False  # every rank has a writer, which writes a part of each checkpoint
    feed: Prefetcher | None = None
    on_step: Callable[[StepReport], None]
    profiler: StepProfiler
    interval: Interval
    schedule: TorchSchedule | None = None  # the script's own, which then sets the learning rate


class TrainingLoop:
    """One run of a task, from `progress` to its end or a stop signal."""

    def __init__(self, setup: LoopSetup) -> None:
        """Prepare the loop.

        Raises:
            TrainError: the number of share weights is not the number of ranks.
        """
        settings, comm, model = setup.settings, setup.comm, setup.model
        self._schedule = setup.schedule
        if setup.schedule is not None and setup.progress.lr_schedule is not None:
            setup.schedule.load(setup.progress.lr_schedule)
        self._model, self._optimizer, self._validation = model, setup.optimizer, setup.validation
        self._settings, self._comm, self._identity = settings, comm, setup.identity
        self.progress, self.profiler = setup.progress, setup.profiler
        self._writer, self._feed, self._on_step = setup.writer, setup.feed, setup.on_step
        self._sync, self._buckets = setup.sync, setup.sync.buckets
        self._exchanged_bytes = sum(flat.nbytes for flat in self._buckets.flats) if comm.size > 1 else 0
        self._phases, self._passes = Phases(model), Passes(model.parameters())
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._replicas = Replicas(model, comm)
        weights = settings.weights or (1.0,) * comm.size
        if len(weights) != comm.size:
            raise TrainError(f"cannot divide the batch: {len(weights)} share weights given for {comm.size} ranks")
        self._counts = shares(settings.batch, weights)  # of a full batch
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._balance = Balance(settings.batch, self._counts) if settings.balance and comm.size > 1 else None
        self._recent_s: list[float] = []
        self.late_reports: list[CheckpointReport] = []  # of checkpoints that ended after the last step
        self._due = self._validation_due = False
        self.changing = False  # ended because the group of ranks changes
        self.ended = False  # by the script, or early
        self.left = False  # because all ranks that had samples in a step have left it
        self._under_way: StepBatch | None = None
        self._times = TimesSinceMeeting()
        self._writes_own_part, self._interval = setup.writes_own_part, setup.interval
        self._step_s = 0.0
        self._log = self._gradient_log()
        if self._writer is not None and self._interval.wanted:
            self._writer.prepare(self._state())

    def steps(self, stop: StopRequest) -> Iterator[Batch]:
        """Yield batches until the end or a stop signal, then publish the state.

        The loop also ends when the group of ranks changes; then another loop continues.

        Raises:
            PeerLost: a rank is lost; `progress` and the tensors are those of the last step taken.
        """
        stopped = self.ended = self._is_out_of_patience and not self.finished
        try:
            while not stopped and not self.finished and not self.changing:
                started_s = time.perf_counter()
                self.profiler.step_begins()
                step = self._under_way = self._begin()
                self._phases.begin()
                for batch in step.pieces:
                    self._buckets.held = batch is not step.pieces[-1]
                    with self._settings.precision.autocast(self._device):
                        yield batch
                    if batch.loss is None:
                        raise TrainError(f"cannot take step {batch.step}: batch.backward(loss) was not called")
                stopped = self._take_step(step, stop, started_s)
                if (trace := self.profiler.step_ended()) is not None:
                    print(f"profile: rank {self._comm.rank} wrote {trace}", flush=True)
        except PeerLost:
            self._replicas.put_back()
            raise
        finally:
            self._phases.close()
            self._passes.close()
            self._buckets.close()
            if self._feed is not None:
                self._feed.close()
        self.changing = self.changing and not stopped and not self.finished
        if not self.changing and not self.left:
            self._publish_last()

    def leave(self) -> None:
        """Tell the other ranks at the end of the step that this rank has left the loop.

        Raises:
            TrainError: other ranks have samples in the step, and take it.
        """
        assert self._under_way is not None
        if self._sync.local is None:
            self._buckets.exchange()
        self._agree(self._under_way, None, (0.0, 0.0, 0.0))

    @property
    def keeps_gradients(self) -> bool:
        """Whether this rank logs the gradients of each step for checkpoints."""
        return self._log is not None

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        total = self.progress.total_steps
        return total is not None and self.progress.step >= total

    def _begin(self) -> StepBatch:
        """Prepare a step: seed random numbers, zero gradients, choose this rank's samples."""
        progress, settings = self.progress, self._settings
        seed_step(settings.seed, progress.step, self._comm.rank)
        self._buckets.zero()
        step = self._step_at(progress.step, progress.next_sample)
        spans = self._spans(step)
        if self._feed is not None:
            self._feed.expect(spans + self._later_spans(step, self._feed.ahead))
        # Between exchanges of local steps, a rank moves by the mean over its own samples.
        whole = step.size if self._sync.local is None else step.counts[step.rank]
        scale = progress.loss_scale.value / max(1, whole)
        load = self._feed.take if self._feed is not None else None
        step.pieces += [Batch(low, high, step.number, (high - low) * scale, load) for low, high in spans]
        for piece in step.pieces:
            piece.phases, piece.passes = self._phases, self._passes
        return step

    def _step_at(self, number: int, low: int) -> StepBatch:
        """Return the step after `number` steps, if shares do not change."""
        low, size = self._settings.batches.span(number, low)
        counts = self._counts if size == self._settings.batch else shares(size, self._counts)
        return StepBatch(number=number + 1, low=low, counts=counts, rank=self._comm.rank)

    def _spans(self, step: StepBatch) -> list[Span]:
        return pieces_of(*step.span(), self._settings.micro_batch)

    def _later_spans(self, step: StepBatch, pieces: int) -> list[Span]:
        """Return the samples of this rank in the steps after this one, in at most `pieces` spans."""
        spans: list[Span] = []
        total = self.progress.total_steps
        for _ in range(pieces):
            if len(spans) >= pieces or step.number == total:
                break
            step = self._step_at(step.number, step.low + step.size)
            spans += self._spans(step)
        return spans[:pieces]

    def _take_step(self, batch: StepBatch, stop: StopRequest, started_s: float) -> bool:
        """Exchange gradients, move the weights and report.

        Return whether any rank was asked to stop.
        """
        own_s = time.perf_counter() - started_s
        data_s, forward_s, backward_s = self._phases.end()
        lr = self._lr(batch)
        local, met = self._sync.local, self._meets_after(batch.number)
        comm_s, waited_s = self._buckets.exchange() if local is None else (0.0, 0.0)
        self._times.add(own_s, data_s, waited_s)
        loss, stops, changes, times = batch.loss, False, [], None  # of this rank's samples, until the ranks meet
        met_at_s = time.perf_counter()
        if met:
            loss, stops, times = self._agree(batch, stop, self._times.means())
            if self.left:
                return True
            self._times = TimesSinceMeeting()
            changes = [self._rebalance(batch, list(times.own_s)), self._sync.measured(own_s, waited_s)]
        elif not math.isfinite(loss):
            self._refuse_loss(batch, loss, alone=True)
        grad_norm, skipped = self._move(batch, lr)
        if local is not None and met:
            comm_s = self._exchange_local(local, batch.part)
            waited_s = time.perf_counter() - met_at_s  # the other ranks learn it at the next meeting
            self._times.wait_s = waited_s
        step_s = self._advance(batch, started_s)
        report = StepReport(
            step=self.progress.step,
            total_steps=self.progress.total_steps,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            samples_per_s=batch.size / step_s,
            step_s=step_s,
            comm_s=comm_s,
            shares=batch.counts,
            loss_scale=self.progress.loss_scale.value if self.progress.loss_scale.dynamic else None,
            data_s=data_s,
            forward_s=forward_s,
            backward_s=backward_s,
            wait_s=waited_s,
            exchanged_bytes=self._exchanged_bytes if met else 0,
            samples=self.progress.next_sample,
            times=times,
            changed="; ".join(filter(None, [skipped, *changes])),
        )
        return self._after_step(batch, report, met=met) or stops

    def _lr(self, batch: StepBatch) -> float:
        if self._schedule is not None:
            return self._schedule.lr
        return self._settings.lr_at(self.progress.step, batch.size, self.progress.total_steps)

    def _advance(self, batch: StepBatch, started_s: float) -> float:
        """Count the step as taken, and return its seconds."""
        self.progress.step += 1
        self.progress.next_sample = batch.low + batch.size
        self._step_s = time.perf_counter() - started_s
        if self.progress.total_steps is None:
            self._recent_s.append(self._step_s)
        return self._step_s

    def _after_step(self, batch: StepBatch, report: StepReport, *, met: bool) -> bool:
        """Validate and checkpoint if due, and report the step.

        Return whether validation ends the run.
        """
        ends = False
        try:
            if met:
                self._fix_total()
            self._validation_due |= self._validates_after(batch)
            val_loss = self._validate() if met else None
            if val_loss is not None:
                report = replace(report, val_loss=val_loss, is_best=self._note_validation(val_loss))
                ends = self.ended
                self._replicas.settle(batch.counts)  # validation may have changed buffers
            checkpoint, copy_s = self._checkpoint()
            total_steps = self.progress.total_steps
            report = replace(report, checkpoint=checkpoint, checkpoint_copy_s=copy_s, total_steps=total_steps)
        finally:  # the step was taken, even if a rank is lost after it
            self._on_step(report)
        return ends

    def _move(self, batch: StepBatch, lr: float) -> tuple[float, str]:
        """Move the weights if the gradients are finite.

        Return their norm, and a note on the loss scale.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            raise TrainError(
                f"cannot take step {batch.number}: weights that were frozen at the start of the loop are trainable now; let "
                "run.stop() end this run there, and train them in a new run with another --out, from this run's model"
            )
        progress, scale = self.progress, self.progress.loss_scale.value
        grad_norm, factor = clip_factor(self._buckets.squares(), self._settings.clip_norm, scale)
        finite = math.isfinite(grad_norm)
        try:
            note = progress.loss_scale.learn(finite)
        except TrainError as error:
            raise TrainError(f"cannot take step {batch.number}: {error}") from None
        if finite:
            number = batch.number - progress.skipped
            if self._log is not None:
                self._log.note(number, lr, factor)
            multiply(self._buckets.flats, factor)
            self._optimizer.step(number, lr)
            if self._schedule is not None:
                self._schedule.stepped()
                progress.lr_schedule = self._schedule.state()
        else:
            progress.skipped += 1
        if scale != progress.loss_scale.value:
            self._buckets.rescale(progress.loss_scale.value / scale)
        return grad_norm, note

    def _meets_after(self, step: int) -> bool:
        """Return whether ranks agree after this step.

        After each step, or when local steps are exchanged.
        """
        local, total = self._sync.local, self.progress.total_steps
        return local is None or local.due(step) or step == total

    def _exchange_local(self, local: LocalSteps, part: float) -> float:
        started_s = time.perf_counter()
        local.exchange(part)
        return time.perf_counter() - started_s

    def _rebalance(self, batch: StepBatch, each_s: list[float]) -> str:
        """Divide the next full batch by the seconds that ranks took for this one; return a note."""
        if self._balance is None or batch.size != self._settings.batch or self.profiler.is_on:
            return ""
        note = self._balance.note(each_s)
        self._counts = list(self._balance.counts)
        return note

    def _agree(
        self, batch: StepBatch, stop: StopRequest | None, own: tuple[float, float, float]
    ) -> tuple[float, bool, RankTimes]:
        """Exchange the loss and requests to stop.

        Return the global loss, whether to stop, the ranks' times.

        `own`: seconds of this rank's own work, data and wait.  `stop` is None if this rank has left the step.
        """
        local_loss, size, rank = batch.loss * batch.part, self._comm.size, self._comm.rank
        facts = torch.zeros(4 + 4 * size, dtype=torch.float64)
        facts[0], facts[1] = local_loss, float(self._comm.changing)
        if stop is not None:
            facts[2], facts[3] = float(stop.received is not None), float(stop.by_script)
        facts[4 + 4 * rank : 8 + 4 * rank] = torch.tensor([*own, 0 if stop is not None else batch.number])
        facts = torch.cat([facts, self._replicas.changes()])
        self._comm.all_reduce(facts)
        loss, changes, stops, ends, *each = facts[: 4 + 4 * size].tolist()
        if any(each[3::4]):
            self._leave_too(batch, [int(step) for step in each[3::4]])
        self._replicas.follow(facts[4 + 4 * size :], batch.counts)
        self.changing, self.ended = changes > 0, ends > 0
        if not math.isfinite(loss) and not self.left:
            self._refuse_loss(batch, local_loss)
        times = RankTimes(own_s=tuple(each[::4]), data_s=tuple(each[1::4]), wait_s=tuple(each[2::4]))
        return loss, stops + ends > 0, times

    def _leave_too(self, batch: StepBatch, left: list[int]) -> None:
        """Leave the loop if all ranks with samples in the step left it.

        `left`: per rank the step, or 0.

        Raises:
            TrainError: some did not leave it, or not in the same step.
        """
        took = {rank: left[rank] for rank, count in enumerate(batch.counts) if count}
        if len(set(took.values())) > 1:
            ranks = [f"rank {rank} {f'left the loop in step {at}' if at else 'did not'}" for rank, at in took.items()]
            raise TrainError(
                f"cannot take step {batch.number}: {', '.join(ranks)}; all ranks have to leave it in the same step, or "
                "one of them calls run.stop(), which ends it after the step on all of them, with a checkpoint"
            )
        self.left = True

    def _refuse_loss(self, batch: StepBatch, local_loss: float, *, alone: bool = False) -> None:
        """Raise TrainError with the ranks and samples of a loss that is not finite.

        All ranks call it, or one `alone`.
        """
        mine = (local_loss, [(p.low, p.high) for p in batch.pieces if not math.isfinite(p.loss or 0.0)])
        spans: list[tuple[float, list[Span]]] = [mine] if alone else self._comm.all_gather_object(mine)
        bad = [
            f"rank {rank}, in its samples " + ", ".join(f"{low} to {high}" for low, high in pieces)
            for rank, (part, pieces) in enumerate(spans, self._comm.rank if alone else 0)
            if not math.isfinite(part)
        ]
        where = "; ".join(bad) or "the sum over the ranks"
        raise TrainError(
            f"cannot continue: the loss is not finite at step {batch.number} (samples {batch.low} to "
            f"{batch.low + batch.size}) on {where}; try a lower learning rate"
        )

    def _fix_total(self) -> None:
        """Fix the number of steps by rank 0's median step, if a target time is given."""
        if self.progress.total_steps is not None or self._settings.target_s is None:
            return
        if len(self._recent_s) < MEASURED_STEPS:
            return
        settled_s = sorted(self._recent_s[MEASURED_STEPS // 2 :])  # the first steps fill caches
        median_s = settled_s[len(settled_s) // 2]
        chosen = torch.tensor([self.progress.step + int(self._settings.target_s / median_s)], dtype=torch.int64)
        self._comm.broadcast(chosen)
        self.progress.total_steps = int(chosen)

    def _checkpoint(self) -> tuple[CheckpointReport | None, float]:
        """Begin a checkpoint if one is due and none is being written; else it stays due."""
        report = self._writer.collect() if self._writer is not None else None
        if report is not None:
            self._interval.learn(self._step_s, report.copy_s, report.write_s)
        self._due |= self._interval.due(self.progress.step)
        if not self._due or not self._meets_after(self.progress.step):
            return report, 0.0
        content = self._agreed(self._writer.next_content() if self._writer is not None else NextCheckpoint.NOTHING)
        if content is NextCheckpoint.NOTHING:
            return report, 0.0
        self._due = False
        copy_s = self._begin_checkpoint(content)
        if self._interval.measured:
            steps = torch.tensor([self._interval.steps()])
            if self._all_write:
                self._comm.broadcast(steps)
            note = self._interval.next_after(self.progress.step, int(steps))
            if note and self._comm.rank == 0:
                print(note, flush=True)
        return report, copy_s

    def _gradient_log(self) -> GradientLog | None:
        """Return a log of gradients if all ranks take the same ones and it lasts long enough."""
        # The script's own schedule may change more than the learning rate, so its steps could not be replayed from the log.
        if self._sync.local is not None or not self._interval.wanted or self._writer is None or self._schedule:
            return None
        comm = self._comm if self._writes_own_part else None
        every = self._settings.checkpoint_every or 1
        log = gradient_log(self._model, self._optimizer, self._buckets, self.progress.step, every, comm)
        self._writer.follow(log)
        return log

    @property
    def _all_write(self) -> bool:
        """Whether every rank takes part in each checkpoint.

        It writes a part, or has a part to be gathered.
        """
        return self._writes_own_part or isinstance(self._optimizer, ShardedOptimizer)

    def _agreed(self, wanted: NextCheckpoint) -> NextCheckpoint:
        """Return the agreed content of the next checkpoint."""
        if self._writes_own_part:  # each rank writes a part
            each = torch.zeros(self._comm.size, dtype=torch.int64)
            each[self._comm.rank] = wanted.value
            self._comm.all_reduce(each)
            return NextCheckpoint(int(each.max()) if int(each.min()) else 0)
        if self._all_write:
            agreed = torch.tensor([wanted.value])
            self._comm.broadcast(agreed)
            return NextCheckpoint(int(agreed))
        return wanted

    def _begin_checkpoint(self, content: NextCheckpoint) -> float:
        """Hand the state to the writer, and return the seconds that this took.

        Ranks with a part of it call it too.
        """
        started_s = time.perf_counter()
        state = self._state() if content is not NextCheckpoint.LOG else None
        if self._writer is not None:
            self._writer.begin(state, self._facts(), base=self._writes_own_part and content is NextCheckpoint.BASE)
        return time.perf_counter() - started_s

    def _publish_last(self) -> None:
        """Publish the current state before the ranks leave."""
        self._replicas.settle(self._counts)  # validation may have changed buffers
        writer, step = self._writer, self.progress.step
        reports = [writer.wait()] if writer is not None else []
        missing = writer is not None and writer.last_step != step and self._interval.wanted
        content = self._agreed(writer.next_content() if writer is not None and missing else NextCheckpoint.NOTHING)
        if content is not NextCheckpoint.NOTHING:
            self._begin_checkpoint(content)
            reports += [writer.wait()] if writer is not None else []
        if writer is not None:
            writer.close()
            self.late_reports = [report for report in reports if report is not None]
            if self.late_reports and writer.last_step != step:
                raise TrainError(f"cannot save the last state (step {step}): {self.late_reports[-1].error}")
        self._comm.barrier()

    def _state(self) -> State:
        comm = self._comm if self._writes_own_part else None
        return state_to_write(self._model, self._optimizer, self._sync.tensors(), comm)

    def _facts(self) -> CheckpointFacts:
        return CheckpointFacts(
            step=self.progress.step,
            attempt=self._identity.attempt,
            generation=self._identity.generation,
            world=self._comm.size,
            job=self._identity.job,
            written_at_s=round(time.time(), 3),
            state=self.progress.to_state(self._settings) | {"exchange": self._comm.plan()},
        )

    def _validate(self) -> float | None:
        """Return the validation loss if it is due.

        With local steps this waits until the ranks are equal.
        """
        if self._validation is None or not self._validation_due:
            return None
        self._validation_due = False
        with self._settings.precision.autocast(self._device):
            return validation_loss(self._model, self._validation, self._comm)

    def _note_validation(self, loss: float) -> bool:
        """Record a validation, end the training without improvement for long.

        Return whether it is the best.
        """
        progress = self.progress
        best = progress.validated(loss)
        if self._schedule is not None:
            self._schedule.validated(loss)
            progress.lr_schedule = self._schedule.state()
        self.ended |= self._is_out_of_patience
        return best

    @property
    def _is_out_of_patience(self) -> bool:
        patience = self._settings.patience
        return patience is not None and self.progress.validations_since_best >= patience

    @property
    def why_ended(self) -> str:
        """The reason why the training ended before its last step, other than a signal."""
        progress = self.progress
        if not self._is_out_of_patience:
            return f"ended by the script at step {progress.step}"
        return (
            f"stopped early at step {progress.step}: {progress.validations_since_best} validations without a lower loss than "
            f"{progress.best_loss:.4f} at step {progress.best_step}"
        )

    def _validates_after(self, batch: StepBatch) -> bool:
        step, every = self.progress.step, self._settings.eval_every
        if every is not None:
            return every > 0 and (step % every == 0 or step == 1 or self.finished)
        samples = self._settings.batches.epoch_samples
        assert samples is not None  # epochs are counted
        return self.finished or self.progress.next_sample // samples > batch.low // samples


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed Python's, NumPy's and torch's generators for one step of one rank."""
    number = (seed * 1_000_003 + step) * 4099 + rank
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number % 2**63)


def live_tensors(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return every tensor that a restart needs, by name.

    Weights, buffers and the optimizer's moments.
    """
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return weights | {f"optim.{name}": tensor for name, tensor in optimizer.tensors().items()}


def state_to_write(
    model: torch.nn.Module, optimizer: Optimizer, more: Mapping[str, torch.Tensor], comm: Communicator | None
) -> State:
    """Return the tensors that this rank writes.

    Its part if ranks write together, else (`comm` None) all.

    Ranks that have a part of the optimizer's state call it together.
    """
    if comm is None:
        return live_tensors(model, optimizer) | dict(more)
    if isinstance(optimizer, ShardedOptimizer):
        shared = {f"model.{name}": tensor for name, tensor in model.state_dict().items()} | dict(more)
        own = {f"optim.{name}": piece for name, piece in optimizer.pieces().items()}
    else:
        shared, own = live_tensors(model, optimizer) | dict(more), {}
    return {**share_of(shared, comm.rank, comm.size, own_of_first(model)), **own}


def gradient_log(
    model: torch.nn.Module,
    optimizer: Optimizer,
    buckets: GradientBuckets,
    step: int,
    every: int,
    comm: Communicator | None,
) -> GradientLog | None:
    """Return a log of this rank's part of gradients, if at least `every` steps fit into it.

    `comm` as above.
    """
    if any(flat.is_complex() for flat in buckets.flats):
        return None  # replay computes with real numbers only
    grads_bytes = sum(flat.nbytes for flat in buckets.flats)
    state_bytes = sum(tensor.nbytes for tensor in model.state_dict().values()) + 2 * grads_bytes
    rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
    log = GradientLog(model, buckets.groups, buckets.flats, step, state_bytes, optimizer.settings(), rank, size)
    return log if grads_bytes and log.most_steps >= every else None


SKIPPED_STEPS = 3


class StepProfiler:
    """Traces `steps` steps of this rank, after the first `SKIPPED_STEPS`; 0: no step."""

    def __init__(self, steps: int, path: Path) -> None:
        self._left = steps
        self._skip = SKIPPED_STEPS
        self._path = path
        self._profiler: Any = None

    @property
    def is_on(self) -> bool:
        """Whether the current step is traced, which makes it slower."""
        return self._profiler is not None

    def step_begins(self) -> None:
        """Start the trace, if this is its first step."""
        if not self._left or self._profiler is not None:
            return
        if self._skip:
            self._skip -= 1
            return
        import torch.profiler  # noqa: PLC0415 (only who wants it waits for its import)

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def step_ended(self) -> Path | None:
        """Write the trace after its last step; return its path if that was now, else None."""
        if self._profiler is None:
            return None
        self._left -= 1
        return self._write() if self._left <= 0 else None

    def _write(self) -> Path | None:
        profiler, self._profiler, self._left = self._profiler, None, 0
        if profiler is None:
            return None
        profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._path))
        return self._path

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Write the incomplete trace when the steps end, or an error ends them."""
        try:
            yield
        finally:
            self._write()
