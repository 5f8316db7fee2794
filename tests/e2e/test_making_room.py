"""Jobs that are suspended, preempted, and change their size, with real processes on three nodes behind real SSH servers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import QUICK, ssh_server
from waiting import wait_until

from hpcsched.loopback.cluster import LocalCluster

Sub = Callable[..., int]

RULES = """
[accounts.lab]
users = ["*"]
qos = ["night", "patient", "urgent"]
[qos.night]
preempt_mode = "checkpoint"
grace_time_s = 20
[qos.patient]
preempt_mode = "suspend"
[qos.urgent]
preempt = ["night", "patient"]
"""
SAVES = """#!/bin/bash
trap 'echo saved; exit 75' USR1
echo attempt ${SLURM_RESTART_COUNT:-0}
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then exit 0; fi
while :; do sleep 0.05; done
"""
SHRINKS = """#!/bin/bash
trap 'grep -q "wanted\\": \\[\\"" $HPCSCHED_ALLOCATION_FILE && hrun --resize=2 && echo gave' WINCH
echo ready
while [ ! -e finish ]; do sleep 0.05; done
"""

GROWS = """#!/bin/bash
until grep -q 'n[0-9]", "n[0-9]", "n' $HPCSCHED_ALLOCATION_FILE; do sleep 0.05; done 2>/dev/null
hrun -N3 -n3 sh -c 'echo rank $SLURM_PROCID of $SLURM_NNODES'
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        settings = QUICK | {"scheduler": {"preempt_type": "qos"}}
        with LocalCluster(Path(directory), settings=settings, server=ssh_server()) as started:
            path = Path(started.config_dir) / "hpcsched.toml"
            path.write_text(path.read_text() + RULES)
            started.run("hctl", "reconfigure")
            yield started


def whole(*options: str) -> tuple[str, ...]:
    return ("--exclusive", *options)


def test_a_job_makes_room_saves_what_it_has_and_comes_back(
    cluster: LocalCluster, sub: Sub, running: Any, ended: Any, job: Any, output: Any
) -> None:
    low = sub(SAVES, *whole("-N3", "-q", "night", "--signal=B:USR1@60", "--open-mode=append"))
    running(low)
    wait_until(lambda: "attempt" in output(low), what="the script to have set its trap")
    high = sub("true", *whole("-N1", "-q", "urgent"))
    assert ended(high)["state"] == "COMPLETED"
    assert job(low)["preempted_by"] in (high, None)
    assert ended(low)["state"] == "COMPLETED"
    assert output(low).splitlines() == ["attempt 0", "saved", "attempt 1"]
    story = cluster.run("hctl", "story", str(low)).stdout
    assert f"preempted by job {high}" in story
    assert "is reserved for it" in cluster.run("hctl", "story", str(high)).stdout


def test_a_job_stands_still_for_another(cluster: LocalCluster, sub: Sub, running: Any, ended: Any, job: Any) -> None:
    low = sub("while [ ! -e go-on ]; do sleep 0.05; done", "-N3", "-c", _cpus(cluster), "--mem=8M", "-q", "patient")
    running(low)
    high = sub("while [ ! -e done ]; do sleep 0.05; done", "-N1", "-c", _cpus(cluster), "--mem=8M", "-q", "urgent")
    running(high)
    assert (job(low)["state"], job(low)["suspended_for"]) == ("SUSPENDED", high)
    assert "S" in cluster.run("hqueue", "-h", "-j", str(low), "-o", "%t").stdout
    (cluster.share / "go-on").touch()
    (cluster.share / "done").touch()
    assert ended(high)["state"] == "COMPLETED"
    assert ended(low)["state"] == "COMPLETED"
    assert cluster.run("hacct", "-n", "-X", "-j", str(low), "-o", "State,Suspended").stdout.split()[0] == "COMPLETED"


def _cpus(cluster: LocalCluster) -> str:
    return str(cluster.json("hctl", "show", "node", "--json")["nodes"][0]["cpus"])


def test_an_admin_suspends_a_job_and_it_goes_on(cluster: LocalCluster, sub: Sub, running: Any, ended: Any) -> None:
    number = sub("while [ ! -e proceed ]; do sleep 0.05; done", "--time=1")
    running(number)
    cluster.run("hctl", "suspend", str(number))
    assert cluster.run("hqueue", "-h", "-j", str(number), "-o", "%T").stdout.split() == ["SUSPENDED"]
    refused = cluster.run("hctl", "suspend", str(number), check=False)
    assert f"cannot suspend job {number}: it is SUSPENDED" in refused.stderr
    (cluster.share / "proceed").touch()
    cluster.run("hctl", "resume", str(number))
    assert ended(number)["state"] == "COMPLETED"


def test_an_elastic_job_gives_a_node_back(
    cluster: LocalCluster, sub: Sub, running: Any, ended: Any, job: Any, output: Any
) -> None:
    number = sub(SHRINKS, *whole("-N2-3", "--elastic"))
    assert running(number)["num_nodes"] == 3
    wait_until(lambda: "ready" in output(number), what="the script to have set its trap")
    other = sub("true", *whole("-N1"))
    assert ended(other)["state"] == "COMPLETED"
    wait_until(lambda: "gave" in output(number), what="the script to have heard")
    assert job(number)["state"] == "RUNNING"
    shown = cluster.run("hctl", "story", str(number)).stdout
    assert "asked to make do with" in shown
    assert "back" in shown
    (cluster.share / "finish").touch()
    assert ended(number)["state"] == "COMPLETED"


def test_an_elastic_job_gets_idle_nodes_and_runs_steps_on_them(
    cluster: LocalCluster, sub: Sub, running: Any, ended: Any, job: Any, output: Any
) -> None:
    other = sub("while [ ! -e free ]; do sleep 0.05; done", *whole("-N2"))
    running(other)
    number = sub(GROWS, *whole("-N1-3", "--elastic"))
    assert running(number)["num_nodes"] == 1
    (cluster.share / "free").touch()
    found = ended(number)
    assert (found["state"], found["num_nodes"]) == ("COMPLETED", 3)
    assert sorted(output(number).splitlines()) == [f"rank {rank} of 3" for rank in range(3)]
