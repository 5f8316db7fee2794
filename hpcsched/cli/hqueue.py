"""hqueue: the jobs that wait or run, and on request those that have just ended.

Without operands your own, with a line about the others'; an admin's are everybody's. A line counts those that have ended.
One job as operand shows in detail. As for squeue the controller selects, sorts and writes the lines
(`hpcsched.listing.queue`), with other defaults.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from hpcsched import client
from hpcsched.cli.errors import run_command
from hpcsched.cli.output import is_terminal, print_json, terminal_width, wants_colour
from hpcsched.client import Json
from hpcsched.commands.options import HELP_LONG, VERSION, Command, Option, Words
from hpcsched.listing.job_detail import detail_lines
from hpcsched.listing.states import parse_states
from hpcsched.listing.table import BOLD, painted

DEFAULT_COLUMNS = "id,partition,name,user,st,time,within,starts,nodes,where"
LONG_COLUMNS = "id,partition,name,user,state,time,within,starts,nodes,cpus,where"
START_COLUMNS = "id,partition,name,user,st,start,nodes,why"
WATCH_S = 2.0

# fmt: off
COMMAND = Command(
    "hqueue",
    ("[OPTIONS] [JOB...]",),
    "Show the jobs that wait or run: yours, for admins everybody's, or those that are named. A single job is shown "
    "in detail, with what it waits for and when it is expected to start.",
    (
        Option("account", "A", "LIST", "show jobs of these accounts"),
        Option("all", "a", help="show everybody's jobs, and those that ended a short while ago"),
        Option("array", "r", help="show each waiting task of an array on a line of its own"),
        Option("format", "o", "FORMAT", "show these columns: names as id,name,state,why,eta, or squeue's as '%i %j %T'"),
        Option("Format", "O", "LIST", "show these columns by squeue's long names: JobArrayID:18,StateCompact,UserName:.10"),
        Option("jobs", "j", "LIST", "show these jobs", aliases=("job",)),
        Option("json", help="print the jobs as JSON, version 1"),
        Option("long", "l", help="show more columns"),
        Option("me", help="show your own jobs (default, but for admins)"),
        Option("name", "n", "LIST", "show jobs of these names"),
        Option("nodelist", "w", "HOSTS", "show jobs that have some of these nodes: n[1-3],m7"),
        Option("noheader", "h", help="print no line of headers"),
        Option("partition", "p", "LIST", "show jobs in these partitions", aliases=("partitions",)),
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
        from hpcsched.cli.render.steps import print_steps  # jobs alone are shown without it

        print_steps(words)
        return ""
    filters = _filters(words)
    if _is_about_one(words):
        answer = _one(words.operands[0])
        if words.has("json"):
            print_json(answer)
            return ""
        if len(answer["jobs"]) == 1:
            return _painted_detail(answer["jobs"][0], answer["now_s"])
    elif words.has("json"):
        print_json(client.call("GET", client.query("/v1/jobs", **filters)))
        return ""
    return client.fetch_text(client.query("/v1/queue", **filters, **_layout(words)))


def _filters(words: Words) -> Json:
    """Return which jobs the words ask for, as parameters of the request."""
    named = [*words.operands, *words.listed("jobs")]
    chosen = named or words.has("all") or words.has("user") or words.has("me")
    users = [*words.listed("user"), *([client.my_name()] if words.has("me") else [])]
    states = parse_states(words.listed("states"))
    filters: Json = {
        "strict": "1",
        "id": ",".join(named),
        "user": ",".join(users),
        "whose": "" if chosen else "default",
        "state": ",".join(states) or ("" if _is_live(words) and not _is_plain(words) else "ALL"),
        "nodes": ",".join(words.given.get("nodelist", ())),
        "expected": "1" if words.has("start") else "",
    }
    for option in ("name", "partition", "account", "qos", "reservation"):
        filters[option] = ",".join(words.listed(option))
    return filters


def _is_live(words: Words) -> bool:
    """Say whether ended jobs are not asked for; JSON has them, each with its state."""
    asked = ("all", "states", "jobs", "start", "json")
    return not words.operands and not any(words.has(option) for option in asked)


def _is_plain(words: Words) -> bool:
    """Say whether the table is for people, so that lines of words below it break nothing."""
    return not any(words.has(option) for option in ("quiet", "noheader", "format", "Format"))


def _layout(words: Words) -> Json:
    """Return how the jobs shall be written, as parameters of the request."""
    quiet = words.has("quiet")
    text = words.last("Format") or words.last("format") or _columns(words)
    return {
        "ended": "1" if _is_live(words) and _is_plain(words) else "",
        "fold": "1",
        "format": "%i" if quiet else text,
        "long": "1" if words.has("Format") and not quiet else "",
        "order": ",".join([*words.listed("sort"), "phase"]),
        "array": "1" if words.has("array") or quiet else "",
        "noheader": "1" if words.has("noheader") or quiet else "",
        "fit": "1",
        "width": str(terminal_width()) if is_terminal() and not words.has("format") else "",
        "colour": "1" if wants_colour() else "",
        "others": "1" if _is_about_mine(words) and _is_plain(words) else "",
    }


def _columns(words: Words) -> str:
    return START_COLUMNS if words.has("start") else LONG_COLUMNS if words.has("long") else DEFAULT_COLUMNS


def _one(reference: str) -> Json:
    """Return the API's answer about what is named, without what nobody looks for here."""
    answer = client.call("GET", client.job_path(reference))
    hidden = ("script", "script_args", "env")
    answer["jobs"] = [{key: job[key] for key in job if key not in hidden} for job in answer["jobs"]]
    return answer


def _is_about_one(words: Words) -> bool:
    """Say whether one job is named and nothing else asked: then it is shown in detail."""
    others = set(words.given) - {"watch", "json"}
    return len(words.operands) == 1 and not others


def _is_about_mine(words: Words) -> bool:
    """Say whether a person sees their own jobs alone: then a line tells of the others'."""
    return not words.operands and not set(words.given) - {"watch", "long", "format", "me"}


def _painted_detail(job: Json, now_s: float) -> str:
    title, *lines = detail_lines(job, now_s)
    return "\n".join([painted(title, BOLD if wants_colour() else ""), *lines]) + "\n"
