"""The energy of a node in a period, from the history of its meters. Every figure names its source.

Pure. `measured`: a meter of the whole machine. `component`: the counters of processors (RAPL) and GPUs (NVML), without the rest
of the machine. Nothing is estimated here: a node without meters has no figure, nor has the time without samples.

Sources: Linux Documentation/power/powercap ("psys" is the platform, with its packages), Documentation/hwmon/acpi_power_meter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcsched.metrics.usage_report import Period

Json = dict[str, Any]

MEASURED, COMPONENT = "measured", "component"
SERIES = ("node_energy_joules_total", "node_power_watts", "gpu_energy_joules_total", "gpu_power_watts")
WHOLE_MACHINE = "power_meter"  # the hwmon chip of a machine's own meter
PLATFORM = "psys"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnergy:
    """What a node used. `covered_s`: the time for which it is known."""

    joules: float
    source: str  # MEASURED or COMPONENT
    covered_s: float


def node_energy(answer: Json, period: Period) -> NodeEnergy | None:
    """Return the energy of a node in the period, None if nothing was measured.

    `answer`: of `/v1/metrics/history` for `SERIES`, with a step that divides the period finely.
    """
    watts: dict[str, list[Sequence[float | None]]] = {}
    for one in answer["series"]:
        watts.setdefault(_meter_of(one), []).append(one["values"])
    source = MEASURED if "whole" in watts else COMPONENT
    chosen = _chosen(watts)
    joules = covered_s = 0.0
    for step in range(answer["count"]):
        values = [series[step] for series in chosen]
        known = [value for value in values if value is not None]
        begin_s = answer["from_s"] + step * answer["step_s"]
        lasted_s = period.overlap_s(begin_s, begin_s + answer["step_s"])
        if known and len(known) == len(values):  # a sum without one of its meters would be too low
            joules += sum(known) * lasted_s
            covered_s += lasted_s
    return NodeEnergy(joules=joules, source=source, covered_s=covered_s) if covered_s else None


def _meter_of(series: Json) -> str:
    """Return what a series measures: the whole machine, the platform, a package or a GPU; "": nothing that counts."""
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
