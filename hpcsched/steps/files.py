"""Paths of a job's input and output files, from patterns, relative to its directory.

The defaults are Slurm's (sbatch(1)).
"""

from __future__ import annotations

from typing import NamedTuple

from hpcsched.jobscript.patterns import PatternFacts, default_output, expand_job_pattern, expand_task_pattern
from hpcsched.model.job import Job


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
