"""A heterogeneous job's components get nodes apart from each other: all of them, or none does.

They choose one after the other, each of what those before it have left. Whether that works out may hang on whose turn
comes first, so the turns are changed until it does; components that ask alike need no turns. For components of one node each
that is exact: if there is a place for all, some order of turns finds one (serial dictatorship reaches every Pareto-optimal
assignment; Abdulkadiroglu and Soenmez, Econometrica 66, 1998). Of very many orders the first have to do: see `MOST_TRIES`.

Knows shapes and seats, no time and no queue. Source: "Heterogeneous Job Support" of Slurm's documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcsched.sched.placement import Seat
from hpcsched.sched.request import Shape

MOST_TRIES = 2_000

Pick = Callable[[int, frozenset[int]], "list[Seat] | None"]
"""The seats that component number `at` chooses beside the nodes that are taken, None if what is left does not do."""


def seats_apart(shapes: Sequence[Shape], pick: Pick) -> list[list[Seat]] | None:
    """Return the seats of each component, no node twice; None: they do not all fit."""
    chosen = _Search(shapes, pick).seats(tuple(range(len(shapes))), frozenset())
    return None if chosen is None else [chosen[at] for at in range(len(shapes))]


class _Search:
    """The turns that have been tried."""

    def __init__(self, shapes: Sequence[Shape], pick: Pick) -> None:
        self._shapes = shapes
        self._pick = pick
        self._tries = 0

    def seats(self, left: tuple[int, ...], taken: frozenset[int]) -> dict[int, list[Seat]] | None:
        """Return the seats of the components that are `left`, beside the nodes that are taken."""
        if not left:
            return {}
        turns: dict[Shape, tuple[int, list[Seat]]] = {}
        for at in left:
            if self._shapes[at] in turns:
                continue
            chosen = self._pick(at, taken)
            self._tries += 1
            if chosen is None:
                return None  # the turns of others would leave it less
            turns[self._shapes[at]] = at, chosen
        for at, chosen in turns.values():
            others = tuple([other for other in left if other != at])
            rest = self.seats(others, taken.union([seat.node for seat in chosen]))
            if rest is not None:
                return {at: chosen, **rest}
            if self._tries > MOST_TRIES:
                return None
        return None
