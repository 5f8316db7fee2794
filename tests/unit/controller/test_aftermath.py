"""What people are shown of attempts that are over, of jobs queued again, of signals and of nodes that are not well."""

from __future__ import annotations

import asyncio
import json

import pytest
from cluster import ANN, ROOT, Cluster
from jobs import T0, node

from hpcnode.wire import protocol
from hpcsched.api.views import node_state, why_waiting
from hpcsched.controller.nodes.messages import claim_token
from hpcsched.controller.requests import jobs
from hpcsched.errors import RequestError
from hpcsched.lifecycle.events import NodeLost
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState, Reason
from hpcsched.model.node import Link, NodeState
from hpcsched.state.transaction import StepRecord


def _step(job_id: int) -> StepRecord:
    return StepRecord(
        job_id=job_id, attempt=0, step="0", name="work", nodes=("n1",), ntasks=1, state="RUNNING", started_at_s=T0
    )


def _states(cluster: Cluster, job_id: int) -> dict[tuple[int, str], str]:
    return {(step.attempt, step.step): step.state for step in cluster.store.load_steps([job_id])}


def test_the_steps_of_a_lost_attempt_ended_with_it() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(requeue=True)
    cluster.run(job_id)
    cluster.ask(lambda tx: tx.put_step(_step(job_id)))
    cluster.tick(10.0)
    cluster.ask(lambda tx: jobs.lose_node(tx, tx.cluster.jobs[job_id], NodeName("n1"), "it was rebooted"))
    assert (cluster.job(job_id).state, cluster.job(job_id).attempt) == (JobState.PENDING, 1)
    assert _states(cluster, job_id) == {(0, "batch"): "NODE_FAIL", (0, "0"): "NODE_FAIL"}
    assert {step.ended_at_s for step in cluster.store.load_steps([job_id])} == {cluster.now_s}


def test_the_steps_of_the_attempt_that_runs_are_left_alone() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit(requeue=True)
    cluster.run(job_id)
    other = cluster.submit()
    cluster.run(other)
    cluster.ask(lambda tx: tx.record(NodeLost(job_id=job_id, at_s=tx.now_s, node="n1", why="x", requeue=False)))
    assert cluster.job(job_id).state is JobState.NODE_FAIL
    assert _states(cluster, other) == {(0, "batch"): "RUNNING"}


def test_a_job_that_was_queued_again_says_why_and_from_when_it_may_start() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(requeue=True)
    cluster.run(job_id)
    cluster.ask(lambda tx: jobs.requeue(tx, ANN, [str(job_id)]))
    cluster.gone(job_id, "n1")
    cluster.tick()
    reason, detail, from_s = why_waiting(cluster.job(job_id), cluster.state, ROOT, cluster.now_s)
    assert (reason, from_s) == (Reason.BEGIN_TIME, cluster.job(job_id).not_before_s)
    assert detail.startswith("was queued again after its attempt 0 (requeued by ann), and may start from ")


def test_a_signal_goes_to_steps_on_all_nodes_and_to_the_script_alone_on_request() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit(nodes_min=2)
    token = claim_token(cluster.job(job_id), NodeName("n2"))
    cluster.says("n2", protocol.Report(seq=1, token=token, status=protocol.CLAIMED, at_s=cluster.now_s))
    cluster.run(job_id)
    batch_token = cluster.job(job_id).token
    there = ("n2", protocol.SignalStep(token=token, signum=10, steps=True))
    for batch, full, expected in (
        (False, False, [("n1", protocol.SignalStep(token=batch_token, signum=10, steps=True)), there]),
        (True, False, [("n1", protocol.SignalStep(token=batch_token, signum=10, batch_only=True))]),
        (True, True, [("n1", protocol.SignalStep(token=batch_token, signum=10, full=True)), there]),
    ):
        done = cluster.ask(lambda tx, batch=batch, full=full: jobs.signal(tx, ROOT, [str(job_id)], {}, 10, batch, full))
        cluster.controller.send_signals(done.signals)
        assert cluster.sent(protocol.SignalStep) == expected
    assert token != batch_token


def test_signal_9_ends_a_job_unless_it_is_for_the_script_alone() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit()
    cluster.run(job_id)
    done = cluster.ask(lambda tx: jobs.signal(tx, ROOT, [str(job_id)], {}, 9, True, False))
    assert [sent.batch_only for sent in done.signals] == [True]
    done = cluster.ask(lambda tx: jobs.signal(tx, ROOT, [str(job_id)], {}, 9, False, False))
    assert not done.signals
    assert cluster.job(job_id).outcome is JobState.CANCELLED


def test_a_user_that_nobody_knows_is_refused_and_one_with_jobs_is_not() -> None:
    cluster = Cluster("n1")
    cluster.submit()  # of ann, who need not have an account here
    backend = cluster.backend()
    assert len(json.loads(asyncio.run(backend.jobs(ROOT, {"user": "ann,root"})))["jobs"]) == 1
    with pytest.raises(RequestError, match="Invalid user: nosuch"):
        asyncio.run(backend.jobs(ROOT, {"user": "root,nosuch"}))


def test_a_drained_node_is_drained_although_it_is_down_as_well() -> None:
    assert node_state(node(link=Link.DOWN, drained=True), 0) is NodeState.DRAINED
    assert node_state(node(link=Link.DOWN), 0) is NodeState.DOWN
