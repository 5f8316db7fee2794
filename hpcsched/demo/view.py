"""The live view: a scene in, a picture for a terminal of some size out. Nothing else: no clock, no terminal, no reading.

Terminals of 80 columns and 28 lines see all panels; lower ones do without the log and older lines of the story, narrower
ones without the queue. Text that came from elsewhere (logs, reasons) is shown as text, never as markup or control characters.
"""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hpcsched.demo.training import Checkpoint, MetricsReader, Training
from hpcsched.errors import UnavailableError
from hpcsched.loopback.cluster import LocalCluster

# ----- a curve in text: points on a canvas of Braille cells, each two dots wide and four high
# Knows no colours and no terminal: it returns, for each cell, its character and which layer it belongs to.
# Source: Unicode, block "Braille Patterns" (U+2800: the code point's low byte is the set of dots).


# Bit of each dot by (row, column) in a cell.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The values that the canvas spans, both ends included."""

    low: float
    high: float

    def part(self, value: float) -> float:
        """Return where `value` lies, from 0 to 1."""
        span = self.high - self.low
        return 0.0 if span <= 0 else min(1.0, max(0.0, (value - self.low) / span))


class Canvas:
    """`width` by `height` cells. Later layers win a cell's name, and all keep their dots."""

    def __init__(self, width: int, height: int, x: Range, y: Range) -> None:
        self._width, self._height = width, height
        self._x, self._y = x, y
        self._bits = [[0] * width for _ in range(height)]
        self._layers: list[list[str]] = [[""] * width for _ in range(height)]

    def line(self, points: Sequence[tuple[float, float]], layer: str) -> None:
        """Draw a line through the points."""
        dots = [self._dot(x, y) for x, y in points]
        for dot in dots[:1]:
            self._set(*dot, layer)
        for (x0, y0), (x1, y1) in zip(dots, dots[1:], strict=False):
            count = max(abs(x1 - x0), abs(y1 - y0), 1)
            for i in range(1, count + 1):
                self._set(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count), layer)

    def marks(self, points: Sequence[tuple[float, float]], layer: str) -> None:
        """Draw each point as a small square of dots."""
        for x, y in points:
            column, row = self._dot(x, y)
            for dx in (0, 1):
                for dy in (0, 1):
                    self._set(column + dx, row + dy, layer)

    def upright(self, x: float, layer: str) -> None:
        """Draw a dotted vertical line at `x`, behind what is drawn already."""
        column, _ = self._dot(x, self._y.low)
        free = [row for row in range(self._height) if not self._layers[row][column // 2]]
        for row in free:
            self._set(column, row * 4, layer)
            self._set(column, row * 4 + 2, layer)

    def rows(self) -> list[list[tuple[str, str]]]:
        """Return (text, layer) runs for each row, from the top."""
        return [self._runs(bits, layers) for bits, layers in zip(self._bits, self._layers, strict=True)]

    def _runs(self, bits: list[int], layers: list[str]) -> list[tuple[str, str]]:
        runs: list[tuple[str, str]] = []
        for bit, layer in zip(bits, layers, strict=True):
            char = chr(_BLANK + bit) if bit else " "
            if runs and runs[-1][1] == layer:
                runs[-1] = (runs[-1][0] + char, layer)
            else:
                runs.append((char, layer))
        return runs

    def _dot(self, x: float, y: float) -> tuple[int, int]:
        column = round(self._x.part(x) * (self._width * 2 - 1))
        row = round((1.0 - self._y.part(y)) * (self._height * 4 - 1))
        return column, row

    def _set(self, column: int, row: int, layer: str) -> None:
        if 0 <= column < self._width * 2 and 0 <= row < self._height * 4:
            self._bits[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
            self._layers[row // 4][column // 2] = layer


def smoothed(values: Sequence[float], keep: float = 0.85) -> list[float]:
    """Return the exponential moving average of the values, without the bias of its start."""
    average, weight, result = 0.0, 0.0, []
    for value in values:
        average = keep * average + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result.append(average / weight)
    return result


# ----- the live view's panel of the training: progress, loss curve, checkpoints. A run in, text out, as in `view`


BORDER = "bright_black"
LAYER_STYLES = {
    "raw": "bright_black",
    "lost": "red",
    "loss": "bold bright_blue",
    "validation": "bold yellow",
    "restart": "magenta",
}
BASE_MARK, INCREMENT_MARK = "█", "▄"
MARKS_LABEL = f"{BASE_MARK}full {INCREMENT_MARK}incr. "


def training_panel(training: Training, width: int) -> RenderableType:
    """Return the loss curve with its numbers and the checkpoints; it takes the height that it is given."""
    return _TrainingPanel(training, width)


class _TrainingPanel:
    """Drawn when the height is known."""

    def __init__(self, training: Training, width: int) -> None:
        self._training, self._width = training, width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = max(3, (options.height or 20) - 2 - 4)
        training = self._training
        parts: list[RenderableType] = [*training_lines(training, self._width)]
        parts += curve_lines(training, self._width, height)
        parts += checkpoint_lines(training, self._width)
        yield Panel(
            Group(*parts),
            title="training",
            title_align="left",
            border_style=BORDER,
            padding=(0, 1),
            height=options.height,
        )


def training_lines(training: Training, width: int) -> list[Text]:
    """Return a progress bar with the step, and the figures of the last step."""
    if not training.points:
        return [Text("waiting for the first step (the ranks import torch and find each other)", style="dim"), Text("")]
    total = training.total_steps
    label = f" step {training.step}/{total or '?'}"
    room = max(8, width - len(label) - 1)
    filled = round(training.done * room)
    bar = Text("━" * filled, style="bright_blue")
    bar.append("━" * (room - filled), style="bright_black")
    bar.append(label, style="bold")
    figures = Text(no_wrap=True, overflow="ellipsis")
    kept = training.kept
    figures.append(f"loss {smoothed([point.loss for point in kept[-60:]])[-1]:.3f}", style="bold bright_blue")
    if training.kept_validation:
        figures.append(f"  validation {training.kept_validation[-1].loss:.3f}", style="yellow")
    if training.attempt:
        figures.append(f"  attempt {training.attempt}", style="magenta")
    if training.step_s:
        figures.append(f"  {training.step_s * 1e3:.0f} ms a step", style="dim")
    return [bar, figures]


def curve_lines(training: Training, width: int, height: int) -> list[Text]:
    """Return the loss curve with its scale; `height` lines."""
    label = 5
    if not training.points:
        return [Text("") for _ in range(height)]
    kept, lost, validation = training.kept, training.lost, training.kept_validation
    values = [point.loss for point in (*kept, *lost, *validation)]
    y = Range(low=min(values), high=max(values))
    x = Range(low=0, high=max(training.total_steps or 0, training.points[-1].step, 20))
    canvas = Canvas(max(10, width - label), height, x, y)
    canvas.line([(point.step, point.loss) for point in kept], "raw")
    for attempt in sorted({point.attempt for point in lost}):
        canvas.line([(point.step, point.loss) for point in lost if point.attempt == attempt], "lost")
    canvas.line(list(zip([p.step for p in kept], smoothed([p.loss for p in kept]), strict=True)), "loss")
    canvas.marks([(point.step, point.loss) for point in validation], "validation")
    for _, step, _ in training.resumes:
        canvas.upright(step, "restart")
    lines = []
    for number, runs in enumerate(canvas.rows()):
        shown = y.high if number == 0 else y.low if number == height - 1 else None
        line = Text(f"{shown:4.1f} " if shown is not None else " " * label, style="dim", no_wrap=True)
        for text, layer in runs:
            line.append(text, style=LAYER_STYLES.get(layer, ""))
        lines.append(line)
    return lines


def checkpoint_lines(training: Training, width: int) -> list[Text]:
    """Return the checkpoints: their number, the last one, and a mark for each (high: a base, low: an increment)."""
    made = training.checkpoints
    if not made:
        return [Text("no checkpoint yet", style="dim"), Text("")]
    last = made[-1]
    line = Text(f"{len(made)} saved", style="bold", no_wrap=True, overflow="ellipsis")
    line.append("; last: ", style="dim")
    line.append(f"step {last.step}, {kind_word(last)}, {size_text(last.size_bytes)}", style="green")
    marks = Text(MARKS_LABEL, style="dim", no_wrap=True)
    for item in made[-(width - len(MARKS_LABEL)) :]:
        marks.append(BASE_MARK if item.is_base else INCREMENT_MARK, style="magenta" if item.attempt else "green")
    return [line, marks]


def kind_word(checkpoint: Checkpoint) -> str:
    """Return what people call this kind of checkpoint."""
    return "full" if checkpoint.is_base else "increment"


def size_text(size_bytes: float) -> str:
    """Return a size in MB."""
    return f"{size_bytes / 1e6:.1f} MB"


# ----- what is to be seen at one moment, and the reading of it: nodes, queue, training, log
# `Observer.look` asks the API and reads the share as a user could; when there is no controller, nodes and jobs stay as
# they were last seen. Knows nothing of how a scene is shown.


LOG_TAIL_BYTES = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One line of the story: when it happened, what kind of thing it is, and the words."""

    at_s: float
    kind: str  # "act", "good", "bad" or "note"
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """All that a frame shows. `controller` is what it answered to a ping, None while there is none."""

    elapsed_s: float = 0.0
    now_s: float = 0.0
    title: str = ""
    controller: Mapping[str, Any] | None = None
    nodes: tuple[Mapping[str, Any], ...] = ()
    jobs: tuple[Mapping[str, Any], ...] = ()
    training: Training = field(default_factory=Training)
    log: tuple[str, ...] = ()
    story: tuple[Moment, ...] = ()

    def job(self, job_id: int) -> Mapping[str, Any] | None:
        """Return the job with this number, None if it is not there."""
        return next((job for job in self.jobs if job["id"] == job_id), None)

    def node(self, name: str) -> Mapping[str, Any] | None:
        """Return the node of this name, None if it is not there."""
        return next((node for node in self.nodes if node["name"] == name), None)


class Observer:
    """Looks at a cluster and at one training run on its share."""

    def __init__(self, cluster: LocalCluster, metrics: Path) -> None:
        self._cluster = cluster
        self._metrics = MetricsReader(metrics)
        self._nodes: tuple[Mapping[str, Any], ...] = ()
        self._jobs: tuple[Mapping[str, Any], ...] = ()
        self.log_file: Path | None = None

    def look(self, *, elapsed_s: float, now_s: float, title: str, story: tuple[Moment, ...]) -> Scene:
        """Return what is to be seen now."""
        controller = self._ask()
        return Scene(
            elapsed_s=elapsed_s,
            now_s=now_s,
            title=title,
            controller=controller,
            nodes=self._nodes,
            jobs=self._jobs,
            training=self._metrics.read(),
            log=tail_lines(self.log_file, LOG_TAIL_BYTES) if self.log_file is not None else (),
            story=story,
        )

    def _ask(self) -> Mapping[str, Any] | None:
        try:
            ping = self._cluster.api("GET", "/v1/ping")
            self._nodes = tuple(self._cluster.api("GET", "/v1/nodes")["nodes"])
            self._jobs = tuple(self._cluster.api("GET", "/v1/jobs")["jobs"])
        except UnavailableError:
            return None
        return ping


def tail_lines(path: Path, limit_bytes: int) -> tuple[str, ...]:
    """Return the last whole lines of a file, as text; none if it is not there."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - limit_bytes))
            data = stream.read()
    except OSError:
        return ()
    lines = data.decode("utf-8", "replace").splitlines()
    return tuple(lines[1:] if size > limit_bytes else lines)


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
