"""Pass requests of OpenAI's API on to the replicas of services.

The controller decides who may ask a model; its answer counts for `MAY_S`. Every second the gateway tells the controller how
busy replicas are, and learns which there are. It reaches a replica through a step of its job, as it reaches what jobs serve in
browsers (`hpcsched.gateway.jobproxy`); one step has the connections of all users.

Rules: answers pass unbuffered, as fast as the client reads. A request whose replica fails before the first byte goes to another
one. A stream that has begun and breaks continues at another replica of the same version, or at the same one when it is back:
that gets the tokens which the client has, and sends what follows. A replica of several nodes continues by itself when it loses
one, so only the loss of a whole replica is seen here. Tokens are counted from the usage that replicas report. Replicas get a
name of each user that only this process can make, by which they keep the users' prefixes in their caches apart.

Sources: OpenAI's API reference; WHATWG HTML (server-sent events).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b, sha256
from itertools import islice
from statistics import median
from typing import Any

import h11
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from hpcsched.errors import report_fault
from hpcsched.gateway.app import SAFE_HEADERS, GatewayApp, ProblemError
from hpcsched.gateway.balancing import ReplicaChoice, ReplicaState, prompt_blocks, prompt_of
from hpcsched.gateway.jobproxy import JobExchange
from hpcsched.gateway.model_answers import NEW, RESUMED, STREAM_HEADER, AnswerMeter, SentStream
from hpcsched.gateway.streams import MOST_CONNECTIONS, JobTunnel, StreamError, TunnelConnection
from hpcsched.gateway.upstream import UpstreamError, UpstreamReply
from hpcsched.listing.text import clean
from hpcsched.model.service import MAX_USED_ROWS

log = logging.getLogger("hpcsched.gateway")

Json = dict[str, Any]

SYNC_S = 1.0
ABSENT_SYNC_S = 5.0  # without services
MAY_S = 2.0
MAX_MAY = 10_000
HOLD_S = 120.0  # a request waits so long for a ready replica
TRIES = 3
ANSWER_S = 600.0  # for the head of an answer: without a stream it is the whole answer
PROBE_S = 5.0
MAX_PROBE_BYTES = 256 << 10
CHECK_TOKENS = 32
CHECK_ANSWER_S = 120.0
MAX_ACTIVE_OF_USER = 256
TUNNELS_OF_REPLICA = 16
MAX_BREAKS = 5  # of one stream
SILENCE_S = 15.0  # then a client that waits for the rest of a stream gets a comment
RECENT = 20  # answers whose first token's time counts
RETRY = {"retry-after": "2"}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
SALT_HEADER = "x-hpcsched-cache-salt"
_SERIES = re.compile(
    rb"^hpcserve_(kv_used_ratio|queue_wait_seconds|api_completion_tokens_total) ([-+.0-9e]+)$", re.MULTILINE
)


class ModelError(Exception):
    """A request that is refused here, as an error object of OpenAI's API."""

    def __init__(self, status: int, why: str, code: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(why)
        self.status, self.code, self.headers = status, code, headers or {}


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_object(status: int, why: str, code: str = "") -> Json:
    """Return an error object of OpenAI's API."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": why, "type": kind, "param": None, "code": code or None}}


def error_answer(status: int, why: str, code: str = "", headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as an answer."""
    more = {"www-authenticate": "Bearer"} if status == 401 else {}
    body = json.dumps(error_object(status, why, code))
    return Response(body, status, {**SAFE_HEADERS, **more, **(headers or {})}, media_type="application/json")


@dataclass(slots=True)
class Replica:
    """A replica as the gateway sees it."""

    job: int
    version: str
    is_drained: bool = False
    is_ready: bool = False
    active: int = 0
    queue_wait_s: float = 0.0
    kv_used: float = 0.0
    requests: int = 0
    errors: int = 0
    error: str = ""
    tokens: float = 0.0  # generated, by its own count
    tokens_per_s: float = 0.0
    probed_s: float = 0.0
    first_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    tunnels: list[JobTunnel] = field(default_factory=list)
    probe: asyncio.Task[None] | None = None

    def failed(self, why: str) -> None:
        """Count an answer that is an error of the replica."""
        self.errors += 1
        self.error = why[:300]

    def load(self) -> Json:
        """Return what the controller is told."""
        return {
            "ready": self.is_ready,
            "active": self.active,
            "queue_wait_s": self.queue_wait_s,
            "kv_used": self.kv_used,
            "requests": self.requests,
            "errors": self.errors,
            "ttft_s": median(self.first_s) if self.first_s else 0.0,
            "tokens_per_s": self.tokens_per_s,
            "error": self.error,
        }


class ServedModel:
    """A service and its replicas."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.weights: Mapping[str, int] = {}
        self.replicas: dict[int, Replica] = {}
        self.choice = ReplicaChoice()
        self.held = 0
        self.checks: Json | None = None
        self.checked: dict[int, str] = {}  # by job: what came of the checks
        self.checking: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()

    def take(self, found: Json) -> None:
        """Take what the controller says of the service."""
        self.weights = found["weights"]
        self.checks = found.get("checks")
        there = {one["job"]: one for one in found["replicas"]}
        for job in [job for job in self.replicas if job not in there]:
            for tunnel in list(self.replicas.pop(job).tunnels):
                tunnel.end("the replica has ended")
        for job, one in there.items():
            known = self.replicas.setdefault(job, Replica(job, one["version"]))
            known.is_drained = one["drained"]

    def tell(self) -> None:
        """Wake the requests that wait for a ready replica."""
        self.changed.set()
        self.changed = asyncio.Event()

    def states(self) -> list[ReplicaState]:
        """Return what the choice needs."""
        return [
            ReplicaState(
                job=one.job, version=one.version, is_ready=one.is_ready, is_drained=one.is_drained, active=one.active
            )
            for one in self.replicas.values()
        ]

    def load(self) -> Json:
        """Return what the controller is told."""
        loads = {str(one.job): one.load() for one in self.replicas.values()}
        checked = {str(job): text for job, text in self.checked.items() if job in self.replicas}
        return {"replicas": loads, "held": self.held, "checked": checked}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Who asks, and the account that pays."""

    user: str
    account: str


@dataclass(slots=True)
class ModelRequest:
    """A request to a model, as it was read."""

    path: str
    body: Json
    asker: Asker
    version: str
    is_stream: bool
    shows_usage: bool
    prompt: tuple[bytes, ...]
    conversation: bytes
    salt: str
    began_s: float
    resumed: Json | None = None  # the stream as far as the client has it

    def sent(self, name: str) -> bytes:
        """Return the body that the replica gets: it has the bare name, and is asked for the usage."""
        body = self.body | {"model": name}
        if self.is_stream:
            options = self.body.get("stream_options")
            options = dict(options) if isinstance(options, dict) else {}
            if not self.shows_usage:
                options.pop("continuous_usage_stats", None)  # has no effect without the usage
            body["stream_options"] = options | {"include_usage": True}
        return json.dumps(body if self.resumed is None else {"request": body, "stream": self.resumed}).encode()

    def headers(self) -> list[tuple[str, str]]:
        """Return the headers that tell the replica what a client cannot."""
        salt = [(SALT_HEADER, self.salt)]
        return [*salt, (STREAM_HEADER, NEW if self.resumed is None else RESUMED)] if self.is_stream else salt


@dataclass(slots=True)
class BegunAnswer:
    """The answer of a replica, from its head on; the replica counts it until it is closed."""

    replica: Replica
    connection: TunnelConnection
    exchange: JobExchange
    head: h11.Response
    is_closed: bool = False

    def close(self) -> None:
        """End the connection."""
        if not self.is_closed:
            self.is_closed = True
            self.connection.close()
            self.replica.active -= 1


class ModelGateway:
    """The routes of OpenAI's API, and what is known of the services."""

    def __init__(self, app: GatewayApp, steps_socket: str, hold_s: float = HOLD_S) -> None:
        self._app, self._socket, self._hold_s = app, steps_socket, hold_s
        self._models: dict[str, ServedModel] = {}
        self._may: OrderedDict[bytes, tuple[Asker, float]] = OrderedDict()
        self._active: Counter[str] = Counter()
        self._salt_key = secrets.token_bytes(32)
        self._used: Counter[tuple[str, str, str, str]] = Counter()  # by service, user, account and kind
        self._wake = asyncio.Event()

    def routes(self) -> list[Route]:
        """Return the routes for the ASGI application."""
        return [
            *(Route(path, self._guarded(self.ask), methods=["POST"]) for path in PATHS),
            Route("/v1/models", self._guarded(self.models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self.model), methods=["GET"]),
        ]

    def _guarded(self, handler: Callable[[Request], Any]) -> Any:
        async def handle(request: Request) -> Response:
            try:
                answer: Response = await handler(request)
                return answer
            except ModelError as error:
                return error_answer(error.status, str(error), error.code, error.headers)
            except ProblemError as error:
                return error_answer(error.status, str(error), headers=error.headers)
            except UpstreamError as error:
                return error_answer(error.status, str(error), headers=RETRY)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:
                wrong = report_fault(error, f"{request.method} {request.url.path[:200]!r}", "the gateway's log")
                return error_answer(500, str(wrong))

        return handle

    # ----- models

    async def models(self, request: Request) -> Response:
        """List the models that the user may ask."""
        found = await self._usable(request)
        return _json({"object": "list", "data": [_model(one) for one in found]})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        name = request.path_params["name"]
        for one in await self._usable(request):
            if one["name"] == name:
                return _json(_model(one))
        raise ModelError(
            404, f"cannot find model {name[:80]!r}; GET /v1/models lists those that you may use", "model_not_found"
        )

    async def _usable(self, request: Request) -> list[Json]:
        reply = await self._app.ask(request, "POST", "/v1/services/use", self._app.admit(request), b"{}")
        found: list[Json] = _read(reply)["services"]
        return found

    # ----- who may ask

    async def _asker(self, request: Request, credential: Mapping[str, str], name: str) -> Asker:
        """Return who asks, if it may. Raises ModelError, ProblemError, UpstreamError."""
        key = _digest(name, *credential.values())
        known = self._may.get(key)
        now_s = time.monotonic()
        if known is not None and known[1] > now_s:
            return known[0]
        body = json.dumps({"name": name}).encode()
        reply = await self._app.ask(request, "POST", "/v1/services/use", credential, body)
        found = _read(reply)
        asker = Asker(user=found["user"], account=found["account"])
        self._may[key] = asker, now_s + MAY_S
        self._may.move_to_end(key)
        if len(self._may) > MAX_MAY:
            self._may.popitem(last=False)
        return asker

    def _enter(self, user: str) -> None:
        """Count a request of a user until `_leave`. Raises ModelError."""
        if self._active[user] >= MAX_ACTIVE_OF_USER:
            why = f"cannot answer now: {MAX_ACTIVE_OF_USER} of your requests are being answered"
            raise ModelError(429, why, "rate_limit_exceeded", RETRY)
        self._active[user] += 1

    def _leave(self, user: str) -> None:
        self._active[user] -= 1
        if not self._active[user]:
            del self._active[user]

    # ----- requests

    async def ask(self, request: Request) -> Response:
        """Pass a request on, and return the answer as it comes."""
        began_s = time.monotonic()
        credential = self._app.admit(request)  # before the body is read
        try:
            body = json.loads(await self._app.json_text(request))
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict) or not isinstance(body.get("model"), str):
            raise ModelError(400, "cannot read the request: the body must be a JSON object with a model")
        name, _, version = body["model"].partition("@")
        asker = await self._asker(request, credential, name)
        model = self._models.get(name)
        if model is None:  # it is new
            model = self._models[name] = ServedModel(name)
            self._wake.set()
        text, conversation = prompt_of(body)
        salt = blake2b(asker.user.encode(), key=self._salt_key, digest_size=16).hexdigest()
        options = body.get("stream_options")
        wanted = ModelRequest(
            path=request.url.path,
            body=body,
            asker=asker,
            version=version,
            is_stream=body.get("stream") is True,
            shows_usage=isinstance(options, dict) and options.get("include_usage") is True,
            prompt=prompt_blocks(text, salt),
            conversation=_digest(asker.user, conversation),  # it is kept, and may have megabytes
            salt=salt,
            began_s=began_s,
        )
        self._enter(asker.user)
        try:
            return self._passed(request, model, wanted, await self._answer(model, wanted, set()))
        except BaseException:
            self._leave(asker.user)
            raise

    async def _answer(self, model: ServedModel, wanted: ModelRequest, failed: set[int]) -> BegunAnswer:
        """Try replicas until one answers. Raises ModelError."""
        tries = TRIES + len(failed)
        while True:
            replica = await self._ready(model, wanted, failed)
            replica.active += 1
            try:
                connection, exchange, head = await self._begun(model, replica, wanted)
            except (StreamError, h11.ProtocolError, UpstreamError, TimeoutError, ModelError) as error:
                replica.active -= 1
                replica.failed(str(error) or "it does not answer")
                replica.is_ready = False
                failed.add(replica.job)
                if len(failed) >= tries:
                    raise ModelError(
                        502, f"cannot answer: {len(failed)} replicas failed: {error}", headers=RETRY
                    ) from None
                continue
            except BaseException:
                replica.active -= 1
                raise
            begun = BegunAnswer(replica, connection, exchange, head)
            if head.status_code in (502, 503) and len(failed) + 1 < tries and len(model.replicas) > len(failed) + 1:
                begun.close()
                failed.add(replica.job)
                continue
            replica.requests += 1
            if head.status_code >= 500:
                replica.failed(f"status {head.status_code}")
            return begun

    async def _ready(self, model: ServedModel, wanted: ModelRequest, failed: set[int]) -> Replica:
        """Return the replica for a request; wait for one if none is ready. Raises ModelError."""
        until_s = wanted.began_s + self._hold_s
        while True:
            if self._models.get(model.name) is not model:
                raise ModelError(404, f"cannot find model {model.name!r}: it was stopped", "model_not_found")
            job = model.choice.choose(
                model.states(),
                model.weights,
                wanted.prompt,
                wanted.conversation,
                version=wanted.version,
                without=failed,
            )
            if job is not None:
                return model.replicas[job]
            if wanted.version and model.weights and wanted.version not in model.weights:
                raise ModelError(
                    404, f"cannot find version {wanted.version[:40]!r} of model {model.name!r}", "model_not_found"
                )
            changed = model.changed
            model.held += 1
            self._wake.set()
            try:
                async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                    await changed.wait()
            except TimeoutError:
                raise ModelError(
                    503,
                    f"cannot answer: no replica of model {model.name!r} was ready within {self._hold_s:g} s; try again later",
                    headers={"retry-after": "10"},
                ) from None
            finally:
                model.held -= 1
            failed.clear()

    async def _begun(
        self, model: ServedModel, replica: Replica, wanted: ModelRequest
    ) -> tuple[TunnelConnection, JobExchange, Any]:
        """Send a request to a replica, and return the head of its answer."""
        body = wanted.sent(model.name)
        connection = (await self._tunnel(model, replica)).connect()
        try:
            exchange = JobExchange(connection)
            await exchange.ask(_head(b"POST", wanted.path, len(body), wanted.headers()), _parts(body))
            async with asyncio.timeout(ANSWER_S):
                return connection, exchange, await exchange.answer()
        except BaseException:
            connection.close()
            raise

    def _passed(self, request: Request, model: ServedModel, wanted: ModelRequest, begun: BegunAnswer) -> Response:
        """Return the answer of a replica, as it comes."""
        replica, head = begun.replica, begun.head
        of_head = {name.lower(): value for name, value in head.headers}
        meter = AnswerMeter(
            is_stream=wanted.is_stream and head.status_code == 200,
            shows_usage=wanted.shows_usage,
            name=of_head.get(STREAM_HEADER.encode(), b"").decode("latin-1"),
        )

        async def body() -> AsyncIterator[bytes]:
            try:
                yield b""  # so that the head is sent before the first part
                async with aclosing(self._parts(model, wanted, begun, meter)) as parts:
                    async for part in parts:
                        yield part
            except (StreamError, h11.ProtocolError) as error:
                if not meter.is_stream:
                    request.scope["state"]["connection"].drop()  # so that the client knows that it has not all
                    await asyncio.sleep(0)
                else:
                    why = json.dumps(error_object(502, f"the replica has failed: {error}"))
                    yield b"data: " + why.encode() + b"\n\n"
            finally:
                begun.close()
                self._charge(model.name, wanted.asker, meter)
                self._leave(wanted.asker.user)

        answer = StreamingResponse(body(), head.status_code)
        kept = [b"content-type", b"retry-after", b"x-request-id", b"openai-processing-ms"]
        kept += [] if meter.is_stream else [b"content-length"]  # the body of a stream is changed
        named = [(name, of_head[name]) for name in kept if name in of_head]
        safe = [(name.encode(), value.encode()) for name, value in SAFE_HEADERS.items()]
        answer.raw_headers = [*named, *safe, (b"x-hpcsched-replica", f"{replica.job}@{replica.version}".encode())]
        return answer

    async def _parts(
        self, model: ServedModel, wanted: ModelRequest, begun: BegunAnswer, meter: AnswerMeter
    ) -> AsyncGenerator[bytes]:
        """Yield what the client gets; a stream that breaks is continued.

        Raises StreamError, h11.ProtocolError.
        """
        is_first = begun.head.status_code == 200
        for breaks in range(1, MAX_BREAKS + 2):
            try:
                if meter.is_stream and begun.head.status_code != 200:
                    raise StreamError(f"status {begun.head.status_code}")
                async for part in begun.exchange.body():
                    if is_first:
                        begun.replica.first_s.append(time.monotonic() - wanted.began_s)
                    is_first = False
                    if kept := meter.feed(part):
                        yield kept
                    if meter.failure:
                        raise StreamError(meter.failure)
                if meter.stream is not None and not meter.is_done:
                    raise StreamError("it has ended before the end of the stream")
                if kept := meter.end():
                    yield kept
                return
            except (StreamError, h11.ProtocolError) as error:
                begun.close()
                begun.replica.failed(str(error))
                if not meter.failure:
                    begun.replica.is_ready = False  # until it is asked again
                if meter.is_done:
                    return
                if meter.stream is None or breaks > MAX_BREAKS:
                    raise
                why = str(error)
            if rest := meter.broken():
                yield rest
                return
            async with aclosing(self._continued(model, wanted, begun, meter.stream, why)) as comments:
                async for comment in comments:
                    yield comment

    async def _continued(
        self, model: ServedModel, wanted: ModelRequest, begun: BegunAnswer, stream: SentStream, why: str
    ) -> AsyncGenerator[bytes]:
        """Let `begun` be the rest of a stream; yield comments until a replica begins it.

        Raises StreamError.
        """
        lost = begun.replica
        others = [one for one in model.replicas.values() if one.version == lost.version and one is not lost]
        failed = {lost.job} if any(one.is_ready and not one.is_drained for one in others) else set()
        rest = replace(wanted, version=lost.version, resumed=stream.resumed(), began_s=time.monotonic())

        async def begin() -> None:
            found = await self._answer(model, rest, failed)
            begun.replica, begun.connection, begun.exchange = found.replica, found.connection, found.exchange
            begun.head, begun.is_closed = found.head, False

        beginning = asyncio.create_task(begin())
        try:
            while not (await asyncio.wait((beginning,), timeout=SILENCE_S))[0]:
                yield b": waiting\n\n"
            beginning.result()
        except (ModelError, UpstreamError) as error:
            raise StreamError(f"{why}; {error}") from None
        finally:
            beginning.cancel()
        log.info("a stream of job %d continues at job %d: %s", lost.job, begun.replica.job, clean(why[:300]))
        if 400 <= begun.head.status_code < 500:
            message = _message_of(await anext(begun.exchange.body(), b""))
            raise StreamError(f"{why}; job {begun.replica.job} does not continue: {message}")

    def _charge(self, name: str, asker: Asker, meter: AnswerMeter) -> None:
        whose = name, asker.user, asker.account
        self._used[(*whose, "requests")] += 1
        self._used[(*whose, "prompt_tokens")] += meter.prompt_tokens
        self._used[(*whose, "completion_tokens")] += meter.completion_tokens

    # ----- connections to replicas

    async def _tunnel(self, model: ServedModel, replica: Replica) -> JobTunnel:
        """Return a tunnel that has room. Raises StreamError, UpstreamError, ModelError."""
        for tunnel in replica.tunnels:
            if tunnel.why_over is None and tunnel.connections < MOST_CONNECTIONS:
                await tunnel.opened()
                return tunnel
        if len(replica.tunnels) >= TUNNELS_OF_REPLICA:
            raise StreamError(f"{TUNNELS_OF_REPLICA * MOST_CONNECTIONS} requests are at this replica")

        def forget() -> None:
            if made in replica.tunnels:
                replica.tunnels.remove(made)

        made = JobTunnel(lambda: None, forget)
        replica.tunnels.append(made)
        try:
            body = json.dumps({"name": model.name, "job": replica.job}).encode()
            reply = await self._app.upstream.ask("POST", "/v1/services/reach", _OURS, body)
            await made.open(self._socket, str(_read(reply)["key"]))
        except BaseException as error:
            made.end(str(error) or "it could not be opened")
            raise
        await made.opened()
        return made

    # ----- what is known of the services

    async def watch(self) -> None:
        """Tell the controller about replicas, learn which there are, and probe them."""
        while True:
            try:
                await self._sync()
            except UpstreamError as error:
                log.debug("%s", error)
            except ModelError as error:
                log.warning("cannot learn of services: %s", error)
            except Exception as error:
                report_fault(error, "watch services", "the gateway's log")
            with suppress(TimeoutError):
                async with asyncio.timeout(SYNC_S if self._models else ABSENT_SYNC_S):
                    await self._wake.wait()
                    await asyncio.sleep(SYNC_S / 5)
            self._wake.clear()

    async def _sync(self) -> None:
        used = Counter(dict(islice(self._used.items(), MAX_USED_ROWS)))
        rows = [[*whose, count] for whose, count in used.items()]
        loads = {name: model.load() for name, model in self._models.items()}
        body = json.dumps({"services": loads, "used": rows}).encode()
        reply = await self._app.upstream.ask("POST", "/v1/services/sync", _OURS, body)
        found = _read(reply)["services"]
        self._used -= used
        there = {service["name"]: service for service in found}
        for name, service in there.items():
            self._models.setdefault(name, ServedModel(name)).take(service)
        for name in loads.keys() - there.keys():  # not those that came meanwhile
            gone = self._models.pop(name)
            gone.take({"weights": {}, "replicas": []})
            gone.tell()
        for model in self._models.values():
            for replica in model.replicas.values():
                if replica.probe is None or replica.probe.done():
                    replica.probe = asyncio.get_running_loop().create_task(self._probe(model, replica))
            self._see_to_checks(model)

    def _see_to_checks(self, model: ServedModel) -> None:
        """Begin the checks of a new version, once for each of its replicas."""
        if model.checks is None or (model.checking is not None and not model.checking.done()):
            return
        version, requests = model.checks["version"], model.checks["requests"]
        for replica in model.replicas.values():
            if replica.version == version and replica.is_ready and replica.job not in model.checked:
                model.checking = asyncio.get_running_loop().create_task(self._check(model, replica, requests))
                return

    async def _check(self, model: ServedModel, replica: Replica, requests: list[Json]) -> None:
        """Send the prompts of a rollout to a replica of the new version, and judge its answers."""
        try:
            for number, wanted in enumerate(requests, 1):
                body = {"max_tokens": CHECK_TOKENS, **wanted, "model": model.name, "stream": False}
                expected = body.pop("expect", None)
                status, answer = await self._got(model, replica, _path_of(wanted), json.dumps(body).encode())
                if why := why_unexpected(status, answer, expected):
                    model.checked[replica.job] = f"prompt {number}: {why}"
                    return
            model.checked[replica.job] = "ok"
        except (StreamError, h11.ProtocolError, UpstreamError, ModelError, TimeoutError) as error:
            model.checked[replica.job] = f"prompt {number}: {str(error)[:300] or 'no answer in time'}"
        except Exception as error:
            wrong = report_fault(error, f"check the replica of job {replica.job}", "the gateway's log")
            model.checked[replica.job] = str(wrong)
        finally:
            self._wake.set()

    async def _probe(self, model: ServedModel, replica: Replica) -> None:
        """Ask a replica whether it is ready, and how busy it is."""
        is_ready, why = False, ""
        try:
            async with asyncio.timeout(PROBE_S + 30.0 * (not replica.tunnels)):
                status, _ = await self._got(model, replica, "/ready")
                if status == 200:
                    note_metrics(replica, (await self._got(model, replica, "/metrics"))[1], time.monotonic())
                is_ready = status == 200
        except (StreamError, h11.ProtocolError, UpstreamError, ModelError, TimeoutError) as error:
            why = str(error)[:300] or "it does not answer"
        except Exception as error:
            report_fault(error, f"ask the replica of job {replica.job}", "the gateway's log")
        was_ready, replica.is_ready = replica.is_ready, is_ready  # a request may have failed meanwhile
        if was_ready and why:
            replica.error = why
        if is_ready and not was_ready:
            model.tell()

    async def _got(self, model: ServedModel, replica: Replica, path: str, sent: bytes = b"") -> tuple[int, bytes]:
        """Return status and body of a page of a replica, or of its answer to what is `sent`."""
        connection = (await self._tunnel(model, replica)).connect()
        try:
            exchange = JobExchange(connection)
            head = _head(b"POST" if sent else b"GET", path, len(sent))
            await exchange.ask(head, _parts(sent) if sent else None)
            async with asyncio.timeout(CHECK_ANSWER_S):
                answer = await exchange.answer()
            body = b""
            async for part in exchange.body():
                body += part
                if len(body) > MAX_PROBE_BYTES:
                    raise StreamError("its answer is too long")
            return answer.status_code, body
        finally:
            connection.close()


