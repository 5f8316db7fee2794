"""How long a job will run, from what its user's last jobs ran.

People ask for far more time than they need, but each runs the same kind of job again and again. The longest of a user's last
few runs says more than the request; it is never more than the request, and the request stands where there is no history or
nobody is named. A prediction only puts jobs in order. What is promised to others is counted by requests, so a prediction
that proves short delays nobody's promise. Source: after Tsafrir, Etsion and Feitelson, "Backfilling using system-generated
predictions rather than user runtime estimates" (2007), who take the mean of the last two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

REMEMBERED = 3


class History:
    """What users' last jobs ran."""

    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = {}
        self.longest_s: dict[int, float] = {}  # of the last few runs, by user

    def record(self, user: int, run_s: float) -> None:
        """Note that a job of `user` ran for `run_s`; a negative user is nobody."""
        if user < 0:
            return
        last = self._last.get(user)
        if last is None:
            last = self._last[user] = deque(maxlen=REMEMBERED)
        last.append(run_s)
        self.longest_s[user] = max(last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What is remembered: the longest of each user's last few runs, by uid, and how plain EASY would have served all jobs.

    `easy_wait_s`: its longest wait so far (see `rehearsal`); `began_s`: when the first job came, None: none has.
    """

    longest_runs_s: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    easy_wait_s: float = 0.0
    began_s: float | None = None


NO_EXPERIENCE = Experience()


class Expected:
    """How long jobs are expected to run by `experience`, where `running` (users, and for how long) does not prove it wrong."""

    def __init__(self, experience: Experience, running: Iterable[tuple[int, float]]) -> None:
        self._longest_s = dict(experience.longest_runs_s)
        for uid, so_far_s in running:
            if so_far_s > self._longest_s.get(uid, so_far_s):
                self._longest_s[uid] = so_far_s

    def run_s(self, uid: int, limit_s: float) -> float:
        """Return how long a job of this user and limit is expected to run: never longer than its limit."""
        return min(limit_s, self._longest_s.get(uid, limit_s))
