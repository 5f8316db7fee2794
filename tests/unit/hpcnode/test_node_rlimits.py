"""Resource limits of the submitter: written, chosen, read and applied."""

from __future__ import annotations

import resource

import pytest

from hpcnode.os import rlimits


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ALL", set(rlimits.KINDS)),
        ("", set(rlimits.KINDS)),
        ("none", set()),
        ("NOFILE,stack", {"NOFILE", "STACK"}),
        ("RLIMIT_CORE", {"CORE"}),
    ],
)
def test_names(text: str, expected: set[str]) -> None:
    assert rlimits.names(text) == expected


@pytest.mark.parametrize("text", ["ALL,NOFILE", "NONE,CORE", "FILES", "NOFILE=3"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        rlimits.names(text)


def test_what_is_noted_is_read_back() -> None:
    found = dict(rlimits.readable(rlimits.noted()))
    assert found == {
        getattr(resource, f"RLIMIT_{kind}"): resource.getrlimit(getattr(resource, f"RLIMIT_{kind}"))[0]
        for kind in rlimits.KINDS
    }


def test_what_the_user_asks_for_is_propagated_whatever_is_configured() -> None:
    assert rlimits.propagated("NOFILE=5,CORE=0", frozenset({"CORE"})) == "CORE=0"
    assert rlimits.propagated(rlimits.chosen("NOFILE=5,CORE=0", "NOFILE"), frozenset()) == "asked:NOFILE=5"
    assert rlimits.readable(rlimits.propagated(rlimits.noted("NONE"), frozenset(rlimits.KINDS))) == []


@pytest.mark.parametrize(
    "text",
    [
        "", "NOFILE", "NOFILE=", "NOFILE=x", "NOFILE=-", "NOFILE=--1", "NOFILE=1e3", "NOFILE=\u0663", "SIGPENDING=1", "=5",
        "NOFILE=" + "9" * 19, "NOFILE=1\n", "x" * 5000 + ",NOFILE=3", "asked:asked:NOFILE=3",
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_left_out(text: str) -> None:
    assert rlimits.readable(text) == []


def test_a_limit_is_never_above_the_hard_one() -> None:
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        rlimits.apply([(resource.RLIMIT_NOFILE, 10**17), (resource.RLIMIT_NOFILE, before[0] - 1)])
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[0] - 1, before[1])
        rlimits.apply([(resource.RLIMIT_NOFILE, 10**17)])
        assert resource.getrlimit(resource.RLIMIT_NOFILE) in (before[1:] * 2, (before[0] - 1, before[1]))
        assert resource.getrlimit(resource.RLIMIT_CORE)[1] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
