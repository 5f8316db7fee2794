"""Metrics of a run: a line per step in metrics.jsonl, TensorBoard and MLflow.

Rank 0 writes.  Does not know what the numbers mean.
Rules: lines are appended one by one, unbuffered.  A line that a killed writer left incomplete is ended first.  After a restart
the lines of the new attempt follow; of a step that was done twice the higher attempt counts. A thread writes to TensorBoard and
MLflow: a server that is slow or away costs no step.  At most one step per second is written there, and each step with a
validation or a checkpoint.  After a restart the same MLflow run continues.  A writer that fails is reported once and dropped.
Sources: torch.utils.tensorboard; MLflow's `MlflowClient`.
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
RETRY_S = 5.0  # a share that is away may take as long to fail each time
MOST_BYTES = 64 << 20  # of waiting lines; then the oldest are dropped
LINE_END = b"\n"


class MetricsFile:
    """An append-only file of JSON lines.

    Lines that a full, read-only or stale share does not take wait in memory, and are written in order when it takes them
    again; this is reported once.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._stream: io.FileIO | None = None
        self._waiting = bytearray()
        self._not_before_s = float("-inf")
        self._trouble = ""
        self._attempt()

    def write(self, line: dict[str, object]) -> None:
        """Append one line, without the keys whose value is None."""
        values = {name: value for name, value in line.items() if value is not None}
        self._waiting += json.dumps(values, separators=(",", ":")).encode() + b"\n"
        if self._clock() >= self._not_before_s:
            self._attempt()

    def backwards(self) -> Iterator[dict[str, Any]]:
        """Yield the lines, newest first: waiting ones, then those of the file."""
        yield from filter(None, map(_line_of, reversed(bytes(self._waiting).split(LINE_END))))
        yield from read_backwards(self._path)

    def close(self) -> None:
        """Try to write once more, and close the file."""
        self._attempt()
        if self._stream is not None:
            self._stream.close()
        if self._waiting:
            print(f"metrics: {self._waiting.count(LINE_END)} lines could not be written to {self._path}", flush=True)

    def _attempt(self) -> None:
        try:
            self._append()
        except OSError as error:
            self._stream = None  # a stale handle stays stale: open the file again
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
        while self._waiting:  # a full disk may take a part of a line: the rest follows
            del self._waiting[: self._stream.write(self._waiting)]


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines, in the file's order."""
    with path.open("rb") as stream:
        yield from filter(None, map(_line_of, stream))


def read_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines, newest first; none if the file does not exist."""
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
        return None  # an incomplete line of a killed attempt
    return line if isinstance(line, dict) and "step" in line else None


def _ends_in_half_a_line(path: Path) -> bool:
    try:
        content = path.read_bytes()[-1:]
    except FileNotFoundError:
        return False
    return content not in (b"", b"\n")


EVERY_S = 1.0
WAITING_LINES = 1000  # more are dropped, to bound the memory
CLOSE_S = 20.0
Line = Mapping[str, Any]
PACKAGES = {"tensorboard": ("tensorboard", "tensorboard"), "mlflow": ("mlflow", "mlflow-skinny")}
SKIPPED = ("step", "attempt", "world", "time", "total_steps", "checkpoint_step")


class MetricsWriter(Protocol):
    """A program that takes metrics."""

    def write(self, step: int, at_s: float, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""

    def close(self) -> None:
        """Finish writing."""


class Writers:
    """The metrics writers of a run, in one thread."""

    def __init__(self, names: tuple[str, ...], out: Path, title: str, settings: Mapping[str, object]) -> None:
        self._writers = {name: _make(name, out, title, settings) for name in names}
        self._written_at_s = float("-inf")
        self._lines: queue.Queue[Line | None] = queue.Queue(WAITING_LINES)
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        if self._writers:
            self._thread.start()

    def write(self, line: Line) -> None:
        """Queue a line if a second has passed, or it has a validation or checkpoint."""
        now_s = time.monotonic()
        special = "val_loss" in line or "checkpoint_step" in line
        if not self._writers or (now_s - self._written_at_s < EVERY_S and not special) or self._lines.full():
            return
        self._written_at_s = now_s
        self._lines.put(line)

    def close(self) -> None:
        """Wait until all is written, for a limited time."""
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
            except Exception as error:  # an error of a foreign library must not end a training
                print(f"metrics: cannot write to {name} any more: {error}", flush=True)
                del self._writers[name]


def numbers_of(line: Line) -> dict[str, float]:
    """Return the entries of a line that are numbers worth a curve."""
    return {
        name: float(value) for name, value in line.items() if name not in SKIPPED and isinstance(value, int | float)
    }


def check_writers(names: tuple[str, ...]) -> None:
    """Check that the packages of the chosen writers are installed.

    Raises:
        MissingPackageError: names the package to install.
    """
    for name in names:
        module, package = PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            raise MissingPackageError(f"cannot log to {name}: it is not installed; install with: pip install {package}")


def _make(name: str, out: Path, title: str, settings: Mapping[str, object]) -> MetricsWriter:
    try:
        return TensorBoard(out / "tensorboard") if name == "tensorboard" else MLflow(out, title, settings)
    except Exception as error:  # any error of a foreign library
        raise TrainError(f"cannot log to {name}: {error}") from error


class TensorBoard:
    """A directory of events for `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (only who wants it waits for its import)

        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, at_s: float, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step, at_s)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run at MLFLOW_TRACKING_URI, or in `mlruns` in the output directory."""

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
