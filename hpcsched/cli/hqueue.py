"""hqueue: the jobs that wait, run or have just ended.

Without operands your own, on a terminal with a line about the others'. One job as operand shows in detail. What squeue
would print for the same options is the same code with other defaults: `squeue`'s face sets them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from hpcsched import client
from hpcsched.cli.errors import run_command
from hpcsched.cli.jobdetail import detail_lines
from hpcsched.cli.jobfields import (
    Cell,
    Job,
    cell_text,
    fold_arrays,
    format_lines,
    header_text,
    parse_format,
)
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
from hpcsched.cli.states import ACTIVE_STATES, ENDED_STATES, parse_states

DEFAULT_COLUMNS = "id,partition,name,user,st,time,nodes,where"
LONG_COLUMNS = "id,partition,name,user,state,time,limit,nodes,cpus,where"
WATCH_S = 2.0

# fmt: off
COMMAND = Command(
    "hqueue",
    ("[OPTIONS] [JOB...]",),
    "Show the jobs that wait, run or have ended a short while ago: yours, or those that are named. A single job is shown "
    "in detail, with what it waits for and when it is expected to start.",
    (
        Option("all", "a", help="show everybody's jobs"),
        Option("array", "r", help="show each waiting task of an array on a line of its own"),
        Option("format", "o", "FORMAT", "show these columns: names as id,name,state,why,eta, or squeue's as '%i %j %T'"),
        Option("jobs", "j", "LIST", "show these jobs", aliases=("job",)),
        Option("json", help="print the jobs as JSON, version 1"),
        Option("long", "l", help="show more columns"),
        Option("me", help="show your own jobs (default)"),
        Option("name", "n", "LIST", "show jobs of these names"),
        Option("noheader", "h", help="print no line of headers"),
        Option("partition", "p", "LIST", "show jobs in these partitions"),
        Option("quiet", "q", help="print the jobs' ids alone, each on its line"),
        Option("sort", "S", "LIST", "sort by these columns; - before one turns it around: -S state,-id"),
        Option("states", "t", "LIST", "show jobs in these states: PENDING,RUNNING or PD,R; all", aliases=("state",)),
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
    states = parse_states(words.listed("states"))
    cells = parse_format(words.last("format") or (LONG_COLUMNS if words.has("long") else DEFAULT_COLUMNS))
    order = _sort_keys(words)
    answer = _ask(words, states)
    answer["jobs"] = _sorted(answer["jobs"], order, answer["now_s"])
    if words.has("json"):
        print_json(answer)
        return ""
    jobs, now_s = answer["jobs"], answer["now_s"]
    if words.has("quiet"):
        return "".join(f"{job['display_id']}\n" for job in jobs)
    if _is_about_one(words) and len(jobs) == 1:
        return _painted_detail(jobs[0], now_s)
    shown = jobs if words.has("array") else fold_arrays(jobs)
    if "%" in words.last("format"):
        return "".join(f"{line}\n" for line in format_lines(cells, shown, now_s, header=not words.has("noheader")))
    return _table(cells, shown, now_s, header=not words.has("noheader")) + _others(words, jobs)


def _ask(words: Words, states: Sequence[str]) -> dict[str, Any]:
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
            made.sort(key=lambda job: cell_text(cell, job, now_s), reverse=reverse)
    return made


def _group(job: Job) -> int:
    return 0 if job["state"] in ACTIVE_STATES else 2 if job["state"] in ENDED_STATES else 1


def _table(cells: Sequence[Cell], jobs: Sequence[Job], now_s: float, *, header: bool) -> str:
    headers = [header_text(cell) for cell in cells] if header else []
    rows = [[cell_text(cell, job, now_s) for cell in cells] for job in jobs]
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
