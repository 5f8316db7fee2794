"""The members of an elastic run, as a state machine.

Takes what members report, returns what to tell them.

A *generation* is a set of members that exchange with each other; any change of the set makes a new generation.  Members leave
a generation when they are told to, or when an exchange fails, and report it.  When all remaining members have left, these and
the waiting members form the next generation.  Knows no sockets, processes or clocks: `now_s` is monotonic, and passed in.
Rules:
- A member that was declared lost stays lost: its number is not used again, and it is told to leave.
- Members with the state of the run come first, in their old order, so the first one can send it to the others.
- Only heartbeats decide whether a member is lost, not its activity.
- Once a member has left a generation because an exchange failed, no other member waits in it for long.
- Two members that do not reach each other are not in one generation for a while, although both reach the roster. The one that is
  left out is the one that reaches fewer members, else the later one. Only what a member reports while the other one lives counts.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

SILENT_S = 3.0
APART_S = 30.0  # how long two members are kept apart at first; twice as long each time
LONGEST_APART_S = 3600.0
SHORTEST_APART_S = 10.0  # if there is no generation without the two
Message = dict[str, object]


class MemberState(enum.Enum):
    """The state of a member."""

    STARTING = "starting"
    READY = "ready"  # can take part in the next generation
    IN = "in"  # takes part in the current generation
    LEFT = "left"  # has left the current generation, and waits for the next


@dataclass(slots=True, kw_only=True)
class Member:
    """A member, as the roster knows it."""

    number: int
    slot: int
    offer: Message = field(default_factory=dict)  # its address for the others
    state: MemberState = MemberState.STARTING
    heard_at_s: float
    requested: str = ""  # the last request sent to it in this generation
    requested_at_s: float = 0.0
    prepared: int = -1  # the last generation whose facts it got as a spare
    step: int = -1  # as it was reported last
    useful_s: float = 0.0  # of all its steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A lost member, with the times of its last heartbeat and of the decision."""

    number: int
    slot: int
    why: str
    heard_at_s: float
    missed_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterSettings:
    """Sizes of a generation (least, usual), and how long the first one waits."""

    least: int
    want: int
    patience_s: float = 60.0
    silent_s: float = SILENT_S
    leave_s: float = math.inf  # a member that stays in a broken generation for longer is lost


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenLink:
    """A link between two slots that failed while both reached the roster."""

    failed_at_s: float
    times: int

    @property
    def apart_s(self) -> float:
        """The seconds for which the two slots are kept apart."""
        return min(LONGEST_APART_S, APART_S * 2.0 ** min(self.times - 1, 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberChoice:
    """The members of a generation in the order of their ranks, and facts for all."""

    members: Sequence[Member]
    facts: Message = field(default_factory=dict)


# Chooses among members with the state of the run and waiting ones; None: these cannot be a generation.
# The last argument: whether the first generation still waits for all.
Arrangement = Callable[[Sequence[Member], Sequence[Member], bool], MemberChoice | None]


class Roster:
    """The members of a run; after a change, send the messages that `settle` returns.

    `arrange` chooses the members of a generation instead of sizes. It must choose none of the waiting members as long as they
    are not needed: each one that it chooses begins a new generation.
    """

    def __init__(self, settings: RosterSettings, now_s: float, arrange: Arrangement | None = None) -> None:
        self._arrange = arrange or self._by_size
        self._settings = settings
        self._began_at_s = now_s
        self._next = 0
        self._leaving: set[int] = set()  # slots whose members have to leave
        self._closed = False
        self.members: dict[int, Member] = {}
        self.generation = -1
        self.losses: list[Loss] = []  # since the last generation was formed
        self._broken = False  # an exchange of this generation failed
        self._renewing = False
        self._facts: Message = {}  # of this generation
        self._unreached: set[frozenset[int]] = set()  # pairs of members, as reported in this generation
        self._broken_links: dict[frozenset[int], BrokenLink] = {}  # by the two slots

    @property
    def want(self) -> int:
        """The usual number of members of a generation."""
        return self._settings.want

    @property
    def leave_s(self) -> float:
        """The seconds after which a member that stays in a broken generation is lost."""
        return self._settings.leave_s

    @property
    def silent_s(self) -> float:
        """The seconds without a heartbeat after which a member is lost."""
        return self._settings.silent_s

    def join(self, slot: int, now_s: float) -> Member:
        """Add the member in `slot`, and give it a number."""
        member = Member(number=self._next, slot=slot, heard_at_s=now_s)
        self._next += 1
        self.members[member.number] = member
        return member

    def ready(self, number: int, offer: Message, now_s: float) -> None:
        """Record that a member can take part, and its address for the others."""
        member = self.members[number]
        member.offer, member.state, member.heard_at_s = offer, MemberState.READY, now_s

    def heartbeat(self, number: int, now_s: float, *, step: int = -1, useful_s: float = 0.0) -> None:
        """Record a heartbeat, the last step, and the seconds of steps since the last one."""
        member = self.members[number]
        member.heard_at_s, member.step, member.useful_s = now_s, step, member.useful_s + useful_s

    def leave_generation(
        self, number: int, generation: int, now_s: float, *, failed: bool, unreached: Collection[int] = ()
    ) -> list[Member]:
        """Record that a member has left a generation, and waits for the next.

        `failed`: an exchange failed. `unreached`: members that it did not reach. Return those that are in the generation, too.
        """
        member = self.members[number]
        member.heard_at_s = now_s
        if generation != self.generation or member.state is not MemberState.IN:
            return []
        member.state = MemberState.LEFT
        self._broken |= failed
        others = [other for other in self.inside() if other.number in unreached and other is not member]
        self._unreached |= {frozenset((number, other.number)) for other in others}
        return others

    def leave(self, number: int) -> None:
        """Remove a member that has ended without an error."""
        del self.members[number]

    def lose(self, number: int, why: str, now_s: float) -> None:
        """Declare a member lost."""
        member = self.members.pop(number)
        if member.state in (MemberState.IN, MemberState.LEFT):
            self.losses.append(
                Loss(number=number, slot=member.slot, why=why, heard_at_s=member.heard_at_s, missed_at_s=now_s)
            )

    def resize(self, want: int, leaving: set[int]) -> None:
        """Form generations of `want` members from now on, without those in the slots `leaving`."""
        self._settings = replace(self._settings, least=min(self._settings.least, want), want=want)
        self._leaving = leaving

    def renew(self) -> None:
        """Form a new generation, although no member is lost or comes: it would be another one now."""
        self._renewing = True

    def close(self) -> None:
        """Accept no new members, because the run is over for a member."""
        self._closed = True

    def extend_deadlines(self, late_s: float, now_s: float) -> None:
        """Extend all deadlines by the seconds in which the roster itself did not listen."""
        for member in self.members.values():
            member.heard_at_s = min(now_s, member.heard_at_s + late_s)
            member.requested_at_s = min(now_s, member.requested_at_s + late_s)

    def silent(self, now_s: float) -> list[Member]:
        """Return the members without a recent heartbeat; a starting member has more time."""
        return [
            member
            for member in self.members.values()
            if now_s - member.heard_at_s > self.silent_s and member.state is not MemberState.STARTING
        ]

    def stuck(self, now_s: float) -> list[Member]:
        """Return the members that stay in a broken generation: heartbeats are not progress."""
        return [
            member
            for member in self.members.values()
            if member.state is MemberState.IN
            and member.requested == "broken"
            and now_s - member.requested_at_s > self._settings.leave_s
        ]

    def inside(self) -> list[Member]:
        """Return the members of the current generation, including those that have just left it."""
        return [m for m in self.members.values() if m.state in (MemberState.IN, MemberState.LEFT)]

    def spares(self) -> list[Member]:
        """Return the members that wait as spares while the generation is complete."""
        if len(self.inside()) < self._settings.want:
            return []
        ready = [m for m in self.members.values() if m.state is MemberState.READY]
        return [member for member in ready if member.slot not in self._leaving]

    def settle(self, now_s: float) -> list[tuple[int, Message]]:
        """Return the messages to send, by member number."""
        inside = self.inside()
        waiting = [m for m in self.members.values() if m.state is MemberState.READY]
        ready = [m for m in waiting if not self._closed and m.slot not in self._leaving]
        leave: list[tuple[int, Message]] = [(m.number, {"type": "leave"}) for m in waiting if m not in ready]
        if all(member.state is MemberState.LEFT for member in inside):
            return leave + self._form(inside, ready, now_s) + self._preparations()
        request = self._request(inside, ready, now_s)
        return leave + (self._requests_to(inside, request, now_s) if request else self._preparations())

    def _request(self, inside: list[Member], ready: list[Member], now_s: float) -> str:
        """Return what the members of the current generation have to do.

        "broken", "changing" or "".
        """
        if self.losses or self._broken:
            return "broken"
        leaves = any(member.slot in self._leaving for member in inside)
        choice = self._chosen(inside, ready, now_s, patient=False) if ready else None
        joins = choice is not None and any(member not in inside for member in choice.members)
        return "changing" if leaves or joins or self._renewing else ""

    def _chosen(
        self, inside: Sequence[Member], ready: Sequence[Member], now_s: float, *, patient: bool
    ) -> MemberChoice | None:
        """Arrange the next generation without members that do not reach each other."""
        for left_out in self._left_out([member.slot for member in (*inside, *ready)], now_s):
            here = [member for member in inside if member.slot not in left_out]
            choice = self._arrange(here, [member for member in ready if member.slot not in left_out], patient)
            if choice is not None:
                return choice
        return None

    def _left_out(self, slots: Sequence[int], now_s: float) -> Iterator[set[int]]:
        """Yield slots to leave out, the best choice first.

        If no generation is possible without them, a link is tried again early.
        """
        ages_s = {pair: now_s - link.failed_at_s for pair, link in self._broken_links.items()}
        apart = [pair for pair, link in self._broken_links.items() if ages_s[pair] < link.apart_s]
        yield left_out_of(slots, apart)
        if apart:
            yield left_out_of(slots, apart, later_first=False)
            yield left_out_of(slots, [pair for pair in apart if ages_s[pair] < SHORTEST_APART_S])

    def _by_size(self, inside: Sequence[Member], ready: Sequence[Member], patient: bool) -> MemberChoice | None:
        """Choose the first members up to the wanted size, if they are enough."""
        chosen = [*inside, *ready][: self._settings.want]
        needed = self._settings.want if patient else self._settings.least
        enough = 1 if self._closed else max(1, needed)  # at the end no new members come
        return MemberChoice(members=chosen) if len(chosen) >= enough else None

    def _form(self, parted: list[Member], ready: list[Member], now_s: float) -> list[tuple[int, Message]]:
        """Form the next generation of members with the state and of waiting ones."""
        orders: list[tuple[int, Message]] = []
        for member in [m for m in parted if m.slot in self._leaving]:
            parted.remove(member)
            self.leave(member.number)
            orders.append((member.number, {"type": "leave"}))
        self._note_broken_links(now_s)
        patient = self.generation < 0 and now_s - self._began_at_s < self._settings.patience_s
        choice = self._chosen(parted, ready, now_s, patient=patient)
        if choice is None:
            return orders
        chosen = choice.members
        for member in parted:
            if member not in chosen:  # it can be of use later
                member.state = MemberState.READY
        self.generation += 1
        self._broken = self._renewing = False
        self._facts = choice.facts
        for member in chosen:
            member.state, member.requested = MemberState.IN, ""
        lost, self.losses = self.losses, []
        news: Message = {
            "type": "generation",
            "generation": self.generation,
            **choice.facts,
            "members": [{"number": m.number, **m.offer} for m in chosen],
            "lost": [{"number": x.number, "why": x.why, "unheard_s": x.missed_at_s - x.heard_at_s} for x in lost],
        }
        return orders + [(m.number, news) for m in chosen]

    def _note_broken_links(self, now_s: float) -> None:
        """Keep members apart that did not reach each other, if both are still there."""
        for numbers in self._unreached:
            if numbers <= self.members.keys():
                slots = frozenset(self.members[number].slot for number in numbers)
                before, times = self._broken_links.get(slots), 1
                if before is not None and now_s - before.failed_at_s < 2 * before.apart_s:
                    times = before.times + 1  # it has not worked since
                self._broken_links[slots] = BrokenLink(failed_at_s=now_s, times=times)
        self._unreached.clear()

    def _preparations(self) -> list[tuple[int, Message]]:
        """Return the facts of the generation for spares, once, so that they can prepare."""
        found: list[tuple[int, Message]] = []
        for member in self.spares() if self._facts else []:
            if member.prepared < self.generation:
                member.prepared = self.generation
                found.append((member.number, {"type": "prepare", **self._facts}))
        return found

    def _requests_to(self, inside: list[Member], request: str, now_s: float) -> list[tuple[int, Message]]:
        """Return a request to the members of the generation, once each.

        "broken" overrides "changing".
        """
        addressed = [m for m in inside if m.state is MemberState.IN and m.requested not in (request, "broken")]
        for member in addressed:
            member.requested, member.requested_at_s = request, now_s
        return [(member.number, {"type": request, "generation": self.generation}) for member in addressed]


def left_out_of(slots: Sequence[int], apart: Sequence[Collection[int]], *, later_first: bool = True) -> set[int]:
    """Return slots without which no two are apart.

    Those in most pairs are left out first, then later or earlier ones.
    """
    left_out: set[int] = set()
    while True:
        pairs = [pair for pair in apart if all(slot in slots and slot not in left_out for slot in pair)]
        if not pairs:
            return left_out
        candidates = reversed(slots) if later_first else slots
        left_out.add(max(candidates, key=lambda slot: sum(slot in pair for pair in pairs)))


def members_of(news: Mapping[str, object]) -> list[Message]:
    """Return the members in a generation message, in the order of their ranks."""
    members = news["members"]
    assert isinstance(members, list)
    return members
