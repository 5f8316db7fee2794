"""Backfill on one pool of equal processors, event by event.

The state of the pool is only the number of free processors. The simulator uses this module, because it is at least ten times as
fast as a snapshot and a `plan` for each event. `plan` does not use it. A property test checks that both give the same starts
for first come first served, EASY, EASY-SJBF, the Slurm-like policy and `default` (which has the same code, `guard`).
`ConservativePool` decides differently from `plan`.

Rules, to the second: the processors of a running job are free again when its time limit is reached, or when it ends if that is
earlier. The queue is in the order of arrival. EASY: heads start while they fit. The first job that does not fit is promised its
*shadow time*, the earliest time at which it fits by the limits of running jobs. Processors that are free then, beyond its need,
are *extra*. A later job that fits now starts if it ends by the shadow time, or takes only extra processors. EASY-SJBF tries the
later jobs in the order of time limits.

Conservative: every job is promised a start that is never delayed. `Steps` is the number of free processors as a step function
of time. A new job gets the earliest interval that is free for its whole time limit, after all earlier promises. When a job ends
early, the waiting jobs are tried in the order of arrival. For each trial, the promise of the job is released: the job starts
now or keeps its promise. So a promise can only improve, as long as no job runs past its limit. A promise becomes due exactly
when a job ends, because earlier ends have been tried already, so no timer is needed.

Sources: Lifka, "The ANL/IBM SP scheduling system" (1995); Mu'alem and Feitelson, "Utilization, predictability, workloads, and
user runtime estimates in scheduling the IBM SP2 with backfilling" (2001).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from math import inf
from operator import itemgetter

Procs = Sequence[int] | Mapping[int, int]  # by a job's number
Limits = Sequence[float] | Mapping[int, float]
NO_JOBS: tuple[int, ...] = ()
Waiting = tuple[int, float, int]  # processors, time limit, number: a job is known by its number in the order of arrival
_number = itemgetter(2)


class Pool:
    """A pool without backfill: first come, first served. The base of the others.

    `procs` and `limits_s` have the processors and the time limit of each job, by its number. Each event returns the numbers
    of the jobs to start, in the order of their starts.
    """

    def __init__(self, size: int, procs: Procs, limits_s: Limits) -> None:
        self.free = size
        self.procs = procs
        self.limits_s = limits_s
        self.ends: list[
            tuple[float, int, int]
        ] = []  # of running jobs: end by time limit, number, processors; ascending
        self.ends_of: dict[int, float] = {}
        self.queue: list[Waiting] = []

    def submit(self, job: int, now_s: float) -> Sequence[int]:
        """Add `job` to the queue. If it fits in the free processors, return the jobs to start."""
        if self.ends and self.ends[0][0] <= now_s:
            self._expire(now_s)
        procs = self.procs[job]
        if procs <= self.free and not self.queue:
            self.start(job, now_s)
            return (job,)
        self._wait((procs, self.limits_s[job], job))
        return self.choose(now_s) if procs <= self.free else NO_JOBS

    def end(self, job: int, now_s: float) -> Sequence[int]:
        """Release the processors of `job`, which has ended, and return the jobs to start."""
        self.release(job, now_s)
        return self.choose(now_s) if self.queue else NO_JOBS

    def choose(self, now_s: float) -> list[int]:
        """Return the jobs to start now, and count them as running."""
        return self._heads(now_s)

    def start(self, job: int, now_s: float) -> None:
        """Count `job`, which is not in the queue, as running from now on."""
        limit_s = self.limits_s[job]
        self.ends_of[job] = now_s + limit_s
        if limit_s > 0:  # a job without time holds nothing
            procs = self.procs[job]
            self.free -= procs
            insort(self.ends, (now_s + limit_s, job, procs))

    def release(self, job: int, now_s: float) -> None:
        """Count the processors of `job`, and those of jobs past their limit, as free."""
        ends = self.ends
        end_s = self.ends_of.pop(job)
        at = bisect_left(ends, (end_s, job))
        if at < len(ends) and ends[at][1] == job:
            self.free += ends[at][2]
            del ends[at]
        if ends and ends[0][0] <= now_s:
            self._expire(now_s)

    def _expire(self, now_s: float) -> None:
        """Count the processors of jobs past their limit as free, before they end."""
        ends = self.ends
        expired = 0
        while expired < len(ends) and ends[expired][0] <= now_s:
            self.free += ends[expired][2]
            expired += 1
        del ends[:expired]

    def _wait(self, job: Waiting) -> None:
        self.queue.append(job)

    def _leave(self, job: Waiting) -> None:
        del self.queue[bisect_left(self.queue, job[2], key=_number)]

    def _heads(self, now_s: float) -> list[int]:
        """Start jobs from the front of the queue while they fit."""
        queue = self.queue
        started = []
        while queue and queue[0][0] <= self.free:
            job = queue[0]
            self._leave(job)
            self.start(job[2], now_s)
            started.append(job[2])
        return started


class EasyPool(Pool):
    """EASY backfill, in the order of arrival."""

    def __init__(self, size: int, procs: Procs, limits_s: Limits) -> None:
        super().__init__(size, procs, limits_s)
        self.shadow_s = 0.0
        self.extra = 0
        self.current = False  # shadow and extra still hold, and no queued job can start until one ends

    def submit(self, job: int, now_s: float) -> Sequence[int]:
        if self.ends and self.ends[0][0] <= now_s:
            self._expire(now_s)
            self.current = False
        procs = self.procs[job]
        limit_s = self.limits_s[job]
        if procs <= self.free:
            if not self.queue:
                self.start(job, now_s)
                return (job,)
            if not self.current:
                self._wait((procs, limit_s, job))
                return self.choose(now_s)
            if now_s + limit_s <= self.shadow_s:
                self.start(job, now_s)
                return (job,)
            if procs <= self.extra:
                self.extra -= procs
                self.start(job, now_s)
                return (job,)
        if not self.queue:
            self.current = False
        self._wait((procs, limit_s, job))
        return NO_JOBS

    def choose(self, now_s: float) -> list[int]:
        started = self._heads(now_s)
        if len(self.queue) > 1 and self.free:
            self._promise()
            self._backfill(now_s, started)
            self.current = True
        else:
            self.current = False
        return started

    def _promise(self) -> None:
        """Find the shadow time of the head, and the extra processors at that time."""
        missing = self.queue[0][0] - self.free
        found = False
        shadow_s = 0.0
        for end_s, _, procs in self.ends:
            if found and end_s != shadow_s:
                break
            missing -= procs
            if missing <= 0 and not found:
                found = True
                shadow_s = end_s
        # A head that needs more processors than exist never fits, so nothing can delay it.
        self.shadow_s, self.extra = (shadow_s, -missing) if found else (float("inf"), 0)

    def _backfill(self, now_s: float, started: list[int]) -> None:
        free, extra = self.free, self.extra
        longest_s = self.shadow_s - now_s
        for job in self.queue[1:]:
            procs = job[0]
            if procs <= free:
                if job[1] > longest_s:
                    if procs > extra:
                        continue
                    extra -= procs
                self._leave(job)
                self.start(job[2], now_s)
                free = self.free
                started.append(job[2])
                if not free:
                    break
        self.extra = extra


class ShortestPool(EasyPool):
    """EASY backfill that tries the jobs with the shortest time limits first (EASY-SJBF).

    If a job cannot start, no longer job with as many processors can, so only the shortest of each size is tried.
    """

    def __init__(self, size: int, procs: Procs, limits_s: Limits) -> None:
        super().__init__(size, procs, limits_s)
        self.by_procs: dict[int, list[tuple[float, int]]] = {}  # of waiting jobs: time limit and number, ascending

    def _wait(self, job: Waiting) -> None:
        super()._wait(job)
        insort(self.by_procs.setdefault(job[0], []), (job[1], job[2]))

    def _leave(self, job: Waiting) -> None:
        super()._leave(job)
        alike = self.by_procs[job[0]]
        del alike[bisect_left(alike, (job[1], job[2]))]
        if not alike:
            del self.by_procs[job[0]]

    def _backfill(self, now_s: float, started: list[int]) -> None:
        extra = self.extra
        longest_s = self.shadow_s - now_s
        # The head is not among them: it needs more than is free.
        shortest = [(*alike[0], procs) for procs, alike in self.by_procs.items() if procs <= self.free]
        heapify(shortest)
        while shortest:
            limit_s, number, procs = shortest[0]
            late = limit_s > longest_s
            if procs > self.free or (late and procs > extra):
                heappop(shortest)
                continue
            if late:
                extra -= procs
            self._leave((procs, limit_s, number))
            self.start(number, now_s)
            started.append(number)
            alike = self.by_procs.get(procs)
            if alike:
                heapreplace(shortest, (*alike[0], procs))
            else:
                heappop(shortest)
        self.extra = extra


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
        over = bisect_right(self.times_s, now_s) - 1
        if over > 0:
            del self.times_s[:over], self.free[:over]
        self.times_s[0] = now_s

    def earliest(self, procs: int, length_s: float, from_s: float = -inf) -> float:
        """Return the first time at or after `from_s` with `procs` free for `length_s`.

        `inf`: never.
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
        return start_s if fits else inf

    def fits_now(self, procs: int, length_s: float, own_start_s: float = inf) -> bool:
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
    """Conservative backfill, event by event. For arguments and results see `Pool`."""

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
        if start_s < inf:
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
                start_s = inf
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
                if start_s < inf:
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
