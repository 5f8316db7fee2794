"""Answers that clients do not read are bounded for each user and for all."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from starlette.responses import Response

from hpcsched.gateway.server import ALL_UNREAD_BYTES, PIECE_BYTES, UNREAD_BYTES, AnswerPacer

BODY = bytes(UNREAD_BYTES * 3 // 4)


@dataclass
class Client:
    """The client's end of one answer."""

    user: str
    may_read: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 0
    size: int = 0
    largest: int = 0
    is_dropped: bool = False

    def drop(self) -> None:
        self.is_dropped = True
        self.may_read.set()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await self.may_read.wait()
        self.status = message.get("status", self.status)
        self.size += len(message.get("body", b""))
        self.largest = max(self.largest, len(message.get("body", b"")))

    def ask(self, pacer: AnswerPacer) -> asyncio.Task[None]:
        scope = {"type": "http", "method": "GET", "state": {"asker": self.user, "connection": self}}
        return asyncio.ensure_future(pacer(scope, None, self.send))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_e1_a_user_with_unread_answers_gets_429_and_others_get_theirs() -> None:
    async def scene() -> None:
        pacer = AnswerPacer(Response(BODY), 100)
        slow, again, other = Client("a"), Client("a"), Client("b")
        waiting = slow.ask(pacer)
        await settle()
        again.may_read.set()
        other.may_read.set()
        await again.ask(pacer)
        await other.ask(pacer)
        assert (again.status, other.status, other.size) == (429, 200, len(BODY))
        assert other.largest <= PIECE_BYTES
        slow.may_read.set()
        await waiting
        assert (slow.status, slow.size, slow.is_dropped) == (200, len(BODY), False)
        later = Client("a")
        later.may_read.set()
        await later.ask(pacer)
        assert later.status == 200

    asyncio.run(scene())


def test_e1_too_many_unread_bytes_of_all_end_the_largest_answer() -> None:
    async def scene() -> None:
        pacer = AnswerPacer(Response(BODY), 100)
        clients = [Client(str(number)) for number in range(ALL_UNREAD_BYTES // len(BODY) + 1)]
        waiting = []
        for client in clients:
            waiting.append(client.ask(pacer))
            await settle()
        assert [client.is_dropped for client in clients].count(True) == 1
        for client in clients:
            client.may_read.set()
        await asyncio.gather(*waiting)
        assert [client.size for client in clients].count(len(BODY)) == len(clients) - 1

    asyncio.run(scene())
