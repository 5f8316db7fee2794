"""Eligibility: holds, begin times, deadlines, dependencies, singletons.

A job that is not eligible cannot start, even if resources are free.

Dependencies follow sbatch(1). If the dependency is an array, `afterok` requires that all its tasks
completed, `afternotok` that all ended and not all completed, `afterany` that all ended, and
`aftercorr` that the task of the same number completed. ``12_3`` refers to that task alone. A job
that is no longer known counts as ended long ago with an unknown outcome: `afterok`, `afternotok`
and `aftercorr` on it are never satisfied. A job never starts if it could not end by its deadline
even if it started now.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from hpcsched.model.ids import JobId
from hpcsched.model.job import ACTIVE, FINAL, Hold, JobState, Reason
from hpcsched.model.spec import Dependency, DependencyKind
from hpcsched.model.units import format_time_s
from hpcsched.sched.decisions import Wait
from hpcsched.sched.snapshot import JobFact, PendingJob, RunningJob, Snapshot

HELD_BY_ADMIN = Wait(reason=Reason.HELD_ADMIN, detail="held by an administrator")
HELD_BY_USER = Wait(reason=Reason.HELD_USER, detail="held by its user")
HELD_BY_PRIORITY = Wait(reason=Reason.HELD_USER, detail="held: its priority is 0")


class Met(Enum):
    YES = "yes"
    NOT_YET = "not yet"
    NEVER = "never"


class Eligibility:
    """Evaluates the eligibility of the jobs of one snapshot.

    A dependency that several jobs share is evaluated once.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._first_by_name: dict[tuple[int, str], JobId] | None = None
        self._by_task: dict[int, dict[int | None, JobFact]] = {}
        self._verdicts: dict[tuple[Dependency, int], Met] = {}

    def why_not(self, job: PendingJob) -> Wait | None:
        """Return the wait of `job` if it may not start, regardless of free resources.

        None: only resources and limits decide.
        """
        if job.free_to_go:
            return None
        if job.deadline_at_s is not None and (wait := self._too_late(job, job.deadline_at_s)) is not None:
            return wait
        if job.hold is Hold.ADMIN:
            return HELD_BY_ADMIN
        if job.hold in (Hold.USER, Hold.SPECIAL):
            return HELD_BY_USER
        if job.priority_set == 0:
            return HELD_BY_PRIORITY
        if job.not_before_s is not None and job.not_before_s > self._snapshot.now_s:
            detail = "its begin time has not come yet"
            return Wait(reason=Reason.BEGIN_TIME, detail=detail, expected_start_s=job.not_before_s)
        return self._unmet(job) if job.dependency else None

    def _too_late(self, job: PendingJob, deadline_at_s: float) -> Wait | None:
        """Return the wait of a job that cannot end by its deadline, even if it starts now.

        None: it can.
        """
        least_s = job.time_min_s if job.time_min_s is not None else job.request.time_limit_s or 0
        left_s = deadline_at_s - self._snapshot.now_s
        if least_s <= left_s:
            return None
        left = f"{format_time_s(int(left_s))} is left" if left_s > 0 else "it has passed"
        limit = "time limit" if job.time_min_s is None else "least time"
        return Wait(
            reason=Reason.DEADLINE,
            detail=f"it cannot end by its deadline any more: its {limit} is {format_time_s(least_s)}, and {left}",
        )

    def _unmet(self, job: PendingJob) -> Wait | None:
        """Return the wait for the dependencies of `job`; None if they are met.

        With `dependency_any`, one met dependency is enough.
        """
        verdicts = [verdict for term in job.dependency for verdict in self._term(term, job)]
        found = {met for met, _ in verdicts}
        if Met.YES in found if job.dependency_any else found == {Met.YES}:
            return None
        never = found == {Met.NEVER} if job.dependency_any else Met.NEVER in found
        verdict = Met.NEVER if never else Met.NOT_YET
        why = next(words for met, words in verdicts if met is verdict)
        if never:
            return Wait(reason=Reason.DEPENDENCY_NEVER, detail=why)
        return Wait(reason=Reason.DEPENDENCY, detail=why, expected_start_s=self._due_s(job))

    def _term(self, term: Dependency, job: PendingJob) -> list[tuple[Met, str]]:
        """Return the verdict on each job in `term`, and the sentence for it."""
        if term.kind is DependencyKind.SINGLETON:
            first = self._first_named(job)
            if first < job.id:
                return [(Met.NOT_YET, f"waits until job {first}, of the same name and user, has ended")]
            return [(Met.YES, "")]
        met = [(job_id, self._verdict(term, job_id, job)) for job_id in term.job_ids]
        return [(verdict, "" if verdict is Met.YES else _words(term, job_id, verdict)) for job_id, verdict in met]

    def _due_s(self, job: PendingJob) -> float | None:
        """Return the end of the first delay (``after:12+5``) of a job that has begun.

        None: no delay runs.
        """
        due = [
            since_s + term.delay_s
            for term in job.dependency
            if term.delay_s
            for job_id in term.job_ids
            for fact in self._facts(term, job_id)
            if _is_begun(fact) and (since_s := _began_at_s(fact)) is not None
        ]
        return min((at_s for at_s in due if at_s > self._snapshot.now_s), default=None)

    def _facts(self, term: Dependency, job_id: int) -> Sequence[JobFact]:
        facts = self._snapshot.facts.get(job_id, ())
        return facts if term.task is None else [fact for fact in facts if fact.array_task_id == term.task]

    def _verdict(self, term: Dependency, job_id: int, job: PendingJob) -> Met:
        facts = self._facts(term, job_id)
        if term.kind is DependencyKind.AFTER_CORR and job.array_task_id is not None and term.task is None:
            by_task = self._by_task.get(job_id)
            if by_task is None:
                by_task = self._by_task[job_id] = {fact.array_task_id: fact for fact in facts}
            same = by_task.get(job.array_task_id, by_task.get(None))
            return _judge(term, (same,) if same is not None else (), self._snapshot.now_s)
        known = self._verdicts.get((term, job_id))
        if known is None:
            known = self._verdicts[term, job_id] = _judge(term, facts, self._snapshot.now_s)
        return known

    def _first_named(self, job: PendingJob) -> JobId:
        """Return the first unfinished job of the same name and user: `job` or an earlier one."""
        if self._first_by_name is None:
            self._first_by_name = {}
            others: Sequence[RunningJob | PendingJob] = (*self._snapshot.running, *self._snapshot.pending)
            for other in others:
                key = (other.uid, other.name)
                self._first_by_name[key] = min(other.id, self._first_by_name.get(key, other.id))
        return self._first_by_name.get((job.uid, job.name), job.id)


