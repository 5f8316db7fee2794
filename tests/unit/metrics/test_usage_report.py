"""The figures of hreport and sreport: use, waits and waste of jobs, and what became of the time of nodes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.metrics.usage_report import (
    HeldPart,
    NodeTime,
    Period,
    ReadJobs,
    UsageRow,
    held_parts,
    node_times,
    present_names,
    total_of,
    usage_rows,
    with_first_seen,
)
from hpcsched.model.accounting import GPU, NODE
from hpcsched.model.tariff import EnergyPrices, PriceSteps

Json = dict[str, Any]
DAY = Period(0.0, 86_400.0, 86_400.0)


def held(node: str, since_s: float, until_s: float | None, cpus: int = 1, gpus: float = 0.0) -> Json:
    return {"node": node, "since_s": since_s, "until_s": until_s, "cpus": cpus, "mem_mib": 1024 * cpus, "gpus": gpus}


def attempt(*holdings: Json, number: int = 0, requeued: bool = False, waited_s: float = 0.0) -> Json:
    return {
        "attempt": number, "waited_s": waited_s, "allocated_at_s": holdings[0]["since_s"],
        "ended_at_s": holdings[-1]["until_s"], "requeued": requeued, "holdings": list(holdings),
    }  # fmt: skip


def job(job_id: int, *attempts: Json, user: str = "ann", state: str = "COMPLETED", **fields: Any) -> Json:
    made = {"id": job_id, "user": user, "account": "", "partition": "main", "state": state, "steps": []}
    return made | {"attempts": list(attempts)} | fields


def step(number: int, cpu_s: float | None) -> Json:
    return {"attempt": number, "step": "batch", "cpu_user_s": cpu_s, "cpu_system_s": None if cpu_s is None else 0.0}


def node(name: str, cpus: int = 4, **fields: Any) -> Json:
    return {"name": name, "cpus": cpus, "mem_mib": 8192, "gpus": [], "since_s": None, "formerly": []} | fields


def parts_of(jobs: list[Json]) -> list[HeldPart]:
    return [part for one in jobs for part in held_parts(one)]


def outage(name: str, start_s: float, end_s: float | None, kind: str) -> Json:
    return {"node": name, "start_s": start_s, "end_s": end_s, "kind": kind}


def only(rows: list[UsageRow]) -> UsageRow:
    (row,) = rows
    return row


def test_use_is_what_all_attempts_held_within_the_period() -> None:
    first = attempt(held("n1", 0, 3600, cpus=2), requeued=True)
    second = attempt(held("n2", 7200, None, cpus=2), number=1)
    row = only(usage_rows([job(1, first, second, state="RUNNING")], [Period(1800, 9000, 8000)], ("user",)))
    assert (row.key, row.jobs, row.cpu_s) == (("ann",), {1}, 2 * 1800 + 2 * 800)
    assert (row.requeued_cpu_s, row.mem_mib_s, row.node_s) == (2 * 1800, 2048 * 2600, 2600)


def test_rows_are_by_every_combination_of_dimensions_that_was_used() -> None:
    jobs = [job(1, attempt(held("n1", 0, 100), held("n2", 0, 100))), job(2, attempt(held("n2", 50, 150)), user="ben")]
    months = [Period(0, 100, 1000, "2027-01"), Period(100, 200, 1000, "2027-02")]
    rows = usage_rows(jobs, months, ("month", "user", "node"))
    assert [(*row.key, row.cpu_s) for row in rows] == [
        ("2027-01", "ann", "n1", 100), ("2027-01", "ann", "n2", 100), ("2027-01", "ben", "n2", 50),
        ("2027-02", "ben", "n2", 50),
    ]  # fmt: skip
    assert total_of(rows).jobs == {1, 2}


def test_unused_cpu_time_counts_only_attempts_whose_time_is_known() -> None:
    known = job(1, attempt(held("n1", 0, 100, cpus=4)), steps=[step(0, 100.0)])
    lost = job(2, attempt(held("n1", 0, 100, cpus=4)), steps=[step(0, None)], state="NODE_FAIL")
    live = job(3, attempt(held("n1", 0, None, cpus=1)), state="RUNNING", use={"cpu_s": 50.0})
    row = only(usage_rows([known, lost, live], [Period(0, 200, 100)], ("user",)))
    assert (row.cpu_s, row.measured_cpu_s, row.busy_cpu_s, row.unused_cpu_s) == (900, 500, 150, 350)
    assert row.failed_cpu_s == 400
    assert only(usage_rows([lost], [DAY], ("user",))).unused_cpu_s is None


def test_a_wait_belongs_to_the_period_of_its_start() -> None:
    jobs = [job(n, attempt(held("n1", 100.0 * n, 100.0 * n + 10), waited_s=10.0 * n)) for n in range(1, 11)]
    row = only(usage_rows(jobs, [Period(150, 86_400, 86_400)], ("user",)))
    assert (len(row.waits_s), row.mean_wait_s, row.wait_s(0.5), row.wait_s(0.9), row.wait_s(1.0)) == (
        9,
        60,
        60,
        100,
        100,
    )
    early = only(usage_rows(jobs, [Period(0, 105, 86_400)], ("user",)))
    assert early.waits_s == [10.0]
    assert usage_rows(jobs, [Period(0, 50, 86_400)], ("user",)) == []


def test_a_job_whose_events_do_not_fit_together_is_counted_as_unknown() -> None:
    broken = job(1) | {"attempts": None}
    read = ReadJobs()
    assert usage_rows(read.reading([broken, job(2)]), [DAY], ("user",)) == []
    assert read.unknown == 1


def test_the_cost_is_that_of_cpus_gpus_and_measured_energy() -> None:
    row = UsageRow(key=(), cpu_s=7200, gpu_s=3600, joules=3.6e6, energy_cost=0.3)
    assert row.cost(0.01, 0.5) == pytest.approx(0.02 + 0.5 + 0.3)


def test_energy_has_the_prices_of_the_time_in_which_it_was_used() -> None:
    prices = EnergyPrices(PriceSteps([(0, 0.4), (3600, 0.2)]), PriceSteps([(0, 100)]))
    use = {"job_id": 1, "attempt": 0, "node": "n1", "source": "component", "joules": 4 * 3.6e6}
    one = job(1, attempt(held("n1", 1800, 9000)), energy=[use])
    row = only(usage_rows([one], [DAY], ("user",), prices=prices))
    assert row.energy_cost == pytest.approx(1 * 0.4 + 3 * 0.2)
    assert row.co2_g == pytest.approx(400)
    parts = usage_rows([one], [Period(0, 3600, 9000, "a"), Period(3600, 9000, 9000, "b")], ("month",), prices=prices)
    assert [part.energy_cost for part in parts] == [pytest.approx(0.4), pytest.approx(0.6)]


def test_a_drained_node_is_not_idle_but_what_runs_there_is_allocated() -> None:
    jobs = [job(1, attempt(held("n1", 0, 1000, cpus=3)))]
    drained = [outage("n1", 500, None, "drained")]
    times = node_times(Period(0, 2000, 2000), parts_of(jobs), [node("n1")], drained)["n1"]
    assert times == NodeTime(capacity_s=8000, allocated_s=3000, drained_s=500 + 4000, idle_s=500)


def test_off_comes_before_down_and_down_before_drained() -> None:
    outages = [outage("n1", 0, 100, "drained"), outage("n1", 20, 60, "down"), outage("n1", 50, 70, "off")]
    times = node_times(Period(0, 100, 100), [], [node("n1", 1)], outages)["n1"]
    assert (times.off_s, times.down_s, times.drained_s, times.idle_s) == (20, 30, 50, 0)


def test_a_node_has_no_capacity_before_it_was_added_or_first_seen() -> None:
    nodes = with_first_seen(
        [node("n1", added_at_s=9.0), node("n2"), node("n3", added_at_s=5.0)], {"n1": 7.0, "n2": 8.0}
    )
    assert [found["since_s"] for found in nodes] == [7.0, 8.0, 5.0]
    times = node_times(Period(0, 100, 100), [], [node("n1", 1, since_s=80.0), node("n2", 1)], [])
    assert (times["n1"].capacity_s, times["n2"].capacity_s) == (20, 100)


def test_a_renamed_node_keeps_its_use_and_a_removed_one_has_no_capacity() -> None:
    nodes = [node("new", 2, formerly=["old"])]
    jobs = [job(1, attempt(held("old", 0, 10, cpus=2))), job(2, attempt(held("gone", 0, 10)))]
    assert node_times(DAY, parts_of(jobs), nodes, [])["new"].allocated_s == 20
    rows = usage_rows(jobs, [DAY], ("node",), present_names(nodes))
    assert [(row.key, row.cpu_s) for row in rows] == [(("gone",), 10), (("new",), 20)]


def test_nodes_and_gpus_are_counted_as_resources_of_their_own() -> None:
    jobs = [job(n, attempt(held("n1", 0, 100, gpus=0.5))) for n in (1, 2, 3)]
    nodes = [node("n1", gpus=[{}, {}])]
    assert node_times(Period(0, 100, 100), parts_of(jobs), nodes, [], GPU)["n1"].allocated_s == 150
    assert node_times(Period(0, 100, 100), parts_of(jobs), nodes, [], NODE)["n1"] == NodeTime(
        capacity_s=100, allocated_s=100
    )


TIMES = st.integers(-50, 250).map(float)
SPANS = st.tuples(TIMES, TIMES).map(sorted)
KINDS = st.sampled_from(["off", "down", "drained"])


@given(
    st.lists(st.tuples(SPANS, st.integers(1, 3), st.booleans()), max_size=8),
    st.lists(st.tuples(SPANS, KINDS, st.booleans()), max_size=8),
    st.one_of(st.none(), TIMES),
)
def test_the_parts_of_a_nodes_time_add_up_to_its_capacity(holdings: Any, downs: Any, since_s: float | None) -> None:
    jobs = [job(n, attempt(held("n1", a, None if o else b, cpus=c))) for n, ((a, b), c, o) in enumerate(holdings)]
    outages = [outage("n1", a, None if is_open else b, kind) for (a, b), kind, is_open in downs]
    times = node_times(Period(0, 200, 180), parts_of(jobs), [node("n1", 4, since_s=since_s)], outages)["n1"]
    parts = (times.allocated_s, times.idle_s, times.down_s, times.drained_s, times.off_s)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(times.capacity_s)
    used = total_of(usage_rows(jobs, [Period(0, 200, 180)], ("user",))).cpu_s
    assert times.allocated_s <= used + 1e-6


def test_memory_that_the_largest_step_never_used_is_unused() -> None:
    sizes = [step(0, 5.0) | {"ntasks": 2, "max_rss_kib": 256 * 1024}, step(0, 5.0) | {"ntasks": 1, "max_rss_kib": None}]
    one = job(1, attempt(held("n1", 0, 100)), steps=sizes)
    (row,) = usage_rows([one, job(2, attempt(held("n1", 0, 50)))], [DAY], ("user",))
    assert (row.measured_mem_mib_s, row.unused_mem_mib_s) == (102_400, 51_200)
    assert UsageRow(key=()).unused_mem_mib_s is None


def test_memory_above_what_was_held_wastes_none() -> None:
    one = job(1, attempt(held("n1", 0, 100)), steps=[step(0, 5.0) | {"ntasks": 8, "max_rss_kib": 2**30}])
    (row,) = usage_rows([one], [DAY], ("user",))
    assert row.unused_mem_mib_s == 0


def test_gpus_are_idle_for_the_sampled_time_in_which_they_did_not_compute() -> None:
    one = job(1, attempt(held("n1", 0, 100, gpus=2.0)), gpu_use=[[0, "n1", 100.0, 30.0], [1, "n1", 9.0, 9.0]])
    (row,) = usage_rows([one, job(2, attempt(held("n2", 0, 10, gpus=1.0)))], [DAY], ("user",))
    assert (row.gpu_s, row.measured_gpu_s, row.idle_gpu_s) == (210, 100, 70)
    (half,) = usage_rows([one], [Period(0, 50, 100)], ("user",))
    assert (half.measured_gpu_s, half.idle_gpu_s) == (50, 35)
