"""Suspended jobs: what their nodes are told, again after every crash and connection; their clocks, their end."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import ANN, ROOT, Cluster

from hpcnode.wire import protocol
from hpcsched.api.views import elapsed_s
from hpcsched.controller.recovery import load_state
from hpcsched.controller.requests import jobs
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState


def running(*nodes: str, path: Path | None = None, **fields: object) -> tuple[Cluster, int]:
    cluster = Cluster(*nodes, path=path)
    job_id = cluster.submit(nodes_min=len(nodes), **fields)
    for name in nodes[1:]:
        cluster.says(name, claimed(cluster, job_id, name))
    cluster.run(job_id)
    return cluster, job_id


def claimed(cluster: Cluster, job_id: int, name: str) -> protocol.Report:
    (launch,) = [message for to, message in cluster.sent(protocol.Launch) if to == name]
    return protocol.Report(seq=9, token=launch.token, status=protocol.CLAIMED, at_s=cluster.now_s)


def suspend(cluster: Cluster, job_id: int) -> None:
    assert cluster.ask(lambda tx: jobs.suspend(tx, ROOT, [str(job_id)])).jobs == [job_id]


def resume(cluster: Cluster, job_id: int) -> None:
    assert cluster.ask(lambda tx: jobs.resume(tx, ROOT, [str(job_id)])).jobs == [job_id]


def told(cluster: Cluster) -> list[tuple[str, bool]]:
    return sorted((to, message.on) for to, message in cluster.sent(protocol.SuspendJob))


def test_all_nodes_of_a_job_are_told_now_and_whenever_one_comes_back() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit(nodes_min=2)
    part = claimed(cluster, job_id, "n2")
    cluster.says("n2", part)
    cluster.run(job_id)
    suspend(cluster, job_id)
    assert (cluster.job(job_id).state, told(cluster)) == (JobState.SUSPENDED, [("n1", True), ("n2", True)])
    cluster.welcome("n2", inventory=(part,))
    assert told(cluster) == [("n2", True)]
    resume(cluster, job_id)
    assert told(cluster) == [("n1", False), ("n2", False)]
    cluster.welcome("n1", inventory=(cluster.report(job_id, protocol.STARTED),))
    assert told(cluster) == [("n1", False)]


def test_a_job_that_was_never_suspended_is_not_told_to_go_on() -> None:
    cluster, job_id = running("n1")
    cluster.welcome("n1", inventory=(cluster.report(job_id, protocol.STARTED),))
    assert told(cluster) == []


def test_the_time_suspended_counts_against_no_limit_and_is_not_charged() -> None:
    cluster, job_id = running("n1", time_limit_s=100)
    cluster.tick(after_s=50)
    suspend(cluster, job_id)
    cluster.tick(after_s=1000)
    assert (cluster.job(job_id).state, elapsed_s(cluster.job(job_id), cluster.now_s)) == (JobState.SUSPENDED, 50)
    resume(cluster, job_id)
    cluster.tick(after_s=49)
    assert cluster.job(job_id).state is JobState.RUNNING
    cluster.tick(after_s=60)  # the slack for its node to end it by itself has passed as well
    assert cluster.job(job_id).outcome is JobState.TIMEOUT
    cluster.gone(job_id, "n1")
    cpus = cluster.job(job_id).shares[0].cpus
    assert cluster.job(job_id).charged_cpu_s == (50 + 49 + 60) * cpus


def test_it_stays_suspended_when_the_controller_is_another_one(tmp_path: Path) -> None:
    cluster, job_id = running("n1", path=tmp_path / "db")
    cluster.tick(after_s=10)
    suspend(cluster, job_id)
    cluster.store.close()
    again = Cluster("n1", path=tmp_path / "db", up=False)
    again.now_s = cluster.now_s + 1000
    load_state(again.state, again.store, again.now_s)
    assert again.job(job_id) == cluster.job(job_id)
    again.welcome("n1", inventory=(again.report(job_id, protocol.STARTED),))
    assert (told(again), elapsed_s(again.job(job_id), again.now_s)) == ([("n1", True)], 10)
    resume(again, job_id)
    again.end(job_id)
    assert again.job(job_id).state is JobState.COMPLETED


def test_a_suspended_job_is_cancelled_as_any_other() -> None:
    cluster, job_id = running("n1")
    suspend(cluster, job_id)
    cluster.ask(lambda tx: jobs.cancel(tx, ANN, [str(job_id)], {}))
    assert cluster.job(job_id).state is JobState.COMPLETING
    assert [to for to, _ in cluster.sent(protocol.EndJob)] == ["n1"]
    cluster.gone(job_id, "n1")
    assert cluster.job(job_id).state is JobState.CANCELLED


def test_a_suspended_job_whose_node_has_no_record_of_it_is_lost() -> None:
    cluster, job_id = running("n1")
    suspend(cluster, job_id)
    cluster.controller.node_down(NodeName("n1"), "gone")
    cluster.welcome("n1")
    assert cluster.job(job_id).state is JobState.PENDING


@pytest.mark.parametrize("state", ["waiting", "suspended", "running"])
def test_what_cannot_be_is_refused(state: str) -> None:
    cluster, job_id = running("n1")
    waiting = cluster.submit(ntasks=2)
    if state == "suspended":
        suspend(cluster, job_id)
    number = str(waiting if state == "waiting" else job_id)
    work = jobs.resume if state == "running" else jobs.suspend
    outcome = cluster.ask(lambda tx: work(tx, ROOT, [number]))
    assert f"job {number}: it is {cluster.job(int(number)).state}" in outcome.errors[0]["error"]


def test_only_admins_suspend_and_resume() -> None:
    cluster, job_id = running("n1")
    refused = cluster.ask(lambda tx: jobs.suspend(tx, ANN, [str(job_id)]))
    assert "this needs the role operator or admin" in refused.errors[0]["error"]
    suspend(cluster, job_id)
    refused = cluster.ask(lambda tx: jobs.resume(tx, ANN, [str(job_id)]))
    assert "this needs the role operator or admin" in refused.errors[0]["error"]
