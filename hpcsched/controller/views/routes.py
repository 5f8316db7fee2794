"""Serve the HTTP routes, version 1, over the unix socket: JSON in, JSON out.

The kernel reports the user of a connection. `ControllerBackend` answers. This module knows HTTP,
the shapes of requests, and the form of errors: 400, 403, 404 or 503 with ``{"error": text, "kind":
class}``.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from time import perf_counter as monotonic_s
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcnode.wire import gate
from hpcsched.api import web
from hpcsched.api.connection_limits import AnswerPauses, AnswerSlots, SocketLimits, retry_after
from hpcsched.api.identity import identity_of, peer_uid
from hpcsched.api.views import VERSION, json_text
from hpcsched.api.web import Bodies
from hpcsched.auth.authorize import Identity, RepeatableRequest
from hpcsched.auth.tokens import Scope, actions_of, why_out_of_scope
from hpcsched.commands.call import OwnProcessError
from hpcsched.controller.views.queue import Reading
from hpcsched.errors import (
    ConflictError,
    HpcschedError,
    NotFoundError,
    PermissionDeniedError,
    ProtocolError,
    RateLimitError,
    RequestError,
    UnauthenticatedError,
    UnavailableError,
    report_fault,
)
from hpcsched.lifecycle.events import EventSubject
from hpcsched.metrics.exposition import OPEN_METRICS, content_type_for
from hpcsched.model.codec import spec_from_json
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.spec import JobSpec
from hpcsched.model.units import number, whole_number

if TYPE_CHECKING:  # the queue is answered before these modules are loaded
    from hpcsched.controller.views.backend import ControllerBackend, LogPart

log = logging.getLogger("hpcsched.api")

MAX_REQUEST_ID = 200
KEY_HEADER = "idempotency-key"
# Their answers have secrets, which are not stored.
UNREPEATABLE = frozenset({"/v1/tokens/create", "/v1/sessions/link", "/v1/sessions/open", "/v1/sessions/close"})
LONG_AT_ONCE, ALL_LONG_AT_ONCE = 1, 2  # concurrent slow answers, per account and in total
FEW_JOBS = 20  # per request: it waits for no other request
MAX_JOBS = 250  # per request: other requests wait until all of them are checked and on disk
# No job's events record who changed these, so the log does.
ADMINS_PATHS = (
    "/v1/nodes/",
    "/v1/strays/",
    "/v1/partitions/",
    "/v1/reservations/",
    "/v1/silences/",
    "/v1/alerts/",
    "/v1/usage/",
    "/v1/reconfigure",
    "/v1/backup",
)
PAGE = frozenset({"limit", "after"})  # parameters of a page
MAX_PAGE = 10_000
LOG_CHUNK_BYTES = 1 << 20
LARGE_BODY_BYTES = 1 << 20
LOG_WAIT_S = 20.0
EVENTS_PAUSE_S = 0.25

Json = dict[str, Any]
Observe = Callable[[str, int, float], None]


STATUS: tuple[tuple[type[HpcschedError], int], ...] = (
    (ConflictError, 409),
    (UnauthenticatedError, 401),
    (PermissionDeniedError, 403),
    (RateLimitError, 429),
    (NotFoundError, 404),
    (RequestError, 400),
    (ProtocolError, 400),
    (UnavailableError, 503),
)


def make_server(
    reader: Reading,
    coming: asyncio.Future[ControllerBackend],
    socket_limits: SocketLimits | None = None,
    identify: web.Identify | None = None,
    observe: Observe = lambda _route, _status, _took_s: None,
) -> web.Server:
    """Return the server: `reader` answers for the queue, the backend for everything else.

    `coming` yields the backend when it is ready. `identify`: see `hpcsched.api.web.Server`. `observe`
    gets the route, the status and the time of each answer.
    """
    routes = _Routes(reader, coming)
    found = [*_gets(routes), *_posts(routes)]
    routed = web.Router(
        web.Route(route.method, route.path, timed(routes.with_errors(route.handler), partial(observe, route.path)))
        for route in found
    )
    routes.router = routed
    return web.Server(routed, _refusal, socket_limits, identify)


def timed(handler: web.Handler, answered: Callable[[int, float], None]) -> web.Handler:
    """Return `handler`, with a call of `answered` for each answer."""

    async def handle(request: web.Request) -> web.Response:
        began_s = monotonic_s()
        response = await handler(request)
        answered(response.status, monotonic_s() - began_s)
        return response

    return handle


def _gets(routes: _Routes) -> list[web.Route]:
    """Return the routes that look at the cluster."""
    by = routes.by
    # fmt: off
    return [
        web.get("/v1/ping", by(lambda call: call.backend.ping(call.identity))),
        web.get("/v1/me", by(lambda call: call.backend.me(call.identity))),
        web.get("/v1/jobs", routes.in_turn(routes.jobs, early=True)),
        web.get("/v1/queue", routes.in_turn(routes.queue, early=True)),
        web.get("/v1/job/{name}", routes.job),
        web.get("/v1/job/{name}/story", by(lambda call: call.backend.story(call.identity, call.name))),
        web.get("/v1/job/{name}/why", routes.in_turn(by(lambda call: call.backend.why(call.identity, call.name)))),
        web.get("/v1/job/{name}/slow", routes.in_turn(by(lambda call: call.backend.slow(call.identity, call.name)))),
        web.get("/v1/slow", routes.in_turn(by(lambda call: call.backend.slow_queue(call.identity)))),
        web.get("/v1/nodes", by(lambda call: call.backend.nodes(call.identity, call.query), "nodes")),
        web.get("/v1/benches",
                routes.in_turn(by(lambda call: call.backend.benches(call.identity), "benches"))),
        web.get("/v1/links", routes.in_turn(by(lambda call: call.backend.links(call.identity), "links"))),
        web.get("/v1/strays", by(lambda call: call.backend.strays(call.identity), "strays")),
        web.get("/v1/partitions", by(lambda call: call.backend.partitions(call.identity), "partitions")),
        web.get("/v1/priorities",
                routes.in_turn(by(lambda call: call.backend.priorities(call.identity, call.query), "jobs"))),
        web.get("/v1/snapshot", routes.in_turn(by(lambda call: call.backend.snapshot(call.identity)))),
        web.get("/v1/shares", by(lambda call: call.backend.shares(call.identity), "shares")),
        web.get("/v1/licenses", by(lambda call: call.backend.licenses(), "licenses")),
        web.get("/v1/crontab", by(lambda call: call.backend.crontab(call.identity, call.query.get("user", "")))),
        web.get("/v1/triggers", by(lambda call: call.backend.triggers(call.identity), "triggers")),
        web.get("/v1/services/usage", routes.in_turn(
            by(lambda call: call.backend.service_usage(call.identity, call.query.get("days", "")), "usage"))),
        web.get("/v1/services", by(lambda call: call.backend.services(call.identity), "services")),
        web.get("/v1/alerts", by(lambda call: call.backend.alerts(call.identity), "alerts")),
        web.get("/v1/reservations", by(lambda call: call.backend.reservations(call.identity), "reservations")),
        web.get("/v1/config", by(lambda call: call.backend.config(call.identity))),
        web.get("/v1/tariff", routes.in_turn(by(lambda call: call.backend.tariff(call.query)))),
        web.get("/v1/history", routes.in_turn(routes.history)),
        web.get("/v1/outages",
                routes.in_turn(by(lambda call: call.backend.outages(call.identity, call.query), "outages"))),
        web.get("/v1/metrics/history", routes.in_turn(routes.metrics_history)),
        web.get("/v1/metrics/series", routes.in_turn(routes.metrics_series)),
        web.get("/v1/audit", routes.in_turn(by(lambda call: call.backend.audit(call.identity, call.query)))),
        web.get("/v1/audit/heads", routes.in_turn(by(lambda call: call.backend.audit_heads(call.identity)))),
        web.get("/v1/log", routes.log),
        web.get("/v1/files", by(lambda call: call.backend.files(call.identity, call.query))),
        web.get("/v1/file", routes.file),
        web.get("/v1/events", routes.events),
        web.get("/metrics", routes.in_turn(routes.metrics)),
        web.get("/metrics/{name:jobs|nodes|partitions|scheduler|jobs-users-accts}", routes.in_turn(routes.metrics)),
        web.get("/v1/tokens", by(lambda call: call.backend.tokens(call.identity, call.query.get("user", "")), "tokens")),
    ]
    # fmt: on


def _posts(routes: _Routes) -> list[web.Route]:
    """Return the routes that submit, try or change something."""
    by = routes.by
    # fmt: off
    return [
        web.post("/v1/submit", routes.submit),
        web.post("/v1/command", routes.command),
        web.post("/v1/test",
                 routes.in_turn(by(lambda call: call.backend.test(call.identity, spec_from_json(call.body.get("job")))))),
        web.post("/v1/strays/{name:adopt|end}", by(lambda call: call.backend.act_on_strays(call.identity, call.name, call.body))),
        web.post("/v1/nodes/bench", by(lambda call: call.backend.bench(call.identity, call.body))),
        web.post("/v1/nodes/sync", by(lambda call: call.backend.note_sync(call.identity, call.body))),
        web.post("/v1/nodes/{name:drain|resume|fence|remove|power-down|power-up}",
                 by(lambda call: call.backend.act_on_nodes(call.identity, call.name, call.body))),
        web.post("/v1/partitions/update", by(lambda call: call.backend.update_partition(call.identity, call.body))),
        web.post("/v1/usage/reset", by(lambda call: call.backend.reset_usage(call.identity, call.body))),
        web.post("/v1/crontab", by(lambda call: call.backend.install_crontab(call.identity, call.body))),
        web.post("/v1/triggers/{name:set|clear}", routes.act_on_triggers),
        web.post("/v1/services/{name:start|scale|roll|stop}", routes.act_on_services),
        web.post("/v1/services/use", by(lambda call: call.backend.use_service(call.identity, call.body))),
        web.post("/v1/services/{name:sync|reach}", routes.serve_gateway),
        web.post("/v1/tokens/{name:create|revoke|rotate-key}", routes.act_on_tokens),
        web.post("/v1/sessions/{name:link|open|close}", routes.act_on_sessions),
        web.post("/v1/logins/{name:begin|finish}", routes.act_on_logins),
        web.post("/v1/reach", routes.reach),
        web.post("/v1/silences/{name:create|end}",
                 by(lambda call: call.backend.act_on_silences(call.identity, call.name, call.body))),
        web.post("/v1/alerts/test", by(lambda call: call.backend.test_receiver(call.identity, call.body))),
        web.post("/v1/reservations/{name:create|update|delete}",
                 by(lambda call: call.backend.act_on_reservation(call.identity, call.name, call.body))),
        web.post("/v1/reconfigure",
                 by(lambda call: call.backend.reconfigure(
                     call.identity, call.body.get("same_machine") or [], call.body.get("testing") or []))),
        web.post("/v1/backup", by(lambda call: call.backend.backup(call.identity, call.body.get("path")))),
        web.post("/v1/{name:cancel|hold|release|requeue|suspend|resume|update}",
                 by(lambda call: call.backend.act(call.identity, call.name, call.body))),
    ]
    # fmt: on


class _Call(NamedTuple):
    """A request for the backend. `name`: the verb or the job in its path. `body`: of a POST."""

    backend: ControllerBackend
    identity: Identity
    name: str
    query: dict[str, str]
    body: Json


class _Routes:
    router: web.Router

    def __init__(self, reader: Reading, coming: asyncio.Future[ControllerBackend]) -> None:
        self._reader = reader
        self._coming = coming
        self._turns = AnswerSlots(LONG_AT_ONCE, ALL_LONG_AT_ONCE)
        self._bodies = Bodies(_parsed, MAX_JOBS)
        self._many = AnswerSlots(1, 1)  # one large submission at a time, over all users

    async def _body(self, request: web.Request) -> Json:
        body: Json = await self._bodies.read(_uid_of(request), request)
        return body

    async def _backend(self) -> ControllerBackend:
        # A client that disconnects cancels its own request only.
        return await asyncio.shield(self._coming)

    def by(self, work: Callable[[_Call], Json | Awaitable[Json]], items: str = "") -> web.Handler:
        """Return the handler that answers with the result of `work`.

        `items`: the name of a list in it of which a client may ask for pages.
        """

        async def handle(request: web.Request) -> web.Response:
            body = await self._body(request) if request.method == "POST" else {}
            name = request.match_info.get("name", "")
            query = {key: request.query[key] for key in request.query if not items or key not in PAGE}
            call = _Call(await self._backend(), self._identity(request), name, query, body)
            if KEY_HEADER in request.headers and request.method == "POST" and request.path != "/v1/test":
                return answer(await self._once(request, call, work))
            result = work(call)
            found = result if isinstance(result, dict) else await result
            return answer(found if not items else page_of(found, items, request.query))

        return handle

    async def _once(self, request: web.Request, call: _Call, work: Callable[[_Call], Json | Awaitable[Json]]) -> Json:
        """Return the answer to a request with an idempotency key. Raises RequestError."""
        if request.path in UNREPEATABLE:
            raise RequestError(
                f"cannot {request.path[4:]} with an idempotency key: its answer has a secret, and is not kept"
            )
        content = sha256(f"{request.path}\n".encode() + request.body).hexdigest()
        asked = RepeatableRequest(_key_of(request), content)

        async def do(identity: Identity) -> Json:
            result = work(call._replace(identity=identity))
            return result if isinstance(result, dict) else await result

        return await call.backend.once(replace(call.identity, request=asked), do)

    def in_turn(self, handler: web.Handler, *, early: bool = False) -> web.Handler:
        """Return `handler`, limited so that each account waits for its own slow answers.

        `early`: the handler needs no backend. Other handlers wait for the backend before they take
        a turn. Otherwise they would block the queue's answers.
        """

        async def handle(request: web.Request) -> web.Response:
            if not early:
                await self._backend()
            async with self._turns.turn(_uid_of(request)):
                return await handler(request)

        return handle

    def _identity(self, request: web.Request) -> Identity:
        if request.scopes is not None:
            identity = identity_of(_uid_of(request), self._reader.access())
            whole = identity if Scope.ADMIN in request.scopes else identity.as_user()
            return replace(whole, scope=actions_of(request.scopes), source=request.source)
        if request.uid is not None:
            return replace(identity_of(request.uid, self._reader.access()).as_user(), source="job")
        return identity_of(_uid_of(request), self._reader.access())

    def with_errors(self, handler: web.Handler) -> web.Handler:
        """Return `handler` with its errors turned into error responses."""

        async def handle(request: web.Request) -> web.Response:
            try:
                is_admins = request.method == "POST" and request.path.startswith(ADMINS_PATHS)
                # The client may have disconnected afterwards.
                uid = _uid_of(request) if is_admins else None
                if why := why_out_of_scope(request.scopes, request.method, request.path):
                    raise PermissionDeniedError(f"cannot {request.method} {request.path[:200]}: {why}")
                response = await handler(request)
            except Exception as raised:
                error = (
                    raised
                    if isinstance(raised, HpcschedError)
                    else report_fault(raised, f"answer {request.method} {request.path[:200]!r}")
                )
                # The frames refer to the request, its jobs and each other. They would stay in memory until
                # the next garbage collection.
                raised.__traceback__ = None
                if len(request.body) > LARGE_BODY_BYTES:
                    gc.collect(0)
                if isinstance(error, PermissionDeniedError) and self._coming.done():
                    with suppress(UnavailableError):  # the client has disconnected, so its account is unknown
                        self._coming.result().note_refusal(
                            self._identity(request), f"{request.method} {request.path[:200]}", str(error)
                        )
                status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
                at = {} if error.at is None else {"at": error.at}
                refusal = answer({"error": str(error), "kind": type(error).__name__, **at}, status)
                if isinstance(error, RateLimitError):
                    refusal = replace(refusal, headers={"Retry-After": retry_after(error.wait_s)})
                return refusal
            if uid is not None:
                log.info("uid %d: %s %.300r", uid, request.path, request.body)
            return response

        return handle

    async def submit(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        jobs = body.get("jobs")
        request_id = body.get("request_id", "")
        if KEY_HEADER in request.headers:
            key = _key_of(request)
            if request_id not in ("", key):
                raise RequestError(
                    "cannot submit: request_id of the body and the idempotency key differ; give one of them"
                )
            request_id = key
        if not isinstance(jobs, list) or not jobs or not isinstance(request_id, str):
            raise RequestError('cannot submit: the body must be {"request_id": text, "jobs": [...]}')
        if len(jobs) > MAX_JOBS:
            raise RequestError(
                f"cannot submit {len(jobs)} jobs at once: the most is {MAX_JOBS}; an array counts as one"
            )
        if len(jobs) <= FEW_JOBS:
            return answer(await self._submit(request, request_id, [spec_from_json(job) for job in jobs]))
        async with self._many.turn(_uid_of(request)):
            specs, breaks = [], AnswerPauses()
            for job in jobs:
                specs.append(spec_from_json(job))
                if breaks.due():
                    await breaks.take()
            return answer(await self._submit(request, request_id, specs))

    async def command(self, request: web.Request) -> web.Response:
        """Run hsub, hqueue or hcancel on behalf of the client that sent the arguments."""
        from hpcsched.api import command  # not needed for the first answers

        if KEY_HEADER in request.headers:
            raise RequestError("cannot run a command with an idempotency key: send request_id in its body")
        body = await self._body(request)
        try:
            words = command.read_words(body)
        except OwnProcessError:
            return web.Response(b"python\n", content_type="application/octet-stream")
        identity = self._identity(request)

        async def submit(request_id: str, spec: JobSpec) -> Json:
            if why := why_out_of_scope(request.scopes, "POST", "/v1/submit"):
                raise PermissionDeniedError(f"cannot submit: {why}")
            return {"version": VERSION, **await self._submit(request, request_id, [spec])}

        def job_id_of(reference: str) -> int:
            if not self._coming.done():
                raise UnavailableError("cannot look for jobs yet: the controller is starting; try again")
            return self._coming.result().array_of(identity, reference)

        api = command.Routed(request, self.router.find, submit, job_id_of)
        return web.Response(await command.answer(words, identity, api), content_type="application/octet-stream")

    async def _submit(self, request: web.Request, request_id: object, specs: list[JobSpec]) -> Json:
        if not isinstance(request_id, str):
            raise RequestError("cannot submit: the request id is not a text")
        if len(request_id) > MAX_REQUEST_ID:
            raise RequestError(
                f"cannot submit: the request id has {len(request_id)} characters, {MAX_REQUEST_ID} are allowed"
            )
        return await (await self._backend()).submit(self._identity(request), request_id, specs)

    async def jobs(self, request: web.Request) -> web.Response:
        return web.Response(await self._reader.jobs(self._identity(request), request.query))

    async def job(self, request: web.Request) -> web.Response:
        """Send a job, or the tasks of an array: many of them in turn, and in parts."""
        backend, identity, name = await self._backend(), self._identity(request), request.match_info["name"]
        if backend.count_jobs(identity, name) <= FEW_JOBS:
            return answer(backend.job(identity, name))
        async with self._turns.turn(_uid_of(request)):
            return web.Response(await backend.job_text(identity, name))

    async def queue(self, request: web.Request) -> web.Response:
        """Send the queue as the text lines that squeue and hqueue print."""
        text = await self._reader.queue(self._identity(request), request.query)
        return web.Response(text.encode("utf-8", "replace"), content_type="text/plain; charset=utf-8")

    async def act_on_triggers(self, request: web.Request) -> web.Response:
        """Set or clear a trigger.

        Only the head accepts this, because its users may run programs there anyway.
        """
        verb = request.match_info["name"]
        if request.uid is not None:
            raise PermissionDeniedError(f"cannot {verb} a trigger from a job: its program runs on the head; ask there")
        return await self.by(lambda call: call.backend.act_on_triggers(call.identity, verb, call.body))(request)

    async def act_on_services(self, request: web.Request) -> web.Response:
        """Start, scale, roll or stop a service. A job cannot: it would outlive itself."""
        verb = request.match_info["name"]
        if request.uid is not None and request.scopes is None:
            raise PermissionDeniedError(f"cannot {verb} a service from a job; do it on the head")
        return await self.by(lambda call: call.backend.act_on_services(call.identity, verb, call.body))(request)

    async def serve_gateway(self, request: web.Request) -> web.Response:
        """Tell the gateway about services, or let it connect to a replica."""
        verb = request.match_info["name"]
        if request.scopes is None or request.uid is not None:
            raise PermissionDeniedError(f"cannot {verb} services from here: only the gateway does")
        backend, body = await self._backend(), await self._body(request)
        return answer(await backend.sync_services(body) if verb == "sync" else backend.reach_service(body))

    async def act_on_tokens(self, request: web.Request) -> web.Response:
        """Make or revoke a token, or rotate the key; from elsewhere only revoke."""
        verb = request.match_info["name"]
        if verb != "revoke" and (request.uid is not None or request.scopes is not None):
            raise PermissionDeniedError(
                f"cannot {verb} a token from here: only on the head, over the controller's socket"
            )
        return await self.by(lambda call: call.backend.act_on_tokens(call.identity, verb, call.body))(request)

    async def act_on_sessions(self, request: web.Request) -> web.Response:
        """Make a link for a session, open a session with it, or close it."""
        verb = request.match_info["name"]
        if verb == "link" and (request.uid is not None or request.scopes is not None):
            raise PermissionDeniedError("cannot make a link from here: only on the head, over the controller's socket")
        backend, body = await self._backend(), await self._body(request)
        if verb == "link":
            return answer(backend.session_link(self._identity(request), body))
        if verb == "close":
            return answer(await backend.close_session(self._identity(request), request.credential_id))
        return answer(await backend.open_session(body, request.source))

    async def act_on_logins(self, request: web.Request) -> web.Response:
        """Begin a login at an OpenID provider, or open a session with its id token."""
        verb = request.match_info["name"]
        if request.scopes is None:
            raise PermissionDeniedError(f"cannot {verb} a login from here: only the gateway does")
        backend, body = await self._backend(), await self._body(request)
        return answer(backend.begin_login() if verb == "begin" else await backend.finish_login(body))

    async def reach(self, request: web.Request) -> web.Response:
        """Prepare a step for the gateway: a job cannot ask."""
        if request.uid is not None and request.scopes is None:
            raise PermissionDeniedError("cannot prepare a step from a job: use hrun there")
        backend, body = await self._backend(), await self._body(request)
        return answer(await backend.reach(self._identity(request), body, request.credential_id))

    async def metrics(self, request: web.Request) -> web.Response:
        """Send the page of metrics, or one of Slurm's."""
        backend, identity = await self._backend(), self._identity(request)
        kind = content_type_for(request.headers.get("accept", ""))
        body = await backend.metrics_page(
            identity, request.match_info.get("name", ""), open_metrics=kind == OPEN_METRICS
        )
        return web.Response(body, content_type=kind)

    async def history(self, request: web.Request) -> web.Response:
        return web.Response(await (await self._backend()).history(self._identity(request), request.query))

    async def metrics_history(self, request: web.Request) -> web.Response:
        return web.Response(await (await self._backend()).metrics_history(self._identity(request), request.query))

    async def metrics_series(self, request: web.Request) -> web.Response:
        return web.Response(await (await self._backend()).metrics_series(self._identity(request), request.query))

    async def events(self, request: web.Request) -> web.Response:
        """Send the events after one; wait up to `wait_s` for more."""
        query, identity, loop = request.query, self._identity(request), asyncio.get_running_loop()
        after = _number(query, "after", 0) if "after" in query else None
        until_s = loop.time() + min(number(query.get("wait_s", "0"), "wait_s"), LOG_WAIT_S)
        about, nodes = read_event_filters(query)
        backend = await self._backend()
        while True:
            found = backend.events(identity, after, about, nodes)
            if found["events"] or after is None or loop.time() >= until_s:
                return answer(found)
            after = found["next"]
            await asyncio.sleep(min(EVENTS_PAUSE_S, until_s - loop.time()))

    async def log(self, request: web.Request) -> web.Response:
        """Send a part of a job's output; wait up to `wait_s` for more output."""
        query = request.query
        identity = self._identity(request)
        offset = _number(query, "offset", 0)
        limit = max(0, min(_number(query, "limit", LOG_CHUNK_BYTES), LOG_CHUNK_BYTES))
        wait_until_s = asyncio.get_running_loop().time() + min(number(query.get("wait_s", "0"), "wait_s"), LOG_WAIT_S)
        pause_s = 0.05
        while True:
            part = await (await self._backend()).log(
                identity, query.get("job", ""), query.get("stream", "out"), offset, limit
            )
            now_s = asyncio.get_running_loop().time()
            if part.data or part.ended or now_s >= wait_until_s:
                break
            await asyncio.sleep(min(pause_s, wait_until_s - now_s))
            pause_s = min(pause_s * 1.5, 0.5)
        return _part(part)

    async def file(self, request: web.Request) -> web.Response:
        """Send a part of a file of a job's directory."""
        return _part(await (await self._backend()).file(self._identity(request), request.query))


