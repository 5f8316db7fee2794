"""Plan in slices: a long queue is planned in the background while requests are answered.

One *whole* plan goes through the whole queue. Each tick takes some of its steps and starts the jobs
that they found. So a short queue is planned in the tick in which something changed, as if there
were no slices. If something changes during a long plan, a *quick* plan with a fresh view of the
cluster comes first. It looks at the front of the queue only. The whole plan is told what the quick
plan starts, and continues where it stopped. Then the whole plan gets as much time as the quick one
took, before the next quick plan.

If jobs may preempt others, or elastic jobs run, a plan consists of many plans, one for each victim
that it tries. In a large cluster such a plan is made in turns (see `InterruptibleWork`). No quick plan comes in
between, because it would take as long. Decisions about jobs or nodes that changed during the plan
are left out of its result.

A plan is older than the state when its starts are applied. This is safe. Only these two plans
allocate resources, and each knows the starts of the other. Resources that became free since are not
used yet. A start is dropped if its job or one of its nodes changed since; then the next plan
decides.

Time alone also makes a plan due: begin times, time limits, deadlines, promises and others.

Knows no clock except the one it is given, and neither database nor messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from threading import Semaphore, Thread

from hpcsched.controller.preemption import exempt_until_s, unanswered_at_s
from hpcsched.controller.requests import reservations
from hpcsched.controller.requests.jobs import JOBS_PER_TICK
from hpcsched.errors import InvariantError
from hpcsched.lifecycle.events import BecameEligible, ClockStepped, EndRequested
from hpcsched.lifecycle.job import cut_at_s, limit_at_s
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import OVER_LIMIT, Hold, Job, JobState, Reason
from hpcsched.model.node import Node, Share
from hpcsched.model.units import format_time_s
from hpcsched.sched.decisions import Plan, Start, Wait
from hpcsched.sched.plan import steps_of
from hpcsched.sched.policy import Policy
from hpcsched.sched.preempt import full_plan, is_plain
from hpcsched.sched.scheduling_pass import SchedulingPass
from hpcsched.sched.snapshot import Promise, Snapshot, switches_matter_until_s, time_min_s
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction

# ----- long work that has no steps of its own, done in turns
#
# A thread does the work, and runs only while its caller waits for it. The two never run at the same
# time, so nothing needs a lock and the result is that of a plain call. The work calls `pause`
# between its parts, and is interrupted there once a turn has lasted long enough. Work that is not
# continued ends at that point.


Pause = Callable[[], None]


class _DroppedError(BaseException):
    """The work was dropped. A BaseException, so that `except Exception` does not catch it."""


class InterruptibleWork:
    """Runs `work` in turns of `turn_s`. `work` gets a function to call between its parts.

    A turn can be longer by one part.
    """

    def __init__(self, work: Callable[[Pause], None], monotonic_s: Callable[[], float], turn_s: float) -> None:
        self._work = work
        self._monotonic_s = monotonic_s
        self._turn_s = turn_s
        self._until_s = 0.0
        self._go, self._stopped = Semaphore(0), Semaphore(0)
        self._ended = self._dropped = False
        self._error: BaseException | None = None

    def steps(self) -> Iterator[None]:
        """Take a turn at each step; the last step raises the error of the work, if any."""
        thread = Thread(target=self._run, name="plan", daemon=True)
        thread.start()
        try:
            while self._turn():
                yield
        finally:
            self._dropped = True
            self._go.release()
            thread.join()
        if self._error is not None:
            raise self._error

    def _turn(self) -> bool:
        """Let the work continue for one turn; return whether there is more of it."""
        self._until_s = self._monotonic_s() + self._turn_s
        self._go.release()
        self._stopped.acquire()
        return not self._ended

    def _run(self) -> None:
        try:
            self._wait()
            self._work(self._pause)
        except _DroppedError:
            pass
        except BaseException as error:
            self._error = error  # raised in the thread that waits for the work
        self._ended = True
        self._stopped.release()

    def _pause(self) -> None:
        if self._monotonic_s() >= self._until_s:
            self._stopped.release()
            self._wait()

    def _wait(self) -> None:
        self._go.acquire()
        if self._dropped:
            raise _DroppedError


SLICE_S = 0.015  # longest planning in a tick, or one step if that is longer
QUICK_DEPTH = 200  # jobs that a quick plan looks at
LARGE = 300  # jobs and nodes: a plan of many plans may take longer than a slice


class _Staged:
    """A plan of many plans, made in one step, or in turns if the cluster is large."""

    def __init__(self, snapshot: Snapshot, policy: Policy, monotonic_s: Callable[[], float]) -> None:
        self.starts: list[Start] = []
        self.looked_at = 0
        self._snapshot = snapshot
        self._policy = policy
        self._plan = Plan(starts=(), waits={})
        large = len(snapshot.pending) + len(snapshot.running) + len(snapshot.nodes) > LARGE
        self.steps = InterruptibleWork(self._make, monotonic_s, SLICE_S).steps() if large else self._at_once()

    def _at_once(self) -> Iterator[None]:
        self._make(lambda: None)
        yield

    def _make(self, pause: Pause) -> None:
        def make(snapshot: Snapshot, policy: Policy) -> Plan:
            current = SchedulingPass(snapshot, policy)
            pause()
            for _ in steps_of(current):
                pause()
            return current.result()

        self._plan = full_plan(self._snapshot, self._policy, make)
        self.starts = list(self._plan.starts)

    def result(self) -> Plan:
        return self._plan


class _Run:
    """A plan under way, and the cluster that it was made for."""

    def __init__(
        self,
        snapshot: Snapshot,
        policy: Policy,
        jobs: Mapping[JobId, Job],
        nodes: Mapping[NodeName, Node],
        monotonic_s: Callable[[], float],
    ) -> None:
        self.plain = is_plain(snapshot, policy)
        self.steps = self._steps(snapshot, policy, monotonic_s)
        self.current: SchedulingPass | _Staged | None = None
        self.applied = 0  # number of its starts that were already returned
        self.took_s = 0.0
        self.stale = False  # the cluster changed after it had begun
        self._jobs = jobs
        self._nodes = dict(nodes)
        self._views = {job.id: job for job in snapshot.pending}

    @property
    def looked_at(self) -> int:
        return self.current.looked_at if self.current is not None else 0

    @property
    def promises(self) -> Mapping[JobId, Promise]:
        """Return the plan's promises so far."""
        return self.current.placement.slots.promises if isinstance(self.current, SchedulingPass) else {}

    def new_starts(self) -> list[Start]:
        """Return the starts found since the last call."""
        starts = self.current.starts if self.current is not None else []
        new = starts[self.applied :]
        self.applied = len(starts)
        return new

    def plan(self) -> Plan:
        """Return the plan, once all steps are taken."""
        if self.current is None:
            raise InvariantError("a plan was asked for before it was made")
        return self.current.result()

    def _steps(
        self, snapshot: Snapshot, policy: Policy, monotonic_s: Callable[[], float]
    ) -> Generator[None, None, None]:
        if self.plain:
            self.current = SchedulingPass(snapshot, policy)
            steps = steps_of(self.current)
        else:
            self.current = _Staged(snapshot, policy, monotonic_s)
            steps = self.current.steps
        yield
        yield from steps

    def absorb(self, start: Start, other: _Run) -> None:
        """Add a start of another plan to this one."""
        if isinstance(self.current, SchedulingPass):
            self.current.absorb(start, other._views[start.job_id])

    def knows(self, job: Job | None) -> bool:
        """Return whether `job` is unchanged since the plan began."""
        return job is not None and self._jobs.get(job.id) is job

    def holds(self, start: Start, jobs: Mapping[JobId, Job], nodes: Mapping[NodeName, Node]) -> bool:
        """Return whether the job and the nodes of `start` are unchanged since the plan began."""
        return self._same(start.shares, nodes) and self.knows(jobs.get(start.job_id))

    def _same(self, shares: Iterable[Share], nodes: Mapping[NodeName, Node]) -> bool:
        return all(nodes.get(share.node) is self._nodes[share.node] for share in shares)

    def what_holds(self, made: Plan, jobs: Mapping[JobId, Job], nodes: Mapping[NodeName, Node]) -> Plan:
        """Return `made` without decisions that changed jobs or nodes make invalid.

        This concerns preemptions, resumes, resizes and jobs given up. "Changed" means since the
        plan began.
        """

        def known(*job_ids: JobId) -> bool:
            return all(self.knows(jobs.get(job_id)) for job_id in job_ids)

        preemptions = [
            one
            for one in made.preemptions
            if known(one.job_id, *(victim.job_id for victim in one.victims)) and self._same(one.shares, nodes)
        ]
        resizes = [one for one in made.resizes if known(one.job_id) and self._same(one.add, nodes)]
        return replace(
            made,
            preemptions=tuple(preemptions),
            resumes=tuple(job_id for job_id in made.resumes if known(job_id)),
            given_up=tuple(job_id for job_id in made.given_up if known(job_id)),
            resizes=tuple(resizes),
        )


