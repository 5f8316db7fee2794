"""Our own policy: short jobs first by prediction, and a guard that keeps jobs from waiting much longer than under plain EASY.

Its measure is plain EASY's longest wait so far on the same jobs (see `rehearsal`): certain, and it only grows. Who has waited
for a part of it is *old*. Wide jobs, for which room is hardest to find, count as having waited longer by their share of the
machine: it is they that wait longest under plain EASY. The old come first, in the order of what they count as having waited:
those that fit start, the first few that do not are promised the earliest start that the requests of what runs allow, and the
others start if they touch no promise. The young come by the time they have waited over the time that they are expected to run
(see `predict`), weighed by their size: whoever waits moves up, a short job quickly. They start if they fit and touch no promise.

The work of those who overtake is what keeps the others waiting. So the nearer the first in line is to the measure, the shorter
a job must be to be preferred: expected times beyond `GuardedPool._long_s` count alike, and such jobs come as they arrived.

Jobs that ask for next to nothing (see `quick`) go ahead of all, promises or not, while nobody has waited for nearly as long as
the measure. So a promise can be late, but not for many at once: what goes ahead holds a small share of the machine.

A few of the young are promised a start as well, for what is begun before they are old would still be in their way then: the
first in line, for a late one, and the first of those that need much of the machine, for an early one. Before there is a
measure, in the first days of a machine, nobody is old before a fixed time, and the first in the second order is promised a start.

A prediction only orders jobs, promises count with requests: one that proves short delays no promise.

What is proven: with `Guard.part` and `old_s` 0 (everybody is old, and no width counts), one promise and nothing quick the
schedule is plain EASY's, and those that went ahead hold no more than their share of the machine. What is not: that the longest
wait stays below plain EASY's. As soon as one job starts elsewhere than under EASY all later ones do, and the longest of many
thousand waits falls as luck has it: see man/adr/0011-the-guard-of-the-default-policy.md for how often it is above. Told of
events like every pool; no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.sched.intervals import NEVER_S
from hpcsched.sched.policy import Guard
from hpcsched.sched.pool import Pool, Waiting
from hpcsched.sched.predict import History
from hpcsched.sched.promises import Steps, steps_of
from hpcsched.sched.rehearsal import Rehearsal

ANY = 1 << 62
SHORTEST_PROMISE_S = 1.0  # one for no time at all would keep nothing free
SHORTEST_S = 10.0  # as bounded slowdown counts: shorter is not worth preferring


class GuardedPool(Pool):
    """Our default policy on a pool of alike processors; `users` has each job's user by its number, negative: nobody."""

    def __init__(
        self, size: int, procs: Sequence[int], limits_s: Sequence[float], users: Sequence[int], guard: Guard
    ) -> None:
        super().__init__(size, procs, limits_s)
        self.size = size
        self.users = users
        self.guard = guard
        self.weights = [count**guard.size_power for count in procs]
        self.learning_weights = [count**guard.learning_power for count in procs]
        self.quick = [guard.quick.is_quick(limits_s[job], count / size) for job, count in enumerate(procs)]
        self.quick_room = guard.quick.share * size  # what quick jobs that run leave of it
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
        if self.quick[job]:
            self.quick_room += self.procs[job]
        self.rehearsal.ended(job, now_s)
        self.rehearsal.go_on(now_s, more_may_come=False)
        return super().end(job, now_s)

    def start(self, job: int, now_s: float) -> None:
        super().start(job, now_s)
        del self.submits_s[job]
        self.starts_s[job] = now_s
        if self.quick[job]:
            self.quick_room -= self.procs[job]
        self.rehearsal.started(job, now_s)

    def choose(self, now_s: float) -> list[int]:
        if not self.free:
            return []
        learning = self.learnt_at_s is not None and now_s < self.learnt_at_s
        long_s = self.guard.learning_long_s if learning else self._long_s(now_s)
        started: list[int] = []
        self._start_quick(now_s, learning, long_s, started)
        if not self.free:
            return started
        old, young = self._by_age(now_s, learning)
        steps = self._start_old(old, now_s, started)
        if not self.free:
            return started
        if learning:
            most = ANY if steps is None else self.free
            self._lead(self._ranked(now_s, young, most, long_s, self.learning_weights), now_s, started, steps)
        elif ranked := self._ranked(now_s, young, self.free, long_s, self.weights):
            steps = steps if steps is not None else steps_of(self, now_s)
            self._start_young(ranked, now_s, started, steps, self._promise_young(young, now_s, steps))
        return started

    def _measure_s(self) -> float:
        return max(self.guard.old_s, self.rehearsal.longest_wait_s)

    def _long_s(self, now_s: float) -> float:
        """Return beyond which expected run times count alike: less, the longer the first in line has waited."""
        guard = self.guard
        waited_s = now_s - self.submits_s[self.queue[0][2]]
        calm_s = max(0.0, guard.calm_part * self._measure_s() - waited_s)
        return min(guard.long_s, guard.long_least_s + guard.long_per_calm * calm_s)

    def _start_quick(self, now_s: float, learning: bool, long_s: float, started: list[int]) -> None:
        """Start what fits of those that are little work, unless somebody has waited for too long."""
        most_s = self.guard.quick.part * max(self._measure_s(), self.guard.learning_old_s if learning else 0.0)
        if now_s - self.submits_s[self.queue[0][2]] > most_s:
            return
        quick = [job for job in self.queue if self.quick[job[2]]]
        for job in self._ranked(now_s, quick, self.free, long_s, self.weights):
            if job[0] <= self.free and job[0] <= self.quick_room:
                self._go(job, now_s, started)

    def _by_age(self, now_s: float, learning: bool) -> tuple[list[Waiting], list[Waiting]]:
        """Return the old, who has counted as waiting longest first, and the young in the order of arrival."""
        old_after_s = self.guard.part * self._measure_s()
        bonus_s = 0.0 if learning else self.guard.wide_bonus * old_after_s / self.size
        if learning:
            old_after_s = max(old_after_s, self.guard.learning_old_s)
        since_s = now_s - old_after_s  # who counts as submitted by then is old
        submits_s = self.submits_s
        old: list[tuple[float, int, Waiting]] = []
        young: list[Waiting] = []
        for at, job in enumerate(self.queue):
            procs, _, number = job
            if submits_s[number] - bonus_s * self.size > since_s:  # nobody behind is old, however wide
                young += self.queue[at:]
                break
            counted_s = submits_s[number] - bonus_s * procs
            if counted_s <= since_s:
                old.append((counted_s, number, job))
            else:
                young.append(job)
        old.sort()
        return [job for _, _, job in old], young

    def _start_old(self, old: Sequence[Waiting], now_s: float, started: list[int]) -> Steps | None:
        """Start the old jobs that fit in their order; the first that do not are promised a start.

        Returns what is free beside the promises (None: there are none).
        """
        steps: Steps | None = None
        left = 0
        for job in old:
            procs, limit_s, _ = job
            if not self.free:
                break
            if left < self.guard.promises:
                if steps is None and procs > self.free:
                    steps = steps_of(self, now_s)
                start_s = now_s if steps is None else _promise(steps, job, now_s)
            else:
                fits = steps is not None and procs <= self.free and steps.fits_now(procs, limit_s)
                start_s = now_s if fits else NEVER_S
                if fits and steps is not None:
                    steps.add(now_s, now_s + limit_s, -procs)
            if start_s <= now_s:
                self._go(job, now_s, started)
            else:
                left += 1
        return steps

    def _promise_young(self, young: Sequence[Waiting], now_s: float, steps: Steps) -> dict[int, float]:
        """Promise a start to the first few young jobs, and to the first wide one; return to whom, and when."""
        guard = self.guard
        measure_s = self._measure_s()
        promised: dict[int, float] = {}
        wide = next((job for job in young if job[0] >= guard.wide * self.size), None)
        bonus = guard.wide_bonus / self.size
        wanted = [(job, guard.first_part * (1 - bonus * job[0])) for job in young[: guard.first]]
        for job, part in wanted if wide is None else [(wide, guard.wide_part), *wanted]:
            if job[2] not in promised:
                promised[job[2]] = _promise(steps, job, max(now_s, self.submits_s[job[2]] + part * measure_s))
        return promised

    def _start_young(
        self, young: Sequence[Waiting], now_s: float, started: list[int], steps: Steps, promised: dict[int, float]
    ) -> None:
        """Start those that fit and touch no promise but their own."""
        for job in young:
            procs, limit_s, number = job
            own_s = promised.get(number, NEVER_S)
            if procs <= self.free and steps.fits_now(procs, limit_s, own_s):
                if own_s < NEVER_S:
                    steps.add(own_s, own_s + max(limit_s, SHORTEST_PROMISE_S), procs)
                steps.add(now_s, now_s + limit_s, -procs)
                self._go(job, now_s, started)
                if not self.free:
                    break

    def _lead(self, young: Sequence[Waiting], now_s: float, started: list[int], steps: Steps | None) -> None:
        """Start those that fit and touch no promise; if none was made, the first that does not fit gets one."""
        for job in young:
            procs, limit_s, _ = job
            if procs <= self.free and (steps is None or steps.fits_now(procs, limit_s)):
                if steps is not None:
                    steps.add(now_s, now_s + limit_s, -procs)
                self._go(job, now_s, started)
                if not self.free:
                    break
            elif steps is None:
                steps = steps_of(self, now_s)
                _promise(steps, job, now_s)

    def _ranked(
        self, now_s: float, young: Sequence[Waiting], most: int, long_s: float, weights: Sequence[float]
    ) -> list[Waiting]:
        """Return those of `young` that need at most `most` processors, the one that has waited most for its size first."""
        longest_s, users, submits_s = self.history.longest_s, self.users, self.submits_s
        ranked = []
        for job in young:
            procs, limit_s, number = job
            if procs <= most:
                expected_s = longest_s.get(users[number], limit_s)
                if expected_s > limit_s:
                    expected_s = limit_s
                if expected_s > long_s:
                    expected_s = long_s
                elif expected_s < SHORTEST_S:
                    expected_s = SHORTEST_S
                ranked.append(((submits_s[number] - now_s) / (expected_s * weights[number]), number, job))
        if len(ranked) > 1:
            ranked.sort()
        return [job for _, _, job in ranked]

    def _go(self, job: Waiting, now_s: float, started: list[int]) -> None:
        self._leave(job)
        self.start(job[2], now_s)
        started.append(job[2])


def _promise(steps: Steps, job: Waiting, from_s: float) -> float:
    """Keep room for `job` from the first time at or after `from_s` at which it fits, and return that time."""
    procs, limit_s, _ = job
    length_s = max(limit_s, SHORTEST_PROMISE_S)
    start_s = steps.earliest(procs, length_s, from_s)
    if start_s < NEVER_S:
        steps.add(start_s, start_s + length_s, -procs)
    return start_s
