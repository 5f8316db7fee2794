"""What a run tells, read back as its readers do; and ranks that are not alike, which are refused before they begin."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import termios
from pathlib import Path

import pytest
from ranks import HERE, clean_environment, finish, mpirun, needs_mpi, python, run_mpi, started
from waiting import wait_until

from hpctrain.errors import MissingPackageError
from hpctrain.metrics import Writers, check_writers
from hpctrain.settings import epochs_text

SCRIPT = HERE / "telling.py"


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@needs_mpi
def test_each_step_is_one_line_with_its_times_and_the_last_line_names_the_limit(tmp_path: Path) -> None:
    ended = run_mpi(2, SCRIPT, "same", "--out", tmp_path / "run", "--profile", "2")
    assert ended.status == 0, ended.output
    told = [line for line in lines(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in told] == list(range(1, 13))
    for line in told:
        parts = [line[f"t_{name}_s"] for name in ("data", "forward", "backward", "wait")]
        assert min(parts) > 0
        assert sum(parts) < line["t_step_s"]
        assert line["bytes"] == 4 * (4 * 2 + 2)
        assert [len(each) for each in line["ranks"].values()] == [2, 2, 2]
        assert line["ranks"]["t_data_s"][0] == line["t_data_s"]
    assert [line["epoch"] for line in told[:3]] == [0.5, 1.0, 1.5]
    assert told[-1]["samples"] == 96
    assert "scaling: 2 ranks compute " in ended.output
    for rank in range(2):
        trace = json.loads((tmp_path / "run" / "profile" / f"rank-{rank}.json").read_text())
        names = [event["name"] for event in trace["traceEvents"]]
        assert names.count("aten::mse_loss") == 2


@needs_mpi
def test_with_local_steps_the_wait_at_exchanges_is_reported(tmp_path: Path) -> None:
    ended = run_mpi(2, SCRIPT, "same", "--out", tmp_path, "--sync", "local:3")
    assert ended.status == 0, ended.output
    met = [line for line in lines(tmp_path) if line.get("ranks")]
    assert [line["step"] for line in met] == [3, 6, 9, 12]
    assert all(line["t_wait_s"] >= line["t_comm_s"] > 0 for line in met)
    assert [min(line["ranks"]["t_wait_s"]) > 0 for line in met] == [False, True, True, True]


def test_tensorboard_shows_the_steps(tmp_path: Path) -> None:
    event_file = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(tmp_path, "tensorboard")
    shown = event_file.EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    assert [(event.step, event.value) for event in shown.Scalars("loss")] == [(1, 4.0), (3, 2.0)]
    assert shown.Scalars("val_loss")[0].wall_time == 30.0


def test_mlflow_has_the_steps_and_a_restart_continues_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    write(tmp_path, "mlflow")
    write(tmp_path, "mlflow")
    client = mlflow.MlflowClient(f"file:{tmp_path / 'mlruns'}")
    (run,) = client.search_runs([client.get_experiment_by_name("title").experiment_id])
    assert run.data.params == {"lr": "0.1"}
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value, each.timestamp) for each in history] == 2 * [(1, 4.0, 10_000), (3, 2.0, 30_000)]


class Agent:
    """What a job's programs tell: the messages that came to a socket, in order."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "s"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(64)

    def heard(self) -> list[dict]:
        self._listener.setblocking(False)
        messages = []
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return messages
            with connection, connection.makefile("rb") as stream:
                messages.append(json.loads(stream.read()[8:]))


def test_the_scheduler_gets_the_resumed_step_and_at_the_end_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # a socket's path is short
    agent = Agent(folder)
    words = [*python(), SCRIPT, "same", "--out", tmp_path / "run"]
    heard = []
    for steps in ("6", "12"):
        with started(
            [*words, "--steps", steps], {"HPCSCHED_SOCKET": str(agent.path), "HPCSCHED_JOB_ID": "7"}
        ) as process:
            assert finish(process).status == 0
        heard.append([message for message in agent.heard() if message["type"] == "Progress"])
    shutil.rmtree(folder)
    first, last = heard[1][0], heard[1][-1]
    assert (first["step"], first["checkpoint_step"], first["steps_per_s"]) == (6, 6, 0.0)
    assert (last["step"], last["checkpoint_step"]) == (12, 12)
    assert heard[0][0]["step"] == 1


