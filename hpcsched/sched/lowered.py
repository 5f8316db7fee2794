"""Jobs whose time limit may be lowered (``--time-min``): the longest time for which one fits now.

As in Slurm: room is kept for the least time alone, and a job that starts gets as much more as touches nobody else's room, in
whole minutes. Knows neither nodes nor policies: whether it fits until some time is asked of the plan.

Source: sbatch(1), --time-min.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import TypeVar

from hpcsched.model.units import MINUTE_S

Found = TypeVar("Found")


def longest(fits: Callable[[float], Found | None], least_s: float, most_s: float) -> tuple[Found, float] | None:
    """Return what `fits` gives for the latest end for which it gives something, and that end; None: not even for `least_s`.

    Ends are `most_s`, or `least_s` and whole minutes later. What fits fits for less time as well, so they are halved.
    """
    found = fits(most_s)
    if found is not None or most_s <= least_s:
        return None if found is None else (found, most_s)
    found = fits(least_s)
    if found is None:
        return None
    low, high = 0, ceil((most_s - least_s) / MINUTE_S)
    while high - low > 1:
        middle = (low + high) // 2
        more = fits(least_s + middle * MINUTE_S)
        if more is None:
            high = middle
        else:
            low, found = middle, more
    return found, least_s + low * MINUTE_S
