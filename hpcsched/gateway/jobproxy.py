"""Show what a user's job serves, a notebook or an editor, in the user's browser.

Each job has an origin of its own, ``job-12.`` and the gateway's domain, so that a page of a job can neither read the pages of the
gateway nor use its cookie. A browser comes there with a ticket that works once: in the fragment of the address, which is sent to
no server, and from there in a POST. The ticket becomes a cookie of that origin. The gateway keeps, for each such cookie, the
credential that has asked, and opens connections to the job with it; the controller decides
(`hpcsched.controller.requests.reaches`).

What it removes before a job sees a request: the gateway's cookies, Authorization, headers of proxies and of one connection. What
it refuses: other hosts, requests and WebSockets that another origin's page sends, answers that are not HTTP/1.1. After a
WebSocket's handshake bytes pass unread.

Sources: RFC 9110 and 9112 (HTTP/1.1), RFC 6455 (WebSockets), RFC 6265bis (cookies), Fetch metadata (W3C).
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import h11
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from hpcsched.errors import report_fault
from hpcsched.gateway.app import (
    COOKIE,
    FAILURE_COST,
    LOGIN_COOKIE,
    SAFE_HEADERS,
    GatewayApp,
    ProblemError,
    own_origin,
    problem,
)
from hpcsched.gateway.site import Site, refused
from hpcsched.gateway.streams import WRITE_S, JobTunnel, StreamError, TunnelConnection, until_one_ends
from hpcsched.gateway.upstream import UpstreamError

Headers = list[tuple[bytes, bytes]]

JOB_COOKIE = "__Host-hpcsched-job"
OWN_PATH = "/.hpcsched/"  # of a job's origin: these are not the job's
OWN_FILES = ("enter.js", "style.css", "icon.svg")
TICKET_S = 60.0
MAX_TICKETS, MAX_VISITS = 1_000, 10_000
MAX_OF_CREDENTIAL = 50  # tickets, and visits; then the oldest one ends
MAX_TUNNELS, MAX_TUNNELS_OF_CREDENTIAL = 256, 8
IDLE_S = 120.0  # without a connection; then the step ends
READY_S = 5.0  # for a server to answer the question whether it is there
ANSWER_S = 300.0  # for the head of an answer
MAX_HEAD_BYTES = 64 << 10  # of an answer
PIECE_BYTES = 64 << 10
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"job-([1-9][0-9]{0,17})\.([a-z0-9.-]{1,200})(:[0-9]{1,5})?\Z")
# Of one connection, or of the way to the gateway.
_HOP_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)
_STRIPPED = frozenset(
    (b"authorization", b"proxy-authorization", b"forwarded", b"x-slurm-user-token", b"x-slurm-user-name")
)
_STRIPPED_PREFIXES = (b"x-forwarded-", b"x-hpcsched-", b"x-real-ip")
_NOT_ANSWERED = frozenset((b"date", b"server", b"strict-transport-security", b"alt-svc", b"proxy-authenticate"))
_OURS = (COOKIE, LOGIN_COOKIE, JOB_COOKIE)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVisit:
    """A browser at the origin of a job.

    `credential`: the headers that prove to the controller who it is.
    """

    credential: Mapping[str, str]
    owner: bytes  # hash of the credential
    job_id: int
    page: str  # address of the job's page at the gateway


class Once:
    """Secrets and what they stand for, by their hashes: bounded, for each credential too."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, tuple[JobVisit, float]] = OrderedDict()

    def add(self, visit: JobVisit, until_s: float) -> str:
        """Return a new secret for a visit."""
        mine = [key for key, (one, _) in self._kept.items() if one.owner == visit.owner]
        for key in mine[: max(0, len(mine) + 1 - MAX_OF_CREDENTIAL)]:
            del self._kept[key]
        if len(self._kept) >= self._most:
            self._kept.popitem(last=False)
        secret = secrets.token_urlsafe(32)
        self._kept[_hash(secret)] = visit, until_s
        return secret

    def get(self, secret: str, now_s: float) -> JobVisit | None:
        """Return the visit of a secret, None if it is unknown or too old."""
        found = self._kept.get(_hash(secret))
        return found[0] if found is not None and found[1] > now_s else None

    def take(self, secret: str, now_s: float) -> JobVisit | None:
        """Return the visit of a secret that works once."""
        found = self.get(secret, now_s)
        self._kept.pop(_hash(secret), None)
        return found

    def end(self, owner: bytes) -> None:
        """Forget what a credential has."""
        for key in [key for key, (one, _) in self._kept.items() if one.owner == owner]:
            del self._kept[key]


