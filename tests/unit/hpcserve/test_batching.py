"""Which tokens a step computes, and in which blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from hpcserve.batching import (
    PRIORITY_S,
    SMALLEST_CHUNK,
    Batcher,
    BatchLimits,
    BlockPool,
    LiveSequence,
    PlannedStep,
    StepCosts,
)
from hpcserve.errors import InvalidRequest, OverloadedError
from hpcserve.requests import GenerateRequest
from hpcserve.steps import BLOCK_POSITIONS

NUMBERS = itertools.count(1)
FLAT = {1: 0.1, 2: 0.1, 512: 0.1}  # steps take the same time, whatever is in them


def batcher_with(costs: dict[int, float] | None = None, **limits: int | float) -> Batcher:
    batcher = Batcher(BatchLimits(**{"blocks": 64, "context_tokens": 1024} | limits))  # type: ignore[arg-type]
    for tokens, took_s in (costs or {}).items():
        batcher.costs.observe(tokens, took_s)
    return batcher


def asked(name: str, prompt: int, max_tokens: int = 100, **fields: Any) -> GenerateRequest:
    """Return a request whose prompt has tokens of its own."""
    first = next(NUMBERS) * 10_000
    return GenerateRequest(id=name, prompt=tuple(range(first, first + prompt)), max_tokens=max_tokens, **fields)


def play(batcher: Batcher, step: PlannedStep | None, ended: Sequence[str] = ()) -> dict[str, int]:
    """Complete a step, each of whose choosing rows gets token 7; return how many tokens it had of which request."""
    assert step is not None
    took_s = batcher.costs.predict_s(step.tokens) or 0.0
    batcher.complete(step, [(7,) if row.chooses else () for row in step.rows], ended, took_s)
    return {row.sequence.request.id: len(row.row.tokens) for row in step.rows}


def test_prompts_come_in_parts_and_decoding_sequences_in_each_step() -> None:
    batcher = batcher_with(FLAT, step_tokens=32)
    batcher.add(asked("a", 20), 0)
    assert play(batcher, batcher.next_step()) == {"a": 20}
    batcher.add(asked("b", 70), 1)
    parts = [play(batcher, batcher.next_step()) for _ in range(4)]
    assert parts == [{"a": 1, "b": 31}, {"a": 1, "b": 31}, {"a": 1, "b": 8}, {"a": 1, "b": 1}]


@pytest.mark.parametrize("streams", [1, 8])
def test_a_prompt_of_512_tokens_delays_no_stream_by_over_two_and_a_half_gaps(streams: int) -> None:
    def cost_s(tokens: int) -> float:
        return 0.035 + 0.0031 * tokens

    batcher = batcher_with(blocks=200)
    for index in range(streams):
        batcher.add(asked(f"s{index}", 6), 0)
    step = batcher.next_step()
    assert step is not None
    batcher.complete(step, [(7,)] * streams, (), cost_s(step.tokens))
    batcher.add(asked("long", 512), 0)
    took: list[float] = []
    for _ in range(400):
        step = batcher.next_step()
        assert step is not None
        if any(row.sequence.request.id == "long" and row.chooses for row in step.rows):
            break
        took.append(cost_s(step.tokens))
        batcher.complete(step, [(7,) if row.chooses else () for row in step.rows], (), took[-1])
    assert max(took) <= 2.5 * cost_s(streams)
    assert len(took) < 60


def test_a_prompt_advances_however_slow_the_steps_are() -> None:
    batcher = batcher_with({1: 1.0, 2: 100.0}, gap_factor=1.0)
    batcher.add(asked("a", 1), 0)
    play(batcher, batcher.next_step())
    batcher.add(asked("b", 50), 1)
    assert play(batcher, batcher.next_step()) == {"a": 1, "b": SMALLEST_CHUNK}


@pytest.mark.parametrize(("gap_factor", "tokens"), [(100.0, 19), (5.0, 4)], ids=["own-limit", "gap-factor"])
def test_a_longest_step_in_seconds_is_a_ceiling(gap_factor: float, tokens: int) -> None:
    batcher = batcher_with({1: 0.01, 512: 5.12}, step_s=0.2, gap_factor=gap_factor)
    batcher.add(asked("a", 1), 0)
    play(batcher, batcher.next_step())
    batcher.add(asked("b", 200), 1)
    assert play(batcher, batcher.next_step())["b"] == pytest.approx(tokens, abs=1)


def test_a_step_of_prompts_alone_has_the_ceiling_too() -> None:
    batcher = batcher_with({100: 0.5}, blocks=100, step_s=0.4)
    batcher.add(asked("a", 600), 0)
    assert play(batcher, batcher.next_step()) == {"a": 80}


def test_streams_of_a_lost_generation_continue_before_gaps_count() -> None:
    batcher = batcher_with({1: 0.01, 512: 0.5}, step_tokens=128, gap_factor=1.0)
    for name in "ab":
        batcher.add(asked(name, 100, sent=(1,) * 28), 0)
    batcher.add(asked("new", 400), 1)
    assert play(batcher, batcher.next_step()) == {"a": 128}
    assert play(batcher, batcher.next_step()) == {"a": 1, "b": 127}
    assert play(batcher, batcher.next_step()) == {"a": 1, "b": 1, "new": 126}
    assert play(batcher, batcher.next_step()) == {"a": 1, "b": 1}, "to measure it"
    assert play(batcher, batcher.next_step()) == {"a": 1, "b": 1, "new": SMALLEST_CHUNK}


def test_a_step_of_prompts_alone_is_short_as_well() -> None:
    batcher = batcher_with({100: 0.5}, blocks=100)
    batcher.add(asked("a", 600), 0)
    assert play(batcher, batcher.next_step()) == {"a": 200}


def test_a_level_of_priority_is_worth_thirty_seconds_of_waiting() -> None:
    batcher = batcher_with(running=1)
    batcher.add(asked("old", 3, priority=0), 0)
    batcher.add(asked("late", 3, priority=1), PRIORITY_S + 1)
    batcher.add(asked("soon", 3, priority=1), PRIORITY_S - 1)
    order = []
    for _ in range(3):
        (name,) = play(batcher, step := batcher.next_step())
        batcher.cancel(step.rows[0].sequence)  # type: ignore[union-attr]
        order.append(name)
    assert order == ["soon", "old", "late"]


def test_a_request_of_higher_priority_takes_the_place_of_a_running_one() -> None:
    batcher = batcher_with(running=1)
    batcher.add(asked("low", 20), 0)
    play(batcher, batcher.next_step())
    batcher.add(asked("equal", 20), 1)
    assert play(batcher, batcher.next_step()) == {"low": 1}
    batcher.add(asked("high", 20, priority=1), 2)
    assert play(batcher, batcher.next_step()) == {"high": 20}
    assert play(batcher, batcher.next_step(), ["high"]) == {"high": 1}
    assert batcher.preemptions == 1
    assert "low" in play(batcher, batcher.next_step())


def test_the_youngest_sequence_is_preempted_and_computed_again_from_cached_blocks() -> None:
    batcher = batcher_with(blocks=6)
    old = batcher.add(asked("old", 2 * BLOCK_POSITIONS, 40), 0)
    young = batcher.add(asked("young", 2 * BLOCK_POSITIONS - 8, 20), 1)
    rows: list[dict[str, int]] = []
    while len(batcher):
        ended = [each.request.id for each in (old, young) if each.generated == each.request.max_tokens - 1]
        rows.append(play(batcher, batcher.next_step(), ended))
    assert batcher.preemptions >= 1
    assert (old.generated, young.generated) == (40, 20)
    assert all("old" in row for row in rows[:40])
    again = [row["young"] for row in rows[1:] if row.get("young", 0) > 1]
    assert len(again) == batcher.preemptions
    assert again[0] <= 44 - BLOCK_POSITIONS


def test_equal_prefixes_share_blocks_that_nobody_writes() -> None:
    batcher = batcher_with(FLAT)
    prompt = tuple(range(1, 50))
    sequences: list[LiveSequence] = []
    for name in ("a", "b"):
        sequences.append(batcher.add(GenerateRequest(id=name, prompt=prompt, max_tokens=5), 0))
        play(batcher, batcher.next_step())
    first, second = sequences
    assert second.cached_tokens == 3 * BLOCK_POSITIONS
    assert first.blocks[:3] == second.blocks[:3]
    assert not set(first.blocks[3:]) & set(second.blocks[3:])
    batcher.add(GenerateRequest(id="c", prompt=(9, *prompt[1:]), max_tokens=5), 0)
    assert play(batcher, batcher.next_step())["c"] == len(prompt)


def test_the_last_token_of_a_known_prompt_is_computed() -> None:
    batcher = batcher_with()
    prompt = tuple(range(1, 1 + 2 * BLOCK_POSITIONS))
    for name in ("a", "b"):
        batcher.add(GenerateRequest(id=name, prompt=prompt, max_tokens=5), 0)
        rows = play(batcher, batcher.next_step(), ["a", "b"])
    assert rows == {"b": BLOCK_POSITIONS}


def test_a_pipeline_has_disjoint_shares_of_the_streams_under_way() -> None:
    batcher = batcher_with(depth=2)
    for index in range(6):
        batcher.add(asked(f"s{index}", 4), 0)
    play(batcher, batcher.next_step())
    first, second = batcher.next_step(), batcher.next_step()
    assert batcher.next_step() is None
    names = [play(batcher, step) for step in (first, second)]
    assert [len(rows) for rows in names] == [3, 3]
    assert not set(names[0]) & set(names[1])


def test_parts_of_one_prompt_follow_each_other_through_a_pipeline() -> None:
    batcher = batcher_with(depth=2, step_tokens=40)
    batcher.add(asked("a", 100), 0)
    steps = [batcher.next_step(), batcher.next_step()]
    assert [step.rows[0].row.start for step in steps if step] == [0, 40]
    for step in steps:
        play(batcher, step)
    assert play(batcher, batcher.next_step()) == {"a": 20}


def test_what_can_never_fit_or_waits_too_long_is_refused() -> None:
    batcher = batcher_with(blocks=4, waiting=1)
    with pytest.raises(InvalidRequest, match="exceed the 64 tokens"):
        batcher.add(asked("a", 50, 15), 0)
    batcher.add(asked("a", 50, 14), 0)
    with pytest.raises(InvalidRequest, match="this id is running"):
        batcher.add(asked("a", 1, 1), 0)
    with pytest.raises(OverloadedError):
        batcher.add(asked("b", 1, 1), 0)


def test_a_sequence_gets_neighbouring_blocks_and_room_to_grow() -> None:
    pool = BlockPool(64)
    first = pool.take(4)
    second = pool.take(4)
    first += pool.take(4, first[-1])
    second += pool.take(4, second[-1])
    for blocks in (first, second):
        assert blocks == list(range(blocks[0], blocks[0] + 8))


def test_known_blocks_are_reused_last_and_a_sequences_end_first() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    for block in blocks:
        pool.remember(block, bytes([block]))
    pool.release(blocks)
    assert pool.available == 4
    pool.take(1)
    assert pool.find([bytes([block]) for block in blocks]) == blocks
    pool.take(1)
    assert pool.find([bytes([block]) for block in blocks]) == blocks[:2]


def test_costs_between_measured_steps_are_interpolated_and_slow_ones_forgotten() -> None:
    costs = StepCosts()
    assert costs.predict_s(3) is None
    costs.observe(1, 0.03)
    assert costs.predict_s(4) == pytest.approx(0.12)
    costs.observe(17, 0.11)
    assert costs.predict_s(9) == pytest.approx(0.07)
    assert costs.most_tokens(0.07, 512) == 9
    assert costs.most_tokens(0.01, 512) == 0
    costs.observe(64, 60.0)
    for _ in range(10_000):
        costs.observe(17, 0.11)
    assert costs.most_tokens(0.25, 512) >= 64
