"""Optimizer state in shards: the same bits as without, over restarts too, less memory, and what cannot be sharded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from ranks import HERE, Ended, needs_mpi, run_mpi, run_plain
from test_train_resume import WITH_WAITING

from hpctrain.errors import TrainError
from hpctrain.optim.zero import check_elementwise

TINY = HERE / "tiny.py"


def weights(ended: Ended) -> str:
    assert ended.status == 0, ended.output
    return next(line for line in ended.output.splitlines() if "sha256" in line)


def tiny(ranks: int, out: Path, *words: str) -> Ended:
    return run_mpi(ranks, TINY, "--out", out, *words, extra=WITH_WAITING)


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_move_the_weights_to_the_same_bits(ranks: int) -> None:
    ended = run_mpi(ranks, HERE / "check_zero.py", "mpi")
    assert ended.status == 0, ended.output
    assert "10 optimizers in shards over mpi" in ended.output


def test_and_over_gloo() -> None:
    for ended in run_plain(2, HERE / "check_zero.py", "gloo"):
        assert ended.status == 0, ended.output


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_each_ranks_part_alone_are_enough_between_hosts(ranks: int) -> None:
    ended = run_mpi(ranks, HERE / "check_own_part.py")
    assert ended.status == 0, ended.output
    assert f"own parts on {ranks}" in ended.output


UNLIKE = ("--shares", "5,2", "--optimizer", "adamw", "--clip", "0.1")


@needs_mpi
def test_a_sharded_run_ends_with_the_bits_of_the_plain_run_also_after_a_restart(tmp_path: Path) -> None:
    plain = weights(tiny(2, tmp_path / "plain", *UNLIKE))
    assert tiny(2, tmp_path / "shards", "--zero", "--patient", *UNLIKE, "--die", "1:11").status != 0
    again = tiny(2, tmp_path / "shards", "--zero", *UNLIKE)
    assert "resumed from step 8" in again.output
    assert weights(again) == plain


@needs_mpi
def test_a_checkpoint_with_shards_fits_other_ranks_and_a_run_without(tmp_path: Path) -> None:
    assert tiny(2, tmp_path / "one", "--zero", *UNLIKE, "--steps", "8").status == 0
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    longer = [
        weights(tiny(3, tmp_path / out, *words, "--optimizer", "adamw", "--steps", "12"))
        for out, words in (("one", ("--zero",)), ("two", ()))
    ]
    assert len(set(longer)) == 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: torch.optim.Adafactor(p), "moves a number by others' gradients too"),
        (lambda p: torch.optim.LBFGS(p), "cannot take a step with a piece of a matrix"),
        (lambda p: torch.optim.Muon(p), "cannot take a step with a piece of a matrix"),
    ],
)
def test_an_optimizer_that_is_not_elementwise_is_refused(make, why: str) -> None:  # noqa: ANN001
    state = torch.random.get_rng_state()
    with pytest.raises(TrainError, match=why):
        check_elementwise(make([torch.nn.Parameter(torch.ones(4, 4))]))
    assert torch.equal(torch.random.get_rng_state(), state)


@needs_mpi
def test_local_steps_have_moments_of_their_own(tmp_path: Path) -> None:
    ended = tiny(2, tmp_path / "run", "--zero", "--sync", "local:4")
    assert ended.status != 0
    assert "cannot shard the optimizer's state (--zero) with --sync local:4" in ended.output
