"""Draw a comparison of policies: utilization, waits, and a Gantt chart of the first one.

Needs matplotlib, which no other module needs. Of a long log, the Gantt chart shows the busiest week. Processors are equal, so
the chart draws a job on the lowest free ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcsched.errors import UnavailableError

if TYPE_CHECKING:
    from hpcsched.sim.policies import Simulation

DAY_S = 86400.0
WINDOW_S = 7 * DAY_S
BINS = 400
MOST_BARS = 4000


def draw(simulations: Sequence[Simulation], base: Path) -> list[Path]:
    """Write the picture to BASE.png and BASE.svg and return their paths.

    Raises UnavailableError without matplotlib.
    """
    figure = _figure(simulations)
    paths = {kind: base.with_name(f"{base.name}.{kind}") for kind in ("png", "svg")}
    for kind, path in paths.items():
        figure.savefig(path, format=kind, dpi=120)
    return list(paths.values())


def utilization_over(simulation: Simulation, bins: int = BINS) -> tuple[list[float], list[float]]:
    """Return the middle of each of `bins` equal spans in days, and the utilization there."""
    first_s = min((job.submit_s for job in simulation.jobs), default=0.0)
    pairs = list(zip(simulation.jobs, simulation.starts_s, strict=True))
    last_s = max((start_s + job.run_s for job, start_s in pairs), default=first_s + 1.0)
    width_s = max(1e-9, (last_s - first_s) / bins)
    used = [0.0] * bins
    for job, start_s in pairs:
        at_s, end_s = start_s, start_s + job.run_s
        while at_s < end_s:
            at = min(bins - 1, int((at_s - first_s) / width_s))
            until_s = end_s if at == bins - 1 else min(end_s, first_s + (at + 1) * width_s)
            if until_s <= at_s:  # rounding put it on the border
                break
            used[at] += (until_s - at_s) * job.procs
            at_s = until_s
    middles = [(at + 0.5) * width_s / DAY_S for at in range(bins)]
    return middles, [min(1.0, part / (width_s * simulation.procs)) for part in used]


def busiest_s(simulation: Simulation, span_s: float = WINDOW_S) -> float:
    """Return when the `span_s` begins in which most jobs start after waiting longest."""
    first_s = min((job.submit_s for job in simulation.jobs), default=0.0)
    waits: dict[int, float] = {}
    for job, start_s in zip(simulation.jobs, simulation.starts_s, strict=True):
        at = int((start_s - first_s) // span_s)
        waits[at] = waits.get(at, 0.0) + start_s - job.submit_s
    return first_s + span_s * max(waits, key=lambda at: (waits[at], -at)) if waits else first_s


def bars_of(simulation: Simulation, from_s: float, to_s: float) -> list[tuple[float, float, int, int, float]]:
    """Return the bars of jobs that run within ``[from_s, to_s)``.

    A bar is (start, end, first processor, processors, wait).
    """
    free = list(range(simulation.procs))
    ends: list[tuple[float, int, list[int]]] = []
    bars: list[tuple[float, float, int, int, float]] = []
    order = sorted(range(len(simulation.jobs)), key=lambda at: simulation.starts_s[at])
    for at in order:
        job, start_s = simulation.jobs[at], simulation.starts_s[at]
        end_s = start_s + job.run_s
        if end_s <= from_s or start_s >= to_s:
            continue
        while ends and ends[0][0] <= start_s:
            for procs in heappop(ends)[2]:
                heappush(free, procs)
        mine = [heappop(free) for _ in range(min(job.procs, len(free)))]
        heappush(ends, (end_s, at, mine))
        bars += [(start_s, end_s, low, count, start_s - job.submit_s) for low, count in _runs(mine)]
    return bars


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending `numbers` as (first, count) of runs without a gap."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][0] + runs[-1][1] == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


def _figure(simulations: Sequence[Simulation]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnavailableError(f"cannot draw a picture: matplotlib is not installed ({error})") from error
    figure = Figure(figsize=(12, 10), layout="constrained")
    use, waits, gantt = figure.subplots(3, 1)
    for simulation in simulations:
        days, parts = utilization_over(simulation)
        use.plot(days, [part * 100 for part in parts], label=simulation.policy, linewidth=0.8)
        _plot_waits(waits, simulation)
    use.set(xlabel="days since the first submission", ylabel="in use, %", ylim=(0, 105), title="Utilization")
    use.legend(loc="lower right", ncols=3, fontsize="small")
    waits.set(
        xscale="symlog",
        xlabel="wait, s",
        ylabel="of all jobs, %",
        ylim=(0, 101),
        title="Jobs that waited at most so long",
    )
    waits.legend(loc="lower right", fontsize="small")
    _plot_gantt(gantt, simulations[0])
    return figure


def _plot_waits(axes: Any, simulation: Simulation) -> None:
    waits = sorted(start - job.submit_s for job, start in zip(simulation.jobs, simulation.starts_s, strict=True))
    picks = sorted({round(at * (len(waits) - 1) / 500) for at in range(501)}) if waits else []
    axes.plot([waits[at] for at in picks], [100 * (at + 1) / len(waits) for at in picks], label=simulation.policy)


def _plot_gantt(axes: Any, simulation: Simulation) -> None:
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection

    first_s = min((job.submit_s for job in simulation.jobs), default=0.0)
    from_s = busiest_s(simulation)
    bars = bars_of(simulation, from_s, from_s + WINDOW_S)[:MOST_BARS]
    longest_s = max((wait for *_, wait in bars), default=0.0) or 1.0
    boxes, colours = [], []
    for start_s, end_s, low, count, wait in bars:
        left, right = (start_s - first_s) / DAY_S, (end_s - first_s) / DAY_S
        boxes.append([(left, low), (right, low), (right, low + count), (left, low + count)])
        colours.append(colormaps["viridis"](wait / longest_s))
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=0.2))
    days = (from_s - first_s) / DAY_S
    axes.set(xlim=(days, days + WINDOW_S / DAY_S), ylim=(0, simulation.procs), xlabel="days since the first submission")
    axes.set(
        ylabel="processors", title=f"{simulation.policy}: its busiest week; the brighter, the longer the job waited"
    )
