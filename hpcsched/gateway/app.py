"""Answer HTTPS requests: credentials, limits, problem details, ETags, streams, logins.

Knows no TLS and no connections (`hpcsched.gateway.server`). It forwards credentials and does not judge them.

Sources: RFC 9110 (HTTP), RFC 9457 (problem details), RFC 6265bis (cookies), WHATWG HTML (server-sent events).
"""

from __future__ import annotations

import codecs
import gzip
import hmac
import ipaddress
import json
import re
import secrets
import ssl
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, parse_qsl, quote, urlencode, urlsplit

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from hpcnode.wire.connection_limits import Rates
from hpcsched.auth.tokens import HEAD_ONLY, METRICS_PATH
from hpcsched.config.load import GatewaySettings
from hpcsched.errors import ConfigError, report_fault
from hpcsched.gateway.routes import MAX_BODY_BYTES, PREFIX, ApiRoute, Routing, openapi, why_bad_query
from hpcsched.gateway.upstream import Upstream, UpstreamError, UpstreamReply

COOKIE = "__Host-hpcsched"
CSRF_HEADER = "x-requested-with"
MAX_KEY_CHARS = 200
MAX_KNOWN = 10_000  # credentials that were accepted lately
FAILURE_COST = 5.0  # a refused credential counts as so many requests of its address
STREAM_WAIT_S = 15.0
MAX_AT_ONCE = 64  # requests of a user that the controller answers
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


def packed(
    request: Request, body: bytes, media_type: str, headers: Mapping[str, str], status: int = 200, level: int = 6
) -> Response:
    """Return an answer, compressed if the client takes that."""
    more = {}
    if "gzip" in request.headers.get("accept-encoding", ""):
        body, more = gzip.compress(body, level), {"content-encoding": "gzip"}
    return Response(body, status, headers={**headers, **more, "content-type": media_type})


