"""Shepherds, step by step as `hpcnode.shepherd.shepherd` does it, and the agent's side (`hpcnode.agent.shepherds`), simulated.

    begun -> task forked, stopped on a pipe -> `started` durable -> released -> over -> `final` durable -> told -> gone

The files are written by the real `Spool`. The task is a process of its own: it holds the entry's lock until it runs its
program, runs it if it was released even when the shepherd dies right after that, and ends if the shepherd dies before.
What a program does is in its launch's arguments: see `Behaviour`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcnode.lease import LOOK_S, StepLease
from hpcnode.os import process
from hpcnode.os.account import UserAccount
from hpcnode.shepherd.environment import MARKER
from hpcnode.shepherd.step_state import BEFORE_RELEASE, REPORTABLE, RUNNING, StepEvent, StepState, after, allows
from hpcnode.wire import protocol
from hpcnode.wire.message import Message
from hpcnode.wire.shepherd_messages import (
    EndTasks,
    ReleaseTasks,
    SignalTasks,
    SuspendTasks,
    TasksEnded,
    TasksReady,
    TasksStarted,
    record_of,
)
from simulation.agenda import Process
from simulation.machine import INIT, Machine, Program

if TYPE_CHECKING:
    from simulation.agent import SimAgent

RETRY_S = 1.0
UID = 1000


WORDS = ("stubborn", "leaves", "escapes", "cannot_start", "misses_directory", "misses_interpreter", "step")


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a program does: its length, how it ends, and its manners."""

    runs_s: float = 10.0
    code: int = 0
    stubborn: bool = False  # ignores TERM
    leaves: bool = False  # leaves a process behind when it ends
    escapes: bool = False  # has a process in a session of its own, until that is killed
    cannot_start: bool = False
    misses_directory: bool = False  # on n1
    misses_interpreter: bool = False  # on n1
    step: bool = False  # runs a step on all its nodes meanwhile (batch scripts alone)

    def as_args(self) -> tuple[str, ...]:
        """Return it as arguments of a job's script."""
        words = [word for word in WORDS if getattr(self, word)]
        return (str(self.runs_s), str(self.code), *words)


def behaviour_of(launch: protocol.Launch) -> Behaviour:
    """Return how the program of a launch behaves."""
    args = launch.argv if launch.step == protocol.BATCH else launch.argv[1:]
    return Behaviour(float(args[0]), int(args[1]), **{word: True for word in args[2:]})


class Wire:
    """The connection of one agent and one shepherd: what is said arrives in order, and then the end."""

    def __init__(self, agent: SimAgent, shepherd: SimShepherd) -> None:
        self.agent, self.shepherd = agent, shepherd
        self.sim = agent.sim
        self.open = True
        self._down_s = self._up_s = 0.0

    def down(self, message: Message) -> None:
        self._down_s = max(self._down_s, self.sim.soon())
        self.sim.agenda.at(self._down_s, self.shepherd, self.shepherd.handle, self, message)

    def up(self, message: Message) -> None:
        self._up_s = max(self._up_s, self.sim.soon())
        self.sim.agenda.at(self._up_s, self.agent, self.agent.heard_shepherd, self.shepherd.token, message)

    def shepherd_ended(self) -> None:
        if self.open:
            self.open = False
            self._up_s = max(self._up_s, self.sim.soon())
            self.sim.agenda.at(self._up_s, self.agent, self.agent.shepherds.hung_up, self.shepherd.token, self)

    def agent_ended(self) -> None:
        if self.open:
            self.open = False
            self._down_s = max(self._down_s, self.sim.soon())
            self.sim.agenda.at(self._down_s, self.shepherd, self.shepherd.agent_gone, self)


class Task(Process):
    """What a shepherd forks: waits on the release pipe, then is the program."""

    kind = "task"

    def __init__(self, shepherd: SimShepherd) -> None:
        self.shepherd = shepherd
        self.machine = shepherd.machine
        self.released = False
        self.holds_lock = True
        shepherd.machine.lock(shepherd.token, self)

    def release(self) -> None:
        """The byte is in the pipe: nothing keeps it from running now."""
        self.released = True
        self.machine.sim.agenda.at(self.machine.sim.soon(), self, self.run_program)

    def pipe_closed(self) -> None:
        """The shepherd is gone, or does not want it any more."""
        if not self.released and self.alive:
            self.alive = False
            self.machine.unlock(self.shepherd.token, self)

    def run_program(self) -> None:
        """Exec: the lock closes by itself, and the program runs."""
        self.machine.unlock(self.shepherd.token, self)
        self.alive = False
        self.shepherd.run_program()


