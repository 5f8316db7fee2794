"""The process that writes a trainer's checkpoints.

`python -m hpctrain.checkpoint.writing.process DESCRIPTOR [LISTENER]`.

It packs, hashes and writes snapshots in memory that it shares with the trainer.  Does not know torch.
Rules: a complete snapshot is published even if the trainer is killed: this process ignores the signals that a job's
processes get.  It ends after the trainer, when its checkpoint is done.  While the share fails or does not answer, the newest
state goes to this node's own disk, and to the share as soon as possible.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from hpctrain.checkpoint.manifest import CheckpointFacts
from hpctrain.checkpoint.writing import local_fallback
from hpctrain.checkpoint.writing.buffers import BROKEN, FULL, Buffer, BufferChannel
from hpctrain.checkpoint.writing.group import First, Other
from hpctrain.checkpoint.writing.maker import CheckpointReport, Maker, WriteOrder, WriterSetup, WriterState
from hpctrain.checkpoint.writing.publish import Retention
from hpctrain.errors import CheckpointKeyError, PublishError, StaleAttemptError

NICE = 5  # the trainer has priority
PATIENCE_S = 60.0  # a share that does not answer for longer counts as away
AGAIN_S = 10.0  # between two attempts to reach it again


def main(descriptor: int, listener: int | None = None) -> int:
    """Make checkpoints until the trainer has ended.

    At `listener` the other ranks' processes report.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    line = BufferChannel(socket.socket(fileno=descriptor))
    try:
        task = line.receive()
        assert isinstance(task, WriterSetup)
        keeper = CheckpointKeeper(
            task, _group(task, listener), float(os.environ.get("HPCTRAIN_PATIENCE_S", PATIENCE_S))
        )
        while True:
            while not select.select([line], [], [], AGAIN_S if keeper.waiting else None)[0]:
                keeper.retry()
            order = line.receive()
            assert isinstance(order, WriteOrder)
            line.send(keeper.make(order, _copied_from(line, order)))
            keeper.tidy()
    except (EOFError, ConnectionError):
        return 0


class CheckpointKeeper:
    """Makes checkpoints on the share, or on the node's disk while the share fails."""

    def __init__(self, task: WriterSetup, group: First | Other | None, patience_s: float) -> None:
        self._task, self._patience_s = task, patience_s
        retention = Retention(task.claim, task.policy, task.distrusted, task.key)
        self._maker = Maker(task.claim, task.parent, task.base_every, retention, task.chunk_bytes, group, task.key)
        self._alone = group is None  # else every rank's process has a part of the state
        self._rank = task.endpoint.rank if task.endpoint is not None else 0
        self._share = ThreadPoolExecutor(1, "share")
        self._slow: Future[CheckpointReport] | None = None  # a checkpoint that the share has not answered yet
        self._read: set[int] = set()  # numbers of buffers that it still reads
        self._local = local_fallback.local_directory(task.claim.directory)
        self._packers = ThreadPoolExecutor(1, "local")
        self.waiting = False  # a local part has to be copied to the share

    def make(
        self, order: WriteOrder, copied: Callable[[], None] = lambda: None
    ) -> tuple[CheckpointReport | StaleAttemptError, WriterState]:
        """Make a checkpoint on the share or locally.

        `copied` returns when the trainer has copied the snapshot.

        Raises:
            EOFError: the trainer ended before that.
        """
        started_s = time.perf_counter()
        if self._slow is not None and self._slow.done():
            self._slow, self._read = None, set()
        if self._slow is not None:
            copied()
            return self._locally(order, started_s, "the share still does not answer")
        self._slow = self._share.submit(self._on_share, order)
        copied()
        try:
            report = self._slow.result(self._patience_s if self._alone else None)
        except TimeoutError:
            self._read = {buffer.number for buffer in _buffers(order)}
            return self._locally(order, started_s, f"the share has not answered for {self._patience_s:g} s")
        except StaleAttemptError as error:
            return error, self._maker.writer_state
        self._slow = None
        if report.error:
            return self._locally(order, started_s, report.error)
        return report, self._maker.writer_state

    def _on_share(self, order: WriteOrder) -> CheckpointReport:
        """Make it on the share; repeat once after an error, which may not last."""
        report = self._maker.make(order)
        return self._maker.make(order) if report.error and self._alone else report

    def retry(self) -> None:
        """Try to copy the local parts to the share."""
        if self._slow is not None and not self._slow.done():
            return
        with suppress(PublishError, OSError, StaleAttemptError, CheckpointKeyError):
            for name in self._copy_to_share():
                print(f"checkpoint: {name} is on the share now, which takes checkpoints again", flush=True)

    def _copy_to_share(self) -> list[str]:
        """Copy local parts to the share; return the names of the published checkpoints."""
        claim = self._task.claim
        local_fallback.bring_parts(self._local, claim.directory, self._rank, self._task.key)
        names = local_fallback.join_parts(claim, self._task.key) if self._rank == 0 else []
        self.waiting = self._rank == 0 and local_fallback.has_waiting_parts(claim.directory)
        return names

    def _keep(self, snapshot: Buffer, facts: CheckpointFacts) -> None:
        """Write this process's part of a state to this node's own disk."""
        ranks, chunk_bytes, key = self._task.ranks, self._task.chunk_bytes, self._task.key
        local_fallback.keep_part(self._local, self._rank, ranks, snapshot, facts, self._packers, chunk_bytes, key)

    def tidy(self) -> None:
        """Remove old checkpoints."""
        if self._slow is None:
            self._maker.tidy()

    def _locally(self, order: WriteOrder, started_s: float, why: str) -> tuple[CheckpointReport, WriterState]:
        """Keep the state on this node's own disk."""
        self.waiting, where = True, "only the running program has the state"
        if order.snapshot is not None:
            try:
                self._keep(order.snapshot, order.facts)
                where = f"kept on {socket.gethostname()} in {self._local}"
            except (PublishError, OSError) as error:
                where += f": {error}"
        report = CheckpointReport(
            step=order.facts.step,
            kind="base",
            stored_bytes=0,
            write_s=time.perf_counter() - started_s,
            error=f"{why}; {where}",
        )
        state = WriterState(away=True) if self._slow is not None else replace(self._maker.writer_state, away=True)
        return report, replace(state, held=frozenset(self._read))


def _copied_from(line: BufferChannel, order: WriteOrder) -> Callable[[], None]:
    """Return a function that passes on the trainer's copy progress until the copy is complete."""
    if order.snapshot is None:
        return lambda: None
    copy_progress = order.snapshot.copy_progress
    copy_progress.begin()

    def copied() -> None:
        there = 0
        try:
            while there not in (FULL, BROKEN):
                there = line.receive()
                copy_progress.reach(there)
        except EOFError:
            copy_progress.reach(BROKEN)
            raise

    return copied


def _buffers(order: WriteOrder) -> Iterator[Buffer]:
    if order.snapshot is not None:
        yield order.snapshot
    if order.taken is not None:
        yield order.taken.loose
        yield from (step.flats for step in order.taken.steps)


def _group(task: WriterSetup, listener: int | None) -> First | Other | None:
    if task.endpoint is not None:
        return Other(task.endpoint)
    return First(task.ranks, socket.socket(fileno=listener), task.secret) if listener is not None else None


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
