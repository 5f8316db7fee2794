"""Find hours in which nodes are least used: when maintenance displaces the least work.

Pure. What a window displaces is the mean use of its nodes in the same hours of the weeks before, as
far as the history goes; of the days before, if it is shorter than a week. Running jobs count by
their time limits. The hours are those of the local clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from hpcsched.planner.capacity import DAY_S

HOUR_S, WEEK_S = 3600.0, 604_800.0
WEEKS = 4  # that count


class NodeUse(NamedTuple):
    """CPUs and GPUs of a node that a job held in a period."""

    node: str
    from_s: float
    to_s: float
    cpus: int
    gpus: int


class QuietWindow(NamedTuple):
    """A period for maintenance, and the work that it is expected to displace.

    `running`: jobs that run now whose time limit is later than its start.
    """

    start_s: float
    end_s: float
    gpu_hours: float
    cpu_hours: float
    running: int


def quiet_windows(
    past: Iterable[NodeUse],
    running: Sequence[NodeUse],
    *,
    nodes: Collection[str],
    since_s: float,
    from_s: float,
    within_s: float,
    hours: int,
    is_closed: Callable[[float, float], bool],
) -> list[QuietWindow]:
    """Return all windows of so many hours that begin on the hour, the quietest first.

    `since_s`: how far the past goes back. `from_s`: a full hour. `is_closed`: whether a period is
    not to be had, because nodes are reserved in it. Windows into which no running job reaches come first.

    Raises ValueError if there is less than a day of history.
    """
    period_s = WEEK_S if from_s - since_s >= WEEK_S else DAY_S
    periods = min(WEEKS if period_s == WEEK_S else 6, int((from_s - since_s) // period_s))
    if periods < 1:
        raise ValueError("there is less than a day of history")
    first_s, last_s = from_s - periods * period_s, from_s + within_s  # a time limit can be a hundred years away
    ended = _by_hour((use for use in past if use.node in nodes), from_s, first_s, from_s)
    held = [use for use in running if use.node in nodes]
    known = _by_hour(held, from_s, from_s, last_s)
    found = []
    for first in range(int(within_s // HOUR_S) - hours + 1):
        start_s = from_s + first * HOUR_S
        end_s = start_s + hours * HOUR_S
        if is_closed(start_s, end_s):
            continue
        cpu_hours = gpu_hours = 0.0
        for hour in range(first, first + hours):
            back = [_same_hour(hour, period_s, period) for period in range(periods)]
            means = [sum(ended.get(at, (0.0, 0.0))[of] for at in back) / periods for of in (0, 1)]
            now = known.get(hour, (0.0, 0.0))
            cpu_hours += max(means[0], now[0])
            gpu_hours += max(means[1], now[1])
        reach = sum(use.to_s > start_s for use in held)
        found.append(QuietWindow(start_s, end_s, gpu_hours, cpu_hours, reach))
    return sorted(
        found, key=lambda one: (one.running > 0, round(one.gpu_hours, 1), round(one.cpu_hours, 1), one.start_s)
    )


def _same_hour(hour: int, period_s: float, period: int) -> int:
    """Return the hour of the past, counted from now, that is the same of the week or day."""
    length = int(period_s // HOUR_S)
    return hour % length - length * (period + 1)


def _by_hour(uses: Iterable[NodeUse], from_s: float, first_s: float, last_s: float) -> dict[int, tuple[float, float]]:
    """Return CPU hours and GPU hours by the hour's distance from `from_s`, of a period."""
    found: dict[int, tuple[float, float]] = {}
    for use in uses:
        began_s, ended_s = max(use.from_s, first_s), min(use.to_s, last_s)
        for hour in range(math.floor((began_s - from_s) / HOUR_S), math.ceil((ended_s - from_s) / HOUR_S)):
            begin_s = from_s + hour * HOUR_S
            part = max(0.0, min(ended_s, begin_s + HOUR_S) - max(began_s, begin_s)) / HOUR_S
            cpus, gpus = found.get(hour, (0.0, 0.0))
            found[hour] = cpus + part * use.cpus, gpus + part * use.gpus
    return found
