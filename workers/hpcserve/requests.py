"""Requests for tokens, and the tokens of the answer, as values.

Front and engine exchange them.
Knows neither HTTP nor text: prompts are token ids. A request that continues an interrupted stream has the tokens that were
already sent in `sent`; they count as generated (for `max_tokens`, penalties and the position of the seed).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How each token is chosen; temperature 0 takes the most likely one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to continue; `n` choices are n requests."""

    id: str
    prompt: tuple[int, ...]
    sent: tuple[int, ...] = ()
    max_tokens: int
    sampling: SamplingSettings = SamplingSettings()
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None  # the most likely tokens reported at each position; None: no log probabilities
    prompt_logprobs: bool = False  # also those of the prompt's tokens
    grammar: Mapping[str, Any] | None = None  # a JSON schema that the text must satisfy
    priority: int = 0  # higher first
    embed: bool = False  # the mean of the final hidden states instead of tokens
    cache_salt: str = ""  # only requests with the same salt share blocks of the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One generated token, or the end of the sequence."""

    token: int | None  # None: no new token, only the end
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens with their log probabilities
    finish: str | None = None  # "stop" or "length": the last event of the request
    prompt_logprobs: tuple[tuple[float | None, tuple[tuple[int, float], ...]], ...] = ()  # in the first event
    embedding: tuple[float, ...] = ()
    cached_tokens: int = 0  # of the prompt, from the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine is."""

    running: int
    waiting: int
    kv_used: float  # part of the blocks, 0 to 1
    queue_wait_s: float  # of the oldest waiting request


class TokenEngine(Protocol):
    """An engine as the front uses it: in its own process, or on the leader of a group."""

    context_tokens: int  # the longest sequence
    vocabulary: int

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """Yield the tokens of a request as they are computed; closing the iterator cancels it.

        Raises:
            InvalidRequest: the request does not fit the model.
            OverloadedError: too many requests wait.
        """

    def load(self) -> EngineLoad:
        """Return how busy the engine is."""

    def metrics(self) -> Mapping[str, float]:
        """Return counters by name."""


class StepRunner(Protocol):
    """The ranks as the engine uses them: steps are executed in the order they were begun."""

    depth: int  # steps that are worth having under way at once: the number of stages

    def begin(self, plan: Any) -> None:
        """Begin a `ForwardStep` on all ranks."""

    def result(self) -> Any:
        """Wait for the oldest step; return its logits.

        A float32 tensor [sum of rows' `logits`, vocabulary].
        Rows with `hidden` add their hidden states: the result is (logits, [tensor of each such row]).

        Raises:
            GroupLost: a rank is lost.
        """
