"""The roster's side of the members' connections: one TCP listener, a JSON object per line in both directions.

A member says `join` (with the run's key and its slot), `ready`, `beat`, `part`, `done`, `turned away` or `failed`; it is told
`generation`, `broken`, `changing`, `leave` or `end`.  A connection that ends is a member that is lost, unless it said `done`.
Does not start processes, nor decide who takes part.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable

from hpctrain.elastic.account import Account
from hpctrain.elastic.roster import Message, Roster

LINE_BYTES = 1 << 20
LOOK_EVERY_S = 0.1
LATE_S = 0.5
MOST_IN_VAIN = 5  # each takes as long as members try to meet


class Server:
    """Speaks with the members of a roster until the run is over."""

    def __init__(
        self,
        roster: Roster,
        key: str,
        say: Callable[[str], None],
        on_lost: Callable[[int], None],
        on_misfit: Callable[[int], None],
    ) -> None:
        """`on_lost` and `on_misfit` are called with the slot of who is lost, or does not fit the run."""
        self.roster, self._key, self._say, self._on_lost, self._on_misfit = roster, key, say, on_lost, on_misfit
        self.account = Account(time.monotonic())
        self.over = asyncio.Event()
        self.done: dict[int, int] = {}  # slots of the members that have ended in an orderly way, by their numbers
        self.first = -1  # the first member of the present generation
        self.failure = ""
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._spares: set[int] = set()  # members that were told of as such
        self._standing: tuple[list[int], int] = (
            [],
            0,
        )  # the members of the last generation, and the step when it began
        self._in_vain = 0  # generations of the same members, one after another, that took no step

    async def listen(self, host: str) -> int:
        """This will accept members from now on; returns the port."""
        self._listener = await asyncio.start_server(self._serve, host, 0, limit=LINE_BYTES)
        self._watcher = asyncio.create_task(self._watch())
        self._watcher.add_done_callback(self._watched)
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """This will end all connections."""
        self._watcher.cancel()
        self._listener.close()
        for writer in self._writers.values():
            writer.close()

    def end_all(self) -> None:
        """This will have every member end, none of which is lost then."""
        for number in list(self.roster.members):
            self._end(number)

    def settle(self) -> None:
        """This will tell members what follows from what is known now."""
        orders = self.roster.settle(time.monotonic())
        for number, message in orders:
            self._send(number, message)
        news = next((message for _, message in orders if message["say"] == "generation"), None)
        if news is not None:
            self._note_generation(news)
        for member in self.roster.spares():
            if member.number not in self._spares:
                self._spares.add(member.number)
                self._say(f"slot {member.slot} is ready to step in")

    def lose(self, number: int, why: str) -> None:
        """This will give a member up."""
        now_s = time.monotonic()
        member = self.roster.members[number]
        self.roster.lose(number, why, now_s)
        self._on_lost(member.slot)
        writer = self._writers.pop(number, None)
        if writer is not None:
            writer.close()
        for loss in self.roster.losses:
            if loss.number == number:
                self.account.lose(loss)
        self._say(f"member {number} (slot {member.slot}) is lost: {why}")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = None
        try:
            first = json.loads(await asyncio.wait_for(reader.readline(), 10.0))
            if not hmac.compare_digest(str(first.get("key", "")), self._key):
                return
            number = self.roster.join(int(first["slot"]), time.monotonic()).number
            self._writers[number] = writer
            self._send(number, {"say": "welcome", "number": number})
            if self.over.is_set():
                self._end(number)
            while (line := await reader.readline()) and number in self.roster.members:
                self._hear(number, json.loads(line))
                self.settle()
        except (TimeoutError, OSError, ValueError, KeyError, TypeError, asyncio.LimitOverrunError) as error:
            why = f"its connection broke ({error})"
        else:
            why = "its connection ended"
        finally:
            writer.close()
        if number in self.roster.members:
            self.lose(number, why)
            self.settle()

    def _hear(self, number: int, message: Message) -> None:
        now_s = time.monotonic()
        match message["say"]:
            case "ready":
                offer = message["offer"]
                assert isinstance(offer, dict)
                self.roster.ready(number, offer, now_s)
            case "beat":
                self.roster.beat(number, now_s)
                self.account.note_step(int(str(message["step"])), float(str(message["useful_s"])), now_s)
            case "part":
                self.roster.part(number, int(str(message["generation"])), now_s, failed=bool(message["failed"]))
            case "done":
                self.done[number] = self.roster.members[number].slot
                self.roster.leave(number)
                self.roster.close()
                self.over.set()
            case "failed":
                self.failure = self.failure or str(message["why"])
                self.over.set()
            case "turned away":
                member = self.roster.members[number]
                self.roster.leave(number)
                self._on_misfit(member.slot)
                self._say(f"slot {member.slot} has no rank from now on: {message['why']}")
            case other:
                raise ValueError(f"a member said {other!r}")

    def _note_generation(self, news: Message) -> None:
        members = news["members"]
        assert isinstance(members, list)
        self.first = members[0]["number"]
        self.account.form([member["number"] for member in members], self.roster.want, time.monotonic())
        slots = ", ".join(str(self.roster.members[member["number"]].slot) for member in members)
        self._say(f"generation {news['generation']}: {len(members)} members, in slots {slots}")
        standing = [member["number"] for member in members], self.account.step
        self._in_vain = self._in_vain + 1 if standing == self._standing else 0
        self._standing = standing
        if self._in_vain == MOST_IN_VAIN:
            hosts = ", ".join(dict.fromkeys(str(member["addresses"][0]) for member in members))
            self.failure = (
                self.failure or f"ranks do not reach each other: do firewalls let any port through between {hosts}?"
            )
            self.over.set()

    async def _watch(self) -> None:
        looked_at_s = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_s = time.monotonic()
            late_s = now_s - looked_at_s - LOOK_EVERY_S
            looked_at_s = now_s
            if late_s > LATE_S:  # this process stood still: what members said meanwhile is still to be read
                self._say(f"the roster itself stood still for {late_s:.1f} s")
                self.roster.excuse(late_s, now_s)
            for member in self.roster.silent(now_s):
                self.lose(member.number, f"it was silent for too long (--silence {self.roster.silent_s:g})")
            self.settle()

    def _watched(self, watcher: asyncio.Task[None]) -> None:
        """Nobody would be missed any more: that ends the run."""
        if not watcher.cancelled():
            self.failure = self.failure or f"the roster failed: {watcher.exception()!r}"
            self.over.set()

    def _end(self, number: int) -> None:
        self._send(number, {"say": "end"})
        self.roster.leave(number)

    def _send(self, number: int, message: Message) -> None:
        writer = self._writers.get(number)
        if writer is not None and not writer.is_closing():
            writer.write(json.dumps(message).encode() + b"\n")
