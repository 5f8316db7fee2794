"""The run of the character GPT: what its options mean in terms of hpctrain.

Read `run` from top to bottom: this is what a script of one's own looks like.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from hpctrain.checkpoint import BackgroundWriter, Claim, Report, Restored, Retention, claim, restore_newest
from hpctrain.checkpoint.files import write_draft
from hpctrain.checkpoint.restore import checkpoint_names
from hpctrain.checkpoint.snapshot import layout_of
from hpctrain.comm import Communicator, connect
from hpctrain.data import VOCABULARY, Corpus, Sampler, decode, encode, standard_library, windows
from hpctrain.env import job_facts
from hpctrain.errors import EXIT_FAILED, EXIT_REQUEUE, TrainError
from hpctrain.examples.gpt import Gpt, generate
from hpctrain.loop import (
    Identity,
    Loop,
    Progress,
    Settings,
    StepReport,
    broadcast_state,
    live_tensors,
    progress_from,
    seed_step,
)
from hpctrain.metrics import MetricsFile
from hpctrain.optim import AdamW
from hpctrain.outermost import all_or_none
from hpctrain.signals import StopRequest
from hpctrain.sync import make_sync

VALIDATION_SAMPLES = 128
PROMPT = "def "


class CharGpt:
    """The task: next-character loss over windows of the corpus."""

    def __init__(self, options: argparse.Namespace, corpus: Corpus, device: torch.device) -> None:
        seed_step(options.seed, 0, 0)
        self.model = Gpt(VOCABULARY, options.context, options.layers, options.width, options.heads).to(device)
        for block in list(self.model.blocks)[: options.freeze]:
            block.requires_grad_(False)
        self.optimizer = AdamW(self.model.named_parameters())
        self._device = device
        self._corpus = corpus
        self._sampler = Sampler(seed=options.seed, tokens=corpus.train.size, length=options.context)

    def loss(self, low: int, high: int) -> torch.Tensor:
        """The mean loss over training samples [low, high)."""
        return self._mean_loss(self._corpus.train, self._sampler.starts(low, high))

    def validation(self, part: int, parts: int) -> tuple[float, int]:
        """The sum of losses over this part of evenly spread validation windows, and their number."""
        tokens, length = self._corpus.validation, self._sampler.length
        starts = np.linspace(0, tokens.size - length - 1, VALIDATION_SAMPLES).astype(np.int64)[part::parts]
        if starts.size == 0:
            return 0.0, 0
        return float(self._mean_loss(tokens, starts)) * starts.size, starts.size

    def sample(self, count: int, seed: int) -> str:
        """Some text that the model writes."""
        start = [int(token) for token in encode(PROMPT.encode())]
        return PROMPT + decode(generate(self.model, start, count, seed))

    def _mean_loss(self, tokens: np.ndarray, starts: np.ndarray) -> torch.Tensor:
        inputs_BT, targets_BT = (
            torch.from_numpy(np.ascontiguousarray(part)).to(self._device)
            for part in windows(tokens, starts, self._sampler.length)
        )
        logits_BTV = self.model(inputs_BT)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """This will train on this rank and return the exit status; every rank calls it."""
    try:
        comm = connect(options.backend, environ)
    except TrainError as error:
        print(f"chargpt: {error}", file=sys.stderr)
        return EXIT_FAILED
    with all_or_none(comm), StopRequest() as stop:
        if options.verbose and comm.rank == 0:
            print("\n".join(f"exchange: {line}" for line in comm.describe()), flush=True)
        if options.threads or comm.size > 1:
            torch.set_num_threads(options.threads or 1)
        device = torch.device("cuda") if comm.name == "nccl" or torch.cuda.is_available() else torch.device("cpu")
        task = CharGpt(options, shared_corpus(comm), device)
        sync = make_sync(options.sync, list(task.model.parameters()), comm, overlap=options.overlap)
        tensors = live_tensors(task) | sync.tensors()
        mine, restored = begin(options, environ, tensors, comm)
        progress = share_progress(options, tensors, comm, restored)
        identity = Identity(attempt=share(comm, mine.attempt if mine else 0), generation=0, job=job_facts(environ).job)
        teller = Teller(options, comm, identity, progress, task) if comm.rank == 0 else None
        loop = Loop(
            task,
            settings_of(options),
            comm,
            progress,
            identity,
            sync,
            background_writer(options, mine, restored) if mine else None,
            teller.step if teller else lambda report: None,
        )
        finished = loop.run(stop)
        if teller:
            teller.end(loop, stop, finished)
        weights = check_replicas(task, comm)
        if finished and comm.rank == 0:
            tell_result(options, task, weights)
        comm.barrier()
        comm.close()
    return 0 if finished else EXIT_REQUEUE


def shared_corpus(comm: Communicator) -> Corpus:
    """This will read the corpus on rank 0 and hand it round, as other hosts may have another Python."""
    corpus = standard_library() if comm.rank == 0 else None
    sizes = share(comm, (corpus.train.size, corpus.validation.size, corpus.files, corpus.digest) if corpus else None)
    train_size, validation_size, files, digest = sizes
    if corpus is None:
        corpus = Corpus(
            train=np.empty(train_size, np.uint8),
            validation=np.empty(validation_size, np.uint8),
            files=files,
            digest=digest,
        )
    for part in (corpus.train, corpus.validation):
        comm.broadcast(torch.from_numpy(part))
    return corpus


def begin(
    options: argparse.Namespace, environ: Mapping[str, str], tensors: dict[str, torch.Tensor], comm: Communicator
) -> tuple[Claim | None, Restored | None]:
    """This will claim the attempt and restore the newest checkpoint, on rank 0; the others get nothing here."""
    if comm.rank != 0:
        return None, None
    directory = options.out / "checkpoints"
    names = checkpoint_names(directory)
    if options.resume == "never" and names:
        raise TrainError(f"cannot start anew in {options.out}: it has checkpoints up to {names[0]}; give another --out")
    mine = claim(directory, job_facts(environ), time.time())
    restored = restore_newest(directory, layout_of(tensors), lambda text: print(text, flush=True))
    return mine, restored


def share_progress(
    options: argparse.Namespace, tensors: dict[str, torch.Tensor], comm: Communicator, restored: Restored | None
) -> Progress:
    """This will bring every rank to the restored state of rank 0, or to its fresh one."""
    saved = None
    if restored is not None:
        restored.published.snapshot.pour(tensors)
        saved = (restored.published.manifest.facts.step, dict(restored.published.manifest.facts.state))
    broadcast_state(tensors, comm)
    saved = share(comm, saved)
    progress = progress_from(saved[1], saved[0]) if saved else Progress()
    if saved:
        comm.follow(saved[1].get("exchange"))
    progress.total_steps = options.steps or progress.total_steps
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


def check_replicas(task: CharGpt, comm: Communicator) -> str:
    """This will return the SHA-256 of the weights, after comparing it among the ranks.

    Raises:
        TrainError: replicas have drifted apart, which never happens in a run that is right.
    """
    total = hashlib.sha256()
    for name, tensor in sorted(task.model.state_dict().items()):
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    hashes = comm.all_gather_object(total.hexdigest())
    if len(set(hashes)) != 1:
        raise TrainError(f"cannot trust the result: the ranks' weights differ: {hashes}")
    return total.hexdigest()


def tell_result(options: argparse.Namespace, task: CharGpt, weights: str) -> None:
    """This will save the weights, print their hash and a sample."""
    save_model(options.out / "model.pt", task.model)
    if options.sample > 0:
        print("\n--- sample ---\n" + task.sample(options.sample, options.seed) + "\n--- end ---")
    print(f"weights sha256 {weights}")
    print(f"model saved to {options.out / 'model.pt'}", flush=True)


def save_model(path: Path, model: torch.nn.Module) -> None:
    """This will write the weights so that `torch.load` reads them; an older file is replaced whole."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    os.replace(write_draft(path, buffer.getvalue()), path)


