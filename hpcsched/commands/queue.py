"""hqueue and squeue: select the jobs and the layout; the API answers with the lines.

hqueue shows the user's own jobs, with a line about other users' jobs. An admin sees all jobs. A line counts the jobs that have
ended. One job as operand is shown in detail. squeue shows all users' jobs in Slurm's formats; variables set its defaults. The
controller selects, sorts and writes the lines (`hpcsched.listing.queue`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcsched.commands.call import Call, Caller, refuse_other_clusters
from hpcsched.commands.options import (
    ELSEWHERE,
    HELP_LONG,
    VERSION,
    Command,
    Face,
    Option,
    Words,
    header_note,
    read_words,
    refuse_operands,
    with_names,
    with_usage,
)
from hpcsched.listing.jobs import detail_lines, parse_states
from hpcsched.listing.text import BOLD, clean, painted

DEFAULT_COLUMNS = "id,partition,name,user,st,time,within,starts,nodes,where"
LONG_COLUMNS = "id,partition,name,user,state,time,within,starts,nodes,cpus,where"
START_COLUMNS = "id,partition,name,user,st,start,nodes,why"
USE_COLUMNS = "id,name,user,st,time,nodes,cpus,cpuuse,mem,memuse,gpus,gpuuse,where"
WATCH_S = 2.0

# fmt: off
HQUEUE = Command(
    "hqueue",
    ("[OPTIONS] [JOB...]",),
    "Show waiting and running jobs: yours, for admins those of all users, or the named ones. A single job is shown "
    "in detail, with what it waits for and when it is expected to start.",
    (
        Option("account", "A", "LIST", "show jobs of these accounts"),
        Option("all", "a", help="show the jobs of all users, and recently ended jobs"),
        Option("array", "r", help="show each waiting task of an array on its own line"),
        Option("format", "o", "FORMAT", "show these columns: names (id,name,state,why,eta) or squeue's letters ('%i %j %T')"),
        Option("Format", "O", "LIST", "show these columns, with squeue's long names: JobArrayID:18,StateCompact,UserName:.10"),
        Option("jobs", "j", "LIST", "show these jobs", aliases=("job",)),
        Option("json", help="print the jobs as JSON, version 1"),
        Option("long", "l", help="show more columns"),
        Option("me", help="show only your jobs (default, except for admins)"),
        Option("name", "n", "LIST", "show jobs with these names"),
        Option("nodelist", "w", "HOSTS", "show jobs on any of these nodes: n[1-3],m7"),
        Option("noheader", "h", help="do not print headers"),
        Option("partition", "p", "LIST", "show jobs in these partitions", aliases=("partitions",)),
        Option("qos", "", "LIST", "show jobs with these QOS"),
        Option("quiet", "q", help="print only the job ids, one per line"),
        Option("reservation", "R", "LIST", "show jobs in these reservations", aliases=("reservations",)),
        Option("sort", "S", "LIST", "sort by these columns; - reverses a column: -S state,-id"),
        Option("start", help="show waiting jobs and their expected start"),
        Option("states", "t", "LIST", "show jobs in these states: PENDING,RUNNING or PD,R; all", aliases=("state",)),
        Option("steps", "s", "LIST", "show running steps: of these jobs, or these steps (12.0)", bare=""),
        Option("use", help="show what running jobs use of their CPUs, memory and GPUs; hwhy --slow judges one"),
        Option("user", "u", "LIST", "show jobs of these users", aliases=("users",)),
        Option("watch", "", "SECONDS", f"refresh every SECONDS (default: {WATCH_S:g}) until interrupted", bare="2"),
        HELP_LONG,
        VERSION,
    ),
    (
        "A JOB is a number, a task of an array (10_3), some of its tasks (10_[1-3,7]), the name of one of your jobs, or "
        "'last'.",
    ),
)
# fmt: on

FORMAT = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
LONG_FORMAT = "%.18i %.9P %.8j %.8u %.8T %.10M %.9l %.6D %R"
START_FORMAT = "%.18i %.9P %.8j %.8u %.2t  %.19S %.6D %20Y %R"
ORDER = "P,t,-p"

# fmt: off
SQUEUE = Face(Command(
    "squeue",
    ("[OPTIONS]",),
    "Show waiting and running jobs.",
    (
        *with_names(HQUEUE.options, "account array Format format jobs json long me name nodelist noheader partition "
                    "reservation sort start states steps user"),
        Option("all", "a", help="show the jobs of all partitions (the default)"),
        Option("iterate", "i", "SECONDS", "refresh every SECONDS until interrupted"),
        Option("licenses", "L", "LIST", "show jobs that requested these licences"),
        Option("only-job-state", help="show only the state of each job"),
        Option("qos", "q", "LIST", "show jobs of these qualities of service"),
        Option("verbose", "v", help="print more"),
        HELP_LONG,
        VERSION,
    ),
    accepted=(*ELSEWHERE, Option("hide"), Option("priority", "P"), Option("array-unique"), Option("expand-patterns"),
              Option("yaml"), Option("usage")),
), "slurm_load_jobs error")
# fmt: on

_FILTERS = {"user": "user", "name": "name", "partition": "partition", "account": "account", "qos": "qos",
            "reservation": "reservation", "licenses": "license"}  # fmt: skip
_VARIABLES = {"account": "SQUEUE_ACCOUNT", "name": "SQUEUE_NAMES", "partition": "SQUEUE_PARTITION", "qos": "SQUEUE_QOS",
              "user": "SQUEUE_USERS", "licenses": "SQUEUE_LICENSES"}  # fmt: skip


async def hqueue(argv: Sequence[str], call: Call) -> int:
    """Run hqueue. Raises HpcschedError, OwnProcessError."""
    words = read_words(HQUEUE, argv)
    call.only_in_own_process(words, "help", "version", "json", "steps", "watch")
    if list(argv) == ["-h"]:
        call.note(HQUEUE.name, header_note(HQUEUE.name))
    return await show(words, call)


async def squeue(argv: Sequence[str], call: Call) -> int:
    """Run squeue. Raises HpcschedError, OwnProcessError."""
    words = read_words(with_usage(SQUEUE), argv)
    call.only_in_own_process(words, "help", "version", "usage", "json", "steps", "iterate")
    await refuse_other_clusters(",".join(words.given.get("clusters", ())), call)
    refuse_operands(words)
    return await show_slurm(words, call)


async def show(words: Words, call: Call) -> int:
    """Write hqueue's output for the present queue."""
    reference = one_job(words)
    if reference:
        answer = await call.api.job(reference)
        if len(answer["jobs"]) == 1:
            call.needs_local_time()
            title, *lines = detail_lines(answer["jobs"][0], answer["now_s"])
            bold = painted(title, BOLD if call.caller.wants_colour else "")
            call.output.out("\n".join([bold, *lines]) + "\n")
            return 0
    call.output.out(await call.api.text("/v1/queue", {**filters(words, call.caller), **_layout(words, call.caller)}))
    return 0


