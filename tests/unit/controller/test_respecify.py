"""What a job asks for is changed after its submission: while it waits all of it, later its name and the like, and its time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cluster import ANN, ROOT, Cluster

from hpcnode.wire import protocol
from hpcsched.auth.authorize import Identity, Role
from hpcsched.controller.recovery import load_state
from hpcsched.controller.requests.jobs import requeue
from hpcsched.controller.requests.update import update
from hpcsched.controller.views.history import story_of
from hpcsched.errors import RequestError
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState
from hpcsched.model.spec import ArraySpec
from hpcsched.state.cluster import ClusterState


def change(cluster: Cluster, reference: object, identity: Identity = ANN, **changes: str) -> list[str]:
    """Change a job as ``hctl update`` does, and return what was refused."""
    outcome = cluster.ask(lambda tx: update(tx, identity, [str(reference)], changes))
    return [error["error"] for error in outcome.errors]


def test_a_waiting_job_asks_for_something_else() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit(hold=True, mem_per_cpu_mib=10)
    assert (
        change(cluster, job_id, name="x", mem="64M", nodelist="n2", cpus_per_task="2", num_nodes="1-2", gres="none")
        == []
    )
    assert change(cluster, job_id, comment="why not", requeue="0") == []
    spec = cluster.job(job_id).spec
    assert (spec.name, spec.comment, spec.requeue) == ("x", "why not", False)
    assert (spec.mem_per_node_mib, spec.mem_per_cpu_mib) == (64, None)
    assert (spec.nodelist, spec.cpus_per_task, spec.nodes_min, spec.nodes_max) == (("n2",), 2, 1, 2)
    assert cluster.replayed(job_id) == cluster.job(job_id)
    assert change(cluster, job_id, nodelist="", num_nodes="1") == []
    assert cluster.job(job_id).spec.nodelist == ()
    told = story_of(cluster.job(job_id), cluster.store.load_events(job_id))
    assert any("changed by" in one["text"] and "name = x" in one["text"] for one in told)


def test_a5_who_changes_jobs_of_others_does_not_choose_what_their_scripts_find() -> None:
    """A script that runs ./train.sh would run it as its user, from the directory of an operator."""
    cluster = Cluster("n1")
    job_id = cluster.submit(hold=True, account="physics")
    operator = Identity(uid=1004, user="olga", role=Role.OPERATOR)
    coordinator = Identity(uid=1002, user="cleo", role=Role.COORDINATOR, accounts=frozenset({"physics"}))
    for other in (operator, coordinator):
        refused = change(cluster, job_id, other, work_dir="/home/other", comment="x")
        assert refused == [f"cannot change the directory of job {job_id}: it belongs to ann, you are {other.user}"]
        assert change(cluster, job_id, other, comment="x") == []
    assert change(cluster, job_id, work_dir="/home/ann") == change(cluster, job_id, ROOT, work_dir="/x") == []
    assert cluster.job(job_id).spec.work_dir == "/x"


def test_cpus_are_asked_for_as_the_tasks_that_need_them() -> None:
    cluster = Cluster("n1", "n2")
    job_id = cluster.submit(hold=True)
    assert change(cluster, job_id, num_cpus="2") == []
    assert cluster.job(job_id).spec.ntasks == 2
    assert change(cluster, job_id, cpus_per_task="2", num_cpus="3") == []
    assert cluster.job(job_id).spec.ntasks == 2
    assert len(change(cluster, job_id, num_cpus="none")) == 1
    cluster.run(running := cluster.submit())
    assert change(cluster, running, num_cpus="2") == [f"cannot change num_cpus of job {running}: it is RUNNING"]


def test_what_can_never_start_or_is_too_late_is_refused_and_changes_nothing() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(hold=True)
    before = cluster.job(job_id)
    for wrong, says in (
        ({"num_nodes": "2"}, "two nodes"),
        ({"nodelist": "n9"}, "n9"),
        ({"mem": "x"}, "x"),
        ({"work_dir": "here"}, "not absolute"),
        ({"name": "ok", "time_limit": "0:00:x"}, "time"),
    ):
        refused = change(cluster, job_id, **wrong)
        assert len(refused) == 1
        assert says in refused[0]
        assert cluster.job(job_id) == before
    running = cluster.submit()
    cluster.run(running)
    assert change(cluster, running, mem="5M") == [f"cannot change mem of job {running}: it is RUNNING"]
    assert change(cluster, running, name="later", comment="c", mail_user="ann@x", mail_type="END,FAIL") == []
    assert cluster.job(running).spec.name == "later"
    assert cluster.job(running).spec.mail_type == ("END", "FAIL")


def test_switches_and_where_they_are_waited_for() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(hold=True)
    assert change(cluster, job_id, switches="1@10") == []
    assert (cluster.job(job_id).spec.switches, cluster.job(job_id).spec.switches_wait_s) == (1, 600)


def test_the_end_of_a_running_job_is_a_time_limit() -> None:
    cluster = Cluster("n1")
    job_id, waiting = cluster.submit(time_limit_s=3600), cluster.submit(hold=True)
    cluster.run(job_id)
    cluster.tick(60.0)
    started_s = cluster.job(job_id).started_at_s
    assert started_s is not None
    ran_s = cluster.now_s - started_s
    assert change(cluster, job_id, end_time="now+10minutes") == []
    assert cluster.job(job_id).time_limit_s == pytest.approx(ran_s + 600, abs=1)
    assert "raise the time limit" in change(cluster, job_id, end_time="now+5hours")[0]
    assert change(cluster, job_id, end_time="now") == [f"cannot end job {job_id} at 'now': that is past"]
    assert "it is PENDING; change its time limit" in change(cluster, waiting, end_time="now+1hour")[0]


def test_an_unknown_name_is_answered_with_the_nearest_one() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(hold=True)
    with pytest.raises(RequestError, match=r"cannot change commnt \(did you mean comment"):
        change(cluster, job_id, commnt="x")
    with pytest.raises(RequestError, match="cannot change zzz: can change account, array_task_throttle"):
        change(cluster, job_id, zzz="x")


def test_tasks_of_an_array_share_what_they_ask_for(tmp_path: Path) -> None:
    path = tmp_path / "db"
    cluster = Cluster("n1", path=path)
    array = cluster.submit(hold=True, array=ArraySpec(indices=(0, 1, 2)))
    assert change(cluster, f"{array}_[0-1]", name="two") == []
    jobs = [cluster.job(array + at) for at in range(3)]
    assert [job.spec.name for job in jobs[:2]] == ["two", "two"]
    assert jobs[2].spec.name != "two"
    assert jobs[0].spec_id == jobs[1].spec_id != jobs[2].spec_id
    again = ClusterState(config=cluster.state.config, incarnation=cluster.state.incarnation, epoch=cluster.state.epoch)
    load_state(again, cluster.store, cluster.now_s)
    assert [again.jobs[job.id] for job in jobs] == jobs


@pytest.mark.parametrize("limit", ["+60", "UNLIMITED"])
def test_the_time_limit_of_a_running_job_is_told_to_its_node(limit: str) -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(time_limit_s=3600)
    cluster.run(job_id)
    assert "raise the time limit of job 1" in change(cluster, job_id, time_limit=limit)[0]
    assert cluster.job(job_id).time_limit_s == 3600
    assert cluster.sent(protocol.TimeLimit) == []
    assert change(cluster, job_id, time_limit="30") == []
    token = cluster.job(job_id).token
    assert cluster.sent(protocol.TimeLimit) == [("n1", protocol.TimeLimit(token=token, limit_s=1800.0))]
    assert change(cluster, job_id, ROOT, time_limit=limit) == []
    [(_, told)] = cluster.sent(protocol.TimeLimit)
    assert told.limit_s == cluster.job(job_id).time_limit_s
    assert told.limit_s is not None
    assert told.limit_s > 3600
    cluster.welcome("n1", inventory=(cluster.report(job_id, protocol.STARTED),))
    assert [message for _, message in cluster.sent(protocol.TimeLimit)] == [told]  # it may have been lost


def test_a_job_that_is_queued_again_keeps_its_changed_limit() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(time_limit_s=3600)
    cluster.run(job_id)
    assert change(cluster, job_id, time_limit="30") == []
    cluster.end(job_id, 1)
    cluster.ask(lambda tx: requeue(tx, ANN, [str(job_id)]))
    job = cluster.job(job_id)
    assert (job.state, job.time_limit_s) == (JobState.PENDING, 1800)
    assert job.shares[0].node == NodeName("n1")


@pytest.mark.parametrize(
    ("max_time_s", "limit", "refused"),
    [
        (7200, "2:00:00", ""),
        (7200, "+60", ""),
        (7200, "2:00:01", "above 2:00:00, the most in partition main"),
        (7200, "UNLIMITED", "above 2:00:00, the most in partition main"),
        (None, "9-0", ""),
        (None, "UNLIMITED", ""),
    ],
)
def test_users_raise_the_limit_of_their_waiting_jobs_up_to_the_partitions(
    max_time_s: int | None, limit: str, refused: str
) -> None:
    cluster = Cluster("n1")
    cluster.state.partitions = {"main": replace(cluster.state.partitions["main"], max_time_s=max_time_s)}
    job_id = cluster.submit(time_limit_s=3600, hold=True)
    errors = change(cluster, job_id, time_limit=limit)
    assert [refused in error for error in errors] == ([True] if refused else [])
    assert (cluster.job(job_id).time_limit_s > 3600) is not bool(refused)
    assert change(cluster, job_id, ROOT, time_limit="UNLIMITED") == []
