"""Samples made ready beforehand: the same as without, never more than is allowed, and errors come up where they belong."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_until

from hpctrain.data.prefetch import Prefetcher, as_tensors, bytes_of

CPU = torch.device("cpu")


class Numbers:
    """A source that notes what it was asked, and may be held up."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __getitem__(self, indexes: slice) -> dict[str, np.ndarray]:
        assert self.gate.wait(20)
        self.asked.append((indexes.start, indexes.stop))
        if indexes.start == 66:
            raise ValueError("sample 66 is rotten")
        return {"n": np.arange(indexes.start, indexes.stop, dtype=np.int64)}


@pytest.fixture
def numbers() -> Iterator[Numbers]:
    source = Numbers()
    yield source
    source.gate.set()


def settled(feed: Prefetcher) -> None:
    wait_until(lambda: all(future.done() for future in feed._ready.values()), what="the thread")


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    ahead=st.integers(0, 4),
    wrong=st.sets(st.integers(0, 11)),
    limit_bytes=st.integers(1, 100),
)
@settings(max_examples=30, deadline=None)
def test_taken_samples_do_not_depend_on_the_expected_ones(
    sizes: list[int], ahead: int, wrong: set[int], limit_bytes: int
) -> None:
    feed = Prefetcher(Numbers(), CPU, ahead, limit_bytes)
    bounds = np.cumsum([0, *sizes]).tolist()
    spans = list(zip(bounds, bounds[1:], strict=False))
    for number, (low, high) in enumerate(spans):
        expected = spans[number : number + 3]
        feed.expect([(a, b + 1) for a, b in expected] if number in wrong else expected)
        assert feed.take(low, high)["n"].tolist() == list(range(low, high))
    feed.close()


def test_pieces_are_loaded_ahead_and_dropped_if_no_longer_expected(numbers: Numbers) -> None:
    feed = Prefetcher(numbers, CPU, ahead=2)
    spans = [(low, low + 10) for low in range(0, 60, 10)]
    feed.expect(spans)
    feed.take(*spans[0])
    settled(feed)
    assert numbers.asked == spans[:3]
    feed.expect([(10, 15), (15, 20), (20, 30)])  # shares have changed
    assert set(feed._ready) == {(10, 15), (15, 20)}
    assert feed.take(10, 15)["n"].tolist() == [10, 11, 12, 13, 14]
    feed.close()


def test_memory_is_bounded_by_the_size_of_a_piece(numbers: Numbers) -> None:
    feed = Prefetcher(numbers, CPU, ahead=8, limit_bytes=2 * 80)
    spans = [(low, low + 10) for low in range(0, 60, 10)]
    feed.expect(spans)
    assert len(feed._ready) == 1  # it is not known yet how large a piece is
    feed.take(*spans[0])
    assert len(feed._ready) == 2
    feed.close()
    none = Prefetcher(numbers, CPU, ahead=0)
    none.expect(spans)
    assert none.take(0, 10)["n"].numel() == 10
    assert not none._ready


def test_samples_are_made_while_the_rank_does_something_else(numbers: Numbers) -> None:
    feed = Prefetcher(numbers, CPU, ahead=1)
    feed.expect([(0, 10), (10, 20)])
    feed.take(0, 10)
    numbers.gate.clear()
    feed.expect([(20, 30), (30, 40)])
    assert numbers.asked[-1] != (20, 30)  # held up, and we are not
    numbers.gate.set()
    settled(feed)
    assert feed.take(20, 30)["n"][0] == 20
    assert numbers.asked.count((20, 30)) == 1
    feed.close()


def test_an_error_of_a_source_comes_up_where_its_samples_are_taken(numbers: Numbers) -> None:
    feed = Prefetcher(numbers, CPU, ahead=1)
    feed.expect([(66, 70), (70, 72)])
    settled(feed)
    with pytest.raises(ValueError, match="sample 66 is rotten"):
        feed.take(66, 70)
    feed.close()


def test_arrays_in_any_nesting_become_tensors() -> None:
    fixed = np.arange(4)
    fixed.flags.writeable = False
    value = as_tensors({"a": (fixed, [np.zeros((2, 3), np.float32).T]), "b": "name"})
    assert value["a"][0].tolist() == [0, 1, 2, 3]
    assert value["a"][1][0].shape == (3, 2)
    assert value["b"] == "name"
    assert bytes_of(value) == 32 + 24
