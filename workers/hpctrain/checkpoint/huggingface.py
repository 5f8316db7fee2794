"""Checkpoints of Hugging Face's Trainer:

    checkpoints = Checkpoints("run1", every=50)
    trainer = Trainer(model, TrainingArguments(..., save_strategy="no"), callbacks=[checkpoints], ...)
    trainer.train(resume_from_checkpoint=checkpoints.newest())
    sys.exit(checkpoints.status)

Saves model, optimizer, schedule, random numbers and the trainer's own state, in the background and as increments; `newest`
makes a checkpoint directory of the Trainer's own format.  Needs the package `transformers`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hpctrain.checkpoint.script import Trees, random_state
from hpctrain.env import StopRequest
from hpctrain.errors import EXIT_REQUEUE

FILES = {"model": "pytorch_model.bin", "optimizer": "optimizer.pt", "lr_scheduler": "scheduler.pt"}


class Checkpoints(TrainerCallback):
    """Saves the trainer's state at intervals, at the end, and at a stop signal."""

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        every: int = 50,
        base_every: int = 10,
        keep: int = 2,
        key_file: str | os.PathLike[str] | None = None,
        key_command: str | None = None,
    ) -> None:
        """Prepare checkpoints in `out`, as `Checkpointer` does."""
        self._trees = Trees(out, base_every=base_every, keep=keep, key_file=key_file, key_command=key_command)
        self._copy: Path | None = None
        self._every = every
        self._stop = StopRequest()
        self._last = 0
        self.status = 0  # the exit status for the scheduler: 0, or 75 to queue the job again

    def newest(self) -> str | None:
        """Return a directory for `resume_from_checkpoint` of `train`.

        None: there is no checkpoint.
        """
        found = self._trees.newest()
        if found is None:
            return None
        self._last, tree = found
        copy = self._copy = self._trees.copy_path(f"huggingface-{os.getpid()}")
        copy.mkdir(parents=True, exist_ok=True)
        for name, file in FILES.items():
            torch.save(tree[name], copy / file)
        random = tree["random"]
        states = {"python": random["python"], "numpy": random["numpy"], "cpu": random["torch"]}
        torch.save(states | ({"cuda": random["cuda"]} if "cuda" in random else {}), copy / "rng_state.pth")
        (copy / "trainer_state.json").write_text(tree["trainer"])
        return str(copy)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Start to record signals."""
        self._stop.__enter__()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """Save the state if it is due, or if the run is to stop."""
        self._remove_copy()  # the trainer has read all of it
        stops = self._stop.received is not None
        if state.is_world_process_zero:
            if stops or (self._every > 0 and state.global_step % self._every == 0):
                self._keep(state, parts, wait=stops)
            self._trees.send_heartbeat(state.global_step)
        if stops:
            self.status = EXIT_REQUEUE
            control.should_training_stop = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """Save the last state."""
        if state.is_world_process_zero and self._every > 0 and self._last != state.global_step:
            self._keep(state, parts, wait=True)
        self._trees.close()
        self._stop.__exit__(None, None, None)
        self._remove_copy()

    def _remove_copy(self) -> None:
        if self._copy is not None:
            self._trees.remove_copy(self._copy)
            self._copy = None

    def _keep(self, state: TrainerState, parts: dict[str, Any], *, wait: bool) -> None:
        tree: dict[str, object] = {name: parts[name].state_dict() for name in FILES}
        tree |= {"trainer": json.dumps(asdict(state), sort_keys=True), "random": random_state()}
        if wait:
            self._trees.wait()
        if self._trees.begin(state.global_step, tree):
            self._last = state.global_step
        if wait:
            self._trees.wait()
