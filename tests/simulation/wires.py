"""The connections between controller and agents, and what can happen to what is said over them.

Within a connection order is kept, as TCP does. A connection can break at any frame, in both directions, without either end
knowing at once or what of its frames has arrived. As attacks, frames also come twice, late on a later connection, and there in
another order; but none comes late over a reboot of its node, and none that an agent said over the end of that agent: a full
disk can make the next one forget what it was refused, and then only the order of TCP keeps an old refusal from being believed.
Nor does a Condition, which has no number that would tell an old one: it comes in its order or never, and Welcome says it anew.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcnode.wire import protocol
from simulation.machine import Machine

if TYPE_CHECKING:
    from simulation.agent import SimAgent
    from simulation.head import Link
    from simulation.stage import Simulation

LOST, CUT, DOUBLED, DELAYED, HALF, REORDERED = "lost", "cut after", "doubled", "delayed", "cut in half", "reordered"
FAULTS = (LOST, CUT, DOUBLED, DELAYED, HALF, REORDERED)

DOWN, UP = 0, 1  # to the agent, to the controller
Frame = tuple[Any, bytes]


@dataclass(slots=True)
class MessageFault:
    """What is to happen to the n-th frame of a kind in a direction; `happened` when it has."""

    direction: int
    kind: str
    count: int
    fault: str
    happened: bool = False


@dataclass(frozen=True, slots=True)
class Late:
    """A frame that comes on a later connection, at once or after the next one there."""

    agent: SimAgent  # whose connection it was sent on
    way: int
    frame: Frame
    after_next: bool
    skips: int  # connections, before the one on which it comes


class Connection:
    """One connection of a controller's link and an agent."""

    def __init__(self, wires: Wires, link: Link, agent: SimAgent) -> None:
        self.sim, self.wires, self.link, self.agent = wires.sim, wires, link, agent
        self.machine = agent.machine
        self.head_open = self.agent_open = True
        self._sent = [0, 0]
        self._lost_from = [1 << 60, 1 << 60]
        self._last_s = [0.0, 0.0]
        self._framers = (protocol.Framer(), protocol.Framer())
        self._afterwards: list[list[Frame]] = [[], []]  # late frames, to follow the next one that arrives

    # ----- what is said

    def to_agent(self, message: Any, blob: bytes = b"") -> None:
        """The controller says something."""
        if self.head_open:
            self._send(DOWN, message, blob)

    def to_head(self, message: Any, blob: bytes = b"") -> None:
        """The agent says something."""
        if self.agent_open:
            self._send(UP, message, blob)

    def _send(self, way: int, message: Any, blob: bytes) -> None:
        self._sent[way] += 1
        fault = self.wires.fault_of(way, message)
        if self.wires.encoded:
            message, blob = next(protocol.Framer().feed(protocol.encode(message, blob)))
        if fault is not None:
            self.sim.faults[f"message {fault}"] += 1
            kind = type(message).__name__
            self.sim.tell(f"{kind} {'to' if way == DOWN else 'of'} {self.machine.name}: {fault}")
        if fault in (LOST, DELAYED, HALF, REORDERED):
            broken = self._sent[way] >= self._lost_from[way]
            self.break_off(way, self._sent[way])
            if broken:
                pass  # nothing of it leaves
            elif fault == HALF:
                self._half(way, message, blob)
            elif fault != LOST and not isinstance(message, protocol.Condition):
                late = Late(self.agent, way, (message, blob), fault == REORDERED, self.wires.skips())
                self.wires.late[self.machine.name].append(late)
            return
        self._schedule(way, self._sent[way], (message, blob))
        if fault == DOUBLED:
            self._schedule(way, self._sent[way], (message, blob))
        elif fault == CUT:
            self.break_off(way, self._sent[way] + 1)

    def _half(self, way: int, message: Any, blob: bytes) -> None:
        """The first part arrives: that must be no message."""
        data = protocol.encode(message, blob)
        part = data[: self.sim.rng.randrange(1, len(data))]
        if list(self._framers[way].feed(part)):
            self.sim.truth.broken("wire", f"a part of {type(message).__name__} was taken for a message")

    def _schedule(self, way: int, number: int, frame: Frame) -> None:
        self._last_s[way] = max(self._last_s[way], self.sim.soon())
        self.sim.agenda.at(self._last_s[way], None, self._arrives, way, number, frame)

    def _arrives(self, way: int, number: int, frame: Frame) -> None:
        if number >= self._lost_from[way]:
            return
        self.deliver(way, frame)
        for late in self._afterwards[way]:
            self.deliver(way, late)
        self._afterwards[way].clear()

    def deliver(self, way: int, frame: Frame) -> None:
        """Hand a frame to its receiver, if that is still there."""
        if way == DOWN:
            if self.agent_open and self.agent.alive:
                self.sim.run(self.agent, self.agent.do, self.agent.receive, self, *frame)
        elif self.head_open and self.link.head.alive:
            self.sim.run(self.link.head, self.link.receive, self, *frame)

    def say_late(self, way: int, frame: Frame, after_next: bool) -> None:
        """A frame of an earlier connection comes now, or after the next one."""
        if after_next:
            self._afterwards[way].append(frame)
            self.sim.agenda.later(2.0, None, self._flush_late, way)
        else:
            self.sim.agenda.at(self.sim.soon(), None, self.deliver, way, frame)

    def _flush_late(self, way: int) -> None:
        for late in self._afterwards[way]:
            self.deliver(way, late)
        self._afterwards[way].clear()

    # ----- its end

    def break_off(self, way: int | None = None, lost_from: int = 0) -> None:
        """The cable is cut: frames of that way from `lost_from` on are lost, of the other way from somewhere on."""
        rng = self.sim.rng
        for one in (DOWN, UP):
            at = lost_from if one == way else rng.choice((0, self._sent[one] + 1))
            self._lost_from[one] = min(self._lost_from[one], at)
        self.sim.agenda.later(self.sim.notice_s(), self.link.head, self.link.lost, self, "the connection broke")
        if rng.random() < 0.7:  # else it notices when the next one comes
            self.sim.agenda.later(self.sim.notice_s(), self.agent, self.agent.hung_up, self)

    def agent_closed(self, why: str) -> None:
        """The agent's end is closed; what it said before still arrives, and then the end."""
        if self.agent_open:
            self.agent_open = False
            self._last_s[UP] = max(self._last_s[UP], self.sim.soon())
            self.sim.agenda.at(self._last_s[UP], self.link.head, self.link.lost, self, why)

    def head_closed(self) -> None:
        """The controller's end is closed; what it said before still arrives, if luck has it."""
        if self.head_open:
            self.head_open = False
            if self.sim.flip(0.5):
                self._lost_from[DOWN] = min(self._lost_from[DOWN], self._sent[DOWN])
            self._last_s[DOWN] = max(self._last_s[DOWN], self.sim.soon())
            self.sim.agenda.at(self._last_s[DOWN], self.agent, self.agent.hung_up, self)


