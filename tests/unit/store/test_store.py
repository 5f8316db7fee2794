"""The database: what is committed is there, what is not is not, and only our own file is opened."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from dataclasses import Field, fields
from pathlib import Path

import pytest
from jobs import T0, job, node, share, spec

from hpcsched.errors import ConfigError, UnavailableError
from hpcsched.lifecycle.events import Allocated, Started, Submitted
from hpcsched.lifecycle.job import apply, submitted_jobs
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import ExitStatus, Hold, Job, JobState, RankFailure, Reason, Refusal
from hpcsched.model.spec import ArraySpec, Dependency, DependencyKind
from hpcsched.state.transaction import NotedRequest, StepRecord, WriteBatch
from hpcsched.store import rows
from hpcsched.store.engine import create_database, incarnation, open_database, raise_epoch, reading
from hpcsched.store.store import HistoryQuery, Store


@pytest.fixture
def database(tmp_path: Path) -> sqlite3.Connection:
    return open_database(tmp_path / "h.db", make=True)


def batch_of(*jobs: Job) -> WriteBatch:
    return WriteBatch(specs={one.spec_id: one.spec for one in jobs}, jobs={one.id: one for one in jobs})


def test_a_job_comes_back_as_it_was(database: sqlite3.Connection) -> None:
    store = Store(database)
    dependency = (Dependency(kind=DependencyKind.AFTER_OK, job_ids=(1, 2)),)
    whole = job(
        7,
        spec=spec(env=(("A", "b"),), array=ArraySpec(indices=(1, 2), limit=1), dependency=dependency),
        state=JobState.RUNNING,
        shares=(share("n1", gpus=(0, 1)), share("n2")),
        held_nodes=("n1", "n2"),
        exit=ExitStatus(code=1, signal=0),
        started_at_s=T0,
    )
    store.commit(batch_of(whole))
    assert store.load_jobs(ended_after_s=T0) == [whole]
    assert store.last_ids() == (7, 7)


def test_each_field_of_a_job_comes_back(database: sqlite3.Connection) -> None:
    store = Store(database)
    given = {"id", "spec", "spec_id", "component"}  # a component is never stored
    values = {field.name: _value(field, at) for at, field in enumerate(fields(Job)) if field.name not in given}
    whole = job(7, **values)
    store.commit(batch_of(whole))
    assert store.load_jobs(ended_after_s=0) == [whole]


def _value(field: Field[object], at: int) -> object:
    """Return a value of the field's type that no other field has, where its type has so many."""
    name = field.name
    shares, names = (share(name),), (name,)
    values = {"int": at, "JobId": at, "float": at + 0.5, "str": name, "bool": True, "ExitStatus": ExitStatus(code=1)}
    values |= {"JobState": JobState.TIMEOUT, "Reason": Reason.LICENSES, "Hold": Hold.ADMIN}
    values |= {"tuple[Share, ...]": shares, "tuple[NodeName, ...]": names}
    values |= {"tuple[Refusal, ...]": (Refusal(NodeName(name), at, True, "no such directory"),)}
    values |= {"tuple[Dependency, ...]": (Dependency(kind=DependencyKind.AFTER_OK, job_ids=(JobId(1),)),)}
    return values[str(field.type).removesuffix(" | None")]


def test_jobs_as_submitted_and_others_come_back_in_their_order(database: sqlite3.Connection) -> None:
    store = Store(database)
    jobs = [
        job(1, hold=Hold.ADMIN, nice=7, priority_set=3, time_limit_s=60, not_before_s=T0 + 5, eligible_at_s=T0),
        job(2, attempt=1, restarts=1),
        job(3, reason_detail="was requeued"),
        job(4, array_job_id=JobId(4), array_task_id=0, partition="a,b"),
        job(5, qos_set=""),
        job(6, state=JobState.COMPLETED, ended_at_s=T0 + 1),
        job(7),
    ]
    store.commit(batch_of(*jobs))
    assert store.load_jobs(ended_after_s=T0) == jobs
    assert store.load_jobs(ended_after_s=T0 + 2) == [one for one in jobs if one.id != 6]


