"""How long a job will run, from what its user's last jobs ran.

People ask for far more time than they need, but each runs the same kind of job again and again. The longest of a user's last
few runs says more than the request; it is never more than the request, and the request stands where there is no history or
nobody is named. As a rule a prediction only puts jobs in order, and promises are counted by requests. On a machine whose jobs
use a small part of the processor time that they ask for (`RequestUse`), requests say nothing. There promises are counted by
`Needed`, a multiple of the prediction, which is raised when a job outlasts it. Source: after Tsafrir, Etsion and Feitelson,
"Backfilling using system-generated predictions rather than user runtime estimates" (2007), who take the mean of the last two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

REMEMBERED = 3
LEAST_JOBS = 200  # after so many ended jobs their use of requests says something of the next
FORGETS_JOBS = 5000  # a job counts 1/e of a new one after so many
LEAST_NEED_S = 60.0  # no job is expected to need less than this


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


class RequestUse:
    """The part of the requested processor time that ended jobs used; older jobs count less and less."""

    def __init__(self) -> None:
        self._jobs = 0
        self._used = 0.0
        self._asked = 0.0

    def record(self, run_s: float, limit_s: float, procs: float) -> None:
        """Note that a job on `procs` processors ran for `run_s` and had asked for `limit_s`."""
        self._jobs += 1
        keep = 1 - 1 / FORGETS_JOBS
        self._used = self._used * keep + run_s * procs
        self._asked = self._asked * keep + limit_s * procs

    @property
    def part(self) -> float:
        """Return the part, 0..1; 1 as long as too few jobs have ended."""
        if self._jobs < LEAST_JOBS or self._used >= self._asked:
            return 1.0
        return self._used / self._asked


class Needed:
    """How long jobs need processors where requests are not trusted: `times` the longest of their user's last runs.

    Never longer than the request. A running job that outlasts this is expected to run for as long again.
    """

    def __init__(self, longest_s: Mapping[int, float], times: float) -> None:
        self._longest_s = longest_s
        self._times = times

    def length_s(self, user: int, limit_s: float) -> float:
        """Return how long a job of `user` that asks for `limit_s` needs."""
        longest_s = self._longest_s.get(user)
        return limit_s if longest_s is None else min(limit_s, max(LEAST_NEED_S, self._times * longest_s))

    def end_s(self, user: int, began_s: float, limit_end_s: float, now_s: float) -> float:
        """Return when a running job is expected to end that began at `began_s` and is at its limit at `limit_end_s`."""
        longest_s = self._longest_s.get(user)
        if longest_s is None:
            return limit_end_s
        end_s = began_s + max(LEAST_NEED_S, self._times * longest_s)
        if end_s <= now_s:
            so_far_s = now_s - began_s
            end_s = began_s + max(2 * so_far_s, so_far_s + LEAST_NEED_S)
        return min(end_s, limit_end_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What is remembered: the longest of each user's last few runs, by uid, and how plain EASY would have served all jobs.

    `easy_wait_s`: its longest wait so far (see `rehearsal`); `began_s`: when the first job came, None: none has;
    `request_use`: the part of the requested processor time that jobs used (see `RequestUse`).
    """

    longest_runs_s: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    easy_wait_s: float = 0.0
    began_s: float | None = None
    request_use: float = 1.0


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
