"""Make checkpoints: choose the kind, write this rank's part, publish.

Knows the last checkpoints; does not know models, ranks or torch.
Rules: a new base after so many increments.  An increment is packed changes or the steps' gradients; at the first one of a
chain both are measured, and the smaller kind stays for the chain.  If the share fails, that costs a checkpoint and a message,
not the run.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from hpctrain.checkpoint.chunks import CHUNK_BYTES
from hpctrain.checkpoint.encryption import CheckpointKey
from hpctrain.checkpoint.manifest import CheckpointFacts, Taken
from hpctrain.checkpoint.writing.buffers import FULL, Buffer
from hpctrain.checkpoint.writing.files import Claim
from hpctrain.checkpoint.writing.group import Endpoint, First, Lost, Other
from hpctrain.checkpoint.writing.publish import (
    Footing,
    PackedLog,
    Published,
    Retention,
    RetentionPolicy,
    WrittenPart,
    estimated_bytes,
    footing_of,
    next_footing,
    pack_log,
    part_from_json,
    part_to_json,
    publish,
    threads,
    write_log,
    write_part,
)
from hpctrain.errors import PublishError, StaleAttemptError
from hpctrain.values import travels


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """The result of one checkpoint.

    `error` is None if it was published, `note` tells the choice of its kind.
    """

    step: int
    kind: str
    stored_bytes: int
    write_s: float  # from the start of the copy
    error: str | None
    note: str = ""
    copy_s: float = 0.0  # for which training waited; the trainer measures it


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterState:
    """The facts about earlier checkpoints that the trainer needs."""

    last_step: int = -1  # of the newest published checkpoint
    by_log: bool | None = None  # whether gradients are smaller; None: not measured in this chain
    room: bool = False  # the chain takes another increment
    base_buffer: int | None = None  # number of the buffer that the next increment is compared with
    held: frozenset[int] = frozenset()  # numbers of buffers that are still being read
    away: bool = False  # the share did not take the last checkpoint

    @property
    def takes_log(self) -> bool:
        """Whether the next checkpoint can be gradients only."""
        return bool(self.by_log) and self.room and not self.away


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSetup:
    """The first message to the process that writes."""

    claim: Claim
    parent: Published | None
    base_every: int
    policy: RetentionPolicy
    distrusted: tuple[str, ...]
    chunk_bytes: int
    ranks: int = 1  # number of ranks that write together
    endpoint: Endpoint | None = None  # address of the first writer; None: this is the first
    secret: bytes = field(default=b"", repr=False)  # the others prove it to the first
    key: CheckpointKey | None = None  # to encrypt with


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOrder:
    """One checkpoint to make; the snapshot may still be being copied."""

    snapshot: Buffer | None
    taken: Taken | None
    facts: CheckpointFacts
    base: bool = False  # make a base in any case


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The kind of a checkpoint, and its parent."""

    kind: str
    parent: Footing | None
    taken: Taken | None
    packed: PackedLog | None = None  # if it was measured
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A published checkpoint."""

    kind: str
    stored_bytes: int


class Maker:
    """Makes one checkpoint after another, or this rank's part of each."""

    def __init__(
        self,
        claim: Claim,
        parent: Published | None,
        base_every: int,
        retention: Retention,
        chunk_bytes: int = CHUNK_BYTES,
        group: First | Other | None = None,
        key: CheckpointKey | None = None,
    ) -> None:
        """Prepare the threads; `group`: the writers of the other ranks.

        None: this one writes everything.
        """
        self._claim, self._key = claim, key
        fits = parent is not None and parent.manifest.chunk_bytes == chunk_bytes
        self._last = footing_of(parent) if parent and fits else None  # the newest checkpoint
        logged = self._last is not None and self._last.kind == "gradients"
        self._footing = None if logged else self._last  # the newest checkpoint with chunks of all tensors
        self._increments = self._last.depth if self._last else 0  # since the base
        self._by_log: bool | None = True if logged else None
        self._base_every = max(1, base_every)
        self._retention = retention
        self._chunk_bytes = chunk_bytes
        self._group = group
        self._untidy = False
        self._pool = ThreadPoolExecutor(threads(), "packer")

    @property
    def writer_state(self) -> WriterState:
        """The facts about earlier checkpoints, for the trainer."""
        last, footing = self._last, self._footing
        if last is None:
            return WriterState()
        room = self._increments + 1 < self._base_every
        base_buffer = footing.snapshot.number if footing and footing.snapshot else None
        return WriterState(last_step=last.step, by_log=self._by_log, room=room, base_buffer=base_buffer)

    def make(self, order: WriteOrder) -> CheckpointReport:
        """Write and publish a checkpoint of the state, or of the steps' gradients.

        Raises:
            StaleAttemptError: a later attempt has taken over.
        """
        started_s = time.perf_counter()
        plan, made, error = self._plan(order), None, None
        try:
            made = self._made(order, plan)
        except (PublishError, OSError) as failure:
            error = str(failure)
        self._untidy = made is not None and made.kind == "base" and not isinstance(self._group, Other)
        return CheckpointReport(
            step=order.facts.step,
            kind=plan.kind,
            stored_bytes=made.stored_bytes if made else 0,
            write_s=time.perf_counter() - started_s,
            error=error,
            note=plan.note,
        )

    def tidy(self) -> None:
        """Remove old checkpoints after a base; done later, because nothing waits for it."""
        if not self._untidy:
            return
        self._untidy = False
        try:
            self._retention.sweep()
        except (PublishError, OSError) as failure:
            print(f"checkpoint: cannot remove old checkpoints: {failure}", file=sys.stderr, flush=True)
        except StaleAttemptError:
            pass  # the next checkpoint reports it

    def close(self) -> None:
        """End the threads, and leave the other writers."""
        self._pool.shutdown()
        if self._group is not None:
            self._group.close()

    def _plan(self, order: WriteOrder) -> _Plan:
        """Choose the smallest kind that is possible."""
        snapshot, taken, last = order.snapshot, order.taken, self._last
        if snapshot is None:
            assert taken is not None
            return _Plan(kind="gradients", parent=last, taken=taken)
        footing = None if order.base else self._footing_for(snapshot)
        plan = _Plan(kind="delta" if footing else "base", parent=footing, taken=None)
        if footing is None or footing.snapshot is None or footing is not last or self._by_log is not None:
            return plan
        if taken is None or taken.since != footing.step:
            return plan
        snapshot.copy_progress.wait(FULL)
        packed = pack_log(taken, footing, self._pool, self._chunk_bytes, self._key)
        changes_bytes = estimated_bytes(snapshot, footing.snapshot, self._chunk_bytes)
        self._by_log = packed.bytes < changes_bytes
        note = _choice(packed.bytes, changes_bytes, len(taken.steps), snapshot.bytes)
        if self._by_log and self._group is None:  # else all ranks switch at the next checkpoint
            return _Plan(kind="gradients", parent=footing, taken=taken, packed=packed, note=note)
        return replace(plan, note=note)

    def _made(self, order: WriteOrder, plan: _Plan) -> _Made:
        """Write this rank's part; publish all parts, or get the first rank's result."""
        part, failure = None, None
        try:
            part = self._write(order, plan)
        except (PublishError, OSError, StaleAttemptError) as error:
            failure = error
        if self._group is None:
            if failure is not None:
                raise failure
            assert part is not None
            return self._published(order, plan, [part])
        if isinstance(self._group, Other):
            return self._report_part(order, plan, part, failure, self._group)
        return self._publish_together(order, plan, part, failure, self._group)

    def _write(self, order: WriteOrder, plan: _Plan) -> WrittenPart:
        if plan.kind != "gradients":
            assert order.snapshot is not None
            return write_part(
                self._claim, order.snapshot, order.facts, plan.parent, self._pool, self._chunk_bytes, self._key
            )
        assert plan.taken is not None
        if plan.parent is None:
            raise PublishError("the logged steps have no parent checkpoint")
        packed = plan.packed or pack_log(plan.taken, plan.parent, self._pool, self._chunk_bytes, self._key)
        return write_log(self._claim, packed, order.facts, plan.parent)

    def _published(self, order: WriteOrder, plan: _Plan, parts: list[WrittenPart]) -> _Made:
        name, checksum, bytes_ = publish(
            self._claim, order.facts, parts, plan.parent, plan.taken, self._chunk_bytes, self._key
        )
        self._take_over(order, plan, name, checksum, parts[0])
        return _Made(kind=plan.kind, stored_bytes=bytes_ + sum(part.data.bytes for part in parts))

    def _publish_together(
        self, order: WriteOrder, plan: _Plan, part: WrittenPart | None, failure: Exception | None, group: First
    ) -> _Made:
        """On the first rank: collect all parts or errors, publish, and announce the result."""
        verdict: dict[str, object] = {"error": "the first rank's writer has failed"}
        try:
            message = group.collect(order.facts.step)
            if failure is not None:
                raise failure
            assert part is not None
            parts = [part, *(_part_of_message(rank, fields, plan) for rank, fields in enumerate(message, 1))]
            made = self._published(order, plan, parts)
            assert self._last is not None
            verdict = {"name": self._last.name, "checksum": self._last.checksum, "by_log": self._by_log}
        except (PublishError, OSError, StaleAttemptError) as error:
            verdict = {"error": str(error)}
            self._forget()
            raise
        finally:
            group.announce(verdict | {"step": order.facts.step})
        return made

    def _report_part(
        self, order: WriteOrder, plan: _Plan, part: WrittenPart | None, failure: Exception | None, group: Other
    ) -> _Made:
        what = part_to_json(part) if part is not None else {"error": str(failure)}
        try:
            verdict = group.report(what | {"step": order.facts.step, "kind": plan.kind})
        except Lost:
            self._forget()
            raise
        if "error" in verdict or part is None:
            self._forget()
            if isinstance(failure, StaleAttemptError):
                raise failure
            raise PublishError(str(verdict.get("error")))
        self._take_over(order, plan, verdict["name"], verdict["checksum"], part)
        self._by_log = verdict["by_log"]
        return _Made(kind=plan.kind, stored_bytes=part.data.bytes)

    def _take_over(self, order: WriteOrder, plan: _Plan, name: str, checksum: str, part: WrittenPart) -> None:
        """Record the parent of the next checkpoint."""
        made = next_footing(name, checksum, order.facts, plan.kind, plan.parent, part, order.snapshot)
        if plan.kind == "gradients":
            made = replace(made, snapshot=None)
        else:
            self._footing = made
        self._increments = 0 if plan.kind == "base" else self._increments + 1
        if plan.kind == "base":
            self._by_log = None
        self._last = made

    def _forget(self) -> None:
        """Make the next checkpoint a base, because ranks may have different records."""
        self._last = self._footing = None
        self._by_log = None

    def _footing_for(self, snapshot: Buffer) -> Footing | None:
        footing = self._footing
        if footing is None or footing.snapshot is None or self._increments + 1 >= self._base_every:
            return None
        return footing if footing.snapshot.layout == snapshot.layout else None


