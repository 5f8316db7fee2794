"""hqueue: the jobs that wait, run or have just ended.

Without operands your own, on a terminal with a line about the others'. One job as operand shows in detail. What squeue
would print for the same options is the same code with other defaults: `squeue`'s face sets them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from hpcsched import client
from hpcsched.cli.errors import run_command
from hpcsched.cli.jobdetail import detail_lines
from hpcsched.cli.options import HELP_LONG, VERSION, Command, Option, UsageError, Words
from hpcsched.cli.output import (
    BOLD,
    DIM,
    GREEN,
    RED,
    YELLOW,
    clean,
    columns,
    is_terminal,
    painted,
    print_json,
    wants_colour,
)
from hpcsched.client import Json
from hpcsched.listing.formats import Cell, Look, cell_text, format_lines, header_text
from hpcsched.listing.jobfields import parse_format, parse_long_format
from hpcsched.listing.jobs import Job, fold_arrays
from hpcsched.listing.states import ACTIVE_STATES, ENDED_STATES, parse_states

DEFAULT_COLUMNS = "id,partition,name,user,st,time,nodes,where"
LONG_COLUMNS = "id,partition,name,user,state,time,limit,nodes,cpus,where"
START_COLUMNS = "id,partition,name,user,st,start,nodes,why"
WATCH_S = 2.0

# fmt: off
COMMAND = Command(
    "hqueue",
    ("[OPTIONS] [JOB...]",),
    "Show the jobs that wait, run or have ended a short while ago: yours, or those that are named. A single job is shown "
    "in detail, with what it waits for and when it is expected to start.",
    (
        Option("account", "A", "LIST", "show jobs of these accounts"),
        Option("all", "a", help="show everybody's jobs"),
        Option("array", "r", help="show each waiting task of an array on a line of its own"),
        Option("format", "o", "FORMAT", "show these columns: names as id,name,state,why,eta, or squeue's as '%i %j %T'"),
        Option("Format", "O", "LIST", "show these columns by squeue's long names: JobArrayID:18,StateCompact,UserName:.10"),
        Option("jobs", "j", "LIST", "show these jobs", aliases=("job",)),
        Option("json", help="print the jobs as JSON, version 1"),
        Option("long", "l", help="show more columns"),
        Option("me", help="show your own jobs (default)"),
        Option("name", "n", "LIST", "show jobs of these names"),
        Option("nodelist", "w", "HOSTS", "show jobs that have some of these nodes: n[1-3],m7"),
        Option("noheader", "h", help="print no line of headers"),
        Option("partition", "p", "LIST", "show jobs in these partitions"),
        Option("qos", "", "LIST", "show jobs of these qualities of service"),
        Option("quiet", "q", help="print the jobs' ids alone, each on its line"),
        Option("reservation", "R", "LIST", "show jobs of these reservations", aliases=("reservations",)),
        Option("sort", "S", "LIST", "sort by these columns; - before one turns it around: -S state,-id"),
        Option("start", help="show jobs that wait, and when they are expected to start"),
        Option("states", "t", "LIST", "show jobs in these states: PENDING,RUNNING or PD,R; all", aliases=("state",)),
        Option("steps", "s", "LIST", "show steps that run: of these jobs, or these steps (12.0)", bare=""),
        Option("user", "u", "LIST", "show jobs of these users", aliases=("users",)),
        Option("watch", "", "SECONDS", f"show anew every SECONDS (default: {WATCH_S:g}) until interrupted", bare="2"),
        HELP_LONG,
        VERSION,
    ),
    (
        "A JOB is a number, a task of an array (10_3), some of its tasks (10_[1-3,7]), the name of one of your jobs, or "
        "'last'.",
    ),
)
# fmt: on


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, _work, argv)


def _work(words: Words) -> int:
    if not words.has("watch"):
        sys.stdout.write(_screen(words))
        return 0
    pause_s = words.number("watch", WATCH_S, at_least=0.1)
    try:
        while True:
            screen = _screen(words)
            sys.stdout.write("\x1b[H\x1b[2J" + screen if is_terminal() else screen + "\n")
            sys.stdout.flush()
            time.sleep(pause_s)
    except KeyboardInterrupt:
        return 0


def _screen(words: Words) -> str:
    """Return all that one look at the queue prints."""
    if words.has("steps"):
        from hpcsched.cli.steplist import print_steps  # jobs alone are shown without it

        print_steps(words)
        return ""
    states = ["PENDING"] if words.has("start") else parse_states(words.listed("states"))
    cells = _cells(words)
    order = _sort_keys(words)
    answer = _ask(words, states)
    answer["jobs"] = _sorted(_filtered(answer["jobs"], words), order, answer["now_s"])
    if words.has("json"):
        print_json(answer)
        return ""
    jobs, now_s = answer["jobs"], answer["now_s"]
    if words.has("quiet"):
        return "".join(f"{job['display_id']}\n" for job in jobs)
    if _is_about_one(words) and len(jobs) == 1:
        return _painted_detail(jobs[0], now_s)
    shown = jobs if words.has("array") else fold_arrays(jobs)
    if "%" in words.last("format") or words.has("Format"):
        return "".join(
            f"{line}\n" for line in format_lines(cells, shown, Look(now_s), header=not words.has("noheader"))
        )
    return _table(cells, shown, now_s, header=not words.has("noheader")) + _others(words, jobs)


def _cells(words: Words) -> list[Cell]:
    if words.has("Format"):
        return parse_long_format(words.last("Format"))
    if words.has("start") and not words.has("format"):
        return parse_format(START_COLUMNS)
    return parse_format(words.last("format") or (LONG_COLUMNS if words.has("long") else DEFAULT_COLUMNS))


def _filtered(jobs: Sequence[Job], words: Words) -> list[Job]:
    """Return those of `jobs` that have one of the accounts, qualities of service, reservations and nodes asked for."""
    kept = list(jobs)
    for option in ("account", "qos", "reservation"):
        if wanted := words.listed(option):
            kept = [job for job in kept if (job.get(option) or ("normal" if option == "qos" else "")) in wanted]
    if words.has("nodelist"):
        from hpcsched.model.hostlist import expand_hostlist  # brings dataclasses along: only for those who need it

        nodes = set(expand_hostlist(",".join(words.given["nodelist"])))
        kept = [job for job in kept if not nodes.isdisjoint(job["nodes"])]
    return kept


def _ask(words: Words, states: Sequence[str]) -> Json:
    """Return the API's answer: the jobs that the words ask for."""
    named = [*words.operands, *words.listed("jobs")]
    if _is_about_one(words):
        answer = client.call("GET", client.job_path(named[0]))
        hidden = ("script", "script_args", "env")  # nobody looks for them here
        answer["jobs"] = [{key: job[key] for key in job if key not in hidden} for job in answer["jobs"]]
        return answer
    mine = not (named or words.has("all") or words.has("user"))
    users = [*words.listed("user"), *([client.my_name()] if words.has("me") or mine else [])]
    path = client.query(
        "/v1/jobs",
        id=",".join(named),
        user=",".join(users),
        state=",".join(states),
        partition=",".join(words.listed("partition")),
        name=",".join(words.listed("name")),
    )
    return client.call("GET", path)


