"""What a run tells: a line for people, and one JSON object per step in a file.

Rank 0 writes.  Does not know what the numbers mean.
Rules: lines are appended one by one, unbuffered; a line that a killed writer left half written is ended first, so that
it spoils nothing.  After a restart the lines of the new attempt follow; for a step that was done twice the higher
attempt counts.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hpctrain.errors import MissingPackageError, TrainError

BLOCK_BYTES = 64 << 10
RETRY_S = 5.0  # a share that is away may take as long to say so each time
MOST_BYTES = 64 << 20  # that wait; then the oldest lines are given up
LINE_END = b"\n"


class MetricsFile:
    """An append-only file of JSON lines.

    What a share that is full, read-only or stale does not take waits in memory, is tried again every few seconds, and follows in
    order; that is said once.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._stream: io.FileIO | None = None
        self._waiting = bytearray()
        self._not_before_s = float("-inf")
        self._trouble = ""
        self._attempt()

    def write(self, line: dict[str, object]) -> None:
        """Append one line; what is None is left out."""
        kept = {name: value for name, value in line.items() if value is not None}
        self._waiting += json.dumps(kept, separators=(",", ":")).encode() + b"\n"
        if self._clock() >= self._not_before_s:
            self._attempt()

    def backwards(self) -> Iterator[dict[str, Any]]:
        """Return the lines, the last one first: those that wait, then those of the file."""
        yield from filter(None, map(_line_of, reversed(bytes(self._waiting).split(LINE_END))))
        yield from read_backwards(self._path)

    def close(self) -> None:
        """Try once more and close the file."""
        self._attempt()
        if self._stream is not None:
            self._stream.close()
        if self._waiting:
            print(f"metrics: {self._waiting.count(LINE_END)} lines could not be written to {self._path}", flush=True)

    def _attempt(self) -> None:
        try:
            self._append()
        except OSError as error:
            self._stream = None  # a stale one stays so: it is opened anew
            self._not_before_s = self._clock() + RETRY_S
            if not self._trouble:
                print(f"metrics: cannot write {self._path}, lines wait in memory: {error.strerror}", flush=True)
            self._trouble = str(error)
            if len(self._waiting) > MOST_BYTES:
                del self._waiting[: self._waiting.index(LINE_END, len(self._waiting) - MOST_BYTES) + 1]
            return
        if self._trouble:
            print(f"metrics: {self._path} is written again", flush=True)
        self._trouble = ""

    def _append(self) -> None:
        if self._stream is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torn = not self._trouble and _ends_in_half_a_line(self._path)
            self._stream = io.FileIO(self._path, "a")
            self._waiting[:0] = LINE_END * torn
        while self._waiting:  # a disk that gets full may take a part of a line: the rest follows
            del self._waiting[: self._stream.write(self._waiting)]


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Return the lines that are whole, in the file's order."""
    with path.open("rb") as stream:
        yield from filter(None, map(_line_of, stream))


def read_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Return the lines that are whole, the last one first; none if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        at, rest = stream.seek(0, 2), b""
        while at > 0:
            size = min(BLOCK_BYTES, at)
            at = stream.seek(at - size)
            rest, *lines = (stream.read(size) + rest).split(b"\n")
            yield from filter(None, map(_line_of, reversed(lines)))
        yield from filter(None, [_line_of(rest)])