def _judge(term: Dependency, facts: Sequence[JobFact], now_s: float) -> Met:
    """Return the verdict of one term on one job, or on the tasks of one array."""
    if term.kind is DependencyKind.AFTER:
        return Met.YES if all(_begun(fact, term.delay_s, now_s) for fact in facts) else Met.NOT_YET
    ended = all(fact.state in FINAL for fact in facts)
    if term.kind is DependencyKind.AFTER_ANY:
        return Met.YES if ended else Met.NOT_YET
    failed = not facts or any(_has_failed(fact) for fact in facts)
    if term.kind is DependencyKind.AFTER_NOT_OK:
        if not ended:
            return Met.NOT_YET
        return Met.YES if facts and failed else Met.NEVER
    if failed:  # afterok, aftercorr
        return Met.NEVER
    return Met.YES if ended else Met.NOT_YET


def _has_failed(fact: JobFact) -> bool:
    return fact.state in FINAL and fact.state is not JobState.COMPLETED


def _begun(fact: JobFact, delay_s: int, now_s: float) -> bool:
    """Say whether the job started, or ended without a start, at least `delay_s` seconds ago."""
    since_s = _began_at_s(fact)
    return _is_begun(fact) and (since_s is None or now_s >= since_s + delay_s)


def _is_begun(fact: JobFact) -> bool:
    return fact.state in FINAL or (fact.state in ACTIVE and fact.started_at_s is not None)


def _began_at_s(fact: JobFact) -> float | None:
    return fact.started_at_s if fact.started_at_s is not None else fact.ended_at_s


_GOALS = {
    DependencyKind.AFTER: "has started",
    DependencyKind.AFTER_ANY: "has ended",
    DependencyKind.AFTER_OK: "has completed",
    DependencyKind.AFTER_NOT_OK: "has failed",
    DependencyKind.AFTER_CORR: "has completed its task of the same number",
}


def _words(term: Dependency, job_id: int, met: Met) -> str:
    goal = _GOALS[term.kind]
    which = f"{job_id}_{term.task}" if term.task is not None else f"{job_id}"
    if met is Met.NEVER:
        return f"waits until job {which} {goal}, which cannot happen any more"
    if term.kind is DependencyKind.AFTER and term.delay_s:
        return f"waits until {term.delay_s // 60} min after job {which} {goal}"
    return f"waits until job {which} {goal}"
