"""Licences: counted resources of the whole cluster, over time.

Licences are not on any node.

Each licence has a step function of time, as each node has a profile. Knows nothing of nodes, jobs and order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpcsched.sched.place.request import LicenseCounts
from hpcsched.sched.place.reserved_intervals import NEVER_S
from hpcsched.sched.pool.conservative import Steps


class FreeLicenses:
    """Free licences over time: `totals` minus `held`, each until its time."""

    def __init__(self, now_s: float, totals: Mapping[str, int], held: Iterable[tuple[LicenseCounts, float]]) -> None:
        self._now_s = now_s
        self._steps = {name: Steps(now_s, count) for name, count in totals.items()}
        for counts, end_s in held:
            self.take(counts, now_s, end_s)

    def take(self, counts: Iterable[tuple[str, int]], start_s: float, end_s: float) -> None:
        """Take `counts` over ``[start_s, end_s)``."""
        for name, count in counts:
            if name in self._steps:
                self._steps[name].add(start_s, end_s, -count)

    def give(self, counts: LicenseCounts, start_s: float, end_s: float) -> None:
        """Give back `counts`, which were taken over ``[start_s, end_s)``."""
        self.take([(name, -count) for name, count in counts], start_s, end_s)

    def free_now(self) -> dict[str, int]:
        """Return the number of free licences now, by name."""
        return {name: steps.free[0] for name, steps in self._steps.items()}

    def earliest(self, counts: LicenseCounts, length_s: float, from_s: float) -> float:
        """Return the first time at or after `from_s` with `counts` free for `length_s`.

        `NEVER_S`: never.
        """
        start_s = from_s
        while True:
            found_s = start_s
            for name, count in counts:
                steps = self._steps.get(name)
                found_s = steps.earliest(count, length_s, found_s) if steps is not None else NEVER_S
            if found_s in (start_s, NEVER_S):
                return found_s
            start_s = found_s
