"""The energy of a node from its meters, and the parts of it that jobs caused. All meters are simulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.metrics.energy import (
    COMPONENT,
    ESTIMATED,
    MEASURED,
    DeclaredPower,
    IntervalEnergy,
    JobPart,
    interval_energy,
    node_energy,
    split,
)
from hpcsched.metrics.series import SAMPLED, NodeSample, read_column
from hpcsched.metrics.usage_report import Period
from hpcsched.model.ids import NodeName

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


# ----- the energy between two samples, and its parts


def sample(at_s: float, boot_id: str = "boot", **columns: float | None) -> NodeSample:
    """Return a sample; in names of columns, __ is a colon."""
    keys = {name.replace("__", ":"): value for name, value in columns.items()}
    read = [read_column(key, SAMPLED) for key in keys]
    assert None not in read
    return NodeSample(
        node=NodeName("n1"), boot_id=boot_id, received_at_s=at_s, columns=tuple(filter(None, read)),
        values=tuple(keys.values()), jobs=(),
    )  # fmt: skip


NOTHING = DeclaredPower()


def test_an_interval_is_the_growth_of_the_counters_and_of_processor_time() -> None:
    before = sample(0, node_energy_joules_total__a=100, gpu_energy_joules_total__0=50, node_cpu_seconds_total__user=5)
    after = sample(10, node_energy_joules_total__a=400, gpu_energy_joules_total__0=90, node_cpu_seconds_total__user=9)
    found = interval_energy(before, after, NOTHING)
    assert found is not None
    assert (found.source, found.rest_j, found.gpus_j, found.busy_s, found.joules) == (COMPONENT, 300, {"0": 40}, 4, 340)


def test_a_counter_that_was_reset_makes_an_interval_unknown() -> None:
    before, after = (sample(at, node_energy_joules_total__a=value) for at, value in ((0, 100), (10, 7)))
    assert interval_energy(before, after, NOTHING) is None
    again = sample(10, "other", node_energy_joules_total__a=200)
    assert interval_energy(before, again, NOTHING) is None
    assert interval_energy(before, replace(before, received_at_s=1e6), NOTHING) is None


def test_a_machine_without_meters_is_estimated_only_if_its_power_is_declared() -> None:
    modes = ("user", "idle")
    before = sample(0, **{f"node_cpu_seconds_total__{mode}": 0.0 for mode in modes})
    after = sample(10, node_cpu_seconds_total__user=10.0, node_cpu_seconds_total__idle=30.0)
    assert interval_energy(before, after, NOTHING) is None
    found = interval_energy(before, after, DeclaredPower(idle_watts=20, peak_watts=100))
    assert found is not None
    assert (found.source, found.joules) == (ESTIMATED, 10 * (20 + 80 / 4))


def test_a_busy_job_is_not_charged_to_the_others_on_its_node() -> None:
    energy = IntervalEnergy(source=COMPONENT, lasted_s=10, rest_j=1000, gpus_j={"0": 500, "1": 70}, busy_s=50)
    hot = JobPart(key=(1, 0), cpu_s=40, cpus=4, gpus={"0": 0.5})
    cool = JobPart(key=(2, 0), cpu_s=0, cpus=4, gpus={"0": 0.25})
    found = split(energy, [hot, cool], 8, DeclaredPower(idle_watts=20))
    assert found.jobs_j == {(1, 0): 250 + 100 + 800 * 40 / 50, (2, 0): 125 + 100}
    assert found.idle_j == 125 + 70 + 800 * 10 / 50


JOULES = st.floats(0, 1e9)
SECONDS = st.floats(0, 1e5)
PARTS = st.lists(
    st.tuples(SECONDS, st.integers(0, 128), st.dictionaries(st.sampled_from("0123"), st.floats(0, 1))), max_size=6
)


@given(
    JOULES, st.dictionaries(st.sampled_from("0123"), JOULES), st.none() | SECONDS, PARTS, st.integers(1, 256), SECONDS
)
def test_jobs_and_idle_add_up_to_the_meter(
    rest_j: float, gpus_j: dict[str, float], busy_s: float | None, parts: Any, cpus: int, idle_watts: float
) -> None:
    energy = IntervalEnergy(source=MEASURED, lasted_s=10, rest_j=rest_j, gpus_j=gpus_j, busy_s=busy_s)
    jobs = [JobPart(key=(n, 0), cpu_s=s, cpus=c, gpus=g) for n, (s, c, g) in enumerate(parts)]
    found = split(energy, jobs, cpus, DeclaredPower(idle_watts=idle_watts))
    assert sum(found.jobs_j.values()) + found.idle_j == pytest.approx(energy.joules, rel=1e-9, abs=1e-6)
    assert found.idle_j >= -1e-6 * max(1.0, energy.joules)
    assert all(joules >= 0 for joules in found.jobs_j.values())
