"""Backfill on one pool of alike processors, which nothing but a count of free ones describes, followed event by event.

It is what the simulator runs: some ten times quicker than a snapshot and a `plan` for each event. `plan` itself does not use
it; it has its own, general code. For first come first served, EASY, EASY-SJBF, the Slurm-like policy and our own (whose
decisions are the same code, `guard`) a property test holds the two to the same starts. `promises.ConservativePool` decides
otherwise than `plan`.

The rules, to the second: a running job's processors are free again when its time limit is up, or when it ends if that comes
first. The queue is in the order of arrival. EASY: heads start while they fit; the first that does not fit is promised its *shadow
time*, the earliest at which it will fit by the limits of what runs; processors that are free then beyond its need are
*extra*. Walking on through the queue a job that fits now starts if it ends by the shadow time, or takes only extra processors.
EASY-SJBF walks in the order of time limits. Source: Lifka, "The ANL/IBM SP scheduling system" (1995).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from operator import itemgetter

Procs = Sequence[int] | Mapping[int, int]  # by a job's number
Limits = Sequence[float] | Mapping[int, float]
NOBODY: tuple[int, ...] = ()
Waiting = tuple[int, float, int]  # processors, time limit, number: a job is known by its number in the order of arrival
_number = itemgetter(2)


class Pool:
    """A pool without backfill: first come, first served. The base of the others.

    `procs` and `limits_s` say of each job, by number, what it needs. Of those that are to start at an event the numbers are
    returned, in the order in which they start.
    """

    def __init__(self, size: int, procs: Procs, limits_s: Limits) -> None:
        self.free = size
        self.procs = procs
        self.limits_s = limits_s
        self.ends: list[
            tuple[float, int, int]
        ] = []  # of what runs: when its limit is up, number, processors; ascending
        self.ends_of: dict[int, float] = {}
        self.queue: list[Waiting] = []

    def submit(self, job: int, now_s: float) -> Sequence[int]:
        """Let `job` wait from now on. If it fits in what is free, return what is to start."""
        if self.ends and self.ends[0][0] <= now_s:
            self._expire(now_s)
        procs = self.procs[job]
        if procs <= self.free and not self.queue:
            self.start(job, now_s)
            return (job,)
        self._wait((procs, self.limits_s[job], job))
        return self.choose(now_s) if procs <= self.free else NOBODY

    def end(self, job: int, now_s: float) -> Sequence[int]:
        """Take back what `job`, which has ended, held, and return what is to start."""
        self.release(job, now_s)
        return self.choose(now_s) if self.queue else NOBODY

    def choose(self, now_s: float) -> list[int]:
        """Return what is to start now, and count it as running."""
        return self._heads(now_s)

    def start(self, job: int, now_s: float) -> None:
        """Count `job`, which is not in the queue, as running from now on."""
        limit_s = self.limits_s[job]
        self.ends_of[job] = now_s + limit_s
        if limit_s > 0:  # the limit of the others is up at once: they hold nothing
            procs = self.procs[job]
            self.free -= procs
            insort(self.ends, (now_s + limit_s, job, procs))

    def release(self, job: int, now_s: float) -> None:
        """Count the processors of `job` as free, and those of all whose limit is up."""
        ends = self.ends
        end_s = self.ends_of.pop(job)
        at = bisect_left(ends, (end_s, job))
        if at < len(ends) and ends[at][1] == job:
            self.free += ends[at][2]
            del ends[at]
        if ends and ends[0][0] <= now_s:
            self._expire(now_s)

    def _expire(self, now_s: float) -> None:
        """Count as free what jobs hold whose limit is up, before they are seen to end."""
        ends = self.ends
        gone = 0
        while gone < len(ends) and ends[gone][0] <= now_s:
            self.free += ends[gone][2]
            gone += 1
        del ends[:gone]

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
        self.current = False  # shadow and extra still hold, and nothing of the queue can start until something ends

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
        return NOBODY

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
        """Find the shadow time of the head, and what is extra then."""
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
        # A head that needs more than there is never fits; nothing can delay it.
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

    A job that cannot start keeps out every longer one that needs as many processors, so of these only the shortest is looked at.
    """

    def __init__(self, size: int, procs: Procs, limits_s: Limits) -> None:
        super().__init__(size, procs, limits_s)
        self.by_procs: dict[int, list[tuple[float, int]]] = {}  # of those that wait: time limit and number, ascending

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
