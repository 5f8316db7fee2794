"""Which nodes a job gets: all that it needs or none (a gang), the tightest fit that leaves least in pieces.

Whether a gang fits is decided exactly for node counts, tasks and GPUs; which nodes it gets is a choice: lower weight first, then
nodes that are left with fewest GPUs, cpus and memory. Tasks are laid out one each, then filled up in the order of nodes
(block distribution, as srun). Pure: works on `Room`s and knows nothing of queues and time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from hpcsched.errors import InvariantError
from hpcsched.sched.gpus import GpuSlot, Units, gpus_taken, shard_choices, shards_taken, whole_gpus
from hpcsched.sched.request import GpuCounts, Shape, gpu_count
from hpcsched.sched.snapshot import NodeView
from hpcsched.sched.timeline import Room

UNBOUNDED = 1 << 30


class Seat(NamedTuple):
    """A node that can take some of a job; ordered by preference, `node` makes it unique."""

    preference: tuple[int, ...]
    node: int
    tasks: int  # so many tasks fit
    gpus: int  # so many GPUs it can give to a total


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a job gets on one node: `node` is its place in the snapshot."""

    node: int
    tasks: int
    use: Room


def tasks_that_fit(shape: Shape, node: NodeView, types: tuple[GpuSlot, ...], room: Room) -> int:
    """Return how many tasks of `shape` fit in `room` of `node`; 0 if the node is of no use to it."""
    cpus, mem_mib, gpus = room
    if shape.exclusive and cpus < node.cpus:
        return 0
    tasks = cpus // shape.cpus_per_task
    if shape.tasks_max and tasks > shape.tasks_max:
        tasks = shape.tasks_max
    if tasks < shape.tasks_min:
        return 0
    if shape.mem_all or (shape.exclusive and not shape.mem_asked):
        if mem_mib < node.mem_mib:
            return 0
    elif shape.mem_per_node_mib is not None:
        if mem_mib < shape.mem_per_node_mib:
            return 0
    else:
        mem_per_task = _mem_per_cpu(shape, node) * shape.cpus_per_task
        if mem_per_task:
            tasks = min(tasks, mem_mib // mem_per_task)
    if shape.gpus_per_node or shape.gpus_per_task or shape.gpus_total or shape.shards:
        tasks = min(tasks, _tasks_by_gpus(shape, types, gpus))
    return tasks if tasks >= shape.tasks_min else 0


def seat_of(shape: Shape, at: int, node: NodeView, types: tuple[GpuSlot, ...], room: Room) -> Seat | None:
    """Return how node number `at` suits `shape` with `room` free, or None if it does not."""
    tasks = tasks_that_fit(shape, node, types, room)
    if not tasks:
        return None
    gpus = 0
    if shape.gpus_total:
        kind, wanted = shape.gpus_total[0]
        gpus = min(wanted, whole_gpus(types, room[2], kind))
    used = min(tasks, shape.ntasks) if shape.ntasks is not None else tasks
    cpus_left = node.cpus if shape.exclusive else room[0] - used * shape.cpus_per_task
    return Seat((node.weight, whole_gpus(types, room[2]) if room[2] else 0, cpus_left, room[1], at), at, tasks, gpus)


def choose(shape: Shape, seats: Sequence[Seat], required: frozenset[int] = frozenset()) -> list[Seat] | None:
    """Return the seats that `shape` gets of `seats` (in order of preference), in the order of nodes, or None if they do not do.

    `required` are the nodes of its node list: all of them, or None.
    """
    if len(seats) < shape.nodes_min or len(required) > shape.nodes_max:
        return None
    first = [seat for seat in seats if seat.node in required] if required else []
    if len(first) < len(required):
        return None
    rest = [seat for seat in seats if seat.node not in required] if required else list(seats)
    if shape.ntasks is None and not shape.gpus_total:
        chosen: list[Seat] | None = first + rest[: shape.nodes_max - len(first)]
    elif not required and shape.nodes_min == 1 and not shape.gpus_total:
        single = next((seat for seat in rest if seat.tasks >= (shape.ntasks or 0)), None)
        chosen = [single] if single is not None else _fewest(shape, first, rest)
    else:
        chosen = _fewest(shape, first, rest)
    return sorted(chosen, key=lambda seat: seat.node) if chosen is not None else None


def parts_of(
    shape: Shape,
    chosen: Sequence[Seat],
    nodes: Sequence[NodeView],
    types: Sequence[tuple[GpuSlot, ...]],
    rooms: Sequence[Room],
) -> list[Part]:
    """Return what `shape` takes of the chosen seats, given their rooms: tasks, cpus, memory and GPUs by type."""
    tasks = _layout(shape, chosen)
    gives = _spread(gpu_count(shape.gpus_total), [seat.gpus for seat in chosen])
    return [
        Part(node=seat.node, tasks=count, use=_use(shape, nodes[seat.node], types[seat.node], room, count, give))
        for seat, room, count, give in zip(chosen, rooms, tasks, gives, strict=True)
    ]


# ----- does it fit


def mem_least(shape: Shape, node: NodeView) -> int:
    """Return the memory that `shape` takes of `node` at the very least."""
    if shape.mem_all or (shape.exclusive and not shape.mem_asked):
        return node.mem_mib
    if shape.mem_per_node_mib is not None:
        return shape.mem_per_node_mib
    return _mem_per_cpu(shape, node) * shape.cpus_least


def _mem_per_cpu(shape: Shape, node: NodeView) -> int:
    if shape.mem_per_cpu_mib is not None:
        return shape.mem_per_cpu_mib
    return node.mem_mib // node.cpus if node.cpus else 0


def _tasks_by_gpus(shape: Shape, types: tuple[GpuSlot, ...], free: Units) -> int:
    """Return how many tasks the free GPUs allow."""
    if shape.shards:
        return UNBOUNDED if shard_choices(shape.shards, types, free) else 0
    if shape.gpus_total:
        return UNBOUNDED if whole_gpus(types, free, shape.gpus_total[0][0]) else 0
    if shape.gpus_per_node:
        if gpus_taken(shape.gpus_per_node, types, free) is None:
            return 0
        each = gpu_count(shape.gpus_per_task)
        return gpu_count(shape.gpus_per_node) // each if each else UNBOUNDED
    tasks = whole_gpus(types, free) // gpu_count(shape.gpus_per_task)
    for kind, count in shape.gpus_per_task:
        tasks = min(tasks, whole_gpus(types, free, kind) // count)
    return tasks


# ----- which of those that fit


def _fewest(shape: Shape, first: list[Seat], rest: list[Seat]) -> list[Seat] | None:
    """Return `first` and the fewest of `rest` that hold all tasks and all GPUs of the total."""
    wanted_tasks, wanted_gpus = shape.ntasks or 0, gpu_count(shape.gpus_total)
    most = min(shape.nodes_max, len(first) + len(rest))
    by_gpus = _enough([seat.gpus for seat in first], [seat.gpus for seat in rest], wanted_gpus)
    by_tasks = _enough([seat.tasks for seat in first], [seat.tasks for seat in rest], wanted_tasks)
    if by_gpus is None or by_tasks is None:
        return None
    for count in range(max(shape.nodes_min, len(first), by_gpus, by_tasks), most + 1):
        for by in ("gpus", "tasks") if wanted_gpus else ("tasks",):
            chosen = first + _pick(rest, count - len(first), wanted_tasks, wanted_gpus, by, first)
            if sum(seat.tasks for seat in chosen) >= wanted_tasks and sum(seat.gpus for seat in chosen) >= wanted_gpus:
                return chosen
    return None


def _enough(first: list[int], rest: list[int], wanted: int) -> int | None:
    """Return how many nodes it takes at least to reach `wanted`, with all of `first`; None if all are not enough."""
    reached = list(accumulate(sorted(rest, reverse=True), initial=sum(first)))
    at = bisect_left(reached, wanted)
    return len(first) + at if at < len(reached) else None


def _pick(rest: list[Seat], count: int, wanted_tasks: int, wanted_gpus: int, by: str, first: list[Seat]) -> list[Seat]:
    """Return `count` of `rest` that reach what is wanted (of tasks or GPUs, `by`), the preferred ones where there is a choice.

    For each place in turn: the most preferred seat with which the largest others can still make up the rest.
    """
    value = (lambda seat: seat.gpus) if by == "gpus" else (lambda seat: seat.tasks)
    missing = (wanted_gpus if by == "gpus" else wanted_tasks) - sum(value(seat) for seat in first)
    open_seats = list(rest)
    sizes = sorted(value(seat) for seat in rest)  # ascending
    chosen: list[Seat] = []
    top = sum(sizes[len(sizes) - count + 1 :]) if count > 1 else 0  # the largest count-1 that are still open
    while len(chosen) < count:
        floor = missing - top
        fit = (at for at, seat in enumerate(open_seats) if value(seat) >= floor)
        if len(chosen) == count - 1:  # the last one: the tightest that has enough
            fit = iter(sorted(fit, key=lambda at: (*open_seats[at].preference[:2], value(open_seats[at]), at)))
        at = next(fit, None)
        if at is None:
            return chosen
        seat = open_seats.pop(at)
        size = value(seat)
        chosen.append(seat)
        missing -= size
        sizes.pop(bisect_left(sizes, size))
        places = count - len(chosen) - 1
        top = sum(sizes[len(sizes) - places :]) if places > 0 else 0
    return chosen


# ----- what they give


def _layout(shape: Shape, chosen: Sequence[Seat]) -> list[int]:
    """Return the tasks on each node: one each, then filled up in order."""
    if shape.ntasks is None:
        return [shape.tasks_min] * len(chosen)
    counts = [1] * len(chosen)
    left = shape.ntasks - len(chosen)
    for at, seat in enumerate(chosen):
        more = min(left, seat.tasks - 1)
        counts[at] += more
        left -= more
    return counts


def _spread(total: int, limits: Sequence[int]) -> list[int]:
    """Spread `total` over nodes as evenly as their limits allow, the first ones getting more."""
    given = [0] * len(limits)
    total = min(total, sum(limits))
    while total > 0:
        for at, limit in enumerate(limits):
            if total and given[at] < limit:
                given[at] += 1
                total -= 1
    return given


def _use(shape: Shape, node: NodeView, types: tuple[GpuSlot, ...], room: Room, tasks: int, give: int) -> Room:
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
        taken = shards_taken(shape.shards, types, room[2])
        if taken is None:
            raise InvariantError(
                f"node {node.name} was chosen for shards {shape.shards} but has {room[2]} of {types} free"
            )
        return cpus, mem_mib, taken
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


class Seating:
    """The seats of one shape on one set of nodes, kept in order of preference while starts change some of them."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        self.ordered = sorted(seats)
        self._by_node = {seat.node: seat for seat in seats}

    def replace(self, node: int, seat: Seat | None) -> None:
        """Put `seat` in the place of the one that `node` had; a node that had none stays without."""
        old = self._by_node.pop(node, None)
        if old is None:
            return
        del self.ordered[bisect_left(self.ordered, old)]
        if seat is not None:
            self._by_node[node] = seat
            insort(self.ordered, seat)
