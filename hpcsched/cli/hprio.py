"""hprio and sprio: the priorities of waiting jobs and their factors.

One column for each factor with a weight, or for all with --long: weighted, so that they add up to the priority, or with
--norm before weighting, from 0 to 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from hpcsched import client
from hpcsched.cli.output import print_json, run_command
from hpcsched.cli.slurm import run_face
from hpcsched.client import Json
from hpcsched.commands.options import ELSEWHERE, HELP_LONG, VERSION, Command, Face, Option, UsageError, Words
from hpcsched.listing.formats import FormatField, Look, format_lines, parse_percent
from hpcsched.listing.text import clean, columns

COMMAND = Command(
    "hprio",
    ("[OPTIONS]",),
    "Show the priorities of waiting jobs, highest first, and their factors.",
    (
        Option("jobs", "j", "LIST", "show these jobs: 12,10_3,10_[1-3]"),
        Option("json", help="print the priorities as JSON, version 1"),
        Option("long", "l", help="show all factors, including those without a weight, and user, account and QOS"),
        Option("noheader", "h", help="do not print headers"),
        Option("norm", "n", help="show the factors before weighting, from 0 to 1"),
        Option("format", "o", "FORMAT", "show these columns, with sprio's letters: %i %Y %A; see hprio(1)"),
        Option("partition", "p", "LIST", "show the jobs in these partitions"),
        Option("user", "u", "LIST", "show the jobs of these users"),
        Option("weights", "w", help="show the weights of the factors instead of jobs"),
        HELP_LONG,
        VERSION,
    ),
)

_HEADERS = {
    "site": "SITE", "age": "AGE", "assoc": "ASSOC", "fairshare": "FAIRSHARE", "size": "JOBSIZE", "partition": "PARTITION",
    "qos": "QOS", "nice": "NICE", "tres": "TRES",
}  # fmt: skip


def _norm(name: str) -> Callable[..., str]:
    return lambda job, look: f"{job['factors'].get(name, 0.0):.7f}"


def _weighted(name: str) -> Callable[..., str]:
    return lambda job, look: str(job["weighted"].get(name, 0))


def _factor(name: str, letter: str, key: str) -> tuple[FormatField, FormatField]:
    """Return the columns of a factor: weighted, and before weighting (the lower-case letter)."""
    header = _HEADERS[key]
    weighted = FormatField(name, letter, header, _weighted(key))
    return weighted, FormatField(f"norm{name}", letter.lower(), header, _norm(key))


FIELDS = (
    FormatField("id", "i", "JOBID", lambda job, look: job["display_id"]),
    FormatField("user", "u", "USER", lambda job, look: job["user"]),
    FormatField("account", "o", "ACCOUNT", lambda job, look: job["account"] or "-"),
    FormatField("partition", "r", "PARTITION", lambda job, look: job["partition"]),
    FormatField("qos", "n", "QOSNAME", lambda job, look: job["qos"] or "-"),
    FormatField("priority", "Y", "PRIORITY", lambda job, look: str(job["priority"])),
    FormatField("normpriority", "y", "PRIORITY", lambda job, look: f"{job['priority'] / 0xFFFFFFFF:.14f}"),
    FormatField("nice", "N", "NICE", lambda job, look: str(job["nice"])),
    FormatField("site", "S", "SITE", _weighted("site")),
    *_factor("age", "A", "age"),
    *_factor("assoc", "B", "assoc"),
    *_factor("fairshare", "F", "fairshare"),
    *_factor("size", "J", "size"),
    *_factor("part", "P", "partition"),
    FormatField("qosfactor", "Q", "QOS", _weighted("qos")),
    FormatField("normqos", "q", "QOS", _norm("qos")),
    FormatField("tres", "T", "TRES", lambda job, look: _tres(job["tres_weighted"])),
    FormatField("normtres", "t", "TRES", lambda job, look: _tres(job["tres_factors"], "{:.6f}")),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, show, argv)


def show(words: Words, usual: Callable[[Words, Json], str] | None = None) -> int:
    """Print the priorities and return the exit status.

    `usual` gives the default format for the weights, if any.
    """
    if words.operands:
        raise UsageError(f"cannot understand {words.operands[0][:60]!r}: to see one job write -j JOB")
    query = {key: ",".join(words.given[name]) for name, key in _QUERY.items() if words.has(name)}
    answer = client.call("GET", client.query("/v1/priorities", **query))
    if words.has("json"):
        print_json(answer)
        return 0
    jobs = sorted(answer["jobs"], key=lambda job: (-job["priority"], job["id"]))
    shown = _shown(answer["weights"], jobs, every=words.has("long"))
    header = not words.has("noheader")
    format_text = words.last("format") or (
        usual(words, answer["weights"]) if usual and not words.has("weights") else ""
    )
    if format_text:
        cells = parse_percent(format_text, FIELDS)
        weights = answer["weights"]["tres"]
        for job in jobs:
            factors = job["tres_factors"].items()
            job["tres_weighted"] = {name: round(part * weights.get(name, 0)) for name, part in factors}
        records = [] if words.has("weights") else jobs
        print("\n".join(format_lines(cells, records, Look(0.0), header=header)))
        return 0
    if words.has("weights"):
        sys.stdout.write(_weights(answer["weights"], shown, header))
    else:
        sys.stdout.write(_table(jobs, shown, header, norm=words.has("norm"), long=words.has("long")))
    return 0


_QUERY = {"jobs": "id", "partition": "partition", "user": "user"}


def _shown(weights: Json, jobs: Sequence[Json], *, every: bool) -> list[str]:
    """Return the factors that have a column."""
    used = {name for name in _HEADERS if weights.get(name)}
    used |= {"nice"} if any(job["nice"] for job in jobs) else set()
    return [name for name in _HEADERS if every or name in used]


def _weights(weights: Json, shown: Sequence[str], header: bool) -> str:
    names = [name for name in shown if name != "nice"]
    row = [_tres(weights["tres"]) if name == "tres" else str(weights[name]) for name in names]
    return columns([_HEADERS[name] for name in names] if header else [], [row], right=range(len(names)))


def _table(jobs: Sequence[Json], shown: Sequence[str], header: bool, *, norm: bool, long: bool) -> str:
    names = [name for name in shown if not norm or name not in ("site", "nice")]
    whose = ["user", "account", "qos"] if long else []
    headers = ["JOBID", "PART", *(name.upper() for name in whose), "PRIORITY", *(_HEADERS[name] for name in names)]
    rows = [
        [
            job["display_id"],
            clean(job["partition"]),
            *(clean(job[name]) or "-" for name in whose),
            str(job["priority"]) + ("" if not job["fixed"] else "*"),
            *(_cell(job, name, norm=norm) for name in names),
        ]
        for job in jobs
    ]
    first = 2 + len(whose)
    return columns(headers if header else [], rows, right=range(first, len(headers)))


def _cell(job: Json, name: str, *, norm: bool) -> str:
    if job["fixed"]:
        return "-"
    if norm:
        return _tres(job["tres_factors"], "{:.6f}") if name == "tres" else f"{job['factors'][name]:.7f}"
    return str(-job["nice"] if name == "nice" else job["weighted"][name])


def _tres(parts: Json, shape: str = "{:g}") -> str:
    return ",".join(f"{name}={shape.format(part)}" for name, part in parts.items()) or "-"


SPRIO = Face(
    COMMAND._replace(
        name="sprio", accepted=(*ELSEWHERE, Option("sort", "S", "LIST"), Option("verbose", "v"), Option("usage"))
    ),
    "slurm_load_jobs error",
)
_LETTERS = {"age": "A", "assoc": "B", "fairshare": "F", "size": "J", "partition": "P", "qos": "Q", "tres": "T"}
_NORMALISED = {ord(letter): letter.lower() for letter in ("Y", *_LETTERS.values())}


def sprio(argv: Sequence[str] | None = None) -> int:
    """Run sprio and return its exit status."""
    return run_face(SPRIO, lambda words: show(words, _sprio_format), argv)


def _sprio_format(words: Words, weights: Json) -> str:
    """Return sprio's columns: the factors with a weight, or all with --long.

    Source: sprio of Slurm 23.02.
    """
    whose = " %.8u" if words.has("long") else ""
    letters = [letter for name, letter in _LETTERS.items() if words.has("long") or weights.get(name)]
    factors = "".join(f" %.{20 if letter == 'T' else 10}{letter}" for letter in letters)
    text = f"%.15i %9r{whose} %.10Y %.10S{factors}"
    return text.translate(_NORMALISED) if words.has("norm") else text
