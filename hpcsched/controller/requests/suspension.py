"""Suspend and resume running jobs for admins. Messages to nodes follow from the state."""

from __future__ import annotations

from collections.abc import Iterable

from hpcsched.api.identity import Asker
from hpcsched.controller.requests.jobs import Outcome, each_job
from hpcsched.errors import RequestError
from hpcsched.lifecycle.events import Resumed, Suspended
from hpcsched.lifecycle.job import can
from hpcsched.model.job import Job
from hpcsched.state.transaction import Transaction


def suspend(tx: Transaction, asker: Asker, references: Iterable[str]) -> Outcome:
    """Suspend the named running jobs. They keep their resources."""

    def one(tx: Transaction, job: Job, outcome: Outcome) -> None:
        asker.must_be_admin("suspend a job")
        if not can(job, Suspended):
            raise RequestError(f"cannot suspend job {job.display_id}: it is {job.state}")
        tx.record(Suspended(job_id=job.id, at_s=tx.now_s, by_uid=asker.uid))

    return each_job(tx, asker, references, {}, "suspend", one)


def resume(tx: Transaction, asker: Asker, references: Iterable[str]) -> Outcome:
    """Resume the named suspended jobs."""

    def one(tx: Transaction, job: Job, outcome: Outcome) -> None:
        asker.must_be_admin("resume a job")
        if not can(job, Resumed):
            raise RequestError(f"cannot resume job {job.display_id}: it is {job.state}, not SUSPENDED")
        if job.suspended_for is not None:
            raise RequestError(
                f"cannot resume job {job.display_id}: job {job.suspended_for} has its cpus; it goes on when they are free"
            )
        tx.record(Resumed(job_id=job.id, at_s=tx.now_s, by_uid=asker.uid))

    return each_job(tx, asker, references, {}, "resume", one)
