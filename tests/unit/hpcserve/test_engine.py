"""The engine over toy ranks: whatever batching does, each request has exactly the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import queue
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import torch

from hpcserve.batching import BatchLimits
from hpcserve.engine import LocalEngine
from hpcserve.errors import GroupLost, InvalidRequest, OverloadedError, ServeError
from hpcserve.requests import GenerateRequest, SamplingSettings, TokenEvent
from tests.toy_ranks import VOCABULARY, ToyRunner, toy_logits, toy_tokens
from tests.waiting import played

GREEDY = SamplingSettings(temperature=0)
NUMBERS = itertools.count()


def request(prompt: Sequence[int], max_tokens: int, **fields: Any) -> GenerateRequest:
    fields = {"id": f"r{next(NUMBERS)}", "sampling": GREEDY} | fields
    return GenerateRequest(prompt=tuple(prompt), max_tokens=max_tokens, **fields)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, VOCABULARY), k=length)


@contextlib.asynccontextmanager
async def engine_over(runner: ToyRunner, **changes: Any) -> AsyncIterator[LocalEngine]:
    """An engine whose clock stands still, so that costs decide nothing; `limits` and arguments are mixed."""
    names = set(BatchLimits.__dataclass_fields__)
    limits = {"blocks": 64, "context_tokens": 512} | {name: changes[name] for name in changes if name in names}
    rest = {"clock": lambda: 0.0} | {name: changes[name] for name in changes if name not in names}
    engine = LocalEngine(runner, BatchLimits(**limits), vocabulary=VOCABULARY, **rest)
    try:
        yield engine
    finally:
        if runner.gate is not None:
            for _ in range(1000):
                runner.gate.put(None)
        await asyncio.to_thread(engine.close)


async def tokens_left(stream: AsyncIterator[TokenEvent]) -> list[int | None]:
    return [event.token async for event in stream]


async def events_of(engine: LocalEngine, asked: GenerateRequest) -> list[TokenEvent]:
    return [event async for event in engine.generate(asked)]


async def tokens_of(engine: LocalEngine, asked: GenerateRequest) -> list[int]:
    return [event.token for event in await events_of(engine, asked) if event.token is not None]


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "speculating"])
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("blocks", [14, 128], ids=["preempting", "roomy"])
def test_batched_requests_have_the_tokens_of_undisturbed_ones(
    blocks: int, depth: int, prefix_cache: bool, speculate: bool
) -> None:
    shared = prompt_of(40)
    prompts = [shared + prompt_of(length, seed) for seed, length in enumerate([0, 1, 3, 8, 9, 25, 60, 90])]

    @played
    async def scene() -> None:
        runner = ToyRunner(depth=depth, memory=3)
        options = {"prefix_cache": prefix_cache, "speculate": speculate}
        async with engine_over(runner, blocks=blocks, step_tokens=24, running=8, **options) as engine:
            found = await asyncio.gather(*(tokens_of(engine, request(prompt, 60)) for prompt in prompts))
            metrics = engine.metrics()
            assert engine.load().kv_used == 0
        assert found == [toy_tokens(prompt, 60, memory=3) for prompt in prompts]
        assert (metrics["preemptions_total"] > 0) == (blocks == 14)
        assert (metrics["cached_tokens_total"] > 0) == prefix_cache
        assert (metrics["right_guesses_total"] > 0) == speculate

    scene()


@played
async def test_every_choice_with_a_seed_is_the_same_alone_in_a_batch_and_resumed() -> None:
    settings = SamplingSettings(temperature=1.3, top_p=0.9, seed=7, presence_penalty=0.5, repetition_penalty=1.2)
    async with engine_over(ToyRunner()) as engine:
        alone = await tokens_of(engine, request(prompt_of(20), 30, sampling=settings))
        others = [request(prompt_of(30, seed), 30, sampling=SamplingSettings()) for seed in range(5)]
        batch = await asyncio.gather(
            tokens_of(engine, request(prompt_of(20), 30, sampling=settings)),
            *(tokens_of(engine, other) for other in others),
        )
        resumed = await tokens_of(engine, request(prompt_of(20), 30, sampling=settings, sent=tuple(alone[:11])))
    assert len(alone) == 30
    assert batch[0] == alone
    assert resumed == alone[11:]


@played
async def test_a_speculating_engine_samples_the_same_tokens_in_fewer_steps() -> None:
    settings = SamplingSettings(temperature=0.2, seed=3)
    found = []
    for speculate in (False, True):
        runner = ToyRunner(memory=1)
        async with engine_over(runner, speculate=speculate) as engine:
            found.append((await tokens_of(engine, request([1, 2], 120, sampling=settings)), len(runner.steps)))
    assert found[0][0] == found[1][0]
    assert found[0][1] == 120
    assert found[1][1] < 100


@played
async def test_the_end_is_a_stop_token_unless_it_is_ignored_or_the_length() -> None:
    tokens = toy_tokens([5, 6], 20)
    stop = tokens[6]
    before = tokens.index(stop)
    async with engine_over(ToyRunner(), eos=frozenset([stop])) as engine:
        events = await events_of(engine, request([5, 6], 20))
        assert [event.token for event in events] == [*tokens[:before], None]
        assert [event.finish for event in events] == [None] * before + ["stop"]
        ignoring = await events_of(engine, request([5, 6], 20, ignore_eos=True))
        assert ([event.token for event in ignoring], ignoring[-1].finish) == (tokens, "length")
        own = await events_of(engine, request([5, 6], 20, ignore_eos=True, stop_tokens=frozenset([tokens[0]])))
        assert [(event.token, event.finish) for event in own] == [(None, "stop")]
        sent = await events_of(engine, request([5, 6], 3, sent=tuple(tokens[:3]), ignore_eos=True))
        assert [(event.token, event.finish) for event in sent] == [(None, "length")]
        assert len(await events_of(engine, request([5, 6], 0))) == 1


@played
async def test_log_probabilities_are_the_models_own_also_those_of_the_prompt() -> None:
    prompt = prompt_of(70)
    async with engine_over(ToyRunner(), step_tokens=24) as engine:
        events = await events_of(engine, request(prompt, 2, logprobs=3, prompt_logprobs=True))
    scores = events[0].prompt_logprobs
    assert scores[0] == (None, ())
    assert len(scores) == 70
    for position in (1, 23, 24, 69):
        logprobs = torch.log_softmax(toy_logits(prompt[:position]), dim=0)
        assert scores[position][0] == pytest.approx(float(logprobs[prompt[position]]))
        assert scores[position][1][0] == (int(logprobs.argmax()), pytest.approx(float(logprobs.max())))
    assert (events[0].logprob, events[0].token) == (events[0].top[0][1], events[0].top[0][0])
    assert len(events[1].top) == 3
    assert events[1].prompt_logprobs == ()


@played
async def test_an_embedding_is_the_normalised_mean_of_all_positions() -> None:
    prompt = prompt_of(50)
    async with engine_over(ToyRunner(), step_tokens=16) as engine:
        (event,) = await events_of(engine, request(prompt, 0, embed=True))
    mean = torch.tensor([sum(prompt) / 50, 1.0])
    assert event.embedding == pytest.approx((mean / mean.norm()).tolist())
    assert event.finish == "stop"


async def close(engine: LocalEngine, stream: Any) -> None:
    await stream.aclose()


async def forget(engine: LocalEngine, stream: Any) -> None:
    del stream
    gc.collect()


@pytest.mark.parametrize("end", [close, forget])
def test_a_consumer_that_goes_away_ends_its_request_within_a_step(end: Callable[..., Any]) -> None:
    @played
    async def scene() -> None:
        runner = ToyRunner()
        runner.gate = queue.Queue()
        async with engine_over(runner) as engine:
            streams = [engine.generate(request(prompt_of(20, seed), 400)) for seed in range(2)]
            runner.gate.put(None)
            runner.gate.put(None)
            await anext(streams[1])
            await end(engine, streams.pop(0))
            for _ in range(10):
                runner.gate.put(None)
            for _ in range(8):
                await anext(streams[0])
            assert engine.load().running == 1
            assert [len(step.rows) for step in runner.steps[-3:]] == [1, 1, 1]
            assert engine.metrics()["requests_cancelled_total"] == 1

    scene()


@played
async def test_a_lost_rank_ends_all_requests_with_that_error_also_later_ones() -> None:
    runner = ToyRunner()
    runner.gate = queue.Queue()
    async with engine_over(runner) as engine:
        streams = [engine.generate(request([1, 2], 400)) for _ in range(3)]
        runner.gate.put(None)
        await anext(streams[0])
        runner.lost = True
        runner.gate.put(None)
        for stream in streams:
            with pytest.raises(GroupLost, match="rank 1 is lost"):
                await tokens_left(stream)
        with pytest.raises(GroupLost):
            engine.generate(request([1], 1))


@played
async def test_logits_that_are_not_numbers_end_their_request_alone() -> None:
    class BrokenRunner(ToyRunner):
        def result(self) -> Any:
            logits = super().result()
            rows = [row for row in self.steps[-1].rows if row.logits]
            for index, row in enumerate(rows):
                if row.start + len(row.tokens) > 8 and row.blocks[0] == bad:
                    logits[index] = float("nan")
            return logits

    runner = BrokenRunner()
    bad = 32  # the first block that an empty pool of 64 gives
    async with engine_over(runner, prefix_cache=False) as engine:
        broken, whole = engine.generate(request([1, 2, 3], 20)), engine.generate(request([4, 5, 6], 20))
        with pytest.raises(ServeError, match="not numbers"):
            await tokens_left(broken)
        assert await tokens_left(whole) == toy_tokens([4, 5, 6], 20)
        assert engine.metrics()["requests_failed_total"] == 1


@played
async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    runner = ToyRunner()
    runner.gate = queue.Queue()
    async with engine_over(runner, running=1, waiting=2) as engine:
        running = engine.generate(request([1, 2], 5))
        runner.gate.put(None)
        await anext(running)
        waiting = [engine.generate(request([1, 2], 5)) for _ in range(2)]
        with pytest.raises(OverloadedError) as refused:
            engine.generate(request([1, 2], 5))
        assert 1 <= refused.value.retry_after_s <= 60
        assert engine.load().waiting == len(waiting)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (VOCABULARY,)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"prompt": (1,) * 600}, "max_tokens"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"grammar": {"type": "object"}}, "response_format"),
        ({"sampling": SamplingSettings(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingSettings(logit_bias={VOCABULARY: 1.0})}, "logit_bias"),
    ],
    ids=str,
)
def test_a_request_that_does_not_fit_is_refused_with_the_field(fields: dict[str, Any], param: str) -> None:
    @played
    async def scene() -> None:
        async with engine_over(ToyRunner()) as engine:
            with pytest.raises(InvalidRequest) as refused:
                engine.generate(request(**({"prompt": (1,), "max_tokens": 1} | fields)))
            assert refused.value.param == param

    scene()


@played
async def test_a_grammar_holds_all_tokens_also_those_after_sent_ones() -> None:
    class Rising:
        """Only the next 8 tokens may follow."""

        def __init__(self) -> None:
            self.last = 0

        def mask(self) -> Any:
            return (torch.arange(VOCABULARY) > self.last) & (torch.arange(VOCABULARY) <= self.last + 8)

        def accept(self, token: int) -> None:
            self.last = token

    async with engine_over(ToyRunner(), grammar=lambda schema: Rising()) as engine:
        fields = {"grammar": {"type": "string"}, "stop_tokens": frozenset([VOCABULARY - 1])}
        tokens = await tokens_of(engine, request([1, 2], 20, **fields))
        assert tokens == sorted(set(tokens))
        assert len(tokens) >= VOCABULARY // 8
        assert await tokens_of(engine, request([1, 2], 20, sent=tuple(tokens[:1]), **fields)) == tokens[1:]


@played
async def test_a_grammar_that_needs_too_much_work_ends_its_request_alone() -> None:
    class Heavy:
        """Allows three tokens, and is too much work then."""

        def __init__(self) -> None:
            self.tokens = 0

        def mask(self) -> Any:
            if self.tokens == 3:
                raise InvalidRequest("cannot follow the JSON schema: too much work")
            return torch.ones(VOCABULARY, dtype=torch.bool)

        def accept(self, token: int) -> None:
            self.tokens += 1

    async with engine_over(ToyRunner(), grammar=lambda schema: Heavy()) as engine:
        heavy = engine.generate(request([1, 2, 3], 20, grammar={"type": "string"}))
        other = engine.generate(request([4, 5, 6], 20))
        with pytest.raises(InvalidRequest, match="too much work"):
            await tokens_left(heavy)
        assert await tokens_left(other) == toy_tokens([4, 5, 6], 20)
        assert engine.metrics()["requests_failed_total"] == 1
