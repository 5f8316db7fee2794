"""hreport: use, waits, waste, time of the nodes, energy and cost of a period.

Each row is of a user, account, partition, node or month, or a combination.

`hpcsched.metrics.usage_report` and `hpcsched.metrics.energy` make the figures. Here are the columns and the formats: tables, CSV,
JSON, and a page of HTML that prints on paper. The page loads nothing and runs no scripts; texts of users are escaped in it.
"""

from __future__ import annotations

import csv
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any, NamedTuple

from hpcsched import client
from hpcsched.cli.output import print_json, run_command
from hpcsched.client import Json
from hpcsched.commands.options import HELP, VERSION, Command, Option, UsageError, Words
from hpcsched.errors import NotFoundError, UnavailableError
from hpcsched.listing.text import clean, columns, date_text
from hpcsched.metrics.energy import SERIES, NodeEnergy, node_energy
from hpcsched.metrics.usage_report import (
    DIMENSIONS,
    HOUR_S,
    ROOT_ACCOUNT,
    HeldPart,
    NodeTime,
    Period,
    ReadJobs,
    UsageRow,
    node_times,
    present_names,
    total_of,
    usage_rows,
    with_first_seen,
)
from hpcsched.model.dates import parse_when
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.tariff import MAX_PERIOD_S, EnergyPrices, PeriodPrices
from hpcsched.model.units import format_time_s

COMMAND = Command(
    "hreport",
    ("[OPTIONS] [REPORT ...]",),
    "Report use, waits, waste, nodes, energy and cost of a period; without a report: all that have figures.",
    (
        Option("accounts", "A", "LIST", "count the jobs of these accounts", aliases=("account",)),
        Option("by", "b", "LIST", "a row for each user, account, partition, node or month, or a combination; default: user"),
        Option("csv", help="print one table as CSV, with plain numbers"),
        Option("endtime", "E", "TIME", "report until TIME; default: now"),
        Option("html", help="print a page of HTML, for a browser or paper"),
        Option("json", help="print the figures as JSON, version 1"),
        Option("mail", "", "LIST", "print a mail to these addresses, as text and HTML, for sendmail -t"),
        Option("month", "m", "MONTH", "report a month: 2027-01, 'this' or 'last'; default: this"),
        Option("nodelist", "N", "HOSTS", "count only these nodes: n[1-3],m7"),
        Option("noheader", "n", help="do not print headers and notes"),
        Option("starttime", "S", "TIME", "report from TIME: now-7days, 2027-01-20"),
        Option("user", "u", "LIST", "count the jobs of these users"),
        HELP,
        VERSION,
    ),
)  # fmt: skip

MOST_MONTHS = 120
ENERGY_STEPS_S = 3600
MAX_ENERGY_STEPS = 10_000
TITLES = {
    "use": "Use",
    "waits": "Waits for resources",
    "waste": "Waste",
    "nodes": "Time of the nodes",
    "energy": "Energy",
    "cost": "Cost",
}
OF_NODES = frozenset({"node", "month"})  # dimensions by which nodes and energy can be reported


class ReportRow(NamedTuple):
    """A row: what jobs used, and the time and energy of its nodes.

    Energy is known of rows of nodes and months only.
    """

    key: tuple[str, ...]
    use: UsageRow
    capacity: NodeTime
    energy: NodeEnergy | None


class UsageReport(NamedTuple):
    """A whole report: `rows` by the dimensions `by`, and their `total`.

    `notes`: what a reader must know of the figures.
    """

    cluster: str
    period: Period
    by: tuple[str, ...]
    rows: list[ReportRow]
    total: ReportRow
    prices: PeriodPrices
    notes: list[str]
    source: str | None  # of the energy; None: there is none


class FigureColumn(NamedTuple):
    """A column: its report, its names in CSV and in tables, its value, and that as text."""

    report: str
    name: str
    title: str
    value: Callable[[ReportRow, UsageReport], float | None]
    text: Callable[[float], str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, _work, argv)


