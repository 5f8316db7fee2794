"""The roster's side of members' connections.

One TCP listener, a JSON object per line in both directions.

Both ends prove that they have the run's key, and each line is authenticated (`hpctrain.peers`). A member sends `join` (with its
slot), `ready`, `heartbeat`, `left`, `done`, `turned away` or `failed`; the roster sends `generation`, `prepare` (to spares),
`broken`, `changing`, `leave` or `end`.  A member whose connection ends without `done` is lost.  Does not start processes, nor
decide which members take part.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hpctrain.elastic.roster import Loss, Message, Roster
from hpctrain.peers import HOST, Messages, Proof, encryption_wanted

# ----- the cost of faults: from the last heartbeat of a lost rank until it is missed, the next step, and full strength
# Knows no clocks: `now_s` is monotonic, and passed in.


SHOWN = 5  # faults that are printed in full


@dataclass(slots=True, kw_only=True)
class Fault:
    """Ranks lost before the others took another step.

    Seconds since the last heartbeat of the first of them.
    """

    step: int  # the last step before it
    losses: list[Loss] = field(default_factory=list)
    next_step_s: float | None = None  # None: not yet
    full_s: float | None = None
    lost_steps: int = 0

    @property
    def heard_at_s(self) -> float:
        """The time of the last heartbeat of the first lost rank."""
        return min(loss.heard_at_s for loss in self.losses)

    @property
    def missed_s(self) -> float:
        """The seconds until the last of them was missed."""
        return max(loss.missed_at_s - loss.heard_at_s for loss in self.losses)

    def facts(self) -> dict[str, object]:
        """Return the fault as JSON values."""
        return {
            "step": self.step,
            "lost": [{"member": loss.number, "slot": loss.slot, "why": loss.why} for loss in self.losses],
            "missed_s": self.missed_s,
            "next_step_s": self.next_step_s,
            "full_strength_s": self.full_s,
            "lost_steps": self.lost_steps,
        }

    def __str__(self) -> str:
        who = ", ".join(f"slot {loss.slot} ({loss.why})" for loss in self.losses)
        parts = [f"missed after {self.missed_s:.2f} s"]
        parts += [f"next step after {self.next_step_s:.2f} s"] if self.next_step_s is not None else ["no step since"]
        parts += [f"full strength after {self.full_s:.2f} s"] if self.full_s is not None else []
        return f"fault after step {self.step} in {who}: {', '.join(parts)}, {self.lost_steps} steps lost"


class RunAccount:
    """The steps, faults and goodput of a run."""

    def __init__(self, began_at_s: float) -> None:
        self.began_at_s = began_at_s
        self.step = 0
        self.useful_s = 0.0
        self.faults: list[Fault] = []
        self._members: set[int] = set()
        self._forming = self._began_anew = False

    def lose(self, loss: Loss) -> None:
        """Record the loss of a member of the generation."""
        if not self.faults or self.faults[-1].next_step_s is not None:
            self.faults.append(Fault(step=self.step))
        self.faults[-1].losses.append(loss)
        self._forming = True

    def form(self, members: Iterable[int], want: int, now_s: float) -> None:
        """Record the members of a new generation."""
        members = set(members)
        self._began_anew = self._began_anew or bool(self._members) and not members & self._members
        self._members, self._forming = members, False
        if len(members) >= want:
            for fault in self.faults:
                if fault.full_s is None:
                    fault.full_s = now_s - fault.heard_at_s

    def note_step(self, step: int, useful_s: float, now_s: float) -> None:
        """Record a member's step; `useful_s`.

        Seconds of the first member's steps since its last report.
        """
        if self._began_anew and useful_s and not self._forming:  # no member had the state: it was restored
            self._began_anew = False
            if self.faults and step <= self.step:
                self.faults[-1].lost_steps = self.step - step + 1
                self.step = step - 1
        self.useful_s += useful_s
        if step <= self.step or self._began_anew:
            return
        self.step = step
        if self.faults and self.faults[-1].next_step_s is None and not self._forming:
            self.faults[-1].next_step_s = now_s - self.faults[-1].heard_at_s

    def facts(self, now_s: float) -> dict[str, object]:
        """Return everything as JSON values."""
        wall_s = now_s - self.began_at_s
        return {
            "wall_s": wall_s,
            "useful_s": self.useful_s,
            "goodput": self.useful_s / wall_s,
            "steps": self.step,
            "lost_steps": sum(fault.lost_steps for fault in self.faults),
            "faults": [fault.facts() for fault in self.faults],
        }

    def describe(self, now_s: float) -> list[str]:
        """Return lines of text: the last faults, then the totals."""
        wall_s = now_s - self.began_at_s
        lines = [str(fault) for fault in self.faults[-SHOWN:]]
        if len(self.faults) > SHOWN:
            lines.insert(0, f"{len(self.faults) - SHOWN} earlier faults (see --report)")
        last = f"goodput {self.useful_s / wall_s:.1%}: {self.useful_s:.1f} s of steps in {wall_s:.1f} s"
        if self.faults:
            last += f"; {len(self.faults)} faults, {sum(fault.lost_steps for fault in self.faults)} steps lost"
            for name, times in (
                ("missed", [fault.missed_s for fault in self.faults]),
                ("next step", [fault.next_step_s for fault in self.faults]),
                ("full strength", [fault.full_s for fault in self.faults]),
            ):
                known_s = [seconds for seconds in times if seconds is not None]
                if known_s:
                    last += f", {name} after {statistics.median(known_s):.2f} s (worst {max(known_s):.2f})"
        return [*lines, last]


LINE_BYTES = 1 << 20
LOOK_EVERY_S = 0.1
LATE_S = 0.5
GREETING_S = 10.0
MOST_IN_VAIN = 5  # each takes as long as members try to meet


class RosterServer:
    """The roster's connections to its members, until the run is over."""

    def __init__(
        self,
        roster: Roster,
        key: str,
        report: Callable[[str], None],
        on_lost: Callable[[int], None],
        on_misfit: Callable[[int], None],
        on_generation: Callable[[Message], None] = lambda news: None,
    ) -> None:
        """Prepare the server; `on_lost` and `on_misfit` get the slot of the member."""
        self._on_generation = on_generation
        self.roster, self._key, self._report, self._on_lost, self._on_misfit = roster, key, report, on_lost, on_misfit
        self._encrypted = encryption_wanted(os.environ)
        self.account = RunAccount(time.monotonic())
        self.over = asyncio.Event()
        self.done: dict[int, int] = {}  # slot by number, of members that have ended without an error
        self.first = -1  # the first member of the current generation
        self.failure = ""
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._messages: dict[int, Messages] = {}
        self._spares: set[int] = set()  # members that were reported as spares
        self._leaving: set[int] = set()  # members that were told to leave
        self.joined: Counter[int] = Counter()  # how many members each slot has had
        # The members of the last generation, and the step when it began.
        self._last_start: tuple[list[int], int] = ([], 0)
        self._in_vain = 0  # consecutive generations of the same members without a step

    async def listen(self, host: str) -> int:
        """Accept members from now on; return the port."""
        self._listener = await asyncio.start_server(self._serve, host, 0, limit=LINE_BYTES)
        self._watcher = asyncio.create_task(self._watch())
        self._watcher.add_done_callback(self._watched)
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End all connections."""
        self._watcher.cancel()
        self._listener.close()
        for writer in self._writers.values():
            writer.close()

    def end_all(self) -> None:
        """Tell every member to end; none counts as lost then."""
        for number in list(self.roster.members):
            self._end(number)

    def settle(self) -> None:
        """Send the messages that follow from the roster's state."""
        orders = self.roster.settle(time.monotonic())
        for number, message in orders:
            self._send(number, message)
            if message["type"] == "leave":
                self._leaving.add(number)
        news = next((message for _, message in orders if message["type"] == "generation"), None)
        if news is not None:
            self._note_generation(news)
        for member in self.roster.spares():
            if member.number not in self._spares:
                self._spares.add(member.number)
                self._report(f"slot {member.slot} is ready as a spare")

    def lose(self, number: int, why: str) -> None:
        """Declare a member lost."""
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
        self._report(f"member {number} (slot {member.slot}) is lost: {why}")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = None
        try:
            messages = await asyncio.wait_for(self._proved(reader, writer), GREETING_S)
            if messages is None:
                return
            first = json.loads(messages.unwrapped(await asyncio.wait_for(reader.readline(), GREETING_S)))
            slot = int(first["slot"])
            number = self.roster.join(slot, time.monotonic()).number
            self.joined[slot] += 1
            self._writers[number] = writer
            self._messages[number] = messages
            self._send(number, {"type": "welcome", "number": number})
            if self.over.is_set():
                self._end(number)
            while (line := await reader.readline()) and number in self.roster.members:
                message = json.loads(messages.unwrapped(line))
                self._handle(number, message)
                if message["type"] != "heartbeat":  # ten a second of each member, and nothing follows from them
                    self.settle()
        except (TimeoutError, OSError, ValueError, KeyError, TypeError, asyncio.LimitOverrunError) as error:
            why = f"its connection broke ({error})"
        else:
            why = "its connection ended"
        finally:
            writer.close()
        if number in self.roster.members:
            if number in self._leaving:  # the member was told to leave
                self.roster.leave(number)
                self._writers.pop(number, None)
            else:
                self.lose(number, why)
            self.settle()

    async def _proved(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Messages | None:
        """Prove the run's key to each other; None: the member does not have it."""
        mine = Proof(self._key.encode(), HOST, encrypted=self._encrypted)
        other = bytes.fromhex((await reader.readline()).decode().strip())
        writer.write(f"{mine.nonce.hex()} {mine.of(HOST, other).hex()}\n".encode())
        session = mine.checked(other, bytes.fromhex((await reader.readline()).decode().strip()))
        return None if session is None else Messages(session)

    def _handle(self, number: int, message: Message) -> None:
        now_s = time.monotonic()
        match message["type"]:
            case "ready":
                offer = message["offer"]
                assert isinstance(offer, dict)
                self.roster.ready(number, offer, now_s)
            case "heartbeat":
                step, useful_s = int(str(message["step"])), float(str(message["useful_s"]))
                self.roster.heartbeat(number, now_s, step=step, useful_s=useful_s)
                self.account.note_step(step, useful_s, now_s)
            case "left":
                self._note_left(number, message, now_s)
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
                self._report(f"slot {member.slot} is given up: {message['why']}")
            case other:
                raise ValueError(f"a member sent {other!r}")

    def _note_left(self, number: int, message: Message, now_s: float) -> None:
        unreached = message.get("unreached", [])
        if not isinstance(unreached, list) or not all(isinstance(other, int) for other in unreached):
            raise ValueError("a member sent other members that are no numbers")
        others = self.roster.leave_generation(
            number, int(str(message["generation"])), now_s, failed=bool(message["failed"]), unreached=unreached
        )
        for other in others:
            self._report(f"slots {self.roster.members[number].slot} and {other.slot} do not reach each other")

    def _note_generation(self, news: Message) -> None:
        members = news["members"]
        assert isinstance(members, list)
        self.first = members[0]["number"]
        self.account.form([member["number"] for member in members], self.roster.want, time.monotonic())
        slots = ", ".join(str(self.roster.members[member["number"]].slot) for member in members)
        self._report(f"generation {news['generation']}: {len(members)} members, in slots {slots}")
        start = [member["number"] for member in members], self.account.step
        self._in_vain = self._in_vain + 1 if start == self._last_start else 0
        self._last_start = start
        self._on_generation(news)
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
            if late_s > LATE_S:  # this process stood still: members' messages are still unread
                self._report(f"the roster itself stood still for {late_s:.1f} s")
                self.roster.extend_deadlines(late_s, now_s)
            for member in self.roster.silent(now_s):
                self.lose(member.number, f"no heartbeat for too long (--silence {self.roster.silent_s:g})")
            for member in self.roster.stuck(now_s):
                self.lose(member.number, f"it does not stop computing for {self.roster.leave_s:g} s")
            self.settle()

    def _watched(self, watcher: asyncio.Task[None]) -> None:
        """End the run if the watcher fails, because no loss would be noticed any more."""
        if not watcher.cancelled():
            self.failure = self.failure or f"the roster failed: {watcher.exception()!r}"
            self.over.set()

    def _end(self, number: int) -> None:
        self._send(number, {"type": "end"})
        self.roster.leave(number)

    def _send(self, number: int, message: Message) -> None:
        writer = self._writers.get(number)
        if writer is not None and not writer.is_closing():
            writer.write(self._messages[number].wrapped(json.dumps(message).encode()))
