"""What the gateway reads in answers of replicas, and what becomes of requests whose replica or client is gone."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from typing import Any

import pytest
from fake_replicas import Gateway, request, said, until
from waiting import PATIENCE_S, played

from hpcsched.gateway.app import ProblemError
from hpcsched.gateway.model_answers import AnswerMeter
from hpcsched.gateway.serving import ModelError, Replica, ServedModel, note_metrics, why_unexpected
from hpcsched.gateway.streams import StreamError
from hpcsched.gateway.upstream import UpstreamReply
from hpcsched.model.service import MAX_USED_ROWS

EVENTS = [
    b'data: {"choices":[{"delta":{"content":"a"}}],"usage":null}\n\n',
    b'data: {"choices":[{"delta":{"content":"\\"usage\\""}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7}}\n\n',
    b"data: [DONE]\n\n",
]


@pytest.mark.parametrize("shows_usage", [True, False])
def test_the_usage_of_a_stream_is_read_and_shown_only_to_clients_that_ask(shows_usage: bool) -> None:
    stream = b"".join(EVENTS)
    for size in (1, 7, 1000):
        meter = AnswerMeter(is_stream=True, shows_usage=shows_usage)
        got = b"".join(meter.feed(stream[at : at + size]) for at in range(0, len(stream), size)) + meter.end()
        assert (meter.prompt_tokens, meter.completion_tokens) == (5, 7)
        assert got == b"".join(event for event in EVENTS if shows_usage or event is not EVENTS[2])


def test_an_event_passes_as_soon_as_it_is_whole_and_an_endless_one_is_not_kept() -> None:
    meter = AnswerMeter(is_stream=True, shows_usage=False)
    assert meter.feed(EVENTS[0][:-1]) == b""
    assert meter.feed(EVENTS[0][-1:]) == EVENTS[0]
    assert len(meter.feed(b"x" * (2 << 20))) == 2 << 20


def test_the_usage_of_a_whole_answer_is_read_and_a_wrong_one_is_nothing() -> None:
    meter = AnswerMeter(is_stream=False, shows_usage=False)
    body = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}).encode()
    assert meter.feed(body[:9]) + meter.feed(body[9:]) + meter.end() == body
    assert (meter.prompt_tokens, meter.completion_tokens) == (3, 4)
    for odd in (
        b"",
        b"[]",
        b"null",
        b'{"usage":[]}',
        b'{"usage":{"prompt_tokens":-1,"completion_tokens":true}}',
        b"[" * 9999,
    ):
        meter = AnswerMeter(is_stream=False, shows_usage=False)
        meter.feed(odd)
        meter.end()
        assert (meter.prompt_tokens, meter.completion_tokens) == (0, 0)


def test_the_load_of_a_replica_is_read_from_its_metrics_and_bounded() -> None:
    replica = Replica(1, "v1")
    note_metrics(replica, b"hpcserve_kv_used_ratio 0.5\nhpcserve_api_completion_tokens_total 100\n", 10.0)
    note_metrics(
        replica,
        b"hpcserve_kv_used_ratio 7\nhpcserve_queue_wait_seconds 2.5\nhpcserve_api_completion_tokens_total 300\n",
        12.0,
    )
    assert (replica.kv_used, replica.queue_wait_s, replica.tokens_per_s) == (1.0, 2.5, 100.0)
    note_metrics(replica, b"\x00\xff hpcserve_kv_used_ratio nan", 13.0)
    assert (replica.kv_used, replica.tokens_per_s) == (0.0, 0.0)


def test_an_answer_to_a_check_must_have_the_expected_text() -> None:
    body = json.dumps({"choices": [{"message": {"content": "two and two is 4"}}]}).encode()
    assert why_unexpected(200, body, None) == why_unexpected(200, body, "4") == ""
    assert why_unexpected(200, body, "5") == "the answer 'two and two is 4' does not contain '5'"
    assert why_unexpected(500, b'{"error":{"message":"broken"}}', None) == "status 500: broken"
    assert why_unexpected(200, b'{"choices":[{"text":""}]}', None) == "the answer is empty"
    assert why_unexpected(200, b"{}", None) == "the answer has no text"


# ----- requests


@played
async def test_an_answer_that_cannot_be_sent_is_not_counted_for_ever() -> None:
    gateway = Gateway()
    await gateway.synced()
    answer = await gateway.ask(request())
    assert (gateway.replica().active, gateway._active) == (1, {"ann": 1})

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            raise RuntimeError("Invalid HTTP header value.")  # as uvicorn says once the head is sent

    with pytest.raises(RuntimeError):
        await answer(request().scope, receive, send)  # type: ignore[arg-type]
    del answer
    gc.collect()
    await until(lambda: gateway.answer.is_closed)
    assert (gateway.replica().active, gateway._active) == (0, {})


@played
async def test_no_body_is_read_of_a_client_without_a_credential_or_over_its_rate() -> None:
    gateway = Gateway()
    await gateway.synced()
    gateway.app.refusal = ProblemError(429, "cannot answer now")
    with pytest.raises(ProblemError):
        await gateway.ask(request())
    assert gateway.app.read == 0


@played
async def test_a_long_conversation_takes_no_more_memory_than_a_short_one() -> None:
    gateway = Gateway()
    await gateway.synced()
    gateway.app.body["messages"] = [{"role": "user", "content": "x" * 100_000}]
    await gateway.ask(request())
    assert [len(key) for key in gateway._models["chat"].choice._versions._kept] == [32]


@played
async def test_a_request_goes_to_another_replica_if_the_controller_says_one_has_ended() -> None:
    gateway = Gateway(2)
    await gateway.synced()
    gateway.failing[1] = ModelError(404, "cannot reach the replica: job 1 does not run", "model_not_found")
    answer = await gateway.ask(request())
    assert answer.headers["x-hpcsched-replica"] == "2@v1"


@played
async def test_a_request_that_waits_for_a_replica_of_a_stopped_service_is_refused_at_once() -> None:
    gateway = Gateway()
    await gateway.synced()
    gateway.replica().is_ready = False
    asked = asyncio.create_task(gateway.ask(request()))
    await until(lambda: gateway._models["chat"].held)
    gateway.serve()
    await gateway._sync()
    with pytest.raises(ModelError, match="it was stopped"):
        await asked


@played
async def test_a_service_that_is_asked_while_the_controller_answers_is_kept() -> None:
    gateway = Gateway()

    def asked_meanwhile(_: bytes) -> UpstreamReply:
        gateway._models["chat"] = ServedModel("chat")
        return said(services=[])

    gateway.app.on["/v1/services/sync"] = asked_meanwhile
    await gateway._sync()
    assert list(gateway._models) == ["chat"]


@played
async def test_a_request_is_held_no_longer_if_a_replica_is_ready_now_and_then_but_fails() -> None:
    gateway = Gateway()
    await gateway.synced()
    gateway.tries_take_s = PATIENCE_S
    gateway.failing[1] = StreamError("it has ended")
    flaps = asyncio.create_task(gateway.flap(50))
    with pytest.raises(ModelError, match="no replica of model 'chat' was ready within"):
        await gateway.ask(request())
    flaps.cancel()


@played
async def test_much_usage_is_told_in_parts_and_each_count_once() -> None:
    gateway, told = Gateway(), Counter[str]()
    for user in range(2 * MAX_USED_ROWS):
        gateway._used[("chat", str(user), "lab", "requests")] = 1

    def answer(body: bytes) -> UpstreamReply:
        rows = json.loads(body)["used"]
        if len(rows) > MAX_USED_ROWS:
            return said(400, error="too many")
        told.update({row[1]: row[4] for row in rows})
        gateway._used[("chat", "0", "lab", "requests")] += 1  # meanwhile
        return said(services=[])

    gateway.app.on["/v1/services/sync"] = answer
    for _ in range(3):
        await gateway._sync()
    assert (len(told), told["0"], told["1"], told.total()) == (2 * MAX_USED_ROWS, 3, 1, 2 * MAX_USED_ROWS + 2)
    gateway.app.on["/v1/services/sync"] = lambda _: said(503, error="not now")
    with pytest.raises(ModelError):
        await gateway._sync()
    assert gateway._used.total() == 1