def _work(words: Words) -> int:
    formats = [name for name in ("csv", "html", "json", "mail") if words.has(name)]
    if len(formats) > 1:
        raise UsageError(f"cannot print --{formats[0]} and --{formats[1]} at once")
    by = _dimensions(words)
    chosen = _reports(words.operands, by)
    to = _addresses(words.listed("mail"))
    found = _made(words, by, _now_s())
    shown = chosen or [name for name in TITLES if _has_figures(name, found)]
    if not formats:
        sys.stdout.write(_text(found, shown, header=not words.has("noheader")))
    elif formats == ["csv"]:
        _print_csv(found, shown, header=not words.has("noheader"))
    elif formats == ["json"]:
        print_json(_json(found, shown))
    elif formats == ["html"]:
        sys.stdout.write(_page(found, shown))
    else:
        sys.stdout.write(_mail(found, shown, to))
    return 0


def _now_s() -> float:
    return time.time()


def _addresses(listed: Sequence[str]) -> list[str]:
    from hpcsched.config.keys import BadValue, mail_address  # only mail needs them

    try:
        return [mail_address(word) for word in listed]
    except BadValue as error:
        raise UsageError(f"cannot write a mail: an address {error}") from None


def _dimensions(words: Words) -> tuple[str, ...]:
    by = tuple(dict.fromkeys(word.lower() for word in words.listed("by"))) or ("user",)
    for name in by:
        if name not in DIMENSIONS:
            raise UsageError(f"cannot report by {name[:60]!r}: there are {', '.join(DIMENSIONS)}")
    return by


def _reports(operands: Sequence[str], by: Sequence[str]) -> list[str]:
    chosen = list(dict.fromkeys(word.lower() for word in operands))
    for name in chosen:
        if name not in TITLES:
            raise UsageError(f"cannot report {name[:60]!r}: there are {', '.join(TITLES)}")
        if name == "nodes" and not OF_NODES.issuperset(by):
            raise UsageError(f"cannot report {name} by {','.join(by)}: only by node, month, or both: --by=node")
    return chosen


# ----- the period


def _period(words: Words, now_s: float) -> Period:
    if words.has("month") and (words.has("starttime") or words.has("endtime")):
        raise UsageError("cannot take --month with --starttime or --endtime: give one of them")
    now = datetime.fromtimestamp(now_s)
    month = words.last("month") or "this"
    if words.has("starttime") or words.has("endtime"):
        end_s = parse_when(words.last("endtime"), now_s, past=True) if words.has("endtime") else now_s
        start_s = _start_of(datetime.fromtimestamp(end_s))
        if words.has("starttime"):
            start_s = parse_when(words.last("starttime"), now_s, past=True)
    elif month in ("this", "last"):
        start_s, end_s = _start_of(now), now_s
        if month == "last":
            start_s, end_s = _start_of(datetime.fromtimestamp(start_s - 1)), start_s
    else:
        try:
            first = datetime.strptime(month, "%Y-%m")
        except ValueError:
            raise UsageError(f"cannot report month {month[:40]!r}: write 2027-01, this or last") from None
        start_s, end_s = first.timestamp(), _next_month(first).timestamp()
    if end_s <= start_s:
        raise UsageError("cannot report: the end is not after the start")
    return Period(start_s, end_s, now_s)


def _start_of(day: datetime) -> float:
    return day.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()


def _next_month(first: datetime) -> datetime:
    return first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)


def months_of(period: Period) -> list[Period]:
    """Return the parts of a period in each month of local time, with names like 2027-01."""
    found: list[Period] = []
    at_s = period.start_s
    while at_s < period.end_s:
        first = datetime.fromtimestamp(at_s).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        until_s = min(period.end_s, _next_month(first).timestamp())
        found.append(Period(at_s, until_s, period.now_s, f"{first:%Y-%m}"))
        if len(found) > MOST_MONTHS:
            raise UsageError(f"cannot report by month: the period has more than {MOST_MONTHS} months")
        at_s = until_s
    return found


# ----- the figures


