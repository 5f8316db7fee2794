"""The routes of the API, and what puts them together.

Knows no ranks: an engine is a `TokenEngine`, wherever it computes. Rules: `/v1/` needs a key if there are keys; `/health` says
that this process answers, `/ready` that the model does.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import re
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from hpcserve.api.answers import AnswerForm, SentEvents, StreamUsage, collected, compact, usage, while_connected
from hpcserve.api.choices import Choice, generated
from hpcserve.api.guard import (
    ApiError,
    ApiKey,
    ApiLimits,
    RequestGuard,
    beside_loop,
    error_response,
    parse_json,
    read_body,
)
from hpcserve.api.openapi import describe
from hpcserve.api.prompts import PromptMaker, TextRequest
from hpcserve.api.resumption import HEADER, MOST_STREAM_BYTES, NEW, RESUMED, ResumedStream, taken_apart
from hpcserve.api.schema import REQUESTS, check
from hpcserve.chat import ChatTemplate
from hpcserve.errors import InvalidRequest, ServeError
from hpcserve.requests import GenerateRequest, TokenEngine
from hpcserve.tokens import TextTokenizer

SALT_HEADER = "x-hpcsched-cache-salt"  # of the gateway: the same for all requests of a user
SERIES = re.compile(r'[a-z_][a-z0-9_]*(\{[a-z_]+="[A-Za-z0-9_.+-]*"\})?')
TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def create_app(
    engine: TokenEngine,
    tokenizer: TextTokenizer,
    template: ChatTemplate,
    *,
    name: str,
    version: str,
    keys: Sequence[ApiKey] | None = None,
    limits: ApiLimits = ApiLimits(),
    why_not_ready: Callable[[], str | None] = lambda: None,
) -> Starlette:
    """Return the application that serves a model by this name.

    `version` is its `system_fingerprint`.

    `why_not_ready` returns what the model waits for, until it can answer.
    """
    api = ModelApi(engine, tokenizer, template, name=name, version=version, limits=limits, why_not_ready=why_not_ready)
    guard = Middleware(RequestGuard, keys=None if keys is None else list(keys), limits=limits, counts=api.counts)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await template.close()

    async def refused(_: Request, error: Exception) -> Response:
        return error_response(error)

    return Starlette(
        routes=api.routes(),
        middleware=[guard],
        exception_handlers={404: refused, 405: refused, ServeError: refused},
        lifespan=lifespan,
    )


def server_config(app: Starlette, *, host: str = "127.0.0.1", port: int = 0, uds: str | None = None) -> uvicorn.Config:
    """Return the settings of uvicorn for the application.

    They are bounded, and uvicorn logs no requests.
    """
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        uds=uds,
        lifespan="on",
        access_log=False,
        server_header=False,
        log_config=None,
        http="h11",  # it bounds the headers of a request; httptools does not
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=30,
        h11_max_incomplete_event_size=64 << 10,
        backlog=4096,
    )


class ModelApi:
    """The API of one model."""

    def __init__(
        self,
        engine: TokenEngine,
        tokenizer: TextTokenizer,
        template: ChatTemplate,
        *,
        name: str,
        version: str,
        limits: ApiLimits,
        why_not_ready: Callable[[], str | None],
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.name = name
        self.version = version
        self.limits = limits
        self.why_not_ready = why_not_ready
        self.created = int(time.time())
        self.counts: Counter[str] = Counter()
        self.prompts = PromptMaker(
            tokenizer=tokenizer,
            template=template,
            context_tokens=engine.context_tokens,
            vocabulary=engine.vocabulary,
            most_choices=limits.choices,
        )

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/version", self.version_of_model),
            Route("/openapi.json", self.openapi),
        ]

    async def chat_completions(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        body, stream = await self._body(request, "ChatCompletionRequest")
        return await self._answer(request, body, await self.prompts.chat(body), stream, is_chat=True)

    async def completions(self, request: Request) -> ASGIApp:
        """Continue texts."""
        body, stream = await self._body(request, "CompletionRequest")
        return await self._answer(request, body, await self.prompts.completion(body), stream, is_chat=False)

    async def embeddings(self, request: Request) -> Response:
        """Return a vector for each text."""
        body, _ = await self._body(request, "EmbeddingRequest")
        salt = cache_salt(request, body)
        wanted = [dataclasses.replace(one, cache_salt=salt) for one in await self.prompts.embeddings(body)]
        vectors = await while_connected(asyncio.gather(*map(self._embedding, wanted)), request.receive)
        in_base64 = body.get("encoding_format") == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(vector) if in_base64 else list(vector)}
            for index, vector in enumerate(vectors)
        ]
        tokens = sum(len(one.prompt) for one in wanted)
        self._charge(request, tokens, 0)
        used = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": self.name, "usage": used})

    async def models(self, _: Request) -> Response:
        """List the model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Describe the model."""
        self._check_name(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, _: Request) -> Response:
        """Say that this process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Say whether the model can answer, with status 503 if it cannot."""
        why = self.why_not_ready()
        return JSONResponse({"status": "ready" if why is None else why}, 200 if why is None else 503)

    async def version_of_model(self, _: Request) -> Response:
        """Return the version of the model."""
        return JSONResponse({"model": self.name, "version": self.version})

    async def openapi(self, _: Request) -> Response:
        """Describe this API."""
        return JSONResponse(describe(self.name, self.version))

    async def metrics(self, _: Request) -> Response:
        """Return what is counted, in the text format of Prometheus."""
        load = self.engine.load()
        values = {
            "requests_running": load.running,
            "requests_waiting": load.waiting,
            "kv_used_ratio": load.kv_used,
            "queue_wait_seconds": load.queue_wait_s,
            **{f"api_{series}": value for series, value in self.counts.items()},
            **self.engine.metrics(),
        }
        return PlainTextResponse(metrics_text(values), media_type="text/plain; version=0.0.4")

    async def _body(self, request: Request, kind: str) -> tuple[Mapping[str, Any], ResumedStream | None]:
        """Return the body of a request, checked by its schema, and the stream that it resumes."""
        is_resumed = request.headers.get(HEADER) == RESUMED
        limits = self.limits
        if is_resumed:
            body_bytes = limits.body_bytes + MOST_STREAM_BYTES
            limits = dataclasses.replace(limits, body_bytes=body_bytes, depth=limits.depth + 1)
        content = await read_body(request, limits)
        body, stream = await beside_loop(len(content), checked_body, content, limits.depth, kind, is_resumed)
        self._check_name(body["model"])
        if stream is not None and not body.get("stream"):
            raise InvalidRequest("cannot continue an answer that is not a stream", param="stream")
        return body, stream

    def _check_name(self, name: str) -> None:
        if name not in (self.name, f"{self.name}@{self.version}"):
            message = f"cannot find model {name[:100]!r}: this server has '{self.name}'"
            raise ApiError(404, message, code="model_not_found", param="model")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "hpcsched",
            "version": self.version,
            "max_model_len": self.engine.context_tokens,
        }

    async def _answer(
        self,
        request: Request,
        body: Mapping[str, Any],
        wanted: Sequence[TextRequest],
        stream: ResumedStream | None,
        *,
        is_chat: bool,
    ) -> ASGIApp:
        form = AnswerForm(model=self.name, version=self.version, tokenizer=self.tokenizer, is_chat=is_chat)
        if stream is not None:
            wanted = stream.continued(wanted, self.version)
            form = dataclasses.replace(form, id=stream.id, created=stream.created)
        salt = cache_salt(request, body)
        choices = [Choice(one.salted(salt), self.tokenizer) for one in wanted]
        deltas = generated(choices, self.engine, self.limits.silence_s)
        begun_s = time.monotonic()

        def end() -> None:
            used = usage(choices)
            resent = sum(len(choice.request.generate.sent) for choice in choices)
            self._charge(request, used["prompt_tokens"], used["completion_tokens"] - resent)

        if not body.get("stream"):
            try:
                found = await while_connected(collected(deltas, choices), request.receive)
            finally:
                end()
            return Response(compact(form.whole(choices, found)), media_type="application/json")
        # An error before the first token has a status of its own; a stream that has begun has 200.
        # There is none if only the end of a stream is missing.
        first = await while_connected(anext(deltas, None), request.receive)
        self._time_first_token(time.monotonic() - begun_s)
        with_tokens = request.headers.get(HEADER) in (NEW, RESUMED)
        return SentEvents(
            form,
            choices,
            first,
            deltas,
            limits=self.limits,
            usage=stream_usage(body.get("stream_options") or {}),
            with_tokens=with_tokens,
            on_end=end,
        )

    async def _embedding(self, wanted: GenerateRequest) -> tuple[float, ...]:
        vector: tuple[float, ...] = ()
        async for event in self.engine.generate(wanted):
            vector = event.embedding or vector
        return vector

    def _charge(self, request: Request, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens of an answer, also against the limits of its key."""
        self.counts["prompt_tokens_total"] += prompt_tokens
        self.counts["completion_tokens_total"] += completion_tokens
        request.state.charge(prompt_tokens + completion_tokens)

    def _time_first_token(self, took_s: float) -> None:
        for bound_s in TTFT_BOUNDS_S:
            self.counts[f'first_event_seconds_bucket{{le="{bound_s:g}"}}'] += took_s <= bound_s
        self.counts['first_event_seconds_bucket{le="+Inf"}'] += 1
        self.counts["first_event_seconds_count"] += 1
        self.counts["first_event_seconds_sum"] += took_s  # type: ignore[assignment]


