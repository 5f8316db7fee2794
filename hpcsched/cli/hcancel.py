"""hcancel, and scancel: ends jobs, or sends them a signal.

The grammar is scancel's. One thing differs, and only `Manners` says it: an id that there is not is an error here, while
Slurm's command says nothing of it and exits with 0.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Callable, Sequence

from hpcsched import client
from hpcsched.cli.errors import FAILED, complain, run_command
from hpcsched.cli.output import clean, outlive_its_end
from hpcsched.client import Json
from hpcsched.commands.options import HELP, VERSION, Command, Option, UsageError, Words, split_list
from hpcsched.errors import RequestError
from hpcsched.listing.states import ENDED_STATES, parse_states
from hpcsched.model.units import parse_signal, signal_name

COMMAND = Command(
    "hcancel",
    ("[OPTIONS] JOB...", "[OPTIONS] --me|--user=LIST|--name=LIST|--state=LIST|--partition=LIST"),
    "Cancel jobs: those that wait leave the queue, those that run are ended (SIGTERM, after a grace time SIGKILL). "
    "Filters narrow the named jobs down; without a job they mean all your jobs that match.",
    (
        Option("account", "A", "LIST", "cancel jobs of these accounts"),
        Option("batch", "b", help="send the signal to the batch script alone"),
        Option("full", "f", help="send the signal to the batch script, its children and all steps"),
        Option("interactive", "i", help="ask before each job"),
        Option("me", help="cancel your own jobs"),
        Option("name", "n", "LIST", "cancel jobs of these names", aliases=("jobname",)),
        Option("nodelist", "w", "HOSTS", "cancel jobs that have some of these nodes: n[1-3],m7"),
        Option("partition", "p", "LIST", "cancel jobs in these partitions"),
        Option("qos", "q", "LIST", "cancel jobs of these qualities of service"),
        Option("quiet", "Q", help="say nothing of jobs that are not there or have ended"),
        Option("reservation", "R", "NAME", "cancel jobs of this reservation"),
        Option(
            "signal",
            "s",
            "SIGNAL",
            "send this signal to the job's steps instead of ending the job: USR1, SIGUSR1 or 10",
        ),
        Option("state", "t", "LIST", "cancel jobs in these states: PENDING, RUNNING, SUSPENDED", aliases=("states",)),
        Option("user", "u", "LIST", "cancel jobs of these users"),
        Option("verbose", "v", help="say which jobs are cancelled"),
        HELP,
        VERSION,
    ),
    (
        "A JOB is a number, a task of an array (10_3), some of its tasks (10_[1-3,7]), a step (10.0, or 10.batch for the "
        "script), the name of one of your jobs, or 'last'.",
    ),
)

ONE_COMPONENT = "Operation not permitted on individual component of heterogeneous job"


class Manners(namedtuple("Manners", "command run slurms", defaults=(False,))):
    """What the native command and Slurm's do differently."""

    __slots__ = ()

    command: Command
    run: Callable[[Callable[[Words], int], Sequence[str] | None], int]
    slurms: bool  # an unknown or ended job is no error, and the words are Slurm's


def _run(work: Callable[[Words], int], argv: Sequence[str] | None) -> int:
    return run_command(COMMAND, work, argv)


NATIVE = Manners(COMMAND, _run)


def main(argv: Sequence[str] | None = None, manners: Manners = NATIVE) -> int:
    """Run the command and return its exit status."""
    return manners.run(lambda words: _work(words, manners), argv)


def _work(words: Words, manners: Manners) -> int:
    references = [reference for operand in words.operands for reference in split_list(operand)]
    _check(words, manners)
    filters = _filters(words)
    if not references and not filters:
        if manners.slurms:
            raise RequestError("No job identification provided")
        raise UsageError("cannot cancel: no job was named; see hcancel --help")
    signum = parse_signal(words.last("signal")) if words.has("signal") else None
    if words.has("interactive"):
        references, status = _asked(references, filters, manners)
        filters = {}
        if not references:
            return status
    body = {
        "jobs": references,
        "filters": filters,
        "signal": signal_name(signum) if signum is not None else None,
        "batch": words.has("batch"),
        "full": words.has("full"),
    }
    if signum is None:
        outlive_its_end()
    answer = client.call("POST", "/v1/cancel", body)
    if words.has("verbose"):
        named = references if manners.slurms and references else answer["jobs"]
        for job_id in named:
            what = "Terminating job" if signum is None else f"Signal {signum} to batch job"
            if "." in str(job_id):
                what = "Terminating step" if signum is None else f"Signal {signum} to step"
            print(f"{manners.command.name}: {what} {job_id}", file=sys.stderr)
        if filters and not named:
            print(f"{manners.command.name}: no job matches", file=sys.stderr)
    elif filters and not manners.slurms and not words.has("quiet"):
        print(_done_text(answer["jobs"], signum))
    for job_id in [] if manners.slurms or words.has("quiet") else answer.get("without_steps", ()):
        print(
            f"hcancel: job {job_id} runs no steps, so nothing got the signal; --batch signals the batch script, "
            "--full the batch script and its children as well",
            file=sys.stderr,
        )
    return _report(answer["errors"], words, manners)


