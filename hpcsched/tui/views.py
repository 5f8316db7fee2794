"""The six screens of hmon, and the details of a job or node.

Answers of the controller come in, rows of text go out. Knows no terminal, no clock and no connection. A row is drawn when it is
visible: of 10,000 jobs, some twenty are. Every screen fits 80 columns. Times are of the controller's clock, shown in the zone of
this machine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, overload

from hpcsched.listing.jobs import (
    ACTIVE_STATES,
    detail_lines,
    end_s,
    energy_text,
    gpu_use_text,
    reason,
    shown_state,
    step_text,
)
from hpcsched.listing.overview import takes_jobs, totals, troubles, worst_first
from hpcsched.listing.text import clean, columns, when_text
from hpcsched.model.units import format_mem, format_time_s
from hpcsched.tui.lines import Line, bar, cell, state_style, wrapped
from hpcsched.tui.reading import ENERGY_DAYS, MOST_OF_ENERGY, ClusterScreen, QueuedJob
from hpcsched.tui.training import checkpoint_lines, curve_lines, training_lines

Json = Mapping[str, Any]

SCREENS = ("overview", "jobs", "nodes", "queue", "health", "use")
PARTS = {  # what each screen needs, see `Asked`
    "overview": frozenset({"jobs"}),
    "jobs": frozenset({"queue"}),
    "nodes": frozenset[str](),
    "queue": frozenset({"jobs", "reservations"}),
    "health": frozenset({"slow", "alerts"}),
    "use": frozenset({"shares", "energy"}),
}
SEARCHED = (
    ("display_id", "name", "user", "account", "partition", "state", "node_list", "reason", "reason_detail")
    + ("features", "partitions", "link_why", "drained_why", "launch_failure")
)  # fmt: skip
SPAN_S = 86_400.0  # of the schedule
ALERT_STYLES = {"critical": "bold red", "warning": "yellow"}
CURVE_HEIGHT = 8
LOG_LINES = 10


class Row(NamedTuple):
    """A row: of a "job" or a "node", by which keys act on it, or "text".

    `key`: a single job (of an array its first task) or node. `name`: how commands name all that the row stands for.
    """

    kind: str
    key: str
    name: str
    value: Any

    def text(self) -> str:
        """Return what a filter looks into, in lower case."""
        if self.kind == "text":
            return "".join(text for text, _ in self.value).lower()
        return " ".join(str(self.value.get(name, "")) for name in SEARCHED).lower()


class QueuedRows(Sequence[Row]):
    """The rows of the queue, made when they are looked at: there may be 10,000."""

    def __init__(self, queue: Sequence[QueuedJob]) -> None:
        self._queue = queue

    def __len__(self) -> int:
        return len(self._queue)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        return _queued_row(self._queue[at]) if isinstance(at, int) else [_queued_row(job) for job in self._queue[at]]

    def texts(self) -> list[str]:
        """Return what a filter looks into, row by row, in lower case."""
        return [" ".join((str(number), *values)).lower() for number, *values in self._queue]

    def only(self, places: Iterable[int]) -> QueuedRows:
        """Return the rows at these places."""
        return QueuedRows([self._queue[at] for at in places])

    def place_of(self, row: Row) -> int | None:
        """Return where a row of the queue is now; None: nowhere."""
        names = [job.display_id for job in self._queue]
        return names.index(row.value.display_id) if row.value.display_id in names else None


@dataclass(frozen=True)
class View:
    """A screen: a header that does not scroll, and rows.

    `schedule_from_s`: jobs are drawn as bars of time, from then on.
    """

    header: Line
    rows: Sequence[Row]
    schedule_from_s: float | None = None

    @cached_property
    def texts(self) -> list[str]:
        """What a filter looks into, row by row, in lower case. A filter asks again with each key."""
        return self.rows.texts() if isinstance(self.rows, QueuedRows) else [row.text() for row in self.rows]

    def place_of(self, row: Row, near: int) -> int:
        """Return where a row is now; `near`, if it is gone.

        Rows move little: the places near that one are looked at first.
        """
        if isinstance(self.rows, QueuedRows) and type(row.value) is QueuedJob:
            found = self.rows.place_of(row)
            return near if found is None else found
        for distance in range(max(near + 1, len(self.rows) - near)):
            for at in {near - distance, near + distance}:
                if 0 <= at < len(self.rows) and self.rows[at][:3] == row[:3]:
                    return at
        return near


def text_row(*parts: tuple[str, str]) -> Row:
    """Return a row of text, on which no key acts."""
    return Row("text", "", "", list(parts))


def filtered(view: View, words: str) -> View:
    """Return the view with those rows that have all `words`."""
    wanted = words.lower().split()
    if not wanted:
        return view
    texts = view.texts
    places: Iterable[int] = range(len(texts))
    for word in wanted:
        places = [at for at in places if word in texts[at]]
    rows = view.rows.only(places) if isinstance(view.rows, QueuedRows) else [view.rows[at] for at in places]
    return View(view.header, rows, view.schedule_from_s)


def row_line(view: View, row: Row, width: int) -> Line:
    """Return a row as it is drawn."""
    if row.kind == "text":
        line: Line = row.value
        return line
    if row.kind == "node":
        return _node_line(row.value)
    if view.schedule_from_s is not None:
        return _schedule_line(row.value, view.schedule_from_s, width)
    if type(row.value) is QueuedJob:
        return _queued_line(row.value, width)
    return _job_line(row.value, width)


def view_of(name: str, screen: ClusterScreen, width: int) -> View:
    """Return the screen of this name."""
    if not screen.now_s:
        return View([], [])  # nothing is known yet
    match name:
        case "overview":
            return _overview(screen, width)
        case "jobs":
            return View([(_queued_header(width), "bold")], QueuedRows(screen.queue))
        case "nodes":
            return View([(NODE_HEADER, "bold")], [_node_row(node) for node in screen.nodes])
        case "queue":
            return _schedule(screen, width)
        case "health":
            return _health(screen, width)
        case _:
            return _use(screen, width)


def headline(screen: ClusterScreen) -> Line:
    """Return the first line: the cluster in figures, or that its controller does not answer."""
    clock = time.strftime("%H:%M:%S", time.localtime(screen.now_s)) if screen.now_s else ""
    ping = screen.controller
    if ping is None:
        if not screen.trouble:
            return [(" hmon: asking hpcschedd ...", "bold")]
        seen = " (below: as last seen)" if screen.nodes else ""
        return [(f" hpcschedd does not answer{seen}", "bold red")]
    sums, wrong = totals(screen.nodes), len(troubles(dict(ping), screen.nodes))
    counts = ping["counts"]
    running = sum(count for state, count in counts.items() if state in ACTIVE_STATES)
    gpus = f"   gpu {sums['gpus_alloc']}/{sums['gpus']}" if sums["gpus"] else ""
    return [
        (f" hmon: {clean(ping['cluster'])} ", "bold"),
        (f"  {sums['up']}/{sums['nodes']} nodes take jobs", "" if sums["up"] == sums["nodes"] else "yellow"),
        (f"   {running} run {counts.get('PENDING', 0)} wait   cpu {sums['cpus_alloc']}/{sums['cpus']}{gpus}", ""),
        (f"   {wrong} wrong" if wrong else "", "bold red"),
        (f"   {clock}", "dim"),
    ]


def tabs(chosen: str, width: int, note: str = "") -> Line:
    """Return the second line: the screens with their keys, and at its end a note."""
    line: Line = [(" ", "")]
    for at, name in enumerate(SCREENS, 1):
        line += [(f"[{at} {name}]", "reverse") if name == chosen else (f" {at} {name} ", ""), (" ", "")]
    room = max(0, width - sum(len(text) for text, _ in line) - 1)
    return [*line, (cell(note, room, right=True), "bold yellow") if note else ("? help".rjust(room), "dim")]


# ----- jobs


def _queued_widths(width: int) -> tuple[int, int, int, int, int]:
    """Return the columns of id, name, user, partition, and of the time left (0: not shown)."""
    more = max(0, width - 80)
    return 11 + min(6, more // 6), 12 + min(20, more // 3), 8 + min(8, more // 6), 8, 11 if more >= 20 else 0


def _queued_header(width: int) -> str:
    ids, names, users, partitions, lefts = _queued_widths(width)
    left = f"{'LEFT':>{lefts}} " if lefts else ""
    return (
        f"  {'JOBID':<{ids}} {'NAME':<{names}} {'USER':<{users}} {'PARTITN':<{partitions}} {'STATE':<9} "
        f"{'TIME':>8} {left}NODES (REASON)"
    )


def _queued_row(job: QueuedJob) -> Row:
    name = job.display_id
    return Row("job", first_task(name), command_name(name), job) if name.endswith("]") else Row("job", name, name, job)


def command_name(display_id: str) -> str:
    """Return how commands name the job: ``10_[3-9]`` of ``10_[3-9%2]``."""
    return re.sub(r"%\d+\]$", "]", display_id)


def first_task(display_id: str) -> str:
    """Return the id of the first task of a row: ``10_3`` of ``10_[3-9,12]``."""
    return re.sub(r"\[(\d+)[^\]]*\]$", r"\1", display_id)


def _queued_line(job: QueuedJob, width: int) -> Line:
    ids, names, users, partitions, lefts = _queued_widths(width)
    state, style = ("LIMBO", "bold red") if job.is_in_limbo else (job.state, state_style(job.state))
    left = f"{cell(job.left, lefts, right=True)} " if lefts else ""
    return [
        (cell(job.display_id, ids) + " ", "bold"),
        (f"{cell(job.name, names)} {cell(job.user, users)} {cell(job.partition, partitions)} ", ""),
        (cell(state, 9) + " ", style),
        (f"{cell(job.time, 8, right=True)} {left}", ""),
        (clean(job.where), ""),
    ]


def _job_name(job: Json) -> str:
    """Return the id of a job, or of the tasks of an array that the answer shows as one."""
    tasks = job.get("folded") or {}
    return f"{job['array_job_id']}_[{tasks['tasks']}]" if tasks.get("count", 1) > 1 else str(job["display_id"])


def _job_row(job: Json) -> Row:
    return Row("job", str(job["display_id"]), _job_name(job), job)


def _job_line(job: Json, width: int) -> Line:
    """Return a job of the overview: its progress and end, or when it starts and why not now."""
    state = shown_state(dict(job))
    head: Line = [
        (cell(_job_name(job), 11) + " ", "bold"),
        (f"{cell(job['name'], 12)} {cell(job['user'], 8)} ", ""),
        (cell(state, 9) + " ", state_style(state)),
    ]
    if state not in ACTIVE_STATES:
        return [*head, (cell(_wait_text(job), max(20, width - 48)), "")]
    latest_s = end_s(dict(job))
    ends = f"to {time.strftime('%H:%M', time.localtime(latest_s))}" if latest_s is not None else ""
    step, gpu = step_text(dict(job)), gpu_use_text(dict(job))
    facts = [format_time_s(job["elapsed_s"]), ends, "" if step == "N/A" else step, "" if gpu == "N/A" else f"gpu {gpu}"]
    return [*head, (" ".join([*filter(None, facts), job["node_list"]]), "")]


def _wait_text(job: Json) -> str:
    expected_s = job["expected_start_s"]
    start = f"{time.strftime('%H:%M', time.localtime(expected_s))} " if expected_s is not None else ""
    return f"{start}{reason(dict(job))}{': ' + job['reason_detail'] if job['reason_detail'] else ''}"


# ----- nodes

NODE_HEADER = "  NODE       STATE     CPUS               MEMORY               GPUS     JOBS"


def _node_row(node: Json) -> Row:
    return Row("node", node["name"], node["name"], node)


def _node_line(node: Json) -> Line:
    gpus = f"gpu {node['gpus_alloc']}/{len(node['gpus'])}" if node["gpus"] else ""
    jobs = ",".join(map(str, sorted(set(node["jobs"]))))
    cpus = cell(f"{node['cpus_alloc']}/{node['cpus']}", 7)
    head: Line = [(cell(node["name"], 10) + " ", "bold"), (cell(node["state"], 9) + " ", state_style(node["state"]))]
    if note := _node_note(node):
        return [*head, (f"{cpus} {cell(jobs, 8)} ", ""), (clean(note), "yellow")]
    memory = f"{format_mem(node['mem_alloc_mib'])}/{format_mem(node['mem_mib'])}"
    return [
        *head,
        (f"{bar(node['cpus_alloc'], node['cpus'], 10)} {cpus} ", ""),
        (f"{bar(node['mem_alloc_mib'], node['mem_mib'], 8)} {cell(memory, 11)} ", ""),
        (f"{gpus:<8} {clean(jobs)}", ""),
    ]


def _node_note(node: Json) -> str:
    if node["link"] != "up":
        return str(node["link_why"] or node["power_why"] or "")
    if node["drained"]:
        return str(node["drained_why"])
    return str(node["launch_failure"]) if node["launch_failures"] else ""


def node_rows(name: str, screen: ClusterScreen, width: int) -> list[Row]:
    """Return the facts of a node, and its jobs."""
    node = screen.node(name)
    if node is None:
        return [text_row((f"there is no node {clean(name)}", "red"))]
    facts = [
        ("state", node["state"]),
        ("note", _node_note(node)),
        ("address", f"{node['host']}:{node['port']}"),
        ("cpus", f"{node['cpus_alloc']} of {node['cpus']} held by jobs"),
        ("memory", f"{format_mem(node['mem_alloc_mib'])} of {format_mem(node['mem_mib'])} held by jobs"),
        ("gpus", f"{node['gpus_alloc']} of {len(node['gpus'])} held by jobs" if node["gpus"] else ""),
        ("features", ", ".join(node["features"])),
        ("partitions", ", ".join(node["partitions"])),
        ("reservation", node["reservation"]),
        ("agent", node["agent_version"] or ""),
    ]
    rows = [text_row((f"node {clean(name)}", "bold"))]
    for fact, value in facts:
        for at, part in enumerate(wrapped(str(value or ""), width - 14)):
            rows.append(text_row((f"  {'' if at else fact:<11} ", "dim"), (part, "")))
    held = [job for job in screen.running if name in job["nodes"]]
    return [*rows, text_row(), *map(_job_row, held)]


# ----- the other screens


def _overview(screen: ClusterScreen, width: int) -> View:
    bad = [node for node in screen.nodes if not takes_jobs(node)]
    order = [*bad, *(node for node in screen.nodes if takes_jobs(node))]
    rows = [_node_row(node) for node in order[: max(8, len(bad[:12]))]]
    if len(order) > len(rows):
        rows.append(text_row((f"  {len(order) - len(rows)} more nodes: 3", "dim")))
    rows.append(text_row((f"  {'JOBID':<11} {'NAME':<12} {'USER':<8} {'STATE':<9} RUNS, OR WHY IT WAITS", "bold")))
    jobs = [*screen.running, *screen.waiting]
    rows += [_job_row(job) for job in jobs] or [text_row(("  no jobs", "dim"))]
    if len(screen.waiting) >= 100:
        rows.append(text_row(("  more jobs wait: 2", "dim")))
    return View([(NODE_HEADER, "bold")], rows)


def _schedule(screen: ClusterScreen, width: int) -> View:
    """Return what runs, is reserved and will start in the next day, as bars."""
    room = _schedule_room(width)
    marks = [" "] * room
    for hour in range(0, 24, 4):
        at = round(hour / 24 * room)
        label = time.strftime("%H:%M", time.localtime(screen.now_s + hour * 3600))
        if at + len(label) <= room:
            marks[at : at + len(label)] = list(label)
    header = f"  {'JOBID':<11} {'NAME':<10} {'NODES':<10} {''.join(marks)}"
    rows = []
    for one in screen.reservations:
        drawn = _time_bar(one["start_s"] - screen.now_s, one["end_s"] - screen.now_s, room, "R")
        name = f"{cell('reserved', 11)} {cell(one['name'], 10)} {cell(one['node_list'], 10)} "
        rows.append(text_row((f"  {name}", "magenta"), (drawn, "magenta")))
    rows += [_job_row(job) for job in (*screen.running, *screen.waiting)]
    return View([(header, "bold")], rows, screen.now_s)


def _schedule_room(width: int) -> int:
    return max(10, width - 37)


def _time_bar(begin_s: float, end_s: float, room: int, mark: str) -> str:
    """Return a bar from `begin_s` to `end_s`, both from now on, on a scale of `SPAN_S`."""
    first = max(0, min(room, int(begin_s / SPAN_S * room)))
    last = max(first + 1, min(room, round(end_s / SPAN_S * room)))
    return "." * first + (mark * (last - first))[: room - first] + "." * (room - last)


def _schedule_line(job: Json, now_s: float, width: int) -> Line:
    room = _schedule_room(width)
    nodes = job["node_list"] or f"{job['num_nodes']} nodes"
    head = f"{cell(_job_name(job), 11)} {cell(job['name'], 10)} {cell(nodes, 10)} "
    if shown_state(dict(job)) in ACTIVE_STATES:
        latest_s = end_s(dict(job))
        drawn = _time_bar(0.0, SPAN_S if latest_s is None else latest_s - now_s, room, "#")
        return [(head, ""), (drawn, "green")]
    expected_s = job["expected_start_s"]
    if expected_s is None or expected_s - now_s >= SPAN_S:
        when = f"{when_text(expected_s, now_s)} " if expected_s is not None else ""
        return [(head, ""), (cell(f"{when}({reason(dict(job))})", room), "yellow")]
    begin_s = max(0.0, expected_s - now_s)
    limit_s = job["time_limit_s"]
    return [(head, ""), (_time_bar(begin_s, SPAN_S if limit_s is None else begin_s + limit_s, room, "="), "yellow")]


def _health(screen: ClusterScreen, width: int) -> View:
    """Return what is wrong with nodes and controller, the alerts, and what holds up the queue."""
    rows: list[Row] = []
    ping = dict(screen.controller or {"not_taken": (), "undecided": 0})
    for trouble in troubles(ping, screen.nodes):
        rows += [text_row(("  " + part, "red")) for part in wrapped(trouble["text"], width - 4)]
        rows.append(text_row(("      $ " + clean(trouble["command"]), "")))
    rows += _alert_rows(screen, width)
    for finding in screen.findings.get("findings", ()):
        where = f" on {finding['node']}" if finding["node"] else ""
        text = f"{finding['cause']}{where}: {finding['text']}"
        rows += [text_row(("  " + part, "yellow")) for part in wrapped(text, width - 4)]
        rows += [text_row(("      " + part, "")) for part in wrapped(finding["remedy"], width - 8)]
    if not rows:
        rows.append(text_row(("  no node and nothing in the queue needs help, and no alert is active", "green")))
        rows += [text_row(("  " + part, "dim")) for part in wrapped(screen.findings.get("text", ""), width - 4)]
    return View([("  WHAT IS WRONG, AND WHAT HELPS   (hpcsched doctor looks deeper)", "bold")], rows)


def _alert_rows(screen: ClusterScreen, width: int) -> list[Row]:
    """Return the alerts, the worst first; those that are over last, and dim."""
    rows: list[Row] = []
    for alert in worst_first(screen.alerts.get("alerts", ())):
        is_over = alert["phase"] == "resolved"
        style = "dim" if is_over else ALERT_STYLES.get(alert["severity"], "")
        where = ", ".join(alert["labels"].values())
        quiet = f" ({alert['quiet']})" if alert["quiet"] else ""
        since = when_text(alert["ended_at_s"] if is_over else alert["since_s"], screen.now_s)
        head = f"{alert['severity']} {alert['rule']}{' of ' + where if where else ''}: {alert['phase']} since {since}{quiet}"
        rows += [text_row(("  " + part, style)) for part in wrapped(head, width - 4)]
        rows += [text_row(("      " + part, "dim" if is_over else "")) for part in wrapped(alert["text"], width - 8)]
        if alert["remedy"] and not is_over:
            rows.append(text_row(("      $ " + clean(alert["remedy"]), "")))
    if screen.alerts.get("left_out"):
        rows.append(
            text_row((f"  and {screen.alerts['left_out']} more alerts, which are too many to be told", "yellow"))
        )
    rows += [text_row(("  " + part, "dim")) for part in wrapped(screen.alerts.get("trouble", ""), width - 4)]
    return rows


def _use(screen: ClusterScreen, width: int) -> View:
    """Return shares and usage of accounts and users, and the energy of the users' jobs."""
    header = f"  {'ACCOUNT':<20} {'USER':<10} {'SHARES':>7} {'DUE':>6} {'USED':>6}  {'':<10} {'FAIRSHARE':>9}"
    rows = []
    for line in screen.shares:
        fair = "" if line["fairshare"] is None else f"{line['fairshare']:.3f}"
        used = line["norm_usage"]
        account = "  " * min(6, line["depth"]) + (line["account"] or "root")
        text = (
            f"  {cell(account, 20)} {cell(line['user'], 10)} {line['shares']:>7} {line['norm_shares']:>6.1%} "
            f"{used:>6.1%}  {bar(used, 1.0, 10)} {fair:>9}"
        )
        rows.append(text_row((text, "" if line["user"] else "bold")))
    rows = rows or [text_row(("  no usage yet", "dim"))]
    return View([(header, "bold")], [*rows, *_energy_rows(screen, width)])


