"""The efficiency of several ranks.

The fraction of time in which they compute, and what takes the rest.

The rank that waits least at the exchange came last: the others waited for it.  Its own wait is the exchange itself.
Takes the same times of all ranks on every rank; measures nothing.
Rules: efficiency is the fraction of all ranks' time in their own work; 1 is as fast as ranks without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WARM_STEPS = 3  # the first steps fill caches and open connections
LATELY = 0.05  # weight of a step in the recent average
WORTH_NAMING = 0.02  # of a step that the others wait


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Seconds of each rank in one step.

    Its own work, getting data within it, and its wait at the exchange.

    With local steps: means over the steps since the last exchange, and the wait at the exchange before.
    """

    own_s: tuple[float, ...]
    data_s: tuple[float, ...]
    wait_s: tuple[float, ...]


@dataclass(slots=True, kw_only=True)
class TimesSinceMeeting:
    """One rank's seconds in the steps since the last exchange.

    One step, or several local ones.
    """

    steps: int = 0
    own_s: float = 0.0
    data_s: float = 0.0
    wait_s: float = 0.0

    def add(self, own_s: float, data_s: float, wait_s: float) -> None:
        """Add one step."""
        self.steps += 1
        self.own_s, self.data_s, self.wait_s = self.own_s + own_s, self.data_s + data_s, self.wait_s + wait_s

    def means(self) -> tuple[float, float, float]:
        """Return own work, data and wait per step; at least one step was added."""
        return self.own_s / self.steps, self.data_s / self.steps, self.wait_s / self.steps


class Scaling:
    """Sums over the steps of a run."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)  # hosts of the ranks
        self._apart_s: list[float] = []  # the steps since the last exchange
        self._seen = 0
        self._step_s = self._own_s = self._data_s = self._exchange_s = self._uneven_s = 0.0
        self._late_s = [0.0] * len(names)  # how long the others waited while this rank was last
        self._lately_s = [0.0] * len(names)
        self._lately_step_s = 0.0

    def note(self, step_s: float, times: RankTimes | None) -> None:
        """Add one step; `times` is None if the ranks did not exchange in it."""
        self._apart_s.append(step_s)
        if times is None:
            return
        step_s = sum(self._apart_s) / len(self._apart_s)
        self._apart_s.clear()
        self._seen += 1
        if self._seen <= WARM_STEPS:
            return
        count = len(times.own_s)
        least_s = min(times.wait_s)
        uneven_s = sum(times.wait_s) / count - least_s
        last = times.wait_s.index(least_s)
        self._step_s += step_s
        self._own_s += sum(times.own_s) / count
        self._data_s += sum(times.data_s) / count
        self._exchange_s += least_s
        self._uneven_s += uneven_s
        others_s = uneven_s * count / max(1, count - 1)  # the mean over the waiting ranks
        self._late_s[last] += others_s
        self._lately_s = [
            old + ((others_s if rank == last else 0.0) - old) * LATELY for rank, old in enumerate(self._lately_s)
        ]
        self._lately_step_s += (step_s - self._lately_step_s) * (LATELY if self._lately_step_s else 1.0)

    def straggler(self) -> str:
        """Return a line about the rank for which the others waited recently.

        Empty if it is negligible.
        """
        worst = max(range(len(self._names)), key=lambda rank: self._lately_s[rank])
        late_s = self._lately_s[worst]
        if len(self._names) < 2 or self._seen <= WARM_STEPS or late_s < WORTH_NAMING * self._lately_step_s:
            return ""
        return f"the others wait for {self._name(worst)}: {1e3 * late_s:.0f} ms of a step's {1e3 * self._lately_step_s:.0f}"

    def summary(self) -> str:
        """Return one line: how well the ranks were used, and what limits them.

        Empty after too few steps.
        """
        if self._step_s <= 0:
            return ""
        efficiency = self._own_s / self._step_s
        worst = max(range(len(self._names)), key=lambda rank: self._late_s[rank])
        parts = {
            "the exchange": self._exchange_s,
            f"waiting for {self._name(worst)}": self._uneven_s,
            "work between steps": max(0.0, self._step_s - self._own_s - self._exchange_s - self._uneven_s),
        }
        if len(self._names) == 1:
            parts = {"work between steps": self._step_s - self._own_s}
        shares = {name: seconds / self._step_s for name, seconds in parts.items()}
        limit = max(shares, key=lambda name: shares[name])
        rest = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items() if name != limit)
        ranks = f"{len(self._names)} ranks compute" if len(self._names) > 1 else "the rank computes"
        data = f"; of the computing, getting data {100 * self._data_s / max(self._own_s, 1e-9):.1f} %"
        what = f"limited by {limit}, {100 * shares[limit]:.1f} %" + (f" ({rest})" if rest else "")
        return f"scaling: {ranks} {100 * efficiency:.1f} % of the time; {what}{data}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._names[rank]}"
