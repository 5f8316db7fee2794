"""The steps between two checkpoints.

Fixed, or by their cost and the rate of interruptions.

Young's first order: of an interval T, cost / T is lost to checkpoints and T / 2 to each interruption, which is least at
T = sqrt(2 * cost * time between interruptions).
Does not know ranks; the caller ensures that all ranks get the same answer.
Rules: the time between interruptions is estimated from the claims of the run's attempts, starting with one interruption a
day.  No checkpoint is due before the last one can be written.
Sources: Young, "A first order approximation to the optimum checkpoint interval", 1974; Daly, 2006.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

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
        self._next = self._told = 0

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
        changed, self._told = abs(steps - self._told) > self._told / 4, steps
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
