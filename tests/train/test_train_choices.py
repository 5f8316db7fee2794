"""What a user may choose beside the model, with ranks and restarts: optimizers, precision, pieces, a growing batch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import HERE, Ended, needs_mpi, run_mpi, run_plain

from hpctrain.checkpoint.restore import checkpoint_names
from hpctrain.metrics import read_metrics

TINY = HERE / "tiny.py"
CHOICES = {
    "sgd": ("--optimizer", "sgd", "--ramp", "3:10", "--scale-lr", "sqrt:3", "--recompute"),
    "bf16": ("--precision", "bf16", "--schedule", "constant", "--micro-batch", "2"),
    "fp16": ("--precision", "fp16", "--optimizer", "adamw", "--grow", "5", "--overflow", "1:3", "--schedule", "linear"),
}


def weights(ended: Ended) -> str:
    found = re.search(r"weights sha256 ([0-9a-f]{64})", ended.output)
    assert ended.status == 0, ended.output
    assert found, ended.output
    return found[1]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line]


@needs_mpi
@pytest.mark.parametrize("choice", CHOICES)
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(choice: str, tmp_path: Path) -> None:
    words = CHOICES[choice]
    unbroken = run_mpi(2, TINY, "--out", tmp_path / "unbroken", *words)
    killed = run_mpi(2, TINY, "--out", tmp_path / "killed", "--die", "1:11", *words)
    assert killed.status != 0
    assert checkpoint_names(tmp_path / "killed" / "checkpoints")
    resumed = run_mpi(2, TINY, "--out", tmp_path / "killed", *words)
    assert "resumed from step" in resumed.output
    assert weights(resumed) == weights(unbroken)


@needs_mpi
def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    ended = run_mpi(2, TINY, "--out", tmp_path, "--precision", "fp16", "--grow", "5", "--overflow", "1:3")
    assert (
        "step 3: skipped, its gradient is not finite in float16; the loss is scaled by 32768 from now on"
        in ended.output
    )
    lines = {line["step"]: line for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line}
    assert [lines[step]["loss_scale"] for step in (2, 3, 7, 8, 9, 13)] == [2**16, 2**15, 2**15, 2**16, 2**16, 2**17]
    assert weights(ended)


@needs_mpi
def test_a_gradient_that_is_not_finite_ends_a_run_in_full_precision(tmp_path: Path) -> None:
    ended = run_mpi(2, TINY, "--out", tmp_path, "--overflow", "0:3")
    assert ended.status == 1
    assert "cannot take step 3: the gradient is not finite" in ended.output


def test_a_script_that_leaves_the_loop_has_ended_and_is_not_queued_again(tmp_path: Path) -> None:
    (ended,) = run_plain(1, TINY, "--out", tmp_path, "--leave", "6")
    assert ended.status == 0, ended.output
    assert "the script left the loop after 5 steps; no checkpoint was made there" in ended.output


def test_pieces_a_ramp_and_ranks_change_a_run_only_by_rounding(tmp_path: Path) -> None:
    words = ("--ramp", "3:10", "--threads", "1", "--drop", "0")
    plain = run_plain(1, TINY, "--out", tmp_path / "a", *words)
    ranks = run_plain(2, TINY, "--out", tmp_path / "b", "--micro-batch", "2", "--shares", "2,1", "--overlap", *words)
    assert [ended.status for ended in (*plain, *ranks)] == [0, 0, 0], (plain, ranks)
    sizes = [line["batch"] for line in read_metrics(tmp_path / "a" / "metrics.jsonl") if "loss" in line]
    assert sizes == [3, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 12, 12, 12, 12, 12]
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), abs=1e-5)


@pytest.mark.parametrize(("speeds", "first"), [("n1=2,n2=1", [8, 4]), ("n1=2,n2=nan", [6, 6]), ("", [6, 6])])
def test_unequal_nodes_begin_with_unequal_shares(speeds: str, first: list[int], tmp_path: Path) -> None:
    nodes = [{"HPCSCHED_NODENAME": name, "HPCSCHED_NODE_SPEEDS": speeds} for name in ("n1", "n2")]
    ranks = run_plain(2, TINY, "--out", tmp_path, "--shares", "auto", extra=nodes)
    assert [ended.status for ended in ranks] == [0, 0], ranks
    assert next(line["shares"] for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line) == first
    assert ("shares 8 4 at the start, by the measured speeds" in ranks[0].output) is (first == [8, 4])


@needs_mpi
def test_options_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    ended = run_mpi(2, TINY, "--out", tmp_path, "--precision", "fp16", "--sync", "local:4")
    assert ended.status == 1
    assert "cannot train with --precision fp16 and --sync local:4" in ended.output
    ended = run_mpi(1, TINY, "--out", tmp_path, "--ramp", "20:4")
    assert "it would begin at 20 samples, over --batch 12" in ended.output


def test_a_compiled_model_learns_the_same(tmp_path: Path) -> None:
    plain = run_plain(1, TINY, "--out", tmp_path / "a", "--threads", "1")
    compiled = run_plain(1, TINY, "--out", tmp_path / "b", "--threads", "1", "--compile", "aot_eager")
    assert (plain[0].status, compiled[0].status) == (0, 0), compiled
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), abs=1e-4)
