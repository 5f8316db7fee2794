"""GPU allocation on the openb trace: tasks arrive until the cluster is full, by the planner that the daemon uses.

The setting of Weng et al. (USENIX ATC 2023): the 8152 tasks of the trace, more drawn from them at random until they ask for
130 % of the 6212 GPUs of the 1213 nodes, in random order; a task that does not fit when it comes is gone; none ends. The
figure is the part of all GPUs that is allocated when as much has been asked for as there is (and at the end). Parts of GPUs are
shards: a hundredth of a GPU each. Needs HPCSCHED_TRACES.

"best fit" is the planner without its estimate of what is stranded, "first fit" the planner that takes the first node that does.
"""

from __future__ import annotations

import csv
import gzip
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.node import Gpu, Partition
from hpcsched.sched.place import groups
from hpcsched.sched.place.fragmentation import Mix
from hpcsched.sched.place.node_fit import Seat
from hpcsched.sched.place.request import ResourceRequest, Shape
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Policy
from hpcsched.sched.snapshot import NodeView, PendingJob, RunningJob, Snapshot
from tests.bench.figures import Figure, from_samples

SHARDS = 100
BATCH = 100  # arrivals between two plans; within one they are placed in order, as they come
ASKED = 1.3
FOREVER_S = 1e12


class Task(NamedTuple):
    """One line of the trace: thousandths of a cpu, and whole GPUs or shards of one."""

    cpus: int
    mem_mib: int
    gpus: int
    shards: int

    @property
    def asks(self) -> int:
        return self.gpus * SHARDS + self.shards


def run(quick: bool) -> list[Figure]:
    """Fill the cluster with each way of choosing nodes."""
    there = os.environ.get("HPCSCHED_TRACES")
    if not there:
        print("HPCSCHED_TRACES is not set: no cluster is filled")
        return []
    nodes, tasks = _nodes(Path(there) / "gpu"), _tasks(Path(there) / "gpu")
    figures = []
    # Each draw takes a minute or more: one will do for what we are compared with.
    for name, way, draws in (
        ("", _as_it_is, 1 if quick else 3),
        ("best fit: ", _best_fit, 1),
        ("first fit: ", _first_fit, 1),
    ):
        got = [way(lambda seed=seed: fill(nodes, tasks, seed)) for seed in range(42, 42 + draws)]
        bar = "" if name else ">= 92.9, reach 95.2"
        figures.append(from_samples(f"{name}GPUs allocated, as many asked for", [one[0] for one in got], "%", bar=bar))
        figures.append(from_samples(f"{name}GPUs allocated, 130 % asked for", [one[1] for one in got], "%"))
    return figures


def fill(nodes: tuple[NodeView, ...], tasks: list[Task], seed: int) -> tuple[float, float]:
    """Return the percentage of GPUs allocated once as many were asked for as there are, and at the end."""
    whole = sum(len(node.gpus) for node in nodes) * SHARDS
    arrivals = _arrivals(tasks, whole, random.Random(seed))
    partitions = {"main": Partition(name="main", nodes=tuple(node.name for node in nodes), default=True)}
    shapes = {task: _shape(task) for task in tasks}
    running: list[RunningJob] = []
    asked = allocated = 0
    when_asked = 0.0
    for at in range(0, len(arrivals), BATCH):
        batch = arrivals[at : at + BATCH]
        pending = tuple(_job(at + number + 1, shapes[task]) for number, task in enumerate(batch))
        world = Snapshot(now_s=0.0, nodes=nodes, partitions=partitions, running=tuple(running), pending=pending)
        for start in plan(world, Policy(backfill_depth=0)).starts:
            running.append(
                RunningJob(id=start.job_id, display_id="", shares=start.shares, began_at_s=-1.0, ends_at_s=FOREVER_S)
            )
            allocated += arrivals[start.job_id - 1].asks
        asked += sum(task.asks for task in batch)
        if not when_asked and asked >= whole:
            when_asked = 100 * allocated / whole
    return when_asked, 100 * allocated / whole


# ----- the trace


def _nodes(folder: Path) -> tuple[NodeView, ...]:
    with gzip.open(folder / "openb_node_list_gpu_node.csv.gz", "rt") as lines:
        return tuple(
            NodeView(
                name=NodeName(row["sn"]),
                cpus=int(row["cpu_milli"]),
                mem_mib=int(row["memory_mib"]),
                gpus=tuple(Gpu(index=at, type=row["model"], shards=SHARDS) for at in range(int(row["gpu"]))),
            )
            for row in csv.DictReader(lines)
        )


def _tasks(folder: Path) -> list[Task]:
    with gzip.open(folder / "openb_pod_list_default.csv.gz", "rt") as lines:
        return [_task(row) for row in csv.DictReader(lines)]


def _task(row: dict[str, str]) -> Task:
    gpus, milli = int(row["num_gpu"]), int(row["gpu_milli"])
    part = gpus == 1 and milli < 1000
    return Task(
        cpus=int(row["cpu_milli"]),
        mem_mib=int(row["memory_mib"]),
        gpus=0 if part else gpus,
        shards=-(-milli * SHARDS // 1000) if part else 0,
    )


def _arrivals(tasks: list[Task], whole: int, chance: random.Random) -> list[Task]:
    arrivals = list(tasks)
    asked = sum(task.asks for task in tasks)
    while asked < ASKED * whole:
        arrivals.append(chance.choice(tasks))
        asked += arrivals[-1].asks
    chance.shuffle(arrivals)
    return arrivals


def _shape(task: Task) -> Shape:
    return Shape(
        tasks_max=1,
        cpus_per_task=task.cpus,
        mem_per_node_mib=task.mem_mib,
        mem_asked=True,
        gpus_per_node=(("", task.gpus),) if task.gpus else (),
        shards=(("", task.shards),) if task.shards else (),
    )


def _job(number: int, shape: Shape) -> PendingJob:
    """Return a task that waits: with a short limit, so that none that does not fit keeps room for later from the others."""
    return PendingJob(
        id=JobId(number),
        display_id=str(number),
        partition="main",
        request=ResourceRequest(shape=shape, time_limit_s=1),
        submitted_at_s=float(number),
    )


# ----- other ways of choosing


def _as_it_is(fill_it: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    return fill_it()


def _best_fit(fill_it: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    return _with("mix_of", _no_mix, fill_it)


def _first_fit(fill_it: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    return _with("seat_at", _in_order, lambda: _best_fit(fill_it))


def _with(name: str, instead: object, fill_it: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    real = getattr(groups, name)
    setattr(groups, name, instead)
    try:
        return fill_it()
    finally:
        setattr(groups, name, real)


def _no_mix(snapshot: Snapshot) -> Mix | None:
    return None


def _in_order(shape: Shape, at: int, node: NodeView, fit: object) -> Seat:
    return Seat((at,), at, fit.tasks, fit.gpus, node)  # type: ignore[attr-defined]
