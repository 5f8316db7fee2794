"""A begun stream that continues at another engine has the tokens of an undisturbed run, also if they are drawn by chance."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("llguidance")

from fake_replicas import ServedGateway, request, text_of
from served_api import made_app
from toy_ranks import VOCABULARY, ToyRunner
from waiting import played

from hpcserve.api.guard import ApiLimits
from hpcserve.batching import BatchLimits
from hpcserve.engine import LocalEngine

PATH = "/v1/completions"
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"temperature": 1.2, "top_p": 0.9, "seed": 7, "n": 3},
    "penalties": {"seed": 3, "presence_penalty": 0.5, "frequency_penalty": 1, "repetition_penalty": 1.2, "logprobs": 2},
    "echo": {"seed": 5, "echo": True, "logprobs": 1},
}


@contextlib.asynccontextmanager
async def replicas() -> AsyncIterator[list[Any]]:
    """Yield two applications, each over an engine with toy ranks."""
    limits = BatchLimits(blocks=64, context_tokens=512)
    engines = [LocalEngine(ToyRunner(), limits, vocabulary=VOCABULARY) for _ in range(2)]
    apps = [made_app(engine, limits=ApiLimits(silence_s=3600)) for engine in engines]  # type: ignore[arg-type]
    try:
        async with contextlib.AsyncExitStack() as stack:
            for app in apps:
                await stack.enter_async_context(app.router.lifespan_context(app))
            yield apps
    finally:
        for engine in engines:
            await asyncio.to_thread(engine.close)


def read(text: bytes) -> dict[int, list[Any]]:
    """Return what each choice of a stream has: its texts, log probabilities and reasons to end."""
    *events, usage, end, _ = text.split(b"\n\n")
    assert end == b"data: [DONE]"
    assert b'"usage"' in usage
    found: dict[int, list[Any]] = {}
    for event in events:
        (choice,) = json.loads(event[6:])["choices"]
        found.setdefault(choice["index"], []).append((choice["text"], choice["logprobs"], choice["finish_reason"]))
    return found


@pytest.mark.parametrize("kind", KINDS)
@played
async def test_a_resumed_stream_has_the_tokens_of_an_undisturbed_one(kind: str) -> None:
    found = []
    async with replicas() as apps:
        for breaks in ([], [0], [7], [40]):
            gateway = ServedGateway(*apps, breaks=breaks)
            await gateway.synced()
            gateway.app.body = {"model": "chat", "prompt": [9, 12, 30], "max_tokens": 24, "stream": True} | KINDS[kind]
            gateway.app.body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
            found.append(read(await text_of(await gateway.ask(request(PATH)))))
            assert len(gateway.asked) == 1 + (breaks in ([0], [7])) + (breaks == [40] and kind == "seed")
    assert len(found[0][0]) > 10
    assert found[1:] == [found[0]] * 3
