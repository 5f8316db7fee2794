"""Crash points: named points at which a test kills a process, to check its successor.

`HPCNODE_CRASH_AT=point[:n]` (for the controller `HPCSCHED_CRASH_AT`) kills the process (SIGKILL) that reaches the point for the
n-th time. It has an effect only together with `HPCNODE_SIMULATED=1` (`HPCSCHED_SIMULATED`), so that it cannot be enabled in
production by accident. There is a point before and after each step that makes a promise durable.
"""

from __future__ import annotations

import os
import signal
from typing import Mapping


class CrashPoints:
    """Kills the process at one named point; without a point, never."""

    def __init__(self, spec: str = "") -> None:
        self._point, _, count = spec.partition(":")
        self._left = int(count or "1")
        self.armed = bool(spec)

    def reached(self, point: str) -> None:
        """Kill this process if this is the requested point."""
        if self.armed and point == self._point:
            self._left -= 1
            if self._left == 0:
                os.write(2, b"dying at %s, as asked\n" % point.encode())
                os.kill(os.getpid(), signal.SIGKILL)


def crash_points(environ: Mapping[str, str], prefix: str = "HPCNODE") -> CrashPoints:
    """Return the crash points of the environment, from variables that begin with `prefix`."""
    if environ.get(prefix + "_SIMULATED") != "1":
        return CrashPoints()
    return CrashPoints(environ.get(prefix + "_CRASH_AT", ""))