def _line_of(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None  # half a line of a killed attempt
    return line if isinstance(line, dict) and "step" in line else None


def _ends_in_half_a_line(path: Path) -> bool:
    try:
        content = path.read_bytes()[-1:]
    except FileNotFoundError:
        return False
    return content not in (b"", b"\n")


EVERY_S = 1.0
WAITING_LINES = 1000  # more than that are dropped rather than kept in memory
CLOSE_S = 20.0
Line = Mapping[str, Any]
PACKAGES = {"tensorboard": ("tensorboard", "tensorboard"), "mlflow": ("mlflow", "mlflow-skinny")}
SKIPPED = ("step", "attempt", "world", "time", "total_steps", "checkpoint_step")


class MetricsWriter(Protocol):
    """Where numbers go."""

    def write(self, step: int, at_s: float, numbers: Mapping[str, float]) -> None:
        """Put the numbers of a step there."""

    def close(self) -> None:
        """Have it all written."""


class Writers:
    """All that were asked for."""

    def __init__(self, names: tuple[str, ...], out: Path, title: str, settings: Mapping[str, object]) -> None:
        self._writers = {name: _make(name, out, title, settings) for name in names}
        self._written_at_s = float("-inf")
        self._lines: queue.Queue[Line | None] = queue.Queue(WAITING_LINES)
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        if self._writers:
            self._thread.start()

    def write(self, line: Line) -> None:
        """Have the line written, if it is time for one or it has more to tell than others."""
        now_s = time.monotonic()
        special = "val_loss" in line or "checkpoint_step" in line
        if not self._writers or (now_s - self._written_at_s < EVERY_S and not special) or self._lines.full():
            return
        self._written_at_s = now_s
        self._lines.put(line)

    def close(self) -> None:
        """Wait until all is written, but not for ever."""
        if self._writers:
            self._lines.put(None)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            numbers = numbers_of(line)
            self._each(partial(_write, line, numbers))
        self._each(lambda writer: writer.close())

    def _each(self, act: Callable[[MetricsWriter], None]) -> None:
        for name, writer in list(self._writers.items()):
            try:
                act(writer)
            except Exception as error:  # whatever a foreign library raises, it is no reason to end a training
                print(f"metrics: cannot write to {name} any more: {error}", flush=True)
                del self._writers[name]


def numbers_of(line: Line) -> dict[str, float]:
    """Pick what is a number worth a curve."""
    kept = {name: value for name, value in line.items() if name not in SKIPPED}
    return {name: float(value) for name, value in kept.items() if isinstance(value, int | float)}


def check_writers(names: tuple[str, ...]) -> None:
    """Return if all that is asked for is installed.

    Raises:
        MissingPackageError: says what to install.
    """
    for name in names:
        module, package = PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            raise MissingPackageError(f"cannot log to {name}: it is not installed; install with: pip install {package}")


def _make(name: str, out: Path, title: str, settings: Mapping[str, object]) -> MetricsWriter:
    try:
        return TensorBoard(out / "tensorboard") if name == "tensorboard" else MLflow(out, title, settings)
    except Exception as error:  # whatever a foreign library raises
        raise TrainError(f"cannot log to {name}: {error}") from error


class TensorBoard:
    """A folder that `tensorboard --logdir` shows."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (only who wants it waits for its import)

        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, at_s: float, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step, at_s)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run at MLFLOW_TRACKING_URI, or in `mlruns` below the output folder."""

    def __init__(self, out: Path, title: str, settings: Mapping[str, object]) -> None:
        import mlflow  # noqa: PLC0415 (only who wants it waits for its import)
        from mlflow.entities import Metric  # noqa: PLC0415

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a database does not belong on a share
            uri = f"file:{(out / 'mlruns').resolve()}"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        known = out / "mlflow-run"
        if known.exists():
            self._run = known.read_text().strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(title)
        number = experiment.experiment_id if experiment else self._client.create_experiment(title)
        self._run = self._client.create_run(number, run_name=out.resolve().name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run, key, value)
        known.write_text(self._run + "\n")

    def write(self, step: int, at_s: float, numbers: Mapping[str, float]) -> None:
        at_ms = int(at_s * 1e3)
        self._client.log_batch(self._run, [self._metric(name, value, at_ms, step) for name, value in numbers.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _write(line: Line, numbers: Mapping[str, float], writer: MetricsWriter) -> None:
    writer.write(line["step"], line["time"], numbers)
