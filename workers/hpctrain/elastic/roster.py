"""Who takes part in an elastic run: a state machine that is told what is heard of members, and says what to tell them.

A *generation* is a set of members that exchange with each other; whatever changes the set makes the next one.  Members part
from a generation when they are told to, or when an exchange fails, and say so; when all that are left have, the next is formed of
them and of those who wait.  Knows no sockets, processes, ranks' work or clocks: `now_s` is monotonic and handed in.
Rules:
- A member that was declared lost is never heard again: its number is not given twice, and it is told that it is out.
- Those who hold the state of the run come first, in their old order, so the first of a generation can hand it to the others.
- Nobody is waited for who is silent: heartbeats decide, not what he was doing.
- Once one has left a generation because an exchange failed, no other one is left waiting in it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

SILENT_S = 3.0
Message = dict[str, object]


class MemberState(enum.Enum):
    """Where a member stands."""

    STARTING = "starting"
    READY = "ready"  # can take part in the next generation
    IN = "in"  # takes part in this one
    PARTED = "parted"  # took part, and waits for the next


@dataclass(slots=True, kw_only=True)
class Member:
    """What is known of one."""

    number: int
    slot: int
    offer: Message = field(default_factory=dict)  # where it can be reached
    standing: MemberState = MemberState.STARTING
    heard_at_s: float
    told: str = ""  # the last wish it was told in this generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A member that was lost, and when it was heard last and missed."""

    number: int
    slot: int
    why: str
    heard_at_s: float
    missed_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterSettings:
    """How many members a generation has: at least, and as a rule; and how long the first one waits for those."""

    least: int
    want: int
    patience_s: float = 60.0
    silent_s: float = SILENT_S


