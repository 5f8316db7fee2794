"""Checkpoints beside the training: the loop waits for a copy, a thread does the rest.

Knows when a base is due and that at most one checkpoint is in flight; does not know models, ranks or steps' meaning.
Rules: two snapshot buffers, used in turn: the published one is what the next increment is taken against.  A share that
fails costs a checkpoint and a message, not the run; a later attempt that has taken over ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from hpctrain.checkpoint.fence import Claim
from hpctrain.checkpoint.manifest import CHUNK_BYTES, Facts
from hpctrain.checkpoint.retain import Retention
from hpctrain.checkpoint.snapshot import Snapshot, layout_of
from hpctrain.checkpoint.write import Published, write_checkpoint
from hpctrain.errors import PublishError


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of one checkpoint; `error` is None if it was published."""

    step: int
    kind: str
    stored_bytes: int
    copy_s: float
    write_s: float
    error: str | None


class BackgroundWriter:
    """Writes one checkpoint at a time; a new base after every `base_every` - 1 increments."""

    def __init__(
        self,
        claim: Claim,
        parent: Published | None,
        base_every: int,
        retention: Retention,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._claim = claim
        self._parent = parent
        self._base_every = max(1, base_every)
        self._retention = retention
        self._chunk_bytes = chunk_bytes
        self._spare: Snapshot | None = None
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._flight: Future[Report] | None = None

    @property
    def last_step(self) -> int:
        """The step of the newest published checkpoint, -1 if there is none."""
        return self._parent.manifest.facts.step if self._parent else -1

    def idle(self) -> bool:
        """This will say whether a new checkpoint can begin now; `collect` what is finished first."""
        return self._flight is None

    def begin(self, tensors: Mapping[str, torch.Tensor], facts: Facts) -> float:
        """This will copy the tensors and start to write them; returns the seconds of the copy."""
        assert self._flight is None, "one checkpoint at a time"
        started_s = time.perf_counter()
        layout = layout_of(tensors)
        spare = self._spare
        if spare is None or spare.layout != layout:
            spare = Snapshot(layout)
        self._spare = None
        spare.fill(tensors)
        copy_s = time.perf_counter() - started_s
        self._flight = self._pool.submit(self._write, spare, facts, copy_s)
        return copy_s

    def collect(self) -> Report | None:
        """This will give the report of a checkpoint that has just been finished, without waiting.

        Raises:
            StaleAttemptError: a later attempt has taken over.
        """
        if self._flight is None or not self._flight.done():
            return None
        return self.wait()

    def wait(self) -> Report | None:
        """This will wait for the checkpoint in flight and give its report."""
        flight, self._flight = self._flight, None
        return flight.result() if flight else None

    def close(self) -> None:
        """This will end the thread, after what is in flight."""
        self._pool.shutdown()

    def _write(self, snapshot: Snapshot, facts: Facts, copy_s: float) -> Report:
        started_s = time.perf_counter()
        parent = self._parent_for(snapshot)
        error, kind, stored_bytes = None, "delta" if parent else "base", 0
        try:
            published = write_checkpoint(self._claim, snapshot, facts, parent, self._chunk_bytes)
        except (PublishError, OSError) as failure:
            error, self._spare = str(failure), snapshot
        else:
            stored_bytes = published.stored_bytes
            self._spare = self._parent.snapshot if self._parent else None
            self._parent = published
            error = self._sweep() if kind == "base" else None
        write_s = time.perf_counter() - started_s
        return Report(
            step=facts.step, kind=kind, stored_bytes=stored_bytes, copy_s=copy_s, write_s=write_s, error=error
        )

    def _parent_for(self, snapshot: Snapshot) -> Published | None:
        parent = self._parent
        if parent is None or parent.manifest.depth + 1 >= self._base_every:
            return None
        if parent.snapshot.layout != snapshot.layout or parent.manifest.chunk_bytes != self._chunk_bytes:
            return None
        return parent

    def _sweep(self) -> str | None:
        try:
            self._retention.sweep()
        except (PublishError, OSError) as failure:
            return f"the checkpoint is published, but old ones could not be removed: {failure}"
        return None
