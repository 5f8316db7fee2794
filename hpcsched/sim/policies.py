"""Replay a trace with a policy on one pool of processors, and compute its metrics.

`sched.pool` says how its fast engines relate to `plan`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil
from typing import Any, Protocol

from hpcsched.errors import RequestError
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.node import Partition
from hpcsched.model.reservation import NEVER_S
from hpcsched.sched.decisions import Plan
from hpcsched.sched.experience import Experience, History, Needed, RequestUse, ShadowEasy
from hpcsched.sched.guard import Candidate, WaitBound, decide
from hpcsched.sched.place.request import ResourceRequest, Shape
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import DEFAULT_GUARD, Backfill, Guard, Policy
from hpcsched.sched.pool import ConservativePool, EasyPool, Pool, PromisedPool, ShortestPool, Steps, Waiting, steps_of
from hpcsched.sched.snapshot import NodeView, PendingJob, RunningJob, Snapshot
from hpcsched.sim.swf import Trace, TraceJob

# ----- how a schedule went: slowdown, waits, use of the machine, and how evenly its users were served. Pure
# Bounded slowdown is ``max(1, (wait + run) / max(run, 10 s))``, its mean over all jobs. Utilization is what the jobs used of
# the processors between the first submission and the last end. Fairness is Jain's index of the users' mean bounded slowdowns: 1
# when all fare alike, 1/n when one of n bears everything. Sources: Feitelson and Rudolph, "Metrics and benchmarking for
# parallel job scheduling" (1998); Jain, Chiu and Hawe, "A quantitative measure of fairness" (1984).


FLOOR_S = 10.0
WORST_USERS = 5


SHORTEST_PROMISE_S = 1.0  # a promise of length zero would reserve nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The metrics of one schedule; times in seconds, `user_slowdowns` by user."""

    jobs: int
    bounded_slowdown_mean: float
    bounded_slowdown_p95: float
    wait_mean_s: float
    wait_median_s: float
    wait_p95_s: float
    wait_max_s: float
    utilization: float
    makespan_s: float
    users: int
    user_fairness_jain: float
    user_slowdowns: dict[int, float]


def bounded_slowdown(wait_s: float, run_s: float) -> float:
    """Return the response time of a job over its run time (at least 10 s)."""
    return max(1.0, (wait_s + run_s) / max(run_s, FLOOR_S))


def metrics_of(jobs: Sequence[TraceJob], starts_s: Sequence[float], procs: int) -> Metrics:
    """Return the metrics of the schedule; all 0 without jobs.

    It starts `jobs` at `starts_s` on `procs` processors.
    """
    waits = [start_s - job.submit_s for job, start_s in zip(jobs, starts_s, strict=True)]
    slowdowns = [bounded_slowdown(wait_s, job.run_s) for job, wait_s in zip(jobs, waits, strict=True)]
    by_user: dict[int, list[float]] = {}
    for job, slowdown in zip(jobs, slowdowns, strict=True):
        by_user.setdefault(job.user, []).append(slowdown)
    user_slowdowns = {user: _mean(values) for user, values in sorted(by_user.items())}
    last_s = max((start_s + job.run_s for job, start_s in zip(jobs, starts_s, strict=True)), default=0.0)
    makespan_s = last_s - min((job.submit_s for job in jobs), default=0.0)
    used = sum(job.run_s * job.procs for job in jobs)
    ordered, slow_ordered = sorted(waits), sorted(slowdowns)
    return Metrics(
        jobs=len(jobs),
        bounded_slowdown_mean=_mean(slowdowns),
        bounded_slowdown_p95=quantile_of(slow_ordered, 0.95),
        wait_mean_s=_mean(waits),
        wait_median_s=quantile_of(ordered, 0.5),
        wait_p95_s=quantile_of(ordered, 0.95),
        wait_max_s=ordered[-1] if ordered else 0.0,
        utilization=used / (procs * makespan_s) if makespan_s > 0 else 0.0,
        makespan_s=makespan_s,
        users=len(by_user),
        user_fairness_jain=jain(user_slowdowns.values()),
        user_slowdowns=user_slowdowns,
    )


