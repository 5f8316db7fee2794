"""Stranded GPUs of a node: free, but of no use to the jobs that are expected.

Expected jobs are assumed to resemble the running and waiting jobs: a *mix* of the most common demands. A demand of the mix can
use the free GPUs of a node if the free cpus and memory of the node suffice for it. All demands together cannot use more GPUs
than the free cpus allow, at the ratio of cpus to GPUs of the mix. The other free GPUs are stranded. A job goes to the node
where it strands the fewest additional GPUs. That number is negative if the job takes GPUs that fit no other job.

Source: placement by the growth of expected fragmentation is from Weng et al., Beware of
Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent, USENIX ATC
2023. The bound by free cpus at the ratio of the mix is ours: it detects that a node runs out of
cpus long before no job fits.

Pure. Knows nothing of time. Types of GPUs are not distinguished, because a node usually has GPUs of one type.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from hpcsched.model.node import Share
from hpcsched.sched.place.gpus import GpuSlot, Units
from hpcsched.sched.place.request import Shape, gpu_count
from hpcsched.sched.place.timeline import NodeResources, less
from hpcsched.sched.snapshot import Snapshot

MOST_DEMANDS = 24  # the most common demands, which are usually nearly all demands
_MICRO = 1_000_000


class Demand(NamedTuple):
    """The part of one node that a job takes.

    It is either whole `gpus`, or `shards` of the `shards_of` of one GPU.
    """

    cpus: int
    mem_mib: int
    gpus: int
    shards: int = 0
    shards_of: int = 1

    @property
    def gpu_amount(self) -> float:
        return self.gpus + self.shards / self.shards_of


class Mix:
    """The demands of jobs on nodes with GPUs, with frequencies that add up to 1."""

    def __init__(self, counts: Counter[Demand]) -> None:
        common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MOST_DEMANDS]
        total = sum(count for _, count in common)
        self._parts = [(demand, count / total) for demand, count in common]
        cpus = sum(demand.cpus * part for demand, part in self._parts)
        self._cpus_per_gpu = max(cpus, 1.0) / sum(demand.gpu_amount * part for demand, part in self._parts)
        self._known: dict[tuple[GpuSlot, ...], dict[NodeResources, float]] = {}

    def newly_stranded(self, slots: tuple[GpuSlot, ...], room: NodeResources, use: NodeResources) -> int:
        """Return the additional stranded GPUs, in millionths, once `use` is taken of `room`.

        A negative number means fewer stranded GPUs.
        """
        return round((self.stranded(slots, less(room, use)) - self.stranded(slots, room)) * _MICRO)

    def stranded(self, slots: tuple[GpuSlot, ...], room: NodeResources) -> float:
        """Return the number of free GPUs in `room` that are expected to be of no use."""
        known = self._known.setdefault(slots, {})
        lost = known.get(room)
        if lost is None:
            lost = known[room] = self._stranded(slots, room)
        return lost

    def _stranded(self, slots: tuple[GpuSlot, ...], room: NodeResources) -> float:
        cpus, mem_mib, units = room
        free = sum([count / slot.shards for slot, count in zip(slots, units, strict=True)])
        if not free:
            return 0.0
        whole = sum([count // slot.shards for slot, count in zip(slots, units, strict=True)])
        fed = min(free, cpus / self._cpus_per_gpu)
        lost = 0.0
        for demand, part in self._parts:
            usable = 0.0
            if demand.cpus <= cpus and demand.mem_mib <= mem_mib:
                if demand.shards:
                    usable = _with_room_for(demand, slots, units)
                elif whole >= demand.gpus:
                    usable = whole
            lost += part * (free - min(usable, fed))
        return lost


def mix_of(snapshot: Snapshot) -> Mix | None:
    """Return the mix of running and pending jobs in `snapshot`.

    None: there are no GPUs, or no job requests any.
    """
    slots = {node.name: node.slots for node in snapshot.nodes if node.gpus}
    if not slots:
        return None
    counts: Counter[Demand] = Counter()
    for job in snapshot.running:
        for share in job.shares:
            if share.gpus:
                counts[_of_share(share)] += 1
    shards_of = max([slot.shards for node_slots in slots.values() for slot in node_slots])
    shapes = {id(job.request.shape): job.request.shape for job in snapshot.pending}
    for key, number in Counter([id(job.request.shape) for job in snapshot.pending]).items():
        for shape in shapes[key].each:
            demand = _of_shape(shape, shards_of)
            if demand is not None:
                counts[demand] += number
    return Mix(counts) if counts else None


def _of_share(share: Share) -> Demand:
    if share.shards:
        return Demand(share.cpus, share.mem_mib, 0, share.shards, share.shards_of)
    return Demand(share.cpus, share.mem_mib, len(share.gpus))


def _of_shape(shape: Shape, shards_of: int) -> Demand | None:
    """Return the approximate demand of `shape` on each node; None if it needs no GPUs."""
    tasks = shape.tasks_min if shape.ntasks is None else max(1, shape.ntasks // shape.nodes_min)
    gpus = gpu_count(shape.gpus_per_node) + gpu_count(shape.gpus_per_task) * tasks
    gpus += gpu_count(shape.gpus_total) // shape.nodes_min
    shards = min(gpu_count(shape.shards), shards_of)
    if not gpus and not shards:
        return None
    cpus = tasks * shape.cpus_per_task
    mem_mib = shape.mem_per_node_mib if shape.mem_per_node_mib is not None else (shape.mem_per_cpu_mib or 0) * cpus
    return Demand(cpus, mem_mib, gpus, shards, shards_of)


def _with_room_for(demand: Demand, slots: tuple[GpuSlot, ...], units: Units) -> float:
    """Return how much is free, in GPUs, on the GPUs that have the shards of `demand`."""
    usable = 0.0
    for slot, count in zip(slots, units, strict=True):
        if slot.gpu_index >= 0 and count * demand.shards_of >= demand.shards * slot.shards:
            usable += count / slot.shards
    return usable
