"""Crash points of the controller: where a test makes it kill itself, to see what its next life and the nodes make of it.

`HPCSCHED_CRASH_AT=point[:n]`, heeded as `hpcnode.os.faults` says.

    commit.before.KIND  commit.after.KIND   a batch with an event of that kind (Submitted, Allocated, ...) is written
    queued.MESSAGE  sent.MESSAGE            a message to a node was handed to its link; has had the time to leave
"""

from __future__ import annotations

import asyncio
from typing import Any

from hpcnode.os.faults import CrashPoints
from hpcsched.state.transaction import Batch
from hpcsched.store.store import Store

SENT_AFTER_S = 0.05  # the link's own thread sends


def queued(faults: CrashPoints, message: Any) -> None:
    """Take note of a message that was handed to a link."""
    if faults.armed:
        name = type(message).__name__
        faults.reached(f"queued.{name}")
        asyncio.get_running_loop().call_later(SENT_AFTER_S, faults.reached, f"sent.{name}")


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

    store.commit = crashing  # type: ignore[method-assign]  # of this one alone
