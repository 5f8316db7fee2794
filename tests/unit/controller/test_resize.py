"""Jobs that give nodes back and get more while they run: what is recorded, what nodes and the job are told, after crashes too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster import ANN, BOB, ROOT, Cluster

from hpcnode.wire import protocol
from hpcsched.api.views import in_a_sentence, job_view, why_waiting
from hpcsched.controller import preemption
from hpcsched.controller.recovery import load_state
from hpcsched.controller.requests import jobs, update
from hpcsched.controller.views.history import story_of
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState


def start(cluster: Cluster, low: int, high: int, **fields: Any) -> int:
    """Have a job that takes whole nodes run on as many as it gets."""
    job_id = cluster.submit(nodes_min=low, nodes_max=high, cpus_per_task=2, **fields)
    for to, launch in cluster.sent(protocol.Launch):
        cluster.says(to, protocol.Report(seq=9, token=launch.token, status=protocol.CLAIMED, at_s=cluster.now_s))
    cluster.run(job_id)
    return job_id


def resize(cluster: Cluster, job_id: int, size: int | str, identity: Any = ANN) -> Any:
    """Change the job's size as hctl update does."""
    return cluster.ask(lambda tx: update.update(tx, identity, [str(job_id)], {"num_nodes": str(size)}))


def give_back(cluster: Cluster, job_id: int, count: int) -> None:
    """Have the job keep so many nodes, as it does by hrun --resize."""
    cluster.ask(lambda tx: preemption.shrink(tx, cluster.job(job_id), count, ANN.uid))


def nodes(cluster: Cluster, job_id: int) -> str:
    return " ".join(share.node for share in cluster.job(job_id).shares)


def told(cluster: Cluster) -> list[tuple[str, int, str, str]]:
    """Return, and forget, what nodes were told of allocations: node, generation, nodes, wanted."""
    found = [(to, m.generation, " ".join(m.nodes), " ".join(m.wanted)) for to, m in cluster.sent(protocol.Allocation)]
    return sorted(set(found))


def test_a_job_starts_on_what_is_free_and_does_not_wait_for_more() -> None:
    cluster = Cluster("n1", "n2", "n3")
    first = start(cluster, 1, 1)
    second = start(cluster, 1, 9)
    assert (nodes(cluster, first), nodes(cluster, second)) == ("n1", "n2 n3")


def test_a_job_gives_nodes_back_which_others_get_when_they_are_clear() -> None:
    cluster = Cluster("n1", "n2", "n3")
    job_id = start(cluster, 3, 3)
    cluster.tick(after_s=10.0)
    waiting = cluster.submit(nodes_min=2, cpus_per_task=2)
    assert resize(cluster, job_id, 1).jobs == [job_id]
    assert nodes(cluster, job_id) == "n1"
    assert sorted(to for to, order in cluster.sent(protocol.EndJob) if order.job_id == job_id) == ["n2", "n3"]
    assert told(cluster) == [("n1", 1, "n1", "")]
    cluster.gone(job_id, "n2")
    assert cluster.job(waiting).state is JobState.PENDING
    cluster.gone(job_id, "n3")
    assert (cluster.job(job_id).state, nodes(cluster, waiting)) == (JobState.RUNNING, "n2 n3")
    cluster.tick(after_s=10.0)
    cluster.end(job_id)
    assert (cluster.job(job_id).state, cluster.job(job_id).charged_cpu_s) == (
        JobState.COMPLETED,
        2 * 20.0 + 2 * 2 * 10.0,
    )
    assert cluster.replayed(job_id) == cluster.job(job_id)


@pytest.mark.parametrize("count", [0, 3, 4, "3-4"])
def test_what_cannot_be_is_refused(count: int | str) -> None:
    cluster = Cluster("n1", "n2")
    job_id = start(cluster, 2, 2)
    (refused,) = resize(cluster, job_id, count).errors
    assert ("it has 2; only an elastic job" if count else "write 4 or 2-4, from 1 up") in refused["error"]


