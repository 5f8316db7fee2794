"""The earliest time at which a gang will fit, if every running job lasts to its limit and reservations are kept.

Room grows only where something ends, so only those times are tried. Between them a node's seat changes only if one of
its own steps begins, or if it has a reservation in the way (its window then moves over the dip).

Where any nodes do that take a share (no task count to spread, no total of GPUs, no node list) each node is walked through
once instead: when could it hold the share for the whole time? The earliest time at which enough nodes could is the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, nsmallest

from hpcsched.sched.placement import Part, Seat, choose, parts_of, seat_of, tasks_that_fit
from hpcsched.sched.request import Shape
from hpcsched.sched.timeline import Room, Timeline


def earliest_start(
    timeline: Timeline, shape: Shape, nodes: Sequence[int], required: frozenset[int], limit_s: float
) -> tuple[float, list[Part]] | None:
    """Return when `shape` can first run for `limit_s` on some of `nodes`, and what it would take; None: never.

    It takes nodes that have least free now, so that what is free now stays open to others meanwhile.
    """
    if shape.ntasks is None and not shape.gpus_total and not required:
        return _earliest_of_any(timeline, shape, nodes, limit_s)
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


def _earliest_of_any(
    timeline: Timeline, shape: Shape, nodes: Sequence[int], limit_s: float
) -> tuple[float, list[Part]] | None:
    """Return what `earliest_start` does, for a shape that takes equal shares of any nodes."""
    fits: dict[tuple[int, Room], bool] = {}
    spans: list[tuple[float, float, int]] = []  # from when to when a node could start to hold a share
    for node in nodes:
        spans += _spans(timeline, shape, node, limit_s, fits)
    spans.sort()
    until: list[tuple[float, int]] = []
    for first_s, last_s, node in spans:
        while until and until[0][0] < first_s:
            heappop(until)
        heappush(until, (last_s, node))
        if len(until) >= shape.nodes_min:
            able = {at for _, at in until} | {at for start_s, _, at in spans if start_s == first_s}
            return first_s, _least_free_of(timeline, shape, able, first_s, limit_s)
    return None


def _spans(
    timeline: Timeline, shape: Shape, node: int, limit_s: float, fits: dict[tuple[int, Room], bool]
) -> list[tuple[float, float, int]]:
    """Return when `node` could start to hold a share of `shape` for `limit_s`: spans of start times, both ends included."""
    profile, view, types = timeline.profiles[node], timeline.nodes[node], timeline.types[node]
    kind = timeline.kinds[node]
    found = []
    began_s: float | None = None
    for at_s, room in zip(profile.times_s, profile.rooms, strict=True):
        fit = fits.get((kind, room))
        if fit is None:
            fit = fits[kind, room] = tasks_that_fit(shape, view, types, room) > 0
        if fit:
            if began_s is None:
                began_s = at_s
        elif began_s is not None:
            if at_s - began_s >= limit_s:
                found.append((began_s, at_s - limit_s, node))
            began_s = None
    if began_s is not None:
        found.append((began_s, float("inf"), node))
    return found


def _least_free_of(timeline: Timeline, shape: Shape, able: set[int], start_s: float, limit_s: float) -> list[Part]:
    """Return what `shape` would take of `able` nodes, those first that have least free now."""

    def free_now(node: int) -> tuple[int, int, int, int]:
        cpus, mem_mib, gpus = timeline.profiles[node].rooms[0]
        return sum(gpus), cpus, mem_mib, node

    chosen = sorted(nsmallest(shape.nodes_max, able, key=free_now))
    rooms = [timeline.profiles[node].free_over(start_s, start_s + limit_s) for node in chosen]
    seats = [
        seat_of(shape, node, timeline.nodes[node], timeline.types[node], room)
        for node, room in zip(chosen, rooms, strict=True)
    ]
    return parts_of(shape, [seat for seat in seats if seat is not None], timeline.nodes, timeline.types, rooms)


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