def _made(words: Words, by: tuple[str, ...], now_s: float) -> UsageReport:
    period = _period(words, now_s)
    nodes = client.call("GET", "/v1/nodes")["nodes"]
    names = present_names(nodes)
    wanted = set(expand_hostlist(",".join(words.given["nodelist"]))) if words.has("nodelist") else None
    if wanted is not None:
        nodes = [node for node in nodes if node["name"] in wanted]
    path = client.query("/v1/outages", start_s=period.start_s, end_s=period.end_s, kinds="down,drained,off")
    answer = client.call("GET", path)
    nodes, outages = with_first_seen(nodes, answer["first_seen_s"]), answer["outages"]
    config = client.call("GET", "/v1/config")
    periods = months_of(period) if "month" in by else [period]
    read, prices = ReadJobs(), _prices(period)
    jobs = read.reading(_jobs(words, period, wanted, names))
    use = {row.key: row for row in usage_rows(jobs, periods, by, names, prices.energy)}
    of_nodes = _of_nodes(periods, by, read.held, nodes, outages)
    energy, trouble = _energy(periods, by, nodes, prices.energy) if OF_NODES.issuperset(by) else ({}, "")
    keys = sorted({*use, *of_nodes} if OF_NODES.issuperset(by) else use)
    rows = [
        ReportRow(key, use.get(key) or UsageRow(key=key), of_nodes.get(_of_node(by, key), NodeTime()), energy.get(key))
        for key in keys
    ]
    whole = NodeTime()
    for times in of_nodes.values():
        whole.add(times)
    if OF_NODES.issuperset(by):  # what the nodes used, not only what their jobs caused
        for row in rows:
            measured = row.energy or NodeEnergy(joules=0.0, source="", covered_s=0.0)
            row.use.joules = measured.joules if row.energy is not None else None
            row.use.energy_cost, row.use.co2_g = measured.cost, measured.co2_g
    total = ReportRow((), total_of(row.use for row in rows), whole, _sum_of(energy.values()))
    source = (
        total.energy.source
        if total.energy is not None
        else "+".join(sorted(read.sources))
        if total.use.joules is not None
        else None
    )
    notes = [*_notes(read, nodes, total, config, periods), *([trouble] if trouble else [])]
    return UsageReport(config["config"]["cluster"], period, by, rows, total, prices, notes, source)


def _prices(period: Period) -> PeriodPrices:
    """Return the prices of the period, by the clock of the head."""
    end_s = max(period.start_s, period.until_s)
    path = client.query("/v1/tariff", start_s=max(period.start_s, end_s - MAX_PERIOD_S, 0.0), end_s=end_s)
    return PeriodPrices.read(client.call("GET", path))


def _jobs(words: Words, period: Period, wanted: set[str] | None, names: Mapping[str, str]) -> Iterator[Json]:
    """Yield the jobs of the period, each with what it held of the `wanted` nodes."""
    users, accounts = ",".join(words.listed("user")), words.listed("accounts")
    filters = {"user": users, "start_s": period.start_s, "end_s": period.end_s}
    for job in client.each_of_history(**filters, attempts=1, energy=1):
        if not accounts or (job["account"] or ROOT_ACCOUNT) in accounts:
            yield job if wanted is None else _on_nodes(job, wanted, names)


def _on_nodes(job: Json, wanted: set[str], names: Mapping[str, str]) -> Json:
    """Return the job with only what it held of these nodes."""
    if job["attempts"] is None:
        return job

    def only(attempt: Json) -> Json:
        held = [one for one in attempt["holdings"] if names.get(one["node"], one["node"]) in wanted]
        return attempt | {"holdings": held}

    return job | {"attempts": [only(attempt) for attempt in job["attempts"]]}


def _of_nodes(
    periods: Sequence[Period], by: Sequence[str], held: list[HeldPart], nodes: list[Json], outages: list[Json]
) -> dict[tuple[str, ...], NodeTime]:
    """Return the time of the nodes, by node and month if the report is by these."""
    found: dict[tuple[str, ...], NodeTime] = {}
    for period in periods:
        for node, times in node_times(period, held, nodes, outages).items():
            found.setdefault(_node_key(by, node, period), NodeTime()).add(times)
    return found


def _node_key(by: Sequence[str], node: str, period: Period) -> tuple[str, ...]:
    return tuple([node if name == "node" else period.name for name in by if name in OF_NODES])


def _of_node(by: Sequence[str], key: Sequence[str]) -> tuple[str, ...]:
    """Return the part of a row's key that says which nodes and months it is of."""
    return tuple([value for name, value in zip(by, key, strict=True) if name in OF_NODES])


def _energy(
    periods: Sequence[Period], by: Sequence[str], nodes: Sequence[Json], prices: EnergyPrices
) -> tuple[dict[tuple[str, ...], NodeEnergy], str]:
    """Return the measured energy by node and month, and why it is not known."""
    found: dict[tuple[str, ...], list[NodeEnergy]] = {}
    try:
        for period in periods:
            for node in nodes:
                if (measured := _measured(node["name"], period, prices)) is not None:
                    found.setdefault(_node_key(by, node["name"], period), []).append(measured)
    except UnavailableError as error:
        return {}, f"The energy is not known: {clean(error)}"
    return {key: energy for key, parts in found.items() if (energy := _sum_of(parts)) is not None}, ""


