"""What a run tells, read back as its readers do; and ranks that are not alike, which are refused before they begin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ranks import HERE, finish, mpirun, needs_mpi, run_mpi, started

from hpctrain.errors import MissingPackageError
from hpctrain.writers import Writers, check_writers

SCRIPT = HERE / "telling.py"


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@needs_mpi
def test_each_step_is_one_line_with_where_its_time_went_and_the_last_one_says_what_limits(tmp_path: Path) -> None:
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
def test_of_local_steps_the_wait_at_meetings_is_told(tmp_path: Path) -> None:
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


def test_mlflow_shows_the_steps_and_a_restart_goes_on_in_the_same_run(
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


def write(out: Path, name: str) -> None:
    """The second step comes too soon to be told; the third has a validation in it."""
    writers = Writers((name,), out, "title", {"lr": "0.1"})
    writers.write({"step": 1, "loss": 4.0, "time": 10.0, "backend": "mpi", "shares": [1, 2]})
    writers.write({"step": 2, "loss": 3.0, "time": 20.0})
    writers.write({"step": 3, "loss": 2.0, "time": 30.0, "val_loss": 2.5})
    writers.close()


def test_a_writer_that_fails_is_left_out_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def write(self, *_: object) -> None:
            raise ConnectionError("no route")

    monkeypatch.setattr("hpctrain.writers._make", lambda *_: Broken())
    write(tmp_path, "mlflow")
    assert capsys.readouterr().out == "metrics: cannot write to mlflow any more: no route\n"


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
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
    here, options = [sys.executable, SCRIPT, "same", "--out", tmp_path / "run"], ["--steps", "9"]
    there = [sys.executable, other, "same", "--out", tmp_path / "run", *(options if change == "options" else [])]
    command = [*mpirun(1, SCRIPT)[:3], *here, ":", "-n", "1", *there]
    with started(command) as process:
        ended = finish(process)
    assert ended.status != 0
    assert f"cannot start: ranks have different {named}: " in ended.output
