"""What is counted while a plan is made: who may not start another job because enough of theirs run.

Before a job is looked at it is asked `why_not`; when its place is known, `why_not_there`; when the plan starts it, `started`
counts it in. So limits hold for all that starts within one plan as well. Array limits are counted here, those of users,
accounts, QOS and partitions by `quota`.
"""

from __future__ import annotations

from hpcsched.model.ids import JobId
from hpcsched.sched.eligible import Wait
from hpcsched.sched.quota import Quota
from hpcsched.sched.reasons import at_array_limit
from hpcsched.sched.snapshot import PendingJob, Snapshot
from hpcsched.sched.tres import Held


class Tally:
    """What runs, counted, and what the plan starts beside it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._array_tasks: dict[JobId | None, int] = {}
        self._quota = Quota(snapshot)
        for job in snapshot.running:
            if job.array_job_id is not None:
                self._array_tasks[job.array_job_id] = self._array_tasks.get(job.array_job_id, 0) + 1

    @property
    def limited(self) -> bool:
        """Whether anybody has set a limit, so that it matters what jobs get."""
        return self._quota.bounded

    def why_not(self, job: PendingJob) -> Wait | None:
        """Return which limit keeps `job` waiting whatever is free, or None."""
        if job.array_limit and self._array_tasks.get(job.array_job_id, 0) >= job.array_limit:
            return at_array_limit(job.array_limit)
        return self._quota.why_not(job)

    def why_not_there(self, job: PendingJob, held: Held) -> Wait | None:
        """Return which limit `job` would break with what it would get."""
        return self._quota.why_not_with(job, held)

    def started(self, job: PendingJob, held: Held) -> None:
        """Count `job`, which the plan starts."""
        self._quota.started(job, held)
        if job.array_limit:
            self._array_tasks[job.array_job_id] = self._array_tasks.get(job.array_job_id, 0) + 1
