"""What an elastic run's faults cost: from the last word of a lost rank until it was missed, the next step, and full strength.

Knows no clocks: `now_s` is monotonic and handed in.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from hpctrain.elastic.roster import Loss

SHOWN = 5  # faults, each in a line of its own


@dataclass(slots=True, kw_only=True)
class Fault:
    """Ranks that were lost before the others could take another step; seconds since the first of them was heard last."""

    step: int  # the last one before it
    losses: list[Loss] = field(default_factory=list)
    next_step_s: float | None = None  # None: not yet
    full_s: float | None = None
    lost_steps: int = 0

    @property
    def heard_at_s(self) -> float:
        """When the first of them was heard last."""
        return min(loss.heard_at_s for loss in self.losses)

    @property
    def missed_s(self) -> float:
        """How long it took to miss the last of them."""
        return max(loss.missed_at_s - loss.heard_at_s for loss in self.losses)

    def facts(self) -> dict[str, object]:
        """This will give it as JSON values."""
        return {
            "step": self.step,
            "lost": [{"member": loss.number, "slot": loss.slot, "why": loss.why} for loss in self.losses],
            "missed_s": self.missed_s,
            "next_step_s": self.next_step_s,
            "full_strength_s": self.full_s,
            "lost_steps": self.lost_steps,
        }

    def __str__(self) -> str:
        who = ", ".join(f"slot {loss.slot} ({loss.why})" for loss in self.losses)
        parts = [f"missed after {self.missed_s:.2f} s"]
        parts += [f"next step after {self.next_step_s:.2f} s"] if self.next_step_s is not None else ["no step since"]
        parts += [f"full strength after {self.full_s:.2f} s"] if self.full_s is not None else []
        return f"fault after step {self.step} in {who}: {', '.join(parts)}, {self.lost_steps} steps lost"


class Account:
    """What a run has done so far."""

    def __init__(self, began_at_s: float) -> None:
        self.began_at_s = began_at_s
        self.step = 0
        self.useful_s = 0.0
        self.faults: list[Fault] = []
        self._members: set[int] = set()
        self._forming = self._began_anew = False

    def lose(self, loss: Loss) -> None:
        """This will note that one who took part is lost."""
        if not self.faults or self.faults[-1].next_step_s is not None:
            self.faults.append(Fault(step=self.step))
        self.faults[-1].losses.append(loss)
        self._forming = True

    def form(self, members: Iterable[int], want: int, now_s: float) -> None:
        """This will note the members of a new generation."""
        members = set(members)
        self._began_anew = self._began_anew or bool(self._members) and not members & self._members
        self._members, self._forming = members, False
        if len(members) >= want:
            for fault in self.faults:
                if fault.full_s is None:
                    fault.full_s = now_s - fault.heard_at_s

    def note_step(self, step: int, useful_s: float, now_s: float) -> None:
        """This will note how far a member is; `useful_s`: of the first member, what its steps took since it said so last."""
        if self._began_anew and useful_s and not self._forming:  # nobody had the state: it is a checkpoint's
            self._began_anew = False
            if self.faults and step <= self.step:
                self.faults[-1].lost_steps = self.step - step + 1
                self.step = step - 1
        self.useful_s += useful_s
        if step <= self.step or self._began_anew:
            return
        self.step = step
        if self.faults and self.faults[-1].next_step_s is None and not self._forming:
            self.faults[-1].next_step_s = now_s - self.faults[-1].heard_at_s

    def facts(self, now_s: float) -> dict[str, object]:
        """This will give everything as JSON values."""
        wall_s = now_s - self.began_at_s
        return {
            "wall_s": wall_s,
            "useful_s": self.useful_s,
            "goodput": self.useful_s / wall_s,
            "steps": self.step,
            "lost_steps": sum(fault.lost_steps for fault in self.faults),
            "faults": [fault.facts() for fault in self.faults],
        }

    def describe(self, now_s: float) -> list[str]:
        """This will say it in lines: the last faults, then all of them together."""
        wall_s = now_s - self.began_at_s
        lines = [str(fault) for fault in self.faults[-SHOWN:]]
        if len(self.faults) > SHOWN:
            lines.insert(0, f"{len(self.faults) - SHOWN} faults before these (--report has them)")
        last = f"goodput {self.useful_s / wall_s:.1%}: {self.useful_s:.1f} s of steps in {wall_s:.1f} s"
        if self.faults:
            last += f"; {len(self.faults)} faults, {sum(fault.lost_steps for fault in self.faults)} steps lost"
            for name, times in (
                ("missed", [fault.missed_s for fault in self.faults]),
                ("next step", [fault.next_step_s for fault in self.faults]),
                ("full strength", [fault.full_s for fault in self.faults]),
            ):
                known_s = [seconds for seconds in times if seconds is not None]
                if known_s:
                    last += f", {name} after {statistics.median(known_s):.2f} s (worst {max(known_s):.2f})"
        return [*lines, last]
