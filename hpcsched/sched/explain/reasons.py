"""Reasons why jobs wait: Slurm's reason and one sentence for each.

`plan` chooses among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcsched.model.job import Reason
from hpcsched.model.node import Partition, PartitionState
from hpcsched.sched.decisions import Wait
from hpcsched.sched.explain.sentences import listed, needs, plural
from hpcsched.sched.place.feasible import impossible_shape
from hpcsched.sched.place.node_fit import Seat
from hpcsched.sched.place.request import LicenseCounts, Shape
from hpcsched.sched.snapshot import NodeView, allows


def partition_closed(partition: Partition) -> Wait:
    """Return the wait of the jobs in a partition that starts no jobs."""
    if partition.state is PartitionState.INACTIVE:
        return Wait(reason=Reason.PARTITION_INACTIVE, detail=f"partition {partition.name!r} is inactive")
    return Wait(reason=Reason.PARTITION_DOWN, detail=f"partition {partition.name!r} is down")


def partition_unknown(name: str) -> Wait:
    """Return the wait of the jobs in a partition that was removed from the configuration."""
    return Wait(reason=Reason.PARTITION_DOWN, detail=f"partition {name!r} is not in the configuration any more")


def at_array_limit(limit: int) -> Wait:
    """Return the wait of an array task when its array already runs its maximum of tasks."""
    return Wait(reason=Reason.ARRAY_LIMIT, detail=f"{plural(limit, 'task')} of its array run at a time, its own limit")


def behind_head(display_id: str, partition: str) -> Wait:
    """Return the wait that all jobs behind a head share."""
    return Wait(reason=Reason.PRIORITY, detail=f"behind job {display_id} in partition {partition!r}")


def shortfall(shape: Shape, seats: Sequence[Seat], missing: Sequence[str], promised_to: Sequence[str] = ()) -> str:
    """Return the needs of a head, and how much of them is free.

    `seats`: nodes that it could have now. `missing`: required nodes that are not free.
    `promised_to`: jobs with slots there.
    """
    if promised_to:
        jobs = f"job {promised_to[0]}" if len(promised_to) == 1 else f"jobs {listed(promised_to)}"
        return f"{_shortfall(shape, seats, missing, enough=True)}, but promised to {jobs}"
    return _shortfall(shape, seats, missing, enough=False)


def _shortfall(shape: Shape, seats: Sequence[Seat], missing: Sequence[str], *, enough: bool) -> str:
    if missing:
        return f"needs {needs(shape)}; {listed(missing)} {'is' if len(missing) == 1 else 'are'} not free"
    if shape.gpus_total:
        free = sum(sorted(seat.gpus for seat in seats)[-shape.nodes_max :])
        return f"needs {needs(shape)}; {_are(free)} free"
    if shape.ntasks is not None and shape.ntasks > 1:
        room = sum(sorted(seat.tasks for seat in seats)[-shape.nodes_max :])
        if len(seats) >= shape.nodes_min:
            together = "" if enough or room < shape.ntasks else _not_together(shape)
            most = room if enough or together else min(room, shape.ntasks - 1)
            return f"needs {needs(shape)}; there is room for {most}{together}"
    together = "" if enough or len(seats) < shape.nodes_min else _not_together(shape)
    return f"needs {needs(shape)}; {_are(len(seats))} free{together}"


def _not_together(shape: Shape) -> str:
    """Return the requirement on all nodes together that keeps `shape` waiting.

    "" if there is none. Enough nodes are free, but not together.
    """
    if shape.counts or shape.alike:
        return f", but not as {shape.constraint} asks for"
    if shape.contiguous:
        return ", but not next to each other"
    if shape.switches:
        return f", but not on {shape.switches} {'switch' if shape.switches == 1 else 'switches'}"
    return ""


def not_available(shape: Shape, partition: Partition, nodes: Sequence[NodeView]) -> Wait:
    """Return the wait of a job that does not fit even if the answering nodes are empty."""
    never = impossible_shape(shape, nodes, partition)
    if never is not None:  # the configuration has changed since the submission
        return Wait(reason=Reason.NODES_UNAVAILABLE, detail=never)
    names = set(partition.nodes)
    present = [node for node in nodes if node.name in names]
    away = [f"{node.name} {node.why_not}" for node in present if not node.usable and allows(shape, node)]
    of = f"of the {plural(len(present), 'node')} of partition {partition.name!r}"
    return Wait(reason=Reason.NODES_UNAVAILABLE, detail=f"needs {needs(shape)}; {of} {listed(away)}")


def _are(count: int) -> str:
    return f"{count or 'none'} {'are' if count > 1 else 'is'}"


def no_licenses(wanted: LicenseCounts, free: Mapping[str, int], there: Mapping[str, int]) -> Wait:
    """Return the wait for licences: their names, and how many of each are free."""
    gone = [name for name, _ in wanted if name not in there]
    if gone:
        return Wait(reason=Reason.LICENSES, detail=f"the cluster has no licence {gone[0]!r} any more")
    short = [
        f"{count} of the {there[name]} licences {name}, of which {max(0, free[name])} are free now"
        for name, count in wanted
        if free[name] < count
    ]
    text = f"needs {listed(short)}" if short else "needs licences that are promised to a job before it"
    return Wait(reason=Reason.LICENSES, detail=text)