def _energy_rows(screen: ClusterScreen, width: int) -> list[Row]:
    """Return the energy of the users' jobs, with price and CO2 if the configuration has them."""
    energy = screen.energy
    title = f"  ENERGY OF THE LAST {ENERGY_DAYS} DAYS"
    if not energy or not energy.users:
        why = "no meter of a node is known, and no power is declared for a node (idle_watts, peak_watts)"
        return [
            text_row(),
            text_row((title, "bold")),
            *(text_row(("  " + part, "dim")) for part in wrapped(why, width - 4)),
        ]
    whole = sum(one.joules for one in energy.users)
    rows = [
        text_row(),
        text_row((title + ("" if energy.is_whole else f", OF THE NEWEST {MOST_OF_ENERGY} JOBS"), "bold")),
    ]
    for one in energy.users:
        head = f"  {cell(one.user, 10)} {bar(one.joules, whole, 8)} {one.joules / max(whole, 1e-9):>6.1%}  "
        rows.append(text_row((head, ""), (clean(energy_text([one._asdict()], screen.currency)), "")))
    return rows


# ----- one job


def job_rows(screen: ClusterScreen, width: int) -> list[Row]:
    """Return facts of the selected job, its training, and the end of its output."""
    job = screen.job
    if job is None:
        return [text_row(("this job is not known any more: hacct shows ended jobs", "yellow"))]
    rows = []
    lines = detail_lines(dict(job), screen.now_s)
    if screen.job_energy:
        text = energy_text([dict(use) for use in screen.job_energy], screen.currency, dict(job))
        lines.append(f"  {'energy':<10} {clean(text)}")
    for at, line in enumerate(lines):
        parts = wrapped(line[13:], width - 14) if at and len(line) > width else [line[13:] if at else line]
        rows += [text_row((line[:13] if at and not row else " " * 13 * bool(at), "dim"), (part, "" if at else "bold"))
                 for row, part in enumerate(parts)]  # fmt: skip
    if screen.run.points:
        drawn = [*training_lines(screen.run, width - 2), *curve_lines(screen.run, width - 2, CURVE_HEIGHT)]
        rows += [text_row(), *(text_row(*line) for line in (*drawn, *checkpoint_lines(screen.run, width - 2)))]
    if screen.log:
        rows += [text_row(), text_row(("output (l follows it)", "bold"))]
        rows += [text_row(("| " + clean(line.expandtabs()), "dim")) for line in screen.log[-LOG_LINES:]]
    return rows