def _measured(node: str, period: Period, prices: EnergyPrices) -> NodeEnergy | None:
    """Return what the meters of a node measured; None: no meters, or no samples then."""
    if period.until_s <= period.start_s:
        return None
    step_s = max(ENERGY_STEPS_S, (period.until_s - period.start_s) / MAX_ENERGY_STEPS)
    asked = {"target": node, "series": ",".join(SERIES), "from_s": period.start_s, "to_s": period.until_s}
    try:
        path = client.query("/v1/metrics/history", **asked, step_s=f"{step_s:.0f}", known_only=1)
        return node_energy(client.call("GET", path), period, prices)
    except NotFoundError:
        return None


def _sum_of(parts: Iterable[NodeEnergy]) -> NodeEnergy | None:
    listed = list(parts)
    if not listed:
        return None
    sources = sorted({source for part in listed for source in part.source.split("+")})
    return NodeEnergy(
        joules=sum(part.joules for part in listed),
        source="+".join(sources),
        covered_s=sum(part.covered_s for part in listed),
        cost=sum(part.cost for part in listed),
        co2_g=sum(part.co2_g for part in listed),
    )


def _notes(
    read: ReadJobs, nodes: Sequence[Json], total: ReportRow, config: Json, periods: Sequence[Period]
) -> list[str]:
    use, capacity = total.use, total.capacity
    notes = []
    hidden = set(config["config"].get("hidden", ()))
    if hidden.intersection({"jobs", "usage", "nodes"}):
        notes.append(
            f"Users may not see all {', '.join(sorted(hidden))} of others here: the report has what you may see."
        )
    if read.unknown:
        notes.append(f"The use of {read.unknown} jobs is not known, because their events do not fit together.")
    elsewhere_s = max(0.0, use.cpu_s - capacity.allocated_s)
    if elsewhere_s > 0.005 * use.cpu_s:
        notes.append(
            f"{_hours_text(elsewhere_s)} cpu-hours were used on nodes that are not there any more, or were larger."
        )
    notes.append(f"Capacity is that of today's {len(nodes)} nodes, each since it was added or first seen.")
    if use.cpu_s:
        notes.append(f"The busy time is known of {use.measured_cpu_s / use.cpu_s:.0%} of the cpu time that jobs held.")
    if total.energy is not None:
        whole_s = len(nodes) * sum(max(0.0, period.until_s - period.start_s) for period in periods)
        notes.append(
            f"Energy: {total.energy.source}, known for {total.energy.covered_s / whole_s:.0%} of the nodes' time; "
            f"'component' is without the rest of the machine."
        )
    if use.measured_gpu_s:
        notes.append(f"GPUs were sampled for {use.measured_gpu_s / use.gpu_s:.0%} of the time that jobs held them.")
    if total.energy is None and use.joules is not None:
        notes.append(f"Energy: what jobs caused on their nodes, without idle nodes ({'+'.join(sorted(read.sources))}).")
    return notes


# ----- the columns


def _hours_text(seconds: float) -> str:
    return f"{seconds / HOUR_S:,.1f}"


def _number_text(value: float) -> str:
    return f"{value:,.1f}"


def _part_text(value: float) -> str:
    return f"{value:.1%}"


def _count_text(value: float) -> str:
    return f"{value:,.0f}"


def _wait_text(value: float) -> str:
    return format_time_s(value)


def _ratio(value: float | None, whole: float) -> float | None:
    return None if value is None or whole <= 0 else value / whole


def _hours(value: Callable[[UsageRow], float | None]) -> Callable[[ReportRow, UsageReport], float | None]:
    def hours(row: ReportRow, report: UsageReport) -> float | None:
        seconds = value(row.use)
        return None if seconds is None else seconds / HOUR_S

    return hours


def _of_capacity(row: ReportRow, report: UsageReport) -> float | None:
    return _ratio(row.use.cpu_s, row.capacity.capacity_s)