async def show_slurm(words: Words, call: Call) -> int:
    """Write squeue's output for the present queue."""
    parameters = {**slurm_filters(words, call), **_slurm_layout(words, call.caller.environ)}
    call.output.out(await call.api.text("/v1/queue", parameters))
    return 0


def filters(words: Words, caller: Caller) -> dict[str, str]:
    """Return the requested filters, as parameters of the request."""
    named = [*words.operands, *words.listed("jobs")]
    chosen = named or words.has("all") or words.has("user") or words.has("me")
    users = [*words.listed("user"), *([caller.user] if words.has("me") else [])]
    states = parse_states(words.listed("states"))
    found = {
        "strict": "1",
        "id": ",".join(named),
        "user": ",".join(users),
        "whose": "" if chosen else "default",
        "state": ",".join(states) or ("" if _is_live(words) and not _is_plain(words) else "ALL"),
        "nodes": ",".join(words.given.get("nodelist", ())),
        "expected": "1" if words.has("start") else "",
    }
    for option in ("name", "partition", "account", "qos", "reservation"):
        found[option] = ",".join(words.listed(option))
    return found


def _is_live(words: Words) -> bool:
    """Return whether ended jobs are excluded; JSON includes them, each with its state."""
    asked = ("all", "states", "jobs", "start", "json")
    return not words.operands and not any(words.has(option) for option in asked)


