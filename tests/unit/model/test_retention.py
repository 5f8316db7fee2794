"""Which backups are kept: days, weeks, and what a wrong clock must not delete."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from hpcsched.errors import RequestError
from hpcsched.model.retention import LEAST_KEPT, KeptBackups, kept_times, retention_of

NOW = datetime(2026, 3, 18, 12, 30)  # a Wednesday
RULE = KeptBackups(7, 8)


def test_the_rule_is_read_in_both_orders_of_magnitude_or_one() -> None:
    assert retention_of("7d daily, 8w weekly") == RULE
    assert retention_of(" 3d daily") == KeptBackups(3, 0)
    assert retention_of("8w weekly") == KeptBackups(0, 8)


@pytest.mark.parametrize(
    "text", ["", "7", "7d", "daily", "7d daily 8d daily", "8w weekly, 7d daily", "-1d daily", "0x7d daily"]
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match='write "7d daily, 8w weekly"'):
        retention_of(text)


def test_all_of_the_last_day_then_one_a_day_then_one_a_week_are_kept() -> None:
    times = [NOW - timedelta(hours=6 * number) for number in range(4 * 80)]
    kept = sorted(kept_times(times, RULE, NOW), reverse=True)
    assert kept[:4] == times[:4]  # 24 hours, yesterday's last one among them
    assert [time.date() for time in kept[4:10]] == [(NOW - timedelta(days=days)).date() for days in range(2, 8)]
    assert all(time.hour == 18 for time in kept[4:10])  # the last of each day
    weeks = [tuple(time.isocalendar())[:2] for time in kept[10:]]
    assert len(set(weeks)) == len(weeks)
    assert NOW - kept[-1] < timedelta(weeks=8)
    assert len(kept) <= 4 + 6 + 8


def test_keeping_again_keeps_the_same() -> None:
    times = [NOW - timedelta(hours=6 * number) for number in range(300)]
    kept = kept_times(times, RULE, NOW)
    assert kept_times(sorted(kept), RULE, NOW) == kept


def test_a_wrong_clock_deletes_neither_the_newest_nor_those_of_the_future() -> None:
    old = [NOW - timedelta(days=900 + number) for number in range(9)]
    assert kept_times(old, RULE, NOW) == set(old[:LEAST_KEPT])
    future = [NOW + timedelta(days=400 + number) for number in range(9)]
    assert kept_times([*old, *future], RULE, NOW) == set(future)
    assert kept_times([], RULE, NOW) == set()
