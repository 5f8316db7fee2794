"""A run of a training script.

Join the ranks, resume from the last checkpoint, give each rank its part of each batch.

    with start(out="run1", epochs=10) as run:
        model = Net().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # or hpctrain.optim.AdamW, which starts faster
        for batch in run.steps(model, optimizer, data=DataLoader(train_set, batch_size=64, shuffle=True)):
            images, names = batch.samples
            batch.backward(F.cross_entropy(model(images), names))
    sys.exit(run.status)

Settings are those of `hpctrain.options`, by name, or `start(options)` with those of `add_options`.  The same code runs
as one process and as many ranks.  Does not know models or data.
Rules: every rank runs the same script; an error on one rank ends all.  `status` is 0 if the training is finished or the
script has ended it, 75 if a signal stopped it with a checkpoint (queue the job again), 1 after an error.
"""

from __future__ import annotations

import argparse
import array
import fcntl
import functools
import io
import itertools
import os
import shutil
import socket
import stat
import sys
import termios
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

import hpctrain.comm
from hpctrain.batch import Batch, MeanLoss, Validation
from hpctrain.checkpoint.encryption import CheckpointKey, checkpoint_key
from hpctrain.checkpoint.manifest import CheckpointFacts, check_key, checkpoint_names
from hpctrain.checkpoint.replay import replay_through
from hpctrain.checkpoint.restore import Replay, RestoredCheckpoint, restore_newest
from hpctrain.checkpoint.writing.files import Claim, claim, write_draft
from hpctrain.checkpoint.writing.group import Endpoint
from hpctrain.checkpoint.writing.local_fallback import bring_host_parts, publish_local_parts
from hpctrain.checkpoint.writing.publish import RetentionPolicy, prune, publish, write_part
from hpctrain.checkpoint.writing.snapshot import TensorSnapshot, layout_of
from hpctrain.checkpoint.writing.writer import CheckpointWriter, Interval, ProcessWriter, claims_at_s
from hpctrain.comm import Communicator, connect
from hpctrain.comm.elastic_group import ElasticCommunicator
from hpctrain.comm.hosts import own_addresses
from hpctrain.data.dataset import Dataset, staged
from hpctrain.data.prefetch import Prefetcher
from hpctrain.data.sources import Source, shares
from hpctrain.data.torchdata import TorchSource, in_order, source_for
from hpctrain.env import StopRequest, job_facts, node_speed, rank_info
from hpctrain.errors import (
    EXIT_FAILED,
    EXIT_REQUEUE,
    CheckpointKeyError,
    MismatchError,
    PeerLost,
    PublishError,
    TrainError,
)
from hpctrain.exchange.agreement import (
    agree,
    announce_end,
    check_replicas,
    data_facts,
    facts_of,
    gather_from_all,
    hand_over,
    hash_of,
)
from hpctrain.exchange.balance import start_weights
from hpctrain.exchange.sync import Sync, make_sync
from hpctrain.heartbeat import Heartbeat
from hpctrain.loop import (
    LoopSetup,
    RunIdentity,
    StepProfiler,
    StepReport,
    TrainingLoop,
    TrainingProgress,
    live_tensors,
    progress_from,
    seed_step,
)
from hpctrain.metrics import check_writers
from hpctrain.optim.precision import Precision, loss_scale_for
from hpctrain.optim.schedule import EpochEnd
from hpctrain.optim.torch_optim import Optimizer, TorchSchedule, guarded, optimizer_for
from hpctrain.optim.zero import ShardedOptimizer, check_elementwise
from hpctrain.options import options_from
from hpctrain.reporter import Goodput, Reporter, ReporterSetup, RunRecord
from hpctrain.settings import (
    DEFAULT_BATCH,
    TrainSettings,
    check_elastic,
    check_options,
    check_own_schedule,
    check_validation,
    settings_of,
)

# ----- the model before the training: checks, recomputing, compiling
# Rules: in place; weights keep their names, so checkpoints fit with and without these options.


def prepare_model(options: argparse.Namespace, model: torch.nn.Module) -> None:
    """Check the model, and apply `--recompute` and `--compile` in place.

    Names of weights stay.

    Raises:
        TrainError: the options do not fit this model or machine, or the model has weights without values.
    """
    _check_weights(model)
    if options.recompute:
        recompute_blocks(model)
    if options.compile:
        compiler = os.environ.get("CXX", "g++")
        on_cpu = next((p.device.type for p in model.parameters()), "cpu") == "cpu"
        if options.compile == "inductor" and on_cpu and shutil.which(compiler) is None:
            raise TrainError(
                f"cannot compile the model: there is no C++ compiler {compiler!r} here; install g++, set CXX, or omit "
                "--compile away"
            )
        model.compile(backend=options.compile)


