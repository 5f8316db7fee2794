"""File-name patterns: ``%j`` and its like in the names of a job's output and input files.

The controller fills what it knows of the job (`expand_job_pattern`); ``%t``, ``%n`` and ``%N`` differ from task to task
and are left, with ``%%``, to the node, which fills them as `expand_task_pattern` does. The paths of a job's files follow
(`job_files`), relative to its directory. Reads no files.

Rules: ``%5j`` pads a number with zeros, up to ten places; a backslash anywhere takes every ``%`` as it is; an unknown
letter stays as it is; what is filled in adds no directory (``/`` becomes ``_``) and no control character, and an empty
value, or dots alone, does not lead to a parent directory. Source: sbatch(1), "FILENAME PATTERN"; slurmstepd's behaviour.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from hpcsched.model.job import Job
from hpcsched.model.units import whole_number

MAX_WIDTH = 10
NO_TASK_ID = 4_294_967_294  # what Slurm fills in for %a outside of an array
MAX_PATH = 4_096

_PATTERN = re.compile(r"%([0-9]{0,6})(.)", re.DOTALL)
_UNSAFE = re.compile(r"[/\x00-\x1f\x7f]")
_ON_THE_NODE = "tnN"


class PatternFacts(NamedTuple):
    """What is filled into the names of one job's files, or of a step's (`step` is its number)."""

    job_id: int
    name: str
    user: str
    array_job_id: int | None = None
    array_task_id: int | None = None
    step: int | None = None


def default_output(facts: PatternFacts) -> str:
    """Return the pattern of a job that named no output file, as in Slurm."""
    return "slurm-%j.out" if facts.array_job_id is None else "slurm-%A_%a.out"


def expand_job_pattern(pattern: str, facts: PatternFacts) -> str:
    """Return `pattern` with all but ``%t %n %N`` filled in.

    A ``%`` is written as ``%%``.
    """
    if "\\" in pattern:
        return pattern.replace("\\", "").replace("%", "%%")
    if "%" not in pattern:  # as most names, and there are three for each job of a list
        return pattern
    array_job = facts.array_job_id if facts.array_job_id is not None else facts.job_id
    task = facts.array_task_id if facts.array_task_id is not None else NO_TASK_ID
    step = "" if facts.step is None else f".{facts.step}"
    values: dict[str, int | str] = {
        "j": facts.job_id,
        "A": array_job,
        "a": task,
        "J": f"{facts.job_id}{step}",
        "s": "batch" if facts.step is None else facts.step,
        "u": facts.user,
        "x": facts.name,
    }
    return _fill(pattern, values, keep=True)


def expand_task_pattern(pattern: str, *, task: int, node_rank: int, node: str) -> str:
    """Return a pattern with the task's number, and its node's rank and name.

    `expand_job_pattern` has filled in the rest.
    """
    return _fill(pattern, {"t": task, "n": node_rank, "N": node.partition(".")[0]}, keep=False)


def _fill(pattern: str, values: Mapping[str, int | str], *, keep: bool) -> str:
    """Return `pattern` with `values` filled in.

    With `keep` another pass follows: ``%%`` and its letters remain.
    """

    def value_of(match: re.Match[str]) -> str:
        width, letter = match.groups()
        if letter == "%" and not width:
            return "%%" if keep else "%"
        if letter not in values:
            return _left(match[0], letter, keep)
        value = values[letter]
        if isinstance(value, int):
            return str(value).zfill(min(whole_number(width or "0"), MAX_WIDTH))
        text = safe_name(value)
        return text.replace("%", "%%") if keep else text

    return _PATTERN.sub(value_of, pattern)


def _left(text: str, letter: str, keep: bool) -> str:
    """Return a pattern unchanged for the next pass, or as text that survives it."""
    if not keep or letter in _ON_THE_NODE:
        return text
    return "%" + text


def safe_name(text: str) -> str:
    """Return `text` as a safe part of a file name.

    It has no directory, control character, ``.`` or ``..``.
    """
    cleaned = _UNSAFE.sub("_", text)[:255]
    return cleaned.replace(".", "_") if cleaned.strip(".") == "" else cleaned


class JobFiles(NamedTuple):
    """Absolute paths; `stderr` equals `stdout` if the user named none, `stdin` is "" for none."""

    stdout: str
    stderr: str
    stdin: str


def pattern_facts(job: Job, step: int | None = None) -> PatternFacts:
    """Return the values for the file name patterns of the job's batch step or another step."""
    return PatternFacts(
        job_id=job.id,
        name=job.spec.name,
        user=job.user,
        array_job_id=job.array_job_id,
        array_task_id=job.array_task_id,
        step=step,
    )


def job_file_patterns(job: Job) -> JobFiles:
    """Return the batch step's file patterns; the node expands ``%t %n %N %%`` in them."""
    facts = pattern_facts(job)

    def absolute(pattern: str) -> str:
        path = expand_job_pattern(pattern, facts)
        return path if path.startswith("/") else f"{job.spec.work_dir.rstrip('/')}/{path}"

    stdout = absolute(job.spec.stdout or default_output(facts))
    stderr = absolute(job.spec.stderr) if job.spec.stderr else stdout
    return JobFiles(stdout=stdout, stderr=stderr, stdin=absolute(job.spec.stdin) if job.spec.stdin else "")


def job_files(job: Job) -> JobFiles:
    """Return the files of the job's batch step.

    Before the job has a node, the node name in them is empty.
    """
    node = job.shares[0].node if job.shares else ""
    patterns = job_file_patterns(job)
    if "%" not in "".join(patterns):
        return patterns

    def filled(pattern: str) -> str:
        return expand_task_pattern(pattern, task=0, node_rank=0, node=node)

    return JobFiles(stdout=filled(patterns.stdout), stderr=filled(patterns.stderr), stdin=filled(patterns.stdin))
