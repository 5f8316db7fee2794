"""How a schedule went: slowdown, waits, use of the machine, and how evenly its users were served. Pure.

Bounded slowdown is ``max(1, (wait + run) / max(run, 10 s))``, its mean over all jobs. Utilization is what the jobs used of
the processors between the first submission and the last end. Fairness is Jain's index of the users' mean bounded slowdowns: 1
when all fare alike, 1/n when one of n bears everything. Sources: Feitelson and Rudolph, "Metrics and benchmarking for
parallel job scheduling" (1998); Jain, Chiu and Hawe, "A quantitative measure of fairness" (1984).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcsched.sim.swf import TraceJob

FLOOR_S = 10.0
WORST_USERS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The figures of one schedule; times in seconds, `user_slowdowns` by user."""

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
    """Return how many times its run time (of 10 s at least) a job took."""
    return max(1.0, (wait_s + run_s) / max(run_s, FLOOR_S))


def metrics_of(jobs: Sequence[TraceJob], starts_s: Sequence[float], procs: int) -> Metrics:
    """Return the figures of the schedule that starts `jobs` at `starts_s` on `procs` processors; all 0 without jobs."""
    waits = [start_s - job.submit_s for job, start_s in zip(jobs, starts_s, strict=True)]
    slowdowns = [bounded_slowdown(wait_s, job.run_s) for job, wait_s in zip(jobs, waits, strict=True)]
    by_user: dict[int, list[float]] = {}
    for job, slowdown in zip(jobs, slowdowns, strict=True):
        by_user.setdefault(job.user, []).append(slowdown)
    user_slowdowns = {user: _mean(its) for user, its in sorted(by_user.items())}
    last_s = max((start_s + job.run_s for job, start_s in zip(jobs, starts_s, strict=True)), default=0.0)
    makespan_s = last_s - min((job.submit_s for job in jobs), default=0.0)
    used = sum(job.run_s * job.procs for job in jobs)
    ordered, slow_ordered = sorted(waits), sorted(slowdowns)
    return Metrics(
        jobs=len(jobs),
        bounded_slowdown_mean=_mean(slowdowns),
        bounded_slowdown_p95=_quantile(slow_ordered, 0.95),
        wait_mean_s=_mean(waits),
        wait_median_s=_quantile(ordered, 0.5),
        wait_p95_s=_quantile(ordered, 0.95),
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
    """Return the figures as they are printed; of the users the mean and those who were served worst."""
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


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0
