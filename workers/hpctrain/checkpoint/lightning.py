"""Checkpoints of PyTorch Lightning:

    checkpoints = Checkpoints("run1", every=50)
    trainer = Trainer(callbacks=[checkpoints], enable_checkpointing=False, ...)
    trainer.fit(model, data, ckpt_path=checkpoints.newest())
    sys.exit(checkpoints.status)

Saves the content of Lightning's own checkpoints, in the background and as increments; `newest` makes a file of Lightning's
format.  Needs the package `lightning`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from hpctrain.checkpoint.script import Trees
from hpctrain.checkpoint.tree import keepable
from hpctrain.env import StopRequest
from hpctrain.errors import EXIT_REQUEUE

# Not needed to resume: values in these that cannot be saved are left out.
RECORDS = ("hyper_parameters", "datamodule_hyper_parameters")


class Checkpoints(Callback):
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
        self._printed: set[str] = set()
        self.status = 0  # the exit status for the scheduler: 0, or 75 to queue the job again

    def newest(self) -> str | None:
        """Return a file for `ckpt_path` of `fit`, made of the newest checkpoint.

        None: there is none.
        """
        found = self._trees.newest()
        if found is None:
            return None
        self._last, tree = found
        self._copy = self._trees.copy_path(f"lightning-{os.getpid()}.ckpt")
        torch.save(tree, self._copy)
        return str(self._copy)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to record signals; Lightning has read its file."""
        if self._copy is not None:
            self._trees.remove_copy(self._copy)
        self._stop.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save the state if it is due, or if the run is to stop."""
        step = trainer.global_step
        stops = bool(trainer.strategy.reduce_boolean_decision(self._stop.received is not None, all=False))
        due = self._every > 0 and step > self._last and step % self._every == 0
        if due or stops:
            self._keep(trainer, wait=stops)
        self._trees.send_heartbeat(step)
        if stops:
            self.status = EXIT_REQUEUE
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last state."""
        if self._every > 0 and self._last != trainer.global_step:
            self._keep(trainer, wait=True)
        self._trees.close()
        self._stop.__exit__(None, None, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Finish the checkpoint that is being written."""
        self._trees.close()
        self._stop.__exit__(None, None, None)

    def _keep(self, trainer: Trainer, *, wait: bool) -> None:
        tree = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if not trainer.is_global_zero:
            return
        for record in RECORDS:
            if record in tree:
                tree[record], refused = keepable(tree[record], record)
                self._print_once(refused)
        if wait:
            self._trees.wait()
        if self._trees.begin(trainer.global_step, tree):
            self._last = trainer.global_step
        if wait:
            self._trees.wait()

    def _print_once(self, refused: list[str]) -> None:
        for why in refused:
            if why not in self._printed:
                print(f"checkpoint: {why}; it is left out", flush=True)
        self._printed.update(refused)
