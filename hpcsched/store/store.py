"""Read the controller's state and commit its changes; search the history.

A `Batch` is everything that one tick changed. `commit` writes it in one transaction; when it returns, the batch is on disk,
and when it raises, nothing of it is.
"""

from __future__ import annotations

import json
import sqlite3
from collections import namedtuple
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, bindparam, delete, func, insert, select
from sqlalchemy.dialects.sqlite import insert as upsert

from hpcsched.errors import UnavailableError
from hpcsched.lifecycle.events import Event, NodeLost, from_data, to_data
from hpcsched.model.codec import spec_from_json, spec_to_json
from hpcsched.model.ids import JobId
from hpcsched.model.job import FINAL, Job, JobState
from hpcsched.model.node import Node
from hpcsched.model.reservation import Reservation
from hpcsched.model.spec import JobSpec
from hpcsched.sched.usage import Used
from hpcsched.store import schema
from hpcsched.store.engine import driver_connection, reading, writing
from hpcsched.store.rows import (
    StepRow,
    job_of,
    job_row,
    node_row,
    reservation_of,
    reservation_row,
    step_of,
    step_row,
    usage_row,
    used_of,
)

ADOPTED = "adopted:"  # keys of the table meta


@dataclass(slots=True)
class Batch:
    """What one tick changed, to be committed together."""

    specs: dict[int, JobSpec] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    arrays: list[tuple[Job, ...]] = field(default_factory=list)  # all tasks, as they were when they came in
    events: list[Event] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    steps: dict[tuple[int, int, str], StepRow] = field(default_factory=dict)
    usage: dict[tuple[str, str, str], Used] = field(default_factory=dict)
    requests: list[tuple[int, str, list[int], float]] = field(default_factory=list)  # uid, request id, job ids, at_s
    reservations: dict[str, Reservation | None] = field(default_factory=dict)  # None: deleted
    adopted: list[str] = field(default_factory=list)  # tokens of before a restore whose jobs go on

    def __bool__(self) -> bool:
        more = (self.usage, self.requests, self.reservations)
        return any(map(bool, (self.specs, self.jobs, self.events, self.nodes, self.steps, *more)))


class PastRun(NamedTuple):
    """How an ended job fared: since when it waited, and when it ran."""

    job_id: JobId
    uid: int
    since_s: float
    started_at_s: float
    ended_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryQuery:
    """What `hacct` asks for; None or empty: no restriction. Times bound the job's life, as sacct's -S and -E do."""

    job_ids: tuple[int, ...] = ()
    users: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    start_s: float | None = None
    end_s: float | None = None
    limit: int = 10_000


def _upsert(table: Any, keys: Sequence[str]) -> Any:
    statement = upsert(table)
    changes = {column.name: statement.excluded[column.name] for column in table.columns if column.name not in keys}
    return statement.on_conflict_do_update(index_elements=list(keys), set_=changes)


class _Rows:
    """A statement for many rows, compiled once: handing each row to SQLAlchemy costs more than SQLite's own work."""

    def __init__(self, engine: Engine, statement: Any, names: Iterable[str]) -> None:
        compiled = statement.compile(dialect=engine.dialect, column_keys=list(names))
        self._sql = str(compiled)
        self._values = itemgetter(*compiled.positiontup)

    def put(self, connection: Connection, rows: Iterable[dict[str, Any]]) -> None:
        connection.exec_driver_sql(self._sql, [self._values(row) for row in rows])


def _names(table: Any) -> list[str]:
    return [column.name for column in table.columns]


def _jobs_and_specs(*where: Any, limit: int | None = None) -> tuple[Any, Any]:
    """Return the statement for the newest jobs that are so, and the one for their specs."""
    found = select(schema.jobs).where(*where).order_by(schema.jobs.c.id.desc()).limit(limit)
    return found, select(schema.specs).where(schema.specs.c.id.in_(found.with_only_columns(schema.jobs.c.spec_id)))


