"""sreport: usage of the cluster in a period, by account and user.

The figures are those of hreport (`hpcsched.metrics.usage_report`): what all attempts of jobs held within the period, and the
time of today's nodes. Down is the free time of nodes that did not answer or were drained, and PLND Down that of nodes that were
switched off to save power.

Source: sreport(1).
"""

from __future__ import annotations

import pwd
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hpcsched import client
from hpcsched.cli.output import complain, print_separated
from hpcsched.cli.slurm import own_cluster, run_face
from hpcsched.client import Json
from hpcsched.commands.options import ELSEWHERE, HELP, VERSION, Command, Face, Option, UsageError, Words
from hpcsched.listing.text import clean, fixed_columns
from hpcsched.metrics.usage_report import (
    ROOT_ACCOUNT,
    NodeTime,
    Period,
    ReadJobs,
    node_times,
    usage_rows,
    with_first_seen,
)
from hpcsched.model.dates import parse_when

SREPORT = Face(
    Command(
        "sreport",
        (
            "[OPTIONS] cluster utilization [start=TIME] [end=TIME]",
            "[OPTIONS] cluster AccountUtilizationByUser | UserUtilizationByAccount [start=TIME] [end=TIME] [users=LIST]",
            "[OPTIONS] user topusage [start=TIME] [end=TIME] [users=LIST] [accounts=LIST] [topcount=N]",
        ),
        "Report use over a time; without start and end: yesterday. Down is time without an answer, or drained.",
        (
            Option("noheader", "n", help="do not print headers"),
            Option("parsable", "p", help="end each column with |"),
            Option("parsable2", "P", help="separate columns with |"),
            Option("quiet", "Q", help="print only the report"),
            Option("time", "t", "FORMAT", "Seconds, Minutes (default), Hours, Percent, SecPer, MinPer or HourPer"),
            Option("tres", "T", "LIST", "what to report: cpu (default), mem, node, gres/gpu, billing"),
            HELP,
            VERSION,
        ),
        accepted=(*ELSEWHERE, Option("all_clusters", "a"), Option("verbose", "v")),
    ),
    "sreport: error",
)
DAY_S = 86_400
TOP = 10
RULE = "-" * 80
UNITS = {"seconds": ("Seconds", 1), "minutes": ("Minutes", 60), "hours": ("Hours", 3600)}
# TRES -> its name in the title.
TRES = {"cpu": "CPU", "mem": "mem", "node": "node", "gres/gpu": "gres/gpu", "billing": "billing"}
UTILIZATION = ("Allocated", "Down", "PLND Down", "Idle", "Planned", "Reported")


class ReportColumn(NamedTuple):
    """A column of a report: its title, and its width if the output is not parsable."""

    title: str
    width: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(SREPORT, _work, argv)


def _work(words: Words) -> int:
    names = [word.lower() for word in words.operands if "=" not in word]
    given = dict(word.lower().split("=", 1) for word in words.operands if "=" in word)
    report = _report(names)
    unknown = given.keys() - {"start", "end", "users", "user", "accounts", "account", "topcount", "clusters", "format"}
    if unknown:
        raise UsageError("", getopt=f"error: Unknown condition: {min(unknown)[:60]}")
    if "format" in given:
        raise UsageError("cannot choose columns: sreport has no format= here; cut those of -P")
    period = _period(given, _now_s())
    tres = [name.lower() for name in words.listed("tres")] or ["cpu"]
    for name in tres:
        if name not in TRES:
            raise UsageError(f"cannot report {name[:60]!r}: there are {', '.join(TRES)}")
    scale = _scale(words.last("time") or "minutes")
    title, shown, rows = report(period, tres, given)
    _print(title, shown, rows, words, tres, scale)
    return 0


def _now_s() -> float:
    return time.time()


def _report(names: Sequence[str]) -> Callable:
    for wanted, report in REPORTS.items():
        kind, name = wanted.split()
        if len(names) == 2 and names[0] and kind.startswith(names[0]) and names[1] and name.startswith(names[1]):
            return report
    raise UsageError("", getopt=f"error: Not valid report: {' '.join(names)[:60] or 'none'}; see sreport --help")


