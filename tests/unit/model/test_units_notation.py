"""Times, sizes, dates and signals in the notations that Slurm's users write."""

from __future__ import annotations

from datetime import datetime

import pytest

from hpcsched.errors import RequestError
from hpcsched.jobscript.values import parse_signal_spec
from hpcsched.model.dates import parse_when
from hpcsched.model.spec import SignalSpec
from hpcsched.model.units import (
    UNLIMITED_S,
    format_mem,
    format_time_s,
    parse_mem_mib,
    parse_signal,
    parse_time_s,
    signal_name,
)

# The first four as recorded from a Slurm 22.05.8 (`sbatch -t`, `squeue -o %l`), the rest by sbatch(1).
TIMES = {
    "2:30": "3:00",
    "0:45:00": "45:00",
    "1-0": "1-00:00:00",
    "1-2:03": "1-02:03:00",
    "1200": "20:00:00",
    "2-00:00": "2-00:00:00",
    "20:00:00": "20:00:00",
    "1-2:3:4": "1-02:04:00",
    "0:90061": "1-01:02:00",  # seconds above 59
    "36:00:00": "1-12:00:00",  # hours above 23
    "0:59": "1:00",
    "5": "5:00",
    "INFINITE": "UNLIMITED",
    "unlimited": "UNLIMITED",
    "-1": "UNLIMITED",
}


@pytest.mark.parametrize(("text", "shown"), TIMES.items())
def test_a_time_limit_is_read_and_shown_as_slurm_does(text: str, shown: str) -> None:
    assert format_time_s(parse_time_s(text)) == shown


def test_only_a_limit_is_rounded_up_to_minutes() -> None:
    assert parse_time_s("2:30") == 180
    assert parse_time_s("2:30", whole_minutes=False) == 150


@pytest.mark.parametrize(
    "text", ["", "1:2:3:4", "1-", "-5", "a", "1.5", "1-2-3", "10x", "1 2", "٣", "1-:30", "99999999-0"]
)
def test_what_is_no_time_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(RequestError, match="cannot (read|take) time"):
        parse_time_s(text)


def test_times_are_shown_with_all_parts_when_asked() -> None:
    assert format_time_s(180, full=True) == "00:03:00"
    assert format_time_s(93_784) == "1-02:03:04"
    assert format_time_s(0) == "0:00"
    assert format_time_s(UNLIMITED_S) == "UNLIMITED"


@pytest.mark.parametrize(
    ("text", "mib", "shown"),
    [
        ("200K", 1, "1M"),
        ("1025k", 2, "2M"),
        ("1024MB", 1024, "1G"),
        ("190GB", 190 * 1024, "190G"),
        ("10Gb", 10 * 1024, "10G"),
        ("2GiB", 2048, "2G"),
        ("1536M", 1536, "1536M"),
        ("4g", 4096, "4G"),
        ("1T", 1 << 20, "1T"),
        ("3000", 3000, "3000M"),
        ("0", 0, "0"),
    ],
)
def test_memory_is_read_and_shown_as_slurm_does(text: str, mib: int, shown: str) -> None:
    assert parse_mem_mib(text) == mib
    assert format_mem(mib) == shown


def test_a_bare_size_is_in_the_unit_asked_for() -> None:
    assert parse_mem_mib("2", default_unit="G") == 2048


