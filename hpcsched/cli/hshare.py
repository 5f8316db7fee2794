"""hshare and sshare: the tree of accounts and users with their shares and usage.

Raw usage is in billing seconds (hpcsched.toml has the price of each resource), after decay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from hpcsched import client
from hpcsched.cli.output import print_json, print_separated, run_command
from hpcsched.cli.slurm import run_face
from hpcsched.client import Json
from hpcsched.commands.options import ELSEWHERE, HELP, VERSION, Command, Face, Option, UsageError, Words
from hpcsched.listing.text import clean, columns, fitted, fixed_columns, sized

COMMAND = Command(
    "hshare",
    ("[OPTIONS]",),
    "Show the shares of accounts and users, their recent usage, and the resulting fair-share factors.",
    (
        Option("accounts", "A", "LIST", "show these accounts and their users"),
        Option("all", "a", help="show all users, not only you"),
        Option("format", "o", "LIST", "show these columns: Account,User%12,FairShare"),
        Option("json", help="print the tree as JSON, version 1"),
        Option("long", "l", help="also show the fraction of all usage, LevelFS, and CPU and GPU hours"),
        Option("noheader", "n", help="do not print headers"),
        Option("parsable", "p", help="end each column with |"),
        Option("parsable2", "P", help="separate columns with |"),
        Option("user", "u", "LIST", "show these users"),
        Option("Users", "U", help="show only users, no accounts"),
        HELP,
        VERSION,
    ),
)


def _hours(resource: str) -> Callable[[Json], str]:
    return lambda line: f"{line['tres_seconds'].get(resource, 0.0) / 3600:.1f}"


_COLUMNS: dict[str, Callable[[Json], str]] = {
    "Account": lambda line: clean(line["account"]) or "root",
    "User": lambda line: clean(line["user"]),
    "RawShares": lambda line: str(line["shares"]),
    "NormShares": lambda line: f"{line['norm_shares']:.6f}",
    "RawUsage": lambda line: f"{line['usage']:.0f}",
    "NormUsage": lambda line: f"{line['norm_usage']:.6f}",
    "EffectvUsage": lambda line: f"{line['effective_usage']:.6f}",
    "FairShare": lambda line: "" if line["fairshare"] is None else f"{line['fairshare']:.6f}",
    "LevelFS": lambda line: "inf" if line["level_fs"] is None else f"{line['level_fs']:.6f}",
    "CPUHours": _hours("cpu"),
    "GPUHours": _hours("gres/gpu"),
}
_BRIEF = ("Account", "User", "RawShares", "NormShares", "RawUsage", "EffectvUsage", "FairShare")
_LEFT = ("Account", "User")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, show, argv)


def show(words: Words, widths: Mapping[str, int] | None = None) -> int:
    """Print the shares and return the exit status.

    `widths` are those of the columns, if they are fixed.
    """
    if words.operands:
        raise UsageError(f"cannot understand {words.operands[0][:60]!r}: to see one user write -u USER")
    chosen = _chosen(words)
    answer = client.call("GET", "/v1/shares")
    lines = _filtered(answer["shares"], words)
    if words.has("json"):
        print_json({**answer, "shares": lines})
        return 0
    header = [] if words.has("noheader") else [name for name, _ in chosen]
    rows = [header] * bool(header) + [[_COLUMNS[name](line) for name, _ in chosen] for line in lines]
    if print_separated(rows, words):
        return 0
    if widths is not None:
        table = [header] * bool(header) + [[_cell(line, name, 0) for name, _ in chosen] for line in lines]
        fixed = [(width or widths.get(name, 10), name != "Account") for name, width in chosen]
        text = fixed_columns(table, fixed, rule=bool(header))
    else:
        text = _aligned(header, lines, chosen)
    sys.stdout.write(text)
    return 0


def _aligned(header: Sequence[str], lines: Sequence[Json], chosen: Sequence[tuple[str, int]]) -> str:
    rows = [[_cell(line, name, width) for name, width in chosen] for line in lines]
    headers = [fitted(name, width) if width else name for name, width in chosen] if header else []
    right = [at for at, (name, _) in enumerate(chosen) if name not in _LEFT]
    return columns(headers, rows, right=right)


def _chosen(words: Words) -> list[tuple[str, int]]:
    """Return the columns with their widths; 0 is as wide as the content."""
    if not words.has("format"):
        return [(name, 0) for name in (_COLUMNS if words.has("long") else _BRIEF)]
    known = {name.lower(): name for name in _COLUMNS}
    chosen = []
    for word in words.listed("format"):
        name, width, _ = sized(word)
        if name.lower() not in known:
            raise UsageError(f"Invalid field requested: {word[:60]!r}; there are {', '.join(_COLUMNS)}")
        chosen.append((known[name.lower()], width))
    return chosen


def _filtered(lines: Sequence[Json], words: Words) -> list[Json]:
    """Return the lines of the requested accounts and users, and all accounts above them."""
    users = words.listed("user") if words.has("user") else [] if words.has("all") else [client.my_name()]
    accounts = words.listed("accounts")
    return [
        line
        for line in lines
        if (not accounts or line["account"] in accounts)
        and (not users or not line["user"] or line["user"] in users)
        and (line["user"] or not words.has("Users"))
    ]


def _cell(line: Json, name: str, width: int) -> str:
    text = _COLUMNS[name](line)
    if name == "Account":
        text = " " * line["depth"] + text
    return fitted(text, width) if width else text


SSHARE = Face(
    COMMAND._replace(
        name="sshare", accepted=(*ELSEWHERE, Option("partition", "m"), Option("verbose", "v"), Option("usage"))
    ),
    "sshare: error",
)
# Source: sshare of Slurm 23.02.
SSHARE_WIDTHS = {
    "Account": 20, "User": 10, "RawShares": 10, "NormShares": 11, "RawUsage": 11, "NormUsage": 11, "EffectvUsage": 13,
    "FairShare": 10, "LevelFS": 10,
}  # fmt: skip


def sshare(argv: Sequence[str] | None = None) -> int:
    """Run sshare and return its exit status."""
    return run_face(SSHARE, lambda words: show(words, SSHARE_WIDTHS), argv)