def _live_jobs() -> tuple[Any, Any]:
    jobs = schema.jobs.c
    states = [state.value for state in FINAL]
    return _jobs_and_specs(jobs.state.not_in(states) | (jobs.ended_at_s > bindparam("after_s")))


class Store:
    """The database of one controller. Not for several threads at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live = _live_jobs()
        self._put_jobs = _Rows(engine, _upsert(schema.jobs, ["id"]), _names(schema.jobs))
        self._put_events = _Rows(engine, insert(schema.events), ("at_s", "job_id", "kind", "data"))
        self._put_node = _upsert(schema.nodes, ["name"])
        self._put_usage = _upsert(schema.usage, ["account", "user", "qos"])
        self._put_step = _upsert(schema.steps, ["job_id", "attempt", "step"])
        self._put_specs = _Rows(engine, insert(schema.specs), ("id", "spec"))
        self._put_requests = _Rows(engine, insert(schema.requests), _names(schema.requests))
        self._driver = driver_connection(engine)

    def commit(self, batch: Batch) -> None:
        """Put `batch` on disk, all or nothing. Raises UnavailableError if that cannot be done (disk full, I/O error)."""
        with writing(self._engine) as connection:
            if batch.specs:
                rows = [
                    {"id": key, "spec": json.dumps(spec_to_json(spec), separators=(",", ":"))}
                    for key, spec in batch.specs.items()
                ]
                self._put_specs.put(connection, rows)
            if batch.jobs:
                self._put_batch_jobs(connection, batch)
            if batch.events:
                self._put_events.put(connection, map(_event_row, batch.events))
            if batch.nodes:
                connection.execute(self._put_node, [node_row(node) for node in batch.nodes.values()])
            if batch.steps:
                connection.execute(self._put_step, [step_row(step) for step in batch.steps.values()])
            if batch.usage:
                connection.execute(self._put_usage, [usage_row(used) for used in batch.usage.values()])
            for name, reservation in batch.reservations.items():
                connection.execute(delete(schema.reservations).where(schema.reservations.c.name == name))
                if reservation is not None:
                    connection.execute(insert(schema.reservations), [reservation_row(reservation)])
            if over := _attempts_over(batch):
                connection.exec_driver_sql(_END_STEPS_SQL, over)
            if batch.adopted:
                rows = [{"key": ADOPTED + token, "value": ""} for token in batch.adopted]
                connection.execute(upsert(schema.meta).on_conflict_do_nothing(), rows)
            if batch.requests:
                rows = [
                    {"uid": uid, "request_id": request, "job_ids": json.dumps(ids), "at_s": at_s}
                    for uid, request, ids, at_s in batch.requests
                ]
                self._put_requests.put(connection, rows)

    def _put_batch_jobs(self, connection: Connection, batch: Batch) -> None:
        made = {job.id: job for tasks in batch.arrays for job in tasks}
        for tasks in batch.arrays:
            self._put_array(connection, tasks)
        changed = [job for job in batch.jobs.values() if made.get(job.id) is not job]
        if changed:
            self._put_jobs.put(connection, map(job_row, changed))

    def _put_array(self, connection: Connection, tasks: tuple[Job, ...]) -> None:
        """Write the tasks of a new array, which differ in two columns: SQLite makes their rows of one, six times as fast."""
        row = job_row(tasks[0]) | {"tasks": json.dumps([task.array_task_id for task in tasks])}
        connection.exec_driver_sql(_ARRAY_SQL, row)

    def load_jobs(self, ended_after_s: float) -> list[Job]:
        """Return all jobs that have not ended, and those that ended after `ended_after_s`."""
        return self._read_jobs(self._live, {"after_s": ended_after_s})

    def history(self, query: HistoryQuery) -> list[Job]:
        """Return the jobs that `query` asks for, by id, at most `query.limit` of them (the newest)."""
        jobs = schema.jobs.c
        where: list[Any] = []
        if query.job_ids:
            where.append(jobs.id.in_(query.job_ids) | jobs.array_job_id.in_(query.job_ids))
        if query.users:
            where.append(jobs.user.in_(query.users))
        if query.states:
            where.append(jobs.state.in_(query.states))
        if query.names:
            where.append(jobs.name.in_(query.names))
        if query.start_s is not None:
            where.append(jobs.ended_at_s.is_(None) | (jobs.ended_at_s >= query.start_s))
        if query.end_s is not None:
            where.append(jobs.submitted_at_s <= query.end_s)
        return self._read_jobs(_jobs_and_specs(*where, limit=query.limit), {})

    def _read_jobs(self, wanted: tuple[Any, Any], values: dict[str, Any]) -> list[Job]:
        found, used = wanted
        with reading(self._engine) as connection:
            specs = _specs_of((row.id, row.spec) for row in connection.execute(used, values))
            rows = map(_JobRow._make, connection.execute(found, values))
            jobs = [job_of(row, specs[row.spec_id]) for row in rows]
        jobs.reverse()
        return jobs

    def load_nodes(self) -> dict[str, Any]:
        """Return the stored part of each node, by name (see `rows.node_row`)."""
        with reading(self._engine) as connection:
            return {row.name: row for row in connection.execute(select(schema.nodes))}

    def load_usage(self) -> list[Used]:
        """Return what has been charged so far."""
        with reading(self._engine) as connection:
            return [used_of(row) for row in connection.execute(select(schema.usage))]

    def past_runs(self, states: Iterable[JobState], limit: int) -> list[PastRun]:
        """Return the last jobs that ended so, the oldest first."""
        jobs = schema.jobs.c
        since_s = func.coalesce(jobs.eligible_at_s, jobs.submitted_at_s)
        query = (
            select(jobs.id, jobs.uid, since_s, jobs.started_at_s, jobs.ended_at_s)
            .where(jobs.ended_at_s.is_not(None), jobs.started_at_s.is_not(None))
            .where(jobs.state.in_([state.value for state in states]))
            .order_by(jobs.ended_at_s.desc(), jobs.id.desc())
            .limit(limit)
        )
        with reading(self._engine) as connection:
            return [PastRun(*row) for row in reversed(connection.execute(query).all())]

    def load_reservations(self) -> list[Reservation]:
        """Return all reservations, by name."""
        query = select(schema.reservations).order_by(schema.reservations.c.name)
        with reading(self._engine) as connection:
            return [reservation_of(row) for row in connection.execute(query)]

    def load_steps(self, job_ids: Iterable[int]) -> list[StepRow]:
        """Return the steps of these jobs, all attempts, in order."""
        steps = schema.steps.c
        query = select(schema.steps).where(steps.job_id.in_(list(job_ids)))
        with reading(self._engine) as connection:
            found = [step_of(row) for row in connection.execute(query)]
        return sorted(found, key=lambda step: (step.job_id, step.attempt, step.step != "batch", step.step.zfill(9)))

    def attempt_steps(self, job_id: int, attempt: int) -> list[StepRow]:
        """Return the steps of one attempt, in order."""
        return [step for step in self.load_steps([job_id]) if step.attempt == attempt]

    def last_step(self, job_id: int, attempt: int) -> int:
        """Return the highest step number of the attempt, -1 if it has had none."""
        steps = schema.steps.c
        query = select(steps.step).where(steps.job_id == job_id, steps.attempt == attempt)
        with reading(self._engine) as connection:
            names = [name for (name,) in connection.execute(query)]
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def load_events(self, job_id: int) -> list[Event]:
        """Return the job's events in order (for an array's task: also the array's submission)."""
        events, jobs = schema.events.c, schema.jobs.c
        with reading(self._engine) as connection:
            array = connection.execute(select(jobs.array_job_id).where(jobs.id == job_id)).scalar_one_or_none()
            own = events.job_id == job_id
            if array is not None:
                own = own & (events.kind != "Submitted") | (events.job_id == array) & (events.kind == "Submitted")
            rows = connection.execute(select(schema.events).where(own).order_by(events.seq))
            return [from_data(row.kind, row.job_id, row.at_s, json.loads(row.data)) for row in rows]

    def request_jobs(self, uid: int, request_id: str) -> list[int] | None:
        """Return the ids of the jobs that this request made, None if it has not been seen."""
        # Every submission asks this: by way of SQLAlchemy it costs more than all else that is done for one.
        try:
            row = self._driver.execute(_REQUEST_SQL, (uid, request_id)).fetchone()
        except sqlite3.Error as error:
            raise UnavailableError(f"cannot read the database: {error}") from error
        return None if row is None else json.loads(row[0])

    def adopted(self) -> set[str]:
        """Return the tokens of before a restore whose jobs go on by an admin's word."""
        key = schema.meta.c.key
        with reading(self._engine) as connection:
            found = connection.execute(select(key).where(key.startswith(ADOPTED)))
            return {name.removeprefix(ADOPTED) for (name,) in found}

    def last_ids(self) -> tuple[int, int]:
        """Return the highest job id and spec id ever given."""
        with reading(self._engine) as connection:
            job_id = connection.execute(select(func.max(schema.jobs.c.id))).scalar_one()
            spec_id = connection.execute(select(func.max(schema.specs.c.id))).scalar_one()
            # Of a restored database: ids that were given after the backup.
            given = connection.execute(
                select(schema.meta.c.value).where(schema.meta.c.key == "last_job_id")
            ).scalar_one_or_none()
        return max(job_id or 0, int(given or 0)), spec_id or 0

    def close(self) -> None:
        """Close the database file."""
        self._engine.dispose()


