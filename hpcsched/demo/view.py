"""The live view: a scene in, a picture for a terminal of some size out. Nothing else: no clock, no terminal, no reading.

Terminals of 80 columns and 28 lines see all panels; lower ones do without the log and older lines of the story, narrower
ones without the queue. Text that came from elsewhere (logs, reasons) is shown as text, never as markup or control characters.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hpcsched.demo.scene import Moment, Scene
from hpcsched.demo.trainview import BORDER, training_panel

STATE_STYLES = {
    "IDLE": "green",
    "MIXED": "cyan",
    "ALLOCATED": "cyan",
    "DOWN": "bold red",
    "UNKNOWN": "yellow",
    "RUNNING": "green",
    "CONFIGURING": "yellow",
    "COMPLETING": "yellow",
    "PENDING": "yellow",
    "COMPLETED": "dim",
    "FAILED": "bold red",
    "NODE_FAIL": "bold red",
}
MOMENT_STYLES = {"act": "bold", "good": "green", "bad": "bold red", "note": ""}
MOMENT_MARKS = {"act": "▸", "good": "✔", "bad": "✘", "note": "·"}
WIDE = 78  # columns from which nodes and queue stand beside the curve; below, the queue is not shown
FULL_HEIGHT = 28  # lines from which everything is shown
LOG_LINES = 4
STORY_LINES = 7
STORY_LINES_LOW = 3  # on terminals that are not high
LIMBO_LINES = 7
WHY_LINES = 2


def picture(scene: Scene, width: int, height: int) -> RenderableType:
    """Return the scene for a terminal of `width` columns and `height` lines."""
    layout = Layout()
    parts = [Layout(headline(scene), size=1)]
    body = Layout()
    if width >= WIDE:
        left_width = min(46, max(38, width * 45 // 100))
        left, right = Layout(size=left_width), Layout()
        left.split_column(
            Layout(nodes_panel(scene, left_width - 4), size=len(scene.nodes) + 3 + _limbo_lines(scene)),
            Layout(queue_panel(scene, left_width - 4)),
        )
        right.update(training_panel(scene.training, width - left_width - 4))
        body.split_row(left, right)
    else:
        body.split_column(
            Layout(nodes_panel(scene, width - 4), size=len(scene.nodes) + 3 + _limbo_lines(scene)),
            Layout(training_panel(scene.training, width - 4)),
        )
    parts.append(body)
    high = height >= FULL_HEIGHT
    if high:
        parts.append(Layout(log_panel(scene.log, width - 4), size=LOG_LINES + 2))
    lines = STORY_LINES if high else STORY_LINES_LOW
    parts.append(Layout(story_panel(scene.story, lines), size=lines + 2))
    layout.split_column(*parts)
    return layout


def headline(scene: Scene) -> Text:
    """Return the first line: what happens now, the controller, the time."""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(" hpcsched demo ", style="bold reverse")
    text.append(f" {clock(scene.elapsed_s)} ", style="bold")
    text.append(f" {scene.title} ", style="bold cyan")
    text.append("  Ctrl-C ends it", style="dim")
    return text


def nodes_panel(scene: Scene, width: int) -> Panel:
    """Return the nodes, and the controller."""
    table = Table.grid(padding=(0, 1))
    for node in scene.nodes:
        table.add_row(*_node_cells(node, stale=scene.controller is None))
    rows: list[RenderableType] = [table]
    for node in scene.nodes:
        if node["state"] == "DOWN":
            rows += [Text(f"  {part}", style="red") for part in _wrapped(node["link_why"], width - 2)[:WHY_LINES]]
    rows.append(_controller_line(scene))
    return Panel(Group(*rows), title="nodes", title_align="left", border_style=BORDER, padding=(0, 1))


def _limbo_lines(scene: Scene) -> int:
    return WHY_LINES * sum(node["state"] == "DOWN" for node in scene.nodes)


def _node_cells(node: Mapping[str, Any], *, stale: bool) -> list[Text]:
    state = str(node["state"])
    style = "dim" if stale else STATE_STYLES.get(state, "")
    used, cpus = node["cpus_alloc"], node["cpus"]
    jobs = Counter(node["jobs"])
    return [
        Text("●", style=style),
        Text(node["name"], style="bold"),
        Text(f"{state:<9}", style=style),
        Text("■" * used + "□" * max(0, cpus - used) + f" {used}/{cpus} cpus", style="dim" if stale else ""),
        Text("job " + ",".join(map(str, sorted(jobs))) if jobs else "", style="dim"),
    ]


def _controller_line(scene: Scene) -> Text:
    if scene.controller is None:
        return Text("✘ hpcschedd: dead (above: as last seen)", style="bold red")
    up_s = scene.controller["now_s"] - scene.controller["started_at_s"]
    line = Text("● ", style="green")
    line.append("hpcschedd", style="bold")
    line.append(f" pid {scene.controller['pid']}, term {scene.controller['epoch']}, up {clock(up_s)}", style="dim")
    return line


def queue_panel(scene: Scene, width: int) -> Panel:
    """Return the queue: who runs where, who waits and why; arrays as one line."""
    rows: list[RenderableType] = []
    for row in queue_rows(scene.jobs):
        rows.extend(_queue_lines(row, width))
    return Panel(Group(*rows), title="queue", title_align="left", border_style=BORDER, padding=(0, 1))


def queue_rows(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each job, and one for all tasks of an array: id, name, state, where or why, detail, seconds."""
    rows: dict[int, dict[str, Any]] = {}
    tasks: dict[int, list[Mapping[str, Any]]] = {}
    for job in jobs:
        if job["array_job_id"] is not None:
            tasks.setdefault(job["array_job_id"], []).append(job)
        else:
            rows[job["id"]] = _job_row(job)
    for array_id, members in tasks.items():
        rows[array_id] = _array_row(array_id, members)
    return [rows[number] for number in sorted(rows)]


