"""The learning rate and the batch as functions of the step's number."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import TrainError
from hpctrain.optim.schedule import Batches, BatchRamp, Course, EpochEnd, LrRule, LrScale, LrSchedule
from hpctrain.options import add_options
from hpctrain.settings import lr_text, settings_of


def course(kind: Course, **more: float) -> list[float]:
    schedule = LrSchedule(peak_lr=1.0, warmup_steps=2, total_steps=10, course=kind, floor=more.get("floor", 0.0))
    return [round(schedule.lr_at(step), 3) for step in (0, 1, 2, 6, 10, 50)]


def test_each_course_warms_up_and_goes_its_way_down() -> None:
    assert course(Course.CONSTANT) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert course(Course.LINEAR) == [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert course(Course.COSINE) == [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert course(Course.LINEAR, floor=0.2) == [0.5, 1.0, 1.0, 0.6, 0.2, 0.2]
    assert course(Course.COSINE, floor=0.2) == [0.5, 1.0, 1.0, 0.6, 0.2, 0.2]
    middle = LrSchedule(peak_lr=1.0, warmup_steps=0, total_steps=8, course=Course.COSINE, floor=0.0)
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


def spans(batches: Batches, step: int = 0, low: int = 0) -> list[tuple[int, int]]:
    """The spans of all steps that are left."""
    found = []
    for _ in range(batches.steps_left(step, low) or 0):
        low, size = batches.span(step, low)
        found.append((low, size))
        step, low = step + 1, low + size
    return found


def batches_of(full: int, end: EpochEnd, first: int | None = None, ramp: int = 0) -> Batches:
    ramp_ = BatchRamp(full=full, first=first or full, steps=ramp)
    return Batches(ramp=ramp_, epoch_samples=10, epoch_end=end, epochs=2)


def test_at_an_epochs_end_a_batch_crosses_is_short_or_is_left_out() -> None:
    assert spans(batches_of(4, EpochEnd.CROSS)) == [(0, 4), (4, 4), (8, 4), (12, 4), (16, 4)]
    assert spans(batches_of(3, EpochEnd.CROSS))[-1] == (18, 2)  # the last one has what is left
    assert spans(batches_of(4, EpochEnd.SHORT)) == [(0, 4), (4, 4), (8, 2), (10, 4), (14, 4), (18, 2)]
    assert spans(batches_of(4, EpochEnd.DROP)) == [(0, 4), (4, 4), (10, 4), (14, 4)]
    ends = (EpochEnd.CROSS, EpochEnd.SHORT, EpochEnd.DROP)
    assert [batches_of(4, end).epochs_in(7) for end in ends] == [2.8, pytest.approx(2.4), pytest.approx(3.4)]
    assert batches_of(4, EpochEnd.SHORT).epochs_in(6) == 2
    assert spans(batches_of(16, EpochEnd.SHORT)) == [(0, 10), (10, 10)]
    assert spans(batches_of(4, EpochEnd.SHORT, first=1, ramp=3)) == [
        (0, 1), (1, 2), (3, 3), (6, 4), (10, 4), (14, 4), (18, 2)
    ]  # fmt: skip


@given(
    full=st.integers(1, 12),
    first=st.integers(1, 12),
    ramp=st.integers(0, 9),
    end=st.sampled_from(EpochEnd),
    at=st.integers(0, 30),
)
def test_epochs_are_counted_from_wherever_a_run_is(full: int, first: int, ramp: int, end: EpochEnd, at: int) -> None:
    batches = batches_of(min(full, 10), end, min(first, full, 10), ramp)
    whole = spans(batches)
    done = whole[:at]
    low = sum(done[-1]) if done else 0
    assert spans(batches, len(done), low) == whole[at:]
    seen = [sample for low, size in whole for sample in range(low, low + size)]
    assert all(size > 0 for _, size in whole)
    assert len(set(seen)) == len(seen)
    assert end is EpochEnd.DROP or seen == list(range(20))


def test_epochs_that_cannot_be_counted_or_batched_are_refused() -> None:
    with pytest.raises(TrainError, match="cannot count epochs: the number of samples .* is not known"):
        settings_of(read("--epochs", "3"), 0.1)
    with pytest.raises(TrainError, match="cannot make batches of 32: there are 10 samples, and drop_last=True"):
        settings_of(read("--epochs", "3"), 0.1, epoch_samples=10, epoch_end=EpochEnd.DROP)


def test_of_three_lengths_the_last_one_counts() -> None:
    both = read("--steps", "5", "--epochs", "3")
    assert (both.steps, both.epochs) == (None, 3)
    assert read("--target-seconds", "5", "--steps", "3").target_seconds is None
    parser = argparse.ArgumentParser()
    with pytest.raises(TrainError, match="cannot give a run two lengths, steps and epochs"):
        add_options(parser, steps=3, epochs=4)


def test_by_default_the_scripts_own_learning_rate_is_constant_and_nothing_is_clipped() -> None:
    settings = settings_of(read("--batch", "64"), 1e-3, epoch_samples=1500)
    assert {settings.lr_at(step, 64, 400) for step in (0, 1, 399)} == {1e-3}
    assert settings.described(400) == "lr 1e-3 (constant), clip none, batch 64, 400 steps = 17.1 epochs"
    assert settings_of(read(), 1e-3, batch=16).batch == 16  # the data's own
    asked = settings_of(read("--lr", "0.004", "--schedule=cosine", "--warmup=20", "--clip=1"), 1e-3)
    expected = "lr 4e-3 (cosine to 0.05 of it, 20 steps warm-up), clip 1, batch 32, 1 step"
    assert asked.described(1) == expected
    assert [lr_text(lr) for lr in (3e-4, 1.5e-5, 0.1, 0.0)] == ["3e-4", "1.5e-5", "0.1", "0"]
