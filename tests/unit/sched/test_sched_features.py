"""Feature expressions: read, asked, refused."""

from __future__ import annotations

import pytest

from hpcsched.errors import RequestError
from hpcsched.sched.features import MAX_CHARS, matches, parse_features


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        ("", [""], []),
        ("a", ["a", "a b"], ["", "b"]),
        ("a&b", ["a b"], ["a", "b", ""]),
        ("a|b", ["a", "b"], ["c", ""]),
        ("a&b|c", ["a b", "c"], ["a", "b"]),
        ("c|a&b", ["a b", "c"], ["a", "b"]),
        ("a&(b|c)", ["a b", "a c"], ["a", "b c"]),
        ("(a|b)&(c|d)", ["a c", "b d"], ["a b", "c d"]),
        (" a & b ", ["a b"], ["a"]),
        ("gen=3.5&x-y", ["gen=3.5 x-y"], ["gen=3.5"]),
    ],
)
def test_what_an_expression_matches(text: str, yes: list[str], no: list[str]) -> None:
    expression = parse_features(text)
    assert all(matches(expression, set(features.split())) for features in yes)
    assert not any(matches(expression, set(features.split())) for features in no)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a&", "ends where a feature should follow"),
        ("&a", "'&' is out of place"),
        ("a b", "'b' is out of place"),
        ("a||b", "out of place"),
        ("()", "out of place"),
        ("(a", "a ( without its )"),
        ("a)", "a ) without its ("),
        ("a;b", "';' is none of"),
        ("a\nb&", "out of place"),
        ("[a*2&b*1]", "counts of features"),
        ("a*2", "counts of features"),
    ],
)
def test_what_is_no_expression_is_refused_with_why(text: str, why: str) -> None:
    with pytest.raises(RequestError) as refusal:
        parse_features(text)
    assert why in str(refusal.value)
    assert str(refusal.value).startswith("cannot ")


def test_a_hostile_expression_is_cut_short_or_read_without_recursion() -> None:
    with pytest.raises(RequestError, match="the longest is"):
        parse_features("a" * 1_000_000)
    deep = "(" * (MAX_CHARS // 2 - 1) + "a" + ")" * (MAX_CHARS // 2 - 1)
    assert matches(parse_features(deep), {"a"})
