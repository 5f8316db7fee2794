"""A controller without a network: an in-memory database, and nodes that are lists of what they were sent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

from jobs import T0, node, partition, spec

from hpcnode.wire import protocol
from hpcsched.auth.authorize import Identity, Role
from hpcsched.config.load import Config, build_config
from hpcsched.controller.requests import submission
from hpcsched.controller.tick import Controller
from hpcsched.controller.views.backend import ControllerBackend
from hpcsched.errors import UnavailableError
from hpcsched.lifecycle.events import Submitted
from hpcsched.lifecycle.job import apply, submitted_jobs
from hpcsched.lifecycle.node import apply_to_node
from hpcsched.model.ids import JobId, LaunchToken, NodeName
from hpcsched.model.job import Job
from hpcsched.model.node import Node
from hpcsched.model.spec import JobSpec
from hpcsched.sched.policy import Policy
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import WriteBatch
from hpcsched.store.engine import incarnation, open_database, raise_epoch
from hpcsched.store.store import Store

ANN = Identity(uid=1000, user="ann", role=Role.USER)
BOB = Identity(uid=1001, user="bob", role=Role.USER)
ROOT = Identity(uid=0, user="root", role=Role.ADMIN)


class FakePorts:
    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.wakes: list[float] = []
        self.boot = ("", 0.0)
        self._nonces = itertools.count(1)

    def send(self, node: NodeName, message: Any, blob: bytes = b"") -> None:
        self.sent.append((node, message))

    def wake(self, after_s: float) -> None:
        self.wakes.append(after_s)

    def nonce(self) -> str:
        return f"{next(self._nonces):032x}"

    def monotonic_s(self) -> float:
        return 0.0

    def processor_s(self) -> float:
        return 0.0

    def boot_clock(self) -> tuple[str, float]:
        return self.boot


class Cluster:
    """A controller over nodes `names` of two cpus each, all of which answer unless `up` is False."""

    def __init__(self, *names: str, path: Path | None = None, up: bool = True) -> None:
        self.now_s = T0
        self.ports = FakePorts()
        self.database = path
        engine = open_database(path, make=True)
        self.store = Store(engine)
        self.state = ClusterState(config=config(), incarnation=incarnation(engine), epoch=raise_epoch(engine))
        for name in names:
            self.state.nodes[NodeName(name)] = node(name)
        self.state.partitions = {"main": partition(*names)}
        self.controller = Controller(self.state, self.store, self.ports, Policy())
        if up:
            for name in names:
                self.welcome(name)

    def ask(self, work: Any) -> Any:
        """Do one request in a tick of its own; raise what it raised."""
        answers: list[Any] = []
        self.controller.ask(work, answers.append)
        self.tick()
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    def tick(self, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.controller.tick(self.now_s)

    def submit(self, identity: Identity = ANN, request_id: str = "", **fields: object) -> JobId:
        one: JobSpec = spec(**fields)
        answer = self.ask(lambda tx: submission.submit(tx, identity, request_id, [one], self.store.request_jobs))
        return JobId(answer[0]["job_id"])

    def job(self, job_id: int) -> Job:
        return self.state.jobs[JobId(job_id)]

    def replayed(self, job_id: int) -> Job:
        """Return what the job's events, applied to it as it was submitted, make of it."""
        first, *rest = self.store.load_events(job_id)
        assert isinstance(first, Submitted)
        job = submitted_jobs(first, self.job(job_id).spec)[0]
        for event in rest:
            job = apply(job, event)
        return job

    def replayed_node(self, name: str) -> Node:
        """Return what the events of the node, applied to it as configured, make of it."""
        known = Node(spec=self.state.nodes[NodeName(name)].spec)
        return reduce(apply_to_node, self.store.load_node_events(name), known)

    def welcome(
        self,
        name: str,
        *,
        boot_id: str = "boot-1",
        inventory: tuple[protocol.Report, ...] = (),
        facts: dict[str, Any] | None = None,
    ) -> str:
        """Have the node's agent answer; return why it is not listened to, if so."""
        items = [{key: value for key, value in protocol.to_json(one).items() if key != "type"} for one in inventory]
        why = self.controller.node_up(
            NodeName(name),
            protocol.Welcome(
                version=1,
                node=name,
                boot_id=boot_id,
                agent_version="x",
                pid=1,
                epoch=1,
                inventory=items,
                facts=facts or {},
            ),
            self.now_s,
        )
        self.tick()
        return why

    def report(self, job_id: int, status: str, **fields: Any) -> protocol.Report:
        """Return what the first node of the job would report of its batch step."""
        job = self.job(job_id)
        return protocol.Report(seq=1, token=job.token, status=status, at_s=self.now_s, **fields)

    def says(self, name: str, message: Any) -> None:
        self.controller.node_says(NodeName(name), message)
        self.tick()

    def run(self, job_id: int) -> None:
        """Have the node say that the job has started."""
        self.says(self.job(job_id).shares[0].node, self.report(job_id, protocol.STARTED))

    def end(self, job_id: int, code: int = 0) -> None:
        """Have the node say that the job has ended."""
        self.says(self.job(job_id).shares[0].node, self.report(job_id, protocol.ENDED, codes=[code], signals=[0]))

    def gone(self, job_id: int, name: str) -> None:
        """Have a node say that nothing is left of the job's attempt."""
        job = self.job(job_id)
        stay = job.stay_on(NodeName(name))
        self.says(name, protocol.JobGone(self.state.incarnation, job_id=job.id, attempt=job.attempt, stay=stay))

    def backend(self) -> ControllerBackend:
        """Return what the API asks, but for what needs connections to nodes."""
        return ControllerBackend(
            self.controller,
            None,  # type: ignore[arg-type]
            clock=lambda: T0,
            started_at_s=T0,
            apply_config=list,
            database=self.database or Path("/none"),  # nobody else can read one in memory
        )

    def sent(self, kind: type) -> list[tuple[str, Any]]:
        """Return, and forget, what was sent of one kind of message."""
        found = [(to, message) for to, message in self.ports.sent if isinstance(message, kind)]
        self.ports.sent = [item for item in self.ports.sent if not isinstance(item[1], kind)]
        return found


@contextmanager
def full_disk(cluster: Cluster) -> Iterator[None]:
    """Nothing can be committed meanwhile."""
    commit = cluster.store.commit

    def fail(batch: WriteBatch) -> None:
        raise UnavailableError("cannot write the database: it is full")

    cluster.store.commit = fail  # type: ignore[method-assign]
    yield
    cluster.store.commit = commit  # type: ignore[method-assign]


def config(**controller: object) -> Config:
    """Return a configuration without nodes."""
    return build_config({"controller": controller}, [], config_dir=Path("/nonexistent"), environ={})


def token_of(job: Job) -> LaunchToken:
    return LaunchToken.parse(job.token)
