"""hcancel and scancel: end jobs, or send them a signal.

The grammar is scancel's. One difference: an id that does not exist is an error for hcancel, but
scancel ignores it and exits with 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcsched.commands.call import Call, Caller, Json, refuse_other_clusters
from hpcsched.commands.options import (
    ELSEWHERE,
    FAILED,
    HELP,
    VERSION,
    Command,
    Face,
    Option,
    UsageError,
    Words,
    read_words,
    split_list,
    with_usage,
)
from hpcsched.errors import RequestError
from hpcsched.listing.jobs import parse_states
from hpcsched.listing.text import clean
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.units import parse_signal, signal_name

HCANCEL = Command(
    "hcancel",
    ("[OPTIONS] JOB...", "[OPTIONS] --me|--user=LIST|--name=LIST|--state=LIST|--partition=LIST"),
    "Cancel jobs: waiting jobs leave the queue, running jobs are ended (SIGTERM, and SIGKILL after a grace period). "
    "Filters select among the given jobs, or without a job among all your jobs.",
    (
        Option("account", "A", "LIST", "cancel jobs of these accounts"),
        Option("batch", "b", help="send the signal only to the batch script"),
        Option("full", "f", help="send the signal to the batch script, its children and all steps"),
        Option("interactive", "i", help="ask for confirmation for each job"),
        Option("me", help="cancel your own jobs"),
        Option("name", "n", "LIST", "cancel jobs with these names", aliases=("jobname",)),
        Option("nodelist", "w", "HOSTS", "cancel jobs on any of these nodes: n[1-3],m7"),
        Option("partition", "p", "LIST", "cancel jobs in these partitions"),
        Option("qos", "q", "LIST", "cancel jobs with these QOS"),
        Option("quiet", "Q", help="do not report jobs that do not exist or have ended"),
        Option("reservation", "R", "NAME", "cancel jobs in this reservation"),
        Option(
            "signal",
            "s",
            "SIGNAL",
            "send this signal to the job's steps instead of ending the job: USR1, SIGUSR1 or 10",
        ),
        Option("state", "t", "LIST", "cancel jobs in these states: PENDING, RUNNING, SUSPENDED", aliases=("states",)),
        Option("user", "u", "LIST", "cancel jobs of these users"),
        Option("verbose", "v", help="report the cancelled jobs"),
        HELP,
        VERSION,
    ),
    (
        "A JOB is a number, a task of an array (10_3), some of its tasks (10_[1-3,7]), a step (10.0, or 10.batch for the "
        "script), the name of one of your jobs, or 'last'.",
    ),
)

SCANCEL = Face(
    HCANCEL._replace(
        name="scancel", accepted=(*ELSEWHERE, Option("hurry", "H"), Option("ctld"), Option("wckey", "", "KEY"))
    ),
    "scancel: error: Kill job error",
)
ONE_COMPONENT = "Operation not permitted on individual component of heterogeneous job"


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """Jobs and steps to end, by name, and filters that narrow them or select from all jobs."""

    references: tuple[str, ...]
    filters: dict[str, str]
    signum: int | None  # None: end it


async def hcancel(argv: Sequence[str], call: Call) -> int:
    """Run hcancel. Raises HpcschedError, OwnProcessError."""
    words = read_words(HCANCEL, argv)
    call.only_in_own_process(words, "help", "version", "interactive")
    return await end(words, meant_by(words, call.caller, slurms=False), call, slurms=False)


async def scancel(argv: Sequence[str], call: Call) -> int:
    """Run scancel. Raises HpcschedError, OwnProcessError."""
    words = read_words(with_usage(SCANCEL), argv)
    call.only_in_own_process(words, "help", "version", "usage", "interactive")
    await refuse_other_clusters(",".join(words.given.get("clusters", ())), call)
    return await end(words, meant_by(words, call.caller, slurms=True), call, slurms=True)


def meant_by(words: Words, caller: Caller, *, slurms: bool) -> CancelRequest:
    """Return the jobs that the words name. Raises RequestError if there are none."""
    references = [reference for operand in words.operands for reference in split_list(operand)]
    if words.has("batch") and not words.has("signal") and not slurms:
        raise UsageError("cannot take --batch without --signal: a job is always ended as a whole")
    meant = CancelRequest(
        references=tuple(references),
        filters=_filters(words, caller),
        signum=parse_signal(words.last("signal")) if words.has("signal") else None,
    )
    if not meant.references and not meant.filters:
        if slurms:
            raise RequestError("No job identification provided")
        raise UsageError("cannot cancel: no job was named; see hcancel --help")
    return meant


def _filters(words: Words, caller: Caller) -> dict[str, str]:
    named = {
        "user": [*words.listed("user"), *([caller.user] if words.has("me") else [])],
        "name": words.listed("name"),
        "state": parse_states(words.listed("state")),
        "partition": words.listed("partition"),
        "account": words.listed("account"),
        "qos": words.listed("qos"),
        "reservation": words.listed("reservation"),
    }
    if words.has("nodelist"):
        named["node"] = expand_hostlist(",".join(words.given["nodelist"]))
    return {name: ",".join(values) for name, values in named.items() if values}


async def end(words: Words, meant: CancelRequest, call: Call, *, slurms: bool) -> int:
    """End or signal the requested jobs, write the result, and return the exit status."""
    signum = meant.signum
    answer = await call.api.cancel(
        {
            "jobs": list(meant.references),
            "filters": meant.filters,
            "signal": signal_name(signum) if signum is not None else None,
            "batch": words.has("batch"),
            "full": words.has("full"),
        }
    )
    name = "scancel" if slurms else "hcancel"
    if words.has("verbose"):
        named = meant.references if slurms and meant.references else answer["jobs"]
        for job_id in named:
            call.output.err(f"{name}: {_act_text(str(job_id), signum)} {job_id}\n")
        if meant.filters and not named:
            call.output.err(f"{name}: no job matches\n")
    elif meant.filters and not slurms and not words.has("quiet"):
        call.output.out(_done_text(answer["jobs"], signum) + "\n")
    for job_id in [] if slurms or words.has("quiet") else answer.get("without_steps", ()):
        call.output.err(
            f"hcancel: job {job_id} runs no steps, so nothing got the signal; --batch signals the batch script, "
            "--full the batch script and its children as well\n"
        )
    complaints = _slurm_complaints if slurms else _complaints
    texts, failed = complaints(answer["errors"], words)
    for text in texts:
        call.complain(name, text)
    return FAILED if failed else 0


def _act_text(reference: str, signum: int | None) -> str:
    if "." in reference:
        return "Terminating step" if signum is None else f"Signal {signum} to step"
    return "Terminating job" if signum is None else f"Signal {signum} to batch job"


def _done_text(job_ids: Sequence[object], signum: int | None) -> str:
    """Return how many jobs the filters matched, and the first of them."""
    if not job_ids:
        return "no job matches"
    shown = " ".join(map(str, job_ids[:10])) + (" ..." if len(job_ids) > 10 else "")
    done = "cancelled" if signum is None else f"sent {signal_name(signum)} to"
    return f"{done} {len(job_ids)} {'job' if len(job_ids) == 1 else 'jobs'}: {shown}"


def _complaints(refused: Sequence[Json], words: Words) -> tuple[list[str], bool]:
    """Return hcancel's messages about refusals, and whether hcancel fails because of them."""
    shown = [refusal for refusal in refused if not (words.has("quiet") and _is_over(refusal))]
    return [clean(refusal["error"]) for refusal in shown], bool(shown)


