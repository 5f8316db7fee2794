"""Answer HTTPS requests: credentials, limits, problem details, ETags, streams, sessions.

Knows no TLS and no connections (`hpcsched.gateway.server`). It forwards credentials and does not judge them.

Sources: RFC 9110 (HTTP), RFC 9457 (problem details), RFC 6265bis (cookies), WHATWG HTML (server-sent events).
"""

from __future__ import annotations

import codecs
import json
import re
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from html import escape
from http import HTTPStatus
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from hpcnode.wire.connection_limits import Rates
from hpcsched.config.load import GatewaySettings
from hpcsched.gateway.routes import MAX_BODY_BYTES, PREFIX, ApiRoute, Routing, openapi, why_bad_query
from hpcsched.gateway.upstream import Upstream, UpstreamError, UpstreamReply

COOKIE = "__Host-hpcsched"
CSRF_HEADER = "x-requested-with"
MAX_KEY_CHARS = 200
MAX_KNOWN = 10_000  # credentials that were accepted lately
FAILURE_COST = 5.0  # a refused credential counts as so many requests of its address
STREAM_WAIT_S = 15.0
MAX_AT_ONCE = 64  # requests of a credential that the controller answers
MAX_CODE_BYTES = 1_000
MAX_USER_CHARS = 256
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_NOW = re.compile(rb'"now_s":[-+.0-9e]+,?')
SAFE_HEADERS = {
    "cache-control": "no-store",
    "strict-transport-security": "max-age=31536000",
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; form-action 'self'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}


class ProblemError(Exception):
    """A request that is refused here."""

    def __init__(self, status: int, why: str, headers: Mapping[str, str] | None = None, kind: str = "") -> None:
        super().__init__(why)
        self.status = status
        self.headers = headers or {}
        self.kind = kind or _KINDS.get(status, "RequestError")


_KINDS = {
    401: "UnauthenticatedError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "UnavailableError",
    500: "InternalError",
    502: "UnavailableError",
    503: "UnavailableError",
    504: "UnavailableError",
}


