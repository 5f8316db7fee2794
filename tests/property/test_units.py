"""What the units write they read, and no text makes them slow or fail otherwise than by saying no."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.errors import RequestError
from hpcsched.jobscript.values import parse_signal_spec
from hpcsched.model.dates import parse_when
from hpcsched.model.units import (
    UNLIMITED_S,
    format_mem,
    format_time_s,
    parse_mem_mib,
    parse_signal,
    parse_time_s,
    signal_name,
)

READERS: list[Callable[[str], object]] = [
    parse_time_s,
    parse_mem_mib,
    parse_signal,
    parse_signal_spec,
    lambda text: parse_when(text, 1_800_000_000.0),
]


def refusal_of(read: Callable[[str], object], text: str) -> str | None:
    try:
        read(text)
    except RequestError as refused:
        return str(refused)
    return None


@given(st.integers(0, UNLIMITED_S // 60 - 1).map(lambda minutes: minutes * 60))
def test_a_limit_that_is_shown_reads_as_itself(limit_s: int) -> None:
    assert parse_time_s(format_time_s(limit_s)) == limit_s


@given(st.integers(0, UNLIMITED_S - 1))
def test_a_time_shown_with_all_its_parts_reads_as_itself(seconds: int) -> None:
    assert parse_time_s(format_time_s(seconds, full=True), whole_minutes=False) == seconds


@given(st.integers(0, UNLIMITED_S - 60))
def test_a_limit_is_never_rounded_down_nor_by_a_minute(seconds: int) -> None:
    limit_s = parse_time_s(f"0:0:{seconds}")
    assert limit_s is not None
    assert seconds <= limit_s < seconds + 60


@given(st.integers(0, 1 << 40))
def test_a_size_that_is_shown_reads_as_itself(mib: int) -> None:
    assert parse_mem_mib(format_mem(mib)) == mib


@given(st.integers(1, 64))
def test_a_signals_name_reads_as_its_number(signum: int) -> None:
    assert parse_signal(signal_name(signum)) == signum


@given(st.text(max_size=30) | st.text("0123456789-:+.@/TAPMnowb ", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in READERS:
        refusal = refusal_of(read, text)
        assert refusal is None or (refusal.startswith("cannot ") and len(refusal) < 400)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("bit", ["a", "1", " ", "1:", "1-", "now+", "SIG", "T", "\n", "+", "1 pm "])
def test_long_texts_are_refused_without_long_work(bit: str) -> None:
    text = bit * (100_000 // len(bit))
    for read in READERS:
        with pytest.raises(RequestError):
            read(text)
        with pytest.raises(RequestError):
            read("now" + text + "x")
