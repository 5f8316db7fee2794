"""The live view's panel of the training: progress, loss curve, checkpoints. A run in, text out, as in `view`."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.text import Text

from hpcsched.demo.curve import Canvas, Range, smoothed
from hpcsched.demo.training import Checkpoint, Training

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
