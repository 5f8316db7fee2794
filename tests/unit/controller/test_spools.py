"""The inventory of another spool proves nothing about jobs: its agent is not listened to while they are held."""

from __future__ import annotations

from typing import Any

import pytest
from cluster import ROOT, Cluster

from hpcnode.wire import protocol
from hpcsched.controller.nodes.edits import spool_of
from hpcsched.controller.recovery import load_state
from hpcsched.controller.requests import jobs
from hpcsched.lifecycle.events import share_from_data, share_to_data
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job, JobState
from hpcsched.model.node import Link, Share

N1 = NodeName("n1")


def facts(spool: str = "a", machine: str = "m", *, inode: int = 1, mac: str = "mac") -> dict[str, Any]:
    """Return what an agent says of its spool."""
    said = {"id": spool, "machine": machine, "inode": inode, "hardware": [mac] if mac else []}
    return {"spool": said}


def running(**where: Any) -> tuple[Cluster, int]:
    """Return a cluster whose node n1 runs a job in the spool that `facts` makes of `where`."""
    cluster = Cluster("n1", up=False)
    assert cluster.welcome("n1", facts=facts(**where)) == ""
    job_id = cluster.submit(requeue=True)
    cluster.tick()
    cluster.run(job_id)
    return cluster, job_id


def lead_elsewhere(cluster: Cluster, **where: Any) -> str:
    """Have the connection end, and an agent answer at another place."""
    boot_id = where.pop("boot_id", "boot-1")
    cluster.controller.node_down(N1, "lost")
    cluster.tick()
    return cluster.welcome("n1", boot_id=boot_id, facts=facts(**where))


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"spool": "b"},  # the cluster was renamed, or the directory moved
        {"spool": "b", "machine": "m2", "mac": "mac2", "boot_id": "boot-2"},  # another machine
        {"machine": "m2", "mac": "mac2", "boot_id": "boot-2"},  # a network file system: both see the same directory
        {"inode": 2},  # a copy of the directory
        {"spool": "b", "mac": "mac2", "boot_id": "boot-2"},  # a machine that was copied from the same image
        {"spool": "b", "mac": "", "boot_id": "boot-2"},  # nothing but /etc/machine-id says which machine it is
    ],
)
def test_another_spool_is_not_listened_to_while_a_job_is_held(elsewhere: dict[str, Any]) -> None:
    cluster, job_id = running()
    sent = len(cluster.ports.sent)
    why = lead_elsewhere(cluster, **elsewhere)
    assert f"holds job {job_id}" in why
    job = cluster.job(job_id)
    assert (job.state, job.attempt, job.held_nodes) == (JobState.RUNNING, 0, (N1,))
    assert len(cluster.ports.sent) == sent
    assert cluster.state.nodes[N1].link is Link.DOWN
    assert lead_elsewhere(cluster) == ""  # the same one again: its word is proof
    assert cluster.job(job_id).state is JobState.PENDING


def test_the_same_spool_is_proof_after_a_restart_of_the_controller_too() -> None:
    cluster, job_id = running()
    load_state(cluster.state, cluster.store, cluster.now_s)
    cluster.state.spools.clear()
    assert lead_elsewhere(cluster, spool="b") != ""
    assert lead_elsewhere(cluster) == ""
    assert cluster.job(job_id).state is JobState.PENDING
    assert cluster.replayed(job_id) == cluster.job(job_id)


def test_a_reboot_of_the_same_machine_is_proof_although_its_spool_is_gone() -> None:
    cluster, job_id = running()
    assert lead_elsewhere(cluster, spool="b", boot_id="boot-2") == ""
    assert cluster.job(job_id).state is JobState.PENDING
    assert "was rebooted, and has another spool" in cluster.job(job_id).reason_detail


def test_a_job_that_ran_in_a_later_boot_is_not_lost_with_the_spool() -> None:
    cluster, job_id = running()
    started = cluster.report(job_id, protocol.STARTED)
    cluster.controller.node_down(N1, "lost")
    cluster.tick()
    assert cluster.welcome("n1", boot_id="boot-2", facts=facts(), inventory=(started,)) == ""
    assert lead_elsewhere(cluster, spool="b", boot_id="boot-2") != ""
    assert cluster.job(job_id).state is JobState.RUNNING


def test_a_fence_is_the_way_out() -> None:
    cluster, job_id = running()
    assert lead_elsewhere(cluster, spool="b") != ""
    cluster.ask(lambda tx: jobs.fence(tx, ROOT, "n1", "replaced"))
    assert cluster.job(job_id).state is JobState.PENDING
    assert lead_elsewhere(cluster, spool="b") == ""


def test_nothing_is_launched_while_it_is_not_known_where_the_name_leads() -> None:
    cluster = Cluster("n1", up=False)
    cluster.welcome("n1", facts=facts())
    cluster.controller.disconnected(N1)  # as after an edit of its address: the word that it is down comes later
    job_id = cluster.submit()
    cluster.tick()
    assert cluster.job(job_id).state is JobState.PENDING
    cluster.welcome("n1", facts=facts(spool="b"))
    cluster.tick(1.0)
    assert cluster.job(job_id).spool_on(N1) == cluster.state.nodes[N1].spool


@pytest.mark.parametrize("said", [None, [], "x", {}, {"id": ""}, {"id": {"a": [1]}, "machine": 3, "hardware": {}}])
def test_whatever_an_agent_says_of_its_spool_is_taken_as_text(said: object) -> None:
    welcome = protocol.Welcome(
        version=1, node="n1", boot_id="b", agent_version="x", pid=1, epoch=1, inventory=[], facts={"spool": said}
    )
    spool = spool_of(welcome)
    assert isinstance(spool.id, str)
    assert len(spool.id) in (0, 32)


@pytest.mark.parametrize("fields", [{}, {"shards": 1, "shards_of": 2}, {"component": 1}])
def test_a_share_is_stored_with_its_spool(fields: dict[str, Any]) -> None:
    for spool in ("", "abc"):
        share = Share(node=N1, cpus=1, mem_mib=1, spool=spool, **fields)
        assert share_from_data(share_to_data(share)) == share


def test_the_spool_is_on_the_jobs_row() -> None:
    cluster, job_id = running()
    (row,) = cluster.store.jobs([job_id])
    assert isinstance(row, Job)
    assert row.spool_on(N1) == cluster.state.nodes[N1].spool
