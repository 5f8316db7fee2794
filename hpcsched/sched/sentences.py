"""Sentences about the needs of jobs and the resources of nodes. Pure text.

Wait reasons, rejections and `hwhy` use them.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.model.node import ANY_GPU
from hpcsched.model.units import format_mem
from hpcsched.sched.place.features import matches
from hpcsched.sched.place.gpus import GpuSlot, gpus_taken, shard_choices, whole_gpus
from hpcsched.sched.place.node_fit import mem_least
from hpcsched.sched.place.request import GpuCounts, Shape, gpus_least
from hpcsched.sched.place.timeline import NodeResources
from hpcsched.sched.snapshot import NodeView

_SMALL = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def spelled(number: int) -> str:
    """Return a number as text: up to twelve as a word, ``nine``, then in digits, ``13``."""
    return _SMALL[number] if 0 <= number < len(_SMALL) else str(number)


def plural(number: int, noun: str) -> str:
    """Return ``1 node`` or ``3 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(items: Sequence[str], most: int = 5) -> str:
    """Return ``a, b and c``.

    Of more than `most` items, the first ones are listed and the others counted.
    """
    if len(items) > most:
        return f"{', '.join(items[:most])} and {len(items) - most} more"
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else list(items))


def gpu_words(gpus: GpuCounts) -> str:
    """Return ``2 a100 GPUs and 1 GPU``."""
    return listed([plural(count, "GPU" if kind == ANY_GPU else f"{kind} GPU") for kind, count in gpus])


def shard_words(shards: GpuCounts) -> str:
    """Return ``2 shards of an a100 GPU``."""
    kind, count = shards[0]
    return f"{plural(count, 'shard')} of {'a GPU' if kind == ANY_GPU else f'one {kind} GPU'}"


def needs(shape: Shape) -> str:
    """Return the needs of `shape`: ``2 nodes with 4 cpus and 8G memory each``."""
    if shape.components:
        return " and apart from that ".join(map(needs, shape.components))
    if shape.ntasks is not None and shape.ntasks > 1:
        whole = _tasks(shape)
    else:
        whole = _nodes(shape)
    extras = [f"in all {gpu_words(shape.gpus_total)}"] if shape.gpus_total else []
    if shape.constraint:
        extras.append(f"feature {shape.constraint}")
    if shape.mincpus:
        extras.append(f"nodes of at least {plural(shape.mincpus, 'cpu')}")
    if shape.tmp_mib:
        extras.append(f"nodes with {format_mem(shape.tmp_mib)} for temporary files")
    if shape.switches and shape.nodes_max > 1:
        extras.append(f"on {shape.switches} {'switch' if shape.switches == 1 else 'switches'}")
    if shape.contiguous and shape.nodes_max > 1:
        extras.append("next to each other")
    if shape.nodelist:
        extras.append(f"{listed(shape.nodelist)} among them" if shape.nodes_max > 1 else f"namely {shape.nodelist[0]}")
    return ", ".join([whole, *extras])


def lacks(shape: Shape, node: NodeView, types: tuple[GpuSlot, ...], free: NodeResources) -> list[str]:
    """List the resources that `node` lacks to take one share of `shape`.

    `free`: its free resources. The list is empty if the share fits.
    """
    if shape.components:
        return min((lacks(component, node, types, free) for component in shape.components), key=len)
    unsuitable = _unsuitable(shape, node)
    if unsuitable:
        return [unsuitable]
    missing = []
    if shape.exclusive and free[0] < node.cpus:
        missing.append("is not empty")
    elif free[0] < shape.cpus_least:
        missing.append(f"{_has(node.cpus, free[0])} cpus free")
    mem_mib = mem_least(shape, node)
    if free[1] < mem_mib:
        has = f"has {format_mem(max(0, free[1]))} of {format_mem(node.mem_mib)} memory free"
        missing.append(f"{has}, not {format_mem(mem_mib)}")
    asked = gpus_least(shape)
    if asked and gpus_taken(asked, types, free[2]) is None:
        missing.append(_gpus_free(asked, types, node, free))
    if shape.shards and not shard_choices(shape.shards, types, free[2]):
        missing.append(_shards_free(shape.shards, types, free))
    return missing


