"""Options that mean nothing are refused before anything begins."""

from __future__ import annotations

import argparse

import pytest

from hpctrain.options import add_options


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(["--out", "run", *words])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--lr=-1", "argument --lr: -1 is not a number of at least 0"),
        ("--lr=nan", "argument --lr: nan is not a number of at least 0"),
        ("--clip=inf", "argument --clip: inf is not"),
        ("--target-seconds=-1", "-1 is not a number of at least 0"),
        ("--keep-every=-1", "-1 is not a number of at least 0"),
        ("--warmup=-5", "argument --warmup: -5 is less than 0"),
        ("--eval-every=-3", "-3 is less than 0"),
        ("--checkpoint-every=-2", "-2 is less than 0"),
        ("--prefetch=-1", "-1 is less than 0"),
        ("--profile=-1", "-1 is less than 0"),
        ("--shares=1,x", "argument --shares: '1,x': write auto, even, or a number for each rank, e.g. 2,1"),
        ("--shares=1,-1", "argument --shares: -1 is not"),
        ("--shares=0,0", "argument --shares: 0,0: not all weights may be zero"),
    ],
)
def test_a_number_that_means_nothing_is_refused(words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(words)
    assert why in capsys.readouterr().err


def test_zero_and_auto_mean_something() -> None:
    options = parsed("--clip=0", "--warmup=0", "--eval-every=0", "--checkpoint-every=auto", "--shares=1,0")
    assert (options.clip, options.warmup, options.eval_every) == (0.0, 0, 0)
    assert options.checkpoint_every is None
    assert options.shares == (1.0, 0.0)