def checked_body(
    content: bytes, depth: int, kind: str, is_resumed: bool
) -> tuple[Mapping[str, Any], ResumedStream | None]:
    """Return a body that satisfies the schema of its kind, and the stream that it resumes.

    Raises:
        ServeError: it does not.
    """
    body: Mapping[str, Any] = parse_json(content, depth)
    stream = None
    if is_resumed:
        body, stream = taken_apart(body)
    check(body, REQUESTS[kind])
    return body, stream


def stream_usage(options: Mapping[str, Any]) -> StreamUsage:
    """Return where a stream with these options reports its usage."""
    if not options.get("include_usage"):
        return StreamUsage.NOWHERE
    return StreamUsage.IN_EACH_CHUNK if options.get("continuous_usage_stats") else StreamUsage.AT_END


def cache_salt(request: Request, body: Mapping[str, Any]) -> str:
    """Return what keeps the prefixes of one user apart from those of others in the cache.

    It is of the user that the gateway names, of the holder of the key, and of what the request asks for; empty without these.
    """
    parts = [request.headers.get(SALT_HEADER, ""), request.state.holder, body.get("cache_salt") or ""]
    return hashlib.sha256(compact(parts).encode()).hexdigest() if any(parts) else ""


def metrics_text(values: Mapping[str, float]) -> str:
    """Return series of the model in the text format of Prometheus.

    What is not the name of a series is left out.
    """
    families: dict[str, list[str]] = {}
    histograms = {series.partition("_bucket{le=")[0] for series in values if "_bucket{le=" in series}
    for series, value in values.items():
        if SERIES.fullmatch(series):
            name = series.partition("{")[0]
            base = re.sub("_(bucket|sum|count)$", "", name)
            families.setdefault(base if base in histograms else name, []).append(f"hpcserve_{series} {value:.10g}")
    lines = []
    for family, samples in sorted(families.items()):
        kind = "histogram" if family in histograms else "counter" if family.endswith("_total") else "gauge"
        lines += [f"# TYPE hpcserve_{family} {kind}", *samples]
    return "\n".join(lines) + "\n"


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
