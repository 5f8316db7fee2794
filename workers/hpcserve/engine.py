"""The engine of a model: batches requests, runs steps, chooses tokens.

A thread repeats: begin steps, wait for the oldest, choose a token for each of its rows, send the events to the consumers'
event loops. The thread and the event loops share the batcher under one lock, which is never held while a step is computed.
A consumer that stops reading holds at most `max_tokens` events. An iterator that is closed, or no longer referenced, cancels
its request; the step under way is not waited for. If the ranks are lost, all requests end with `GroupLost`: whoever keeps the
tokens sends them again, to another engine. Does not know text, HTTP or ranks.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpcserve.batching import Batcher, BatchLimits, LiveSequence, PlannedRow, PlannedStep
from hpcserve.errors import InvalidRequest, OverloadedError, ServeError
from hpcserve.requests import EngineLoad, GenerateRequest, StepRunner, TokenEvent
from hpcserve.sampling import (
    MOST_LOGPROBS,
    ChosenToken,
    TokenDraw,
    TokenMask,
    check_settings,
    choose,
    has_penalties,
    score,
)
from hpcserve.speculation import RepeatGuesser

log = logging.getLogger(__name__)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # bounds of the histograms
LONGEST_RETRY_S = 60.0
WEIGHT = 0.1  # of a new interval between the ends of requests

COUNTED = (
    "requests_rejected",
    "requests_cancelled",
    "requests_failed",
    "requests_ended",
    "steps",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "guesses",
    "right_guesses",
)

GrammarStart = Callable[[Mapping[str, Any]], TokenMask]


class SecondsHistogram:
    """How many durations were at most each of some bounds, as Prometheus counts them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts = [0] * len(SECONDS)
        self._count = 0
        self._sum_s = 0.0

    def add(self, took_s: float) -> None:
        """Count a duration."""
        self._count += 1
        self._sum_s += took_s
        for index, bound_s in enumerate(SECONDS):
            self._counts[index] += took_s <= bound_s

    def series(self) -> dict[str, float]:
        """Return the counts by the names of their series."""
        found: dict[str, float] = {
            f'{self._name}_bucket{{le="{bound_s:g}"}}': count
            for bound_s, count in zip(SECONDS, self._counts, strict=True)
        }
        return found | {
            f'{self._name}_bucket{{le="+Inf"}}': self._count,
            f"{self._name}_sum": self._sum_s,
            f"{self._name}_count": self._count,
        }


class EventStream(AsyncIterator[TokenEvent]):
    """The events of one request, for one consumer; the engine's thread adds them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cancel: Callable[[], None]) -> None:
        self.loop = loop
        self._cancel = cancel
        self._events: deque[TokenEvent | ServeError] = deque()
        self._arrived = asyncio.Event()
        self._over = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._events:
            if self._over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, ServeError):
            self._over = True
            raise event
        self._over = event.finish is not None
        return event

    async def aclose(self) -> None:
        """End the request, if it has not ended."""
        if not self._over:
            self._over = True
            self._events.clear()
            self._arrived.set()
            self._cancel()

    def add(self, events: Sequence[TokenEvent | ServeError]) -> None:
        """Add events; called on the stream's event loop."""
        if not self._over:
            self._events.extend(events)
            self._arrived.set()

    def __del__(self) -> None:
        if not self._over:
            self._cancel()


PromptScore = tuple[float | None, tuple[tuple[int, float], ...]]


