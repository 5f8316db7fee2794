"""A request id that comes again: the jobs that it made, if the same is asked for, else a refusal.

Whoever got no answer asks again with the same id. What is asked for is the same then but for where and when the command ran:
the environment that it saw, the path of the script, and dates that it worked out (``--begin=now+1hour``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from hpcsched.errors import RequestError
from hpcsched.model.spec import JobSpec

_OF_THE_COMMAND = frozenset(
    ("env", "script_path", "submit_line", "submit_dir", "submit_host", "begin_at_s", "deadline_at_s")
)
_SETTLED = frozenset(("account", "qos"))  # a job that names none has been given some
SHOWN = 3  # of what differs
_COMPARED = tuple(field.name for field in fields(JobSpec) if field.name not in _OF_THE_COMMAND)


def jobs_again(request_id: str, made: Mapping[int, JobSpec], specs: Sequence[JobSpec]) -> list[dict[str, int]]:
    """Return the ids and numbers of tasks of the jobs that this request id has made, with the specs that they have.

    Raises RequestError if `specs`, what it is to make now, are others.
    """
    ids = ", ".join(map(str, made))
    if len(made) != len(specs):
        raise _refusal(request_id, f"job {ids}, and {len(specs)} are asked for now")
    for (job_id, before), now in zip(made.items(), specs, strict=True):
        if differing := [name for name in _COMPARED if _differs(name, before, now)]:
            raise _refusal(request_id, f"job {job_id}, which differs in its {', '.join(differing[:SHOWN])}")
    return [{"job_id": job_id, "tasks": task_count(spec)} for job_id, spec in made.items()]


def task_count(spec: JobSpec) -> int:
    """Return how many tasks a job of `spec` has; 1 if it is no array."""
    return 1 if spec.array is None else len(spec.array.indices)


def _differs(name: str, before: JobSpec, now: JobSpec) -> bool:
    wanted = getattr(now, name)
    return wanted != getattr(before, name) and not (name in _SETTLED and not wanted)


def _refusal(request_id: str, what: str) -> RequestError:
    return RequestError(
        f"cannot submit under request id {request_id!r}: it has already made {what}; for another job give another id, or none"
    )
