"""Crash points of the controller: where a test makes it kill itself, to see what its next life and the nodes make of it.

`HPCSCHED_CRASH_AT=point[:n]` kills (SIGKILL) the process that comes to the point for the n-th time. It is heeded only
together with `HPCSCHED_SIMULATED=1`, so that nothing in a production environment can switch it on by accident.

    commit.before.KIND  commit.after.KIND   a batch with an event of that kind (Submitted, Allocated, ...) is written
    queued.MESSAGE  sent.MESSAGE            a message to a node was handed to its link; has had the time to leave

`hpcnode.faults` is the same for agents and shepherds.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from typing import Any

from hpcsched.store.store import Batch, Store

SENT_AFTER_S = 0.05  # the link's own thread sends


class CrashPoints:
    """Kills the process at one named point; by default nowhere."""

    def __init__(self, spec: str = "") -> None:
        self._point, _, count = spec.partition(":")
        self._left = int(count or "1")
        self.armed = bool(spec)

    def reached(self, point: str) -> None:
        """Die here if this is the point that was asked for."""
        if self.armed and point == self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def queued(self, message: Any) -> None:
        """Take note of a message that was handed to a link."""
        if self.armed:
            name = type(message).__name__
            self.reached(f"queued.{name}")
            asyncio.get_running_loop().call_later(SENT_AFTER_S, self.reached, f"sent.{name}")


def crash_around_commits(store: Store, faults: CrashPoints) -> None:
    """Put crash points around the commits of `store`."""
    commit = store.commit

    def crashing(batch: Batch) -> None:
        kinds = sorted({type(event).__name__ for event in batch.events})
        for kind in kinds:
            faults.reached(f"commit.before.{kind}")
        commit(batch)
        for kind in kinds:
            faults.reached(f"commit.after.{kind}")

    store.commit = crashing  # type: ignore[method-assign]


def crash_points(environ: Mapping[str, str]) -> CrashPoints:
    """Return the crash points that the environment asks for."""
    if environ.get("HPCSCHED_SIMULATED") != "1":
        return CrashPoints()
    return CrashPoints(environ.get("HPCSCHED_CRASH_AT", ""))