def _node_part(value: Callable[[NodeTime], float]) -> Callable[[ReportRow, UsageReport], float | None]:
    return lambda row, report: _ratio(value(row.capacity), row.capacity.capacity_s)


def _kwh(row: ReportRow, report: UsageReport) -> float | None:
    return None if row.use.joules is None else row.use.joules / 3.6e6


def _co2_kg(row: ReportRow, report: UsageReport) -> float | None:
    return None if row.use.joules is None or not report.prices.energy.gco2_per_kwh else row.use.co2_g / 1000


def _cost(row: ReportRow, report: UsageReport) -> float | None:
    return row.use.cost(report.prices.cpu_hour, report.prices.gpu_hour) if report.prices else None


# fmt: off
COLUMNS = (
    FigureColumn("use", "jobs", "jobs", lambda row, _: len(row.use.jobs), _count_text),
    FigureColumn("use", "cpu_hours", "cpu-hours", _hours(lambda use: use.cpu_s), _number_text),
    FigureColumn("use", "gpu_hours", "GPU-hours", _hours(lambda use: use.gpu_s), _number_text),
    FigureColumn("use", "mem_gib_hours", "GiB-hours", lambda row, _: row.use.mem_mib_s / 1024 / HOUR_S, _number_text),
    FigureColumn("use", "node_hours", "node-hours", _hours(lambda use: use.node_s), _number_text),
    FigureColumn("use", "part_of_capacity", "of capacity", _of_capacity, _part_text),
    FigureColumn("waits", "starts", "starts", lambda row, _: len(row.use.waits_s), _count_text),
    FigureColumn("waits", "mean_wait_s", "mean", lambda row, _: row.use.mean_wait_s, _wait_text),
    FigureColumn("waits", "median_wait_s", "median", lambda row, _: row.use.wait_s(0.5), _wait_text),
    FigureColumn("waits", "p90_wait_s", "9 of 10", lambda row, _: row.use.wait_s(0.9), _wait_text),
    FigureColumn("waits", "longest_wait_s", "longest", lambda row, _: row.use.wait_s(1.0), _wait_text),
    FigureColumn("waste", "unused_cpu_hours", "unused cpu-hours", _hours(lambda use: use.unused_cpu_s), _number_text),
    FigureColumn("waste", "unused_part", "of measured",
                 lambda row, _: _ratio(row.use.unused_cpu_s, row.use.measured_cpu_s), _part_text),
    FigureColumn("waste", "unused_mem_gib_hours", "unused GiB-hours",
                 lambda row, _: None if row.use.unused_mem_mib_s is None else row.use.unused_mem_mib_s / 1024 / HOUR_S,
                 _number_text),
    FigureColumn("waste", "idle_gpu_hours", "idle GPU-hours", _hours(lambda use: use.idle_gpu_s), _number_text),
    FigureColumn("waste", "idle_gpu_part", "of sampled",
                 lambda row, _: _ratio(row.use.idle_gpu_s, row.use.measured_gpu_s), _part_text),
    FigureColumn("waste", "requeued_cpu_hours", "requeued", _hours(lambda use: use.requeued_cpu_s), _number_text),
    FigureColumn("waste", "failed_cpu_hours", "failed", _hours(lambda use: use.failed_cpu_s), _number_text),
    FigureColumn("nodes", "capacity_cpu_hours", "cpu-hours", lambda row, _: row.capacity.capacity_s / HOUR_S, _number_text),
    FigureColumn("nodes", "allocated_part", "allocated", _node_part(lambda node: node.allocated_s), _part_text),
    FigureColumn("nodes", "idle_part", "idle", _node_part(lambda node: node.idle_s), _part_text),
    FigureColumn("nodes", "down_part", "down", _node_part(lambda node: node.down_s), _part_text),
    FigureColumn("nodes", "drained_part", "drained", _node_part(lambda node: node.drained_s), _part_text),
    FigureColumn("nodes", "off_part", "off", _node_part(lambda node: node.off_s), _part_text),
    FigureColumn("energy", "kwh", "kWh", _kwh, _number_text),
    FigureColumn("energy", "co2_kg", "kg CO2", _co2_kg, _number_text),
    FigureColumn("cost", "cost", "cost", _cost, lambda value: f"{value:,.2f}"),
)
# fmt: on


