"""hsim as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unit.sim.traces import SMALL

from hpcsched.cli.hsim import main


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.swf"
    path.write_text(SMALL)
    return str(path)


def test_run_prints_the_figures_and_writes_the_schedule(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.csv"
    assert main(["run", small, "--policy", "easy", "--json", "--schedule-out", str(out)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {"jobs": 5, "policy": "easy", "wait_max_s": 106, "makespan_s": 303}.items() <= answer.items()
    keys = "bounded_slowdown_mean wait_mean_s utilization simulated_jobs_per_s user_fairness_jain"
    assert set(keys.split()) <= set(answer)
    assert out.read_text().splitlines()[:3] == ["job_id,submit,start,end", "1,0,0,60", "2,1,60,110"]


def test_the_machine_may_be_another(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", small, "--nodes", "3", "--cpus", "10", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["procs"], answer["wait_max_s"], answer["policy"]) == (30, 0, "default")


def test_compare_sets_policies_side_by_side(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", small, "fcfs", "easy"]) == 0
    head, fcfs, easy = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "POLICY"
    assert [line.split()[0] for line in (fcfs, easy)] == ["fcfs", "easy"]
    assert float(fcfs.split()[1]) > float(easy.split()[1])


def test_compare_draws(small: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["compare", small, "fcfs", "easy", "--plot", str(tmp_path / "picture")]) == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "picture.svg").read_text()


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["run"], 2, "which trace"),
        (["walk", "x"], 2, "begin with run, compare, replay or whatif"),
        (["compare", "x"], 2, "wants a trace and policies"),
        (["run", "SMALL", "--policy", "magic"], 2, "known are fcfs, easy"),
        (["run", "SMALL", "--cpus", "4"], 2, "cannot take --cpus alone"),
        (["compare", "SMALL", "easy", "--policy", "easy"], 2, "it is for run"),
        (["run", "SMALL", "--plot", ""], 2, "cannot draw to '.': it names no file"),
        (["compare", "SMALL", "easy", "--plot", "a/.."], 2, "cannot draw to 'a/..': it names no file"),
        (["run", "/nowhere.swf"], 1, "cannot read trace"),
        (["run", "SMALL", "--schedule-out", "/nowhere/x.csv"], 1, "cannot write the schedule"),
    ],
)
def test_what_is_wrong_is_said(
    words: list[str], status: int, says: str, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([small if word == "SMALL" else word for word in words]) == status
    assert says in capsys.readouterr().err