def _is_about_one(words: Words) -> bool:
    """Say whether one job is named and nothing else asked: then it is shown in detail."""
    others = set(words.given) - {"watch", "json"}
    return len(words.operands) == 1 and not others


def _sort_keys(words: Words) -> list[tuple[Cell, bool]]:
    keys = []
    for word in words.listed("sort"):
        name = word.lstrip("+-")
        cells = parse_format(name if len(name) > 1 else f"%{name}")
        if len(cells) != 1 or cells[0].field is None:
            raise UsageError(f"cannot sort by {word[:60]!r}: write a column's name, as -S name or -S -time")
        keys.append((cells[0], word.startswith("-")))
    return keys


_NUMBERS = {
    "id": "id", "rawid": "id", "time": "elapsed_s", "limit": "time_limit_s", "nodes": "num_nodes", "cpus": "num_cpus",
    "gpus": "gpus", "mem": "mem_mib", "priority": "priority", "nice": "nice", "tasks": "num_tasks",
}  # fmt: skip


def _sorted(jobs: list[Job], keys: Sequence[tuple[Cell, bool]], now_s: float) -> list[Job]:
    """Return the jobs in the order that was asked for; else those that run, that wait and that have ended, by id."""
    made = sorted(jobs, key=lambda job: (_group(job), job["id"]))
    for cell, reverse in reversed(keys):
        assert cell.field is not None
        number = _NUMBERS.get(cell.field.name)
        if number:
            made.sort(key=lambda job: job[number] if job[number] is not None else float("inf"), reverse=reverse)
        else:
            made.sort(key=lambda job: cell_text(cell, job, Look(now_s)), reverse=reverse)
    return made


def _group(job: Job) -> int:
    return 0 if job["state"] in ACTIVE_STATES else 2 if job["state"] in ENDED_STATES else 1


def _table(cells: Sequence[Cell], jobs: Sequence[Job], now_s: float, *, header: bool) -> str:
    headers = [header_text(cell) for cell in cells] if header else []
    rows = [[cell_text(cell, job, Look(now_s)) for cell in cells] for job in jobs]
    right = [at for at, cell in enumerate(cells) if cell.right]
    colours = [_colour(job) for job in jobs] if wants_colour() else ()
    return columns(headers, rows, right=right, colours=colours)


def _colour(job: Job) -> str:
    match job["state"]:
        case "RUNNING" | "COMPLETING":
            return GREEN
        case "PENDING" | "CONFIGURING" | "SUSPENDED":
            return YELLOW
        case "COMPLETED" | "CANCELLED":
            return DIM
        case _:
            return RED


def _painted_detail(job: Job, now_s: float) -> str:
    title, *lines = detail_lines(job, now_s)
    return "\n".join([painted(title, BOLD if wants_colour() else ""), *lines]) + "\n"


def _others(words: Words, jobs: Sequence[Job]) -> str:
    """Return the line about the jobs of others, for a person who sees their own alone."""
    if not is_terminal() or words.operands or set(words.given) - {"watch", "long", "format", "me"}:
        return ""
    counts = client.call("GET", "/v1/ping")["counts"]
    running = sum(counts.get(state, 0) for state in ACTIVE_STATES) - sum(job["state"] in ACTIVE_STATES for job in jobs)
    waiting = counts.get("PENDING", 0) - sum(job["state"] == "PENDING" for job in jobs)
    if running <= 0 and waiting <= 0:
        return ""
    text = clean(f"others: {max(0, running)} running, {max(0, waiting)} waiting (hqueue -a)")
    return painted(text, DIM if wants_colour() else "") + "\n"
