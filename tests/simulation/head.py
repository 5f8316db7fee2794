"""The controller's process around the real `Controller`: its database, its links to the nodes, its restarts.

The database is SQLite in memory, one per operating-system process and emptied for each world. A crash loses what was in
memory; what was committed stays, for SQLite's commit is all or nothing (that a disk keeps it is another test's subject).
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcnode.wire import protocol
from hpcsched.config.load import Config, build_config
from hpcsched.controller.nodes import edits as safeguards
from hpcsched.controller.nodes.loss import lose_gone_nodes
from hpcsched.controller.recovery import load_state, node_of
from hpcsched.controller.stepping import Stepping
from hpcsched.controller.tick import Controller
from hpcsched.errors import HpcschedError, InvariantError, UnavailableError, reported_faults
from hpcsched.model.accounting import PreemptMode, PreemptType, Qos
from hpcsched.model.ids import NodeName
from hpcsched.model.node import NodeSpec, Partition
from hpcsched.sched.policy import Policy, PreemptRules
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import WriteBatch
from hpcsched.store.engine import incarnation, open_database, raise_epoch
from hpcsched.store.store import Store
from simulation import edits
from simulation.agenda import Process
from simulation.agent import SimAgent
from simulation.machine import Machine
from simulation.wires import Connection

if TYPE_CHECKING:
    from simulation.stage import Simulation

CONNECT_TIMEOUT_S = 20.0


class Database:
    """The one database, in memory; emptied by `reset`."""

    def __init__(self) -> None:
        self.connection = self._raw = open_database(None)
        self._empty = self._raw.serialize()
        self.store = SimStore(self.connection)

    def reset(self, incarnation_: str) -> None:
        """Make it the empty database of that incarnation."""
        self._become(self._empty)
        self._set_meta(incarnation=incarnation_)

    def backup(self) -> bytes:
        """Return a copy of what is committed."""
        return self._raw.serialize()

    def restore(self, copy: bytes, incarnation_: str, now_s: float) -> None:
        """Go back to a copy, as a new incarnation: what `hpcsched.store.backup` writes into it."""
        last_id = self._highest_id()
        self._become(copy)
        restored = self._highest_id()
        self._set_meta(
            incarnation=incarnation_,
            restored_at_s=now_s,
            restored_last_job_id=restored,
            last_job_id=max(last_id, restored),
        )
        self._raw.execute("UPDATE nodes SET boot_id = ''")

    def _become(self, copy: bytes) -> None:
        """Take the contents of a copy. Not by `deserialize`: SQLite 3.40 does not survive that after a use of json_each."""
        with closing(sqlite3.connect(":memory:")) as source:
            source.deserialize(copy)
            source.backup(self._raw)

    @property
    def incarnation(self) -> str:
        """The name of this life of it."""
        return incarnation(self.connection)

    def _set_meta(self, **values: object) -> None:
        rows = [(key, str(value)) for key, value in values.items()]
        self._raw.executemany("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", rows)

    def _highest_id(self) -> int:
        return self.store.last_ids()[0]

    def has_jobs(self, job_ids: list[int]) -> bool:
        """Return whether all these jobs are committed."""
        return len(self.store.jobs(job_ids)) == len(job_ids) and not self._raw.in_transaction


class SimStore(Store):
    """The real store with crash points around its commit, and a disk that may be full."""

    sim: Simulation

    def commit(self, batch: WriteBatch) -> None:
        kinds = "+".join(sorted({type(event).__name__ for event in batch.events})) or "nodes"
        points = self.sim.points
        points.reached(f"before commit of {kinds}")
        if self.sim.database_full or self.sim.flip(self.sim.commit_fails):
            self.sim.faults["commit failed"] += 1
            self.sim.tell(f"the commit of {kinds} fails")
            raise UnavailableError("cannot write the database: disk is full")
        super().commit(batch)
        self.sim.truth.committed(batch)
        points.reached(f"after commit of {kinds}")


class Link:
    """The controller's side of one node, as `hpcsched.launch.link` has it: up, messages, down, up again."""

    def __init__(self, head: Head, machine: Machine) -> None:
        self.head, self.machine, self.sim = head, machine, head.sim
        self.node = NodeName(machine.name)
        self.up = self.closed = False
        self._connection: Connection | None = None
        self._told = ""

    def dial(self) -> None:
        """Make a connection, start the agent if it is not there, and greet it."""
        if self.closed:
            return
        machine = self.machine
        if not machine.power or not machine.reachable:
            self._fail("cannot reach it")
            return
        if machine.agent is None:
            agent = SimAgent(machine)
            self.sim.run(agent, agent.do, agent.start)
        if machine.agent is None:
            self._fail("its agent does not start")
            return
        self._connection = connection = self.sim.wires.connect(self, machine.agent)
        state = self.head.state
        connection.to_agent(
            protocol.Hello(
                version=protocol.VERSION,
                cluster=state.config.name,
                incarnation=state.incarnation,
                epoch=state.epoch,
                node=machine.name,
            )
        )
        self.sim.agenda.later(CONNECT_TIMEOUT_S, self.head, self._timed_out, connection)

    def _timed_out(self, connection: Connection) -> None:
        if connection is self._connection and not self.up:
            self._fail("no welcome")

    def receive(self, connection: Connection, message: Any, blob: bytes) -> None:
        """Take one frame of the agent."""
        if connection is not self._connection or self.closed:
            return
        if isinstance(message, protocol.Goodbye):
            self._fail(message.why)
        elif isinstance(message, protocol.Ping):
            self.send(protocol.Pong(message.request), b"")
        elif self.up:
            self.head.heard(self.node, message)
        elif isinstance(message, protocol.Welcome):
            why = self.head.controller.node_up(self.node, message, self.head.clock())
            if why:
                self._fail(why)
                return
            self.up, self._told = True, ""
            self.head.stepping.node_welcome(self.node, message.inventory)
            self.sim.wires.welcomed(connection)
        else:
            self._fail(f"it said {type(message).__name__} before Welcome")

    def lost(self, connection: Connection, why: str) -> None:
        """The connection has ended."""
        if connection is self._connection:
            self._fail(why)

    def _fail(self, why: str) -> None:
        if self.closed:
            return
        was_up, self.up = self.up, False
        if self._connection is not None:
            self._connection.head_closed()
            self._connection = None
        if was_up or why != self._told:
            self._told = why
            self.head.controller.node_down(self.node, why)
        self.sim.agenda.later(self.sim.rng.uniform(0.5, 4.0), self.head, self.dial)

    def send(self, message: Any, blob: bytes) -> None:
        """Say something to the agent if it is connected."""
        if self.up and self._connection is not None:
            self._connection.to_agent(message, blob)

    def close(self) -> None:
        """The controller's process has ended."""
        self.closed = True
        if self._connection is not None:
            self._connection.head_closed()