def _period(given: Mapping[str, str], now_s: float) -> Period:
    """Return the requested period; by default yesterday, in local time."""
    today = time.localtime(now_s)
    midnight_s = time.mktime((today.tm_year, today.tm_mon, today.tm_mday, 0, 0, 0, 0, 0, -1))
    yesterday_s = time.mktime((today.tm_year, today.tm_mon, today.tm_mday - 1, 0, 0, 0, 0, 0, -1))
    start_s = parse_when(given["start"], now_s, past=True) if "start" in given else yesterday_s
    end_s = parse_when(given["end"], now_s, past=True) if "end" in given else midnight_s
    if "start" in given and "end" not in given and start_s >= end_s:
        end_s = now_s
    if end_s <= start_s:
        raise UsageError("cannot report: the end is not after the start")
    return Period(start_s, end_s, now_s)


def _jobs(period: Period, given: Mapping[str, str], read: ReadJobs) -> Iterator[Json]:
    users = given.get("users") or given.get("user", "")
    jobs = client.each_of_history(user=users, start_s=period.start_s, end_s=period.end_s, attempts=1, energy=1)
    accounts = (given.get("accounts") or given.get("account", "")).split(",")
    yield from read.reading(job for job in jobs if accounts == [""] or (job["account"] or ROOT_ACCOUNT) in accounts)
    if read.unknown:
        complain("sreport", f"the use of {read.unknown} jobs is not in it: their events do not fit together")


def _used(period: Period, given: Mapping[str, str], tres: Sequence[str]) -> dict[tuple[str, str], list[float]]:
    """Return (account, user) -> seconds of each TRES, and then the energy in joules."""
    rows = usage_rows(_jobs(period, given, ReadJobs()), [period], ("account", "user"))
    return {(row.key[0], row.key[1]): [*(row.tres_s(name) for name in tres), row.joules or 0.0] for row in rows}


# ----- the reports: title, columns, and rows of (texts, seconds of each TRES by column)


def _utilization(period: Period, tres: Sequence[str], given: Mapping[str, str]) -> tuple:
    nodes = client.call("GET", "/v1/nodes")["nodes"]
    read = ReadJobs()
    for _ in _jobs(period, given, read):
        pass
    path = client.query("/v1/outages", start_s=period.start_s, end_s=period.end_s, kinds="down,drained,off")
    answer = client.call("GET", path)
    nodes = with_first_seen(nodes, answer["first_seen_s"])
    rows = []
    for name in tres:
        whole = NodeTime()
        for times in node_times(period, read.held, nodes, answer["outages"], name).values():
            whole.add(times)
        down_s = whole.down_s + whole.drained_s
        values = [whole.allocated_s, down_s, whole.off_s, whole.idle_s, 0.0, whole.capacity_s]
        rows.append(([own_cluster()], name, values))
    columns = [ReportColumn("Cluster", 9)]
    values_columns = [ReportColumn(title, 8) for title in UTILIZATION]
    return f"Cluster Utilization {_span(period)}", (columns, values_columns), rows


def _by_account(period: Period, tres: Sequence[str], given: Mapping[str, str]) -> tuple:
    used = _used(period, given, tres)
    rows = []
    for account in sorted({account for account, _ in used}):
        mine = {user: sums for (name, user), sums in used.items() if name == account}
        for at, name in enumerate(tres):
            whole = [sum(sums[column] for sums in mine.values()) for column in (at, -1)]
            rows.append(([own_cluster(), account, "", ""], name, whole))
        for user in sorted(mine):
            rows += [
                ([own_cluster(), account, user, _full_name(user)], name, [mine[user][at], mine[user][-1]])
                for at, name in enumerate(tres)
            ]
    columns = [
        ReportColumn("Cluster", 9),
        ReportColumn("Account", 15),
        ReportColumn("Login", 9),
        ReportColumn("Proper Name", 15),
    ]
    return f"Cluster/Account/User Utilization {_span(period, seconds=True)}", (columns, _VALUES), rows


def _by_user(period: Period, tres: Sequence[str], given: Mapping[str, str]) -> tuple:
    used = _used(period, given, tres)
    rows = [
        ([own_cluster(), user, _full_name(user), account], name, [sums[at], sums[-1]])
        for (account, user), sums in sorted(used.items(), key=lambda item: item[0][::-1])
        for at, name in enumerate(tres)
    ]
    return f"Cluster/User/Account Utilization {_span(period, seconds=True)}", (_USER_COLUMNS, _VALUES), rows


