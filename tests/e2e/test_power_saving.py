"""A node is switched off when it is idle, and on when a job needs it. Its power supply is simulated.

The simulated power supply of a loopback node ends all its processes (SSH server and agent), and starts its SSH server again. The
programs that switch it ask a simulated management board, which is this test.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster

pytestmark = pytest.mark.timeout(400)
CONTROLLER = {"requeue_delay_s": 0, "kill_wait_s": 1, "heartbeat_s": 0.5, "node_down_after_s": 2}
POWER = {"suspend_after": 1, "min_on": 1, "suspend_timeout": 3, "resume_timeout": 120}


class Board:
    """The management board of the nodes: does what programs have asked for, and remembers it."""

    def __init__(self, base: Path) -> None:
        self.asked = base / "board"
        self.asked.mkdir()
        self.asked.chmod(0o777)
        self.done: list[str] = []
        self.cluster: LocalCluster | None = None
        for word in ("off", "on"):
            program = base / word
            program.write_text(f"#!/bin/sh\ntouch {self.asked}/{word}.${{1:-n1}}\n")
            program.chmod(0o755)

    def act(self) -> None:
        """Switch the nodes that programs have asked for."""
        assert self.cluster is not None
        assert self.cluster.machines is not None
        for path in sorted(self.asked.iterdir()):
            word, _, name = path.name.partition(".")
            path.unlink()
            switch = self.cluster.machines.power_off if word == "off" else self.cluster.machines.power_on
            switch(name)
            self.done.append(path.name)

    def until(self, cond: Callable[[], Any], what: str) -> None:
        """Wait until `cond`, and switch nodes meanwhile."""
        wait_until(lambda: self.act() or cond(), what=what)  # type: ignore[func-returns-value]


@pytest.fixture(params=["by its agent", "by a program on the head"])
def board(request: pytest.FixtureRequest) -> Iterator[Board]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        base = Path(directory)
        base.chmod(0o755)
        board = Board(base)
        by = (
            {"suspend_command": str(base / "off")}
            if "agent" in request.param
            else {"suspend_program": str(base / "off")}
        )
        settings = {"controller": CONTROLLER, "power": POWER | by | {"resume_program": str(base / "on")}}
        with LocalCluster(base, names=("n1",), settings=settings) as cluster:
            board.cluster = cluster
            yield board


def state(cluster: LocalCluster) -> str:
    return str(cluster.api("GET", "/v1/nodes")["nodes"][0]["state"])


def test_an_idle_node_is_switched_off_and_on_again_for_a_job(board: Board) -> None:
    cluster = board.cluster
    assert cluster is not None
    board.until(lambda: state(cluster) == "POWERED_DOWN", "the node to be switched off")
    assert board.done == ["off.n1"]
    assert cluster.run("hinfo", "-h", "-o", "%t").stdout.split() == ["idle~"]
    assert cluster.run("hhealth", check=False).stdout.count("switched off by hpcschedd/power") == 1

    script = f"#!/bin/sh\nhostname > {cluster.share}/ran\n"
    job_id = int(cluster.run("hsub", "--parsable", stdin=script).stdout)
    wait_until(lambda: state(cluster) == "POWERING_UP", what="the order to switch it on")
    assert "waits for n1 to come back" in cluster.run("hwhy", str(job_id)).stdout
    assert cluster.run("hinfo", "-h", "-o", "%t").stdout.strip().endswith("#")
    cluster.down()  # a controller that is started again continues
    cluster.up()
    done = cluster.share / "ran"
    board.until(lambda: done.exists() and done.read_text(), "the job to run")
    assert board.done[:2] == ["off.n1", "on.n1"]
    job = cluster.api("GET", f"/v1/job/{job_id}")["jobs"][0]
    assert job["restarts"] == 0
    records = cluster.api("GET", "/v1/audit?limit=200")["records"]
    assert {"PowerDownOrdered", "PowerUpOrdered"} <= {record["action"] for record in records}
    board.until(lambda: state(cluster) == "POWERED_DOWN", "the node to be switched off again")