def share(comm: Communicator, value: object) -> object:
    """This will give every rank the value of rank 0."""
    return comm.all_gather_object(value)[0]


class Teller:
    """Rank 0's lines for people and for programs."""

    def __init__(
        self, options: argparse.Namespace, comm: Communicator, identity: Identity, progress: Progress, task: CharGpt
    ) -> None:
        self._options, self._comm, self._identity = options, comm, identity
        self._file = MetricsFile(options.out / "metrics.jsonl")
        self._resumed_from: int | None = progress.step or None
        count = sum(parameter.numel() for parameter in task.model.parameters())
        start = f"resumed from step {progress.step}" if progress.step else "a fresh start"
        print(
            f"chargpt: {count / 1e6:.2f} M parameters, {comm.size} rank{'s' * (comm.size > 1)} over {comm.name}, "
            f"attempt {identity.attempt}, {start}",
            flush=True,
        )

    def step(self, report: StepReport) -> None:
        """Tell about one step."""
        self._file.write(self._line(report))
        self._resumed_from = None
        last = report.step == report.total_steps
        if last or report.val_loss is not None or report.step % self._options.print_every == 0:
            validation = f"  val {report.val_loss:.4f}" if report.val_loss is not None else ""
            print(
                f"step {report.step:5d}/{report.total_steps or '?'}  loss {report.loss:.4f}{validation}  "
                f"lr {report.lr:.2e}  {report.samples_per_s:6.0f} samples/s  {report.step_s * 1e3:5.0f} ms "
                f"({report.comm_s * 1e3:.0f} ms exchange)",
                flush=True,
            )
        if report.changed:
            print(f"step {report.step}: {report.changed}", flush=True)
        self._tell_checkpoint(report.checkpoint)

    def end(self, loop: Loop, stop: StopRequest, finished: bool) -> None:
        """Tell about what ended after the last step."""
        for late in loop.late_reports:
            self._tell_checkpoint(late)
            line = {"step": loop.progress.step, "attempt": self._identity.attempt, "time": round(time.time(), 3)}
            self._file.write(line | _checkpoint_facts(late))
        self._file.close()
        if not finished and stop.received is None:
            print("another rank was asked to stop", flush=True)
        if not finished:
            why = stop.received.name if stop.received else "a signal"
            print(f"stopped by {why} at step {loop.progress.step}, to be resumed (exit {EXIT_REQUEUE})", flush=True)

    def _line(self, report: StepReport) -> dict[str, object]:
        line: dict[str, object] = {
            "step": report.step,
            "total_steps": report.total_steps,
            "loss": round(report.loss, 6),
            "val_loss": None if report.val_loss is None else round(report.val_loss, 6),
            "lr": report.lr,
            "grad_norm": round(report.grad_norm, 6),
            "samples_per_s": round(report.samples_per_s, 2),
            "t_step_s": round(report.step_s, 6),
            "t_comm_s": round(report.comm_s, 6),
            "t_checkpoint_copy_s": round(report.checkpoint_copy_s, 6) or None,
            "shares": report.shares if len(report.shares) > 1 else None,
            "attempt": self._identity.attempt,
            "world": self._comm.size,
            "backend": self._comm.name,
            "resumed_from": self._resumed_from,
            "time": round(time.time(), 3),
        }
        return line | _checkpoint_facts(report.checkpoint)

    def _tell_checkpoint(self, report: Report | None) -> None:
        if report is None:
            return
        if report.error:
            print(f"checkpoint of step {report.step}: {report.error}", flush=True)
            return
        print(
            f"checkpoint: step {report.step}, {report.kind}, {report.stored_bytes / 1e6:.2f} MB, written in "
            f"{report.write_s * 1e3:.0f} ms (training waited {report.copy_s * 1e3:.1f} ms)",
            flush=True,
        )


def _checkpoint_facts(report: Report | None) -> dict[str, object]:
    if report is None:
        return {}
    return {
        "checkpoint_step": report.step,
        "checkpoint_kind": report.kind,
        "checkpoint_bytes": report.stored_bytes,
        "checkpoint_write_s": round(report.write_s, 6),
        "checkpoint_error": report.error,
    }
