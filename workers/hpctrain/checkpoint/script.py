"""Checkpoints for any script.

Objects with a `state_dict()` are saved in the background, and restored.

    run = Checkpointer("run1", model=model, optimizer=optimizer, schedule=schedule)  # resumes from the last checkpoint
    for step in range(run.step, 10_000):
        ...                                                                          # a step, as before
        run.step_done()                                                              # saves every 50th step

Knows no training loop.
Rules: SIGTERM and SIGUSR1 end the script after the current step, with a checkpoint and exit status 75 (queue the job again).
Of several ranks the first one writes, and all read; so the saved objects must be equal on all ranks.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.distributed as dist

from hpctrain.checkpoint.encryption import checkpoint_key
from hpctrain.checkpoint.manifest import CheckpointFacts, check_key, checkpoint_names
from hpctrain.checkpoint.restore import RestoredCheckpoint, restore_newest
from hpctrain.checkpoint.tree import flattened, grown
from hpctrain.checkpoint.writing.files import Claim, claim
from hpctrain.checkpoint.writing.maker import CheckpointReport
from hpctrain.checkpoint.writing.publish import RetentionPolicy
from hpctrain.checkpoint.writing.snapshot import TensorSnapshot
from hpctrain.checkpoint.writing.writer import ProcessWriter
from hpctrain.env import StopRequest, job_facts, rank_info
from hpctrain.errors import EXIT_REQUEUE, MismatchError
from hpctrain.heartbeat import Heartbeat, HeartbeatStatus

MEMORY = "/dev/shm"  # noqa: S108 (a new directory of mode 0700 is made there)


class Stateful(Protocol):
    """An object that can be saved: a model, an optimizer, a schedule, a scaler, a sampler."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore a state."""


class Trees:
    """Checkpoints of nested state in a directory: reads the newest one, and writes new ones."""

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        base_every: int = 10,
        keep: int = 2,
        keep_every_hours: float = 0.0,
        key_file: str | os.PathLike[str] | None = None,
        key_command: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Open a directory; every `base_every`-th checkpoint is a base, and `keep` chains stay.

        Raises:
            CheckpointKeyError: the key cannot be read, or is not private.
        """
        self._environ = os.environ if environ is None else environ
        self._key = checkpoint_key(key_file, key_command, self._environ)
        self.directory = Path(out) / "checkpoints"
        self._base_every, self._policy = base_every, RetentionPolicy(keep=keep, every_s=3600 * keep_every_hours)
        self._claim: Claim | None = None
        self._writer: ProcessWriter | None = None
        self._restored: RestoredCheckpoint | None = None
        self._heartbeat = Heartbeat(self._environ)
        self._saved_step, self._saved_at_s = 0, 0.0
        self._away = ""  # why the last one is not on the share

    def newest(self) -> tuple[int, Any] | None:
        """Read the newest undamaged checkpoint.

        Return its step and tree, or None if there is no checkpoint.

        Raises:
            NoCheckpointError: all checkpoints are damaged.
            CheckpointKeyError: the key does not fit them.
        """
        self._restored = restore_newest(self.directory, None, _print, key=self._key)
        if self._restored is None:
            return None
        published = self._restored.published
        assert isinstance(published.snapshot, TensorSnapshot)
        names = [slot.name for slot in published.snapshot.layout]
        tensors = dict(zip(names, (tensor.clone() for tensor in published.snapshot.tensors()), strict=True))
        facts = published.manifest.facts
        if "tree" not in facts.state:
            raise MismatchError(
                f"cannot resume from {self.directory}: its checkpoints are of hpctrain's own loop; give another directory"
            )
        self._saved_step, self._saved_at_s = facts.step, time.monotonic() - (time.time() - facts.written_at_s)
        return facts.step, grown(facts.state["tree"], tensors)

    def begin(self, step: int, tree: object) -> bool:
        """Copy a tree and start to write it.

        Return False if the last checkpoint is still being written.
        """
        tensors, skeleton = flattened(tree)
        writer = self._writer or self._new_writer()
        self.collect()
        if not writer.idle():
            _print(f"checkpoint of step {step}: left out, because the last one is still being written")
            return False
        facts = CheckpointFacts(
            step=step,
            attempt=self._claim.attempt if self._claim else 0,
            generation=0,
            world=rank_info(self._environ).world,
            job=job_facts(self._environ).job,
            written_at_s=round(time.time(), 3),
            state={"tree": skeleton},
        )
        writer.begin(tensors, facts)
        return True

    def collect(self) -> CheckpointReport | None:
        """Return the report of a checkpoint that is finished, or None."""
        return self._note(self._writer.collect() if self._writer else None)

    def wait(self) -> CheckpointReport | None:
        """Wait for the checkpoint that is being written."""
        return self._note(self._writer.wait() if self._writer else None)

    def close(self) -> None:
        """Finish writing, and end the process."""
        self.wait()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def send_heartbeat(self, step: int) -> None:
        """Send a heartbeat if it is due."""
        if self._heartbeat.due():
            status = HeartbeatStatus(
                step=step,
                total_steps=0,
                loss=math.nan,
                samples_per_s=0.0,
                steps_per_s=0.0,
                checkpoint_step=self._saved_step,
                checkpoint_at_s=self._saved_at_s,
                goodput=math.nan,
                note=self._away,
                directory=str(self.directory),
            )
            self._heartbeat.send(status)

    def _note(self, report: CheckpointReport | None) -> CheckpointReport | None:
        if report is not None:
            self._away = f"checkpoints: {report.error}" if report.error else ""
        if report is not None and report.error:
            _print(f"checkpoint of step {report.step}: {report.error}")
        elif report is not None:
            self._saved_step, self._saved_at_s = report.step, time.monotonic()
        return report

    def copy_path(self, name: str) -> Path:
        """Return a path for a copy in a framework's format; in memory if it must be secret."""
        if self._key is None:
            return self.directory.parent / name
        memory = MEMORY if os.access(MEMORY, os.W_OK) else None
        return Path(tempfile.mkdtemp(prefix="hpctrain-", dir=memory)) / name

    def remove_copy(self, path: Path) -> None:
        """Remove the copy at a path of `copy_path`."""
        path.unlink(missing_ok=True) if not path.is_dir() else shutil.rmtree(path, ignore_errors=True)
        if self._key is not None:
            shutil.rmtree(path.parent, ignore_errors=True)

    def _new_writer(self) -> ProcessWriter:
        check_key(self.directory, self._key)
        self._claim = claim(self.directory, job_facts(self._environ), time.time())
        damaged = self._restored.damaged if self._restored else ()
        parent = self._restored.published if self._restored else None
        self._writer = ProcessWriter(self._claim, parent, self._base_every, self._policy, damaged, key=self._key)
        return self._writer