class GatewayApp:
    """The application: what it needs to answer."""

    def __init__(self, upstream: Upstream, settings: GatewaySettings) -> None:
        self.upstream = upstream
        self._settings = settings
        self._rates = Rates(settings.rate, settings.burst, time.monotonic)
        self._known: OrderedDict[bytes, str] = OrderedDict()  # credentials, and the uid of each
        self.open_streams = 0  # of events: as many pages are open, about
        self._asked: Counter[str] = Counter()  # requests that the controller is answering, by user or address
        self._routing = Routing()
        self._openapi = json.dumps(openapi(), separators=(",", ":")).encode()

    def asgi(self, more: Sequence[Route] = ()) -> Starlette:
        """Return the ASGI application; `more`: routes of other interfaces."""
        routes = [
            Route("/healthz", self.guarded(self.health), methods=["GET"]),
            Route("/login", self.guarded(self.login), methods=["POST"]),
            Route(METRICS_PATH, self.guarded(self.metrics), methods=["GET"]),
            Route(METRICS_PATH + "/{page}", self.guarded(self.metrics), methods=["GET"]),
            Route(PREFIX + "/openapi.json", self.guarded(self.description), methods=["GET"]),
            Route(PREFIX + "/session", self.guarded(self.session), methods=["POST", "DELETE"]),
            Route(PREFIX + "/{path:path}", self.guarded(self.api), methods=METHODS),
            *more,
            Route("/{path:path}", self.guarded(self.nothing), methods=METHODS),
        ]
        handlers = {404: self.guarded(self.nothing), 405: self._wrong_method}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _wrong_method(self, request: Request, error: Exception) -> Response:
        headers = getattr(error, "headers", None) or {}
        return problem(405, f"cannot {request.method} {request.url.path[:200]!r}", "RequestError", headers=headers)

    def guarded(self, handler: Any) -> Any:
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
            except Exception as error:
                wrong = report_fault(error, f"{request.method} {request.url.path[:200]!r}", "the gateway's log")
                return problem(500, str(wrong), "InternalError")

        return handle

    # ----- for other interfaces

    def admit(self, request: Request) -> Mapping[str, str]:
        """Count a request that another interface answers, and return its credential.

        Raises ProblemError.
        """
        credential = self.credential(request)
        self.count(request, credential)
        return credential

    async def public(self, request: Request, path: str, body: Mapping[str, str]) -> UpstreamReply:
        """Ask the controller without a credential, to get one. Raises UpstreamError."""
        return await self.ask(request, "POST", path, {}, json.dumps(body).encode())

    def refusal(self, reply: UpstreamReply) -> Response:
        """Return the answer to a request that the controller refuses."""
        return _problem_of(reply)

    async def opened(self, request: Request, reply: UpstreamReply, made: Callable[[str], Response] | None) -> Response:
        """Return the answer with the cookie of a new session; `made` makes it of the user's name."""
        if reply.status != 200:
            self.count(request, cost=FAILURE_COST)
            return _problem_of(reply)
        values = json.loads(reply.body)
        secret = values.pop("session")
        plain = Response(json.dumps(values), headers=SAFE_HEADERS, media_type="application/json")
        answer = plain if made is None else made(values["user"])
        age_s = int(max(0, values["expires_at_s"] - time.time()))  # int: of our own controller
        answer.set_cookie(COOKIE, secret, max_age=age_s, path="/", secure=True, httponly=True, samesite="strict")
        return answer

    async def forward(self, request: Request, method: str, path: str, body: bytes = b"") -> UpstreamReply:
        """Ask the controller as the request's user. Raises ProblemError, UpstreamError."""
        return await self.ask(request, method, path, self.credential(request), body)

    async def json_text(self, request: Request) -> bytes:
        """Return the body of a request. Raises ProblemError."""
        self._must_be_json(request)
        return await self._body(request)

    # ----- pages and other small things

    async def nothing(self, request: Request) -> Response:
        raise ProblemError(404, f"cannot find {request.url.path[:200]!r}: the API is below {PREFIX}/")

    async def health(self, request: Request) -> Response:
        self.count(request)
        return Response("ok\n", headers=SAFE_HEADERS, media_type="text/plain")

    async def description(self, request: Request) -> Response:
        self.count(request)
        return self._tagged(request, self._openapi, "application/json")

    async def login(self, request: Request) -> Response:
        self.count(request)
        data = await self._body(request, MAX_CODE_BYTES)
        codes = parse_qs(data.decode("latin-1")).get("code", [""])
        reply = await self.public(request, "/v1/sessions/open", {"code": codes[0]})
        return await self.opened(request, reply, lambda _: RedirectResponse("/", 303, headers=SAFE_HEADERS))

    async def session(self, request: Request) -> Response:
        """Open a session with a one-time code, or close it."""
        if request.method == "DELETE":
            headers = self.credential(request)
            self.count(request, headers)
            reply = await self.ask(request, "POST", "/v1/sessions/close", headers, b"{}")
            answer = self._answer(request, reply, "json")
            answer.delete_cookie(COOKIE, path="/", secure=True, httponly=True, samesite="strict")
            return answer
        self.count(request)
        self._must_be_json(request)
        try:
            body = json.loads(await self._body(request, MAX_CODE_BYTES))
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise ProblemError(400, 'cannot open a session: the body must be {"code": text}')
        return await self.opened(
            request, await self.public(request, "/v1/sessions/open", {"code": str(body.get("code"))}), None
        )

    async def metrics(self, request: Request) -> Response:
        """Forward a page of metrics, compressed if the client takes that."""
        credential = self.credential(request)
        self.count(request, credential)
        if request.query_params:
            raise ProblemError(400, "cannot show metrics: the page takes no parameters")
        page = request.path_params.get("page", "")
        path = f"{METRICS_PATH}/{quote(page, safe='')}" if page else METRICS_PATH
        accept = {"accept": request.headers.get("accept", "")[:1000]}
        reply = await self.ask(request, "GET", path, credential, more=accept)
        if reply.status != 200:
            return _problem_of(reply)
        headers = {**SAFE_HEADERS, "vary": "accept-encoding"}
        return packed(request, reply.body, reply.headers.get("content-type", "text/plain"), headers, level=1)

    # ----- the API

    async def api(self, request: Request) -> Response:
        """Forward a request to the controller."""
        credential = self.credential(request)
        self.count(request, credential)
        raw = request.scope["raw_path"].decode("ascii", "replace")
        if request.headers.get("if-match", "*") != "*":  # our ETags are weak: none matches (RFC 9110 13.1.1)
            raise ProblemError(412, "cannot accept If-Match: read again, then send the request without it")
        found = self._routing.find(request.method, raw[len(PREFIX) :])
        if isinstance(found, frozenset):
            if found:
                raise ProblemError(
                    405,
                    f"cannot {request.method} {raw[:200]!r}: it has {', '.join(found)}",
                    {"allow": ", ".join(sorted(found))},
                )
            if "/v1" + raw[len(PREFIX) :] in HEAD_ONLY:
                raise ProblemError(403, f"cannot {request.method} {raw[:200]!r}: it is done on the head only")
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
        reply = await self.ask(request, route.method, path, credential, body, more=key)
        return self._answer(request, reply, route.answer)

    def credential(self, request: Request) -> dict[str, str]:
        """Return the headers that carry the request's one credential to the controller.

        Raises ProblemError.
        """
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
        if cookie and headers.get("origin") not in (None, own_origin(request), self._settings.url.rstrip("/")):
            raise ProblemError(403, "cannot accept the session: a page of another origin uses it")
        if cookie and request.method not in ("GET", "HEAD") and CSRF_HEADER not in headers:
            raise ProblemError(403, f"cannot change anything with a session alone: send the header {CSRF_HEADER}")
        return given[0]

    def count(self, request: Request, credential: Mapping[str, str] = _NO_HEADERS, cost: float = 1.0) -> None:
        """Count a request of its credential, if that was accepted lately, or of its address.

        Raises ProblemError.
        """
        key = _key_of(credential)
        subject = key.hex() if credential and key in self._known else network_of(_source(request))
        wait_s = self._rates.wait_s(hash(subject), cost)
        if wait_s is not None and cost == 1.0:
            raise ProblemError(
                429,
                f"cannot answer now: more than {self._settings.rate:g} requests per second; wait and ask again",
                {"retry-after": str(max(1, round(wait_s + 0.5)))},
            )

    async def ask(
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
        key = _key_of(credential)
        asker = self._known.get(key) if credential else None
        with self._place(asker or network_of(_source(request))):
            reply = await self.upstream.ask(method, path, headers, body, timeout_s=60.0 + wait_s)
        if credential and reply.status == 401:
            self._known.pop(key, None)
            self.count(request, cost=FAILURE_COST)
        elif uid := reply.headers.get("x-hpcsched-uid"):
            self._known[key] = request.scope["state"]["asker"] = f"uid {uid}"
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return reply

    @contextmanager
    def _place(self, asker: str) -> Iterator[None]:
        """Count a request that the controller answers.

        Raises ProblemError if the user has too many. Otherwise requests that wait could take all
        connections to the controller: a user may have many credentials.
        """
        if self._asked[asker] >= MAX_AT_ONCE:
            why = f"cannot answer now: {MAX_AT_ONCE} of your requests are being answered; wait, and ask again"
            raise ProblemError(429, why, {"retry-after": "1"})
        self._asked[asker] += 1
        try:
            yield
        finally:
            self._asked[asker] -= 1
            if not self._asked[asker]:
                del self._asked[asker]

    def _answer(self, request: Request, reply: UpstreamReply, kind: str) -> Response:
        if reply.status != 200:
            return _problem_of(reply)
        if kind == "bytes":
            headers = {name: value for name, value in reply.headers.items() if name.startswith("x-")}
            headers.pop("x-hpcsched-uid", None)
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
            filters = {name: query[name] for name in ("about", "node") if query.get(name)}
            pieces = self._events(request, credential, last or query.get("after", ""), filters)
        else:
            if not query.get("job"):
                raise ProblemError(400, "cannot stream output: name the job, as ?job=12")
            pieces = self._output(request, credential, query | ({"offset": last} if last else {}))
        first = await anext(pieces)

        async def whole() -> AsyncIterator[bytes]:
            self.open_streams += route.path == "/events"
            try:
                yield first
                async for piece in pieces:
                    yield piece
            except (ProblemError, UpstreamError) as error:
                yield _event("error", {"error": str(error)})
            finally:
                self.open_streams -= route.path == "/events"

        return StreamingResponse(whole(), headers=SAFE_HEADERS, media_type="text/event-stream")

    async def _polled(
        self, request: Request, credential: Mapping[str, str], path: str, query: Mapping[str, str]
    ) -> UpstreamReply:
        reply = await self.ask(request, "GET", f"{path}?{urlencode(query)}", credential, wait_s=STREAM_WAIT_S)
        if reply.status != 200:
            error = json.loads(reply.body)
            raise ProblemError(reply.status, error["error"], _passed(reply.headers), error["kind"])
        return reply

    async def _events(
        self, request: Request, credential: Mapping[str, str], after: str, filters: Mapping[str, str]
    ) -> AsyncIterator[bytes]:
        wait_s = "0"
        while True:
            query = {"wait_s": wait_s, **filters} | ({"after": after} if after else {})
            values = json.loads((await self._polled(request, credential, "/v1/events", query)).body)
            lines = [_event(event["about"], event, event["seq"]) for event in values["events"]]
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


def own_origin(request: Request) -> str:
    """Return the origin of the host that a request asks."""
    return f"{request.scope['scheme']}://{request.headers.get('host', '')}"


def _source(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def network_of(address: str) -> str:
    """Return what counts as one address: of IPv6, 64 bits; all loopback addresses together."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    ip = (ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None) or ip
    if ip.is_loopback:
        return "loopback"
    return str(ip if ip.version == 4 else ipaddress.ip_network((int(ip) >> 64 << 64, 64)))


# ----- login at an OpenID provider: authorization code flow with PKCE, state and nonce
#
# The controller makes state and nonce, and checks the id token that comes back: man/adr/0025. The gateway sends the
# browser to the provider, and exchanges the code for the id token; it reads no claim. State and verifier wait in a
# cookie of the browser that began the login, so that another browser cannot end it and nothing is kept here.
#
# Sources: OpenID Connect Core 1.0, RFC 7636 (PKCE), RFC 9207 (issuer in the answer), RFC 9700 (best current practice).


LOGIN_COOKIE = "__Host-hpcsched-login"
LOGIN_S = 600
LOGIN_PATH, CALLBACK_PATH = "/login/oidc", "/login/oidc/callback"
SCOPE = "openid profile email"
DESCRIBED_S = 3600.0
PROVIDER_S = 10.0
MAX_DESCRIPTION_BYTES = 256 << 10
MAX_PARAMETER_CHARS = 4_000
# What the HTTP client would import at its first request, when the gateway's account may not be able to read it.
FIRST_IMPORTS = ("anyio._backends._asyncio", "concurrent.futures.thread", "encodings.idna", "httpcore")


class OidcLogin:
    """Logins at one provider. `page` makes the page after a login, of the user's name.

    The secret is read at the start, when the gateway may still be root.
    """

    def __init__(self, app: GatewayApp, settings: GatewaySettings, page: Callable[[Request, str], Response]) -> None:
        import httpx  # of the extra [oidc]
        from authlib.integrations.base_client import OAuthError
        from authlib.integrations.httpx_client import AsyncOAuth2Client

        for name in FIRST_IMPORTS:
            import_module(name)
        self._http, self._oauth_client, self._oauth_error = httpx, AsyncOAuth2Client, OAuthError
        AsyncOAuth2Client()  # it imports its transport, whose name changes with the version
        self._app, self._page = app, page
        self._oidc = settings.oidc
        self._callback = settings.url.rstrip("/") + CALLBACK_PATH
        self._secret = _secret_of(Path(self._oidc.client_secret)) if self._oidc.client_secret else None
        self._tls = ssl.create_default_context(cafile=self._oidc.ca or None)
        self._described: dict[str, str] = {}
        self._described_until_s = 0.0

    def routes(self) -> list[Route]:
        """Return the routes for the ASGI application."""
        return [
            Route(LOGIN_PATH, self._app.guarded(self.begin), methods=["GET"]),
            Route(CALLBACK_PATH, self._app.guarded(self.finish), methods=["GET"]),
        ]

    async def begin(self, request: Request) -> Response:
        """Send the browser to the provider."""
        self._app.count(request)
        described = await self._description()
        begun = await self._app.public(request, "/v1/logins/begin", {})
        if begun.status != 200:
            return self._app.refusal(begun)
        login, verifier = json.loads(begun.body), secrets.token_urlsafe(48)
        async with self._client() as client:
            address, _ = client.create_authorization_url(
                described["authorization_endpoint"],
                state=login["state"],
                nonce=login["nonce"],
                code_verifier=verifier,
            )
        answer = RedirectResponse(address, 303, headers=SAFE_HEADERS)
        answer.set_cookie(
            LOGIN_COOKIE, f"{login['state']}~{verifier}", LOGIN_S, path="/", secure=True, httponly=True, samesite="lax"
        )
        return answer

    async def finish(self, request: Request) -> Response:
        """Exchange the provider's code for an id token, and that for a session."""
        self._app.count(request)
        given = request.query_params
        state, _, verifier = request.cookies.get(LOGIN_COOKIE, "").partition("~")
        if not verifier or not hmac.compare_digest(state.encode(), given.get("state", "").encode()):
            raise ProblemError(401, "cannot log in: this browser did not begin this login; begin again at /login/oidc")
        if given.get("iss", self._oidc.issuer) != self._oidc.issuer:
            raise ProblemError(401, "cannot log in: another issuer has answered")
        code = given.get("code", "")
        if not code or len(code) > MAX_PARAMETER_CHARS:
            why = "".join(filter(str.isprintable, given.get("error", "no code")[:100]))
            raise ProblemError(401, f"cannot log in: the provider says: {why}")
        token = await self._exchanged(code, verifier)
        reply = await self._app.public(request, "/v1/logins/finish", {"state": state, "id_token": token})
        answer = await self._app.opened(request, reply, partial(self._page, request))
        answer.delete_cookie(LOGIN_COOKIE, path="/", secure=True, httponly=True, samesite="lax")
        return answer

    async def _exchanged(self, code: str, verifier: str) -> str:
        """Return the id token for a code. Raises ProblemError."""
        described = await self._description()
        try:
            async with self._client() as client:
                answer = await client.fetch_token(described["token_endpoint"], code=code, code_verifier=verifier)
        except self._oauth_error as error:
            raise ProblemError(401, f"cannot log in: the provider refuses the code: {error.error}") from None
        except (self._http.HTTPError, ValueError) as error:
            raise ProblemError(502, f"cannot log in: the provider does not answer: {type(error).__name__}") from None
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise ProblemError(502, "cannot log in: the provider sent no id token")
        return token

    def _client(self) -> Any:
        return self._oauth_client(
            self._oidc.client_id,
            self._secret,
            scope=SCOPE,
            redirect_uri=self._callback,
            code_challenge_method="S256",
            token_endpoint_auth_method="client_secret_basic" if self._secret else "none",
            verify=self._tls,
            timeout=PROVIDER_S,
            follow_redirects=False,
        )

    async def _description(self) -> dict[str, str]:
        """Return the provider's endpoints. Raises ProblemError."""
        if time.monotonic() < self._described_until_s:
            return self._described
        address = f"{self._oidc.issuer.rstrip('/')}/.well-known/openid-configuration"
        try:
            async with self._http.AsyncClient(verify=self._tls, timeout=PROVIDER_S, follow_redirects=False) as client:
                answer = await client.get(address)
            values = answer.json() if len(answer.content) <= MAX_DESCRIPTION_BYTES and answer.status_code == 200 else {}
            found = {name: str(values[name]) for name in ("issuer", "authorization_endpoint", "token_endpoint")}
        except (self._http.HTTPError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = type(error).__name__
            raise ProblemError(
                502, f"cannot log in: the provider does not describe itself at {address}: {why}"
            ) from None
        ends = [urlsplit(found[name]).scheme for name in ("authorization_endpoint", "token_endpoint")]
        if found["issuer"] != self._oidc.issuer or ends != ["https", "https"]:
            raise ProblemError(502, f"cannot log in: {address} describes another issuer, or has no https")
        self._described, self._described_until_s = found, time.monotonic() + DESCRIBED_S
        return found


def _secret_of(path: Path) -> str:
    """Return the secret in a file that others cannot read. Raises ConfigError."""
    try:
        if path.stat().st_mode & 0o027:
            raise ConfigError(
                f"cannot start the gateway: others can read or write the secret {path}; run: chmod 640 {path}"
            )
        secret = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot start the gateway: cannot read the secret {path}: {error}") from None
    if not secret:
        raise ConfigError(f"cannot start the gateway: the secret {path} is empty")
    return secret
