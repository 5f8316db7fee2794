"""Small worlds for scheduler tests, written as sketches.

    world(nodes="3x4", running=["1: n1,n2 2c 60s"], waiting=["2: 3 nodes 4c 600s", "3: 1c 30s"])

A node group is ``COUNTxCPUS[/MEM_MIB][/GPUSxTYPE[%SHARDS]][+feature...][@SWITCH][~SPEED]``; nodes are called n1, n2,
... Time is 0. A job is a job id, a colon and words: ``2 nodes``, ``2-4 nodes``, ``5 tasks``, ``2 per-node``, ``4c``
(cpus per task), ``100M`` (memory per node), ``2g``, ``2g:a100`` (GPUs per node), ``3shards``, ``60s`` (limit),
``n1,n2`` (node list, or where it runs), ``p=a`` or ``p=a,b`` (partition), ``+feature`` (constraint), ``q=NAME``
(QOS), ``exclusive``, ``nice=5``. Running jobs began at 0 and hold their cpus, memory and GPUs on each of their nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Job, JobState
from hpcsched.model.node import Gpu, GpuRequest, Link, Node, NodeSpec, Partition, Share
from hpcsched.model.reservation import Reservation
from hpcsched.model.spec import JobSpec
from hpcsched.sched.decisions import Plan
from hpcsched.sched.place.feasible import impossible_shape, too_long
from hpcsched.sched.place.request import ResourceRequest
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Policy
from hpcsched.sched.preempt import full_plan
from hpcsched.sched.snapshot import Snapshot, node_view, snapshot_of

MEM_MIB = 1000  # of a node that does not say


@dataclass(kw_only=True)
class World:
    """Jobs, nodes and partitions that a test can change before it asks for a plan."""

    nodes: list[Node]
    partitions: list[Partition]
    jobs: list[Job] = field(default_factory=list)
    policy: Policy = field(default_factory=lambda: Policy(weight_age=0))
    now_s: float = 0.0
    reservations: list[Reservation] = field(default_factory=list)

    def snapshot(self) -> Snapshot:
        return snapshot_of(self.jobs, self.nodes, self.partitions, self.now_s, reservations=self.reservations)

    def plan(self) -> Plan:
        return plan(self.snapshot(), self.policy)

    def full_plan(self) -> Plan:
        return full_plan(self.snapshot(), self.policy)

    def starts(self) -> dict[int, str]:
        """Return what starts: ``{2: "n1:4 n2:4"}``, the cpus on each node."""
        return {
            start.job_id: " ".join(f"{share.node}:{share.cpus}" for share in start.shares)
            for start in self.plan().starts
        }

    def reasons(self) -> dict[int, str]:
        return {job_id: str(wait.reason) for job_id, wait in self.plan().waits.items()}

    def job(self, job_id: int) -> Job:
        return next(job for job in self.jobs if job.id == job_id)

    def change(self, job_id: int, **changes: Any) -> World:
        """Replace fields of a job; names that only `JobSpec` has go to its spec."""
        of_job = {key: value for key, value in changes.items() if key in Job.__dataclass_fields__}
        of_spec = {key: value for key, value in changes.items() if key not in of_job}
        self.jobs = [
            replace(job, **of_job, spec=replace(job.spec, **of_spec)) if job.id == job_id else job for job in self.jobs
        ]
        return self

    def change_node(self, name: str, **changes: Any) -> World:
        self.nodes = [replace(node, **changes) if node.name == name else node for node in self.nodes]
        return self


def world(
    nodes: str,
    running: Iterable[str] = (),
    waiting: Iterable[str] = (),
    partitions: dict[str, str] | Sequence[Partition] | None = None,
    **policy: Any,
) -> World:
    """Return the sketched world. Partitions: ``{"main": "n1,n2"}``; the first is the default; none given: main with all."""
    made = _nodes(nodes)
    jobs = [_running(text) for text in running] + [_waiting(text) for text in waiting]
    return World(
        nodes=made,
        partitions=_partitions(partitions, [node.name for node in made]),
        jobs=jobs,
        policy=Policy(**{"weight_age": 0, **policy}),
    )


def spec_of(text: str) -> JobSpec:
    """Return the spec that the words of a job spell."""
    return JobSpec(name="j", script="#!/bin/sh\n", work_dir="/", **_spec_fields(text.split()))


def refusal_of(request: ResourceRequest, nodes: Iterable[Node], partition: Partition) -> str | None:
    """Return why a job with `request` is refused at submission; None: it is not."""
    views = [node_view(node) for node in nodes]
    return too_long(request, partition) or impossible_shape(request.shape, views, partition)


def _nodes(text: str) -> list[Node]:
    nodes: list[Node] = []
    for group in text.split():
        group, _, speed = group.partition("~")
        group, _, switch = group.partition("@")
        sizes, *features = group.split("+")
        count, cpus, *rest = re.split(r"[x/]", sizes, maxsplit=2)
        parts = rest[0].split("/") if rest else []
        mem_mib = next((int(part) for part in parts if part.isdigit()), MEM_MIB)
        gpus = [part.split("x", 1) for part in parts if not part.isdigit()]
        types = [kind.partition("%") for number, kind in gpus for _ in range(int(number))]
        for _ in range(int(count)):
            spec = NodeSpec(
                name=NodeName(f"n{len(nodes) + 1}"),
                host="h",
                host_key="k",
                cpus=int(cpus),
                mem_mib=mem_mib,
                gpus=tuple(Gpu(index=at, type=kind, shards=int(n or 1)) for at, (kind, _, n) in enumerate(types)),
                features=tuple(features),
                switch=switch,
                speed=float(speed or 0),
            )
            nodes.append(Node(spec=spec, link=Link.UP))
    return nodes


def _partitions(given: dict[str, str] | Sequence[Partition] | None, names: list[NodeName]) -> list[Partition]:
    if given is None:
        return [Partition(name="main", nodes=tuple(names), default=True)]
    if not isinstance(given, dict):
        return list(given)
    return [
        Partition(name=name, nodes=tuple(NodeName(node) for node in its.split(",")), default=at == 0)
        for at, (name, its) in enumerate(given.items())
    ]


def _waiting(text: str) -> Job:
    job_id, words = text.split(":", 1)
    nice = re.search(r"nice=(-?\d+)", words)
    return Job(
        id=JobId(int(job_id)),
        spec_id=int(job_id),
        spec=spec_of(words),
        uid=1000,
        user="ann",
        submitted_at_s=-1.0,
        nice=int(nice.group(1)) if nice else 0,
    )


def _running(text: str) -> Job:
    job = _waiting(text)
    spec = job.spec
    gpus = tuple(range(sum(gpu.count for gpu in spec.gpus_per_node)))
    mem_mib = spec.mem_per_node_mib or 0
    shares = tuple(Share(node=name, cpus=spec.cpus_per_task, mem_mib=mem_mib, gpus=gpus) for name in spec.nodelist)
    return replace(
        job, state=JobState.RUNNING, shares=shares, held_nodes=spec.nodelist, started_at_s=0.0, allocated_at_s=0.0
    )


_WORDS: tuple[tuple[str, Any], ...] = (
    (r"(\d+)c", lambda m: {"cpus_per_task": int(m[1])}),
    (r"(\d+)M", lambda m: {"mem_per_node_mib": int(m[1])}),
    (r"(\d+)g(?::(\w+))?", lambda m: {"gpus_per_node": (GpuRequest(count=int(m[1]), type=m[2] or ""),)}),
    (r"(\d+)shards", lambda m: {"shards_per_node": (GpuRequest(count=int(m[1])),)}),
    (r"(\d+)s", lambda m: {"time_limit_s": int(m[1])}),
    (r"(n\d+(?:,n\d+)*)", lambda m: {"nodelist": tuple(NodeName(name) for name in m[1].split(","))}),
    (r"p=([\w,]+)", lambda m: {"partition": m[1]}),
    (r"\+(\S+)", lambda m: {"constraint": m[1]}),
    (r"q=(\w+)", lambda m: {"qos": m[1]}),
    (r"exclusive", lambda m: {"exclusive": True}),
    (r"nice=-?\d+", lambda m: {}),
)


def _spec_fields(words: list[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    at = 0
    while at < len(words):
        word, following = words[at], words[at + 1] if at + 1 < len(words) else ""
        if following in ("nodes", "node"):
            low, _, high = word.partition("-")
            fields |= {"nodes_min": int(low), "nodes_max": int(high or low), "nodes_given": True}
            at += 2
        elif following in ("tasks", "task", "per-node"):
            fields["ntasks_per_node" if following == "per-node" else "ntasks"] = int(word)
            at += 2
        else:
            fields |= _word(word)
            at += 1
    return fields


def _word(word: str) -> dict[str, Any]:
    for pattern, fields in _WORDS:
        match = re.fullmatch(pattern, word)
        if match:
            return fields(match)
    raise ValueError(f"unknown word in sketch: {word!r}")
