"""What the controller remembers of ended jobs, for the policy `default`: what users' last jobs ran, and how long jobs waited.

Jobs count that came to their own end, well or badly, or to that of their limit: one that was cancelled or lost says nothing
of the next. After a start the database tells of the last `LAST_JOBS`; then each job is noted as it ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcsched.model.ids import JobId
from hpcsched.model.job import Job, JobState
from hpcsched.sched.predict import REMEMBERED, Experience
from hpcsched.store.store import PastRun

LAST_JOBS = 5_000
TELLING = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.TIMEOUT, JobState.OUT_OF_MEMORY})


class Memory:
    """The last runs of each user, and the waits of the last jobs of all."""

    def __init__(self, past: Iterable[PastRun]) -> None:
        self._runs_s: dict[int, dict[JobId, float]] = {}
        self._waits_s: dict[JobId, float] = {}
        self._known: Experience | None = None
        for run in past:
            self._put(run)

    def note(self, job: Job) -> None:
        """Take note of `job` if it has come to its own end; a job is remembered once, however often it changes then."""
        if job.state in TELLING and job.started_at_s is not None and job.ended_at_s is not None:
            since_s = job.eligible_at_s if job.eligible_at_s is not None else job.submitted_at_s
            self._put(PastRun(job.id, job.uid, since_s, job.started_at_s, job.ended_at_s))

    def experience(self) -> Experience:
        """Return all of it as a plan sees it."""
        if self._known is None:
            self._known = Experience(
                longest_runs_s={uid: max(runs.values()) for uid, runs in self._runs_s.items()},
                longest_wait_s=max(self._waits_s.values(), default=0.0),
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
