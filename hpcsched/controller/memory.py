"""What the controller remembers for the policy `default`: what users' last jobs ran, and how long jobs waited, or would have.

Jobs count that came to their own end, well or badly, or to that of their limit: one that was cancelled or lost says nothing
of the next. After a start the database tells of the last `LAST_JOBS`; then each job is noted as it ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcsched.controller.rehearsed import Rehearsed, rehearsed
from hpcsched.model.ids import JobId
from hpcsched.model.job import Job, JobState
from hpcsched.sched.policy import Policy
from hpcsched.sched.predict import REMEMBERED, Experience
from hpcsched.sched.snapshot import SnapshotCache
from hpcsched.store.store import PastRun, Store
from hpcsched.store.world import World

LAST_JOBS = 5_000
TELLING = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.TIMEOUT, JobState.OUT_OF_MEMORY})


def memory_of(store: Store, world: World, policy: Policy, views: SnapshotCache) -> Memory:
    """Return what the database tells of; `views` knows what jobs ask for."""
    memory = Memory(store.past_runs(TELLING, LAST_JOBS), store.first_submitted_s())
    memory.rehearse(world, policy, views)
    return memory


class Memory:
    """The last runs of each user, and the waits of the last jobs of all; `began_s`: when the first job of all came."""

    def __init__(self, past: Iterable[PastRun], began_s: float | None) -> None:
        self._runs_s: dict[int, dict[JobId, float]] = {}
        self._waits_s: dict[JobId, float] = {}
        self._began_s = began_s
        self._rehearsed: Rehearsed | None = None
        self._known: Experience | None = None
        for run in past:
            self._put(run)

    @property
    def longest_wait_s(self) -> float:
        """Return the longest wait that is known of: under plain EASY where that is rehearsed, else of the last jobs."""
        if self._rehearsed is not None:
            return self._rehearsed.longest_wait_s
        return max(self._waits_s.values(), default=0.0)

    def rehearse(self, world: World, policy: Policy, views: SnapshotCache) -> None:
        """Have plain EASY rehearsed from now on, with the jobs that are there, if `policy` wants it."""
        self._rehearsed = rehearsed(world, policy, views, self.longest_wait_s)

    def note(self, job: Job, now_s: float) -> None:
        """Take note of `job` if it has come to its own end; a job is remembered once, however often it changes then."""
        if self._rehearsed is not None:
            self._rehearsed.note(job, now_s)
        if self._began_s is None:
            self._began_s, self._known = job.submitted_at_s, None
        if job.state in TELLING and job.started_at_s is not None and job.ended_at_s is not None:
            since_s = job.eligible_at_s if job.eligible_at_s is not None else job.submitted_at_s
            self._put(PastRun(job.id, job.uid, since_s, job.started_at_s, job.ended_at_s))

    def experience(self, now_s: float) -> Experience:
        """Return all of it as a plan sees it at `now_s`."""
        if self._rehearsed is not None:
            self._rehearsed.go_on(now_s)
        easy_wait_s = self.longest_wait_s
        if self._known is None or self._known.easy_wait_s != easy_wait_s:
            self._known = Experience(
                longest_runs_s={uid: max(runs.values()) for uid, runs in self._runs_s.items()},
                easy_wait_s=easy_wait_s,
                began_s=self._began_s,
            )
        return self._known

    def _put(self, run: PastRun) -> None:
        runs = self._runs_s.setdefault(run.uid, {})
        runs[run.job_id] = max(0.0, run.ended_at_s - run.started_at_s)
        if len(runs) > REMEMBERED:
            del runs[next(iter(runs))]
        self._waits_s[run.job_id] = max(0.0, run.started_at_s - run.since_s)
        if len(self._waits_s) > LAST_JOBS:
            del self._waits_s[next(iter(self._waits_s))]
        self._known = None
