"""What the controller does with a failed prolog or epilog, and with what a hostile node says of its scripts."""

from __future__ import annotations

from typing import Any

import pytest
from cluster import ROOT, Cluster

from hpcnode.wire import protocol
from hpcsched.controller.requests import jobs
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState
from hpcsched.model.node import JOB_SCRIPTS, MAX_WHY

N1 = NodeName("n1")


def test_a_prolog_that_failed_drains_the_node_and_the_job_starts_elsewhere() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit(requeue=False)
    node = cluster.job(job_id).shares[0].node
    cluster.says(node, protocol.ScriptFailed(seq=7, job_id=job_id, why="prolog p ended with status 1: no scratch"))
    cluster.says(node, cluster.report(job_id, protocol.REFUSED, why="prolog p ended with status 1", node_fault=True))
    cluster.says(node, protocol.Condition(""))
    cluster.tick(60.0)
    drained = cluster.state.nodes[node]
    assert (drained.drained_by, drained.drained_why) == (
        JOB_SCRIPTS,
        f"job {job_id}: prolog p ended with status 1: no scratch",
    )
    assert cluster.job(job_id).shares[0].node != node
    assert [7] in [message.seqs for _, message in cluster.sent(protocol.Ack)]


def test_the_words_of_a_hostile_node_are_bounded_and_change_no_drain_of_an_admin() -> None:
    cluster = Cluster("n1")
    for number in range(300):
        cluster.says("n1", protocol.ScriptFailed(seq=number, job_id=9, why=f"{number}\x1b[2J\n" + "x" * 10_000))
    why = cluster.state.nodes[N1].drained_why
    assert why.startswith("job 9: 0?[2J?x")
    assert len(why) < MAX_WHY + 20
    cluster.ask(lambda tx: jobs.drain(tx, ROOT, "n1", "mine", ""))
    cluster.says("n1", protocol.ScriptFailed(seq=1000, job_id=9, why="again"))
    assert cluster.state.nodes[N1].drained_why == "mine"


@pytest.mark.parametrize(
    "found", [None, 5, "x", {}, [5], [["a"]], [["a", "b", 0, 0]], [["a", 1, 0]], [[1, 2, 3, 4]] * 1000]
)
def test_a_list_of_jobs_with_scripts_that_is_none_is_ignored(found: Any) -> None:
    cluster = Cluster("n1")
    cluster.welcome("n1", facts={"jobs_with_scripts": found})
    assert cluster.sent(protocol.EndJob) == []


def test_a_node_ends_the_scripts_of_jobs_that_it_holds_no_more_and_no_others() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit()
    cluster.run(job_id)
    own = cluster.state.incarnation
    known = (cluster.report(job_id, protocol.STARTED),)
    cluster.welcome("n1", inventory=known, facts={"jobs_with_scripts": [[own, job_id, 0, 0], [own, 99, 2, 1]]})
    assert [(message.job_id, message.attempt, message.stay) for _, message in cluster.sent(protocol.EndJob)] == [
        (99, 2, 1)
    ]


def test_a_job_holds_its_node_until_its_epilog_has_ended() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit()
    cluster.run(job_id)
    cluster.says("n1", cluster.report(job_id, protocol.ENDED, codes=[0], signals=[0], clearing=True))
    assert (cluster.job(job_id).state, cluster.job(job_id).held_nodes) == (JobState.COMPLETING, (N1,))
    assert cluster.job(job_id) == cluster.replayed(job_id)
    cluster.gone(job_id, "n1")
    assert cluster.job(job_id).state is JobState.COMPLETED