def on_terminal(columns: int, *options: str | Path, **environ: str) -> str:
    """Run the script on a terminal of this width; return what it wrote, escape sequences included."""
    control, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 40, columns, 0, 0))
    ours = ("TERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    clean = {name: value for name, value in clean_environment().items() if name not in ours}
    process = subprocess.Popen(
        [str(part) for part in (*python(), SCRIPT, "same", *options)],
        stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, env=clean | {"TERM": "xterm"} | environ,
    )  # fmt: skip
    os.close(terminal)
    written = b""
    with open(control, "rb", buffering=0) as stream:
        try:
            while data := stream.read(65536):
                written += data
        except OSError:  # EIO: the other end is closed
            pass
    wait_until(lambda: process.poll() is not None, what="the script to end")
    assert process.returncode == 0, written.decode()
    return written.decode()


ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STEP_LINE = re.compile(r"step +\d+/")
BAR = re.compile(
    r"telling +\S+ +(?P<step>\d+)/(?P<of>\d+) +epoch (?P<epoch>[\d.]+)/(?P<epochs>[\d.]+) +loss [\d.]+"
    r" +(?P<rate>\d+) samples/s(?: +ETA (?P<left>[\d:]+))?"
)


def drawn(written: str) -> list[str]:
    """Each line, in each of its states."""
    return re.split(r"[\r\n]+", ESCAPE.sub("", written))


def bars(written: str) -> list[re.Match[str]]:
    """Each state of the progress bar, in order."""
    return [found for line in drawn(written) if (found := BAR.match(line))]


def test_a_terminal_shows_a_bar_and_a_resumed_run_continues_it(tmp_path: Path) -> None:
    written = on_terminal(120, "--out", tmp_path / "run", "--steps", "600", "--print-every", "1")
    shown = bars(written)
    steps = [int(each["step"]) for each in shown]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, 600)
    assert {each["of"] for each in shown} == {"600"}
    assert {each["epochs"] for each in shown} == {"300"}  # 600 steps of 8, in an epoch of 16
    for each in shown:
        assert float(each["epoch"]) == int(each["step"]) / 2
        assert int(each["rate"]) > 0
        assert bool(each["left"]) == (each["step"] != "600")
    assert any(line.startswith("checkpoint: step ") for line in drawn(written))  # above the bar
    assert sum(bool(STEP_LINE.match(line)) for line in drawn(written)) == 1  # the last
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")  # the cursor is visible again
    shown = bars(on_terminal(120, "--out", tmp_path / "run", "--steps", "612"))
    assert [(each["step"], each["of"]) for each in (shown[0], shown[-1])] == [("601", "612"), ("612", "612")]


def test_less_than_an_epoch_is_printed_as_a_fraction() -> None:
    told = [epochs_text(number) for number in (3.0, 2.5, 1.04, 0.1, 0.0192, 4e-3)]
    assert told == ["3", "2.5", "1", "0.1", "0.02", "0.004"]


@pytest.mark.parametrize(("options", "environ"), [(["--no-progress"], {}), ([], {"TERM": "dumb"})])
def test_without_a_bar_a_terminal_shows_lines(options: list[str], environ: dict[str, str], tmp_path: Path) -> None:
    written = on_terminal(120, "--out", tmp_path / "run", "--print-every", "1", *options, **environ)
    assert not bars(written)
    assert "\x1b" not in written
    assert sum(bool(STEP_LINE.match(line)) for line in drawn(written)) == 12


def write(out: Path, name: str) -> None:
    """The second step comes too soon to be told; the third has a validation in it."""
    writers = Writers((name,), out, "title", {"lr": "0.1"})
    writers.write({"step": 1, "loss": 4.0, "time": 10.0, "backend": "mpi", "shares": [1, 2]})
    writers.write({"step": 2, "loss": 3.0, "time": 20.0})
    writers.write({"step": 3, "loss": 2.0, "time": 30.0, "val_loss": 2.5})
    writers.close()


def test_a_metrics_writer_that_fails_is_dropped_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def write(self, *_: object) -> None:
            raise ConnectionError("no route")

    monkeypatch.setattr("hpctrain.metrics._make", lambda *_: Broken())
    write(tmp_path, "mlflow")
    assert capsys.readouterr().out == "metrics: cannot write to mlflow any more: no route\n"


def test_a_writer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="cannot log to mlflow: .* pip install mlflow-skinny"):
        check_writers(("mlflow",))


@needs_mpi
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("model", "models (names, kinds and shapes of weights)"),
        ("optimizer", "optimizers"),
        ("data", "data"),
        ("python", "Python"),
    ],
)
def test_ranks_that_are_not_alike_are_refused_with_their_hashes(what: str, named: str, tmp_path: Path) -> None:
    ended = run_mpi(3, SCRIPT, what, "--out", tmp_path / "run")
    assert ended.status != 0
    assert f"cannot start: ranks have different {named}: " in ended.output
    assert " on ranks 0 (" in ended.output
    assert " on rank 2 (" in ended.output
    assert not (tmp_path / "run").exists()


@needs_mpi
@pytest.mark.parametrize(("change", "named"), [("code", "code of __main__"), ("options", "options")])
def test_ranks_of_other_code_or_options_are_refused(change: str, named: str, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(SCRIPT.read_text() + ("# changed\n" if change == "code" else ""))
    here, options = [*python(), SCRIPT, "same", "--out", tmp_path / "run"], ["--steps", "9"]
    there = [*python(), other, "same", "--out", tmp_path / "run", *(options if change == "options" else [])]
    command = [*mpirun(1, SCRIPT)[:3], *here, ":", "-n", "1", *there]
    with started(command) as process:
        ended = finish(process)
    assert ended.status != 0
    assert f"cannot start: ranks have different {named}: " in ended.output
