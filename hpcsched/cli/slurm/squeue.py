"""squeue: the queue as Slurm's command shows it: everybody's jobs that wait or run, in the columns that were asked for.

The controller selects, sorts and writes the lines (`hpcsched.listing.queue`); here are the options, the variables that give
their defaults, and which format is meant.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hpcsched import client
from hpcsched.cli import hqueue
from hpcsched.cli.errors import complain
from hpcsched.cli.output import clean
from hpcsched.cli.slurm import look_again, run_face
from hpcsched.client import Json
from hpcsched.commands.options import HELP_LONG, VERSION, Command, Option, Words
from hpcsched.commands.slurm import ELSEWHERE, Face, with_names
from hpcsched.listing.states import parse_states

FORMAT = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
LONG_FORMAT = "%.18i %.9P %.8j %.8u %.8T %.10M %.9l %.6D %R"
START_FORMAT = "%.18i %.9P %.8j %.8u %.2t  %.19S %.6D %20Y %R"
ORDER = "P,t,-p"

# fmt: off
FACE = Face(Command(
    "squeue",
    ("[OPTIONS]",),
    "Show the jobs that wait or run.",
    (
        *with_names(hqueue.COMMAND.options, "account array Format format jobs json long me name nodelist noheader partition "
                    "reservation sort start states steps user"),
        Option("all", "a", help="show the jobs of all partitions (always so)"),
        Option("iterate", "i", "SECONDS", "show anew every SECONDS until interrupted"),
        Option("licenses", "L", "LIST", "show jobs that asked for these licences"),
        Option("only-job-state", help="show no more of each job than its state (always as quick)"),
        Option("qos", "q", "LIST", "show jobs of these qualities of service"),
        Option("verbose", "v", help="say more"),
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(FACE, _work, argv)


def _work(words: Words) -> int:
    return look_again(words, _look)


def _look(words: Words) -> int:
    if words.has("json"):
        from hpcsched.cli.render.slurm_json import print_jobs  # only here: polling does without it

        return print_jobs(client.call("GET", client.query("/v1/jobs", strict="0", **_filters(words))))
    if words.has("steps"):
        from hpcsched.cli.render.steps import print_steps

        return print_steps(words)
    sys.stdout.write(client.fetch_text(client.query("/v1/queue", **_filters(words), **_layout(words))))
    return 0


def _filters(words: Words) -> Json:
    """Return which jobs the words ask for, as parameters of the request."""
    env = os.environ
    states = words.listed("states") or _words(env.get("SQUEUE_STATES", ""))
    filters: Json = {
        "id": ",".join(words.listed("jobs")),
        "state": _states(states),
        "nodes": ",".join(words.given.get("nodelist", ())),
        "expected": "1" if words.has("start") else "",
    }
    for option, parameter in _FILTERS.items():
        values = words.listed(option) or _words(env.get(_VARIABLES.get(option, ""), ""))
        filters[parameter] = ",".join(values)
    if words.has("me"):
        filters["user"] = str(os.getuid())
    for name in _words(filters["user"]):
        _warn_of_stranger(name)
    return filters


def _warn_of_stranger(name: str) -> None:
    """Say that nobody has this account, as Slurm does; jobs of it are looked for all the same."""
    import pwd  # only where users are named

    if name.isdigit():  # a uid needs no account
        return
    try:
        pwd.getpwnam(name)
    except KeyError:
        complain(FACE.command.name, f"Invalid user: {clean(name)}")


def _layout(words: Words) -> Json:
    """Return how the jobs shall be written, as parameters of the request."""
    env = os.environ
    text, long = _format(words)
    return {
        "format": text,
        "long": "1" if long else "",
        "order": ",".join(words.given.get("sort", ())) or env.get("SQUEUE_SORT", "") or _order(words),
        "array": "1" if words.has("array") or "SQUEUE_ARRAY" in env else "",
        "noheader": "1" if words.has("noheader") else "",
        "dated": "1" if words.has("long") and not words.has("noheader") else "",
        "time_format": env.get("SLURM_TIME_FORMAT", ""),
    }


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _states(words: Sequence[str]) -> str:
    return ",".join(parse_states(words) or ["ALL"]) if words else ""


def _order(words: Words) -> str:
    return "S" if words.has("start") else ORDER


def _format(words: Words) -> tuple[str, bool]:
    """Return the format, and whether it is one of long names."""
    if words.has("Format"):
        return words.last("Format"), True
    if words.has("format"):
        return words.last("format"), False
    if words.has("start"):
        return START_FORMAT, False
    if words.has("long"):
        return LONG_FORMAT, False
    if os.environ.get("SQUEUE_FORMAT"):
        return os.environ["SQUEUE_FORMAT"], False
    if os.environ.get("SQUEUE_FORMAT2"):
        return os.environ["SQUEUE_FORMAT2"], True
    return FORMAT, False