def _done_text(job_ids: Sequence[object], signum: int | None) -> str:
    """Return how many jobs the filters meant, and the first of them."""
    if not job_ids:
        return "no job matches"
    shown = " ".join(map(str, job_ids[:10])) + (" ..." if len(job_ids) > 10 else "")
    done = "cancelled" if signum is None else f"sent {signal_name(signum)} to"
    return f"{done} {len(job_ids)} {'job' if len(job_ids) == 1 else 'jobs'}: {shown}"


def _check(words: Words, manners: Manners) -> None:
    if words.has("batch") and not words.has("signal") and not manners.slurms:
        raise UsageError("cannot take --batch without --signal: a job is always ended as a whole")


def _filters(words: Words) -> dict[str, str]:
    users = [*words.listed("user"), *([client.my_name()] if words.has("me") else [])]
    named = {
        "user": users,
        "name": words.listed("name"),
        "state": parse_states(words.listed("state")),
        "partition": words.listed("partition"),
        "account": words.listed("account"),
        "qos": words.listed("qos"),
        "reservation": words.listed("reservation"),
    }
    if words.has("nodelist"):
        from hpcsched.model.hostlist import expand_hostlist  # brings dataclasses along: only for those who need it

        named["node"] = expand_hostlist(",".join(words.given["nodelist"]))
    return {name: ",".join(values) for name, values in named.items() if values}


def _asked(references: Sequence[str], filters: dict[str, str], manners: Manners) -> tuple[list[str], int]:
    """Return those of the jobs and steps meant that a person said yes to, and the exit status of those already over."""
    steps = [reference for reference in references if "." in reference]
    of_jobs = [reference for reference in references if "." not in reference]
    wanted = {"nodes" if name == "node" else name: value for name, value in filters.items()}
    chosen, status = [], 0
    if of_jobs or not references:
        for job in client.call("GET", client.query("/v1/jobs", id=",".join(of_jobs), **wanted))["jobs"]:
            if job.get("het_offset"):  # a heterogeneous job is asked for once
                continue
            if job["state"] in ENDED_STATES:
                if job["display_id"] in of_jobs:
                    _say_over(job, manners)
                    status = status if manners.slurms else FAILED
                continue
            chosen += [job["display_id"]] if _said_yes("job_id", job["display_id"], job) else []
    for reference in steps:
        jobs = client.call("GET", client.query("/v1/jobs", id=reference.partition(".")[0], **wanted))["jobs"]
        for job in jobs[:1]:
            chosen += [reference] if _said_yes("step_id", reference, job) else []
    return chosen, status


def _said_yes(what: str, reference: str, job: Json) -> bool:
    print(
        f"Cancel {what}={reference} name={clean(job['name'])} partition={clean(job['partition'])} [y/n]? ",
        end="",
        flush=True,
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _say_over(job: Json, manners: Manners) -> None:
    if manners.slurms:
        why = "Job/step already completing or completed"
        complain(manners.command.name, f"Kill job error on job id {job['display_id']}: {why}")
    else:
        complain(COMMAND.name, f"cannot cancel job {job['display_id']}: it has already ended ({job['state']})")


def _report(refused: Sequence[dict[str, str]], words: Words, manners: Manners) -> int:
    """Say what was refused and why; return the exit status."""
    failed = False
    for refusal in refused:
        named = str(refusal.get("job", "0"))
        if manners.slurms and (named == "0" or not named[:1].isdigit()):  # it was no job's name either
            complain(manners.command.name, f"Invalid job id {clean(refusal['job'])}")
            failed = True
            continue
        of_job = refusal.get("kind") in ("NotFoundError", "RequestError")  # against: not allowed to
        of_job = of_job and ONE_COMPONENT not in refusal["error"]
        failed = failed or not (of_job and (manners.slurms or words.has("quiet")))
        text = clean(refusal["error"])
        if not manners.slurms:
            if not (of_job and words.has("quiet")):
                complain(COMMAND.name, text)
        elif words.has("verbose") or not of_job:
            complain(manners.command.name, f"Kill job error on job id {refusal.get('job', '')}: {_slurms(refusal)}")
    return FAILED if failed else 0


def _slurms(refusal: dict[str, str]) -> str:
    """Return Slurm's words for why a job is not cancelled."""
    match refusal.get("kind"):
        case "NotFoundError":
            return "Invalid job id specified"
        case "PermissionDeniedError":
            return "Access/permission denied"
        case _ if ONE_COMPONENT in refusal["error"]:
            return ONE_COMPONENT
        case _:
            return "Job/step already completing or completed"
