"""A simulated cluster: agenda, machines, wires, the controller, people and the truth, driven step by step.

Everything random comes from one `random.Random`. `run` goes on until some time, `settle` until nothing is left to be done
once the faults have stopped: that it comes to that is the liveness that is checked.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from hpcnode.wire.protocol import read_token
from hpcsched.model.ids import NodeName
from hpcsched.model.job import FINAL
from hpcsched.model.node import Link
from hpcsched.model.spec import JobSpec
from simulation import edits
from simulation.agenda import Agenda, Crash, Process
from simulation.agent import SimAgent
from simulation.disk import SimOs, simulated_disks
from simulation.head import CONFIG, CONFIG_WITH_SCRIPTS, Database, Head
from simulation.machine import Machine, ProcessTable, simulated_processes
from simulation.people import People
from simulation.points import Points
from simulation.shepherds import Behaviour, SimShepherd
from simulation.truth import Truth
from simulation.wires import Wires

T0 = 1_000_000_000.0
SETTLE_S = 7200.0
MAX_STEPS = 40_000


class Stage:
    """What all worlds of one operating-system process share: made once, because it is slow to make."""

    def __init__(self, disks: SimOs, processes: ProcessTable) -> None:
        self.disks = disks
        self.processes = processes
        self.database = Database()


@contextlib.contextmanager
def stage() -> Iterator[Stage]:
    """Have the production code work on simulated disks and processes, silently."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with simulated_disks() as disks, simulated_processes() as processes:
            yield Stage(disks, processes)
    finally:
        logging.disable(before)


