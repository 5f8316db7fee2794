"""What a training run's metrics.jsonl tells: loss, checkpoints, attempts, and what a restart cost.

Reads the file as it grows; knows nothing of how it is drawn, and takes nothing from the trainer but this file's format.
Rules: lines are JSON objects; half a line is not there yet, or of a killed writer; for a step that was done twice the
higher attempt counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One step of one attempt."""

    step: int
    loss: float
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that was published. `kind` is "base" or what kind of increment it is."""

    step: int
    kind: str
    size_bytes: int
    write_s: float
    attempt: int

    @property
    def is_base(self) -> bool:
        return self.kind == "base"


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A run so far, in the file's order. `resumes` are (attempt, step that it resumed from, time of its first step)."""

    points: tuple[Point, ...] = ()
    validation: tuple[Point, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    resumes: tuple[tuple[int, int, float], ...] = ()
    total_steps: int | None = None
    world: int = 0
    backend: str = ""
    step_s: float | None = None  # a moving average
    samples_per_s: float | None = None

    @property
    def step(self) -> int:
        """The last step that was done."""
        return self.points[-1].step if self.points else 0

    @property
    def attempt(self) -> int:
        """The attempt that did it."""
        return self.points[-1].attempt if self.points else 0

    @property
    def done(self) -> float:
        """How much of the training is done, from 0 to 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else 0.0

    @property
    def lost(self) -> tuple[Point, ...]:
        """Steps that had to be done again: beyond the checkpoint that a later attempt resumed from."""
        return tuple(
            point
            for point in self.points
            if any(point.attempt < attempt and point.step > step for attempt, step, _ in self.resumes)
        )

    @property
    def kept(self) -> tuple[Point, ...]:
        """The steps that count, in order."""
        return _those_that_count(self.points, self.resumes)

    @property
    def kept_validation(self) -> tuple[Point, ...]:
        """The validation losses that count."""
        return _those_that_count(self.validation, self.resumes)


def _those_that_count(points: tuple[Point, ...], resumes: tuple[tuple[int, int, float], ...]) -> tuple[Point, ...]:
    def counts(point: Point) -> bool:
        return not any(point.attempt < attempt and point.step > step for attempt, step, _ in resumes)

    return tuple(point for point in points if counts(point))


class MetricsReader:
    """Follows one metrics file; each call reads what was added since the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._half = b""
        self._points: list[Point] = []
        self._validation: list[Point] = []
        self._checkpoints: list[Checkpoint] = []
        self._resumes: list[tuple[int, int, float]] = []
        self._last: dict[str, Any] = {}
        self._step_s: float | None = None

    def read(self) -> Training:
        """Return the run so far; an empty one if there is no file yet."""
        for line in self._new_lines():
            try:
                value = json.loads(line)
            except ValueError:
                continue  # half a line that a killed attempt left
            if isinstance(value, dict) and "step" in value:
                self._take(value)
        return Training(
            points=tuple(self._points),
            validation=tuple(self._validation),
            checkpoints=tuple(self._checkpoints),
            resumes=tuple(self._resumes),
            total_steps=self._last.get("total_steps"),
            world=self._last.get("world", 0),
            backend=self._last.get("backend", ""),
            step_s=self._step_s,
            samples_per_s=self._last.get("samples_per_s"),
        )

    def _new_lines(self) -> list[bytes]:
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._half = (self._half + data).split(b"\n")
        return lines

    def _take(self, line: dict[str, Any]) -> None:
        attempt = line.get("attempt", 0)
        if "loss" in line:
            self._take_step(line, attempt)
        if "val_loss" in line:
            self._validation.append(Point(step=line["step"], loss=line["val_loss"], attempt=attempt))
        if "checkpoint_step" in line and not line.get("checkpoint_error"):
            self._checkpoints.append(
                Checkpoint(
                    step=line["checkpoint_step"],
                    kind=line["checkpoint_kind"],
                    size_bytes=line["checkpoint_bytes"],
                    write_s=line["checkpoint_write_s"],
                    attempt=attempt,
                )
            )

    def _take_step(self, line: dict[str, Any], attempt: int) -> None:
        known = self._points[-1].attempt if self._points else 0
        if attempt > known:
            self._resumes.append((attempt, line.get("resumed_from", 0), line.get("time", 0.0)))
        self._points.append(Point(step=line["step"], loss=line["loss"], attempt=attempt))
        self._last = {**self._last, **line}
        took_s = line.get("t_step_s")
        if took_s is not None:
            self._step_s = took_s if self._step_s is None else 0.9 * self._step_s + 0.1 * took_s
