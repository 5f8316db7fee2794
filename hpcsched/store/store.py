"""Read the controller's state, commit its changes, and search the history.

A `WriteBatch` has all changes of one tick. `commit` writes it in one transaction. If it returns,
the whole batch is on disk. If it raises, no part of it is.

Reads at the start and writes of every tick use SQLite directly, in this module. All other
statements are in `hpcsched.store.queries`, which is imported on first use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cached_property
from hashlib import sha256
from sqlite3 import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcsched.lifecycle.events import JobEvent, NodeLost, to_data
from hpcsched.lifecycle.node import NodeEvent, node_event_to_data
from hpcsched.model.codec import spec_to_json
from hpcsched.model.cron import Crontab
from hpcsched.model.ids import JobId
from hpcsched.model.job import ACTIVE, FINAL, Job, JobState, RankFailure, TrainingStatus
from hpcsched.model.node import PartitionState
from hpcsched.model.reservation import Reservation
from hpcsched.model.spec import JobSpec
from hpcsched.model.trigger import Trigger
from hpcsched.sched.queue.fairshare import UsedResources
from hpcsched.state.transaction import StepRecord, WriteBatch
from hpcsched.store import columns
from hpcsched.store.engine import reading, writing
from hpcsched.store.rows import (
    ADOPTED,
    AS_SUBMITTED,
    PARTITION,
    SUBMITTED,
    HistoryQuery,
    crontab_of,
    job_of,
    job_row,
    node_row,
    reservation_of,
    specs_of,
    step_row,
    submitted_job_of,
    training_of,
    training_row,
    trigger_of,
    usage_row,
    used_of,
)
from hpcsched.store.statements import Putting, Row, insert, select, upsert

if TYPE_CHECKING:
    from hpcsched.store.queries import Outage, Seldom

CLOCK = "clock"  # keys of the table meta
CLUSTER_ID = "cluster_id"
CLUSTER = "cluster"
GIVEN_UP = "given-up:"


class PastRun(NamedTuple):
    """Times and limit of an ended job: when it began to wait, when it ran, and its request.

    `limit_s` None: no limit.
    """

    job_id: JobId
    uid: int
    since_s: float
    started_at_s: float
    ended_at_s: float
    limit_s: int | None
    cpus: int


class Store:
    """The database of one controller. Not thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @cached_property
    def seldom(self) -> Seldom:
        """Return the infrequent statements."""
        from hpcsched.store.queries import Seldom  # SQLAlchemy: a start must not wait for it

        return Seldom(self.connection)

    def _rows(self, table: Any, rest: str = "", values: Any = ()) -> list[Any]:
        """Return whole rows of `table` (in `hpcsched.store.columns`); `rest` follows its name."""
        with reading(self.connection) as connection:
            return list(map(table._make, connection.execute(f"{select(table)} {rest}", values)))

    def commit(self, batch: WriteBatch) -> None:
        """Write `batch` to disk, all or nothing.

        Raises UnavailableError if that fails (disk full, I/O error).
        """
        with writing(self.connection) as connection:
            _write_jobs(connection, batch)
            tables: tuple[tuple[Putting, Callable[[Any], Row], dict[Any, Any]], ...] = (
                (_PUT_NODES, node_row, batch.nodes),
                (_PUT_STEPS, step_row, batch.steps),
                (_PUT_USAGE, usage_row, batch.usage),
                (_PUT_TRAINING, training_row, batch.training),
            )
            for statement, row_of, changed in tables:
                if changed:
                    statement.put(connection, map(row_of, changed.values()))
            if over := _attempts_over(batch):
                connection.executemany(_END_STEPS, over)
                connection.executemany(_DROP_KEPT, [(job_id, attempt) for _, _, job_id, attempt in over])
            facts = {PARTITION + name: state.value for name, state in batch.partitions.items()}
            if batch.clock:
                facts[CLOCK] = batch.clock
            if facts:
                connection.executemany(_PUT_META, facts.items())
            for uid, request, ids, at_s in batch.requests:
                connection.execute(insert(columns.Requests), (uid, request, json.dumps(ids), at_s))
            self._write_seldom(batch)

    def _write_seldom(self, batch: WriteBatch) -> None:
        if batch.failures:
            self.seldom.put_failures(batch.failures)
        for name, reservation in batch.reservations.items():
            self.seldom.put_reservation(name, reservation)
        for uid, crontab in batch.crontabs.items():
            self.seldom.put_crontab(uid, crontab)
        for number, trigger in batch.triggers.items():
            self.seldom.put_trigger(number, trigger)
        if batch.adopted:
            self.seldom.put_adopted(batch.adopted)

    def script(self, spec: JobSpec) -> bytes | None:
        """Return the script of `spec`, empty if it has none; None: deleted or damaged."""
        if spec.script or not spec.script_sha256:
            return spec.script.encode("utf-8", "surrogateescape")
        with reading(self.connection) as connection:
            row = connection.execute("SELECT text FROM scripts WHERE sha256 = ?", (spec.script_sha256,)).fetchone()
        if row is None or sha256(row[0]).hexdigest() != spec.script_sha256:
            return None
        return bytes(row[0])

    def script_hashes(self) -> list[str]:
        """Return the hashes of all stored scripts."""
        with reading(self.connection) as connection:
            return [row[0] for row in connection.execute("SELECT sha256 FROM scripts")]

    def delete_scripts(self, hashes: Iterable[str]) -> None:
        """Delete the texts of these scripts. Raises UnavailableError if that fails."""
        with writing(self.connection) as connection:
            connection.executemany("DELETE FROM scripts WHERE sha256 = ?", ((one,) for one in hashes))

    def load_jobs(self, ended_after_s: float) -> list[Job]:
        """Return all unfinished jobs, and those that ended after `ended_after_s`, by id."""
        values = {"after_s": ended_after_s}
        with reading(self.connection) as connection:
            specs = specs_of(connection.execute(_SPECS_OF.format(f"SELECT spec_id FROM jobs WHERE {_LIVE}"), values))
            same: dict[str, str] = {}
            jobs = [
                submitted_job_of(row, specs[row[1]], same) for row in connection.execute(_AS_SUBMITTED, AS_SUBMITTED)
            ]
        others = self._rows(columns.Jobs, f"WHERE {_LIVE} AND NOT ({_IS_AS_SUBMITTED})", values | AS_SUBMITTED)
        jobs += [job_of(row, specs[row.spec_id]) for row in others]
        return sorted(jobs, key=lambda job: job.id)

    def history(self, query: HistoryQuery) -> list[Job]:
        """Return the jobs that match `query`, by id, at most `query.limit` (the newest)."""
        return self.jobs(self.history_ids(query))

    def history_ids(self, query: HistoryQuery) -> list[int]:
        """Return the ids of the jobs that `history` returns. It may read the rows of all jobs."""
        with reading(self.connection):
            return self.seldom.history_ids(query)

    def jobs(self, job_ids: Iterable[int]) -> list[Job]:
        """Return these jobs, by id."""
        with reading(self.connection):
            return self.seldom.jobs(job_ids)

    def load_nodes(self) -> dict[str, Any]:
        """Return the stored part of each node, by name (see `rows.node_row`)."""
        return {row.name: row for row in self._rows(columns.Nodes)}

    def load_usage(self) -> list[UsedResources]:
        """Return the usage that has been charged so far."""
        return list(map(used_of, self._rows(columns.Usage)))

    def load_training(self, job_ids: Iterable[int]) -> dict[int, TrainingStatus]:
        """Return the last training status of these jobs, by job."""
        rows = self._rows(columns.Training, _JOB_IN_LIST, (json.dumps(list(job_ids)),))
        return {row.job_id: training_of(row) for row in rows}

    def load_failures(self, job_id: int, attempt: int) -> list[RankFailure]:
        """Return the failures of ranks in this attempt, the first cause first."""
        with reading(self.connection):
            return self.seldom.failures(job_id, attempt)

    def past_runs(self, states: Iterable[JobState], limit: int) -> list[PastRun]:
        """Return the last jobs that ended in `states`, the oldest first."""
        values = {"states": json.dumps([state.value for state in states]), "limit": limit}
        with reading(self.connection) as connection:
            return [PastRun(*row) for row in reversed(connection.execute(_PAST_RUNS, values).fetchall())]

    def first_submitted_s(self) -> float | None:
        """Return the submission time of the first job of all; None: there is none."""
        with reading(self.connection) as connection:
            row = connection.execute("SELECT submitted_at_s FROM jobs ORDER BY id LIMIT 1").fetchone()
            return row[0] if row is not None else None

    def load_crontabs(self) -> list[Crontab]:
        """Return all crontabs, by uid."""
        return list(map(crontab_of, self._rows(columns.Crontabs, "ORDER BY uid")))

    def load_triggers(self) -> list[Trigger]:
        """Return all triggers, by number."""
        return list(map(trigger_of, self._rows(columns.Triggers, "ORDER BY id")))

    def load_reservations(self) -> list[Reservation]:
        """Return all reservations, by name."""
        return list(map(reservation_of, self._rows(columns.Reservations, "ORDER BY name")))

    def load_steps(self, job_ids: Iterable[int]) -> list[StepRecord]:
        """Return the steps of these jobs, all attempts, in order."""
        with reading(self.connection):
            return self.seldom.steps(job_ids)

    def attempt_steps(self, job_id: int, attempt: int) -> list[StepRecord]:
        """Return the steps of one attempt, in order."""
        return [step for step in self.load_steps([job_id]) if step.attempt == attempt]

    def last_step(self, job_id: int, attempt: int) -> int:
        """Return the highest step number of the attempt, -1 if it has none."""
        with reading(self.connection):
            return self.seldom.last_step(job_id, attempt)

    def load_events(self, job_id: int) -> list[JobEvent]:
        """Return the job's events in order (for an array task: also the array's submission)."""
        with reading(self.connection):
            return self.seldom.events(job_id)

    def load_node_events(self, node: str) -> list[NodeEvent]:
        """Return the node's events in order."""
        with reading(self.connection):
            return self.seldom.node_events(node)

    def outages(self, after_s: float, before_s: float) -> list[Outage]:
        """Return when nodes did not answer between the two times."""
        with reading(self.connection):
            return self.seldom.outages(after_s, before_s)

    def request_jobs(self, uid: int, request_id: str) -> dict[int, JobSpec] | None:
        """Return the jobs that this request created (of an array: its first task's).

        None: the request is unknown.
        """
        query = "SELECT job_ids FROM requests WHERE uid = ? AND request_id = ?"
        with reading(self.connection) as connection:
            row = connection.execute(query, (uid, request_id)).fetchone()
            return None if row is None else specs_of(connection.execute(_SPECS_OF_JOBS, row))

    def adopted(self) -> set[str]:
        """Return the tokens from before a restore whose jobs continue by an admin's order."""
        rows = self._rows(columns.Meta, f"WHERE key GLOB '{ADOPTED}*'")
        return {row.key.removeprefix(ADOPTED) for row in rows}

    def cluster(self) -> str:
        """Return the name of the cluster of this database; "" if it was never recorded."""
        rows = list(self._rows(columns.Meta, f"WHERE key = '{CLUSTER}'"))
        return str(rows[0].value) if rows else ""

    def cluster_id(self) -> str:
        """Return the random id of the cluster of this database; "" if it was never recorded."""
        rows = list(self._rows(columns.Meta, f"WHERE key = '{CLUSTER_ID}'"))
        return str(rows[0].value) if rows else ""

    def put_cluster_id(self, cluster_id: str) -> None:
        """Write the id of the cluster. Raises UnavailableError."""
        with writing(self.connection) as connection:
            connection.execute(_PUT_META, (CLUSTER_ID, cluster_id))

    def put_cluster(self, name: str) -> None:
        """Write the name of the cluster. Raises UnavailableError."""
        with writing(self.connection) as connection:
            connection.execute(_PUT_META, (CLUSTER, name))

    def given_up(self) -> dict[str, str]:
        """Return the nodes that an admin removed with their jobs while no controller ran.

        The values are the admins' names.
        """
        rows = self._rows(columns.Meta, f"WHERE key GLOB '{GIVEN_UP}*'")
        return {row.key.removeprefix(GIVEN_UP): row.value for row in rows}

    def give_up(self, node: str, by: str) -> None:
        """Record that an admin removed a node with its jobs. Raises UnavailableError."""
        with writing(self.connection) as connection:
            connection.execute(_PUT_META, (GIVEN_UP + node, by))

    def forget_given_up(self) -> None:
        """Delete these records: their jobs have been ended. Raises UnavailableError."""
        with writing(self.connection) as connection:
            connection.execute(f"DELETE FROM meta WHERE key GLOB '{GIVEN_UP}*'")

    def held_on(self, node: str) -> list[int]:
        """Return the jobs with an allocation on `node`, by id."""
        query = f"SELECT id FROM jobs WHERE {_ACTIVE} AND ? IN (SELECT value FROM json_each(held_nodes)) ORDER BY id"
        with reading(self.connection) as connection:
            return [row[0] for row in connection.execute(query, (node,))]

    def partition_states(self) -> dict[str, PartitionState]:
        """Return the partition states that admins set, by name."""
        rows = self._rows(columns.Meta, f"WHERE key GLOB '{PARTITION}*'")
        return {row.key.removeprefix(PARTITION): PartitionState(row.value) for row in rows}

    def clock(self) -> str:
        """Return the last record of the head node's clocks; "" if there is none."""
        rows = list(self._rows(columns.Meta, f"WHERE key = '{CLOCK}'"))
        return str(rows[0].value) if rows else ""

    def last_ids(self) -> tuple[int, int]:
        """Return the highest job id and spec id ever given."""
        with reading(self.connection) as connection:
            job_id, spec_id, given = connection.execute(_LAST_IDS).fetchone()
        return max(job_id or 0, int(given or 0)), spec_id or 0

    def close(self) -> None:
        """Close the database file."""
        self.connection.close()


