"""`hpcsched top`: nodes, queue, and one job with its curve and log, on a live screen.

`ClusterReader` asks the controller through its socket, as any user may. `picture` draws a `ClusterScreen`, also for `hpcsched
demo`; it knows no clock, terminal or connection.

Rules: if the controller does not answer, the screen says so and keeps its last contents; the output is plain text, once, if it
is not a terminal that can be redrawn. Everything fits into 80 columns and 24 lines; lower terminals show less. Text from users
(names, reasons, logs) is shown as text, never as markup or control characters.

Source: Unicode, block "Braille Patterns" (U+2800: the low byte of the code point is the set of dots).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import select
import signal
import stat
import sys
import termios
import textwrap
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcsched import client
from hpcsched.errors import HpcschedError, NotFoundError, UnavailableError
from hpcsched.listing.jobs import ACTIVE_STATES, detail_lines
from hpcsched.listing.plot import BrailleCanvas
from hpcsched.listing.text import clean, columns

TIMEOUT_S = 5.0
INTERVAL_S = 2.0
LOG_EVERY_S = 1.0
LOG_BYTES = 4000
SEPARATOR = "\x1f"  # never in a value: the controller replaces control characters
COLUMNS = SEPARATOR.join(("%A", "%i", "%j", "%u", "%T", "%M", "%R", "%r"))
ARROWS = {b"\x1b[A": "k", b"\x1b[B": "j", b"\x1bOA": "k", b"\x1bOB": "j"}


@click.command()
@click.argument("job", default="")
@click.option("--once", is_flag=True, help="Print plain text once and exit, as if the output is not a terminal.")
@click.option(
    "--interval",
    metavar="SECONDS",
    type=click.FloatRange(min=0.2),
    default=INTERVAL_S,
    show_default=True,
    help="Time between two refreshes.",
)
def top(job: str, once: bool, interval: float) -> int:
    """Show nodes, queue, and a job's training curve and log, live.

    Without JOB, the first of your running jobs is selected. Keys: j and k (or arrows) select another job, q quits.
    """
    console = Console(highlight=False)
    reader = ClusterReader()
    if once or not is_live(console):
        screen = reader.look(job or None)
        if screen.controller is None:
            raise UnavailableError(screen.trouble)
        click.echo(plain_text(screen), nl=False)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the terminal is restored on the way
    with contextlib.suppress(KeyboardInterrupt):
        _refresh(console, reader, job or None, interval)
    return 0


def is_live(console: Console) -> bool:
    """Return whether the output is a terminal that can be redrawn and shows our characters."""
    return console.is_terminal and not console.is_dumb_terminal and (console.encoding or "").lower() == "utf-8"


def _refresh(console: Console, reader: ClusterReader, chosen: str | int | None, interval_s: float) -> None:
    """Show the cluster until the user quits. Raises NotFoundError if `chosen` names no job."""
    with _keyboard() as next_key, Live(console=console, screen=True, auto_refresh=False) as live:
        screen, due_s = reader.look(chosen), time.monotonic() + interval_s
        while True:
            chosen = screen.job["id"] if screen.job is not None else chosen
            live.update(picture(screen, *console.size), refresh=True)
            key = next_key(due_s - time.monotonic())
            if key == "q":
                return
            if key in ("j", "k"):
                chosen = _neighbour(screen, 1 if key == "j" else -1)
            elif key:
                continue
            screen, due_s = reader.look(chosen), time.monotonic() + interval_s


def _neighbour(screen: ClusterScreen, step: int) -> int | None:
    """Return the job `step` lines below the selected one; None if there are no jobs."""
    numbers = [job.number for job in screen.queue]
    selected = screen.job["id"] if screen.job is not None else None
    at = numbers.index(selected) + step if selected in numbers else 0
    return numbers[max(0, min(len(numbers) - 1, at))] if numbers else None


@contextlib.contextmanager
def _keyboard() -> Iterator[Callable[[float], str]]:
    """Give a function that waits some seconds for a key; it returns "" if none was pressed."""
    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):

        def no_key(wait_s: float) -> str:
            time.sleep(max(0.0, wait_s))
            return ""

        yield no_key
        return

    pending = b""

    def next_key(wait_s: float) -> str:
        nonlocal pending
        if not pending:
            if not select.select([descriptor], [], [], max(0.0, wait_s))[0]:
                return ""
            pending = os.read(descriptor, 64)
        arrow = next((code for code in ARROWS if pending.startswith(code)), b"")
        key = ARROWS.get(arrow) or pending[:1].decode("latin-1").lower() or "q"  # the end of the input quits
        pending = pending[len(arrow) or 1 :]
        return key

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield next_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class ClusterReader:
    """Asks the controller for what a screen shows.

    `metrics` is the training's file, if the caller knows it.
    """

    def __init__(self, metrics: Path | None = None) -> None:
        self._metrics = metrics
        self._runs: dict[int, MetricsReader] = {}
        self._last = ClusterScreen()
        self._log_of: tuple[int, float] = (0, 0.0)

    def look(self, chosen: str | int | None = None) -> ClusterScreen:
        """Return the cluster as it is now, with the job `chosen`.

        By default this is our first running job.

        Raises NotFoundError if there is no job of a name that a user chose; a job's number may have been forgotten.
        """
        try:
            self._last = self._asked(chosen)
        except UnavailableError as error:
            self._last = dataclasses.replace(self._last, controller=None, trouble=str(error), now_s=time.time())
            if self._last.job is not None:  # its file may still grow
                self._last = dataclasses.replace(self._last, run=self._runs[self._last.job["id"]].read())
        return self._last

    def _asked(self, chosen: str | int | None) -> ClusterScreen:
        ping = client.call("GET", "/v1/ping", timeout_s=TIMEOUT_S)
        nodes = client.call("GET", "/v1/nodes", timeout_s=TIMEOUT_S)["nodes"]
        query = client.query("/v1/queue", format=COLUMNS, state="ALL", order="phase", fold="1", noheader="1")
        queue = _queue_of(client.fetch_text(query, timeout_s=TIMEOUT_S))
        job = self._job(chosen if chosen is not None else _first_of_mine(queue))
        screen = ClusterScreen(
            now_s=ping["now_s"],
            title="hpcsched top",
            subtitle=time.strftime("%H:%M:%S"),
            hint="j/k select a job, q quits",
            controller=ping,
            nodes=tuple(nodes),
            queue=queue,
            job=job,
        )
        return (
            screen if job is None else dataclasses.replace(screen, run=self._run(job).read(), log=self._log(job["id"]))
        )

    def _job(self, chosen: str | int | None) -> dict[str, Any] | None:
        if chosen is None:
            return None
        try:
            answer = client.call("GET", client.job_path(str(chosen)), timeout_s=TIMEOUT_S)
        except NotFoundError:
            if isinstance(chosen, str):
                raise
            return None
        job: dict[str, Any] = answer["jobs"][0]
        return job

    def _run(self, job: dict[str, Any]) -> MetricsReader:
        """Return the reader of the job's metrics file, or of its reports if that is not readable."""
        report = job.get("training") or {}
        path = self._metrics
        if path is None and report.get("directory"):
            path = Path(report["directory"]).parent / "metrics.jsonl"
        known = self._runs.get(job["id"])
        if known is None or known.path != path:
            known = self._runs[job["id"]] = MetricsReader(path)
        if report and (path is None or not os.access(path, os.R_OK)):
            known.add_report(report)
        return known

    def _log(self, number: int) -> tuple[str, ...]:
        """Return the last lines of the job's output.

        Those seen last if it cannot be read at the moment.
        """
        known_of, at_s = self._log_of
        known = self._last.log if known_of == number else ()
        if known_of == number and time.monotonic() < at_s + LOG_EVERY_S:
            return known
        self._log_of = number, time.monotonic()
        try:
            part = client.fetch_log(str(number), offset=-LOG_BYTES, timeout_s=TIMEOUT_S)
        except UnavailableError:
            return known
        except HpcschedError as error:
            return (str(error),)
        lines = part.data.decode("utf-8", "replace").splitlines()
        return tuple(lines[1:] if part.offset else lines)


