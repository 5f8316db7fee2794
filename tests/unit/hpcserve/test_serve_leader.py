"""Streams over several generations, and what front and leader say to each other."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hpcserve.errors import GroupLost, InvalidRequest, OverloadedError, ServeError
from hpcserve.group.leader import (
    MOST_LOSSES,
    GroupEngine,
    LeaderConnection,
    LeaderEnd,
    MessageLine,
    error_of,
    error_values,
    event_of,
    event_values,
    request_of,
    request_values,
)
from hpcserve.requests import EngineLoad, GenerateRequest, SamplingSettings, TokenEvent
from hpctrain.peers import GUEST, HOST
from tests.waiting import played

REQUEST = GenerateRequest(
    id="r1",
    prompt=(1, 2, 3),
    max_tokens=6,
    sampling=SamplingSettings(temperature=0.5, logit_bias={4: -1.5}, seed=3),
    stop_tokens=frozenset({9, 8}),
    logprobs=2,
    prompt_logprobs=True,
    grammar={"type": "object"},
)


def test_a_request_is_the_same_after_its_journey() -> None:
    assert request_of(json.loads(json.dumps(request_values(REQUEST)))) == REQUEST


def test_an_event_is_the_same_after_its_journey() -> None:
    full = TokenEvent(
        token=0,
        logprob=-0.5,
        top=((5, -0.5), (6, -1.0)),
        prompt_logprobs=((None, ()), (-1.0, ((2, -1.0),))),
        embedding=(0.5, 0.25),
        cached_tokens=3,
    )
    for event in (full, TokenEvent(token=None, finish="stop"), TokenEvent(token=7)):
        assert event_of(json.loads(json.dumps(event_values(event)))) == event


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("no", param="stop"),
        OverloadedError("full", retry_after_s=2.5),
        GroupLost("gone"),
        ServeError("nan"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_after_its_journey(error: ServeError) -> None:
    found = error_of(json.loads(json.dumps(error_values(error))))
    assert (type(found), str(found)) == (type(error), str(error))
    assert found.__dict__ == error.__dict__


class CountingEngine:
    """An engine whose tokens are 10 + their place in the text; it stops before a place, until it is released."""

    context_tokens, vocabulary = 100, 100

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.asked: list[GenerateRequest] = []
        self.cancelled = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        self.asked.append(request)
        try:
            for place in range(len(request.sent), request.max_tokens):
                if place == self.stop_at:
                    await asyncio.Event().wait()
                is_last = place + 1 == request.max_tokens
                yield TokenEvent(token=10 + place, finish="length" if is_last else None)
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise

    def load(self) -> EngineLoad:
        return EngineLoad(running=1, waiting=0, kv_used=0.5, queue_wait_s=0.0)

    def metrics(self) -> dict[str, float]:
        return {"steps_total": 4.0}


class LostEngine(CountingEngine):
    """An engine whose ranks are lost, which its leader has not noticed yet."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        self.asked.append(request)
        raise GroupLost("rank 1 is lost")
        yield


class FrontAndLeaders:
    """A front's engine, and leaders of one generation after the other."""

    def __init__(self, hold_s: float = 60.0) -> None:
        self.engine = GroupEngine(context_tokens=100, vocabulary=100, hold_s=hold_s)
        self.overs: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._greet, "127.0.0.1", 0)

    async def lead(self, engine: CountingEngine, key: bytes = b"key") -> None:
        """Let a leader with this engine connect; returns when it is in use."""
        port = self._server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        line = await MessageLine.proved(reader, writer, key, GUEST, os.environ)
        self.overs.append(asyncio.Event())
        self._tasks.append(asyncio.create_task(LeaderEnd(engine, line).serve(self.overs[-1])))
        while not self.engine.is_ready:
            await asyncio.sleep(0)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await MessageLine.proved(reader, writer, b"key", HOST, os.environ)
        except GroupLost:
            return
        leader = LeaderConnection(line, 0)
        self.engine.attach(leader)
        await leader.read()
        self.engine.detach(leader)

    async def end(self) -> None:
        for over in self.overs:
            over.set()
        await asyncio.gather(*self._tasks)
        self._server.close()


