"""Answers that take long to make: each account waits for its own, and who has gone is worked for no more."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from waiting import played

from hpcsched.api import web
from hpcsched.api.connection_limits import AnswerSlots
from hpcsched.auth.authorize import AccessPolicy
from hpcsched.controller.views.routes import LONG_AT_ONCE, make_server

ASKED = b"GET /v1/jobs HTTP/1.1\r\nConnection: close\r\n\r\n"


class Slow:
    """A queue that is told when the gate opens."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = self.cancelled = 0

    def access(self) -> AccessPolicy:
        return AccessPolicy()

    async def jobs(self, identity: Any, query: Any) -> bytes:
        self.begun += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return b'{"jobs":[]}'

    async def queue(self, identity: Any, query: Any) -> str:
        return ""


async def _turns_of_the_loop() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def _connect(server: web.Server, asked: bytes = ASKED) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    ours, theirs = socket.socketpair()
    await asyncio.get_running_loop().connect_accepted_socket(lambda: web.Connection(server), theirs)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    writer.write(asked)
    return reader, writer


@played
async def test_an_account_that_asks_for_much_waits_for_its_own_answers() -> None:
    slow = Slow()
    server = make_server(slow, asyncio.get_running_loop().create_future())
    clients = [await _connect(server) for _ in range(LONG_AT_ONCE + 3)]
    await _turns_of_the_loop()
    assert slow.begun == LONG_AT_ONCE
    slow.gate.set()
    for reader, writer in clients:
        assert (await reader.read()).endswith(b'{"jobs":[]}')
        writer.close()
    await server.close()


@played
async def test_whose_client_has_gone_is_worked_for_no_more_and_gives_its_turn_back() -> None:
    slow = Slow()
    server = make_server(slow, asyncio.get_running_loop().create_future())
    gone = [await _connect(server) for _ in range(LONG_AT_ONCE)]
    reader, writer = await _connect(server)
    await _turns_of_the_loop()
    for _, leaving in gone:
        leaving.close()
    while slow.begun < LONG_AT_ONCE + 1:
        await asyncio.sleep(0)
    assert slow.cancelled == LONG_AT_ONCE
    slow.gate.set()
    assert (await reader.read()).endswith(b'{"jobs":[]}')
    writer.close()
    await server.close()


@played
async def test_the_queue_is_not_kept_by_questions_that_wait_for_the_rest_of_the_controller() -> None:
    slow = Slow()
    slow.gate.set()
    coming: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    server = make_server(slow, coming)
    later = [await _connect(server, ASKED.replace(b"/v1/jobs", b"/v1/priorities")) for _ in range(LONG_AT_ONCE + 1)]
    reader, writer = await _connect(server)
    assert (await reader.read()).endswith(b'{"jobs":[]}')
    coming.set_result(SimpleNamespace(priorities=lambda identity, query: {"jobs": []}))
    for reads, _ in later:
        assert (await reads.read()).endswith(b'"jobs":[]}')
    for _, writes in (*later, (reader, writer)):
        writes.close()
    await server.close()


@played
async def test_accounts_do_not_wait_for_each_other() -> None:
    turns = AnswerSlots(1, 4)
    async with turns.turn(1000):
        second = asyncio.ensure_future(turns.turn(1000).__aenter__())
        async with turns.turn(1001):
            await asyncio.sleep(0)
            assert not second.done()
    await second
