"""Forecast a queue without further submissions, by the controller's own `plan`.

Jobs run to their time limits, or as long as predicted (`sched.experience`); a plan never knows more than the limits. Time
advances from event to event: the end of a job, a begin time, the start or end of a reservation, whatever a waiting job waits
for. Decisions are final; held jobs and jobs that wait for something impossible are left over with their reason.

Not simulated: preemption, elastic jobs that change size, fair-share factors and usage that change meanwhile, and jobs
that fail (a dependency treats each as completed).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import JobState, Reason
from hpcsched.model.node import Gpu, Partition
from hpcsched.model.reservation import NEVER_S, reserved_intervals_of
from hpcsched.model.units import parse_mem_mib
from hpcsched.sched.decisions import Plan, Wait
from hpcsched.sched.experience import Expected
from hpcsched.sched.plan import as_running, plan
from hpcsched.sched.policy import Policy, PreemptRules
from hpcsched.sched.snapshot import NodeView, PendingJob, RunningJob, Snapshot

SHORTEST_S = 1.0
_IN_QUEUE = frozenset({Reason.PRIORITY, Reason.RESOURCES, Reason.LICENSES, Reason.POWER_NOT_AVAIL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The starts of the waiting jobs, in order.

    `left` has the reasons of jobs that never start.

    `empty_at_s`: when the last job has started. `ended_at_s`: when all have ended. `utilization`: of the cpus of the nodes that
    answer, until the queue is empty; None if that is now.
    """

    now_s: float
    starts_s: Mapping[JobId, float]
    left: Mapping[JobId, Wait]
    empty_at_s: float
    ended_at_s: float
    utilization: float | None

    @property
    def waits_s(self) -> list[float]:
        """Return the remaining wait, in seconds from now, of each job that starts."""
        return [start_s - self.now_s for start_s in self.starts_s.values()]


def forecast(snapshot: Snapshot, policy: Policy, *, predict: bool = False) -> Forecast:
    """Return the forecast for the jobs of `snapshot`.

    With `predict` they run as long as predicted.
    """
    course = _Course(snapshot, replace(policy, estimate_depth=0, preempt=PreemptRules()), predict)
    course.run()
    empty_at_s = max(course.starts_s.values(), default=snapshot.now_s)
    return Forecast(
        now_s=snapshot.now_s,
        starts_s=course.starts_s,
        left={job.id: course.last_plan.waits[job.id] for job in course.pending},
        empty_at_s=empty_at_s,
        ended_at_s=course.now_s,
        utilization=_utilization(snapshot, course.held, empty_at_s),
    )


def with_nodes(snapshot: Snapshot, nodes: Sequence[NodeView]) -> Snapshot:
    """Return the snapshot with these additional nodes in every partition."""
    names = tuple(node.name for node in nodes)
    partitions: dict[str, Partition] = {
        name: replace(partition, nodes=(*partition.nodes, *names)) for name, partition in snapshot.partitions.items()
    }
    return replace(snapshot, nodes=(*snapshot.nodes, *nodes), partitions=partitions)


_NEW_NODES = re.compile(r"(?:([1-9]\d{0,4})x)?([1-9]\d{0,5}):(\d+[KMGT]?)(?::gpu:([^:\s]+):(\d{1,3}))?", re.IGNORECASE)
NEW_NODES = "COUNTxCPUS:MEM or COUNTxCPUS:MEM:gpu:TYPE:N, as 2x16:64G:gpu:a100:4"


def new_nodes(text: str, taken: Collection[str]) -> list[NodeView] | None:
    """Return the nodes in the notation of `NEW_NODES`, with names that are not taken.

    None: it is another notation. Raises RequestError for a size of memory that cannot be.
    """
    match = _NEW_NODES.fullmatch(text)
    if match is None:
        return None
    count, cpus, mem, kind, gpus = match.groups()
    free = (name for number in range(1, 1_000_000) if (name := NodeName(f"new{number}")) not in taken)
    return [
        NodeView(
            name=next(free),
            cpus=int(cpus),
            mem_mib=parse_mem_mib(mem),
            gpus=tuple(Gpu(index=index, type=kind) for index in range(int(gpus or 0))),
        )
        for _ in range(int(count or 1))
    ]


def without_nodes(snapshot: Snapshot, names: Collection[NodeName]) -> Snapshot:
    """Return the snapshot in which no job starts on these nodes; jobs that run there continue."""
    nodes = tuple(replace(node, why_not="is removed") if node.name in names else node for node in snapshot.nodes)
    return replace(snapshot, nodes=nodes)