def _check_weights(model: torch.nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrainError("cannot train this model: it has no weights, or all are frozen (requires_grad is False)")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise TrainError(
                f"cannot train this model: {name} has no shape yet (a lazy module); call the model once on a sample before the "
                "optimizer is made"
            )
        if tensor.is_meta:
            raise TrainError(
                f"cannot train this model: {name} has no values (device meta); call model.to_empty(device=run.device), and "
                "have it initialized, before the optimizer is made"
            )


# ----- activation checkpointing: inner results of the forward pass are computed again in the backward pass
# Knows a model's lists of blocks only.
# Rules: random numbers are the same the second time, so the gradients are the same to the bit.
# Sources: Chen et al., "Training deep nets with sublinear memory cost", 2016; torch.utils.checkpoint.


def recompute_blocks(model: nn.Module) -> int:
    """Recompute each block of the model's outermost lists (ModuleList, Sequential).

    Return their number.

    Raises:
        TrainError: the model has no list of blocks.
    """
    blocks = _blocks(model)
    if not blocks:
        raise TrainError(
            "cannot recompute: the model has no torch.nn.ModuleList or Sequential of blocks; call "
            "hpctrain.run.recompute(module) for each module that the backward pass is to compute again"
        )
    for block in blocks:
        recompute(block)
    return len(blocks)


def recompute(module: nn.Module) -> None:
    """Make the module save only its inputs for the backward pass."""
    forward = module.forward

    @functools.wraps(forward)
    def twice(*inputs: Any, **named: Any) -> Any:
        if module.training and torch.is_grad_enabled():
            return checkpoint(forward, *inputs, use_reentrant=False, **named)
        return forward(*inputs, **named)

    module.forward = twice


def _blocks(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return [child for child in module if any(True for _ in child.parameters())]
    return [block for child in module.children() for block in _blocks(child)]


# ----- errors: print the reason, then end all ranks at once
# Without this the other ranks would wait in a collective for a lost rank.  In a job the scheduler gets the reason too, and
# whether it is a cause or only an echo of another rank's end: hlogs(1) shows the first cause first.


READ_LIMIT_S = 2.0  # the other ranks wait meanwhile


@contextmanager
def all_or_none(comm: Communicator) -> Iterator[None]:
    """Run the body; if it raises, print the reason with the rank's number and end every rank.

    In an interactive interpreter or a notebook with one rank, the caller gets the error.
    """
    if comm.size == 1 and not comm.elastic and is_interactive():
        yield
        return
    try:
        yield
    except SystemExit as exiting:
        status, text = EXIT_FAILED, str(exiting.code)
        if isinstance(exiting.code, int):
            status, text = exiting.code, f"the script ended with status {exiting.code}"
        _print_error(comm, f"{text}\n")
        _report_failure(comm, text, exiting)
        comm.abort(status)
    except KeyboardInterrupt:
        _print_error(comm, "interrupted\n")
        comm.abort(130)
    except TrainError as error:
        _print_error(comm, f"{error}\n")
        _report_failure(comm, str(error), error)
        comm.abort(EXIT_FAILED)
    except Exception as error:  # the other ranks must not wait for this one
        text = traceback.format_exc()
        _print_error(comm, text)
        _report_failure(comm, text, error)
        comm.abort(EXIT_FAILED)


def is_interactive() -> bool:
    """Return whether a user can continue after an error.

    A prompt, a notebook, or not the main thread.
    """
    return (
        hasattr(sys, "ps1") or bool(sys.flags.interactive) or threading.current_thread() is not threading.main_thread()
    )


@contextmanager
def orderly_exit() -> Iterator[list[SystemExit]]:
    """Run the body; the yielded list gets a SystemExit with status 0, 75 or none."""
    found: list[SystemExit] = []
    try:
        yield found
    except SystemExit as exiting:
        if exiting.code not in (None, 0, EXIT_REQUEUE):
            raise
        found.append(exiting)


def report_unmet(environ: Mapping[str, str], error: TrainError) -> None:
    """Report to the scheduler why the ranks could not meet.

    The rank number comes from the launcher.
    """
    with suppress(TrainError):  # the launcher's variables may be the error
        here = rank_info(environ)
        Heartbeat(environ).fail(here.rank, here.world, str(error), echo=False)


def is_echo(error: BaseException) -> bool:
    """Return whether the error is of an exchange, so most likely of a lost rank."""
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(hpctrain.comm.__file__).parent)
    return not isinstance(error, TrainError) and any(frame.filename.startswith(here) for frame in frames)


def wait_until_read(descriptor: int, limit_s: float = READ_LIMIT_S) -> bool:
    """Wait until a reader has taken all output of a pipe, socket or terminal.

    MPICH's launcher ends at once when it is told to abort, and loses output that it has not read yet.  Returns whether all
    output was taken.
    """
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)):
        return True
    request = (
        termios.FIONREAD if stat.S_ISFIFO(mode) else termios.TIOCOUTQ
    )  # ioctl_tty(2), unix(7): bytes not taken yet
    unread = array.array("i", [0])
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        fcntl.ioctl(descriptor, request, unread)
        if unread[0] == 0:
            return True
        time.sleep(0.001)
    return False


