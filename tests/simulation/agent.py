"""The agent around the real ledger and spool: connections, timers and the process itself, as `hpcnode.agent.agent` has them.

Whatever the real agent lets out of its loop (a full disk where nothing can be done about it) ends this one too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcnode.agent.agent import FORGET_S, IDLE_S, START_REPORT_S, TICK_S
from hpcnode.agent.ledger import REPEAT_S, Ledger
from hpcnode.lease import Renewals
from hpcnode.os.account import UserAccount
from hpcnode.os.loop import Timer
from hpcnode.spool import Spool
from hpcnode.wire import protocol
from hpcnode.wire.shepherd_messages import TasksEnded, TasksReady, TasksStarted
from simulation.agenda import Process
from simulation.machine import Machine
from simulation.shepherds import UID, SimShepherdPool

if TYPE_CHECKING:
    from simulation.wires import Connection

ACCOUNT = UserAccount("ann", UID, UID, [UID], "/home/ann", "/bin/sh")


class SimAgent(Process):
    """One agent, from its start to its end."""

    kind = "agent"
    spool: Spool
    ledger: Ledger

    def __init__(self, machine: Machine) -> None:
        self.machine, self.sim = machine, machine.sim
        self.shepherds = SimShepherdPool(self)
        self.connection: Connection | None = None
        self.welcomed = False
        self.clients: dict[int, Any] = {}  # stream -> step command
        self._starts_set = self._tick_set = self._forget_set = self._idle_set = False
        machine.agent = self
        machine.started(self)

    def __str__(self) -> str:
        return f"{self.machine.name}'s agent"

    def start(self) -> None:
        """Find what an agent before this one has left, and serve."""
        machine = self.machine
        self.spool = Spool(machine.root, self.sim.points)  # type: ignore[arg-type]
        self.ledger = Ledger(
            node=machine.name,
            boot_id=machine.boot_id,
            spool=self.spool,
            shepherds=self.shepherds,
            send=self.say,
            find_account=lambda _name, _allow_uid_below: ACCOUNT,
            log=lambda text: self.sim.tell(f"{machine.name}'s agent: {text}"),
            scripts=Scripts(self),
            wall_s=machine.wall_s,
            boot_s=machine.boot_s,
        )
        self.renewals = Renewals(Timers(self), self.ledger.leases, self.say)  # type: ignore[arg-type]
        self.ledger.recover()
        self.sim.agenda.later(REPEAT_S, self, self.do, self._repeat)

    def do(self, call: Callable[..., Any], *args: Any) -> None:
        """One turn of its loop."""
        try:
            call(*args)
        except OSError as error:
            self.killed(f"it cannot go on: {error}")
            return
        if self.alive:
            self._after_turn()

    def killed(self, why: str) -> None:
        """SIGKILL: its shepherds run on."""
        if not self.alive:
            return
        self.sim.tell(f"{self} dies: {why}")
        self._gone()

    def _gone(self) -> None:
        self.alive = False
        if self.machine.agent is self:
            self.machine.agent = None
        self.shepherds.agent_died()
        if self.connection is not None:
            self.connection.agent_closed("the agent has gone")

    # ----- the controller

    def greeted(self, connection: Connection, hello: protocol.Hello) -> None:
        """Take a connection whose first frame is Hello as the controller's, if it may be that."""
        why = self.ledger.epochs.begin(hello.incarnation, hello.epoch, hello.start)
        if why:
            self.sim.tell(f"{self} refuses a controller: {why}")
            connection.to_head(protocol.Goodbye(why))
            connection.agent_closed(why)
            return
        self._end_renewals()
        if self.connection is not None and self.connection is not connection:
            self.connection.to_head(protocol.Goodbye("another connection took over"))
            self.connection.agent_closed("another connection took over")
        self.connection, self.welcomed = connection, False
        welcome = protocol.Welcome(
            version=protocol.VERSION,
            node=self.machine.name,
            boot_id=self.machine.boot_id,
            agent_version="simulated",
            pid=1,
            epoch=self.ledger.epochs.seen.epoch,
            inventory=self.ledger.inventory(),
            facts={
                "machine_id": self.machine.name,
                "is_root": True,
                "fault": self.ledger.fault,
                "spool": self.machine.spool,
            },
        )
        connection.to_head(welcome)
        self.welcomed = True

    def say(self, message: protocol.Message, blob: bytes = b"") -> None:
        """Tell the controller, if one listens."""
        if self.connection is not None and self.welcomed:
            self.connection.to_head(message, blob)

    def receive(self, connection: Connection, message: protocol.Message, blob: bytes) -> None:
        """Take one frame of a connection."""
        if isinstance(message, protocol.Hello):
            if connection is self.connection:
                connection.to_head(protocol.Goodbye("a controller cannot say Hello"))
                connection.agent_closed("a second Hello")
                self.hung_up(connection)
            else:
                self.greeted(connection, message)
        elif connection is self.connection:
            self._obey(message, blob)

    def hung_up(self, connection: Connection) -> None:
        """The controller's connection ended."""
        if connection is self.connection:
            self.connection, self.welcomed = None, False
            self.do(self._end_renewals)

    def _end_renewals(self) -> None:
        self.renewals.forget()
        self.ledger.disconnected()

    def _obey(self, message: protocol.Message, blob: bytes) -> None:
        match message:
            case protocol.Launch():
                self.ledger.launch(message, blob)
            case protocol.Ack():
                self.ledger.ack(message.seqs)
            case protocol.EndStep():
                self.ledger.end_step(message)
            case protocol.EndJob():
                self.ledger.end_job(message)
            case protocol.SuspendJob():
                self.ledger.suspend_job(message)
            case protocol.Allocation():
                self.sim.people.hear_allocation(self.machine, message)
            case protocol.SignalStep():
                self.ledger.signal_step(message)
            case protocol.Go():
                self.ledger.go(message)
            case protocol.Pong():
                asked_s = self.renewals.answered(message.request)
                if asked_s is not None:
                    self.ledger.renewed(asked_s)
            case protocol.ToStream():
                self._to_client(message)
            case protocol.CloseStream():
                self.clients.pop(message.stream, None)

    def _to_client(self, message: protocol.ToStream) -> None:
        client = self.clients.get(message.stream)
        if client is None:
            self.say(protocol.CloseStream(message.stream))
        else:
            client(message.message)

    # ----- shepherds

    def heard_shepherd(self, token: str, message: protocol.Message) -> None:
        """Take a message of a shepherd."""
        match message:
            case TasksReady():
                self.do(self.ledger.shepherd_ready, token)
            case TasksStarted():
                self.do(self.ledger.shepherd_started, token, message)
            case TasksEnded():
                self.do(self.ledger.shepherd_ended, token, message)

    # ----- time

    def _after_turn(self) -> None:
        agenda = self.sim.agenda
        self.renewals.keep_on(self.welcomed)
        if self.ledger.has_unreported_starts and not self._starts_set:
            self._starts_set = True
            agenda.later(START_REPORT_S, self, self.do, self._report_starts)
        if self.ledger.waits and not self._tick_set:
            self._tick_set = True
            agenda.later(TICK_S, self, self.do, self._tick)
        if self.ledger.to_forget and not self._forget_set:
            self._forget_set = True
            agenda.later(FORGET_S, self, self.do, self._forget)
        if self.connection is None and not self._idle_set and self.ledger.is_idle:
            self._idle_set = True
            agenda.later(IDLE_S, self, self.do, self._idle)

    def _report_starts(self) -> None:
        self._starts_set = False
        self.ledger.report_starts()

    def _tick(self) -> None:
        self._tick_set = False
        self.ledger.tick()

    def _forget(self) -> None:
        self._forget_set = False
        tokens = self.ledger.forget_some()
        if tokens:
            self.sim.agenda.at(self.sim.soon(), Helper(self.machine), self._remove, tokens)

    def _remove(self, tokens: list[str]) -> None:
        """What a child of the agent does; it may outlive the agent."""
        try:
            self.spool.remove(tokens)
        except OSError as error:
            self.sim.tell(f"{self.machine.name}: entries were not removed: {error}")

    def _repeat(self) -> None:
        if self.welcomed:
            self.ledger.repeat()
        self.sim.agenda.later(REPEAT_S, self, self.do, self._repeat)

    def _idle(self) -> None:
        self._idle_set = False
        if self.connection is None and self.ledger.is_idle:
            self.sim.tell(f"{self} ends: nobody needs it")
            if self.ledger.to_forget:
                self._forget()
            self._gone()


