"""How long a job will run, predicted from the last jobs of its user.

Users ask for far more time than they need, but each runs the same kind of job again and again. So the longest of a user's last
few runs says more than the request. A prediction is never longer than the request, and equals it if there is no history or no
user. Usually a prediction only orders jobs, and promises count with requests. On a machine whose jobs use a small part of the
processor time that they ask for (`RequestUse`), requests say nothing: there, promises count with `Needed`, a multiple of the
prediction, which is raised when a job outlasts it.

Source: after Tsafrir, Etsion and Feitelson, "Backfilling using system-generated predictions rather than user runtime estimates"
(2007), who take the mean of the last two runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

REMEMBERED = 3
LEAST_JOBS = 200  # ended jobs before their use of requests predicts that of later jobs
FORGETS_JOBS = 5000  # later jobs after which a job counts 1/e of a new one
LEAST_NEED_S = 60.0  # no job is expected to need less than this


class History:
    """The run times of each user's last jobs."""

    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = {}
        self.longest_s: dict[int, float] = {}  # of the last few runs, by user

    def record(self, user: int, run_s: float) -> None:
        """Note that a job of `user` ran for `run_s`; a negative user is unknown and is ignored."""
        if user < 0:
            return
        last = self._last.get(user)
        if last is None:
            last = self._last[user] = deque(maxlen=REMEMBERED)
        last.append(run_s)
        self.longest_s[user] = max(last)


class RequestUse:
    """The part of the requested processor time that ended jobs used; the older a job, the less it counts."""

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
        """Return the part, 0..1; 1 until enough jobs have ended."""
        if self._jobs < LEAST_JOBS or self._used >= self._asked:
            return 1.0
        return self._used / self._asked


class Needed:
    """How long jobs need their processors if requests are not trusted: `times` the longest of their user's last runs.

    Never longer than the request. A running job that outlasts this is expected to run as long again.
    """

    def __init__(self, longest_s: Mapping[int, float], times: float) -> None:
        self._longest_s = longest_s
        self._times = times

    def length_s(self, user: int, limit_s: float) -> float:
        """Return how long a job of `user` that asks for `limit_s` needs."""
        longest_s = self._longest_s.get(user)
        return limit_s if longest_s is None else min(limit_s, max(LEAST_NEED_S, self._times * longest_s))

    def end_s(self, user: int, began_s: float, limit_end_s: float, now_s: float) -> float:
        """Return the expected end of a job that began at `began_s` and reaches its limit at `limit_end_s`."""
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
    """The history of a machine: the longest of each user's last few runs, by uid, and the waits under plain EASY.

    `easy_wait_s`: the longest of these waits so far (see `shadow_easy`). `began_s`: first submission; None: no job yet.
    `request_use`: the part of the requested processor time that jobs used (see `RequestUse`).
    """

    longest_runs_s: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    easy_wait_s: float = 0.0
    began_s: float | None = None
    request_use: float = 1.0


NO_EXPERIENCE = Experience()


class Expected:
    """Predicted run times by `experience`, raised by those of `running` jobs (user, run time so far) that outlast them."""

    def __init__(self, experience: Experience, running: Iterable[tuple[int, float]]) -> None:
        self._longest_s = dict(experience.longest_runs_s)
        for uid, so_far_s in running:
            if so_far_s > self._longest_s.get(uid, so_far_s):
                self._longest_s[uid] = so_far_s

    def run_s(self, uid: int, limit_s: float) -> float:
        """Return how long a job of this user with this limit is expected to run: never longer than its limit."""
        return min(limit_s, self._longest_s.get(uid, limit_s))
