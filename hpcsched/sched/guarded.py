"""Our own policy: short jobs first by prediction, and a guard that keeps old jobs from waiting longer than under plain EASY.

Two orders. The *old*, which have waited for more than a part of plain EASY's longest wait (see `rehearsal`), come first, in
the order of arrival; the first few of them that do not fit are promised the earliest start that the requests of what runs
allow. All others come by the time they have waited over what they are expected to take (run time, see `predict`, times the
root of the processors): whoever waits moves up, a small job quickly. They start if they fit now and touch no promise.

Before there is a measure, in the first days of a machine, nobody is old before a fixed time, and the first in the second
order is promised a start.

A prediction only orders jobs, promises count with requests: one that proves short delays no promise. Expected run times
beyond `Guard.long_s` count as that. What the guard does not do: it is a rule of thumb that keeps the longest wait near plain
EASY's, not a proof that it stays below. Told of events like every pool; no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from hpcsched.sched.intervals import NEVER_S
from hpcsched.sched.policy import Guard
from hpcsched.sched.pool import Pool, Waiting
from hpcsched.sched.predict import History
from hpcsched.sched.promises import Steps, steps_of
from hpcsched.sched.rehearsal import Rehearsal

ANY = 1 << 62
SHORTEST_S = 10.0  # as bounded slowdown counts: shorter is not worth preferring


class GuardedPool(Pool):
    """Our default policy on a pool of alike processors; `users` has each job's user by its number, negative: nobody."""

    def __init__(
        self, size: int, procs: Sequence[int], limits_s: Sequence[float], users: Sequence[int], guard: Guard
    ) -> None:
        super().__init__(size, procs, limits_s)
        self.users = users
        self.guard = guard
        self.history = History()
        self.rehearsal = Rehearsal(size, procs, limits_s)
        self.submits_s: dict[int, float] = {}
        self.starts_s: dict[int, float] = {}
        self.learnt_at_s: float | None = None  # from then on the rehearsal is the measure

    def submit(self, job: int, now_s: float) -> Sequence[int]:
        if self.learnt_at_s is None:
            self.learnt_at_s = now_s + self.guard.learning_s
        self.submits_s[job] = now_s
        self.rehearsal.submitted(now_s)
        self.rehearsal.go_on(now_s, more_may_come=True)
        return super().submit(job, now_s)

    def end(self, job: int, now_s: float) -> Sequence[int]:
        self.history.record(self.users[job], now_s - self.starts_s.pop(job))
        self.rehearsal.ended(job, now_s)
        self.rehearsal.go_on(now_s, more_may_come=False)
        return super().end(job, now_s)

    def start(self, job: int, now_s: float) -> None:
        super().start(job, now_s)
        del self.submits_s[job]
        self.starts_s[job] = now_s
        self.rehearsal.started(job, now_s)

    def choose(self, now_s: float) -> list[int]:
        if not self.free:
            return []
        started: list[int] = []
        learning = self.learnt_at_s is not None and now_s < self.learnt_at_s
        steps, promised = self._old_ones(self._old_after_s(learning), now_s, started)
        if self.free:
            self._by_size(now_s, started, steps, promised, lead=learning and not promised)
        return started

    def _old_after_s(self, learning: bool) -> float:
        """Return how long a job that counts as old has waited."""
        guard = self.guard
        old_after_s = max(guard.old_s, guard.part * self.rehearsal.longest_wait_s)
        return max(old_after_s, guard.learning_old_s) if learning else old_after_s

    def _old_ones(self, old_after_s: float, now_s: float, started: list[int]) -> tuple[Steps | None, set[int]]:
        """Start the old jobs that fit, and promise starts to the first few that do not.

        Returns what is free beside the promises (None: there are none) and to whom they were made.
        """
        guard = self.guard
        steps: Steps | None = None
        promised: set[int] = set()
        for job in self.queue[: guard.most_old]:  # in the order of arrival
            procs, limit_s, number = job
            if now_s - self.submits_s[number] < old_after_s or len(promised) >= guard.promises:
                break
            if steps is None and procs > self.free:
                steps = steps_of(self, now_s)
            if steps is None:
                start_s = now_s
            else:
                start_s = steps.earliest(procs, limit_s)
                if start_s < NEVER_S:
                    steps.add(start_s, start_s + limit_s, -procs)
            if start_s <= now_s:
                self._go(job, now_s, started)
            else:
                promised.add(number)
        return steps, promised

    def _by_size(
        self, now_s: float, started: list[int], steps: Steps | None, promised: set[int], *, lead: bool
    ) -> None:
        """Start the other jobs that fit; with `lead` the first that does not is promised a start."""
        for job in self._ranked(now_s, promised, ANY if lead else self.free):
            procs, limit_s, _ = job
            if procs <= self.free and (steps is None or steps.fits_now(procs, limit_s)):
                if steps is not None:
                    steps.add(now_s, now_s + limit_s, -procs)
                self._go(job, now_s, started)
                if not self.free:
                    break
            elif lead:
                lead = False
                steps = steps_of(self, now_s)
                start_s = steps.earliest(procs, limit_s)
                if start_s < NEVER_S:
                    steps.add(start_s, start_s + limit_s, -procs)

    def _ranked(self, now_s: float, promised: set[int], most: int) -> list[Waiting]:
        """Return the jobs of at most `most` processors without a promise, the one that has waited most for its size first."""
        longest_s = self.history.longest_s
        users, submits_s, long_s = self.users, self.submits_s, self.guard.long_s
        ranked = []
        for job in self.queue:
            procs, limit_s, number = job
            if procs <= most and number not in promised:
                expected_s = longest_s.get(users[number], limit_s)
                if expected_s > limit_s:
                    expected_s = limit_s
                if expected_s > long_s:
                    expected_s = long_s
                elif expected_s < SHORTEST_S:
                    expected_s = SHORTEST_S
                ranked.append(((submits_s[number] - now_s) / (expected_s * sqrt(procs)), number, job))
        if len(ranked) > 1:
            ranked.sort()
        return [job for _, _, job in ranked]

    def _go(self, job: Waiting, now_s: float, started: list[int]) -> None:
        self._leave(job)
        self.start(job[2], now_s)
        started.append(job[2])
