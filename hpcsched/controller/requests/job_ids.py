"""Resolve job references: `12`, `10_3`, `10_[1-3,7]`, `10` (an array), `last`, a name.

`last` is the job that the user submitted last. A component of a heterogeneous job is `12+1`, or its own number, 13.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

from hpcnode.wire.gate import MAX_DIGITS
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.listing.jobs import SPECIAL_EXIT
from hpcsched.model.ids import JobId
from hpcsched.model.job import FINAL, MAX_COMPONENTS, Hold, Job, JobState, component, components_of
from hpcsched.model.units import whole_number
from hpcsched.state.cluster import ClusterState

_REFERENCE = re.compile(r"([0-9]+)(?:_(?:([0-9]+)|\[([0-9,\-]+)\]))?(?:\+([0-9]+))?\Z")
MAX_TASKS = 100_000  # that the references of a request name together
MAX_REFERENCES = 10_000  # of one request
MAX_REFERENCE_CHARS = 1 << 20  # of all references of a request
MAX_FILTER_CHARS = 4096
# Names and lists of array tasks among them: each is looked for among all jobs, or all tasks.
MAX_JOB_NAMES = 100
FILTERS = frozenset({"user", "name", "state", "partition", "account", "qos", "reservation", "node"})


def find_jobs(cluster: ClusterState, reference: str, uid: int) -> list[Job]:
    """Return the jobs that `reference` names for user `uid`, at least one.

    Raises: NotFoundError (with the text that Slurm's clients look for), RequestError.
    """
    match = _REFERENCE.match(reference)
    if match is None:
        return _by_name(cluster, reference, uid)
    job_id, task, tasks, component = match.groups()
    if len(job_id) > MAX_DIGITS:
        raise NotFoundError(f"Invalid job id specified: {job_id[:40]}...")
    number = whole_number(job_id, "a job id")
    if task is not None:
        found = _task_of(cluster, number, whole_number(task, "an array task"))
    else:
        found = cluster.numbered(number)
    if component not in (None, "0"):
        at = whole_number(component, "a component")
        found = [job for job in found if at <= len(job.spec.components)]
    elif not found and task is None and tasks is None:
        found = _with_component(cluster, number)
    if tasks is not None:
        found = _in_ranges([job for job in found if job.array_job_id == number], _ranges(tasks))
    if not found:
        raise NotFoundError(f"Invalid job id specified: {reference}")
    return found


def _with_component(cluster: ClusterState, number: int) -> list[Job]:
    """Return the heterogeneous job that has a component with that number."""
    before = (cluster.jobs.get(JobId(number - at)) for at in range(1, MAX_COMPONENTS))
    return [job for job in before if job is not None and number <= job.id + len(job.spec.components)]


def listed_of(job: Job, reference: str) -> list[Job]:
    """Return what a list shows of `job` for `reference`.

    For a heterogeneous job this is its components, or the referenced one.
    """
    at = component_in(job, reference)
    return components_of(job) if at is None else [component(job, at)]


def component_in(job: Job, reference: str) -> int | None:
    """Return the number of the component that `reference` names in a heterogeneous job.

    None if it names the whole job.
    """
    if not job.spec.components:
        return None
    number, plus, component = reference.partition("+")
    if plus:
        return whole_number(component, "a component")
    return at if number.isdigit() and (at := whole_number(number, "a job id") - job.id) > 0 else None


def _by_name(cluster: ClusterState, name: str, uid: int) -> list[Job]:
    """Return the user's job of that name, or all tasks if it is an array.

    Jobs that have not ended take precedence over ended ones.
    """
    mine = [job for job in cluster.jobs.values() if job.uid == uid]
    if name == "last":
        if not mine:
            raise NotFoundError("Invalid job id specified: you have no recent job")
        last = max(map(_submission, mine))
        return [job for job in mine if _submission(job) == last]
    named = [job for job in mine if job.spec.name == name]
    if not named:
        raise NotFoundError(f"Invalid job id specified: {name}")
    live = {_submission(job) for job in named if job.state not in FINAL} or {_submission(job) for job in named}
    if len(live) > 1:
        ids = " ".join(map(str, sorted(live)[:10]))
        raise RequestError(f"cannot tell which job {name!r} means: you have {len(live)} of that name: {ids}")
    return [job for job in named if _submission(job) in live]


def _submission(job: Job) -> int:
    """Return the number that `hsub` printed for the job."""
    return job.array_job_id or job.id


def _task_of(cluster: ClusterState, number: int, task: int) -> list[Job]:
    """Return the task of the array, without a look at the others; [] if it is unknown."""
    known = next((cluster.jobs[job_id] for job_id in cluster.arrays.get(JobId(number), ())), None)
    if known is None or known.spec.array is None:
        return []
    job = cluster.jobs.get(JobId(number + bisect_left(known.spec.array.indices, task)))
    return [job] if job is not None and (job.array_job_id, job.array_task_id) == (number, task) else []


def _ranges(text: str) -> list[tuple[int, int]]:
    """Return the ranges of `1-3,7`, ascending; they may overlap."""
    ranges = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise RequestError(f"cannot read array tasks {text[:40]!r}: write them as 1-3,7")
        ranges.append((whole_number(first, "an array task"), whole_number(last or first, "an array task")))
    return sorted(ranges)


def _in_ranges(jobs: list[Job], ranges: list[tuple[int, int]]) -> list[Job]:
    """Return the tasks of an array that are in one of the ascending ranges."""
    jobs = sorted(jobs, key=_task_number)
    found: list[Job] = []
    begin = 0
    for low, high in ranges:
        begin = max(begin, bisect_left(jobs, low, key=_task_number))
        end = max(begin, bisect_right(jobs, high, key=_task_number))
        found += jobs[begin:end]
        begin = end
    return found


def _task_number(job: Job) -> int:
    return -1 if job.array_task_id is None else job.array_task_id


def is_special(job: Job) -> bool:
    """Return whether the job waits in SPECIAL_EXIT (scontrol requeuehold State=SpecialExit)."""
    return job.state is JobState.PENDING and job.hold is Hold.SPECIAL


def check_references(references: Sequence[str], filters: Mapping[str, str]) -> None:
    """Raise RequestError if there are too many references, or an unknown filter."""
    if len(references) > MAX_REFERENCES:
        raise RequestError(
            f"cannot take {len(references)} jobs at once: the most is {MAX_REFERENCES}; an array counts as one"
        )
    if sum(map(len, references)) > MAX_REFERENCE_CHARS:
        raise RequestError(f"cannot take the names of these jobs: they have more than {MAX_REFERENCE_CHARS} characters")
    if sum(map(len, filters.values())) > MAX_FILTER_CHARS:
        raise RequestError(f"cannot filter jobs: the filters have more than {MAX_FILTER_CHARS} characters")
    names = sum("[" in reference or _REFERENCE.match(reference) is None for reference in references)
    if names > MAX_JOB_NAMES:
        raise RequestError(
            f"cannot find {names} jobs by name or list of tasks at once: the most is {MAX_JOB_NAMES}; give their ids"
        )
    if unknown := filters.keys() - FILTERS:
        shown = ", ".join(sorted(unknown))
        raise RequestError(f"cannot filter by {shown[:200]}: can filter by {', '.join(sorted(FILTERS))}")


def matches(job: Job, filters: Mapping[str, str]) -> bool:
    """Return whether the job matches the filters, which have comma-separated values."""
    values = {
        "user": job.user,
        "name": job.spec.name,
        "state": f"{job.state.value},{SPECIAL_EXIT}" if is_special(job) else job.state.value,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos or "normal",
        "reservation": job.reservation,
        "node": ",".join(share.node for share in job.shares),
    }
    return all(not set(wanted.split(",")).isdisjoint(values[key].split(",")) for key, wanted in filters.items())
