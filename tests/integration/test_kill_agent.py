"""An agent is killed under a running step: hrun cannot go on, and what it had started ends with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from killable import PATIENCE_S, KillableCluster, new_cluster
from waiting import wait_until

LONG = "hrun -N2 --ntasks-per-node=1 sh -c 'echo $SLURM_PROCID >> {share}/tasks-$HPCSCHED_JOB_ID; sleep 3600'"
TWO_NODES = {"nodes_min": 2, "nodes_max": 2, "nodes_given": True, "nodelist": ("n1", "n2")}


@pytest.fixture
def cluster() -> Iterator[KillableCluster]:
    yield from new_cluster(KillableCluster, ("n1", "n2"))


def test_what_hrun_had_started_ends_with_it_when_its_agent_is_killed(cluster: KillableCluster) -> None:
    gate = cluster.share / "gate"
    hrun = LONG.format(share=cluster.share)
    (at_once,) = cluster.submit(cluster.spec(f"{hrun}; exit 4\n", **TWO_NODES))
    (goes_on,) = cluster.submit(cluster.spec(f"{hrun}; while [ ! -e {gate} ]; do sleep 0.05; done\n", **TWO_NODES))
    for job_id in (at_once, goes_on):
        tasks = cluster.share / f"tasks-{job_id}"
        wait_until(lambda tasks=tasks: tasks.exists() and len(tasks.read_text().split()) == 2, PATIENCE_S, "both tasks")
    assert cluster.kill_agent("n1")
    wait_until(lambda: cluster.job(at_once).get("state") == "FAILED", PATIENCE_S, "the job whose script ended to end")
    assert cluster.job(at_once)["exit_code"] == 4

    def step() -> str:
        steps = cluster.json("hacct", "--json", "-j", str(goes_on))["jobs"][0]["steps"]
        return next(step["state"] for step in steps if step["step"] == "0")

    wait_until(lambda: step() == "CANCELLED", PATIENCE_S, "the step to end")
    assert cluster.job(goes_on)["state"] == "RUNNING"
    gate.touch()
    wait_until(lambda: cluster.job(goes_on).get("state") == "COMPLETED", PATIENCE_S, "the other job to end")
    wait_until(lambda: not cluster.leftovers(), PATIENCE_S, "the nodes to be empty")
