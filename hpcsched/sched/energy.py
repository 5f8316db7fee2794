"""The power that jobs may take together, and the hours in which their energy is cheap.

Power: a circuit has a budget in watts. The declared idle power of its nodes is taken off first, whether they are on or off. Of
the rest, a job counts its cpus' part of what each of its nodes takes above that, and the power limits of its GPUs, in whole watts
for each circuit. A plan treats these watts as it treats licences, except that they depend on the nodes.

Price: a job with `--cheap-by` waits for the cheapest hours from which it ends in time, by its time limit, if its nodes are free
then by the time limits of running jobs. A plan reserves these hours for it (see `plan`). Once it has been eligible, it waits for
other jobs only, and no longer for prices. So a job that does not get its nodes in these hours starts as soon as it can.

Pure. Knows no queue: it does not predict whether jobs of higher priority take the cheap hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from math import ceil, floor, inf
from typing import NamedTuple

from hpcsched.model.accounting import CPU, GPU
from hpcsched.model.job import Reason
from hpcsched.model.node import Circuit, Share
from hpcsched.model.tariff import JOULES_PER_KWH, Tariff, cheapest_starts, steps_of
from hpcsched.sched.decisions import Wait
from hpcsched.sched.place.node_fit import NodePart
from hpcsched.sched.place.request import LicenseCounts, Shape
from hpcsched.sched.sentences import listed
from hpcsched.sched.snapshot import NodeView, PendingJob, RunningJob, Snapshot
from hpcsched.sched.tres import least_of

POWER = "power:"  # with the name of a circuit, the name of its watts among the licences, none of which has a colon
WORTH_WAITING = 0.02  # least part of its price that a job saves if it waits
MOST_TRIES = 12
DAY_S = 86400.0


class PowerCounts:
    """The watts of jobs in each circuit of a snapshot, and what the circuits have for jobs."""

    def __init__(self, circuits: Sequence[Circuit], nodes: Sequence[NodeView]) -> None:
        self._nodes = nodes if circuits else ()
        self._index = {node.name: at for at, node in enumerate(self._nodes)}
        members = [(POWER + one.name, frozenset(one.nodes)) for one in circuits]
        self._keys = [tuple(key for key, names in members if not names or node.name in names) for node in self._nodes]
        idle = dict.fromkeys((key for key, _ in members), 0.0)
        for node, keys in zip(self._nodes, self._keys, strict=True):
            for key in keys:
                idle[key] += node.idle_watts
        # What the circuits have for jobs: their budgets without the idle power of their nodes.
        self.totals = {POWER + one.name: floor(one.budget_watts - idle[POWER + one.name] + 1e-6) for one in circuits}

    def __bool__(self) -> bool:
        return bool(self.totals)

    def counts_of(self, job: PendingJob, parts: Iterable[NodePart]) -> LicenseCounts:
        """Return the licences and the power of `job` on these parts of nodes."""
        return (*job.licenses, *self.of_parts(parts, job.gpu_power)) if self else job.licenses

    def held_by(self, job: RunningJob) -> LicenseCounts:
        """Return the licences and the power that `job` holds."""
        return (*job.licenses, *self.of_shares(job.shares, job.gpu_power)) if self else job.licenses

    def of_parts(self, parts: Iterable[NodePart], gpu_power: int) -> LicenseCounts:
        """Return the watts of a job on these parts in each circuit.

        `gpu_power`: its own limit of each GPU; 0: none.
        """
        held = []
        for part in parts:
            slots = self._nodes[part.node].slots
            gpus = sum(count / slot.shards for slot, count in zip(slots, part.use[2], strict=True))
            held.append((part.node, part.use[0], gpus))
        return self._counts(held, gpu_power)

    def of_shares(self, shares: Iterable[Share], gpu_power: int) -> LicenseCounts:
        """Return the watts of a job that holds these shares in each circuit."""
        known = ((self._index.get(share.node), share) for share in shares)
        return self._counts([(at, share.cpus, share.gpu_amount) for at, share in known if at is not None], gpu_power)

    def _counts(self, held: Sequence[tuple[int, int, float]], gpu_power: int) -> LicenseCounts:
        sums: dict[str, float] = {}
        for at, cpus, gpus in held:
            for key in self._keys[at]:
                sums[key] = sums.get(key, 0.0) + watts_above_idle(self._nodes[at], cpus, gpus, gpu_power)
        return tuple((key, ceil(watts - 1e-6)) for key, watts in sums.items() if watts > 0)


def watts_above_idle(node: NodeView, cpus: float, gpus: float, gpu_power: int) -> float:
    """Return what a part of a node takes at most, above the idle power of the node."""
    limit = min(node.gpu_watts, gpu_power or inf)
    return max(0.0, node.peak_watts - node.idle_watts) * cpus / node.cpus + limit * gpus


def circuit_watts(
    circuits: Sequence[Circuit], nodes: Sequence[NodeView], held: Iterable[tuple[Iterable[Share], int]]
) -> list[tuple[Circuit, int, int]]:
    """Return for each circuit what it has for jobs, and what jobs count of it.

    `held`: the shares of each job, and its own limit of each GPU.
    """
    counts = PowerCounts(circuits, nodes)
    used = dict.fromkeys(counts.totals, 0)
    for shares, gpu_power in held:
        for key, watts in counts.of_shares(shares, gpu_power):
            used[key] += watts
    return [(one, counts.totals[POWER + one.name], used[POWER + one.name]) for one in circuits]


def has_power(snapshot: Snapshot, job: RunningJob, shares: Iterable[Share]) -> bool:
    """Say whether there is power for a running job to hold `shares` instead of its own."""
    counts = PowerCounts(snapshot.circuits, snapshot.nodes)
    free = dict(counts.totals)
    for other in snapshot.running:
        for key, watts in counts.of_shares(other.shares if other is not job else (), other.gpu_power):
            free[key] -= watts
    return all(watts <= free[key] for key, watts in counts.of_shares(shares, job.gpu_power))


def no_power(wanted: LicenseCounts, free: Mapping[str, int], there: Mapping[str, int]) -> Wait:
    """Return the wait for power: the watts of each circuit that are needed and free."""
    short = [
        f"{watts} W{_of(key)}, of which {max(0, free[key])} of {max(0, there[key])} W for jobs are free now"
        for key, watts in wanted
        if key in there and free[key] < watts
    ]
    text = f"needs {listed(short)}" if short else "needs power that is promised to a job before it"
    return Wait(reason=Reason.POWER_NOT_AVAIL, detail=text)


def _of(key: str) -> str:
    name = key.removeprefix(POWER)
    return f" of circuit {name!r}" if name else ""


# ----- the price of energy


class CheapStart(NamedTuple):
    """A later start of a job, and the part of its price that it saves.

    `price`: of a kilowatt-hour if it starts now.
    """

    start_s: float
    saves: float
    price: float


def cheap_start(
    tariff: Tariff,
    limit_s: float,
    now_s: float,
    latest_s: float,
    start_from: Callable[[float], float | None] | None = None,
) -> CheapStart | None:
    """Return the cheapest start from now until `latest_s`; None if waiting saves too little.

    `start_from` returns the first start from a time on that the plan can keep; without it, all times can be kept.
    """
    if not tariff.kwh.windows or latest_s <= now_s:
        return None
    options = cheapest_starts(tariff.kwh, limit_s, now_s, latest_s)
    price_now = next(price for at_s, price in options if at_s == now_s)
    steps = steps_of(tariff.kwh, now_s, latest_s + limit_s)
    best_s, best = 0.0, price_now * (1 - WORTH_WAITING)
    for at_s, price in options[:MOST_TRIES]:
        if price >= best:
            break
        start_s = at_s if start_from is None else start_from(at_s)
        if start_s is not None and now_s < start_s <= latest_s:
            real = steps.mean(start_s, start_s + limit_s)
            best_s, best = (start_s, real) if real < best else (best_s, best)
    return CheapStart(best_s, 1 - best / price_now, price_now) if best_s else None


def advice(snapshot: Snapshot, job: PendingJob, limit_s: float | None) -> str:
    """Return what a job without `--cheap-by` would save within a day; "" if nothing."""
    now_s = snapshot.now_s
    if job.cheap_by_s is not None or not limit_s:
        return ""
    found = cheap_start(snapshot.tariff, limit_s, now_s, now_s + DAY_S)
    if found is None:
        return ""
    return f"Starting at {clock(found.start_s, now_s)} would save {money(snapshot, job, found)} (--cheap-by)."


def money(snapshot: Snapshot, job: PendingJob, found: CheapStart) -> str:
    """Return what a job saves.

    That is money, or a part of the price if the power of its nodes is not declared.
    """
    partition = snapshot.partitions.get(job.partition)
    names = set(partition.nodes) if partition is not None else set()
    watts = job_watts(job.request.shape, [node for node in snapshot.nodes if node.name in names], job.gpu_power)
    saved = found.saves * watts * (job.request.time_limit_s or 0) / JOULES_PER_KWH * found.price
    return (
        f"{saved:.2f} {snapshot.tariff.currency}" if saved >= 0.005 else f"{found.saves:.0%} of the price of its energy"
    )


def job_watts(shape: Shape, nodes: Iterable[NodeView], gpu_power: int) -> float:
    """Return the power of a job on average nodes, with their idle power; 0: not known."""
    able = [node for node in nodes if node.peak_watts > 0]
    if not able:
        return 0.0
    held = least_of(shape)
    gpus = [min(node.gpu_watts, gpu_power or inf) for node in able if node.gpu_watts > 0]
    per_cpu = sum(node.peak_watts / node.cpus for node in able) / len(able)
    return held.get(CPU, 0.0) * per_cpu + held.get(GPU, 0.0) * (sum(gpus) / len(gpus) if gpus else 0.0)


def clock(at_s: float, now_s: float) -> str:
    """Return a time for a sentence: ``22:00``, if it is not within a day ``Sat 06:00``."""
    return datetime.fromtimestamp(at_s).strftime("%H:%M" if at_s - now_s < DAY_S else "%a %H:%M")