class Timers:
    """The part of `hpcnode.os.loop.Loop` that `Renewals` needs."""

    def __init__(self, agent: SimAgent) -> None:
        self._agent = agent

    def later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call once after `delay_s`, unless the timer is cancelled."""
        timer = Timer(call)
        self._agent.sim.agenda.later(delay_s, self._agent, self._ring, timer)
        return timer

    def _ring(self, timer: Timer) -> None:
        if timer.call is not None:
            self._agent.do(timer.call)


class Scripts:
    """`hpcnode.agent.job_scripts.ScriptRunner`: what it starts outlives the agent, and notes its end."""

    def __init__(self, agent: SimAgent) -> None:
        self._agent, self._machine = agent, agent.machine

    def run(self, name: str, state: str, scripts: protocol.JobScripts, over: Callable[[str], None]) -> None:
        """Run a script, or wait for one that an earlier agent has begun."""
        machine, sim = self._machine, self._agent.sim
        key = name, state
        running = machine.scripts.get(key)
        if key in machine.scripts_over:
            sim.agenda.at(sim.soon(), self._agent, self._agent.do, over, "")
            return
        if running is None or not running.alive:
            machine.scripts[key] = script = Script(machine, key)
            sim.agenda.later(sim.rng.uniform(0.01, 3.0), script, script.end)
        sim.agenda.later(0.1, self._agent, self._agent.do, self.run, name, state, scripts, over)

    def forget(self, name: str) -> None:
        """Forget that the scripts of the job were here."""
        for state in ("prolog", "epilog"):
            self._machine.scripts.pop((name, state), None)
            self._machine.scripts_over.discard((name, state))


class Script(Process):
    """A prolog or an epilog."""

    kind = "script"

    def __init__(self, machine: Machine, key: tuple[str, str]) -> None:
        self.machine, self._key = machine, key
        machine.started(self)

    def end(self) -> None:
        """It succeeds, and says so on disk."""
        self.alive = False
        self.machine.scripts_over.add(self._key)


class Helper(Process):
    """A child of the agent that removes entries."""

    kind = "helper"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        machine.started(self)
