"""The policy `default` on a pool of equal processors, event by event.

Plain EASY is simulated beside it. Has no clock: submissions and ends are reported to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.model.reservation import NEVER_S
from hpcsched.sched.guard.decide import Candidate, WaitBound, decide
from hpcsched.sched.guard.experience import History, Needed, RequestUse, ShadowEasy
from hpcsched.sched.policy import Guard
from hpcsched.sched.pool import Pool, Steps, Waiting, steps_of

SHORTEST_PROMISE_S = 1.0  # a promise of length zero would reserve nothing


class GuardedPool(Pool):
    """A pool that follows the policy `default`.

    `users` has the user of each job by its number; a negative user is unknown.
    """

    def __init__(
        self, size: int, procs: Sequence[int], limits_s: Sequence[float], users: Sequence[int], guard: Guard
    ) -> None:
        super().__init__(size, procs, limits_s)
        self.size = size
        self.users = users
        self.guard = guard
        self._distrusting = guard.where_distrusted()
        self.history = History()
        self.request_use = RequestUse()
        self.needed: Needed | None = None  # while requests are not trusted
        self.shadow = ShadowEasy(size)
        self.candidates: dict[int, Candidate[Waiting]] = {}
        self.starts_s: dict[int, float] = {}
        self.learnt_at_s: float | None = None  # from then on the shadow schedule determines the bound

    def submit(self, job: int, now_s: float) -> Sequence[int]:
        if self.learnt_at_s is None:
            self.learnt_at_s = now_s + self.guard.learning_s
        procs, limit_s = self.procs[job], self.limits_s[job]
        self.candidates[job] = Candidate(
            number=job,
            since_s=now_s,
            limit_s=limit_s,
            user=self.users[job],
            amount=procs,
            part=procs / self.size,
            is_short=self.is_short(job),
            queue=None,
            job=(procs, limit_s, job),
        )
        self.shadow.submitted(procs, limit_s, now_s)
        self.shadow.advance(now_s, more_may_come=True)
        return super().submit(job, now_s)

    def end(self, job: int, now_s: float) -> Sequence[int]:
        run_s = now_s - self.starts_s.pop(job)
        self.history.record(self.users[job], run_s)
        self.request_use.record(run_s, self.limits_s[job], self.procs[job])
        self.shadow.ended(job, now_s)
        self.shadow.advance(now_s, more_may_come=False)
        return super().end(job, now_s)

    def start(self, job: int, now_s: float) -> None:
        super().start(job, now_s)
        del self.candidates[job]
        self.starts_s[job] = now_s
        self.shadow.started(job, now_s)

    def length_s(self, job: int) -> float:
        """Return how long `job` needs its processors, in seconds.

        That is its time limit, or the expected run time if limits are not trusted.
        """
        limit_s = self.limits_s[job]
        return limit_s if self.needed is None else self.needed.length_s(self.users[job], limit_s)

    def steps(self, now_s: float) -> Steps:
        """Return the free processors from now on.

        Running jobs are assumed to run to their limits, or for their expected time.
        """
        if self.needed is None:
            return steps_of(self.free, self.ends, now_s)
        users, starts_s, end_s = self.users, self.starts_s, self.needed.end_s
        ends = sorted([(end_s(users[job], starts_s[job], at_s, now_s), job, procs) for at_s, job, procs in self.ends])
        return steps_of(self.free, ends, now_s)

    def is_short(self, job: int) -> bool:
        """Say whether `job` is short enough to start ahead of the others."""
        return self.guard.short.is_short(self.length_s(job), self.procs[job] / self.size)

    def choose(self, now_s: float) -> list[int]:
        if not self.free:
            return []
        guard, candidates, was_trusted = self.guard, self.candidates, self.needed is None
        self.needed = None
        if guard.distrusts(self.request_use.part):
            guard = self._distrusting
            self.needed = Needed(self.history.longest_s, guard.distrust_times)
        if self.needed is not None or not was_trusted:  # the set of short jobs depends on the run times of users
            self.candidates = candidates = {
                job: candidate._replace(is_short=self.is_short(job)) for job, candidate in candidates.items()
            }
        bound = WaitBound(
            guard,
            now_s,
            self.shadow.longest_wait_s,
            learning=self.learnt_at_s is not None and now_s < self.learnt_at_s,
            first_waited_s=now_s - candidates[self.queue[0][2]].since_s,
            longest_s=self.history.longest_s,
        )
        capacity = PoolCapacity(self, now_s)
        for _ in decide(tuple(candidates.values()), bound, capacity):
            pass
        return capacity.started


class PoolCapacity:
    """The free processors of the pool at one time; see `decide.Capacity`."""

    def __init__(self, pool: GuardedPool, now_s: float) -> None:
        self.started: list[int] = []
        self._pool = pool
        self.now_s = now_s
        self._held_by_short = sum(procs for _, job, procs in pool.ends if pool.is_short(job))
        self._steps: Steps | None = None  # free processors beside the promises, once there is a promise
        self._promised_s: dict[int, float] = {}

    def most(self) -> float:
        return self._pool.free

    def has_for_short(self, candidate: Candidate[Waiting]) -> bool:
        return self._held_by_short + candidate.amount <= self._pool.guard.short.share * self._pool.size

    def start(self, candidate: Candidate[Waiting]) -> bool:
        pool, steps, now_s = self._pool, self._steps, self.now_s
        procs, _, number = candidate.job
        if procs > pool.free:
            return False
        length_s = pool.length_s(number)
        if steps is not None:
            own_s = self._promised_s.get(number, NEVER_S)
            if not steps.fits_now(procs, length_s, own_s):
                return False
            if own_s < NEVER_S:
                steps.add(own_s, own_s + max(length_s, SHORTEST_PROMISE_S), procs)
            steps.add(now_s, now_s + length_s, -procs)
        if candidate.is_short:
            self._held_by_short += procs
        pool._leave(candidate.job)
        pool.start(number, now_s)
        self.started.append(number)
        return True

    def promise(self, candidate: Candidate[Waiting], from_s: float) -> None:
        if self._steps is None:
            self._steps = self._pool.steps(self.now_s)
        procs, _, number = candidate.job
        length_s = max(self._pool.length_s(number), SHORTEST_PROMISE_S)
        start_s = self._steps.earliest(procs, length_s, from_s)
        if start_s < NEVER_S:
            self._steps.add(start_s, start_s + length_s, -procs)
            self._promised_s[number] = start_s
