"""A controller that has just started: the queue is answered at once, all else when the rest is there."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from waiting import played

from hpcsched.api import web
from hpcsched.auth.authorize import AccessPolicy
from hpcsched.controller.views.routes import make_server


class Early:
    """The queue alone."""

    def access(self) -> AccessPolicy:
        return AccessPolicy()

    async def jobs(self, identity: Any, query: Any) -> bytes:
        return b'{"jobs":["all"]}'

    async def queue(self, identity: Any, query: Any) -> str:
        return "all\n"


WHOLE = SimpleNamespace(ping=lambda _identity: {"pid": 7})


async def _ask(server: web.Server, path: str) -> bytes:
    """Return the answer's body."""
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    await loop.connect_accepted_socket(lambda: web.Connection(server), theirs)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    writer.write(f"GET {path} HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n\r\n")[2]


@played
async def test_the_queue_is_answered_before_all_else_is_there() -> None:
    coming: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    server = make_server(Early(), coming)
    ping = asyncio.create_task(_ask(server, "/v1/ping"))
    gone = asyncio.create_task(_ask(server, "/v1/ping"))
    assert await _ask(server, "/v1/jobs") == b'{"jobs":["all"]}'
    assert await _ask(server, "/v1/queue") == b"all\n"
    gone.cancel()
    assert not ping.done()
    coming.set_result(WHOLE)
    assert await ping == b'{"version":1,"pid":7}'
    await server.close()
