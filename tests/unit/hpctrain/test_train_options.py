"""Options that mean nothing are refused before anything begins."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hpctrain.errors import TrainError
from hpctrain.options import add_options, options_from


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
def test_a_number_out_of_range_is_refused(words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(words)
    assert why in capsys.readouterr().err


def test_zero_and_auto_mean_something() -> None:
    options = parsed("--clip=0", "--warmup=0", "--eval-every=0", "--checkpoint-every=auto", "--shares=1,0")
    assert (options.clip, options.warmup, options.eval_every) == (0.0, 0, 0)
    assert options.checkpoint_every is None
    assert options.shares == (1.0, 0.0)


def test_settings_by_name_are_the_options() -> None:
    words = [
        "--lr=1e-3",
        "--ramp=8:100",
        "--shares=2,1",
        "--zero",
        "--no-overlap",
        "--log=mlflow",
        "--epochs=3",
        "--compile",
    ]
    settings = {
        "lr": 1e-3, "ramp": (8, 100), "shares": (2, 1), "zero": True, "overlap": False, "log": ["mlflow"], "epochs": 3,
        "compile": True, "out": Path("run"), "verbose": False, "batch": None,
    }  # fmt: skip
    assert options_from(settings) == parsed(*words)
    assert options_from({"out": "run", "checkpoint_every": "auto"}).checkpoint_every is None
    assert options_from({"out": "run", "scale_lr": "sqrt:32"}).scale_lr.base == 32


def test_unknown_or_wrong_settings_are_refused() -> None:
    with pytest.raises(TypeError, match=r"start\(\) has no setting 'learning_rate': see hpctrain\(1\)"):
        options_from({"out": "run", "learning_rate": 1})
    with pytest.raises(TypeError, match="has no setting 'warm_up'; did you mean 'warmup'?"):
        options_from({"out": "run", "warm_up": 5})
    with pytest.raises(TrainError, match="cannot start: --lr: -1 is not a number of at least 0"):
        options_from({"out": "run", "lr": -1})
    with pytest.raises(TrainError, match=r"give a directory .*: start\(out=DIRECTORY\)"):
        options_from({"lr": 1})
    with pytest.raises(TrainError, match="cannot give a run two lengths, steps and epochs"):
        options_from({"out": "run", "steps": 10, "epochs": 3})