def test_an_update_sets_between_how_many_nodes_an_elastic_job_stays() -> None:
    cluster = Cluster("n1", "n2", "n3")
    job_id = start(cluster, 1, 3, elastic=True)
    assert resize(cluster, job_id, "1-2").errors == []
    assert (nodes(cluster, job_id), cluster.job(job_id).spec.nodes_max) == ("n1 n2", 2)
    cluster.gone(job_id, "n3")
    cluster.sent(protocol.Launch)
    assert resize(cluster, job_id, 1).errors == []
    cluster.gone(job_id, "n2")
    assert (nodes(cluster, job_id), cluster.sent(protocol.Launch)) == ("n1", []), "what it gave back stays idle"
    assert resize(cluster, job_id, "1-3").errors == []
    given = [(to, launch.step) for to, launch in cluster.sent(protocol.Launch)]
    assert given == [("n2", "alloc"), ("n3", "alloc")], "it may grow again"
    assert cluster.replayed(job_id) == cluster.job(job_id)


def test_an_elastic_job_cannot_be_given_more_by_an_update_nor_be_told_twice_at_once() -> None:
    cluster, job_id, _ = growing()
    assert "it has 1 now, and gets more by itself" in resize(cluster, job_id, "2-4").errors[0]["error"]
    assert "it is just being given more; try again" in resize(cluster, job_id, 1).errors[0]["error"]


def test_a_request_to_an_elastic_job_is_withdrawn_when_it_is_to_have_more() -> None:
    cluster = Cluster("n1", "n2", "n3")
    job_id = start(cluster, 1, 3, elastic=True)
    cluster.submit(nodes_min=2, cpus_per_task=2)
    assert cluster.job(job_id).wanted_nodes == ("n1",)
    assert resize(cluster, job_id, "2-3").errors == []
    assert (nodes(cluster, job_id), cluster.job(job_id).wanted_nodes) == ("n1 n2 n3", ())


def test_others_and_waiting_jobs_give_nothing_back() -> None:
    cluster = Cluster("n1", "n2")
    job_id = start(cluster, 2, 2)
    waiting = cluster.submit(nodes_min=2, nodes_max=2, nodes_given=True)
    assert "it belongs to ann, you are bob" in resize(cluster, job_id, 1, BOB).errors[0]["error"]
    assert resize(cluster, waiting, 1).errors == []  # it asks for fewer
    assert cluster.job(waiting).spec.nodes_max == 1


def test_an_elastic_job_is_asked_for_nodes_that_another_waits_for_and_may_give_them() -> None:
    cluster = Cluster("n1", "n2", "n3")
    job_id = start(cluster, 1, 3, elastic=True)
    waiting = cluster.submit(nodes_min=1, cpus_per_task=2)
    assert told(cluster) == [(name, 1, "n1 n2 n3", "n1 n2") for name in ("n1", "n2", "n3")]
    assert (nodes(cluster, job_id), cluster.job(waiting).state) == ("n1 n2 n3", JobState.PENDING)
    asked = cluster.job(job_id)
    reason, detail, _ = why_waiting(asked, cluster.state, ROOT, cluster.now_s)
    text = f"job {job_id} is RUNNING, and was asked to make do with n[1-2]"
    assert in_a_sentence(asked, cluster.state, ROOT, reason, detail, cluster.now_s) == text
    shown = job_view(asked, cluster.state, ROOT, cluster.now_s)
    assert (shown["elastic"], shown["wanted_nodes"]) == ([1, 3], ["n1", "n2"])
    another = cluster.submit(nodes_min=3, cpus_per_task=2)  # not on all that the job can do without
    assert told(cluster) == []
    give_back(cluster, job_id, 2)
    assert told(cluster) == [(name, 2, "n1 n2", "") for name in ("n1", "n2")]
    cluster.gone(job_id, "n3")
    assert nodes(cluster, waiting) == "n3"
    cluster.ask(lambda tx: jobs.cancel(tx, ANN, [str(another)], {}))


