"""A cluster whose head or node has no room left, or an unwell disk: it says so, loses nothing, and goes on afterwards."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killable import QUICK, KillableCluster
from losing_disk import LosingDisk, why_not
from waiting import wait_until

from hpcsched.loopback.cluster import LoopbackNode

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


class ClusterOnDisk(KillableCluster):
    """The controller's database is on `head_disk`, the agent of n1 on `node_disk`."""

    def __init__(self, base: Path, head_disk: LosingDisk, node_disk: LosingDisk) -> None:
        state = {"state_dir": str(head_disk.path / "state"), "run_dir": str(base / "run")}
        settings = {"controller": QUICK["controller"] | state}
        server = "sshd" if os.environ.get("CI") == "true" else "auto"
        super().__init__(base, names=("n1", "n2"), settings=settings, server=server)
        self.head_disk, self.node_disk = head_disk, node_disk

    def node_values(self, node: LoopbackNode) -> dict[str, object]:
        root = {"root": str(self.node_disk.path / "agent")} if node.name == "n1" else {}
        return super().node_values(node) | root

    def submit_as_user(self, *options: str, script: str = "true") -> int:
        """Submit with hsub; return the job's id."""
        return int(self.run("hsub", "--parsable", "-o", "/dev/null", *options, stdin=f"#!/bin/sh\n{script}\n").stdout)

    def node(self, name: str) -> dict[str, Any]:
        """Return what the controller says of a node."""
        nodes: list[dict[str, Any]] = self.api("GET", "/v1/nodes")["nodes"]
        return next(node for node in nodes if node["name"] == name)

    def state(self, job_id: int) -> str:
        return str(self.job(job_id).get("state"))


@pytest.fixture
def cluster() -> Iterator[ClusterOnDisk]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        base = Path(directory)
        base.chmod(0o755)
        with (
            LosingDisk(base / "head") as head_disk,
            LosingDisk(base / "node") as node_disk,
            ClusterOnDisk(base, head_disk, node_disk) as cluster,
        ):
            yield cluster


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_b9_a_controller_that_cannot_write_refuses_work_and_loses_nothing(cluster: ClusterOnDisk, error: int) -> None:
    gate = cluster.share / "gate"
    script = f"while [ ! -e {gate} ]; do sleep 0.05; done; exit 7"
    running = cluster.submit_as_user(script=script)
    wait_until(lambda: cluster.state(running) == "RUNNING", what="the job to run")
    cluster.head_disk.fail(error)
    refused = cluster.run("hsub", stdin="#!/bin/sh\ntrue\n", check=False)
    assert refused.returncode == 1
    assert "cannot write the database" in refused.stderr
    assert str(running) in cluster.run("hqueue").stdout, "what is known can still be read"
    gate.touch()
    cluster.kill_agent("n2")
    wait_until(lambda: cluster.agent_pid("n2"), what="a new agent on n2")
    assert cluster.state(running) == "RUNNING", "its end cannot be on disk"
    assert cluster.head_disk.heal() > 0
    wait_until(lambda: cluster.state(running) == "FAILED", what="the end of the job to be recorded")
    assert cluster.job(running)["exit_code"] == 7
    cluster.wait_for_nodes()
    after = cluster.submit_as_user("-N2")
    wait_until(lambda: cluster.state(after) == "COMPLETED", what="a new job to end")
    cluster.kill_controller()
    cluster.up()
    assert (cluster.state(running), cluster.state(after)) == ("FAILED", "COMPLETED")


def test_a_node_without_room_starts_nothing_says_why_and_goes_on_afterwards(cluster: ClusterOnDisk) -> None:
    gate = cluster.share / "gate"
    running = cluster.submit_as_user("-w", "n1", script=f"while [ ! -e {gate} ]; do sleep 0.05; done")
    wait_until(lambda: cluster.state(running) == "RUNNING", what="the job to run")
    agent = cluster.agent_pid_at(cluster.node_disk.path / "agent")
    cluster.node_disk.fail(errno.ENOSPC)
    refused = cluster.submit_as_user("-w", "n1")
    wait_until(lambda: cluster.node("n1")["drained"], what="the node to be drained")
    assert "No space left on device" in cluster.node("n1")["drained_why"]
    wait_until(lambda: cluster.state(refused) == "PENDING", what="the job to go back to the queue")
    assert "No space left on device" in cluster.run("hctl", "story", str(refused)).stdout
    gate.touch()
    elsewhere = cluster.submit_as_user("-w", "n2")
    wait_until(lambda: cluster.state(elsewhere) == "COMPLETED", what="another node's job to end")
    assert cluster.agent_pid_at(cluster.node_disk.path / "agent") == agent, "the agent lives"
    assert cluster.node_disk.heal() > 0
    wait_until(lambda: cluster.state(running) == "COMPLETED", what="the end of the job to be told")
    wait_until(lambda: cluster.state(refused) == "COMPLETED", what="the job that waited to end")
    assert not cluster.node("n1")["drained"]


def test_a_node_that_has_no_room_for_the_controllers_term_says_so_and_comes_back(cluster: ClusterOnDisk) -> None:
    cluster.node_disk.fail(errno.ENOSPC)
    cluster.kill_controller()
    cluster.up()
    wait_until(lambda: cluster.node("n1")["link"] == "down", what="the node to be given up")
    assert "No space left on device" in cluster.node("n1")["link_why"]
    cluster.node_disk.heal()
    cluster.wait_for_nodes()
