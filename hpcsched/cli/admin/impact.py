"""What a node changed for waiting jobs: `hpcsched node impact`, last line of `node add`.

Waits before and after it was added are what jobs had. But a busy week after it is not the node's
fault, so the days since are also replayed without it and with it, by the replay of `hpcsched plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcsched.cli.admin.plan import cluster_past
from hpcsched.listing.text import date_text
from hpcsched.planner.capacity import (
    DAY_S,
    WARM_DAYS,
    Arrival,
    ReplayResult,
    WaitFigures,
    busy_s,
    replayed,
    wait_figures,
)
from hpcsched.planner.worth import Past, hours_text
from hpcsched.sched.sentences import plural

ENOUGH_DAYS = 7.0
MONTH_DAYS = 28
MOST_DAYS = 366.0
MOST_REPLAYED = 20_000  # jobs, at the end of `node add`: nobody waits for more there


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the jobs of a period had. `use`: of the cpus of the nodes that were there."""

    from_s: float
    to_s: float
    waits: WaitFigures
    gpu_waits: WaitFigures
    use: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Impact:
    """The figures of a node that was added at `added_s`.

    `is_known`: by its file, else by its first job.
    """

    node: str
    added_s: float
    is_known: bool
    before: Measured
    after: Measured
    with_it: ReplayResult
    without_it: ReplayResult
    has_gpus: bool

    @property
    def days(self) -> float:
        """Return the days after the node was added that count."""
        return (self.after.to_s - self.after.from_s) / DAY_S


def impact_of(past: Past, name: str, added_s: float | None, days: float) -> Impact:
    """Return the impact of the node `name` over the last `days` days, or since it was added."""
    first_s = min((job.began_s for job in past.jobs if job.began_s is not None and name in job.on), default=past.now_s)
    at_s = added_s if added_s is not None else first_s
    from_s = min(max(at_s, past.now_s - days * DAY_S), past.now_s)
    others = tuple(machine for machine in past.machines if machine.name != name)
    span = (from_s, past.now_s)
    return Impact(
        node=name,
        added_s=at_s,
        is_known=added_s is not None,
        before=_measured(past.jobs, sum(machine.cpus for machine in others), at_s - (past.now_s - from_s), at_s),
        after=_measured(past.jobs, sum(machine.cpus for machine in past.machines), *span),
        with_it=replayed(past.machines, past.jobs, *span),
        without_it=replayed(others, past.jobs, *span),
        has_gpus=any(machine.gpus for machine in past.machines if machine.name == name),
    )


def _measured(jobs: Sequence[Arrival], cpus: int, from_s: float, to_s: float) -> Measured:
    began = [(job, job.began_s) for job in jobs if job.began_s is not None]
    counted = [(job, at_s - job.submit_s) for job, at_s in began if from_s <= job.submit_s < to_s]
    cpu_s, _ = busy_s(began, from_s, to_s)
    room_s = cpus * (to_s - from_s)
    return Measured(
        from_s=from_s,
        to_s=to_s,
        waits=wait_figures([wait_s for _, wait_s in counted]),
        gpu_waits=wait_figures([wait_s for job, wait_s in counted if job.gpus]),
        use=cpu_s / room_s if room_s > 0 else 0.0,
    )


def impact_text(found: Impact) -> str:
    """Return the figures in words."""
    how = "" if found.is_known else ", by its first job (its file has no date: added)"
    lines = [f"{found.node} was added {date_text(found.added_s)}{how}"]
    if found.days < ENOUGH_DAYS:
        lines.append(
            f"Only {found.days:.1f} days of history with it: less than a week says little; try again in a week"
        )
    if not found.after.waits.jobs:
        return (
            "\n".join([*lines, "No job was started since then that was submitted since then: nothing to compare."])
            + "\n"
        )
    span = f"the {found.days:.1f} days"
    lines.append(
        f"{plural(found.before.waits.jobs, 'job')} in {span} before, {found.after.waits.jobs} in {span} to now"
    )
    lines.append(f"mean wait  {_change(found.before.waits, found.after.waits)}")
    if found.has_gpus or found.after.gpu_waits.jobs:
        lines.append(f"  GPU jobs {_change(found.before.gpu_waits, found.after.gpu_waits)}")
    lines.append(f"use        {found.before.use:.0%} -> {found.after.use:.0%} of the cpus")
    lines.append(
        f"The {span[4:]} to now again by replay: without it {hours_text(found.without_it.waits.mean_s)}, with it "
        f"{hours_text(found.with_it.waits.mean_s)}" + _lost(found)
    )
    if found.after.gpu_waits.jobs:
        lines.append(
            f"  GPU jobs: without it {hours_text(found.without_it.gpu_waits.mean_s)}, with it "
            f"{hours_text(found.with_it.gpu_waits.mean_s)}"
        )
    return "\n".join(lines) + "\n"


def _change(before: WaitFigures, after: WaitFigures) -> str:
    first = hours_text(before.mean_s) if before.jobs else "no jobs"
    return f"{first} -> {hours_text(after.mean_s) if after.jobs else 'no jobs'}"


def _lost(found: Impact) -> str:
    more = found.without_it.left_out - found.with_it.left_out
    return f"; {plural(more, 'job')} could not have run without it" if more > 0 else ""


def impact_json(found: Impact) -> dict[str, Any]:
    """Return the figures for JSON."""
    return {**asdict(found), "days": found.days, "is_enough": found.days >= ENOUGH_DAYS}


def history_days(now_s: float, added_s: float | None, days: float) -> int:
    """Return for how many days the history is needed."""
    since_s = now_s - MOST_DAYS * DAY_S if added_s is None else added_s - days * DAY_S
    return int(max(days, min(2 * MOST_DAYS, (now_s - since_s) / DAY_S + days))) + WARM_DAYS


def promise_line(name: str) -> str:
    """Return what the last month would have been with the new node; "" without enough history.

    Raises HpcschedError.
    """
    past = cluster_past(MONTH_DAYS + WARM_DAYS)
    new = next((machine for machine in past.machines if machine.name == name), None)
    if new is None or past.whole_days < ENOUGH_DAYS or len(past.jobs) > MOST_REPLAYED:
        return ""
    span = (past.now_s - MONTH_DAYS * DAY_S, past.now_s)
    others = tuple(machine for machine in past.machines if machine.name != name)
    before, after = (replayed(machines, past.jobs, *span) for machines in (others, past.machines))
    kind, first, second = "GPU jobs", before.gpu_waits, after.gpu_waits
    if not (new.gpus and first.jobs):
        kind, first, second = "jobs", before.waits, after.waits
    if not first.jobs:
        return ""
    days = min(MONTH_DAYS, past.whole_days)
    if second.mean_s > 0.99 * first.mean_s:
        return f"waits of {kind} in the last {days} days would have been the same with it: {hours_text(first.mean_s)}"
    return f"waits of {kind} in the last {days} days: {hours_text(first.mean_s)} -> about {hours_text(second.mean_s)} with it"
