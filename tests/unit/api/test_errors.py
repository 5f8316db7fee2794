"""How the errors of handlers are answered, and that nothing of a large request outlives them."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import weakref
from types import SimpleNamespace

import pytest

from hpcsched.api import web
from hpcsched.auth.authorize import AccessPolicy
from hpcsched.controller.views.routes import LARGE_BODY_BYTES, _Routes, _uid_of
from hpcsched.errors import NotFoundError, PermissionDeniedError, RequestError

STARTING = _Routes(SimpleNamespace(), SimpleNamespace(done=lambda: False))  # type: ignore[arg-type]  # has no backend yet


class Asked(list[int]):
    """What a handler makes of a body."""


@pytest.mark.parametrize(
    ("raised", "status", "kind"),
    [
        (RequestError("no"), 400, "RequestError"),
        (NotFoundError("no"), 404, "NotFoundError"),
        (ValueError("no"), 500, "InternalError"),
    ],
)
def test_nothing_of_a_large_request_stays_after_an_error(raised: Exception, status: int, kind: str) -> None:
    made: list[weakref.ref[Asked]] = []

    async def handler(request: web.Request) -> web.Response:
        asked = Asked([0] * 10)
        made.append(weakref.ref(asked))
        raise raised.with_traceback(None)

    request = web.Request("POST", "/v1/submit", {}, {}, b" " * (LARGE_BODY_BYTES + 1), None)
    gc.disable()
    try:
        asyncio.run(STARTING.with_errors(handler)(request))  # the log keeps the traceback of a fault's first occurrence
        response = asyncio.run(STARTING.with_errors(handler)(request))
        assert made[1]() is None
    finally:
        gc.enable()
    assert response.status == status
    assert json.loads(response.body)["kind"] == kind


@pytest.mark.parametrize("gone_first", [True, False])
def test_a_client_that_has_gone_is_no_fault(gone_first: bool, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)

    async def handler(request: web.Request) -> web.Response:
        _uid_of(request)
        ours.close()
        return web.Response(b"{}")

    request = web.Request("POST", "/v1/nodes/drain", {}, {}, b"{}", ours)
    if gone_first:
        ours.close()
    with caplog.at_level(logging.ERROR):
        response = asyncio.run(STARTING.with_errors(handler)(request))
    theirs.close()
    assert response.status == (503 if gone_first else 200)
    assert not caplog.records


def test_a_refused_client_that_has_gone_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    backend = SimpleNamespace(note_refusal=lambda *_: None)
    coming = SimpleNamespace(done=lambda: True, result=lambda: backend)
    routes = _Routes(SimpleNamespace(access=AccessPolicy), coming)  # type: ignore[arg-type]

    async def handler(request: web.Request) -> web.Response:
        ours.close()
        raise PermissionDeniedError("no")

    response = asyncio.run(routes.with_errors(handler)(web.Request("GET", "/v1/strays", {}, {}, b"", ours)))
    theirs.close()
    assert response.status == 403
    assert not caplog.records
