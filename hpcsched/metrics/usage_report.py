"""What jobs used, wasted and waited for in a period, and what the nodes did.

These are the figures of hreport and sreport. Pure. Knows no options and no formats. Jobs are those of `/v1/history?attempts=1`,
nodes and outages those of the API.

- Use is what all attempts of a job held, node by node and second by second, within the period. Suspended time is not use.
- Capacity is that of today's nodes, each since it was added or first seen. Nodes that were removed have none.
- Of a node's time without a job, off comes before down, and down before drained. What runs on a drained node is allocated.
  So allocated, down, drained, off and idle add up to the capacity.
- The cpu time of an attempt is known when its steps have ended, and of a running job from its last sample. It counts as if it was
  spent evenly over what the attempt held. An attempt without a known cpu time is not among the measured ones.
- So does the energy that an attempt caused on a node, over the time for which it held the node. It has the prices of that time.
- Used memory is that of the attempt's largest step at its highest, as if it was used all the time. GPUs are idle for the part of
  the sampled time in which they did not compute.
- A wait belongs to the start of the attempt that ended it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from hpcsched.model.accounting import CPU, GPU, MEM, NODE
from hpcsched.model.tariff import NO_PRICES, EnergyPrices

Json = dict[str, Any]

DIMENSIONS = ("user", "account", "partition", "node", "month")
ROOT_ACCOUNT = "root"  # of jobs without an account, as in Slurm
FAILED_STATES = frozenset({"FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "DEADLINE"})
HOUR_S = 3600.0
OFF, DOWN, DRAINED = "off", "down", "drained"  # kinds of outages, the first one counts


class Period(NamedTuple):
    """A period in seconds since the epoch, with a name; `now_s` bounds the use so far."""

    start_s: float
    end_s: float
    now_s: float
    name: str = ""

    @property
    def until_s(self) -> float:
        """Return the end of the past part of the period."""
        return min(self.end_s, self.now_s)

    def overlap_s(self, start_s: float, end_s: float | None) -> float:
        """Return the seconds of an interval within the period; `end_s` None: it has not ended."""
        until_s = min(self.end_s, self.now_s if end_s is None else end_s)
        return max(0.0, until_s - max(self.start_s, start_s))

    def has(self, at_s: float) -> bool:
        """Return whether a time is in the period."""
        return self.start_s <= at_s < self.end_s


@dataclass(slots=True, kw_only=True)
class UsageRow:
    """What the jobs of a user, say, used. `key`: the values of the dimensions.

    Times are resource-seconds.
    """

    key: tuple[str, ...]
    jobs: set[int] = field(default_factory=set)
    cpu_s: float = 0.0
    gpu_s: float = 0.0
    mem_mib_s: float = 0.0
    node_s: float = 0.0
    measured_cpu_s: float = 0.0  # the part of cpu_s for which busy_cpu_s is known
    busy_cpu_s: float = 0.0
    measured_mem_mib_s: float = 0.0  # the part of mem_mib_s for which used_mem_mib_s is known
    used_mem_mib_s: float = 0.0
    measured_gpu_s: float = 0.0  # the part of gpu_s in which GPUs were sampled
    busy_gpu_s: float = 0.0
    requeued_cpu_s: float = 0.0  # of attempts after which the job began anew
    failed_cpu_s: float = 0.0  # of the last attempts of failed jobs
    waits_s: list[float] = field(default_factory=list)
    joules: float | None = None  # None: nothing was measured
    energy_cost: float = 0.0  # at the prices of the time when it was used
    co2_g: float = 0.0

    @property
    def unused_cpu_s(self) -> float | None:
        """Return the cpu time that was held and not used, None if none was measured."""
        return max(0.0, self.measured_cpu_s - self.busy_cpu_s) if self.measured_cpu_s else None

    @property
    def unused_mem_mib_s(self) -> float | None:
        """Return the memory that was held and not used, None if none was measured."""
        return max(0.0, self.measured_mem_mib_s - self.used_mem_mib_s) if self.measured_mem_mib_s else None

    @property
    def idle_gpu_s(self) -> float | None:
        """Return the time that GPUs were held and did not compute, None if none was measured."""
        return max(0.0, self.measured_gpu_s - self.busy_gpu_s) if self.measured_gpu_s else None

    def wait_s(self, part: float) -> float | None:
        """Return the wait that this part of the starts did not exceed; None without starts."""
        if not self.waits_s:
            return None
        if part == 0.5:
            return float(median(self.waits_s))
        ordered = sorted(self.waits_s)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))]

    @property
    def mean_wait_s(self) -> float | None:
        """Return the mean wait, None without starts."""
        return sum(self.waits_s) / len(self.waits_s) if self.waits_s else None

    def cost(self, cpu_hour: float, gpu_hour: float) -> float:
        """Return the price of the use, with the prices of an hour of a cpu and of a GPU."""
        return self.cpu_s / HOUR_S * cpu_hour + self.gpu_s / HOUR_S * gpu_hour + self.energy_cost

    def tres_s(self, tres: str) -> float:
        """Return the seconds of a TRES; that of billing is that of cpus."""
        return {CPU: self.cpu_s, MEM: self.mem_mib_s, NODE: self.node_s, GPU: self.gpu_s}.get(tres, self.cpu_s)

    def add(self, other: UsageRow) -> None:
        """Add another row to this one."""
        self.jobs |= other.jobs
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.waits_s += other.waits_s
        if other.joules is not None:
            self.joules = (self.joules or 0.0) + other.joules


_SUMS = (
    "cpu_s", "gpu_s", "mem_mib_s", "node_s", "measured_cpu_s", "busy_cpu_s", "measured_mem_mib_s", "used_mem_mib_s",
    "measured_gpu_s", "busy_gpu_s", "requeued_cpu_s", "failed_cpu_s",
    "energy_cost", "co2_g",
)  # fmt: skip


class ReadJobs:
    """Notes what is needed of all jobs while they are read once: there may be very many.

    `unknown`: jobs with an unknown use, because their events do not fit together. `sources`: of their energy.
    """

    def __init__(self) -> None:
        self.held: list[HeldPart] = []
        self.unknown = 0
        self.sources: set[str] = set()

    def reading(self, jobs: Iterable[Json]) -> Iterator[Json]:
        """Yield the jobs."""
        for job in jobs:
            self.held += held_parts(job)
            self.unknown += job["attempts"] is None
            self.sources.update(use["source"] for use in job.get("energy") or ())
            yield job


def usage_rows(
    jobs: Iterable[Json], periods: Sequence[Period], by: Sequence[str], names: Mapping[str, str] | None = None,
    prices: EnergyPrices = NO_PRICES,
) -> list[UsageRow]:  # fmt: skip
    """Return a row for each combination of the dimensions in `by` that was used.

    The rows are in order of their keys. The periods do not overlap; the dimension "month" is their name. `names`: the present
    names of renamed nodes.
    """
    rows: dict[tuple[str, ...], UsageRow] = {}

    def row_of(job: Json, period: Period, node: str) -> UsageRow:
        key = tuple([_value(job, period, node, dimension) for dimension in by])
        return rows.setdefault(key, UsageRow(key=key))

    for job in jobs:
        for attempt in job["attempts"] or ():
            _add_attempt(job, attempt, periods, names or {}, row_of, prices)
    return [rows[key] for key in sorted(rows)]


def total_of(rows: Iterable[UsageRow]) -> UsageRow:
    """Return the sum of the rows; a job counts once."""
    total = UsageRow(key=())
    for row in rows:
        total.add(row)
    return total


def _value(job: Json, period: Period, node: str, dimension: str) -> str:
    if dimension == "month":
        return period.name
    if dimension == "node":
        return node
    return str(job[dimension] or (ROOT_ACCOUNT if dimension == "account" else ""))


def _add_attempt(
    job: Json,
    attempt: Json,
    periods: Sequence[Period],
    names: Mapping[str, str],
    row_of: Callable[[Json, Period, str], UsageRow],
    prices: EnergyPrices,
) -> None:
    holdings = attempt["holdings"]
    joules = _joules_by_second(job, attempt, periods)
    busy_part = _busy_part(job, attempt, periods)
    mem_part = _mem_part(job, attempt)
    gpus = _gpu_parts(job, attempt, periods)
    is_failed = not attempt["requeued"] and attempt["ended_at_s"] is not None and job["state"] in FAILED_STATES
    for period in periods:
        if holdings and period.has(attempt["allocated_at_s"]):
            first = holdings[0]["node"]
            row_of(job, period, names.get(first, first)).waits_s.append(attempt["waited_s"])
        for held in holdings:
            lasted_s = period.overlap_s(held["since_s"], held["until_s"])
            if lasted_s <= 0:
                continue
            row = row_of(job, period, names.get(held["node"], held["node"]))
            cpu_s = lasted_s * held["cpus"]
            row.jobs.add(job["id"])
            row.cpu_s += cpu_s
            row.gpu_s += lasted_s * held["gpus"]
            row.mem_mib_s += lasted_s * held["mem_mib"]
            row.node_s += lasted_s
            if busy_part is not None:
                row.measured_cpu_s += cpu_s
                row.busy_cpu_s += cpu_s * busy_part
            if mem_part is not None:
                row.measured_mem_mib_s += lasted_s * held["mem_mib"]
                row.used_mem_mib_s += lasted_s * held["mem_mib"] * mem_part
            if held["node"] in gpus and held["gpus"]:
                seen, busy = gpus[held["node"]]
                row.measured_gpu_s += lasted_s * held["gpus"] * seen
                row.busy_gpu_s += lasted_s * held["gpus"] * busy
            if held["node"] in joules:
                since_s = max(period.start_s, held["since_s"])
                _add_energy(row, joules[held["node"]] * lasted_s, since_s, since_s + lasted_s, prices)
            row.requeued_cpu_s += cpu_s * attempt["requeued"]
            row.failed_cpu_s += cpu_s * is_failed


def _mem_part(job: Json, attempt: Json) -> float | None:
    """Return the part of its memory that the attempt used at most, None if it is not known."""
    held_mib = sum(held["mem_mib"] for held in _at_once(attempt["holdings"]))
    if attempt["ended_at_s"] is None:
        live = job.get("use")
        used_mib = None if not live else live.get("memory_bytes", 0) / (1 << 20)
    else:
        sizes = [
            step["max_rss_kib"] * step["ntasks"] / 1024
            for step in job.get("steps", ())
            if step["attempt"] == attempt["attempt"] and step.get("max_rss_kib")
        ]
        used_mib = max(sizes, default=None)
    return None if used_mib is None or not held_mib else min(1.0, used_mib / held_mib)


def _at_once(holdings: Sequence[Json]) -> Iterable[Json]:
    """Return the last holding of each node: what an attempt held at once in the end."""
    return {held["node"]: held for held in holdings}.values()


def _gpu_parts(job: Json, attempt: Json, periods: Sequence[Period]) -> dict[str, tuple[float, float]]:
    """Return the sampled and the busy part of the attempt's GPU time on each node."""
    found: dict[str, tuple[float, float]] = {}
    for number, node, seen_s, busy_s in job.get("gpu_use", ()):
        if number == attempt["attempt"]:
            held_s = sum(
                held["gpus"] * max(0.0, _end_s(held, periods) - held["since_s"])
                for held in attempt["holdings"]
                if held["node"] == node
            )
            if held_s > 0:
                found[node] = min(1.0, seen_s / held_s), min(1.0, busy_s / held_s)
    return found