def _unsuitable(shape: Shape, node: NodeView) -> str:
    """Explain why `shape` cannot use `node` even if it is empty; "" if it can."""
    if shape.exclude and node.name in shape.exclude:
        return "is excluded by the job"
    if shape.features and not matches(shape.features, node.features):
        return f"lacks feature {shape.constraint}"
    kinds = [*shape.alike, *(kind for kind, _ in shape.counts)]
    if kinds and not any(matches(kind, node.features) for kind in kinds) and len(shape.counts) != 1:
        return f"is none of the kinds of {shape.constraint}"
    if node.cpus < shape.mincpus:
        return f"has {plural(node.cpus, 'cpu')}, not {shape.mincpus}"
    if node.tmp_mib < shape.tmp_mib:
        return f"has {format_mem(node.tmp_mib)} for temporary files, not {format_mem(shape.tmp_mib)}"
    return ""


def _has(whole: int, free: int) -> str:
    return f"has {max(0, free)} of {whole}"


def _gpus_free(asked: GpuCounts, types: tuple[GpuSlot, ...], node: NodeView, free: NodeResources) -> str:
    kinds = [kind for kind, _ in asked if kind != ANY_GPU]
    for kind in kinds:
        if kind not in [slot.type for slot in types]:
            return f"has no {kind} GPU"
    if not kinds:
        return f"{_has(len(node.gpus), whole_gpus(types, free[2]))} GPUs free" if node.gpus else "has no GPU"
    count = whole_gpus(types, free[2], kinds[0])
    return f"{_has(sum(gpu.type.lower() == kinds[0] for gpu in node.gpus), count)} {kinds[0]} GPUs free"


def _shards_free(asked: GpuCounts, types: tuple[GpuSlot, ...], free: NodeResources) -> str:
    """Return the number of free shards on the best GPU of a node that has too few."""
    kind = asked[0][0]
    counts = [
        count
        for slot, count in zip(types, free[2], strict=True)
        if slot.gpu_index >= 0 and kind in (ANY_GPU, slot.type)
    ]
    of = f" {kind}" if kind != ANY_GPU else ""
    return f"has at most {plural(max(counts), 'shard')} free of one{of} GPU" if counts else f"shares no{of} GPU"


def _nodes(shape: Shape) -> str:
    parts = [plural(shape.cpus_least, "cpu"), *_memory(shape, shape.cpus_least)]
    if gpus_least(shape) and not shape.gpus_total:
        parts.append(gpu_words(gpus_least(shape)))
    if shape.shards:
        parts.append(shard_words(shape.shards))
    count = str(shape.nodes_min)
    if shape.nodes_max > shape.nodes_min and not shape.gpus_total:
        count += f" to {shape.nodes_max}"
    noun = "empty node" if shape.exclusive else "node"
    each = " each" if shape.nodes_max > 1 else ""
    return f"{count} {noun}{'' if shape.nodes_max == 1 else 's'} with {listed(parts)}{each}"


def _tasks(shape: Shape) -> str:
    parts = [plural(shape.cpus_per_task, "cpu"), *(_memory(shape, shape.cpus_per_task) if not _by_node(shape) else [])]
    if shape.gpus_per_task:
        parts.append(gpu_words(shape.gpus_per_task))
    per_node = [*(_memory(shape, 0) if _by_node(shape) else [])]
    if shape.gpus_per_node:
        per_node.append(gpu_words(shape.gpus_per_node))
    if shape.shards:
        per_node.append(shard_words(shape.shards))
    where = f" on {_range(shape)}" if shape.nodes_max < (shape.ntasks or 0) or shape.nodes_min > 1 else ""
    where += f" with {listed(per_node)} per node" if per_node else ""
    return f"{shape.ntasks} tasks of {listed(parts)}{where}{' that are empty' if shape.exclusive and where else ''}"


def _range(shape: Shape) -> str:
    if shape.nodes_min == shape.nodes_max:
        return plural(shape.nodes_min, "node")
    return f"{shape.nodes_min} to {shape.nodes_max} nodes"


def _by_node(shape: Shape) -> bool:
    return shape.mem_all or shape.mem_per_node_mib is not None


def _memory(shape: Shape, cpus: int) -> list[str]:
    """Return the memory request of the job as text; empty for a default."""
    if shape.mem_all:
        return ["all memory"]
    if not shape.mem_asked:
        return []
    if shape.mem_per_node_mib is not None:
        return [f"{format_mem(shape.mem_per_node_mib)} memory"]
    return [f"{format_mem((shape.mem_per_cpu_mib or 0) * cpus)} memory"]