@dataclass(slots=True, eq=False, kw_only=True)
class EngineRequest:
    """What the engine's thread keeps of a running request beside its sequence."""

    sequence: LiveSequence
    stream: weakref.ref[EventStream]  # a consumer that forgets its iterator cancels the request
    loop: asyncio.AbstractEventLoop
    stops: frozenset[int]
    seed: int
    last_token_s: float
    generated: int
    grammar: TokenMask | None = None
    guesser: RepeatGuesser | None = None
    prompt_counts: Mapping[int, int] = field(default_factory=dict)
    generated_counts: Counter[int] = field(default_factory=Counter)
    scores: list[PromptScore] = field(default_factory=lambda: [(None, ())])  # of the prompt's tokens
    hidden_sum: Tensor | None = None
    is_started: bool = False  # an event was sent
    is_over: bool = False
    outbox: list[TokenEvent | ServeError] = field(default_factory=list)

    def emit(self, event: TokenEvent) -> None:
        """Let an event be sent; the first one says what is known of the prompt."""
        if not self.is_started:
            request = self.sequence.request
            scores = tuple(self.scores) if request.prompt_logprobs and not request.sent else ()
            event = replace(event, prompt_logprobs=scores, cached_tokens=self.sequence.cached_tokens)
        self.is_started = True
        self.is_over = event.finish is not None
        self.outbox.append(event)

    def fail(self, error: ServeError) -> None:
        """Let the request end with an error."""
        self.is_over = True
        self.outbox.append(error)

    def fail_without_numbers(self) -> None:
        """Let the request end because its logits cannot be used."""
        self.fail(
            ServeError(
                f"cannot continue request {self.sequence.request.id!r}: "
                "the model's logits are not numbers, or its grammar allows no token"
            )
        )

    def take(self, choice: ChosenToken) -> None:
        """Add a chosen token; a token that ends the text is not sent."""
        self.generated += 1
        self.generated_counts[choice.token] += 1
        if choice.token in self.stops:
            self.emit(TokenEvent(token=None, finish="stop"))
            return
        if self.grammar is not None:
            self.grammar.accept(choice.token)
        finish = "length" if self.generated >= self.sequence.request.max_tokens else None
        self.emit(TokenEvent(token=choice.token, logprob=choice.logprob, top=choice.top, finish=finish))

    def draws(self, planned: PlannedRow) -> list[TokenDraw]:
        """Return how the tokens that follow a row are chosen: one, and one after each guess.

        A grammar that needs too much work ends its request alone.
        """
        request = self.sequence.request
        if not planned.chooses or self.is_over or request.max_tokens == 0:
            return []
        try:
            allowed = self.grammar.mask() if self.grammar is not None else None
        except ServeError as error:
            self.fail(error)
            return []
        first = planned.row.start + len(planned.row.tokens) - planned.proposals
        penalties = has_penalties(request.sampling)
        return [
            TokenDraw(
                settings=request.sampling,
                seed=self.seed,
                position=first + index,
                prompt=self.prompt_counts,
                generated=self.generated_counts if penalties else {},
                allowed=allowed,
                logprobs=request.logprobs,
            )
            for index in range(1 + planned.proposals)
        ]

    def advance(self, planned: PlannedRow, choices: Sequence[ChosenToken | None]) -> tuple[int, ...]:
        """Take the tokens that follow a row, up to the first wrong guess; return them."""
        guesses = planned.row.tokens[len(planned.row.tokens) - planned.proposals :]
        tokens: list[int] = []
        for index, choice in enumerate(choices):
            if choice is None:
                self.fail_without_numbers()
                break
            self.take(choice)
            tokens.append(choice.token)
            if self.is_over or (index < len(guesses) and choice.token != guesses[index]):
                break
        return tuple(tokens)

    def add_scores(self, planned: PlannedRow, logits: Tensor) -> None:
        """Add the log probabilities of the prompt's tokens that follow those of a row."""
        request, start = self.sequence.request, planned.row.start
        tokens = request.prompt[start + 1 : start + 1 + len(planned.row.tokens)]
        if request.prompt_logprobs and not request.sent and tokens:
            scores = score(logits[: len(tokens)], tokens, [request.logprobs or 0] * len(tokens))
            if any(math.isnan(logprob) for logprob, _ in scores):
                self.fail_without_numbers()
            self.scores += scores[len(self.scores) - 1 - start :]  # some are known if the sequence was preempted

    def add_hidden(self, planned: PlannedRow, states: Tensor) -> None:
        """Add the hidden states of a part of the prompt; the last one gives the embedding."""
        part = states.double().sum(dim=0)
        self.hidden_sum = part if planned.row.start == 0 or self.hidden_sum is None else self.hidden_sum + part
        if planned.row.start + len(planned.row.tokens) == len(self.sequence.request.prompt):
            embedding = torch.nn.functional.normalize(self.hidden_sum, dim=0)
            if bool(torch.isfinite(embedding).all()):
                self.emit(TokenEvent(token=None, embedding=tuple(embedding.tolist()), finish="stop"))
            else:
                self.fail_without_numbers()