def _end_s(held: Json, periods: Sequence[Period]) -> float:
    now_s = periods[0].now_s if periods else 0.0
    return float(now_s if held["until_s"] is None else held["until_s"])


def _add_energy(row: UsageRow, joules: float, start_s: float, end_s: float, prices: EnergyPrices) -> None:
    row.joules = (row.joules or 0.0) + joules
    row.energy_cost += prices.cost(joules, start_s, end_s)
    row.co2_g += prices.co2_g(joules, start_s, end_s)


def _joules_by_second(job: Json, attempt: Json, periods: Sequence[Period]) -> dict[str, float]:
    """Return the energy that the attempt caused on each node, for each second there."""
    uses: dict[str, float] = {}
    for use in job.get("energy") or ():
        if use["attempt"] == attempt["attempt"]:
            uses[use["node"]] = uses.get(use["node"], 0.0) + use["joules"]
    held_s: dict[str, float] = {}
    for held in attempt["holdings"] if uses and periods else ():
        until_s = periods[0].now_s if held["until_s"] is None else held["until_s"]
        held_s[held["node"]] = held_s.get(held["node"], 0.0) + max(0.0, until_s - held["since_s"])
    return {node: joules / held_s[node] for node, joules in uses.items() if held_s.get(node, 0.0) > 0}


