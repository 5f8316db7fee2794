"""Crash points: where a test makes an agent, a shepherd or the controller kill itself, to see what the next one finds.

`HPCNODE_CRASH_AT=point[:n]` (of the controller `HPCSCHED_CRASH_AT`) kills (SIGKILL) the process that comes to the point for the
n-th time. It is heeded only together with `HPCNODE_SIMULATED=1` (`HPCSCHED_SIMULATED`), so that nothing in a production
environment can switch it on by accident.
The points are named where they stand: before and after each step that puts a promise on the disk.
"""

from __future__ import annotations

import os
import signal
from typing import Mapping


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
                os.write(2, b"dying at %s, as asked\n" % point.encode())
                os.kill(os.getpid(), signal.SIGKILL)


def crash_points(environ: Mapping[str, str], prefix: str = "HPCNODE") -> CrashPoints:
    """Return the crash points that the environment asks for, by variables that begin with `prefix`."""
    if environ.get(prefix + "_SIMULATED") != "1":
        return CrashPoints()
    return CrashPoints(environ.get(prefix + "_CRASH_AT", ""))
