"""Slurm's words for why something was refused, of our own: clients look for them on a command's standard error.

Ours follow on a line of their own: they have the numbers, and what to do.

Source: slurm_errno.c and the commands of Slurm 23.02.
"""

from __future__ import annotations

from typing import Sequence, Tuple

# What our own texts have, in lower case, and Slurm's name for it.
_OF_JOBS = (
    ("invalid partition name", "Invalid partition name specified"),
    ("required partition not available", "Required partition not available (inactive or drain)"),
    ("invalid account", "Invalid account or account/partition combination specified"),
    ("invalid qos", "Invalid qos specification"),
    ("invalid license", "Invalid license specification"),
    ("invalid node name", "Invalid node name specified"),
    ("job dependency problem", "Job dependency problem"),
    (
        "job violates accounting/qos policy",
        "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
    ),
    ("reservation", "Requested reservation is invalid"),
    ("max_array_size", "Invalid job array specification"),
    ("max_jobs", "Slurm temporarily unable to accept job, sleeping and retrying"),
    ("time limit", "Requested time limit is invalid (missing or exceeds some limit)"),
    ("permission", "Access/permission denied"),
)
_OTHER_JOB = "Requested node configuration is not available"
_OF_STEPS = (
    ("gpu", "Invalid generic resource (gres) specification"),
    (" mib ", "Memory required by task is not available"),
)
_OTHER_STEP = "More processors requested than permitted"


def of_job(text: str) -> str:
    """Return Slurm's words for why a job was refused."""
    return _found(text, _OF_JOBS, _OTHER_JOB)


def of_allocation(text: str) -> str:
    """Return what salloc says when a job was refused; "": nothing more."""
    return "Job submit/allocate failed: " + of_job(text) if text.startswith("cannot ") else ""


def of_step(job_id: int, text: str) -> str:
    """Return what srun says when a step of job `job_id` was refused; 0: when the job of its own was. "": nothing more."""
    if not text.startswith("cannot "):  # it was taken, and ended before it ran
        return ""
    if not job_id:
        return "Unable to allocate resources: " + of_job(text)
    if "Invalid job id" in text or "does not run on this node" in text:
        return "Unable to confirm allocation for job %d: Invalid job id specified" % job_id
    if not text.startswith("cannot give"):
        return ""
    return "Unable to create step for job %d: %s" % (job_id, _found(text, _OF_STEPS, _OTHER_STEP))


def _found(text: str, phrases: Sequence[Tuple[str, str]], otherwise: str) -> str:
    lowered = text.lower()
    return next((slurms for ours, slurms in phrases if ours in lowered), otherwise)
