"""The queues of one pass: one for each partition and reservation.

A queue has its answering nodes and its *head*: the first of its jobs that does not fit. Only eligible jobs are in it. Holds,
begin times, deadlines, dependencies, singletons and reservations keep a job waiting even if resources are free.

Dependencies follow sbatch(1). If the dependency is an array, `afterok` requires that all its tasks completed, `afternotok` that
all ended and not all completed, `afterany` that all ended, and `aftercorr` that the task of the same number completed. ``12_3``
refers to that task alone. A job that is no longer known counts as ended long ago with an unknown outcome: `afterok`,
`afternotok` and `aftercorr` on it are never satisfied. A job never starts if it could not end by its deadline even if it
started now.

`model.reservation` has the times at which nodes are closed; the reasons, in words, are here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import ACTIVE, FINAL, Hold, JobState, Reason
from hpcsched.model.node import Partition, PartitionState
from hpcsched.model.reservation import HORIZON_S, MAX_PERIOD_S, NEVER_S, Interval, Reservation, occurrences
from hpcsched.model.spec import Dependency, DependencyKind
from hpcsched.model.units import format_time_s
from hpcsched.sched.decisions import Wait
from hpcsched.sched.policy import Policy
from hpcsched.sched.sentences import listed
from hpcsched.sched.snapshot import JobFact, NodeView, PendingJob, RunningJob, Snapshot, relaxed

STEP_JOBS = 1000  # jobs that are considered in one step


@dataclass(slots=True)
class PartitionQueue:
    """The queue of one partition and reservation: its answering nodes, and its head."""

    partition: Partition
    nodes: list[int]
    reservation: str = ""
    head: PendingJob | None = None
    slots: int = 0  # waiting jobs with a reserved slot
    wait_behind_head: Wait | None = None  # shared by all jobs behind the head


class PartitionQueues:
    """The queues of one pass, by partition and reservation."""

    def __init__(self, snapshot: Snapshot, reservations: Mapping[str, Reservation]) -> None:
        self._snapshot = snapshot
        self._reservations = reservations
        self._queues = {
            (name, reservation): self._make(partition, reservation)
            for reservation in sorted({"", *(job.reservation for job in snapshot.pending)})
            for name, partition in snapshot.partitions.items()
        }
        self._node_sets: dict[tuple[str, str], Set[int]] = {}

    def of(self, job: PendingJob) -> PartitionQueue:
        """Return the queue of `job`."""
        return self.at(job.partition, job.reservation)

    def at(self, partition: str, reservation: str) -> PartitionQueue:
        """Return the queue of this partition and reservation; make it if it is missing."""
        queue = self._queues.get((partition, reservation))
        if queue is None:
            made = self._make(self._snapshot.partitions[partition], reservation)
            queue = self._queues[partition, reservation] = made
        return queue

    def nodes_of(self, job: PendingJob) -> Set[int]:
        """Return the nodes of the queue of `job`, as a set."""
        key = job.partition, job.reservation
        if key not in self._node_sets:
            self._node_sets[key] = frozenset(self.of(job).nodes)
        return self._node_sets[key]

    def sharing_nodes(self, queue: PartitionQueue) -> list[PartitionQueue]:
        """Return the queues of the same reservation that share nodes with `queue`.

        `queue` itself is included.
        """
        alike = [other for other in self._queues.values() if other.reservation == queue.reservation]
        return [other for other in alike if not set(other.nodes).isdisjoint(queue.nodes)]

    def open_to(self, queue: PartitionQueue) -> Sequence[NodeView]:
        """Return all nodes; nodes outside the reservation of `queue` are marked as unusable."""
        if not queue.reservation:
            return self._snapshot.nodes
        why = f"is not in reservation {queue.reservation!r}"
        reserved = set(self._reservations[queue.reservation].nodes)
        return [
            node if node.name in reserved or node.why_not else replace(node, why_not=why)
            for node in self._snapshot.nodes
        ]

    def _make(self, partition: Partition, reservation: str) -> PartitionQueue:
        names = set(partition.nodes)
        if reservation in self._reservations:
            names &= set(self._reservations[reservation].nodes)
        nodes = [at for at, node in enumerate(self._snapshot.nodes) if node.name in names and node.usable]
        return PartitionQueue(partition=partition, nodes=nodes, reservation=reservation)


def eligible_jobs(
    snapshot: Snapshot, policy: Policy, reservations: Mapping[str, Reservation], waits: dict[JobId, Wait]
) -> Generator[None, None, list[PendingJob]]:
    """Return, in steps, the eligible jobs, once for each partition that they request.

    Only resources and limits keep these jobs waiting. The waits of the other jobs are added to `waits`.
    """
    eligibility, now_s, partitions = Eligibility(snapshot), snapshot.now_s, snapshot.partitions
    closed = {name: _closed(part) for name, part in partitions.items() if not part.state.starts_jobs}
    found = []
    for number, job in enumerate(snapshot.pending, 1):
        if number % STEP_JOBS == 0:
            yield
        wait = None if job.free_to_go else eligibility.why_not(job) or not_now(job, reservations, now_s)
        if wait is not None:
            waits[job.id] = wait
            continue
        opened = [
            view for view in _views(job, policy, now_s) if view.partition in partitions and view.partition not in closed
        ]
        found += opened
        if not opened:
            name = job.partition
            waits[job.id] = closed.get(name) or closed.setdefault(name, _removed(name))
    yield
    return found


def _closed(partition: Partition) -> Wait:
    """Return the wait of the jobs in a partition that starts no jobs."""
    if partition.state is PartitionState.INACTIVE:
        return Wait(reason=Reason.PARTITION_INACTIVE, detail=f"partition {partition.name!r} is inactive")
    return Wait(reason=Reason.PARTITION_DOWN, detail=f"partition {partition.name!r} is down")


def _removed(name: str) -> Wait:
    """Return the wait of the jobs in a partition that was removed from the configuration."""
    return Wait(reason=Reason.PARTITION_DOWN, detail=f"partition {name!r} is not in the configuration any more")


def _views(job: PendingJob, policy: Policy, now_s: float) -> tuple[PendingJob, ...]:
    """Return `job` with its current request, once for each of its partitions."""
    views = (job, *job.others) if job.others else (job,)
    if not job.request.shape.switches:
        return views
    return tuple([relaxed(view, now_s, policy.max_switch_wait_s) for view in views])


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


def not_now(job: PendingJob, reservations: Mapping[str, Reservation], now_s: float) -> Wait | None:
    """Return the wait of `job` if it cannot start in its reservation now; None if it can.

    Free resources do not matter. A job without a reservation has no such wait.
    """
    if not job.reservation:
        return None
    reservation = reservations.get(job.reservation)
    if reservation is None or reservation.is_over(now_s):
        why = f"its reservation {job.reservation!r} is over or was deleted"
        way = f"hctl update {job.display_id} ReservationName= lets it run without"
        return Wait(reason=Reason.RESERVATION_DELETED, detail=f"{why}; {way}")
    if now_s < reservation.start_s:
        detail = f"its reservation {job.reservation!r} begins in {format_time_s(int(reservation.start_s - now_s))}"
        return Wait(reason=Reason.RESERVATION, detail=detail, expected_start_s=reservation.start_s)
    return None


def cut_short_s(job: PendingJob, reservations: Mapping[str, Reservation]) -> float:
    """Return when `job` is ended before its time limit; `NEVER_S`: only its limit ends it.

    That is the end of the current or next occurrence of its reservation. If it requested no time
    limit, its deadline counts too.
    """
    cut_s = reservations[job.reservation].end_s if job.reservation in reservations else NEVER_S
    if job.deadline_at_s is not None and job.time_min_s is not None:
        cut_s = min(cut_s, job.deadline_at_s)
    return cut_s


def wait_for_reservation(snapshot: Snapshot, job: PendingJob, nodes: Sequence[int], end_s: float) -> Wait | None:
    """Return the wait for the first reservation that keeps `job` off `nodes`.

    The reservation begins before `end_s`. None: no reservation does.
    """
    now_s = snapshot.now_s
    wanted = {snapshot.nodes[node].name for node in nodes}
    for reservation in sorted(snapshot.reservations, key=lambda reservation: (reservation.start_s, reservation.name)):
        interval = next(occurrences(reservation, now_s, end_s), None)
        if reservation.name != job.reservation and interval and not wanted.isdisjoint(reservation.nodes):
            return _reserved(reservation, sorted(wanted.intersection(reservation.nodes)), interval, now_s)
    return None


def certain_until_s(reservations: Iterable[Reservation], now_s: float) -> float:
    """Return the time up to which expected starts are certain.

    Later starts may overlap occurrences of repeating reservations that are not known yet.
    """
    return now_s + HORIZON_S - MAX_PERIOD_S if any(reservation.repeats for reservation in reservations) else NEVER_S


def _reserved(reservation: Reservation, nodes: list[NodeName], interval: Interval, now_s: float) -> Wait:
    from_s = max(now_s, interval[0])
    which = f"{listed(nodes)} {'is' if len(nodes) == 1 else 'are'} reserved"
    when = f"in {format_time_s(int(from_s - now_s))}" if from_s > now_s else "now"
    end = f"{when}, for {format_time_s(int(interval[1] - from_s))} ({reservation.name})"
    if reservation.is_maintenance:
        return Wait(reason=Reason.NODES_UNAVAILABLE, detail=f"{which} for maintenance {end}")
    return Wait(reason=Reason.RESERVATION, detail=f"{which} {end}")
