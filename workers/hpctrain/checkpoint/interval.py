"""After how many steps a checkpoint is due: as told, or by what it costs and how often the run is interrupted.

Young's first order: of an interval T, cost / T is lost to checkpoints and T / 2 to each interruption, which is least at
T = sqrt(2 * cost * time between interruptions).
Does not know steps' meaning or ranks; the caller sees to it that all ranks have the same answer.
Rules: the time between interruptions is learned from the claims of the run's attempts, with one interruption a day as what
is believed before any; a checkpoint is not due before the last one can be written.
Sources: Young, "A first order approximation to the optimum checkpoint interval", 1974; Daly, 2006.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

BELIEVED_S = 86400.0  # between interruptions, as long as there is nothing to learn from
FIRST = 10  # steps until the first one, which tells what it costs
MOST = 100_000
WEIGHT = 0.3  # of the newest measurement


class Interval:
    """When checkpoints are due: every so many steps, or (None) when it is best."""

    def __init__(self, every: int | None, claimed_at_s: Sequence[float] = (), now_s: float = 0.0) -> None:
        self._every = every
        self._between_s = between_interruptions_s(claimed_at_s, now_s)
        self._cost_s = self._write_s = self._step_s = 0.0
        self._next = self._told = 0

    @property
    def wanted(self) -> bool:
        """Whether there are checkpoints at all."""
        return self._every is None or self._every > 0

    @property
    def measured(self) -> bool:
        """Whether the interval changes."""
        return self._every is None

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        if self._every is not None:
            return self._every > 0 and step % self._every == 0
        if not self._next:
            self._next = step + FIRST - 1
        return step >= self._next

    def learn(self, step_s: float, cost_s: float, write_s: float) -> None:
        """Take note of what a step takes, what one waits for a checkpoint, and how long that is written."""
        for name, value in (("_step_s", step_s), ("_cost_s", cost_s), ("_write_s", write_s)):
            before = getattr(self, name)
            setattr(self, name, before + WEIGHT * (value - before) if before else value)

    def steps(self) -> int:
        """Return the best interval by what is known, in steps."""
        if not self._step_s:
            return FIRST
        best_s = max(math.sqrt(2 * self._cost_s * self._between_s), self._write_s)
        return max(1, min(MOST, round(best_s / self._step_s)))

    def next_after(self, step: int, steps: int) -> str:
        """Have the next one due so many steps after this one, and say so if that is otherwise than before."""
        self._next = step + steps
        changed, self._told = abs(steps - self._told) > self._told / 4, steps
        if not changed or not self._step_s:
            return ""
        return (
            f"checkpoint: the next in {steps} steps: one costs {self._cost_s * 1e3:.1f} ms, a step takes "
            f"{self._step_s * 1e3:.0f} ms, and the run is interrupted every {self._between_s / 3600:.1f} h"
        )


def between_interruptions_s(claimed_at_s: Sequence[float], now_s: float) -> float:
    """Estimate the time between interruptions from when the run's attempts began, the present one included."""
    if not claimed_at_s:
        return BELIEVED_S
    # As if there had been a day without any, and one then.
    return (max(0.0, now_s - min(claimed_at_s)) + BELIEVED_S) / len(claimed_at_s)


def claims_at_s(directory: Path) -> list[float]:
    """Read when the attempts of a run have begun."""
    found = []
    for path in directory.glob("attempt.*"):
        try:
            found.append(float(json.loads(path.read_bytes())["claimed_at_s"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # its writer died in it
    return found
