"""The engine over the real model: the tokens that transformers generates, in any batch, with and without the prefix cache."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from pathlib import Path

import pytest
import torch

from hpcserve.batching import BatchLimits
from hpcserve.config import read_config
from hpcserve.engine import LocalEngine
from hpcserve.model import DecoderModel, whole_part
from hpcserve.requests import GenerateRequest, SamplingSettings
from hpcserve.steps import ForwardStep
from hpcserve.weights import WeightFiles
from tests.tiny_models import VOCAB, tiny_model
from tests.waiting import played

NEW_TOKENS = 64


class OneRank:
    """A `StepRunner` in which the whole model is computed when its result is asked for."""

    depth = 1

    def __init__(self, model: DecoderModel) -> None:
        self.model = model
        self.steps: deque[ForwardStep] = deque()

    def begin(self, plan: ForwardStep) -> None:
        self.steps.append(plan)

    def result(self) -> torch.Tensor:
        plan = self.steps.popleft()
        return self.model.logits(self.model.forward(plan, None), plan)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """Prompts of several lengths, half of which begin alike."""
    shared = random.Random(0).choices(range(4, VOCAB), k=36)
    return [
        tuple(shared[: 36 * (seed % 2)] + random.Random(seed).choices(range(4, VOCAB), k=1 + 5 * seed))
        for seed in range(16)
    ]


@pytest.fixture(scope="module")
def expected(directory: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """What transformers generates."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = []
    for prompt in prompts:
        tokens = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        found.append(tokens[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("batch", [1, 7, 16])
def test_greedy_tokens_are_those_of_transformers(
    directory: Path, prompts: list[tuple[int, ...]], expected: list[list[int]], batch: int, prefix_cache: bool
) -> None:
    config = read_config(directory)
    model = DecoderModel(config, WeightFiles(directory), whole_part(config), "fp32", blocks=96)

    @played
    async def scene() -> None:
        limits = BatchLimits(blocks=96, context_tokens=256, running=16, step_tokens=64)
        engine = LocalEngine(OneRank(model), limits, vocabulary=VOCAB, prefix_cache=prefix_cache)

        async def tokens_of(number: int) -> list[int | None]:
            request = GenerateRequest(
                id=str(number),
                prompt=prompts[number],
                max_tokens=NEW_TOKENS,
                sampling=SamplingSettings(temperature=0),
            )
            return [event.token async for event in engine.generate(request)]

        try:
            assert await asyncio.gather(*map(tokens_of, range(batch))) == expected[:batch]
            if prefix_cache:
                assert await tokens_of(0) == expected[0]
        finally:
            await asyncio.to_thread(engine.close)

    scene()
