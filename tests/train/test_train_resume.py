"""The whole path: ranks that train, are killed and go on to the very bits of the run that was not killed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from ranks import HERE, Ended, finish, mpirun, needs_mpi, python, run_mpi, run_plain, started
from waiting import wait_until

from hpctrain.errors import EXIT_REQUEUE
from hpctrain.metrics import MetricsFile, read_metrics
from hpctrain.plot import main as plot
from hpctrain.plot import read_curve

STEPS = 24
SMALL = (
    f"--steps {STEPS} --layers 1 --width 32 --heads 2 --context 16 --batch 6 --checkpoint-every 3 --base-every 3 "
    "--eval-every 8 --print-every 8 --sample 20 --shares even"
).split()
FAULTY = HERE / "faulty_chargpt.py"
WITH_WAITING = {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE.parent)]).strip(os.pathsep)}
CHARGPT = ("-m", "hpctrain.examples.chargpt")


def newest_checkpoint(out: Path) -> int:
    """Return the step of the last checkpoint that was published."""
    return max(int(re.findall(r"\d+", path.name)[0]) for path in (out / "checkpoints").glob("step-*.json"))


def options(out: Path, *more: str) -> list[str | Path]:
    return ["--out", out, *SMALL, *more]


def lines_of(out: Path) -> list[dict]:
    path = out / "metrics.jsonl"
    return list(read_metrics(path)) if path.exists() else []


def weights_hash(ended: Ended) -> str:
    found = re.search(r"weights sha256 ([0-9a-f]{64})", ended.output)
    assert found, ended.output
    return found[1]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run of two ranks that nobody disturbs: the hash of its weights, and where it is."""
    out = tmp_path_factory.mktemp("unbroken")
    ended = run_mpi(2, *CHARGPT, *options(out))
    assert ended.status == 0, ended.output
    return weights_hash(ended), out