def _print_error(comm: Communicator, text: str) -> None:
    label = f"rank {comm.rank} of {comm.size}: " if comm.size > 1 else ""
    with suppress(BrokenPipeError):  # the reader is gone; all ranks end anyway
        if sys.stdout is not None:  # None if Python was started without it
            sys.stdout.flush()
    with suppress(BrokenPipeError):
        if sys.stderr is not None:
            sys.stderr.write(f"hpctrain: {label}{text}")
            sys.stderr.flush()
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream is not None:
                wait_until_read(stream.fileno())


def _report_failure(comm: Communicator, text: str, error: BaseException) -> None:
    Heartbeat(os.environ).fail(comm.rank, comm.size, text, echo=is_echo(error))


DEFAULT_STEPS = 400
CLAIM_AGAIN_S = 30.0
MODEL, BEST = "model.pt", "best.pt"
EXPORT = "python3 -m hpctrain.checkpoint export"
SEALED_BEST = "best"  # a directory with one encrypted checkpoint
T = TypeVar("T")


@contextmanager
def start(
    options: argparse.Namespace | None = None,
    name: str = "train",
    environ: Mapping[str, str] | None = None,
    **settings: object,
) -> Iterator[Run]:
    """Join the ranks that the launcher started, and leave them at the end.

    Log lines begin with `name`.

    `settings` have the names and values of the options (`start(out="run1", lr=1e-3)`), in place of `options`; the command
    line is not read.

    Raises:
        SystemExit: the ranks cannot meet; the reason is on stderr.
        TypeError: a setting does not exist, or both `options` and settings were given.
        TrainError: a setting has a wrong value.
    """
    if options is None:
        options = options_from(settings)
    elif settings:
        raise TypeError(f"start() takes options or settings, not both: {', '.join(settings)}")
    environ = os.environ if environ is None else environ
    try:
        comm = connect(options.backend, environ)
    except TrainError as error:
        print(f"{name}: {error}", file=sys.stderr)
        report_unmet(environ, error)
        raise SystemExit(EXIT_FAILED) from None
    with all_or_none(comm), StopRequest() as stop:
        if options.threads or comm.size > 1 or comm.elastic:
            torch.set_num_threads(options.threads or 1)
        seed_step(options.seed, 0, 0)  # so new weights are equal on all ranks and in every attempt
        run = Run(options, name, comm, stop, environ)
        if options.verbose and run.is_first:
            print("\n".join(f"exchange: {line}" for line in comm.describe()), flush=True)
        try:
            with orderly_exit() as exiting:
                yield run
        except BaseException:
            run.abandon()
            raise
        run.leave()
        with suppress(PeerLost):  # a rank that is lost now has nothing left to do
            comm.barrier()
        comm.close()
    if exiting:
        raise exiting[0]


@dataclass(slots=True, kw_only=True)
class TrainingTask:
    """What is trained, independent of the group of ranks; `facts` must be equal on all ranks."""

    model: torch.nn.Module
    optimizer: Optimizer
    facts: dict[str, str]
    validation: Validation | None
    data: Source | None
    settings: TrainSettings
    schedule: object = None  # of torch.optim.lr_scheduler


