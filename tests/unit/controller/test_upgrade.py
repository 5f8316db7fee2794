"""A newer controller on the database of the released version: everything is there, and goes on."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from cluster import BOB, Cluster
from jobs import T0

from hpcnode.wire import protocol
from hpcsched.controller.recovery import load_state
from hpcsched.model.ids import JobId
from hpcsched.model.job import JobState, Reason
from hpcsched.store.engine import SCHEMA, open_database
from hpcsched.store.store import HistoryQuery

RELEASED = Path(__file__).parents[2] / "golden" / "database-1.sql"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "h.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(RELEASED.read_text())
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    return path


def started(database: Path) -> Cluster:
    """Return a controller that has loaded the database; its nodes have not answered yet."""
    cluster = Cluster("n1", "n2", path=database, up=False)
    cluster.now_s = T0 + 20
    load_state(cluster.state, cluster.store, cluster.now_s)
    return cluster


def test_all_jobs_are_there_and_the_schema_is_ours(database: Path) -> None:
    cluster = started(database)
    assert {job.display_id: job.state.value for job in cluster.state.jobs.values()} == {
        "1": "COMPLETED", "2": "RUNNING", "3": "FAILED", "4": "RUNNING", "5_1": "PENDING", "5_4": "PENDING", "7": "PENDING",
    }  # fmt: skip
    assert (cluster.state.incarnation, cluster.state.epoch) == ("25eae5ba16077762", 2)
    assert (cluster.state.last_job_id, cluster.state.last_spec_id) == (7, 6)
    assert [job.id for job in cluster.store.history(HistoryQuery(users=("bob",)))] == [3, 7]
    assert [step.state for step in cluster.store.load_steps([1, 2])] == ["COMPLETED", "RUNNING"]
    assert [type(event).__name__ for event in cluster.store.load_events(6)] == ["Submitted"]
    assert cluster.store.request_jobs(1000, "one") == {1: cluster.state.jobs[JobId(1)].spec}
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
    assert open_database(database) is not None  # and once more, with nothing left to migrate


def test_what_runs_is_found_again_and_what_waits_starts(database: Path) -> None:
    cluster = started(database)
    cluster.welcome("n1", inventory=(cluster.report(2, protocol.STARTED),))
    cluster.welcome("n2", inventory=(cluster.report(4, protocol.STARTED),))
    assert [cluster.job(job_id).state for job_id in (2, 4)] == [JobState.RUNNING] * 2
    cluster.end(2)
    assert cluster.job(2).state is JobState.COMPLETED
    assert cluster.job(5).state is JobState.CONFIGURING
    assert cluster.job(5).token.startswith("25eae5ba16077762.5.0.batch.n1.")
    assert cluster.state.waits[cluster.job(7).id].reason is Reason.HELD_USER
    assert cluster.submit(BOB) == 8
