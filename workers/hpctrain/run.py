"""A run, for scripts of one's own: join the ranks, go on from the last checkpoint, and give each rank its part of each batch.

    with start(options, "mnist") as run:
        model = Net().to(run.device)
        optimizer = AdamW(model.named_parameters())
        for batch in run.steps(model, optimizer):
            inputs, targets = data[batch.low : batch.high]
            batch.backward(F.cross_entropy(model(inputs), targets))
    sys.exit(run.status)

`options` are those of `hpctrain.options.add_options`.  One process is the same code as many ranks.  Does not know models or data.
Rules: every rank runs the same script; an error on one ends all; `status` is 0 when the training is finished, 75 when a
signal stopped it with a checkpoint made (queue me again), 1 after an error.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

import torch

from hpctrain.checkpoint import BackgroundWriter, Claim, Restored, Retention, claim, restore_newest
from hpctrain.checkpoint.files import write_draft
from hpctrain.checkpoint.restore import checkpoint_names
from hpctrain.checkpoint.snapshot import layout_of
from hpctrain.comm import Communicator, connect
from hpctrain.env import job_facts
from hpctrain.errors import EXIT_FAILED, EXIT_REQUEUE, TrainError
from hpctrain.loop import (
    Batch,
    Identity,
    Loop,
    Progress,
    Settings,
    Validation,
    broadcast_state,
    live_tensors,
    progress_from,
    seed_step,
)
from hpctrain.optim import AdamW
from hpctrain.outermost import all_or_none
from hpctrain.signals import StopRequest
from hpctrain.sync import make_sync
from hpctrain.teller import Teller

DEFAULT_STEPS = 400
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
        raise SystemExit(EXIT_FAILED) from None
    with all_or_none(comm), StopRequest() as stop:
        if options.threads or comm.size > 1:
            torch.set_num_threads(options.threads or 1)
        seed_step(options.seed, 0, 0)  # weights that are made now are alike on all ranks, and in every attempt
        run = Run(options, name, comm, stop, environ)
        if options.verbose and run.is_first:
            print("\n".join(f"exchange: {line}" for line in comm.describe()), flush=True)
        yield run
        comm.barrier()
        comm.close()


class Run:
    """This rank's part in a run."""

    def __init__(
        self, options: argparse.Namespace, name: str, comm: Communicator, stop: StopRequest, environ: Mapping[str, str]
    ) -> None:
        self._options, self._name, self._stop, self._environ = options, name, stop, environ
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.is_first = comm.rank == 0  # who prints and writes
        on_gpu = comm.name == "nccl" or torch.cuda.is_available()
        self.device = torch.device("cuda") if on_gpu else torch.device("cpu")
        self.finished = False
        self.weights_sha256 = ""  # after the steps: the same on all ranks

    @property
    def status(self) -> int:
        """The exit status that the scheduler understands."""
        return 0 if self.finished else EXIT_REQUEUE

    def share(self, make: Callable[[], T]) -> T:
        """This will give every rank what `make` returns on the first one (picklable, small); all ranks call it."""
        return cast(T, self.comm.all_gather_object(make() if self.is_first else None)[0])

    def steps(self, model: torch.nn.Module, optimizer: AdamW, validation: Validation | None = None) -> Iterator[Batch]:
        """This will go through the steps that are left, and give this rank's part of each batch; all ranks go along.

        Of each batch the script calls `backward` once.  A rank that has no samples in a step is not given one.
        `validation(part, parts)` returns the sum of losses over one part of the validation samples, and how many they are.
        """
        options, comm = self._options, self.comm
        sync = make_sync(options.sync, list(model.parameters()), comm, overlap=options.overlap)
        tensors = live_tensors(model, optimizer) | sync.tensors()
        mine, restored = self._begin(tensors)
        progress = self._share_progress(tensors, restored)
        attempt = self.share(lambda: mine.attempt if mine else 0)
        identity = Identity(attempt=attempt, generation=0, job=job_facts(self._environ).job)
        teller = Teller(options, self._name, comm, identity, progress, model) if self.is_first else None
        loop = Loop(
            model,
            optimizer,
            validation,
            settings_of(options),
            comm,
            progress,
            identity,
            sync,
            background_writer(options, mine, restored) if mine else None,
            teller.step if teller else lambda report: None,
        )
        yield from loop.steps(self._stop)
        self.finished = loop.finished
        if teller:
            teller.end(loop, self._stop, self.finished)
        self.weights_sha256 = check_replicas(model, comm)

    def _begin(self, tensors: dict[str, torch.Tensor]) -> tuple[Claim | None, Restored | None]:
        """Claim the attempt and read the newest checkpoint, on rank 0; the others get nothing here."""
        if not self.is_first:
            return None, None
        options, directory = self._options, self._options.out / "checkpoints"
        names = checkpoint_names(directory)
        if options.resume == "never" and names:
            raise TrainError(
                f"cannot start anew in {options.out}: it has checkpoints up to {names[0]}; give another --out"
            )
        mine = claim(directory, job_facts(self._environ), time.time())
        return mine, restore_newest(directory, layout_of(tensors), lambda text: print(text, flush=True))

    def _share_progress(self, tensors: dict[str, torch.Tensor], restored: Restored | None) -> Progress:
        """Bring every rank to the restored state of rank 0, or to its fresh one."""
        if restored is not None:
            restored.published.snapshot.pour(tensors)
        broadcast_state(tensors, self.comm)
        facts = self.share(lambda: restored.published.manifest.facts if restored else None)
        progress = progress_from(facts.state, facts.step) if facts else Progress()
        if facts:
            self.comm.follow(facts.state.get("exchange"))
        progress.total_steps = self._options.steps or progress.total_steps
        if progress.total_steps is None and self._options.target_seconds is None:
            progress.total_steps = DEFAULT_STEPS
        return progress


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
    )


def background_writer(options: argparse.Namespace, mine: Claim, restored: Restored | None) -> BackgroundWriter:
    """This will make the writer, standing on what was restored."""
    distrusted = restored.damaged if restored else ()
    parent = restored.published if restored else None
    return BackgroundWriter(mine, parent, options.base_every, Retention(mine, options.keep, distrusted))


def check_replicas(model: torch.nn.Module, comm: Communicator) -> str:
    """This will return the SHA-256 of the weights, after comparing it among the ranks.

    Raises:
        TrainError: replicas have drifted apart, which never happens in a run that is right.
    """
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    hashes = comm.all_gather_object(total.hexdigest())
    if len(set(hashes)) != 1:
        raise TrainError(f"cannot trust the result: the ranks' weights differ: {hashes}")
    return total.hexdigest()


def save_model(path: Path, model: torch.nn.Module) -> None:
    """This will write the weights so that `torch.load` reads them; an older file is replaced whole."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    os.replace(write_draft(path, buffer.getvalue()), path)