def test_a_start_reads_nothing_of_the_history(database: sqlite3.Connection) -> None:
    store = Store(database)
    waiting = batch_of(job(2))
    waiting.submitted = [(waiting.jobs[JobId(2)],)]
    store.commit(batch_of(job(1)))
    store.commit(waiting)
    asked: list[str] = []
    database.set_trace_callback(asked.append)
    store.load_jobs(ended_after_s=T0)
    store.past_runs([JobState.COMPLETED], 10)
    database.set_trace_callback(None)
    plans = [row[3] for query in asked for row in database.execute("EXPLAIN QUERY PLAN " + query)]
    assert [plan for plan in plans if plan.startswith("SCAN jobs") or "SCAN specs" in plan or "ORDER BY" in plan] == []
    assert len(asked) == 5


def test_the_columns_are_those_of_the_database(database: sqlite3.Connection) -> None:
    names = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert set(rows.metadata.tables) == names
    for name, table in rows.metadata.tables.items():
        found = {row[1]: row[2:] for row in database.execute(f"PRAGMA table_info({name})")}
        assert set(found) == set(table.columns.keys()), name
        for column in table.columns:
            kind, not_null, _, key = found[column.name]
            said = (str(column.type), column.primary_key)
            assert said == (kind, key > 0), (name, column.name)
            assert column.primary_key or column.nullable is not bool(not_null), (name, column.name)


def test_what_is_written_seldom_is_undone_with_its_batch(database: sqlite3.Connection) -> None:
    store = Store(database)
    store.commit(WriteBatch(adopted=["a"]))  # a second time is no error: it is there
    with pytest.raises(sqlite3.IntegrityError):  # the values are wrong: waiting for the disk would not help
        store.commit(WriteBatch(adopted=["b", "a"], failures=[failure(1), failure(1, node=None)]))
    assert not database.in_transaction
    assert (store.adopted(), store.load_failures(1, 0)) == ({"a"}, [])
    store.commit(
        WriteBatch(adopted=["a", "c"], failures=[failure(1), failure(1, text="another"), failure(0, echo=True)])
    )
    assert (store.adopted(), store.load_failures(1, 0)) == ({"a", "c"}, [failure(1), failure(0, echo=True)])


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (sqlite3.OperationalError("disk I/O error"), "cannot read the database: disk I/O error$"),
        (sqlite3.DatabaseError("it is malformed"), "it is malformed; restore it from a backup: hpcsched restore$"),
    ],
)
def test_a_damaged_database_is_to_be_restored_and_an_unwell_disk_is_not(
    database: sqlite3.Connection, error: sqlite3.Error, says: str
) -> None:
    with pytest.raises(UnavailableError, match=says), reading(database):
        raise error


@pytest.mark.parametrize("part", [part.name for part in fields(WriteBatch)])
def test_a_batch_with_any_one_part_is_not_empty(part: str) -> None:
    """What the tick takes for empty is never committed."""
    value = getattr(WriteBatch(), part)
    one: object = {1: None} if isinstance(value, dict) else [None] if isinstance(value, list) else "x"
    assert not WriteBatch()
    assert WriteBatch(**{part: one})  # type: ignore[arg-type]


def failure(rank: int, node: str | None = "n1", text: str = "why", *, echo: bool = False) -> RankFailure:
    return RankFailure(job_id=1, attempt=0, rank=rank, ranks=2, node=node, at_s=T0, echo=echo, text=text)  # type: ignore[arg-type]


def test_a_reading_that_fails_says_so(database: sqlite3.Connection) -> None:
    store = Store(database)
    database.execute("DROP TABLE events")
    with pytest.raises(UnavailableError, match="cannot read the database: no such table: events"):
        store.load_events(1)


def test_the_history_is_searched_by_all_that_hacct_names(database: sqlite3.Connection) -> None:
    store = Store(database)
    jobs = [
        job(1, spec=spec(name="a"), user="ann"),
        job(2, spec=spec(name="b"), user="bob", state=JobState.FAILED, ended_at_s=T0 + 9),
        job(3, spec=spec(name="a"), user="bob", array_job_id=JobId(3), array_task_id=0),
        job(4, spec=spec(name="a"), user="bob", array_job_id=JobId(3), array_task_id=1, submitted_at_s=T0 + 60),
    ]
    store.commit(batch_of(*jobs))
    found = {
        HistoryQuery(): [1, 2, 3, 4],
        HistoryQuery(limit=2): [3, 4],
        HistoryQuery(job_ids=(3, 2)): [2, 3, 4],
        HistoryQuery(users=("bob", "eve")): [2, 3, 4],
        HistoryQuery(states=("FAILED",)): [2],
        HistoryQuery(names=("a",), users=("bob",)): [3, 4],
        HistoryQuery(start_s=T0 + 10): [1, 3, 4],
        HistoryQuery(end_s=T0 + 59): [1, 2, 3],
    }
    assert {query: [one.id for one in store.history(query)] for query in found} == found


