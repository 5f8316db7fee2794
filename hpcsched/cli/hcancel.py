"""hcancel: ends jobs, or sends them a signal.

The grammar is scancel's. One thing differs, and only `Manners` says it: an id that there is not is an error here, while
Slurm's command says nothing of it and exits with 0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from hpcsched import client
from hpcsched.cli.errors import FAILED, complain, run_command
from hpcsched.cli.options import HELP, VERSION, Command, Option, UsageError, Words, split_list
from hpcsched.cli.output import clean
from hpcsched.cli.states import ENDED_STATES, parse_states
from hpcsched.errors import RequestError
from hpcsched.model.units import parse_signal, signal_name


class Manners(NamedTuple):
    """What the native command and Slurm's do differently."""

    unknown_fails: bool  # an unknown or ended job is reported, and the exit status is 1


NATIVE = Manners(unknown_fails=True)

COMMAND = Command(
    "hcancel",
    ("[OPTIONS] JOB...", "[OPTIONS] --me|--user=LIST|--name=LIST|--state=LIST|--partition=LIST"),
    "Cancel jobs: those that wait leave the queue, those that run are ended (SIGTERM, after a grace time SIGKILL). "
    "Filters narrow the named jobs down; without a job they mean all your jobs that match.",
    (
        Option("batch", "b", help="send the signal to the batch script alone"),
        Option("full", "f", help="send the signal to the batch script and all steps"),
        Option("interactive", "i", help="ask before each job"),
        Option("me", help="cancel your own jobs"),
        Option("name", "n", "LIST", "cancel jobs of these names", aliases=("jobname",)),
        Option("partition", "p", "LIST", "cancel jobs in these partitions"),
        Option("quiet", "Q", help="say nothing of jobs that are not there or have ended"),
        Option("signal", "s", "SIGNAL", "send this signal instead of ending the job: USR1, SIGUSR1 or 10"),
        Option("state", "t", "LIST", "cancel jobs in these states: PENDING, RUNNING, SUSPENDED", aliases=("states",)),
        Option("user", "u", "LIST", "cancel jobs of these users"),
        Option("verbose", "v", help="say which jobs are cancelled"),
        HELP,
        VERSION,
    ),
    (
        "A JOB is a number, a task of an array (10_3), some of its tasks (10_[1-3,7]), the name of one of your jobs, or "
        "'last'.",
    ),
)


def main(argv: Sequence[str] | None = None, manners: Manners = NATIVE) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, lambda words: _work(words, manners), argv)


def _work(words: Words, manners: Manners) -> int:
    references = [reference for operand in words.operands for reference in split_list(operand)]
    _check(references, words)
    filters = _filters(words)
    if not references and not filters:
        raise UsageError("cannot cancel: no job was named; see hcancel --help")
    signum = parse_signal(words.last("signal")) if words.has("signal") else None
    if words.has("interactive"):
        references, filters = _asked(references, filters), {}
        if not references:
            return 0
    body = {
        "jobs": references,
        "filters": filters,
        "signal": signal_name(signum) if signum is not None else None,
        "batch": words.has("batch"),
        "full": words.has("full"),
    }
    answer = client.call("POST", "/v1/cancel", body)
    if words.has("verbose"):
        for job_id in answer["jobs"]:
            what = "Terminating job" if signum is None else f"Signal {signum} to batch job"
            print(f"{COMMAND.name}: {what} {job_id}", file=sys.stderr)
    return _report(answer["errors"], words, manners)


def _check(references: Sequence[str], words: Words) -> None:
    for reference in references:
        number, dot, step = reference.partition(".")
        if dot and number.replace("_", "").isdigit():
            raise RequestError(f"cannot cancel step {step[:20]} alone: only whole jobs can be; write hcancel {number}")
    if words.has("batch") and not words.has("signal"):
        raise UsageError("cannot take --batch without --signal: a job is always ended as a whole")


def _filters(words: Words) -> dict[str, str]:
    users = [*words.listed("user"), *([client.my_name()] if words.has("me") else [])]
    named = {
        "user": users,
        "name": words.listed("name"),
        "state": parse_states(words.listed("state")),
        "partition": words.listed("partition"),
    }
    return {name: ",".join(values) for name, values in named.items() if values}


def _asked(references: Sequence[str], filters: dict[str, str]) -> list[str]:
    """Return those of the jobs meant that a person said yes to."""
    jobs: list[dict[str, Any]] = client.call("GET", client.query("/v1/jobs", id=",".join(references), **filters))[
        "jobs"
    ]
    chosen = []
    for job in jobs:
        if job["state"] in ENDED_STATES:
            continue
        question = (
            f"Cancel job_id={job['display_id']} name={clean(job['name'])} partition={clean(job['partition'])} [y/n]? "
        )
        print(question, end="", flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            chosen.append(job["display_id"])
    return chosen


def _report(refused: Sequence[dict[str, str]], words: Words, manners: Manners) -> int:
    """Say what was refused and why; return the exit status."""
    tolerated = not manners.unknown_fails or words.has("quiet")
    failed = False
    for refusal in refused:
        of_job = refusal.get("kind") in ("NotFoundError", "RequestError")  # against: not allowed to
        if tolerated and of_job:
            continue
        complain(COMMAND.name, clean(refusal["error"]))
        failed = True
    return FAILED if failed else 0
