"""A writer that is a process of its own: the loop waits for the copy only, and what was copied outlives the trainer.

Does not know what a checkpoint is made of.
Rules: the process ends by itself after the trainer.  If it is killed, that costs the checkpoint in flight: another one is
started, whose first checkpoint is a base.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hpctrain.checkpoint.format.chunks import CHUNK_BYTES
from hpctrain.checkpoint.writing.fd_passing import Handing
from hpctrain.checkpoint.writing.fence import Claim
from hpctrain.checkpoint.writing.group import SECRET_BYTES, Seat
from hpctrain.checkpoint.writing.maker import Order, Report, Standing, Task, standing_of
from hpctrain.checkpoint.writing.publish import Published
from hpctrain.checkpoint.writing.retain import Policy
from hpctrain.checkpoint.writing.snapshot import Snapshot
from hpctrain.checkpoint.writing.writer import Writer
from hpctrain.errors import StaleAttemptError

CLOSE_S = 20.0
# glibc's threads give memory back after each chunk otherwise, and touch it anew: a third of what packing takes.
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(256 << 20), "MALLOC_MMAP_THRESHOLD_": str(64 << 20)}


class ProcessWriter(Writer):
    """Writes in a process that outlives this one."""

    def __init__(
        self,
        claim: Claim,
        parent: Published | None,
        base_every: int,
        policy: Policy,
        distrusted: tuple[str, ...] = (),
        chunk_bytes: int = CHUNK_BYTES,
        ranks: int = 1,
        seat: Seat | None = None,
    ) -> None:
        """`ranks` write together; `seat` is where the others find the first of them, which has none."""
        self._task = Task(
            claim=claim,
            parent=parent,
            base_every=base_every,
            policy=policy,
            distrusted=distrusted,
            chunk_bytes=chunk_bytes,
            ranks=ranks,
            seat=seat,
            secret=secrets.token_bytes(SECRET_BYTES),
        )
        # Of the first of several ranks: it outlives a process that writes, so that the others find the next one there.
        self._listener = socket.create_server(("", 0), backlog=ranks) if ranks > 1 and seat is None else None
        self._order: Order | None = None
        super().__init__(standing_of(parent, base_every, chunk_bytes), parent)
        self._start(self._task)

    def close(self) -> None:
        self._line.close()
        if self._listener is not None:
            self._listener.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return  # it has its share to wait for, and ends by itself
        finally:
            self._snapshots.clear()

    @property
    def pid(self) -> int:
        """The process that writes."""
        return self._process.pid

    def seats(self, addresses: Sequence[str]) -> list[Seat]:
        """This will say where the other ranks' writers find this one, by rank; it is on a host with these addresses."""
        assert self._listener is not None
        port = self._listener.getsockname()[1]
        secret, several = self._task.secret, tuple(addresses)
        return [Seat(rank=rank, addresses=several, port=port, secret=secret) for rank in range(self._task.ranks)]

    def _start(self, task: Task) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            listener = [self._listener.fileno()] if self._listener else []
            given = [theirs.fileno(), *listener]
            command = [sys.executable, "-P", "-m", "hpctrain.checkpoint.writing.process", *map(str, given)]
            paths = [path or os.getcwd() for path in sys.path]
            self._process = subprocess.Popen(
                command,
                pass_fds=given,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=ALLOCATOR | os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )
        self._line = Handing(ours)
        self._line.send(task)

    def _hand_over(self, order: Order) -> None:
        self._order = order
        try:
            self._line.send(self._order)
        except OSError:
            pass  # it is gone: `_result` finds that, and starts another

    def _tell(self, snapshot: Snapshot, there: int) -> None:
        with suppress(OSError):  # it is gone
            self._line.send(there)

    def _finished(self) -> bool:
        return bool(select.select([self._line], [], [], 0)[0])

    def _result(self) -> tuple[Report, Standing]:
        assert self._order is not None
        try:
            answer: Any = self._line.receive()
        except EOFError:
            return self._gone(self._order)
        said, standing = answer
        if isinstance(said, StaleAttemptError):
            raise said
        return said, standing

    def _gone(self, order: Order) -> tuple[Report, Standing]:
        self._line.close()
        status = self._process.wait()
        self._task = replace(self._task, parent=None)
        self._start(self._task)
        why = f"the process that writes checkpoints has ended with status {status}; another one is started"
        report = Report(step=order.facts.step, kind="", stored_bytes=0, write_s=0.0, error=why)
        return report, replace(self._standing, by_log=None, room=False, kept=None)
