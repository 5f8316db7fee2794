"""Splits of a model: parts are complete, and do not overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcserve.errors import ServeError
from hpcserve.split import ModelPart, ModelSplit, Span, even, spans_of, whole


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9))
def test_spans_follow_each_other(widths: list[int]) -> None:
    spans = spans_of(widths)
    assert [len(span) for span in spans] == widths
    whole(sum(widths), spans, "things")


@given(st.integers(0, 100), st.integers(1, 9))
def test_even_widths_differ_by_one_at_most(length: int, count: int) -> None:
    widths = even(length, count)
    assert sum(widths) == length
    assert max(widths) - min(widths) <= 1


@pytest.mark.parametrize(
    "spans",
    [
        [Span(0, 2), Span(3, 4)],
        [Span(0, 3), Span(2, 4)],
        [Span(0, 3)],
        [Span(1, 4)],
        [Span(0, 5), Span(5, 4)],
        [Span(0, 4), Span(4, 4), Span(4, 3), Span(3, 4)],
    ],
    ids=["gap", "overlap", "short", "late", "back", "negative"],
)
def test_spans_that_are_not_the_whole_are_refused(spans: list[Span]) -> None:
    with pytest.raises(ServeError, match="4 things"):
        whole(4, spans, "things")


def test_ranks_are_numbered_by_stage() -> None:
    halves = [
        tuple(ModelPart(layers=layers, kv_groups=half, ffn=half, vocab=half) for half in (Span(0, 1), Span(1, 2)))
        for layers in (Span(0, 3), Span(3, 4))
    ]
    split = ModelSplit(stages=(halves[0], halves[1]))
    split.check(layers=4, kv_groups=2, ffn=2, vocab=2)
    assert split.size == 4
    assert [split.place(rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert split.part(3) is halves[1][1]
    with pytest.raises(IndexError):
        split.place(4)
