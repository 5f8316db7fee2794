"""Samples: each exactly once, whatever the ranks and restarts; shares that add up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data import CHARACTERS, Sampler, decode, encode, permute, shares, standard_library, windows
from hpctrain.errors import TrainError

weights = st.lists(st.floats(min_value=0, max_value=1e3), min_size=1, max_size=9).filter(lambda w: sum(w) > 1e-3)


@given(count=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_the_permutation_is_one_to_one(count: int, key: int) -> None:
    assert sorted(permute(np.arange(count), count, key).tolist()) == list(range(count))


@given(total=st.integers(0, 10_000), weights=weights)
@settings(deadline=None)
def test_shares_add_up_and_follow_the_weights(total: int, weights: list[float]) -> None:
    counts = shares(total, weights)
    assert sum(counts) == total
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) <= 1


def test_remaining_samples_go_to_the_largest_remainders() -> None:
    assert shares(10, [1, 1, 1]) == [4, 3, 3]
    assert shares(5, [2.4, 2.6]) == [2, 3]
    assert shares(7, [1, 0]) == [7, 0]


def test_weights_that_divide_nothing_are_refused() -> None:
    with pytest.raises(TrainError, match="none may be negative, nor all zero"):
        shares(8, [0.0, 0.0])


@st.composite
def histories(draw: st.DrawFn) -> tuple[Sampler, list[tuple[int, list[float]]]]:
    """Lives of a run: in each another world and other weights, some batches of some size."""
    sampler = Sampler(
        seed=draw(st.integers(0, 99)), tokens=draw(st.integers(100, 2000)), length=draw(st.integers(1, 9))
    )
    lives = draw(st.lists(st.tuples(st.integers(1, 40), weights), min_size=1, max_size=30))
    return sampler, lives


@given(history=histories())
@settings(max_examples=60, deadline=None)
def test_every_sample_comes_exactly_once_whatever_the_ranks_and_restarts(
    history: tuple[Sampler, list[tuple[int, list[float]]]],
) -> None:
    sampler, lives = history
    seen: list[int] = []
    next_sample = 0
    for batch, rank_weights in lives:
        low = next_sample
        for count in shares(batch, rank_weights):
            seen += sampler.starts(low, low + count).tolist()
            low += count
        next_sample += batch
    assert seen == sampler.starts(0, next_sample).tolist()
    for epoch in range(0, len(seen), sampler.per_epoch):
        part = seen[epoch : epoch + sampler.per_epoch]
        assert len(set(part)) == len(part)
    assert max(seen) + sampler.length + 1 <= sampler.tokens
    assert min(seen) >= 0


def test_epochs_differ_in_order() -> None:
    sampler = Sampler(seed=1, tokens=10_000, length=10)
    first, second = sampler.starts(0, sampler.per_epoch), sampler.starts(sampler.per_epoch, 2 * sampler.per_epoch)
    assert first.tolist() != second.tolist()


def test_a_context_longer_than_the_text_is_refused() -> None:
    with pytest.raises(TrainError, match="100 tokens are too few for samples of 64"):
        Sampler(seed=1, tokens=100, length=64)


def test_targets_are_the_next_characters() -> None:
    tokens = encode(b"abcdefghij")
    inputs, targets = windows(tokens, np.array([0, 3]), 4)
    assert [decode(row) for row in inputs] == ["abcd", "defg"]
    assert [decode(row) for row in targets] == ["bcde", "efgh"]


@given(text=st.text(alphabet=CHARACTERS[:-1]))
def test_printable_text_survives_encoding(text: str) -> None:
    assert decode(encode(text.encode())) == text


def test_the_corpus_is_the_same_each_time_and_keeps_files_apart(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"m{number:03d}.py").write_text(f"x{number} = 1\n" * 1000)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text("secret = 1\n" * 100)
    first, second = standard_library(tmp_path), standard_library(tmp_path)
    assert first.digest == second.digest
    assert first.files == 200
    training, validation = decode(first.train), decode(first.validation)
    assert "secret" not in training + validation
    assert not set(training.split("\n")) & set(validation.split("\n")) - {""}


def test_a_place_without_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="holds only 0 bytes of source"):
        standard_library(tmp_path)
