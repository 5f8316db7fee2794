"""Plain EASY backfill of the same jobs, simulated beside the real schedule.

The result is the bound of the policy `default`. An `EasyPool` schedules the same jobs once more, as
if on a second machine. The run time of a job is known only after it has ended on the real machine.
So the simulation runs behind the real clock: it advances until an end that is not known yet could
matter. Its result is certain: the longest wait under plain EASY is at least `longest_wait_s`, and
only grows. A job is removed once it has started here and ended on the real machine, because a
daemon runs for years.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from hpcsched.sched.pool.easy import EasyPool


class ShadowEasy:
    """Plain EASY on a machine of `size` processors, for the jobs submitted so far.

    It advances as far as the run times of jobs are known. A job is identified by its number in the
    order of submission.
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
