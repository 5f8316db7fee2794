"""A training run, read from its metrics.jsonl while that grows, and drawn as lines.

Knows no terminal and no colours: a line is made of texts with the names of their styles (`hpcsched.tui.lines`). Rules: an
incomplete line is ignored; if two attempts did the same step, the later attempt counts. The file is what a job wrote: its path
may be a pipe, and its values may be anything.

Source: Unicode, block "Braille Patterns" (U+2800: the low byte of the code point is the set of dots).
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcsched.listing.plot import BrailleCanvas
from hpcsched.tui.lines import Line

CURVE_STYLES = {
    "raw": "bright_black",
    "lost": "red",
    "loss": "bold bright_blue",
    "validation": "bold yellow",
    "restart": "magenta",
}
BASE_MARK, INCREMENT_MARK = "█", "▄"
MARKS_LABEL = f"{BASE_MARK}full {INCREMENT_MARK}incr. "

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


# ----- a run as lines


def training_lines(run: TrainingRun, width: int) -> list[Line]:
    """Return a progress bar with the step, and the figures of the last step: two lines."""
    if not run.points:
        return [[("waiting for the first step (the ranks import torch and connect)", "dim")], []]
    label = f" step {run.step}/{run.total_steps or '?'}"
    room = max(8, width - len(label))
    done = round(run.done * room)
    bar = [("━" * done, "bright_blue"), ("━" * (room - done), "bright_black"), (label, "bold")]
    validation = run.counted_validation
    figures = [
        (f"loss {smoothed([point.loss for point in run.counted[-60:]])[-1]:.3f}", "bold bright_blue"),
        (f"  validation {validation[-1].loss:.3f}" if validation else "", "yellow"),
        (f"  attempt {run.attempt}" if run.attempt else "", "magenta"),
        (f"  {run.step_s * 1e3:.0f} ms per step" if run.step_s else "", "dim"),
    ]
    return [bar, figures]


def checkpoint_lines(run: TrainingRun, width: int) -> list[Line]:
    """Return two lines: the number of checkpoints and the last one, and a mark for each."""
    made = run.checkpoints
    if not made:
        return [[("no checkpoint yet", "dim")], []]
    last = made[-1]
    facts = f"step {last.step}, {checkpoint_kind(last)}, {size_text(last.size_bytes)}"
    marks: Line = [(MARKS_LABEL, "dim")]
    for item in made[-max(1, width - len(MARKS_LABEL)) :]:
        marks.append((BASE_MARK if item.is_base else INCREMENT_MARK, "magenta" if item.attempt else "green"))
    return [[(f"{len(made)} saved", "bold"), ("; last: ", "dim"), (facts, "green")], marks]


def checkpoint_kind(checkpoint: SavedCheckpoint) -> str:
    """Return "full" or "increment"."""
    return "full" if checkpoint.is_base else "increment"


def size_text(size_bytes: float) -> str:
    """Return a size in MB."""
    return f"{size_bytes / 1e6:.1f} MB"


def curve_lines(run: TrainingRun, width: int, height: int) -> list[Line]:
    """Return the loss curve with its scale, in `height` lines."""
    if not run.points:
        return [[] for _ in range(height)]
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
    return [[(scale.get(at, " " * 5), "dim"), *parts] for at, parts in enumerate(rows)]


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