class Head(Process):
    """One life of the controller."""

    kind = "head"

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.serving = False
        self.links: dict[NodeName, Link] = {}
        self._tick_soon = False
        self._tick_at_s: float | None = None

    def start(self) -> None:
        """As `Daemon._build` and `_serve`."""
        sim = self.sim
        database = sim.database.connection
        store = sim.database.store
        self.state = state = ClusterState(
            config=sim.config, incarnation=incarnation(database), epoch=raise_epoch(database)
        )
        sim.points.reached("epoch raised")
        stored = store.load_nodes()
        load_state(state, store, self.clock())
        self._take_name()
        for name, machine in self._with_files():
            spec = NodeSpec(name=NodeName(name), host=name, host_key="", cpus=machine.cpus, mem_mib=4000)
            state.nodes[spec.name] = node_of(spec, stored.get(spec.name))
        state.partitions = {"main": Partition(name="main", nodes=tuple(state.nodes), default=True)}
        self.controller = Controller(state, store, self, POLICY)
        self.stepping = Stepping(self.controller, self, clock=self.clock, reply_head=lambda *_: None)
        sim.truth.head_starts(self)
        self.serving = True
        for job in state.active_jobs():
            self.stepping.job_running(job)
        self.controller.ask(lambda tx: lose_gone_nodes(tx, {}), lambda _: None, keep=True)
        for _, machine in self._with_files():
            link = self.links[NodeName(machine.name)] = Link(self, machine)
            sim.agenda.at(sim.soon(), self, link.dial)
        self.wake(0.0)

    def _take_name(self) -> None:
        """Take the name of the cluster that its file says, or keep the former one, as `begin_epoch` does."""
        sim, store, held = self.sim, self.sim.database.store, safeguards.jobs_held(self.state.active_jobs())
        wanted, former = sim.cluster_on_file, store.cluster()
        self.state.config, _ = safeguards.as_before(replace(sim.config, name=wanted), former, {}, held)
        name = self.state.config.name
        edits.check_rename(sim, bool(held), taken=name == wanted, renamed=former not in ("", wanted))
        if name != former:
            store.put_cluster(name)
        edits.lead_to_cluster(sim, name)

    def rename(self, name: str) -> None:
        """As `Daemon.apply_config` does with a new name that it takes."""
        self.sim.database.store.put_cluster(name)
        self.state.config = replace(self.state.config, name=name)
        for node in self.links:
            self.controller.node_redialled(node, "its description was changed")
        edits.lead_to_cluster(self.sim, name)
        self.controller.reconfigured()

    def _with_files(self) -> list[tuple[str, Machine]]:
        return [item for item in self.sim.machines.items() if item[0] not in self.sim.without_file]

    def take_node_out(self, name: NodeName) -> None:
        """As `Daemon.apply_config` and `Fleet.configure` do with a node that has no file any more."""
        if self.state.nodes.pop(name, None) is not None:
            self.links.pop(name).close()
            self.controller.node_redialled(name, "it was taken out of the configuration")
            self._partition()

    def take_node_in(self, name: NodeName) -> None:
        """As they do with a new one."""
        machine = self.sim.machines[name]
        spec = NodeSpec(name=name, host=name, host_key="", cpus=machine.cpus, mem_mib=4000)
        self.state.nodes[name] = node_of(spec, self.controller.store.load_nodes().get(name))
        link = self.links[name] = Link(self, machine)
        self.sim.agenda.at(self.sim.soon(), self, link.dial)
        self._partition()

    def _partition(self) -> None:
        self.state.partitions = {"main": Partition(name="main", nodes=tuple(self.state.nodes), default=True)}
        self.controller.reconfigured()

    def killed(self, why: str) -> None:
        """SIGKILL."""
        if not self.alive:
            return
        self.alive = self.serving = False
        self.sim.tell(f"the controller dies: {why}")
        for link in self.links.values():
            link.close()
        self.sim.head_died(self)

    def clock(self) -> float:
        return self.sim.wall_s() + self.sim.head_clock_off_s

    def heard(self, node: NodeName, message: Any) -> None:
        """As `Fleet.on_message`."""
        try:
            match message:
                case protocol.Output() | protocol.InputAck():
                    pass
                case protocol.FromStream():
                    self.stepping.on_from_stream(node, message, b"")
                case protocol.CloseStream():
                    self.stepping.on_stream_closed((node, message.stream))
                case _:
                    if isinstance(message, protocol.Report):
                        self.sim.truth.heard(self.sim.machines[node], message)
                    self.controller.node_says(node, message)
        except (HpcschedError, protocol.WireError) as error:
            self.sim.tell(f"the controller drops what {node} says: {error}")

    def tick(self) -> None:
        """As `Daemon._tick`: a wrong ledger stops the controller, and the simulation. So does here any bug that is survived."""
        before = reported_faults()
        try:
            self.controller.tick(self.clock())
        except InvariantError as error:
            self.sim.truth.broken("ledger", str(error))
        if reported_faults() > before:
            self.sim.truth.broken("mishap", "an unexpected exception in a tick: see the log")

    def _tick_now(self) -> None:
        self._tick_soon = False
        self.tick()

    def _timer_rang(self, at_s: float) -> None:
        if self._tick_at_s == at_s:
            self._tick_at_s = None
            self.wake(0.0)

    # ----- Ports of the controller

    def send(self, node: NodeName, message: Any, blob: bytes = b"") -> None:
        kind = type(message).__name__
        self.sim.points.reached(f"before {kind} is sent")
        if node in self.links:
            self.links[node].send(message, blob)
        self.sim.points.reached(f"after {kind} was sent")

    def wake(self, after_s: float) -> None:
        agenda = self.sim.agenda
        if after_s <= 0.0:
            if not self._tick_soon:
                self._tick_soon = True
                agenda.at(self.sim.soon(), self, self._tick_now)
            return
        at_s = agenda.now_s + after_s
        if self._tick_at_s is None or self._tick_at_s > at_s:
            self._tick_at_s = at_s
            agenda.at(at_s, self, self._timer_rang, at_s)

    def nonce(self) -> str:
        return f"{self.sim.rng.getrandbits(128):032x}"

    def monotonic_s(self) -> float:
        return self.sim.agenda.now_s

    def processor_s(self) -> float:
        return self.sim.agenda.now_s

    def boot_clock(self) -> tuple[str, float]:
        return "head", self.sim.agenda.now_s


def _config() -> Config:
    settings = {
        "controller": {"kill_wait_s": 5, "requeue_delay_s": 2, "min_job_age_s": 100_000, "lease_s": 20},
        "fairshare": {"half_life": "UNLIMITED"},  # so that what was charged can be added up
    }
    return replace(build_config(settings, [], config_dir=Path("/nonexistent"), environ={}), name=edits.CLUSTERS[0])


CONFIG = _config()
_SCRIPTS = replace(CONFIG.controller, prolog="/prolog", epilog="/epilog")
CONFIG_WITH_SCRIPTS = replace(CONFIG, controller=_SCRIPTS)
LOW = {f"low-{mode}": Qos(name=f"low-{mode}", preempt_mode=mode) for mode in PreemptMode}
_HIGH = {"high": Qos(name="high", preempt=tuple(LOW))}
POLICY = Policy(preempt=PreemptRules(type=PreemptType.QOS, grace_s=1.0, qos=LOW | _HIGH))