def jain(values: Iterable[float]) -> float:
    """Return Jain's index of `values`: ``(sum x)^2 / (n * sum x^2)``; 1 of none."""
    given = list(values)
    squares = sum(value * value for value in given)
    return sum(given) ** 2 / (len(given) * squares) if squares else 1.0


def json_of(metrics: Metrics) -> dict[str, Any]:
    """Return the metrics as printed; of the slowdowns by user, only the worst."""
    worst = sorted(metrics.user_slowdowns.items(), key=lambda item: (-item[1], item[0]))[:WORST_USERS]
    return {
        "jobs": metrics.jobs,
        "bounded_slowdown_mean": round(metrics.bounded_slowdown_mean, 6),
        "bounded_slowdown_p95": round(metrics.bounded_slowdown_p95, 6),
        "wait_mean_s": round(metrics.wait_mean_s, 3),
        "wait_median_s": metrics.wait_median_s,
        "wait_p95_s": metrics.wait_p95_s,
        "wait_max_s": metrics.wait_max_s,
        "utilization": round(metrics.utilization, 6),
        "makespan_s": metrics.makespan_s,
        "users": metrics.users,
        "user_fairness_jain": round(metrics.user_fairness_jain, 6),
        "user_slowdown_mean": round(_mean(list(metrics.user_slowdowns.values())), 6),
        "users_served_worst": [{"user": user, "bounded_slowdown_mean": round(mean, 6)} for user, mean in worst],
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def quantile_of(ordered: Sequence[float], part: float) -> float:
    """Return a quantile of ascending values, one of them; 0 of none."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


# ----- lets a trace happen on a virtual clock, event by event, with the scheduler deciding what starts
# Events come one at a time, by time; submissions before ends of the same second, each in the order in which they were made. The
# scheduler is asked at every end, and at a submission only if the new job fits in what is free. The clock is the trace's;
# nothing here knows a policy. These are the semantics of the simulator whose published schedules are our reference (pyss).


class Engine(Protocol):
    """The decider: it gets events, and returns the numbers of jobs that start."""

    def submit(self, job: int, now_s: float) -> Sequence[int]: ...

    def end(self, job: int, now_s: float) -> Sequence[int]: ...


class Replayed(Protocol):
    """A job that is submitted at a time and then runs so long."""

    @property
    def submit_s(self) -> float: ...

    @property
    def run_s(self) -> float: ...


def replay(jobs: Sequence[Replayed], line: Engine) -> list[float]:
    """Return when each of `jobs` (in order of submission) starts if `line` decides."""
    starts = [-1.0] * len(jobs)
    submits = [job.submit_s for job in jobs]
    runs = [job.run_s for job in jobs]
    ends: list[tuple[float, int, int]] = []
    submit, end = line.submit, line.end
    made = coming = 0
    count = len(jobs)
    while coming < count or ends:
        if coming < count and (not ends or submits[coming] <= ends[0][0]):
            now_s = submits[coming]
            started = submit(coming, now_s)
            coming += 1
        else:
            now_s, _, done = heappop(ends)
            started = end(done, now_s)
        for job in started:
            starts[job] = now_s
            heappush(ends, (now_s + runs[job], made, job))
            made += 1
    return starts


POOL, PLAN = "pool", "plan"  # who decides: see `simulate`
SLURM_DEPTH = 100  # bf_max_job_test as Slurm has it

Make = Callable[[int, Sequence[int], Sequence[float], Sequence[int]], Engine]

POLICIES: dict[str, tuple[Make, str]] = {
    "fcfs": (lambda size, procs, limits_s, users: Pool(size, procs, limits_s), "first come, first served"),
    "easy": (lambda size, procs, limits_s, users: EasyPool(size, procs, limits_s), "EASY backfill"),
    "easy-sjbf": (
        lambda size, procs, limits_s, users: ShortestPool(size, procs, limits_s),
        "EASY backfill, shortest time limit first",
    ),
    "conservative": (
        lambda size, procs, limits_s, users: ConservativePool(size, procs, limits_s),
        "every job is promised a start",
    ),
    "slurm-like": (
        lambda size, procs, limits_s, users: PromisedPool(size, procs, limits_s, SLURM_DEPTH),
        f"the first {SLURM_DEPTH} that wait are promised a start, anew each time",
    ),
    "default": (
        lambda size, procs, limits_s, users: GuardedPool(size, procs, limits_s, users, Guard()),
        "short jobs first by prediction, old ones guarded",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The schedule of a trace by a policy on `procs` processors.

    `starts_s` is in the order of `jobs`.
    """

    policy: str
    procs: int
    jobs: tuple[TraceJob, ...]
    starts_s: tuple[float, ...]
    metrics: Metrics
    took_s: float
    too_big: int = 0  # jobs left out: they never fit

    @property
    def jobs_per_s(self) -> float:
        return len(self.jobs) / self.took_s if self.took_s > 0 else 0.0


def simulate(trace: Trace, policy: str, procs: int = 0, engine: str = POOL) -> Simulation:
    """Return the schedule of `trace` by `policy` on `procs` processors (0: as the trace says).

    Raises RequestError.

    `engine`: PLAN is the daemon's own `plan` at each event; POOL is faster code with the same rules.
    """
    if policy not in POLICIES:
        raise RequestError(f"cannot follow policy {policy!r}: known are {', '.join(POLICIES)}")
    size = procs or trace.procs
    if size <= 0:
        raise RequestError(
            f"cannot tell the size of the machine: {trace.name} has no MaxProcs; give --nodes and --cpus"
        )
    jobs = tuple(job for job in trace.jobs if job.procs <= size)
    if not jobs:
        raise RequestError(_nothing_to_do(trace, size))
    line = _line(jobs, policy, size, engine)
    began_s = time.perf_counter()
    starts_s = replay(jobs, line)
    took_s = time.perf_counter() - began_s
    return Simulation(
        policy=policy,
        procs=size,
        jobs=jobs,
        starts_s=tuple(starts_s),
        metrics=metrics_of(jobs, starts_s, size),
        took_s=took_s,
        too_big=len(trace.jobs) - len(jobs),
    )


def _nothing_to_do(trace: Trace, size: int) -> str:
    if not trace.jobs:
        return f"cannot simulate {trace.name}: it has no job that ran"
    least = min(job.procs for job in trace.jobs)
    return (
        f"cannot simulate {trace.name}: none of its {len(trace.jobs)} jobs fits on {size} processors, the smallest needs "
        f"{least}; give --nodes and --cpus"
    )


def _line(jobs: Sequence[TraceJob], policy: str, size: int, engine: str) -> Engine:
    if engine == PLAN:
        return PlannedLine(jobs, KINDS[policy], size)
    return POLICIES[policy][0](
        size, [job.procs for job in jobs], [job.asked_s for job in jobs], [job.user for job in jobs]
    )


# ----- the engine PLAN: at each event a snapshot of the pool is given to `plan`
# This is exactly what `hpcschedd` runs, and slower than the pools of `sched.pool`. The pool is one node, whose cpus are the
# processors. A limit counts in whole seconds, at least 1. All jobs are looked at, in the order of arrival, at every event.
# `default` knows of ended jobs what the daemon knows: each user's last runs, and the longest wait under plain EASY.


KINDS = {
    "fcfs": Backfill.NONE,
    "easy": Backfill.EASY,
    "easy-sjbf": Backfill.EASY_SJBF,
    "default": Backfill.DEFAULT,
    "conservative": Backfill.CONSERVATIVE,
    "slurm-like": Backfill.SLURM_LIKE,
}


class PlannedLine:
    """Decides by `plan`; see `world.Engine`.

    `kind` is the policy, `size` the number of processors, `guard` that of "default".
    """

    def __init__(self, jobs: Sequence[TraceJob], kind: Backfill, size: int, guard: Guard = DEFAULT_GUARD) -> None:
        self.last_plan = Plan(starts=(), waits={})
        self._jobs = jobs
        self._policy = Policy(backfill=kind, guard=guard, weight_age=0, backfill_depth=0, estimate_depth=0)
        self._nodes = (NodeView(name=NodeName("pool"), cpus=size, mem_mib=0),)
        self._partitions = {"main": Partition(name="main", nodes=(self._nodes[0].name,), default=True)}
        self._size = size
        self._shapes: dict[int, Shape] = {}
        self._waiting: dict[int, PendingJob] = {}
        self._running: dict[int, RunningJob] = {}
        self._history = History()
        self._request_use = RequestUse()
        self._shadow: ShadowEasy | None = None  # only the policy `default` needs it
        if kind is Backfill.DEFAULT:
            self._shadow = ShadowEasy(size)

    def submit(self, job: int, now_s: float) -> Sequence[int]:
        """Add `job` to the queue.

        If it fits in the free processors, or is promised a start, return the jobs to start.
        """
        self._waiting[job] = self._pending(job, now_s)
        if self._shadow is not None:
            self._shadow.submitted(self._jobs[job].procs, self._jobs[job].asked_s, now_s)
            self._shadow.advance(now_s, more_may_come=True)
        held = sum(other.shares[0].cpus for other in self._held(now_s))
        fits = self._jobs[job].procs <= self._size - held
        return self._plan(now_s) if fits or self._policy.backfill is Backfill.CONSERVATIVE else []

    def end(self, job: int, now_s: float) -> Sequence[int]:
        """Release the processors of `job`, and return the jobs to start."""
        ended = self._running.pop(job)
        run_s = now_s - ended.began_at_s
        self._history.record(ended.uid, run_s)
        self._request_use.record(run_s, self._jobs[job].asked_s, self._jobs[job].procs)
        if self._shadow is not None:
            self._shadow.ended(job, now_s)
            self._shadow.advance(now_s, more_may_come=False)
        return self._plan(now_s) if self._waiting else []

    def _held(self, now_s: float) -> list[RunningJob]:
        """Return the running jobs within their time limit.

        The processors of the others count as free.
        """
        return [job for job in self._running.values() if job.ends_at_s is not None and job.ends_at_s > now_s]

    def _plan(self, now_s: float) -> list[int]:
        snapshot = Snapshot(
            now_s=now_s,
            nodes=self._nodes,
            partitions=self._partitions,
            running=tuple(self._held(now_s)),
            pending=tuple(self._waiting.values()),
            promises=self.last_plan.promises,
            experience=Experience(
                longest_runs_s=self._history.longest_s,
                easy_wait_s=self._shadow.longest_wait_s if self._shadow is not None else 0.0,
                began_s=self._jobs[0].submit_s,
                request_use=self._request_use.part,
            ),
        )
        self.last_plan = plan(snapshot, self._policy)
        started = []
        for start in self.last_plan.starts:
            view = self._waiting.pop(start.job_id)
            ends_at_s = now_s + self._jobs[start.job_id].asked_s
            self._running[start.job_id] = RunningJob(
                id=view.id,
                display_id="",
                shares=start.shares,
                began_at_s=now_s,
                ends_at_s=ends_at_s,
                uid=view.uid,
                partition=view.partition,
            )
            if self._shadow is not None:
                self._shadow.started(int(start.job_id), now_s)
            started.append(int(start.job_id))
        return started

    def _pending(self, job: int, now_s: float) -> PendingJob:
        procs = self._jobs[job].procs
        shape = self._shapes.setdefault(procs, Shape(cpus_per_task=procs, mem_per_node_mib=0))
        request = ResourceRequest(
            shape=shape, time_limit_s=max(1, ceil(self._jobs[job].asked_s))
        )  # 0 would be no limit
        return PendingJob(
            id=JobId(job),
            display_id=str(job),
            partition="main",
            request=request,
            submitted_at_s=job,
            since_s=now_s,
            uid=self._jobs[job].user,
        )


# ----- the policy `default` on a pool of equal processors; plain EASY is simulated beside it
# Has no clock: submissions and ends are reported to it.


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
    """The free processors of the pool at one time; see `guard.Capacity`."""

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
