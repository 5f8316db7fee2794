"""Continuous batching, whatever arrives and whatever is cancelled: right tokens, own blocks, bounded steps, an end for all."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcserve.batching import Batcher, BatchLimits, LiveSequence, PlannedStep
from hpcserve.errors import OverloadedError
from hpcserve.requests import GenerateRequest
from hpcserve.speculation import RepeatGuesser
from hpcserve.steps import BLOCK_POSITIONS, ForwardStep
from tests.toy_ranks import ToyRunner, toy_tokens

MEMORY = 2  # tokens that the next one depends on: texts repeat, and guesses are sometimes right
ARRIVALS = st.tuples(
    st.integers(0, 20),  # before which step
    st.integers(1, 70),  # tokens of the prompt
    st.integers(1, 40),  # new tokens
    st.integers(-1, 1),  # priority
    st.sampled_from([0, 0, 1, 2]),  # which of some prefixes
    st.one_of(st.none(), st.integers(0, 30)),  # before which step it is cancelled
)


class PlayedBatches:
    """A batcher that is played with toy ranks, step by step, and looked at."""

    def __init__(self, limits: BatchLimits, *, prefix_cache: bool) -> None:
        self.limits = limits
        self.runner = ToyRunner(depth=limits.depth, memory=MEMORY)
        self.batcher = Batcher(limits, propose=self.guess, prefix_cache=prefix_cache)
        self.guessers: dict[LiveSequence, RepeatGuesser] = {}
        self.under_way: deque[PlannedStep] = deque()
        self.ended: list[LiveSequence] = []

    def guess(self, sequence: LiveSequence, most: int) -> tuple[int, ...]:
        return self.guessers.setdefault(sequence, RepeatGuesser()).guess(sequence.tokens, most)

    def begin(self) -> bool:
        """Begin what can begin; return whether a step is under way."""
        while (step := self.batcher.next_step()) is not None:
            self.check(step.step)
            self.runner.begin(step.step)
            self.under_way.append(step)
        return bool(self.under_way)

    def check(self, step: ForwardStep) -> None:
        """Check that a step keeps its budget, and that no written block has another user."""
        assert 0 < sum(len(row.tokens) for row in step.rows) <= self.limits.step_tokens
        users = Counter(block for row in step.rows for block in set(row.blocks))
        for row in step.rows:
            end = row.start + len(row.tokens)
            assert len(set(row.blocks)) == len(row.blocks) >= -(-end // BLOCK_POSITIONS)
            written = row.blocks[row.start // BLOCK_POSITIONS : -(-end // BLOCK_POSITIONS)]
            assert all(users[block] == 1 for block in written)

    def finish(self) -> None:
        """Complete the oldest step with the most likely tokens."""
        step = self.under_way.popleft()
        logits = self.runner.result()
        likeliest = iter(logits.argmax(dim=-1).tolist())
        chosen, ended = [], []
        for row in step.rows:
            found = [next(likeliest) for _ in range(row.row.logits)]
            guesses = row.row.tokens[len(row.row.tokens) - row.proposals :]
            right = next((index for index, guess in enumerate(guesses) if guess != found[index]), row.proposals)
            chosen.append(tuple(found[: right + 1]) if row.chooses else ())
            sequence = row.sequence
            if not sequence.cancelled and sequence.generated + len(chosen[-1]) >= sequence.request.max_tokens:
                assert sequence.generated + len(chosen[-1]) == sequence.request.max_tokens
                ended.append(sequence.request.id)
                self.ended.append(sequence)
        self.batcher.complete(step, chosen, ended, 0.001 * (20 + step.tokens))


@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=10),
    blocks=st.integers(7, 24),
    depth=st.integers(1, 3),
    running=st.integers(1, 6),
    step_tokens=st.integers(8, 64),
    prefix_cache=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_request_ends_with_its_own_tokens_and_every_block_is_free(
    arrivals: list[tuple[int, int, int, int, int, int | None]],
    blocks: int,
    depth: int,
    running: int,
    step_tokens: int,
    prefix_cache: bool,
) -> None:
    limits = BatchLimits(
        blocks=blocks, context_tokens=200, depth=depth, running=running, waiting=8, step_tokens=step_tokens
    )
    world = PlayedBatches(limits, prefix_cache=prefix_cache)
    live: dict[int, LiveSequence] = {}
    refused: set[int] = set()
    cancelled: set[LiveSequence] = set()
    for turn in range(10_000):
        for index, (when, length, new, priority, prefix, end) in enumerate(arrivals):
            if when == turn:
                prompt = tuple(1 + (prefix + place * place) % 40 for place in range(length))
                request = GenerateRequest(id=str(index), prompt=prompt, max_tokens=new, priority=priority)
                try:
                    live[index] = world.batcher.add(request, float(turn))
                except OverloadedError:
                    refused.add(index)
            if end == turn and index in live and live[index] not in world.ended:
                world.batcher.cancel(live[index])
                cancelled.add(live[index])
        if world.begin():
            world.finish()
        elif turn > 30:
            break
    assert len(world.batcher) == 0
    load = world.batcher.load(0.0)
    assert (load.running, load.waiting, load.kv_used) == (0, 0, 0)
    assert set(world.ended) == set(live.values()) - cancelled
    assert len(live) + len(refused) == len(arrivals)
    for sequence in world.ended:
        request = sequence.request
        assert sequence.tokens[len(request.prompt) :] == toy_tokens(request.prompt, request.max_tokens, MEMORY)