def _busy_part(job: Json, attempt: Json, periods: Sequence[Period]) -> float | None:
    """Return the fraction of its cpu time that the attempt used, None if it is not known."""
    now_s = periods[0].now_s if periods else 0.0
    held_s = sum(
        held["cpus"] * max(0.0, (now_s if held["until_s"] is None else held["until_s"]) - held["since_s"])
        for held in attempt["holdings"]
    )
    busy_s = _busy_s(job, attempt)
    return None if busy_s is None or held_s <= 0 else busy_s / held_s


def _busy_s(job: Json, attempt: Json) -> float | None:
    if attempt["ended_at_s"] is None:
        live = job.get("use")
        return None if not live else float(live["cpu_s"])
    known = [
        step["cpu_user_s"] + (step["cpu_system_s"] or 0.0)
        for step in job.get("steps", ())
        if step["attempt"] == attempt["attempt"] and step["cpu_user_s"] is not None
    ]
    return sum(known) if known else None


# ----- the time of the nodes


AMOUNTS: Mapping[str, Callable[[Json], float]] = {
    CPU: lambda node: node["cpus"],
    MEM: lambda node: node["mem_mib"],
    NODE: lambda node: 1,
    GPU: lambda node: len(node["gpus"]),
}


@dataclass(slots=True, kw_only=True)
class NodeTime:
    """What became of the time of a resource of a node, in resource-seconds.

    The parts add up to `capacity_s`.
    """

    capacity_s: float = 0.0
    allocated_s: float = 0.0
    down_s: float = 0.0
    drained_s: float = 0.0
    off_s: float = 0.0
    idle_s: float = 0.0

    def add(self, other: NodeTime) -> None:
        """Add the times of another node to these."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def present_names(nodes: Iterable[Json]) -> dict[str, str]:
    """Return the present name of each former name of a node."""
    return {former: node["name"] for node in nodes for former in node.get("formerly", ())}


def with_first_seen(nodes: Iterable[Json], first_seen_s: Mapping[str, float]) -> list[Json]:
    """Return the nodes with `since_s`: when they were added or first seen; None: not known."""
    found = []
    for node in nodes:
        known = [at_s for at_s in (node.get("added_at_s"), first_seen_s.get(node["name"])) if at_s is not None]
        found.append(node | {"since_s": min(known, default=None)})
    return found


class HeldPart(NamedTuple):
    """What a job held of a node, and when; the same fields as in a job of the history."""

    node: str
    since_s: float
    until_s: float | None
    cpus: float
    mem_mib: float
    gpus: float


def held_parts(job: Json) -> Iterator[HeldPart]:
    """Yield all that a job of the history held."""
    for attempt in job["attempts"] or ():
        for held in attempt["holdings"]:
            yield HeldPart(*map(held.__getitem__, HeldPart._fields))


def node_times(
    period: Period, held: Iterable[HeldPart], nodes: Sequence[Json], outages: Iterable[Json], tres: str = CPU
) -> dict[str, NodeTime]:
    """Return the times of each of today's nodes in the period, for a TRES.

    Billing is that of cpus. `held`: what all jobs held. `nodes`: see `with_first_seen`.
    """
    names = present_names(nodes)
    changes: dict[str, list[_Change]] = {node["name"]: [] for node in nodes}
    for part in held:
        amount = {MEM: part.mem_mib, GPU: part.gpus, NODE: 1.0}.get(tres, part.cpus)
        _mark(changes, names, part.node, part.since_s, part.until_s, "", amount)
    for outage in outages:
        _mark(changes, names, outage["node"], outage["start_s"], outage["end_s"], outage["kind"], 1.0)
    found = {}
    for node in nodes:
        start_s = max(period.start_s, node["since_s"] or period.start_s)
        amount = AMOUNTS.get(tres, AMOUNTS[CPU])(node)
        found[node["name"]] = _swept(changes[node["name"]], start_s, period.until_s, amount)
    return found


# A time, and what begins then: resources are allocated (kind ""), or an outage; a negative amount: it ends.
_Change = tuple[float, str, float]


def _mark(
    changes: Mapping[str, list[_Change]], names: Mapping[str, str], node: str, since_s: float, until_s: float | None,
    kind: str, amount: float,
) -> None:  # fmt: skip
    of_node = changes.get(names.get(node, node))
    if of_node is None:
        return
    of_node.append((since_s, kind, amount))
    if until_s is not None:
        of_node.append((until_s, kind, -amount))


def _swept(changes: Iterable[_Change], start_s: float, end_s: float, amount: float) -> NodeTime:
    """Return the times between `start_s` and `end_s` of `amount` of a resource."""
    made = NodeTime()
    state = {"": 0.0, OFF: 0.0, DOWN: 0.0, DRAINED: 0.0}
    at_s = start_s
    for change_s, kind, change in (*sorted(changes), (end_s, "", 0.0)):
        until_s = min(end_s, change_s)
        if until_s > at_s:
            _count(made, state, until_s - at_s, amount)
            at_s = until_s
        if kind in state:
            state[kind] += change
    return made


def _count(made: NodeTime, state: Mapping[str, float], lasted_s: float, amount: float) -> None:
    used = min(amount, max(0.0, state[""]))
    made.capacity_s += lasted_s * amount
    made.allocated_s += lasted_s * used
    free_s = lasted_s * (amount - used)
    if state[OFF] > 0:
        made.off_s += free_s
    elif state[DOWN] > 0:
        made.down_s += free_s
    elif state[DRAINED] > 0:
        made.drained_s += free_s
    else:
        made.idle_s += free_s