_TO_JSON = json.JSONEncoder(separators=(",", ":")).encode
_PUT_SPEC = insert(columns.Specs)
_PUT_SCRIPT = insert(columns.Scripts, "INSERT OR IGNORE")
_PUT_EVENT = "INSERT INTO events (at_s, job_id, kind, data) VALUES (?, ?, ?, ?)"
_PUT_META = "INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)"
_PUT_NODE_EVENT = "INSERT INTO node_events (at_s, node, kind, data) VALUES (?, ?, ?, ?)"
_PUT_JOBS = Putting(columns.Jobs, upsert(columns.Jobs, ["id"]))
_PUT_NODES = Putting(columns.Nodes, upsert(columns.Nodes, ["name"]))
_PUT_STEPS = Putting(columns.Steps, upsert(columns.Steps, ["job_id", "attempt", "step"]))
_PUT_USAGE = Putting(columns.Usage, upsert(columns.Usage, ["account", "user", "qos"]))
_PUT_TRAINING = Putting(columns.Training, upsert(columns.Training, ["job_id"]))
_END_STEPS = "UPDATE steps SET state = ?, ended_at_s = ? WHERE job_id = ? AND attempt = ? AND state = 'RUNNING'"
_DROP_KEPT = "UPDATE steps SET kept = NULL WHERE job_id = ? AND attempt = ? AND kept IS NOT NULL"
# The tasks of a new array differ in two columns. SQLite copies their rows from one, six times as
# fast.
_ARRAY_COLUMNS = {"id": ":id + key", "array_task_id": "value"}
_PUT_ARRAY = "INSERT INTO jobs ({}) SELECT {} FROM json_each(:tasks)".format(
    ", ".join(columns.Jobs._fields), ", ".join(_ARRAY_COLUMNS.get(name, f":{name}") for name in columns.Jobs._fields)
)

