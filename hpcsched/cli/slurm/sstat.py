"""sstat: resources of running steps; and lists of running steps.

`hqueue` and `squeue --steps` and `scontrol show step` print the lists.

A step is the JSON object of the history. The columns of sstat are sacct's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hpcsched import client
from hpcsched.cli.hacct import HistoryRow, columns_of, field_names, slurms_columns
from hpcsched.cli.output import print_separated
from hpcsched.cli.slurm import run_face
from hpcsched.client import Json
from hpcsched.commands.options import ELSEWHERE, HELP, INVALID_JOB, VERSION, Command, Face, Option, Words
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.listing.formats import FormatField, Look, format_lines, parse_percent
from hpcsched.listing.jobs import ACTIVE_STATES
from hpcsched.listing.text import clean, fixed_columns
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.units import format_time_s

FIELDS = "JobID,MaxVMSize,MaxRSS,AveRSS,AveCPU,NTasks,TRESUsageInAve,TRESUsageInMax,TRESUsageInTot"

SSTAT = Face(
    Command(
        "sstat",
        ("[OPTIONS] -j JOB[.STEP],...",),
        "Show the steps of running jobs.",
        (
            Option("allsteps", "a", help="show all steps of the jobs, not only the last"),
            Option("format", "o", "LIST", "show these columns: JobID,MaxRSS%12", aliases=("fields",)),
            Option("helpformat", "e", help="list the columns"),
            Option("jobs", "j", "LIST", "show these jobs, or steps: 12, 12.0, 12.batch"),
            Option("noheader", "n", help="do not print headers"),
            Option("parsable", "p", help="end each column with |"),
            Option("parsable2", "P", help="separate columns with |"),
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
    if print_separated(lines, words):
        return 0
    sys.stdout.write(fixed_columns(lines, [(column.width or column.slurms, column.right) for column in shown]))
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
    if not words.has("allsteps") and not any("." in reference for reference in wanted):
        last = {step["job"]["id"]: step for step in steps}
        return list(last.values())
    return list(steps)


# ----- running steps


STEP_FORMAT = "%.15i %.8j %.9P %.8u %.9M %N"

STEP_FIELDS = (
    FormatField("id", "i", "STEPID", lambda step, look: step["id"]),
    FormatField("task", "A", "TASKS", lambda step, look: str(step["ntasks"])),
    FormatField("name", "j", "NAME", lambda step, look: step["name"] or step["step"]),
    FormatField("partition", "P", "PARTITION", lambda step, look: step["job"]["partition"]),
    FormatField("user", "u", "USER", lambda step, look: step["job"]["user"]),
    FormatField("uid", "U", "UID", lambda step, look: str(step["job"]["uid"])),
    FormatField("limit", "l", "TIME_LIMIT", lambda step, look: format_time_s(step["job"]["time_limit_s"])),
    FormatField(
        "time", "M", "TIME", lambda step, look: format_time_s(look.now_s - (step["started_at_s"] or look.now_s))
    ),
    FormatField("nodelist", "N", "NODELIST", lambda step, look: compress_hostlist(step["nodes"])),
    FormatField("start", "S", "START_TIME", lambda step, look: look.date(step["started_at_s"])),
)


def running_steps(wanted: Sequence[str]) -> tuple[float, list[Json]]:
    """Return the current time and the running steps.

    `wanted` selects jobs and steps: ``12``, ``12.0``, ``10_3.batch``.
    """
    ids = sorted({word.partition(".")[0].partition("_")[0].partition("+")[0] for word in wanted})
    states = ",".join(sorted(ACTIVE_STATES))
    answer = client.history(id=",".join(ids), state=states)
    found = []
    for job in answer["jobs"]:
        for step in job["steps"]:
            name = f"{job['display_id']}.{step['step']}"
            whole = (
                str(job["id"]),
                str(job["array_job_id"]),
                str(job.get("het_job_id")),
                f"{job['id']}.{step['step']}",
            )
            names = (name, job["display_id"], *whole)
            is_meant = not wanted or any(word in names for word in wanted)
            if is_meant and step["ended_at_s"] is None and step["attempt"] == job["attempt"]:
                found.append({**step, "id": name, "job": job})
    return answer["now_s"], found


def print_steps(words: Words, *, text: str = "") -> int:
    """Print the requested steps like squeue --steps."""
    now_s, steps = running_steps([word for word in words.listed("steps") if word])
    users = words.listed("user")
    shown = [step for step in steps if not users or step["job"]["user"] in users or str(step["job"]["uid"]) in users]
    cells = parse_percent(text or words.last("format") or STEP_FORMAT, STEP_FIELDS)
    for line in format_lines(cells, shown, Look(now_s), header=not words.has("noheader")):
        print(line)
    return 0
