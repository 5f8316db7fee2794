"""Say what other machines would be worth: the past, the weeks ahead, and costs.

Pure: the snapshot and the history are arguments, as the API shows them. `hpcsched.planner.capacity` replays and draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcsched.errors import RequestError
from hpcsched.listing.text import clean
from hpcsched.model.units import format_time_s, nearest
from hpcsched.planner.capacity import (
    DAY_S,
    HISTORY_DAYS,
    LEAST_DAYS,
    Ahead,
    Arrival,
    PlanNode,
    PlanNodes,
    ReplayResult,
    ahead,
    day_of,
    days_of,
    is_idle,
    memory_bound,
    replayed,
    short_limits,
    with_memory,
    without_idle,
)
from hpcsched.planner.windows import HOUR_S
from hpcsched.sched.snapshot import NodeView, Snapshot
from hpcsched.sim.forecast import NEW_NODES, new_nodes

Json = dict[str, Any]
MOST_NODES = 1000
MOST_LEFT_S = 28 * DAY_S  # of a job that runs
HOURS_A_YEAR = 8766.0
MOST_PRICE = 1e9
UNKNOWN = "Not in this: that people submit more when there is more, and that another machine has another speed."


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The machines of a cluster and the jobs that it ran, until `now_s`.

    `local`: its times are dates, not those of a trace.
    """

    name: str
    machines: PlanNodes
    jobs: Sequence[Arrival]
    now_s: float
    local: bool
    speeds: Mapping[str, float]
    work: Mapping[str, tuple[float, float]]  # by node: cpu seconds and GPU seconds that jobs held

    @property
    def began_s(self) -> float:
        return min((job.submit_s for job in self.jobs), default=self.now_s)

    @property
    def whole_days(self) -> int:
        """Return the days of history before today."""
        return max(0, day_of(self.now_s, self.local) - day_of(self.began_s, self.local))


def past_of(snapshot: Snapshot, views: Iterable[Json], work_days: float = 0.0) -> Past:
    """Return the machines of the snapshot, and the jobs of the history, as the API shows both.

    The work is that of the last `work_days` days.
    """
    now_s, machines = snapshot.now_s, machines_of(snapshot)
    kinds = {machine.name: machine.gpu_type for machine in machines}
    jobs, work = [], {machine.name: (0.0, 0.0) for machine in machines}
    for view in views:
        job = arrival_of(view, now_s, kinds)
        if job is None:
            continue
        jobs.append(job)
        began_s = view["started_at_s"]  # a time limit may be far ahead: only what was held counts as work
        held_s = max(0.0, min(now_s, began_s + job.run_s) - max(began_s, now_s - work_days * DAY_S))
        for share in view["shares"]:
            cpu_s, gpu_s = work.get(share["node"], (0.0, 0.0))
            work[share["node"]] = (cpu_s + share["cpus"] * held_s, gpu_s + len(share["gpus"]) * held_s)
    return Past(
        name="the cluster",
        machines=machines,
        jobs=sorted(jobs),
        now_s=now_s,
        local=True,
        speeds={node.name: node.speed for node in snapshot.nodes},
        work=work,
    )


def machines_of(snapshot: Snapshot) -> PlanNodes:
    """Return the machines of a snapshot."""
    partitions: dict[str, set[str]] = {}
    for name, partition in snapshot.partitions.items():
        for node in partition.nodes:
            partitions.setdefault(node, set()).add(name)
    return tuple(machine_of(node, frozenset(partitions.get(node.name, ()))) for node in snapshot.nodes)


def machine_of(node: NodeView, partitions: frozenset[str]) -> PlanNode:
    kind = node.gpus[0].type.lower() if node.gpus else ""
    return PlanNode(node.name, node.cpus, node.mem_mib, len(node.gpus), kind, partitions)


def arrival_of(view: Json, now_s: float, kinds: Mapping[str, str]) -> Arrival | None:
    """Return a job of the history, None if it never ran.

    `kinds`: types of GPU by node. A job that runs is taken to end at its time limit, or now if it has none; at the latest after
    `MOST_LEFT_S`, because users may ask for a hundred years.
    """
    shares, began_s = view["shares"], view["started_at_s"]
    if not shares or began_s is None:
        return None
    ended_s = view["ended_at_s"]
    if ended_s is None:
        ended_s = min(began_s + view["time_limit_s"], now_s + MOST_LEFT_S) if view["time_limit_s"] else now_s
    run_s = max(0.0, ended_s - began_s - (view["suspended_s"] or 0.0))
    gpus = max(0 if share["shards"] else len(share["gpus"]) for share in shares)
    steps = [step for step in view["steps"] if step.get("attempt", view["attempt"]) == view["attempt"]]
    used = [step["cpu_user_s"] + (step["cpu_system_s"] or 0.0) for step in steps if step["cpu_user_s"] is not None]
    return Arrival(
        submit_s=max(view["submitted_at_s"], view["eligible_at_s"] or 0.0),
        run_s=run_s,
        limit_s=max(run_s, float(view["time_limit_s"] or 0.0)) or run_s,
        nodes=len(shares),
        cpus=max(share["cpus"] for share in shares),
        mem_mib=max(share["mem_mib"] for share in shares),
        gpus=gpus,
        gpu_type=kinds.get(shares[0]["node"], "") if gpus else "",
        partition=view["partition"],
        user=view["user"],
        cpu_used_s=sum(used) if used else None,
        began_s=began_s,
        on=tuple(share["node"] for share in shares),
    )