class Run:
    """This rank's part in a run."""

    def __init__(
        self, options: argparse.Namespace, name: str, comm: Communicator, stop: StopRequest, environ: Mapping[str, str]
    ) -> None:
        self._options, self._name, self._stop, self._environ = options, name, stop, environ
        self.comm = comm
        self._key = checkpoint_key(options.checkpoint_key_file, options.checkpoint_key_command, environ)
        on_gpu = comm.name == "nccl" or torch.cuda.is_available()
        self.device = torch.device("cuda") if on_gpu else torch.device("cpu")
        self._claim: Claim | None = None  # on the rank that writes
        self._attempt = 0  # of the last rank that could claim
        self._unclaimed, self._claim_again_at_s = "", 0.0  # why this rank cannot claim, and when it tries again
        self._distrusted: tuple[str, ...] = ()
        self._writer: CheckpointWriter | None = None
        # If ranks come and go, the first rank alone writes.
        self._shares_writing = comm.size > 1 and not comm.elastic
        self.finished = self._ended = self._over = False
        self._began = False
        self._inside: TrainingLoop | None = None  # while the script iterates over it
        self._left_after: int | None = None  # the number of steps when the script left the loop by itself
        self._record = RunRecord(options.out)
        self._progress: TrainingProgress | None = None  # of this rank; None if it has no state yet
        self._last_step: tuple[StepReport, float] | None = None  # and when it ended, epoch seconds
        self._sources: list[TorchSource] = []  # these may have worker processes
        self._iterator: weakref.ref[Generator[Batch, None, None]] | None = None
        self._current_reporter: Reporter | None = None
        self._interrupted = False  # ranks were lost since the last generation, or the run was started again
        self.weights_sha256 = ""  # after the last step: equal on all ranks

    @property
    def rank(self) -> int:
        """The number of this rank; in an elastic run it changes."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.comm.size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.comm.rank == 0

    @property
    def status(self) -> int:
        """The exit status for the scheduler: 0, or 75 to queue the job again."""
        left = (self._inside or self._left_after) is not None and self._stop.received is None
        return 0 if self.finished or self._ended or left or not self._began else EXIT_REQUEUE

    def stop(self) -> None:
        """End the loop on all ranks after the current step, with a checkpoint.

        The training is finished.
        """
        self._stop.by_script = True

    def leave(self) -> None:
        """Meet the other ranks if the script has left the loop by itself, or never entered it.

        Raises:
            TrainError: some ranks are in the loop.
        """
        loop, self._inside = self._inside, None
        if loop is None:
            if not self._began and not self.comm.elastic:
                announce_end(self.comm)
            return
        self._left_after = loop.progress.step
        if not self.comm.elastic:  # in an elastic run a rank may leave
            loop.leave()
        if self.is_first:
            print(
                f"{self._name}: the script left the loop after {self._left_after} steps; no checkpoint was made there "
                "(run.stop() ends it with one)",
                flush=True,
            )

    def agree(self, what: str, value: object) -> None:
        """Check that `value` (bytes or numbers) is equal on all ranks; all ranks call it.

        Raises:
            MismatchError: it differs; `what` names it in the message, for example "data".
        """
        agree(self.comm, {what: hash_of(value)})

    def share(self, make: Callable[[], T]) -> T:
        """Return on every rank what `make` returns on the first one.

        It is small: numbers, texts, bytes, paths, arrays, and lists, tuples and dicts of them. All ranks call it.
        """
        made: T = gather_from_all(self.comm, make() if self.is_first else None)[0]
        return made

    def dataset(self, directory: Path) -> Dataset:
        """Open the data set in a directory that all nodes see, or its copy (`--stage`).

        All ranks call it.

        Raises:
            DamagedError: it is incomplete, or of another version.
            MismatchError: ranks see different data sets there.
        """
        where, lines = staged(directory, self._options.stage, self.comm)
        if self.is_first and lines:
            print("\n".join(lines), flush=True)
        dataset = Dataset(where)
        digests = gather_from_all(self.comm, dataset.digest)
        if len(set(digests)) != 1:
            raise MismatchError(f"cannot train on {directory}: the ranks see different data sets there: {digests}")
        return dataset

    def mean_loss(self, loss_of: Callable[[Any], torch.Tensor], data: Any, batch: int | None = None) -> MeanLoss:
        """Return a validation for `steps`: the mean of `loss_of(samples)` over `data`.

        `data` is a torch Dataset or DataLoader, or a source.  Each rank computes a part, without gradients and with the model in
        eval mode.  `batch`: samples at once; by default the DataLoader's batch_size, else the option's.
        """
        source = in_order(data, self._options.workers)
        self._keep_source(source)
        size = batch or getattr(source, "batch", None) or self._options.batch or DEFAULT_BATCH
        return MeanLoss(loss_of, source, size, self._options.prefetch)

    def steps(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer | torch.optim.Optimizer,
        validation: Validation | None = None,
        data: Any = None,
        samples: int | None = None,
        schedule: Any = None,
    ) -> Iterator[Batch]:
        """Iterate over the remaining steps, and yield this rank's part of each batch.

        All ranks call it.

        The script calls `backward` once for each batch; with `--micro-batch` a rank's part comes in several batches.  A rank
        without samples in a step gets no batch for it.  Computation with a batch runs in `--precision`.

        `data`: a torch Dataset or DataLoader, or a source of `hpctrain.data.sources`; `batch.samples` is its value on the
        model's device.  The DataLoader's batch_size is the sum over all ranks, unless `--batch` is given. `samples`: the number
        of samples of an epoch, if `data` has no length. `validation`: the value of `mean_loss`; or a function of (part, parts)
        that returns the sum of losses over one part of the validation samples, and their number. `schedule`: one of
        torch.optim.lr_scheduler; it is stepped after each step and saved in checkpoints.

        Raises:
            TrainError: options, model, optimizer, data or schedule do not fit together; a step cannot be taken.
        """
        iterator = self._steps(model, optimizer, validation, data, samples, schedule)
        self._iterator = weakref.ref(iterator)
        return iterator

    def abandon(self) -> None:
        """Undo after an error what stays in the script's process.

        Hooks on its model, threads, a progress bar.
        """
        if self._current_reporter is not None:
            self._current_reporter.close()
        iterator = self._iterator() if self._iterator is not None else None
        if iterator is not None:
            iterator.close()

    def _steps(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer | torch.optim.Optimizer,
        validation: Validation | None,
        data: Any,
        samples: int | None,
        schedule: Any,
    ) -> Generator[Batch, None, None]:
        if self._began:
            raise TrainError(
                "cannot begin another loop: run.steps was called already, and a run has one loop; start another run"
            )
        self._began = True
        task = self._prepare(model, optimizer, validation, data, samples, schedule)
        self._print_unused_options(task)
        try:
            yield from self._generations(task)
        finally:
            for source in self._sources:
                source.close()

    def _prepare(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer | torch.optim.Optimizer,
        validation: Validation | None,
        data: Any,
        samples: int | None,
        schedule: Any,
    ) -> TrainingTask:
        """Check that everything fits, prepare the model, and return the task.

        Raises:
            TrainError: options, model, optimizer, data or schedule do not fit together.
        """
        options = self._options
        check_options(options)
        check_writers(options.log)
        data = source_for(data, options.seed, options.workers)
        self._keep_source(data)
        if options.zero:
            check_elementwise(optimizer)
        if self.comm.elastic:
            check_elastic(options)
        self._check_weights_are_kept()
        prepare_model(options, model)
        if isinstance(validation, MeanLoss):
            validation.device = _device_of(model)
        own = optimizer_for(model, optimizer)
        if schedule is not None:
            check_own_schedule(options)
        settings = settings_of(
            options,
            own.lr,
            batch=getattr(data, "batch", None),
            epoch_samples=samples or (len(data) if isinstance(data, Sized) else None),
            epoch_end=getattr(data, "epoch_end", EpochEnd.CROSS),
            own_schedule=type(schedule).__name__ if schedule is not None else "",
        )
        facts = facts_of(options, model, optimizer) | data_facts(data)
        facts["keys of checkpoints"] = self._key.id if self._key else "none"
        return TrainingTask(
            model=model,
            optimizer=own,
            facts=facts,
            validation=validation,
            data=data,
            schedule=schedule,
            settings=settings,
        )

    def _check_weights_are_kept(self) -> None:
        options = self._options
        if self._key is not None and options.checkpoint_every == 0 and options.save_model is None:
            raise TrainError(
                "cannot keep the weights encrypted: --checkpoint-every 0 makes no checkpoints; give --save-model to write them "
                "in plain, or --no-save-model"
            )

    def _print_unused_options(self, task: TrainingTask) -> None:
        options = self._options
        notes = [check_validation(options, validates=task.validation is not None)]
        if options.workers and not isinstance(task.data, TorchSource):
            notes.append(f"--workers {options.workers} has no effect: the data is not a torch Dataset or DataLoader")
        for note in filter(None, notes if self.is_first else ()):
            print(f"{self._name}: {note}", flush=True)

    def _generations(self, task: TrainingTask) -> Iterator[Batch]:
        while not self._over:
            self.comm.rendezvous()
            try:
                loop, reporter = self._generation(task)
                self._inside = loop
                with loop.profiler.watching(), guarded(_of_own_part(task.optimizer)):
                    yield from loop.steps(self._stop)
                self._inside = None
                if loop.left:
                    self._over, self._left_after = True, loop.progress.step
                elif not loop.changing:
                    self._end(task.model, loop, reporter)
            except PeerLost as lost:
                self._interrupted, self._inside = True, None
                print(f"{self._name}: rank {self.rank} of {self.size}: {lost}", flush=True)

    def _generation(self, task: TrainingTask) -> tuple[TrainingLoop, Reporter | None]:
        """Return the loop of the ranks that have met."""
        options, comm, model = self._options, self.comm, task.model
        hosts = self._agreed(task.facts)
        sync = make_sync(options.sync, list(model.parameters()), comm, overlap=options.overlap)
        try:
            return self._loop(task, hosts, sync)
        except PeerLost:
            sync.buckets.close()  # else their hooks would see the next generation's gradients too
            raise

    def _loop(self, task: TrainingTask, hosts: list[str], sync: Sync) -> tuple[TrainingLoop, Reporter | None]:
        """Bring the ranks to the same state, and make their loop."""
        options, comm, model, optimizer = self._options, self.comm, task.model, task.optimizer
        live = lambda: live_tensors(model, optimizer) | sync.tensors()  # noqa: E731
        replay = replay_through(model, optimizer.step, live, lambda text: print(text, flush=True), self._key)
        progress = self._catch_up(live, replay, task.settings)
        self._attempt, goodput = self.share(
            lambda: (
                self._claim.attempt if self._claim else self._attempt,
                self._record.account(progress.step, interrupted=self._interrupted),
            )
        )
        if self._shares_writing and self._writer is None:
            self._writer = self._join_writers(self._attempt)
        if options.zero:
            optimizer = task.optimizer = ShardedOptimizer(model, optimizer, sync.buckets, comm)
        identity, settings = self._identity(), self._with_start_shares(task.settings)
        reporter = self._reporter(task, identity, progress, hosts, goodput, sync)
        self._interrupted = False
        loop = TrainingLoop(
            LoopSetup(
                model=model,
                optimizer=optimizer,
                validation=task.validation,
                settings=settings,
                comm=comm,
                progress=progress,
                identity=identity,
                sync=sync,
                writer=self._writer,
                writes_own_part=self._shares_writing,
                feed=Prefetcher(task.data, _device_of(model), options.prefetch) if task.data is not None else None,
                on_step=lambda report: self._report(report, reporter, model),
                profiler=StepProfiler(options.profile, options.out / "profile" / f"rank-{self.rank}.json"),
                interval=self._interval(),
                schedule=TorchSchedule(_of_own_part(optimizer), task.schedule) if task.schedule is not None else None,
            )
        )
        if reporter is not None and loop.finished:
            reporter.report_done(progress.step)
        if options.zero and not any(comm.all_gather_object(loop.keeps_gradients)):
            sync.buckets.sum_own_part()
        return loop, reporter

    def _with_start_shares(self, settings: TrainSettings) -> TrainSettings:
        """Return the settings with shares to start from; all ranks call it."""
        if not settings.balance or self.size == 1:
            return settings
        speeds = self.comm.all_gather_object(node_speed(self._environ, socket.gethostname()))
        weights = start_weights(settings.batch, speeds)
        if weights and self.is_first:
            counts = " ".join(map(str, shares(settings.batch, weights)))
            print(f"{self._name}: shares {counts} at the start, by the measured speeds of the nodes", flush=True)
        return replace(settings, weights=weights)

    def _reporter(
        self,
        task: TrainingTask,
        identity: RunIdentity,
        progress: TrainingProgress,
        hosts: list[str],
        goodput: Goodput,
        sync: Sync,
    ) -> Reporter | None:
        """Return the first rank's reporter.

        The other ranks record the goodput only, and have none.
        """
        if not self.is_first:
            self._record.follow(goodput)
            return None
        self._record.look_for_checkpoint(self._distrusted, self._key)
        reporter = self._current_reporter = Reporter(
            ReporterSetup(
                options=self._options,
                name=self._name,
                comm=self.comm,
                identity=identity,
                progress=progress,
                model=task.model,
                environ=self._environ,
                hosts=hosts,
                settings=task.settings,
                goodput=goodput,
                record=self._record,
            )
        )
        if self._last_step is not None:
            reporter.report_missed(*self._last_step)
        if advice := sync.advice():
            print(f"{self._name}: {advice}", flush=True)
        return reporter

    def _agreed(self, facts: dict[str, str]) -> list[str]:
        """Return the host of each rank if all train the same.

        A newcomer that trains something else leaves.
        """
        try:
            return agree(self.comm, facts)
        except MismatchError as error:
            has_progress = any(self.comm.all_gather_object(self._progress is not None))
            if not has_progress:
                raise
            if self.rank in error.ranks:
                print(f"{self._name}: rank {self.rank} of {self.size}: {error}", file=sys.stderr, flush=True)
                assert isinstance(self.comm, ElasticCommunicator)  # other groups have no newcomers
                self.comm.turn_away(str(error))
            raise PeerLost(f"another rank was turned away: {error}") from None

    def _join_writers(self, attempt: int) -> CheckpointWriter:
        """Start a process that writes this rank's part of checkpoints.

        The first rank's publishes them.
        """
        options, size = self._options, self.size
        if self.is_first:
            assert self._claim is not None
            first = ProcessWriter(
                self._claim, None, options.base_every, policy_of(options), self._distrusted, ranks=size, key=self._key
            )
            self.comm.all_gather_object(first.endpoints(own_addresses()))
            return first
        endpoints: list[Endpoint] = self.comm.all_gather_object(None)[0]
        mine = Claim(directory=options.out / "checkpoints", attempt=attempt)
        return ProcessWriter(
            mine,
            None,
            options.base_every,
            policy_of(options),
            ranks=size,
            endpoint=endpoints[self.rank],
            key=self._key,
        )

    def _report(self, report: StepReport, reporter: Reporter | None, model: torch.nn.Module) -> None:
        self._last_step = report, time.time()
        self.comm.report_step(report.step, report.step_s)
        if self._lacks_claim and time.monotonic() > self._claim_again_at_s:
            self.comm.changing = True  # the ranks leave the generation, and meet again
        if report.is_best and self._options.patience and self.is_first:
            self._save_best(model, report.step)
        if reporter is not None:
            reporter.step(report)
        else:
            self._record.count_step(report.step, report.step_s)

    @property
    def _lacks_claim(self) -> bool:
        """Whether this rank has to write, and has no claim."""
        return self.is_first and self._claim is None and self._options.checkpoint_every != 0

    def _end(self, model: torch.nn.Module, loop: TrainingLoop, reporter: Reporter | None) -> None:
        if self._lacks_claim:
            raise TrainError(f"cannot save the last state (step {loop.progress.step}): {self._unclaimed}")
        self.weights_sha256 = check_replicas(model, self.comm)
        self.finished, self._ended, self._over = loop.finished, loop.ended, True
        saved = None
        saves = self._key is None if self._options.save_model is None else self._options.save_model
        if self.is_first and saves and (loop.finished or loop.ended):
            saved = self._options.out / MODEL
            self._save(saved, model)
        if reporter:
            reporter.end(loop, self._stop, self.finished, saved)
            if self._key is not None and saved is None and self.finished:
                print(f"weights: encrypted, in the last checkpoint; {EXPORT} {self._options.out} FILE", flush=True)

    def _save_best(self, model: torch.nn.Module, step: int) -> None:
        path = self._options.out / (BEST if self._key is None else SEALED_BEST)
        try:
            if self._key is None:
                save_model(path, model)
            else:
                publish_weights(path, model, self._identity(), step, self._key)
        except (OSError, PublishError) as error:  # training continues: the share may be back at the next one
            print(f"{self._name}: cannot write {path}: {error}", flush=True)

    def _identity(self) -> RunIdentity:
        job = job_facts(self._environ).job
        return RunIdentity(attempt=self._attempt, generation=self.comm.generation, job=job)

    def _keep_source(self, source: object) -> None:
        if isinstance(source, TorchSource):
            self._sources.append(source)

    def _save(self, path: Path, model: torch.nn.Module) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_model(path, model)
        except OSError as error:
            raise TrainError(
                f"cannot write {path}: {error.strerror}; the weights are in the last checkpoint: "
                f"{EXPORT} {self._options.out}"
            ) from error

    def _catch_up(
        self, live: Callable[[], dict[str, torch.Tensor]], replay: Replay, settings: TrainSettings
    ) -> TrainingProgress:
        """Bring every rank to the state of the furthest rank.

        If none has a state, to a restored or new one.

        If the transfer is interrupted, a rank has its old state or all of the new one.
        """
        if self._progress is None:
            bring_host_parts(self._options.out / "checkpoints", self._key)
        steps = self.comm.all_gather_object(-1 if self._progress is None else self._progress.step)
        begins = max(steps) < 0
        plan = None
        if self.is_first and self._claim is None and begins:
            plan = self._resume(live, replay, settings)
        elif self.is_first and self._claim is None:
            self._take_over_if_possible()
        source = steps.index(max(steps))
        mine = (self._progress, self._last_step, plan) if self.rank == source else None
        received = self.comm.all_gather_object(mine)[source]
        if min(steps) < max(steps) or begins:
            # Ask for the live tensors again: replayed steps may have made the optimizer's anew.
            hand_over(live(), self.comm, source)
        self._progress, self._last_step, plan = received
        if begins:
            self._interrupted = True
            self.comm.follow(plan)
        return self._progress

    def _resume(self, live: Callable[[], dict[str, torch.Tensor]], replay: Replay, settings: TrainSettings) -> object:
        """Claim the attempt, restore the newest checkpoint, and return its plan.

        Raises:
            TrainError: the output directory cannot be written to, or has checkpoints under `--resume never`.
        """
        if self._options.resume == "never":
            self._refuse_to_resume()
        check_key(self._options.out / "checkpoints", self._key)  # before a claim stops an attempt that has the key
        try:
            self._claim = self._take_over()
        except OSError as error:
            raise TrainError(
                f"cannot write to {self._options.out}: {error.strerror}; give an --out that this account can write to and "
                "that all nodes see"
            ) from error
        restored = self._restore(live(), replay)
        self._distrusted = restored.damaged if restored else ()
        if not self._shares_writing:
            self._writer = make_writer(self._options, self._claim, restored, self._key)
        self._progress, plan = self._begin(live(), restored, settings)
        return plan

    def _begin(
        self, tensors: dict[str, torch.Tensor], restored: RestoredCheckpoint | None, settings: TrainSettings
    ) -> tuple[TrainingProgress, object]:
        """Return the state of a checkpoint or a new one, and the checkpoint's communication plan."""
        precision = Precision(self._options.precision)
        progress, plan = TrainingProgress(loss_scale=loss_scale_for(precision, None)), None
        if restored is not None:
            restored.pour(tensors)
            facts = restored.published.manifest.facts
            progress, plan = progress_from(facts.state, facts.step, precision), facts.state.get("exchange")
            self._print_changed(facts.state.get("settings"), settings)
        left = settings.batches.steps_left(progress.step, progress.next_sample)
        if left is not None:
            progress.total_steps = progress.step + left
        progress.total_steps = self._options.steps or progress.total_steps
        if progress.total_steps is None and self._options.target_seconds is None:
            progress.total_steps = DEFAULT_STEPS
        return progress, plan

    def _print_changed(self, before: object, settings: TrainSettings) -> None:
        """Print the settings that differ from the checkpoint's."""
        texts = settings.as_texts()
        if isinstance(before, dict):
            changed = [
                f"{name} {before.get(name, 'none')} -> {texts.get(name, 'none')}"
                for name in dict.fromkeys([*texts, *before])
                if before.get(name) != texts.get(name)
            ]
            if changed:
                print(f"{self._name}: settings differ from the checkpoint: {', '.join(changed)}", flush=True)

    def _take_over(self) -> Claim:
        """Claim the attempt, so that no earlier attempt can write any more."""
        mine = claim(self._options.out / "checkpoints", job_facts(self._environ), time.time())
        publish_local_parts(mine, self._key)
        return mine

    def _take_over_if_possible(self) -> None:
        """Claim the attempt in place of the lost first rank.

        If the share fails, training continues.
        """
        try:
            self._claim = self._take_over()
        except (OSError, PublishError, CheckpointKeyError) as error:
            self._unclaimed = str(error)
            self._record.last_checkpoint.away = f"checkpoints: cannot be written now: {error}"
            self._claim_again_at_s = time.monotonic() + CLAIM_AGAIN_S
            print(
                f"checkpoint: cannot write checkpoints now: {error}; tries again every {CLAIM_AGAIN_S:.0f} s",
                flush=True,
            )
            return
        self._writer = make_writer(self._options, self._claim, None, self._key)
        self._record.last_checkpoint.away = ""
        if self._unclaimed:
            print("checkpoint: checkpoints can be written again", flush=True)

    def _refuse_to_resume(self) -> None:
        names = checkpoint_names(self._options.out / "checkpoints")
        if names:
            raise TrainError(
                f"cannot start a new run in {self._options.out}: it has checkpoints up to {names[0]}; give another --out"
            )

    def _interval(self) -> Interval:
        claims_s = claims_at_s(self._claim.directory) if self._claim is not None else []
        return Interval(self._options.checkpoint_every, claims_s, time.time())

    def _restore(self, tensors: dict[str, torch.Tensor], replay: Replay) -> RestoredCheckpoint | None:
        directory = self._options.out / "checkpoints"
        return restore_newest(directory, layout_of(tensors), lambda text: print(text, flush=True), replay, self._key)


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _of_own_part(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of this rank's shard, if the state is sharded."""
    return optimizer.of_own_part if isinstance(optimizer, ShardedOptimizer) else optimizer


def policy_of(options: argparse.Namespace) -> RetentionPolicy:
    """Return which checkpoints to keep."""
    return RetentionPolicy(keep=options.keep, every_s=3600 * options.keep_every)


def make_writer(
    options: argparse.Namespace, mine: Claim, restored: RestoredCheckpoint | None, key: CheckpointKey | None = None
) -> CheckpointWriter:
    """Start the process that writes checkpoints; its increments continue the restored one."""
    distrusted = restored.damaged if restored else ()
    parent = restored.published if restored else None
    return ProcessWriter(mine, parent, options.base_every, policy_of(options), distrusted, key=key)


def save_model(path: Path, model: torch.nn.Module) -> None:
    """Write the weights for `torch.load`; an older file is replaced as a whole."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    os.replace(write_draft(path, buffer.getvalue()), path)


def publish_weights(
    directory: Path, model: torch.nn.Module, identity: RunIdentity, step: int, key: CheckpointKey
) -> None:
    """Write the weights as an encrypted checkpoint, in place of the directory's last one.

    Raises: OSError, PublishError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    snapshot = TensorSnapshot(layout_of(tensors))
    snapshot.fill(tensors)
    facts = CheckpointFacts(
        step=step,
        attempt=identity.attempt,
        generation=identity.generation,
        world=1,
        job=identity.job,
        written_at_s=round(time.time(), 3),
        state={},
    )
    mine = Claim(directory=directory, attempt=identity.attempt)
    with ThreadPoolExecutor(1, "weights") as pool:
        part = write_part(mine, snapshot, facts, None, pool, key=key)
    publish(mine, facts, [part], None, None, key=key)
    prune(directory, RetentionPolicy(keep=1), (), key)
