"""Compute when the next plan is due by time alone: begin times, limits and other times.

These times are begin times, time limits, deadlines, promises and others. Knows no clock, and
nothing of how a plan is made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from hpcsched.controller.preemption import exempt_until_s, unanswered_at_s
from hpcsched.controller.requests import reservations
from hpcsched.lifecycle.events import ClockStepped, EndRequested
from hpcsched.lifecycle.job import cut_at_s, limit_at_s
from hpcsched.model.job import Job, JobState, Reason
from hpcsched.model.units import format_time_s
from hpcsched.sched.policy import Policy
from hpcsched.sched.snapshot import Promise, switches_matter_until_s, time_min_s
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction

# ----- jobs whose time is over and that no shepherd ends
#
# A shepherd ends its own job at the time limit, by its node's clock. The controller ends the
# others: allocations without a script, jobs of silent nodes (a while later), and jobs whose
# reservation or deadline comes before their limit.


# After limit and grace period, the controller ends a job that its node did not end.
LIMIT_SLACK_S = 15.0
_GOING_ON = frozenset({JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED})


def end_overdue(tx: Transaction) -> None:
    """End the jobs whose time is over."""
    for job in tx.cluster.active_jobs():
        due_s = overdue_at_s(tx.cluster, job)
        if due_s is not None and due_s <= tx.now_s:
            tx.attempt(f"end job {job.id}, whose time is over", partial(_end_one, job=job, due_s=due_s))


def _end_one(tx: Transaction, job: Job, due_s: float) -> None:
    outcome, why = _end(tx.cluster, job, due_s)
    tx.record(EndRequested(job_id=job.id, at_s=tx.now_s, outcome=outcome, by_uid=None, why=why))


def overdue_at_s(cluster: ClusterState, job: Job) -> float | None:
    """Return when the controller is to end the job, or None for never."""
    limit_s = limit_at_s(job) if job.state is JobState.RUNNING else None
    if limit_s is not None and job.spec.has_script:
        limit_s += LIMIT_SLACK_S + cluster.config.controller.kill_wait_s
    cut_s = _cut_s(cluster, job)
    return min((due_s for due_s in (limit_s, cut_s) if due_s is not None), default=None)


def warn_at_s(job: Job) -> float | None:
    """Return when a running job without a script is to get its --signal.

    For a job with a script, its node sends the signal.
    """
    limit_s = limit_at_s(job) if job.state is JobState.RUNNING and not job.spec.has_script else None
    return limit_s - job.spec.signal.before_s if limit_s is not None and job.spec.signal is not None else None


def _cut_s(cluster: ClusterState, job: Job) -> float | None:
    if job.state not in _GOING_ON or not (job.reservation or job.deadline_at_s):
        return None
    return cut_at_s(job, cluster.reservations.get(job.reservation))


def _end(cluster: ClusterState, job: Job, due_s: float) -> tuple[JobState, str]:
    """Return the state in which the overdue job ends, and why."""
    if due_s != _cut_s(cluster, job):
        return JobState.TIMEOUT, "its time limit was reached"
    if due_s == job.deadline_at_s:
        return JobState.DEADLINE, "its deadline was reached"
    return JobState.TIMEOUT, f"its reservation {job.reservation!r} ended"


# For these waits, plan again at the expected start.
TIMED = frozenset({Reason.DEPENDENCY, Reason.RESERVATION})


SIGNATURE_LEFT_S = 10.0  # a signature that expires so soon may have expired on the node


def next_time_s(cluster: ClusterState, policy: Policy, promises: Iterable[Promise], now_s: float) -> float | None:
    """Return the next time at which a plan is due, or None.

    This is the next begin time, time limit, last start to meet a deadline, or promised start.
    """
    ends = (overdue_at_s(cluster, job) for job in cluster.active_jobs())
    warns = (warn_at_s(job) for job in cluster.active_jobs())
    turns = (wait.expected_start_s for wait in cluster.waits.values() if wait.reason in TIMED)
    reserved = reservations.next_turn_s(cluster, now_s)
    exempt = exempt_until_s(cluster, policy.preempt)
    unanswered = unanswered_at_s(cluster, policy.preempt)
    promised = (promise.start_s for promise in promises)
    due = [
        at_s
        for at_s in (*_of_waiting(cluster, policy), *promised, *ends, *warns, *turns, *exempt, *unanswered, reserved)
        if at_s is not None and at_s > now_s
    ]
    return min(due, default=None)


def _of_waiting(cluster: ClusterState, policy: Policy) -> Iterator[float | None]:
    """Yield the times of the waiting jobs. Most waiting jobs have none."""
    for job_id in cluster.pending:
        job = cluster.jobs[job_id]
        if job.not_before_s is not None:
            yield job.not_before_s
        if job.deadline_at_s is not None:
            yield _too_late_at_s(job)
        if job.spec.signed:
            yield job.spec.signed_until_s - SIGNATURE_LEFT_S
        if job.spec.switches:
            yield _spreads_at_s(job, policy.max_switch_wait_s)


def _too_late_at_s(job: Job) -> float | None:
    """Return when the waiting job can no longer meet its deadline, or None without a deadline."""
    if job.deadline_at_s is None:
        return None
    least_s = time_min_s(job)
    return job.deadline_at_s - (least_s if least_s is not None else job.time_limit_s or 0) + 0.001


def _spreads_at_s(job: Job, max_switch_wait_s: float) -> float | None:
    """Return when the job accepts more switches than it requested, or None for never."""
    return switches_matter_until_s(job.eligible_at_s, job.spec.switches_wait_s, max_switch_wait_s)


# ----- steps of the head node's wall clock: set by hand, or by NTP on a machine that booted with a
# wrong time
#
# Stored times are wall clock times, and a job's run time is their difference. A clock set forward
# by an hour would end jobs that have an hour left; one set back would let them run an hour longer.
# So the wall clock is compared with the clock that counts since boot and has no steps. If their
# difference changes, the times of all jobs that hold nodes are moved (`ClockStepped`), in the same
# tick, before they are used. The mark of the two clocks is stored in the database, so a step while
# the controller is down is seen too, unless the machine has rebooted since.
#
# Times of day (begin times, deadlines, reservations) do not move: they come when the clock shows
# them. Source: clock_gettime(2): CLOCK_REALTIME may be set, CLOCK_BOOTTIME continues; NTP slews
# both alike.


log = logging.getLogger("hpcsched.clock")

# Smaller steps do not matter; a pause between the two clock readings can also cause them.
STEP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockMark:
    """The difference of the wall clock and the time since boot; "" for an unknown boot."""

    boot_id: str = ""
    ahead_s: float = 0.0

    def text(self) -> str:
        """Return the mark as it is stored."""
        return f"{self.boot_id} {self.ahead_s!r}" if self.boot_id else ""


def mark_of(text: str) -> ClockMark:
    """Return the mark that `ClockMark.text` wrote."""
    boot_id, _, ahead = text.partition(" ")
    return ClockMark(boot_id=boot_id, ahead_s=float(ahead)) if boot_id else ClockMark()


def keep_step(tx: Transaction, known: ClockMark, boot_id: str, boot_s: float) -> ClockMark:
    """Move wall clock times if the clock was set since `known`; return the present mark.

    The mark is added to the transaction's batch and counts when that is committed. If the move
    fails, the known mark is returned.
    """
    mark = ClockMark(boot_id=boot_id, ahead_s=tx.now_s - boot_s)
    same_boot = bool(boot_id) and boot_id == known.boot_id
    step_s = mark.ahead_s - known.ahead_s
    if not boot_id or (same_boot and abs(step_s) < STEP_S):
        return known  # in nearly all ticks: avoid a savepoint

    def follow(inner: Transaction) -> ClockMark:
        inner.batch.clock = mark.text()
        if same_boot:
            _move(inner, step_s)
        return mark

    result = tx.attempt("follow a step of the clock", follow)
    return known if isinstance(result, Exception) else mark


def _move(tx: Transaction, step_s: float) -> None:
    cluster = tx.cluster
    how = "forward" if step_s > 0 else "back"
    log.warning("the clock was set %s by %s: running jobs' times move along", how, format_time_s(round(abs(step_s))))
    pause_s = cluster.config.controller.requeue_delay_s
    paused = [cluster.jobs[job_id] for job_id in cluster.pending if cluster.jobs[job_id].attempt]
    then_s = tx.now_s - step_s  # now, by the clock before the step
    for job in (*cluster.active_jobs(), *paused):
        waits_s = (job.not_before_s or 0.0) - then_s
        if job.state is not JobState.PENDING or 0.0 < waits_s <= pause_s:
            tx.record(ClockStepped(job_id=job.id, at_s=tx.now_s, by_s=step_s))
