"""Fits of jobs on nodes: how much of a job a node can take, and which fit is best.

The best fit is the tightest one, which leaves the least fragmentation. Preferred are, in this order: nodes that the job prefers
(--prefer), nodes with a fast link if the job is bound by communication, nodes of lower weight, nodes where it strands the
fewest GPUs (see `fragmentation`), and nodes that are left with the fewest GPUs, cpus and memory. Each node first gets one task,
then nodes are filled in order (block distribution, as in srun). `gang` chooses the seats of a gang.

Pure: works on `NodeResources`; knows nothing of queues and time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import NamedTuple

from hpcsched.errors import InvariantError
from hpcsched.sched.place.features import matches
from hpcsched.sched.place.fragmentation import Mix
from hpcsched.sched.place.gpus import GpuSlot, Units, gpus_taken, has_gpus, shard_choices, units_of, whole_gpus
from hpcsched.sched.place.request import GpuCounts, Shape, gpu_count
from hpcsched.sched.place.timeline import NodeResources
from hpcsched.sched.snapshot import NodeView

UNBOUNDED = 1 << 30
LINK_STEP = 1.5  # links whose rates differ by less can count as equal


class Fit(NamedTuple):
    """The fit of a job on a node: tasks, GPUs of its total, and quality (`left`)."""

    tasks: int
    gpus: int
    left: tuple[int, int, int, int]  # GPUs newly stranded, GPUs free, cpus left, memory free: less is better


class Seat(NamedTuple):
    """A node that can take a part of a job.

    Seats order by preference; `node` makes the order unique.
    """

    preference: tuple[int, ...]
    node: int
    tasks: int  # tasks that fit
    gpus: int  # GPUs that it can give to `Shape.gpus_total`
    view: NodeView


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePart:
    """The part of a job on one node; `node` is its index in the snapshot."""

    node: int
    tasks: int
    use: NodeResources
    component: int = 0  # of a heterogeneous job


def tasks_that_fit(shape: Shape, node: NodeView, types: tuple[GpuSlot, ...], room: NodeResources) -> int:
    """Return how many tasks of `shape` fit in `room` on `node`.

    `room`: the free resources. 0: fewer tasks fit than the job needs on a node.
    """
    cpus, mem_mib, gpus = room
    if shape.exclusive and cpus < node.cpus:
        return 0
    tasks = cpus // shape.cpus_per_task
    if shape.tasks_max and tasks > shape.tasks_max:
        tasks = shape.tasks_max
    if tasks < shape.tasks_min:
        return 0
    tasks = min(tasks, _tasks_by_memory(shape, node, mem_mib))
    if tasks and (shape.gpus_per_node or shape.gpus_per_task or shape.gpus_total or shape.shards):
        tasks = min(tasks, _tasks_by_gpus(shape, types, gpus))
    return tasks if tasks >= shape.tasks_min else 0


def fit_of(
    shape: Shape, node: NodeView, types: tuple[GpuSlot, ...], room: NodeResources, mix: Mix | None = None
) -> Fit | None:
    """Return the fit of `shape` in `room` on `node`; None if it does not fit.

    `room`: the free resources. The result is equal for equal nodes.
    """
    tasks = tasks_that_fit(shape, node, types, room)
    if not tasks:
        return None
    gpus = 0
    if shape.gpus_total:
        kind, wanted = shape.gpus_total[0]
        gpus = min(wanted, whole_gpus(types, room[2], kind))
    used = min(tasks, shape.ntasks) if shape.ntasks is not None else shape.tasks_min
    cpus_left = node.cpus if shape.exclusive else room[0] - used * shape.cpus_per_task
    stranded = 0
    if mix is not None and any(room[2]):
        stranded = mix.newly_stranded(types, room, _use(shape, node, types, room, used, gpus, mix))
    return Fit(tasks, gpus, (stranded, whole_gpus(types, room[2]) if room[2] else 0, cpus_left, room[1]))


def seat_at(shape: Shape, at: int, node: NodeView, fit: Fit) -> Seat:
    """Return the seat with this fit on `node`, whose index is `at`."""
    unwanted, slow = 0, 0
    if shape.prefer:
        unwanted = 0 if matches(shape.prefer, node.features) else 1
    if shape.comm_bound:
        slow = -_link_class(node.link_mbps)
    return Seat((unwanted, slow, node.weight, *fit.left, at), at, fit.tasks, fit.gpus, node)


def _link_class(mbps: int) -> int:
    """Return the class of a link: a higher number for a clearly faster link.

    938 and 1000 Mbit/s are in the same class.
    """
    return round(log(mbps, LINK_STEP)) if mbps > 1 else 0


def seat_of(shape: Shape, at: int, node: NodeView, types: tuple[GpuSlot, ...], room: NodeResources) -> Seat | None:
    """Return the seat of `shape` on `node` with `room` free; None if it does not fit.

    `at`: the index of the node.
    """
    fit = fit_of(shape, node, types, room)
    return seat_at(shape, at, node, fit) if fit is not None else None


def parts_of(
    shape: Shape,
    chosen: Sequence[Seat],
    nodes: Sequence[NodeView],
    types: Sequence[tuple[GpuSlot, ...]],
    rooms: Sequence[NodeResources],
    mix: Mix | None = None,
) -> list[NodePart]:
    """Return the parts of `shape` on the chosen seats: tasks, cpus, memory, GPUs by type.

    `rooms`: the free resources of the nodes.
    """
    tasks = _layout(shape, chosen)
    gives = _spread(gpu_count(shape.gpus_total), [seat.gpus for seat in chosen])
    return [
        NodePart(
            node=seat.node, tasks=count, use=_use(shape, nodes[seat.node], types[seat.node], room, count, give, mix)
        )
        for seat, room, count, give in zip(chosen, rooms, tasks, gives, strict=True)
    ]


def mem_least(shape: Shape, node: NodeView) -> int:
    """Return the least memory, in MiB, that `shape` takes of `node`."""
    if shape.mem_all or (shape.exclusive and not shape.mem_asked):
        return node.mem_mib
    if shape.mem_per_node_mib is not None:
        return shape.mem_per_node_mib
    return _mem_per_cpu(shape, node) * shape.cpus_least


def _mem_per_cpu(shape: Shape, node: NodeView) -> int:
    if shape.mem_per_cpu_mib is not None:
        return shape.mem_per_cpu_mib
    return node.mem_mib // node.cpus if node.cpus else 0


def _tasks_by_memory(shape: Shape, node: NodeView, free_mib: int) -> int:
    """Return how many tasks the free memory allows."""
    if shape.mem_all or (shape.exclusive and not shape.mem_asked):
        return UNBOUNDED if free_mib >= node.mem_mib else 0
    if shape.mem_per_node_mib is not None:
        return UNBOUNDED if free_mib >= shape.mem_per_node_mib else 0
    mem_per_task_mib = _mem_per_cpu(shape, node) * shape.cpus_per_task
    return free_mib // mem_per_task_mib if mem_per_task_mib else UNBOUNDED


def _tasks_by_gpus(shape: Shape, types: tuple[GpuSlot, ...], free: Units) -> int:
    """Return how many tasks the free GPUs allow."""
    if shape.shards:
        return UNBOUNDED if shard_choices(shape.shards, types, free) else 0
    if shape.gpus_total:
        return UNBOUNDED if whole_gpus(types, free, shape.gpus_total[0][0]) else 0
    if shape.gpus_per_node:
        if not has_gpus(shape.gpus_per_node, types, free):
            return 0
        each = gpu_count(shape.gpus_per_task)
        return gpu_count(shape.gpus_per_node) // each if each else UNBOUNDED
    tasks = whole_gpus(types, free) // gpu_count(shape.gpus_per_task)
    for kind, count in shape.gpus_per_task:
        tasks = min(tasks, whole_gpus(types, free, kind) // count)
    return tasks


def _layout(shape: Shape, chosen: Sequence[Seat]) -> list[int]:
    """Return the number of tasks on each node: one each, then filled in order.

    Tasks are distributed evenly if the job is spread.
    """
    if shape.ntasks is None:
        return [shape.tasks_min] * len(chosen)
    if shape.spread:
        return _spread(shape.ntasks, [seat.tasks for seat in chosen])
    counts = [1] * len(chosen)
    left = shape.ntasks - len(chosen)
    for at, seat in enumerate(chosen):
        more = min(left, seat.tasks - 1)
        counts[at] += more
        left -= more
    return counts


def _spread(total: int, limits: Sequence[int]) -> list[int]:
    """Return `total` distributed over nodes as evenly as their limits allow.

    The first nodes get more.
    """
    given = [0] * len(limits)
    total = min(total, sum(limits))
    while total > 0:
        for at, limit in enumerate(limits):
            if total and given[at] < limit:
                given[at] += 1
                total -= 1
    return given


def _use(
    shape: Shape,
    node: NodeView,
    types: tuple[GpuSlot, ...],
    room: NodeResources,
    tasks: int,
    give: int,
    mix: Mix | None,
) -> NodeResources:
    cpus = node.cpus if shape.exclusive else tasks * shape.cpus_per_task
    if shape.mem_all or (shape.exclusive and not shape.mem_asked):
        mem_mib = node.mem_mib
    elif shape.mem_per_node_mib is not None:
        mem_mib = shape.mem_per_node_mib
    else:
        mem_mib = min(node.mem_mib, cpus * _mem_per_cpu(shape, node))
    if shape.exclusive:
        return cpus, mem_mib, room[2]
    if shape.shards:
        return cpus, mem_mib, _shards(shape, types, room, (cpus, mem_mib), mix)
    if shape.gpus_total:
        asked: GpuCounts = ((shape.gpus_total[0][0], give),)
    elif shape.gpus_per_node:
        asked = shape.gpus_per_node
    else:
        asked = tuple((kind, count * tasks) for kind, count in shape.gpus_per_task)
    taken = gpus_taken(asked, types, room[2])
    if taken is None:
        raise InvariantError(f"node {node.name} was chosen for GPUs {asked} but has {room[2]} of {types} free")
    return cpus, mem_mib, taken


def _shards(
    shape: Shape, types: tuple[GpuSlot, ...], room: NodeResources, rest: tuple[int, int], mix: Mix | None
) -> Units:
    """Return the shards that `shape` takes.

    They are on the GPU where that strands the fewest GPUs; among equals, on the GPU with the fewest shards left.
    """
    asked = shape.shards
    choices: dict[tuple[str, int, int], int] = {}  # GPUs with equally many shards left are equal
    for at in shard_choices(asked, types, room[2]):
        choices.setdefault((types[at].type, types[at].shards, room[2][at]), at)
    if not choices:
        raise InvariantError(f"a node was chosen for shards {asked} but has {room[2]} of {types} free")

    def cost(at: int) -> tuple[int, int, int]:
        stranded = mix.newly_stranded(types, room, (*rest, units_of(types, at, asked[0][1]))) if mix is not None else 0
        return stranded, room[2][at], at

    best = min(choices.values(), key=cost) if len(choices) > 1 else next(iter(choices.values()))
    return units_of(types, best, asked[0][1])


class Seating:
    """The seats of one shape on some nodes, in order of preference.

    Starts of jobs change some of them.
    """

    def __init__(self, seats: Sequence[Seat]) -> None:
        self.ordered = sorted(seats)
        self._by_node = {seat.node: seat for seat in seats}

    def replace(self, node: int, seat: Seat | None) -> None:
        """Replace the seat of `node` by `seat`; a node without a seat gets none."""
        old = self._by_node.pop(node, None)
        if old is None:
            return
        del self.ordered[bisect_left(self.ordered, old)]
        if seat is not None:
            self._by_node[node] = seat
            insort(self.ordered, seat)
