"""The training loop: data-parallel over the ranks of a communicator; one rank is the same code.

It gives each step's batch away to be learned from; the rest is here.  Does not know the backend, nor how a checkpoint is
stored, nor what is trained.
Rules:
- The gradient equals that of one process on the same global batch: each rank's mean loss is weighted by its samples.
- Everything that a step depends on is the checkpoint's tensors and (seed, step, rank): random numbers are seeded anew
  for each step, samples are addressed by index.  So a run that was killed goes on bit for bit.
- Ranks agree at each step whether to stop, and what the next checkpoint is made of.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from hpctrain.batch import Batch, Passes, Phases, StepBatch, Validation, pieces_of, validation_loss
from hpctrain.checkpoint import CheckpointFacts, CheckpointReport, CheckpointWriter, NextCheckpoint
from hpctrain.checkpoint.interval import Interval
from hpctrain.checkpoint.writing.gradient_log import GradientLog, own_of_first
from hpctrain.checkpoint.writing.snapshot import State, share_of
from hpctrain.comm import Communicator
from hpctrain.data import shares
from hpctrain.data.prefetch import Prefetcher, Span
from hpctrain.errors import PeerLost, TrainError
from hpctrain.exchange.balance import Balance
from hpctrain.exchange.buckets import GradientBuckets
from hpctrain.exchange.replicas import Replicas
from hpctrain.exchange.scaling import RankTimes, TimesSinceMeeting
from hpctrain.exchange.sync import LocalSteps, Sync
from hpctrain.optim.adamw import clip_factor, multiply
from hpctrain.optim.torch_optim import Optimizer, TorchSchedule
from hpctrain.optim.zero import ShardedOptimizer
from hpctrain.report.profiling import StepProfiler
from hpctrain.report.progress import RunIdentity, StepReport, TrainingProgress
from hpctrain.settings import TrainSettings
from hpctrain.signals import StopRequest

# With a target time, this many steps are measured before the number of steps is fixed.
MEASURED_STEPS = 20


class TrainingLoop:
    """One run of a task, from `progress` to its end or a stop signal."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        validation: Validation | None,
        settings: TrainSettings,
        comm: Communicator,
        progress: TrainingProgress,
        identity: RunIdentity,
        sync: Sync,
        writer: CheckpointWriter | None,
        feed: Prefetcher | None,
        on_step: Callable[[StepReport], None],
        profile: StepProfiler,
        shared: bool = False,
        interval: Interval | None = None,
        schedule: TorchSchedule | None = None,
    ) -> None:
        """`writer`: None on ranks that write nothing; `shared`: every rank has one, which writes a part.

        `schedule`: the script's own, which then sets the learning rate.
        """
        self._schedule = schedule
        if schedule is not None and progress.lr_schedule is not None:
            schedule.load(progress.lr_schedule)
        self._model, self._optimizer, self._validation = model, optimizer, validation
        self._settings, self._comm = settings, comm
        self.progress = progress
        self._identity = identity
        self._writer = writer
        self._on_step = on_step
        self._feed = feed
        self._sync = sync
        self._buckets = sync.buckets
        self._exchanged_bytes = sum(flat.nbytes for flat in sync.buckets.flats) if comm.size > 1 else 0
        self._phases = Phases(model)
        self._passes = Passes(model.parameters())
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._replicas = Replicas(model, comm)
        self.profile = profile
        weights = settings.weights or (1.0,) * comm.size
        if len(weights) != comm.size:
            raise TrainError(f"cannot divide the batch: {len(weights)} share weights given for {comm.size} ranks")
        self._counts = shares(settings.batch, weights)  # of a full batch
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._balance = Balance(settings.batch, self._counts) if settings.balance and comm.size > 1 else None
        self._recent_s: list[float] = []
        self.late_reports: list[CheckpointReport] = []  # of checkpoints that ended after the last step
        self._due = self._validation_due = False
        self.changing = False  # ended because others are to take part
        self.ended = False  # by the word of a script, or early
        self.left = False  # because all who had samples in a step have left it
        self._under_way: StepBatch | None = None
        self._apart = TimesSinceMeeting()
        self._shared = shared
        self._interval = interval or Interval(settings.checkpoint_every)
        self._step_s = 0.0
        self._log = self._gradient_log()
        if writer is not None and self._interval.wanted:
            writer.prepare(self._state())

    def steps(self, stop: StopRequest) -> Iterator[Batch]:
        """Train to the end, or until a stop signal, and publish the state; what it gives is to be learned from.

        Or until other ranks are to take part: then another loop goes on with them.

        Raises:
            PeerLost: a rank is gone; `progress` and the tensors are those of the last step that was taken.
        """
        stopped = self.ended = self._is_out_of_patience and not self.finished
        try:
            while not stopped and not self.finished and not self.changing:
                started_s = time.perf_counter()
                self.profile.step_begins()
                step = self._under_way = self._begin()
                self._phases.begin()
                for batch in step.pieces:
                    self._buckets.held = batch is not step.pieces[-1]
                    with self._settings.precision.autocast(self._device):
                        yield batch
                    if batch.loss is None:
                        raise TrainError(f"cannot take step {batch.step}: batch.backward(loss) was not called")
                stopped = self._take_step(step, stop, started_s)
                if (trace := self.profile.step_ended()) is not None:
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
        """Tell the others that this rank's script has left the step that was under way, when they come to its end.

        Raises:
            TrainError: some have samples in it, and take it.
        """
        assert self._under_way is not None
        if self._sync.local is None:
            self._buckets.exchange()
        self._agree(self._under_way, None, (0.0, 0.0, 0.0))

    @property
    def keeps_gradients(self) -> bool:
        """Whether this rank keeps the gradients of each step, for a checkpoint."""
        return self._log is not None

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        total = self.progress.total_steps
        return total is not None and self.progress.step >= total

    def _begin(self) -> StepBatch:
        """Make ready for a step: its random numbers, zero gradients, and this rank's samples."""
        progress, settings = self.progress, self._settings
        seed_step(settings.seed, progress.step, self._comm.rank)
        self._buckets.zero()
        step = self._step_at(progress.step, progress.next_sample)
        spans = self._spans(step)
        if self._feed is not None:
            self._feed.expect(spans + self._later_spans(step, self._feed.ahead))
        # With local steps this rank goes its own way meanwhile, by the mean of its own samples.
        whole = step.size if self._sync.local is None else step.counts[step.rank]
        scale = progress.loss_scale.value / max(1, whole)
        load = self._feed.take if self._feed is not None else None
        step.pieces += [Batch(low, high, step.number, (high - low) * scale, load) for low, high in spans]
        for piece in step.pieces:
            piece.phases, piece.passes = self._phases, self._passes
        return step

    def _step_at(self, number: int, low: int) -> StepBatch:
        """The step after so many others, if shares stay as they are."""
        low, size = self._settings.batches.span(number, low)
        counts = self._counts if size == self._settings.batch else shares(size, self._counts)
        return StepBatch(number=number + 1, low=low, counts=counts, rank=self._comm.rank)

    def _spans(self, step: StepBatch) -> list[Span]:
        return pieces_of(*step.span(), self._settings.micro_batch)

    def _later_spans(self, step: StepBatch, pieces: int) -> list[Span]:
        """The samples that this rank takes after this step, in so many steps or pieces."""
        spans: list[Span] = []
        total = self.progress.total_steps
        for _ in range(pieces):
            if len(spans) >= pieces or step.number == total:
                break
            step = self._step_at(step.number, step.low + step.size)
            spans += self._spans(step)
        return spans[:pieces]

    def _take_step(self, batch: StepBatch, stop: StopRequest, started_s: float) -> bool:
        """Exchange gradients, move the weights and report; returns whether any rank was asked to stop."""
        progress, settings = self.progress, self._settings
        own_s = time.perf_counter() - started_s
        data_s, forward_s, backward_s = self._phases.end()
        if self._schedule is not None:
            lr = self._schedule.lr
        else:
            lr = settings.lr_at(progress.step, batch.size, progress.total_steps)
        local, met = self._sync.local, self._meets_after(batch.number)
        comm_s, waited_s = self._buckets.exchange() if local is None else (0.0, 0.0)
        self._apart.add(own_s, data_s, waited_s)
        loss, stops, said, times = batch.loss, False, [], None  # until they meet: of this rank's samples
        met_at_s = time.perf_counter()
        if met:
            loss, stops, times = self._agree(batch, stop, self._apart.means())
            if self.left:
                return True
            self._apart = TimesSinceMeeting()
            said = [self._rebalance(batch, list(times.own_s)), self._sync.measured(own_s, waited_s)]
        elif not math.isfinite(loss):
            self._refuse_loss(batch, loss, alone=True)
        grad_norm, skipped = self._move(batch, lr)
        if local is not None and met:
            comm_s = self._meet(local, batch.part)
            waited_s = time.perf_counter() - met_at_s  # for the other ranks, too; they hear of it when they meet next
            self._apart.wait_s = waited_s
        progress.step += 1
        progress.next_sample = batch.low + batch.size
        step_s = time.perf_counter() - started_s
        self._step_s = step_s
        if progress.total_steps is None:
            self._recent_s.append(step_s)
        report = StepReport(
            step=progress.step,
            total_steps=progress.total_steps,
            loss=loss,
            val_loss=None,
            lr=lr,
            grad_norm=grad_norm,
            samples_per_s=batch.size / step_s,
            step_s=step_s,
            comm_s=comm_s,
            checkpoint=None,
            checkpoint_copy_s=0.0,
            shares=batch.counts,
            loss_scale=progress.loss_scale.value if progress.loss_scale.dynamic else None,
            data_s=data_s,
            forward_s=forward_s,
            backward_s=backward_s,
            wait_s=waited_s,
            exchanged_bytes=self._exchanged_bytes if met else 0,
            samples=progress.next_sample,
            times=times,
            changed="; ".join(filter(None, [skipped, *said])),
        )
        try:
            if met:
                self._fix_total()
            self._validation_due |= self._validates_after(batch)
            val_loss = self._validate() if met else None
            if val_loss is not None:
                report = replace(report, val_loss=val_loss, is_best=self._note_validation(val_loss))
                stops |= self.ended
                self._replicas.settle(batch.counts)  # validation may have changed something
            checkpoint, copy_s = self._checkpoint()
            report = replace(report, checkpoint=checkpoint, checkpoint_copy_s=copy_s, total_steps=progress.total_steps)
        finally:  # it was taken, even if a rank is lost in what comes after it
            self._on_step(report)
        return stops

    def _move(self, batch: StepBatch, lr: float) -> tuple[float, str]:
        """Move the weights by the gradients, if these are finite; returns their norm, and what changes, in words."""
        if any(parameter.requires_grad for parameter in self._frozen):
            raise TrainError(
                f"cannot take step {batch.number}: weights that were frozen when the loop began are to be trained now; let "
                "run.stop() end this run there, and train them in one of its own, with another --out, from its model"
            )
        progress, scale = self.progress, self.progress.loss_scale.value
        grad_norm, factor = clip_factor(self._buckets.squares(), self._settings.clip_norm, scale)
        finite = math.isfinite(grad_norm)
        try:
            said = progress.loss_scale.learn(finite)
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
        return grad_norm, said

    def _meets_after(self, step: int) -> bool:
        """Whether ranks agree after the step of this number: after each, or with local steps when they meet, and at the end."""
        local, total = self._sync.local, self.progress.total_steps
        return local is None or local.due(step) or step == total

    def _meet(self, local: LocalSteps, part: float) -> float:
        started_s = time.perf_counter()
        local.meet(part)
        return time.perf_counter() - started_s

    def _rebalance(self, batch: StepBatch, each_s: list[float]) -> str:
        """Give the next step's samples to the ranks by what each took for this one's, once batches are full."""
        if self._balance is None or batch.size != self._settings.batch or self.profile.is_on:
            return ""
        said = self._balance.note(each_s)
        self._counts = list(self._balance.counts)
        return said

    def _agree(
        self, batch: StepBatch, stop: StopRequest | None, own: tuple[float, float, float]
    ) -> tuple[float, bool, RankTimes]:
        """The global loss, whether any rank was asked to stop, and the seconds of each rank: own work, data, wait.

        `stop`: None if this rank does not take the step, but has left it.
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
            self._part(batch, [int(step) for step in each[3::4]])
        self._replicas.follow(facts[4 + 4 * size :], batch.counts)
        self.changing, self.ended = changes > 0, ends > 0
        if not math.isfinite(loss) and not self.left:
            self._refuse_loss(batch, local_loss)
        times = RankTimes(own_s=tuple(each[::4]), data_s=tuple(each[1::4]), wait_s=tuple(each[2::4]))
        return loss, stops + ends > 0, times

    def _part(self, batch: StepBatch, left: list[int]) -> None:
        """Leave the loop too if all have left it who had samples in the step; `left`: by rank, the step that it left, or 0.

        Raises:
            TrainError: they have not, or not in the same step.
        """
        took = {rank: left[rank] for rank, count in enumerate(batch.counts) if count}
        if len(set(took.values())) > 1:
            said = [f"rank {rank} {f'left the loop in step {at}' if at else 'did not'}" for rank, at in took.items()]
            raise TrainError(
                f"cannot take step {batch.number}: {', '.join(said)}; all ranks have to leave it in the same step, or "
                "one of them calls run.stop(), which ends it after the step on all of them, with a checkpoint"
            )
        self.left = True

    def _refuse_loss(self, batch: StepBatch, local_loss: float, *, alone: bool = False) -> None:
        """Say where the loss is not finite: which ranks, and which of their samples; all ranks call it, or one `alone`."""
        mine = (local_loss, [(p.low, p.high) for p in batch.pieces if not math.isfinite(p.loss or 0.0)])
        spans: list[tuple[float, list[Span]]] = [mine] if alone else self._comm.all_gather_object(mine)
        bad = [
            f"rank {rank}, in its samples " + ", ".join(f"{low} to {high}" for low, high in pieces)
            for rank, (part, pieces) in enumerate(spans, self._comm.rank if alone else 0)
            if not math.isfinite(part)
        ]
        where = "; ".join(bad) or "the sum over the ranks"
        raise TrainError(
            f"cannot go on: the loss is not finite at step {batch.number} (samples {batch.low} to "
            f"{batch.low + batch.size}) on {where}; try a lower learning rate"
        )

    def _fix_total(self) -> None:
        """With a target time, rank 0's measured median decides the number of steps, for all ranks."""
        if self.progress.total_steps is not None or self._settings.target_s is None:
            return
        if len(self._recent_s) < MEASURED_STEPS:
            return
        settled_s = sorted(self._recent_s[MEASURED_STEPS // 2 :])  # the first steps warm caches up
        median_s = settled_s[len(settled_s) // 2]
        chosen = torch.tensor([self.progress.step + int(self._settings.target_s / median_s)], dtype=torch.int64)
        self._comm.broadcast(chosen)
        self.progress.total_steps = int(chosen)

    def _checkpoint(self) -> tuple[CheckpointReport | None, float]:
        """Begin one if it is due and none is in flight; else it stays due for the next step."""
        report = self._writer.collect() if self._writer is not None else None
        if report is not None:
            self._interval.learn(self._step_s, report.copy_s, report.write_s)
        self._due |= self._interval.due(self.progress.step)
        if not self._due or not self._meets_after(self.progress.step):
            return report, 0.0
        wish = self._agreed(self._writer.wish() if self._writer is not None else NextCheckpoint.NOTHING)
        if wish is NextCheckpoint.NOTHING:
            return report, 0.0
        self._due = False
        copy_s = self._begin_checkpoint(wish)
        if self._interval.measured:
            steps = torch.tensor([self._interval.steps()])
            if self._all_write:
                self._comm.broadcast(steps)
            said = self._interval.next_after(self.progress.step, int(steps))
            if said and self._comm.rank == 0:
                print(said, flush=True)
        return report, copy_s

    def _gradient_log(self) -> GradientLog | None:
        """The log of gradients, if ranks take the same ones in every step, and a checkpoint comes before it is too long."""
        # A step of the script's own schedule could not be taken again from the log: it may change more than the learning rate.
        if self._sync.local is not None or not self._interval.wanted or self._writer is None or self._schedule:
            return None
        comm = self._comm if self._shared else None
        every = self._settings.checkpoint_every or 1
        log = gradient_log(self._model, self._optimizer, self._buckets, self.progress.step, every, comm)
        self._writer.follow(log)
        return log

    @property
    def _all_write(self) -> bool:
        """Whether every rank has to do with each checkpoint: writes a part of it, or has one which the first one gathers."""
        return self._shared or isinstance(self._optimizer, ShardedOptimizer)

    def _agreed(self, wish: NextCheckpoint) -> NextCheckpoint:
        """What all ranks that have to know make the next checkpoint of."""
        if self._shared:  # each writes a part of it
            wishes = torch.zeros(self._comm.size, dtype=torch.int64)
            wishes[self._comm.rank] = wish.value
            self._comm.all_reduce(wishes)
            return NextCheckpoint(int(wishes.max()) if int(wishes.min()) else 0)
        if self._all_write:
            said = torch.tensor([wish.value])
            self._comm.broadcast(said)
            return NextCheckpoint(int(said))
        return wish

    def _begin_checkpoint(self, wish: NextCheckpoint) -> float:
        """Have the state as it is now written, and return the seconds that this waited; who has a part of it comes along."""
        started_s = time.perf_counter()
        state = self._state() if wish is not NextCheckpoint.LOG else None
        if self._writer is not None:
            self._writer.begin(state, self._facts(), base=self._shared and wish is NextCheckpoint.BASE)
        return time.perf_counter() - started_s

    def _publish_last(self) -> None:
        """The state as it is now has to be on the share before a rank leaves."""
        self._replicas.settle(self._counts)  # validation may have changed something
        writer, step = self._writer, self.progress.step
        reports = [writer.wait()] if writer is not None else []
        missing = writer is not None and writer.last_step != step and self._interval.wanted
        wish = self._agreed(writer.wish() if writer is not None and missing else NextCheckpoint.NOTHING)
        if wish is not NextCheckpoint.NOTHING:
            self._begin_checkpoint(wish)
            reports += [writer.wait()] if writer is not None else []
        if writer is not None:
            writer.close()
            self.late_reports = [report for report in reports if report is not None]
            if self.late_reports and writer.last_step != step:
                raise TrainError(f"cannot keep the last state (step {step}): {self.late_reports[-1].error}")
        self._comm.barrier()

    def _state(self) -> State:
        comm = self._comm if self._shared else None
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
        """The loss over the validation samples, if it is wanted now; with local steps that waits until the ranks are alike."""
        if self._validation is None or not self._validation_due:
            return None
        self._validation_due = False
        with self._settings.precision.autocast(self._device):
            return validation_loss(self._model, self._validation, self._comm)

    def _note_validation(self, loss: float) -> bool:
        """Count a validation, and end the training if it has been in vain for long; returns whether it is the best so far."""
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
        """Why the training ended before its last step, if it did not stop at a signal."""
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
    """Return every tensor that a restart needs: weights, buffers and the optimizer's moments."""
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return weights | {f"optim.{name}": tensor for name, tensor in optimizer.tensors().items()}


def state_to_write(
    model: torch.nn.Module, optimizer: Optimizer, more: Mapping[str, torch.Tensor], comm: Communicator | None
) -> State:
    """Return what this rank writes: of ranks that write together its part, else (`comm` None) all of it.

    Who has a part of the optimizer's state calls it with the others.
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
    """Make a log of what this rank keeps of gradients, if at least `every` steps have room in it; `comm` as above."""
    if any(flat.is_complex() for flat in buckets.flats):
        return None  # steps are taken again with real numbers
    grads_bytes = sum(flat.nbytes for flat in buckets.flats)
    state_bytes = sum(tensor.nbytes for tensor in model.state_dict().values()) + 2 * grads_bytes
    rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
    log = GradientLog(model, buckets.groups, buckets.flats, step, state_bytes, optimizer.settings(), rank, size)
    return log if grads_bytes and log.most_steps >= every else None