def _has_figures(name: str, report: UsageReport) -> bool:
    """Return whether a report that was not asked for is shown."""
    match name:
        case "nodes":
            return OF_NODES.issuperset(report.by)
        case "energy":
            return report.total.use.joules is not None
        case "cost":
            return bool(report.prices)
        case _:
            return True


def _title(column: FigureColumn, report: UsageReport) -> str:
    return report.prices.currency if column.name == "cost" else column.title


def _cell(column: FigureColumn, row: ReportRow, report: UsageReport) -> str:
    value = column.value(row, report)
    return "-" if value is None else column.text(value)


# ----- the formats


def _heading(report: UsageReport) -> str:
    period = report.period
    return f"{clean(report.cluster)}, {date_text(period.start_s)} to {date_text(period.until_s)}"


def _capacity_line(report: UsageReport) -> str:
    whole = report.total.capacity
    if not whole.capacity_s:
        return "No capacity is known for this period."
    parts = (("allocated", whole.allocated_s), ("idle", whole.idle_s), ("down", whole.down_s), ("drained", whole.drained_s),
             ("off", whole.off_s))  # fmt: skip
    words = ", ".join(f"{seconds / whole.capacity_s:.1%} {name}" for name, seconds in parts)
    return f"{_hours_text(whole.capacity_s)} cpu-hours: {words}"


def _text(report: UsageReport, shown: Sequence[str], *, header: bool) -> str:
    parts = [f"{_heading(report)}\n{_capacity_line(report)}\n"] if header else []
    for name in shown:
        of_report = [column for column in COLUMNS if column.report == name]
        titles = [*report.by, *(_title(column, report) for column in of_report)]
        rows = [[*map(clean, row.key), *(_cell(column, row, report) for column in of_report)] for row in report.rows]
        rows.append(
            ["total", *[""] * (len(report.by) - 1), *(_cell(column, report.total, report) for column in of_report)]
        )
        right = range(len(report.by), len(titles))
        parts.append(
            (f"{TITLES[name]}\n" if header else "") + columns(titles if header else [], rows, right=right, rule=True)
        )
    if header:
        parts.append("".join(f"{note}\n" for note in report.notes))
    return "\n".join(parts)


def _print_csv(report: UsageReport, shown: Sequence[str], *, header: bool) -> None:
    """Print one line for each row, without a total; a value that is not known is empty."""
    chosen = [column for column in COLUMNS if column.report in shown]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if header:
        writer.writerow([*report.by, *(column.name for column in chosen)])
    for row in report.rows:
        values = [column.value(row, report) for column in chosen]
        writer.writerow([*map(_csv_text, row.key), *("" if value is None else f"{value:.10g}" for value in values)])


