"""Predictions of run times, from the last jobs of each user.

Users request far more time than they need, but each user runs the same kind of job again and again.
So the longest of a user's last few runs is a better estimate than the request. A prediction is
never longer than the request. It equals the request if the user is unknown or has no history.

Usually a prediction only orders jobs, and promises are computed from requests. If the jobs of a
machine use only a small part of the requested processor time (`RequestUse`), requests are useless.
Then promises are computed from `Needed`, a multiple of the prediction, which is raised when a job
outlasts it.

Source: after Tsafrir, Etsion and Feitelson, "Backfilling using system-generated predictions rather
than user runtime estimates" (2007), which uses the mean of the last two runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

REMEMBERED = 3
LEAST_JOBS = 200  # ended jobs before the use of requests predicts that of later jobs
FORGETS_JOBS = 5000  # number of later jobs after which the weight of a job is 1/e
LEAST_NEED_S = 60.0  # no job is expected to need less than this


class History:
    """The run times of each user's last jobs."""

    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = {}
        self.longest_s: dict[int, float] = {}  # of the last few runs, by user

    def record(self, user: int, run_s: float) -> None:
        """Record that a job of `user` ran for `run_s`; ignore an unknown user (negative)."""
        if user < 0:
            return
        last = self._last.get(user)
        if last is None:
            last = self._last[user] = deque(maxlen=REMEMBERED)
        last.append(run_s)
        self.longest_s[user] = max(last)


class RequestUse:
    """The part of the requested processor time that ended jobs used.

    The older a job, the lower its weight.
    """

    def __init__(self) -> None:
        self._jobs = 0
        self._used = 0.0
        self._asked = 0.0

    def record(self, run_s: float, limit_s: float, procs: float) -> None:
        """Record that a job on `procs` processors requested `limit_s` and ran for `run_s`."""
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
    """The expected run times of jobs if requests are not trusted.

    A job needs `times` the longest of its user's last runs, but never longer than its request. A
    running job that outlasts this is expected to run as long again.
    """

    def __init__(self, longest_s: Mapping[int, float], times: float) -> None:
        self._longest_s = longest_s
        self._times = times

    def length_s(self, user: int, limit_s: float) -> float:
        """Return how long a job of `user` that requests `limit_s` needs."""
        longest_s = self._longest_s.get(user)
        return limit_s if longest_s is None else min(limit_s, max(LEAST_NEED_S, self._times * longest_s))

    def end_s(self, user: int, began_s: float, limit_end_s: float, now_s: float) -> float:
        """Return the expected end of a job that began at `began_s`.

        The job reaches its time limit at `limit_end_s`.
        """
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
    """The history of a machine: recent run times by uid, and the waits under plain EASY.

    Of each user it has the longest of the last few runs.

    `easy_wait_s`: the longest wait so far (see `shadow_easy`). `began_s`: first submission; None:
    no job yet. `request_use`: the part of the requested processor time that jobs used (see
    `RequestUse`).
    """

    longest_runs_s: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    easy_wait_s: float = 0.0
    began_s: float | None = None
    request_use: float = 1.0


NO_EXPERIENCE = Experience()


class Expected:
    """Predicted run times by `experience`, raised by running jobs that outlast them.

    `running`: user and run time so far of each running job.
    """

    def __init__(self, experience: Experience, running: Iterable[tuple[int, float]]) -> None:
        self._longest_s = dict(experience.longest_runs_s)
        for uid, so_far_s in running:
            if so_far_s > self._longest_s.get(uid, so_far_s):
                self._longest_s[uid] = so_far_s

    def run_s(self, uid: int, limit_s: float) -> float:
        """Return the expected run time of a job of this user, at most its limit."""
        return min(limit_s, self._longest_s.get(uid, limit_s))
