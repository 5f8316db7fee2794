"""The energy of nodes from their meters, and the parts of it that jobs caused.

Pure. Every figure names its source. `measured`: a meter of the whole machine. `component`: the counters of processors (RAPL)
and GPUs (NVML), without the rest of the machine. `estimated`: from the declared idle and peak power of a node without meters,
and how busy its processors were. A node without meters and declaration has no figure, nor has the time without samples.

Between two samples of a node (`interval_energy`), its energy is split among its jobs (`split`): that of a GPU goes to the job
that holds it, to several jobs by their shards. Of the rest, the declared idle power goes to jobs by their cpus, and what is above
it by processor time; what no job caused is idle. So jobs and idle add up to the meter, and a job is not charged for the work of
others.

Sources: Linux Documentation/power/powercap ("psys" is the platform, with its packages), Documentation/hwmon/acpi_power_meter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcsched.metrics.series import NodeSample, Value
from hpcsched.metrics.usage_report import Period
from hpcsched.model.tariff import NO_PRICES, EnergyPrices

Json = dict[str, Any]
JobKey = tuple[int, int]  # job and attempt

MEASURED, COMPONENT, ESTIMATED = "measured", "component", "estimated"
SERIES = ("node_energy_joules_total", "node_power_watts", "gpu_energy_joules_total", "gpu_power_watts")
WHOLE_MACHINE = "power_meter"  # the hwmon chip of a machine's own meter
PLATFORM = "psys"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnergy:
    """What a node used. `covered_s`: the time for which it is known."""

    joules: float
    source: str  # MEASURED or COMPONENT
    covered_s: float
    cost: float = 0.0
    co2_g: float = 0.0


def node_energy(answer: Json, period: Period, prices: EnergyPrices = NO_PRICES) -> NodeEnergy | None:
    """Return the energy of a node in the period, None if nothing was measured.

    `answer`: of `/v1/metrics/history` for `SERIES`, with a step that divides the period finely.
    """
    watts: dict[str, list[Sequence[float | None]]] = {}
    for one in answer["series"]:
        watts.setdefault(_meter_of(one), []).append(one["values"])
    source = MEASURED if "whole" in watts else COMPONENT
    chosen = _chosen(watts)
    joules = covered_s = cost = co2_g = 0.0
    for step in range(answer["count"]):
        values = [series[step] for series in chosen]
        known = [value for value in values if value is not None]
        begin_s = answer["from_s"] + step * answer["step_s"]
        lasted_s = period.overlap_s(begin_s, min(begin_s + answer["step_s"], period.now_s))
        if known and len(known) == len(values):  # a sum without one of its meters would be too low
            begin_s = max(begin_s, period.start_s)
            joules += sum(known) * lasted_s
            cost += prices.cost(sum(known) * lasted_s, begin_s, begin_s + lasted_s)
            co2_g += prices.co2_g(sum(known) * lasted_s, begin_s, begin_s + lasted_s)
            covered_s += lasted_s
    if not covered_s:
        return None
    return NodeEnergy(joules=joules, source=source, covered_s=covered_s, cost=cost, co2_g=co2_g)


def _meter_of(series: Json) -> str:
    """Return what a series measures; "": nothing that counts."""
    label = str(series.get("labels", {}).get("sensor", series.get("labels", {}).get("domain", "")))
    match series["name"]:
        case "node_power_watts":
            return "whole" if label.startswith(WHOLE_MACHINE) else ""
        case "node_energy_joules_total":
            return "platform" if label.startswith(PLATFORM) else "package"
        case "gpu_energy_joules_total":
            return "gpu energy"
        case _:
            return "gpu power"


def _chosen(watts: Mapping[str, Iterable[Sequence[float | None]]]) -> list[Sequence[float | None]]:
    """Return the series that add up to the node, each part once."""
    if "whole" in watts:
        return list(watts["whole"])
    processors = watts.get("platform") or watts.get("package") or ()
    gpus = watts.get("gpu energy") or watts.get("gpu power") or ()
    return [*processors, *gpus]


# ----- the energy between two samples


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredPower:
    """What a node takes by its configuration, without its GPUs; 0: not declared.

    `peak_watts`: with all cpus busy.
    """

    idle_watts: float = 0.0
    peak_watts: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalEnergy:
    """What a node used between two samples: each GPU, and the rest of what is known."""

    source: str
    lasted_s: float
    rest_j: float
    gpus_j: dict[str, float] = field(default_factory=dict)  # by index
    busy_s: float | None = None  # processor time of all processes; None: not known

    @property
    def joules(self) -> float:
        """Return all of it."""
        return self.rest_j + sum(self.gpus_j.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPart:
    """What an attempt of a job had of a node between two samples.

    `cpus`: fewer if it did not hold them all the time. `gpus`: the part of each GPU, by index.
    """

    key: JobKey
    cpu_s: float
    cpus: float
    gpus: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitEnergy:
    """The energy of a node by job; `idle_j`: what no job caused."""

    jobs_j: dict[JobKey, float]
    idle_j: float


LONGEST_S = 3600.0  # between two samples that belong together
_IDLE_MODES = ("idle", "iowait")


def interval_energy(before: NodeSample, after: NodeSample, declared: DeclaredPower) -> IntervalEnergy | None:
    """Return what a node used between two samples, None if it is not known.

    A counter that fell (a reset, another boot) makes the interval unknown, or estimated if that is possible.
    """
    lasted_s = after.received_at_s - before.received_at_s
    if before.boot_id != after.boot_id or not 0.0 < lasted_s <= LONGEST_S:
        return None
    old, new = _values(before), _values(after)
    gpus_j = _gpu_joules(old, new, lasted_s)
    busy_s = _busy_s(old, new)

    def made(source: str, rest_j: float) -> IntervalEnergy:
        return IntervalEnergy(source=source, lasted_s=lasted_s, rest_j=rest_j, gpus_j=gpus_j, busy_s=busy_s)

    meters = [name for name in new if name.startswith(f"node_power_watts:{WHOLE_MACHINE}")]
    whole_j = _sum([_mean(old.get(name), new[name]) for name in meters])
    if whole_j is not None:
        return made(MEASURED, max(0.0, whole_j * lasted_s - sum(gpus_j.values())))
    counters = [name for name in new if name.startswith("node_energy_joules_total:")]
    platforms = [name for name in counters if name.startswith(f"node_energy_joules_total:{PLATFORM}")]
    rest_j = _sum([_growth(old.get(name), new[name]) for name in platforms or counters])
    if rest_j is not None:
        return made(COMPONENT, rest_j)
    if declared.peak_watts > 0 and busy_s is not None:
        busy_part = min(1.0, busy_s / max(1e-9, _cpu_s(old, new)))
        watts = declared.idle_watts + max(0.0, declared.peak_watts - declared.idle_watts) * busy_part
        return made(ESTIMATED, watts * lasted_s)
    return made(COMPONENT, 0.0) if gpus_j and not counters else None


def split(energy: IntervalEnergy, parts: Iterable[JobPart], cpus: int, declared: DeclaredPower) -> SplitEnergy:
    """Return the energy by job. `cpus`: of the node."""
    listed = list(parts)
    jobs_j = {part.key: 0.0 for part in listed}
    for index, joules in energy.gpus_j.items():
        held = sum(part.gpus.get(index, 0.0) for part in listed)
        for part in listed:
            jobs_j[part.key] += joules * part.gpus.get(index, 0.0) / max(1.0, held)
    floor_j = min(energy.rest_j, declared.idle_watts * energy.lasted_s)
    allocated = sum(part.cpus for part in listed)
    used_s = sum(part.cpu_s for part in listed)
    busy_s = max(used_s, energy.busy_s or 0.0)
    for part in listed:
        jobs_j[part.key] += floor_j * part.cpus / max(cpus, allocated, 1)
        jobs_j[part.key] += (energy.rest_j - floor_j) * part.cpu_s / busy_s if busy_s > 0 else 0.0
    return SplitEnergy(jobs_j=jobs_j, idle_j=energy.joules - sum(jobs_j.values()))


def _values(sample: NodeSample) -> dict[str, Value]:
    return {column.key: value for column, value in zip(sample.columns, sample.values, strict=True)}


def _gpu_joules(old: Mapping[str, Value], new: Mapping[str, Value], lasted_s: float) -> dict[str, float]:
    """Return the energy of each GPU that is known, by its counter, else by its power."""
    found: dict[str, float] = {}
    for name, value in new.items():
        series, _, index = name.partition(":")
        if series == "gpu_power_watts" and (watts := _mean(old.get(name), value)) is not None:
            found.setdefault(index, watts * lasted_s)
        elif series == "gpu_energy_joules_total" and (joules := _growth(old.get(name), value)) is not None:
            found[index] = joules
    return found


def _busy_s(old: Mapping[str, Value], new: Mapping[str, Value]) -> float | None:
    return _sum(
        [_growth(old.get(name), new[name]) for name in _modes(new) if name.partition(":")[2] not in _IDLE_MODES]
    )


def _cpu_s(old: Mapping[str, Value], new: Mapping[str, Value]) -> float:
    return _sum([_growth(old.get(name), new[name]) for name in _modes(new)]) or 0.0


def _modes(values: Mapping[str, Value]) -> list[str]:
    return [name for name in values if name.startswith("node_cpu_seconds_total:")]


def _growth(before: Value, after: Value) -> float | None:
    return None if before is None or after is None or after < before else float(after - before)


def _mean(before: Value, after: Value) -> float | None:
    return None if before is None or after is None else (before + after) / 2


def _sum(values: Sequence[float | None]) -> float | None:
    """Return the sum, None if there is no value or one of them is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