def added_nodes(texts: Sequence[str], past: Past, partition: str | None) -> PlanNodes:
    """Return the machines of texts such as ``1x16:64G:gpu:rtx4090:1``. Raises RequestError."""
    known = set().union(*(machine.partitions for machine in past.machines))
    if partition is not None and partition not in known:
        raise RequestError(
            f"cannot add nodes to partition {partition[:60]!r}: there is none{nearest(partition, known)}"
        )
    where = frozenset((partition,)) if partition is not None else frozenset[str]()
    found: list[PlanNode] = []
    for text in texts:
        nodes = new_nodes(text, {machine.name for machine in (*past.machines, *found)})
        if nodes is None:
            raise RequestError(f"cannot add nodes {text[:60]!r}: write {NEW_NODES}")
        if len(found) + len(nodes) > MOST_NODES:
            raise RequestError(f"cannot add more than {MOST_NODES} nodes")
        found += [machine_of(node, where) for node in nodes]
    if not past.local:  # a trace is one pool of processors
        more = sum(machine.cpus for machine in found)
        pool = past.machines[0]
        return (pool._replace(name="new", cpus=more),)
    return tuple(found)


# ----- what it would be worth


def replay_sentences(days: int, now: ReplayResult, then: ReplayResult) -> list[str]:
    """Return what the same jobs would have waited, without and with the other machines."""
    lines = [
        f"The last {days} days again, with it: mean wait {hours_text(now.waits.mean_s)} -> {hours_text(then.waits.mean_s)}; "
        f"{then.waits.prompt} of {then.waits.jobs} jobs would have started at once, {now.waits.prompt} without it"
    ]
    if now.gpu_waits.jobs:
        lines.append(
            f"of GPU jobs: {hours_text(now.gpu_waits.mean_s)} -> {hours_text(then.gpu_waits.mean_s)}; "
            f"{then.gpu_waits.prompt} of {then.gpu_waits.jobs} at once, {now.gpu_waits.prompt} without it"
        )
    return [*lines, f"use of cpus {now.utilization:.0%} -> {then.utilization:.0%}{left_out_text(now)}"]


def instead_of(past: Past, span: tuple[float, float], now: ReplayResult) -> list[Json]:
    """Return cheaper ways that shorten the waits, the best first."""
    found: list[Json] = []

    def add(kind: str, text: str, result: ReplayResult) -> None:
        if result.waits.total_s < 0.95 * now.waits.total_s:
            words = f"{text}: mean wait {hours_text(now.waits.mean_s)} -> {hours_text(result.waits.mean_s)}"
            found.append({"kind": kind, "text": words, "wait_mean_s": result.waits.mean_s})

    idle = [job for job in past.jobs if is_idle(job) and span[0] <= job.submit_s < span[1]]
    if idle:
        hours = sum(job.run_s * job.nodes * job.cpus for job in idle) / HOUR_S
        add(
            "idle",
            f"nobody holds idle cpus ({len(idle)} jobs, {hours:.0f} cpu hours)",
            replayed(past.machines, without_idle(past.jobs), *span),
        )
    add("limits", "time limits of at most 1.25 times the run", replayed(past.machines, short_limits(past.jobs), *span))
    if names := memory_bound(past.machines, past.jobs, *span):
        result = replayed(with_memory(past.machines, names), past.jobs, *span)
        add(
            "memory",
            f"twice the memory in {', '.join(map(clean, names[:5]))}{' ...' if len(names) > 5 else ''}",
            result,
        )
    return sorted(found, key=lambda each: float(each["wait_mean_s"]))


# ----- the weeks ahead


VALUES: dict[str, Callable[[ReplayResult], float]] = {
    "wait_mean_s": lambda replay: replay.waits.mean_s,
    "gpu_wait_mean_s": lambda replay: replay.gpu_waits.mean_s,
    "utilization": lambda replay: replay.utilization,
    "gpu_utilization": lambda replay: replay.gpu_utilization,
    "jobs": lambda replay: float(replay.waits.jobs),
}