def initial_state(parent: Published | None, base_every: int, chunk_bytes: int) -> WriterState:
    """Return the state of a maker whose next increment builds on `parent`."""
    if parent is None or parent.manifest.chunk_bytes != chunk_bytes:
        return WriterState()
    manifest, snapshot = parent.manifest, parent.snapshot
    logged = manifest.kind == "gradients"
    base_buffer = snapshot.number if snapshot and not logged else None
    room = manifest.depth + 1 < max(1, base_every)
    return WriterState(
        last_step=manifest.facts.step, by_log=True if logged else None, room=room, base_buffer=base_buffer
    )


def _part_of_message(rank: int, message: dict[str, Any], plan: _Plan) -> WrittenPart:
    """Return another rank's part, if it fits the plan."""
    if "error" in message:
        raise PublishError(f"rank {rank}: {message['error']}")
    part = part_from_json(message)
    parent = plan.parent.name if plan.parent else None
    if ("gradients" in (message["kind"], plan.kind) and message["kind"] != plan.kind) or part.parent_name not in (
        parent,
        None,
    ):
        raise PublishError(
            f"rank {rank} has written {message['kind']} on {part.parent_name}, not {plan.kind} on {parent}"
        )
    return part


def _choice(log_bytes: int, changes_bytes: int, steps: int, state_bytes: int) -> str:
    """Return the kind of a chain's increments and its saving, as text."""
    of_steps = f"the gradients of {steps} step{'s' * (steps != 1)} take {log_bytes / 1e6:.2f} MB"
    changes = f"the changes about {changes_bytes / 1e6:.2f} MB"
    chosen, best = ("gradients", log_bytes) if log_bytes < changes_bytes else ("changes", changes_bytes)
    times = f", {state_bytes / best:.1f} times less than the state" if best else ""
    return f"{of_steps}, {changes}: increments are {chosen}{times}"
