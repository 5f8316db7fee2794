"""Checkpoints during training.

The loop waits for a copy only, and a process of its own writes it.

At most one checkpoint is in flight.  Does not know models, ranks, or the kinds of checkpoints.
Rules: two snapshot buffers are used in turn, because the next increment is compared with the published one.  Writing starts
while the rest is still copied.  The process ends by itself after the trainer, so that a copied state is published.  If the
process is killed, that costs the checkpoint in flight: another one is started, and its first checkpoint is a base.  A later
attempt that has taken over ends the run.
The interval is fixed, or follows from the cost of a checkpoint and the rate of interruptions.  Young's first order: of an
interval T, cost / T is lost to checkpoints and T / 2 to each interruption, which is least at T = sqrt(2 * cost * time between
interruptions).  That time is estimated from the claims of the run's attempts, starting with one interruption a day.  No
checkpoint is due before the last one can be written.  The caller ensures that all ranks get the same answer.
Sources: Young, "A first order approximation to the optimum checkpoint interval", 1974; Daly, 2006.
"""

from __future__ import annotations

import enum
import json
import math
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.chunks import CHUNK_BYTES
from hpctrain.checkpoint.encryption import CheckpointKey
from hpctrain.checkpoint.manifest import CheckpointFacts, Taken
from hpctrain.checkpoint.writing.buffers import BROKEN, FULL, BufferChannel
from hpctrain.checkpoint.writing.files import Claim
from hpctrain.checkpoint.writing.gradient_log import GradientLog
from hpctrain.checkpoint.writing.group import SECRET_BYTES, Endpoint
from hpctrain.checkpoint.writing.maker import CheckpointReport, WriteOrder, WriterSetup, WriterState, initial_state
from hpctrain.checkpoint.writing.publish import Published, RetentionPolicy
from hpctrain.checkpoint.writing.snapshot import Layout, State, TensorSnapshot, layout_of
from hpctrain.errors import StaleAttemptError


class NextCheckpoint(enum.IntEnum):
    """The best content of a rank's next checkpoint.

    Of all ranks the largest value counts, unless one is NOTHING.
    """

    NOTHING = 0  # it cannot begin now
    LOG = 1  # the gradients since the last one
    STATE = 2
    BASE = 3  # a state without a parent


