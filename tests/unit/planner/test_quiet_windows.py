"""When maintenance displaces the least work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.planner.windows import HOUR_S, WEEK_S, NodeUse, QuietWindow, quiet_windows

NOW_S = 1_000 * WEEK_S
DAY_S = 24 * HOUR_S


def windows(past: Sequence[NodeUse], running: Sequence[NodeUse] = (), **more: Any) -> list[QuietWindow]:
    asked = {"nodes": {"n1", "n2"}, "since_s": NOW_S - 4 * WEEK_S, "from_s": NOW_S, "within_s": WEEK_S, "hours": 4,
             "is_closed": lambda start_s, end_s: False}  # fmt: skip
    return quiet_windows(past, running, **(asked | more))


def days(
    first: int, last: int, from_hour: int, hours: int, cpus: int = 8, gpus: int = 0, node: str = "n1"
) -> list[NodeUse]:
    """Return the same use at the same hours of each day before now: day 1 is yesterday."""
    starts = [NOW_S - day * DAY_S + from_hour * HOUR_S for day in range(first, last + 1)]
    return [NodeUse(node, start_s, start_s + hours * HOUR_S, cpus, gpus) for start_s in starts]


def test_the_quietest_hours_of_the_weeks_before_come_first_and_the_busiest_last() -> None:
    found = windows([*days(1, 28, 0, 20), *days(1, 28, 8, 6, cpus=8, node="n2")])
    assert len(found) == 7 * 24 - 3
    assert found[0] == QuietWindow(NOW_S + 20 * HOUR_S, NOW_S + 24 * HOUR_S, 0.0, 0.0, 0)
    assert found[-1].cpu_hours == pytest.approx(64.0)
    assert 8 <= (found[-1].start_s - NOW_S) % DAY_S / HOUR_S <= 10


def test_gpu_hours_count_before_cpu_hours() -> None:
    found = windows([*days(1, 28, 0, 12, cpus=2, gpus=4), *days(1, 28, 12, 12, cpus=60)])
    assert (found[0].start_s - NOW_S) % DAY_S / HOUR_S >= 12
    assert found[0].gpu_hours == 0.0


def test_a_short_history_counts_by_days_and_none_is_refused() -> None:
    found = windows(days(1, 3, 0, 20), since_s=NOW_S - 3 * DAY_S)
    assert (found[0].start_s - NOW_S) % DAY_S == 20 * HOUR_S
    assert found[0].cpu_hours == 0.0
    with pytest.raises(ValueError, match="a day"):
        windows([], since_s=NOW_S - HOUR_S)


def test_a_job_with_a_limit_of_a_hundred_years_counts_within_the_period_only() -> None:
    forever = NodeUse("n1", 0.0, math.inf, 8, 0)
    found = windows([forever], [forever])
    assert {one.cpu_hours for one in found} == {32.0}
    assert {one.running for one in found} == {1}


def test_other_nodes_and_reserved_periods_are_left_out() -> None:
    busy_elsewhere = days(1, 28, 0, 24, node="n9")
    assert {one.cpu_hours for one in windows(busy_elsewhere)} == {0.0}
    found = windows([], is_closed=lambda start_s, end_s: start_s < NOW_S + DAY_S)
    assert min(one.start_s for one in found) == NOW_S + DAY_S


def test_windows_into_which_running_jobs_may_run_come_last() -> None:
    found = windows([], [NodeUse("n1", NOW_S - HOUR_S, NOW_S + 10 * HOUR_S, 8, 1)])
    assert found[0].start_s == NOW_S + 10 * HOUR_S
    assert (found[0].running, found[-1].running) == (0, 1)
    assert found[-1].gpu_hours == pytest.approx(4.0)


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(1, 60), st.integers(1, 8)), max_size=20), st.integers(1, 12))
def test_nothing_is_counted_twice_or_lost(uses: list[tuple[int, int, int]], hours: int) -> None:
    past = [NodeUse("n1", NOW_S - 4 * WEEK_S + at * HOUR_S, NOW_S - 4 * WEEK_S + (at + long) * HOUR_S, cpus, 0)
            for at, long, cpus in uses]  # fmt: skip
    found = windows(past, hours=hours)
    starts = {one.start_s: one.cpu_hours for one in found}
    whole = sum(starts[NOW_S + hour * HOUR_S] for hour in range(0, 168 - 168 % hours, hours))
    seen = sum(
        cpus
        for at, long, cpus in uses
        for hour in range(at, at + long)
        if hour % 168 < 168 - 168 % hours and hour < 672
    )
    assert whole == pytest.approx(seen / 4)