class Slice:
    """The result of a slice: `starts` to make, the number `dropped`, and a finished `plan`.

    `plan` is None if the whole plan is not finished.
    """

    def __init__(self, starts: list[Start], dropped: int, plan: Plan | None, run: _Run | None) -> None:
        self.starts = starts
        self.dropped = dropped
        self.plan = plan
        self.stale = run is not None and run.stale  # the cluster changed meanwhile: plan again
        self._run = run

    def knows(self, job: Job) -> bool:
        """Return whether `job` is unchanged since the plan began."""
        return self._run is not None and self._run.knows(job)


class Planning:
    """The plans under way: at most one whole plan, and one quick plan in between."""

    def __init__(self, monotonic_s: Callable[[], float], quick_depth: int = QUICK_DEPTH) -> None:
        self._monotonic_s = monotonic_s
        self._quick_depth = quick_depth
        self._whole: _Run | None = None
        self._quick: _Run | None = None
        self._owed_s = 0.0  # time owed to the whole plan before the next quick plan

    @property
    def under_way(self) -> bool:
        return self._whole is not None

    @property
    def may_begin(self) -> bool:
        """Return whether a plan may begin now: a whole one, or a quick one in between."""
        if self._whole is None:
            return True
        return (
            self._whole.plain
            and self._quick is None
            and self._owed_s <= 0
            and self._whole.looked_at >= self._quick_depth
        )

    def begin(
        self, snapshot: Snapshot, policy: Policy, jobs: Mapping[JobId, Job], nodes: Mapping[NodeName, Node]
    ) -> None:
        """Begin a plan of `snapshot`, which was made from `jobs` and `nodes`."""
        began_s = self._monotonic_s()
        if self._whole is not None:  # a quick plan must keep the whole plan's promises
            snapshot = replace(snapshot, promises={**snapshot.promises, **self._whole.promises})
        run = _Run(snapshot, policy, jobs, nodes, self._monotonic_s)
        run.took_s = self._monotonic_s() - began_s
        if self._whole is None or not run.plain:
            self.forget()
            self._whole = run
        else:
            self._quick = run
            self._whole.stale = True

    def forget(self) -> None:
        """Drop the plans under way, because the cluster has changed."""
        for run in (self._whole, self._quick):
            if run is not None:
                run.steps.close()
        self._whole = self._quick = None
        self._owed_s = 0.0

    def go_on(self, jobs: Mapping[JobId, Job], nodes: Mapping[NodeName, Node]) -> Slice:
        """Plan for one slice; return the starts, and the whole plan if it is finished."""
        run = self._quick or self._whole
        if run is None:
            return Slice([], 0, None, None)
        ended = self._take_steps(run)
        found = run.new_starts()
        good = [start for start in found if run.holds(start, jobs, nodes)]
        finished = None
        if run is self._quick and self._whole is not None:
            for start in good:
                self._whole.absorb(start, run)
            if ended or run.looked_at >= self._quick_depth:
                self._quick, self._owed_s = None, run.took_s
        elif ended:
            finished, self._whole, self._owed_s = run, None, 0.0
        if finished is None:
            return Slice(good, len(found) - len(good), None, None)
        plan = finished.plan()
        if not finished.plain:
            whole, plan = plan, finished.what_holds(plan, jobs, nodes)
            finished.stale = finished.stale or len(good) < len(found) or plan != whole
        return Slice(good, len(found) - len(good), plan, finished)

    def _take_steps(self, run: _Run) -> bool:
        """Take steps of `run` for one slice; return whether it is finished."""
        began_s = self._monotonic_s()
        while True:
            ended = next(run.steps, run) is run
            if ended or self._monotonic_s() - began_s >= SLICE_S:
                break
            if run is self._quick and run.looked_at >= self._quick_depth:
                break
        took_s = self._monotonic_s() - began_s
        run.took_s += took_s
        if run is self._whole:
            self._owed_s -= took_s
        return ended


