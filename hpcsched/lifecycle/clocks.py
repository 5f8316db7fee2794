"""What a job's clocks show: for how long an attempt has run, when its limit is up, what it is charged.

Rules: time suspended counts against no limit and is charged to nobody, as in Slurm (scontrol(1): "The time a job is
suspended will not count against a job's time limit"). What a job holds is charged node by node, from `Job.charged_until_s`
(the allocation, if that is None) until the node is given back: so whoever changes what a job holds, or stops it,
settles first. A fault changes when a node is given back, never that every second until then is charged; but for the time
between the end of a job's script, as its node recorded it, and our hearing of it: that is nobody's.
"""

from __future__ import annotations

from hpcsched.model.frozen import replace
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job
from hpcsched.model.reservation import Reservation


def suspended_s(job: Job, now_s: float) -> float:
    """Return for how long the attempt has been suspended in all."""
    before_s = job.suspended_s or 0.0
    return before_s if job.suspended_at_s is None else before_s + max(0.0, now_s - job.suspended_at_s)


def ran_s(job: Job, now_s: float) -> float:
    """Return for how long the attempt has run until `now_s` (or had, when it ended), without the time it was suspended."""
    if job.started_at_s is None:
        return 0.0
    return max(0.0, now_s - job.started_at_s - suspended_s(job, now_s))


def limit_at_s(job: Job) -> float | None:
    """Return when the attempt's time limit is up; None: it has none, or does not run now."""
    if job.started_at_s is None or job.time_limit_s is None or job.suspended_at_s is not None:
        return None
    return job.started_at_s + (job.suspended_s or 0.0) + job.time_limit_s


def cut_at_s(job: Job, reservation: Reservation | None) -> float | None:
    """Return when the attempt is ended whatever is left of its time limit; None: that alone ends it.

    With its reservation; and one that asked for no time limit at its deadline. Suspension puts neither off.
    """
    ends_s: list[float] = [reservation.end_s] if reservation is not None else []
    if job.deadline_at_s is not None and job.spec.time_limit_s is None and job.time_min_s is None:
        ends_s.append(job.deadline_at_s)
    return min(ends_s, default=None)


def not_aging(job: Job, at_s: float) -> Job:
    """Return the job with what it has waited kept, and its age standing still until it `BecameEligible`."""
    if job.eligible_at_s is None:
        return job
    return replace(job, eligible_at_s=None, aged_s=job.aged_s + max(0.0, at_s - job.eligible_at_s))


def stopped(job: Job, at_s: float) -> Job:
    """Return the job with what it has run charged, and its clocks standing still."""
    return replace(settled(job, at_s), suspended_at_s=at_s)


def going_on(job: Job, at_s: float) -> Job:
    """Return the job with its clocks going again; one that was not suspended stays as it is."""
    if job.suspended_at_s is None:
        return job
    return replace(
        job, suspended_s=suspended_s(job, at_s), suspended_at_s=None, suspended_for=None, charged_until_s=at_s
    )


def moved(job: Job, by_s: float) -> Job:
    """Return the job with the times of its attempt `by_s` later: what has passed since each stays the same."""

    def at(at_s: float | None) -> float | None:
        return None if at_s is None else at_s + by_s

    return replace(
        job,
        allocated_at_s=at(job.allocated_at_s),
        started_at_s=at(job.started_at_s),
        suspended_at_s=at(job.suspended_at_s),
        charged_until_s=at(job.charged_until_s),
        ended_at_s=at(job.ended_at_s),
        wanted_at_s=at(job.wanted_at_s),
    )


def settled(job: Job, at_s: float) -> Job:
    """Return the job with all that it holds charged until `at_s`."""
    for node in job.held_nodes:
        job = charged(job, node, at_s)
    return replace(job, charged_until_s=at_s)


def charged(job: Job, node: NodeName, at_s: float) -> Job:
    """Return the job with what it holds of `node` charged until `at_s`."""
    since_s = job.charged_until_s if job.charged_until_s is not None else job.allocated_at_s
    if node not in job.held_nodes or since_s is None or job.suspended_at_s is not None:
        return job
    share = next(share for share in (*job.shares, *job.leaving, *job.joining) if share.node == node)
    held_s = max(0.0, at_s - since_s)
    return replace(
        job,
        charged_cpu_s=job.charged_cpu_s + share.cpus * held_s,
        charged_mem_mib_s=job.charged_mem_mib_s + share.mem_mib * held_s,
        charged_gpu_s=job.charged_gpu_s + share.gpu_amount * held_s,
    )
