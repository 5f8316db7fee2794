"""The energy of a node from its meters: which of them count, and for which time it is known. All meters are simulated."""

from __future__ import annotations

from typing import Any

from hpcsched.metrics.energy import COMPONENT, MEASURED, node_energy
from hpcsched.metrics.usage_report import Period

HOUR = Period(0.0, 3600.0, 3600.0)


def series(name: str, label: str, *values: float | None) -> dict[str, Any]:
    kind = {"node_energy_joules_total": "domain", "node_power_watts": "sensor"}.get(name, "gpu")
    return {"name": name, "labels": {kind: label}, "values": list(values)}


def answer(*found: dict[str, Any], step_s: float = 1800.0) -> dict[str, Any]:
    return {"from_s": 0.0, "step_s": step_s, "count": len(found[0]["values"]) if found else 2, "series": list(found)}


def test_packages_and_gpus_add_up_and_are_called_components() -> None:
    packages = (series("node_energy_joules_total", f"package-{n}", 50.0, 70.0) for n in (0, 1))
    gpu = series("gpu_energy_joules_total", "0", 100.0, 200.0)
    same_gpu = series("gpu_power_watts", "0", 101.0, 202.0)
    found = node_energy(answer(*packages, gpu, same_gpu), HOUR)
    assert found is not None
    assert (found.joules, found.source, found.covered_s) == (200 * 1800 + 340 * 1800, COMPONENT, 3600)


def test_the_platforms_counter_has_its_packages_in_it() -> None:
    found = node_energy(
        answer(series("node_energy_joules_total", "psys", 90.0), series("node_energy_joules_total", "package-0", 50.0)),
        HOUR,
    )
    assert found is not None
    assert found.joules == 90 * 1800


def test_a_meter_of_the_whole_machine_comes_before_all_components() -> None:
    meter, chip = (series("node_power_watts", label, 300.0) for label in ("power_meter/power1", "amdgpu/PPT"))
    found = node_energy(answer(meter, chip, series("node_energy_joules_total", "package-0", 50.0)), HOUR)
    assert found is not None
    assert (found.joules, found.source) == (300 * 1800, MEASURED)


def test_time_in_which_one_of_the_meters_is_silent_is_not_known() -> None:
    both = answer(
        series("node_energy_joules_total", "package-0", 50.0, 50.0), series("gpu_power_watts", "0", None, 100.0)
    )
    found = node_energy(both, HOUR)
    assert found is not None
    assert (found.joules, found.covered_s) == (150 * 1800, 1800)


def test_a_sensor_of_a_part_is_no_meter_and_nothing_is_estimated() -> None:
    assert node_energy(answer(series("node_power_watts", "amdgpu/PPT", 40.0, 40.0)), HOUR) is None
    assert node_energy(answer(), HOUR) is None


def test_steps_count_as_far_as_they_are_in_the_period() -> None:
    found = node_energy(answer(series("node_energy_joules_total", "package-0", 10.0, 10.0)), Period(900, 3600, 2700))
    assert found is not None
    assert (found.joules, found.covered_s) == (10 * 1800, 1800)
