"""The course of a training run, as its metrics.jsonl records it: losses, checkpoints, attempts, and steps lost by a restart.

Reads the file while it grows. Knows neither how a run is drawn nor the program that writes the file, only its format.
Rules: lines are JSON objects; an incomplete line is ignored; if two attempts did the same step, the later attempt counts.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
