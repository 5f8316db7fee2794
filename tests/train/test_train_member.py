"""A member and its roster, over their connection: what is broken off when, and who is lost at the end."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from roster_line import connected
from waiting import played, wait_until

from hpctrain.elastic.launch import was_killed
from hpctrain.elastic.member import Membership
from hpctrain.elastic.roster import Roster, RosterSettings
from hpctrain.elastic.serve import MOST_IN_VAIN, RosterServer
from hpctrain.peers import HOST, Messages, Proof


class FakeRoster:
    """The other end of a member's connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._accepting = threading.Thread(target=self._welcome)
        self._accepting.start()
        port = self._listener.getsockname()[1]
        facts = {"HPCTRAIN_ROSTER": f"127.0.0.1:{port}", "HPCTRAIN_ROSTER_KEY": "k", "HPCTRAIN_SLOT": "0"}
        self.member = Membership(facts)
        self._accepting.join()

    def _welcome(self) -> None:
        self._peer, _ = self._listener.accept()
        with self._peer.makefile("rb") as lines:
            mine, other = Proof(b"k", HOST, encrypted=False), bytes.fromhex(lines.readline().decode())
            self._peer.sendall(f"{mine.nonce.hex()} {mine.of(HOST, other).hex()}\n".encode())
            session = mine.checked(other, bytes.fromhex(lines.readline().decode()))
        assert session is not None
        self._messages = Messages(session)
        self.say(type="welcome", number=0)

    def say(self, **message: object) -> None:
        self._peer.sendall(self._messages.wrapped(json.dumps(message).encode()))

    def close(self) -> None:
        self.member.done()
        self._peer.close()
        self._listener.close()


@pytest.fixture
def roster() -> Iterator[FakeRoster]:
    one = FakeRoster()
    yield one
    one.close()


def test_a_break_is_handed_on_at_once_and_one_that_was_there_before_too(roster: FakeRoster) -> None:
    broken: list[int] = []
    roster.member.watch(3, lambda: broken.append(3))
    roster.say(type="broken", generation=3)
    wait_until(lambda: broken == [3], what="the break")
    roster.member.watch(3, lambda: broken.append(33))
    assert broken == [3, 33]
    roster.member.watch(4, lambda: broken.append(4))
    assert broken == [3, 33], "that is another generation"


def test_an_unwatched_exchange_is_not_broken_off(roster: FakeRoster) -> None:
    """The member notices a neighbour's end by itself, and closes what the roster would have it break off."""
    broken: list[int] = []
    roster.member.watch(3, lambda: broken.append(3))
    roster.member.unwatch()
    roster.say(type="broken", generation=3)
    wait_until(lambda: roster.member.is_broken(3), what="the word of the break")
    roster.say(type="changing")
    wait_until(lambda: roster.member.changing, what="the next word")
    assert broken == []


def test_nothing_is_given_up_while_it_is_being_broken_off(roster: FakeRoster) -> None:
    inside, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def break_off() -> None:
        inside.set()
        go_on.wait()

    def unwatch() -> None:
        roster.member.unwatch()
        over.set()

    roster.member.watch(0, break_off)
    roster.say(type="broken", generation=0)
    inside.wait()
    other = threading.Thread(target=unwatch)
    other.start()
    assert not over.wait(0.1)
    go_on.set()
    other.join()


def test_a_member_told_to_end_is_not_lost() -> None:
    said: list[str] = []

    async def go() -> None:
        server = RosterServer(
            Roster(RosterSettings(least=1, want=1), time.monotonic()), "k", said.append, lambda _: None, lambda _: None
        )
        port = await server.listen("127.0.0.1")
        await spare(port, before_end=server.end_all)
        server.over.set()
        await spare(port)
        await server.close()
        assert not server.roster.members

    async def spare(port: int, before_end=lambda: None) -> None:  # noqa: ANN001
        line = await connected(port, "k")
        line.say(type="join", slot=3)
        assert (await line.hear())["type"] == "welcome"
        before_end()
        assert (await line.hear())["type"] == "end"
        line.writer.write_eof()  # its process ends
        assert await line.reader.read() == b"", "the server has taken note"

    asyncio.run(go())
    assert said == []


def test_a_spare_is_reported_once_when_it_is_ready() -> None:
    said: list[str] = []
    roster = Roster(RosterSettings(least=1, want=1), time.monotonic())
    server = RosterServer(roster, "k", said.append, lambda slot: None, lambda slot: None)
    for slot in (4, 7):
        roster.ready(roster.join(slot, time.monotonic()).number, {"addresses": ["10.0.0.1"]}, time.monotonic())
        server.settle()
    server.settle()
    assert said == ["generation 0: 1 members, in slots 4", "slot 7 is ready as a spare"]


