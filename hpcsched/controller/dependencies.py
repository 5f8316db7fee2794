"""What a job may be made to wait for: jobs that exist, no circle, a deadline that can be made.

Asked when a job is submitted and when it is changed. What a dependency comes to later is `hpcsched.sched.eligible`.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcsched.errors import RequestError
from hpcsched.model.job import FINAL, Job
from hpcsched.model.spec import Dependency
from hpcsched.model.units import UNLIMITED_S, format_time_s
from hpcsched.sched.snapshot import LEAST_LIMIT_S
from hpcsched.store.world import World


def check_dependency(world: World, terms: Iterable[Dependency]) -> None:
    """Refuse terms that name a job, an array or a task of one that is not known."""
    for term in terms:
        for job_id in term.job_ids:
            if not world.numbered(job_id):
                raise RequestError(f"cannot depend on job {job_id}: there is no such job (Job dependency problem)")
            if term.task is not None and not _named(world, term, job_id):
                raise RequestError(
                    f"cannot depend on job {job_id}_{term.task}: job {job_id} has no such task (Job dependency problem)"
                )


def dependency_circle(world: World, job: Job, terms: Iterable[Dependency]) -> list[Job]:
    """Return the waiting jobs by which `terms` would make `job` wait for itself, itself last; empty: they would not."""
    came_from: dict[int, Job | None] = {}
    to_see = [(one, None) for one in _waited_for(world, terms)]
    while to_see:
        one, parent = to_see.pop()
        if one.id in came_from or one.state in FINAL:
            continue
        came_from[one.id] = parent
        if one.id == job.id:
            way = [one]
            while (before := came_from[way[-1].id]) is not None:
                way.append(before)
            return way[::-1]
        to_see += [(other, one) for other in _waited_for(world, one.dependency)]
    return []


def check_deadline(deadline_s: float, limit_s: int | None, from_s: float) -> None:
    """Refuse a deadline by which a job that starts at `from_s` at the earliest cannot have ended.

    `limit_s`: the time limit that was asked for. One that was not is cut to what is left until the deadline.
    """
    if limit_s is not None and limit_s >= UNLIMITED_S:
        raise RequestError("cannot keep a deadline for a job of unlimited time: give --time, or leave it out")
    least_s = LEAST_LIMIT_S if limit_s is None else limit_s
    if from_s + least_s > deadline_s:
        left = f"{format_time_s(int(deadline_s - from_s))} is left" if deadline_s > from_s else "it has passed"
        limit = format_time_s(least_s)
        why = (
            f"{left}, and no job gets less than {limit}"
            if limit_s is None
            else f"the job may run for {limit}, and {left}"
        )
        raise RequestError(f"cannot end by the deadline: {why} (Incorrect deadline)")


def _waited_for(world: World, terms: Iterable[Dependency]) -> list[Job]:
    return [job for term in terms for job_id in term.job_ids for job in _named(world, term, job_id)]


def _named(world: World, term: Dependency, job_id: int) -> list[Job]:
    jobs = world.numbered(job_id)
    return jobs if term.task is None else [job for job in jobs if job.array_task_id == term.task]