def test_a_job_that_keeps_its_nodes_is_not_asked_again_until_nobody_waits() -> None:
    cluster = Cluster("n1", "n2")
    job_id = start(cluster, 1, 2, elastic=True)
    waiting = cluster.submit(nodes_min=1, cpus_per_task=2)
    assert told(cluster) == [(name, 1, "n1 n2", "n1") for name in ("n1", "n2")]
    cluster.controller.replan()
    cluster.tick(after_s=100.0)
    assert (told(cluster), nodes(cluster, job_id)) == ([], "n1 n2")
    cluster.ask(lambda tx: jobs.cancel(tx, ANN, [str(waiting)], {}))
    assert told(cluster) == [(name, 2, "n1 n2", "") for name in ("n1", "n2")]


def test_an_elastic_job_gets_idle_nodes_when_they_have_claimed_them() -> None:
    cluster = Cluster("n1", "n2", "n3")
    other = start(cluster, 2, 2)
    job_id = start(cluster, 1, 3, elastic=True)
    cluster.sent(protocol.EndJob)
    cluster.end(other)
    for name in ("n1", "n2"):
        cluster.gone(other, name)
    for name, now in (("n1", "n3 n1"), ("n2", "n3 n1 n2")):  # one after the other, as they came free
        to, claim = cluster.sent(protocol.Launch)[-1]
        assert (to, claim.step, claim.job_id, told(cluster)) == (name, "alloc", job_id, [])
        cluster.says(to, protocol.Report(seq=9, token=claim.token, status=protocol.CLAIMED, at_s=cluster.now_s))
        assert nodes(cluster, job_id) == now
        assert {line[2] for line in told(cluster)} == {now}
    assert [share.node for share in cluster.job(job_id).joining] == []
    assert cluster.replayed(job_id) == cluster.job(job_id)


def growing(path: Path | None = None) -> tuple[Cluster, int, protocol.Launch]:
    """Return a cluster whose job has n1 and is being given n2."""
    cluster = Cluster("n1", "n2", path=path)
    other = cluster.submit(nodelist=(NodeName("n2"),), cpus_per_task=2)
    job_id = start(cluster, 1, 2, elastic=True)
    cluster.run(other)
    cluster.sent(protocol.Launch)
    cluster.end(other)
    to, claim = cluster.sent(protocol.Launch)[-1]
    assert (to, claim.job_id, claim.step) == ("n2", job_id, "alloc")
    return cluster, job_id, claim


def test_a_node_that_cannot_take_its_part_is_left_out_and_the_job_goes_on() -> None:
    cluster, job_id, claim = growing()
    cluster.says("n2", protocol.Report(seq=9, token=claim.token, status=protocol.REFUSED, at_s=cluster.now_s, why="no"))
    job = cluster.job(job_id)
    assert (job.state, nodes(cluster, job_id), job.held_nodes, job.joining) == (JobState.RUNNING, "n1", ("n1",), ())
    assert cluster.sent(protocol.Launch) == []  # nor is it tried again with this attempt


def test_a_node_that_reboots_while_it_is_given_or_given_back_ends_nothing() -> None:
    cluster, job_id, claim = growing()
    cluster.welcome("n2", boot_id="boot-2")
    job = cluster.job(job_id)
    assert (job.state, nodes(cluster, job_id), [share.node for share in job.joining]) == (
        JobState.RUNNING,
        "n1",
        ["n2"],
    )
    assert cluster.sent(protocol.Launch)[-1][1].token == claim.token.replace(".0.alloc", ".0-1.alloc"), (
        "it is tried again"
    )
    cluster = Cluster("n1", "n2")
    job_id = start(cluster, 2, 2)
    resize(cluster, job_id, 1)
    cluster.welcome("n2", boot_id="boot-2")
    assert (cluster.job(job_id).state, cluster.job(job_id).held_nodes) == (JobState.RUNNING, ("n1",))


