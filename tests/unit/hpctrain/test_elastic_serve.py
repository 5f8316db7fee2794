"""What the roster's server says of members that go, at the end of a run and before."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence

import pytest
from roster_line import RosterLine, connected

from hpctrain.elastic.roster import Member as RosterMember
from hpctrain.elastic.roster import MemberChoice, Roster, RosterSettings
from hpctrain.elastic.serve import RosterServer

KEY = "key"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close breaks the connection off, as a process that ends at once may


class Member:
    """One end of a connection to the server."""

    def __init__(self, line: RosterLine) -> None:
        self._line, self.say = line, line.say

    async def hear(self, word: str) -> None:
        """Read until the server says this."""
        while (await self._line.hear())["type"] != word:
            pass

    async def break_off(self) -> None:
        self._line.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._line.writer.close()


async def join(port: int, slot: int) -> Member:
    member = Member(await connected(port, KEY))
    member.say(type="join", slot=slot)
    await member.hear("welcome")
    return member


async def ended_members(*, orderly: bool) -> list[str]:
    """Two members: the first one is done, or not; then the connection of the other, which waits, breaks. What is said."""
    said: list[str] = []
    server = RosterServer(
        Roster(RosterSettings(least=1, want=1), 0.0), KEY, said.append, lambda slot: None, lambda slot: None
    )
    port = await server.listen("127.0.0.1")
    first, second = await join(port, 0), await join(port, 1)
    first.say(type="ready", offer={})
    await first.hear("generation")
    second.say(type="ready", offer={})
    if orderly:
        first.say(type="done")
        await second.hear("leave")
    else:
        while not server.roster.spares():
            await asyncio.sleep(0)
    number = max(server.roster.members)
    await second.break_off()
    while number in server.roster.members:
        await asyncio.sleep(0)
    await server.close()
    return [line for line in said if "lost" in line]


def test_a_member_that_leaves_on_request_is_not_lost() -> None:
    assert asyncio.run(asyncio.wait_for(ended_members(orderly=True), 60)) == []


def test_a_member_whose_connection_breaks_is() -> None:
    (line,) = asyncio.run(asyncio.wait_for(ended_members(orderly=False), 60))
    assert line.startswith("member 1 (slot 1) is lost: its connection ")


def test_heartbeats_do_not_arrange_the_members_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.elastic.serve.LOOK_EVERY_S", 3600.0)
    arranged: list[int] = []

    def first_of(inside: Sequence[RosterMember], ready: Sequence[RosterMember], patient: bool) -> MemberChoice:
        arranged.append(len(ready))
        return MemberChoice(members=[*inside, *ready][:1])

    async def scene() -> None:
        roster = Roster(RosterSettings(least=1, want=1), 0.0, first_of)
        server = RosterServer(roster, KEY, lambda text: None, lambda slot: None, lambda slot: None)
        port = await server.listen("127.0.0.1")
        first, second = await join(port, 0), await join(port, 1)
        first.say(type="ready", offer={})
        await first.hear("generation")
        second.say(type="ready", offer={})
        while not roster.spares():
            await asyncio.sleep(0)
        before = len(arranged)
        for step in range(20):
            first.say(type="heartbeat", step=step, useful_s=0.0)
        while roster.members[0].step < 19:
            await asyncio.sleep(0)
        assert len(arranged) == before
        await server.close()

    asyncio.run(asyncio.wait_for(scene(), 60))
