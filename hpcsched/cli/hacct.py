"""hacct: jobs and their steps as the history has them: how they ended, how long they took, what they used.

The grammar is sacct's. Columns are as wide as they need to be unless a width is asked for (``State%20``, ``-20`` to the
left); --parsable2 is for programs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from hpcsched import client
from hpcsched.cli.acctfields import Column, Row, columns_of, field_names, job_rows
from hpcsched.cli.errors import run_command
from hpcsched.cli.options import HELP, VERSION, Command, Option, UsageError, Words
from hpcsched.cli.output import clean, columns, fitted, print_json
from hpcsched.cli.states import parse_states
from hpcsched.model.units import parse_when

DEFAULT_FIELDS = "JobID,JobName,Partition,Account,AllocCPUS,State,ExitCode"
DAY_S = 86_400

COMMAND = Command(
    "hacct",
    ("[OPTIONS]",),
    "Show jobs and their steps from the history: those that are named with --jobs, else yours of the last day.",
    (
        Option("allocations", "X", help="show jobs alone, not their steps"),
        Option("allusers", "a", help="show everybody's jobs"),
        Option("delimiter", "", "TEXT", "put this between columns instead of |, with --parsable or --parsable2"),
        Option("endtime", "E", "TIME", "show jobs that were submitted before: now, 16:00, 2027-01-20T12:34"),
        Option("format", "o", "LIST", "show these columns, each with a width if wanted: JobID,State%20,NodeList"),
        Option("helpformat", "e", help="list the columns"),
        Option("jobs", "j", "LIST", "show these jobs: 12, 10_3, 10_[1-3], 'last'"),
        Option("json", help="print jobs and steps as JSON, version 1"),
        Option("name", "", "LIST", "show jobs of these names"),
        Option("noheader", "n", help="print no line of headers"),
        Option("parsable", "p", help="put | behind each column", aliases=("parseable",)),
        Option("parsable2", "P", help="put | between the columns", aliases=("parseable2",)),
        Option(
            "starttime", "S", "TIME", "show jobs that had not ended by then: now-2days, 2027-01-20; default: now-1day"
        ),
        Option("state", "s", "LIST", "show jobs in these states: COMPLETED,FAILED or CD,F"),
        Option("user", "u", "LIST", "show jobs of these users", aliases=("uid",)),
        HELP,
        VERSION,
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, _work, argv)


def _work(words: Words) -> int:
    if words.operands:
        raise UsageError(f"cannot understand {words.operands[0][:60]!r}: to see one job write -j JOB")
    if words.has("helpformat"):
        sys.stdout.write("\n".join(field_names()) + "\n")
        return 0
    shown = columns_of(",".join(words.given.get("format", [DEFAULT_FIELDS])))
    answer = _ask(words, time.time())
    if words.has("json"):
        print_json(answer)
        return 0
    rows = [row for job in answer["jobs"] for row in job_rows(job, steps=not words.has("allocations"))]
    header = not words.has("noheader")
    if words.has("parsable") or words.has("parsable2"):
        sys.stdout.write(_parsable(shown, rows, words, header))
    else:
        sys.stdout.write(_table(shown, rows, header))
    return 0


def _ask(words: Words, now_s: float) -> dict[str, Any]:
    """Return the API's answer: the jobs that the words ask for, in the order of their ids."""
    references = words.listed("jobs")
    wanted = [_known(reference) for reference in references]
    named = bool(references) or words.has("allusers") or words.has("user")
    since_s = None if references else now_s - DAY_S
    if words.has("starttime"):
        since_s = parse_when(words.last("starttime"), now_s, past=True)
    path = client.query(
        "/v1/history",
        id=",".join(sorted({reference.partition("_")[0] for reference in wanted})),
        user=",".join(words.listed("user") if named else [client.my_name()]),
        state=",".join(parse_states(words.listed("state"))),
        name=",".join(words.listed("name")),
        start_s=since_s,
        end_s=parse_when(words.last("endtime"), now_s, past=True) if words.has("endtime") else None,
    )
    answer = client.call("GET", path)
    jobs = [job for job in answer["jobs"] if not wanted or any(_is_meant(job, one) for one in wanted)]
    return {**answer, "jobs": sorted(jobs, key=lambda job: job["id"])}


def _known(reference: str) -> str:
    """Return the reference as ``12``, ``10_3`` or ``10_[1-3]``; a name, or 'last', is asked for."""
    number = reference.split(".")[0].split("+")[0]
    if number.partition("_")[0].isdigit():
        return number
    jobs = client.call("GET", client.query("/v1/jobs", id=reference))["jobs"]
    return str(jobs[0]["display_id"])


def _is_meant(job: dict[str, Any], reference: str) -> bool:
    number, underscore, tasks = reference.partition("_")
    if not underscore:
        return number in (str(job["id"]), str(job["array_job_id"]))
    index = job["array_task_id"]
    return str(job["array_job_id"]) == number and index is not None and _is_among(index, tasks.strip("[]"))


def _is_among(index: int, ranges: str) -> bool:
    for part in ranges.partition("%")[0].split(","):
        low, _, high = part.partition("-")
        if low.isdigit() and int(low) <= index <= int(high if high.isdigit() else low):
            return True
    return False


def _parsable(shown: Sequence[Column], rows: Sequence[Row], words: Words, header: bool) -> str:
    between = words.last("delimiter", "|")
    end = between if words.has("parsable") and not words.has("parsable2") else ""
    lines = [[column.name for column in shown]] if header else []
    lines += [[clean(column.text(row)) for column in shown] for row in rows]
    return "".join(between.join(line) + end + "\n" for line in lines)


def _table(shown: Sequence[Column], rows: Sequence[Row], header: bool) -> str:
    cells = [[_in_width(column, clean(column.text(row))) for column in shown] for row in rows]
    right = [at for at, column in enumerate(shown) if column.right]
    headers = [_in_width(column, column.name) for column in shown] if header else []
    return columns(headers, cells, right=right, rule=True)


def _in_width(column: Column, text: str) -> str:
    """Return `text` in the column's width, if it has one; cut text ends in a +, as sacct's."""
    if not column.width:
        return text
    cut = text if len(text) <= column.width else text[: column.width - 1] + "+"
    return fitted(cut, column.width, right=column.right)
