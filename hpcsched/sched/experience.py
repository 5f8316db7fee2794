"""The experience of a machine: predicted run times, use of requests, longest wait.

Users request far more time than they need, but each user runs the same kind of job again and again. So the longest of a user's
last few runs is a better estimate than the request. A prediction is never longer than the request. It equals the request if the
user is unknown or has no history.

Usually a prediction only orders jobs, and promises are computed from requests. If the jobs of a machine use only a small part
of the requested processor time (`RequestUse`), requests are useless. Then promises are computed from `Needed`, a multiple of
the prediction, which is raised when a job outlasts it.

`ShadowEasy` is plain EASY backfill of the same jobs, simulated beside the real schedule, as if on a second machine. Its result
is the bound of the policy `default`. The run time of a job is known only after it has ended on the real machine. So the
simulation runs behind the real clock: it advances until an end that is not known yet could matter. Its result is certain: the
longest wait under plain EASY is at least `longest_wait_s`, and only grows. A job is removed once it has started here and ended
on the real machine, because a daemon runs for years.

Source: after Tsafrir, Etsion and Feitelson, "Backfilling using system-generated predictions rather than user runtime estimates"
(2007), which uses the mean of the last two runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import MappingProxyType

from hpcsched.sched.pool import EasyPool

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

    `easy_wait_s`: the longest wait so far (see `ShadowEasy`). `began_s`: first submission; None: no job yet. `request_use`: the
    part of the requested processor time that jobs used (see `RequestUse`).
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


class ShadowEasy:
    """Plain EASY on a machine of `size` processors, for the jobs submitted so far.

    It advances as far as the run times of jobs are known. A job is identified by its number in the order of submission.
    """

    def __init__(self, size: int) -> None:
        self.longest_wait_s = 0.0
        self._procs: dict[int, int] = {}  # this and the next two: jobs that have not started here
        self._limits_s: dict[int, float] = {}
        self._submits_s: dict[int, float] = {}
        self._pool = EasyPool(size, self._procs, self._limits_s)
        self._submitted = 0
        self._coming: deque[tuple[float, int]] = deque()  # submissions that are not simulated yet
        self._starts_s: dict[int, float] = {}  # jobs that run here
        self._ends: list[tuple[float, int, int]] = []  # ends of jobs that run here and have a known run time
        self._count = 0
        self._made: dict[int, int] = {}  # order of starts here, which orders ends in the same second
        self._real_starts_s: dict[int, float] = {}
        self._runs_s: dict[int, float] = {}
        self._unknown: set[int] = set()  # jobs that run here and have an unknown run time
        self._blocker = -1

    def submitted(self, procs: int, limit_s: float, now_s: float) -> int:
        """Record that the next job was submitted now, and return its number."""
        job = self._submitted
        self._submitted += 1
        self._procs[job], self._limits_s[job], self._submits_s[job] = procs, limit_s, now_s
        self._coming.append((now_s, job))
        return job

    def started(self, job: int, now_s: float) -> None:
        """Record that `job` has started on the real machine."""
        self._real_starts_s[job] = now_s

    def ended(self, job: int, now_s: float) -> None:
        """Record that `job` has ended on the real machine."""
        self._runs_s[job] = run_s = now_s - self._real_starts_s.pop(job)
        if job in self._unknown:
            self._unknown.discard(job)
            heappush(self._ends, (self._starts_s[job] + run_s, self._made[job], job))

    def advance(self, now_s: float, *, more_may_come: bool) -> None:
        """Simulate as far as the known run times allow.

        If `more_may_come` in this second, the ends in this second are left out.
        """
        ends, coming = self._ends, self._coming
        while True:
            submit_s = coming[0][0] if coming else None
            if submit_s is not None and (not ends or submit_s <= ends[0][0]):
                if submit_s > now_s or self._unsure(submit_s, now_s):
                    break
                _, job = coming.popleft()
                self._begin(self._pool.submit(job, submit_s), submit_s)
                self._look(submit_s)
            elif ends and (ends[0][0] < now_s or (ends[0][0] == now_s and not more_may_come)):
                if self._unsure(ends[0][0], now_s, or_then=True):
                    break
                at_s, _, job = heappop(ends)
                self._look(at_s)
                del self._starts_s[job], self._made[job]
                self._begin(self._pool.end(job, at_s), at_s)
            else:
                break

    def _unsure(self, at_s: float, now_s: float, *, or_then: bool = False) -> bool:
        """Say whether a job of unknown run time could end here before `at_s`.

        With `or_then`, an end at `at_s` counts too.
        """
        if self._blocker in self._unknown and self._may_end(self._blocker, at_s, now_s, or_then):
            return True
        for job in self._unknown:
            if self._may_end(job, at_s, now_s, or_then):
                self._blocker = job
                return True
        return False

    def _may_end(self, job: int, at_s: float, now_s: float, or_then: bool) -> bool:
        # It runs here at least as long as it has run on the real machine.
        least_s = self._starts_s[job] + now_s - self._real_starts_s.get(job, now_s)
        return least_s < at_s or (or_then and least_s == at_s)

    def _begin(self, jobs: Sequence[int], at_s: float) -> None:
        for job in jobs:
            self.longest_wait_s = max(self.longest_wait_s, at_s - self._submits_s.pop(job))
            del self._procs[job], self._limits_s[job]
            self._starts_s[job] = at_s
            self._made[job] = self._count
            self._count += 1
            run_s = self._runs_s.pop(job, None)
            if run_s is None:
                self._unknown.add(job)
            else:
                heappush(self._ends, (at_s + run_s, self._made[job], job))

    def _look(self, at_s: float) -> None:
        """Record the wait of the first job in the queue, which has waited longest."""
        if self._pool.queue:
            self.longest_wait_s = max(self.longest_wait_s, at_s - self._submits_s[self._pool.queue[0][2]])
