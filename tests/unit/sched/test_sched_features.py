"""Feature expressions: read, asked, refused."""

from __future__ import annotations

import pytest

from hpcsched.errors import RequestError
from hpcsched.sched.place.features import MAX_CHARS, matches, parse_constraint, parse_features


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
        ("&a", "'&' (character 1): it is out of place"),
        ("a b", "'b' (character 3): it is out of place"),
        ("a||b", "out of place"),
        ("()", "out of place"),
        ("(a", "a ( without its )"),
        ("a)", "a ) without its ("),
        ("a;b", "';' (character 2): it is not a feature name"),
        ("a\nb&", "out of place"),
        ("[a*2&b*1]", "cannot be used here"),
        ("!a", "'!' (character 1): there is no 'not'"),
        ("a*2", "'*' (character 2)"),
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


def test_a_constraint_says_what_the_nodes_must_be_together() -> None:
    counted = parse_constraint("[a*2&(b|c)*1]")
    assert counted.counts == ((("a",), 2), (("b", "c", "|"), 1))
    assert counted.every == counted.alike == ()
    assert parse_constraint("a*4&x").counts == ((("a",), 4),)
    assert parse_constraint("a*4&x").every == ("x",)
    assert parse_constraint("x&[a|b&c]&y").alike == (("a",), ("b", "c", "&"))
    assert parse_constraint("x&[a|b]&(y|z)").every == ("x", "y", "z", "|", "&")


@pytest.mark.parametrize("text", ["", "a", "a&b|c", "a&(b|c)"])
def test_a_constraint_of_each_node_alone_is_an_expression(text: str) -> None:
    assert parse_constraint(text).every == parse_features(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[a&b]", "'a' (character 2): say how many nodes of it"),
        ("[]", "'[' (character 1): brackets with nothing in them"),
        ("[a|b", "a [ without its ]"),
        ("a|b]", "']' (character 4)"),
        ("[a|[b|c]]", "'[' (character 4): brackets do not go into brackets"),
        ("a|[b|c]", "'[' (character 3): counts and brackets are joined to the rest by &"),
        ("a|b&[c|d]", "'|' (character 2): beside counts and brackets it needs parentheses"),
        ("[a|b]&[c|d]", "'[' (character 7): brackets with | a second time"),
        ("[a|b]&c*2", "exclude each other"),
        ("a*x", "'x' (character 3): it is not a number of nodes"),
        ("a*0", "'0' (character 3): it is not a number of nodes"),
        ("a*2*3", "'*' (character 4)"),
        ("*2", "say how many nodes of it"),
        ("a&b*", "'*' (character 4)"),
        ("[a*2|b*1]", "'*' (character 3)"),
        ("(a*2)", "'*' (character 3)"),
        ("[a*1&&b*1]", "one side of a & is empty"),
        ("[a*1]x", "joined to the rest by &"),
    ],
)
def test_what_is_no_constraint_is_refused_with_the_place(text: str, why: str) -> None:
    with pytest.raises(RequestError) as refusal:
        parse_constraint(text)
    assert why in str(refusal.value)