# ----- the pace of planning: a quarter of the time, however long the plans are
#
# A plan is made in slices. After each slice, other work gets as much time as the slice took. After
# the last slice it gets three times as long as the whole plan took. That time includes making the
# snapshot and applying the result. It is processor time: on a busy machine a plan waits for the
# processor, and the next one must not wait three times longer for that.


PAUSE_MAX_S = 0.5


class Pace:
    """The pace of planning, by a monotonic clock and the processor time of this process."""

    def __init__(self, monotonic_s: Callable[[], float], processor_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._processor_s = processor_s
        self._next_s = 0.0
        self._began_s = 0.0
        self._used_before_s = 0.0
        self._spent_s = 0.0  # on the plan under way

    def begin_turn(self) -> float:
        """Begin a turn and return 0.0, or return the seconds until one may begin."""
        self._began_s, self._used_before_s = self._monotonic_s(), self._processor_s()
        return max(0.0, self._next_s - self._began_s)

    def turn_s(self) -> float:
        """Return how long the turn has lasted, in seconds."""
        return self._monotonic_s() - self._began_s

    def end_turn(self, *, whole: bool = False) -> float:
        """End the turn; return the seconds until the next one may begin.

        `whole`: the plan was finished in this turn.
        """
        pause_s = min(self.turn_s(), self._processor_s() - self._used_before_s)
        self._spent_s += pause_s
        if whole:
            pause_s, self._spent_s = min(3 * self._spent_s, PAUSE_MAX_S), 0.0
        self._next_s = self._monotonic_s() + pause_s
        return pause_s


# ----- why each job waits by the last plan, and what follows
#
# A job's age counts from the moment when only other jobs, resources and limits delay it. A job that
# can never start is ended. Each tick records this for a limited number of jobs; later ticks record
# the rest.


ELIGIBLE = OVER_LIMIT | {
    Reason.PRIORITY, Reason.RESOURCES, Reason.LICENSES, Reason.POWER_NOT_AVAIL, Reason.ARRAY_LIMIT
}  # fmt: skip
ENDING = frozenset({Reason.DEADLINE, Reason.DEPENDENCY_NEVER})
NOTED = ELIGIBLE | ENDING | {Reason.RESERVATION}  # reasons that have consequences
# Changed in one tick: then the plan comes in the next. A part of a large request is as many: each part with a plan of its own
# would take several times as long.
MANY_JOBS = JOBS_PER_TICK


class Waits:
    """Records wait reasons in the cluster, and from when the age of jobs counts (`note_ages`)."""

    def __init__(self) -> None:
        self._to_note: list[JobId] = []  # jobs whose age begins to count; not yet recorded

    @property
    def has_ages(self) -> bool:
        """Return whether `note_ages` has work to do."""
        return bool(self._to_note)

    def note(self, tx: Transaction, done: Slice) -> bool:
        """Record why each job waits, and return whether a job was ended.

        A job ends if it can no longer start in time for its deadline. With --kill-on-invalid-dep it
        also ends if a dependency can never be satisfied.
        """
        cluster, ended = tx.cluster, False
        waits = done.plan.waits if done.plan is not None else {}
        cluster.waits = {job_id: wait for job_id, wait in waits.items() if job_id in cluster.pending}
        for job_id, wait in tuple(cluster.waits.items()):
            if wait.reason not in NOTED:
                continue
            job = cluster.jobs[job_id]
            if wait.reason in ENDING and (outcome := _end_of(job, wait)) and done.knows(job):
                tx.record(EndRequested(job_id=job_id, at_s=tx.now_s, outcome=outcome, by_uid=None, why=wait.detail))
                ended = True
            elif job.eligible_at_s is None and _is_eligible(job, wait):
                self._to_note.append(job_id)
        return ended

    def note_ages(self, tx: Transaction) -> bool:
        """Record for some jobs that their age counts from now; return whether others remain."""
        now, self._to_note = self._to_note[:MANY_JOBS], self._to_note[MANY_JOBS:]
        for job_id in now:
            job = tx.cluster.jobs.get(job_id)
            if job is None or job.state is not JobState.PENDING or job.hold is not Hold.NONE:
                continue
            if job.eligible_at_s is None:
                tx.record(BecameEligible(job_id=job_id, at_s=tx.now_s))
        return bool(self._to_note)


def _is_eligible(job: Job, wait: Wait) -> bool:
    """Return whether only other jobs, resources (also reserved ones) and limits delay the job."""
    return wait.reason in ELIGIBLE or (wait.reason is Reason.RESERVATION and not job.reservation)


def _end_of(job: Job, wait: Wait) -> JobState | None:
    """Return the state in which a job with this wait is to end, or None if it is not to end."""
    if wait.reason is Reason.DEADLINE:
        return JobState.DEADLINE
    hopeless = wait.reason is Reason.DEPENDENCY_NEVER and job.spec.kill_on_invalid_dep
    return JobState.CANCELLED if hopeless else None


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
TIMED = frozenset({Reason.DEPENDENCY, Reason.RESERVATION, Reason.BEGIN_TIME})


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