def _job_row(job: Mapping[str, Any]) -> dict[str, Any]:
    waits = job["state"] == "PENDING"
    limbo = job["reason"] == "NodeDown"
    return {
        "id": str(job["display_id"]),
        "name": job["name"],
        "state": job["state"],
        "where": f"({job['reason']})" if waits else job["node_list"],
        "detail": job["reason_detail"] if limbo or (waits and job["attempt"]) else "",
        "attempt": job["attempt"],
        "elapsed_s": job["elapsed_s"],
        "limbo": limbo,
    }


def _array_row(array_id: int, tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    states = Counter(task["state"] for task in tasks)
    running = states["RUNNING"] + states["CONFIGURING"] + states["COMPLETING"]
    done = states["COMPLETED"]
    state = (
        "RUNNING" if running else "PENDING" if states["PENDING"] else "COMPLETED" if done == len(tasks) else "FAILED"
    )
    return {
        "id": str(array_id),
        "name": tasks[0]["name"],
        "state": state,
        "where": f"{done}/{len(tasks)} done",
        "detail": "",
        "attempt": 0,
        "elapsed_s": 0.0,
        "limbo": False,
    }


def _queue_lines(row: Mapping[str, Any], width: int) -> list[Text]:
    style = "bold red" if row["limbo"] else STATE_STYLES.get(row["state"], "")
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{row['id']:>4} ", style="bold")
    line.append(f"{row['name']:<8} ")
    line.append(f"{'IN LIMBO' if row['limbo'] else row['state']:<10} ", style=style)
    line.append(row["where"], style="dim" if row["state"] == "COMPLETED" else "")
    if row["attempt"]:
        line.append(f" attempt {row['attempt']}", style="magenta")
    elif row["state"] == "RUNNING" and row["elapsed_s"]:
        line.append(f" {clock(row['elapsed_s'])}", style="dim")
    lines = [line]
    if row["detail"]:
        lines += [
            Text(f"     {part}", style="red" if row["limbo"] else "yellow")
            for part in _wrapped(row["detail"], width - 5)
        ]
    return lines


def log_panel(lines: Sequence[str], width: int) -> Panel:
    """Return the end of the job's output."""
    shown = [_fitted(line, width, "dim") for line in lines[-LOG_LINES:]]
    return Panel(Group(*shown), title="hlogs -f", title_align="left", border_style=BORDER, padding=(0, 1))


def story_panel(story: Sequence[Moment], lines: int) -> Panel:
    """Return the last lines of the story."""
    shown = [moment_text(moment) for moment in story[-lines:]]
    return Panel(Group(*shown), title="story", title_align="left", border_style="cyan", padding=(0, 1))


def moment_text(moment: Moment) -> Text:
    """Return one line of the story."""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{clock(moment.at_s)} ", style="dim")
    text.append(f"{MOMENT_MARKS[moment.kind]} {moment.text}", style=MOMENT_STYLES[moment.kind])
    return text


def clock(seconds: float) -> str:
    """Return seconds as m:ss."""
    whole = max(0, int(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def _fitted(line: str, width: int, style: str) -> Text:
    return Text(_clean(line)[:width], style=style, no_wrap=True)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(_clean(text), max(10, width))[:LIMBO_LINES]


def _clean(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
