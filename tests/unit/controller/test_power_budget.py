"""Power budgets and cheap hours in the controller: submission, the next plan, what is shown, and the alert."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest
from unit.controller.cluster import ANN, ROOT, Cluster
from unit.controller.test_energy_ledger import MeteredNode
from unit.controller.test_respecify import change
from zones import zone_fixture

from hpcsched.alerts.rules import WatchedCluster, of_cluster
from hpcsched.controller.planning import next_time_s
from hpcsched.errors import RequestError
from hpcsched.model.alerting import limits_of
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState
from hpcsched.model.node import Circuit
from hpcsched.model.tariff import Tariff, price_of

NIGHT = Tariff(kwh=price_of({"default": 0.4, "22:00-06:00": 0.2}))


utc = zone_fixture("UTC")


def declared(cluster: Cluster, budget: float) -> None:
    """Let n1 and n2 take 20 W each, and 50 W more for each of their two cpus."""
    for name, known in cluster.state.nodes.items():
        spec = replace(known.spec, idle_watts=20.0, peak_watts=120.0)
        cluster.state.nodes[name] = replace(known, spec=spec)
    set_budget(cluster, budget)


def set_budget(cluster: Cluster, budget: float) -> None:
    cluster.state.config = replace(cluster.state.config, circuits=(Circuit(budget_watts=budget),))


def reason(cluster: Cluster, job_id: int) -> str:
    return str(cluster.state.waits[cluster.job(job_id).id].reason)


def test_a_job_that_would_exceed_the_budget_starts_when_another_has_ended() -> None:
    cluster = Cluster("n1", "n2")
    declared(cluster, 40 + 100)
    first = cluster.submit(cpus_per_task=2)
    second = cluster.submit(cpus_per_task=1)
    assert cluster.job(first).state is JobState.CONFIGURING
    assert (cluster.job(second).state, reason(cluster, second)) == (JobState.PENDING, "PowerNotAvail")
    (shown,) = cluster.backend().partitions(ROOT)["circuits"]
    assert {name: shown[name] for name in ("total_watts", "used_watts", "free_watts", "nodes", "unknown")} == {
        "total_watts": 100, "used_watts": 100, "free_watts": 0, "nodes": "n[1-2]", "unknown": ""
    }  # fmt: skip
    cluster.run(first)
    cluster.end(first)
    cluster.gone(first, "n1")
    assert cluster.job(second).state is JobState.CONFIGURING


def test_a_budget_below_what_runs_ends_no_job_and_starts_none() -> None:
    cluster = Cluster("n1", "n2")
    declared(cluster, 40 + 200)
    first = cluster.submit(cpus_per_task=2)
    set_budget(cluster, 40 + 60)
    second = cluster.submit(cpus_per_task=1)
    cluster.tick()
    assert cluster.job(first).state is JobState.CONFIGURING
    assert reason(cluster, second) == "PowerNotAvail"
    assert cluster.backend().partitions(ROOT)["circuits"][0]["free_watts"] == 0


def test_a_job_waits_until_the_cheap_hours_begin_and_starts_then() -> None:
    cluster = Cluster("n1")
    cluster.state.config = replace(cluster.state.config, cost=NIGHT)
    now_s = datetime(2027, 3, 5, 20).timestamp()
    cluster.tick(now_s - cluster.now_s)
    job = cluster.submit(time_limit_s=3600, cheap_by_s=int(now_s) + 12 * 3600)
    begins_s = now_s + 2 * 3600
    assert reason(cluster, job) == "BeginTime"
    assert cluster.job(job).eligible_at_s is None
    assert next_time_s(cluster.state, cluster.controller.policy, (), now_s) == begins_s
    cluster.tick(begins_s - cluster.now_s - 1)
    assert cluster.job(job).state is JobState.PENDING
    cluster.tick(1.003)
    assert cluster.job(job).state is JobState.CONFIGURING


def test_the_time_of_cheap_by_is_changed_while_the_job_waits() -> None:
    cluster = Cluster("n1")
    cluster.state.config = replace(cluster.state.config, cost=NIGHT)
    now_s = datetime(2027, 3, 5, 20).timestamp()
    cluster.tick(now_s - cluster.now_s)
    running = cluster.submit(time_limit_s=1800, cpus_per_task=2)
    cluster.run(running)
    job = cluster.submit(time_limit_s=3600, cpus_per_task=2)
    assert reason(cluster, job) == "Resources"
    assert change(cluster, job, cheap_by="2027-03-06T06:00") == []
    cluster.tick()
    assert (reason(cluster, job), cluster.state.waits[cluster.job(job).id].expected_start_s) == (
        "BeginTime", now_s + 2 * 3600
    )  # fmt: skip
    assert cluster.replayed(job) == cluster.job(job)
    (wrong,) = change(cluster, job, cheap_by="2027-03-05T20:30")
    assert wrong.startswith("cannot end by --cheap-by")
    assert change(cluster, job, cheap_by="none") == []
    cluster.tick()
    assert reason(cluster, job) == "Resources"
    (late,) = change(cluster, running, cheap_by="2027-03-06T06:00")
    assert late == f"cannot change cheap_by of job {running}: it is RUNNING"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"cheap_by_s": 10_000_000_000}, "give --time"),
        ({"time_limit_s": 3600, "cheap_by_s": 1}, "cannot end by --cheap-by"),
    ],
)
def test_a_time_by_which_a_job_cannot_end_is_refused(fields: dict[str, int], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        Cluster("n1").submit(ANN, **fields)


def test_the_power_of_a_node_is_that_of_its_last_samples() -> None:
    cluster = Cluster("n1")
    declared(cluster, 500)
    meter = MeteredNode(cluster)
    meter.sample()
    meter.work(10.0, other=5.0)
    assert cluster.controller.energy.watts(NodeName("n1"), cluster.now_s) == (pytest.approx(10 + 45), "component")
    (shown,) = cluster.backend().partitions(ROOT)["circuits"]
    assert (shown["measured_watts"], shown["sources"]) == (pytest.approx(55), ["component"])
    assert cluster.controller.energy.watts(NodeName("n1"), cluster.now_s + 600) is None


def test_an_alert_says_that_meters_show_more_than_the_budget() -> None:
    facts = WatchedCluster(circuits=[("", 90.0, 100.0), ("rack1", 120.0, 100.0)])
    (found,) = of_cluster(facts, [], "", limits_of([]))
    assert (found.rule, found.for_s, dict(found.labels)) == ("PowerOverBudget", 300.0, {"circuit": "rack1"})
    assert found.text == "the nodes take 120 W, and the budget is 100 W"