class Simulation:
    """One simulated cluster."""

    def __init__(self, on: Stage, seed: int, nodes: dict[str, int], *, history: list[str] | None = None) -> None:
        self.rng = random.Random(seed)
        self.agenda = Agenda()
        self.points = Points(self.agenda)
        self.database = on.database
        self.database.store.sim = self
        self.processes = on.processes
        self.processes.agenda = self.agenda
        self.history = history
        self.faults: Counter[str] = Counter()  # those that happened, by kind
        self.head_clock_off_s = 0.0
        self.healed = False
        self.database_full = False
        self.commit_fails = 0.0
        self.fork_fails = 0.0
        self.power_fails = False  # what dies at a crash point of a node takes the node with it
        self.restart_s = (0.1, 4.0)
        self.wires = Wires(self)
        self.cluster = self.cluster_on_file = edits.CLUSTERS[
            0
        ]  # the name that agents' directories have, and that the files say
        self.machines = {name: Machine(self, name, cpus) for name, cpus in nodes.items()}
        self.wires.late = {name: [] for name in nodes}
        self.former: dict[str, list[Machine]] = {}  # spools to which a node's name led before
        self.without_file: set[str] = set()  # nodes that are not in the configuration now
        self.disks = on.disks
        on.disks.disks = {name: machine.disk for name, machine in self.machines.items()}
        self.truth = Truth(self)
        self.people = People(self)
        self._backup: bytes | None = None
        self.incarnations = 0
        self.database.reset(self.new_incarnation())
        self.head: Head | None = None
        self.config = CONFIG_WITH_SCRIPTS if seed % 4 == 3 else CONFIG
        self.start_head()

    def every_machine(self) -> list[Machine]:
        """Return the machines that nodes' names lead to, and those that they led to before."""
        return [*self.machines.values(), *(machine for machines in self.former.values() for machine in machines)]

    # ----- time and chance

    def soon(self) -> float:
        """Return a time a little later than now: how long things take."""
        return self.agenda.now_s + self.rng.random() * 0.01

    def notice_s(self) -> float:
        """Return how long it takes to notice that a connection has broken."""
        return self.rng.choice((0.01, 1.0, 20.0)) * self.rng.random()

    def flip(self, chance: float) -> bool:
        """Return True with that chance."""
        return chance > 0.0 and self.rng.random() < chance

    def wall_s(self) -> float:
        """Return the true time of day."""
        return T0 + self.agenda.now_s

    def new_incarnation(self) -> str:
        """Return the name of another life of the database."""
        self.incarnations += 1
        return f"{self.incarnations:016x}"

    # ----- words

    def tell(self, text: str) -> None:
        """Add a line to the history, if somebody wants it."""
        if self.history is not None:
            self.history.append(f"{self.agenda.now_s:10.3f}  {text}")

    def words(self, token: str) -> str:
        """Return what a token is of."""
        key = read_token(token)
        return token if key is None else f"job {key.job_id}, attempt {key.attempt}, {key.step}"

    # ----- processes

    def start_head(self) -> None:
        """Start a controller, if none is there."""
        if self.head is None:
            self.tell("a controller starts")
            self.head = Head(self)
            self.run(self.head, self.head.start)

    def head_died(self, head: Head) -> None:
        """Somebody starts it again."""
        if self.head is head:
            self.head = None
            self.agenda.later(self.rng.uniform(*self.restart_s), None, self.start_head)

    def run(self, process: Process, call: Callable[..., Any], *args: Any) -> None:
        """Do something as `process`, which may be killed at one of the points on the way."""
        if not process.alive:
            return
        before, self.agenda.running = self.agenda.running, process
        try:
            call(*args)
        except Crash as crash:
            self.kill(process, f"killed at {crash.point}")
        finally:
            self.agenda.running = before

    def kill(self, process: Process, why: str) -> None:
        """SIGKILL to a process, or a power failure of its node."""
        self.faults[f"{process.kind} killed at a point"] += 1
        machine = getattr(process, "machine", None)
        if self.power_fails and isinstance(machine, Machine):
            machine.power_off()
            self.agenda.later(self.rng.uniform(*self.restart_s), None, machine.power_on)
        elif isinstance(process, (Head, SimAgent, SimShepherd)):
            process.killed(why)
        else:
            process.alive = False

    # ----- driving it

    def step(self) -> None:
        """Do the next thing."""
        crash = self.agenda.step()
        if crash is not None:
            assert self.agenda.last is not None
            self.kill(self.agenda.last, f"killed at {crash.point}")

    def run_until(self, at_s: float) -> None:
        """Do all that happens before `at_s`."""
        agenda = self.agenda
        while agenda.next_at_s is not None and agenda.next_at_s <= at_s:
            self.step()
            if agenda.steps > MAX_STEPS:
                self.truth.broken("liveness", f"no end after {MAX_STEPS} steps")
        agenda.now_s = at_s

    def back_up(self) -> None:
        """Keep a copy of the database, as `hctl backup` does."""
        self.tell("the database is backed up")
        self._backup = self.database.backup()

    def restore(self) -> None:
        """Stop the controller and go back to the copy, as `hpcsched restore` does."""
        if self._backup is None:
            return
        if self.head is not None:
            self.head.killed("to restore the database")
        self.tell("the database is restored")
        former = self.database.incarnation
        self.database.restore(self._backup, self.new_incarnation(), self.wall_s())
        rows = self.database.store.load_jobs(-1.0)
        self.truth.restored(former, {job.id: job for job in rows})

    def heal(self) -> None:
        """No more faults: everything is on, connected, and has room."""
        self.tell("--- the faults stop")
        self.healed = True
        self.points.armed.clear()
        self.points.countdowns.clear()
        self.wires.faults.clear()
        self.wires.fault_rate = self.commit_fails = self.fork_fails = 0.0
        self.people.answers_lost = self.people.doubled = 0.0
        self.database_full = False
        for machines in self.former.values():
            for machine in machines:
                machine.power_off()
        for name in list(self.without_file):
            edits.add_again(self, name)
        for machine in self.machines.values():
            machine.disk.full, machine.disk.fail_in, machine.disk.full_in = False, None, None
            machine.reachable = True
            machine.power_on()
            self.people.resume(machine.name)
        self.people.release_all()

    def settle(self) -> None:
        """Run until everything is over. Raises Violation (liveness) if that does not come."""
        self._run_to_end(self.unfinished)
        if any(self.left_on(machine) for machine in self.machines.values()):
            for machine in self.machines.values():  # what a helper has left is found by the next agent
                if machine.agent is not None:
                    machine.agent.killed("to see that the next one finds what is left")
        self._run_to_end(self.unsettled)
        assert self.head is not None
        self.truth.check_end(self.head)

    def _run_to_end(self, why_not: Callable[[], str]) -> None:
        end_s = self.agenda.now_s + SETTLE_S
        while why := why_not():
            if self.agenda.now_s > end_s:
                self.truth.broken("liveness", why)
            edits.settle_former(self)
            self.people.release_all()  # also what was held when it was over, and is queued again by a late request
            self.run_until(self.agenda.now_s + 5.0)

    def left_on(self, machine: Machine) -> list[str]:
        """Return the tokens of which a node's disk still has something."""
        spool, jobs = machine.disk.find(["spool"]), machine.disk.find(["jobs"])
        names = [*getattr(spool, "names", ()), *getattr(jobs, "names", ())]
        return [name for name in names if read_token(name) is not None]

    def unfinished(self) -> str:
        """Return which job is not over yet, "" if all are."""
        if self.people.waiting:
            return f"{self.people.waiting} requests are not answered"
        for job in self.truth.rows.values():
            if job.state not in FINAL:
                return f"job {job.id} is {job.state}, attempt {job.attempt}, holds {job.held_nodes}"
        if self.truth.running:
            return f"these still run: {self.truth.running}"
        return ""

    def unsettled(self) -> str:
        """Return what is not as on an idle cluster, "" if all is."""
        for machine in self.machines.values():
            if left := self.left_on(machine):
                return f"{machine.name} still has something of {[self.words(token) for token in left]}"
            if self.head is None or self.head.state.nodes[NodeName(machine.name)].link is not Link.UP:
                return f"{machine.name} is not up"
        return self.unfinished()


def job_spec(how: Behaviour, **fields: Any) -> JobSpec:
    """Return a job whose script behaves so."""
    nodes = fields.pop("nodes", 1)
    return JobSpec(
        name="job",
        script="#!/bin/sh\n",
        work_dir="/tmp",
        script_args=how.as_args(),
        nodes_max=nodes,
        nodes_given=nodes > 1,
        **{"nodes_min": nodes, **fields},
    )
