"""Could a job ever run here? Asked at submission: what never can is refused with the numbers.

All nodes of the partition count, empty and able, whether or not they answer today.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hpcsched.model.ids import NodeName
from hpcsched.model.node import Node, Partition
from hpcsched.model.resources import ANY_GPU, Gpu
from hpcsched.model.units import format_mem, format_time_s
from hpcsched.sched.explain.sentences import gpu_words, listed, needs, plural, shard_words, spelled
from hpcsched.sched.place.features import matches
from hpcsched.sched.place.gang import choose, seats_apart
from hpcsched.sched.place.node_fit import Seat, mem_least, seat_of, tasks_that_fit
from hpcsched.sched.place.request import ResourceRequest, Shape, gpu_count, gpus_least
from hpcsched.sched.place.timeline import whole
from hpcsched.sched.snapshot import NodeView, allows, node_view


def never_fits(shape: Shape, nodes: Sequence[NodeView]) -> bool:
    """Say whether `shape` would not fit even if all of `nodes` (those that it may use) were empty.

    How many switches they hang on does not count: with time more will do.
    """
    if shape.components:
        return _never_apart(shape.components, nodes)
    if shape.switches:
        shape = replace(shape, switches=0)
    if shape.ntasks is None and not shape.gpus_total and not shape.nodelist and shape.any_nodes:
        return not _has_seats(shape, nodes, shape.nodes_min)
    places = {node.name: at for at, node in enumerate(nodes)}
    required = frozenset(places.get(name, -1) for name in shape.nodelist)
    return choose(shape, sorted(_seats(shape, nodes)), required) is None


def _never_apart(components: Sequence[Shape], nodes: Sequence[NodeView]) -> bool:
    """Say whether the components would not fit on nodes of their own even if all of `nodes` were empty."""
    places = {node.name: at for at, node in enumerate(nodes)}
    required = [frozenset(places.get(name, -1) for name in one.nodelist) for one in components]
    seats = [
        sorted([seat for seat in _seats(one, nodes) if allows(one, nodes[seat.node])]) for one in components
    ]  # `nodes` are those that any of them may use

    def pick(at: int, taken: frozenset[int]) -> list[Seat] | None:
        return choose(components[at], [seat for seat in seats[at] if seat.node not in taken], required[at])

    return seats_apart(components, pick) is None


def impossible(request: ResourceRequest, nodes: Iterable[Node | NodeView], partition: Partition) -> str | None:
    """Return why a job that asks for `request` can never run in `partition`, in a sentence with the numbers; None: it can."""
    views = [node if isinstance(node, NodeView) else node_view(node) for node in nodes]
    return _too_long(request, partition) or impossible_shape(request.shape, views, partition)


def impossible_shape(shape: Shape, nodes: Iterable[NodeView], partition: Partition) -> str | None:
    """Return why no job of `shape`, however short, can ever run in `partition`; None: it can."""
    names = set(partition.nodes)
    its = [node for node in nodes if node.name in names]
    if shape.components:
        return _impossible_components(shape, its, partition)
    return _wrong_nodes(shape, its, partition) or _too_much(shape, its, partition)


def _impossible_components(shape: Shape, nodes: list[NodeView], partition: Partition) -> str | None:
    """Return which component can never run, or that they cannot beside each other."""
    for number, one in enumerate(shape.components):
        why = _wrong_nodes(one, nodes, partition) or _too_much(one, nodes, partition)
        if why is not None:
            return f"component {number}: {why}"
    if _never_apart(shape.components, nodes):
        return (
            f"cannot give job {needs(shape)}: its components run on nodes of their own, and partition {partition.name!r} "
            f"has {plural(len(nodes), 'node')}, not enough for all of them at a time"
        )
    return None


def _too_long(request: ResourceRequest, partition: Partition) -> str | None:
    limit_s, most_s = request.time_limit_s, partition.max_time_s
    if most_s is None or (limit_s is not None and 0 < limit_s <= most_s):
        return None
    asked = format_time_s(limit_s or None)
    return f"cannot give job time limit {asked}: partition {partition.name!r} allows {format_time_s(most_s)}"


def _wrong_nodes(shape: Shape, nodes: list[NodeView], partition: Partition) -> str | None:
    """Return what is wrong with how many and which nodes it wants, whatever they have."""
    where = f"partition {partition.name!r}"
    wanted = f"cannot give job {_count(shape.nodes_min)}"
    if partition.max_nodes is not None and shape.nodes_min > partition.max_nodes:
        return f"{wanted}: {where} allows {partition.max_nodes} to one job"
    if shape.nodes_min > len(nodes):
        return f"{wanted}: {where} has {len(nodes)}"
    kept = [node for node in nodes if node.name not in shape.exclude]
    if shape.nodes_min > len(kept):
        return f"{wanted}: {where} has {len(nodes)}, and the request excludes {len(nodes) - len(kept)} of them"
    fit = [node for node in kept if matches(shape.features, node.features)]
    if shape.nodes_min > len(fit):
        return f"{wanted} with feature {shape.constraint}: {_nodes_with_feature(fit, kept, where)}"
    wrong = _wrong_kinds(shape, fit, where) or _wrong_floors(shape, fit, where)
    if wrong is not None:
        return wrong
    return _wrong_list(shape, {node.name for node in nodes}, {node.name for node in fit}, where)


def _nodes_with_feature(fit: list[NodeView], nodes: list[NodeView], where: str) -> str:
    """Return how many nodes of `where` have the features asked for; if none has, which features there are."""
    if fit:
        return f"{where} has {len(fit)}"
    there = sorted({feature for node in nodes for feature in node.features})
    return f"no node of {where} has it; " + (f"there are: {', '.join(there)}" if there else "no node has any feature")


def _wrong_kinds(shape: Shape, nodes: list[NodeView], where: str) -> str | None:
    """Return of which kind there are too few nodes, of those that it asks for beside what each must be."""
    if shape.alike:
        most = max(sum(matches(kind, node.features) for node in nodes) for kind in shape.alike)
        if most < shape.nodes_min:
            return f"cannot give job {_count(shape.nodes_min)} of one kind of {shape.constraint}: {where} has at most {most}"
    for kind, count in shape.counts:
        its = sum(matches(kind, node.features) for node in nodes)
        if its < count:
            return f"cannot give job {_count(count)} of a kind of {shape.constraint}: {where} has {its}"
    return None


def _wrong_floors(shape: Shape, nodes: list[NodeView], where: str) -> str | None:
    """Return of what too few nodes have at least so much as it asks, taken or not."""
    for least, what, has in (
        (shape.mincpus, plural(shape.mincpus, "cpu"), [node.cpus for node in nodes]),
        (shape.tmp_mib, f"{format_mem(shape.tmp_mib)} for temporary files", [node.tmp_mib for node in nodes]),
    ):
        enough = sum(its >= least for its in has)
        if least and enough < shape.nodes_min:
            return f"cannot give job {_count(shape.nodes_min)} with {what}: {where} has {enough}"
    return None


def _wrong_list(shape: Shape, known: set[NodeName], fit: set[NodeName], where: str) -> str | None:
    """Return what is wrong with its node list."""
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
    """Return of what the nodes that it may use have too little."""
    able = [node for node in nodes if allows(shape, node)]
    if not never_fits(shape, able):
        return None
    words = [f"with feature {shape.constraint}"] if shape.constraint else []
    kept = f" {listed([*words, *(['not excluded'] if shape.exclude else [])])}" if words or shape.exclude else ""
    where = f"partition {partition.name!r}"
    return _one_thing(shape, able, where, kept) or _in_all(shape, able, where, f" in nodes{kept}" if kept else "")


def _one_thing(shape: Shape, nodes: list[NodeView], where: str, kept: str) -> str | None:
    """Return the one resource of which too few nodes have enough; `kept` says which nodes it may use of the partition."""
    cpus, floors = shape.cpus_least, [mem_least(shape, node) for node in nodes]
    most = max((node.cpus for node in nodes), default=0)
    short = _short(shape, [node.cpus >= cpus for node in nodes], plural(cpus, "cpu"), f"more than {most}", where, kept)
    if short is None:
        most = max((node.mem_mib for node in nodes), default=0)
        enough = [node.mem_mib >= floor for node, floor in zip(nodes, floors, strict=True)]
        asked, best = f"{format_mem(max(floors, default=0))} memory", f"more than {format_mem(most)}"
        short = _short(shape, enough, asked, best, where, kept)
    for kind, count in gpus_least(shape) if short is None else ():
        had = [_of_kind(node, kind) for node in nodes]
        best = f"more than {max(had)}" if any(had) else f"any {kind} GPU".replace("  ", " ")
        short = short or _short(shape, [its >= count for its in had], gpu_words(((kind, count),)), best, where, kept)
    if short is None and shape.shards:
        kind, count = shape.shards[0]
        cut = [max((gpu.shards for gpu in node.gpus if _is(gpu, kind) and gpu.shards > 1), default=0) for node in nodes]
        best = (
            f"more than {plural(max(cut), 'shard')} of a GPU" if any(cut) else f"shared {kind} GPUs".replace("  ", " ")
        )
        short = _short(shape, [its >= count for its in cut], shard_words(shape.shards), best, where, kept)
    return short


def _short(shape: Shape, enough: list[bool], asked: str, best: str, where: str, kept: str) -> str | None:
    """Return the sentence for one resource if too few nodes have enough of it."""
    if sum(enough) >= shape.nodes_min:
        return None
    wanted = f"cannot give job {_count(shape.nodes_min)} with {asked}{' each' if shape.nodes_min > 1 else ''}"
    if any(enough):
        return f"{wanted}: {where} has {sum(enough)}{kept}"
    return f"{wanted}: no node{kept} of {where} has {best}"


def _in_all(shape: Shape, nodes: list[NodeView], where: str, among: str) -> str:
    """Return what is lacking taken together: each thing alone would do."""
    seats = _seats(shape, nodes)
    if shape.gpus_total:
        have = sum(seat.gpus for seat in sorted(seats, key=lambda seat: -seat.gpus)[: shape.nodes_max])
        if have < gpu_count(shape.gpus_total):
            on = f" on {plural(shape.nodes_max, 'node')}" if shape.nodes_max < len(nodes) else ""
            return f"cannot give job {gpu_words(shape.gpus_total)}: {where} has at most {have}{on}{among}"
    if shape.ntasks is not None and len(seats) >= shape.nodes_min:
        room = sum(sorted((seat.tasks for seat in seats), reverse=True)[: shape.nodes_max])
        if room < shape.ntasks:
            on = f" on {plural(shape.nodes_max, 'node')}" if shape.nodes_max < len(nodes) else ""
            return f"cannot give job {needs(shape)}: {where} has room for {room}{on}{among}"
    fit = {nodes[seat.node].name for seat in seats}
    missing = [name for name in shape.nodelist if name not in fit]
    if missing:
        return f"cannot give job {needs(shape)}: {listed(missing)} {'has' if len(missing) == 1 else 'have'} not so much"
    if shape.alike or shape.counts:
        return f"cannot give job {needs(shape)}: {where} has no nodes that are all of that together"
    return f"cannot give job {needs(shape)}: {where} has {plural(len(seats), 'node')} with all of that{among}"


# ----- small pieces


def _has_seats(shape: Shape, nodes: Sequence[NodeView], wanted: int) -> bool:
    """Say whether at least `wanted` of `nodes` could take a share of `shape`; stops looking when they are found."""
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