def _queue_of(text: str) -> tuple[QueuedJob, ...]:
    """Return the jobs of the controller's lines."""
    jobs = []
    for line in text.splitlines():
        number, display_id, name, user, state, spent, where, reason = line.split(SEPARATOR)
        jobs.append(
            QueuedJob(
                number=int(number),
                display_id=display_id,
                name=name,
                user=user,
                state=state,
                time=spent,
                where=where,
                reason=reason,
            )
        )
    return tuple(jobs)


def _first_of_mine(queue: tuple[QueuedJob, ...]) -> int | None:
    """Return the job to select first: a running one of ours, else the first in the queue.

    None if there is none.
    """
    me = client.my_name()
    mine = [job for job in queue if job.user == me and job.state in ACTIVE_STATES]
    return next((job.number for job in (*mine, *queue)), None)


STATE_STYLES = {
    "IDLE": "green",
    "MIXED": "cyan",
    "ALLOCATED": "cyan",
    "RUNNING": "green",
    "COMPLETED": "dim",
    "CANCELLED": "dim",
    **dict.fromkeys(("DOWN", "FAILED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY"), "bold red"),
}  # any other state: yellow
STORY_STYLES = {"act": "bold", "good": "green", "bad": "bold red", "note": ""}
STORY_MARKS = {"act": "▸", "good": "✔", "bad": "✘", "note": "·"}
CURVE_STYLES = {
    "raw": "bright_black",
    "lost": "red",
    "loss": "bold bright_blue",
    "validation": "bold yellow",
    "restart": "magenta",
}
BASE_MARK, INCREMENT_MARK = "█", "▄"
MARKS_LABEL = f"{BASE_MARK}full {INCREMENT_MARK}incr. "
WIDE = 78  # columns: from here on nodes and queue are beside the job
HIGH = 28  # lines: from here on log and story have more than three lines


