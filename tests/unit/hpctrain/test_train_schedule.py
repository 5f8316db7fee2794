"""The learning rate and the batch as functions of the step's number."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.options import add_options
from hpctrain.schedule import BatchRamp, Course, LrRule, LrScale, Schedule


def course(kind: Course, **more: float) -> list[float]:
    schedule = Schedule(peak_lr=1.0, warmup_steps=2, total_steps=10, course=kind, floor=more.get("floor", 0.0))
    return [round(schedule.lr_at(step), 3) for step in (0, 1, 2, 6, 10, 50)]


def test_each_course_warms_up_and_goes_its_way_down() -> None:
    assert course(Course.CONSTANT) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert course(Course.LINEAR) == [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert course(Course.COSINE) == [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert course(Course.LINEAR, floor=0.2) == [0.5, 1.0, 1.0, 0.6, 0.2, 0.2]
    assert course(Course.COSINE, floor=0.2) == [0.5, 1.0, 1.0, 0.6, 0.2, 0.2]
    middle = Schedule(peak_lr=1.0, warmup_steps=0, total_steps=8, course=Course.COSINE, floor=0.0)
    assert middle.lr_at(2) == pytest.approx(0.8536, abs=1e-4)  # above the straight line


def test_a_learning_rate_meant_for_another_batch_is_scaled_by_the_rule() -> None:
    assert LrScale().factor(512) == 1.0
    assert LrScale(rule=LrRule.LINEAR, base=32).factor(128) == 4.0
    assert LrScale(rule=LrRule.SQRT, base=32).factor(128) == 2.0


def test_a_ramp_grows_evenly_and_stays() -> None:
    ramp = BatchRamp(full=32, first=8, steps=4)
    assert [ramp.samples_at(step) for step in range(7)] == [8, 14, 20, 26, 32, 32, 32]
    assert BatchRamp(full=32).samples_at(0) == 32


@given(full=st.integers(1, 5000), first=st.integers(1, 5000), steps=st.integers(1, 500))
def test_a_ramp_never_goes_back_nor_beyond(full: int, first: int, steps: int) -> None:
    first = min(first, full)
    sizes = [BatchRamp(full=full, first=first, steps=steps).samples_at(step) for step in range(steps + 2)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (first, full)


def read(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(["--out", "x", *words])


def test_options_say_all_of_it() -> None:
    options = read("--scale-lr", "sqrt:64", "--ramp", "8:100", "--schedule", "linear", "--floor", "0", "--compile")
    assert options.scale_lr == LrScale(rule=LrRule.SQRT, base=64)
    assert (options.ramp, options.schedule, options.floor, options.compile) == ((8, 100), "linear", 0.0, "inductor")
    assert options.out == Path("x")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--ramp", "8"), "write FIRST:STEPS"),
        (("--ramp", "0:9"), "0 is not positive"),
        (("--scale-lr", "cubic:3"), "write linear:BASE or sqrt:BASE"),
        (("--scale-lr", "linear"), "write linear:BASE or sqrt:BASE"),
        (("--floor", "1.5"), "1.5 is not between 0 and 1"),
        (("--precision", "fp8"), "invalid choice: 'fp8'"),
    ],
)
def test_words_that_make_no_sense_are_refused(
    words: tuple[str, str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read(*words)
    assert why in capsys.readouterr().err