def _hash(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "replace")).digest()


class Origins:
    """The ASGI application: jobs have origins of their own, all else is the gateway's."""

    def __init__(self, gateway: Any, jobs: JobProxy) -> None:
        self._gateway, self._jobs = gateway, jobs

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        job_id = self._jobs.job_of(request.headers.get("host", ""))
        if job_id is None:
            await self._gateway(scope, receive, send)
        else:
            answer = await self._jobs.answer(request, job_id)
            await answer(scope, receive, send)


class JobProxy:
    """The origins of jobs, and the address that leads there."""

    def __init__(self, app: GatewayApp, site: Site, steps_socket: str, job_hosts: str, session_s: float) -> None:
        self._app, self._site, self._socket = app, site, steps_socket
        self._suffix = job_hosts.removeprefix("*.").lower()
        self._session_s = session_s
        self._tickets, self._visits = Once(MAX_TICKETS), Once(MAX_VISITS)
        self._tunnels: dict[tuple[bytes, int], JobTunnel] = {}

    # ----- at the gateway's own origin

    def routes(self) -> list[Route]:
        """Return the routes at the gateway's own origin."""
        return [
            *self._site.routes({"/job/{job}/open": self.open_page}),
            Route("/job/{job}/open", self._app.guarded(self.open), methods=["POST"]),
        ]

    async def open_page(self, request: Request) -> Response:
        """Say when a job starts; its script asks the server, and leads there when it answers."""
        name = request.path_params["job"]
        found = await self._site.load(request, {"answer": f"/v1/job/{quote(name, safe='')}"})
        job = found["answer"]["jobs"][0]
        if job["state"] == "PENDING":
            found = await self._site.load(
                request, {}, {"why": f"/v1/job/{quote(job['display_id'], safe='')}/why"}, found
            )
        return self._site.page(request, "open.html", {"why": None, **found, "job": job})

    async def open(self, request: Request) -> Response:
        """Ask whether the job's server answers; if it does, make a ticket for the job's origin."""
        self._app.admit(request)
        await self._app.json_text(request)
        suffix, port = self._domain_for(request)
        credential = self._app.credential(request)
        reply = await self._app.forward(request, "GET", f"/v1/job/{quote(request.path_params['job'], safe='')}")
        if reply.status != 200:
            raise refused(reply)
        job = json.loads(reply.body)["jobs"][0]
        visit = JobVisit(
            credential=credential,
            owner=_hash("\n".join(credential.values())),
            job_id=job["id"],
            page=f"{own_origin(request)}/job/{quote(job['display_id'], safe='')}",
        )
        why = await self._why_not_ready(request, visit)
        if why:
            return _json({"ready": False, "why": why})
        address = f"{request.scope['scheme']}://job-{visit.job_id}.{suffix}{port}{OWN_PATH}enter"
        ticket = self._tickets.add(visit, time.monotonic() + TICKET_S)
        return _json({"ready": True, "address": address, "ticket": ticket})

    def _domain_for(self, request: Request) -> tuple[str, str]:
        """Return the domain and port of the jobs' origins, as the browser reaches them.

        Raises ProblemError.
        """
        host = request.headers.get("host", "").lower()
        name, colon, port = host.rpartition(":") if host.rpartition(":")[2].isdigit() else (host, "", "")
        if not self._suffix and name not in LOCAL_HOSTS:
            raise ProblemError(
                400,
                "cannot open the job at this address: jobs have no origin of their own here. Set job_hosts in [gateway] of "
                f"hpcsched.toml; or run, on your machine: ssh -N -L {port or 443}:localhost:{port or 443} {name[:100]}, and "
                f"open https://localhost:{port or 443}/",
            )
        return self._suffix or "localhost", colon + port

    async def _why_not_ready(self, request: Request, visit: JobVisit) -> str:
        """Return why the job's server does not answer yet, "" if it does."""
        try:
            tunnel = await self._tunnel(request, visit)
            connection = tunnel.connect()
            try:
                async with asyncio.timeout(READY_S):
                    head = h11.Request(
                        method="HEAD", target="/", headers=[("host", "localhost"), ("connection", "close")]
                    )
                    exchange = JobExchange(connection)
                    await exchange.ask(head)
                    await exchange.answer()
            finally:
                connection.close()
        except TimeoutError:
            return f"the server in the job has not answered within {READY_S:g} s"
        except ProblemError as error:
            if error.status != 502:
                raise
            return str(error)  # it does not run
        except (StreamError, h11.ProtocolError) as error:
            return str(error)
        return ""

    # ----- at the origins of jobs

    def job_of(self, host: str) -> int | None:
        """Return the job whose origin this Host is, None: it is the gateway's own."""
        match = _HOST.match(host.lower())
        if match is None or match[2] != (self._suffix or "localhost"):
            return None
        return int(match[1])  # int: bounded by the pattern

    async def answer(self, request: Request, job_id: int) -> Response:
        """Answer a request at the origin of a job."""
        try:
            return await self._answer(request, job_id)
        except ProblemError as error:
            return self._error(request, error.status, str(error), headers=error.headers)
        except UpstreamError as error:
            return self._error(request, error.status, str(error))
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            wrong = report_fault(error, f"{request.method} at the origin of job {job_id}", "the gateway's log")
            return self._error(request, 500, str(wrong))

    async def _answer(self, request: Request, job_id: int) -> Response:
        self._check_origin(request)
        path = request.scope["path"]
        if path == OWN_PATH + "enter":
            return await self._enter(request, job_id)
        if path.startswith(OWN_PATH):
            self._app.count(request)
            return self._own_file(request, path.removeprefix(OWN_PATH))
        visit = self._visit(request, job_id)
        try:
            return await self._passed_on(request, visit)
        except ProblemError as error:
            return self._error(request, error.status, str(error), visit, error.headers)
        except (StreamError, h11.ProtocolError) as error:
            return self._error(request, 502, str(error), visit)

    def _check_origin(self, request: Request) -> None:
        """Refuse what another origin's page has sent. Raises ProblemError."""
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
        is_visit = request.headers.get("sec-fetch-dest") == "document" and request.method in ("GET", "HEAD")
        if (origin is not None and origin != own_origin(request)) or (
            site not in ("none", "same-origin") and not is_visit
        ):
            raise ProblemError(403, "cannot accept the request: a page of another origin has sent it")

    def _visit(self, request: Request, job_id: int) -> JobVisit:
        """Return the visit of the browser's cookie. Raises ProblemError."""
        visit = self._visits.get(request.cookies.get(JOB_COOKIE, ""), time.monotonic())
        if visit is None or visit.job_id != job_id:
            self._app.count(request)
            self._app.count(request, cost=FAILURE_COST)
            raise ProblemError(401, f"cannot show job {job_id}: open it from its page at the gateway")
        self._app.count(request, visit.credential)
        return visit

    async def _enter(self, request: Request, job_id: int) -> Response:
        """Make a cookie of a ticket, or send the page that posts the ticket in its address."""
        self._app.count(request)
        if request.method in ("GET", "HEAD"):
            return self._site.page(request, "enter.html", {"job_id": job_id})
        if request.method != "POST" or request.headers.get("origin") != own_origin(request):
            raise ProblemError(403, "cannot accept the ticket: the page for it has not sent it")
        try:
            ticket = str(json.loads(await self._app.json_text(request))["ticket"])
        except (ValueError, RecursionError, KeyError, TypeError):
            raise ProblemError(400, 'cannot accept the ticket: the body must be {"ticket": text}') from None
        visit = self._tickets.take(ticket, time.monotonic())
        if visit is None or visit.job_id != job_id:
            self._app.count(request, cost=FAILURE_COST)
            raise ProblemError(401, "cannot accept the ticket: it is unknown, used, too old or of another job")
        secret = self._visits.add(visit, time.monotonic() + self._session_s)
        answer = _json({"entered": True})
        answer.set_cookie(JOB_COOKIE, secret, path="/", secure=True, httponly=True, samesite="strict")
        return answer

    def _own_file(self, request: Request, name: str) -> Response:
        if name not in OWN_FILES or request.method not in ("GET", "HEAD"):
            raise ProblemError(404, f"cannot find {request.scope['path'][:200]!r}")
        return self._site.file(request, name)

    def _error(
        self,
        request: Request,
        status: int,
        why: str,
        visit: JobVisit | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return an error as a page for people, else as problem details."""
        if request.headers.get("sec-fetch-dest", "document") != "document" or "text/html" not in request.headers.get(
            "accept", ""
        ):
            return problem(status, why, "UnavailableError" if status >= 500 else "RequestError", headers=headers)
        values = {"status": status, "why": why, "page": visit.page if visit is not None else ""}
        return self._site.page(request, "away.html", values, status, headers)

    # ----- tunnels

    async def _tunnel(self, request: Request, visit: JobVisit) -> JobTunnel:
        """Return the tunnel to a job, opened if there is none. Raises ProblemError, StreamError."""
        place = visit.owner, visit.job_id
        known = self._tunnels.get(place)
        if known is None:
            mine = sum(owner == visit.owner for owner, _ in self._tunnels)
            if mine >= MAX_TUNNELS_OF_CREDENTIAL or len(self._tunnels) >= MAX_TUNNELS:
                raise ProblemError(
                    429, f"cannot reach job {visit.job_id}: too many jobs are open; close some, and wait"
                )
            known = self._new_tunnel(place)
            try:
                await known.open(self._socket, await self._key(request, visit))
            except BaseException as error:
                known.end(str(error) or "it could not be opened")
                raise
        await known.opened()
        return known

    def _new_tunnel(self, place: tuple[bytes, int]) -> JobTunnel:
        loop = asyncio.get_running_loop()

        def end_if_idle() -> None:
            if tunnel.is_idle:
                tunnel.end(f"it was not used for {IDLE_S:g} s")

        def forget() -> None:
            if self._tunnels.get(place) is tunnel:
                del self._tunnels[place]

        def is_idle() -> None:
            loop.call_later(IDLE_S, end_if_idle)

        tunnel = self._tunnels[place] = JobTunnel(is_idle, forget)
        is_idle()
        return tunnel

    async def _key(self, request: Request, visit: JobVisit) -> str:
        """Return the key of a new step for the visit's user. Raises ProblemError, UpstreamError."""
        body = json.dumps({"job": str(visit.job_id)}).encode()
        reply = await self._app.ask(request, "POST", "/v1/reach", visit.credential, body)
        if reply.status == 401:
            self._tickets.end(visit.owner)
            self._visits.end(visit.owner)
        if reply.status != 200:
            error = refused(reply)
            raise ProblemError(502 if error.status == 400 else error.status, str(error), kind=error.kind)
        return str(json.loads(reply.body)["key"])

    # ----- requests

    async def _passed_on(self, request: Request, visit: JobVisit) -> Response:
        """Send a request to the job, and return its answer as it comes."""
        connection = (await self._tunnel(request, visit)).connect()
        try:
            exchange = JobExchange(connection)
            await exchange.ask(
                h11.Request(
                    method=request.method.encode("ascii"),
                    target=target_of(request),
                    headers=request_headers(request),
                ),
                request.stream(),
            )
            async with asyncio.timeout(ANSWER_S):
                head = await exchange.answer()
        except TimeoutError:
            connection.close()
            raise StreamError(
                f"cannot show this: the server in the job has not answered within {ANSWER_S:g} s"
            ) from None
        except BaseException:
            connection.close()
            raise

        async def body() -> AsyncIterator[bytes]:
            try:
                yield b""  # so that the head is sent before the first part
                async for part in exchange.body():
                    yield part
            except (StreamError, h11.ProtocolError):
                request.scope["state"]["connection"].drop()  # so that the browser knows that it has not all
                await asyncio.sleep(0)
            finally:
                connection.close()

        answer = StreamingResponse(body(), head.status_code)
        answer.raw_headers = answer_headers(head.headers)
        return answer

    # ----- WebSockets

    async def upgrade(
        self, request: Request, job_id: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass a WebSocket on: its handshake, then all bytes in both directions.

        Raises ProblemError, UpstreamError, StreamError.
        """
        if request.headers.get("origin") != own_origin(request):
            raise ProblemError(403, "cannot open the WebSocket: a page of another origin asks for it")
        visit = self._visit(request, job_id)
        connection = (await self._tunnel(request, visit)).connect()
        try:
            exchange = JobExchange(connection)
            headers = [*request_headers(request), (b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
            async with asyncio.timeout(ANSWER_S):
                await exchange.ask(h11.Request(method=b"GET", target=target_of(request), headers=headers))
                head = await exchange.answer(switches=True)
            if head.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
                raise ProblemError(502, f"cannot open the WebSocket: the job answers with status {head.status_code}")
            kept = [*answer_headers(head.headers), (b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
            lines = [b"HTTP/1.1 101 Switching Protocols", *(name + b": " + value for name, value in kept)]
            writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + exchange.rest())
            await _pump(reader, writer, connection)
        except (TimeoutError, h11.ProtocolError) as error:
            raise StreamError(f"cannot open the WebSocket: {error or 'the job does not answer'}") from None
        finally:
            connection.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: TunnelConnection) -> None:
    """Copy bytes in both directions until one end closes, or both are silent for too long."""
    heard_s = time.monotonic()

    async def from_browser() -> None:
        nonlocal heard_s
        while data := await reader.read(PIECE_BYTES):
            heard_s = time.monotonic()
            await connection.write(data)

    async def from_job() -> None:
        nonlocal heard_s
        while data := await connection.read():
            heard_s = time.monotonic()
            writer.write(data)
            async with asyncio.timeout(WRITE_S):
                await writer.drain()

    await until_one_ends([from_browser(), from_job()], lambda: heard_s)


class JobExchange:
    """One request and its answer on a connection to a job's server, which may send anything."""

    def __init__(self, connection: TunnelConnection) -> None:
        self._connection = connection
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._has_heard = False
        self._is_until_close = False  # only the end of the connection ends the body

    async def ask(self, head: h11.Request, body: AsyncIterator[bytes] | None = None) -> None:
        """Send a request. Raises StreamError, h11.ProtocolError."""
        try:
            await self._send(head)
            if body is not None:
                async for part in body:
                    if part:
                        await self._send(h11.Data(data=part))
            await self._send(h11.EndOfMessage())
        except StreamError:
            if self._connection.why_ended != "":  # else it may have answered without reading all
                raise

    async def _send(self, event: h11.Event) -> None:
        async with asyncio.timeout(ANSWER_S):
            await self._connection.write(self._http.send(event) or b"")

    async def answer(self, *, switches: bool = False) -> h11.Response | h11.InformationalResponse:
        """Return the head of the answer, 101 too if the request `switches`.

        Raises StreamError, h11.ProtocolError.
        """
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                names = {name for name, _ in event.headers}
                self._is_until_close = not names & {b"content-length", b"transfer-encoding"}
                return event
            if isinstance(event, h11.InformationalResponse) and event.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
                if switches:
                    return event
                raise StreamError("cannot show this: the server in the job switches protocols unasked")
            if not isinstance(event, h11.InformationalResponse):
                raise StreamError("the server in the job does not answer: it closes the connection")

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the parts of the answer's body. Raises StreamError, h11.ProtocolError."""
        while isinstance(event := await self._event(), h11.Data):
            for begin in range(0, len(event.data), PIECE_BYTES):
                yield bytes(event.data[begin : begin + PIECE_BYTES])
        if self._is_until_close and self._connection.why_ended:
            raise StreamError(self._connection.why_ended)

    def rest(self) -> bytes:
        """Return what has come after the head of a 101."""
        return self._http.trailing_data[0]

    async def _event(self) -> Any:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                if self._connection.why_ended is not None and not self._has_heard:
                    why = self._connection.why_ended or "it closes the connection"
                    raise StreamError(f"the server in the job does not answer: {why}") from None
                raise h11.RemoteProtocolError(f"the server in the job does not speak HTTP/1.1: {error}") from None
            if event is not h11.NEED_DATA:
                return event
            data = await self._connection.read()
            self._has_heard = self._has_heard or bool(data)
            self._http.receive_data(data)


# ----- heads


def target_of(request: Request) -> bytes:
    """Return path and query as they came."""
    query: bytes = request.scope["query_string"]
    path: bytes = request.scope["raw_path"]
    return path + (b"?" + query if query else b"")


def request_headers(request: Request) -> Headers:
    """Return the headers of a request that the job sees."""
    raw: Sequence[tuple[bytes, bytes]] = request.headers.raw
    named = _connection_headers(raw)
    found = []
    has_body = False
    for name, value in raw:
        if name == b"cookie":
            value = _others(value)
        dropped = name in _HOP_HEADERS or name in _STRIPPED or name in named or name.startswith(_STRIPPED_PREFIXES)
        has_body = has_body or (name == b"transfer-encoding")
        if not dropped and (name != b"cookie" or value):
            found.append((name, value))
    if has_body:
        found = [one for one in found if one[0] != b"content-length"] + [(b"transfer-encoding", b"chunked")]
    is_upgrade = any(name == b"upgrade" for name, _ in raw)
    host = request.headers.get("host", "").encode("latin-1")
    found += [(b"x-forwarded-proto", request.scope["scheme"].encode()), (b"x-forwarded-host", host)]
    return found if is_upgrade else [*found, (b"connection", b"close")]


def answer_headers(raw: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Return the headers of a job's answer that the browser sees.

    A job sets no cookie for other hosts, and none of ours.
    """
    named = _connection_headers(raw)
    return [
        (name.lower(), value)
        for name, value in raw
        if name.lower() not in _HOP_HEADERS | _NOT_ANSWERED | named
        and not (name.lower() == b"set-cookie" and _is_foreign(value))
    ]


def _connection_headers(raw: Sequence[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Return the headers that Connection names: they are of one connection."""
    values = b",".join(value for name, value in raw if name.lower() == b"connection")
    return frozenset(word.strip().lower() for word in values.split(b",") if word.strip()) - {b"host", b"cookie"}


def _others(cookie: bytes) -> bytes:
    """Return the cookies of a header that are not the gateway's."""
    ours = tuple(name.encode() for name in _OURS)
    kept = [one.strip() for one in cookie.split(b";") if one.partition(b"=")[0].strip() not in ours]
    return b"; ".join(one for one in kept if one)


def _is_foreign(set_cookie: bytes) -> bool:
    """Return whether an answer sets a cookie of the gateway, or one for other hosts."""
    first, *attributes = set_cookie.split(b";")
    name = first.partition(b"=")[0].strip().lower()
    return name.startswith(b"__host-hpcsched") or any(
        one.partition(b"=")[0].strip().lower() == b"domain" for one in attributes
    )


def _json(values: Mapping[str, Any]) -> Response:
    return Response(json.dumps(values), headers=SAFE_HEADERS, media_type="application/json")