def can_guess(request: GenerateRequest) -> bool:
    """Return whether tokens can be chosen before the one before them is known."""
    return not (request.embed or request.grammar is not None or has_penalties(request.sampling))


def again(error: ServeError) -> ServeError:
    """Return the same error once more: each consumer raises its own."""
    return type(error)(str(error))


def deliver(batch: Sequence[tuple[weakref.ref[EventStream], Sequence[TokenEvent | ServeError]]]) -> None:
    """Hand events to their streams, on the streams' event loop."""
    for reference, events in batch:
        stream = reference()
        if stream is not None:
            stream.add(events)


def choose_all(
    step: PlannedStep, requests: Sequence[EngineRequest | None], logits: Tensor
) -> list[list[ChosenToken | None]]:
    """Return the tokens that follow each row of a step, as if all its guesses were right."""
    places: list[int] = []
    draws: list[TokenDraw] = []
    counts: list[int] = []
    at = 0
    for planned, request in zip(step.rows, requests, strict=True):
        own = request.draws(planned) if request is not None else []
        at += planned.row.logits
        places += range(at - len(own), at)
        draws += own
        counts.append(len(own))
    found = iter(choose(logits if len(places) == at else logits[places], draws))
    return [list(itertools.islice(found, count)) for count in counts]


class LocalEngine:
    """A `TokenEngine` over a `StepRunner`."""

    def __init__(
        self,
        runner: StepRunner,
        limits: BatchLimits,
        *,
        vocabulary: int,
        eos: frozenset[int] = frozenset(),
        grammar: GrammarStart | None = None,
        speculate: bool = True,
        prefix_cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the engine's thread.

        Args:
            vocabulary: the number of tokens.
            eos: tokens that end a text, unless a request says `ignore_eos`.
            grammar: starts the mask of a request's JSON schema; None refuses such requests.
            clock: seconds, which never go back.
        """
        self.vocabulary = vocabulary
        self._runner = runner
        self._eos = eos
        self._grammar = grammar
        self._speculate = speculate
        self._clock = clock
        limits = replace(limits, depth=max(1, runner.depth))
        self._batcher = Batcher(limits, propose=self._guess, prefix_cache=prefix_cache)
        self.context_tokens = self._batcher.longest
        self._changed = threading.Condition()  # guards the batcher, the requests and what follows
        self._requests: dict[LiveSequence, EngineRequest] = {}
        self._over: ServeError | None = None
        self._under_way: deque[tuple[PlannedStep, float]] = deque()  # of the thread alone
        self._cancelled: deque[LiveSequence] = deque()  # without the lock: a finalizer may add to it at any time
        self._last_done_s = 0.0
        self._last_end_s: float | None = None
        self._end_interval_s = 1.0
        self._counts: Counter[str] = Counter()
        self._first_token = SecondsHistogram("time_to_first_token_seconds")
        self._next_token = SecondsHistogram("time_per_output_token_seconds")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def generate(self, request: GenerateRequest) -> EventStream:
        """Yield the tokens of a request as they are computed; closing the iterator cancels it.

        Called on the consumer's event loop.

        Raises:
            InvalidRequest: the request does not fit the model.
            OverloadedError: too many requests wait.
            GroupLost: the ranks are lost.
        """
        loop = asyncio.get_running_loop()
        self._check(request)
        stops = self._stops(request)
        if request.sent and (request.sent[-1] in stops or len(request.sent) >= request.max_tokens):
            stream = EventStream(loop, lambda: None)  # all but the end was sent already
            stream.add([TokenEvent(token=None, finish="stop" if request.sent[-1] in stops else "length")])
            return stream
        grammar = self._start_grammar(request)
        with self._changed:
            if self._over is not None:
                raise again(self._over)
            try:
                sequence = self._batcher.add(request, self._clock())
            except OverloadedError as error:
                self._counts["requests_rejected"] += 1
                raise OverloadedError(str(error), retry_after_s=self._retry_after_s()) from None
            stream = EventStream(loop, partial(self._cancelled.append, sequence))
            self._requests[sequence] = EngineRequest(
                sequence=sequence,
                stream=weakref.ref(stream),
                loop=loop,
                stops=stops,
                seed=secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed,
                grammar=grammar,
                guesser=RepeatGuesser() if self._speculate and can_guess(request) else None,
                prompt_counts=Counter(request.prompt) if has_penalties(request.sampling) else {},
                generated_counts=Counter(request.sent),
                generated=len(request.sent),
                last_token_s=sequence.arrived_s,
            )
            self._counts["requests"] += 1
            self._changed.notify()
        return stream

    @property
    def is_over(self) -> bool:
        """Whether the engine has ended, by an error or by `close`."""
        return self._over is not None

    def load(self) -> EngineLoad:
        """Return how busy the engine is."""
        with self._changed:
            return self._batcher.load(self._clock())

    def metrics(self) -> Mapping[str, float]:
        """Return counters, gauges and histograms by the names of their series, without a prefix."""
        with self._changed:
            load = self._batcher.load(self._clock())
            names = ("requests", *COUNTED)
            return {
                **{f"{name}_total": self._counts[name] for name in names},
                "preemptions_total": self._batcher.preemptions,
                "running_requests": load.running,
                "waiting_requests": load.waiting,
                "kv_used_ratio": load.kv_used,
                "queue_wait_seconds": load.queue_wait_s,
                **self._first_token.series(),
                **self._next_token.series(),
            }

    def close(self) -> None:
        """End all requests with an error, and the thread."""
        with self._changed:
            if self._over is None:
                self._over = ServeError("cannot continue: the engine was stopped")
            self._changed.notify()
        self._thread.join()

    def _check(self, request: GenerateRequest) -> None:
        """Check what does not depend on other requests."""
        check_settings(request.sampling, self.vocabulary)
        if not request.prompt:
            raise InvalidRequest("cannot start a request without tokens: its prompt is empty", param="prompt")
        bad = next((token for token in (*request.prompt, *request.sent) if not 0 <= token < self.vocabulary), None)
        if bad is not None:
            raise InvalidRequest(f"cannot use token {bad}: tokens are from 0 to {self.vocabulary - 1}", param="prompt")
        if request.max_tokens < 0:
            raise InvalidRequest(f"cannot generate {request.max_tokens} tokens", param="max_tokens")
        if request.logprobs is not None and not 0 <= request.logprobs <= MOST_LOGPROBS:
            raise InvalidRequest(
                f"cannot report {request.logprobs} log probabilities a token: at most {MOST_LOGPROBS}", param="logprobs"
            )

    def _stops(self, request: GenerateRequest) -> frozenset[int]:
        return request.stop_tokens if request.ignore_eos else request.stop_tokens | self._eos

    def _start_grammar(self, request: GenerateRequest) -> TokenMask | None:
        if request.grammar is None:
            return None
        if self._grammar is None:
            raise InvalidRequest(
                "cannot hold the text to a schema: the engine has no grammars", param="response_format"
            )
        grammar = self._grammar(request.grammar)
        for token in request.sent:
            grammar.accept(token)
        return grammar

    def _retry_after_s(self) -> float:
        """Return when a place in the queue is likely to be free."""
        return max(1.0, min(self._end_interval_s, LONGEST_RETRY_S))

    def _guess(self, sequence: LiveSequence, most: int) -> Sequence[int]:
        guesser = self._requests[sequence].guesser
        return guesser.guess(sequence.tokens, most) if guesser is not None else ()

    def _run(self) -> None:
        error: ServeError
        try:
            while self._begin_steps():
                self._finish_oldest()
            error = self._over or ServeError("cannot continue: the engine was stopped")
        except ServeError as found:
            error = found
        except Exception:
            log.exception("cannot continue: the engine failed")
            error = ServeError("cannot continue: the engine failed; its log says why")
        with self._changed:
            self._over = error
            requests = list(self._requests.values())
            self._requests.clear()
        for request in requests:
            request.outbox.append(again(error))
        self._send(requests)

    def _begin_steps(self) -> bool:
        """Begin as many steps as are worth it; wait if there are none.

        Returns False when the engine is closed."""
        with self._changed:
            while True:
                while self._cancelled:
                    self._forget(self._cancelled.popleft())
                if self._over is not None:
                    return False
                planned = list(iter(self._batcher.next_step, None))
                if planned or self._under_way:
                    break
                self._changed.wait()
        for step in planned:
            self._under_way.append((step, self._clock()))
            self._runner.begin(step.step)
        return True

    def _finish_oldest(self) -> None:
        """Wait for the oldest step, choose its tokens and send them."""
        step, begun_s = self._under_way.popleft()
        result = self._runner.result()
        logits, hidden = result if isinstance(result, tuple) else (result, [])
        now_s = self._clock()
        with self._changed:
            requests = [self._requests.get(row.sequence) for row in step.rows]
        self._use(step, requests, logits, hidden)
        choices = choose_all(step, requests, logits)
        chosen = [
            () if request is None else request.advance(row, found)
            for request, row, found in zip(requests, step.rows, choices, strict=True)
        ]
        with self._changed:
            self._count(step, requests, chosen, now_s)
            ended = [request for request in requests if request is not None and request.is_over]
            took_s = now_s - max(begun_s, self._last_done_s)
            self._batcher.complete(step, chosen, {request.sequence.request.id for request in ended}, took_s)
            self._last_done_s = now_s
            for request in ended:
                self._requests.pop(request.sequence, None)
        self._send([request for request in requests if request is not None])

    def _use(
        self, step: PlannedStep, requests: Sequence[EngineRequest | None], logits: Tensor, hidden: Sequence[Tensor]
    ) -> None:
        """Use what a step says of prompts: log probabilities and hidden states."""
        if len(logits) != sum(row.row.logits for row in step.rows) or len(hidden) != sum(
            row.row.hidden for row in step.rows
        ):
            raise ServeError("cannot continue: the ranks returned another number of rows than the step has")
        at, states = 0, iter(hidden)
        for planned, request in zip(step.rows, requests, strict=True):
            own = logits[at : at + planned.row.logits]
            at += len(own)
            own_states = next(states) if planned.row.hidden else None
            if request is None:
                continue
            if own_states is not None:
                request.add_hidden(planned, own_states)
            elif request.sequence.request.prompt_logprobs:
                request.add_scores(planned, own)
            if planned.chooses and request.sequence.request.max_tokens == 0 and not request.is_over:
                request.emit(TokenEvent(token=None, finish="length"))

    def _count(
        self, step: PlannedStep, requests: Sequence[EngineRequest | None], chosen: Sequence[Sequence[int]], now_s: float
    ) -> None:
        """Count a step, its tokens and their times."""
        self._counts["steps"] += 1
        for planned, request, tokens in zip(step.rows, requests, chosen, strict=True):
            if request is None:
                continue
            sequence = request.sequence
            if tokens:
                is_first = request.generated - len(tokens) == len(sequence.request.sent)
                gap_s = now_s - request.last_token_s
                request.last_token_s = now_s
                if is_first:
                    self._first_token.add(gap_s)
                for _ in tokens[int(is_first) :]:
                    self._next_token.add(gap_s / len(tokens))
                if is_first:
                    self._counts["prompt_tokens"] += len(sequence.request.prompt)
                    self._counts["cached_tokens"] += sequence.cached_tokens
            self._counts["generated_tokens"] += len(tokens)
            if request.guesser is not None and planned.proposals and tokens:
                request.guesser.judge(planned.proposals, len(tokens) - 1, len(sequence.tokens))
                self._counts["guesses"] += planned.proposals
                self._counts["right_guesses"] += len(tokens) - 1
            if request.is_over:
                self._counts["requests_ended"] += 1
                self._counts["requests_failed"] += any(isinstance(event, ServeError) for event in request.outbox)
                if self._last_end_s is not None:
                    self._end_interval_s += WEIGHT * (now_s - self._last_end_s - self._end_interval_s)
                self._last_end_s = now_s

    def _forget(self, sequence: LiveSequence) -> None:
        """End a cancelled request."""
        self._batcher.cancel(sequence)
        if self._requests.pop(sequence, None) is not None:
            self._counts["requests_cancelled"] += 1

    def _send(self, requests: Sequence[EngineRequest]) -> None:
        """Send the events of requests to their consumers, once for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[EngineRequest]] = {}
        for request in requests:
            if request.outbox:
                by_loop.setdefault(request.loop, []).append(request)
        for loop, own in by_loop.items():
            batch = [(request.stream, request.outbox) for request in own]
            for request in own:
                request.outbox = []
            try:
                loop.call_soon_threadsafe(deliver, batch)
            except RuntimeError:  # the event loop is closed, and its consumers with it
                self._cancelled.extend(request.sequence for request in own)