@played
async def test_a_stream_continues_with_the_next_generation_without_a_gap_or_repetition() -> None:
    world, first, second = FrontAndLeaders(), CountingEngine(stop_at=2), CountingEngine()
    await world.start()
    await world.lead(first)
    tokens: list[int | None] = []
    async for event in world.engine.generate(REQUEST):
        tokens.append(event.token)
        if len(tokens) == 2:
            world.overs[0].set()  # the generation is lost while the third token is computed
            while world.engine.is_ready:
                await asyncio.sleep(0)
            await world.lead(second)
    assert tokens == [10, 11, 12, 13, 14, 15]
    assert second.asked[0].sent == (10, 11)
    assert second.asked[0].sampling.seed == 3
    assert not second.asked[0].prompt_logprobs, "the first event had them"
    assert world.engine.metrics()["resumed_streams_total"] == 1
    await world.end()


@played
async def test_a_leader_whose_ranks_are_lost_is_not_asked_again() -> None:
    world, first = FrontAndLeaders(), LostEngine()
    await world.start()
    await world.lead(first)
    stream = world.engine.generate(REQUEST)
    event = asyncio.ensure_future(anext(stream))
    while world.engine.is_ready and not event.done():
        await asyncio.sleep(0)
    await world.lead(CountingEngine())
    assert (await event).token == 10
    assert len(first.asked) == 1
    await stream.aclose()
    await world.end()


@played
async def test_a_request_that_loses_one_generation_after_the_other_ends_with_an_error() -> None:
    world = FrontAndLeaders()
    await world.start()
    event = asyncio.ensure_future(anext(world.engine.generate(REQUEST)))
    for _ in range(MOST_LOSSES + 1):
        assert not event.done()
        await world.lead(LostEngine())
        while world.engine.is_ready:
            await asyncio.sleep(0)
    with pytest.raises(ServeError, match="9 generations were lost computing its next token"):
        await event
    await world.end()


@played
async def test_a_request_is_held_until_a_generation_is_ready() -> None:
    world = FrontAndLeaders()
    await world.start()
    stream = world.engine.generate(REQUEST)
    first = asyncio.ensure_future(anext(stream))
    while not world.engine.load().waiting:
        await asyncio.sleep(0)
    await world.lead(CountingEngine())
    assert (await first).token == 10
    await stream.aclose()
    await world.end()


@played
async def test_a_request_is_held_no_longer_than_was_said() -> None:
    world = FrontAndLeaders(hold_s=0.01)
    with pytest.raises(GroupLost, match=r"no rank serves the model since 0\.01 s"):
        await anext(world.engine.generate(REQUEST))


@played
async def test_a_closed_stream_is_cancelled_on_the_leader() -> None:
    world, engine = FrontAndLeaders(), CountingEngine(stop_at=1)
    await world.start()
    await world.lead(engine)
    stream = world.engine.generate(REQUEST)
    await anext(stream)
    await stream.aclose()
    while not engine.cancelled:
        await asyncio.sleep(0)
    await world.end()


@played
async def test_two_requests_with_one_id_are_two_on_the_leader() -> None:
    world, engine = FrontAndLeaders(), CountingEngine()
    await world.start()
    await world.lead(engine)
    for _ in range(2):
        assert len([event async for event in world.engine.generate(REQUEST)]) == 6
    assert len({request.id for request in engine.asked}) == 2
    await world.end()


@played
async def test_a_leader_without_the_key_is_not_used() -> None:
    world = FrontAndLeaders()
    await world.start()
    with pytest.raises(GroupLost, match="does not prove the key"):
        await world.lead(CountingEngine(), key=b"other")
    assert not world.engine.is_ready
    await world.end()
