"""The choice of a gang: all nodes that a job needs, or none.

The test whether a gang fits is exact for node counts, tasks, GPUs and kinds of nodes. Among the gangs that fit, the preferred
one has as many nodes as the job may have or its tasks need, then nodes of similar speed if the job is synchronous, then the
fewest switches, then the preferred seats. Speed and switches do not count for contiguous jobs and jobs that are spread. If
several switches can each hold the whole gang, the switch with the fewest seats is taken.

Without switches, the measured links count: the slowest link between two nodes of the gang is as good as possible. That set is
searched greedily from the first `MOST_FIRST` seats, because the exact search is as hard as finding a clique.

Knows only seats (see `node_fit`), not time or queues. Sources: topology.conf(5), sbatch(1) --switches and --constraint.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain

from hpcsched.sched.place.features import Expression, matches
from hpcsched.sched.place.node_fit import Seat
from hpcsched.sched.place.request import Shape, gpu_count

SIMILAR = 0.9  # speeds are similar if the slowest is at least this part of the fastest

MOST_FIRST = 16  # seats from which a set with good links is searched

_Choice = Callable[[Sequence[Seat]], list[Seat] | None]


def choose(shape: Shape, seats: Sequence[Seat], required: frozenset[int] = frozenset()) -> list[Seat] | None:
    """Return the seats of a gang for `shape`, in the order of nodes; None if it does not fit.

    `seats` are in order of preference. `required`: the nodes of its node list, all of which it gets.
    """
    for kind in shape.alike or ((),):
        able = [seat for seat in seats if matches(kind, seat.view.features)] if kind else seats
        chosen = _closest(shape, able, required)
        if chosen is not None:
            return sorted(chosen, key=lambda seat: seat.node)
    return None


def _closest(shape: Shape, seats: Sequence[Seat], required: frozenset[int]) -> list[Seat] | None:
    """Return the gang of the most nodes that `shape` can have, on the fewest switches."""
    if shape.nodes_max == 1:
        return _gang(shape, seats, required, 1, 1)
    if shape.contiguous:
        return _contiguous(shape, seats, required)
    if shape.spread:
        return _widest(shape, seats, required)
    chosen = _gang(shape, seats, required, shape.nodes_min, shape.nodes_max)
    if chosen is None or len(chosen) == 1:
        return chosen
    count = len(chosen)
    for among in chain(_bands(shape, seats, count) if shape.synchronous else (), [seats]):
        near = _linked(among, required, count, lambda some: _gang(shape, some, required, count, count))
        if near is not None:
            return near
        near = _near(shape, among, lambda some: _gang(shape, some, required, count, count))
        if near is not None:
            return near
    if shape.switches:  # fewer nodes may fit within its switches
        return _near(shape, seats, lambda some: _gang(shape, some, required, shape.nodes_min, shape.nodes_max))
    return chosen


def _widest(shape: Shape, seats: Sequence[Seat], required: frozenset[int]) -> list[Seat] | None:
    """Return the gang of the most nodes over which its tasks can be spread."""
    most = min(shape.nodes_max, len(seats), shape.ntasks or shape.nodes_max)
    counts = range(most, shape.nodes_min - 1, -1)
    return next(filter(None, (_gang(shape, seats, required, count, count) for count in counts)), None)


def _contiguous(shape: Shape, seats: Sequence[Seat], required: frozenset[int]) -> list[Seat] | None:
    """Return a gang of adjacent nodes.

    It has as many nodes as possible. If the job has tasks, it has the fewest nodes that hold them.
    """
    runs: list[list[Seat]] = []
    for seat in sorted(seats, key=lambda seat: seat.node):
        if not runs or runs[-1][-1].node != seat.node - 1:
            runs.append([])
        runs[-1].append(seat)
    most = min(shape.nodes_max, max(map(len, runs), default=0))
    counts = range(shape.nodes_min, most + 1)
    fewest = not shape.spread and (shape.ntasks is not None or bool(shape.gpus_total))
    for count in counts if fewest else reversed(counts):
        found = [chosen for window in _windows(shape, runs, required, count)
                 if (chosen := _gang(shape, sorted(window), required, count, count)) is not None]  # fmt: skip
        if found:
            return min(found, key=lambda chosen: sorted((seat.preference for seat in chosen), reverse=True))
    return None


def _windows(shape: Shape, runs: Sequence[list[Seat]], required: frozenset[int], count: int) -> Iterator[list[Seat]]:
    """Yield windows of `count` adjacent seats that satisfy all requirements.

    A window holds all tasks, all GPUs of the total and all required nodes.
    """
    tasks, gpus = shape.ntasks or 0, gpu_count(shape.gpus_total)
    for run in runs:
        tasks_until = list(accumulate((seat.tasks for seat in run), initial=0))
        gpus_until = list(accumulate((seat.gpus for seat in run), initial=0))
        for at in range(len(run) - count + 1):
            first, last = run[at].node, run[at + count - 1].node
            if (
                tasks_until[at + count] - tasks_until[at] >= tasks
                and gpus_until[at + count] - gpus_until[at] >= gpus
                and all(first <= node <= last for node in required)
            ):
                yield run[at : at + count]


def _bands(shape: Shape, seats: Sequence[Seat], count: int) -> Iterator[list[Seat]]:
    """Yield the sets of at least `count` seats with similar speeds, the fastest first.

    If the shape has GPUs, their measured rate is the speed, if enough nodes have one.
    """
    speed_of = {seat.node: seat.view.gemm_gflops for seat in seats}
    if not _has_gpus(shape) or sum(speed > 0 for speed in speed_of.values()) < count:
        speed_of = {seat.node: seat.view.speed for seat in seats}
    speeds = sorted({speed for speed in speed_of.values() if speed > 0}, reverse=True)
    lowest = 0.0
    for fastest in speeds:
        band = [seat for seat in seats if fastest * SIMILAR <= speed_of[seat.node] <= fastest]
        slowest = min(speed_of[seat.node] for seat in band)
        if len(band) >= count and slowest != lowest:  # else the previous band contains this one
            yield band
        lowest = slowest


def _has_gpus(shape: Shape) -> bool:
    return bool(shape.gpus_per_node or shape.gpus_per_task or shape.gpus_total or shape.shards)


def _linked(seats: Sequence[Seat], required: frozenset[int], count: int, choice: _Choice) -> list[Seat] | None:
    """Return `choice` of the seats whose slowest link with each other is of the best class.

    None: no links were measured, or the configuration names switches.
    """
    able = [seat for seat in seats if seat.view.near]
    if len(able) < count or [seat for seat in able if seat.view.switch]:
        return None
    if required:
        able.sort(key=lambda seat: seat.node not in required)
    for least in _levels(able):
        for first in able[: 1 if required else MOST_FIRST]:
            some = _linked_with(first, able, least, count)
            chosen = choice(some) if len(some) >= count else None
            if chosen is not None:
                return chosen
    return None


def _levels(able: Sequence[Seat]) -> Iterator[int]:
    """Yield the classes of the links, the best first; mostly that one suffices."""
    best = max([seat.view.near[0][0] for seat in able])
    yield best
    yield from sorted({level for seat in able for level, _ in seat.view.near} - {best}, reverse=True)


def _linked_with(first: Seat, able: Sequence[Seat], least: int, count: int) -> list[Seat]:
    """Return `first`, and the next seats that reach all before them with that class.

    These are at most twice `count`. It gives up as soon as `count` seats cannot be reached.
    """
    chosen, reached = [first], _reached(first, least)
    if 1 + reached.bit_count() < count:
        return chosen
    for seat in able:
        if reached & seat.view.link_bit:
            chosen.append(seat)
            reached &= _reached(seat, least)
            if not reached or len(chosen) == 2 * count or len(chosen) + reached.bit_count() < count:
                break
    return chosen


def _reached(seat: Seat, least: int) -> int:
    """Return the bits of the nodes that its links reach with at least the class `least`."""
    return next((bits for level, bits in reversed(seat.view.near) if level >= least), 0)


def _near(shape: Shape, seats: Sequence[Seat], choice: _Choice) -> list[Seat] | None:
    """Return `choice` of the seats on the fewest switches that suffice.

    If the shape has a limit of switches, the seats are within it.
    """
    leaves: dict[str, list[Seat]] = {}
    for seat in seats:
        leaves.setdefault(seat.view.switch, []).append(seat)
    most = shape.switches or len(leaves)
    by_size = sorted(leaves, key=lambda name: (len(leaves[name]), name))
    for name in by_size:
        chosen = choice(leaves[name])
        if chosen is not None:
            return chosen
    for number in range(2, min(most, len(leaves)) + 1):
        largest = by_size[1 - number :]
        if choice([seat for seat in seats if seat.view.switch in by_size[-number:]]) is None:
            continue
        for last in by_size:
            if last not in largest:
                chosen = choice([seat for seat in seats if seat.view.switch in (*largest, last)])
                if chosen is not None:
                    return chosen
    return None


def _gang(shape: Shape, seats: Sequence[Seat], required: frozenset[int], low: int, high: int) -> list[Seat] | None:
    """Return the preferred seats for a gang of `low` to `high` nodes; None if none."""
    if len(seats) < low or len(required) > high:
        return None
    must_have = _seats_it_must_have(shape, seats, required)
    if must_have is None or len(must_have) > high:
        return None
    names = {seat.node for seat in must_have}
    rest = [seat for seat in seats if seat.node not in names] if names else list(seats)
    if shape.ntasks is None and not shape.gpus_total:
        return must_have + rest[: high - len(must_have)]
    single = _single(shape, rest) if not must_have and low == 1 else None
    chosen = [single] if single is not None else _fewest(shape, must_have, rest, low, high)
    return _largest_of_each(shape, seats, required, low, high) if chosen is None else chosen


def _single(shape: Shape, seats: Sequence[Seat]) -> Seat | None:
    """Return the preferred seat that holds all tasks of `shape`.

    None: there is none, or GPUs count too.
    """
    if shape.gpus_total:
        return None
    return next((seat for seat in seats if seat.tasks >= (shape.ntasks or 0)), None)


def _seats_it_must_have(shape: Shape, seats: Sequence[Seat], required: frozenset[int]) -> list[Seat] | None:
    """Return the mandatory seats: on `required` nodes, and of the kinds that `shape` counts.

    None: some are missing.
    """
    listed = [seat for seat in seats if seat.node in required] if required else []
    if len(listed) < len(required):
        return None
    if not shape.counts:
        return listed
    kinds = _of_each(shape.counts, [*listed, *(seat for seat in seats if seat.node not in required)])
    if kinds is None:
        return None
    names = required.union(seat.node for seat in kinds)
    return [seat for seat in seats if seat.node in names]


def _of_each(counts: Sequence[tuple[Expression, int]], seats: Sequence[Seat]) -> list[Seat] | None:
    """Return the preferred seats with the required number of each kind.

    Each seat is counted once. None: there are too few.

    The sets of seats that can be assigned to kinds form a transversal matroid. So a greedy choice is exact and takes the most
    preferred seats: each seat is added, in order of preference, if the earlier seats can be rearranged to admit it.
    """
    fits: dict[frozenset[str], list[int]] = {}
    taken: list[list[Seat]] = [[] for _ in counts]

    def admit(seat: Seat, seen: set[int]) -> bool:
        features = seat.view.features
        kinds = fits.get(features)
        if kinds is None:
            kinds = fits[features] = [at for at, (kind, _) in enumerate(counts) if matches(kind, features)]
        for kind in kinds:
            if kind in seen:
                continue
            seen.add(kind)
            if len(taken[kind]) < counts[kind][1]:
                taken[kind].append(seat)
                return True
            for at, other in enumerate(taken[kind]):
                if admit(other, seen):
                    taken[kind][at] = seat
                    return True
        return False

    missing = sum(count for _, count in counts)
    for seat in seats:
        missing -= admit(seat, set())
        if not missing:
            return [seat for of_kind in taken for seat in of_kind]
    return None


def _largest_of_each(
    shape: Shape, seats: Sequence[Seat], required: frozenset[int], low: int, high: int
) -> list[Seat] | None:
    """Return a gang for tasks and kinds, of the seats with room for most tasks.

    None: even those do not suffice.
    """
    if not shape.counts or shape.ntasks is None:
        return None
    by_size = sorted(seats, key=lambda seat: (seat.node not in required, -seat.tasks, seat))
    kinds = _of_each(shape.counts, by_size)
    names = {seat.node for seat in kinds or ()} | required
    first = [seat for seat in by_size if seat.node in names]
    if kinds is None or len(first) > high:
        return None
    return _fewest(shape, first, [seat for seat in by_size if seat.node not in names], low, high)


def _fewest(shape: Shape, first: list[Seat], rest: list[Seat], low: int, high: int) -> list[Seat] | None:
    """Return `first` and the fewest of `rest` that hold all tasks and all GPUs of the total."""
    wanted_tasks, wanted_gpus = shape.ntasks or 0, gpu_count(shape.gpus_total)
    most = min(high, len(first) + len(rest))
    by_gpus = _enough([seat.gpus for seat in first], [seat.gpus for seat in rest], wanted_gpus)
    by_tasks = _enough([seat.tasks for seat in first], [seat.tasks for seat in rest], wanted_tasks)
    if by_gpus is None or by_tasks is None:
        return None
    for count in range(max(low, len(first), by_gpus, by_tasks), most + 1):
        for by in ("gpus", "tasks") if wanted_gpus else ("tasks",):
            chosen = first + _pick(rest, count - len(first), wanted_tasks, wanted_gpus, by, first)
            if sum(seat.tasks for seat in chosen) >= wanted_tasks and sum(seat.gpus for seat in chosen) >= wanted_gpus:
                return chosen
    return None


def _enough(first: list[int], rest: list[int], wanted: int) -> int | None:
    """Return the fewest nodes that reach `wanted`, including all of `first`; None if none."""
    reached = list(accumulate(sorted(rest, reverse=True), initial=sum(first)))
    at = bisect_left(reached, wanted)
    return len(first) + at if at < len(reached) else None


def _pick(rest: list[Seat], count: int, wanted_tasks: int, wanted_gpus: int, by: str, first: list[Seat]) -> list[Seat]:
    """Return `count` seats of `rest` that reach the wanted tasks or GPUs.

    `by` selects tasks or GPUs. If there is a choice, the preferred seats are taken: each place gets
    the most preferred seat with which the largest other seats still reach the total.
    """
    value: Callable[[Seat], int] = (lambda seat: seat.gpus) if by == "gpus" else (lambda seat: seat.tasks)
    missing = (wanted_gpus if by == "gpus" else wanted_tasks) - sum(value(seat) for seat in first)
    open_seats = list(rest)
    sizes = sorted(value(seat) for seat in rest)  # ascending
    chosen: list[Seat] = []
    top = sum(sizes[len(sizes) - count + 1 :]) if count > 1 else 0  # the largest count-1 that are left
    while len(chosen) < count:
        floor = missing - top
        fit: Iterator[int] = (at for at, seat in enumerate(open_seats) if value(seat) >= floor)
        if len(chosen) == count - 1:  # the last place: the smallest seat that suffices
            fit = iter(sorted(fit, key=lambda at: (*open_seats[at].preference[:-3], value(open_seats[at]), at)))
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


# ----- the components of a heterogeneous job get separate nodes: all components, or none
# Components choose one after the other among the remaining nodes. The result may depend on the order, so orders are tried until
# all components fit; equal components are not reordered. For components of one node each this is exact: if all fit, some order
# finds it (serial dictatorship reaches every Pareto-optimal assignment; Abdulkadiroglu and Soenmez, Econometrica 66, 1998).
# The search stops after `MOST_TRIES` tries.
#
# Source: "Heterogeneous Job Support" of Slurm's documentation.


MOST_TRIES = 2_000

Pick = Callable[[int, frozenset[int]], "list[Seat] | None"]
"""(component, nodes that are taken) -> the seats that it chooses of the others; None: it does not fit there."""


def seats_apart(shapes: Sequence[Shape], pick: Pick) -> list[list[Seat]] | None:
    """Return the seats of each component, no node twice; None if they do not all fit."""
    chosen = _Search(shapes, pick).seats(tuple(range(len(shapes))), frozenset())
    return None if chosen is None else [chosen[at] for at in range(len(shapes))]


class _Search:
    """The search for an order of components; counts the tries."""

    def __init__(self, shapes: Sequence[Shape], pick: Pick) -> None:
        self._shapes = shapes
        self._pick = pick
        self._tries = 0

    def seats(self, left: tuple[int, ...], taken: frozenset[int]) -> dict[int, list[Seat]] | None:
        """Return the seats of the components that are `left`, on nodes that are not taken."""
        if not left:
            return {}
        next_choices: dict[Shape, tuple[int, list[Seat]]] = {}
        for at in left:
            if self._shapes[at] in next_choices:
                continue
            chosen = self._pick(at, taken)
            self._tries += 1
            if chosen is None:
                return None  # after other components, it has even fewer nodes
            next_choices[self._shapes[at]] = at, chosen
        for at, chosen in next_choices.values():
            others = tuple([other for other in left if other != at])
            rest = self.seats(others, taken.union([seat.node for seat in chosen]))
            if rest is not None:
                return {at: chosen, **rest}
            if self._tries > MOST_TRIES:
                return None
        return None
