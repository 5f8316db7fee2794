"""Host lists keep the names and their order, and cannot be made to blow up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.errors import RequestError
from hpcsched.model.hostlist import MAX_NAMES, compress_hostlist, expand_hostlist

NAMES = st.lists(st.from_regex(r"(n|gpu|a-|a1b)?[0-9]{1,4}|[a-z]{1,3}", fullmatch=True), max_size=30)


def expanded_or_refused(text: str) -> tuple[list[str], str]:
    try:
        return expand_hostlist(text), ""
    except RequestError as refused:
        return [], str(refused)


@given(NAMES)
def test_a_short_form_stands_for_the_same_names_in_the_same_order(names: list[str]) -> None:
    assert expand_hostlist(compress_hostlist(names)) == names


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 5))
def test_neighbours_become_one_range(first: int, count: int, width: int) -> None:
    names = [f"n{number:0{width}}" for number in range(first, first + count)]
    short = compress_hostlist(names)
    assert expand_hostlist(short) == names
    assert short.count(",") == 0


@given(st.text("n[]-,0123456789 a.", max_size=40) | st.text(max_size=20))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    names, refusal = expanded_or_refused(text)
    assert len(names) <= MAX_NAMES
    assert all(names)
    assert refusal == "" or (refusal.startswith("cannot ") and len(refusal) < 400)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("bit", ["a", "1", "[", "]", "[1-9]", "[0-999999999]", "a[1", "a,", "a1,", "[1,", ","])
def test_long_texts_need_no_long_work(bit: str) -> None:
    text = "n" + bit * (100_000 // len(bit))
    assert len(expanded_or_refused(text)[0]) <= MAX_NAMES
    if not set(text) & set("[],"):
        assert compress_hostlist([text]) == text
