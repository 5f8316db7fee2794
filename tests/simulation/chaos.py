"""Random worlds. A seed makes a script of acts; the script and the seed make the world; a shorter script may still fail.

`script_of(seed)` says what people do and what befalls the machines, and when. `play` runs it, lets the faults stop, and waits
until everything is over. `shrink` drops acts for as long as what is left still breaks the same invariant.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hpcsched.model.spec import ArraySpec
from simulation import edits
from simulation.head import LOW
from simulation.shepherds import WORDS, Behaviour
from simulation.stage import Simulation, Stage, job_spec
from simulation.truth import Violation, as_violation

LENGTH_S = 8.0
ACTS = 8
FEWEST_STEPS = 200  # before the faults stop
MAX_TRIES = 300


@dataclass(frozen=True, slots=True)
class Act:
    """Something that happens at a time."""

    at_s: float
    kind: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.at_s:7.2f}  {self.kind} {' '.join(str(arg) for arg in self.args)}"


@dataclass(frozen=True, slots=True)
class Script:
    """A whole world: its nodes, how often small things go wrong, and the acts."""

    seed: int
    nodes: dict[str, int]
    rates: dict[str, float]
    acts: tuple[Act, ...]


@dataclass(slots=True)
class Outcome:
    """How a world went."""

    seed: int
    steps: int = 0
    jobs: int = 0
    executions: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violation: Violation | None = None
    history: list[str] = field(default_factory=list)


# ----- what happens

_WEIGHTS = {
    "submit": 12,
    "cancel": 5,
    "requeue": 3,
    "hold": 1,
    "release": 1,
    "signal": 1,
    "suspend": 2,
    "go_on": 2,
    "resize": 1,
    "drain": 1,
    "resume": 1,
    "kill head": 2,
    "kill head at point": 3,
    "kill agent": 2,
    "kill agent at point": 3,
    "kill shepherd": 2,
    "kill shepherd at point": 2,
    "kill helper at point": 1,
    "power off": 3,
    "fence": 1,
    "unplug": 2,
    "cut": 3,
    "disk full": 1,
    "disk fails": 2,
    "database full": 1,
    "lead elsewhere": 2,
    "edit address": 1,
    "remove and add": 1,
    "delete file": 1,
    "rename": 1,
    "head clock": 1,
    "node clock": 1,
    "backup": 1,
    "restore": 1,
}

# What they use of it is counted where it happens: `at point`, `disk fails`, `disk full`, `database full`.
_FAULTS = frozenset(
    {"kill head", "kill agent", "kill shepherd", "power off", "fence", "unplug", "cut", "head clock", "node clock"}
    | {"backup", "restore", "lead elsewhere", "edit address", "remove and add", "delete file", "rename"}
)


def script_of(seed: int) -> Script:
    """Return the script that the seed makes."""
    rng = random.Random(f"script {seed}")
    nodes = {f"n{i}": rng.choice((1, 2, 2, 4)) for i in range(1, rng.randint(2, 4) + 1)}
    rates = {
        "fault": rng.choice((0.0, 0.0, 0.01, 0.05)),
        "commit fails": rng.choice((0.0, 0.0, 0.03)),
        "fork fails": rng.choice((0.0, 0.0, 0.05)),
        "answer lost": rng.choice((0.0, 0.2)),
        "request doubled": rng.choice((0.0, 0.2)),
        "encoded": float(rng.random() < 0.1),
    }
    kinds = [kind for kind in _WEIGHTS if kind == "submit" or rng.random() < 0.6]  # each world has faults of its own
    weights = [_WEIGHTS[kind] for kind in kinds]
    times = sorted(rng.uniform(0.0, LENGTH_S) for _ in range(ACTS))
    acts: list[Act] = [Act(times[0], "submit", _submission(rng, "r0", len(nodes), min(nodes.values())))]
    names = ["r0"]
    for at_s in times[1:]:
        kind = rng.choices(kinds, weights)[0]
        acts.append(Act(at_s, kind, _args(rng, kind, names, nodes)))
    return Script(seed, nodes, rates, tuple(acts))


def _args(rng: random.Random, kind: str, names: list[str], nodes: dict[str, int]) -> tuple[Any, ...]:
    node = rng.choice(list(nodes))
    match kind:
        case "submit":
            names.append(f"r{len(names)}")
            return _submission(rng, names[-1], len(nodes), min(nodes.values()))
        case "cancel" | "requeue" | "hold" | "release" | "suspend" | "go_on":
            return (rng.choice(names[-4:]),)
        case "signal":
            return (rng.choice(names[-4:]), rng.choice((2, 10, 15)))
        case "resize":
            return (rng.choice(names[-4:]), rng.randint(1, len(nodes)))
        case "kill head at point" | "kill agent at point" | "kill shepherd at point" | "kill helper at point":
            return (rng.randrange(25),)
        case "power off" | "unplug" | "disk full":
            return node, round(rng.choice((1.0, 5.0, 25.0)) * rng.random(), 2)
        case "lead elsewhere" | "edit address":
            return node, rng.random() < 0.5
        case "remove and add" | "delete file":
            return node, round(rng.choice((1.0, 5.0, 25.0)) * rng.random(), 2)
        case "rename":
            return (rng.choice(edits.CLUSTERS),)
        case "database full":
            return (round(5.0 * rng.random(), 2),)
        case "disk fails":
            return node, rng.randrange(20)
        case "head clock":
            return (round(rng.uniform(-1000.0, 1000.0)),)
        case "node clock":
            return node, round(rng.uniform(-100_000.0, 100_000.0))
        case "kill head" | "backup" | "restore":
            return ()
        case _:
            return (node,)


def _submission(rng: random.Random, name: str, nodes: int, cpus: int) -> tuple[Any, ...]:
    jobs = tuple(_job(rng, nodes, cpus) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    return (name, *jobs)


@dataclass(frozen=True, slots=True)
class Wish:
    """A job that is submitted."""

    how: Behaviour
    nodes: int = 1
    tasks: int = 0  # of an array
    requeue: bool | None = None
    limit_s: int | None = None
    lease: str = "keep"
    qos: str = "normal"
    cpus: int = 1
    elastic: bool = False  # content with one of its nodes, gives others back and is given more

    def __str__(self) -> str:
        words = [f"{self.how.runs_s} s", f"code {self.how.code}"]
        words += [w for w in WORDS if getattr(self.how, w)]
        words += [f"{self.nodes} nodes{' at most' if self.elastic else ''}"] if self.nodes > 1 else []
        words += [f"array of {self.tasks}"] if self.tasks else []
        words += [f"requeue={self.requeue}"] if self.requeue is not None else []
        words += [f"limit {self.limit_s} s"] if self.limit_s is not None else []
        words += [self.qos] if self.qos != "normal" else []
        words += [f"{self.cpus} cpus"] if self.cpus > 1 else []
        return f"[{', '.join(words)}{', lease=kill' if self.lease == 'kill' else ''}]"


def _job(rng: random.Random, nodes: int, cpus: int) -> Wish:
    wanted = rng.choice((1, 1, 1, 2, nodes))
    requeue = rng.choice((None, None, True, False))
    how = Behaviour(
        runs_s=round(rng.choice((0.01, 1.0, 10.0, 30.0)) * rng.random(), 3),
        code=rng.choice((0, 0, 0, 1, 75)),
        stubborn=rng.random() < 0.2,
        leaves=rng.random() < 0.2,
        escapes=rng.random() < 0.3,
        cannot_start=rng.random() < 0.05,
        misses_directory=rng.random() < 0.05,
        misses_interpreter=rng.random() < 0.05,
        step=wanted > 1 and rng.random() < 0.6,
    )
    if requeue is True and how.code == 75 and how.runs_s < 1.0:
        requeue = None  # it would run again too often
    return Wish(
        how=how,
        nodes=min(wanted, nodes),
        tasks=rng.choice((2, 4)) if rng.random() < 0.15 else 0,
        requeue=requeue,
        limit_s=rng.choice((1, 5)) if rng.random() < 0.15 else None,
        lease=rng.choice(("keep", "keep", "kill")),
        qos=rng.choice(("normal", "normal", "normal", "high", *LOW)),
        cpus=rng.choice((1, 1, cpus)),
        elastic=wanted > 1 and rng.random() < 0.5,
    )


# ----- how it happens


def act_on(sim: Simulation, act: Act) -> None:  # noqa: C901
    """Do it."""
    people, machines = sim.people, sim.machines
    match act.kind, act.args:
        case "submit", (name, *wishes):
            people.submit(name, [_spec(wish) for wish in wishes])
        case (("cancel" | "requeue" | "hold" | "release" | "suspend" | "go_on"), (name,)):
            getattr(people, act.kind)(name)
        case (("signal" | "resize"), (name, number)):
            getattr(people, act.kind)(name, number)
        case (("drain" | "resume"), (node,)):
            getattr(people, act.kind)(node)
        case "kill head", ():
            if sim.head is not None:
                sim.head.killed("by the script")
        case "kill agent", (node,):
            if (agent := machines[node].agent) is not None:
                agent.killed("by the script")
        case "kill shepherd", (node,):
            for shepherd in list(machines[node].shepherds.values())[:1]:
                shepherd.killed("by the script")
        case (("kill head at point" | "kill agent at point" | "kill shepherd at point" | "kill helper at point"), (n,)):
            sim.points.countdowns[act.kind.split(" ")[1]] = n
        case "power off", (node, for_s):
            machines[node].power_off()
            sim.agenda.later(for_s, None, machines[node].power_on)
        case "fence", (node,):
            _fence(sim, node)
        case "unplug", (node, for_s):
            sim.tell(f"{node} is unplugged")
            machines[node].reachable = False
            sim.wires.cut(machines[node])
            sim.agenda.later(for_s, None, setattr, machines[node], "reachable", True)
        case "cut", (node,):
            sim.tell(f"the connection to {node} is cut")
            sim.wires.cut(machines[node])
        case _:
            _hurt(sim, act)


def _hurt(sim: Simulation, act: Act) -> None:
    match act.kind, act.args:
        case "disk full", (node, for_s):
            sim.tell(f"the disk of {node} is full")
            sim.machines[node].disk.full = True
            sim.agenda.later(for_s, None, setattr, sim.machines[node].disk, "full", False)
        case "disk fails", (node, writes):
            sim.machines[node].disk.fail_in = writes
        case "database full", (for_s,):
            sim.database_full = True
            sim.agenda.later(for_s, None, setattr, sim, "database_full", False)
        case "lead elsewhere", (node, same):
            edits.lead_elsewhere(sim, node, same_machine=same)
        case "edit address", (node, same):
            edits.edit_address(sim, node, same_machine=same)
        case "remove and add", (node, away_s):
            edits.remove_and_add(sim, node, away_s)
        case "delete file", (node, away_s):
            edits.delete_file(sim, node, away_s)
        case "rename", (cluster,):
            edits.rename_cluster(sim, cluster)
        case "head clock", (by_s,):
            sim.head_clock_off_s += by_s
        case "node clock", (node, by_s):
            sim.machines[node].clock_off_s += by_s
        case "backup", ():
            sim.back_up()
        case "restore", ():
            sim.restore()
        case _:
            raise ValueError(f"no such act: {act}")


def _fence(sim: Simulation, node: str) -> None:
    """An admin who is right: the node is off before it is said, and stays off until it was heard."""
    machine = sim.machines[node]
    machine.power_off()
    machine.fences += 1

    def heard() -> None:
        machine.fences -= 1
        sim.agenda.later(sim.rng.uniform(0.0, 5.0), None, machine.power_on)

    sim.people.fence(node, heard)


def _spec(wish: Wish) -> Any:
    return job_spec(
        wish.how,
        nodes=wish.nodes,
        **({"elastic": True, "nodes_min": 1} if wish.elastic else {}),
        array=ArraySpec(indices=tuple(range(wish.tasks))) if wish.tasks else None,
        requeue=wish.requeue,
        time_limit_s=wish.limit_s,
        lease=wish.lease,
        qos=wish.qos,
        cpus_per_task=wish.cpus,
        mem_per_node_mib=1,  # so that one can stand still beside another
    )


def play(on: Stage, script: Script, *, in_words: bool = False) -> Outcome:
    """Run the world of a script to its end."""
    outcome = Outcome(script.seed)
    history: list[str] | None = outcome.history if in_words else None
    sim: Simulation | None = None
    try:
        sim = Simulation(on, script.seed, script.nodes, history=history)
        _set_rates(sim, script.rates)
        for act in script.acts:
            sim.run_until(act.at_s)
            sim.tell(f"* {act.kind} {' '.join(str(arg) for arg in act.args)}")
            act_on(sim, act)
            sim.faults[act.kind] += act.kind in _FAULTS
        sim.run_until(LENGTH_S)
        _fill(sim)
        sim.heal()
        sim.settle()
    except (Exception, Violation) as error:  # the edge of a world: whatever it is, it is a failure
        outcome.violation = as_violation(error)
    if sim is not None:
        outcome.steps, outcome.jobs = sim.agenda.steps, len(sim.truth.rows)
        outcome.executions = len(sim.truth.executions)
        outcome.faults = +sim.faults
        if no_room := sum(machine.disk.refused for machine in sim.machines.values()):
            outcome.faults["write without room"] = no_room
    return outcome


def _fill(sim: Simulation) -> None:
    """Go on with small jobs in a world in which not much has happened yet."""
    number = 0
    while sim.agenda.steps < FEWEST_STEPS:
        number += 1
        sim.people.submit(f"more{number}", [job_spec(Behaviour(0.5))])
        sim.run_until(sim.agenda.now_s + 1.0)


def _set_rates(sim: Simulation, rates: dict[str, float]) -> None:
    sim.wires.fault_rate = rates["fault"]
    sim.wires.encoded = bool(rates["encoded"])
    sim.commit_fails, sim.fork_fails = rates["commit fails"], rates["fork fails"]
    sim.people.answers_lost, sim.people.doubled = rates["answer lost"], rates["request doubled"]


# ----- shorter


def shrink(script: Script, fails: Callable[[Script], bool]) -> Script:
    """Return a script with as few acts as can be found that still fails."""
    tries = 0
    size = max(1, len(script.acts) // 2)
    while size >= 1 and tries < MAX_TRIES:
        start, shorter = 0, False
        while start < len(script.acts) and tries < MAX_TRIES:
            acts = script.acts[:start] + script.acts[start + size :]
            tries += 1
            candidate = Script(script.seed, script.nodes, script.rates, acts)
            if fails(candidate):
                script, shorter = candidate, True
            else:
                start += size
        if not shorter or size > len(script.acts):
            size //= 2
    for name in script.rates:
        candidate = Script(script.seed, script.nodes, script.rates | {name: 0.0}, script.acts)
        if script.rates[name] and fails(candidate):
            script = candidate
    return script