_END_STEPS_SQL = "UPDATE steps SET state = ?, ended_at_s = ? WHERE job_id = ? AND attempt = ? AND state = 'RUNNING'"
_REQUEST_SQL = "SELECT job_ids FROM requests WHERE uid = ? AND request_id = ?"
_ARRAY_COLUMNS = {"id": ":id + key", "array_task_id": "value"}
_ARRAY_SQL = "INSERT INTO jobs ({}) SELECT {} FROM json_each(:tasks)".format(  # noqa: S608 -- names of our own columns
    ", ".join(_names(schema.jobs)), ", ".join(_ARRAY_COLUMNS.get(name, f":{name}") for name in _names(schema.jobs))
)
# Attributes of SQLAlchemy's own rows cost more than making a job of them.
_JobRow = namedtuple("_JobRow", _names(schema.jobs))


def _specs_of(rows: Iterable[tuple[int, str]]) -> dict[int, JobSpec]:
    """Return the specifications by their ids; equal ones, as of a script that is submitted again and again, are one."""
    by_text: dict[str, JobSpec] = {}
    specs = {}
    for spec_id, text in rows:
        spec = by_text.get(text)
        if spec is None:
            spec = by_text[text] = spec_from_json(json.loads(text))
        specs[spec_id] = spec
    return specs


def _attempts_over(batch: Batch) -> list[tuple[str, float | None, int, int]]:
    """Return the attempts that have given their last node back: state, end, job and attempt.

    A step of theirs that nobody has reported the end of ended with its attempt, and nobody will report it any more.
    """
    lost = {event.job_id for event in batch.events if isinstance(event, NodeLost)}
    over = []
    for job in batch.jobs.values():
        again = job.state is JobState.PENDING and job.attempt > 0
        if job.allocated_at_s is not None and (again or job.state in FINAL):
            state = JobState.NODE_FAIL if job.id in lost else JobState.CANCELLED if again else job.state
            over.append((state.value, job.ended_at_s, job.id, job.attempt - again))
    return over


def _event_row(event: Event) -> dict[str, Any]:
    return {
        "at_s": event.at_s,
        "job_id": event.job_id,
        "kind": type(event).__name__,
        "data": json.dumps(to_data(event), separators=(",", ":")),
    }