class _Course:
    """The cluster as it continues."""

    def __init__(self, snapshot: Snapshot, policy: Policy, predict: bool) -> None:
        self.now_s = snapshot.now_s
        self.pending = [replace(job, reserved_shares=()) for job in snapshot.pending]
        self.starts_s: dict[JobId, float] = {}
        self.held: list[tuple[float, float, int]] = []  # from, until, cpus of nodes that answer
        self.last_plan = Plan(starts=(), waits={})
        self._base = snapshot
        self._usable = frozenset(node.name for node in snapshot.nodes if node.usable)
        self._policy = policy
        self._promises = snapshot.promises
        self._facts = dict(snapshot.facts)
        self._expected = _expected(snapshot) if predict else None
        self._running: dict[JobId, RunningJob] = {}
        self._ends: list[tuple[float, JobId]] = []
        for job in snapshot.running:
            self._begin(replace(job, elastic=None), self._rest_until_s(job))

    def run(self) -> None:
        """Advance until nothing more happens."""
        while True:
            self._plan()
            if not self.pending:
                break
            next_s = min((at_s for at_s in self._next_times_s() if at_s > self.now_s), default=None)
            if next_s is None:
                break
            self._move_to(next_s)
        self.now_s = max((end_s for end_s, _ in self._ends), default=self.now_s)

    def _plan(self) -> None:
        """Start what a plan starts; plan again if other jobs depend on these starts."""
        again = True
        while again:
            self.last_plan = plan(self._snapshot(), self._policy)
            self._promises = self.last_plan.promises
            starts = {start.job_id: start for start in self.last_plan.starts}
            again = False
            for job in [job for job in self.pending if job.id in starts]:
                start = starts[job.id]
                here = next((view for view in (job, *job.others) if view.partition == start.partition), job)
                running = as_running(here, start.shares, self.now_s, self._base.reservations, start.time_limit_s)
                again = self._update_facts(job.id, JobState.RUNNING, started_at_s=self.now_s) or again
                self.starts_s[job.id] = self.now_s
                self._begin(replace(running, runs=True), self.now_s + self._lasts_s(here, running))
            self.pending = [self._eligible(job) for job in self.pending if job.id not in starts]

    def _snapshot(self) -> Snapshot:
        reservations = tuple(each for each in self._base.reservations if not each.is_over(self.now_s))
        return replace(
            self._base,
            now_s=self.now_s,
            running=tuple(self._running.values()),
            pending=tuple(self.pending),
            facts=self._facts,
            reservations=reservations,
            promises=self._promises,
            reserved_intervals=reserved_intervals_of(reservations, self.now_s),
        )

    def _eligible(self, job: PendingJob) -> PendingJob:
        """Return `job`; its age counts from now if it waits only for resources or jobs."""
        if job.since_s is not None or self.last_plan.waits[job.id].reason not in _IN_QUEUE:
            return job
        return replace(job, since_s=self.now_s)

    def _begin(self, job: RunningJob, end_s: float) -> None:
        self._running[job.id] = job
        heappush(self._ends, (end_s, job.id))
        cpus = sum(share.cpus for share in job.shares if share.node in self._usable)
        self.held.append((self.now_s, end_s, cpus))

    def _lasts_s(self, job: PendingJob, running: RunningJob) -> float:
        """Return how long `job`, which starts now, runs."""
        ends_at_s = running.ends_at_s
        limit_s = ends_at_s - self.now_s if ends_at_s is not None else float(self._policy.default_time_limit_s)
        return max(SHORTEST_S, limit_s if self._expected is None else self._expected.run_s(job.uid, limit_s))

    def _rest_until_s(self, job: RunningJob) -> float:
        """Return when `job`, which already runs, ends."""
        policy, began_s = self._policy, job.began_at_s
        limit_s = job.ends_at_s - began_s if job.ends_at_s is not None else float(policy.default_time_limit_s)
        if self._expected is not None and not job.ending:
            expected_s = began_s + self._expected.run_s(job.uid, limit_s)
            if expected_s > self.now_s:
                return expected_s
        return began_s + limit_s if began_s + limit_s > self.now_s else self.now_s + policy.overdue_s

    def _next_times_s(self) -> Iterator[float]:
        """Yield the times at which something changes."""
        if self._ends:
            yield self._ends[0][0]
        for block in reserved_intervals_of(self._base.reservations, self.now_s):
            yield block.start_s
            yield block.end_s if block.end_s < NEVER_S else self.now_s
        for job in self.pending:
            wait = self.last_plan.waits[job.id]
            if wait.reason not in _IN_QUEUE and wait.expected_start_s is not None:
                yield wait.expected_start_s
            if job.deadline_at_s is not None:  # then it cannot end in time
                least_s = job.time_min_s if job.time_min_s is not None else job.request.time_limit_s or 0
                yield job.deadline_at_s - least_s + 0.001
            if job.request.shape.switches and job.since_s is not None:
                own_s = job.switches_wait_s
                yield job.since_s + (own_s if own_s is not None else self._policy.max_switch_wait_s)

    def _move_to(self, now_s: float) -> None:
        self.now_s = now_s
        while self._ends and self._ends[0][0] <= now_s:
            end_s, job_id = heappop(self._ends)
            del self._running[job_id]
            self._update_facts(job_id, JobState.COMPLETED, ended_at_s=end_s)

    def _update_facts(
        self, job_id: JobId, state: JobState, started_at_s: float | None = None, ended_at_s: float | None = None
    ) -> bool:
        """Give the new state of the job to its dependents; say whether it has any."""
        keys = [key for key, facts in self._facts.items() if any(fact.id == job_id for fact in facts)]
        for key in keys:
            facts = self._facts[key]
            self._facts[key] = tuple(
                [
                    replace(
                        fact,
                        state=state,
                        started_at_s=fact.started_at_s if started_at_s is None else started_at_s,
                        ended_at_s=fact.ended_at_s if ended_at_s is None else ended_at_s,
                    )
                    if fact.id == job_id
                    else fact
                    for fact in facts
                ]
            )
        return bool(keys)


def _expected(snapshot: Snapshot) -> Expected:
    return Expected(snapshot.experience, ((job.uid, snapshot.now_s - job.began_at_s) for job in snapshot.running))


def _utilization(snapshot: Snapshot, held: Sequence[tuple[float, float, int]], until_s: float) -> float | None:
    cpus = sum(node.cpus for node in snapshot.nodes if node.usable)
    if until_s <= snapshot.now_s or not cpus:
        return None
    used = sum(count * max(0.0, min(end_s, until_s) - start_s) for start_s, end_s, count in held)
    return used / (cpus * (until_s - snapshot.now_s))
