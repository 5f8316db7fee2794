"""All processes below this one, which is their subreaper: told to end, killed until none is left, collected.

*No child is left* means that the tree is empty, whoever detached. It does not know what the processes are for.
Sources: prctl(2) PR_SET_CHILD_SUBREAPER, wait(2).
"""

from __future__ import annotations

import os
import resource
import signal
from typing import Iterator, List, Set, Tuple

from hpcnode import process
from hpcnode.loop import Loop


class Tree:
    """The tree below this process."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._told: Set[int] = set()  # who got TERM
        self._kill_rounds = 0
        self.is_empty = False  # it had processes, and has none any more

    def terminate(self) -> None:
        """Send TERM to all of it."""
        self._terminate(process.descendants([os.getpid()]))

    def terminate_orphans(self) -> None:
        """Send TERM to what was forked while the tree was told to end, and whose parent has ended since: it missed it."""
        if self._told:
            self._terminate([pid for pid in process.children_of(os.getpid()) if pid not in self._told])

    def _terminate(self, pids: List[int]) -> None:
        self._told.update(pids)
        process.signal_all(pids, signal.SIGTERM)
        process.signal_all(pids, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, again and again until nothing is left of it."""
        if self.is_empty:
            return
        if self._kill_rounds > 0:
            process.stop_all_below_us()  # so that nothing forks away from the kill
        process.signal_all(process.descendants([os.getpid()]), signal.SIGKILL)
        self._kill_rounds += 1
        self._loop.later(min(1.0, 0.01 * 2**self._kill_rounds), self.kill)

    def reap(self) -> Iterator[Tuple[int, int, resource.struct_rusage]]:
        """Collect whatever has ended: pid, status and usage of each."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self.is_empty = True
                return
            if pid == 0:
                return
            yield pid, status, usage