class Checkpointer:
    """Saves objects with a `state_dict()`, and the state of random generators."""

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        every: int = 50,
        base_every: int = 10,
        keep: int = 2,
        keep_every_hours: float = 0.0,
        key_file: str | os.PathLike[str] | None = None,
        key_command: str | None = None,
        environ: Mapping[str, str] | None = None,
        **parts: Stateful,
    ) -> None:
        """Resume from the newest checkpoint in `out`, if there is one.

        Restore the parts, and set `step`.

        `every`: steps between checkpoints.  `base_every`: every so many checkpoints are a base.  `keep`: chains to keep.
        `key_file` or `key_command`: encrypt with the key in a file, or with the one that a command prints.

        Raises:
            MismatchError: the checkpoint is of another model; names the first tensor that differs.
            NoCheckpointError: all checkpoints are damaged.
            CheckpointKeyError: the key cannot be used, or does not fit the checkpoints.
        """
        environ = os.environ if environ is None else environ
        self._parts, self._every = parts, every
        self._first = rank_info(environ).rank == 0
        self._trees = Trees(
            out,
            base_every=base_every,
            keep=keep,
            keep_every_hours=keep_every_hours,
            key_file=key_file,
            key_command=key_command,
            environ=environ,
        )
        self._stop = StopRequest()
        self._stop.__enter__()
        self.step = 0
        found = self._trees.newest() if checkpoint_names(self._trees.directory) else None
        if found is not None:
            self.step, tree = found
            self._take_over(tree)

    def step_done(self) -> None:
        """Count a step, and save the state if it is due.

        End the script if a signal has asked for that.

        Raises:
            SystemExit: with status 75; the state is saved.
        """
        self.step += 1
        stops = self._any_rank_stops()
        if self._first:
            self._trees.collect()
            if self._every > 0 and self.step % self._every == 0 and not stops:
                self._trees.begin(self.step, self._tree())
            self._trees.send_heartbeat(self.step)
        if stops:
            self.close()
            print(f"stopped by a signal at step {self.step}, to be resumed (exit {EXIT_REQUEUE})", flush=True)
            raise SystemExit(EXIT_REQUEUE)

    def save(self) -> None:
        """Save the current state, and wait until it is on the share."""
        if self._first:
            self._trees.wait()
            self._trees.begin(self.step, self._tree())
            self._trees.wait()

    def close(self) -> None:
        """Save the last state, and finish."""
        if self._first and self._every > 0 and self._saved_step() != self.step:
            self.save()
        self._trees.close()
        self._stop.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif kind is not SystemExit:
            self._trees.close()

    def _saved_step(self) -> int:
        self._trees.wait()
        return self._trees._saved_step

    def _any_rank_stops(self) -> bool:
        stops = self._stop.received is not None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            any_stops = torch.tensor([int(stops)], device=device)
            dist.all_reduce(any_stops, dist.ReduceOp.MAX)
            return bool(any_stops)
        return stops

    def _tree(self) -> dict[str, object]:
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return {"parts": parts, "random": random_state()}

    def _take_over(self, tree: Any) -> None:
        there = tree["parts"]
        if there.keys() != self._parts.keys():
            raise MismatchError(
                f"cannot resume from {self._trees.directory}: it has {', '.join(there)}, and this script saves "
                f"{', '.join(self._parts)}"
            )
        for name, part in self._parts.items():
            if isinstance(part, torch.nn.Module):
                check_alike(there[name], part.state_dict(), self._trees.directory, name)
        for name, part in self._parts.items():
            part.load_state_dict(there[name])
        set_random_state(tree["random"])


def check_alike(saved: Mapping[str, Any], live: Mapping[str, Any], source: Path, what: str) -> None:
    """Check that a model's saved tensors are those that it has.

    Raises:
        MismatchError: names the first one that differs.
    """
    for name in [*live, *saved]:
        has = [_kind(tensors[name]) if name in tensors else "none" for tensors in (saved, live)]
        if has[0] != has[1]:
            raise MismatchError(
                f"cannot resume from {source}: for {what}'s {name!r} it has {has[0]}, this script {has[1]}"
            )


def random_state() -> dict[str, object]:
    """Return the state of Python's, NumPy's and torch's generators."""
    state: dict[str, object] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned; GPUs' only if their number is the same."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def _print(text: str) -> None:
    print(text, flush=True)
