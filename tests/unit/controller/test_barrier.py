"""What fails unexpectedly in a tick fails alone: undone, told, logged once; the rest is committed, and memory is as the disk."""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cluster import ANN, BOB, Cluster
from jobs import spec

from hpcnode.wire import message as message_codec
from hpcnode.wire import protocol
from hpcsched import errors
from hpcsched.controller import tick
from hpcsched.controller.recovery import load_state
from hpcsched.controller.requests import submission
from hpcsched.errors import InternalError, InvariantError, RequestError
from hpcsched.lifecycle.events import EndRequested
from hpcsched.lifecycle.node import NodeUp
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import JobState, Reason
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import StepRecord, Transaction


@pytest.fixture(autouse=True)
def _forget_faults() -> None:
    errors._faults.clear()


def submit(cluster: Cluster, answers: list[Any], **fields: Any) -> None:
    """Ask for a job, in the next tick."""
    one = spec(**fields)
    cluster.controller.ask(lambda tx: submission.submit(tx, ANN, "", [one], cluster.store.request_jobs), answers.append)


def assert_memory_is_disk(cluster: Cluster) -> None:
    known = cluster.state
    read = ClusterState(config=known.config, incarnation=known.incarnation, epoch=known.epoch)
    load_state(read, cluster.store, cluster.now_s)
    assert read.jobs == known.jobs
    assert list(read.pending) == list(known.pending)
    assert (set(read.active), read.arrays, read.usage) == (set(known.active), known.arrays, known.usage)
    assert known.count_states() == Counter(job.state for job in known.jobs.values()) == read.count_states()


def test_an_unexpected_failure_of_one_item_is_its_own_and_leaves_nothing_behind(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "db")
    answers: list[Any] = []

    def broken(tx: Transaction) -> None:
        submission.submit(tx, BOB, "", [spec(), spec()], cluster.store.request_jobs)
        raise ValueError("nobody thought of this")

    submit(cluster, answers)
    cluster.controller.ask(broken, answers.append)
    submit(cluster, answers)
    cluster.tick()
    assert [type(answer).__name__ for answer in answers] == ["list", "InternalError", "list"]
    assert sorted(cluster.state.jobs) == [1, 2]
    assert {job.user for job in cluster.state.jobs.values()} == {"ann"}
    assert_memory_is_disk(cluster)


def test_the_traceback_is_logged_once_under_the_number_that_the_client_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster("n1")

    def broken(tx: Transaction) -> None:
        raise ValueError("nobody thought of this")

    told = []
    for _ in range(12):
        with pytest.raises(InternalError) as caught:
            cluster.ask(broken)
        told.append(caught.value.reference)
    assert len(set(told)) == 1
    assert told[0] in str(caught.value)
    records = [record for record in caplog.records if told[0] in record.getMessage()]
    assert [bool(record.exc_info) for record in records] == [True, False]  # and once more at the tenth time
    assert "10 times" in records[1].getMessage()


def booted(at_s: float) -> NodeUp:
    """Return an event that no database can store: its boot id is a number of 71 bits."""
    facts = {"machine_id": "", "spool": "", "hardware": "", "agent_version": "", "root_agent": False}
    return NodeUp(node=NodeName("n1"), at_s=at_s, boot_id=2**70, **facts)  # type: ignore[arg-type]


def test_what_cannot_be_written_is_found_and_the_rest_of_the_tick_is_on_disk(tmp_path: Path) -> None:
    cluster = Cluster("n1", path=tmp_path / "db")
    answers: list[Any] = []
    row = StepRecord(job_id=1, attempt=0, step="7", name="\ud800", nodes=("n1",), ntasks=1, state="RUNNING")
    submit(cluster, answers)
    cluster.controller.ask(lambda tx: tx.put_step(row), answers.append)
    cluster.controller.ask(lambda tx: tx.record_node(booted(tx.now_s)), answers.append)
    submit(cluster, answers, nodes_min=9)
    submit(cluster, answers)
    cluster.tick()
    kinds = [type(answer).__name__ for answer in answers]
    assert kinds == ["list", "InternalError", "InternalError", "RequestError", "list"]
    assert "UnicodeEncodeError" in str(answers[1])
    assert "OverflowError" in str(answers[2])
    assert cluster.state.nodes[NodeName("n1")].boot_id == "boot-1"
    assert_memory_is_disk(cluster)
    cluster.tick(1.0)
    assert [to for to, _ in cluster.sent(protocol.Launch)] == ["n1", "n1"]  # and it is planned for as ever
    assert_memory_is_disk(cluster)


def test_items_after_one_that_cannot_be_written_keep_the_ids_that_they_were_given() -> None:
    cluster = Cluster("n1")
    answers: list[Any] = []

    def bad(tx: Transaction) -> Any:
        made = submission.submit(tx, BOB, "", [spec(), spec()], cluster.store.request_jobs)
        tx.note_request(1, "\ud800", [1])
        return made

    ids: list[int] = []

    def good(tx: Transaction) -> None:
        ids.append(submission.submit(tx, ANN, "", [spec()], cluster.store.request_jobs)[0]["job_id"])

    cluster.controller.ask(bad, answers.append)
    cluster.controller.ask(good, answers.append)
    cluster.tick()
    assert isinstance(answers[0], InternalError)
    assert answers[1] is None
    assert ids == [3, 3]  # asked twice, with one answer: what was derived from the number still holds
    assert sorted(cluster.state.jobs) == [3]