def note_metrics(replica: Replica, page: bytes, now_s: float) -> None:
    """Take a replica's load from its page of metrics; what it does not say stays 0."""
    found = {}
    for name, value in _SERIES.findall(page):
        with suppress(ValueError):
            found[name] = float(value)
    replica.kv_used = min(max(found.get(b"kv_used_ratio", 0.0), 0.0), 1.0)
    replica.queue_wait_s = min(max(found.get(b"queue_wait_seconds", 0.0), 0.0), 1e6)
    tokens = min(max(found.get(b"api_completion_tokens_total", 0.0), 0.0), 1e15)
    if replica.probed_s and now_s > replica.probed_s:
        replica.tokens_per_s = max(0.0, tokens - replica.tokens) / (now_s - replica.probed_s)
    replica.tokens, replica.probed_s = tokens, now_s


def _path_of(check: Json) -> str:
    return PATHS[0] if "messages" in check else PATHS[1]


def why_unexpected(status: int, body: bytes, expected: object) -> str:
    """Return why an answer to a check is not good; its text must contain `expected`."""
    if status != 200:
        return f"status {status}: {_message_of(body)}"
    try:
        choice = json.loads(body)["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return "the answer has no text"
    if not isinstance(text, str) or not text:
        return "the answer is empty"
    if isinstance(expected, str) and expected not in text:
        return f"the answer {text[:80]!r} does not contain {expected[:80]!r}"
    return ""


def _message_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "no error object"


_OURS = {"x-hpcsched-gateway": "gateway"}


def _head(method: bytes, path: str, size: int, more: Sequence[tuple[str, str]] = ()) -> h11.Request:
    headers = [("host", "localhost"), ("connection", "close"), *more]
    if method == b"POST":
        headers += [("content-type", "application/json"), ("content-length", str(size))]
    return h11.Request(method=method, target=path, headers=headers)


async def _parts(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _digest(*texts: str) -> bytes:
    return sha256("\n".join(texts).encode("utf-8", "replace")).digest()


def _read(reply: UpstreamReply) -> Json:
    """Return an answer of the controller. Raises ModelError."""
    status = reply.status
    try:
        found: Json = json.loads(reply.body)
        if status == 200:
            return found
        why = str(found["error"])
    except (ValueError, KeyError, TypeError):
        why = "cannot read the controller's answer"
    code = {404: "model_not_found", 401: "invalid_api_key"}.get(status, "")
    wait = {"retry-after": reply.headers.get("retry-after", RETRY["retry-after"])}
    raise ModelError(status if status >= 400 else 502, why, code, wait if status in (429, 503) else None)


def _model(one: Json) -> Json:
    return {"id": one["name"], "object": "model", "created": int(one["made_at_s"]), "owned_by": one["user"]}


def _json(values: Json) -> Response:
    return Response(json.dumps(values), headers=SAFE_HEADERS, media_type="application/json")