def problem(status: int, why: str, kind: str, at: object = None, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as problem details."""
    body: dict[str, Any] = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status}
    body |= {"detail": why, "error": why, "kind": kind} | ({} if at is None else {"at": at})
    more = {"www-authenticate": "Bearer"} if status == 401 else {}
    return Response(
        json.dumps(body), status, {**SAFE_HEADERS, **more, **(headers or {})}, media_type="application/problem+json"
    )


class GatewayApp:
    """The application: what it needs to answer."""

    def __init__(self, upstream: Upstream, settings: GatewaySettings) -> None:
        self.upstream = upstream
        self._settings = settings
        self._rates = Rates(settings.rate, settings.burst, time.monotonic)
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._asked: Counter[bytes] = Counter()  # requests that the controller is answering, by credential
        self._routing = Routing()
        self._openapi = json.dumps(openapi(), separators=(",", ":")).encode()

    def asgi(self, more: Sequence[Route] = ()) -> Starlette:
        """Return the ASGI application; `more`: routes of other interfaces."""
        routes = [
            Route("/healthz", self._guarded(self.health), methods=["GET"]),
            Route("/login", self._guarded(self.login_page), methods=["GET"]),
            Route("/login", self._guarded(self.login), methods=["POST"]),
            Route(PREFIX + "/openapi.json", self._guarded(self.description), methods=["GET"]),
            Route(PREFIX + "/session", self._guarded(self.session), methods=["POST", "DELETE"]),
            Route(PREFIX + "/{path:path}", self._guarded(self.api), methods=METHODS),
            *more,
            Route("/{path:path}", self._guarded(self.nothing), methods=METHODS),
        ]
        handlers = {404: self._guarded(self.nothing), 405: self._wrong_method}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _wrong_method(self, request: Request, error: Exception) -> Response:
        headers = getattr(error, "headers", None) or {}
        return problem(405, f"cannot {request.method} {request.url.path[:200]!r}", "RequestError", headers=headers)

    def _guarded(self, handler: Any) -> Any:
        async def handle(request: Request, _error: Exception | None = None) -> Response:
            try:
                answer: Response = await handler(request)
                return answer
            except ProblemError as error:
                return problem(error.status, str(error), error.kind, headers=error.headers)
            except UpstreamError as error:
                return problem(error.status, str(error), "UnavailableError", headers={"retry-after": "1"})
            except ClientDisconnect:
                return Response(status_code=400)

        return handle

    # ----- for other interfaces

    def admit(self, request: Request) -> None:
        """Count a request that another interface answers. Raises ProblemError."""
        self._count(request, self._credential(request))

    async def forward(self, request: Request, method: str, path: str, body: bytes = b"") -> UpstreamReply:
        """Ask the controller as the request's user. Raises ProblemError, UpstreamError."""
        return await self._ask(request, method, path, self._credential(request), body)

    async def json_text(self, request: Request) -> bytes:
        """Return the body of a request. Raises ProblemError."""
        self._must_be_json(request)
        return await self._body(request)

    # ----- pages and other small things

    async def nothing(self, request: Request) -> Response:
        raise ProblemError(404, f"cannot find {request.url.path[:200]!r}: the API is below {PREFIX}/")

    async def health(self, request: Request) -> Response:
        self._count(request, {})
        return Response("ok\n", headers=SAFE_HEADERS, media_type="text/plain")

    async def description(self, request: Request) -> Response:
        self._count(request, {})
        return self._tagged(request, self._openapi, "application/json")

    async def login_page(self, request: Request) -> Response:
        """Ask for a click, because programs that preview links must not use up the code."""
        self._count(request, {})
        code = request.query_params.get("code", "")[:200]
        page = (
            "<!doctype html><title>hpcsched</title><h1>hpcsched</h1>"
            f'<form method="post" action="/login"><input type="hidden" name="code" value="{escape(code)}">'
            "<button>Log in</button></form>"
        )
        return HTMLResponse(page, headers=SAFE_HEADERS)

    async def login(self, request: Request) -> Response:
        self._count(request, {})
        data = await self._body(request, MAX_CODE_BYTES)
        codes = parse_qs(data.decode("latin-1")).get("code", [""])
        answer = RedirectResponse("/healthz", 303, headers=SAFE_HEADERS)
        return await self._opened(request, {"code": codes[0]}, answer)

    async def session(self, request: Request) -> Response:
        """Open a session with a one-time code, or close it."""
        if request.method == "DELETE":
            headers = self._credential(request)
            self._count(request, headers)
            reply = await self._ask(request, "POST", "/v1/sessions/close", headers, b"{}")
            answer = self._answer(request, reply, "json")
            answer.delete_cookie(COOKIE, path="/", secure=True, httponly=True, samesite="strict")
            return answer
        self._count(request, {})
        self._must_be_json(request)
        try:
            body = json.loads(await self._body(request, MAX_CODE_BYTES))
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise ProblemError(400, 'cannot open a session: the body must be {"code": text}')
        return await self._opened(request, {"code": str(body.get("code"))}, None)

    async def _opened(self, request: Request, body: dict[str, str], answer: Response | None) -> Response:
        """Exchange a code for a session, and set its cookie."""
        reply = await self._ask(request, "POST", "/v1/sessions/open", {}, json.dumps(body).encode())
        if reply.status != 200:
            self._count(request, {}, FAILURE_COST)
            return self._answer(request, reply, "json")
        values = json.loads(reply.body)
        secret = values.pop("session")
        made = answer or Response(json.dumps(values), headers=SAFE_HEADERS, media_type="application/json")
        age_s = int(max(0, values["expires_at_s"] - time.time()))  # int: of our own controller
        made.set_cookie(COOKIE, secret, max_age=age_s, path="/", secure=True, httponly=True, samesite="strict")
        return made

    # ----- the API

    async def api(self, request: Request) -> Response:
        """Forward a request to the controller."""
        credential = self._credential(request)
        self._count(request, credential)
        raw = request.scope["raw_path"].decode("ascii", "replace")
        found = self._routing.find(request.method, raw[len(PREFIX) :])
        if isinstance(found, frozenset):
            if found:
                raise ProblemError(
                    405,
                    f"cannot {request.method} {raw[:200]!r}: it has {', '.join(found)}",
                    {"allow": ", ".join(sorted(found))},
                )
            raise ProblemError(404, f"cannot find {raw[:200]!r}: see {PREFIX}/openapi.json")
        route, path = found
        pairs = _query_of(request)
        if why := why_bad_query(route, pairs):
            raise ProblemError(400, f"cannot {request.method} {raw[:200]}: {why}")
        if route.answer == "events":
            return await self._stream(request, route, credential, dict(pairs))
        if pairs:
            path += "?" + urlencode([("after" if name == "cursor" else name, value) for name, value in pairs])
        body = await self.json_text(request) if route.method == "POST" else b""
        key = _idempotency_key(request) if route.repeatable else {}
        reply = await self._ask(request, route.method, path, credential, body, more=key)
        return self._answer(request, reply, route.answer)

    def _credential(self, request: Request) -> dict[str, str]:
        """Return the headers that carry the request's one credential to the controller."""
        headers = request.headers
        given: list[dict[str, str]] = []
        given += [{"authorization": value} for value in headers.getlist("authorization")]
        given += [{"authorization": f"Bearer {value}"} for value in headers.getlist("x-slurm-user-token")]
        if cookie := request.cookies.get(COOKIE):
            given.append({"x-hpcsched-session": cookie})
        if len(given) > 1:
            raise ProblemError(401, "cannot accept the request: it has more than one credential")
        if not given and (fingerprint := request.scope["state"].get("certificate")):
            given.append({"x-hpcsched-certificate": fingerprint})
        if not given:
            raise ProblemError(
                401, "cannot accept the request: it has no credential; send a token: Authorization: Bearer TOKEN"
            )
        value = next(iter(given[0].values()))
        if len(value) > 4_000 or not value.isprintable() or not value.isascii():
            raise ProblemError(401, "cannot accept the credential: it is too long, or not ASCII")
        if cookie and request.method not in ("GET", "HEAD") and CSRF_HEADER not in headers:
            raise ProblemError(403, f"cannot change anything with a session alone: send the header {CSRF_HEADER}")
        return given[0]

    def _count(self, request: Request, credential: Mapping[str, str], cost: float = 1.0) -> None:
        """Count a request of its credential, if that was accepted lately, or of its address."""
        key = _key_of(credential)
        subject = key.hex() if credential and key in self._known else _network(_source(request))
        wait_s = self._rates.wait_s(hash(subject), cost)
        if wait_s is not None and cost == 1.0:
            raise ProblemError(
                429,
                f"cannot answer now: more than {self._settings.rate:g} requests per second; wait and ask again",
                {"retry-after": str(max(1, round(wait_s + 0.5)))},
            )

    async def _ask(
        self,
        request: Request,
        method: str,
        path: str,
        credential: Mapping[str, str],
        body: bytes = b"",
        wait_s: float = 0,
        more: Mapping[str, str] = _NO_HEADERS,
    ) -> UpstreamReply:
        headers = {"x-hpcsched-gateway": _source(request), **credential, **_user_name(request), **more}
        key = _key_of(credential) if credential else _network(_source(request)).encode()
        with self._place(key):
            reply = await self.upstream.ask(method, path, headers, body, timeout_s=60.0 + wait_s)
        if credential:
            if reply.status == 401:
                self._known.pop(key, None)
                self._count(request, {}, FAILURE_COST)
            else:
                self._known[key] = None
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
        return reply

    @contextmanager
    def _place(self, key: bytes) -> Iterator[None]:
        """Count a request that the controller answers.

        Raises ProblemError if the credential has too many. Otherwise its requests that wait could
        take all connections to the controller.
        """
        if self._asked[key] >= MAX_AT_ONCE:
            why = (
                f"cannot answer now: {MAX_AT_ONCE} requests of this credential are being answered; wait, and ask again"
            )
            raise ProblemError(429, why, {"retry-after": "1"})
        self._asked[key] += 1
        try:
            yield
        finally:
            self._asked[key] -= 1
            if not self._asked[key]:
                del self._asked[key]

    def _answer(self, request: Request, reply: UpstreamReply, kind: str) -> Response:
        if reply.status != 200:
            return _problem_of(reply)
        if kind == "bytes":
            headers = {name: value for name, value in reply.headers.items() if name.startswith("x-")}
            if request.method != "GET":
                return Response(reply.body, headers={**SAFE_HEADERS, **headers}, media_type="application/octet-stream")
            return self._tagged(request, reply.body, "application/octet-stream", headers)
        if request.method != "GET":
            return Response(reply.body, headers=SAFE_HEADERS, media_type="application/json")
        return self._tagged(request, reply.body, reply.headers.get("content-type", "application/json"))

    def _tagged(
        self, request: Request, body: bytes, media_type: str, more: Mapping[str, str] = _NO_HEADERS
    ) -> Response:
        """Return the answer with its ETag, or 304 if the client has it.

        `more`: headers that the tag covers.
        """
        digest = blake2b(repr(sorted(more.items())).encode(), digest_size=16)
        digest.update(_NOW.sub(b"", body[:400], count=1))
        digest.update(body[400:])
        tag = f'W/"{digest.hexdigest()}"'
        headers = {**SAFE_HEADERS, **more, "etag": tag, "cache-control": "private, no-cache"}
        wanted = request.headers.get("if-none-match", "")
        if wanted == "*" or tag in [one.strip() for one in wanted.split(",")]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=media_type)

    # ----- bodies

    def _must_be_json(self, request: Request) -> None:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ProblemError(415, "cannot read the request: send the body as application/json")

    async def _body(self, request: Request, most: int = MAX_BODY_BYTES) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise ProblemError(
                    413, f"cannot read the request: its body has more than {most} bytes", {"connection": "close"}
                )
            parts.append(part)
        return b"".join(parts)

    # ----- server-sent events

    async def _stream(
        self, request: Request, route: ApiRoute, credential: Mapping[str, str], query: dict[str, str]
    ) -> Response:
        """Return a stream; its first piece is asked for now, so that errors are ordinary answers."""
        last = request.headers.get("last-event-id", "")
        if last and not (last.isascii() and last.isdigit() and len(last) < 16):
            raise ProblemError(400, "cannot continue the stream: Last-Event-ID is not a number")
        if route.path == "/events":
            pieces = self._events(request, credential, last or query.get("after", ""))
        else:
            if not query.get("job"):
                raise ProblemError(400, "cannot stream output: name the job, as ?job=12")
            pieces = self._output(request, credential, query | ({"offset": last} if last else {}))
        first = await anext(pieces)

        async def whole() -> AsyncIterator[bytes]:
            yield first
            try:
                async for piece in pieces:
                    yield piece
            except (ProblemError, UpstreamError) as error:
                yield _event("error", {"error": str(error)})

        return StreamingResponse(whole(), headers=SAFE_HEADERS, media_type="text/event-stream")

    async def _polled(
        self, request: Request, credential: Mapping[str, str], path: str, query: Mapping[str, str]
    ) -> UpstreamReply:
        reply = await self._ask(request, "GET", f"{path}?{urlencode(query)}", credential, wait_s=STREAM_WAIT_S)
        if reply.status != 200:
            error = json.loads(reply.body)
            raise ProblemError(reply.status, error["error"], _passed(reply.headers), error["kind"])
        return reply

    async def _events(self, request: Request, credential: Mapping[str, str], after: str) -> AsyncIterator[bytes]:
        wait_s = "0"
        while True:
            query = {"wait_s": wait_s} | ({"after": after} if after else {})
            values = json.loads((await self._polled(request, credential, "/v1/events", query)).body)
            lines = [_event("job", event, event["seq"]) for event in values["events"]]
            after, wait_s = str(values["next"]), str(STREAM_WAIT_S)
            yield b"".join(lines) or f"id: {after}\n\n".encode()  # no event, but a place to continue from

    async def _output(
        self, request: Request, credential: Mapping[str, str], query: dict[str, str]
    ) -> AsyncIterator[bytes]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        query = {"stream": "out", "limit": str(64 << 10), "wait_s": "0"} | query
        while True:
            reply = await self._polled(request, credential, "/v1/log", query)
            offset = int(reply.headers["x-offset"])  # int: of our own controller
            after = offset + len(reply.body)
            ended = reply.headers["x-ended"] == "1"
            begun = offset - len(decoder.getstate()[0])  # of a character whose rest comes now
            text = decoder.decode(reply.body, final=ended)
            whole = after - len(decoder.getstate()[0])
            piece = _event("output", {"offset": begun, "data": text}, whole) if text else b""
            yield piece + (_event("end", {"offset": after}, after) if ended else b"") or f"id: {whole}\n\n".encode()
            if ended:
                return
            query |= {"offset": str(after), "wait_s": str(STREAM_WAIT_S)}