# ----- the course of a training run, as its metrics.jsonl records it
# The file is read while it grows; an incomplete line is ignored. If two attempts did the same step, the later attempt counts.


READ_MAX_BYTES = 32 << 20  # of a longer file, only its end is read
STEP_MAX = 1 << 53  # numbers beyond are not exact as floats
POINTS_MAX = 20_000  # beyond that, every second point is dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class LossPoint:
    """The loss of one step of one attempt."""

    step: int
    loss: float
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCheckpoint:
    """A published checkpoint. `kind` is "base", or the kind of increment."""

    step: int
    kind: str
    size_bytes: int
    attempt: int

    @property
    def is_base(self) -> bool:
        return self.kind == "base"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """A run so far, in the order of the file.

    `resumes` are (attempt, step that it resumed from).
    """

    points: tuple[LossPoint, ...] = ()
    validation: tuple[LossPoint, ...] = ()
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    resumes: tuple[tuple[int, int], ...] = ()
    total_steps: int | None = None
    world: int = 0
    backend: str = ""
    step_s: float | None = None  # moving average

    @property
    def step(self) -> int:
        """The last completed step."""
        return self.points[-1].step if self.points else 0

    @property
    def attempt(self) -> int:
        """The attempt that completed the last step."""
        return self.points[-1].attempt if self.points else 0

    @property
    def done(self) -> float:
        """The completed fraction of the training, 0 to 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else 0.0

    @property
    def lost(self) -> tuple[LossPoint, ...]:
        """Steps after the checkpoint that a later attempt resumed from: they had to be repeated."""
        return tuple(point for point in self.points if not self._counts(point))

    @property
    def counted(self) -> tuple[LossPoint, ...]:
        """The steps that were not lost, in order."""
        return tuple(point for point in self.points if self._counts(point))

    @property
    def counted_validation(self) -> tuple[LossPoint, ...]:
        """The validation losses that were not lost, in order."""
        return tuple(point for point in self.validation if self._counts(point))

    def _counts(self, point: LossPoint) -> bool:
        return not any(point.attempt < attempt and point.step > step for attempt, step in self.resumes)


class MetricsReader:
    """Follows one metrics file, or without a path the reports of a job."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._offset = 0
        self._incomplete = b""
        self._points: list[LossPoint] = []
        self._validation: list[LossPoint] = []
        self._checkpoints: list[SavedCheckpoint] = []
        self._resumes: list[tuple[int, int]] = []
        self._last: dict[str, Any] = {}
        self._total_steps: int | None = None
        self._step_s: float | None = None

    def read(self) -> TrainingRun:
        """Return the run so far, an empty one if there is no file yet."""
        for line in self._new_lines():
            try:
                value = json.loads(line)
                if isinstance(value, dict) and "step" in value:
                    self._add(value)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                continue  # incomplete, of a killed attempt, or written by another program
        return TrainingRun(
            points=tuple(self._points),
            validation=tuple(self._validation),
            checkpoints=tuple(self._checkpoints),
            resumes=tuple(self._resumes),
            total_steps=self._total_steps,
            world=self._last.get("world", 0),
            backend=self._last.get("backend", ""),
            step_s=self._step_s,
        )

    def add_report(self, report: Mapping[str, Any]) -> None:
        """Add the last reported step, for runs whose file cannot be read here."""
        if report["loss"] is not None and report["step"] not in {point.step for point in self._points[-1:]}:
            self._add({**report, "resumed_from": report["checkpoint_step"] or 0})

    def _new_lines(self) -> list[bytes]:
        if self.path is None:
            return []
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return []
        with open(descriptor, "rb") as stream:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):  # the job chose the path, and may have made a pipe there
                return []
            stream.seek(max(self._offset, facts.st_size - READ_MAX_BYTES))
            data = stream.read(READ_MAX_BYTES)
            self._offset = stream.tell()
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        return lines

    def _add(self, line: Mapping[str, Any]) -> None:
        attempt = int(line.get("attempt", 0))
        if "loss" in line:
            self._add_step(line, attempt)
        if "val_loss" in line:
            self._validation.append(_point(line["step"], line["val_loss"], attempt))
        if "checkpoint_kind" in line and not line.get("checkpoint_error"):
            self._checkpoints.append(
                SavedCheckpoint(
                    step=int(line["checkpoint_step"]),
                    kind=str(line["checkpoint_kind"]),
                    size_bytes=min(int(line["checkpoint_bytes"]), STEP_MAX),
                    attempt=attempt,
                )
            )

    def _add_step(self, line: Mapping[str, Any], attempt: int) -> None:
        point = _point(line["step"], line["loss"], attempt)
        if attempt > (self._points[-1].attempt if self._points else 0):
            self._resumes.append((attempt, int(line.get("resumed_from", 0))))
        self._points.append(point)
        if len(self._points) > POINTS_MAX:
            del self._points[-2::-2]
        self._last = {**self._last, **line}
        total = int(line.get("total_steps") or 0)
        if 0 < total <= STEP_MAX:
            self._total_steps = total
        if (took := line.get("t_step_s")) is not None:
            self._step_s = float(took) if self._step_s is None else 0.9 * self._step_s + 0.1 * float(took)


