"""How much of a run's time went into steps that count, over all its lives: an account that each line of metrics.jsonl carries on.

The time is that from the run's first beginning until now, restarts and waiting in a queue included.  A step that has to be taken
again, because the run goes on from an older checkpoint, counted for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any


@dataclass(slots=True, kw_only=True)
class Goodput:
    """The account of a run; times of day in seconds."""

    began_at_s: float
    useful_s: float = 0.0  # of steps that count
    interruptions: int = 0  # ranks were lost, or all of them were started again
    lost_steps: int = 0  # that had to be taken again
    last_at_s: float | None = None  # when the last step was over, if the run was interrupted after it
    told_step: int = 0  # the last one of which there is a line

    def step(self, step_s: float, now_s: float) -> dict[str, object]:
        """This will count a step that is over now, and give what metrics.jsonl keeps."""
        self.useful_s += step_s
        interrupted_s = None if self.last_at_s is None else round(now_s - self.last_at_s, 3)
        self.last_at_s = None
        return {
            "goodput": round(self.share(now_s), 4),
            "useful_s": round(self.useful_s, 6),
            "began_at_s": round(self.began_at_s, 3),
            "interruptions": self.interruptions,
            "interrupted_s": interrupted_s,  # from the step before to this one
            "lost_steps": self.lost_steps,
        }

    def share(self, now_s: float) -> float:
        """This will give the useful part of the time until now."""
        return min(1.0, self.useful_s / max(now_s - self.began_at_s, 1e-9))

    def describe(self, now_s: float) -> str:
        """This will say it in words."""
        return (
            f"goodput: {self.share(now_s):.1%}, {self.useful_s:.1f} s of steps in {now_s - self.began_at_s:.1f} s; "
            f"interrupted {self.interruptions} times, {self.lost_steps} steps lost"
        )


def carried_on(
    lines: Iterator[Mapping[str, Any]],
    step: int,
    *,
    interrupted: bool,
    began_at_s: float,
    seen: Mapping[str, Any] | None = None,
) -> Goodput:
    """This will take up the account in lines of metrics, the last one first, for a run that has come to `step`, or begin one.

    `interrupted`: ranks were lost, or are started again; else they only come and go in an orderly way.
    `seen`: the account of the last step that this rank saw: lines before it may have been lost with the rank that had them.
    """
    kept = (line for line in lines if "useful_s" in line)
    newest = next(kept, None)
    if seen is not None and (newest is None or newest["step"] + 1 < seen["step"]):
        newest, kept = seen, chain([newest] if newest else [], kept)
    if newest is None:
        return Goodput(began_at_s=began_at_s)
    useful_s = next((line["useful_s"] for line in chain([newest], kept) if line["step"] <= step), 0.0)
    return Goodput(
        began_at_s=newest["began_at_s"],
        useful_s=useful_s,
        interruptions=newest["interruptions"] + interrupted,
        lost_steps=newest["lost_steps"] + max(0, newest["step"] - step),
        last_at_s=newest["time"] if interrupted else None,
        told_step=newest["step"],
    )
