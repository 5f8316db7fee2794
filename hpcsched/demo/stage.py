"""Where the story is shown: live on a terminal, or as plain lines with times where there is none.

Knows how things are written, not what happens. Plain lines bear no escape codes; NO_COLOR is respected (by rich).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpcsched.demo.scene import Moment, Scene
from hpcsched.demo.training import Training
from hpcsched.demo.view import clock, moment_text, picture

PLAIN_EVERY_STEPS = 10
PLAIN_LINES_MAX = 60  # a long training tells its loss less often


class Stage(Protocol):
    """What the story needs of a stage. `plain`: nobody watches it live."""

    plain: bool

    def heading(self, text: str) -> None:
        """Begin something new on the ordinary screen."""

    def tell(self, moment: Moment) -> None:
        """Say one line of the story."""

    def show(self, lines: Sequence[str]) -> None:
        """Show some lines of text as they are: a script, a sample."""

    def frame(self, scene: Scene) -> None:
        """Show the scene as it is now."""

    def curtain(self) -> None:
        """End the live view; what follows is ordinary output."""

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print names with what belongs to them."""


class PlainStage:
    """Lines on stdout, each with the time."""

    plain = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: tuple[int, int] = (0, 0)  # attempt, step

    def tell(self, moment: Moment) -> None:
        self._line(moment.at_s, moment.text)

    def heading(self, text: str) -> None:
        self._console.print(Text(text))

    def show(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._console.print(Text("      | " + line), soft_wrap=True)

    def frame(self, scene: Scene) -> None:
        training = scene.training
        every = max(PLAIN_EVERY_STEPS, -(-(training.total_steps or 0) // PLAIN_LINES_MAX))
        attempt, step = self._told
        due = training.step >= step + every or training.attempt > attempt or training.step < step
        if training.points and (due or (training.step == training.total_steps and step < training.step)):
            self._told = (training.attempt, training.step)
            self._line(scene.elapsed_s, loss_line(training))

    def curtain(self) -> None:
        pass

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        for name, value in rows:
            self._console.print(Text(f"{name:<18} {value}"), soft_wrap=True)

    def _line(self, at_s: float, text: str) -> None:
        self._console.print(Text(f"{clock(at_s):>5} {text}"), soft_wrap=True)


class LiveStage:
    """The terminal's other screen, redrawn in place; the story is printed on the ordinary one when it is over."""

    plain = False

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._unsaid: list[Moment] = []

    def tell(self, moment: Moment) -> None:
        if self._live is None:
            self._console.print(moment_text(moment), soft_wrap=True)
        else:
            self._unsaid.append(moment)

    def heading(self, text: str) -> None:
        self._console.print(Text("\n" + text, style="bold"))

    def show(self, lines: Sequence[str]) -> None:
        if self._live is None:
            for line in lines:
                style = "cyan" if line.startswith("#HSUB") else "dim"
                self._console.print(Text("       │ " + line, style=style))

    def frame(self, scene: Scene) -> None:
        if self._live is None:
            self._live = Live(console=self._console, screen=True, auto_refresh=False)
            self._live.start()
        width, height = self._console.size
        self._live.update(picture(scene, width, height), refresh=True)

    def curtain(self) -> None:
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        for moment in self._unsaid:
            self._console.print(moment_text(moment), soft_wrap=True)
        self._unsaid.clear()

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for name, value in rows:
            table.add_row(f"  {name}", Text(value))
        self._console.print(table)


def loss_line(training: Training) -> str:
    """Return the last step as one plain line."""
    text = f"step {training.step}/{training.total_steps or '?'}  loss {training.points[-1].loss:.3f}"
    if training.kept_validation:
        text += f"  validation {training.kept_validation[-1].loss:.3f}"
    if training.checkpoints:
        text += f"  last checkpoint: step {training.checkpoints[-1].step}"
    return text


def make_stage(console: Console, *, plain: bool) -> Stage:
    """Return the stage for this console: plain if asked for, or if nobody looks at it."""
    if plain or not console.is_terminal or console.is_dumb_terminal or (console.encoding or "").lower() != "utf-8":
        return PlainStage(console)
    return LiveStage(console)
