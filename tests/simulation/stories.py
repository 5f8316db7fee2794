"""Small stories, each tried with every crash point in it, and every fault of every message in it, and all pairs of them.

A story is first run without faults, noting every crash point that its processes pass (controller: before and after each
commit, each send and each answer; agent, shepherd and their helper: before each change of the disk, after each fsync and
rename, and at the points named in the code) and every frame that is sent. Then it is run again for each pair. A pair
counts as explored when both have happened. A crash on a node is tried twice: the process is killed; the power fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from simulation.shepherds import Behaviour
from simulation.stage import Simulation, Stage, job_spec
from simulation.truth import Violation, as_violation
from simulation.wires import DOWN, FAULTS, UP, MessageFault

HEAL_S = 8.0


@dataclass(frozen=True, slots=True)
class Story:
    """What people and nodes do, at which times."""

    name: str
    nodes: dict[str, int]
    acts: tuple[tuple[float, Callable[[Simulation], None]], ...]

    @property
    def requeues(self) -> bool:
        """Whether people ask for its job to be queued again."""
        return any(act is requeue for _, act in self.acts)


@dataclass(frozen=True, slots=True)
class Crash:
    """Where a process dies; with `power`, its node does."""

    point: str
    count: int
    power: bool = False

    @property
    def place(self) -> tuple[str, int]:
        """Where it happens."""
        return self.point, self.count

    def __str__(self) -> str:
        return f"{self.point} #{self.count}{' (power fails)' if self.power else ''}"


@dataclass(frozen=True, slots=True)
class Message:
    """Which frame is hurt, and how."""

    direction: int
    kind: str
    count: int
    fault: str

    @property
    def place(self) -> tuple[int, str, int]:
        """To which frame it happens."""
        return self.direction, self.kind, self.count

    def __str__(self) -> str:
        return f"{self.kind} #{self.count} {self.fault}"


Pair = tuple[Crash | None, Message | None]
Passed = list[Any]  # (point, count) of each point that was passed, (direction, kind, count) of each frame that was sent


@dataclass(slots=True)
class Tally:
    """What was explored."""

    runs: int = 0
    pairs: set[tuple[str, str, str]] = field(default_factory=set)  # story, crash point, message fault
    points: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Take over what another one has counted."""
        self.runs += other.runs
        self.pairs |= other.pairs
        self.points |= other.points
        self.failures += other.failures

    @property
    def distinct(self) -> set[tuple[str, str]]:
        """The (crash point, message fault) of which both happened, whatever the story."""
        return {(point, fault) for _, point, fault in self.pairs if "None" not in (point, fault)}

    def __str__(self) -> str:
        return (
            f"{self.runs} runs; {len(self.points)} crash points; {len(self.distinct)} distinct (crash point x message "
            f"fault) pairs; {len(self.failures)} violations"
        )


def submit(*specs: Behaviour, **fields: object) -> Callable[[Simulation], None]:
    """Return the act of submitting jobs that behave so."""
    return lambda sim: sim.people.submit("a", [job_spec(how, **fields) for how in specs])


def power(name: str, on: bool) -> Callable[[Simulation], None]:
    """Return the act of switching a node."""
    return lambda sim: sim.machines[name].power_on() if on else sim.machines[name].power_off()


def kill_shepherds(sim: Simulation) -> None:
    """Kill every shepherd."""
    for machine in sim.machines.values():
        for shepherd in list(machine.shepherds.values()):
            shepherd.killed("by the story")


def kill_agents(sim: Simulation) -> None:
    """Kill every agent."""
    for machine in sim.machines.values():
        if machine.agent is not None:
            machine.agent.killed("by the story")


def fill_disk(name: str, after: int) -> Callable[[Simulation], None]:
    """Return the act of filling a node's disk, after that many more writes."""
    return lambda sim: setattr(sim.machines[name].disk, "full_in", after)


def free_disk(name: str) -> Callable[[Simulation], None]:
    """Return the act of making room on a node's disk."""

    def free(sim: Simulation) -> None:
        sim.machines[name].disk.full, sim.machines[name].disk.full_in = False, None

    return free


def full_disk(after: int) -> Story:
    """A job starts on a disk that gets full after some writes; the agent dies before there is room again."""
    acts = (
        (1.0, fill_disk("n1", after)),
        (1.0, submit(Behaviour(1.5))),
        (2.0, kill_agents),
        (2.2, free_disk("n1")),
    )
    return Story(f"the disk is full after {after} writes", TWO, acts)


def cancel(sim: Simulation) -> None:
    sim.people.cancel("a")


def requeue(sim: Simulation) -> None:
    sim.people.requeue("a")


def suspend(sim: Simulation) -> None:
    sim.people.suspend("a")


def resume(sim: Simulation) -> None:
    sim.people.go_on("a")


def give_back(sim: Simulation) -> None:
    """Have the jobs go on with one node."""
    sim.people.resize("a", 1)


def preempt(mode: str) -> tuple[tuple[float, Callable[[Simulation], None]], ...]:
    """Return the acts of a job that is preempted in this way by another."""

    def high(sim: Simulation) -> None:
        sim.people.submit("b", [job_spec(SHORT, qos="high", cpus_per_task=2, mem_per_node_mib=1)])

    return ((1.0, submit(Behaviour(1.5), qos=f"low-{mode}", cpus_per_task=2, mem_per_node_mib=1)), (2.0, high))


SHORT, LONG = Behaviour(0.5), Behaviour(60.0)
ONE, TWO = {"n1": 2}, {"n1": 2, "n2": 2}

