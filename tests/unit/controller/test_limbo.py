"""A job whose node does not answer: what `hctl story` and `hwhy` say of it now, and what will become of it when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cluster import ROOT, Cluster

from hpcnode.wire import protocol
from hpcsched.controller.requests import jobs
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import JobState


def silent(cluster: Cluster, node: str = "n1") -> None:
    cluster.controller.node_down(NodeName(node), "cable")
    cluster.tick()


def now(cluster: Cluster, job_id: JobId) -> str:
    text: str = cluster.backend().story(ROOT, str(job_id))["now"]
    return text


@pytest.mark.parametrize(
    ("options", "fate"),
    [
        (
            {"requeue": True},
            "It goes back to the queue when the node has been rebooted, or an admin says that it is gone",
        ),
        ({"requeue": False}, "It ends as NODE_FAIL when the node has been rebooted, or an admin says that it is gone"),
        (
            {"requeue": True, "lease": "kill"},
            "when the node has been rebooted, in 157 s when the job's lease there has run out",
        ),
    ],
)
def test_the_story_of_a_job_in_limbo_ends_with_what_it_waits_for(options: dict[str, Any], fate: str) -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(**options)
    cluster.run(job_id)
    assert now(cluster, job_id) == f"job {job_id} is RUNNING"
    silent(cluster)
    assert now(cluster, job_id).startswith(
        "node n1 does not answer (cable); the job may still run there, and continues when"
    )
    assert fate in now(cluster, job_id)
    assert now(cluster, job_id).endswith("hctl fence n1")


@pytest.mark.parametrize("by", ["cancel", "requeue"])
def test_a_job_that_is_being_ended_on_a_silent_node_says_what_it_will_be(by: str) -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit()
    cluster.run(job_id)
    silent(cluster)
    if by == "cancel":
        cluster.ask(lambda tx: jobs.cancel(tx, ROOT, [str(job_id)], {}))
    else:
        cluster.ask(lambda tx: jobs.requeue(tx, ROOT, [str(job_id)]))
    assert cluster.job(job_id).state is JobState.COMPLETING
    fate = "ends as CANCELLED" if by == "cancel" else "goes back to the queue"
    assert f"something of the job may still run there. The job {fate} when the node answers" in now(cluster, job_id)


def test_an_ending_job_says_where_it_may_have_processes_and_what_hinders_the_node() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(requeue=True)
    cluster.run(job_id)
    cluster.ask(lambda tx: jobs.cancel(tx, ROOT, [str(job_id)], {}))
    ends = f"job {job_id} ends as CANCELLED (cancelled by root) when nothing of it is left on n1"
    assert now(cluster, job_id) == ends
    cluster.says("n1", protocol.Condition(why="No space left on device"))
    assert now(cluster, job_id) == f"{ends}; node n1: No space left on device"


def test_the_story_of_a_cancelled_job_that_is_lost_does_not_say_that_it_runs_again() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(requeue=True)
    cluster.run(job_id)
    cluster.ask(lambda tx: jobs.cancel(tx, ROOT, [str(job_id)], {}))
    cluster.says("n1", cluster.report(job_id, protocol.LOST, why="its shepherd was killed"))
    story = cluster.backend().story(ROOT, str(job_id))
    assert story["now"] == f"job {job_id} is CANCELLED"
    (lost,) = [event["text"] for event in story["events"] if event["kind"] == "NodeLost"]
    assert lost == "lost on n1: node n1 lost the job: its shepherd was killed"


def test_an_elastic_job_goes_on_without_the_node() -> None:
    cluster = Cluster("n1", "n2", "n3")
    job_id = cluster.submit(nodes_min=2, nodes_max=3, elastic=True)
    cluster.run(job_id)
    silent(cluster, "n3")
    assert "It continues without the node when the node has been rebooted" in now(cluster, job_id)


def test_the_story_of_a_job_that_is_over_ends_with_how_it_ended() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit()
    cluster.run(job_id)
    cluster.end(job_id)
    assert now(cluster, job_id) == "job 1 is COMPLETED"


def test_a_job_that_lost_its_node_says_so_while_it_waits_to_begin_again() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit()
    cluster.run(job_id)
    silent(cluster)
    cluster.ask(lambda tx: jobs.fence(tx, ROOT, "n1", "it burnt"))
    cluster.tick()
    answer = asyncio.run(cluster.backend().why(ROOT, str(job_id)))
    assert answer["lines"][0].startswith(
        "BeginTime: was queued again after its attempt 0 (node n1 was fenced by root: it burnt)"
    )
