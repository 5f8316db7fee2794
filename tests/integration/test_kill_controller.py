"""The controller dies before and after each commit and each send: nothing is lost, doubled or left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest
from killable import PATIENCE_S, Flow, KillableCluster, new_cluster
from waiting import wait_until

from hpcsched.model.job import FINAL

NAMES = ("n1", "n2", "n3")
# Kinds of events and messages that jobs on one node and on two lead to, with some that are cancelled or queued again.
EVENTS = ("Submitted", "Allocated", "Claimed", "Started", "Exited", "EndRequested", "NodeCleared", "Requeued")
MESSAGES = ("Launch", "Go", "Ack", "EndJob")

pytestmark = pytest.mark.timeout(1800)


class Provoking:
    """What else must happen for a controller to come to a point. Each does it once more, and leaves all as it was."""

    def __init__(self, cluster: KillableCluster, rng: random.Random) -> None:
        self._cluster, self._rng, self._round = cluster, rng, 0

    def shepherd_killed(self) -> None:
        """A node says that its record of a job is all that is left of it."""
        self._cluster.kill_shepherd(self._rng.choice(NAMES), self._rng)

    def launch_refused(self) -> None:
        """A job that its node cannot start, however often."""
        self._cluster.accepted.failing += self._cluster.submit(
            self._cluster.one_task(0, stdout="/proc/no/such/directory/out")
        )

    def suspended(self) -> None:
        """A job is suspended, and goes on."""
        (job_id,) = self._cluster.submit(self._cluster.one_task(0.3))
        wait_until(lambda: self._cluster.job(job_id).get("state") in ("RUNNING", *FINAL), PATIENCE_S, "the job to run")
        for verb in ("suspend", "resume"):
            self._cluster.ask(f"/v1/{verb}", {"jobs": [str(job_id)]})

    def failed_beside_silent_node(self) -> None:
        """A script fails while another node of its job does not answer."""
        cluster, gate = self._cluster, self._cluster.share / f"gate-{self._round}"
        self._round += 1
        script = f"while [ ! -e {gate} ]; do sleep 0.05; done; exit 1\n"
        nodes = {"nodelist": NAMES[:2], "nodes_min": 2, "nodes_max": 2, "nodes_given": True}
        (job_id,) = cluster.submit(cluster.spec(script, requeue=False, **nodes))
        cluster.accepted.failing.append(job_id)
        wait_until(lambda: cluster.ran()[(job_id, 0)], PATIENCE_S, f"job {job_id} to run")
        assert cluster.machines is not None
        off_s = time.time()
        cluster.machines.power_off(NAMES[1])
        gate.touch()
        wait_until(
            lambda: f"while node {NAMES[1]} did not answer" in cluster.job(job_id).get("reason_detail", ""),
            PATIENCE_S,
            f"the silence of {NAMES[1]} to be blamed for the end of job {job_id}",
        )
        cluster.machines.power_on(NAMES[1])
        cluster.note_kill("power", NAMES[1], off_s)  # a job that was given the node meanwhile was hit as well


PROVOKED: dict[str, tuple[Callable[[Provoking], None], tuple[str, ...], tuple[str, ...]]] = {
    "a killed shepherd": (Provoking.shepherd_killed, ("NodeLost",), ()),
    "a refused launch": (Provoking.launch_refused, ("LaunchRefused",), ()),
    "a suspended job": (Provoking.suspended, ("Suspended", "Resumed"), ("SuspendJob",)),
    "a silent node": (Provoking.failed_beside_silent_node, ("NodeSilent",), ()),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[KillableCluster]:
    yield from new_cluster(KillableCluster, NAMES)


def points(events: tuple[str, ...], messages: tuple[str, ...]) -> list[str]:
    """Return the crash points of `hpcsched.controller.daemon` at these events and messages."""
    commits = [f"commit.{side}.{kind}" for kind in events for side in ("before", "after")]
    return commits + [f"{how}.{kind}" for kind in messages for how in ("queued", "sent")]


def die_at_each(cluster: KillableCluster, flow: Flow, names: list[str]) -> None:
    """Kill a controller at each point, one after the other, and start one that lives."""
    for point in names:
        cluster.kill_controller()
        cluster.start_controller(point)
        wait_until(lambda: flow.check() or cluster.controller_died(), PATIENCE_S, f"the controller to die at {point}")
    cluster.up()


def check(cluster: KillableCluster) -> None:
    cluster.wait_until_ended(PATIENCE_S)
    assert cluster.violations() == []
    wait_until(lambda: not cluster.leftovers(), PATIENCE_S, "the nodes to be empty")


def test_g1_a_controller_that_dies_at_any_step_loses_and_doubles_nothing(cluster: KillableCluster) -> None:
    with Flow(cluster, random.Random(7)) as flow:
        die_at_each(cluster, flow, points(EVENTS, MESSAGES))
    check(cluster)


@pytest.mark.parametrize("fault", PROVOKED)
def test_a_controller_that_dies_while_something_else_fails_loses_and_doubles_nothing(
    cluster: KillableCluster, fault: str
) -> None:
    provoke, events, messages = PROVOKED[fault]
    provoking = Provoking(cluster, random.Random(8))
    with Flow(cluster, random.Random(7)) as flow:
        flow.also = lambda: provoke(provoking)
        die_at_each(cluster, flow, points(events, messages))
    cluster.wait_for_nodes(PATIENCE_S)
    check(cluster)
