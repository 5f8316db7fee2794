"""An engine without a model: it answers with given text, and records what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from hpcserve.requests import EngineLoad, GenerateRequest, TokenEvent
from hpcserve.tokens import TextTokenizer


class FakeEngine:
    """A `TokenEngine` whose answer to a prompt is `answer(prompt's text)`, token by token."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        answer: Callable[[str], str] = lambda _: "hello world",
        *,
        context_tokens: int = 2048,
        vocabulary: int = 384,
    ) -> None:
        self.tokenizer = tokenizer
        self.answer = answer
        self.context_tokens = context_tokens
        self.vocabulary = vocabulary
        self.asked: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.sent = 0
        self.error: Exception | None = None
        self.fails_after: tuple[int, Exception] | None = None  # after so many tokens
        self.gate: asyncio.Event | None = None  # if set, answers wait for it after their first token

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """Yield the tokens of the answer."""
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        if request.embed:
            yield TokenEvent(token=None, finish="stop", embedding=(1.0, float(len(request.prompt))))
            return
        ended = False
        try:
            async for event in self._events(request):
                yield event
                ended = event.finish is not None
        finally:
            if not ended:
                self.cancelled.append(request.id)

    async def _events(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        tokens = self.tokenizer.encode(self.answer(self.tokenizer.decode(request.prompt)), add_special=False)
        tokens += sorted(self.tokenizer.end_tokens)[:1]
        tokens = tokens[: request.max_tokens]
        assert list(request.sent) == tokens[: len(request.sent)]
        if len(request.sent) == len(tokens):
            yield TokenEvent(token=None, finish="stop" if tokens[-1] in request.stop_tokens else "length")
        for index, token in list(enumerate(tokens))[len(request.sent) :]:
            if index == 1 and self.gate is not None:
                await self.gate.wait()
            if self.fails_after is not None and index == self.fails_after[0]:
                raise self.fails_after[1]
            is_end = token in request.stop_tokens
            finish = "stop" if is_end else "length" if index + 1 == request.max_tokens else None
            self.sent += 1
            yield TokenEvent(
                token=token,
                logprob=-0.5,
                top=((token, -0.5), (0, -2.0))[: request.logprobs or 0],
                finish=finish,
                prompt_logprobs=self._prompt_logprobs(request) if index == 0 else (),
                cached_tokens=len(request.prompt) - 1,
            )
            await asyncio.sleep(0)

    def _prompt_logprobs(
        self, request: GenerateRequest
    ) -> tuple[tuple[float | None, tuple[tuple[int, float], ...]], ...]:
        if not request.prompt_logprobs:
            return ()
        return ((None, ()), *((-1.0, ((token, -1.0),)) for token in request.prompt[1:]))

    def load(self) -> EngineLoad:
        """Return an idle load."""
        return EngineLoad(running=0, waiting=0, kv_used=0.0, queue_wait_s=0.0)

    def metrics(self) -> Mapping[str, float]:
        """Return a counter, and one whose name is not one."""
        return {"tokens_total": float(self.sent), "bad name\n": 1.0}
