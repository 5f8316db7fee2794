"""A node: power, boots, its processes as /proc would show them, its disk, and the locks in its spool.

Pids come round again soon, on purpose. The search for what a lost step left behind (`hpcnode.os.process.remains_of`) is the
real one: it reads the simulated process table through `simulated_processes`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcnode import lease
from hpcnode.os import process
from hpcnode.shepherd.environment import MARKER
from hpcnode.wire import protocol
from simulation.agenda import Agenda, Process
from simulation.disk import ROOT, Disk

if TYPE_CHECKING:
    from simulation.agent import SimAgent
    from simulation.shepherds import SimShepherd
    from simulation.stage import Simulation

FIRST_PID, LAST_PID = 100, 140
INIT = 1


@dataclass(slots=True, eq=False)
class Program:
    """A job's process: the batch script or a task, or what it left behind. `ends` is called when it is gone."""

    launch: protocol.Launch
    pid: int
    ticks: int
    session: int
    parent: int
    alive: bool = True
    is_main: bool = True
    stubborn: bool = False  # ignores TERM
    stopped: bool = False  # stands still
    ends: Callable[[int, int], None] | None = None  # code, signal

    @property
    def token(self) -> str:
        return self.launch.token


class Machine:
    """One node."""

    def __init__(self, sim: Simulation, name: str, cpus: int, number: int = 0) -> None:
        self.sim = sim
        self.name = name  # of the node that leads, or led, here
        self.cpus = cpus
        self.key = f"{name}~{number}" if number else name
        self.root = ROOT + self.key
        self.twins = [self]  # other directories of the same machine, see `edits`
        self.by_cluster = {sim.cluster: self}  # of these, those below the same root: of clusters by their names
        self.disk = Disk(sim.points.reached)
        self.power = True
        self.fences = 0  # admins who say that it is off, and have not been heard yet
        self.reachable = True
        self.boots = 1
        self.booted_at_s = 0.0
        self.clock_off_s = 0.0  # how far its wall clock is off
        self.agent: SimAgent | None = None
        self._locks: dict[str, set[Process]] = {}  # token -> who holds the lock in its entry
        self.programs: dict[int, Program] = {}  # by pid
        self.shepherds: dict[str, SimShepherd] = {}
        self.processes: list[Process] = []  # everything that ends with the power
        self._last_pid = FIRST_PID
        self.scripts: dict[tuple[str, str], Process] = {}  # by job and state; they outlive the agent
        self.scripts_over: set[tuple[str, str]] = set()

    @property
    def boot_id(self) -> str:
        return f"{self.twins[0].key}-boot-{self.twins[0].boots}"

    @property
    def spool(self) -> dict[str, object]:
        """What `hpcnode.spool` finds there."""
        machine = self.twins[0].key
        return {"id": self.root, "machine": machine, "inode": 1, "hardware": [machine]}

    def wall_s(self) -> float:
        """Return what its clock shows."""
        return self.sim.wall_s() + self.clock_off_s

    def boot_s(self) -> float:
        """Return what its boot clock shows."""
        return self.sim.agenda.now_s - self.booted_at_s

    # ----- locks

    def lock(self, token: str, holder: Process) -> None:
        """Have `holder` hold the lock of a token's entry, with others it was inherited from."""
        self._locks.setdefault(token, set()).add(holder)

    def unlock(self, token: str, holder: Process) -> None:
        """`holder` has closed it."""
        holders = self._locks.get(token)
        if holders is not None:
            holders.discard(holder)
            if not holders:
                del self._locks[token]

    def is_locked(self, token: str) -> bool:
        """Return whether anybody holds it."""
        return token in self._locks

    # ----- processes

    def new_pid(self) -> int:
        """Return a pid that is free."""
        while True:
            self._last_pid = FIRST_PID if self._last_pid >= LAST_PID else self._last_pid + 1
            if self._last_pid not in self.programs:
                return self._last_pid

    def ticks(self) -> int:
        """Return the start time of a process that starts now."""
        return int(self.boot_s() * 100)

    def kill(self, program: Program, signum: int) -> None:
        """End a program by a signal."""
        self.over(program, 0, signum)

    def over(self, program: Program, code: int, signum: int) -> None:
        """A program ends."""
        if not program.alive:
            return
        program.alive = False
        self.programs.pop(program.pid, None)
        self.sim.truth.program_over(self, program, code, signum)
        if program.ends is not None:
            program.ends(code, signum)

    def started(self, process_: Process) -> None:
        """Note a process that ends with the power."""
        self.processes = [one for one in self.processes if one.alive]
        self.processes.append(process_)

    # ----- power

    def power_off(self) -> None:
        """Everything ends at once; the disk loses what was not fsynced."""
        for twin in self.twins:
            twin._off()

    def _off(self) -> None:
        if not self.power:
            return
        self.sim.tell(f"{self.name} loses power")
        self.power = False
        for one in self.processes:
            one.alive = False
        self.processes.clear()
        self.agent = None
        self.shepherds.clear()
        self._locks.clear()
        for program in list(self.programs.values()):
            program.ends = None
            self.over(program, 0, 9)
        self.disk.power_failure(self.sim.rng)
        self.sim.wires.node_died(self)

    def power_on(self) -> None:
        """Boot."""
        if not any(twin.fences for twin in self.twins):
            for twin in self.twins:
                twin._on()

    def _on(self) -> None:
        if self.power:
            return
        self.power = True
        self.boots += 1
        self.booted_at_s = self.sim.agenda.now_s
        self.sim.tell(f"{self.name} boots")


@contextlib.contextmanager
def simulated_processes() -> Iterator[ProcessTable]:
    """Have `hpcnode.os.process` see a simulated process table."""
    table = ProcessTable()
    real = process.all_processes, process._owner, process._environment, lease.boot_clock_s
    process.all_processes, process._owner, process._environment = table.all, table.owner, table.environment
    lease.boot_clock_s = table.boot_clock_s
    try:
        yield table
    finally:
        process.all_processes, process._owner, process._environment, lease.boot_clock_s = real


class ProcessTable:
    """The processes of the machine that is looked at, and the boot clock of the one that something runs on."""

    def __init__(self) -> None:
        self.machine: Machine | None = None
        self.agenda = Agenda()

    def boot_clock_s(self) -> float:
        machine: Machine | None = getattr(self.agenda.running, "machine", None)
        assert machine is not None, "a process without a machine asks for the time since its boot"
        return machine.boot_s()

    def _programs(self) -> dict[int, Program]:
        return {} if self.machine is None else self.machine.programs

    def all(self) -> dict[int, process.Stat]:
        return {pid: process.Stat("S", one.parent, one.session, one.ticks, 1) for pid, one in self._programs().items()}

    def owner(self, pid: int) -> int:
        return 1000 if pid in self._programs() else -1

    def environment(self, pid: int) -> list[bytes]:
        one = self._programs().get(pid)
        return [] if one is None else [f"{MARKER}={one.token}".encode()]