def _part(part: LogPart) -> web.Response:
    """Return a part of a file as a response."""
    headers = {
        "X-Offset": str(part.offset),
        "X-Size": str(part.size),
        "X-Path": json.dumps(part.path),
        "X-Ended": "1" if part.ended else "0",
    }
    return web.Response(part.data, headers=headers, content_type="application/octet-stream")


def answer(body: Json, status: int = 200) -> web.Response:
    """Return `body` with the version as a response."""
    return web.Response(json_text({"version": VERSION, **body}).encode(), status)


def page_of(found: Json, items: str, query: Mapping[str, str]) -> Json:
    """Return the answer with a page of its list `items`, and the cursor of the next one.

    A cursor has the place and the name of a page's last item. If that was removed meanwhile, the next page begins at its place.
    """
    if not PAGE.intersection(query):
        return found
    whole = found[items]
    limit = max(1, min(_number(query, "limit", MAX_PAGE), MAX_PAGE))
    begin = 0
    if cursor := query.get("after", ""):
        place, _, last = cursor.partition(".")
        begin = whole_number(place, "cursor")
        names = [_name_of(item) for item in whole]
        if last in names:
            begin = names.index(last) + 1
    shown = whole[begin : begin + limit]
    more = {"next_cursor": f"{begin + len(shown) - 1}.{_name_of(shown[-1])}"} if begin + limit < len(whole) else {}
    return found | {items: shown} | more


