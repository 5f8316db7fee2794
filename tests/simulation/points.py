"""The named points at which a process can be killed, as production code and the simulated disk come to them.

A point is armed by its name and count (the stories) or by how many points of a kind of process are still to be passed
(the random worlds). It does not know what a crash does to the rest of the world.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from simulation.agenda import Agenda, Crash


@dataclass(slots=True)
class Points:
    """All points of one world."""

    agenda: Agenda
    passed: dict[str, int] = field(default_factory=dict)
    noted: list[Any] | None = None  # if wanted: every (point, count) that was passed, in order
    armed: dict[tuple[str, int], bool] = field(default_factory=dict)  # -> whether it was reached
    countdowns: dict[str, int] = field(default_factory=dict)  # kind of process -> points until it dies

    def reached(self, name: str) -> None:
        """The running process is at this point: kill it if that was asked for. Raises Crash."""
        process = self.agenda.running
        if process is None:
            return
        if self.countdowns:
            self._count_down(process.kind, name)
        if self.noted is None and not self.armed:
            return
        point = f"{process.kind}: {name}"
        count = self.passed[point] = self.passed.get(point, 0) + 1
        if self.noted is not None:
            self.noted.append((point, count))
        if self.armed.get((point, count)) is False:
            self.armed[(point, count)] = True
            raise Crash(point)

    def _count_down(self, kind: str, name: str) -> None:
        left = self.countdowns.get(kind)
        if left is None:
            return
        if left > 0:
            self.countdowns[kind] = left - 1
            return
        del self.countdowns[kind]
        raise Crash(f"{kind}: {name}")
