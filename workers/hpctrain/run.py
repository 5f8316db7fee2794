"""A run, for scripts of one's own: join the ranks, go on from the last checkpoint, and give each rank its part of each batch.

    with start(options, "mnist") as run:
        model = Net().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters())  # or hpctrain.optim.AdamW, which starts a second sooner
        for batch in run.steps(model, optimizer, data=Rows(arrays, options.seed)):
            part = batch.samples
            batch.backward(F.cross_entropy(model(part["image"]), part["name"]))
    sys.exit(run.status)

`options` are those of `hpctrain.options.add_options`.  One process is the same code as many ranks.  Does not know models or data.
Rules: every rank runs the same script; an error on one ends all; `status` is 0 when the training is finished or the
script has left the loop or ended it, 75 when a signal stopped it with a checkpoint made (queue me again), 1 after an error.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch

from hpctrain.agreement import agree, data_facts, facts_of, hash_of, say_ended, told
from hpctrain.batch import Batch
from hpctrain.checkpoint import (
    BackgroundWriter,
    Claim,
    KeptWriter,
    Policy,
    Restored,
    Retention,
    Writer,
    claim,
    replay_through,
    restore_newest,
)
from hpctrain.checkpoint.bringing import bring_back, bring_parts
from hpctrain.checkpoint.files import write_draft
from hpctrain.checkpoint.group import Seat
from hpctrain.checkpoint.interval import Interval, claims_at_s
from hpctrain.checkpoint.listing import checkpoint_names
from hpctrain.checkpoint.restore import Replay
from hpctrain.checkpoint.snapshot import layout_of
from hpctrain.comm import Communicator, connect
from hpctrain.comm.links import own_addresses
from hpctrain.comm.members import MembersCommunicator
from hpctrain.data.dataset import Dataset
from hpctrain.data.prefetch import Prefetcher
from hpctrain.data.sources import Source
from hpctrain.data.staging import staged
from hpctrain.env import job_facts
from hpctrain.errors import EXIT_FAILED, EXIT_REQUEUE, MismatchError, PeerLost, PublishError, TrainError
from hpctrain.loop import Loop, seed_step
from hpctrain.outermost import all_or_none, orderly_exit, tell_unmet
from hpctrain.precision import Precision, loss_scale_for
from hpctrain.prepare import prepare_model
from hpctrain.profiling import Profile
from hpctrain.progress import Identity, Progress, StepReport, progress_from
from hpctrain.record import Record
from hpctrain.replicas import check_replicas, hand_over
from hpctrain.settings import check_elastic, check_options, settings_of
from hpctrain.signals import StopRequest
from hpctrain.state import live_tensors
from hpctrain.sync import Sync, make_sync
from hpctrain.teller import Teller
from hpctrain.torchoptim import Optimizer, guarded, optimizer_for
from hpctrain.validation import Validation
from hpctrain.writers import check_writers
from hpctrain.zero import ShardedOptimizer, check_elementwise

DEFAULT_STEPS = 400
CLAIM_AGAIN_S = 30.0
T = TypeVar("T")


@contextmanager
def start(options: argparse.Namespace, name: str, environ: Mapping[str, str] | None = None) -> Iterator[Run]:
    """This will join the ranks that the launcher made, and leave them at the end; `name` is what log lines begin with.

    Raises:
        SystemExit: the ranks cannot meet; why is on stderr.
    """
    environ = os.environ if environ is None else environ
    try:
        comm = connect(options.backend, environ)
    except TrainError as error:
        print(f"{name}: {error}", file=sys.stderr)
        tell_unmet(environ, error)
        raise SystemExit(EXIT_FAILED) from None
    with all_or_none(comm), StopRequest() as stop:
        if options.threads or comm.size > 1 or comm.elastic:
            torch.set_num_threads(options.threads or 1)
        seed_step(options.seed, 0, 0)  # weights that are made now are alike on all ranks, and in every attempt
        run = Run(options, name, comm, stop, environ)
        if options.verbose and run.is_first:
            print("\n".join(f"exchange: {line}" for line in comm.describe()), flush=True)
        with orderly_exit() as exiting:
            yield run
        run.leave()
        with suppress(PeerLost):  # who is lost now has nothing left to do
            comm.barrier()
        comm.close()
    if exiting:
        raise exiting[0]


@dataclass(slots=True, kw_only=True)
class Task:
    """What is trained, whoever takes part; `facts` are to be the same on all ranks."""

    model: torch.nn.Module
    optimizer: Optimizer
    facts: dict[str, str]
    validation: Validation | None
    data: Source | None
    samples: int | None


class Run:
    """This rank's part in a run."""

    def __init__(
        self, options: argparse.Namespace, name: str, comm: Communicator, stop: StopRequest, environ: Mapping[str, str]
    ) -> None:
        self._options, self._name, self._stop, self._environ = options, name, stop, environ
        self.comm = comm
        on_gpu = comm.name == "nccl" or torch.cuda.is_available()
        self.device = torch.device("cuda") if on_gpu else torch.device("cpu")
        self._claim: Claim | None = None  # of the rank that writes
        self._attempt = 0  # of the last one that could claim
        self._unclaimed, self._claim_again_at_s = "", 0.0  # why this rank cannot, and when it tries again
        self._distrusted: tuple[str, ...] = ()
        self._writer: Writer | None = None
        # Ranks that come and go leave it to the first of them.
        self._shares_writing = comm.size > 1 and not comm.elastic and options.checkpoint_writer == "process"
        self.finished = self._ended = self._over = False
        self._began = False
        self._inside: Loop | None = None  # while the script is in it
        self._left_after: int | None = None  # the steps that were taken when the script left the loop by itself
        self._record = Record(options.out)
        self._progress: Progress | None = None  # how far this rank is, None if it has nothing yet
        self._last_step: tuple[StepReport, float] | None = None  # and when it was over
        self._interrupted = False  # ranks were lost since the last generation, or all are started again
        self.weights_sha256 = ""  # after the steps: the same on all ranks

    @property
    def rank(self) -> int:
        """Which rank this is; in an elastic run it changes."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.comm.size

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.comm.rank == 0

    @property
    def status(self) -> int:
        """The exit status that the scheduler understands."""
        left = (self._inside or self._left_after) is not None and self._stop.received is None
        return 0 if self.finished or self._ended or left or not self._began else EXIT_REQUEUE

    def stop(self) -> None:
        """This will end the loop after the step that is under way, on all ranks, with a checkpoint: training is good enough."""
        self._stop.by_script = True

    def leave(self) -> None:
        """This will meet the other ranks where they are, if the script has left the loop by itself or never was in it.

        Raises:
            TrainError: they are in it.
        """
        loop, self._inside = self._inside, None
        if loop is None:
            if not self._began and not self.comm.elastic:
                say_ended(self.comm)
            return
        self._left_after = loop.progress.step
        if not self.comm.elastic:  # there a rank may leave
            loop.leave()
        if self.is_first:
            print(
                f"{self._name}: the script left the loop after {self._left_after} steps; no checkpoint was made there "
                "(run.stop() ends it with one)",
                flush=True,
            )

    def agree(self, what: str, value: object) -> None:
        """This will return if `value` is the same on all ranks: bytes or numbers as they lie in memory; all ranks call it.

        Raises:
            MismatchError: it is not; `what` names it, as "data".
        """
        agree(self.comm, {what: hash_of(value)})

    def share(self, make: Callable[[], T]) -> T:
        """This will give every rank what `make` returns on the first one (picklable, small); all ranks call it."""
        return cast(T, told(self.comm, make() if self.is_first else None)[0])

    def dataset(self, directory: Path) -> Dataset:
        """This will open the data set in a directory that all nodes see, or its copy (`--stage`); all ranks call it.

        Raises:
            DamagedError: it is not whole, or of another version.
            MismatchError: ranks see different data sets there.
        """
        where, said = staged(directory, self._options.stage, self.comm)
        if self.is_first and said:
            print("\n".join(said), flush=True)
        dataset = Dataset(where)
        digests = told(self.comm, dataset.digest)
        if len(set(digests)) != 1:
            raise MismatchError(f"cannot train on {directory}: the ranks see different data sets there: {digests}")
        return dataset

    def steps(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer | torch.optim.Optimizer,
        validation: Validation | None = None,
        data: Source | None = None,
        samples: int | None = None,
    ) -> Iterator[Batch]:
        """This will go through the steps that are left, and give this rank's part of each batch; all ranks go along.

        Of each batch the script calls `backward` once; with `--micro-batch` a rank's part comes in pieces, each a batch here.
        A rank that has no samples in a step is not given one.  What the script computes with a batch runs in `--precision`.
        `batch.samples` is what `data[low:high]` gives (see `hpctrain.data.sources`), on the device and made ready beforehand.
        `samples`: how many there are, if that is not what `data` says; then metrics have the epoch too.
        `validation(part, parts)` returns the sum of losses over one part of the validation samples, and how many they are.
        """
        options = self._options
        if self._began:
            raise TrainError(
                "cannot begin another loop: run.steps was called already, and a run has one; start another run"
            )
        self._began = True
        check_options(options)
        check_writers(options.log)
        samples = samples or (len(data) if isinstance(data, Sized) else None)
        if options.zero:
            check_elementwise(optimizer)
        if self.comm.elastic:
            check_elastic(options)
        prepare_model(options, model)
        task = Task(
            model=model,
            optimizer=optimizer_for(model, optimizer),
            facts=facts_of(options, model, optimizer) | data_facts(data),
            validation=validation,
            data=data,
            samples=samples,
        )
        while not self._over:
            self.comm.meet()
            try:
                loop, teller = self._generation(task)
                self._inside = loop
                mine = task.optimizer.of_own_part if isinstance(task.optimizer, ShardedOptimizer) else task.optimizer
                with loop.profile.watching(), guarded(mine):
                    yield from loop.steps(self._stop)
                self._inside = None
                if loop.left:
                    self._over, self._left_after = True, loop.progress.step
                elif not loop.changing:
                    self._end(model, loop, teller)
            except PeerLost as lost:
                self._interrupted, self._inside = True, None
                print(f"{self._name}: rank {self.rank} of {self.size}: {lost}", flush=True)

    def _generation(self, task: Task) -> tuple[Loop, Teller | None]:
        """Make the loop of those who have met."""
        options, comm, model = self._options, self.comm, task.model
        hosts = self._agreed(task.facts)
        sync = make_sync(options.sync, list(model.parameters()), comm, overlap=options.overlap)
        try:
            return self._loop(task, hosts, sync)
        except PeerLost:
            sync.buckets.close()  # else they would see the gradients of the next generation, too
            raise

    def _loop(self, task: Task, hosts: list[str], sync: Sync) -> tuple[Loop, Teller | None]:
        """Make it for ranks that train the same, once they have the same state."""
        options, comm, model, optimizer = self._options, self.comm, task.model, task.optimizer
        live = lambda: live_tensors(model, optimizer) | sync.tensors()  # noqa: E731
        replay = replay_through(model, optimizer.step, live, lambda text: print(text, flush=True))
        progress = self._catch_up(live, replay)
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
        identity = Identity(attempt=self._attempt, generation=comm.generation, job=job_facts(self._environ).job)
        teller = None
        if self.is_first:
            self._record.look_for_checkpoint(self._distrusted)
            told_of = identity, progress, model, self._environ, hosts, task.samples, goodput
            teller = Teller(options, self._name, comm, *told_of, self._record)
            if self._last_step is not None:
                teller.make_up(*self._last_step)
            if advice := sync.advice():
                print(f"{self._name}: {advice}", flush=True)
        else:
            self._record.follow(goodput)
        self._interrupted = False
        profile = Profile(options.profile, options.out / "profile" / f"rank-{self.rank}.json")
        loop = Loop(
            model,
            optimizer,
            task.validation,
            settings_of(options),
            comm,
            progress,
            identity,
            sync,
            self._writer,
            Prefetcher(task.data, self.device, options.prefetch) if task.data is not None else None,
            lambda report: self._tell(report, teller),
            profile,
            self._shares_writing,
            self._interval(),
        )
        if options.zero and not any(comm.all_gather_object(loop.keeps_gradients)):
            sync.buckets.sum_own_part()
        return loop, teller

    def _agreed(self, facts: dict[str, str]) -> list[str]:
        """The host of each rank, if all are about to train the same; one that joins a run which trains something else leaves."""
        try:
            return agree(self.comm, facts)
        except MismatchError as error:
            goes_on = any(self.comm.all_gather_object(self._progress is not None))
            if not goes_on:
                raise
            if self.rank in error.ranks:
                print(f"{self._name}: rank {self.rank} of {self.size}: {error}", file=sys.stderr, flush=True)
                assert isinstance(self.comm, MembersCommunicator)  # no other group has newcomers
                self.comm.turn_away(str(error))
            raise PeerLost(f"another rank was turned away: {error}") from None

    def _join_writers(self, attempt: int) -> Writer:
        """Have a process write this rank's part of each checkpoint, and the first one's publish them; all ranks call it."""
        options, size = self._options, self.size
        if self.is_first:
            assert self._claim is not None
            first = KeptWriter(self._claim, None, options.base_every, policy_of(options), self._distrusted, ranks=size)
            self.comm.all_gather_object(first.seats(own_addresses()))
            return first
        seats = cast("list[Seat]", self.comm.all_gather_object(None)[0])
        mine = Claim(directory=options.out / "checkpoints", attempt=attempt)
        return KeptWriter(mine, None, options.base_every, policy_of(options), ranks=size, seat=seats[self.rank])

    def _tell(self, report: StepReport, teller: Teller | None) -> None:
        self._last_step = report, time.time()
        self.comm.stepped(report.step, report.step_s)
        if self._lacks_claim and time.monotonic() > self._claim_again_at_s:
            self.comm.changing = True  # they part, and meet again
        if teller is not None:
            teller.step(report)
        else:
            self._record.saw(report.step, report.step_s)

    @property
    def _lacks_claim(self) -> bool:
        """Whether this rank has to write and cannot."""
        return self.is_first and self._claim is None and self._options.checkpoint_every != 0

    def _end(self, model: torch.nn.Module, loop: Loop, teller: Teller | None) -> None:
        if self._lacks_claim:
            raise TrainError(f"cannot keep the last state (step {loop.progress.step}): {self._unclaimed}")
        self.weights_sha256 = check_replicas(model, self.comm)
        self.finished, self._ended, self._over = loop.finished, loop.ended, True
        if teller:
            teller.end(loop, self._stop, self.finished)

    def _catch_up(self, live: Callable[[], dict[str, torch.Tensor]], replay: Replay) -> Progress:
        """Bring every rank to the state of the one that is furthest; if none has any, to that which the first one begins with.

        A rank that is interrupted in it has what it had before, or all of the other's.
        """
        if self._progress is None:
            bring_parts(self._options.out / "checkpoints")
        steps = cast("list[int]", self.comm.all_gather_object(-1 if self._progress is None else self._progress.step))
        begins = max(steps) < 0
        plan = None
        if self.is_first and self._claim is None and begins:
            if self._options.resume == "never":
                self._refuse_to_resume()
            self._claim = self._take_over()
            restored = self._restore(live(), replay)
            self._distrusted = restored.damaged if restored else ()
            if not self._shares_writing:
                self._writer = background_writer(self._options, self._claim, restored)
            self._progress, plan = self._begin(live(), restored)
        elif self.is_first and self._claim is None:
            self._take_over_if_possible()
        source = steps.index(max(steps))
        mine = (self._progress, self._last_step, plan) if self.rank == source else None
        told = self.comm.all_gather_object(mine)[source]
        if min(steps) < max(steps) or begins:
            # Live tensors anew: steps that were taken again may have made the optimizer's anew.
            hand_over(live(), self.comm, source)
        self._progress, self._last_step, plan = cast("tuple[Progress, tuple[StepReport, float] | None, object]", told)
        if begins:
            self._interrupted = True
            self.comm.follow(plan)
        return self._progress

    def _begin(self, tensors: dict[str, torch.Tensor], restored: Restored | None) -> tuple[Progress, object]:
        """The state of a checkpoint, or a fresh one; and what was chosen to exchange by then."""
        precision = Precision(self._options.precision)
        progress, plan = Progress(loss_scale=loss_scale_for(precision, None)), None
        if restored is not None:
            restored.pour(tensors)
            facts = restored.published.manifest.facts
            progress, plan = progress_from(facts.state, facts.step, precision), facts.state.get("exchange")
        progress.total_steps = self._options.steps or progress.total_steps
        if progress.total_steps is None and self._options.target_seconds is None:
            progress.total_steps = DEFAULT_STEPS
        return progress, plan

    def _take_over(self) -> Claim:
        """Claim the attempt: whoever wrote before must not any more."""
        mine = claim(self._options.out / "checkpoints", job_facts(self._environ), time.time())
        bring_back(mine)
        return mine

    def _take_over_if_possible(self) -> None:
        """The rank that wrote is lost: claim the attempt in its place. While the share does not take that, training goes on."""
        try:
            self._claim = self._take_over()
        except (OSError, PublishError) as error:
            self._unclaimed = str(error)
            self._record.kept.away = f"checkpoints: none for now: {error}"
            self._claim_again_at_s = time.monotonic() + CLAIM_AGAIN_S
            print(f"checkpoint: none for now, tried again every {CLAIM_AGAIN_S:.0f} s: {error}", flush=True)
            return
        self._writer = background_writer(self._options, self._claim, None)
        self._record.kept.away = ""
        if self._unclaimed:
            print("checkpoint: they can be written again", flush=True)

    def _refuse_to_resume(self) -> None:
        names = checkpoint_names(self._options.out / "checkpoints")
        if names:
            raise TrainError(
                f"cannot start anew in {self._options.out}: it has checkpoints up to {names[0]}; give another --out"
            )

    def _interval(self) -> Interval:
        claims_s = claims_at_s(self._claim.directory) if self._claim is not None else []
        return Interval(self._options.checkpoint_every, claims_s, time.time())

    def _restore(self, tensors: dict[str, torch.Tensor], replay: Replay) -> Restored | None:
        directory = self._options.out / "checkpoints"
        return restore_newest(directory, layout_of(tensors), lambda text: print(text, flush=True), replay)


def policy_of(options: argparse.Namespace) -> Policy:
    """This will say which checkpoints stay."""
    return Policy(keep=options.keep, every_s=3600 * options.keep_every)


def background_writer(options: argparse.Namespace, mine: Claim, restored: Restored | None) -> Writer:
    """This will make the writer, standing on what was restored."""
    distrusted = restored.damaged if restored else ()
    parent = restored.published if restored else None
    if options.checkpoint_writer == "process":
        return KeptWriter(mine, parent, options.base_every, policy_of(options), distrusted)
    return BackgroundWriter(mine, parent, options.base_every, Retention(mine, policy_of(options), distrusted))


def save_model(path: Path, model: torch.nn.Module) -> None:
    """This will write the weights so that `torch.load` reads them; an older file is replaced whole."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    os.replace(write_draft(path, buffer.getvalue()), path)