def test_a_member_turned_away_is_not_lost_and_its_slot_is_given_up() -> None:
    said: list[str] = []
    lost: list[int] = []
    misfits: list[int] = []

    async def go() -> None:
        roster = Roster(RosterSettings(least=1, want=1), time.monotonic())
        server = RosterServer(roster, "k", said.append, lost.append, misfits.append)
        line = await connected(await server.listen("127.0.0.1"), "k")
        line.say(type="join", slot=3)
        line.say(type="turned away", why="other code")
        line.writer.write_eof()
        assert (await line.hear())["type"] == "welcome"
        assert await line.reader.read() == b"", "the server has taken note"
        await server.close()
        assert not roster.members

    asyncio.run(go())
    assert (lost, misfits) == ([], [3])
    assert said == ["slot 3 is given up: other code"]


def test_a_connection_without_the_runs_key_gets_no_answer() -> None:
    async def go() -> None:
        roster = Roster(RosterSettings(least=1, want=1), time.monotonic())
        server = RosterServer(roster, "k", lambda text: None, lambda slot: None, lambda slot: None)
        line = await connected(await server.listen("127.0.0.1"), "l")
        assert await line.reader.read() == b""
        await server.close()
        assert not roster.members

    asyncio.run(go())


def test_after_a_member_has_ended_fewer_than_the_least_may_continue() -> None:
    roster = Roster(RosterSettings(least=2, want=2), time.monotonic())
    server = RosterServer(roster, "k", lambda text: None, lambda slot: None, lambda slot: None)
    for slot in range(2):
        roster.ready(roster.join(slot, time.monotonic()).number, {"addresses": ["10.0.0.1"]}, time.monotonic())
    server.settle()
    server._handle(0, {"type": "done"})
    roster.leave_generation(1, 0, time.monotonic(), failed=True)
    server.settle()
    assert (roster.generation, [member.number for member in roster.inside()]) == (1, [1])


@played
async def test_no_member_is_lost_because_the_roster_itself_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    shift_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + shift_s[0])
    monkeypatch.setattr("hpctrain.elastic.serve.time", clock)
    roster = Roster(RosterSettings(least=1, want=1, silent_s=1000.0), time.monotonic())
    server = RosterServer(roster, "k", said.append, lambda slot: None, lambda slot: None)
    roster.ready(roster.join(0, time.monotonic()).number, {"addresses": ["10.0.0.1"]}, time.monotonic())
    await server.listen("127.0.0.1")
    while not any("generation 0" in line for line in said):  # it watches
        await asyncio.sleep(0.01)
    shift_s[0] = 2000.0
    while not any("stood still for 2" in line for line in said):
        await asyncio.sleep(0.01)
    assert list(roster.members) == [0], said
    await server.close()


@played
async def test_a_roster_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    roster = Roster(RosterSettings(least=1, want=1), time.monotonic())
    monkeypatch.setattr(roster, "silent", lambda now_s: 1 // 0)
    server = RosterServer(roster, "k", lambda text: None, lambda slot: None, lambda slot: None)
    await server.listen("127.0.0.1")
    await server.over.wait()
    assert server.failure.startswith("the roster failed: ZeroDivisionError")
    await server.close()


def test_members_that_never_reach_each_other_end_the_run() -> None:
    roster = Roster(RosterSettings(least=2, want=2), time.monotonic())
    server = RosterServer(roster, "k", lambda text: None, lambda slot: None, lambda slot: None)
    for slot in range(2):
        member = roster.join(slot, time.monotonic())
        roster.ready(member.number, {"addresses": [f"10.0.0.{slot}"]}, time.monotonic())

    def try_in_vain() -> None:
        server.settle()
        for number in range(2):
            roster.leave_generation(number, roster.generation, time.monotonic(), failed=True)

    for _ in range(MOST_IN_VAIN):
        try_in_vain()
    server.account.note_step(1, 0.0, time.monotonic())
    for _ in range(MOST_IN_VAIN):
        try_in_vain()
    assert not server.over.is_set(), "a step was taken in between"
    try_in_vain()
    assert server.over.is_set()
    assert (
        server.failure == "ranks do not reach each other: do firewalls let any port through between 10.0.0.0, 10.0.0.1?"
    )


@pytest.mark.parametrize(("status", "killed"), [(0, False), (1, False), (75, False), (-9, True), (137, True)])
def test_a_rank_that_is_killed_is_known_by_its_status_and_by_hruns(status: int, killed: bool) -> None:
    assert was_killed(status) is killed