class Wires:
    """All connections of a world."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.encoded = False
        self.fault_rate = 0.0
        self.faults: list[MessageFault] = []
        self.noted: list[Any] | None = None  # if wanted: every frame that was sent
        self.late: dict[str, list[Late]] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._open: list[Connection] = []

    def connect(self, link: Link, agent: SimAgent) -> Connection:
        """Return a new connection."""
        self._open = [one for one in self._open if one.head_open and one.agent_open]
        connection = Connection(self, link, agent)
        self._open.append(connection)
        return connection

    def welcomed(self, connection: Connection) -> None:
        """The connection is up: what was delayed comes now, or still later."""
        late, self.late[connection.machine.name] = self.late[connection.machine.name], []
        for one in late:
            if one.skips:
                self.late[connection.machine.name].append(dataclasses.replace(one, skips=one.skips - 1))
            elif one.way == DOWN or one.agent.alive:
                connection.say_late(one.way, one.frame, one.after_next)

    def fault_of(self, way: int, message: Any) -> str | None:
        """Return what is to happen to this frame, None for nothing."""
        kind = type(message).__name__
        if self.noted is not None or self.faults:
            count = self._counts[way, kind] = self._counts.get((way, kind), 0) + 1
            if self.noted is not None:
                self.noted.append((way, kind, count))
            for fault in self.faults:
                if not fault.happened and (fault.direction, fault.kind, fault.count) == (way, kind, count):
                    fault.happened = True
                    return fault.fault
        if self.fault_rate and self.sim.rng.random() < self.fault_rate:
            return self.sim.rng.choice(FAULTS)
        return None

    def skips(self) -> int:
        """Return how many connections a late frame lets pass: none in stories, where it is to happen."""
        return self.sim.rng.choice((0, 0, 0, 1, 2)) if self.fault_rate else 0

    def node_died(self, machine: Machine) -> None:
        """All its connections break, and what is late comes never: nothing that it knew of them is left."""
        self.cut(machine)
        self.late[machine.name].clear()

    def cut(self, machine: Machine) -> None:
        """Its cable is pulled."""
        for connection in self._open:
            if connection.machine is machine:
                connection.break_off()