def test_a_node_that_rejoins_is_a_new_stay_and_late_reports_of_the_old_are_ignored() -> None:
    cluster, job_id, claim = growing()
    cluster.says("n2", protocol.Report(seq=9, token=claim.token, status=protocol.CLAIMED, at_s=cluster.now_s))
    give_back(cluster, job_id, 1)
    ((_, end),) = cluster.sent(protocol.EndJob)
    assert (end.attempt, end.stay, cluster.sent(protocol.Launch)) == (0, 0, [])
    gone = protocol.JobGone(end.incarnation, job_id, end.attempt, end.stay)
    cluster.says("n2", gone)
    to, again = cluster.sent(protocol.Launch)[-1]
    assert (to, again.step, again.token) == ("n2", "alloc", claim.token.replace(".0.alloc", ".0-1.alloc"))
    cluster.says("n2", gone)
    cluster.says("n2", protocol.Report(seq=10, token=claim.token, status=protocol.REVOKED, at_s=cluster.now_s))
    assert [share.node for share in cluster.job(job_id).joining] == ["n2"], "these were of the stay before"
    cluster.says("n2", protocol.Report(seq=11, token=again.token, status=protocol.CLAIMED, at_s=cluster.now_s))
    assert nodes(cluster, job_id) == "n1 n2"
    assert told(cluster)[-1][2:] == ("n1 n2", "")
    give_back(cluster, job_id, 1)
    assert [order.stay for _, order in cluster.sent(protocol.EndJob)] == [1]
    cluster.says("n2", gone)
    assert cluster.job(job_id).held_nodes == ("n1", "n2"), "what runs there of the second stay has not gone"
    cluster.gone(job_id, "n2")
    assert cluster.job(job_id).stay_on(NodeName("n2")) == 2
    assert cluster.replayed(job_id) == cluster.job(job_id)


def test_a_job_that_ends_meanwhile_leaves_nothing_on_any_of_them() -> None:
    cluster, job_id, _ = growing()
    cluster.ask(lambda tx: jobs.cancel(tx, ANN, [str(job_id)], {}))
    assert sorted({to for to, _ in cluster.sent(protocol.EndJob)}) == ["n1", "n2"]
    cluster.gone(job_id, "n1")
    cluster.gone(job_id, "n2")
    assert cluster.job(job_id).state is JobState.CANCELLED
    assert (cluster.job(job_id).joining, cluster.job(job_id).held_nodes) == ((), ())


@pytest.mark.parametrize("what", ["given", "given back"])
def test_after_a_crash_the_same_is_asked_of_the_nodes_again(tmp_path: Path, what: str) -> None:
    path = tmp_path / "db"
    if what == "given":
        cluster, job_id, _ = growing(path)
    else:
        cluster = Cluster("n1", "n2", path=path)
        job_id = start(cluster, 2, 2)
        resize(cluster, job_id, 1)
    started = cluster.report(job_id, protocol.STARTED)
    cluster.store.close()
    again = Cluster("n1", "n2", path=path, up=False)
    again.now_s = cluster.now_s + 1.0
    load_state(again.state, again.store, again.now_s)
    assert again.job(job_id) == cluster.job(job_id)
    again.welcome("n1", inventory=(started,))
    again.welcome("n2")
    if what == "given":
        assert "n2" in [to for to, launch in again.sent(protocol.Launch) if launch.step == "alloc"]
    else:
        assert [to for to, order in again.sent(protocol.EndJob)] == ["n2"]
        assert told(again) == [("n1", 1, "n1", "")]
        again.gone(job_id, "n2")
    assert again.job(job_id).state is JobState.RUNNING


def test_the_story_tells_of_it() -> None:
    cluster = Cluster("n1", "n2")
    job_id = start(cluster, 1, 2, elastic=True)
    waiting = cluster.submit(nodes_min=1, cpus_per_task=2)
    give_back(cluster, job_id, 1)
    lines = [line["text"] for line in story_of(cluster.job(job_id), cluster.store.load_events(job_id))]
    assert lines[-2:] == [f"asked to make do with n1, job {waiting} waits for the others", "gives n2 back"]
