"""One choice of an answer: the engine's tokens become text.

Knows no HTTP and no objects of the API. Rules: half a character and what may become a stop string are held back; a stop string
ends the request in the engine; what is read slowly is computed slowly. A choice that was begun elsewhere takes the tokens that
the client has first, so that what was held back of them is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from hpcserve.api.guard import beside_loop
from hpcserve.api.prompts import TextRequest
from hpcserve.api.tools import SHOWN_WORDS, ToolCall, ToolReader
from hpcserve.requests import TokenEngine, TokenEvent
from hpcserve.tokens import StopScanner, TextStream, TextTokenizer

MOST_DELTAS_AHEAD = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token of the answer with its log probability, and where its text begins."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int  # characters before it


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What is new of a choice."""

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    finish: str | None = None
    tokens: tuple[int, ...] = ()  # generated since the delta before


class Choice:
    """A choice that is being generated."""

    def __init__(self, request: TextRequest, tokenizer: TextTokenizer) -> None:
        self.request = request
        self.completion_tokens = len(request.generate.sent)
        self.cached_tokens = 0
        self._unreported: list[int] = []  # tokens that no delta has named
        shown = {number for word in SHOWN_WORDS if (number := tokenizer.find(word)) is not None}
        self._stream = TextStream(tokenizer, shown=shown if request.tools else ())
        self._stops = StopScanner(request.stops)
        self._tools = ToolReader(request.tools) if request.tools else None
        self._tokenizer = tokenizer
        self._characters = 0

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return len(self.request.generate.prompt)

    async def deltas(self, engine: TokenEngine) -> AsyncIterator[TextDelta]:
        """Yield the text as it is generated; the last delta says how it finished."""
        await beside_loop(len(self.request.generate.sent), self._take_sent)
        first, last = not self.request.is_begun, TokenEvent(token=None, finish="stop")
        if self._stops.found is not None:  # in what was sent
            yield self._last("stop")
            return
        events = engine.generate(self.request.generate)
        try:
            async for event in events:
                self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
                if first and self.request.echo is not None:
                    yield self._echo(event)
                first = False
                if event.finish is not None:
                    last = event
                if event.token is not None and self.request.keep:
                    self.completion_tokens += 1
                    self._unreported.append(event.token)
                    delta = self._delta(event)
                    if delta.text or delta.logprobs:
                        yield self._reported(delta)
                if event.finish is not None or self._stops.found is not None:
                    break
        finally:
            # Closed at once, not when it is collected: the engine then stops computing.
            if (close := getattr(events, "aclose", None)) is not None:
                await close()
        yield self._last(last.finish or "stop")

    def _take_sent(self) -> None:
        """Take what the client has, so that what follows is as if it had come from here."""
        if self.request.is_begun:
            self._characters = len(self.request.echo or "")
        for token in self.request.generate.sent:
            self._delta(TokenEvent(token=token))

    def _echo(self, event: TokenEvent) -> TextDelta:
        """Return the prompt as the beginning of the answer."""
        logprobs, offset = [], 0
        stream = TextStream(self._tokenizer)
        for token, (logprob, top) in zip(self.request.generate.prompt, event.prompt_logprobs, strict=False):
            logprobs.append(TokenLogprob(token=token, logprob=logprob, top=top, offset=offset))
            offset += len(stream.push(token))
        text = self.request.echo or ""
        self._characters = len(text)
        return TextDelta(text=text, logprobs=tuple(logprobs))

    def _delta(self, event: TokenEvent) -> TextDelta:
        assert event.token is not None
        offset = self._characters
        is_end = event.finish == "stop" and event.token in self.request.generate.stop_tokens
        piece = "" if is_end else self._stream.push(event.token)
        self._characters += len(piece)
        text = self._stops.push(piece)
        if self._tools is not None:
            text = self._tools.push(text)
        if self.request.generate.logprobs is None or self._stops.found is not None:
            return TextDelta(text=text)
        logprob = TokenLogprob(token=event.token, logprob=event.logprob, top=event.top, offset=offset)
        return TextDelta(text=text, logprobs=(logprob,))

    def _reported(self, delta: TextDelta) -> TextDelta:
        """Return a delta with the tokens since the one before."""
        tokens = tuple(self._unreported)
        self._unreported.clear()
        return dataclasses.replace(delta, tokens=tokens)

    def _last(self, finish: str) -> TextDelta:
        """Return what was held back."""
        text = self._stops.push(self._stream.finish()) + self._stops.finish()
        calls: tuple[ToolCall, ...] = ()
        if self._stops.found is not None:
            finish = "stop"
        if self._tools is not None:
            before = self._tools.push(text)
            rest, calls = self._tools.finish()
            text = before + rest
            finish = "tool_calls" if calls else finish
        return self._reported(TextDelta(text=text, calls=calls, finish=finish))


async def generated(
    choices: Sequence[Choice], engine: TokenEngine, silence_s: float
) -> AsyncIterator[tuple[Choice, TextDelta] | None]:
    """Yield the deltas of choices that are generated at once.

    Yields None after each `silence_s` without a delta.

    Closing the iterator cancels all of them.
    """
    ready: asyncio.Queue[tuple[Choice, TextDelta | Exception]] = asyncio.Queue(MOST_DELTAS_AHEAD)

    async def run(choice: Choice) -> None:
        try:
            async with contextlib.aclosing(choice.deltas(engine)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    await ready.put((choice, delta))
        except Exception as error:
            await ready.put((choice, error))

    tasks = [asyncio.create_task(run(choice)) for choice in choices if not choice.request.is_over]
    left = len(tasks)
    try:
        while left:
            try:
                async with asyncio.timeout(silence_s):
                    choice, delta = await ready.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(delta, Exception):
                raise delta
            left -= delta.finish is not None
            yield choice, delta
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
