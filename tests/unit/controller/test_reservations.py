"""Reservations in the controller: made, changed and deleted by admins, used by their users, followed as time goes by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cluster import ANN, BOB, ROOT, Cluster
from jobs import partition

from hpcsched.api.views import node_views
from hpcsched.auth.authorize import Identity
from hpcsched.controller.recovery import load_state
from hpcsched.controller.requests import jobs, reservations
from hpcsched.controller.requests.update import update
from hpcsched.errors import HpcschedError, NotFoundError, PermissionDeniedError, RequestError, UnavailableError
from hpcsched.model.job import JobState, Reason
from hpcsched.model.reservation import Flag, Reservation

DAY = 86_400


def reserve(cluster: Cluster, name: str = "r", identity: Identity = ROOT, **changes: str) -> Reservation:
    words = {"StartTime": "now+10minutes", "Duration": "10", "Users": "ann", "Nodes": "n1"} | changes
    found: Reservation = cluster.ask(
        lambda tx: reservations.create(tx, identity, name, {key: value for key, value in words.items() if value})
    )
    return found


def change(cluster: Cluster, **changes: str) -> Reservation:
    words = {key.replace("_add", "+").replace("_sub", "-"): value for key, value in changes.items()}
    found: Reservation = cluster.ask(lambda tx: reservations.update(tx, ROOT, "r", words))
    return found


def delete(cluster: Cluster) -> None:
    cluster.ask(lambda tx: reservations.delete(tx, ROOT, "r"))


def refusal(cluster: Cluster, **changes: str) -> str:
    with pytest.raises(HpcschedError) as refused:
        reserve(cluster, **changes)
    assert not cluster.state.reservations
    return str(refused.value)


def test_a_reservation_is_kept_over_a_restart_and_forgotten_when_it_is_over(tmp_path: Path) -> None:
    cluster = Cluster("n1", "n2", path=tmp_path / "h.db")
    made = reserve(cluster, Nodes="n[1-2]", Accounts="physics", Flags="maint,overlap")
    assert made == Reservation(
        name="r",
        start_s=int(cluster.now_s) + 600,
        end_s=int(cluster.now_s) + 1200,
        nodes=("n1", "n2"),
        users=("ann",),
        accounts=("physics",),
        flags=(Flag.MAINT, Flag.OVERLAP),
        made_by="root",
        made_at_s=cluster.now_s,
    )
    again = Cluster("n1", "n2", path=tmp_path / "h.db", up=False)
    load_state(again.state, again.store, again.now_s)
    assert again.state.reservations == {"r": made}
    again.tick(1199.0)
    assert "r" in again.state.reservations
    again.tick(1.0)
    assert again.state.reservations == {}
    assert again.store.load_reservations() == []


def test_one_that_repeats_moves_on_to_its_next_day(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "h.db")
    made = reserve(cluster, Flags="DAILY")
    cluster.tick(1200.0)
    assert cluster.state.reservations["r"] == replace(made, start_s=made.start_s + DAY, end_s=made.end_s + DAY)
    assert cluster.store.load_reservations() == list(cluster.state.reservations.values())


def test_only_admins_make_change_and_delete_them() -> None:
    cluster = Cluster("n1")
    with pytest.raises(PermissionDeniedError, match="cannot create a reservation"):
        reserve(cluster, identity=ANN)
    reserve(cluster)
    for work in (
        lambda tx: reservations.update(tx, ANN, "r", {"Users": "ann"}),
        lambda tx: reservations.delete(tx, ANN, "r"),
    ):
        with pytest.raises(PermissionDeniedError):
            cluster.ask(work)
    assert reserve(cluster, name="", StartTime="now+1hour").name == "root_1"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"Users": ""}, "cannot reserve without a user or account"),
        ({"Duration": ""}, "say how long"),
        ({"Duration": "0"}, "the end is not after the beginning"),
        ({"Nodes": ""}, "say which nodes"),
        ({"Nodes": "n9"}, "Invalid node name specified"),
        ({"NodeCnt": "1"}, "both Nodes= and NodeCnt="),
        ({"Nodes": "", "NodeCnt": "3"}, "3 nodes: Node count specification invalid: the cluster has 2"),
        ({"Nodes": "", "NodeCnt": "x"}, "NodeCnt= is a number"),
        (
            {"Nodes": "", "NodeCnt": "1", "Features": "gpu"},
            "1 node with feature gpu: Node count specification invalid: ",
        ),
        ({"Nodes": "", "NodeCnt": "1", "Features": "a&"}, "cannot read constraint"),
        ({"PartitionName": "nosuch"}, "invalid partition name specified"),
        ({"Flags": "NIGHTLY"}, "cannot set flag 'NIGHTLY': there are MAINT"),
        ({"Flags": "DAILY,WEEKLY"}, "cannot repeat in two ways"),
        ({"Flags": "DAILY", "Duration": "1-1"}, "it would overlap itself"),
        ({"Color": "red"}, "cannot give a reservation 'Color'"),
        ({"Users+": "ben"}, "cannot create a reservation with +="),
        ({"Users": "-ben"}, "cannot except 'ben'"),
        ({"StartTime": "now-1hour", "Duration": "120"}, "the beginning has passed"),
        ({"name": "a b"}, "a name has letters"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, str], why: str) -> None:
    assert why in refusal(Cluster("n1", "n2"), **changes)


def test_an_overlap_is_refused_unless_the_new_one_says_that_it_may() -> None:
    cluster = Cluster("n1", "n2")
    reserve(cluster)
    with pytest.raises(RequestError, match=r"n1 reserved \(r\); Flags=OVERLAP allows it"):
        reserve(cluster, name="s", Nodes="ALL", StartTime="now+15minutes")
    reserve(cluster, name="s", Nodes="ALL", StartTime="now+15minutes", Flags="MAINT")
    reserve(cluster, name="t", StartTime="now+1hour")
    with pytest.raises(RequestError, match="t"):
        change(cluster, StartTime="now+1hour")
    assert change(cluster, StartTime="now+1hour", Nodes="n2").nodes == ("n2",)


def test_a_daily_one_is_refused_for_a_meeting_of_next_month() -> None:
    cluster = Cluster("n1")
    reserve(cluster, StartTime=f"uts{int(cluster.now_s) + 30 * DAY}")
    with pytest.raises(RequestError, match="Requested nodes are busy"):
        reserve(cluster, name="s", StartTime="now", Duration="60", Flags="DAILY")


def test_a_job_that_may_run_into_it_is_in_the_way_unless_it_is_to_be_ignored() -> None:
    cluster = Cluster("n1", "n2")
    long = cluster.submit(nodelist=("n1",), time_limit_s=700)
    cluster.run(long)
    short = cluster.submit(nodelist=("n2",), time_limit_s=600)
    cluster.run(short)
    with pytest.raises(RequestError, match=f"cannot reserve n1: Requested nodes are busy: job {long} may run beyond"):
        reserve(cluster, Nodes="ALL")
    assert reserve(cluster, Nodes="", NodeCnt="1").nodes == ("n2",)
    assert reserve(cluster, name="s", Flags="IGNORE_JOBS").nodes == ("n1",)


def test_a_count_takes_nodes_that_answer_and_are_of_the_partition() -> None:
    cluster = Cluster("n1", "n2", "n3")
    cluster.state.partitions["half"] = partition("n2", "n3", name="half", default=False)
    cluster.ask(lambda tx: jobs.drain(tx, ROOT, "n2", "noise", ""))
    assert reserve(cluster, Nodes="", NodeCnt="1", PartitionName="half").nodes == ("n3",)
    with pytest.raises(RequestError, match=r"1 can be reserved then; n2 is drained; n3 reserved \(r\)"):
        reserve(cluster, name="s", Nodes="", NodeCnt="2")


def test_lists_are_added_to_and_taken_from() -> None:
    cluster = Cluster("n1", "n2")
    reserve(cluster)
    assert change(cluster, Users_add="ben,cleo").users == ("ann", "ben", "cleo")
    assert change(cluster, Users_sub="ann").users == ("ben", "cleo")
    assert change(cluster, Nodes_add="n2").nodes == ("n1", "n2")
    assert change(cluster, Flags_add="MAINT").flags == (Flag.MAINT,)
    assert change(cluster, EndTime="now+1hour").duration_s == 3000
    assert change(cluster, StartTime="now+20minutes").duration_s == 3000
    with pytest.raises(RequestError, match="without a user or account"):
        change(cluster, Users_sub="ben,cleo")


def test_the_users_jobs_wait_for_it_run_in_it_and_nobody_else_s() -> None:
    cluster = Cluster("n1")
    reserve(cluster)
    other = cluster.submit(BOB, time_limit_s=1200)
    mine = cluster.submit(reservation="r", time_limit_s=300)
    assert cluster.state.waits[mine].reason is Reason.RESERVATION
    assert 600.0 in cluster.ports.wakes
    cluster.tick(600.0)
    assert (cluster.job(mine).state, cluster.job(other).state) == (JobState.CONFIGURING, JobState.PENDING)
    cluster.run(mine)
    cluster.end(mine)
    assert cluster.job(other).state is JobState.PENDING
    cluster.tick(600.0)
    assert cluster.job(other).state is JobState.CONFIGURING


def test_who_may_not_use_it_is_told_who_may() -> None:
    cluster = Cluster("n1")
    reserve(cluster)
    with pytest.raises(
        PermissionDeniedError, match="Access denied to requested reservation; it is for users ann, you are"
    ):
        cluster.submit(BOB, reservation="r")
    with pytest.raises(
        NotFoundError,
        match="Requested reservation is invalid: there is no reservation 'q' that you may use; there are: r",
    ):
        cluster.submit(reservation="q")
    with pytest.raises(RequestError, match="in reservation 'r': cannot give job two nodes"):
        cluster.submit(reservation="r", nodes_min=2)
    assert not cluster.state.jobs


def test_after_its_end_it_is_refused(tmp_path: Path) -> None:
    cluster = Cluster("n1")
    reserve(cluster)
    waits = cluster.submit(reservation="r", hold=True)
    cluster.tick(1200.0)
    with pytest.raises(NotFoundError, match="Requested reservation is invalid"):
        cluster.submit(reservation="r")
    cluster.ask(lambda tx: jobs.release(tx, ANN, [str(waits)]))
    assert cluster.state.waits[waits].reason is Reason.RESERVATION_DELETED


@pytest.mark.parametrize("limit_s", [None, 3600])
@pytest.mark.parametrize("flags", ["", "DAILY"])
def test_a_job_that_still_runs_when_its_reservation_ends_is_ended(limit_s: int | None, flags: str) -> None:
    cluster = Cluster("n1")
    reserve(cluster, StartTime="now", Flags=flags)
    cluster.tick(400.0)
    job_id = cluster.submit(reservation="r", time_limit_s=limit_s)
    cluster.run(job_id)
    cluster.tick(199.0)
    assert any(1.0 <= wake < 1.1 for wake in cluster.ports.wakes)
    assert (cluster.job(job_id).time_limit_s, cluster.job(job_id).state) == (limit_s, JobState.RUNNING)
    cluster.tick(1.0)
    job = cluster.job(job_id)
    assert (job.state, job.outcome, job.reason_detail) == (
        JobState.COMPLETING,
        JobState.TIMEOUT,
        "its reservation 'r' ended",
    )


def test_a_suspended_job_ends_with_its_reservation_too() -> None:
    cluster = Cluster("n1")
    reserve(cluster, StartTime="now")
    job_id = cluster.submit(reservation="r", time_limit_s=300)
    cluster.run(job_id)
    cluster.ask(lambda tx: jobs.suspend(tx, ROOT, [str(job_id)]))
    assert cluster.job(job_id).state is JobState.SUSPENDED
    cluster.tick(600.0)
    assert cluster.job(job_id).outcome is JobState.TIMEOUT


def test_a_job_runs_as_long_as_its_reservation_is_made_to_last() -> None:
    cluster = Cluster("n1")
    reserve(cluster, StartTime="now")
    job_id = cluster.submit(reservation="r", time_limit_s=3600)
    cluster.run(job_id)
    change(cluster, Duration="20")
    cluster.tick(600.0)
    assert cluster.job(job_id).state is JobState.RUNNING
    change(cluster, Duration="15")
    cluster.tick(300.0)
    assert cluster.job(job_id).outcome is JobState.TIMEOUT


def test_a_reservation_may_follow_at_once_on_nodes_whose_jobs_end_with_the_last() -> None:
    cluster = Cluster("n1")
    reserve(cluster, StartTime="now")
    cluster.run(cluster.submit(reservation="r", time_limit_s=3600))
    reserve(cluster, "next", StartTime="now+10minutes")
    assert "may run beyond" in refusal_of(cluster, "during", StartTime="now+9minutes", Flags="OVERLAP")


def test_others_expect_the_nodes_when_the_reservation_ends() -> None:
    cluster = Cluster("n1")
    ends_s = reserve(cluster, StartTime="now", Flags="OVERLAP").end_s
    cluster.run(cluster.submit(reservation="r", cpus_per_task=2, time_limit_s=3600))
    reserve(cluster, "later", StartTime="now+2hours")
    waits = cluster.submit(cpus_per_task=2, time_limit_s=60)
    assert cluster.state.waits[waits].expected_start_s == ends_s


def refusal_of(cluster: Cluster, name: str, **changes: str) -> str:
    with pytest.raises(HpcschedError) as refused:
        reserve(cluster, name, **changes)
    return str(refused.value)


def test_it_is_not_deleted_under_the_jobs_that_use_it_nor_loses_their_nodes() -> None:
    cluster = Cluster("n1", "n2")
    reserve(cluster, StartTime="now", Nodes="ALL")
    job_id = cluster.submit(reservation="r", time_limit_s=300)
    cluster.run(job_id)
    with pytest.raises(
        RequestError, match=f"cannot delete reservation 'r': Requested reservation is in use: by job {job_id}"
    ):
        delete(cluster)
    node = cluster.job(job_id).shares[0].node
    with pytest.raises(RequestError, match=f"cannot take {node} out .* job {job_id} runs there"):
        change(cluster, Nodes_sub=node)
    assert change(cluster, Duration="6").duration_s == 360
    cluster.end(job_id)
    delete(cluster)
    assert cluster.state.reservations == {}


def test_who_may_use_it_can_be_changed_while_maintenance_overlaps_it() -> None:
    cluster = Cluster("n1")
    reserve(cluster)
    reserve(cluster, "m", Flags="MAINT")
    assert change(cluster, Users_add="bob").users == ("ann", "bob")
    with pytest.raises(RequestError, match=r"n1 reserved \(m\)"):
        change(cluster, Duration="20")


def test_a_waiting_job_leaves_and_enters_a_reservation() -> None:
    cluster = Cluster("n1")
    reserve(cluster)
    job_id = cluster.submit(reservation="r", time_limit_s=300)
    with pytest.raises(RequestError, match="in use"):
        delete(cluster)
    cluster.ask(lambda tx: update(tx, ANN, [str(job_id)], {"reservation": ""}))
    assert cluster.job(job_id).state is JobState.CONFIGURING
    delete(cluster)
    second = cluster.submit(hold=True, time_limit_s=300)
    outcome = cluster.ask(lambda tx: update(tx, ANN, [str(second)], {"reservation": "r"}))
    assert "there is no reservation" in outcome.errors[0]["error"]


def test_idle_nodes_are_shown_as_reserved_while_it_goes_on() -> None:
    cluster = Cluster("n1", "n2", "n3")
    reserve(cluster, StartTime="now", Nodes="n[1-2]")
    reserve(cluster, name="m", StartTime="now", Nodes="n2", Flags="MAINT")
    found = {view["name"]: (view["state"], view["reservation"]) for view in node_views(cluster.state, cluster.now_s)}
    assert found == {"n1": ("RESERVED", "r"), "n2": ("MAINT", "m"), "n3": ("IDLE", "")}
    later = node_views(cluster.state, cluster.now_s + 600)
    assert {view["state"] for view in later} == {"IDLE"}


def test_a_commit_that_fails_leaves_no_reservation_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("n1")

    def fail(batch: object) -> None:
        raise UnavailableError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(cluster.store, "commit", fail)
        with pytest.raises(UnavailableError):
            reserve(cluster)
    assert cluster.state.reservations == {}
    reserve(cluster)
