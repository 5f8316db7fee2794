"""Suspend and resume running jobs, and cancel or signal single steps of them: `hcancel 12.0`.

`12.batch` is the batch script: to end it is to end the job. Knows how steps are named, not how they are ended. Messages to nodes
follow from the state. Source: scancel(1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from hpcsched.auth.authorize import Action, Identity, authorize
from hpcsched.controller.requests.job_ids import find_jobs, matches
from hpcsched.controller.requests.jobs import Outcome, each_job
from hpcsched.controller.tick import StepListener
from hpcsched.errors import HpcschedError, NotFoundError, RequestError
from hpcsched.lifecycle.events import Resumed, Suspended
from hpcsched.lifecycle.job import can
from hpcsched.model.job import Job
from hpcsched.model.text import whole_number
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction

_STEP = re.compile(r"(\d+(?:[_+]\d+)?)\.(\d+|batch)\Z")


class Meant(NamedTuple):
    """The parsed references of a request."""

    jobs: list[str]
    batch: list[str]  # jobs of which only the batch script is referenced
    steps: list[tuple[str, int]]  # job, number


def sort_out(references: Iterable[str]) -> Meant:
    """Return which of the references are jobs, which batch scripts and which steps."""
    meant = Meant([], [], [])
    for reference in references:
        match = _STEP.match(reference)
        if match is None:
            meant.jobs.append(reference)
        elif match[2] == "batch":
            meant.batch.append(match[1])
        else:
            meant.steps.append((match[1], whole_number(match[2], "a step")))
    return meant


def act_on_steps(
    cluster: ClusterState,
    minding: StepListener,
    identity: Identity,
    steps: Iterable[tuple[str, int]],
    filters: dict[str, str],
    signum: int | None,
    outcome: Outcome,
) -> None:
    """Send `signum` to these steps of matching jobs, or end them if it is None.

    Refusals are added to `outcome`.
    """
    for reference, number in steps:
        try:
            jobs = find_jobs(cluster, reference, identity.uid)
            if not all(matches(job, filters) for job in jobs):
                continue
            if len(jobs) > 1:
                raise RequestError(
                    f"cannot tell which step {number} of job {reference} is meant: say {jobs[0].display_id}"
                )
            authorize(identity, Action.CANCEL, jobs[0], f"cancel a step of job {jobs[0].display_id}")
            if not minding.act_on_step(jobs[0], number, signum, identity.user):
                raise NotFoundError(f"Invalid job id specified: no step {reference}.{number} is running")
        except HpcschedError as error:
            outcome.refuse(f"{reference}.{number}", error)
        else:
            outcome.jobs.append(jobs[0].id)


def suspend(tx: Transaction, identity: Identity, references: Iterable[str]) -> Outcome:
    """Suspend the named running jobs. They keep their resources."""

    def suspend_job(tx: Transaction, job: Job, outcome: Outcome) -> None:
        if not can(job, Suspended):
            raise RequestError(f"cannot suspend job {job.display_id}: it is {job.state}")
        tx.record(Suspended(job_id=job.id, at_s=tx.now_s, by_uid=identity.uid))

    return each_job(tx, identity, references, {}, Action.SUSPEND, suspend_job)


def resume(tx: Transaction, identity: Identity, references: Iterable[str]) -> Outcome:
    """Resume the named suspended jobs."""

    def resume_job(tx: Transaction, job: Job, outcome: Outcome) -> None:
        if not can(job, Resumed):
            raise RequestError(f"cannot resume job {job.display_id}: it is {job.state}, not SUSPENDED")
        if job.suspended_for is not None:
            raise RequestError(
                f"cannot resume job {job.display_id}: job {job.suspended_for} has its cpus; it goes on when they are free"
            )
        tx.record(Resumed(job_id=job.id, at_s=tx.now_s, by_uid=identity.uid))

    return each_job(tx, identity, references, {}, Action.SUSPEND, resume_job, "resume")
