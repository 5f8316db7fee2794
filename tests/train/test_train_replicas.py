"""Buffers of the model (batch norm's running statistics, counters) are alike on all ranks after each step."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ended, needs_mpi, run_mpi, run_plain

HERE = Path(__file__).parent


def normed(ranks: int, out: Path, *options: str) -> Ended:
    return run_mpi(ranks, HERE / "normed.py", "--out", out, *options)


def facts(ended: Ended) -> str:
    assert ended.status == 0, ended.output
    return next(line for line in ended.output.splitlines() if line.startswith("weights sha256"))


@needs_mpi
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--micro-batch", "3", "--shares", "3,1"),
        ("--shares", "0,1"),
        ("--sync", "local:4"),
        ("--zero",),
        ("--eval-every", "4"),
    ],
    ids=" ".join,
)
def test_ranks_end_alike_whatever_the_model_keeps_beside_its_weights(tmp_path: Path, options: tuple[str, ...]) -> None:
    facts(normed(2, tmp_path / "run", *options))


def test_and_over_gloo(tmp_path: Path) -> None:
    ended = run_plain(2, HERE / "normed.py", "--out", tmp_path / "run", "--backend", "gloo")
    assert [one.status for one in ended] == [0, 0], ended
    facts(ended[0])


@needs_mpi
def test_the_rank_that_has_learned_most_is_followed(tmp_path: Path) -> None:
    """The first rank has no samples, so that its own buffers stay as they were."""
    ended = normed(2, tmp_path / "run", "--shares", "0,1")
    assert " forwards 16 " in facts(ended)
    assert "running mean 0.0000" not in ended.output


@needs_mpi
@pytest.mark.parametrize("options", [(), ("--checkpoint-every", "1")], ids=" ".join)
def test_ranks_resume_from_a_checkpoint_to_the_same_bits(tmp_path: Path, options: tuple[str, ...]) -> None:
    whole = facts(normed(2, tmp_path / "whole", *options))
    assert normed(2, tmp_path / "killed", *options, "--die", "1:11").status != 0
    again = normed(2, tmp_path / "killed", *options)
    assert "resumed from step" in again.output
    assert facts(again).split()[:5] == whole.split()[:5]