def test_more_steps_and_jobs_are_found_than_a_statement_has_places_for(database: sqlite3.Connection) -> None:
    store = Store(database)
    store.commit(batch_of(job(1), job(2)))
    many = tuple(range(1, 300_000))
    assert [one.id for one in store.history(HistoryQuery(job_ids=many))] == [1, 2]
    assert store.load_steps(many) == []


def test_only_recent_ends_are_loaded_and_the_history_has_them_all(database: sqlite3.Connection) -> None:
    store = Store(database)
    old = job(1, state=JobState.COMPLETED, ended_at_s=T0 - 100)
    new = job(2, state=JobState.FAILED, ended_at_s=T0 + 100)
    store.commit(batch_of(old, new, job(3)))
    assert [one.id for one in store.load_jobs(ended_after_s=T0)] == [2, 3]
    assert [one.id for one in store.history(HistoryQuery())] == [1, 2, 3]
    assert [one.id for one in store.history(HistoryQuery(states=("FAILED",)))] == [2]
    assert [one.id for one in store.history(HistoryQuery(job_ids=(1, 3)))] == [1, 3]
    assert [one.id for one in store.history(HistoryQuery(start_s=T0))] == [2, 3]


def test_replaying_a_task_s_events_gives_its_row(database: sqlite3.Connection) -> None:
    store = Store(database)
    array = spec(array=ArraySpec(indices=(3, 4)))
    submitted = Submitted(job_id=JobId(1), at_s=T0, spec_id=1, uid=5, user="ann", partition="main", time_limit_s=60)
    tasks = submitted_jobs(submitted, array)
    start = Allocated(job_id=JobId(2), at_s=T0 + 1, token="t", epoch=1, shares=(share(),))
    second = apply(apply(tasks[1], start), Started(job_id=JobId(2), at_s=T0 + 2))
    batch = batch_of(tasks[0], second)
    batch.specs = {1: array}
    batch.events = [submitted, start, Started(job_id=JobId(2), at_s=T0 + 2)]
    store.commit(batch)
    first, *rest = store.load_events(2)
    assert isinstance(first, Submitted)
    replayed = submitted_jobs(first, array)[1]
    for event in rest:
        replayed = apply(replayed, event)
    assert replayed == second == store.history(HistoryQuery(job_ids=(2,)))[0]


def test_a_new_array_comes_back_as_its_tasks_and_with_what_happened_to_them_at_once(
    database: sqlite3.Connection,
) -> None:
    store = Store(database)
    array = spec(array=ArraySpec(indices=(0, 7, 3), limit=1), begin_at_s=int(T0) + 9, priority=5, account="physics")
    submitted = Submitted(job_id=JobId(11), at_s=T0, spec_id=1, uid=5, user="ann", partition="main", time_limit_s=60)
    tasks = submitted_jobs(submitted, array)
    start = Allocated(job_id=JobId(12), at_s=T0 + 1, token="t", epoch=1, shares=(share(),))
    started = apply(tasks[1], start)
    batch = batch_of(tasks[0], started, tasks[2])
    batch.submitted = [tasks]
    store.commit(batch)
    assert store.load_jobs(ended_after_s=T0) == [tasks[0], started, tasks[2]]


def test_equal_specifications_are_one_value_after_loading(database: sqlite3.Connection) -> None:
    store = Store(database)
    store.commit(batch_of(job(1, spec=spec(name="same")), job(2, spec=spec(name="same")), job(3, spec=spec(name="no"))))
    first, second, third = store.load_jobs(ended_after_s=T0)
    assert first.spec is second.spec
    assert (first.spec.name, third.spec.name) == ("same", "no")


def test_jobs_share_the_row_of_their_environment(database: sqlite3.Connection) -> None:
    store = Store(database)
    env = (("HOME", "/home/ann"), ("NAME", "\udcff\u00e9"))
    store.commit(batch_of(job(1, spec=spec(name="one", env=env)), job(2, spec=spec(name="two", env=tuple(env)))))
    store.commit(batch_of(job(3, spec=spec(name="three", env=env)), job(4, spec=spec(env=()))))
    first, second, third, fourth = store.load_jobs(ended_after_s=T0)
    assert first.spec.env == env
    assert first.spec.env is second.spec.env is third.spec.env
    assert fourth.spec.env == ()
    assert database.execute("SELECT count(*) FROM environments").fetchone() == (1,)


