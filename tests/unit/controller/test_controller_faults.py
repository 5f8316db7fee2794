"""What becomes of jobs when nodes, the disk or the database fail, tick by tick."""

from __future__ import annotations

import pytest
from cluster import Cluster, full_disk

from hpcnode.wire import protocol
from hpcsched.errors import UnavailableError, reported_faults
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState


def test_a_launch_that_its_node_revoked_unasked_is_not_waited_for() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(requeue=True)
    revoked = cluster.report(job_id, protocol.REVOKED, why="the node was rebooted before it could start")
    cluster.welcome("n1", boot_id="boot-2", inventory=(revoked,))
    cluster.tick(60.0)
    assert (cluster.job(job_id).state, cluster.job(job_id).attempt) == (JobState.CONFIGURING, 1)
    (again,) = [launch for _, launch in cluster.sent(protocol.Launch) if launch.attempt == 1]
    assert again.token != revoked.token


def test_what_nodes_say_while_the_disk_is_full_counts_when_it_has_room_again() -> None:
    cluster = Cluster("n1", "n2", up=False)
    cluster.welcome("n1")
    job_id = cluster.submit()
    cluster.run(job_id)
    cluster.sent(protocol.Ack)
    with full_disk(cluster):
        cluster.welcome("n2")
        cluster.end(job_id)
        with pytest.raises(UnavailableError, match="full"):
            cluster.submit()
        assert cluster.state.nodes[NodeName("n2")].boot_id == ""
        assert cluster.job(job_id).state is JobState.RUNNING
        assert cluster.sent(protocol.Ack) == []
        assert cluster.ports.wakes[-1] > 0, "it is tried again without being asked"
    cluster.tick(1.0)
    assert cluster.state.nodes[NodeName("n2")].boot_id == "boot-1"
    assert cluster.job(job_id).state is JobState.COMPLETED
    assert [ack.seqs for _, ack in cluster.sent(protocol.Ack)] == [[1]]
    assert cluster.job(cluster.submit()).state is JobState.CONFIGURING
    assert len(cluster.state.jobs) == 2


def test_an_inventory_with_another_kind_of_message_is_refused_and_no_fault_of_ours() -> None:
    cluster = Cluster("n1", up=False)
    foreign = {"type": "Pong", "request": 1}
    faults = reported_faults()
    cluster.controller.node_up(
        NodeName("n1"),
        protocol.Welcome(
            version=1, node="n1", boot_id="b", agent_version="x", pid=1, epoch=1, inventory=[foreign], facts={}
        ),
        cluster.now_s,
    )
    cluster.tick()
    assert reported_faults() == faults
    assert cluster.state.nodes[NodeName("n1")].boot_id == ""