def _csv_text(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula."""
    shown = clean(text)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown


def _json(report: UsageReport, shown: Sequence[str]) -> Json:
    chosen = [column for column in COLUMNS if column.report in shown]

    def values(row: ReportRow) -> dict[str, Any]:
        return {column.name: column.value(row, report) for column in chosen}

    capacity = {f"{name}_cpu_hours": getattr(report.total.capacity, f"{name}_s") / HOUR_S for name in
                ("capacity", "allocated", "idle", "down", "drained", "off")}  # fmt: skip
    rows = [dict(zip(report.by, row.key, strict=True)) | values(row) for row in report.rows]
    return {
        "version": 1,
        "cluster": report.cluster,
        "start_s": report.period.start_s,
        "end_s": report.period.until_s,
        "by": list(report.by),
        "rows": rows,
        "total": values(report.total),
        "capacity": capacity,
        "currency": report.prices.currency,
        "energy_source": report.source,
        "notes": report.notes,
    }


# ----- the page: everything is in it, so that it can be sent, kept and printed

STYLE = """
:root { color-scheme: light; font: 11pt/1.45 system-ui, "Liberation Sans", Arial, sans-serif; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1a1a1a; background: #fff; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
p.period { margin-top: .2rem; color: #444; }
.bar { display: flex; height: 1.4rem; border: 1px solid #555; margin: 1rem 0 .3rem; }
.bar span { display: block; border-right: 1px solid #fff; }
.allocated { background: #1b5e9e; } .idle { background: #dfe6ec; } .down { background: #b3261e; }
.drained { background: #e08a00; } .off { background: #7a7a7a; }
.swatch { display: inline-block; width: .8em; height: .8em; border: 1px solid #555; margin-right: .3em; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: #444; padding-bottom: .2rem; }
th, td { padding: .2rem .5rem; text-align: right; border-bottom: 1px solid #ccc; overflow-wrap: anywhere; }
th.key, td.key { text-align: left; } thead th { border-bottom: 2px solid #333; } tfoot td, tfoot th { font-weight: 600; }
ul.notes { color: #333; font-size: .9rem; padding-left: 1.2rem; }
@page { size: A4; margin: 15mm; }
@media print {
  body { margin: 0; max-width: none; padding: 0; font-size: 9.5pt; }
  .bar span, .bar, .swatch { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  h2 { break-after: avoid; } tr { break-inside: avoid; } thead { display: table-header-group; }
  tfoot { display: table-row-group; }
}
"""


def _page(report: UsageReport, shown: Sequence[str]) -> str:
    """Return the report as a page of HTML."""
    title = escape(f"Use of {clean(report.cluster)}")
    span = escape(f"{date_text(report.period.start_s)} to {date_text(report.period.until_s)}")
    body = [
        f"<h1>{title}</h1>",
        f'<p class="period">{span}</p>',
        _bar(report),
        f"<p>{_with_swatches(_capacity_line(report))}</p>",
    ]
    body += [_html_table(name, report) for name in shown]
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    body.append(f'<h2>About the figures</h2><ul class="notes">{notes}</ul>')
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}, {span}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _mail(report: UsageReport, shown: Sequence[str], to: Sequence[str]) -> str:
    """Return the report as a mail, with the tables as text and as HTML."""
    from hpcsched.alerts.messages import Letter, Sender, mail_of  # only mail needs them

    host = socket.getfqdn()
    sender = Sender(cluster=report.cluster, mail_from=f"{client.my_name()}@{host}")
    span = f"{report.period.start_s:.0f}-{report.period.until_s:.0f}"
    days = " to ".join(date_text(at_s).partition("T")[0] for at_s in (report.period.start_s, report.period.until_s - 1))
    letter = Letter(
        id=f"report.{span}.{report.period.now_s:.0f}",
        at_s=report.period.now_s,
        subject=f"[{report.cluster}] use from {days}",
        lines=tuple(_text(report, shown, header=True).split("\n")),
        thread="report",
        html=_page(report, shown),
    )
    message = mail_of(letter, sender, to)
    message.replace_header("List-Id", message["List-Id"].replace("<alerts.", "<reports.", 1))
    return message.as_bytes(policy=message.policy.clone(linesep="\n")).decode("ascii")


def _bar(report: UsageReport) -> str:
    whole = report.total.capacity
    if not whole.capacity_s:
        return ""
    parts = "".join(
        f'<span class="{name}" style="width:{100 * seconds / whole.capacity_s:.2f}%"></span>'
        for name, seconds in (("allocated", whole.allocated_s), ("idle", whole.idle_s), ("down", whole.down_s),
                              ("drained", whole.drained_s), ("off", whole.off_s))
        if seconds > 0
    )  # fmt: skip
    return f'<div class="bar" aria-hidden="true">{parts}</div>'


def _with_swatches(line: str) -> str:
    """Return the line of the capacity, with the colour of each part before its figure."""
    head, _, parts = escape(line).partition(": ")
    if not parts:
        return head
    shown = (f'<span class="swatch {part.split()[-1]}"></span>{part}' for part in parts.split(", "))
    return f"{head}: {', '.join(shown)}"


def _html_table(name: str, report: UsageReport) -> str:
    of_report = [column for column in COLUMNS if column.report == name]
    heads = [f'<th class="key" scope="col">{escape(dimension)}</th>' for dimension in report.by]
    heads += [f'<th scope="col">{escape(_title(column, report))}</th>' for column in of_report]

    def line(keys: Sequence[str], row: ReportRow) -> str:
        cells = [f'<td class="key">{escape(clean(key))}</td>' for key in keys]
        cells += [f"<td>{escape(_cell(column, row, report))}</td>" for column in of_report]
        return f"<tr>{''.join(cells)}</tr>"

    rows = "\n".join(line(row.key, row) for row in report.rows)
    foot = line(("total", *[""] * (len(report.by) - 1)), report.total)
    return (
        f"<h2>{TITLES[name]}</h2>\n<table><thead><tr>{''.join(heads)}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n"
        f"<tfoot>{foot}</tfoot></table>"
    )