class Roster:
    """The members of a run. Whoever changes something calls `settle` then and sends what it returns."""

    def __init__(self, settings: RosterSettings, now_s: float) -> None:
        self._settings = settings
        self._began_at_s = now_s
        self._next = 0
        self._leaving: set[int] = set()  # slots
        self._closed = False
        self.members: dict[int, Member] = {}
        self.generation = -1
        self.losses: list[Loss] = []  # since the last generation was formed
        self._broken = False  # an exchange of this generation failed

    @property
    def want(self) -> int:
        """How many members a generation has as a rule."""
        return self._settings.want

    @property
    def silent_s(self) -> float:
        """After how long a silent member is lost."""
        return self._settings.silent_s

    def join(self, slot: int, now_s: float) -> Member:
        """Take in who runs in `slot`, and give it a number."""
        member = Member(number=self._next, slot=slot, heard_at_s=now_s)
        self._next += 1
        self.members[member.number] = member
        return member

    def ready(self, number: int, offer: Message, now_s: float) -> None:
        """Note that a member can take part, and where the others reach it."""
        member = self.members[number]
        member.offer, member.standing, member.heard_at_s = offer, MemberState.READY, now_s

    def beat(self, number: int, now_s: float) -> None:
        """Note that a member is alive."""
        self.members[number].heard_at_s = now_s

    def part(self, number: int, generation: int, now_s: float, *, failed: bool) -> None:
        """Note that a member has left a generation and waits for the next. `failed`: it could not exchange."""
        member = self.members[number]
        member.heard_at_s = now_s
        if generation == self.generation and member.standing is MemberState.IN:
            member.standing = MemberState.PARTED
            self._broken |= failed

    def leave(self, number: int) -> None:
        """Forget a member that has ended in an orderly way."""
        del self.members[number]

    def lose(self, number: int, why: str, now_s: float) -> None:
        """Take a member for lost."""
        member = self.members.pop(number)
        if member.standing in (MemberState.IN, MemberState.PARTED):
            self.losses.append(
                Loss(number=number, slot=member.slot, why=why, heard_at_s=member.heard_at_s, missed_at_s=now_s)
            )

    def resize(self, want: int, leaving: set[int]) -> None:
        """Have generations of `want` members, without those in the slots `leaving`."""
        self._settings = replace(self._settings, least=min(self._settings.least, want), want=want)
        self._leaving = leaving

    def close(self) -> None:
        """Take in nobody any more: the run is at its end for one who took part."""
        self._closed = True

    def excuse(self, late_s: float, now_s: float) -> None:
        """Hold it against nobody that the roster itself has not listened for so long."""
        for member in self.members.values():
            member.heard_at_s = min(now_s, member.heard_at_s + late_s)

    def silent(self, now_s: float) -> list[Member]:
        """Return the members that have not been heard for too long; who starts has longer to do so."""
        return [
            member
            for member in self.members.values()
            if now_s - member.heard_at_s > self.silent_s and member.standing is not MemberState.STARTING
        ]

    def inside(self) -> list[Member]:
        """Return those who take part in this generation, or did until just now."""
        return [m for m in self.members.values() if m.standing in (MemberState.IN, MemberState.PARTED)]

    def spares(self) -> list[Member]:
        """Return those who are ready to step in, while nobody is missing."""
        if len(self.inside()) < self._settings.want:
            return []
        ready = [m for m in self.members.values() if m.standing is MemberState.READY]
        return [member for member in ready if member.slot not in self._leaving]

    def settle(self, now_s: float) -> list[tuple[int, Message]]:
        """Say who is to be told what, by number."""
        inside = self.inside()
        waiting = [m for m in self.members.values() if m.standing is MemberState.READY]
        ready = [m for m in waiting if not self._closed and m.slot not in self._leaving]
        orders: list[tuple[int, Message]] = [(m.number, {"say": "leave"}) for m in waiting if m not in ready]
        if all(member.standing is MemberState.PARTED for member in inside):
            return orders + self._form(inside, ready, now_s)
        leaves = any(member.slot in self._leaving for member in inside)
        if self.losses or self._broken:
            orders += self._tell(inside, "broken")
        elif leaves or (ready and len(inside) < self._settings.want):
            orders += self._tell(inside, "changing")
        return orders

    def _form(self, parted: list[Member], ready: list[Member], now_s: float) -> list[tuple[int, Message]]:
        """Make the next generation of those who have the state and of those who wait, if they are enough."""
        orders: list[tuple[int, Message]] = []
        for member in [m for m in parted if m.slot in self._leaving]:
            parted.remove(member)
            self.leave(member.number)
            orders.append((member.number, {"say": "leave"}))
        chosen = [*parted, *ready][: self._settings.want]
        patient = self.generation < 0 and now_s - self._began_at_s < self._settings.patience_s
        needed = self._settings.want if patient else self._settings.least
        if len(chosen) < (1 if self._closed else max(1, needed)):  # at the end nobody comes who could be waited for
            return orders
        self.generation += 1
        self._broken = False
        for member in chosen:
            member.standing, member.told = MemberState.IN, ""
        lost, self.losses = self.losses, []
        news: Message = {
            "say": "generation",
            "generation": self.generation,
            "members": [{"number": m.number, **m.offer} for m in chosen],
            "lost": [{"number": x.number, "why": x.why, "unheard_s": x.missed_at_s - x.heard_at_s} for x in lost],
        }
        return orders + [(m.number, news) for m in chosen]

    def _tell(self, inside: list[Member], wish: str) -> list[tuple[int, Message]]:
        """Tell those who take part what to do, once each; a break outranks a change."""
        told = [m for m in inside if m.standing is MemberState.IN and m.told not in (wish, "broken")]
        for member in told:
            member.told = wish
        return [(member.number, {"say": wish, "generation": self.generation}) for member in told]


def members_of(news: Mapping[str, object]) -> list[Message]:
    """Return the members of a generation's news, in the order of their ranks."""
    members = news["members"]
    assert isinstance(members, list)
    return members