class CheckpointWriter:
    """The loop's side of writing.

    A subclass passes orders to the writer, and returns its reports.
    """

    def __init__(self, state: WriterState, parent: Published | None) -> None:
        self._writer_state = state
        restored = parent.snapshot if parent else None
        self._snapshots = [restored] if isinstance(restored, TensorSnapshot) else []
        self._log: GradientLog | None = None
        self._lent: tuple[GradientLog | None, Taken | None] | None = None  # in flight
        self._copy_s = 0.0  # for which training waited
        self._touching: threading.Thread | None = None

    @property
    def last_step(self) -> int:
        """The step of the newest published checkpoint, -1 if there is none."""
        return self._writer_state.last_step

    def follow(self, log: GradientLog | None) -> None:
        """Let increments be the gradients in `log`, if they are smaller than packed changes."""
        self._log = log

    def prepare(self, state: State) -> None:
        """Allocate the memory for copies of such a state, in the background."""
        layout = layout_of(state)
        alike = [snapshot for snapshot in self._snapshots if snapshot.layout == layout]
        fresh = [TensorSnapshot(layout) for _ in range(len(alike), 2)]
        self._snapshots = [*alike, *fresh]
        self._touching = threading.Thread(target=_touch, args=(fresh,), name="touch", daemon=True)
        self._touching.start()

    def idle(self) -> bool:
        """Return whether a new checkpoint can begin now; call `collect` first."""
        return self._lent is None

    def next_content(self) -> NextCheckpoint:
        """Return the best content of the next checkpoint."""
        if not self.idle():
            return NextCheckpoint.NOTHING
        if not self._writer_state.room:
            return NextCheckpoint.BASE
        return NextCheckpoint.LOG if self.log_suffices() else NextCheckpoint.STATE

    def log_suffices(self) -> bool:
        """Return whether the next checkpoint can be gradients only, without tensors."""
        return self._writer_state.takes_log and self._log is not None and self._log.covers(self.last_step)

    def begin(self, state: State | None, facts: CheckpointFacts, *, base: bool = False) -> float:
        """Copy the state (None: `log_suffices`) and start to write.

        Return the seconds of the copy.
        """
        assert self._lent is None, "one checkpoint at a time"
        started_s = time.perf_counter()
        taken = self._log.take(facts.step) if self._log is not None else None
        snapshot = self._free(layout_of(state)) if state is not None else None
        self._lent = (self._log, taken)
        self._hand_over(WriteOrder(snapshot=snapshot, taken=taken, facts=facts, base=base))
        if snapshot is not None and state is not None:
            self._copy(state, snapshot)
        self._copy_s = time.perf_counter() - started_s
        return self._copy_s

    def collect(self) -> CheckpointReport | None:
        """Return the report of a checkpoint that has just been finished, or None, without waiting.

        Raises:
            StaleAttemptError: a later attempt has taken over.
        """
        if self._lent is None or not self._finished():
            return None
        return self.wait()

    def wait(self) -> CheckpointReport | None:
        """Wait for the checkpoint in flight, and return its report."""
        if self._lent is None:
            return None
        (log, taken), self._lent = self._lent, None
        report, self._writer_state = self._result()
        report = replace(report, copy_s=self._copy_s)
        held = taken is not None and taken.loose.number in self._writer_state.held  # still being read
        if log is not None and taken is not None and not held:  # in an elastic run the loop and its log may be new ones
            log.give_back(taken)
        if self._log is not None:
            self._log.enabled = self._writer_state.by_log is not False
        return report

    def close(self) -> None:
        """End the writer, after the checkpoint in flight."""
        raise NotImplementedError

    def _free(self, layout: Layout) -> TensorSnapshot:
        """Return a buffer that is not being read."""
        alike = [snapshot for snapshot in self._snapshots if snapshot.layout == layout]
        taken = {self._writer_state.base_buffer, *self._writer_state.held}
        free = [snapshot for snapshot in alike if snapshot.number not in taken]
        snapshot = free[0] if free else TensorSnapshot(layout)
        self._snapshots = alike if free else [*alike, snapshot]
        return snapshot

    def _copy(self, state: State, snapshot: TensorSnapshot) -> None:
        try:
            snapshot.fill(state, lambda there: self._report_progress(snapshot, there))
        except BaseException:
            self._report_progress(snapshot, BROKEN)
            raise
        self._report_progress(snapshot, FULL)

    def _hand_over(self, order: WriteOrder) -> None:
        """Pass the order to the writer, which waits for the rest of the copy."""
        raise NotImplementedError

    def _report_progress(self, snapshot: TensorSnapshot, there: int) -> None:
        """Pass the copy progress to the writer."""
        raise NotImplementedError

    def _finished(self) -> bool:
        raise NotImplementedError

    def _result(self) -> tuple[CheckpointReport, WriterState]:
        raise NotImplementedError


def _touch(snapshots: Sequence[TensorSnapshot]) -> None:
    for snapshot in snapshots:
        snapshot.touch()


CLOSE_S = 20.0
# By default glibc's threads return memory after each chunk and touch it again: a third of the packing time.
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(256 << 20), "MALLOC_MMAP_THRESHOLD_": str(64 << 20)}


class ProcessWriter(CheckpointWriter):
    """Writes in a process that outlives this one."""

    def __init__(
        self,
        claim: Claim,
        parent: Published | None,
        base_every: int,
        policy: RetentionPolicy,
        distrusted: tuple[str, ...] = (),
        chunk_bytes: int = CHUNK_BYTES,
        ranks: int = 1,
        endpoint: Endpoint | None = None,
        key: CheckpointKey | None = None,
    ) -> None:
        """Start the process; `endpoint`: the first writer's address (None: this one)."""
        self._task = WriterSetup(
            claim=claim,
            parent=parent,
            base_every=base_every,
            policy=policy,
            distrusted=distrusted,
            chunk_bytes=chunk_bytes,
            ranks=ranks,
            endpoint=endpoint,
            secret=secrets.token_bytes(SECRET_BYTES),
            key=key,
        )
        # The first rank's listener outlives a process that writes, so that the others find the next one there.
        self._listener = socket.create_server(("", 0), backlog=ranks) if ranks > 1 and endpoint is None else None
        self._order: WriteOrder | None = None
        super().__init__(initial_state(parent, base_every, chunk_bytes), parent)
        self._start(self._task)

    def close(self) -> None:
        self._line.close()
        if self._listener is not None:
            self._listener.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return  # it waits for the share, and ends by itself
        finally:
            self._snapshots.clear()

    @property
    def pid(self) -> int:
        """The process id of the writer."""
        return self._process.pid

    def endpoints(self, addresses: Sequence[str]) -> list[Endpoint]:
        """Return this writer's address for the other ranks, by rank.

        `addresses` are those of its host.
        """
        assert self._listener is not None
        port = self._listener.getsockname()[1]
        secret, hosts = self._task.secret, tuple(addresses)
        return [Endpoint(rank=rank, addresses=hosts, port=port, secret=secret) for rank in range(self._task.ranks)]

    def _start(self, task: WriterSetup) -> None:
        own_end, writers_end = socket.socketpair()
        with writers_end:
            listener = [self._listener.fileno()] if self._listener else []
            given = [writers_end.fileno(), *listener]
            command = [sys.executable, "-P", "-m", "hpctrain.checkpoint.writing.process", *map(str, given)]
            paths = [path or os.getcwd() for path in sys.path]
            self._process = subprocess.Popen(
                command,
                pass_fds=given,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=ALLOCATOR | os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )
        self._line = BufferChannel(own_end)
        self._line.send(task)

    def _hand_over(self, order: WriteOrder) -> None:
        self._order = order
        try:
            self._line.send(self._order)
        except OSError:
            pass  # it has ended: `_result` starts another one

    def _report_progress(self, snapshot: TensorSnapshot, there: int) -> None:
        with suppress(OSError):  # it has ended
            self._line.send(there)

    def _finished(self) -> bool:
        return bool(select.select([self._line], [], [], 0)[0])

    def _result(self) -> tuple[CheckpointReport, WriterState]:
        assert self._order is not None
        try:
            answer: Any = self._line.receive()
        except EOFError:
            return self._restart(self._order)
        message, state = answer
        if isinstance(message, StaleAttemptError):
            raise message
        return message, state

    def _restart(self, order: WriteOrder) -> tuple[CheckpointReport, WriterState]:
        self._line.close()
        status = self._process.wait()
        self._task = replace(self._task, parent=None)
        self._start(self._task)
        why = f"the process that writes checkpoints has ended with status {status}; another one is started"
        report = CheckpointReport(step=order.facts.step, kind="", stored_bytes=0, write_s=0.0, error=why)
        return report, replace(self._writer_state, by_log=None, room=False, base_buffer=None)


