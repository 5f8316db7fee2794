"""Prices by the hour of the week: windows, clock changes, refusals, and the cheapest time for a job."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zones import zone_fixture

from hpcsched.errors import RequestError
from hpcsched.model.tariff import (
    WEEK_S,
    Price,
    PriceSteps,
    as_written,
    cheapest_starts,
    price_of,
    steps_of,
)

NIGHT = {"default": 0.31, "Mo-Fr 22:00-06:00": 0.22}
HOUR_S = 3600.0


berlin = zone_fixture("Europe/Berlin")


def at(*when: int) -> float:
    return datetime(*when).timestamp()  # type: ignore[arg-type]


def changes(price: Price, start_s: float, end_s: float) -> list[tuple[str, float]]:
    found = steps_of(price, start_s, end_s).steps
    return [(datetime.fromtimestamp(at_s).strftime("%a %H:%M"), value) for at_s, value in found]


def test_a_window_over_midnight_belongs_to_the_day_on_which_it_begins() -> None:
    assert changes(price_of(NIGHT), at(2026, 11, 27, 12), at(2026, 12, 1, 12)) == [
        ("Fri 12:00", 0.31), ("Fri 22:00", 0.22), ("Sat 06:00", 0.31), ("Mon 22:00", 0.22), ("Tue 06:00", 0.31)
    ]  # fmt: skip


def test_a_window_of_sunday_night_ends_on_monday() -> None:
    price = price_of({"default": 2, "Su 23:30-01:15": 1})
    assert changes(price, at(2026, 11, 29, 12), at(2026, 11, 30, 12)) == [
        ("Sun 12:00", 2), ("Sun 23:30", 1), ("Mon 01:15", 2)
    ]  # fmt: skip


@pytest.mark.parametrize(("month", "day", "hours"), [(3, 28, 7.0), (10, 24, 9.0), (11, 28, 8.0)])
def test_a_night_in_which_the_clock_changes_lasts_as_long_as_it_does(month: int, day: int, hours: float) -> None:
    """In 2026, the clocks of Berlin change in the night to 29 March and to 25 October."""
    steps = steps_of(price_of({"default": 1, "22:00-06:00": 0}), at(2026, month, day, 12), at(2026, month, day + 1, 12))
    (_, _), (begins_s, low), (ends_s, _) = steps.steps
    assert (low, (ends_s - begins_s) / HOUR_S) == (0, hours)


def test_a_window_in_the_hour_that_is_skipped_is_left_out() -> None:
    price = price_of({"default": 1, "02:15-02:45": 0})
    assert changes(price, at(2026, 3, 29, 1), at(2026, 3, 29, 12)) == [("Sun 01:00", 1)]
    price = price_of({"default": 1, "02:15-03:30": 0})
    assert changes(price, at(2026, 3, 29, 1), at(2026, 3, 29, 12)) == [
        ("Sun 01:00", 1), ("Sun 03:00", 0), ("Sun 03:30", 1)
    ]  # fmt: skip


def test_a_window_in_the_hour_that_is_repeated_counts_twice() -> None:
    price = price_of({"default": 1, "02:15-02:45": 0})
    assert [when for when, _ in changes(price, at(2026, 10, 25, 1), at(2026, 10, 25, 12))] == [
        "Sun 01:00", "Sun 02:15", "Sun 02:45", "Sun 02:15", "Sun 02:45"
    ]  # fmt: skip


@given(st.floats(1.77e9, 1.80e9))
def test_the_price_at_a_time_is_that_of_the_local_clock(now_s: float) -> None:
    local = datetime.fromtimestamp(now_s)
    is_night = (local.hour >= 22 and local.weekday() < 5) or (local.hour < 6 and local.weekday() in range(1, 6))
    steps = steps_of(price_of(NIGHT), now_s - 3 * WEEK_S, now_s + WEEK_S)
    assert steps.mean(now_s, now_s) == (0.22 if is_night else 0.31)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("cheap", "must be a number"),
        (-0.1, "0 or more"),
        (True, "must be a number"),
        (float("nan"), "must be a number"),
        ({"22:00-06:00": 0.2}, "no default"),
        ({"default": 1, "25:00-26:00": 0.2}, "not a time of day"),
        ({"default": 1, "10:60-11:00": 0.2}, "not a time of day"),
        ({"default": 1, "10:00-10:00": 0.2}, "empty"),
        ({"default": 1, "24:00-06:00": 0.2}, "empty"),
        ({"default": 1, "Xx 10:00-12:00": 0.2}, "not a day"),
        ({"default": 1, "M 10:00-12:00": 0.2}, "cannot read the window"),
        ({"default": 1, "always": 0.2}, "cannot read the window"),
        ({"default": 1, "10:00-12:00": "x"}, "must be a number"),
        ({"default": 1, "Sa 00:00-24:00": 2, "Mo-Fr 22:00-06:00": 3}, "overlap"),
        ({"default": 1, **{f"{hour // 60:02}:{hour % 60:02}-24:00": 1 for hour in range(60)}}, "more than 50"),
    ],
)
def test_a_price_that_cannot_be_meant_is_refused_with_the_reason(value: object, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        price_of(value)


@pytest.mark.parametrize("value", [0.0, 0.3, NIGHT, {"default": 1.0, "Sa,Su 00:00-24:00": 0.0}])
def test_a_price_is_shown_as_it_was_written(value: object) -> None:
    assert as_written(price_of(value)) == value


def test_the_mean_price_weighs_each_price_by_its_time() -> None:
    steps = PriceSteps([(0, 0.4), (100, 0.1)])
    assert steps.mean(50, 150) == pytest.approx(0.25)
    assert steps.mean(-100, 0) == pytest.approx(0.4)  # before the first time, the nearest price counts
    assert steps.mean(200, 900) == pytest.approx(0.1)


# ----- the cheapest start

prices = st.sampled_from(
    [
        price_of(0.3),
        price_of(NIGHT),
        price_of({"default": 0.3, "12:00-14:00": 0.05, "Sa-Su 00:00-12:00": 0.1, "18:00-20:00": 0.6}),
    ]
)


@given(prices, st.floats(60, 3 * 86400), st.floats(1.77e9, 1.80e9), st.floats(0, 14 * 86400))
def test_no_cheapest_start_is_too_late_or_dearer_than_now(
    price: Price, length_s: float, now_s: float, slack_s: float
) -> None:
    starts = cheapest_starts(price, length_s, now_s, now_s + slack_s)
    assert all(now_s <= at_s <= now_s + slack_s for at_s, _ in starts)
    best_s, best = starts[0]
    steps = steps_of(price, now_s, now_s + slack_s + length_s)
    assert steps.mean(best_s, best_s + length_s) <= steps.mean(now_s, now_s + length_s) + 1e-9
    some = (now_s + part / 20 * min(slack_s, WEEK_S) for part in range(21))
    assert all(best <= steps.mean(at_s, at_s + length_s) + 1e-6 for at_s in some)


def test_of_equal_prices_the_earliest_start_comes_first() -> None:
    assert cheapest_starts(price_of(0.3), 3600, 1.78e9, 1.79e9)[0][0] == 1.78e9
    evening_s = at(2026, 11, 27, 20)
    assert cheapest_starts(price_of(NIGHT), 2 * HOUR_S, evening_s, evening_s + 86400)[0][0] == at(2026, 11, 27, 22)


def test_a_start_after_the_deadline_is_not_proposed() -> None:
    now_s = at(2026, 11, 27, 20)
    assert [at_s for at_s, _ in cheapest_starts(price_of(NIGHT), 7200, now_s, now_s - 60)] == [now_s]