def test_g5_a_repeated_request_id_finds_its_jobs_and_only_its_user_s(database: sqlite3.Connection) -> None:
    store = Store(database)
    made = {number: job(number) for number in (4, 5)}
    specs = {one.spec_id: one.spec for one in made.values()}
    store.commit(WriteBatch(specs=specs, jobs=made, requests=[NotedRequest(1000, "abc", [4, 5], T0)]))
    assert store.request_jobs(1000, "abc") == {4: made[4].spec, 5: made[5].spec}
    assert store.request_jobs(1001, "abc") is None


def test_nodes_and_steps_come_back(database: sqlite3.Connection) -> None:
    store = Store(database)
    step = StepRecord(job_id=1, attempt=0, step="10", name="a", nodes=("n1",), ntasks=2, state="RUNNING")
    batch = WriteBatch(nodes={"n1": node(drained=True, drained_why="disk", boot_id="b")})
    batch.steps = {(1, 0, "10"): step, (1, 0, "2"): StepRecord(**_values(step) | {"step": "2"})}
    store.commit(batch)
    assert store.load_nodes()["n1"].drained_why == "disk"
    assert [found.step for found in store.load_steps([1])] == ["2", "10"]
    assert store.last_step(1, 0) == 10


def _values(step: StepRecord) -> dict[str, object]:
    return {name: getattr(step, name) for name in StepRecord.__dataclass_fields__}


def test_a_full_disk_keeps_nothing_of_the_batch_and_says_so(database: sqlite3.Connection) -> None:
    store = Store(database)
    store.commit(batch_of(job(1)))
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")
    big = job(2, spec=spec(script="#!/bin/sh\n" + "x" * 1_000_000))
    with pytest.raises(UnavailableError, match="cannot write the database.*full"):
        store.commit(batch_of(big))
    assert [one.id for one in store.history(HistoryQuery())] == [1]


def test_the_epoch_rises_and_the_incarnation_stays(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    first = open_database(path, make=True)
    name, epoch = incarnation(first), raise_epoch(first)
    first.close()
    second = open_database(path)
    assert incarnation(second) == name
    assert raise_epoch(second) == epoch + 1
    assert path.stat().st_mode & 0o077 == 0


def test_what_was_committed_survives_kill_9(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from jobs import job
from hpcsched.store.engine import open_database
from hpcsched.state.transaction import WriteBatch
from hpcsched.store.store import Store
store = Store(open_database(Path({str(tmp_path / "h.db")!r}), make=True))
store.commit(WriteBatch(specs={{1: job(1).spec}}, jobs={{1: job(1)}}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    assert [one.id for one in Store(open_database(tmp_path / "h.db")).load_jobs(0.0)] == [1]


def test_a_database_is_not_made_by_mistake(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    with pytest.raises(ConfigError, match="it is not there.*hpcsched restore.*hpcsched init --database"):
        open_database(path)
    assert not path.exists()
    path.touch()
    with pytest.raises(ConfigError, match="it is empty"):
        open_database(path)
    create_database(path)
    name = incarnation(open_database(path))
    create_database(path)
    assert incarnation(open_database(path)) == name


def test_a_database_is_not_made_beside_the_log_of_a_lost_one(tmp_path: Path) -> None:
    (tmp_path / "h.db-wal").write_text("of a database that is gone")
    with pytest.raises(ConfigError, match="h.db-wal is left of one"):
        create_database(tmp_path / "h.db")
    assert (tmp_path / "h.db-wal").exists()


def test_d6_a_foreign_a_newer_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("PRAGMA user_version = 3")
    with pytest.raises(ConfigError, match="another program"):
        open_database(foreign)
    newer = tmp_path / "newer.db"
    create_database(newer)
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match="schema 99"):
        open_database(newer)
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"not a database at all" * 100)
    with pytest.raises(ConfigError, match="restore it from a backup"):
        open_database(damaged)


def test_d6_a_database_that_was_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.db"
    create_database(whole)
    with sqlite3.connect(whole) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    content = whole.read_bytes()
    taken = []
    for size in range(
        0, len(content.rstrip(b"\0")), 512
    ):  # the last page may end with zeros: nothing is lost with them
        cut = tmp_path / f"{size}.db"
        cut.write_bytes(content[:size])
        try:
            open_database(cut)
            taken.append(size)
        except ConfigError:
            pass
    assert len(content) > 50 * 512
    assert taken == []
