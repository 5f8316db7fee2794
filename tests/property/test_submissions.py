"""Jobs that wait as submitted share a row of the database: it gives back what the controller's memory holds."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import T0, share, spec

from hpcsched.config.load import build_config
from hpcsched.controller.recovery import load_state
from hpcsched.lifecycle.events import Allocated, EndRequested, Held, JobEvent, Released, Submitted
from hpcsched.lifecycle.job import can
from hpcsched.model.ids import JobId
from hpcsched.model.job import FINAL, Hold, JobState
from hpcsched.model.spec import ArraySpec
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import NotedRequest, Transaction
from hpcsched.store.engine import open_database
from hpcsched.store.store import HistoryQuery, Store

CONFIG = build_config({}, [], config_dir=Path("/nonexistent"), environ={})
INDICES = st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(tuple)
SUBMIT = st.tuples(st.just("submit"), INDICES, st.sampled_from(["", "hold", "begin"]))
CHANGE = st.tuples(st.sampled_from([Held, Released, Allocated, EndRequested]), st.integers(0, 20), st.booleans())
STEPS = st.lists(
    st.tuples(
        st.lists(SUBMIT | CHANGE, min_size=1, max_size=4),
        st.sampled_from(["commit", "commit", "undo", "failure", "restart"]),
    ),
    max_size=8,
)


def event_of(kind: type[JobEvent], job_id: int) -> JobEvent:
    own = {
        Held: {"hold": Hold.USER, "by_uid": 1},
        Released: {"by_uid": 1},
        Allocated: {"token": "t", "epoch": 1, "shares": (share(),)},
        EndRequested: {"outcome": JobState.CANCELLED, "by_uid": 1, "why": "cancelled"},
    }
    return kind(job_id=JobId(job_id), at_s=T0 + 1, **own[kind])  # type: ignore[arg-type]


class Head:
    """A cluster state and the database under it."""

    def __init__(self) -> None:
        self.connection = open_database(None)
        self.start()

    def start(self) -> None:
        """Start again: nothing but the database is left."""
        self.store = Store(self.connection)
        self.cluster = ClusterState(config=CONFIG, incarnation="i", epoch=1)
        load_state(self.cluster, self.store, 0.0)

    def change(self, work: list[tuple[object, ...]]) -> Transaction:
        tx = Transaction(self.cluster, T0)
        for kind, what, how in work:
            if kind == "submit":
                array = None if what is None else ArraySpec(indices=what)  # type: ignore[arg-type]
                asked = spec(name=str(how), array=array, hold=how == "hold", begin_at_s=9 if how == "begin" else None)
                tx.submit(asked, uid=1, user="ann", partition="main", time_limit_s=60)
                continue
            known = sorted(self.cluster.jobs)
            job_ids = known[what % len(known) :][: None if how else 1] if known else []  # type: ignore[operator]
            for job_id in job_ids:
                if can(self.cluster.jobs[job_id], kind):  # type: ignore[arg-type]
                    tx.record(event_of(kind, job_id))  # type: ignore[arg-type]
        return tx


def check(head: Head) -> None:
    memory = dict(sorted(head.cluster.jobs.items()))
    reader = Store(head.connection)
    assert reader.load_jobs(0.0) == list(memory.values())
    assert reader.jobs(range(100)) == list(memory.values())
    assert reader.last_ids()[0] == head.cluster.last_job_id
    assert reader.history_ids(HistoryQuery()) == list(memory)
    for states in (("PENDING",), ("CONFIGURING", "CANCELLED")):
        found = [job.id for job in memory.values() if job.state in states]
        assert reader.history_ids(HistoryQuery(states=states)) == found
    assert reader.history_ids(HistoryQuery(names=("hold",))) == [
        one.id for one in memory.values() if one.spec.name == "hold"
    ]
    assert reader.history_ids(HistoryQuery(limit=2)) == list(memory)[-2:]
    assert all(isinstance(reader.load_events(job_id)[0], Submitted) for job_id in memory)
    _, jobs, unfinished, _, _ = reader.counts()
    assert (jobs, unfinished) == (len(memory), sum(job.state not in FINAL for job in memory.values()))
    waiting = {job.array_job_id or job.id for job in memory.values() if job.state is JobState.PENDING}
    (rows,) = head.connection.execute("SELECT count(*) FROM submissions").fetchone()
    assert rows <= len(waiting), "rows of submissions that stand for nothing are left"


def check_each_job(head: Head) -> None:
    memory = dict(sorted(head.cluster.jobs.items()))
    for job_id in memory:
        tasks = [one.id for one in memory.values() if job_id in (one.id, one.array_job_id)]
        assert Store(head.connection).history_ids(HistoryQuery(job_ids=(job_id,))) == tasks


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_the_database_gives_back_what_memory_holds(steps: list[tuple[list[tuple[object, ...]], str]]) -> None:
    head = Head()
    for work, end in steps:
        tx = head.change(work)
        if end == "failure":
            tx.batch.requests = [NotedRequest(1, "twice", [], T0, "")] * 2
            with pytest.raises(sqlite3.IntegrityError):
                head.store.commit(tx.batch)
        if end in ("undo", "failure"):
            tx.undo()
        else:
            head.store.commit(tx.batch)
        if end == "restart":
            head.start()
        check(head)
    check_each_job(head)
