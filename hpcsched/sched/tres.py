"""Resources of requests, of shares and of nodes, under Slurm's names (TRES)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest

from hpcsched.model.accounting import BILLING, CPU, GPU, LICENSE, MEM, NODE
from hpcsched.model.ids import NodeName
from hpcsched.model.node import ANY_GPU, Share
from hpcsched.model.units import MIB_PER_GIB
from hpcsched.sched.place.features import matches
from hpcsched.sched.place.gpus import GpuSlot, Units
from hpcsched.sched.place.node_fit import mem_least
from hpcsched.sched.place.request import GpuCounts, Shape
from hpcsched.sched.snapshot import NodeView

Held = dict[str, float]
Licenses = tuple[tuple[str, int], ...]


def least_of(shape: Shape, licenses: Licenses = ()) -> Held:
    """Return the least resources that a job of `shape` gets."""
    if shape.components:
        return _sum([least_of(component) for component in shape.components], licenses)
    tasks = shape.tasks_least
    cpus = tasks * shape.cpus_per_task
    held: Held = {NODE: shape.nodes_min, CPU: cpus, MEM: 0.0}
    if shape.mem_per_node_mib is not None:
        held[MEM] = shape.mem_per_node_mib * shape.nodes_min
    elif shape.mem_per_cpu_mib is not None:
        held[MEM] = shape.mem_per_cpu_mib * cpus
    _add_gpus(held, shape.gpus_per_node, shape.nodes_min)
    if not shape.gpus_per_node:
        _add_gpus(held, shape.gpus_per_task, tasks)
        if not shape.gpus_per_task:
            _add_gpus(held, shape.gpus_total, 1)
    _add_licenses(held, licenses)
    return held


def _sum(parts: Iterable[Held], licenses: Licenses) -> Held:
    held: Held = {}
    for part in parts:
        for name, amount in part.items():
            held[name] = held.get(name, 0) + amount
    _add_licenses(held, licenses)
    return held


def least_there(shape: Shape, nodes: Sequence[NodeView], licenses: Licenses = ()) -> Held:
    """Return the least resources that a job of `shape` gets on some of `nodes`.

    An exclusive job gets more than it requests. So does a job without a memory request: it gets a
    part of the memory of the node.
    """
    if shape.components:
        return _sum([least_there(component, nodes) for component in shape.components], licenses)
    held, count = least_of(shape, licenses), shape.nodes_min
    if not shape.exclusive and (shape.mem_per_node_mib is not None or shape.mem_per_cpu_mib is not None):
        return held
    able = [
        node
        for node in nodes
        if node.cpus >= shape.cpus_least and (not shape.features or matches(shape.features, node.features))
    ]
    held[MEM] = max(held[MEM], sum(nsmallest(count, (mem_least(shape, node) for node in able))))
    if shape.exclusive:
        held[CPU] = max(held[CPU], sum(nsmallest(count, (node.cpus for node in able))))
        gpus = sum(nsmallest(count, (len(node.gpus) for node in able)))
        if gpus > held.get(GPU, 0):
            held[GPU] = gpus
    return held


def held_by(shares: Iterable[Share], nodes: Mapping[NodeName, NodeView], licenses: Licenses = ()) -> Held:
    """Return the resources of a job with these shares; GPUs of unknown nodes have no type."""
    held: Held = {NODE: 0, CPU: 0, MEM: 0}
    for share in shares:
        held[NODE] += 1
        held[CPU] += share.cpus
        held[MEM] += share.mem_mib
        if share.gpus:
            held[GPU] = held.get(GPU, 0) + share.gpu_amount
            node = nodes.get(share.node)
            for gpu in node.gpus if node is not None else ():
                if gpu.index in share.gpus:
                    name = f"{GPU}:{gpu.type.lower()}"
                    held[name] = held.get(name, 0) + share.gpu_amount / len(share.gpus)
    _add_licenses(held, licenses)
    return held


def held_of(parts: Iterable[tuple[int, int, Units, tuple[GpuSlot, ...]]], licenses: Licenses = ()) -> Held:
    """Return the resources of a job with these parts and licences.

    Each part has cpus, MiB, units of GPU slots, and the slots of the node.
    """
    held: Held = {NODE: 0, CPU: 0, MEM: 0}
    for cpus, mem_mib, units, slots in parts:
        held[NODE] += 1
        held[CPU] += cpus
        held[MEM] += mem_mib
        for slot, count in zip(slots, units, strict=True):
            if count:
                for name in (GPU, f"{GPU}:{slot.type}"):
                    held[name] = held.get(name, 0) + count / slot.shards
    _add_licenses(held, licenses)
    return held


def all_of(nodes: Iterable[NodeView], licenses: Licenses = ()) -> Held:
    """Return the resources of all `nodes` together, and the licences."""
    nodes = tuple(nodes)
    whole: Held = {NODE: len(nodes), CPU: sum(n.cpus for n in nodes), MEM: sum(n.mem_mib for n in nodes)}
    for node in nodes:
        for slot, count in zip(node.slots, node.units, strict=True):
            for name in (GPU, f"{GPU}:{slot.type}"):
                whole[name] = whole.get(name, 0) + count // slot.shards
    _add_licenses(whole, licenses)
    return whole


def billing_of(held: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the billing of one second of `held`."""
    total = held.get(CPU, 0) * weights.get(CPU, 0.0) + held.get(MEM, 0) / MIB_PER_GIB * weights.get(MEM, 0.0)
    typed = {name: weight for name, weight in weights.items() if name.startswith(GPU + ":")}
    plain = held.get(GPU, 0) - sum(held.get(name, 0) for name in typed)
    counted = [name for name in weights if name == NODE or name.startswith(LICENSE)]
    total += sum(held.get(name, 0) * weights[name] for name in counted)
    return total + plain * weights.get(GPU, 0.0) + sum(held.get(name, 0) * weight for name, weight in typed.items())


def with_billing(held: Held, weights: Mapping[str, float]) -> Held:
    """Return `held` with the billing of one second of it."""
    return held | {BILLING: billing_of(held, weights)}


def _add_gpus(held: Held, counts: GpuCounts, times: int) -> None:
    for kind, count in counts:
        held[GPU] = held.get(GPU, 0) + count * times
        if kind != ANY_GPU:
            name = f"{GPU}:{kind.lower()}"
            held[name] = held.get(name, 0) + count * times


def _add_licenses(held: Held, licenses: Licenses) -> None:
    for name, count in licenses:
        held[LICENSE + name] = count
