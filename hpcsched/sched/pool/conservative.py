"""Conservative backfill on a pool: every job is promised a start that is never delayed.

`Steps` is the number of free processors as a step function of time. A new job gets the earliest
interval that is free for its whole time limit, after all earlier promises. When a job ends early,
the waiting jobs are tried in the order of arrival. For each trial, the promise of the job is
released: the job starts now or keeps its promise. So a promise can only improve, as long as no job
runs past its limit. A promise becomes due exactly when a job ends, because earlier ends have been
tried already, so no timer is needed.

Source: Mu'alem and Feitelson, "Utilization, predictability, workloads, and user runtime estimates
in scheduling the IBM SP2 with backfilling" (2001). `sched.promises` does the same for nodes and
priorities.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from hpcsched.sched.place.reserved_intervals import NEVER_S
from hpcsched.sched.pool.easy import NO_JOBS, Pool


class Steps:
    """Free processors over time.

    There are `free[i]` from `times_s[i]` until the next time; the last step has no end.
    """

    __slots__ = ("free", "times_s")

    def __init__(self, now_s: float, free: int) -> None:
        self.times_s = [now_s]
        self.free = [free]

    def add(self, start_s: float, end_s: float, procs: int) -> None:
        """Add `procs` free processors over ``[start_s, end_s)``.

        The interval must not begin before the first step.
        """
        if end_s <= start_s:
            return
        times_s, free = self.times_s, self.free
        first = bisect_left(times_s, start_s)
        if first == len(times_s) or times_s[first] != start_s:
            times_s.insert(first, start_s)
            free.insert(first, free[first - 1])
        last = bisect_left(times_s, end_s, first)
        if last == len(times_s) or times_s[last] != end_s:
            times_s.insert(last, end_s)
            free.insert(last, free[last - 1])
        for at in range(first, last):
            free[at] += procs
        # Remove steps that equal the one before, because they slow searches.
        if free[last] == free[last - 1]:
            del free[last], times_s[last]
        if first and free[first] == free[first - 1]:
            del free[first], times_s[first]

    def forget(self, now_s: float) -> None:
        """Remove the steps that are over."""
        gone = bisect_right(self.times_s, now_s) - 1
        if gone > 0:
            del self.times_s[:gone], self.free[:gone]
        self.times_s[0] = now_s

    def earliest(self, procs: int, length_s: float, from_s: float = -NEVER_S) -> float:
        """Return the first time at or after `from_s` with `procs` free for `length_s`.

        `NEVER_S`: never.
        """
        times_s, free = self.times_s, self.free
        start_s = -1.0
        fits = False
        for at in range(max(0, bisect_right(times_s, from_s) - 1), len(free)):
            if fits and times_s[at] >= start_s + length_s:
                return start_s
            if free[at] < procs:
                fits = False
            elif not fits:
                fits = True
                start_s = max(times_s[at], from_s)
        return start_s if fits else NEVER_S

    def fits_now(self, procs: int, length_s: float, own_start_s: float = NEVER_S) -> bool:
        """Say whether `procs` are free from the first step on for `length_s`.

        From `own_start_s` on, the job's own promise holds as many processors: there it always fits.
        """
        times_s = self.times_s
        end_s = times_s[0] + length_s
        for at, count in enumerate(self.free):
            start_s = times_s[at]
            if start_s >= end_s:
                return True
            if count < procs and start_s < own_start_s:
                return False
        return True


class ConservativePool:
    """Conservative backfill, event by event. For arguments and results see `easy.Pool`."""

    def __init__(self, size: int, procs: Sequence[int], limits_s: Sequence[float]) -> None:
        self.steps = Steps(float("-inf"), size)
        self.procs = procs
        # A promise of length zero would hold no processors.
        self.limits_s = [limit_s or 1.0 for limit_s in limits_s]
        self.ends_of: dict[int, float] = {}
        self.promises: dict[int, float] = {}  # by waiting job

    def submit(self, job: int, now_s: float) -> Sequence[int]:
        """Promise `job` a start; return it if it starts now."""
        self.steps.forget(now_s)
        procs, limit_s = self.procs[job], self.limits_s[job]
        start_s = self.steps.earliest(procs, limit_s)
        if start_s <= now_s:
            self.steps.add(now_s, now_s + limit_s, -procs)
            self.ends_of[job] = now_s + limit_s
            return (job,)
        self.promises[job] = start_s
        if start_s < NEVER_S:
            self.steps.add(start_s, start_s + limit_s, -procs)
        return NO_JOBS

    def end(self, job: int, now_s: float) -> Sequence[int]:
        """Release the remaining time of `job`, and return the jobs to start."""
        self.steps.forget(now_s)
        self.steps.add(now_s, self.ends_of.pop(job), self.procs[job])
        return self._due(now_s) if self.promises else NO_JOBS

    def _due(self, now_s: float) -> list[int]:
        """Start the jobs that can start now without delaying a promise.

        Promises that are due come first.
        """
        due = sorted(job for job, start_s in self.promises.items() if start_s <= now_s)
        for job in due:
            self._start(job, now_s)
        steps = self.steps
        for job in tuple(self.promises):  # ascending: the order of arrival
            procs, limit_s = self.procs[job], self.limits_s[job]
            free = steps.free[0]
            if not free:
                break
            if procs <= free and steps.fits_now(procs, limit_s, self.promises[job]):
                due.append(job)
                self._start(job, now_s)
        return due

    def _start(self, job: int, now_s: float) -> None:
        procs, limit_s = self.procs[job], self.limits_s[job]
        promise_s = self.promises.pop(job)
        self.ends_of[job] = now_s + limit_s
        if promise_s > now_s:
            self.steps.add(promise_s, promise_s + limit_s, procs)
            self.steps.add(now_s, now_s + limit_s, -procs)


class PromisedPool(Pool):
    """A pool with promised starts for the first `depth` waiting jobs, as in Slurm.

    The promises are made again in each pass, in the order of arrival. A later job starts if it fits
    now and delays no promise. Source: backfill.html of Slurm's documentation.
    """

    def __init__(self, size: int, procs: Sequence[int], limits_s: Sequence[float], depth: int) -> None:
        super().__init__(size, procs, limits_s)
        self.depth = depth

    def choose(self, now_s: float) -> list[int]:
        started = self._heads(now_s)
        if self.queue and self.free:
            steps = steps_of(self.free, self.ends, now_s)
            promised = 0
            for job in tuple(self.queue):
                procs, limit_s, number = job
                start_s = NEVER_S
                if promised < self.depth:
                    start_s = steps.earliest(procs, limit_s)
                elif steps.fits_now(procs, limit_s):
                    start_s = now_s
                if start_s <= now_s:
                    self._leave(job)
                    self.start(number, now_s)
                    started.append(number)
                elif promised < self.depth:
                    promised += 1
                if start_s < NEVER_S:
                    steps.add(start_s, start_s + limit_s, -procs)
                if not steps.free[0] and (promised >= self.depth or not self.free):
                    break
        return started


def steps_of(free_now: int, ends: Sequence[tuple[float, int, int]], now_s: float) -> Steps:
    """Return the free processors from now on if running jobs end at `ends`.

    `ends`: time, number and processors, ascending.
    """
    steps = Steps(now_s, free_now)
    times_s, free = steps.times_s, steps.free
    count = free_now
    for end_s, _, procs in ends:
        count += procs
        if end_s == times_s[-1]:
            free[-1] = count
        else:
            times_s.append(end_s)
            free.append(count)
    return steps
