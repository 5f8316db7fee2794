"""What the attempts of a job held of each node, from its events: what reports count, and who may see it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import ANN, BOB, ROOT, Cluster
from jobs import T0

from hpcnode.wire import protocol
from hpcsched.auth.authorize import HIDEABLE, Action, Identity
from hpcsched.controller import preemption
from hpcsched.controller.requests import jobs
from hpcsched.lifecycle.attempts import Attempt, Holding, attempts_of, ordinary_attempts
from hpcsched.lifecycle.events import Submitted
from hpcsched.model.ids import NodeName


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster("n1", "n2", path=tmp_path / "hpcsched.db")


def attempts(cluster: Cluster, job_id: int) -> tuple[Attempt, ...]:
    found = cluster.store.attempts([cluster.job(job_id)])[job_id]
    assert found is not None
    events = [event for event in cluster.store.load_events(job_id) if not isinstance(event, Submitted)]
    assert found == attempts_of(cluster.job(job_id), events)  # however it was found
    assert found == cluster.store.attempts(cluster.store.counted_jobs([job_id]))[job_id]
    return found


def held(holding: Holding, begun_s: float) -> tuple[str, float, float | None, int]:
    until_s = None if holding.until_s is None else holding.until_s - begun_s
    return holding.node, holding.since_s - begun_s, until_s, holding.cpus


def cpu_s(found: tuple[Attempt, ...]) -> float:
    return sum(one.cpus * ((one.until_s or 0.0) - one.since_s) for attempt in found for one in attempt.holdings)


def test_each_attempt_of_a_requeued_job_has_its_own_holdings(cluster: Cluster) -> None:
    job_id = cluster.submit(requeue=True)
    begun_s = cluster.now_s
    cluster.run(job_id)
    cluster.tick(100.0)
    cluster.ask(lambda tx: jobs.requeue(tx, ROOT, [str(job_id)]))
    cluster.gone(job_id, "n1")
    cluster.tick(50.0)
    cluster.run(job_id)
    cluster.tick(20.0)
    cluster.end(job_id)
    first, second = attempts(cluster, job_id)
    assert [(one.number, one.is_requeued) for one in (first, second)] == [(0, True), (1, False)]
    assert [held(one, begun_s) for one in first.holdings] == [("n1", 0.0, 100.0, 1)]
    assert second.holdings[0].until_s == cluster.now_s
    assert cpu_s((first, second)) == cluster.job(job_id).charged_cpu_s == 120.0


def test_suspended_time_is_not_held(cluster: Cluster) -> None:
    job_id = cluster.submit()
    begun_s = cluster.now_s
    cluster.run(job_id)
    cluster.tick(10.0)
    cluster.ask(lambda tx: jobs.suspend(tx, ROOT, [str(job_id)]))
    cluster.tick(1000.0)
    assert attempts(cluster, job_id)[0].holdings[-1].until_s == begun_s + 10.0
    cluster.ask(lambda tx: jobs.resume(tx, ROOT, [str(job_id)]))
    cluster.tick(5.0)
    (found,) = attempts(cluster, job_id)
    assert [held(one, begun_s) for one in found.holdings] == [("n1", 0.0, 10.0, 1), ("n1", 1010.0, None, 1)]
    cluster.end(job_id)
    assert cpu_s(attempts(cluster, job_id)) == cluster.job(job_id).charged_cpu_s == 15.0


def test_a_job_that_shrinks_held_a_node_until_that_was_clear(cluster: Cluster) -> None:
    job_id = cluster.submit(nodes_min=2, cpus_per_task=2)
    begun_s = cluster.now_s
    for to, launch in cluster.sent(protocol.Launch):
        cluster.says(to, protocol.Report(seq=9, token=launch.token, status=protocol.CLAIMED, at_s=cluster.now_s))
    cluster.run(job_id)
    cluster.tick(30.0)
    cluster.ask(lambda tx: preemption.shrink(tx, cluster.job(job_id), 1, ANN.uid))
    cluster.tick(7.0)
    cluster.gone(job_id, "n2")
    cluster.tick(3.0)
    cluster.end(job_id)
    (found,) = attempts(cluster, job_id)
    assert [held(one, begun_s) for one in found.holdings] == [("n1", 0.0, 40.0, 2), ("n2", 0.0, 37.0, 2)]
    assert cpu_s((found,)) == cluster.job(job_id).charged_cpu_s


def test_an_attempt_knows_how_long_it_waited(cluster: Cluster) -> None:
    first = cluster.submit(nodes_min=2, cpus_per_task=2)
    (launch,) = [message for to, message in cluster.sent(protocol.Launch) if to == "n2"]
    cluster.says("n2", protocol.Report(seq=9, token=launch.token, status=protocol.CLAIMED, at_s=cluster.now_s))
    cluster.run(first)
    second = cluster.submit(BOB)
    cluster.tick(60.0)
    cluster.end(first)
    cluster.gone(first, "n2")
    assert (attempts(cluster, first)[0].waited_s, attempts(cluster, second)[0].waited_s) == (0.0, 60.0)


def history(cluster: Cluster, identity: Identity, **query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(asyncio.run(cluster.backend().history(identity, query)))["jobs"]
    return found


def test_the_history_has_attempts_on_request(cluster: Cluster) -> None:
    job_id = cluster.submit()
    cluster.run(job_id)
    (plain,), (asked,) = history(cluster, ANN), history(cluster, ANN, attempts="1")
    assert "attempts" not in plain
    (attempt,) = asked["attempts"]
    assert attempt["holdings"][0] == {
        "node": "n1", "since_s": cluster.job(job_id).allocated_at_s, "until_s": None, "cpus": 1,
        "mem_mib": cluster.job(job_id).shares[0].mem_mib, "gpus": 0.0,
    }  # fmt: skip


def test_a4_hidden_usage_hides_attempts_of_others(cluster: Cluster) -> None:
    cluster.submit(ANN)
    cluster.submit(BOB)
    bob = replace(BOB, hidden=frozenset({HIDEABLE["usage"]}))
    assert len(history(cluster, bob)) == 2
    assert [job["user"] for job in history(cluster, bob, attempts="1")] == ["bob"]
    assert len(history(cluster, replace(ROOT, hidden=frozenset({Action.VIEW_USAGE})), attempts="1")) == 2


def outages(cluster: Cluster, **query: str) -> list[tuple[str, float, float | None, str]]:
    asked = {"start_s": str(T0), "end_s": str(T0 + 1e6), **query}
    found = asyncio.run(cluster.backend().outages(ROOT, asked))["outages"]
    ends = [None if one["end_s"] is None else one["end_s"] - T0 for one in found]
    return [(one["node"], one["start_s"] - T0, end, one["kind"]) for one, end in zip(found, ends, strict=True)]


def test_drains_are_outages_of_their_own_kind(cluster: Cluster) -> None:
    cluster.tick(100 - (cluster.now_s - T0))
    cluster.ask(lambda tx: jobs.drain(tx, ROOT, "n1", "heat", "root"))
    cluster.tick(50)
    cluster.ask(lambda tx: jobs.drain(tx, ROOT, "n1", "heat, and noise", "root"))
    cluster.controller.node_down(NodeName("n1"), "no answer")
    cluster.tick()
    cluster.tick(50)
    cluster.welcome("n1")
    cluster.tick(50)
    cluster.ask(lambda tx: jobs.resume_nodes(tx, ROOT, "n1", ""))
    assert outages(cluster) == [("n1", 150, 200, "down")]
    assert outages(cluster, kinds="drained") == [("n1", 100, 250, "drained")]
    assert outages(cluster, kinds="down,drained,off") == [("n1", 150, 200, "down"), ("n1", 100, 250, "drained")]


def test_an_ordinary_job_is_told_from_its_kinds_of_events_alone(cluster: Cluster) -> None:
    waits, job_id = cluster.submit(), cluster.submit()
    for late_s in (0.0, 7.0):  # the end may be reported late
        one = cluster.submit(cpus_per_task=2)
        cluster.run(one)
        cluster.tick(30.0)
        report = cluster.report(one, protocol.ENDED, codes=[0], ran_s=30.0, ago_s=late_s)
        cluster.says(cluster.job(one).shares[0].node, report)
        course = [(type(event).__name__, event.at_s) for event in cluster.store.load_events(one)][1:]
        assert ordinary_attempts(cluster.job(one), course) == attempts(cluster, one)
        assert cpu_s(attempts(cluster, one)) == cluster.job(one).charged_cpu_s
    course = [(type(event).__name__, event.at_s) for event in cluster.store.load_events(waits)][1:]
    assert ordinary_attempts(cluster.job(waits), course) is None
    cluster.run(job_id)
    course = [(type(event).__name__, event.at_s) for event in cluster.store.load_events(job_id)][1:]
    assert ordinary_attempts(cluster.job(job_id), course) is None
