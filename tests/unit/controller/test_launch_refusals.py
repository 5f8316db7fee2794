"""A job that a node cannot start is tried on others; a node that could not start jobs which others could is drained."""

from __future__ import annotations

import pytest
from cluster import ANN, BOB, ROOT, Cluster
from jobs import node

from hpcnode.wire import protocol
from hpcsched.api.views import node_views, why_waiting
from hpcsched.auth.authorize import Identity
from hpcsched.controller.nodes.loss import LAUNCH_TRIES
from hpcsched.controller.nodes.messages import claim_token
from hpcsched.controller.recovery import node_of
from hpcsched.controller.requests import jobs
from hpcsched.health import Status, check_node
from hpcsched.lifecycle.node import LAUNCH_FAILURES
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState, Reason
from hpcsched.model.node import Link

WHY = "cannot enter the job's directory /home/ann/jobs: No such file or directory"


def refuse(cluster: Cluster, job_id: int, why: str = WHY) -> str:
    """Have the node that the job was sent to refuse it; return the node's name."""
    node = cluster.job(job_id).shares[0].node
    cluster.says(node, cluster.report(job_id, protocol.REFUSED, why=why))
    return str(node)


def not_executed(cluster: Cluster, job_id: int) -> str:
    node = cluster.job(job_id).shares[0].node
    cluster.run(job_id)
    why = "cannot execute script: No such file or directory: its interpreter /opt/py is not on this node"
    cluster.says(node, cluster.report(job_id, protocol.ENDED, codes=[2], signals=[0], unexecuted=True, why=why))
    return str(node)


def test_a_job_that_a_node_cannot_start_is_sent_to_another_one() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit()
    first = refuse(cluster, job_id)
    job = cluster.job(job_id)
    assert job.state is JobState.CONFIGURING
    assert job.shares[0].node not in (first, "")
    assert job.attempt == 1
    cluster.run(job_id)
    cluster.end(job_id)
    assert cluster.job(job_id).state is JobState.COMPLETED
    assert cluster.replayed(job_id) == cluster.job(job_id)


def test_a_job_that_no_node_can_start_fails_with_what_each_of_them_said() -> None:
    cluster = Cluster("n1", "n2", "n3")
    job_id = cluster.submit()
    refuse(cluster, job_id)
    refuse(cluster, job_id)
    last = refuse(cluster, job_id, why="there is no user ann here")
    job = cluster.job(job_id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.LAUNCH_FAILED)
    others = ", ".join(one.node for one in job.refusals[:2])
    assert job.reason_detail == f"on {others}: {WHY}; on {last}: there is no user ann here"
    assert not any(node.drained for node in cluster.state.nodes.values())
    assert cluster.replayed(job_id) == job


def test_the_tries_are_bounded() -> None:
    cluster = Cluster(*(f"n{i}" for i in range(12)))
    job_id = cluster.submit()
    for _ in range(LAUNCH_TRIES):
        assert cluster.job(job_id).state is JobState.CONFIGURING
        refuse(cluster, job_id)
    assert cluster.job(job_id).state is JobState.FAILED
    assert len(cluster.job(job_id).refusals) == LAUNCH_TRIES


def test_a_job_that_may_run_on_that_node_alone_fails_at_once() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit(nodelist=(NodeName("n2"),))
    refuse(cluster, job_id)
    assert cluster.job(job_id).state is JobState.FAILED
    assert cluster.job(job_id).reason_detail == WHY


def test_nodes_that_take_no_jobs_now_are_not_waited_for() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit()
    other = "n2" if cluster.job(job_id).shares[0].node == "n1" else "n1"
    cluster.controller.node_down(NodeName(other), "no route")
    cluster.tick()
    refuse(cluster, job_id)
    assert cluster.state.nodes[NodeName(other)].link is Link.DOWN
    assert cluster.job(job_id).state is JobState.FAILED


def test_a_job_that_waits_for_another_node_says_which_one_could_not_start_it() -> None:
    cluster = Cluster("n1", "n2")
    blocker = cluster.submit(cpus_per_task=2)
    cluster.run(blocker)
    job_id = cluster.submit()
    name = refuse(cluster, job_id)
    assert cluster.job(job_id).state is JobState.PENDING
    _, why, _ = why_waiting(cluster.job(job_id), cluster.state, ANN, cluster.now_s)
    assert f"it could not be started on {name}: {WHY}" in why
    _, why, _ = why_waiting(cluster.job(job_id), cluster.state, BOB, cluster.now_s)
    assert "/home/ann" not in why


def test_a_job_whose_interpreter_a_node_misses_runs_on_another_one() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit()
    first = not_executed(cluster, job_id)
    assert cluster.job(job_id).shares[0].node != first
    second = not_executed(cluster, job_id)
    job = cluster.job(job_id)
    assert (job.state, job.reason, str(job.exit)) == (JobState.FAILED, Reason.LAUNCH_FAILED, "2:0")
    assert {first, second} == {"n1", "n2"}
    assert not any(node.launch_failures for node in cluster.state.nodes.values())  # the script is the cause