@pytest.mark.parametrize("text", ["", "G", "1.5G", "-1", "4X", "4 G", "1e3", "iB", "4iB", "٤G", "9" * 18 + "P"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="memory size"):
        parse_mem_mib(text)


NOW = datetime(2026, 11, 21, 15, 30, 10)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", datetime(2026, 11, 21, 15, 30, 10)),
        ("now+1hour", datetime(2026, 11, 21, 16, 30, 10)),
        ("now+60", datetime(2026, 11, 21, 15, 31, 10)),
        ("now+1min", datetime(2026, 11, 21, 15, 31, 10)),
        ("now+2weeks", datetime(2026, 12, 5, 15, 30, 10)),
        ("now-2days", datetime(2026, 11, 19, 15, 30, 10)),
        ("16:00", datetime(2026, 11, 21, 16)),
        ("15:00", datetime(2026, 11, 22, 15)),
        ("4:00PM", datetime(2026, 11, 21, 16)),
        ("12:10 am", datetime(2026, 11, 22, 0, 10)),
        ("today", datetime(2026, 11, 21)),
        ("tomorrow", datetime(2026, 11, 22)),
        ("midnight", datetime(2026, 11, 22)),
        ("noon", datetime(2026, 11, 22, 12)),
        ("fika tomorrow", datetime(2026, 11, 22, 15)),
        ("teatime", datetime(2026, 11, 21, 16)),
        ("2027-01-20", datetime(2027, 1, 20)),
        ("2027-01-20T12:34:00", datetime(2027, 1, 20, 12, 34)),
        ("2027-01-20T12:34", datetime(2027, 1, 20, 12, 34)),
        ("2027-01-20 12:34:56", datetime(2027, 1, 20, 12, 34, 56)),
        ("012027", datetime(2027, 1, 20)),
        ("1225", datetime(2026, 12, 25)),
        ("0101", datetime(2027, 1, 1)),
        ("01/20/27", datetime(2027, 1, 20)),
        ("10:00 1/20", datetime(2027, 1, 20, 10)),
        ("01/20/27-10:05", datetime(2027, 1, 20, 10, 5)),
        ("012027-10:05:06", datetime(2027, 1, 20, 10, 5, 6)),
        ("01.20-4:00pm", datetime(2027, 1, 20, 16)),
        ("elevenses", datetime(2026, 11, 22, 11)),
        ("noon-tomorrow", datetime(2026, 11, 22, 12)),
        ("tomorrow-16:00", datetime(2026, 11, 22, 16)),
        ("noon-2030-01-20", datetime(2030, 1, 20, 12)),
        ("2030-01-20-noon", datetime(2030, 1, 20, 12)),
    ],
)
def test_a_date_is_read_in_local_time(text: str, expected: datetime) -> None:
    assert parse_when(text, NOW.timestamp()) == expected.timestamp()


def test_accounting_looks_back_where_a_date_is_not_whole() -> None:
    now_s = NOW.timestamp()
    assert parse_when("09:00", now_s, past=True) == datetime(2026, 11, 21, 9).timestamp()
    assert parse_when("0101", now_s, past=True) == datetime(2026, 1, 1).timestamp()
    assert parse_when("uts1700000000", now_s) == 1_700_000_000


@pytest.mark.parametrize(
    "text",
    ["", "soon", "25:00", "2027-13-01", "2027-02-30", "now+", "now+1moon", "noon noon", "13:00pm", "16:00 x",
     "now+9999999999weeks", "1" * 100],
)  # fmt: skip
def test_what_is_no_date_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="cannot (read|take) time"):
        parse_when(text, NOW.timestamp())


@pytest.mark.parametrize(("text", "number"), [("USR1", 10), ("SIGUSR1", 10), ("sigterm", 15), ("10", 10), ("64", 64)])
def test_a_signal_has_many_spellings(text: str, number: int) -> None:
    assert parse_signal(text) == number


@pytest.mark.parametrize("text", ["", "0", "65", "SIG", "USR3", "-9", "9.0"])
def test_what_is_no_signal_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="cannot read signal"):
        parse_signal(text)


def test_signals_have_names() -> None:
    assert (signal_name(9), signal_name(15), signal_name(31), signal_name(40)) == ("KILL", "TERM", "SYS", "40")


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("15@180", SignalSpec(signum=15, before_s=180)),
        ("SIGUSR1@90", SignalSpec(signum=10, before_s=90)),
        ("USR2", SignalSpec(signum=12, before_s=60)),
        ("B:TERM@300", SignalSpec(signum=15, before_s=300, batch_only=True)),
        ("R:USR1@0", SignalSpec(signum=10, before_s=0)),
    ],
)
def test_the_signal_option_is_read(text: str, spec: SignalSpec) -> None:
    assert parse_signal_spec(text) == spec


@pytest.mark.parametrize("text", ["", "@60", "B:", "X:TERM", "TERM@", "TERM@70000", "TERM@-1", "NOPE@60"])
def test_a_wrong_signal_option_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="cannot"):
        parse_signal_spec(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("5m", 300),
        ("2h", 7200),
        ("1d", 86_400),
        ("1h30m", 5400),
        ("1D2H3M4S", 93_784),
        ("0s", 0),
        (" 5m ", 300),
    ],
)
def test_durations_with_units(text: str, seconds: int) -> None:
    assert parse_time_s(text, whole_minutes=False) == seconds
    assert parse_time_s(text) == -(-seconds // 60) * 60


@pytest.mark.parametrize(
    "text", ["h", "m5", "1h30", "5m2h", "1.5h", "-5m", "5 m", "1m1m", "5w", "", "9999999d", "1h:30m"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="time"):
        parse_time_s(text)
