"""Where a job's input and output files are: patterns filled in, relative to its directory. Slurm's defaults (sbatch(1))."""

from __future__ import annotations

from dataclasses import dataclass

from hpcsched.jobscript.patterns import expand_job_pattern
from hpcsched.model.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFiles:
    """Absolute paths; `stderr` is stdout's where the user named none, `stdin` is "" for none."""

    stdout: str
    stderr: str
    stdin: str


def job_files(job: Job) -> JobFiles:
    """Return the files of the job's batch step."""
    default = "slurm-%j.out" if job.array_job_id is None else "slurm-%A_%a.out"
    stdout = _absolute(job.spec.stdout or default, job)
    stderr = _absolute(job.spec.stderr, job) if job.spec.stderr else stdout
    return JobFiles(stdout=stdout, stderr=stderr, stdin=_absolute(job.spec.stdin, job) if job.spec.stdin else "")


def _absolute(pattern: str, job: Job) -> str:
    path = expand_job_pattern(pattern, job)
    return path if path.startswith("/") else f"{job.spec.work_dir.rstrip('/')}/{path}"
