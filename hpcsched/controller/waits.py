"""Why each job waits, as the last plan has it, and what follows: its age counts from now on, or it ends, as it can never start.

The age of a job counts from when only other jobs, resources and limits are in its way. That is recorded of so many jobs in one
tick; of the others in the next ones.
"""

from __future__ import annotations

from hpcsched.controller.planning import Slice
from hpcsched.lifecycle.events import BecameEligible, EndRequested
from hpcsched.model.ids import JobId
from hpcsched.model.job import OVER_LIMIT, Hold, Job, JobState, Reason
from hpcsched.sched.eligible import Wait
from hpcsched.store.world import Transaction

ELIGIBLE = OVER_LIMIT | {Reason.PRIORITY, Reason.RESOURCES, Reason.LICENSES, Reason.ARRAY_LIMIT}
MANY_JOBS = 500  # changed in one tick: then the plan comes in the next


class Waits:
    """Notes waits in the world. Of some jobs it has still to be recorded from when on their age counts: see `note_ages`."""

    def __init__(self) -> None:
        self._to_note: list[JobId] = []  # jobs whose age begins to count: their events are yet to be recorded

    def note(self, tx: Transaction, done: Slice) -> bool:
        """Keep why each job waits, and say whether any was ended.

        What can never start any more ends: past its last moment to make its deadline, or, if it says so, with a dependency that
        can never come true.
        """
        world, ended = tx.world, False
        waits = done.plan.waits if done.plan is not None else {}
        world.waits = {job_id: wait for job_id, wait in waits.items() if job_id in world.pending}
        for job_id, wait in tuple(world.waits.items()):
            job = world.jobs[job_id]
            if (outcome := _end_of(job, wait)) and done.knows(job):
                tx.record(EndRequested(job_id=job_id, at_s=tx.now_s, outcome=outcome, by_uid=None, why=wait.detail))
                ended = True
            elif job.eligible_at_s is None and _is_eligible(job, wait):
                self._to_note.append(job_id)
        return ended

    def note_ages(self, tx: Transaction) -> bool:
        """Record of some jobs that their age counts from now on, and say whether there are others."""
        now, self._to_note = self._to_note[:MANY_JOBS], self._to_note[MANY_JOBS:]
        for job_id in now:
            job = tx.world.jobs.get(job_id)
            waits = job is not None and job.state is JobState.PENDING and job.hold is Hold.NONE
            if waits and job.eligible_at_s is None:
                tx.record(BecameEligible(job_id=job_id, at_s=tx.now_s))
        return bool(self._to_note)


def _is_eligible(job: Job, wait: Wait) -> bool:
    """Say whether only other jobs, resources, be they reserved, and limits keep the job waiting."""
    return wait.reason in ELIGIBLE or (wait.reason is Reason.RESERVATION and not job.reservation)


def _end_of(job: Job, wait: Wait) -> JobState | None:
    """Return as what a job that waits so is to end; None: it is not."""
    if wait.reason is Reason.DEADLINE:
        return JobState.DEADLINE
    hopeless = wait.reason is Reason.DEPENDENCY_NEVER and job.spec.kill_on_invalid_dep
    return JobState.CANCELLED if hopeless else None