@needs_mpi
def test_a_run_reports_each_step_and_saves_a_model(unbroken: tuple[str, Path]) -> None:
    _, out = unbroken
    lines = [line for line in lines_of(out) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert {(line["attempt"], line["world"], line["backend"]) for line in lines} == {(0, 2, "mpi")}
    assert [line["step"] for line in lines if "val_loss" in line] == [1, 8, 16, 24]
    assert lines[-1]["val_loss"] < lines[0]["val_loss"]
    weights = torch.load(out / "model.pt", weights_only=True)
    assert weights["token.weight"].shape == (97, 32)


@needs_mpi
def test_after_a_killed_rank_the_next_attempt_ends_with_the_same_bits(
    unbroken: tuple[str, Path], tmp_path: Path
) -> None:
    killed = run_mpi(2, FAULTY, "rank:1:11", *options(tmp_path), extra=WITH_WAITING)
    assert killed.status != 0
    assert max(line["step"] for line in lines_of(tmp_path)) == 10
    newest = newest_checkpoint(tmp_path)
    assert 0 < newest < 11
    resumed = run_mpi(2, *CHARGPT, *options(tmp_path))
    assert resumed.status == 0, resumed.output
    assert f"attempt 1, resumed from step {newest}\n" in resumed.output
    assert weights_hash(resumed) == unbroken[0]


@needs_mpi
def test_a_run_killed_in_the_middle_of_a_checkpoint_ends_with_the_same_bits(
    unbroken: tuple[str, Path], tmp_path: Path
) -> None:
    killed = run_mpi(2, FAULTY, "checkpoint:5", *options(tmp_path), extra=WITH_WAITING)
    assert killed.status != 0
    assert len(list((tmp_path / "checkpoints").glob("data-*"))) == 5
    assert len(list((tmp_path / "checkpoints").glob("step-*.json"))) == 4
    newest = newest_checkpoint(tmp_path)  # no more than four: on a busy machine some steps later than planned
    resumed = run_mpi(2, *CHARGPT, *options(tmp_path))
    assert resumed.status == 0, resumed.output
    assert f"attempt 1, resumed from step {newest}\n" in resumed.output
    assert weights_hash(resumed) == unbroken[0]
    curve = read_curve(tmp_path / "metrics.jsonl")
    assert curve.restarts == [(newest, 1)]
    assert [step for step, _ in curve.loss] == list(range(1, STEPS + 1))


@needs_mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_signal_makes_a_checkpoint_and_asks_to_be_queued_again(
    unbroken: tuple[str, Path], tmp_path: Path, number: signal.Signals
) -> None:
    command = mpirun(2, FAULTY, "await:6", *options(tmp_path, "--checkpoint-every", "1000"))
    with started(command, WITH_WAITING) as process:
        wait_until(lambda: len(lines_of(tmp_path)) == 5, what="the fifth step")
        process.send_signal(number)
        stopped = finish(process)
    assert stopped.status == EXIT_REQUEUE, stopped.output
    assert f"stopped by {number.name} at step 6, to be resumed" in stopped.output
    resumed = run_mpi(2, *CHARGPT, *options(tmp_path))
    assert "attempt 1, resumed from step 6" in resumed.output
    assert weights_hash(resumed) == unbroken[0]


@needs_mpi
def test_a_script_of_a_few_lines_learns_real_digits_on_two_ranks(tmp_path: Path) -> None:
    ended = run_mpi(2, "-m", "hpctrain.examples.digits", "--out", tmp_path, "--steps", "60")
    assert ended.status == 0, ended.output
    right = re.search(r"([0-9.]+) % of 360 unseen digits classified correctly", ended.output)
    assert right, ended.output
    assert float(right[1]) > 85


@needs_mpi
def test_ranks_with_local_steps_learn_and_resume_at_an_exchange(tmp_path: Path) -> None:
    first = run_mpi(2, *CHARGPT, *options(tmp_path, "--steps", "10", "--sync", "local:4:bf16"))
    assert first.status == 0, first.output
    losses = [line["loss"] for line in lines_of(tmp_path) if "loss" in line]
    assert losses[-1] < losses[3] < losses[0]
    assert newest_checkpoint(tmp_path) == 10  # they meet at the end as well
    assert {line["checkpoint_step"] for line in lines_of(tmp_path) if "checkpoint_step" in line} <= {4, 8, 10}
    longer = run_mpi(2, *CHARGPT, *options(tmp_path, "--steps", "14", "--sync", "local:4:bf16"))
    assert longer.status == 0, longer.output
    assert "attempt 1, resumed from step 10\n" in longer.output


@needs_mpi
def test_a_loss_that_is_no_number_stops_all_and_names_the_rank(tmp_path: Path) -> None:
    ended = run_mpi(2, FAULTY, "nan:1:4", *options(tmp_path), extra=WITH_WAITING)
    assert ended.status == 1
    assert "the loss is not finite at step 4 (samples 18 to 24) on rank 1, in its samples 21 to 24" in ended.output


def test_another_number_of_ranks_resumes_a_checkpoint_of_two(tmp_path: Path) -> None:
    first = run_plain(2, *CHARGPT, *options(tmp_path, "--steps", "6", "--shares", "2,1"))
    assert [ended.status for ended in first] == [0, 0], first
    assert "2 ranks over gloo, attempt 0, a fresh start" in first[0].output
    with started([*python(), *CHARGPT, *options(tmp_path, "--threads", "1")]) as process:
        ended = finish(process)
    assert ended.status == 0, ended.output
    assert "1 rank over single, attempt 1, resumed from step 6" in ended.output
    (tmp_path / "other").mkdir()
    with started([*python(), *CHARGPT, *options(tmp_path / "other", "--threads", "1")]) as process:
        alone = finish(process)
    assert alone.status == 0
    together, apart = (
        [line["loss"] for line in lines_of(out) if "loss" in line] for out in (tmp_path, tmp_path / "other")
    )
    assert together == pytest.approx(apart, abs=2e-4)
    with started([*python(), *CHARGPT, *options(tmp_path, "--resume", "never")]) as process:
        refused = finish(process)
    assert refused.status == 1
    assert "cannot start a new run in" in refused.output
    with started([*python(), *CHARGPT, *options(tmp_path, "--width", "64")]) as process:
        refused = finish(process)
    assert refused.status == 1
    assert (
        "this model has 'model.token.weight' float32[97, 64], the checkpoint has it as float32[97, 32]"
        in refused.output
    )


def test_a_line_cut_short_by_a_kill_spoils_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"loss":2.0,"attempt":0}\n{"step":2,"lo')
    again = MetricsFile(path)
    again.write({"step": 2, "loss": 1.5, "attempt": 1, "val_loss": None})
    again.close()
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 2.0), (2, 1.5)]
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 2, "loss": 1.5, "attempt": 1}


def test_the_curve_counts_a_step_once_and_becomes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": n, "loss": 4.0 - n / 10, "attempt": 0} for n in range(1, 9)]
    lines[4] |= {"checkpoint_step": 4, "checkpoint_bytes": 9, "checkpoint_kind": "base"}
    lines += [{"step": n, "loss": 4.0 - n / 10, "attempt": 1} for n in range(5, 11)]
    lines[8] |= {"resumed_from": 4}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = read_curve(path)
    assert [step for step, _ in curve.loss] == list(range(1, 11))
    assert [step for step, _ in curve.lost[0]] == [5, 6, 7, 8]
    assert (curve.restarts, curve.bases) == ([(4, 1)], [4])
    assert plot([str(path), "-o", str(tmp_path / "loss.png")]) == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"wrote {tmp_path / 'loss.png'}: 10 steps, 1 restart, loss 3.00\n"
    assert plot([str(path), "-o", "/proc/none/loss.png"]) == 1
    assert "cannot write /proc/none/loss.png: No such file" in capsys.readouterr().err


def test_a_picture_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot([str(tmp_path / "none.jsonl")]) == 1
    assert "No such file" in capsys.readouterr().err
