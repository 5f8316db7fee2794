"""Curves in cells of text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.listing.plot import BrailleCanvas, short_number, time_plot, unit_of


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    canvas = BrailleCanvas(4, 2, (0, 1), (0, 1))
    canvas.draw_line([(0, 1), (1, 0)], "loss")
    assert ["".join(text for text, _ in cells) for cells in canvas.rows()] == ["⠑⢄  ", "  ⠑⢄"]


def test_points_outside_of_the_range_are_drawn_at_its_edge() -> None:
    canvas = BrailleCanvas(2, 1, (0, 1), (0, 1))
    canvas.draw_squares([(5, 5), (-5, -5)], "validation")
    assert all(layer == "validation" for cells in canvas.rows() for _, layer in cells)


def plotted(values: list[float | None], *, width: int = 30, height: int = 3, ascii_only: bool = False) -> list[str]:
    return time_plot(values, 0.0, 60.0, width, height, "B", binary=True, ascii_only=ascii_only)


def test_a_plot_has_its_scale_and_its_times() -> None:
    lines = plotted([0, 512, 1024, 2048])
    assert len(lines) == 5
    assert lines[0].startswith("2 KiB ┤")
    assert lines[2].startswith("  0 B ┤")
    assert len(lines[4].split()) >= 2


def test_a_gap_stays_empty_and_a_lone_value_is_a_dot() -> None:
    lines = plotted([5, 5, None, None, None, None, None, 5], ascii_only=True)
    top = lines[0].partition("|")[2]
    assert top.strip().startswith("'") or top.strip().startswith(".")
    assert "   " in top.strip()


def test_without_values_there_is_a_word() -> None:
    assert plotted([None, None]) == ["no values"]


def test_ascii_is_enough_for_a_terminal_without_utf8() -> None:
    assert "\n".join(plotted([1, 7, 3], ascii_only=True)).isascii()


@given(
    st.lists(st.one_of(st.none(), st.floats(-1e300, 1e300)), min_size=1, max_size=50),
    st.integers(0, 120),
    st.integers(1, 12),
)
def test_any_values_fit_into_the_width(values: list[float | None], width: int, height: int) -> None:
    lines = plotted(values, width=width, height=height)
    if any(value is not None for value in values):
        assert len(lines) == height + 2
    assert all(len(line) <= max(width, 30) for line in lines)


@pytest.mark.parametrize(
    ("value", "unit", "binary", "text"),
    [
        (0, "B", True, "0 B"),
        (1536, "B", True, "1.5 KiB"),
        (1.2e9, "B/s", False, "1.2 GB/s"),
        (0.031, "", False, "0.031"),
        (999.7, "", False, "1000"),
        (-2048, "B", True, "-2 KiB"),
    ],
)
def test_numbers_are_short(value: float, unit: str, binary: bool, text: str) -> None:
    assert short_number(value, unit, binary=binary) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_is_short(value: float) -> None:
    assert len(short_number(value)) <= 8 or abs(value) > 1e18 or 0 < abs(value) < 1e-3
    assert math.isfinite(value)


def test_a_rate_of_seconds_is_a_number_of_cpus_and_of_joules_are_watts() -> None:
    assert unit_of({"unit": "seconds"}, is_rate=True) == ("", False)
    assert unit_of({"unit": "joules"}, is_rate=True) == ("W", False)
    assert unit_of({"unit": "bytes"}, is_rate=True) == ("B/s", True)
