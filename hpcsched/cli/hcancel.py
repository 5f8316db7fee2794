"""hcancel and scancel in their own process: --interactive asks before each job.

The rest is `hpcsched.commands.cancel`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from hpcsched import client
from hpcsched.cli.output import complain, run_command
from hpcsched.cli.process import finish, own_call
from hpcsched.cli.slurm import run_face
from hpcsched.client import Json
from hpcsched.commands.cancel import HCANCEL, SCANCEL, CancelRequest, end, meant_by
from hpcsched.commands.options import FAILED, Words
from hpcsched.listing.jobs import ENDED_STATES
from hpcsched.listing.text import clean

COMMAND = HCANCEL


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(HCANCEL, work, argv)


def scancel(argv: Sequence[str] | None = None) -> int:
    """Run scancel and return its exit status."""
    return run_face(SCANCEL, lambda words: work(words, slurms=True), argv)


def work(words: Words, *, slurms: bool = False) -> int:
    """Do what the words ask for; `slurms`: as scancel does. Returns the exit status."""
    call = own_call()
    meant = meant_by(words, call.caller, slurms=slurms)
    if words.has("interactive"):
        chosen, status = _asked(meant, slurms=slurms)
        if not chosen:
            return status
        meant = replace(meant, references=tuple(chosen), filters={})
    return finish(end(words, meant, call, slurms=slurms))


def _asked(meant: CancelRequest, *, slurms: bool) -> tuple[list[str], int]:
    """Return the jobs and steps that the user confirmed, and the exit status for ended ones."""
    references = meant.references
    steps = [reference for reference in references if "." in reference]
    of_jobs = [reference for reference in references if "." not in reference]
    wanted = {"nodes" if name == "node" else name: value for name, value in meant.filters.items()}
    chosen, status = [], 0
    if of_jobs or not references:
        for job in client.call("GET", client.query("/v1/jobs", id=",".join(of_jobs), **wanted))["jobs"]:
            if job.get("het_offset"):  # a heterogeneous job is asked for once
                continue
            if job["state"] in ENDED_STATES:
                if job["display_id"] in of_jobs:
                    _report_ended(job, slurms=slurms)
                    status = status if slurms else FAILED
                continue
            chosen += [job["display_id"]] if _is_confirmed("job_id", job["display_id"], job) else []
    for reference in steps:
        jobs = client.call("GET", client.query("/v1/jobs", id=reference.partition(".")[0], **wanted))["jobs"]
        for job in jobs[:1]:
            chosen += [reference] if _is_confirmed("step_id", reference, job) else []
    return chosen, status


def _is_confirmed(what: str, reference: str, job: Json) -> bool:
    print(
        f"Cancel {what}={reference} name={clean(job['name'])} partition={clean(job['partition'])} [y/n]? ",
        end="",
        flush=True,
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _report_ended(job: Json, *, slurms: bool) -> None:
    if slurms:
        why = "Job/step already completing or completed"
        complain("scancel", f"Kill job error on job id {job['display_id']}: {why}")
    else:
        complain(HCANCEL.name, f"cannot cancel job {job['display_id']}: it has already ended ({job['state']})")
