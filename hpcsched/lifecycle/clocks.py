"""The clocks of a job: how long an attempt has run, when it reaches its limit, what it is charged.

Rules: suspended time counts against no limit and is not charged, as in Slurm (scontrol(1): "The time a job is suspended will
not count against a job's time limit"). The resources of a job are charged node by node, from `Job.charged_until_s` (the
allocation, if that is None) until the node is given back. So code that changes the resources of a job, or suspends it, settles
first. A fault changes when a node is given back, but every second until then is charged, with one exception: the time
between the end of a job's script, as its node recorded it, and the report of it is not charged.
"""

from __future__ import annotations

from hpcsched.model.frozen import replace
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job
from hpcsched.model.reservation import Reservation


def suspended_s(job: Job, now_s: float) -> float:
    """Return how long the attempt has been suspended in all."""
    before_s = job.suspended_s or 0.0
    return before_s if job.suspended_at_s is None else before_s + max(0.0, now_s - job.suspended_at_s)


def ran_s(job: Job, now_s: float) -> float:
    """Return how long the attempt has run until `now_s`, or until it ended, without suspended time."""
    if job.started_at_s is None:
        return 0.0
    return max(0.0, now_s - job.started_at_s - suspended_s(job, now_s))


def limit_at_s(job: Job) -> float | None:
    """Return when the attempt reaches its time limit; None: it has none, or does not run now."""
    if job.started_at_s is None or job.time_limit_s is None or job.suspended_at_s is not None:
        return None
    return job.started_at_s + (job.suspended_s or 0.0) + job.time_limit_s


def cut_at_s(job: Job, reservation: Reservation | None) -> float | None:
    """Return when the attempt is ended before its time limit; None: only its limit ends it.

    That is the end of its reservation, and its deadline if it asked for no time limit. Suspension delays neither.
    """
    ends_s: list[float] = [reservation.end_s] if reservation is not None else []
    if job.deadline_at_s is not None and job.spec.time_limit_s is None and job.time_min_s is None:
        ends_s.append(job.deadline_at_s)
    return min(ends_s, default=None)


def not_aging(job: Job, at_s: float) -> Job:
    """Return the job with its age stopped until it `BecameEligible` again."""
    if job.eligible_at_s is None:
        return job
    return replace(job, eligible_at_s=None, aged_s=job.aged_s + max(0.0, at_s - job.eligible_at_s))


def clocks_stopped(job: Job, at_s: float) -> Job:
    """Return the job with its run time charged, and its clocks stopped."""
    return replace(settled(job, at_s), suspended_at_s=at_s)


def clocks_resumed(job: Job, at_s: float) -> Job:
    """Return the job with its clocks running again; unchanged if it was not suspended."""
    if job.suspended_at_s is None:
        return job
    return replace(
        job, suspended_s=suspended_s(job, at_s), suspended_at_s=None, suspended_for=None, charged_until_s=at_s
    )


def moved(job: Job, by_s: float) -> Job:
    """Return the job with the times of its attempt moved by `by_s`, so that the time since each stays the same."""

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
    """Return the job with all its resources charged until `at_s`."""
    for node in job.held_nodes:
        job = charged(job, node, at_s)
    return replace(job, charged_until_s=at_s)


def charged(job: Job, node: NodeName, at_s: float) -> Job:
    """Return the job with its resources on `node` charged until `at_s`."""
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