def _point(step: int, loss: float, attempt: int) -> LossPoint:
    """Return a point that can be drawn. Raises ValueError for values that are not finite."""
    if not math.isfinite(float(loss)) or not 0 <= int(step) <= STEP_MAX:
        raise ValueError("not a point of a curve")
    return LossPoint(step=int(step), loss=float(loss), attempt=attempt)


# ----- what a screen shows


@dataclass(frozen=True, kw_only=True, slots=True)
class StoryLine:
    """One line of the demo's story. `kind` is "act", "good", "bad" or "note"."""

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedJob:
    """One line of the queue.

    `number` addresses the job; `where` is its node list, or why it waits in parentheses.
    """

    number: int
    display_id: str
    name: str
    user: str
    state: str
    time: str
    where: str
    reason: str = "None"

    @property
    def is_in_limbo(self) -> bool:
        """Whether a node of this job does not answer, so that nothing is known of it."""
        return self.reason == "NodeDown" and self.state in ACTIVE_STATES


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterScreen:
    """All that is shown. `controller` is its answer to a ping, None if it did not answer."""

    now_s: float = 0.0
    title: str = ""  # the command, then what happens
    subtitle: str = ""
    hint: str = ""
    controller: Mapping[str, Any] | None = None
    trouble: str = ""  # why the controller does not answer
    nodes: tuple[Mapping[str, Any], ...] = ()
    queue: tuple[QueuedJob, ...] = ()
    job: Mapping[str, Any] | None = None  # the selected job, as the API shows one job
    run: TrainingRun = field(default_factory=TrainingRun)
    log: tuple[str, ...] = ()
    story: tuple[StoryLine, ...] = ()

    def node(self, name: str) -> Mapping[str, Any] | None:
        """Return the node of this name, None if there is none."""
        return next((node for node in self.nodes if node["name"] == name), None)


# ----- the whole screen


