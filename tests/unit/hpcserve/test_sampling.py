"""How tokens are chosen from logits."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from hpcserve.errors import InvalidRequest
from hpcserve.requests import SamplingSettings
from hpcserve.sampling import TokenDraw, check_settings, choose, likely, uniform

GREEDY = SamplingSettings(temperature=0)
LOGITS = torch.tensor([0.5, 3.0, 2.5, -1.0, 1.0])


def drawn(logits: torch.Tensor, draws: int, settings: SamplingSettings, **fields: Any) -> set[int | None]:
    """Return the tokens that many positions choose from the same logits."""
    rows = [TokenDraw(settings=settings, seed=5, position=position, **fields) for position in range(draws)]
    return {token and token.token for token in choose(logits.expand(draws, -1), rows)}


def one(settings: SamplingSettings, **fields: Any) -> Any:
    return choose(LOGITS[None], [TokenDraw(settings=settings, seed=1, position=0, **fields)])[0]


def test_tokens_are_as_frequent_as_their_probabilities() -> None:
    rows = [TokenDraw(settings=SamplingSettings(temperature=2), seed=9, position=position) for position in range(1000)]
    counts = Counter(token.token for token in choose(LOGITS.expand(1000, -1), rows) if token)
    chances = torch.softmax(LOGITS / 2, dim=0)
    assert [counts[token] / 1000 for token in range(5)] == pytest.approx(chances.tolist(), abs=0.05)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        (SamplingSettings(temperature=0), {1}),
        (SamplingSettings(top_k=1), {1}),
        (SamplingSettings(top_k=2), {1, 2}),
        (SamplingSettings(top_p=0.5), {1}),
        (SamplingSettings(top_p=0.85), {1, 2}),
        (SamplingSettings(top_p=0), {1}),
        (SamplingSettings(min_p=0.5), {1, 2}),
        (SamplingSettings(min_p=1), {1}),
        (SamplingSettings(temperature=1e30), {0, 1, 2, 3, 4}),
        (SamplingSettings(temperature=1e30, top_k=3), {1, 2, 4}),
        (SamplingSettings(temperature=1e-300), {1}),
        (SamplingSettings(temperature=2e-5), {1}),
    ],
    ids=str,
)
def test_settings_leave_the_likely_tokens(settings: SamplingSettings, tokens: set[int]) -> None:
    assert drawn(LOGITS, 100, settings) == tokens


@pytest.mark.parametrize(
    ("settings", "others"),
    [(SamplingSettings(top_p=0.3), False), (SamplingSettings(top_p=0.99), True), (SamplingSettings(min_p=1e-9), True)],
    ids=["top_p=0.3", "top_p=0.99", "min_p"],
)
def test_many_unlikely_tokens_count_as_much_as_a_likely_one(settings: SamplingSettings, others: bool) -> None:
    """Token 0 is 100,000 times as likely as any other; together the others are as likely as it is."""
    logits = torch.zeros(100_001)
    logits[0] = math.log(100_000)
    tokens = drawn(logits, 12, settings)
    assert 0 in tokens
    assert (len(tokens) > 1) == others


def test_tokens_are_left_out_exactly_where_top_p_says() -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * 4
    chances, order = torch.softmax(logits.double(), dim=0).sort(descending=True)
    kept = set(order[chances.cumsum(0) - chances < 0.97].tolist())
    assert drawn(logits, 200, SamplingSettings(top_p=0.97)) <= kept
    found = set(likely(torch.exp(logits - logits.max()), SamplingSettings(top_p=0.97)).tolist())
    assert kept <= found
    assert len(found) < 1500


def test_a_random_number_depends_on_seed_and_position_alone() -> None:
    numbers = {(seed, position): uniform(seed, position) for seed in (0, 1, -1, 2**63) for position in range(50)}
    assert len(set(numbers.values())) == 200
    assert all(0 <= number < 1 for number in numbers.values())
    assert uniform(1, 2) == numbers[1, 2] == pytest.approx(0.408262, abs=1e-6)


def test_a_rows_token_does_not_depend_on_the_other_rows() -> None:
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(1))
    kinds = [GREEDY, SamplingSettings(), SamplingSettings(top_p=0.9), SamplingSettings(logit_bias={3: 9.0})]
    draws = [TokenDraw(settings=kinds[row % 4], seed=row, position=3, logprobs=row % 3 or None) for row in range(8)]
    assert choose(logits, draws) == [choose(logits[row : row + 1], [draws[row]])[0] for row in range(8)]


def test_penalties_biases_and_masks_change_the_choice() -> None:
    assert one(SamplingSettings(temperature=0, presence_penalty=1), generated={1: 1}).token == 2
    assert one(SamplingSettings(temperature=0, frequency_penalty=0.2), generated={1: 2}).token == 1
    assert one(SamplingSettings(temperature=0, frequency_penalty=0.2), generated={1: 3}).token == 2
    assert one(SamplingSettings(temperature=0, presence_penalty=1), prompt={1: 1}).token == 1
    assert one(SamplingSettings(temperature=0, repetition_penalty=2), prompt={1: 1}, generated={2: 1}).token == 1
    assert one(SamplingSettings(temperature=0, repetition_penalty=4), prompt={1: 1}, generated={2: 1}).token == 4
    assert one(SamplingSettings(temperature=0, logit_bias={3: 1e300, 1: -100})).token == 3
    assert one(GREEDY, allowed=torch.tensor([True, False, False, True])).token == 0
    assert one(GREEDY, allowed=[False, False, False, False, True, True]).token == 4
    assert one(GREEDY, allowed=torch.zeros(5, dtype=torch.bool)) is None


def test_log_probabilities_are_those_before_any_change() -> None:
    found = one(SamplingSettings(temperature=0, logit_bias={3: 100.0}), logprobs=2)
    logprobs = torch.log_softmax(LOGITS, dim=0).tolist()
    assert (found.token, found.logprob) == (3, pytest.approx(logprobs[3]))
    assert found.top == ((1, pytest.approx(logprobs[1])), (2, pytest.approx(logprobs[2])))
    assert one(SamplingSettings(), logprobs=0).top == ()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_row_that_is_not_numbers_has_no_token_and_the_others_have(bad: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 3] = bad
    logits[2] = -float("inf")
    for settings in (GREEDY, SamplingSettings(top_p=0.5)):
        draws = [TokenDraw(settings=settings, seed=1, position=row, logprobs=1) for row in range(3)]
        found = choose(logits, draws)
        assert found[0] is not None
        assert found[1:] == [None, None]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -1},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"presence_penalty": 1e30},
        {"logit_bias": {5: 1}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": dict.fromkeys(range(1025), 1)},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_settings_out_of_range_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_settings(SamplingSettings(**fields), 5)
    assert [refused.value.param] == list(fields)