BELIEVED_S = 86400.0  # between interruptions, before any was seen
FIRST = 10  # steps until the first checkpoint, which measures the cost
MOST = 100_000
WEIGHT = 0.3  # of the newest measurement


class Interval:
    """Decides when checkpoints are due: every so many steps, or (None) at the best interval."""

    def __init__(self, every: int | None, claimed_at_s: Sequence[float] = (), now_s: float = 0.0) -> None:
        self._every = every
        self._between_s = between_interruptions_s(claimed_at_s, now_s)
        self._cost_s = self._write_s = self._step_s = 0.0
        self._next = self._printed_steps = 0

    @property
    def wanted(self) -> bool:
        """Whether checkpoints are made at all."""
        return self._every is None or self._every > 0

    @property
    def measured(self) -> bool:
        """Whether the interval is measured."""
        return self._every is None

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step."""
        if self._every is not None:
            return self._every > 0 and step % self._every == 0
        if not self._next:
            self._next = step + FIRST - 1
        return step >= self._next

    def learn(self, step_s: float, cost_s: float, write_s: float) -> None:
        """Learn the seconds of a step, of waiting for a checkpoint, and of writing it."""
        for name, value in (("_step_s", step_s), ("_cost_s", cost_s), ("_write_s", write_s)):
            before = getattr(self, name)
            setattr(self, name, before + WEIGHT * (value - before) if before else value)

    def steps(self) -> int:
        """Return the best interval in steps."""
        if not self._step_s:
            return FIRST
        best_s = max(math.sqrt(2 * self._cost_s * self._between_s), self._write_s)
        return max(1, min(MOST, round(best_s / self._step_s)))

    def next_after(self, step: int, steps: int) -> str:
        """Make the next checkpoint due `steps` steps after this one.

        Return a line if the interval changes.
        """
        self._next = step + steps
        changed, self._printed_steps = abs(steps - self._printed_steps) > self._printed_steps / 4, steps
        if not changed or not self._step_s:
            return ""
        return (
            f"checkpoint: next in {steps} steps: one costs {self._cost_s * 1e3:.1f} ms, a step takes "
            f"{self._step_s * 1e3:.0f} ms, and the run is interrupted every {self._between_s / 3600:.1f} h"
        )


def between_interruptions_s(claimed_at_s: Sequence[float], now_s: float) -> float:
    """Estimate the seconds between interruptions from the begin of all attempts."""
    if not claimed_at_s:
        return BELIEVED_S
    # As if one day without an interruption had come first, and then one.
    return (max(0.0, now_s - min(claimed_at_s)) + BELIEVED_S) / len(claimed_at_s)


def claims_at_s(directory: Path) -> list[float]:
    """Return when the attempts of a run began, in epoch seconds."""
    found = []
    for path in directory.glob("attempt.*"):
        try:
            found.append(float(json.loads(path.read_bytes())["claimed_at_s"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # its writer died while writing it
    return found
