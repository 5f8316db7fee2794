"""The earliest time at which a gang will fit, if every running job lasts to its limit and reservations are kept.

Room grows only where something ends, so only those times are tried. Between them a node's seat changes only if one of
its own steps begins, or if it has a reservation in the way (its window then moves over the dip).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.sched.placement import Part, Seat, choose, parts_of, seat_of
from hpcsched.sched.request import Shape
from hpcsched.sched.timeline import Timeline


def earliest_start(
    timeline: Timeline, shape: Shape, nodes: Sequence[int], required: frozenset[int], limit_s: float
) -> tuple[float, list[Part]] | None:
    """Return when `shape` can first run for `limit_s` on some of `nodes`, and what it would take; None: never.

    It takes nodes that have least free now, so that what is free now stays open to others meanwhile.
    """
    changes = sorted((at_s, node) for node in nodes for at_s in timeline.profiles[node].times_s[1:])
    dipped = [node for node in nodes if timeline.profiles[node].dips]
    seats: dict[int, Seat] = {}
    fresh = set(nodes)
    at, at_s = 0, timeline.now_s
    while True:
        _update(seats, timeline, shape, fresh.union(dipped), at_s, at_s + limit_s)
        chosen = choose(shape, sorted(seats.values()), required) if _may_do(shape, seats) else None
        if chosen is not None:
            rooms = [timeline.profiles[seat.node].free_over(at_s, at_s + limit_s) for seat in chosen]
            return at_s, parts_of(shape, chosen, timeline.nodes, timeline.types, rooms)
        if at == len(changes):
            return None
        at_s = changes[at][0]
        fresh = set()
        while at < len(changes) and changes[at][0] == at_s:
            fresh.add(changes[at][1])
            at += 1


def _update(
    seats: dict[int, Seat], timeline: Timeline, shape: Shape, nodes: set[int], start_s: float, end_s: float
) -> None:
    """Work out anew the seats of `nodes` for the window ``[start_s, end_s)``."""
    for node in nodes:
        profile = timeline.profiles[node]
        seat = seat_of(shape, node, timeline.nodes[node], timeline.types[node], profile.free_over(start_s, end_s))
        if seat is None:
            seats.pop(node, None)
        else:
            cpus_now, mem_now, gpus_now = profile.rooms[0]
            seats[node] = seat._replace(preference=(sum(gpus_now), cpus_now, mem_now, node))


def _may_do(shape: Shape, seats: dict[int, Seat]) -> bool:
    """Say quickly that there are too few seats, before they are sorted."""
    if len(seats) < shape.nodes_min:
        return False
    return shape.ntasks is None or sum(seat.tasks for seat in seats.values()) >= shape.ntasks