def _is_plain(words: Words) -> bool:
    """Return whether the table is for users, so that text lines may follow it."""
    return not any(words.has(option) for option in ("quiet", "noheader", "format", "Format"))


def _layout(words: Words, caller: Caller) -> dict[str, str]:
    """Return the requested layout, as parameters of the request."""
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
        "width": str(caller.width) if caller.out_is_terminal and not words.has("format") else "",
        "colour": "1" if caller.wants_colour else "",
        "others": "1" if _is_about_mine(words) and _is_plain(words) else "",
    }


def _columns(words: Words) -> str:
    if words.has("use"):
        return USE_COLUMNS
    return START_COLUMNS if words.has("start") else LONG_COLUMNS if words.has("long") else DEFAULT_COLUMNS


def one_job(words: Words) -> str:
    """Return the job that is named without other filters, to show in detail; "" if none is."""
    others = set(words.given) - {"watch", "json"}
    return words.operands[0] if len(words.operands) == 1 and not others else ""


def _is_about_mine(words: Words) -> bool:
    """Return whether only the user's own jobs are shown; a line then describes the others."""
    return not words.operands and not set(words.given) - {"watch", "long", "format", "me"}


def slurm_filters(words: Words, call: Call) -> dict[str, str]:
    """Return the requested filters, as parameters of the request."""
    environ = call.caller.environ
    states = words.listed("states") or _words(environ.get("SQUEUE_STATES", ""))
    found = {
        "id": ",".join(words.listed("jobs")),
        "state": _states(states),
        "nodes": ",".join(words.given.get("nodelist", ())),
        "expected": "1" if words.has("start") else "",
    }
    for option, parameter in _FILTERS.items():
        values = words.listed(option) or _words(environ.get(_VARIABLES.get(option, ""), ""))
        found[parameter] = ",".join(values)
    if words.has("me"):
        found["user"] = str(call.caller.uid)
    for name in _words(found["user"]):
        _warn_of_stranger(name, call)
    return found


def _warn_of_stranger(name: str, call: Call) -> None:
    """Warn, as Slurm does, that no account has this name; its jobs are still searched."""
    if not name.isdigit() and not call.api.is_account(name):  # a uid needs no account
        call.complain(SQUEUE.command.name, f"Invalid user: {clean(name)}")


def _slurm_layout(words: Words, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the requested layout, as parameters of the request."""
    text, long = _format(words, environ)
    return {
        "format": text,
        "long": "1" if long else "",
        "order": ",".join(words.given.get("sort", ())) or environ.get("SQUEUE_SORT", "") or _order(words),
        "array": "1" if words.has("array") or "SQUEUE_ARRAY" in environ else "",
        "noheader": "1" if words.has("noheader") else "",
        "dated": "1" if words.has("long") and not words.has("noheader") else "",
        "time_format": environ.get("SLURM_TIME_FORMAT", ""),
    }


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _states(words: Sequence[str]) -> str:
    return ",".join(parse_states(words) or ["ALL"]) if words else ""


def _order(words: Words) -> str:
    return "S" if words.has("start") else ORDER


def _format(words: Words, environ: Mapping[str, str]) -> tuple[str, bool]:
    """Return the format, and whether it uses long names."""
    if words.has("Format"):
        return words.last("Format"), True
    if words.has("format"):
        return words.last("format"), False
    if words.has("start"):
        return START_FORMAT, False
    if words.has("long"):
        return LONG_FORMAT, False
    if environ.get("SQUEUE_FORMAT"):
        return environ["SQUEUE_FORMAT"], False
    if environ.get("SQUEUE_FORMAT2"):
        return environ["SQUEUE_FORMAT2"], True
    return FORMAT, False
