"""Which of the nodes that have room make up a gang: all that a job needs, or none.

Whether a gang fits is decided exactly for node counts, tasks, GPUs and kinds of nodes. Which it is, is a choice: as many nodes as
it may have or its tasks need, then nodes of like speed if the job is synchronous, then the fewest switches, then the
seats' own order of preference. Of the switches that can hold it alone the one with fewest seats is taken.

Knows seats (see `placement`), no time and no queue. Sources: topology.conf(5), sbatch(1) --switches and --constraint.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain

from hpcsched.sched.features import Expression, matches
from hpcsched.sched.placement import Seat
from hpcsched.sched.request import Shape, gpu_count

LIKE = 0.9  # nodes are of like speed if the slowest has so much of the fastest's

_Choice = Callable[[Sequence[Seat]], list[Seat] | None]


def choose(shape: Shape, seats: Sequence[Seat], required: frozenset[int] = frozenset()) -> list[Seat] | None:
    """Return the seats that `shape` gets of `seats` (in order of preference), in the order of nodes, or None if they do not do.

    `required` are the nodes of its node list: all of them, or None.
    """
    for kind in shape.alike or ((),):
        able = [seat for seat in seats if matches(kind, seat.view.features)] if kind else seats
        chosen = _closest(shape, able, required)
        if chosen is not None:
            return sorted(chosen, key=lambda seat: seat.node)
    return None


# ----- close to each other, and alike


def _closest(shape: Shape, seats: Sequence[Seat], required: frozenset[int]) -> list[Seat] | None:
    """Return the gang of `seats` that lies closest, of the most nodes that it can have."""
    if shape.nodes_max == 1:
        return _gang(shape, seats, required, 1, 1)
    chosen = _gang(shape, seats, required, shape.nodes_min, shape.nodes_max)
    if chosen is None or len(chosen) == 1:
        return chosen
    count = len(chosen)
    for among in chain(_bands(seats, count) if shape.synchronous else (), [seats]):
        near = _near(shape, among, lambda some: _gang(shape, some, required, count, count))
        if near is not None:
            return near
    if shape.switches:  # fewer nodes may do within its switches
        return _near(shape, seats, lambda some: _gang(shape, some, required, shape.nodes_min, shape.nodes_max))
    return chosen


def _bands(seats: Sequence[Seat], count: int) -> Iterator[list[Seat]]:
    """Yield the sets of at least `count` seats whose speeds are alike, the fastest first."""
    speeds = sorted({seat.view.speed for seat in seats if seat.view.speed > 0}, reverse=True)
    lowest = 0.0
    for fastest in speeds:
        band = [seat for seat in seats if fastest * LIKE <= seat.view.speed <= fastest]
        slowest = min(seat.view.speed for seat in band)
        if len(band) >= count and slowest != lowest:  # else the band before has all of these
            yield band
        lowest = slowest


def _near(shape: Shape, seats: Sequence[Seat], choice: _Choice) -> list[Seat] | None:
    """Return `choice` of the seats of as few switches as do, and of no more than the shape's limit if it has one."""
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


# ----- enough of all that it needs


def _gang(shape: Shape, seats: Sequence[Seat], required: frozenset[int], low: int, high: int) -> list[Seat] | None:
    """Return the preferred seats for a gang of `low` to `high` nodes, or None."""
    if len(seats) < low or len(required) > high:
        return None
    first = [seat for seat in seats if seat.node in required] if required else []
    if len(first) < len(required):
        return None
    asked = required
    if shape.counts:
        kinds = _of_each(shape.counts, [*first, *(seat for seat in seats if seat.node not in required)])
        if kinds is None:
            return None
        required = required.union(seat.node for seat in kinds)
        first = [seat for seat in seats if seat.node in required]
        if len(first) > high:
            return None
    rest = [seat for seat in seats if seat.node not in required] if required else list(seats)
    if shape.ntasks is None and not shape.gpus_total:
        return first + rest[: high - len(first)]
    if not required and low == 1 and not shape.gpus_total:
        single = next((seat for seat in rest if seat.tasks >= (shape.ntasks or 0)), None)
        if single is not None:
            return [single]
    chosen = _fewest(shape, first, rest, low, high)
    if chosen is None and shape.counts and shape.ntasks is not None:
        return _largest_of_each(shape, seats, asked, low, high)
    return chosen


def _of_each(counts: Sequence[tuple[Expression, int]], seats: Sequence[Seat]) -> list[Seat] | None:
    """Return the preferred seats of which so many are of each kind, each seat counted for one kind only; None: there are none.

    The sets of seats that can be spread over kinds form a transversal matroid: taking seats in order of preference, each if
    those taken before can be rearranged to let it in, is exact and takes the most preferred.
    """
    fits: dict[frozenset[str], list[int]] = {}
    taken: list[list[Seat]] = [[] for _ in counts]

    def let_in(seat: Seat, seen: set[int]) -> bool:
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
                if let_in(other, seen):
                    taken[kind][at] = seat
                    return True
        return False

    missing = sum(count for _, count in counts)
    for seat in seats:
        missing -= let_in(seat, set())
        if not missing:
            return [seat for of_kind in taken for seat in of_kind]
    return None


def _largest_of_each(
    shape: Shape, seats: Sequence[Seat], required: frozenset[int], low: int, high: int
) -> list[Seat] | None:
    """Return a gang for tasks and kinds that takes the seats with room for most tasks, or None if even those do not do."""
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
