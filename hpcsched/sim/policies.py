"""The policies that a simulation can follow, by name, on one pool of processors; `sched.pool` says how near `plan` they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcsched.errors import RequestError
from hpcsched.sched.guarded import GuardedPool
from hpcsched.sched.policy import Guard
from hpcsched.sched.pool import EasyPool, Pool, ShortestPool
from hpcsched.sched.promises import ConservativePool, PromisedPool
from hpcsched.sim.metrics import Metrics, metrics_of
from hpcsched.sim.swf import Trace, TraceJob
from hpcsched.sim.world import Line, replay

POOL, PLAN = "pool", "plan"  # who decides: see `simulate`
SLURM_DEPTH = 100  # bf_max_job_test as Slurm has it

Make = Callable[[int, Sequence[int], Sequence[float], Sequence[int]], Line]

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
    """What a policy did with a trace on `procs` processors; `starts_s` in the order of `jobs`."""

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
    """Return what `policy` does with `trace` on `procs` processors (0: as many as the trace says). Raises RequestError.

    `engine` PLAN has the daemon's own `plan` decide at each event, POOL the quick code that follows the same rules.
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


def _line(jobs: Sequence[TraceJob], policy: str, size: int, engine: str) -> Line:
    if engine == PLAN:
        from hpcsched.sim.planned import KINDS, PlannedLine  # only this needs the planner

        return PlannedLine(jobs, KINDS[policy], size)
    return POLICIES[policy][0](
        size, [job.procs for job in jobs], [job.asked_s for job in jobs], [job.user for job in jobs]
    )
