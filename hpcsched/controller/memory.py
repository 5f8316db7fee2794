"""Remember job history for the policy `default`.

This is the run times of users' last jobs, how much of their requests jobs used, and how long jobs
waited, or would have waited under plain EASY.

Only jobs count that ended by themselves, successfully or not, or at their time limit. A cancelled
or lost job says nothing about the next one. At a start the last `LAST_JOBS` are read from the
database. Then each job is recorded as it ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from math import ceil
from operator import itemgetter

from hpcsched.model.accounting import CPU
from hpcsched.model.ids import JobId
from hpcsched.model.job import Job, JobState
from hpcsched.model.node import Partition
from hpcsched.model.units import known_limit_s
from hpcsched.sched.experience import REMEMBERED, Experience, RequestUse, ShadowEasy
from hpcsched.sched.guard import amount_of
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.snapshot import NodeView, SnapshotCache, node_view, pending_job
from hpcsched.sched.tres import all_of, least_of
from hpcsched.state.cluster import ClusterState
from hpcsched.store.store import PastRun, Store

# ----- rehearse plain EASY beside the real queue, for the policy `default`: its longest wait
#
# All nodes count as one pool of processors. A job takes the share of the pool that equals its
# largest share of any requested resource. EASY on real nodes has more constraints, so the longest
# wait here tends to be too short, and the guard too strict. The rehearsal begins with the jobs that
# wait and run at that time; `longest_wait_s` is never less than the value given at its start.
#
# It is told of each changed job, in the order of time. After the clock was set back, time does not
# move here until the clock has caught up. A job that is cancelled before it starts takes no time
# here when its turn comes.


BEGUN = frozenset({JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED})


def rehearsed(cluster: ClusterState, policy: Policy, views: SnapshotCache, longest_wait_s: float) -> Rehearsed | None:
    """Return a rehearsal of the waiting and running jobs; None if `policy` does not need it."""
    if policy.backfill is not Backfill.DEFAULT:
        return None
    known_s = min(longest_wait_s, policy.age_max_s)  # it may be the wait of a job over its limits
    made = Rehearsed(map(node_view, cluster.nodes.values()), cluster.partitions, policy, views, known_s)
    for at_s, _, job in sorted([(_since_s(job), job.id, job) for job in cluster.jobs_to_plan()], key=itemgetter(0, 1)):
        made.note(job, at_s)
    return made


def _since_s(job: Job) -> float:
    return job.eligible_at_s if job.eligible_at_s is not None else job.submitted_at_s


class Rehearsed:
    """The rehearsal of one cluster.

    `views` knows what jobs request; `longest_wait_s` is the longest wait known before.
    """

    def __init__(
        self,
        nodes: Iterable[NodeView],
        partitions: Mapping[str, Partition],
        policy: Policy,
        views: SnapshotCache,
        longest_wait_s: float,
    ) -> None:
        self._machine = all_of(nodes)
        self._size = max(1, int(self._machine[CPU]))  # int: a number
        self._partitions = partitions
        self._default = next((partition.name for partition in partitions.values() if partition.default), "")
        self._no_limit_s = policy.default_time_limit_s
        self._views = views
        self._shadow = ShadowEasy(self._size)
        self._least_s = longest_wait_s
        # Attempt and its number in the rehearsal, of jobs that wait or run.
        self._open: dict[JobId, tuple[int, int]] = {}
        self._began: set[int] = set()
        self._now_s = float("-inf")

    @property
    def longest_wait_s(self) -> float:
        return max(self._least_s, self._shadow.longest_wait_s)

    def note(self, job: Job, now_s: float) -> None:
        """Record the present state of `job`."""
        self._now_s = now_s = max(self._now_s, now_s)
        attempt, number = self._open.get(job.id, (-1, -1))
        if number >= 0 and (attempt != job.attempt or not (job.state is JobState.PENDING or job.state in BEGUN)):
            self._end(job.id, number, now_s)
            number = -1
        if number < 0 and (job.state in BEGUN or (job.state is JobState.PENDING and job.eligible_at_s is not None)):
            number = self._submit(job, now_s)
        if job.state in BEGUN and number not in self._began:
            self._began.add(number)
            self._shadow.started(number, job.allocated_at_s if job.allocated_at_s is not None else now_s)

    def go_on(self, now_s: float) -> None:
        """Rehearse up to the latest known time."""
        self._shadow.advance(max(self._now_s, now_s), more_may_come=True)

    def _submit(self, job: Job, now_s: float) -> int:
        request = pending_job(job, self._partitions, self._default, self._views).request
        amount = amount_of(least_of(request.shape), self._machine)
        procs = max(1, min(self._size, ceil(amount)))
        limit_s = known_limit_s(request.time_limit_s) or self._no_limit_s
        number = self._shadow.submitted(procs, limit_s, now_s)
        self._open[job.id] = job.attempt, number
        return number

    def _end(self, job_id: JobId, number: int, now_s: float) -> None:
        if number not in self._began:
            self._shadow.started(number, now_s)
        self._began.discard(number)
        self._shadow.ended(number, now_s)
        del self._open[job_id]


LAST_JOBS = 5_000
TELLING = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.TIMEOUT, JobState.OUT_OF_MEMORY})


def memory_of(store: Store, cluster: ClusterState, policy: Policy, views: SnapshotCache) -> Memory:
    """Return the memory loaded from the database; `views` knows what jobs request."""
    memory = Memory(store.past_runs(TELLING, LAST_JOBS), store.first_submitted_s(), policy.default_time_limit_s)
    memory.rehearse(cluster, policy, views)
    return memory


class Memory:
    """The last runs of each user, and the waits of the last jobs.

    `began_s` is when the first job came. A job without a time limit counts as if it had requested
    `no_limit_s`.
    """

    def __init__(self, past: Iterable[PastRun], began_s: float | None, no_limit_s: float) -> None:
        self._no_limit_s = no_limit_s
        self._request_use = RequestUse()
        self._runs_s: dict[int, dict[JobId, float]] = {}
        self._waits_s: OrderedDict[JobId, float] = (
            OrderedDict()
        )  # a dict searches for its first key behind deleted ones
        self._began_s = began_s
        self._rehearsed: Rehearsed | None = None
        self._known: Experience | None = None
        for run in past:
            self._put(run)

    @property
    def longest_wait_s(self) -> float:
        """Return the longest known wait: under plain EASY if rehearsed, else of the last jobs."""
        if self._rehearsed is not None:
            return self._rehearsed.longest_wait_s
        return max(self._waits_s.values(), default=0.0)

    def rehearse(self, cluster: ClusterState, policy: Policy, views: SnapshotCache) -> None:
        """Start to rehearse plain EASY with the present jobs, if `policy` needs it."""
        self._rehearsed = rehearsed(cluster, policy, views, self.longest_wait_s)

    def note(self, job: Job, now_s: float) -> None:
        """Record `job` if it ended by itself; each job is recorded once."""
        if self._rehearsed is not None:
            self._rehearsed.note(job, now_s)
        if self._began_s is None:
            self._began_s, self._known = job.submitted_at_s, None
        if job.state in TELLING and job.started_at_s is not None and job.ended_at_s is not None:
            since_s = job.eligible_at_s if job.eligible_at_s is not None else job.submitted_at_s
            limit_s = job.asked_limit_s if job.asked_limit_s is not None else job.time_limit_s
            cpus = sum(share.cpus for share in job.shares)
            self._put(PastRun(job.id, job.uid, since_s, job.started_at_s, job.ended_at_s, limit_s, cpus))

    def experience(self, now_s: float) -> Experience:
        """Return the experience that a plan uses at `now_s`."""
        if self._rehearsed is not None:
            self._rehearsed.go_on(now_s)
        easy_wait_s = self.longest_wait_s
        if self._known is None or self._known.easy_wait_s != easy_wait_s:
            self._known = Experience(
                longest_runs_s={uid: max(runs.values()) for uid, runs in self._runs_s.items()},
                easy_wait_s=easy_wait_s,
                began_s=self._began_s,
                request_use=self._request_use.part,
            )
        return self._known

    def _put(self, run: PastRun) -> None:
        runs = self._runs_s.setdefault(run.uid, {})
        runs[run.job_id] = run_s = max(0.0, run.ended_at_s - run.started_at_s)
        if len(runs) > REMEMBERED:
            del runs[next(iter(runs))]
        if run.job_id not in self._waits_s:
            self._request_use.record(run_s, known_limit_s(run.limit_s) or self._no_limit_s, run.cpus)
        self._waits_s[run.job_id] = max(0.0, run.started_at_s - run.since_s)
        if len(self._waits_s) > LAST_JOBS:
            self._waits_s.popitem(last=False)
        self._known = None
