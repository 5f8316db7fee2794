"""Steps on several ranks give what one rank gives; ranks are threads, the model is a toy whose numbers can be followed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from hpcserve.errors import GroupLost
from hpcserve.group.links import links_of_threads
from hpcserve.group.runner import GroupRunner, RankProgram, local_runner
from hpcserve.split import ModelPart, ModelSplit, Span, even, spans_of
from hpcserve.steps import ForwardStep, StepRow

LAYERS, WIDTH, VOCABULARY = 4, 6, 11


class ToyModel:
    """Each layer adds a weighted sum of the hidden state; a part has some of the layers, columns and tokens."""

    def __init__(self, part: ModelPart) -> None:
        self.part = part
        numbers = torch.Generator().manual_seed(1)
        self._embedding = torch.randn(VOCABULARY, WIDTH, generator=numbers)
        self._layers = torch.randn(LAYERS, WIDTH, WIDTH, generator=numbers)

    def forward(
        self, plan: ForwardStep, hidden: torch.Tensor | None, reduce: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        if hidden is None:
            hidden = self._embedding[[token for row in plan.rows for token in row.tokens]]
        low, high = self.part.ffn.start, self.part.ffn.stop
        for layer in self.part.layers:
            change = torch.tanh(hidden @ self._layers[layer][:, low:high]) @ self._layers[layer].T[low:high]
            if reduce is not None:
                reduce(change)
            hidden = hidden + change
        return hidden

    def logits(self, hidden: torch.Tensor, plan: ForwardStep) -> torch.Tensor:
        rows = hidden.split([len(row.tokens) for row in plan.rows])
        wanted = torch.cat([states[len(states) - row.logits :] for states, row in zip(rows, plan.rows, strict=True)])
        return wanted @ self._embedding[self.part.vocab.start : self.part.vocab.stop].T


def split_of(*stages: int) -> ModelSplit:
    """A split of the toy into stages of so many ranks."""
    layers = spans_of(even(LAYERS, len(stages)))
    return ModelSplit(
        stages=tuple(
            tuple(
                ModelPart(layers=span, kv_groups=Span(0, 0), ffn=ffn, vocab=vocab)
                for ffn, vocab in zip(spans_of(even(WIDTH, size)), spans_of(even(VOCABULARY, size)), strict=True)
            )
            for span, size in zip(layers, stages, strict=True)
        )
    )


class Group:
    """A leader and its followers, which are threads."""

    def __init__(self, split: ModelSplit) -> None:
        self.links = links_of_threads(split)
        self.runner = GroupRunner(ToyModel(split.part(0)), self.links[0])
        programs = [RankProgram(ToyModel(split.part(rank)), self.links[rank]) for rank in range(1, split.size)]
        self._threads = [threading.Thread(target=self._follow, args=(program,)) for program in programs]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self.links[0].break_off()
        for thread in self._threads:
            thread.join()
        for links in self.links:
            links.close()

    def _follow(self, program: RankProgram) -> None:
        with suppress(GroupLost):
            program.follow()


def step_of(number: int, *, hidden: bool = False) -> ForwardStep:
    """A step with a part of a prompt, one token of a second sequence, and a third whose states may be wanted."""
    rows = (
        StepRow(tokens=(1, 2, number % VOCABULARY), start=0, blocks=(0,), logits=0),
        StepRow(tokens=(5,), start=2, blocks=(1,)),
        StepRow(tokens=(3, 4), start=0, blocks=(2,), logits=2, hidden=hidden),
    )
    return ForwardStep(number=number, rows=rows)


def whole() -> GroupRunner:
    return local_runner(ToyModel(split_of(1).part(0)))


@pytest.mark.parametrize("stages", [(1,), (2,), (3,), (1, 1, 1), (2, 1), (1, 3)], ids=str)
def test_any_split_gives_the_logits_of_one_rank(stages: tuple[int, ...]) -> None:
    group, alone = Group(split_of(*stages)), whole()
    assert group.runner.depth == len(stages)
    for number in range(3):
        for runner in (group.runner, alone):
            runner.begin(step_of(number))
        ours, expected = group.runner.result(), alone.result()
        assert isinstance(ours, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert ours.shape == (3, VOCABULARY)
        torch.testing.assert_close(ours, expected)
    group.end()


def test_steps_under_way_at_once_give_their_results_in_order() -> None:
    group, alone = Group(split_of(1, 1, 1)), whole()
    for number in range(3):
        group.runner.begin(step_of(number))
    for number in range(3):
        alone.begin(step_of(number))
        torch.testing.assert_close(group.runner.result(), alone.result())
    group.end()


@pytest.mark.parametrize("stages", [(1,), (2,), (1, 2)], ids=str)
def test_hidden_states_come_with_the_logits_of_rows_that_want_them(stages: tuple[int, ...]) -> None:
    group, alone = Group(split_of(*stages)), whole()
    for runner in (group.runner, alone):
        runner.begin(step_of(1, hidden=True))
    (logits, states), (its_logits, its_states) = group.runner.result(), alone.result()
    torch.testing.assert_close(logits, its_logits)
    assert [one.shape for one in states] == [(2, WIDTH)]
    torch.testing.assert_close(states[0], its_states[0])
    group.end()


def test_a_step_that_wants_no_logits_has_a_result() -> None:
    group = Group(split_of(1, 1))
    group.runner.begin(ForwardStep(number=0, rows=(StepRow(tokens=(1,), start=0, blocks=(0,), logits=0),)))
    result = group.runner.result()
    assert isinstance(result, torch.Tensor)
    assert result.shape == (0, VOCABULARY)
    group.end()


@pytest.mark.parametrize("stages", [(1,), (2,), (1, 1)], ids=str)
def test_steps_of_one_token_are_timed_if_no_other_step_is_under_way(stages: tuple[int, ...]) -> None:
    group = Group(split_of(*stages))

    def run(*numbers: int) -> dict[str, float]:
        for number in numbers:
            row = StepRow(tokens=(number,), start=number, blocks=(0,))
            group.runner.begin(ForwardStep(number=number, rows=(row,)))
        for _ in numbers:
            group.runner.result()
        return group.runner.metrics()

    first, second = run(0), run(1)
    assert (first["single_token_steps_total"], second["single_token_steps_total"]) == (1, 2)
    assert 0 < first["single_token_step_seconds_total"] < second["single_token_step_seconds_total"]
    assert run(2, 3)["single_token_steps_total"] == 2, "neither of them was alone"
    group.end()


def test_a_lost_rank_fails_the_step() -> None:
    group = Group(split_of(2))
    group.links[1].break_off()
    group.runner.begin(step_of(0))
    with pytest.raises(GroupLost):
        group.runner.result()
    group.end()
