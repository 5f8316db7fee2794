"""Users of one served model against each other, its clients against the gateway, and replicas that send anything."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import h11
import pytest

pytest.importorskip("jwt")
pytest.importorskip("starlette")
pytest.importorskip("tokenizers")
pytest.importorskip("llguidance")
pytest.importorskip("httpx")

from fake_engine import FakeEngine
from fake_replicas import FakeAnswer, Gateway, ServedGateway, request, said, text_of
from served_api import made_app
from small_tokenizers import byte_level
from starlette.testclient import TestClient
from waiting import played

from hpcsched.gateway.model_answers import MAX_CHOICES, MAX_EVENT_BYTES, MAX_TOKENS, SentStream
from hpcsched.gateway.serving import MAX_BREAKS, Replica, StreamError, error_object
from hpcserve.api.guard import key_of
from hpcserve.batching import Batcher, BatchLimits
from hpcserve.requests import GenerateRequest
from hpcserve.steps import BLOCK_POSITIONS

PROMPT = tuple(range(4 * BLOCK_POSITIONS))


# ----- A4: the cache of a model does not tell what others asked


def cached_tokens(*salts: str) -> list[int]:
    """Return how many tokens of one prompt each request found in the cache; the requests have these salts."""
    batcher, found = Batcher(BatchLimits(blocks=64, context_tokens=1024)), []
    for number, salt in enumerate(salts):
        asked = GenerateRequest(id=str(number), prompt=PROMPT, max_tokens=2, cache_salt=salt)
        sequence = batcher.add(asked, 0.0)
        while (step := batcher.next_step()) is not None:
            is_over = any(row.chooses for row in step.rows)
            batcher.complete(step, [(7,) if row.chooses else () for row in step.rows], [asked.id] * is_over, 0.1)
        found.append(sequence.cached_tokens)
    return found


def test_a4_users_find_only_their_own_prompts_in_the_cache() -> None:
    known = 3 * BLOCK_POSITIONS  # the last block is computed, because its logits are needed
    assert cached_tokens("ann", "bob", "", "ann", "bob", "") == [0, 0, 0, known, known, known]


@played
async def test_a4_the_gateway_names_each_user_to_replicas_as_nobody_else_can() -> None:
    salts = []
    for gateway in (Gateway(), Gateway()):
        await gateway.synced()
        for user in ("ann", "ann", "bob"):
            gateway.app.on["/v1/services/use"] = lambda _, user=user: said(user=user, account="lab")
            gateway._may.clear()
            await gateway.ask(request(x_hpcsched_cache_salt="chosen"))
        salts.append([dict(wanted.headers())["x-hpcsched-cache-salt"] for _, wanted in gateway.asked])
    assert [len({salt for salt in own}) for own in salts] == [2, 2]
    assert [own[0] == own[1] for own in salts] == [True, True]
    assert not set(salts[0]) & set(salts[1])  # each gateway has a key of its own


@played
async def test_a4_a_prompt_of_another_user_does_not_choose_the_replica() -> None:
    gateway = Gateway(2)
    await gateway.synced()
    gateway.app.body["messages"][0]["content"] = "x" * 2048
    gateway.app.on["/v1/services/use"] = lambda _: said(user="bob", account="lab")
    gateway.replica(1).active = 1
    await gateway.ask(request())  # the second replica, which has none
    gateway.replica(1).active = gateway.replica(2).active = 0
    gateway.app.on["/v1/services/use"] = lambda _: said(user="ann", account="lab")
    gateway._may.clear()
    await gateway.ask(request())
    assert [job for job, _ in gateway.asked] == [2, 1]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
def test_a4_keys_headers_and_fields_keep_prefixes_apart_and_none_stands_for_another(path: str) -> None:
    engine = FakeEngine(byte_level())
    body = {"model": "tiny"} | (
        {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x", "input": "x"}
    )
    body.pop("input" if path == "/v1/completions" else "prompt", None)
    with TestClient(made_app(engine, keys=[key_of("a", name="ann"), key_of("b", name="bob")])) as client:
        for key in ("a", "b"):
            for header, field in (("", None), ("x", None), ("", "x"), ("x", "x")):
                headers = {"authorization": f"Bearer {key}", "x-hpcsched-cache-salt": header}
                for _ in range(2):
                    answer = client.post(path, json=body | {"cache_salt": field}, headers=headers)
                    assert answer.status_code == 200, answer.text
    salts = [one.cache_salt for one in engine.asked]
    assert salts[::2] == salts[1::2]
    assert len(set(salts)) == 8
    assert "" not in salts


# ----- A1: what only the gateway says to replicas is not taken from clients


@played
async def test_a1_a_client_cannot_say_what_only_the_gateway_says() -> None:
    engine = FakeEngine(byte_level())
    app = made_app(engine)
    async with app.router.lifespan_context(app):
        gateway = ServedGateway(app)
        await gateway.synced()
        stream = {"name": f"{'0' * 32} 1 0123abcd", "choices": [{"index": 0, "tokens": [9, 9], "is_over": False}]}
        asked = gateway.app.body | {"stream": True}
        for body in (
            {**asked, "stream": stream, "request": asked},
            {**asked, "resumed": stream},
            {**asked, "sent": [9]},
        ):
            gateway.app.body = body
            answer = await gateway.ask(request(x_hpcsched_stream="resumed", x_hpcsched_cache_salt="ann"))
            assert answer.status_code == 400
            await text_of(answer)
        assert not engine.asked
        gateway.app.body = asked
        answer = await gateway.ask(request(x_hpcsched_stream="new"))
        assert "x-hpcsched-stream" not in answer.headers
        assert b": tokens" not in await text_of(answer)


STREAM = {"name": f"{'0' * 32} 1 0123abcd", "choices": [{"index": 0, "tokens": [9], "is_over": False}]}
WRONG: dict[str, dict[str, Any]] = {
    "no-stream": {"request": {}},
    "no-object": {"request": {}, "stream": []},
    "name": {"request": {}, "stream": STREAM | {"name": "x\r\ny"}},
    "version": {"request": {}, "stream": STREAM | {"name": f"{'0' * 32} 1 other"}},
    "index": {"request": {}, "stream": {**STREAM, "choices": [{"index": 5, "tokens": [], "is_over": False}]}},
    "negative": {"request": {}, "stream": {**STREAM, "choices": [{"index": 0, "tokens": [-1], "is_over": False}]}},
    "text": {"request": {}, "stream": {**STREAM, "choices": [{"index": 0, "tokens": "9", "is_over": False}]}},
    "too-many": {"request": {}, "stream": {**STREAM, "choices": [{"index": 0, "tokens": [9] * 41, "is_over": False}]}},
    "choices": {"request": {}, "stream": {**STREAM, "choices": STREAM["choices"] * 257}},
    "whole": {"request": {"stream": False}, "stream": STREAM},
}


@pytest.mark.parametrize("kind", WRONG)
def test_a1_a_stream_that_cannot_be_resumed_is_refused_by_the_replica(kind: str) -> None:
    engine = FakeEngine(byte_level())
    body = WRONG[kind]
    body["request"] = {"model": "tiny", "prompt": "x", "max_tokens": 40, "stream": True} | body["request"]
    with TestClient(made_app(engine)) as client:
        answer = client.post("/v1/completions", json=body, headers={"x-hpcsched-stream": "resumed"})
    assert answer.status_code == (409 if kind == "version" else 400), answer.text
    assert answer.json()["error"]["message"].startswith("cannot ")
    assert not engine.asked


# ----- D7: a replica is a job of a user, and sends what it likes


class OddAnswer(FakeAnswer):
    """An answer of a replica that says it can continue streams."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts

    async def body(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            yield part
        raise StreamError("it was killed")


class OddGateway(Gateway):
    """A gateway of replicas that name their streams."""

    async def begun(self, replica: Replica, wanted: Any) -> Any:
        head = h11.Response(status_code=200, headers=[("x-hpcsched-stream", "name")])
        return self.answer, self.answer, head


ODD = [b"", b"{}", b"[]", b"[0,[1]]", b'[0,"12",true]', b"[0,[-1],true]", b"[0,[1.5],true]", b"[true,[1],true]"]
ODD += [b"[0,[4294967296],true]", b"[-1,[],true]", b"[0,[1],1]", b"[0,null,true]", b"[" * 5000, b"\xff", b"nan"]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
@played
async def test_d7_a_stream_with_odd_tokens_passes_and_is_not_continued(odd: bytes) -> None:
    gateway = OddGateway(2)
    await gateway.synced()
    gateway.app.body |= {"stream": True}
    gateway.answer = OddAnswer(b": tokens [0,[1],false]\ndata: 1\n\n: tokens " + odd + b"\ndata: 2\n\n")
    text = await text_of(await gateway.ask(request()))
    assert text.startswith(b'data: 1\n\ndata: 2\n\ndata: {"error"')
    assert len(gateway.asked) == 1


@played
async def test_d7_a_stream_with_a_long_event_passes_without_tokens_and_is_not_continued() -> None:
    gateway = OddGateway(2)
    await gateway.synced()
    gateway.app.body |= {"stream": True}
    long = b"data: " + b"x" * MAX_EVENT_BYTES
    first, last = b": tokens [0,[1],false]\ndata: 1\n\n", b"y\n\n: tokens [0,[2],false]\ndata: 2\n\n"
    gateway.answer = OddAnswer(first, long, last)
    text = await text_of(await gateway.ask(request()))
    assert text.startswith(b"data: 1\n\n" + long + b'y\n\ndata: 2\n\ndata: {"error"')
    assert len(gateway.asked) == 1


def test_d7_what_a_replica_says_of_a_stream_takes_bounded_memory() -> None:
    for said_of in ([[0, [1] * 1000, False]] * 100, [[index, [], False] for index in range(MAX_CHOICES + 2)]):
        stream = SentStream("name")
        for one in said_of:
            stream.take(json.dumps(one).encode())
            assert sum(map(len, stream._tokens.values())) <= MAX_TOKENS
            assert len(stream._tokens) <= MAX_CHOICES
        assert not stream.is_whole
    assert not SentStream("x" * 10_000).is_whole


@played
async def test_d7_a_stream_of_replicas_that_always_break_off_ends() -> None:
    gateway = OddGateway(MAX_BREAKS + 3)
    await gateway.synced()
    gateway.app.body |= {"stream": True}
    gateway.answer = OddAnswer(b": tokens [0,[1],false]\ndata: 1\n\n")
    text = await text_of(await gateway.ask(request()))
    assert text.count(b"data: 1\n\n") == MAX_BREAKS + 1 == len(gateway.asked)
    assert gateway._active == {}
    assert all(gateway.replica(job).active == 0 for job in range(1, MAX_BREAKS + 4))


class FailingAnswer(FakeAnswer):
    """The answers of a replica that says why it cannot continue, and of one that ends the stream."""

    def __init__(self, why: str) -> None:
        self.parts = [b"data: " + json.dumps(error_object(503, why)).encode() + b"\n\n", b"data: [DONE]\n\n"]

    async def body(self) -> AsyncIterator[bytes]:
        yield self.parts.pop(0)


@played
async def test_d7_a_replica_cannot_write_lines_of_its_own_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    gateway = OddGateway(2)
    await gateway.synced()
    gateway.app.body |= {"stream": True}
    gateway.answer = FailingAnswer("gone\n2026-01-01 ERROR hpcsched.gateway: \x1b[31mforged")
    with caplog.at_level("INFO", "hpcsched.gateway"):
        await text_of(await gateway.ask(request()))
    (message,) = caplog.messages
    assert message.startswith("a stream of job 1 continues at job 2: gone")
    assert message.isprintable()