def test_a_value_that_sqlite_refuses_is_not_taken_for_a_full_disk() -> None:
    cluster = Cluster("n1")
    job_id = cluster.submit()
    cluster.state.jobs[JobId(99)] = cluster.job(job_id)  # a trap: the commit refers to a row that is not there

    def bad(tx: Transaction) -> None:
        tx.put_step(StepRecord(job_id=1, attempt=0, step="0", name=None, nodes=(), ntasks=1, state="RUNNING"))  # type: ignore[arg-type]

    del cluster.state.jobs[JobId(99)]
    with pytest.raises(InternalError, match="IntegrityError"):
        cluster.ask(bad)
    assert cluster.submit() == job_id + 1


def test_an_answer_that_cannot_be_given_keeps_nobody_elses() -> None:
    cluster = Cluster("n1")
    answers: list[Any] = []

    def refuse(result: Any) -> None:
        raise RuntimeError("the client's future is broken")

    cluster.controller.ask(lambda tx: None, refuse)
    submit(cluster, answers)
    cluster.tick()
    assert answers == [[{"job_id": 1, "tasks": 1}]]
    assert cluster.sent(protocol.Launch)


def test_a_plan_that_fails_stops_nothing_else_and_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster("n1")
    time_s = [100.0]
    monkeypatch.setattr(cluster.ports, "monotonic_s", lambda: time_s[0])
    plans: list[int] = []

    def fail(*_: object) -> None:
        plans.append(1)
        raise ZeroDivisionError("of the planner")

    with monkeypatch.context() as broken:
        broken.setattr(cluster.controller._planning, "go_on", fail)
        job_id = cluster.submit()
        for _ in range(5):
            cluster.tick()
        assert len(plans) == 1
        time_s[0] += 1.0
        cluster.tick()
        time_s[0] += 1.0
        cluster.tick()
        assert len(plans) == 2  # the pause has doubled
    assert cluster.job(job_id).state is JobState.PENDING
    assert sum(bool(record.exc_info) for record in caplog.records) == 1
    time_s[0] += 60.0
    cluster.tick()
    assert cluster.job(job_id).state is JobState.CONFIGURING


def test_a_job_whose_start_fails_keeps_no_other_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("n1")
    start = tick.Controller._start

    def fail(self: Any, tx: Transaction, job: Any, decision: Any) -> None:
        start(self, tx, job, decision)
        if job.id == 1:
            raise KeyError("n7")

    monkeypatch.setattr(tick.Controller, "_start", fail)
    first, second = cluster.submit(exclusive=True), cluster.submit(exclusive=True)
    cluster.tick(1.0)
    cluster.tick(1.0)
    assert (cluster.job(first).state, cluster.job(second).state) == (JobState.PENDING, JobState.CONFIGURING)
    wait = cluster.state.waits[first]
    assert wait.reason is Reason.LAUNCH_FAILED
    assert "fault" in wait.detail
    assert [launch.job_id for _, launch in cluster.sent(protocol.Launch)] == [second]


def test_a_job_that_cannot_be_ended_keeps_no_other_running_past_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("n1", "n2")
    first, second = (cluster.submit(script="", time_limit_s=60, exclusive=True) for _ in range(2))
    record = Transaction.record

    def fail(self: Transaction, event: Any) -> Any:
        if event.job_id == first and isinstance(event, EndRequested):
            raise OverflowError("too much")
        return record(self, event)

    monkeypatch.setattr(Transaction, "record", fail)
    cluster.tick(1000.0)
    assert cluster.job(second).outcome is JobState.TIMEOUT
    assert cluster.job(first).state is JobState.CONFIGURING or cluster.job(first).state is JobState.RUNNING


def test_a_launch_that_is_too_long_to_be_sent_fails_its_own_job(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("n1")
    send = cluster.ports.send

    def encode(node: NodeName, message: Any, blob: bytes = b"") -> None:
        protocol.encode(message, blob)
        send(node, message, blob)

    monkeypatch.setattr(cluster.ports, "send", encode)
    monkeypatch.setattr(message_codec, "MAX_BLOB_BYTES", 100)
    long, short = cluster.submit(script="#!/bin/sh\n" + 200 * "#"), cluster.submit(script="#!/bin/sh\n")
    cluster.tick()
    cluster.tick()
    assert cluster.job(long).state is JobState.FAILED
    assert "bytes are too many" in cluster.job(long).reason_detail
    assert cluster.job(short).state is JobState.CONFIGURING


def test_a_broken_ledger_still_stops_the_controller() -> None:
    cluster = Cluster("n1")

    def broken(tx: Transaction) -> None:
        raise InvariantError("one job twice")

    cluster.controller.ask(broken, lambda result: None)
    with pytest.raises(InvariantError):
        cluster.tick()


def test_an_expected_refusal_is_not_logged_as_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster("n1")
    with caplog.at_level(logging.WARNING), pytest.raises(RequestError):
        cluster.submit(nodes_min=9)
    assert not caplog.records


def test_sqlite_says_of_a_full_disk_something_else() -> None:
    assert issubclass(sqlite3.OperationalError, sqlite3.DatabaseError)
    assert not issubclass(sqlite3.OperationalError, sqlite3.DataError | sqlite3.IntegrityError)