EVENTS: dict[type[Message], StepEvent] = {
    EndTasks: StepEvent.END,
    SignalTasks: StepEvent.SIGNAL,
    ReleaseTasks: StepEvent.GO,
}


class SimShepherd(Process):
    """Minds one step."""

    kind = "shepherd"

    def __init__(self, machine: Machine, token: str, agent: SimAgent, suspended: bool) -> None:
        self.machine, self.token, self.sim = machine, token, machine.sim
        self.spool = agent.spool
        self.wire: Wire | None = Wire(agent, self)
        self.listening = False
        self.launch: protocol.Launch | None = None
        self.task: Task | None = None
        self.programs: list[Program] = []
        self.state = StepState.PREPARING
        self.started: TasksStarted | None = None
        self.ended: TasksEnded | None = None
        self.kill_at_s: float | None = None
        self.why = ""
        self.may_go = True
        self.suspended = suspended
        self.overdue: list[tuple[Program, Behaviour]] = []
        self.lease: StepLease | None = None
        self.lease_over = self.node_fault = self.unexecuted = False
        self.timed_out = False
        self.code = self.signal = 0
        self.main_over = False

    def __str__(self) -> str:
        return f"the shepherd of {self.sim.words(self.token)}"

    def _later(self, call: Any, *args: Any) -> None:
        self.sim.agenda.at(self.sim.soon(), self, call, *args)

    def _apply(self, event: StepEvent) -> None:
        self.state = after(self.state, event)

    def reached(self, point: str) -> None:
        self.sim.points.reached(point)

    # ----- to the release

    def begin(self) -> None:
        self.reached("shepherd.begun")
        self.launch = self.spool.read(self.token).launch
        if self.launch is None:
            self.killed("it finds no launch")
            return
        self.may_go = not self.launch.hold
        self.lease = StepLease(self.launch, lambda: self.spool.renewed_s(self.token))
        self._later(self.fork)
        self._watch_lease()

    def _watch_lease(self) -> None:
        assert self.lease is not None
        if self.state in BEFORE_RELEASE | RUNNING and not self.lease.lasts_for_ever:
            left_s = self.lease.left_s()
            if left_s <= 0:
                self.lease_over = self.lease_over or self.state is not StepState.ENDING
                self.end(max(0.0, left_s + self.lease.grace_s), protocol.LEASE_OVER)
            pause_s = (
                min(LOOK_S, max(0.001, left_s)) if left_s > 0 else LOOK_S
            )  # simulated time passes only between steps
            self.sim.agenda.later(pause_s, self, self._watch_lease)

    def fork(self) -> None:
        if self.state is StepState.PREPARING:
            self.task = Task(self)
            self.machine.started(self.task)
            self.reached("tasks.forked")
            self._later(self.ready)

    def ready(self) -> None:
        assert self.launch is not None
        how = behaviour_of(self.launch)
        if how.cannot_start or (how.misses_directory and self.machine.name == "n1"):
            self.refuse("cannot enter the job's directory")
        elif self.state is StepState.PREPARING:
            self._apply(StepEvent.TASKS_READY)
            self.release_if_allowed()

    def release_if_allowed(self) -> None:
        if self.state is not StepState.READY or self.suspended:
            return
        if self.may_go:
            self.release()
        else:
            self.send(TasksReady())

    def release(self) -> None:
        assert self.launch is not None
        assert self.task is not None
        assert self.lease is not None
        if not self.lease.lasts_for_ever and self.lease.left_s() <= 0:
            self.end(0.0, protocol.LEASE_OVER)
            return
        machine, now_s = self.machine, self.machine.wall_s()
        self.pid, self.ticks = machine.new_pid(), machine.ticks()
        identity = process.ProcessIdentity(self.pid, self.ticks, machine.boot_id)
        started = TasksStarted(
            pid=self.pid,
            at_s=now_s,
            started_at_s=now_s,
            tasks=[identity],
            shepherd=identity,
            boot_id=machine.boot_id,
            started_boot_s=machine.boot_s(),
            uid=UID,
            stream_to=self.launch.stream_to,
        )
        try:
            self.spool.write_started(self.token, record_of(started))
        except OSError as error:
            self.node_fault = True
            self.refuse(f"cannot record the start: {error.strerror}")
            return
        self.started = started
        self._apply(StepEvent.RELEASE)
        self.task.release()
        self.reached("released")
        self.send(started)
        if self.launch.limit_s is not None:
            self.sim.agenda.later(self.launch.limit_s, self, self.limit_reached)

    def run_program(self) -> None:
        """The task's exec. The shepherd itself may be dead by now."""
        assert self.launch is not None
        how = behaviour_of(self.launch)
        if how.misses_interpreter and self.machine.name == "n1":
            if self.alive:
                self.why = self.why or "cannot execute the script"
                self.unexecuted = True
                self._later(self.reap, True, 2, 0)
            return
        parent = self.pid if self.alive else INIT
        program = Program(self.launch, self.pid, self.ticks, self.pid, parent, stubborn=how.stubborn)
        self._add(program)
        self.sim.truth.program_runs(self.machine, program)
        if how.escapes:
            pid = self.machine.new_pid()
            self._add(Program(self.launch, pid, self.machine.ticks(), pid, parent, is_main=False))
        self.sim.agenda.later(how.runs_s, None, self._program_ends, program, how)
        if how.step:
            self.sim.people.start_step(self.machine, self.launch)

    def _add(self, program: Program) -> None:
        program.ends = lambda code, signum: self._ended(program, code, signum)
        self.programs.append(program)
        self.machine.programs[program.pid] = program

    def _program_ends(self, program: Program, how: Behaviour) -> None:
        if not program.alive:
            return
        if program.stopped:
            self.overdue.append((program, how))  # its time is up, and it stands still
            return
        if how.leaves and self.launch is not None:
            pid = self.machine.new_pid()
            parent = program.parent
            self._add(Program(self.launch, pid, self.machine.ticks(), program.session, parent, True, False))
        again = how.code == 75 and self.sim.healed  # who asked to run again and again is content then
        self.machine.over(program, 0 if again else how.code, 0)

    def _ended(self, program: Program, code: int, signum: int) -> None:
        if self.alive:
            self._later(self.reap, program.is_main, code, signum)

    # ----- to the end

    def refuse(self, why: str) -> None:
        if self.state in BEFORE_RELEASE:
            self.why = self.why or why
            self.over_before_release(StepEvent.REFUSE, protocol.REFUSED)

    def over_before_release(self, event: StepEvent, status: str) -> None:
        if self.task is not None:
            self.task.pipe_closed()
        self.close(event, self.end_record(status))

    def limit_reached(self) -> None:
        if self.state in RUNNING:
            self.timed_out = True
            assert self.launch is not None
            self.end(self.launch.grace_s, "timeout")

    def suspend(self, on: bool) -> None:
        """Have the programs stand still, or go on."""
        self.suspended = on
        for program in self.programs:
            program.stopped = on
        if not on:
            for program, how in self.overdue:
                self._later(self._program_ends, program, how)
            self.overdue = []
        self.release_if_allowed()

    def end(self, grace_s: float, why: str, signum: int = 15) -> None:
        self.why = self.why or why
        if self.state in BEFORE_RELEASE:
            self.over_before_release(StepEvent.END, protocol.REVOKED)
            return
        was_ending = self.state is StepState.ENDING
        self._apply(StepEvent.END)
        if self.state is StepState.GONE:
            self.exit()
        if self.state is not StepState.ENDING:
            return
        at_s = self.sim.agenda.now_s + grace_s
        if not was_ending and grace_s > 0:
            for program in [one for one in self.programs if one.alive and not one.stubborn]:
                self.sim.agenda.at(self.sim.soon(), None, self.machine.kill, program, signum)
        if self.kill_at_s is None or at_s < self.kill_at_s:
            self.kill_at_s = at_s
            self.sim.agenda.at(at_s, self, self.kill_all)

    def kill_all(self) -> None:
        if self.state not in RUNNING:
            return
        living = [one for one in self.programs if one.alive]
        for program in living:
            self.machine.kill(program, 9)
        if not self.main_over:
            self.sim.agenda.later(0.5, self, self.kill_all)  # also what is only about to run

    def reap(self, was_main: bool, code: int, signum: int) -> None:
        if was_main:
            self.main_over, self.code, self.signal = True, code, signum
        if self.state not in RUNNING or not self.main_over:
            return
        if any(one.alive for one in self.programs):
            if self.state is StepState.RELEASED:
                self._apply(StepEvent.TASKS_OVER)
                self.kill_at_s = 0.0
                self.kill_all()
            return
        self.reached("tasks.over")
        self.close(StepEvent.TREE_EMPTY, self.end_record(protocol.ENDED))

    def end_record(self, status: str) -> TasksEnded:
        """Return the record of the end."""
        machine, launch = self.machine, self.launch
        stream_to = launch.stream_to if launch is not None else None
        if self.started is None or launch is None:
            return TasksEnded(status, machine.wall_s(), self.why, stream_to, node_fault=self.node_fault)
        count = launch.tasks.count
        return TasksEnded(
            status=protocol.LOST if self.lease_over else status,
            at_s=machine.wall_s(),
            why=self.why,
            stream_to=stream_to,
            boot_id=machine.boot_id,
            ended_boot_s=machine.boot_s(),
            ran_s=machine.boot_s() - self.started.started_boot_s,
            codes=[self.code] * count,
            signals=[self.signal] * count,
            timed_out=self.timed_out,
            unexecuted=self.unexecuted,
        )

    def close(self, event: StepEvent, ended: TasksEnded) -> None:
        self._apply(event)
        self.ended = ended
        self.write_final()

    def write_final(self) -> None:
        assert self.ended is not None
        try:
            self.spool.write_final(self.token, record_of(self.ended))
        except OSError:
            if self.started is not None:
                self.sim.agenda.later(RETRY_S, self, self.write_final)
                return
        self._apply(StepEvent.RECORD)
        if self.started is not None and self.ended.status == protocol.ENDED:
            self.sim.truth.end_kept(self.machine, self.token, record_of(self.ended))
        self.after_moves()

    def report_final(self) -> None:
        if self.state is StepState.RECORDED and self.wire is not None and self.ended is not None:
            self.send(self.ended)
            self._apply(StepEvent.REPORT)

    def after_moves(self) -> None:
        if self.state in REPORTABLE:
            self.report_final()
            self._apply(StepEvent.LEAVE)
            self.exit()

    def exit(self) -> None:
        """All is done; the lock may be closed a little later than the connection."""
        self.alive = False
        self.machine.shepherds.pop(self.token, None)
        if self.wire is not None:
            self.wire.shepherd_ended()
        self.sim.agenda.at(self.sim.soon(), None, self.machine.unlock, self.token, self)

    def killed(self, why: str) -> None:
        """SIGKILL: its task ends if it was not released; what runs, runs on."""
        self.sim.tell(f"{self} on {self.machine.name} dies: {why}")
        self.alive = False
        self.machine.shepherds.pop(self.token, None)
        self.machine.unlock(self.token, self)
        for program in self.programs:
            program.parent = INIT
        if self.task is not None:
            self.sim.agenda.at(self.sim.soon(), None, self.task.pipe_closed)
        if self.wire is not None:
            self.wire.shepherd_ended()

    # ----- the agent

    def send(self, message: Message) -> None:
        if self.wire is not None:
            self.wire.up(message)

    def handle(self, wire: Wire, message: Message) -> None:
        event = EVENTS.get(type(message))
        if isinstance(message, SuspendTasks):
            event = StepEvent.SUSPEND if message.on else StepEvent.RESUME
        if wire is not self.wire or event is None or not allows(self.state, event):
            return
        match message:
            case EndTasks():
                self.end(message.grace_s, message.why, message.signum or 15)
            case SuspendTasks():
                self.suspend(message.on)
            case ReleaseTasks():
                self.may_go = True
                self.release_if_allowed()
            case SignalTasks():
                for program in [one for one in self.programs if one.alive and not one.stubborn]:
                    self.machine.kill(program, message.signum)

    def agent_gone(self, wire: Wire) -> None:
        if wire is self.wire:
            self.wire = None
            self.listening = True
            self.after_moves()

    def agent_came(self, agent: SimAgent) -> Wire:
        """Accept the connection of the next agent."""
        self.listening = False
        self.wire = Wire(agent, self)
        self._later(self.greet)
        return self.wire

    def greet(self) -> None:
        self._apply(StepEvent.RECONNECT)
        if self.started is not None:
            self.send(self.started)
        else:
            self.release_if_allowed()
        self.after_moves()


