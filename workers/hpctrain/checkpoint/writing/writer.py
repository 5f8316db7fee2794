"""Checkpoints beside the training: the loop waits for a copy, somebody else does the rest.

Knows that at most one checkpoint is in flight; does not know models, ranks or steps' meaning, nor what kinds there are.
What is copied is written while the rest is still copied.
Rules: two snapshot buffers, used in turn: the published one is what the next increment is taken against.  A later attempt
that has taken over ends the run.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from hpctrain.checkpoint.format.manifest import Facts
from hpctrain.checkpoint.format.step_log import Taken
from hpctrain.checkpoint.writing.buffers import BROKEN, FULL
from hpctrain.checkpoint.writing.gradient_log import GradientLog
from hpctrain.checkpoint.writing.maker import Order, Report, Standing
from hpctrain.checkpoint.writing.publish import Published
from hpctrain.checkpoint.writing.snapshot import Layout, Snapshot, State, layout_of


class Wish(enum.IntEnum):
    """What a rank would make the next checkpoint of; of all ranks' wishes the greatest counts, unless one says NOTHING."""

    NOTHING = 0  # it does not begin now
    LOG = 1  # the gradients since the last one
    STATE = 2
    BASE = 3  # a state that stands on nothing


class Writer:
    """What the loop sees of whoever writes; a subclass hands over what was copied, and gets the report."""

    def __init__(self, standing: Standing, parent: Published | None) -> None:
        self._standing = standing
        kept = parent.snapshot if parent else None
        self._snapshots = [kept] if isinstance(kept, Snapshot) else []
        self._log: GradientLog | None = None
        self._lent: tuple[GradientLog | None, Taken | None] | None = None  # what is in flight
        self._copy_s = 0.0  # for which training waited
        self._touching: threading.Thread | None = None

    @property
    def last_step(self) -> int:
        """The step of the newest published checkpoint, -1 if there is none."""
        return self._standing.last_step

    def follow(self, log: GradientLog | None) -> None:
        """This will let increments be the gradients that `log` notes, where they are smaller than what changed."""
        self._log = log

    def prepare(self, state: State) -> None:
        """This will get the memory for copies of such a state beforehand, beside whatever else is done."""
        layout = layout_of(state)
        alike = [snapshot for snapshot in self._snapshots if snapshot.layout == layout]
        fresh = [Snapshot(layout) for _ in range(len(alike), 2)]
        self._snapshots = [*alike, *fresh]
        self._touching = threading.Thread(target=_touch, args=(fresh,), name="touch", daemon=True)
        self._touching.start()

    def idle(self) -> bool:
        """This will say whether a new checkpoint can begin now; `collect` what is finished first."""
        return self._lent is None

    def wish(self) -> Wish:
        """This will say what the next checkpoint would best be made of."""
        if not self.idle():
            return Wish.NOTHING
        if not self._standing.room:
            return Wish.BASE
        return Wish.LOG if self.log_suffices() else Wish.STATE

    def log_suffices(self) -> bool:
        """This will say whether the next checkpoint needs no tensors, because it is the gradients since the last one."""
        return self._standing.takes_log and self._log is not None and self._log.covers(self.last_step)

    def begin(self, state: State | None, facts: Facts, *, base: bool = False) -> float:
        """This will copy the state (None: `log_suffices`) and start to write; returns the seconds of the copy."""
        assert self._lent is None, "one checkpoint at a time"
        started_s = time.perf_counter()
        taken = self._log.take(facts.step) if self._log is not None else None
        snapshot = self._free(layout_of(state)) if state is not None else None
        self._lent = (self._log, taken)
        self._hand_over(Order(snapshot=snapshot, taken=taken, facts=facts, base=base))
        if snapshot is not None and state is not None:
            self._copy(state, snapshot)
        self._copy_s = time.perf_counter() - started_s
        return self._copy_s

    def collect(self) -> Report | None:
        """This will give the report of a checkpoint that has just been finished, without waiting.

        Raises:
            StaleAttemptError: a later attempt has taken over.
        """
        if self._lent is None or not self._finished():
            return None
        return self.wait()

    def wait(self) -> Report | None:
        """This will wait for the checkpoint in flight and give its report."""
        if self._lent is None:
            return None
        (log, taken), self._lent = self._lent, None
        report, self._standing = self._result()
        report = replace(report, copy_s=self._copy_s)
        held = taken is not None and taken.loose.number in self._standing.held  # somebody reads them still
        if (
            log is not None and taken is not None and not held
        ):  # of an elastic run the loop, and its log, may be another by now
            log.give_back(taken)
        if self._log is not None:
            self._log.enabled = self._standing.by_log is not False
        return report

    def close(self) -> None:
        """This will end whoever writes, after what is in flight."""
        raise NotImplementedError

    def _free(self, layout: Layout) -> Snapshot:
        """A buffer that nobody reads."""
        alike = [snapshot for snapshot in self._snapshots if snapshot.layout == layout]
        taken = {self._standing.kept, *self._standing.held}
        free = [snapshot for snapshot in alike if snapshot.number not in taken]
        snapshot = free[0] if free else Snapshot(layout)
        self._snapshots = alike if free else [*alike, snapshot]
        return snapshot

    def _copy(self, state: State, snapshot: Snapshot) -> None:
        try:
            snapshot.fill(state, lambda there: self._tell(snapshot, there))
        except BaseException:
            self._tell(snapshot, BROKEN)
            raise
        self._tell(snapshot, FULL)

    def _hand_over(self, order: Order) -> None:
        """Have somebody write it, who waits for what is not copied yet."""
        raise NotImplementedError

    def _tell(self, snapshot: Snapshot, there: int) -> None:
        """Let who writes know how much of the snapshot is there."""
        raise NotImplementedError

    def _finished(self) -> bool:
        raise NotImplementedError

    def _result(self) -> tuple[Report, Standing]:
        raise NotImplementedError


def _touch(snapshots: Sequence[Snapshot]) -> None:
    for one in snapshots:
        one.touch()