_ACTIVE = "state IN ({})".format(", ".join(f"'{state}'" for state in sorted(ACTIVE)))
# In this form it uses two indices: a start reads nothing of the history.
_LIVE = "(state IN ({}) OR ended_at_s > :after_s)".format(
    ", ".join(f"'{state}'" for state in (JobState.PENDING, *ACTIVE))
)
# Most waiting jobs are unchanged since submission: only a quarter of their columns has information.
_IS_AS_SUBMITTED = " AND ".join(f"{name} IS :{name}" for name in AS_SUBMITTED)
_AS_SUBMITTED = f"SELECT {', '.join(SUBMITTED)} FROM jobs WHERE {_IS_AS_SUBMITTED}"
_JOB_IN_LIST = "WHERE job_id IN (SELECT value FROM json_each(?))"
_SPECS_OF = "SELECT id, spec FROM specs WHERE id IN ({})"
_SPECS_OF_JOBS = """SELECT jobs.id, specs.spec FROM jobs JOIN specs ON specs.id = jobs.spec_id
    WHERE jobs.id IN (SELECT value FROM json_each(?)) ORDER BY jobs.id"""
# The index of end times finds the last jobs; + stops SQLite from sorting all that ended in these
# states.
_PAST_RUNS = """SELECT id, uid, coalesce(eligible_at_s, submitted_at_s), started_at_s, ended_at_s,
    coalesce(asked_limit_s, time_limit_s),
    (SELECT coalesce(sum(json_extract(share.value, '$[1]')), 0) FROM json_each(jobs.shares) AS share) FROM jobs
    WHERE ended_at_s IS NOT NULL AND started_at_s IS NOT NULL AND +state IN (SELECT value FROM json_each(:states))
    ORDER BY ended_at_s DESC, id DESC LIMIT :limit"""