class SimShepherdPool:
    """`hpcnode.entry.ShepherdControl` over simulated shepherds."""

    def __init__(self, agent: SimAgent) -> None:
        self._agent = agent
        self._machine = agent.machine
        self._sim = agent.sim
        self._wires: dict[str, Wire] = {}
        self._unsent: dict[str, list[Message]] = {}

    def try_to_start(self) -> None:
        """As `ShepherdPool.try_to_start`: a fork fails now and then only."""

    def start(self, launch: protocol.Launch, account: UserAccount, suspended: bool) -> None:
        """As `ShepherdPool.start`: the lock, then the fork."""
        token, machine = launch.token, self._machine
        if self.is_supervised(token):
            raise OSError("its spool entry is locked by another shepherd")
        self._sim.points.reached("fork.before")
        if self._sim.flip(self._sim.fork_fails):
            self._sim.faults["fork failed"] += 1
            raise OSError(11, "Resource temporarily unavailable")
        shepherd = SimShepherd(machine, token, self._agent, suspended)
        machine.lock(token, shepherd)
        machine.shepherds[token] = shepherd
        machine.started(shepherd)
        assert shepherd.wire is not None
        self._wires[token] = shepherd.wire
        self._sim.agenda.at(self._sim.soon(), shepherd, shepherd.begin)
        self._sim.points.reached("fork.after")

    def adopt(self, token: str) -> None:
        self._unsent.setdefault(token, [])
        self._try_adopt(token)

    def _try_adopt(self, token: str) -> None:
        shepherd = self._machine.shepherds.get(token)
        if shepherd is not None and shepherd.listening:
            wire = self._wires[token] = shepherd.agent_came(self._agent)
            for message in self._unsent.pop(token, ()):
                wire.down(message)
        elif self.is_supervised(token):
            self._sim.agenda.later(0.02, self._agent, self._agent.do, self._try_adopt, token)
        else:
            self._unsent.pop(token, None)
            self._agent.ledger.shepherd_gone(token)

    def is_supervised(self, token: str) -> bool:
        """As `ShepherdPool._lock`: the lock file is made if it is not there."""
        disk = self._machine.disk
        entry = disk.folder(["spool", token])
        if "lock" not in entry.names:
            disk.make_file(entry, "lock")
        return self._machine.is_locked(token)

    def send(self, token: str, message: Message, blob: bytes = b"") -> None:
        if token in self._wires:
            self._wires[token].down(message)
        elif token in self._unsent:
            self._unsent[token].append(message)

    def hung_up(self, token: str, wire: Wire) -> None:
        """The shepherd closed its connection; it is gone when its lock is free."""
        if self._wires.get(token) is wire:
            del self._wires[token]
            self._agent.do(self._wait_for_lock, token)

    def _wait_for_lock(self, token: str) -> None:
        if self.is_supervised(token):
            self._sim.agenda.later(0.02, self._agent, self._agent.do, self._wait_for_lock, token)
        else:
            self._agent.ledger.shepherd_gone(token)

    def agent_died(self) -> None:
        """Its connections end."""
        for wire in self._wires.values():
            wire.agent_ended()

    def claim(self, launch: protocol.Launch, account: UserAccount) -> None:
        pass

    def job_over(self, job: str, clean: bool) -> None:
        pass

    def kill_remains(self, started: dict[str, Any]) -> bool:
        """As `ShepherdPool.kill_remains`, by the real search."""
        machine = self._machine
        if started.get("boot_id") != machine.boot_id:
            return True
        tasks = [process.ProcessIdentity(*item) for item in started.get("tasks", ())]
        self._sim.processes.machine = machine
        left = process.remains_of(
            tasks,
            uid=started.get("uid", -1),
            marker=f"{MARKER}={started['token']}".encode(),
        )
        for pid in left:
            program = machine.programs.get(pid)
            if program is not None:
                self._sim.truth.killed_for(started["token"], program)
                machine.kill(program, 9)
        return not left
