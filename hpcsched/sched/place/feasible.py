"""Checks at submission: a job that can never run is rejected, with the numbers.

All nodes of the partition count as empty and usable, even if they do not answer now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hpcsched.model.ids import NodeName
from hpcsched.model.node import ANY_GPU, Gpu, Partition
from hpcsched.model.units import format_mem, format_time_s
from hpcsched.sched.place.features import matches
from hpcsched.sched.place.gang import choose, seats_apart
from hpcsched.sched.place.node_fit import Seat, mem_least, seat_of, tasks_that_fit
from hpcsched.sched.place.request import ResourceRequest, Shape, gpu_count, gpus_least
from hpcsched.sched.place.timeline import whole
from hpcsched.sched.sentences import gpu_words, listed, needs, plural, shard_words, spelled
from hpcsched.sched.snapshot import NodeView, allows

SOME_NODES = (16, 128)  # most jobs fit on so many of a large cluster, and no more are looked at


def never_fits(shape: Shape, nodes: Sequence[NodeView]) -> bool:
    """Say whether `shape` does not fit even if all of `nodes` are empty.

    `nodes`: the nodes that it may use. The number of switches does not count, because a job accepts
    more switches after some time.
    """
    if shape.components:
        return _components_never_fit(shape.components, nodes)
    if shape.switches:
        shape = replace(shape, switches=0)
    if shape.ntasks is None and not shape.gpus_total and not shape.nodelist and shape.any_nodes:
        return not _has_seats(shape, nodes, shape.nodes_min)
    places = {node.name: at for at, node in enumerate(nodes)}
    required = frozenset(places.get(name, -1) for name in shape.nodelist)
    some = [count for count in SOME_NODES if shape.nodes_min <= count < len(nodes)]
    return all(choose(shape, sorted(_seats(shape, nodes[:count])), required) is None for count in (*some, len(nodes)))


def _components_never_fit(components: Sequence[Shape], nodes: Sequence[NodeView]) -> bool:
    """Say whether the components do not fit on separate nodes even if `nodes` are empty."""
    places = {node.name: at for at, node in enumerate(nodes)}
    required = [frozenset(places.get(name, -1) for name in component.nodelist) for component in components]
    seats = [
        sorted([seat for seat in _seats(component, nodes) if allows(component, nodes[seat.node])])
        for component in components
    ]  # `nodes` are those that any component may use

    def pick(at: int, taken: frozenset[int]) -> list[Seat] | None:
        return choose(components[at], [seat for seat in seats[at] if seat.node not in taken], required[at])

    return seats_apart(components, pick) is None


def impossible_shape(shape: Shape, nodes: Iterable[NodeView], partition: Partition) -> str | None:
    """Explain why no job of `shape` can ever run in `partition`; None if it can.

    The time limit does not matter.
    """
    names = set(partition.nodes)
    present = [node for node in nodes if node.name in names]
    if shape.components:
        return _impossible_components(shape, present, partition)
    return _wrong_nodes(shape, present, partition) or _too_much(shape, present, partition)


def _impossible_components(shape: Shape, nodes: list[NodeView], partition: Partition) -> str | None:
    """Name the component that can never run, or say that all cannot run together."""
    for number, component in enumerate(shape.components):
        why = _wrong_nodes(component, nodes, partition) or _too_much(component, nodes, partition)
        if why is not None:
            return f"component {number}: {why}"
    if _components_never_fit(shape.components, nodes):
        return (
            f"cannot give job {needs(shape)}: its components run on nodes of their own, and partition {partition.name!r} "
            f"has {plural(len(nodes), 'node')}, not enough for all of them at a time"
        )
    return None


def too_long(request: ResourceRequest, partition: Partition) -> str | None:
    """Explain why a partition allows no job so long; None if it does."""
    limit_s, most_s = request.time_limit_s, partition.max_time_s
    if most_s is None or (limit_s is not None and 0 < limit_s <= most_s):
        return None
    asked = format_time_s(limit_s or None)
    return f"cannot give job time limit {asked}: partition {partition.name!r} allows {format_time_s(most_s)}"


def _wrong_nodes(shape: Shape, nodes: list[NodeView], partition: Partition) -> str | None:
    """Explain why the number or the choice of nodes is wrong, regardless of resources."""
    where = f"partition {partition.name!r}"
    wanted = f"cannot give job {_count(shape.nodes_min)}"
    if partition.max_nodes is not None and shape.nodes_min > partition.max_nodes:
        return f"{wanted}: {where} allows {partition.max_nodes} to one job"
    if shape.nodes_min > len(nodes):
        return f"{wanted}: {where} has {len(nodes)}"
    left = [node for node in nodes if node.name not in shape.exclude]
    if shape.nodes_min > len(left):
        return f"{wanted}: {where} has {len(nodes)}, and the request excludes {len(nodes) - len(left)} of them"
    fit = [node for node in left if matches(shape.features, node.features)]
    if shape.nodes_min > len(fit):
        return f"{wanted} with feature {shape.constraint}: {_nodes_with_feature(fit, left, where)}"
    wrong = _wrong_kinds(shape, fit, where) or _too_small(shape, fit, where)
    if wrong is not None:
        return wrong
    return _wrong_list(shape, {node.name for node in nodes}, {node.name for node in fit}, where)


def _nodes_with_feature(fit: list[NodeView], nodes: list[NodeView], where: str) -> str:
    """Return the number of nodes of `where` that have the features.

    If it is zero, the existing features are listed.
    """
    if fit:
        return f"{where} has {len(fit)}"
    there = sorted({feature for node in nodes for feature in node.features})
    return f"no node of {where} has it; " + (f"there are: {', '.join(there)}" if there else "no node has any feature")


def _wrong_kinds(shape: Shape, nodes: list[NodeView], where: str) -> str | None:
    """Name the kind of node of which there are too few (`Shape.alike`, `Shape.counts`)."""
    if shape.alike:
        most = max(sum(matches(kind, node.features) for node in nodes) for kind in shape.alike)
        if most < shape.nodes_min:
            return f"cannot give job {_count(shape.nodes_min)} of one kind of {shape.constraint}: {where} has at most {most}"
    for kind, count in shape.counts:
        there = sum(matches(kind, node.features) for node in nodes)
        if there < count:
            return f"cannot give job {_count(count)} of a kind of {shape.constraint}: {where} has {there}"
    return None


def _too_small(shape: Shape, nodes: list[NodeView], where: str) -> str | None:
    """Name the minimum per node that too few nodes reach, free or not.

    Minimums are ``--mincpus`` and ``--tmp``.
    """
    for least, what, has in (
        (shape.mincpus, plural(shape.mincpus, "cpu"), [node.cpus for node in nodes]),
        (shape.tmp_mib, f"{format_mem(shape.tmp_mib)} for temporary files", [node.tmp_mib for node in nodes]),
    ):
        enough = sum(amount >= least for amount in has)
        if least and enough < shape.nodes_min:
            return f"cannot give job {_count(shape.nodes_min)} with {what}: {where} has {enough}"
    return None


def _wrong_list(shape: Shape, known: set[NodeName], fit: set[NodeName], where: str) -> str | None:
    """Explain the error in the node list; None if it is correct."""
    if len(shape.nodelist) > shape.nodes_max:
        return f"cannot give job {_count(shape.nodes_max)}: its node list names {len(shape.nodelist)}"
    for name in shape.nodelist:
        if name not in known:
            return f"cannot give job node {name}: {where} does not have it"
        if name in shape.exclude:
            return f"cannot give job node {name}: the request also excludes it"
        if name not in fit:
            return f"cannot give job node {name}: it lacks feature {shape.constraint}"
    return None


def _too_much(shape: Shape, nodes: list[NodeView], partition: Partition) -> str | None:
    """Name the resource of which the nodes that `shape` may use have too little."""
    able = [node for node in nodes if allows(shape, node)]
    if not never_fits(shape, able):
        return None
    words = [f"with feature {shape.constraint}"] if shape.constraint else []
    words += ["not excluded"] if shape.exclude else []
    only = f" {listed(words)}" if words else ""
    judged = _Judged(shape=shape, nodes=able, where=f"partition {partition.name!r}", only=only)
    return _one_resource(judged) or _together(judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """The nodes that a shape may use, and their names in messages."""

    shape: Shape
    nodes: list[NodeView]
    where: str  # the partition
    only: str  # which of its nodes the shape may use; empty: all


def _one_resource(judged: _Judged) -> str | None:
    """Return the sentence about the single resource of which too few nodes have enough.

    None: no single resource is short.
    """
    return _cpus(judged) or _memory(judged) or _gpus(judged) or _shards(judged)


def _cpus(judged: _Judged) -> str | None:
    least = judged.shape.cpus_least
    most = max((node.cpus for node in judged.nodes), default=0)
    return _short(judged, [node.cpus >= least for node in judged.nodes], plural(least, "cpu"), f"more than {most}")


def _memory(judged: _Judged) -> str | None:
    least = [mem_least(judged.shape, node) for node in judged.nodes]
    most = max((node.mem_mib for node in judged.nodes), default=0)
    enough = [node.mem_mib >= mem_mib for node, mem_mib in zip(judged.nodes, least, strict=True)]
    asked = f"{format_mem(max(least, default=0))} memory"
    return _short(judged, enough, asked, f"more than {format_mem(most)}")


def _gpus(judged: _Judged) -> str | None:
    for kind, count in gpus_least(judged.shape):
        counts = [_of_kind(node, kind) for node in judged.nodes]
        best = f"more than {max(counts)}" if any(counts) else f"any {kind} GPU".replace("  ", " ")
        short = _short(judged, [has >= count for has in counts], gpu_words(((kind, count),)), best)
        if short is not None:
            return short
    return None


def _shards(judged: _Judged) -> str | None:
    if not judged.shape.shards:
        return None
    kind, count = judged.shape.shards[0]
    most = [
        max((gpu.shards for gpu in node.gpus if _is(gpu, kind) and gpu.shards > 1), default=0) for node in judged.nodes
    ]
    best = f"more than {plural(max(most), 'shard')} of a GPU" if any(most) else f"shared {kind} GPUs".replace("  ", " ")
    return _short(judged, [has >= count for has in most], shard_words(judged.shape.shards), best)


def _short(judged: _Judged, enough: list[bool], asked: str, best: str) -> str | None:
    """Return the sentence for one resource if too few nodes have `enough` of it.

    `best`: the largest amount of any node.
    """
    least = judged.shape.nodes_min
    if sum(enough) >= least:
        return None
    wanted = f"cannot give job {_count(least)} with {asked}{' each' if least > 1 else ''}"
    if any(enough):
        return f"{wanted}: {judged.where} has {sum(enough)}{judged.only}"
    return f"{wanted}: no node{judged.only} of {judged.where} has {best}"


def _together(judged: _Judged) -> str:
    """Return the sentence for a shape with enough of each resource, but not of all together."""
    shape, nodes, where = judged.shape, judged.nodes, judged.where
    seats = _seats(shape, nodes)
    short = _gpus_in_all(judged, seats) or _tasks_in_all(judged, seats)
    if short is not None:
        return short
    fit = {nodes[seat.node].name for seat in seats}
    missing = [name for name in shape.nodelist if name not in fit]
    if missing:
        return f"cannot give job {needs(shape)}: {listed(missing)} {'has' if len(missing) == 1 else 'have'} not so much"
    if shape.alike or shape.counts:
        return f"cannot give job {needs(shape)}: {where} has no nodes that are all of that together"
    return f"cannot give job {needs(shape)}: {where} has {plural(len(seats), 'node')} with all of that{_among(judged)}"


def _gpus_in_all(judged: _Judged, seats: Sequence[Seat]) -> str | None:
    """Return the sentence for a shape whose nodes have too few GPUs in total."""
    shape = judged.shape
    have = sum(sorted((seat.gpus for seat in seats), reverse=True)[: shape.nodes_max])
    if have >= gpu_count(shape.gpus_total):
        return None
    return (
        f"cannot give job {gpu_words(shape.gpus_total)}: {judged.where} has at most {have}{_on(judged)}{_among(judged)}"
    )


def _tasks_in_all(judged: _Judged, seats: Sequence[Seat]) -> str | None:
    """Return the sentence for a shape whose nodes have too little room for its tasks."""
    shape = judged.shape
    if shape.ntasks is None or len(seats) < shape.nodes_min:
        return None
    room = sum(sorted((seat.tasks for seat in seats), reverse=True)[: shape.nodes_max])
    if room >= shape.ntasks:
        return None
    return f"cannot give job {needs(shape)}: {judged.where} has room for {room}{_on(judged)}{_among(judged)}"


def _on(judged: _Judged) -> str:
    most = judged.shape.nodes_max
    return f" on {plural(most, 'node')}" if most < len(judged.nodes) else ""


def _among(judged: _Judged) -> str:
    return f" in nodes{judged.only}" if judged.only else ""


def _has_seats(shape: Shape, nodes: Sequence[NodeView], wanted: int) -> bool:
    """Say whether at least `wanted` of `nodes` can take a share of `shape`.

    The search stops at that number.
    """
    for node in nodes:
        wanted -= tasks_that_fit(shape, node, node.slots, whole(node)) > 0
        if wanted <= 0:
            return True
    return False


def _count(nodes: int) -> str:
    return f"{spelled(nodes)} node{'' if nodes == 1 else 's'}"


def _of_kind(node: NodeView, kind: str) -> int:
    return sum(_is(gpu, kind) for gpu in node.gpus)


def _is(gpu: Gpu, kind: str) -> bool:
    return kind in (ANY_GPU, gpu.type.lower())


def _seats(shape: Shape, nodes: Sequence[NodeView]) -> list[Seat]:
    seats = []
    for at, node in enumerate(nodes):
        seat = seat_of(shape, at, node, node.slots, whole(node))
        if seat is not None:
            seats.append(seat)
    return seats
