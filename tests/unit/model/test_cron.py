"""Schedules of recurring jobs: when they are due, and what cannot be read."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.errors import RequestError
from hpcsched.model.cron import next_time_s, parse_crontab, parse_schedule, with_disabled

AT = datetime(2026, 11, 23, 3, 45, 30)  # a Monday


def due(text: str, after: datetime = AT) -> str:
    found = next_time_s(parse_schedule(text), after.timestamp())
    assert found is not None
    return datetime.fromtimestamp(found).strftime("%Y-%m-%d %H:%M")


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("* * * * *", "2026-11-23 03:46"),
        ("*/5 * * * *", "2026-11-23 03:50"),
        ("45 3 * * *", "2026-11-24 03:45"),
        ("0 4 * * 1", "2026-11-23 04:00"),
        ("0 3 * * mon", "2026-11-30 03:00"),
        ("0 0 1 jan *", "2027-01-01 00:00"),
        ("0 0 13 * 5", "2026-11-27 00:00"),  # the 13th, or a Friday
        ("0 0 13 * *", "2026-12-13 00:00"),
        ("30 9-17/4 * * *", "2026-11-23 09:30"),
        ("0 0 29 2 *", "2028-02-29 00:00"),
        ("0 0 * * 7", "2026-11-29 00:00"),
        ("59 23 31 12 *", "2026-12-31 23:59"),
        ("@daily", "2026-11-24 00:00"),
        ("@HOURLY", "2026-11-23 04:00"),
        ("@yearly", "2027-01-01 00:00"),
    ],
)
def test_a_schedule_is_due_at_its_next_minute(text: str, at: str) -> None:
    assert due(text) == at


@pytest.mark.parametrize(
    "text",
    ["", "* * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * 8", "5-1 * * * *", "*/0 * * * *",
     "a * * * *", "1,, * * * *", "0 0 30 2 *", "@reboot", "99999999999999999999 * * * *", "\u0663 * * * *", "-1 * * * *"],
)  # fmt: skip
def test_what_is_not_a_schedule_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_schedule(text)


FIELDS = st.tuples(
    st.sampled_from(["*", "*/7", "3", "10-20/5", "0,59"]),
    st.sampled_from(["*", "*/6", "0", "2-4"]),
    st.sampled_from(["*", "1", "31", "*/10"]),
    st.sampled_from(["*", "2", "jun-aug"]),
    st.sampled_from(["*", "0", "mon-fri"]),
)


@given(FIELDS, st.integers(0, 2_000_000_000))
def test_the_next_time_is_later_and_fits_every_field(fields: tuple[str, ...], after_s: int) -> None:
    try:
        schedule = parse_schedule(" ".join(fields))
    except RequestError:
        assert fields[2:4] == ("31", "2")  # there is no such day
        return
    found = next_time_s(schedule, after_s)
    assert found is not None
    assert found > after_s
    at = datetime.fromtimestamp(found)
    assert at.minute in schedule.minutes
    assert at.hour in schedule.hours
    assert at.month in schedule.months


def test_a_crontab_has_entries_with_their_options() -> None:
    text = "# mine\n\n#SCRON -t 10 --job-name='a b'\n#SCRON -p main\n*/5 * * * * echo '5 4'  x\n@daily true\n"
    first, second = parse_crontab(text)
    assert (first.number, first.schedule, first.command) == (5, "*/5 * * * *", "echo '5 4'  x")
    assert first.options == ("-t", "10", "--job-name=a b", "-p", "main")
    assert (second.schedule, second.command, second.options) == ("@daily", "true", ())
    assert [line.command for line in parse_crontab(with_disabled(text, 5))] == ["true"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("* * * * *\n", "line 1"),
        ("\n1 2 3 4 5 x\n@weekly\n", "line 3"),
        ("#SCRON 'x\n", "line 1"),
        ("@daily x\n" * 101, "101 entries"),
        ("#" * 70_000, "more than 65536 bytes"),
    ],
)
def test_a_wrong_crontab_is_refused_with_its_line(text: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        parse_crontab(text)