def _slurm_complaints(refused: Sequence[Json], words: Words) -> tuple[list[str], bool]:
    """Return scancel's messages about refusals, and whether scancel fails because of them."""
    texts, failed = [], False
    for refusal in refused:
        named = str(refusal.get("job", "0"))
        if named == "0" or not named[:1].isdigit():  # it was not a job's name either
            texts.append(f"Invalid job id {clean(refusal['job'])}")
            failed = True
            continue
        failed = failed or not _is_over(refusal)
        if words.has("verbose") or not _is_over(refusal):
            texts.append(f"Kill job error on job id {refusal.get('job', '')}: {_slurms(refusal)}")
    return texts, failed


def _is_over(refusal: Json) -> bool:
    """Return whether the job did not exist or had ended; other refusals concern permission."""
    return refusal.get("kind") in ("NotFoundError", "RequestError") and ONE_COMPONENT not in refusal["error"]


def _slurms(refusal: Json) -> str:
    """Return Slurm's text for the reason why a job is not cancelled."""
    match refusal.get("kind"):
        case "NotFoundError":
            return "Invalid job id specified"
        case "PermissionDeniedError":
            return "Access/permission denied"
        case _ if ONE_COMPONENT in refusal["error"]:
            return ONE_COMPONENT
        case _:
            return "Job/step already completing or completed"