def start_elsewhere(cluster: Cluster, identity: Identity, bad: str = "n1") -> None:
    """Have a job refused by `bad`, if it is sent there, and run on another node."""
    job_id = cluster.submit(identity)
    if cluster.job(job_id).shares[0].node == bad:
        refuse(cluster, job_id)
    cluster.run(job_id)
    cluster.end(job_id)


@pytest.mark.parametrize("askers", [(ROOT, ROOT, ROOT), (ANN, ANN, ROOT), (ANN, BOB, ANN)])
def test_a_node_that_could_not_start_three_jobs_in_a_row_is_drained(askers: tuple[Identity, ...]) -> None:
    cluster = Cluster("n1", "n2")
    for identity in askers:
        assert not cluster.state.nodes[NodeName("n1")].drained
        start_elsewhere(cluster, identity)
    first = cluster.state.nodes[NodeName("n1")]
    assert first.drained
    said = "cannot enter the job's directory ...: No such file or directory"
    assert first.drained_why == f"3 jobs in a row (the last: 3) could not be started here, and could elsewhere: {said}"
    cluster.ask(lambda tx: jobs.resume_nodes(tx, ROOT, "n1", ""))
    assert not cluster.state.nodes[NodeName("n1")].drained
    assert not cluster.state.nodes[NodeName("n1")].launch_failures


def test_such_a_drain_outlives_word_of_the_node_that_it_is_well() -> None:
    cluster = Cluster("n1", "n2")
    for _ in range(3):
        start_elsewhere(cluster, ROOT)
    cluster.welcome("n1")
    assert cluster.state.nodes[NodeName("n1")].drained


def test_one_user_cannot_drain_a_node() -> None:
    cluster = Cluster("n1", "n2")
    for _ in range(6):
        start_elsewhere(cluster, ANN)
    first = cluster.state.nodes[NodeName("n1")]
    assert not first.drained
    assert len(first.launch_failures) == LAUNCH_FAILURES
    view = next(view for view in node_views(cluster.state, cluster.now_s) if view["name"] == "n1")
    (check,) = [check for check in check_node(view, cluster.now_s) if check.name == "launches"]
    assert check.status is Status.WARN
    said = "cannot enter the job's directory ...: No such file or directory"  # its path is ann's alone
    assert check.text == f"the last 3 jobs could not be started here, and could elsewhere: {said}"


def test_jobs_that_start_nowhere_drain_no_node() -> None:
    cluster = Cluster("n1", "n2", "n3")
    for _ in range(5):
        job_id = cluster.submit(ROOT)
        while cluster.job(job_id).state is JobState.CONFIGURING:
            refuse(cluster, job_id)
    assert not any(node.drained or node.launch_failures for node in cluster.state.nodes.values())


def test_a_job_that_starts_ends_the_row() -> None:
    cluster = Cluster("n1", "n2")
    start_elsewhere(cluster, ROOT)
    start_elsewhere(cluster, ROOT)
    job_id = cluster.submit(ROOT, nodelist=(NodeName("n1"),))
    cluster.run(job_id)
    cluster.end(job_id)
    start_elsewhere(cluster, ROOT)
    first = cluster.state.nodes[NodeName("n1")]
    assert not first.drained
    assert len(first.launch_failures) == 1


def test_the_row_outlives_the_controller() -> None:
    cluster = Cluster("n1", "n2")
    start_elsewhere(cluster, ROOT)
    start_elsewhere(cluster, ROOT)
    before = cluster.state.nodes[NodeName("n1")].launch_failures
    assert len(before) == 2
    assert node_of(node("n1"), cluster.store.load_nodes()["n1"]).launch_failures == before


def test_a_job_that_is_cancelled_on_its_way_to_another_node_stays_cancelled() -> None:
    cluster = Cluster("n1", "n2", "n3")
    job_id = cluster.submit(nodes_min=2, nodes_max=2)
    job = cluster.job(job_id)
    claims = [name for name in job.held_nodes if name != job.shares[0].node]
    for name in claims:
        token = protocol.Report(seq=1, token="", status=protocol.CLAIMED, at_s=cluster.now_s)
        cluster.says(name, protocol.changed(token, token=claim_token(job, NodeName(name))))
    refuse(cluster, job_id)
    assert cluster.job(job_id).state is JobState.COMPLETING
    cluster.ask(lambda tx: jobs.cancel(tx, ANN, [str(job_id)], {}))
    for name in cluster.job(job_id).held_nodes:
        cluster.gone(job_id, name)
    assert cluster.job(job_id).state is JobState.CANCELLED


def test_the_story_says_where_a_job_could_not_be_started() -> None:
    cluster = Cluster("n1", "n2", "n3")
    job_id = cluster.submit()
    first = refuse(cluster, job_id)
    second = not_executed(cluster, job_id)
    told = [event["text"] for event in cluster.backend().story(ANN, str(job_id))["events"]]
    assert f"{first} could not start it: {WHY}; it is tried on another node" in told
    assert any(text.startswith(f"{second} could not execute its script: cannot execute script") for text in told)
