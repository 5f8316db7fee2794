"""How often a checkpoint is due: as told, or as it costs least."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from ranks import finish, needs_mpi, python, run_mpi, started
from test_train_gradlog import TINY, WITH_WAITING

from hpctrain.checkpoint.writing.writer import BELIEVED_S, Interval, between_interruptions_s, claims_at_s


def test_reported_steps_are_kept() -> None:
    assert [step for step in range(1, 10) if Interval(3).due(step)] == [3, 6, 9]
    assert not any(Interval(0).due(step) for step in range(1, 10))
    assert not Interval(0).wanted
    assert Interval(None).wanted


@pytest.mark.parametrize(
    ("cost_s", "between_s", "steps"), [(0.1, 3600.0, 268), (0.4, 3600.0, 537), (0.1, 14400.0, 537)]
)
def test_the_interval_is_youngs(cost_s: float, between_s: float, steps: int) -> None:
    attempts = [0.0] * 100
    interval = Interval(None, attempts, 100 * between_s - BELIEVED_S)
    interval.learn(0.1, cost_s, 1.0)
    assert interval.steps() == steps


def test_none_is_due_before_the_last_one_is_written() -> None:
    interval = Interval(None, [float(at) for at in range(1000)], 1000.0)
    interval.learn(0.1, 1e-6, 7.0)
    assert interval.steps() == 70


def test_the_first_checkpoint_comes_soon_and_the_next_as_announced() -> None:
    interval = Interval(None)
    assert [step for step in range(101, 130) if interval.due(step)][0] == 110
    interval.learn(0.5, 0.01, 0.1)
    said = interval.next_after(110, interval.steps())
    assert "next in 83 steps: one costs 10.0 ms, a step takes 500 ms, and the run is interrupted every 24.0 h" in said
    assert not interval.due(192)
    assert interval.due(193)
    assert interval.next_after(193, 84) == "", "about the same is not said again"


def test_interruptions_are_learned_from_claims(tmp_path: Path) -> None:
    assert between_interruptions_s([], 5.0) == BELIEVED_S
    assert between_interruptions_s([0.0], 0.0) == BELIEVED_S
    assert between_interruptions_s([0.0, 600.0, 1200.0], 3600.0) == (BELIEVED_S + 3600.0) / 3
    (tmp_path / "attempt.0000").write_text(json.dumps({"claimed_at_s": 12.5}))
    (tmp_path / "attempt.0001").write_text("")
    assert claims_at_s(tmp_path) == [12.5]


@needs_mpi
def test_all_ranks_go_by_the_first_ones_interval(tmp_path: Path) -> None:
    options = ("--steps", "40", "--checkpoint-every", "auto", "--out", tmp_path / "run")
    ended = run_mpi(2, TINY, *options, extra=WITH_WAITING)
    assert ended.status == 0, ended.output
    assert "checkpoint: step 10, base" in ended.output
    assert "checkpoint: step 40, " in ended.output


def test_a_run_learns_from_the_lives_before_it(tmp_path: Path) -> None:
    claims = tmp_path / "run" / "checkpoints"
    claims.mkdir(parents=True)
    for number in range(3):
        (claims / f"attempt.{number:04d}").write_text(json.dumps({"claimed_at_s": time.time()}))
    options = ("--steps", "20", "--checkpoint-every", "auto", "--out", tmp_path / "run", "--patient")
    with started([*python(), TINY, *options], WITH_WAITING) as process:
        ended = finish(process)
    assert ended.status == 0, ended.output
    assert "the run is interrupted every 6.0 h" in ended.output
