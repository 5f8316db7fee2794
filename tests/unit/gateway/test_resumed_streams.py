"""A begun stream whose replica is lost continues at another one: nothing is lost, doubled or changed, wherever it breaks off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("llguidance")

from fake_engine import FakeEngine
from fake_replicas import FakeAnswer, Gateway, ServedGateway, request, text_of, until
from served_api import made_app
from small_tokenizers import byte_level
from waiting import played

from hpcsched.gateway.model_answers import MAX_TOKENS, AnswerMeter, SentStream
from hpcsched.gateway.serving import MAX_BREAKS, StreamError
from hpcserve.api.guard import ApiLimits
from hpcserve.errors import GroupLost, InvalidRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = 'wait. <tool_call>{"name": "weather", "arguments": {}}</tool_call>'
FINE = "hello world, the weather is fine"
EACH_CHUNK = {"include_usage": True, "continuous_usage_stats": True}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": (CHAT, FINE, {}),
    "stop-across-tokens": (CHAT, "one two three four", {"stop": ["o thr", "never"]}),
    "nearly-a-stop": (CHAT, "one two three four", {"stop": ["one two thx"]}),
    "choices": (CHAT, FINE, {"n": 3, "seed": 1}),
    "length": (CHAT, FINE, {"max_tokens": 2}),
    "usage-in-each-chunk": (CHAT, FINE, {"n": 2, "seed": 1, "stream_options": EACH_CHUNK}),
    "logprobs": (CHAT, "hello w\u00f6rld", {"logprobs": True, "top_logprobs": 2}),
    "characters-of-bytes": (CHAT, "h\u00e9llo \u20ac \U0001f600!", {}),
    "tools": (CHAT, CALL, {"tools": [TOOL]}),
    "echo": (TEXT, FINE, {"echo": True, "logprobs": 1, "n": 2}),
    "echo-alone": (TEXT, FINE, {"echo": True, "logprobs": 1, "max_tokens": 0}),
    "prompts": (TEXT, FINE, {"prompt": ["a", "b"], "max_tokens": 3}),
}


@contextlib.asynccontextmanager
async def replicas(answer: str, count: int = 2) -> AsyncIterator[tuple[list[FakeEngine], list[Any]]]:
    """Yield engines with the same answer, and applications over them."""
    engines = [FakeEngine(byte_level(), lambda _: answer) for _ in range(count)]
    apps = [made_app(engine, limits=ApiLimits(silence_s=3600)) for engine in engines]
    async with contextlib.AsyncExitStack() as stack:
        for app in apps:
            await stack.enter_async_context(app.router.lifespan_context(app))
        yield engines, apps


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    more = {"messages": HELLO} if path == CHAT else {"prompt": "hi", "max_tokens": 40}
    return {"model": "chat", "stream": True, "stream_options": {"include_usage": True}, **more, **fields}


def read(text: bytes) -> tuple[dict[Any, list[Any]], set[Any]]:
    """Return the objects of a stream by choice, without what differs between two runs; and what names the stream."""
    *events, end, rest = text.decode().split("\n\n")
    assert (end, rest) == ("data: [DONE]", ""), text[-500:]
    found: dict[Any, list[Any]] = {}
    names = set()
    for event in events:
        if event == ": waiting":
            continue
        assert event.startswith("data: {"), event
        one = json.loads(re.sub(r'"call_\w+"', '"call"', event[6:]))
        names.add((one.pop("id"), one.pop("created")))
        if one["usage"]:
            one["usage"].pop("prompt_tokens_details", None)
        found.setdefault(one["choices"][0]["index"] if one["choices"] else None, []).append(one)
    return found, names


async def asked(gateway: Gateway, path: str, fields: dict[str, Any]) -> bytes:
    """Return the stream that a client gets."""
    await gateway.synced()
    gateway.app.body = body_of(path, fields)
    return await text_of(await gateway.ask(request(path)))


@pytest.mark.parametrize("within", [False, True], ids=["between-events", "within-an-event"])
@pytest.mark.parametrize("kind", KINDS)
@played
async def test_a_stream_that_breaks_off_anywhere_is_that_of_an_undisturbed_run(kind: str, within: bool) -> None:
    path, answer, fields = KINDS[kind]
    async with replicas(answer) as (_, apps):
        whole = await asked(ServedGateway(*apps), path, fields)
        events = whole.count(b"\n\n")
        for first in range(events + 1):  # the last one: after the end, before the connection is closed
            gateway = ServedGateway(*apps, breaks=[first], within=within)
            found, names = read(await asked(gateway, path, fields))
            assert found == read(whole)[0], first
            assert len(names) == 1
            assert gateway.asked[0][0] == 1
            assert [job for job, _ in gateway.asked[1:]] == [2] * (first < events - 1)
            used = {name: count for (*_, name), count in gateway._used.items()}
            assert (used["requests"], used["completion_tokens"]) == (1, usage_of(found)["completion_tokens"])


def usage_of(found: dict[Any, list[Any]]) -> dict[str, int]:
    usage: dict[str, int] = found[None][0]["usage"]
    return usage


@played
async def test_only_what_follows_is_computed_and_the_client_sees_no_tokens() -> None:
    async with replicas(FINE) as (engines, apps):
        text = await asked(ServedGateway(*apps, breaks=[3]), CHAT, {})
        assert b": tokens" not in text
        tokens = byte_level().encode(FINE, add_special=False)
        assert engines[1].asked[0].sent == tuple(tokens[:3])
        assert engines[1].asked[0].prompt == engines[0].asked[0].prompt


@played
async def test_a_stream_breaks_off_twice_and_waits_for_its_only_replica() -> None:
    async with replicas(FINE, 1) as (engines, apps):
        gateway = ServedGateway(*apps, breaks=[2, 1])
        back = asyncio.create_task(gateway.flap(2))
        assert read(await asked(gateway, CHAT, {}))[0][0][-1]["choices"][0]["finish_reason"] == "stop"
        await back
        assert [len(one.sent) for one in engines[0].asked] == [0, 2, 3]


@played
async def test_a_replica_that_loses_its_ranks_says_so_and_another_one_continues() -> None:
    async with replicas(FINE) as (engines, apps):
        engines[0].fails_after = 2, GroupLost("cannot continue: no rank serves the model")
        gateway = ServedGateway(*apps)
        found, _ = read(await asked(gateway, CHAT, {}))
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in found[0]) == FINE
        assert gateway.replica().is_ready  # it says by itself whether it is


@played
async def test_an_error_that_no_other_replica_can_mend_ends_the_stream() -> None:
    async with replicas(FINE) as (engines, apps):
        for engine in engines:
            engine.fails_after = 2, InvalidRequest("cannot continue: the request is wrong")
        gateway = ServedGateway(*apps)
        text = await asked(gateway, CHAT, {})
        assert json.loads(text.split(b"\n\n")[-2][6:])["error"]["message"] == "cannot continue: the request is wrong"
        assert text.count(b'"error"') == 1
        assert [job for job, _ in gateway.asked] == [1]
        assert gateway.replica().errors == 0


@played
async def test_a_stream_that_always_breaks_off_ends_with_an_error() -> None:
    async with replicas(FINE) as (_, apps):
        gateway = ServedGateway(*apps, breaks=[1] + [0] * MAX_BREAKS)
        back = asyncio.create_task(gateway.flap(MAX_BREAKS))
        text = await asked(gateway, CHAT, {})
        back.cancel()
        assert b"[DONE]" not in text
        assert (
            json.loads(text.split(b"\n\n")[-2][6:])["error"]["message"]
            == "the replica has failed: the replica was killed"
        )
        assert len(gateway.asked) == MAX_BREAKS + 1


@played
async def test_a_stream_is_not_continued_by_another_version_of_the_model() -> None:
    async with replicas(FINE) as (engines, apps):
        gateway = ServedGateway(*apps, breaks=[2])
        there = [{"job": job, "version": f"v{job}", "drained": False} for job in (1, 2)]
        gateway.serve({"name": "chat", "weights": {"v1": 100, "v2": 0}, "replicas": there})
        gateway._hold_s = 0.0
        text = await asked(gateway, CHAT, {})
        assert b"was ready within 0 s" in text
        assert not engines[1].asked


@played
async def test_a_whole_answer_and_one_of_another_server_are_as_before() -> None:
    gateway = Gateway(2)
    await gateway.synced()
    gateway.answer = BrokenAnswer()
    gateway.app.body |= {"stream": True}
    text = await text_of(await gateway.ask(request()))
    assert text.startswith(b'data: {"choices":[]}\n\ndata: {"error"')
    assert len(gateway.asked) == 1


class BrokenAnswer(FakeAnswer):
    """An answer of a server that knows nothing of resumed streams, and ends."""

    async def body(self) -> AsyncIterator[bytes]:
        yield b'data: {"choices":[]}\n\n'
        raise StreamError("it was killed")


@played
async def test_the_replica_is_let_go_if_the_client_goes_while_its_stream_waits() -> None:
    async with replicas(FINE, 1) as (_, apps):
        gateway = ServedGateway(*apps, breaks=[1])
        await gateway.synced()
        gateway.app.body = body_of(CHAT, {})
        answer = await gateway.ask(request())
        reading = asyncio.create_task(text_of(answer))
        await until(lambda: gateway._models["chat"].held)
        reading.cancel()
        await until(reading.done)
        await until(lambda: not gateway._models["chat"].held)
        assert (gateway.replica().active, gateway._active) == (0, {})


@played
async def test_a_probe_that_began_before_a_request_failed_wakes_those_that_wait() -> None:
    gateway = Gateway()
    await gateway.synced()
    model, told = gateway._models["chat"], gateway._models["chat"].changed

    async def got(*_: object) -> tuple[int, bytes]:
        gateway.replica().is_ready = False  # a request has failed meanwhile
        return 200, b""

    gateway._got = got  # type: ignore[method-assign]
    await gateway._probe(model, gateway.replica())
    assert gateway.replica().is_ready
    assert told.is_set()


def test_a_break_after_the_usage_needs_no_replica() -> None:
    meter = AnswerMeter(is_stream=True, shows_usage=False, name="x")
    assert meter.feed(b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\ndata: [DO') == b""
    assert meter.broken() == b"data: [DONE]\n\n"


def test_tokens_of_a_long_stream_take_little_memory_and_have_a_bound() -> None:
    stream = SentStream("x")
    for _ in range(MAX_TOKENS // 64):
        stream.take(json.dumps([0, [7] * 64, False]).encode())
    assert stream.is_whole
    assert sum(tokens.itemsize * len(tokens) for tokens in stream._tokens.values()) == 4 * MAX_TOKENS
    stream.take(b"[0,[7],false]")
    assert not stream.is_whole
    assert not stream._tokens