def picture(screen: ClusterScreen, width: int, height: int) -> RenderableType:
    """Return the screen for a terminal of `width` columns and `height` lines."""
    layout, body = Layout(), Layout()
    log_lines, story_lines = (4, 7) if height >= HIGH else (3, 3) if height >= 20 else (0, 1)
    beside = width >= WIDE
    left_width = min(46, max(38, width * 45 // 100)) if beside else width
    nodes = nodes_panel(screen, left_width - 4, rows=max(1, height // 4))
    top = Layout(nodes, size=len(nodes.renderable.renderables) + 2)  # type: ignore[union-attr]
    job = Layout(_JobPanel(screen, width - left_width if beside else width))
    if beside:
        left = Layout(size=left_width)
        left.split_column(top, Layout(_QueuePanel(screen)))
        body.split_row(left, job)
    else:
        body.split_column(top, Layout(_QueuePanel(screen)), job) if not screen.story else body.split_column(top, job)
    parts = [Layout(headline(screen), size=1), body]
    if log_lines and not (screen.story and height < HIGH):
        parts.append(Layout(_panel("log", log_text(screen.log, log_lines)), size=log_lines + 2))
    if screen.story:
        shown = [story_text(line) for line in screen.story[-story_lines:]]
        parts.append(Layout(_panel("story", *shown, style="cyan"), size=story_lines + 2))
    layout.split_column(*parts)
    return layout


def headline(screen: ClusterScreen) -> Text:
    """Return the first line: the command, what happens, and how to end it."""
    text = _line((f" {screen.title} ", "bold reverse"), (f" {clean(screen.subtitle)} ", "bold cyan"))
    return text.append(f"  {screen.hint}", style="dim")


def story_text(line: StoryLine) -> Text:
    """Return one line of the story."""
    return _line(
        (f"{clock(line.at_s)} ", "dim"), (f"{STORY_MARKS[line.kind]} {clean(line.text)}", STORY_STYLES[line.kind])
    )


def log_text(lines: Sequence[str], count: int) -> RenderableType:
    """Return the last `count` lines of a job's output."""
    return Group(*[_line((clean(line.expandtabs()), "dim")) for line in lines[-count:]])


def clock(seconds: float) -> str:
    """Return seconds as m:ss."""
    whole = max(0, int(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def _line(*parts: tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _panel(title: str, *lines: RenderableType, style: str = "bright_black", height: int | None = None) -> Panel:
    return Panel(Group(*lines), title=title, title_align="left", border_style=style, padding=(0, 1), height=height)


def _state_style(state: str) -> str:
    return STATE_STYLES.get(state, "yellow")


# ----- nodes and queue


def nodes_panel(screen: ClusterScreen, width: int, *, rows: int) -> Panel:
    """Return at most `rows` nodes, those that are down first, and the controller."""
    stale = screen.controller is None
    lines: list[RenderableType] = []
    order = sorted(screen.nodes, key=lambda node: node["state"] != "DOWN") if len(screen.nodes) > rows else screen.nodes
    names = max((len(node["name"]) for node in order[:rows]), default=0)
    for node in order[:rows]:
        lines.append(_node_line(node, names, stale=stale))
        if node["state"] == "DOWN" and node["link_why"]:
            lines += [Text(f"  {part}", style="red") for part in _wrapped(node["link_why"], width - 2)[:2]]
    if rest := Counter(node["state"] for node in order[rows:]):
        lines.append(_line((f"{rest.total()} more: {', '.join(f'{n} {state}' for state, n in rest.items())}", "dim")))
    lines += _controller_lines(screen, width)
    return _panel("nodes", *lines)


def _node_line(node: Mapping[str, Any], name_width: int, *, stale: bool) -> Text:
    state, used, cpus = str(node["state"]), node["cpus_alloc"], node["cpus"]
    style = "dim" if stale else _state_style(state)
    drawn = "■" * used + "□" * max(0, cpus - used) + " " if cpus <= 8 else ""
    jobs = ",".join(map(str, sorted(set(node["jobs"]))))
    return _line(
        ("● ", style),
        (f"{clean(node['name']):<{name_width}} ", "bold"),
        (f"{state:<9} ", style),
        (f"{drawn}{used}/{cpus} cpus", "dim" if stale else ""),
        (f" job {jobs}" if jobs else "", "dim"),
    )


def _controller_lines(screen: ClusterScreen, width: int) -> list[Text]:
    if screen.controller is None:
        why = _wrapped(screen.trouble, width)[:2]
        return [_line(("✘ hpcschedd does not answer (above: as last seen)", "bold red")), *(Text(part) for part in why)]
    ping = screen.controller
    up = f" pid {ping['pid']}, epoch {ping['epoch']}, up {clock(ping['now_s'] - ping['started_at_s'])}"
    return [_line(("● ", "green"), ("hpcschedd", "bold"), (up, "dim"))]


class _QueuePanel:
    """The queue, drawn when its height is known: the rows around the selected job."""

    def __init__(self, screen: ClusterScreen) -> None:
        self._screen = screen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        screen, height = self._screen, options.height or 20
        queue, room = screen.queue, max(1, height - 2)
        chosen = next((at for at, job in enumerate(queue) if _is_selected(screen, job)), 0)
        if len(queue) > room:
            room -= 1
        first = max(0, min(chosen - room // 2, len(queue) - room))
        shown = queue[first : first + room]
        table = Table.grid(padding=(0, 1))
        for style in ("bold", "", ""):
            table.add_column(style=style, no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for job in shown:
            state = ("LIMBO", "bold red") if job.is_in_limbo else (job.state[:9], _state_style(job.state))
            where = f"{clean(job.where)} {job.time}" if job.state in ACTIVE_STATES else clean(job.where)
            table.add_row(
                clean(job.display_id)[:14],
                Text(clean(job.name)[:10]),
                Text(*state),
                Text(where),
                style="reverse" if _is_selected(screen, job) and not screen.story else "",
            )
        more = len(queue) - len(shown)
        lines: list[RenderableType] = [table, Text(f"{more} more", style="dim")] if more else [table]
        if not queue:
            lines = [Text("no jobs", style="dim")]
        yield _panel("queue", *lines, height=options.height)


def _is_selected(screen: ClusterScreen, job: QueuedJob) -> bool:
    return screen.job is not None and screen.job["id"] == job.number


# ----- the selected job: its training, or what is known of it


class _JobPanel:
    """The selected job, drawn when its height is known."""

    def __init__(self, screen: ClusterScreen, width: int) -> None:
        self._screen, self._width = screen, width - 4

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        screen, width = self._screen, self._width
        height = (options.height or 20) - 2
        job, run = screen.job, screen.run
        lines: list[RenderableType] = []
        title = "job"
        if job is not None:
            title = f"job {clean(job['display_id'])} {clean(job['name'])[:20]}"
            if job["reason"] == "NodeDown" or (job["state"] == "PENDING" and job["attempt"]):
                lines += [Text(part, style="red") for part in _wrapped(job["reason_detail"], width)[:3]]
        if run.points or screen.story:
            rest = height - len(lines) - 4
            lines += [
                *training_lines(run, width),
                *curve_lines(run, width, max(3, rest)),
                *checkpoint_lines(run, width),
            ]
        elif job is not None:
            lines += [_line((text.removeprefix("  "), "")) for text in detail_lines(dict(job), screen.now_s)[1:]]
        yield _panel(title, *lines[:height], height=options.height)


def training_lines(run: TrainingRun, width: int) -> list[RenderableType]:
    """Return a progress bar with the step, and the figures of the last step: two lines."""
    if not run.points:
        return [_line(("waiting for the first step (the ranks import torch and connect)", "dim")), Text("")]
    label = f" step {run.step}/{run.total_steps or '?'}"
    bar = Table.grid()
    bar.add_row(
        ProgressBar(total=1.0, completed=run.done, width=max(8, width - len(label)), complete_style="bright_blue"),
        Text(label, style="bold", no_wrap=True),
    )
    validation = run.counted_validation
    figures = _line(
        (f"loss {smoothed([point.loss for point in run.counted[-60:]])[-1]:.3f}", "bold bright_blue"),
        (f"  validation {validation[-1].loss:.3f}" if validation else "", "yellow"),
        (f"  attempt {run.attempt}" if run.attempt else "", "magenta"),
        (f"  {run.step_s * 1e3:.0f} ms per step" if run.step_s else "", "dim"),
    )
    return [bar, figures]


def checkpoint_lines(run: TrainingRun, width: int) -> list[Text]:
    """Return two lines: the number of checkpoints and the last one, and a mark for each."""
    made = run.checkpoints
    if not made:
        return [_line(("no checkpoint yet", "dim")), Text("")]
    last = made[-1]
    facts = f"step {last.step}, {checkpoint_kind(last)}, {size_text(last.size_bytes)}"
    marks = _line((MARKS_LABEL, "dim"))
    for item in made[-max(1, width - len(MARKS_LABEL)) :]:
        marks.append(BASE_MARK if item.is_base else INCREMENT_MARK, style="magenta" if item.attempt else "green")
    return [_line((f"{len(made)} saved", "bold"), ("; last: ", "dim"), (facts, "green")), marks]


def checkpoint_kind(checkpoint: SavedCheckpoint) -> str:
    """Return "full" or "increment"."""
    return "full" if checkpoint.is_base else "increment"


def size_text(size_bytes: float) -> str:
    """Return a size in MB."""
    return f"{size_bytes / 1e6:.1f} MB"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(clean(text), max(10, width))


# ----- the loss curve, in cells of Braille dots


def curve_lines(run: TrainingRun, width: int, height: int) -> list[Text]:
    """Return the loss curve with its scale, in `height` lines."""
    if not run.points:
        return [Text("") for _ in range(height)]
    counted, lost, validation = run.counted, run.lost, run.counted_validation
    losses = [point.loss for point in (*counted, *lost, *validation)]
    low, high = min(losses), max(losses)
    canvas = BrailleCanvas(max(10, width - 5), height, (0, max(run.total_steps or 0, run.step, 20)), (low, high))
    canvas.draw_line(_dots(counted), "raw")
    for attempt in sorted({point.attempt for point in lost}):
        canvas.draw_line(_dots([point for point in lost if point.attempt == attempt]), "lost")
    average = smoothed([point.loss for point in counted])
    canvas.draw_line(list(zip([point.step for point in counted], average, strict=True)), "loss")
    canvas.draw_squares(_dots(validation), "validation")
    for _, step in run.resumes:
        canvas.draw_upright(step, "restart")
    scale = {0: f"{high:4.1f} ", height - 1: f"{low:4.1f} "}
    rows = [[(cell, CURVE_STYLES.get(layer, "")) for cell, layer in row] for row in canvas.rows()]
    return [_line((scale.get(at, " " * 5), "dim"), *parts) for at, parts in enumerate(rows)]


def _dots(points: Sequence[LossPoint]) -> list[tuple[float, float]]:
    return [(point.step, point.loss) for point in points]


def smoothed(values: Sequence[float], keep: float = 0.85) -> list[float]:
    """Return the exponential moving average of the values, without the bias of its start."""
    average, weight, result = 0.0, 0.0, []
    for value in values:
        average = keep * average + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result.append(average / weight)
    return result


# ----- without a terminal


def plain_text(screen: ClusterScreen) -> str:
    """Return the screen as plain text: nodes, jobs, the selected job, the end of its log."""
    ping = screen.controller
    if ping is None:
        text = f"hpcschedd does not answer: {clean(screen.trouble)}\n"
    else:
        text = f"hpcschedd is running (process {ping['pid']}, for {clock(ping['now_s'] - ping['started_at_s'])})\n"
    nodes = [
        (clean(node["name"]), str(node["state"]), f"{node['cpus_alloc']}/{node['cpus']}", clean(node["link_why"]))
        for node in screen.nodes
    ]
    jobs = [
        (clean(job.display_id), clean(job.name), clean(job.user), _shown_state(job), job.time, clean(job.where))
        for job in screen.queue
    ]
    if nodes:
        text += "\n" + columns(("NODE", "STATE", "CPUS", "WHY"), nodes)
    header = ("JOBID", "NAME", "USER", "STATE", "TIME", "NODELIST(REASON)")
    if jobs:
        text += "\n" + columns(header, jobs, right=(0, 4))
    if screen.job is not None:
        text += "\n" + "\n".join(detail_lines(dict(screen.job), screen.now_s)) + "\n"
    return text + "".join(f"  | {clean(line)}\n" for line in screen.log[-10:])


def _shown_state(job: QueuedJob) -> str:
    return "LIMBO" if job.is_in_limbo else job.state