# ----- without a terminal


def plain_text(screen: ClusterScreen) -> str:
    """Return the overview as plain text: nodes, jobs, the selected job, the end of its log."""
    ping = screen.controller
    if ping is None:
        text = f"hpcschedd does not answer: {clean(screen.trouble)}\n"
    else:
        up = format_time_s(ping["now_s"] - ping["started_at_s"])
        text = f"hpcschedd is running (process {ping['pid']}, for {up})\n"
    nodes = [
        (clean(node["name"]), str(node["state"]), f"{node['cpus_alloc']}/{node['cpus']}", clean(_node_note(node)))
        for node in screen.nodes
    ]
    jobs = [
        (
            *map(clean, (job.display_id, job.name, job.user)),
            "LIMBO" if job.is_in_limbo else job.state,
            job.time,
            clean(job.where),
        )
        for job in screen.queue
    ]
    if nodes:
        text += "\n" + columns(("NODE", "STATE", "CPUS", "NOTE"), nodes)
    header = ("JOBID", "NAME", "USER", "STATE", "TIME", "NODELIST(REASON)")
    if jobs:
        text += "\n" + columns(header, jobs, right=(0, 4))
    wrong = troubles(dict(ping), screen.nodes) if ping is not None else []
    text += "".join(f"\n! {clean(one['text'])}\n  {clean(one['command'])}\n" for one in wrong)
    if screen.job is not None:
        text += "\n" + "\n".join(detail_lines(dict(screen.job), screen.now_s)) + "\n"
    return text + "".join(f"  | {clean(line)}\n" for line in screen.log[-LOG_LINES:])