def _name_of(item: Json) -> str:
    """Return what distinguishes an item from others of its list."""
    names = (
        ("name",)
        if "name" in item and "id" not in item
        else ("id", "token", "account", "user", "node", "start_s", "kind")
    )
    return "/".join(str(item[name]) for name in names if name in item)


def _parsed(text: bytes) -> Json:
    try:
        body = gate.read_json(text or b"{}")
    except gate.GateError as error:
        raise RequestError(f"cannot read the request: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("cannot read the request: not a JSON object")
    return body


def _uid_of(request: web.Request) -> int:
    """Return the uid of the request. For a relayed request, the relay names it.

    Otherwise the kernel does.
    """
    if request.uid is not None:
        return request.uid
    assert request.peer is not None
    try:
        return peer_uid(request.peer)
    except OSError as error:  # the client has disconnected; close its connection
        raise UnavailableError(f"cannot tell who asks: {error.strerror}") from None


def _key_of(request: web.Request) -> str:
    """Return the idempotency key of a request. Raises RequestError."""
    key = request.headers[KEY_HEADER]
    if not 0 < len(key) <= MAX_REQUEST_ID or not key.isprintable():
        raise RequestError(f"cannot use the idempotency key: it must have 1 to {MAX_REQUEST_ID} printable characters")
    return key


def read_event_filters(query: Mapping[str, str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return what events must be about, and their nodes, of a query; empty: all.

    Raises RequestError.
    """
    known = [subject.value for subject in EventSubject]
    about = [word.strip() for word in query.get("about", "").split(",") if word.strip()]
    for word in about:
        if word not in known:
            raise RequestError(f"cannot filter events by {word[:40]!r}: there are {', '.join(known)}")
    return frozenset(about), frozenset(expand_hostlist(query["node"]) if query.get("node") else ())


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    return whole_number(query[name], name) if name in query else default


def _refusal(status: int, why: str) -> web.Response:
    """Return the response to a request that no handler answered."""
    return answer({"error": why, "kind": _KINDS.get(status, "RequestError")}, status)


_KINDS = {401: "UnauthenticatedError", 403: "PermissionDeniedError", 404: "NotFoundError", 500: "InternalError"}
