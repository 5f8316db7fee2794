"""When the next plan is due though nothing happens: begin times, time limits, deadlines, promises and other times come round.

Knows no clock, and nothing of how a plan is made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from hpcsched.controller.preemption import exempt_until_s, unanswered_at_s
from hpcsched.controller.requests import reservations
from hpcsched.lifecycle.clocks import cut_at_s, limit_at_s
from hpcsched.lifecycle.events import ClockStepped, EndRequested
from hpcsched.model.job import Job, JobState, Reason
from hpcsched.model.units import format_time_s
from hpcsched.sched.policy import Policy
from hpcsched.sched.snapshot import Promise, switches_matter_until_s, time_min_s
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction

# ----- jobs whose time is over and that no shepherd ends
# A shepherd ends its own job at the time limit, by its node's clock. From here are ended: allocations without a script; a while
# later the jobs of nodes that are silent; and jobs whose reservation, or time until the deadline, is over before their limit is
# up.


LIMIT_SLACK_S = 15.0  # after its limit and grace, a job whose node did not end it is ended from here
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
    """Return when the job is to be ended from here, None: never."""
    limit_s = limit_at_s(job) if job.state is JobState.RUNNING else None
    if limit_s is not None and job.spec.has_script:
        limit_s += LIMIT_SLACK_S + cluster.config.controller.kill_wait_s
    cut_s = _cut_s(cluster, job)
    return min((due_s for due_s in (limit_s, cut_s) if due_s is not None), default=None)


def warn_at_s(job: Job) -> float | None:
    """Return when a running job without a script is to get its signal; that of a script is its node's to send."""
    limit_s = limit_at_s(job) if job.state is JobState.RUNNING and not job.spec.has_script else None
    return limit_s - job.spec.signal.before_s if limit_s is not None and job.spec.signal is not None else None


def _cut_s(cluster: ClusterState, job: Job) -> float | None:
    if job.state not in _GOING_ON or not (job.reservation or job.deadline_at_s):
        return None
    return cut_at_s(job, cluster.reservations.get(job.reservation))


def _end(cluster: ClusterState, job: Job, due_s: float) -> tuple[JobState, str]:
    """Return as what the job ends that is due, and why."""
    if due_s != _cut_s(cluster, job):
        return JobState.TIMEOUT, "its time limit was reached"
    if due_s == job.deadline_at_s:
        return JobState.DEADLINE, "its deadline was reached"
    return JobState.TIMEOUT, f"its reservation {job.reservation!r} ended"


TIMED = frozenset({Reason.DEPENDENCY, Reason.RESERVATION})  # waits whose expected start is a time to plan again


def next_time_s(cluster: ClusterState, policy: Policy, promises: Iterable[Promise], now_s: float) -> float | None:
    """Return when the next begin time, time limit, last moment to make a deadline or promised start comes round, if any."""
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
    """Yield the times of the jobs that wait. Of tens of thousands most have none."""
    for job_id in cluster.pending:
        job = cluster.jobs[job_id]
        if job.not_before_s is not None:
            yield job.not_before_s
        if job.deadline_at_s is not None:
            yield _too_late_at_s(job)
        if job.spec.switches:
            yield _spreads_at_s(job, policy.max_switch_wait_s)


def _too_late_at_s(job: Job) -> float | None:
    """Return from when on the waiting job cannot end by its deadline any more; None: it has none."""
    if job.deadline_at_s is None:
        return None
    least_s = time_min_s(job)
    return job.deadline_at_s - (least_s if least_s is not None else job.time_limit_s or 0) + 0.001


def _spreads_at_s(job: Job, max_switch_wait_s: float) -> float | None:
    """Return from when on the waiting job takes nodes on more switches than it asked for; None: it never does."""
    return switches_matter_until_s(job.eligible_at_s, job.spec.switches_wait_s, max_switch_wait_s)


# ----- steps of the head node's wall clock: set by hand, or by NTP on a machine that booted without knowing the time
# What is stored are times of that clock, and for how long a job has run is their difference: a clock that was set forward by an
# hour would end what has an hour left, one that was set back would let it run an hour longer. So the wall clock is compared
# with the one that counts since boot and knows no steps; when they no longer go together, the times of all jobs that hold
# nodes are moved along (`ClockStepped`), in the same tick, before anything goes by them. How the two clocks stand is kept with
# the ledger, so that a step while the controller is down is seen as well, if the machine has not been booted since.
#
# What is a time of day (begin times, deadlines, reservations) stays as it is: it comes when the clock shows it.
# Source: clock_gettime(2): CLOCK_REALTIME may be set, CLOCK_BOOTTIME counts on; NTP slews both alike.


log = logging.getLogger("hpcsched.clock")

STEP_S = 5.0  # less is no matter, and may be a process that stood still between its looks at the two clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockMark:
    """What the wall clock shows beyond the time since boot; "" for a boot that nothing is known of."""

    boot_id: str = ""
    ahead_s: float = 0.0

    def text(self) -> str:
        """Return it as it is stored."""
        return f"{self.boot_id} {self.ahead_s!r}" if self.boot_id else ""


def mark_of(text: str) -> ClockMark:
    """Return the mark that `ClockMark.text` wrote."""
    boot_id, _, ahead = text.partition(" ")
    return ClockMark(boot_id=boot_id, ahead_s=float(ahead)) if boot_id else ClockMark()


def keep_step(tx: Transaction, known: ClockMark, boot_id: str, boot_s: float) -> ClockMark:
    """Move what is measured by the wall clock if that was set since `known`; return how the clocks stand now.

    The mark goes into the transaction's batch: it counts when that is committed. If the move fails, the known mark is returned.
    """
    mark = ClockMark(boot_id=boot_id, ahead_s=tx.now_s - boot_s)
    same_boot = bool(boot_id) and boot_id == known.boot_id
    step_s = mark.ahead_s - known.ahead_s
    if not boot_id or (same_boot and abs(step_s) < STEP_S):
        return known  # in nearly all ticks: no savepoint is made

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
    then_s = tx.now_s - step_s  # now, by the clock of before
    for job in (*cluster.active_jobs(), *paused):
        waits_s = (job.not_before_s or 0.0) - then_s
        if job.state is not JobState.PENDING or 0.0 < waits_s <= pause_s:
            tx.record(ClockStepped(job_id=job.id, at_s=tx.now_s, by_s=step_s))
