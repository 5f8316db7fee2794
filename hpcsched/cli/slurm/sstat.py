"""sstat: the steps of running jobs with their measured usage. The columns are sacct's."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hpcsched.cli.render.acct_fields import HistoryRow, columns_of, field_names, slurms_columns
from hpcsched.cli.render.steps import running_steps
from hpcsched.cli.slurm import run_face
from hpcsched.client import Json
from hpcsched.commands.options import HELP, VERSION, Command, Option, Words
from hpcsched.commands.slurm import ELSEWHERE, INVALID_JOB, Face
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.listing.text import clean, fitted

FIELDS = "JobID,MaxVMSize,MaxRSS,AveRSS,AveCPU,NTasks,TRESUsageInAve,TRESUsageInMax,TRESUsageInTot"

SSTAT = Face(
    Command(
        "sstat",
        ("[OPTIONS] -j JOB[.STEP],...",),
        "Show the steps of running jobs.",
        (
            Option("allsteps", "a", help="show every step of the jobs, not the last one alone"),
            Option("format", "o", "LIST", "show these columns: JobID,MaxRSS%12", aliases=("fields",)),
            Option("helpformat", "e", help="list the columns"),
            Option("jobs", "j", "LIST", "show these jobs, or steps: 12, 12.0, 12.batch"),
            Option("noheader", "n", help="print no line of headers"),
            Option("parsable", "p", help="put | behind each column"),
            Option("parsable2", "P", help="put | between the columns"),
            HELP,
            VERSION,
        ),
        accepted=(*ELSEWHERE, Option("verbose", "v"), Option("pidformat", "i"), Option("usage")),
    ),
    "sstat: error",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(SSTAT, _work, argv)


def _work(words: Words) -> int:
    known = slurms_columns("")
    if words.has("helpformat"):
        print("\n".join(field_names(known)))
        return 0
    steps = _steps(words)
    shown = columns_of(",".join(words.given.get("format", [FIELDS])), known)
    lines = [] if words.has("noheader") else [[column.name for column in shown]]
    lines += [[clean(column.text(HistoryRow(step["job"], step))) for column in shown] for step in steps]
    if words.has("parsable") or words.has("parsable2"):
        end = "|" if words.has("parsable") else ""
        sys.stdout.write("".join("|".join(line) + end + "\n" for line in lines))
        return 0
    for line in lines:
        pairs = zip(shown, line, strict=True)
        print("".join(fitted(text, column.width or column.slurms, right=column.right) + " " for column, text in pairs))
    return 0


def _steps(words: Words) -> list[Json]:
    """Return the named running steps; for a job without a step, its last one.

    Raises RequestError, NotFoundError.
    """
    wanted = [*words.listed("jobs"), *words.operands]
    if not wanted:
        raise RequestError("You didn't give me any jobs to stat.")
    _, steps = running_steps(wanted)
    if not steps:
        raise NotFoundError(f"{INVALID_JOB}: no running steps found for job {wanted[0]}")
    if not words.has("allsteps") and not any("." in one for one in wanted):
        last = {step["job"]["id"]: step for step in steps}
        return list(last.values())
    return list(steps)
