"""The audit log of the controller: no change without its record, no secrets, bounded records."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from cluster import ANN, BOB, ROOT, Cluster
from jobs import spec

from hpcnode.wire import protocol
from hpcsched.auth.audit import MAX_TEXT, verify
from hpcsched.auth.authorize import Identity
from hpcsched.controller.credentials import MAX_CODES_PER_USER
from hpcsched.errors import HpcschedError, UnauthenticatedError
from hpcsched.model.codec import spec_to_json


@pytest.fixture
def cluster(tmp_path: Any) -> Cluster:
    return Cluster("n1", path=tmp_path / "hpcsched.db")


def do(cluster: Cluster, work: Any) -> Any:
    """Return the answer of a request to the backend, or the text of its error."""

    async def play() -> Any:
        asked = asyncio.ensure_future(work(cluster.backend()))
        while not asked.done():
            await asyncio.sleep(0)
            cluster.tick()
        try:
            return await asked
        except HpcschedError as error:
            return str(error)

    return asyncio.run(play())


def hold(cluster: Cluster, identity: Identity, *jobs: int) -> Any:
    return do(cluster, lambda backend: backend.act(identity, "hold", {"jobs": [str(job) for job in jobs]}))


def all_records(cluster: Cluster) -> list[Any]:
    return cluster.store.audit_records(0, 1000)


def records(cluster: Cluster) -> list[Any]:
    """Return the records, without those of the jobs that a test submits past the backend."""
    return [record for record in all_records(cluster) if record.action != "Submitted"]


def test_e8_without_a_record_nothing_is_changed(cluster: Cluster) -> None:
    job = cluster.submit(ANN, begin_at_s=int(cluster.now_s) + 1000)
    cluster.store.connection.execute("ALTER TABLE audit RENAME TO elsewhere")
    answer = hold(cluster, ANN, job)
    assert "errors" not in answer, answer
    assert cluster.job(job).hold.value == "none"
    cluster.store.connection.execute("ALTER TABLE elsewhere RENAME TO audit")
    hold(cluster, ANN, job)
    assert cluster.job(job).hold.value == "user"
    assert [record.action for record in records(cluster)] == ["hold"]


def test_a_change_has_the_values_before_and_after(cluster: Cluster) -> None:
    job = cluster.submit(ANN, begin_at_s=int(cluster.now_s) + 1000)
    hold(cluster, ANN, job)
    (record,) = records(cluster)
    assert json.loads(record.before) == {f"job {job}": {"hold": "none"}}
    assert json.loads(record.after) == {f"job {job}": {"hold": "user"}}


def test_f1_a_secret_of_the_environment_is_in_no_record(cluster: Cluster) -> None:
    secret = spec(env=(("TOKEN", "canary-in-the-mine"),), begin_at_s=int(cluster.now_s) + 1000)
    job = do(cluster, lambda backend: backend.submit(ROOT, "", [secret]))["jobs"][0]["job_id"]
    changes = {"comment": "x", "num_nodes": "1"}
    do(cluster, lambda backend: backend.act(ROOT, "update", {"jobs": [str(job)], "changes": changes}))
    assert [record.action for record in records(cluster)] == ["submit", "update"]
    assert "canary" in str(spec_to_json(secret))
    assert "canary" not in repr(records(cluster))


def test_a_large_request_makes_one_bounded_record(cluster: Cluster) -> None:
    begin_at_s = int(cluster.now_s) + 1000
    jobs = [cluster.submit(ANN, begin_at_s=begin_at_s, name="x" * 100) for _ in range(60)]
    hold(cluster, ANN, *jobs)
    (record,) = records(cluster)
    assert record.object.endswith("and 40 more")
    assert max(len(record.before), len(record.after)) <= MAX_TEXT


def test_a3_refused_parts_of_a_request_are_recorded(cluster: Cluster) -> None:
    mine, others = (cluster.submit(who, begin_at_s=int(cluster.now_s) + 1000) for who in (BOB, ANN))
    hold(cluster, BOB, mine, others)
    cluster.tick()
    assert [(record.user, record.outcome.partition(":")[0]) for record in records(cluster)] == [
        ("bob", "done"),
        ("bob", "refused"),
    ]
    assert verify(all_records(cluster), [], lambda head: True)[1] == ""


def test_e8_requests_refused_as_a_whole_leave_a_bounded_number_of_records(cluster: Cluster) -> None:
    job = cluster.submit(ANN, begin_at_s=int(cluster.now_s) + 1000)
    for _ in range(50):
        assert hold(cluster, BOB, job)["errors"]
        assert hold(cluster, BOB, 999)["errors"]
    cluster.tick()
    assert {record.outcome.partition(":")[0] for record in records(cluster)} == {"refused"}
    assert len(records(cluster)) <= 20


def test_the_chain_goes_on_after_a_restart(cluster: Cluster) -> None:
    job = cluster.submit(ANN, begin_at_s=int(cluster.now_s) + 1000)
    hold(cluster, ANN, job)
    cluster.store._audit_end = None  # as a new controller has it
    do(cluster, lambda backend: backend.act(ANN, "release", {"jobs": [str(job)]}))
    assert verify(all_records(cluster), [], lambda head: True)[1] == ""


def test_admins_see_tokens_of_all_users_and_others_their_own(cluster: Cluster) -> None:
    for who in (ANN, BOB):
        do(cluster, lambda backend, who=who: backend.act_on_tokens(who, "create", {"scopes": "read"}))
    backend = cluster.backend()
    assert [one["user"] for one in backend.tokens(ROOT, "")["tokens"]] == ["ann", "bob"]
    assert [one["user"] for one in backend.tokens(BOB, "")["tokens"]] == ["bob"]
    assert backend.tokens(ROOT, "root")["tokens"] == []


def test_e1_links_of_one_user_do_not_keep_others_from_logging_in(cluster: Cluster) -> None:
    backend = cluster.backend()
    links = [backend.session_link(ANN, {}) for _ in range(MAX_CODES_PER_USER + 1)]
    other = backend.session_link(BOB, {})
    used = [backend._credentials.use_code({"code": link["code"]}).user for link in (links[-1], other)]
    assert used == ["ann", "bob"]
    with pytest.raises(UnauthenticatedError):
        backend._credentials.use_code({"code": links[0]["code"]})


def test_tokens_and_a_new_key_for_them_leave_records(cluster: Cluster) -> None:
    made = do(cluster, lambda backend: backend.act_on_tokens(ANN, "create", {"scopes": "read,submit", "expires": "60"}))
    assert "needs the role admin" in do(cluster, lambda backend: backend.act_on_tokens(ANN, "rotate-key", {}))
    do(cluster, lambda backend: backend.act_on_tokens(ROOT, "rotate-key", {}))
    first, second = records(cluster)
    assert (first.action, second.action) == ("create-token", "rotate-token-key")
    assert json.loads(first.after)[first.object]["scopes"] == ["read", "submit"]
    assert made["token"] not in repr(first)


def test_a_time_limit_that_ends_a_job_leaves_a_record_of_the_controller(cluster: Cluster) -> None:
    job = cluster.submit(ANN, script="", time_limit_s=60)
    cluster.tick()
    cluster.tick(61.0)
    assert cluster.job(job).state.value == "COMPLETING"
    (record,) = records(cluster)
    assert (record.uid, record.user, record.source, record.action) == (-1, "controller", "controller", "EndRequested")
    assert record.object == f"job {job}"
    assert json.loads(record.before)[record.object]["state"] == "RUNNING"
    assert json.loads(record.after)[record.object]["state"] == "COMPLETING"


def test_a_node_drained_by_its_own_check_leaves_a_record_that_names_the_node(cluster: Cluster) -> None:
    cluster.says("n1", protocol.Condition(why="/tmp is full"))
    (record,) = records(cluster)
    assert (record.user, record.source, record.action, record.object) == (
        "controller",
        "node n1",
        "NodeDrained",
        "node n1",
    )
    assert "/tmp is full" in record.after


def test_a_job_submitted_without_the_backend_leaves_a_record_of_its_user(cluster: Cluster) -> None:
    job = cluster.submit(ANN)  # as hrun and crontabs do
    record = all_records(cluster)[0]
    assert (record.uid, record.user, record.object) == (ANN.uid, "ann", f"job {job}")


def test_the_ordinary_way_of_a_job_leaves_no_record_but_that_of_its_submission(cluster: Cluster) -> None:
    job = cluster.submit(ANN)
    cluster.tick()
    cluster.says("n1", cluster.report(job, protocol.STARTED))
    cluster.says("n1", cluster.report(job, protocol.ENDED, codes=[0], signals=[0]))
    assert records(cluster) == []
