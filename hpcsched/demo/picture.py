"""The demo's screen: nodes, the training's curve, the end of its log, and the story.

`picture` draws a `Scene` with rich; it knows no clock, terminal or connection. Rules: everything fits into 80 columns and 24
lines; lower terminals show less. Text from users (names, reasons, logs) is shown as text, never as markup or control characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hpcsched.listing.jobs import ACTIVE_STATES
from hpcsched.listing.text import clean
from hpcsched.tui.lines import Line, state_style, wrapped
from hpcsched.tui.reading import ClusterScreen, QueuedJob
from hpcsched.tui.training import checkpoint_lines, curve_lines, training_lines

STORY_STYLES = {"act": "bold", "good": "green", "bad": "bold red", "note": ""}
STORY_MARKS = {"act": "▸", "good": "✔", "bad": "✘", "note": "·"}
WIDE = 78  # columns: from here on nodes and queue are beside the job
HIGH = 28  # lines: from here on the log is shown, and more of the story


@dataclass(frozen=True, kw_only=True, slots=True)
class StoryLine:
    """One line of the demo's story. `kind` is "act", "good", "bad" or "note"."""

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """The cluster as it is now, what happens there, and the story so far."""

    cluster: ClusterScreen
    subtitle: str = ""
    story: tuple[StoryLine, ...] = ()


def is_live(console: Console) -> bool:
    """Return whether the output is a terminal that can be redrawn and shows our characters."""
    return console.is_terminal and not console.is_dumb_terminal and (console.encoding or "").lower() == "utf-8"


def picture(scene: Scene, width: int, height: int) -> RenderableType:
    """Return the screen for a terminal of `width` columns and `height` lines."""
    layout, body = Layout(), Layout()
    story_lines = 7 if height >= HIGH else 3 if height >= 20 else 1
    beside = width >= WIDE
    left_width = min(46, max(38, width * 45 // 100)) if beside else width
    nodes = nodes_panel(scene.cluster, left_width - 4, rows=max(1, height // 4))
    top = Layout(nodes, size=len(nodes.renderable.renderables) + 2)  # type: ignore[union-attr]
    job = Layout(_JobPanel(scene.cluster, width - left_width if beside else width))
    if beside:
        left = Layout(size=left_width)
        left.split_column(top, Layout(_QueuePanel(scene.cluster)))
        body.split_row(left, job)
    else:
        body.split_column(top, job)
    parts = [Layout(_headline(scene), size=1), body]
    if height >= HIGH:
        lines = [_line(("", ""), (clean(line.expandtabs()), "dim")) for line in scene.cluster.log[-4:]]
        parts.append(Layout(_panel("log", *lines), size=6))
    shown = [story_text(line) for line in scene.story[-story_lines:]]
    parts.append(Layout(_panel("story", *shown, style="cyan"), size=story_lines + 2))
    layout.split_column(*parts)
    return layout


def _headline(scene: Scene) -> Text:
    """Return the first line: the command, what happens, and how to end it."""
    text = _line((" hpcsched demo ", "bold reverse"), (f" {clean(scene.subtitle)} ", "bold cyan"))
    return text.append("  Ctrl-C ends it", style="dim")


def story_text(line: StoryLine) -> Text:
    """Return one line of the story."""
    return _line(
        (f"{clock(line.at_s)} ", "dim"), (f"{STORY_MARKS[line.kind]} {clean(line.text)}", STORY_STYLES[line.kind])
    )


def clock(seconds: float) -> str:
    """Return seconds as m:ss."""
    whole = max(0, int(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def _line(*parts: tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _drawn(lines: Sequence[Line]) -> list[Text]:
    return [_line(*line) for line in lines]


def _panel(title: str, *lines: RenderableType, style: str = "bright_black", height: int | None = None) -> Panel:
    return Panel(
        Group(*lines), title=Text(title), title_align="left", border_style=style, padding=(0, 1), height=height
    )


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
            lines += [Text(f"  {part}", style="red") for part in wrapped(node["link_why"], width - 2)[:2]]
    if rest := Counter(node["state"] for node in order[rows:]):
        lines.append(_line((f"{rest.total()} more: {', '.join(f'{n} {state}' for state, n in rest.items())}", "dim")))
    lines += _controller_lines(screen, width)
    return _panel("nodes", *lines)


def _node_line(node: Mapping[str, Any], name_width: int, *, stale: bool) -> Text:
    state, used, cpus = str(node["state"]), node["cpus_alloc"], node["cpus"]
    style = "dim" if stale else state_style(state)
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
        why = wrapped(screen.trouble, width)[:2]
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
            state = ("LIMBO", "bold red") if job.is_in_limbo else (job.state[:9], state_style(job.state))
            where = f"{clean(job.where)} {job.time}" if job.state in ACTIVE_STATES else clean(job.where)
            table.add_row(Text(clean(job.display_id)[:14]), Text(clean(job.name)[:10]), Text(*state), Text(where))
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
                lines += [Text(part, style="red") for part in wrapped(job["reason_detail"], width)[:3]]
        rest = max(3, height - len(lines) - 4)
        lines += _drawn([*training_lines(run, width), *curve_lines(run, width, rest), *checkpoint_lines(run, width)])
        yield _panel(title, *lines[:height], height=options.height)
