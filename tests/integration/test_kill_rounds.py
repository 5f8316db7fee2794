"""Agents, shepherds, nodes and the controller are killed while jobs flow: nothing is lost, doubled or left behind."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator

import pytest
from agent_client import fill_done_log
from kill_rounds import kill_rounds
from killable import PATIENCE_S, KillableCluster, new_cluster
from waiting import wait_until

from hpcsched.loopback.cluster import LoopbackNode
from hpcsched.model.job import FINAL

# Where the agent or the shepherd dies, and what becomes of the job: its state, and the attempt that came to it.
ONCE, AGAIN, REFUSED = ("COMPLETED", 0), ("COMPLETED", 1), ("FAILED", 0)
NODE_POINTS = {
    "epoch.before": ONCE,
    "epoch.after": ONCE,
    "claim.before": ONCE,
    "claim.made": ONCE,
    "claim.written": ONCE,
    "fork.before": ONCE,
    "fork.after": ONCE,
    "shepherd.begun": REFUSED,  # each of its shepherds dies there
    "tasks.forked": REFUSED,
    "started.before": REFUSED,
    "started.after": AGAIN,  # recorded as released, though it was not: this attempt must not run any more
    "released": AGAIN,
    "tasks.over": AGAIN,
    "final.before": AGAIN,
    "final.after": ONCE,
    "forget.before": ONCE,
    "done.turned": ONCE,
    "forget.noted": ONCE,
    "forget.after": ONCE,
}
# The events that bring a job to its next attempt.
AGAIN_BY = {"NodeLost", "NodeSilent", "Requeued", "EndRequested"}
NAMES = ("n1", "n2", "n3")

pytestmark = pytest.mark.timeout(1800)

# The node's Python: what the next agent and its shepherds are told of crash points, one time only.
PYTHON = """\
#!/bin/sh
if mv {at} {at}.used 2>/dev/null; then HPCNODE_CRASH_AT=$(cat {at}.used); export HPCNODE_CRASH_AT; fi
exec {python} "$@"
"""


class CrashingCluster(KillableCluster):
    """Its nodes' agents and shepherds can be told where to die."""

    def node_values(self, node: LoopbackNode) -> dict[str, object]:
        python = node.root / "python"
        python.write_text(PYTHON.format(at=node.root / "crash-at", python=sys.executable))
        python.chmod(0o755)
        return super().node_values(node) | {"python": str(python)}

    def crash_next_agent(self, node: str, point: str) -> None:
        """End the node's agent and shepherds, and have the next agent, or a shepherd of it, die at `point`."""
        assert self.machines is not None
        (self.machines.nodes[node].root / "crash-at").write_text(point)
        self.kill_agent(node)
        wait_until(lambda: self.agent_pid(node) is None and not self.shepherds(node), PATIENCE_S, "the node to be idle")
        (self.agent_root(node) / "log").unlink(missing_ok=True)
        if point == "done.turned":
            fill_done_log(self.agent_root(node))

    def has_crashed(self, node: str, point: str) -> bool:
        """Return whether somebody on the node has died at `point`."""
        log = self.agent_root(node) / "log"
        said = log.read_text() if log.exists() else ""
        return f"dying at {point.partition(':')[0]}," in said


@pytest.fixture(scope="module")
def cluster() -> Iterator[CrashingCluster]:
    yield from new_cluster(CrashingCluster, NAMES)


def explained(cluster: KillableCluster) -> None:
    """Check that the commands tell what became of the jobs."""
    acct = {job["id"]: job for job in cluster.json("hacct", "--json", "-S", "2020-01-01")["jobs"]}
    for job_id in cluster.accepted.ids:
        assert acct[job_id]["state"] in FINAL
    worst = [job for job in acct.values() if job["attempt"] or job["state"] != "COMPLETED"][:3]
    for job in worst or list(acct.values())[:1]:
        story = cluster.json("hctl", "story", "--json", job["display_id"])["events"]
        assert story[0]["kind"] == "Submitted"
        assert not job["attempt"] or AGAIN_BY & {event["kind"] for event in story}, story
    assert cluster.run("hqueue").returncode == 0


def test_nothing_is_lost_doubled_or_left_behind_whatever_is_killed_whenever(cluster: KillableCluster) -> None:
    killed = kill_rounds(cluster, 15, random.Random(20))
    assert {"controller", "agent", "shepherd"} <= set(killed)
    assert cluster.violations() == []
    wait_until(lambda: not cluster.leftovers(), PATIENCE_S, "the nodes to be empty")
    explained(cluster)


def test_an_agent_or_shepherd_that_dies_at_any_step_loses_and_doubles_nothing(cluster: CrashingCluster) -> None:
    for batch in range(0, len(NODE_POINTS), len(NAMES)):
        points = dict(zip(NAMES, list(NODE_POINTS)[batch : batch + len(NAMES)], strict=False))
        since_s = time.time()
        cluster.kill_controller()
        for node, point in points.items():
            cluster.crash_next_agent(node, point)
        cluster.up()
        jobs = {node: cluster.submit(cluster.one_task(0.1, nodelist=(node,)))[0] for node in points}
        for node, point in points.items():
            wait_until(
                lambda node=node, point=point: cluster.has_crashed(node, point), PATIENCE_S, f"a death at {point}"
            )
            cluster.note_kill("shepherd", node, since_s)
            if NODE_POINTS[point] == AGAIN:
                cluster.kill_agent(node)  # or the next shepherd would die there as well
        cluster.wait_until_ended(PATIENCE_S, str(points))
        for node, point in points.items():
            job = cluster.job(jobs[node])
            state, attempt = NODE_POINTS[point]
            assert (point, job["state"]) == (point, state)
            assert job["attempt"] == attempt or job["attempt"] > attempt == 1
    assert cluster.violations() == []
    wait_until(lambda: not cluster.leftovers(), PATIENCE_S, "the nodes to be empty")
