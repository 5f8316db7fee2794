"""Which kind a checkpoint is of, and its making: what a thread or a process does with a snapshot.

Knows what the last checkpoints were; does not know models, ranks, torch or who copies.
Rules: a new base after so many increments.  The first increment of a chain that could be either, packed changes or the
steps' gradients, is measured as both, and what is smaller stays for the chain.  A share that fails costs a checkpoint
and a message, not the run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from hpctrain.checkpoint.buffers import Buffer
from hpctrain.checkpoint.chunks import CHUNK_BYTES
from hpctrain.checkpoint.fence import Claim
from hpctrain.checkpoint.manifest import Facts
from hpctrain.checkpoint.retain import Retention
from hpctrain.checkpoint.steplog import Taken
from hpctrain.checkpoint.write import Published, estimated_bytes, pack_log, write_checkpoint, write_log
from hpctrain.errors import PublishError


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of one checkpoint; `error` is None if it was published, `note` says what was chosen and why."""

    step: int
    kind: str
    stored_bytes: int
    copy_s: float
    write_s: float
    error: str | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What who copies has to know of what was made."""

    last_step: int = -1  # of the newest published checkpoint
    by_log: bool | None = None  # whether gradients are smaller; None: not yet measured in this chain
    room: bool = False  # for another increment in this chain
    kept: int | None = None  # the number of the buffer that the next increment is taken against

    @property
    def takes_log(self) -> bool:
        """Whether the next checkpoint can be gradients alone."""
        return bool(self.by_log) and self.room


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a keeper is told first."""

    claim: Claim
    parent: Published | None
    base_every: int
    keep: int
    distrusted: tuple[str, ...]
    chunk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One checkpoint to be made."""

    snapshot: Buffer | None
    taken: Taken | None
    facts: Facts
    copy_s: float


class Maker:
    """Makes one checkpoint after another."""

    def __init__(
        self,
        claim: Claim,
        parent: Published | None,
        base_every: int,
        retention: Retention,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._claim = claim
        self._last = parent  # the newest one
        logged = parent is not None and parent.manifest.kind == "gradients"
        self._stand = None if logged else parent  # the newest one with chunks of all tensors
        self._increments = parent.manifest.depth if parent else 0  # since the base
        self._by_log: bool | None = True if logged else None
        self._base_every = max(1, base_every)
        self._retention = retention
        self._chunk_bytes = chunk_bytes

    @property
    def standing(self) -> Standing:
        """What was made up to now."""
        last, stand = self._last, self._stand
        if last is None:
            return Standing()
        room = self._increments + 1 < self._base_every and last.manifest.chunk_bytes == self._chunk_bytes
        kept = stand.snapshot.number if stand and stand.snapshot else None
        return Standing(last_step=last.manifest.facts.step, by_log=self._by_log, room=room, kept=kept)

    def make(self, snapshot: Buffer | None, taken: Taken | None, facts: Facts, copy_s: float) -> Report:
        """This will write and publish a checkpoint of the state, or of the steps' gradients alone.

        Raises:
            StaleAttemptError: a later attempt has taken over.
        """
        started_s = time.perf_counter()
        error, kind, stored_bytes, note = None, "gradients", 0, ""
        if snapshot is not None:
            kind = "delta" if self._stand_for(snapshot) else "base"
        try:
            published, note = self._made(snapshot, taken, facts)
        except (PublishError, OSError) as failure:
            error = str(failure)
        else:
            kind, stored_bytes = published.manifest.kind, published.stored_bytes
            self._take_over(published)
            error = self._sweep() if kind == "base" else None
        return Report(
            step=facts.step,
            kind=kind,
            stored_bytes=stored_bytes,
            copy_s=copy_s,
            write_s=time.perf_counter() - started_s,
            error=error,
            note=note,
        )

    def _made(self, snapshot: Buffer | None, taken: Taken | None, facts: Facts) -> tuple[Published, str]:
        """Write the checkpoint, in the form that is smaller if there is a choice; and what was found out, in words."""
        last = self._last
        if snapshot is None:
            assert taken is not None
            assert last is not None
            packed = pack_log(taken, last, self._chunk_bytes)
            return write_log(self._claim, packed, facts, last, self._chunk_bytes), ""
        note, stand = "", self._stand_for(snapshot)
        if stand and stand is last and taken and taken.since == self.standing.last_step and self._by_log is None:
            packed = pack_log(taken, stand, self._chunk_bytes)
            changes_bytes = estimated_bytes(snapshot, stand, self._chunk_bytes)
            self._by_log = packed.bytes < changes_bytes
            note = _choice(packed.bytes, changes_bytes, len(taken.steps), snapshot.bytes)
            if self._by_log:
                return write_log(self._claim, packed, facts, stand, self._chunk_bytes), note
        return write_checkpoint(self._claim, snapshot, facts, stand, self._chunk_bytes), note

    def _take_over(self, published: Published) -> None:
        """Note what the next one is to stand on."""
        kind = published.manifest.kind
        if kind != "gradients":
            self._stand = published
        self._increments = 0 if kind == "base" else self._increments + 1
        if kind == "base":
            self._by_log = None
        self._last = published

    def _stand_for(self, snapshot: Buffer) -> Published | None:
        stand = self._stand
        if stand is None or stand.snapshot is None or self._increments + 1 >= self._base_every:
            return None
        if stand.snapshot.layout != snapshot.layout or stand.manifest.chunk_bytes != self._chunk_bytes:
            return None
        return stand

    def _sweep(self) -> str | None:
        try:
            self._retention.sweep()
        except (PublishError, OSError) as failure:
            return f"the checkpoint is published, but old ones could not be removed: {failure}"
        return None


def _choice(log_bytes: int, changes_bytes: int, steps: int, state_bytes: int) -> str:
    """In words, what the increments of a chain are and what that saves."""
    of_steps = f"the gradients of {steps} step{'s' * (steps != 1)} take {log_bytes / 1e6:.2f} MB"
    changes = f"what changed about {changes_bytes / 1e6:.2f} MB"
    chosen, best = ("gradients", log_bytes) if log_bytes < changes_bytes else ("changes", changes_bytes)
    times = f", {state_bytes / best:.1f} times less than the state" if best else ""
    return f"{of_steps}, {changes}: increments are {chosen}{times}"
