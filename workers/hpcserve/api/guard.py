"""What each request passes first: bounds, API keys and their rates, an identifier.

Knows no models. Rules: a body is read up to a limit, within a time; an error is OpenAI's object; keys are kept as hashes; of
what a client sends nothing reaches the log or the metrics.

Sources: https://platform.openai.com/docs/guides/error-codes, https://www.rfc-editor.org/rfc/rfc6750
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hpcserve.errors import GroupLost, InvalidRequest, OverloadedError, ServeError
from hpcserve.grammar import within_depth

log = logging.getLogger(__name__)

SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
MINUTE_S = 60.0
LARGE_INPUT = 16 << 10  # bytes, characters or tokens that keep the event loop busy for milliseconds

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits:
    """The bounds of requests."""

    body_bytes: int = 8 << 20
    body_s: float = 30.0  # to send a body
    depth: int = 64  # of nested JSON
    choices: int = 256  # prompts of a request, times `n`
    requests: int = 1024  # at once
    send_s: float = 60.0  # a client that reads nothing for so long is cut off
    silence_s: float = 15.0  # then a stream gets a comment, which proxies take as a sign of life


class ApiError(ServeError):
    """A request that gets this status, as OpenAI's error object."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


def as_api_error(error: Exception) -> ApiError:
    """Return the status and the words of an error for the client."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return ApiError(400, str(error), code="invalid_value", param=error.param)
        case OverloadedError():
            return ApiError(503, str(error), code="overloaded", retry_after_s=error.retry_after_s)
        case GroupLost():
            return ApiError(503, str(error), code="replica_lost", retry_after_s=5.0)
        case HTTPException():
            words = {404: "there is no such address; see /openapi.json", 405: "this address has other methods"}
            message = f"cannot answer: {words.get(error.status_code, error.detail)}"
            return ApiError(error.status_code, message, code="not_found" if error.status_code == 404 else "not_allowed")
        case ServeError():
            return ApiError(500, str(error), code="server_error")
    return ApiError(500, "cannot answer: there is a fault in the server; its log has the details", code="server_error")


def error_object(error: ApiError) -> dict[str, Any]:
    """Return OpenAI's error object."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_response(error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    """Return the answer to a request that failed."""
    known = as_api_error(error)
    extra = dict(headers or getattr(error, "headers", None) or {})
    if known.retry_after_s is not None:
        extra["Retry-After"] = str(max(1, math.ceil(known.retry_after_s)))
    if known.status == 401:
        extra["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_object(known), known.status, extra)


async def beside_loop(size: int, call: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Return what a call returns; one with a large input runs in a thread.

    Other requests are answered meanwhile.
    """
    if size > LARGE_INPUT:
        return await asyncio.to_thread(call, *arguments)
    await asyncio.sleep(0)  # a request may have many inputs
    return call(*arguments)


async def read_body(request: Request, limits: ApiLimits) -> bytes:
    """Return the body of a request that says that it is JSON.

    Raises:
        ApiError: it is too large, too slow, or of another type.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page of another site cannot send this type unasked
        message = "cannot read the body: send it with the header 'Content-Type: application/json'"
        raise ApiError(415, message, code="unsupported_media_type")
    too_large = ApiError(413, f"cannot read the body: it has more than {limits.body_bytes} bytes", code="too_large")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > limits.body_bytes:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for piece in request.stream():
                content += piece
                if len(content) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        message = f"cannot read the body: it did not end within {limits.body_s:g} seconds"
        raise ApiError(408, message, code="timeout") from None
    return bytes(content)


def parse_json(content: bytes, depth: int) -> Any:
    """Return the value of a JSON text.

    Numbers are finite, Unicode is valid, and values are nested at most `depth` deep.

    Raises:
        ApiError: it is something else.
    """
    try:
        text = content.decode()
        value = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(
            400, "cannot read the body: it has half of a surrogate pair; send valid Unicode", code="invalid_unicode"
        ) from None
    except RecursionError:
        raise ApiError(400, "cannot read the body: it is nested too deep", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"cannot read the body: it is not JSON: {str(error)[:200]}", code="invalid_json") from None
    if not within_depth(value, depth):
        raise ApiError(400, f"cannot read the body: it is nested more than {depth} deep", code="invalid_json")
    return value


def _refuse_number(word: str) -> float:
    raise ValueError(f"{word} is not a number of JSON")


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key of the API, by its SHA-256, and what its holder may use; None: without limit."""

    name: str
    digest: str
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    at_once: int | None = None


def key_of(secret: str, *, name: str, **limits: int | None) -> ApiKey:
    """Return a key with these limits; the secret itself is not kept."""
    return ApiKey(name=name, digest=hashlib.sha256(secret.encode()).hexdigest(), **limits)


def load_keys(path: Path) -> list[ApiKey]:
    """Return the keys of a JSON file: a list of objects with the fields of `ApiKey`.

    Raises:
        ServeError: the file cannot be read, or is something else.
    """
    try:
        keys = [ApiKey(**item) for item in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError) as error:
        raise ServeError(f"cannot read the keys of '{path}': {error}") from None
    for key in keys:
        limits = (key.requests_per_min, key.tokens_per_min, key.at_once)
        if not re.fullmatch("[0-9a-f]{64}", str(key.digest)) or not all(
            limit is None or (isinstance(limit, int) and limit > 0) for limit in limits
        ):
            raise ServeError(f"cannot read the keys of '{path}': '{key.name}' needs a SHA-256 and limits above 0")
    return keys


class KeyUse:
    """What the holder of a key uses.

    Two buckets that fill up evenly, and the requests under way.
    """

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.key = key
        self.requests_left = float(key.requests_per_min or 0)
        self.tokens_left = float(key.tokens_per_min or 0)
        self.under_way = 0
        self._at_s = now_s

    def admit(self, now_s: float) -> None:
        """Count a request.

        Raises:
            ApiError: it is over a limit of the key.
        """
        minutes, self._at_s = max(0.0, now_s - self._at_s) / MINUTE_S, now_s
        key = self.key
        requests, tokens = key.requests_per_min, key.tokens_per_min
        self.requests_left = min(requests or 0, self.requests_left + minutes * (requests or 0))
        self.tokens_left = min(tokens or 0, self.tokens_left + minutes * (tokens or 0))
        if key.at_once is not None and self.under_way >= key.at_once:
            raise _too_many(f"{key.at_once} requests at once", 1.0)
        if tokens is not None and self.tokens_left <= 0:
            raise _too_many(f"{tokens} tokens a minute", (1 - self.tokens_left) * MINUTE_S / tokens)
        if requests is not None and self.requests_left < 1:
            raise _too_many(f"{requests} requests a minute", (1 - self.requests_left) * MINUTE_S / requests)
        self.requests_left -= 1  # counts for nothing without a limit
        self.under_way += 1

    def charge(self, tokens: int) -> None:
        """Count the tokens of an answer; more than are left delay the next request."""
        self.tokens_left -= tokens


def _too_many(limit: str, retry_after_s: float) -> ApiError:
    message = f"cannot accept the request: your key is limited to {limit}; try again later"
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=retry_after_s)


class RequestGuard:
    """The middleware of all requests: identifiers, keys, counts, and what is caught last."""

    def __init__(self, app: ASGIApp, *, keys: list[ApiKey] | None, limits: ApiLimits, counts: Counter[str]) -> None:
        self._app = app
        self._limits = limits
        self._counts = counts
        self._under_way = 0
        now_s = time.monotonic()
        self._uses = None if keys is None else {key.digest: KeyUse(key, now_s) for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Request(scope).headers.get("x-request-id", "")
        request_id = asked if SAFE_ID.fullmatch(asked) else uuid.uuid4().hex
        status = 0

        async def marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._admitted(scope, receive, marked)
        except ClientDisconnect:
            status = status or 499
        except Exception as error:
            known = as_api_error(error)
            if known.status == 500:
                log.exception("request %s failed", request_id)
            if not status:
                await error_response(error)(scope, receive, marked)
        finally:
            self._counts[f'requests_total{{status="{status}"}}'] += 1

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it may be answered."""
        if not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        use = self._holder(Request(scope).headers.get("authorization", ""))
        if self._under_way >= self._limits.requests:
            message = f"cannot accept the request: {self._under_way} are under way; try again later"
            raise OverloadedError(message, retry_after_s=1.0)
        if use is not None:
            use.admit(time.monotonic())
        charge, holder = (_free, "") if use is None else (use.charge, use.key.digest)
        scope.setdefault("state", {}).update(charge=charge, holder=holder)
        self._under_way += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._under_way -= 1
            if use is not None:
                use.under_way -= 1

    def _holder(self, header: str) -> KeyUse | None:
        """Return the holder of a request's key; None if no keys are needed."""
        if self._uses is None:
            return None
        scheme, _, secret = header.partition(" ")
        digest = hashlib.sha256(secret.strip().encode("utf-8", "replace")).hexdigest()
        found = self._uses.get(digest) if scheme.lower() == "bearer" else None
        if found is None:
            message = "cannot accept the request: send a valid API key as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key")
        return found


def _free(tokens: int) -> None:
    """Count the tokens of a request without a key: nobody's."""
