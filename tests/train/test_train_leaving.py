"""A script that leaves its loop or ends: all ranks do so in the same step, or all are told who did not."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import HERE, Ended, needs_mpi, run_mpi, run_plain

from hpctrain.checkpoint.restore import checkpoint_names

LEAVING = HERE / "leaving.py"


def leave(out: Path, way: str, *who: int, count: int = 2, more: tuple[str, ...] = ()) -> Ended:
    return run_mpi(count, LEAVING, "--out", out, "--way", way, *more, "--who", *map(str, who))


@needs_mpi
@pytest.mark.parametrize(
    "more",
    [("--overlap",), ("--sync", "local:8", "--eval-every", "7"), ("--sync", "bf16", "--zero")],
    ids=" ".join,
)
def test_one_rank_that_leaves_the_loop_alone_ends_all_and_is_named(more: tuple[str, ...], tmp_path: Path) -> None:
    ended = leave(tmp_path, "break", 1, more=more)
    assert ended.status == 1, ended.output
    assert "rank 0 did not, rank 1 left the loop in step 6" in ended.output
    assert "run.stop()" in ended.output


@needs_mpi
def test_so_does_one_that_exits_out_of_it(tmp_path: Path) -> None:
    ended = leave(tmp_path, "exit", 0)
    assert ended.status == 1, ended.output
    assert "rank 0 left the loop in step 6, rank 1 did not" in ended.output


@needs_mpi
@pytest.mark.parametrize(("way", "more"), [("break", ("--shares", "1,0")), ("return", ("--overlap",))])
def test_ranks_leave_it_together_also_those_without_samples(way: str, more: tuple[str, ...], tmp_path: Path) -> None:
    ended = leave(tmp_path, way, 0, 1, more=more)
    assert ended.status == 0, ended.output
    assert "the script left the loop after 5 steps; no checkpoint was made there" in ended.output


@needs_mpi
def test_an_exit_without_an_error_is_none(tmp_path: Path) -> None:
    ended = leave(tmp_path, "exit", 0, 1)
    assert ended.status == 0, ended.output
    assert "the script ended with status" not in ended.output
    for way, status in (("end", 0), ("requeue", 75)):
        (alone,) = run_plain(1, LEAVING, "--way", way, "--out", tmp_path / way, "--who", "0")
        assert alone.status == status, alone.output
        assert "hpctrain:" not in alone.output


@needs_mpi
def test_a_rank_that_exits_with_an_error_ends_all_with_its_reason(tmp_path: Path) -> None:
    ended = leave(tmp_path, "refuse", 1)
    assert ended.status == 1, ended.output
    assert "rank 1 of 2: no such data here" in ended.output
    ended = leave(tmp_path, "fail", 1)
    assert ended.status == 3, ended.output
    assert "rank 1 of 2: the script ended with status 3" in ended.output


@needs_mpi
def test_a_rank_that_never_comes_to_the_loop_is_named(tmp_path: Path) -> None:
    ended = leave(tmp_path, "never", 1)
    assert ended.status == 1, ended.output
    assert "rank 1 ended without run.steps" in ended.output


@needs_mpi
def test_one_rank_ends_the_loop_on_all_of_them_with_a_checkpoint(tmp_path: Path) -> None:
    ended = leave(tmp_path, "stop", 1)
    assert ended.status == 0, ended.output
    assert "ended by the script at step 6" in ended.output
    assert [name.split(".")[0] for name in checkpoint_names(tmp_path / "checkpoints")][0].endswith("6"), ended.output


def test_over_gloo_and_alone_it_is_the_same(tmp_path: Path) -> None:
    words = ("--backend", "gloo", "--way", "break", "--out")
    ended = run_plain(2, LEAVING, *words, tmp_path / "a", "--who", "1")
    assert all(one.status for one in ended), ended
    assert "rank 0 did not, rank 1 left the loop in step 6" in ended[0].output + ended[1].output
    (alone,) = run_plain(1, LEAVING, "--way", "stop", "--out", tmp_path / "b", "--who", "0")
    assert alone.status == 0
    assert "ended by the script at step 6" in alone.output
    (again,) = run_plain(1, LEAVING, "--way", "stop", "--out", tmp_path / "b", "--who", "7")
    assert "resumed from step 6" in again.output
    assert "step    16/16" in again.output
