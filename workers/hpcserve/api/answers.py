"""Choices as the objects of the API: whole, or as server-sent events.

Rules: a client that is gone cancels its request; a client that does not read is cut off; an error before the first event has
its status, and one after it is an event of its own, after which there is no [DONE].

Sources: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from hpcserve.api import resumption
from hpcserve.api.choices import Choice, TextDelta, TokenLogprob
from hpcserve.api.guard import ApiLimits, as_api_error, error_object
from hpcserve.api.tools import ToolCall
from hpcserve.tokens import TextTokenizer

Result = TypeVar("Result")
Delta = tuple[Choice, TextDelta]
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """What all objects of one answer have in common."""

    model: str
    version: str
    tokenizer: TextTokenizer
    is_chat: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def stream_name(self) -> str:
        """What another replica needs to continue a stream under the same name."""
        return f"{self.id} {self.created} {self.version}"

    def whole(self, choices: Sequence[Choice], deltas: Mapping[int, list[TextDelta]]) -> dict[str, Any]:
        """Return the answer as one object."""
        made = [self._whole_choice(choice, deltas[choice.request.index]) for choice in choices]
        return self._object("", made) | {"usage": usage(choices)}

    def _whole_choice(self, choice: Choice, deltas: list[TextDelta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
        made: dict[str, Any] = {"index": choice.request.index, "finish_reason": deltas[-1].finish}
        made["logprobs"] = self._logprobs(choice, logprobs)
        if not self.is_chat:
            return {"text": text, **made}
        calls = deltas[-1].calls
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [_call_object(call) for call in calls]
        return {"message": message, **made}

    def chunk(self, choice: Choice, delta: TextDelta, *, is_first: bool) -> dict[str, Any]:
        """Return a delta as an object of a stream."""
        made: dict[str, Any] = {"index": choice.request.index, "finish_reason": delta.finish}
        made["logprobs"] = self._logprobs(choice, delta.logprobs) if delta.logprobs else None
        if self.is_chat:
            content: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
            if delta.text:
                content["content"] = delta.text
            if delta.calls:
                content["tool_calls"] = [
                    {"index": index, **_call_object(call)} for index, call in enumerate(delta.calls)
                ]
            made["delta"] = content
        else:
            made["text"] = delta.text
        return self._object(".chunk", [made])

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the object that ends a stream whose client asked for the usage."""
        return self._object(".chunk", []) | {"usage": usage(choices)}

    def _object(self, suffix: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}",
            "object": f"chat.completion{suffix}" if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.version,
            "choices": choices,
        }

    def _logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        most = choice.request.generate.logprobs
        if most is None:
            return None
        if self.is_chat:
            return {"content": [self._chat_logprob(one, most) for one in logprobs], "refusal": None}
        return {
            "tokens": [self.token_text(one.token) for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [self._top(one, most) for one in logprobs],
            "text_offset": [one.offset for one in logprobs],
        }

    def _chat_logprob(self, one: TokenLogprob, most: int) -> dict[str, Any]:
        top = [self._token_object(token, logprob) for token, logprob in one.top[:most]]
        return self._token_object(one.token, one.logprob) | {"top_logprobs": top}

    def _token_object(self, token: int, logprob: float | None) -> dict[str, Any]:
        content = self.tokenizer.token_bytes(token)
        return {"token": content.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(content)}

    def _top(self, one: TokenLogprob, most: int) -> dict[str, float] | None:
        """Return the most likely tokens by their text; of two with the same text, the likelier."""
        if one.logprob is None:
            return None
        pairs = [*one.top[:most], (one.token, one.logprob)]
        made: dict[str, float] = {}
        for token, logprob in pairs:
            made.setdefault(self.token_text(token), _finite(logprob))
        return made

    def token_text(self, token: int) -> str:
        """Return the text of a token alone.

        Of a part of a character these are its bytes, as OpenAI writes them.
        """
        content = self.tokenizer.token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _finite(logprob: float | None) -> float:
    """Return a log probability that JSON can say: that of an impossible token is -infinity."""
    return -9999.0 if logprob is None or logprob < -9999.0 else logprob


def _call_object(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage(choices: Iterable[Choice]) -> dict[str, Any]:
    """Return the tokens of an answer; a prompt counts once, however many choices it has."""
    choices = list(choices)
    firsts = [choice for choice in choices if choice.request.is_first]
    prompt_tokens = sum(choice.prompt_tokens for choice in firsts)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    cached = {"prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in firsts)}}
    return _token_counts(prompt_tokens, completion_tokens) | cached


def _token_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def compact(value: Any) -> str:
    """Return a value as JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def while_connected(work: Awaitable[Result], receive: Receive) -> Result:
    """Return the result of `work`, which is cancelled if the client goes.

    Raises:
        ClientDisconnect: it has gone.
    """
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def collected(deltas: AsyncIterator[Delta | None], choices: Sequence[Choice]) -> dict[int, list[TextDelta]]:
    """Return all deltas, by the number of the choice."""
    found: dict[int, list[TextDelta]] = {choice.request.index: [] for choice in choices}
    async with contextlib.aclosing(deltas) as open_deltas:  # type: ignore[type-var]
        async for item in open_deltas:
            if item is not None:
                found[item[0].request.index].append(item[1])
    return found


class StreamUsage(enum.Enum):
    """Where a stream reports its usage."""

    NOWHERE = "nowhere"
    AT_END = "at end"
    IN_EACH_CHUNK = "in each chunk"  # that of the chunk's choice so far; and at the end


class SentEvents:
    """An answer as server-sent events; `first` is the first item of `deltas`, already taken."""

    def __init__(
        self,
        form: AnswerForm,
        choices: Sequence[Choice],
        first: Delta | None,
        deltas: AsyncIterator[Delta | None],
        *,
        limits: ApiLimits,
        usage: StreamUsage,
        with_tokens: bool,
        on_end: Callable[[], None],
    ) -> None:
        self._form = form
        self._choices = choices
        self._first = first
        self._deltas = deltas
        self._limits = limits
        self._usage = usage
        self._sent_tokens = {choice.request.index: len(choice.request.generate.sent) for choice in choices}
        self._with_tokens = with_tokens
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await while_connected(self._send_all(send), receive)
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers.append((b"x-accel-buffering", b"no"))
        if self._with_tokens:
            headers.append((resumption.HEADER.encode(), self._form.stream_name.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with contextlib.aclosing(self._events()) as events:  # type: ignore[type-var]
                async for event in events:
                    async with asyncio.timeout(self._limits.send_s):
                        await send({"type": "http.response.body", "body": event, "more_body": True})
        except TimeoutError:
            raise ClientDisconnect from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        begun = {choice.request.index for choice in self._choices if choice.request.is_begun}
        try:
            async with contextlib.aclosing(self._items()) as items:  # type: ignore[type-var]
                async for item in items:
                    if item is None:
                        yield b": waiting\n\n"
                        continue
                    choice, delta = item
                    index = choice.request.index
                    chunk = self._form.chunk(choice, delta, is_first=index not in begun)
                    begun.add(index)
                    yield self._named(choice, delta) + _event(chunk | self._chunk_usage(choice, delta))
        except Exception as error:
            yield _event(error_object(as_api_error(error)))
            return
        if self._usage is not StreamUsage.NOWHERE:
            yield _event(self._form.usage_chunk(self._choices))
        yield DONE

    def _chunk_usage(self, choice: Choice, delta: TextDelta) -> dict[str, Any]:
        """Return the field of a chunk for the usage, if the client asked for it."""
        index = choice.request.index
        self._sent_tokens[index] += len(delta.tokens)  # the choice itself may be ahead of what is sent
        match self._usage:
            case StreamUsage.NOWHERE:
                return {}
            case StreamUsage.AT_END:
                return {"usage": None}
        return {"usage": _token_counts(choice.prompt_tokens, self._sent_tokens[index])}

    def _named(self, choice: Choice, delta: TextDelta) -> bytes:
        """Return the comment that names the tokens of a delta, if they are wanted."""
        if not self._with_tokens:
            return b""
        return f": tokens {compact([choice.request.index, delta.tokens, delta.finish is not None])}\n".encode()

    async def _items(self) -> AsyncIterator[Delta | None]:
        async with contextlib.aclosing(self._deltas) as deltas:  # type: ignore[type-var]
            yield self._first
            async for item in deltas:
                yield item


def _event(value: Any) -> bytes:
    return f"data: {compact(value)}\n\n".encode()
