"""What becomes of jobs when nodes, the disk or the database fail, tick by tick."""

from __future__ import annotations

from world import Cluster

from hpcnode import protocol
from hpcsched.model.job import JobState


def test_a_launch_that_its_node_barred_unasked_is_not_waited_for() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(requeue=True)
    barred = cluster.report(job_id, protocol.BARRED, why="the node was rebooted before it could start")
    cluster.welcome("n1", boot_id="boot-2", inventory=(barred,))
    cluster.tick(60.0)
    assert (cluster.job(job_id).state, cluster.job(job_id).attempt) == (JobState.CONFIGURING, 1)
    (again,) = [launch for _, launch in cluster.sent(protocol.Launch) if launch.attempt == 1]
    assert again.token != barred.token