def _event(kind: str, values: Mapping[str, Any], number: int | None = None) -> bytes:
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {kind}\ndata: {json.dumps(values)}\n\n".encode()


def _problem_of(reply: UpstreamReply) -> Response:
    """Return the controller's error as problem details."""
    try:
        error = json.loads(reply.body)
        why, kind, at = str(error["error"]), str(error["kind"]), error.get("at")
    except (ValueError, KeyError, TypeError):
        why, kind, at = "cannot read the controller's answer", "ProtocolError", None
    return problem(reply.status, why, kind, at, _passed(reply.headers))


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    return {"retry-after": headers["retry-after"]} if "retry-after" in headers else {}


def _query_of(request: Request) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            request.scope["query_string"].decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=100
        )
    except ValueError:
        raise ProblemError(400, "cannot read the query: it is not UTF-8, or has too many parameters") from None


def _key_of(credential: Mapping[str, str]) -> bytes:
    return blake2b("\n".join(credential.values()).encode(), digest_size=16).digest()


def _user_name(request: Request) -> dict[str, str]:
    """Return the header with the token's user of Slurm's clients; the controller checks it."""
    name = request.headers.get("x-slurm-user-name", "")
    if len(name) > MAX_USER_CHARS or not name.isprintable() or not name.isascii():
        raise ProblemError(401, "cannot accept the request: X-SLURM-USER-NAME is not the name of a user")
    return {"x-slurm-user-name": name} if name else {}


def _idempotency_key(request: Request) -> dict[str, str]:
    """Return the header with the client's idempotency key; the controller checks it."""
    keys = request.headers.getlist("idempotency-key")
    if len(keys) > 1 or not all(0 < len(key) <= MAX_KEY_CHARS and key.isprintable() for key in keys):
        raise ProblemError(400, f"cannot use the idempotency key: one, with 1 to {MAX_KEY_CHARS} printable characters")
    return {"idempotency-key": keys[0]} if keys else {}


def _source(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def _network(address: str) -> str:
    """Return what counts as one address: of IPv6 the network of 64 bits."""
    return ":".join(address.split(":")[:4]) if ":" in address and not address.startswith("::") else address
