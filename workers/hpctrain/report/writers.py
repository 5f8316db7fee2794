"""Metrics for other programs' eyes: TensorBoard and MLflow, beside the lines of metrics.jsonl, for `--log`.

A thread of its own writes: a server that is slow or away costs no step.  Knows neither ranks nor what the numbers mean.
Rules: one step a second at the most, and each one that has a validation or a checkpoint in it; a run that goes on after a restart
goes on in the same MLflow run.  A writer that fails says so once and is left out: training goes on.
Sources: torch.utils.tensorboard; MLflow's `MlflowClient`.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hpctrain.errors import MissingPackageError, TrainError

EVERY_S = 1.0
WAITING_LINES = 1000  # more than that are dropped rather than kept in memory
CLOSE_S = 20.0
Line = Mapping[str, Any]
PACKAGES = {"tensorboard": ("tensorboard", "tensorboard"), "mlflow": ("mlflow", "mlflow-skinny")}
SKIPPED = ("step", "attempt", "world", "time", "total_steps", "checkpoint_step")


class Writer(Protocol):
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
        """This will have the line written, if it is time for one or it has more to tell than others."""
        now_s = time.monotonic()
        special = "val_loss" in line or "checkpoint_step" in line
        if not self._writers or (now_s - self._written_at_s < EVERY_S and not special) or self._lines.full():
            return
        self._written_at_s = now_s
        self._lines.put(line)

    def close(self) -> None:
        """This will wait until all is written, but not for ever."""
        if self._writers:
            self._lines.put(None)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            numbers = numbers_of(line)
            self._each(partial(_write, line, numbers))
        self._each(lambda writer: writer.close())

    def _each(self, act: Callable[[Writer], None]) -> None:
        for name, writer in list(self._writers.items()):
            try:
                act(writer)
            except Exception as error:  # whatever a foreign library raises, it is no reason to end a training
                print(f"metrics: cannot write to {name} any more: {error}", flush=True)
                del self._writers[name]


def numbers_of(line: Line) -> dict[str, float]:
    """This will pick what is a number worth a curve."""
    kept = {name: value for name, value in line.items() if name not in SKIPPED}
    return {name: float(value) for name, value in kept.items() if isinstance(value, int | float)}


def check_writers(names: tuple[str, ...]) -> None:
    """This will return if all that is asked for is installed.

    Raises:
        MissingPackageError: says what to install.
    """
    for name in names:
        module, package = PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            raise MissingPackageError(f"cannot log to {name}: it is not installed; install with: pip install {package}")


def _make(name: str, out: Path, title: str, settings: Mapping[str, object]) -> Writer:
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


def _write(line: Line, numbers: Mapping[str, float], writer: Writer) -> None:
    writer.write(line["step"], line["time"], numbers)
