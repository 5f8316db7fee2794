"""Job scripts: stored once by hash, not in memory, within a quota per user, and deleted with their jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import ANN, BOB, Cluster, config
from jobs import T0, spec

from hpcnode.wire import protocol
from hpcsched.auth.authorize import Identity
from hpcsched.config.load import Config, build_config
from hpcsched.controller.recovery import load_state
from hpcsched.controller.requests import jobs, submission
from hpcsched.controller.tick import PURGE_EVERY_S
from hpcsched.errors import RequestError, UnavailableError
from hpcsched.model.ids import JobId
from hpcsched.model.spec import JobSpec
from hpcsched.store.store import Store

AGE_S = 3600.0


def text(number: int, size: int = 100) -> str:
    return f"#!/bin/sh\n# {number}\n".ljust(size, "#")


def limited(most: str) -> Config:
    made = config()
    return build_config({"scheduler": {"max_scripts_per_user": most}}, [], config_dir=made.config_dir, environ={})


def stored(cluster: Cluster) -> int:
    return len(cluster.store.script_hashes())


def cancel(cluster: Cluster, job_id: int, identity: Identity = ANN) -> None:
    cluster.ask(lambda tx: jobs.cancel(tx, identity, [str(job_id)], {}))


def shown(cluster: Cluster, identity: Identity, job_id: int) -> object:
    return cluster.backend().job(identity, str(job_id))["jobs"][0].get("script", "hidden")


def test_equal_scripts_are_stored_once_and_are_in_no_job_in_memory() -> None:
    cluster = Cluster("n1")
    ids = [cluster.submit(identity, hold=True, script=text(1)) for identity in (ANN, ANN, BOB)]
    ids.append(cluster.submit(hold=True, script=text(2)))
    assert stored(cluster) == 2
    assert {cluster.job(job_id).spec.script for job_id in ids} == {""}
    assert all(cluster.job(job_id).spec.has_script for job_id in ids)
    assert [shown(cluster, ANN, job_id) for job_id in ids] == [text(1), text(1), "hidden", text(2)]


def test_b8_the_node_gets_the_text() -> None:
    cluster = Cluster("n1")
    blobs: list[bytes] = []
    cluster.ports.send = lambda _node, message, blob=b"": blobs.append(blob)  # type: ignore[method-assign]
    cluster.submit(script=text(1))
    cluster.tick()
    assert blobs == [text(1).encode()]


def test_nobody_can_name_the_script_of_another_by_its_hash() -> None:
    cluster = Cluster("n1")
    secret = cluster.job(cluster.submit(ANN, hold=True, script=text(1))).spec
    for fields in (
        {"script": "", "script_sha256": secret.script_sha256},
        {"script_sha256": secret.script_sha256, "script_bytes": secret.script_bytes},
        {"script_bytes": -(1 << 40)},
        {"components": (spec(script_sha256=secret.script_sha256),)},
    ):
        with pytest.raises(RequestError, match="are set by the controller"):
            cluster.submit(BOB, **fields)


def test_a_request_id_that_comes_again_is_known_by_its_script() -> None:
    cluster = Cluster("n1")
    assert cluster.submit(request_id="r", script=text(1)) == cluster.submit(request_id="r", script=text(1))
    with pytest.raises(RequestError, match="which differs in its script;"):
        cluster.submit(request_id="r", script=text(2))


def test_a_users_unended_jobs_have_no_more_than_the_quota() -> None:
    cluster = Cluster("n1")
    cluster.state.config = limited("1M")
    ids = [cluster.submit(ANN, hold=True, script=text(number, 400 << 10)) for number in (1, 2)]
    with pytest.raises(
        RequestError,
        match=r"cannot submit the job: the scripts of your waiting and running jobs have 800 KiB, this one has 400 KiB more, "
        "and max_scripts_per_user is 1 MiB; wait until",
    ):
        cluster.submit(ANN, hold=True, script=text(3, 400 << 10))
    cluster.submit(ANN, hold=True, script=text(1, 400 << 10))  # the same again
    cluster.submit(BOB, hold=True, script=text(3, 400 << 10))
    cancel(cluster, ids[1])
    cluster.submit(ANN, hold=True, script=text(4, 400 << 10))


def test_a_refused_request_counts_for_nothing() -> None:
    cluster = Cluster("n1")
    cluster.state.config = limited("1M")
    many = [spec(hold=True, script=text(number, 300 << 10)) for number in range(5)]
    for _ in range(3):
        with pytest.raises(RequestError, match="max_scripts_per_user"):
            cluster.ask(lambda tx: submission.submit(tx, ANN, "", many, cluster.store.request_jobs))
    assert stored(cluster) == 0
    cluster.submit(ANN, hold=True, script=text(9, 1000 << 10))
    assert stored(cluster) == 1


def test_scripts_go_when_the_last_job_that_uses_them_is_forgotten() -> None:
    cluster = Cluster("n1")
    first, second = (cluster.submit(hold=True, script=text(1)) for _ in range(2))
    cluster.submit(hold=True, script=text(2))
    cancel(cluster, first)
    cluster.tick(AGE_S + PURGE_EVERY_S)
    assert JobId(first) not in cluster.state.jobs
    assert stored(cluster) == 2, "the second job uses it"
    cancel(cluster, second)
    cluster.tick(PURGE_EVERY_S)
    assert stored(cluster) == 2, "the second job can still be requeued"
    cluster.tick(AGE_S)
    assert stored(cluster) == 1
    assert shown(cluster, ANN, first) is None


def test_scripts_of_ended_jobs_go_early_where_they_are_too_many() -> None:
    cluster = Cluster("n1")
    cluster.state.config = limited("1M")
    ids = []
    for number in range(8):
        ids.append(cluster.submit(ANN, hold=True, script=text(number, 400 << 10)))
        cancel(cluster, ids[-1])
    assert stored(cluster) <= 2
    assert cluster.state.scripts.has(cluster.job(ids[-1]))
    cluster.ask(lambda tx: jobs.requeue(tx, ANN, [str(ids[-1])]))
    outcome = cluster.ask(lambda tx: jobs.requeue(tx, ANN, [str(ids[0])]))
    assert "its script is not kept any more; submit it again" in outcome.errors[0]["error"]


def test_a_script_that_went_early_comes_back_with_a_job_that_has_it_again() -> None:
    cluster = Cluster("n1")
    cluster.state.config = limited("1M")
    for number in (1, 2, 3, 1):
        job_id = cluster.submit(ANN, hold=True, script=text(number, 500 << 10))
        if number != 1 or len(cluster.state.pending) != 1:
            cancel(cluster, job_id)
    cancel_all = [job_id for job_id in cluster.state.pending]
    assert [shown(cluster, ANN, job_id) for job_id in cancel_all] == [text(1, 500 << 10)]
    cluster.tick(AGE_S + PURGE_EVERY_S)  # the jobs that ended are forgotten, the one that waits keeps its script
    assert [shown(cluster, ANN, job_id) for job_id in cancel_all] == [text(1, 500 << 10)]


def test_what_a_crash_left_of_scripts_is_deleted_at_the_next_start(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "db")
    kept = cluster.submit(hold=True, script=text(1))
    cluster.store.connection.execute("INSERT INTO scripts VALUES ('left', x'00')")
    again = Cluster("n1", path=tmp_path / "db", up=False)
    load_state(again.state, again.store, T0)
    again.tick()
    assert again.store.script_hashes() == [again.job(kept).spec.script_sha256]
    assert shown(again, ANN, kept) == text(1)


def test_a_script_that_cannot_be_read_starts_its_job_when_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit(hold=True)

    def fails(_store: Store, _spec: JobSpec) -> bytes:
        raise UnavailableError("cannot read the database: disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "script", fails)
        cluster.ask(lambda tx: jobs.release(tx, ANN, [str(job_id)]))
        assert cluster.sent(protocol.Launch) == []
        cluster.tick(1.0)
        assert cluster.sent(protocol.Launch) == []
    cluster.tick(1.0)
    assert len(cluster.sent(protocol.Launch)) == 1


def test_a_job_whose_script_is_lost_ends_with_that_reason() -> None:
    cluster = Cluster("n1")
    lost = cluster.submit(hold=True)
    cluster.store.delete_scripts(cluster.store.script_hashes())
    cluster.ask(lambda tx: jobs.release(tx, ANN, [str(lost)]))
    cluster.tick()
    assert cluster.job(lost).outcome == "FAILED"
    assert cluster.job(lost).reason_detail == "its script is not in the database any more; submit it again"


def test_a_script_that_went_early_is_gone_after_a_restart_too(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "db")
    cluster.state.config = limited("1M")
    ids = []
    for number in range(8):
        ids.append(cluster.submit(ANN, hold=True, script=text(number, 400 << 10)))
        cancel(cluster, ids[-1])
    cluster.tick(PURGE_EVERY_S)
    again = Cluster("n1", path=tmp_path / "db", up=False)
    load_state(again.state, again.store, T0)
    outcome = again.ask(lambda tx: jobs.requeue(tx, ANN, [str(ids[0]), str(ids[-1])]))
    assert outcome.jobs == [ids[-1]]
    assert "its script is not kept any more; submit it again" in outcome.errors[0]["error"]
    assert again.state.scripts.unended_bytes(ANN.uid) == 400 << 10
    again.tick(AGE_S + PURGE_EVERY_S)
    assert again.store.script_hashes() == [again.job(ids[-1]).spec.script_sha256]
