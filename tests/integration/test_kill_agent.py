"""An agent is killed under running steps: hrun comes back to the next one, and the steps go on as if nothing had been."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from killable import PATIENCE_S, KillableCluster, new_cluster
from waiting import wait_until

# Each task says that it runs, waits for the gate, says something, and ends with its own exit code.
TASK = """echo $SLURM_PROCID >> {share}/tasks-$HPCSCHED_JOB_ID; echo before $SLURM_PROCID
while [ ! -e {share}/gate ]; do sleep 0.05; done; read word; echo $word $SLURM_PROCID; exit $((SLURM_PROCID * 3))"""
SCRIPT = """{{ while [ ! -e {share}/gate ]; do sleep 0.05; done; echo after; }} |
hrun -N2 --ntasks-per-node=1 --input all sh -c '{task}' > {share}/out-$HPCSCHED_JOB_ID
echo $? > {share}/code-$HPCSCHED_JOB_ID
"""
TWO_NODES = {"nodes_min": 2, "nodes_max": 2, "nodes_given": True, "nodelist": ("n1", "n2")}


@pytest.fixture(scope="module")
def cluster() -> Iterator[KillableCluster]:
    yield from new_cluster(KillableCluster, ("n1", "n2"))


@pytest.mark.parametrize("killed", [("n1",), ("n2",), ("n1", "n2", "controller")])
def test_steps_outlive_their_agents(cluster: KillableCluster, killed: tuple[str, ...]) -> None:
    """The script runs on n1, and has hrun there."""
    share = cluster.share
    (share / "gate").unlink(missing_ok=True)
    (job_id,) = cluster.submit(cluster.spec(SCRIPT.format(share=share, task=TASK.format(share=share)), **TWO_NODES))
    tasks = share / f"tasks-{job_id}"
    wait_until(lambda: tasks.exists() and len(tasks.read_text().split()) == 2, PATIENCE_S, "both tasks")
    for name in killed:
        if name == "controller":
            cluster.kill_controller()
            cluster.up()
        else:
            assert cluster.kill_agent(name)
    (share / "gate").touch()
    wait_until(lambda: cluster.job(job_id).get("state") == "COMPLETED", PATIENCE_S, "the job to end")
    said = (share / f"out-{job_id}").read_text().splitlines()
    assert sorted(said) == ["after 0", "after 1", "before 0", "before 1"]
    assert (share / f"code-{job_id}").read_text() == "3\n"
    assert sorted(tasks.read_text().split()) == ["0", "1"]
    steps = cluster.json("hacct", "--json", "-j", str(job_id))["jobs"][0]["steps"]
    assert [(step["state"], step["exit_code"]) for step in steps if step["step"] == "0"] == [("FAILED", 3)]
    wait_until(lambda: not cluster.leftovers(), PATIENCE_S, "the nodes to be empty")