def bands_of(drawn: Ahead, variant: int) -> dict[str, dict[str, float]]:
    """Return the band of each value with a variant of the machines."""
    return {name: drawn.band(variant, value)._asdict() for name, value in VALUES.items()}


def days_ahead(variants: Sequence[PlanNodes], past: Past, days: int, draws: int, seed: int) -> Ahead | None:
    """Return the draws of the days ahead, None with too little history."""
    if past.whole_days < LEAST_DAYS:
        return None
    first = day_of(past.now_s, past.local)
    return ahead(variants, days_of(past.jobs, past.local), first, past.local, count=days, draws=draws, seed=seed)


def forecast_lines(answer: Json, past: Past) -> list[str]:
    """Return the forecast in sentences, or why there is none."""
    if "ahead" not in answer:
        return [f"No forecast: there are {past.whole_days} days of history; it needs {LEAST_DAYS}."]
    now, then = (_words(answer["ahead"][which]["wait_mean_s"]) for which in ("now", "with"))
    lines = [
        f"The next {answer['days']} days ({answer['ahead']['draws']} draws): {now} -> {then}    80 % of the draws are within"
    ]
    tested = answer.get("backtest")
    if tested:
        lines.append(
            f"  Back-test on this past: of {tested['windows']} periods {tested['wait_within']} had their mean wait within, "
            f"{tested['gain_within']} the gain, {tested['sign_right']} its sign"
        )
    elif "backtest" in answer:
        lines.append(f"  No back-test: it needs {HISTORY_DAYS} days of history and a period after them.")
    return lines


def _words(band: Mapping[str, float]) -> str:
    return f"{hours_text(band['median'])} ({hours_text(band['low'])} to {hours_text(band['high'])})"


# ----- costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What more machines cost, None if it is not known.

    `price`: of all of them; `watts`: of all of them under load; `kwh`: of electricity; `cloud`: of an hour of such a node
    elsewhere.
    """

    price: float | None = None
    watts: float | None = None
    kwh: float | None = None
    cloud: float | None = None


def costs_of(now: ReplayResult, then: ReplayResult, new: PlanNodes, days: int, prices: Prices) -> Json:
    """Return the costs that can be told from the prices."""
    price, watts, kwh, cloud = prices.price, prices.watts, prices.kwh, prices.cloud
    saved_h = (now.waits.total_s - then.waits.total_s) / HOUR_S * 365.25 / days
    used = then.gpu_utilization if any(machine.gpus for machine in new) else then.utilization
    found: Json = {"saved_wait_h_a_year": saved_h, "use": used}
    power = watts * used * HOURS_A_YEAR / 1000 * kwh if watts is not None and kwh is not None else None
    if power is not None:
        found["electricity_a_year"] = power
    if price is not None:
        found["price"] = price
        found["first_year"] = price + (power or 0.0)
        found["per_saved_h"] = found["first_year"] / saved_h if saved_h > 0 else None
    if cloud is not None:
        found["cloud_a_year"] = cloud * used * HOURS_A_YEAR * len(new)
        if price is not None:
            yearly = found["cloud_a_year"] - (power or 0.0)
            found["years_to_pay"] = price / yearly if yearly > 0 else None
    return found


def cost_lines(costs: Json) -> list[str]:
    """Return the costs in sentences."""
    lines = []
    if "price" in costs:
        per = costs["per_saved_h"]
        each = (
            f"{per:.2f} for each hour of waiting saved in the first year" if per is not None else "it saves no waiting"
        )
        power = (
            f" and {costs['electricity_a_year']:.0f} a year for electricity" if "electricity_a_year" in costs else ""
        )
        lines.append(f"Costs {costs['price']:.0f}{power} at {costs['use']:.0%} use: {each}")
    elif "electricity_a_year" in costs:
        lines.append(f"Costs {costs['electricity_a_year']:.0f} a year for electricity at {costs['use']:.0%} use")
    if "cloud_a_year" in costs:
        years = costs.get("years_to_pay")
        paid = f"; it pays for itself in {years:.1f} years" if years is not None else ""
        lines.append(f"The same hours elsewhere: {costs['cloud_a_year']:.0f} a year{paid}")
    return lines


def hours_text(seconds: float) -> str:
    """Return a wait as people say it: ``3.1 h``, or minutes and seconds below an hour."""
    return f"{seconds / HOUR_S:.1f} h" if seconds >= HOUR_S else format_time_s(round(seconds))


def left_out_text(found: ReplayResult) -> str:
    """Return how many jobs do not count, "" if all do."""
    return f"; {found.left_out} jobs that no node of today can run are left out" if found.left_out else ""