def _top(period: Period, tres: Sequence[str], given: Mapping[str, str]) -> tuple:
    count = given.get("topcount", str(TOP))
    if not (count.isascii() and count.isdigit() and 0 < int(count[:6]) <= 100_000):
        raise UsageError(f"cannot take topcount={count[:40]!r}: it must be a number")
    used = _used(period, given, tres)
    best = sorted(used.items(), key=lambda item: -item[1][0])[: int(count)]
    rows = [
        ([own_cluster(), user, _full_name(user), account], name, [sums[at], sums[-1]])
        for (account, user), sums in best
        for at, name in enumerate(tres)
    ]
    return f"Top {count} Users {_span(period, seconds=True)}", (_USER_COLUMNS, _VALUES), rows


ENERGY = ReportColumn("Energy", 8)  # in joules
_VALUES = [ReportColumn("Used", 8), ENERGY]
_USER_COLUMNS = [
    ReportColumn("Cluster", 9),
    ReportColumn("Login", 9),
    ReportColumn("Proper Name", 15),
    ReportColumn("Account", 15),
]
REPORTS: Mapping[str, Callable] = {
    "cluster utilization": _utilization,
    "cluster accountutilizationbyuser": _by_account,
    "cluster userutilizationbyaccount": _by_user,
    "user topusage": _top,
}


# ----- output


def _span(period: Period, *, seconds: bool = False) -> str:
    start, end = (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at_s)) for at_s in (period.start_s, period.end_s - 1)
    )
    return f"{start} - {end}" + (f" ({round(period.end_s - period.start_s)} secs)" if seconds else "")


def _full_name(user: str) -> str:
    try:
        return pwd.getpwnam(user).pw_gecos.split(",")[0]
    except KeyError:
        return ""


def _scale(text: str) -> tuple[str, Callable[[float, float], str]]:
    """Return the name of a unit, and a writer of (value, whole), both in seconds."""
    name = text.lower()
    per = {"secper": "seconds", "minper": "minutes", "hourper": "hours"}.get(name)
    if name == "percent":
        return "Percentage of Total", _percent
    unit = UNITS.get(per or name)
    if unit is None:
        raise UsageError(
            f"cannot report in {text[:40]!r}: there are Seconds, Minutes, Hours, Percent, SecPer, MinPer, HourPer"
        )
    words, factor = unit

    def write(value_s: float, whole_s: float) -> str:
        number = f"{round(value_s / factor)}"
        return f"{number}({_percent(value_s, whole_s)})" if per else number

    return words + ("/Percentage of Total" if per else ""), write


def _percent(value_s: float, whole_s: float) -> str:
    return f"{value_s / whole_s:.2%}" if whole_s else "0.00%"


def _print(title: str, shown: tuple, rows: Sequence[tuple], words: Words, tres: Sequence[str], scale: tuple) -> None:
    texts, values = shown
    unit, write = scale
    by_tres = words.has("tres")
    columns = [*texts, *([ReportColumn("TRES Name", 15)] if by_tres else []), *values]
    whole = {name: sum(numbers[0] for _, row, numbers in rows if row == name) for name in tres}
    table = []
    for names, tres_name, numbers in rows:
        total = numbers[-1] if len(values) > 2 else whole[tres_name]
        numbers_text = [
            f"{number:.0f}" if column is ENERGY else write(number, total)
            for column, number in zip(values, numbers, strict=True)
        ]
        table.append([*map(clean, names), *([tres_name] if by_tres else []), *numbers_text])
    if not words.has("noheader"):
        if not words.has("quiet"):
            what = "TRES" if by_tres else TRES[tres[0]]
            print(f"{RULE}\n{title}\nUsage reported in {what} {unit}\n{RULE}")
        table.insert(0, [column.title for column in columns])
    _print_table(table, columns, words)


def _print_table(table: Sequence[Sequence[str]], columns: Sequence[ReportColumn], words: Words) -> None:
    """Print rows of cells, separated by bars or in columns.

    The first row is the header, if there is one.
    """
    if print_separated(table, words):
        return
    widths = [(column.width, True) for column in columns]
    sys.stdout.write(fixed_columns(table, widths, rule=not words.has("noheader")))
