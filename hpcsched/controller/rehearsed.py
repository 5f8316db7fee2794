"""Plain EASY rehearsed beside the real queue, for the policy `default`: how long it would have had the unluckiest job wait.

All nodes count as one pool of processors, of which a job needs the largest part of a resource that it asks for. That is less than
EASY has to heed on nodes, so its longest wait here is rather too short than too long, and the guard rather too strict. It
knows the jobs since it began, and begins with those that wait and run; `longest_wait_s` is never less than what it was told then.

Told of each job that changes, in the order of time (a clock that is set back stands still here). A job that is cancelled before
it starts takes no time here when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from operator import itemgetter

from hpcsched.model.accounting import CPU
from hpcsched.model.ids import JobId
from hpcsched.model.job import Job, JobState
from hpcsched.model.node import Partition
from hpcsched.model.units import known_limit_s
from hpcsched.sched.guardplan import amount_of
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.rehearsal import Rehearsal
from hpcsched.sched.snapshot import NodeView, SnapshotCache, node_view, pending_job
from hpcsched.sched.tres import all_of, least_of
from hpcsched.store.world import World

BEGUN = frozenset({JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED})


def rehearsed(world: World, policy: Policy, views: SnapshotCache, longest_wait_s: float) -> Rehearsed | None:
    """Return a rehearsal of the jobs that wait and run in `world`; None: `policy` has no use for it."""
    if policy.backfill is not Backfill.DEFAULT:
        return None
    known_s = min(longest_wait_s, policy.age_max_s)  # it may have been the wait of a job over its limits
    made = Rehearsed(map(node_view, world.nodes.values()), world.partitions, policy, views, known_s)
    for at_s, _, job in sorted([(_since_s(job), job.id, job) for job in world.jobs_to_plan()], key=itemgetter(0, 1)):
        made.note(job, at_s)
    return made


def _since_s(job: Job) -> float:
    return job.eligible_at_s if job.eligible_at_s is not None else job.submitted_at_s


class Rehearsed:
    """The rehearsal of one cluster; `views` knows what jobs ask for, `longest_wait_s` is what is known already."""

    def __init__(
        self,
        nodes: Iterable[NodeView],
        partitions: Mapping[str, Partition],
        policy: Policy,
        views: SnapshotCache,
        longest_wait_s: float,
    ) -> None:
        self._machine = all_of(nodes)
        self._size = max(1, int(self._machine[CPU]))
        self._partitions = partitions
        self._default = next((partition.name for partition in partitions.values() if partition.default), "")
        self._no_limit_s = policy.default_time_limit_s
        self._views = views
        self._rehearsal = Rehearsal(self._size)
        self._least_s = longest_wait_s
        self._open: dict[JobId, tuple[int, int]] = {}  # attempt, number there; of jobs that wait or run
        self._began: set[int] = set()
        self._now_s = float("-inf")

    @property
    def longest_wait_s(self) -> float:
        return max(self._least_s, self._rehearsal.longest_wait_s)

    def note(self, job: Job, now_s: float) -> None:
        """Take note of `job` as it is now."""
        self._now_s = now_s = max(self._now_s, now_s)
        attempt, number = self._open.get(job.id, (-1, -1))
        if number >= 0 and (attempt != job.attempt or not (job.state is JobState.PENDING or job.state in BEGUN)):
            self._end(job.id, number, now_s)
            number = -1
        if number < 0 and (job.state in BEGUN or (job.state is JobState.PENDING and job.eligible_at_s is not None)):
            number = self._submit(job, now_s)
        if job.state in BEGUN and number not in self._began:
            self._began.add(number)
            self._rehearsal.started(number, job.allocated_at_s if job.allocated_at_s is not None else now_s)

    def go_on(self, now_s: float) -> None:
        """Rehearse as far as what is known allows."""
        self._rehearsal.go_on(max(self._now_s, now_s), more_may_come=True)

    def _submit(self, job: Job, now_s: float) -> int:
        request = pending_job(job, self._partitions, self._default, self._views).request
        amount = amount_of(least_of(request.shape), self._machine)
        procs = max(1, min(self._size, ceil(amount)))
        limit_s = known_limit_s(request.time_limit_s) or self._no_limit_s
        number = self._rehearsal.submitted(procs, limit_s, now_s)
        self._open[job.id] = job.attempt, number
        return number

    def _end(self, job_id: JobId, number: int, now_s: float) -> None:
        if number not in self._began:
            self._rehearsal.started(number, now_s)
        self._began.discard(number)
        self._rehearsal.ended(number, now_s)
        del self._open[job_id]