# `last_job_id` of a restored database: ids that were given after the backup.
_LAST_IDS = """SELECT (SELECT max(id) FROM jobs), (SELECT max(id) FROM specs),
    (SELECT value FROM meta WHERE key = 'last_job_id')"""


def _write_jobs(connection: Connection, batch: WriteBatch) -> None:
    """Write jobs, after the rows that they refer to."""
    if batch.specs:
        connection.executemany(_PUT_SPEC, ((key, _TO_JSON(spec_to_json(spec))) for key, spec in batch.specs.items()))
    if batch.scripts:
        connection.executemany(_PUT_SCRIPT, batch.scripts.items())
    if batch.jobs:
        _put_jobs(connection, batch)
    if batch.events:
        connection.executemany(_PUT_EVENT, map(_event_values, batch.events))
    if batch.node_events:
        connection.executemany(_PUT_NODE_EVENT, map(_node_event_values, batch.node_events))


def _put_jobs(connection: Connection, batch: WriteBatch) -> None:
    made = {job.id: job for tasks in batch.arrays for job in tasks}
    for tasks in batch.arrays:
        row = job_row(tasks[0]) | {"tasks": json.dumps([task.array_task_id for task in tasks])}
        connection.execute(_PUT_ARRAY, row)
    changed = [job for job in batch.jobs.values() if made.get(job.id) is not job]
    if changed:
        _PUT_JOBS.put(connection, map(job_row, changed))


def _attempts_over(batch: WriteBatch) -> list[tuple[str, float | None, JobId, int]]:
    """Return the attempts that have released their last node: state, end, job and attempt.

    Their steps without a reported end have ended with the attempt: no report will come.
    """
    lost = {event.job_id for event in batch.events if isinstance(event, NodeLost)}
    over = []
    for job in batch.jobs.values():
        again = job.state is JobState.PENDING and job.attempt > 0
        if job.allocated_at_s is not None and (again or job.state in FINAL):
            state = JobState.NODE_FAIL if job.id in lost else JobState.CANCELLED if again else job.state
            over.append((state.value, job.ended_at_s, job.id, job.attempt - again))
    return over


def _node_event_values(event: NodeEvent) -> tuple[float, str, str, str]:
    return event.at_s, event.node, type(event).__name__, _TO_JSON(node_event_to_data(event))


def _event_values(event: JobEvent) -> tuple[float, int, str, str]:
    return event.at_s, event.job_id, type(event).__name__, _TO_JSON(to_data(event))