STORIES = (
    Story("a job runs", ONE, ((1.0, submit(SHORT)),)),
    Story("a job is cancelled", ONE, ((1.0, submit(LONG)), (2.0, cancel))),
    Story("a job is cancelled while it starts", ONE, ((1.0, submit(SHORT)), (1.02, cancel))),
    Story("a job is requeued", ONE, ((1.0, submit(Behaviour(1.5))), (2.0, requeue))),
    Story("a job cannot start", ONE, ((1.0, submit(Behaviour(cannot_start=True))),)),
    Story("a job starts on another node", TWO, ((1.0, submit(Behaviour(0.5, misses_directory=True))),)),
    Story("a job is executed on another node", TWO, ((1.0, submit(Behaviour(0.5, misses_interpreter=True))),)),
    Story("a job leaves something behind", ONE, ((1.0, submit(Behaviour(0.5, 1, stubborn=True, leaves=True))),)),
    Story("a job asks to run again", ONE, ((1.0, submit(Behaviour(0.5, 75), requeue=True)), (2.5, cancel))),
    Story("a shepherd is killed", ONE, ((1.0, submit(Behaviour(1.5))), (2.0, kill_shepherds))),
    Story("a node reboots", ONE, ((1.0, submit(Behaviour(1.5))), (2.0, power("n1", False)), (3.0, power("n1", True)))),
    Story("a job is suspended", ONE, ((1.0, submit(Behaviour(1.5))), (1.8, suspend), (3.0, resume))),
    Story("a suspended job is cancelled", ONE, ((1.0, submit(LONG)), (1.8, suspend), (2.5, cancel))),
    Story("a job is preempted and queued again", ONE, preempt("requeue")),
    Story("a job is preempted and has time to save", ONE, preempt("checkpoint")),
    Story("a job is preempted and cancelled", ONE, preempt("cancel")),
    Story("a job stands still for another", ONE, preempt("suspend")),
    Story("a job gives a node back", TWO, ((1.0, submit(Behaviour(2.5), nodes=2)), (2.0, give_back))),
    Story(
        "a node comes back to its job",
        TWO,
        ((1.0, submit(Behaviour(5.0, step=True), nodes=2, nodes_min=1, elastic=True)), (2.0, give_back)),
    ),
    Story("a job has two nodes", TWO, ((1.0, submit(SHORT, nodes=2)),)),
    Story("a job on two nodes is cancelled", TWO, ((1.0, submit(LONG, nodes=2)), (2.0, cancel))),
    *(full_disk(after) for after in range(8)),
    Story(
        "a shepherd is killed, not all of its job",
        ONE,
        ((1.0, submit(Behaviour(1.5, escapes=True))), (2.0, kill_shepherds)),
    ),
    Story("a step on two nodes", TWO, ((1.0, submit(Behaviour(4.0, step=True), nodes=2)),)),
)


def play(on: Stage, story: Story, pair: Pair, passed: Passed | None = None) -> tuple[Simulation, bool]:
    """Run a story with a crash and a message fault; return the world and whether both happened. Raises Violation.

    `passed` gets every point that was passed and every frame that was sent until the story ends, in order.
    """
    sim = Simulation(on, 1, story.nodes)
    sim.points.noted = sim.wires.noted = passed
    sim.wires.encoded = True
    crash, message = pair
    if crash is not None:
        sim.points.armed[(crash.point, crash.count)] = False
        sim.power_fails = crash.power
    fault = None if message is None else MessageFault(message.direction, message.kind, message.count, message.fault)
    if fault is not None:
        sim.wires.faults.append(fault)
    _act(sim, story)
    sim.points.noted = sim.wires.noted = None
    happened = all(sim.points.armed.values()) and (fault is None or fault.happened)
    sim.heal()
    sim.settle()
    return sim, happened


def _act(sim: Simulation, story: Story) -> None:
    for at_s, act in story.acts:
        sim.run_until(at_s)
        act(sim)
    sim.run_until(HEAL_S)


def faults_of(on: Stage, story: Story) -> tuple[list[Crash], list[Message], Passed]:
    """Return every crash and every message fault that the story has, and the order of what they happen to."""
    passed: Passed = []
    play(on, story, (None, None), passed)
    crashes: list[Crash] = []
    messages: list[Message] = []
    for one in dict.fromkeys(passed):
        if len(one) == 3:
            messages += [Message(*one, fault) for fault in FAULTS]
            continue
        crashes.append(Crash(*one))
        if not one[0].startswith("head"):
            crashes.append(Crash(*one, power=True))
    return crashes, messages, passed


def pairs_of(on: Stage, story: Story) -> list[Pair]:
    """Return every pair that the story has, and every crash and every fault alone."""
    crashes, messages, _ = faults_of(on, story)
    return [(crash, message) for crash in (None, *crashes) for message in (None, *messages)]


def attempt(on: Stage, story: Story, pair: Pair, passed: Passed | None = None) -> bool | str:
    """Run the story with a pair; return whether both happened, or, if it failed, words that say how to see it."""
    try:
        return play(on, story, pair, passed)[1]
    except (Exception, Violation) as error:  # the edge of a run: whatever it is, it is a failure
        return f"{story.name}: {pair[0]} x {pair[1]}: {as_violation(error)}"


def explore(on: Stage, story: Story, pairs: Iterator[Pair] | list[Pair]) -> Tally:
    """Run the story with each pair."""
    tally = Tally()
    for pair in pairs:
        tally.runs += 1
        result = attempt(on, story, pair)
        if isinstance(result, str):
            tally.failures.append(result)
        elif result:
            tally.points.add(str(pair[0]))
            tally.pairs.add((story.name, str(pair[0]), str(pair[1])))
    return tally


__all__ = ["DOWN", "UP", "STORIES", "Story", "Tally", "explore", "pairs_of", "play"]
