"""A checkpoint writer in a thread of the test's process, so that a test can make the file system fail, or die in a write.

`install` has runs of this process write with it: their first rank alone, instead of a process for each rank.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import hpctrain.run
from hpctrain.checkpoint.chunks import CHUNK_BYTES
from hpctrain.checkpoint.encryption import CheckpointKey
from hpctrain.checkpoint.restore import RestoredCheckpoint
from hpctrain.checkpoint.writing.files import Claim
from hpctrain.checkpoint.writing.group import First, Other
from hpctrain.checkpoint.writing.maker import CheckpointReport, Maker, WriteOrder, WriterState
from hpctrain.checkpoint.writing.publish import Published, Retention
from hpctrain.checkpoint.writing.snapshot import TensorSnapshot
from hpctrain.checkpoint.writing.writer import CheckpointWriter


class ThreadWriter(CheckpointWriter):
    """Makes checkpoints in a thread of this process."""

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
        self._maker = Maker(claim, parent, base_every, retention, chunk_bytes, group, key)
        super().__init__(self._maker.writer_state, parent)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._flight: Future[CheckpointReport] | None = None

    def close(self) -> None:
        self._thread.shutdown()
        self._maker.close()

    def _hand_over(self, order: WriteOrder) -> None:
        if order.snapshot is not None:
            order.snapshot.copy_progress.begin()
        self._flight = self._thread.submit(self._maker.make, order)
        self._thread.submit(self._maker.tidy)

    def _report_progress(self, snapshot: TensorSnapshot, there: int) -> None:
        snapshot.copy_progress.reach(there)

    def _finished(self) -> bool:
        return self._flight is not None and self._flight.done()

    def _result(self) -> tuple[CheckpointReport, WriterState]:
        assert self._flight is not None
        return self._flight.result(), self._maker.writer_state


def install() -> None:
    """Have every run of this process write checkpoints by a `ThreadWriter` of its first rank."""
    real_init = hpctrain.run.Run.__init__

    def init(self: hpctrain.run.Run, *arguments: object) -> None:
        real_init(self, *arguments)  # type: ignore[arg-type]
        self._shares_writing = False

    def make_writer(
        options: object, mine: Claim, restored: RestoredCheckpoint | None, key: CheckpointKey | None = None
    ) -> CheckpointWriter:
        distrusted = restored.damaged if restored else ()
        parent = restored.published if restored else None
        retention = Retention(mine, hpctrain.run.policy_of(options), distrusted, key)  # type: ignore[arg-type]
        return ThreadWriter(mine, parent, options.base_every, retention, key=key)  # type: ignore[attr-defined]

    hpctrain.run.Run.__init__ = init  # type: ignore[method-assign]
    hpctrain.run.make_writer = make_writer
