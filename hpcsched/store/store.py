"""Read the controller's state, commit its changes, and search the history.

A job that waits as it was submitted has no row of its own: it is in a row of `submissions`, which it
shares with the other tasks of its array. At its first change it gets a row in `jobs`; from then on
that row counts. The last one deletes the row of the submission.

A `WriteBatch` has all changes of one tick. `commit` writes it in one transaction. If it returns,
the whole batch is on disk. If it raises, no part of it is.

Lists of ids are bound in parts, so that their length is not limited.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from sqlite3 import Connection
from typing import Any, NamedTuple

from sqlalchemy import BindParameter, ColumnElement, Table, and_, case, delete, func, null, or_, select, update

from hpcsched.auth.audit import GENESIS, AuditEntry, AuditRecord, chained, record_from_json
from hpcsched.auth.tokens import Credential
from hpcsched.errors import InvariantError
from hpcsched.lifecycle.attempts import Attempt, attempts_of, ordinary_attempts
from hpcsched.lifecycle.events import ClusterEvent, JobEvent, NodeLost, from_data, to_data
from hpcsched.lifecycle.node import (
    NodeDown,
    NodeDrained,
    NodeEvent,
    NodeFaultCleared,
    NodeResumed,
    NodeUp,
    PowerDownFailed,
    PowerDownOrdered,
    PowerUpFailed,
    node_event_from_data,
    node_event_to_data,
)
from hpcsched.metrics.bench import BenchRun, run_from, run_text
from hpcsched.metrics.links import LinkRun, link_from, link_text
from hpcsched.model.accounting import EnergyUse, GpuUse, ServiceUse
from hpcsched.model.cron import Crontab
from hpcsched.model.ids import JobId
from hpcsched.model.job import ACTIVE, FINAL, Job, JobState, RankFailure, TrainingStatus
from hpcsched.model.node import PartitionState
from hpcsched.model.reservation import Reservation
from hpcsched.model.service import Service
from hpcsched.model.spec import JobSpec
from hpcsched.model.trigger import Trigger
from hpcsched.sched.fairshare import UsedResources
from hpcsched.state.transaction import NotedRequest, StepRecord, WriteBatch
from hpcsched.store.engine import PUT_META, Row, Statement, adding, insert, place, reading, upsert, writing
from hpcsched.store.rows import (
    COUNTED,
    Env,
    audit,
    benches,
    counted_jobs_of,
    credential_of,
    credential_row,
    credentials,
    crontab_of,
    crontab_row,
    crontabs,
    energies,
    env_of,
    env_row,
    environments,
    events,
    failure_of,
    failure_row,
    failures,
    gpu_uses,
    job_row,
    jobs,
    jobs_of,
    links,
    meta,
    node_events,
    node_row,
    nodes,
    power_row,
    powers,
    requests,
    reservation_of,
    reservation_row,
    reservations,
    scripts,
    sealed_row,
    service_charges,
    service_of,
    service_row,
    service_uses,
    services,
    spec_row,
    specs,
    specs_of,
    step_of,
    step_row,
    steps,
    submission_row,
    submissions,
    submitted_of,
    training,
    training_of,
    training_row,
    trigger_of,
    trigger_row,
    triggers,
    usage,
    usage_row,
    used_of,
)
from hpcsched.store.sealing import SealingKey, SealingKeys

MOST_DROPPED = 1000  # environments that one call deletes

ADOPTED = "adopted:"  # keys of the table meta
CLOCK = "clock"
CLUSTER = "cluster"
CLUSTER_ID = "cluster_id"
ENERGY_MARK = "energy:"
GIVEN_UP = "given-up:"
PARTITION = "partition:"  # the state that an admin set


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryQuery:
    """A query of `hacct`; None or empty: no restriction.

    Times bound the job's life, as sacct's -S and -E do.
    """

    job_ids: tuple[int, ...] = ()
    users: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    start_s: float | None = None
    end_s: float | None = None
    limit: int = 10_000
    before_id: int | None = None


class Outage(NamedTuple):
    """A period in which a node took no jobs, in Unix seconds; `end_s` None: not ended."""

    node: str
    start_s: float
    end_s: float | None
    kind: str = "down"  # one of `OUTAGES`


# It did not answer; it was drained; it was switched off to save power.
OUTAGES = ("down", "drained", "off")


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
    """The database of one controller. Not thread-safe.

    Without `keys`, the environments of jobs that another process has stored cannot be read, and
    are empty.
    """

    def __init__(self, connection: Connection, keys: SealingKeys | None = None) -> None:
        self.connection = connection
        self.keys = keys or SealingKeys()
        # Of jobs in memory, specifications with an environment, and those whose environment no key opens.
        self._env_macs: dict[int, str] = {}
        self.unopened: frozenset[int] = frozenset()
        # Of each row of `submissions`: the jobs without a row of their own.
        self._unchanged: dict[int, set[int]] = {}
        self._audit_end: tuple[int, str] | None = None  # number and hash of the last audit record; None: not read yet

    def close(self) -> None:
        """Close the database file."""
        self.connection.close()

    def _rows(self, statement: Statement, values: Row | None = None) -> list[Any]:
        with reading(self.connection) as connection:
            return statement.rows(connection, values)

    def _rows_of(self, statement: Statement, ids: Iterable[object]) -> list[Any]:
        """Return the rows for all `ids`, which `statement` has in its places."""
        return [row for part in _parts(ids) for row in self._rows(statement, part)]

    def _tuples_of(self, statement: Statement, ids: Iterable[object]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows for all `ids` as `_rows_of` returns them, but without names."""
        for part in _parts(ids):
            with reading(self.connection) as connection:
                found = statement.tuples(connection, part)
            yield from found

    def _value(self, statement: Statement, values: Row | None = None) -> Any:
        with reading(self.connection) as connection:
            return statement.value(connection, values)

    def _write(self, statement: Statement, rows: Iterable[Row]) -> None:
        with writing(self.connection) as connection:
            statement.run_many(connection, rows)

    # ----- a tick

    def commit(self, batch: WriteBatch) -> None:
        """Write `batch` to disk, all or nothing.

        Raises UnavailableError if that fails (disk full, I/O error).
        """
        new = {tasks[0].id: _unchanged(tasks, batch) for tasks in batch.submitted}
        unchanged = set[int]().union(*new.values())
        changed = [job for job_id, job in batch.jobs.items() if job_id not in unchanged]
        first = self._first_changes(changed)
        records = self._chained(batch.audit) if batch.audit else []
        with writing(self.connection) as connection:
            macs = _put_specs(connection, batch.specs, self.keys.newest)
            _put(connection, _NEW_SCRIPT, _script_row, batch.scripts.items())
            _put(connection, _NEW_SUBMISSION, submission_row, [made for made in batch.submitted if new[made[0].id]])
            _put(connection, _PUT_JOB, job_row, changed)
            spent = [{"of_id": number} for number, ids in first.items() if len(ids) == len(self._unchanged[number])]
            _DELETE_SUBMISSION.run_many(connection, spent)
            _put(connection, _NEW_EVENT, _event_row, [*batch.events, *batch.cluster_events])
            _put(connection, _NEW_NODE_EVENT, _node_event_row, batch.node_events)
            _put(connection, _PUT_NODE, node_row, batch.nodes.values())
            _put(connection, _PUT_POWER, power_row, [node for node in batch.nodes.values() if node.power_since_s])
            _put(connection, _PUT_STEP, step_row, batch.steps.values())
            _put(connection, _PUT_USAGE, usage_row, batch.usage.values())
            _put(connection, _PUT_TRAINING, training_row, batch.training.values())
            _put(connection, _NEW_FAILURE, failure_row, batch.failures)
            _put_uses(connection, batch)
            _put(connection, _NEW_BENCH, _bench_row, batch.benches)
            _FORGET_BENCHES.run_many(connection, [{"of_node": run.node} for run in batch.benches])
            _put(connection, _NEW_LINK, _link_row, batch.links)
            _FORGET_LINKS.run_many(connection, [{"of_one": run.one, "of_other": run.other} for run in batch.links])
            _put(connection, _NEW_REQUEST, _request_row, batch.requests)
            _put(connection, _PUT_ANSWER, _answer_row, batch.answers.items())
            _NEW_AUDIT.run_many(connection, records)
            _put(connection, PUT_META, _meta_row, _facts(batch))
            if over := _attempts_over(changed, batch.events):
                _END_STEPS.run_many(connection, over)
                _FORGET_STEPS.run_many(connection, over)
            _replace(connection, _DELETE_RESERVATION, _NEW_RESERVATION, reservation_row, batch.reservations)
            _replace(connection, _DELETE_CRONTAB, _NEW_CRONTAB, crontab_row, batch.crontabs)
            _replace(connection, _DELETE_TRIGGER, _NEW_TRIGGER, trigger_row, batch.triggers)
            _replace(connection, _DELETE_SERVICE, _NEW_SERVICE, service_row, batch.services)
            _replace(connection, _DELETE_CREDENTIAL, _NEW_CREDENTIAL, credential_row, batch.credentials)
        self._env_macs |= macs
        if records:
            self._audit_end = records[-1]["seq"], records[-1]["hash"]
        self._unchanged |= {number: ids for number, ids in new.items() if ids}
        for number, ids in first.items():
            self._unchanged[number] -= ids
            if not self._unchanged[number]:
                del self._unchanged[number]

    def _first_changes(self, changed: Iterable[Job]) -> dict[int, set[int]]:
        """Return those of the changed jobs that have no row of their own yet, by submission."""
        first: dict[int, set[int]] = {}
        for job in changed:
            number = _submission(job)
            if job.id in self._unchanged.get(number, ()):
                first.setdefault(number, set()).add(job.id)
        return first

    # ----- the audit log

    def _chained(self, entries: Iterable[AuditEntry]) -> list[Row]:
        records: list[Row] = []
        seq, previous = self.audit_end()
        for entry in entries:
            seq += 1
            records.append(chained(entry, seq, previous))
            previous = records[-1]["hash"]
        return records

    def audit_end(self) -> tuple[int, str]:
        """Return the number and the hash of the last audit record; of none: 0 and `GENESIS`."""
        if self._audit_end is None:
            last = self._rows(_LAST_AUDIT)
            self._audit_end = (last[0].seq, last[0].hash) if last else (0, GENESIS)
        return self._audit_end

    def audit_hash(self, seq: int) -> str:
        """Return the hash of an audit record, "" if there is no such record."""
        found = self._rows(_AUDIT, {"after_seq": seq - 1, "most": 1})
        return str(found[0].hash) if found and found[0].seq == seq else ""

    def audit_records(self, after: int, limit: int) -> list[AuditRecord]:
        """Return the audit records with numbers above `after`, in order, `limit` at most."""
        found = self._rows(_AUDIT, {"after_seq": after, "most": limit})
        return [record_from_json(row._asdict()) for row in found]

    # ----- scripts

    def script(self, spec: JobSpec) -> bytes | None:
        """Return the script of `spec`, empty if it has none; None: deleted or damaged."""
        if spec.script or not spec.script_sha256:
            return spec.script.encode("utf-8", "surrogateescape")
        text = self._value(_SCRIPT, {"hash": spec.script_sha256})
        return bytes(text) if text is not None and sha256(text).hexdigest() == spec.script_sha256 else None

    def script_hashes(self) -> list[str]:
        """Return the hashes of all stored scripts."""
        return [row.sha256 for row in self._rows(_SCRIPT_HASHES)]

    def delete_scripts(self, hashes: Iterable[str]) -> None:
        """Delete the texts of these scripts. Raises UnavailableError if that fails."""
        self._write(_DELETE_SCRIPT, ({"hash": one} for one in hashes))

    # ----- environments

    def drop_environments(self, spec_ids: Collection[int]) -> None:
        """Delete the environments that none of these specifications has.

        Raises UnavailableError if that fails.
        """
        self._env_macs = {spec_id: mac for spec_id, mac in self._env_macs.items() if spec_id in spec_ids}
        used = set(self._env_macs.values())
        unused = [row.mac for row in self._rows(_ENVIRONMENT_MACS) if row.mac not in used]
        if unused:
            self._write(_DELETE_ENVIRONMENT, ({"of_mac": mac} for mac in unused[:MOST_DROPPED]))

    def reseal(self) -> int:
        """Read the key file again, and seal all environments with its newest key.

        Return the number of newly sealed environments.

        An environment that no key opens stays as it is. Raises ConfigError, UnavailableError.
        """
        self.keys.read_again()
        newest, opened = self.keys.newest, dict[str, Row]()
        for row in self._rows(_SEALED_BY_OTHERS, {"key": newest.id}):
            text = self.keys.open(row.key_id, row.mac, row.sealed)
            if text is not None:
                opened[row.mac] = sealed_row(text, newest)
        changed = {spec_id: opened[mac]["mac"] for spec_id, mac in self._env_macs.items() if mac in opened}
        with writing(self.connection) as connection:
            _NEW_ENVIRONMENT.run_many(connection, opened.values())
            _PUT_ENV_MAC.run_many(connection, ({"of_id": of, "env_mac": mac} for of, mac in changed.items()))
            _DELETE_ENVIRONMENT.run_many(connection, ({"of_mac": mac} for mac in opened))
        self._env_macs |= changed
        return len(opened)

    def key_uses(self) -> dict[str, int]:
        """Return how many environments each key has sealed, by the key's id."""
        return {row.key_id: row.count for row in self._rows(_KEY_USES)}

    # ----- jobs and their history

    def load_jobs(self, ended_after_s: float) -> list[Job]:
        """Return all unfinished jobs, and those that ended after `ended_after_s`, by id."""
        values = {"after_s": ended_after_s}
        with reading(self.connection) as connection:
            rows = _SPECS_OF_LIVE.rows(connection, values)
            by_id = self._specs(rows)
            found = jobs_of(_LIVE_JOBS.rows(connection, values), by_id)
        self._env_macs = {row.id: row.env_mac for row in rows if row.env_mac}
        self.unopened = frozenset(spec_id for spec_id in self._env_macs if not by_id[spec_id].env)
        self._unchanged = {}
        for row, ids in self._submitted(_SUBMISSIONS):
            found += submitted_of(row, by_id[row.spec_id], ids)
            self._unchanged[row.id] = set(ids)
        return sorted(found, key=lambda job: job.id)

    def _submitted(self, statement: Statement, values: Row | None = None) -> list[tuple[Any, Sequence[int]]]:
        """Return rows of `submissions`, and of each the jobs without a row of their own."""
        rows = self._rows(statement, values)  # first: a job that changes meanwhile has a row
        changed = {row.id for row in self._rows(_CHANGED)} if rows else set()
        return [(row, [job_id for job_id in _ids_of(row) if job_id not in changed]) for row in rows]

    def jobs(self, job_ids: Iterable[int]) -> list[Job]:
        """Return these jobs, by id."""
        return self._jobs(job_ids, _JOBS, jobs_of, self._specs)

    def counted_jobs(self, job_ids: Iterable[int]) -> list[Job]:
        """Return these jobs, by id, with what reports count of them (see `counted_jobs_of`).

        Their specifications have no environments.
        """
        return self._jobs(job_ids, _COUNTED_JOBS, counted_jobs_of, partial(specs_of, environments={}))

    def _jobs(
        self,
        job_ids: Iterable[int],
        statement: Statement,
        made_of: Callable[[Sequence[Any], Mapping[int, JobSpec]], list[Job]],
        specs_in: Callable[[Sequence[Any]], dict[int, JobSpec]],
    ) -> list[Job]:
        wanted = set(job_ids)
        bounds = {"first": min(wanted, default=0), "last": max(wanted, default=0)}
        submitted = self._rows(_SUBMISSIONS_BETWEEN, bounds)  # first: a job that changes meanwhile has a row
        rows = self._rows_of(statement, wanted)
        missing = wanted.difference([row.id for row in rows])
        waiting = [(row, ids) for row in submitted if (ids := sorted(missing.intersection(_ids_of(row))))]
        spec_ids = {row.spec_id for row in rows} | {row.spec_id for row, _ in waiting}
        by_id = specs_in(self._rows_of(_SPECS, spec_ids))
        found = made_of(rows, by_id)
        for row, ids in waiting:
            found += submitted_of(row, by_id[row.spec_id], ids)
        return sorted(found, key=lambda job: job.id)

    def _specs(self, rows: Sequence[Any]) -> dict[int, JobSpec]:
        """Return the specifications of these rows, by id."""
        macs = {row.env_mac for row in rows if row.env_mac}
        opened: dict[str, Env] = {}
        for row in self._rows_of(_ENVIRONMENTS, macs):
            text = self.keys.open(row.key_id, row.mac, row.sealed)
            if text is not None:
                opened[row.mac] = env_of(text)
        return specs_of(rows, opened)

    def history(self, query: HistoryQuery) -> list[Job]:
        """Return the jobs that match `query`, by id, at most `query.limit` (the newest)."""
        return self.jobs(self.history_ids(query))

    def history_ids(self, query: HistoryQuery) -> list[int]:
        """Return the ids of the jobs that `history` returns. It may read the rows of all jobs."""
        ids = self._waiting_ids(query)  # first: a job that changes meanwhile has a row
        found = select(jobs.c.id).where(*_conditions(query)).order_by(jobs.c.id.desc()).limit(query.limit)
        if not query.job_ids:
            ids.update([row.id for row in self._rows(Statement(found))])
        else:
            of_these = Statement(found.where(or_(jobs.c.id.in_(_PLACES), jobs.c.array_job_id.in_(_PLACES))))
            ids.update([row.id for row in self._rows_of(of_these, query.job_ids)])
        return sorted(ids)[max(0, len(ids) - query.limit) :]

    def _waiting_ids(self, query: HistoryQuery) -> set[int]:
        """Return the ids of the matching jobs without a row of their own."""
        if query.states and JobState.PENDING.value not in query.states:
            return set()
        found = select(submissions).where(*_conditions(query, submissions))
        wanted, ids = set(query.job_ids), set[int]()
        for row, waiting in self._submitted(Statement(found)):
            ids.update(waiting if not wanted or row.id in wanted else wanted.intersection(waiting))
        return ids if query.before_id is None else {job_id for job_id in ids if job_id < query.before_id}

    def past_runs(self, states: Iterable[JobState], limit: int) -> list[PastRun]:
        """Return the last jobs that ended in `states`, the oldest first."""
        # The index of end times finds the last jobs. SQLite would sort all that ended in these
        # states if their index could be used; it cannot for an expression.
        ended = jobs.c.state.concat("").in_([state.value for state in states])
        rows = self._rows(Statement(_PAST_RUNS.where(ended).limit(limit)))
        return [PastRun._make((*row[:-1], _cpus(row.shares))) for row in reversed(rows)]

    def first_submitted_s(self) -> float | None:
        """Return the submission time of the first job of all; None: there is none."""
        found = [row for statement in (_FIRST_JOB, _FIRST_SUBMISSION) for row in self._rows(statement)]
        return min(found).submitted_at_s if found else None

    def held_on(self, node: str) -> list[int]:
        """Return the jobs with an allocation on `node`, by id."""
        return [row.id for row in self._rows(_HELD_NODES) if node in json.loads(row.held_nodes)]

    def last_ids(self) -> tuple[int, int]:
        """Return the highest job id and spec id ever given."""
        # Of a restored database: ids that were given after the backup.
        given = int(self._meta("last_job_id") or 0)
        job_id = max(self._value(_LAST_JOB) or 0, self._value(_LAST_SUBMITTED) or 0, given)
        return job_id, self._value(_LAST_SPEC) or 0

    def request_jobs(self, uid: int, request_id: str) -> dict[int, JobSpec] | None:
        """Return the jobs that this request created (of an array: its first task's).

        None: the request is unknown.
        """
        job_ids = self._value(_REQUEST, {"of_uid": uid, "of_request": request_id})
        return None if job_ids is None else {job.id: job.spec for job in self.jobs(json.loads(job_ids))}

    def request(self, uid: int, request_id: str) -> tuple[str, str] | None:
        """Return content and answer of a request, None if it is unknown.

        Both are "" of a submission.
        """
        found = self._rows(_REQUEST_ANSWER, {"of_uid": uid, "of_request": request_id})
        return (found[0].content, found[0].answer) if found else None

    def forget_requests(self, before_s: float, most: int, most_deleted: int) -> None:
        """Delete the requests of before that time, and the oldest above `most` of each user.

        It deletes at most `most_deleted` of each user. Raises UnavailableError.
        """
        uid = -1
        while (uid := self._value(_NEXT_REQUESTER, {"of_uid": uid})) is not None:
            above_s = self._value(_NTH_REQUEST, {"of_uid": uid, "most": most})
            until_s = before_s if above_s is None else max(before_s, above_s)
            old = self._rows(_OLD_REQUESTS, {"of_uid": uid, "until_s": until_s, "most": most_deleted})
            if old:
                self._write(_DELETE_REQUEST, ({"of_uid": uid, "of_request": row.request_id} for row in old))

    def load_events(self, job_id: int) -> list[JobEvent]:
        """Return the job's events in order (for an array task: also the array's submission)."""
        rows = self._rows(_EVENTS, {"of_job": job_id})
        return [from_data(row.kind, row.job_id, row.at_s, json.loads(row.data)) for row in rows]

    def attempts(self, listed: Sequence[Job]) -> dict[int, tuple[Attempt, ...] | None]:
        """Return the attempts of these jobs; None of a job whose events do not fit together."""
        courses: dict[int, list[tuple[str, float]]] = {job.id: [] for job in listed}
        for job_id, kind, at_s in self._tuples_of(_COURSES_OF_JOBS, courses):
            courses[job_id].append((kind, at_s))
        found: dict[int, tuple[Attempt, ...] | None] = {}
        found |= {job.id: ordinary_attempts(job, courses[job.id]) for job in listed}
        left = [job for job in listed if found[job.id] is None]
        of_job: dict[int, list[JobEvent]] = {job.id: [] for job in left}
        for row in self._rows_of(_EVENTS_OF_JOBS, of_job):
            of_job[row.job_id].append(from_data(row.kind, row.job_id, row.at_s, json.loads(row.data)))
        for job in left:
            try:
                found[job.id] = attempts_of(job, of_job[job.id])
            except InvariantError:
                found[job.id] = None
        return found

    def events_after(self, seq: int) -> list[Any]:
        """Return some of the next events: seq, at_s, job_id and kind.

        Those of no job have the job id `NO_JOB`, and their data.
        """
        return self._rows(_EVENTS_AFTER, {"after": seq})

    def last_event(self) -> int:
        """Return the number of the last event, 0 if there is none."""
        return int(self._value(_LAST_EVENT_SEQ) or 0)  # int: of our own database

    # ----- steps and training

    def load_steps(self, job_ids: Iterable[int]) -> list[StepRecord]:
        """Return the steps of these jobs, all attempts, in order."""
        found = map(step_of, self._rows_of(_STEPS, job_ids))
        return sorted(found, key=lambda step: (step.job_id, step.attempt, step.step != "batch", step.step.zfill(9)))

    def step_figures(self, job_ids: Iterable[int]) -> dict[int, list[dict[str, Any]]]:
        """Return what reports count of the steps of these jobs, by job."""
        found: dict[int, list[dict[str, Any]]] = {}
        for job_id, *figures in self._tuples_of(_STEP_FIGURES, job_ids):
            found.setdefault(job_id, []).append(dict(zip(STEP_FIGURES, figures, strict=True)))
        return found

    def attempt_steps(self, job_id: int, attempt: int) -> list[StepRecord]:
        """Return the steps of one attempt, in order."""
        return [step for step in self.load_steps([job_id]) if step.attempt == attempt]

    def last_step(self, job_id: int, attempt: int) -> int:
        """Return the highest step number of the attempt, -1 if it has none."""
        names = [row.step for row in self._rows(_STEP_NAMES, {"of_job": job_id, "of_attempt": attempt})]
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def load_training(self, job_ids: Iterable[int]) -> dict[int, TrainingStatus]:
        """Return the last training status of these jobs, by job."""
        return {row.job_id: training_of(row) for row in self._rows_of(_TRAINING, job_ids)}

    def load_energies(self, job_ids: Iterable[int]) -> dict[int, list[EnergyUse]]:
        """Return the energy that these jobs caused on each node, by job."""
        found: dict[int, list[EnergyUse]] = {}
        for row in self._rows_of(_ENERGIES, job_ids):
            found.setdefault(row.job_id, []).append(EnergyUse(*row))
        return found

    def load_gpu_uses(self, job_ids: Iterable[int]) -> dict[int, list[GpuUse]]:
        """Return how busy the GPUs of these jobs were on each node, by job."""
        found: dict[int, list[GpuUse]] = {}
        for row in self._rows_of(_GPU_USES, job_ids):
            found.setdefault(row.job_id, []).append(GpuUse(*row))
        return found

    def load_failures(self, job_id: int, attempt: int) -> list[RankFailure]:
        """Return the failures of ranks in this attempt, the first cause first."""
        return list(map(failure_of, self._rows(_FAILURES, {"of_job": job_id, "of_attempt": attempt})))

    # ----- nodes

    def load_nodes(self) -> dict[str, Any]:
        """Return the stored part of each node, by name (see `rows.node_row`)."""
        return {row.name: row for row in self._rows(_NODES)}

    def rename_node(self, former: str, name: str) -> None:
        """Give the state, events, assessments and links of a node another name.

        Raises UnavailableError. What a removed node of that name has left is deleted. Past jobs and steps keep the former name.
        """
        names = {"of_node": former, "to_node": name}
        benches = [replace(run, node=name) for run in self.load_benches() if run.node == former]
        links = [run for run in self.load_links() if former in run.pair]
        new = {former: name}
        renamed = [replace(run, one=new.get(run.one, run.one), other=new.get(run.other, run.other)) for run in links]
        with writing(self.connection) as connection:
            for delete_old, move in _RENAME_NODE:
                delete_old.run_many(connection, [{"of_node": name}])
                move.run_many(connection, [names])
            for forget in (_DELETE_BENCHES, _DELETE_LINKS):
                forget.run_many(connection, [{"of_node": former}, {"of_node": name}])
            _put(connection, _NEW_BENCH, _bench_row, benches)
            _put(connection, _NEW_LINK, _link_row, renamed)

    def load_node_events(self, node: str) -> list[NodeEvent]:
        """Return the node's events in order."""
        rows = self._rows(_NODE_EVENTS, {"of_node": node})
        return [node_event_from_data(row.kind, row.node, row.at_s, json.loads(row.data)) for row in rows]

    def recent_node_events(self, since_s: float) -> list[NodeEvent]:
        """Return the events of all nodes since then, in order."""
        rows = self._rows(_RECENT_NODE_EVENTS, {"since_s": since_s})
        return [node_event_from_data(row.kind, row.node, row.at_s, json.loads(row.data)) for row in rows]

    def load_benches(self) -> list[BenchRun]:
        """Return the last assessments of all nodes, in order."""
        return [run_from(row.data) for row in self._rows(_BENCHES)]

    def load_links(self) -> list[LinkRun]:
        """Return the last runs of all pairs of nodes, in order."""
        return [link_from(row.data) for row in self._rows(_LINKS)]

    def first_seen(self) -> dict[str, float]:
        """Return when each node was first heard of, by its first event."""
        return {row.node: row.at_s for row in self._rows(_FIRST_NODE_EVENTS)}

    def outages(self, after_s: float, before_s: float) -> list[Outage]:
        """Return when nodes took no jobs between the two times; an unfinished outage has no end."""
        found: list[Outage] = []
        began_s: dict[tuple[str, str], float] = {}

        def end(node: str, kind: str, at_s: float) -> None:
            if (node, kind) in began_s:
                found.append(Outage(node, began_s.pop((node, kind)), at_s, kind))

        for node, event, at_s in self._rows(_OUTAGES):
            begins, ends = _OUTAGE_OF[event]
            if begins == "down" and event != PowerUpFailed.__name__ and (node, "off") in began_s:
                continue  # it is switched off
            for kind in ends:
                end(node, kind, at_s)
            if begins:  # the second event of a down or drained node: only its cause has changed
                began_s.setdefault((node, begins), at_s)
        found += [Outage(node, start_s, None, kind) for (node, kind), start_s in began_s.items()]
        return [one for one in found if one.start_s < before_s and (one.end_s is None or one.end_s > after_s)]

    # ----- the rest of the cluster

    def load_usage(self) -> list[UsedResources]:
        """Return the usage that has been charged so far."""
        return list(map(used_of, self._rows(_USAGE)))

    def load_crontabs(self) -> list[Crontab]:
        """Return all crontabs, by uid."""
        return list(map(crontab_of, self._rows(_CRONTABS)))

    def load_triggers(self) -> list[Trigger]:
        """Return all triggers, by number."""
        return list(map(trigger_of, self._rows(_TRIGGERS)))

    def load_service_uses(self, from_day: int) -> list[ServiceUse]:
        """Return what users have asked of served models since a day."""
        return [ServiceUse(*row) for row in self._rows(_SERVICE_USES, {"from_day": from_day})]

    def load_services(self) -> list[Service]:
        """Return all services, by name."""
        return list(map(service_of, self._rows(_SERVICES)))

    def load_credentials(self) -> list[Credential]:
        """Return all credentials, by id."""
        return list(map(credential_of, self._rows(_CREDENTIALS)))

    def load_reservations(self) -> list[Reservation]:
        """Return all reservations, by name."""
        return list(map(reservation_of, self._rows(_RESERVATIONS)))

    # ----- single facts

    def _meta(self, key: str) -> str:
        return str(self._value(_META, {"of_key": key}) or "")

    def _facts(self, prefix: str) -> dict[str, str]:
        """Return the facts whose keys begin with `prefix`, without it."""
        return {row.key.removeprefix(prefix): row.value for row in self._rows(_META_FROM, {"prefix": prefix})}

    def adopted(self) -> set[str]:
        """Return the tokens from before a restore whose jobs continue by an admin's order."""
        return set(self._facts(ADOPTED))

    def partition_states(self) -> dict[str, PartitionState]:
        """Return the partition states that admins set, by name."""
        return {name: PartitionState(state) for name, state in self._facts(PARTITION).items()}

    def energy_marks(self) -> dict[str, str]:
        """Return what the meters of nodes showed when energy was last written, by node."""
        return self._facts(ENERGY_MARK)

    def clock(self) -> str:
        """Return the last record of the head node's clocks; "" if there is none."""
        return self._meta(CLOCK)

    def cluster(self) -> str:
        """Return the name of the cluster of this database; "" if it was never recorded."""
        return self._meta(CLUSTER)

    def put_cluster(self, name: str) -> None:
        """Write the name of the cluster. Raises UnavailableError."""
        self._write(PUT_META, [_meta_row((CLUSTER, name))])

    def cluster_id(self) -> str:
        """Return the random id of the cluster of this database; "" if it was never recorded."""
        return self._meta(CLUSTER_ID)

    def put_cluster_id(self, cluster_id: str) -> None:
        """Write the id of the cluster. Raises UnavailableError."""
        self._write(PUT_META, [_meta_row((CLUSTER_ID, cluster_id))])

    def given_up(self) -> dict[str, str]:
        """Return the nodes that an admin removed with their jobs while no controller ran.

        The values are the admins' names.
        """
        return self._facts(GIVEN_UP)

    def give_up(self, node: str, by: str) -> None:
        """Record that an admin removed a node with its jobs. Raises UnavailableError."""
        self._write(PUT_META, [_meta_row((GIVEN_UP + node, by))])

    def forget_given_up(self) -> None:
        """Delete these records: their jobs have been ended. Raises UnavailableError."""
        self._write(_DELETE_META_FROM, [{"prefix": GIVEN_UP}])

    # ----- backups

    def counts(self) -> tuple[str, int, int, int, float]:
        """Return incarnation, jobs, unfinished jobs, highest job id and time of the last event.

        Raises sqlite3.Error.
        """
        known, unfinished = _JOB_COUNTS.rows(self.connection)[0]
        waiting = sum(len(ids) for _, ids in self._submitted(_SUBMISSIONS))
        at_s = _LAST_EVENT.value(self.connection)
        last_id, _ = self.last_ids()
        return self._meta("incarnation"), known + waiting, unfinished + waiting, last_id, float(at_s or 0.0)

    def mark_restored(self, facts: dict[str, str]) -> None:
        """Write the facts of a restored incarnation, and delete the old ones: no node is seen.

        It belongs to the open transaction. Raises sqlite3.Error.
        """
        PUT_META.run_many(self.connection, map(_meta_row, facts.items()))
        # It becomes the database of the cluster for which it is restored.
        _DELETE_META_FROM.run_many(self.connection, [{"prefix": CLUSTER_ID}, {"prefix": ADOPTED}])
        _FORGET_BOOTS.run(self.connection)


# ----- statements

_PART = 100
_PLACES: list[BindParameter[Any]] = [place(f"id{i}") for i in range(_PART)]


def _parts(ids: Iterable[object]) -> Iterator[Row]:
    """Yield the values of `_PLACES` for all `ids`, in parts."""
    listed = list(ids)
    for at in range(0, len(listed), _PART):
        part: Sequence[object] = listed[at : at + _PART]
        yield {f"id{i}": part[i] if i < len(part) else None for i in range(_PART)}


_META = Statement(select(meta.c.value).where(meta.c.key == place("of_key")))
_META_FROM = Statement(select(meta).where(meta.c.key.startswith(place("prefix"))))
_DELETE_META_FROM = Statement(delete(meta).where(meta.c.key.startswith(place("prefix"))))

_NEW_ENVIRONMENT = Statement(insert(environments).on_conflict_do_nothing())
_ENVIRONMENTS = Statement(select(environments).where(environments.c.mac.in_(_PLACES)))
_ENVIRONMENT_MACS = Statement(select(environments.c.mac))
_DELETE_ENVIRONMENT = Statement(delete(environments).where(environments.c.mac == place("of_mac")))
_SEALED_BY_OTHERS = Statement(select(environments).where(environments.c.key_id != place("key")))
_KEY_USES = Statement(
    select(environments.c.key_id, func.count().label("count")).select_from(environments).group_by(environments.c.key_id)
)
_PUT_ENV_MAC = Statement(update(specs).where(specs.c.id == place("of_id")), ("env_mac",))
_NEW_SPEC = Statement(insert(specs))
_SPECS = Statement(select(specs).where(specs.c.id.in_(_PLACES)))
_LAST_SPEC = Statement(select(func.max(specs.c.id)))

_NEW_SCRIPT = Statement(insert(scripts).on_conflict_do_nothing())
_SCRIPT = Statement(select(scripts.c.text).where(scripts.c.sha256 == place("hash")))
_SCRIPT_HASHES = Statement(select(scripts.c.sha256))
_DELETE_SCRIPT = Statement(delete(scripts).where(scripts.c.sha256 == place("hash")))

_ACTIVE = sorted(state.value for state in ACTIVE)
_UNFINISHED = jobs.c.state.in_([JobState.PENDING.value, *_ACTIVE])
# In this form it uses two indices: a start reads nothing of the history.
_LIVE = or_(_UNFINISHED, jobs.c.ended_at_s > place("after_s"))
_LIVE_JOBS = Statement(select(jobs).where(_LIVE))
_SPECS_OF_LIVE = Statement(
    select(specs).where(specs.c.id.in_(select(jobs.c.spec_id).where(_LIVE).union_all(select(submissions.c.spec_id))))
)
_PUT_JOB = Statement(upsert(jobs))
_JOBS = Statement(select(jobs).where(jobs.c.id.in_(_PLACES)))
_COUNTED_JOBS = Statement(select(*(jobs.c[name] for name in COUNTED)).where(jobs.c.id.in_(_PLACES)))
_PAST_RUNS = (
    select(
        jobs.c.id,
        jobs.c.uid,
        func.coalesce(jobs.c.eligible_at_s, jobs.c.submitted_at_s).label("since_s"),
        jobs.c.started_at_s,
        jobs.c.ended_at_s,
        func.coalesce(jobs.c.asked_limit_s, jobs.c.time_limit_s).label("limit_s"),
        jobs.c.shares,
    )
    .where(jobs.c.ended_at_s.is_not(None), jobs.c.started_at_s.is_not(None))
    .order_by(jobs.c.ended_at_s.desc(), jobs.c.id.desc())
)
_FIRST_JOB = Statement(select(jobs.c.id, jobs.c.submitted_at_s).order_by(jobs.c.id).limit(1))
_HELD_NODES = Statement(select(jobs.c.id, jobs.c.held_nodes).where(jobs.c.state.in_(_ACTIVE)).order_by(jobs.c.id))
_LAST_JOB = Statement(select(func.max(jobs.c.id)))
_JOB_COUNTS = Statement(
    select(func.count().label("known"), func.count().filter(_UNFINISHED).label("unfinished")).select_from(jobs)
)

_NEW_SUBMISSION = Statement(insert(submissions))
_DELETE_SUBMISSION = Statement(delete(submissions).where(submissions.c.id == place("of_id")))
_SUBMISSIONS = Statement(select(submissions))
_SUBMISSIONS_BETWEEN = Statement(
    select(submissions).where(submissions.c.id <= place("last"), submissions.c.last_id >= place("first"))
)
_FIRST_SUBMISSION = Statement(
    select(submissions.c.id, submissions.c.submitted_at_s).order_by(submissions.c.id).limit(1)
)
_LAST_SUBMITTED = Statement(select(func.max(submissions.c.last_id)))
_NUMBERS = select(submissions.c.id)
_CHANGED = Statement(select(jobs.c.id).where(or_(jobs.c.array_job_id.in_(_NUMBERS), jobs.c.id.in_(_NUMBERS))))

NO_JOB = 0  # of events of no job
_NEW_EVENT = Statement(insert(events), ("at_s", "job_id", "kind", "data"))
_ARRAY_ID = func.coalesce(
    select(jobs.c.array_job_id).where(jobs.c.id == place("of_job")).scalar_subquery(),
    select(submissions.c.id)
    .where(submissions.c.id < place("of_job"), submissions.c.last_id >= place("of_job"))
    .scalar_subquery(),
)
_EVENTS = Statement(
    select(events)
    .where(
        or_(
            and_(events.c.job_id == place("of_job"), or_(events.c.kind != "Submitted", _ARRAY_ID.is_(None))),
            and_(events.c.job_id == _ARRAY_ID, events.c.kind == "Submitted"),
        )
    )
    .order_by(events.c.seq)
)
_EVENTS_OF_JOBS = Statement(
    select(events).where(events.c.job_id.in_(_PLACES), events.c.kind != "Submitted").order_by(events.c.seq)
)
_COURSES_OF_JOBS = Statement(
    select(events.c.job_id, events.c.kind, events.c.at_s)
    .where(events.c.job_id.in_(_PLACES), events.c.kind != "Submitted")
    .order_by(events.c.seq)
)
_LAST_EVENT = Statement(select(func.max(events.c.at_s)))

_NEW_AUDIT = Statement(insert(audit))
_LAST_AUDIT = Statement(select(audit.c.seq, audit.c.hash).order_by(audit.c.seq.desc()).limit(1))
_AUDIT = Statement(select(audit).where(audit.c.seq > place("after_seq")).order_by(audit.c.seq).limit(place("most")))

_NEW_REQUEST = Statement(insert(requests))
_REQUEST = Statement(
    select(requests.c.job_ids).where(requests.c.uid == place("of_uid"), requests.c.request_id == place("of_request"))
)

_OF_REQUEST = and_(requests.c.uid == place("of_uid"), requests.c.request_id == place("of_request"))
_REQUEST_ANSWER = Statement(select(requests.c.content, requests.c.answer).where(_OF_REQUEST))
_PUT_ANSWER = Statement(update(requests).where(_OF_REQUEST), ("answer",))
_NEXT_REQUESTER = Statement(select(func.min(requests.c.uid)).where(requests.c.uid > place("of_uid")))
_NTH_REQUEST = Statement(
    select(requests.c.at_s)
    .where(requests.c.uid == place("of_uid"))
    .order_by(requests.c.at_s.desc())
    .limit(1)
    .offset(place("most"))
)
_OLD_REQUESTS = Statement(
    select(requests.c.request_id)
    .where(requests.c.uid == place("of_uid"), requests.c.at_s <= place("until_s"))
    .order_by(requests.c.at_s)
    .limit(place("most"))
)
_DELETE_REQUEST = Statement(delete(requests).where(_OF_REQUEST))

_PUT_STEP = Statement(upsert(steps))
_STEPS = Statement(select(steps).where(steps.c.job_id.in_(_PLACES)))
STEP_FIGURES = ("step", "attempt", "ntasks", "cpu_user_s", "cpu_system_s", "max_rss_kib")
_STEP_FIGURES = Statement(
    select(steps.c.job_id, *(steps.c[name] for name in STEP_FIGURES))
    .where(steps.c.job_id.in_(_PLACES))
    .order_by(steps.c.job_id)
)
_OF_ATTEMPT = and_(steps.c.job_id == place("of_job"), steps.c.attempt == place("of_attempt"))
_STEP_NAMES = Statement(select(steps.c.step).where(_OF_ATTEMPT))
_END_STEPS = Statement(update(steps).where(_OF_ATTEMPT, steps.c.state == "RUNNING"), ("state", "ended_at_s"))
_FORGET_STEPS = Statement(update(steps).where(_OF_ATTEMPT, steps.c.kept.is_not(None)).values(kept=null()))

_PUT_TRAINING = Statement(upsert(training))
_ADD_ENERGY = Statement(adding(energies))
_ENERGIES = Statement(select(energies).where(energies.c.job_id.in_(_PLACES)).order_by(energies.c.job_id))
_ADD_GPU_USE = Statement(adding(gpu_uses))
_ADD_SERVICE_USE = Statement(adding(service_uses))
_ADD_SERVICE_CHARGE = Statement(adding(service_charges))
_charges_of_uses = service_uses.outerjoin(
    service_charges,
    and_(*(column == service_charges.c[column.name] for column in service_uses.primary_key.columns)),
)
_SERVICE_USES = Statement(
    select(service_uses, func.coalesce(service_charges.c.charged_s, 0.0).label("charged_s"))
    .select_from(_charges_of_uses)
    .where(service_uses.c.day >= place("from_day"))
    .order_by(service_uses.c.day)
)
_GPU_USES = Statement(select(gpu_uses).where(gpu_uses.c.job_id.in_(_PLACES)).order_by(gpu_uses.c.job_id))
_TRAINING = Statement(select(training).where(training.c.job_id.in_(_PLACES)))

_NEW_FAILURE = Statement(insert(failures).on_conflict_do_nothing())  # only the first report of a rank counts
_FAILURES = Statement(
    select(failures)
    .where(failures.c.job_id == place("of_job"), failures.c.attempt == place("of_attempt"))
    .order_by(failures.c.echo, failures.c.at_s, failures.c.rank)
)

_PUT_NODE = Statement(upsert(nodes))
_PUT_POWER = Statement(upsert(powers))
_NODES = Statement(
    select(
        nodes,
        powers.c.power,
        powers.c.since_s.label("power_since_s"),
        powers.c.by_whom.label("power_by"),
        powers.c.why.label("power_why"),
    ).select_from(nodes.outerjoin(powers, nodes.c.name == powers.c.node))
)
_FORGET_BOOTS = Statement(update(nodes).values(boot_id=""))
_NEW_NODE_EVENT = Statement(insert(node_events), ("at_s", "node", "kind", "data"))
_NODE_EVENTS = Statement(select(node_events).where(node_events.c.node == place("of_node")).order_by(node_events.c.seq))
_RECENT_NODE_EVENTS = Statement(
    select(node_events).where(node_events.c.at_s >= place("since_s")).order_by(node_events.c.seq)
)
_RENAME_NODE = (
    (
        Statement(delete(nodes).where(nodes.c.name == place("of_node"))),
        Statement(update(nodes).where(nodes.c.name == place("of_node")).values(name=place("to_node"))),
    ),
    (
        Statement(delete(powers).where(powers.c.node == place("of_node"))),
        Statement(update(powers).where(powers.c.node == place("of_node")).values(node=place("to_node"))),
    ),
    (
        Statement(delete(node_events).where(node_events.c.node == place("of_node"))),
        Statement(update(node_events).where(node_events.c.node == place("of_node")).values(node=place("to_node"))),
    ),
)
_DELETE_BENCHES = Statement(delete(benches).where(benches.c.node == place("of_node")))
_NEW_BENCH = Statement(insert(benches), ("at_s", "node", "data"))
_BENCHES = Statement(select(benches).order_by(benches.c.seq))
_KEPT_BENCHES = 100  # of each node
_newest = select(benches.c.seq).where(benches.c.node == place("of_node")).order_by(benches.c.seq.desc())
_FORGET_BENCHES = Statement(
    delete(benches).where(benches.c.node == place("of_node"), benches.c.seq.not_in(_newest.limit(_KEPT_BENCHES)))
)
_DELETE_LINKS = Statement(delete(links).where((links.c.one == place("of_node")) | (links.c.other == place("of_node"))))
_NEW_LINK = Statement(insert(links), ("at_s", "one", "other", "data"))
_LINKS = Statement(select(links).order_by(links.c.seq))
_KEPT_LINKS = 5  # of each pair
_of_pair = (links.c.one == place("of_one"), links.c.other == place("of_other"))
_newest_links = select(links.c.seq).where(*_of_pair).order_by(links.c.seq.desc()).limit(_KEPT_LINKS)
_FORGET_LINKS = Statement(delete(links).where(*_of_pair, links.c.seq.not_in(_newest_links)))
# Of each event: the outage that begins with it, and those that end.
_OUTAGE_OF: dict[str, tuple[str, tuple[str, ...]]] = {
    event.__name__: row
    for event, row in (
        (NodeDown, ("down", ())),
        (NodeUp, ("", ("down", "off"))),
        (NodeDrained, ("drained", ())),
        (NodeResumed, ("", ("drained",))),
        (NodeFaultCleared, ("", ("drained",))),
        (PowerDownOrdered, ("off", ())),
        (PowerDownFailed, ("", ("off",))),
        (PowerUpFailed, ("down", ("off",))),
    )
}
_FIRST_NODE_EVENTS = Statement(
    select(node_events.c.node, func.min(node_events.c.at_s).label("at_s")).group_by(node_events.c.node)
)
_OUTAGES = Statement(
    select(node_events.c.node, node_events.c.kind, node_events.c.at_s)
    .where(node_events.c.kind.in_(list(_OUTAGE_OF)))
    .order_by(node_events.c.seq)
)

_PUT_USAGE = Statement(upsert(usage))
_USAGE = Statement(select(usage))

_NEW_RESERVATION = Statement(insert(reservations))
_DELETE_RESERVATION = Statement(delete(reservations).where(reservations.c.name == place("of")))
_RESERVATIONS = Statement(select(reservations).order_by(reservations.c.name))

_NEW_CRONTAB = Statement(insert(crontabs))
_DELETE_CRONTAB = Statement(delete(crontabs).where(crontabs.c.uid == place("of")))
_CRONTABS = Statement(select(crontabs).order_by(crontabs.c.uid))

_NEW_TRIGGER = Statement(insert(triggers))
_DELETE_TRIGGER = Statement(delete(triggers).where(triggers.c.id == place("of")))
_NEW_SERVICE = Statement(insert(services))
_DELETE_SERVICE = Statement(delete(services).where(services.c.name == place("of")))
_SERVICES = Statement(select(services).order_by(services.c.name))
_TRIGGERS = Statement(select(triggers).order_by(triggers.c.id))
_EVENTS_AFTER = Statement(
    select(
        events.c.seq,
        events.c.at_s,
        events.c.job_id,
        events.c.kind,
        case((events.c.job_id == NO_JOB, events.c.data), else_="").label("data"),
    )
    .where(events.c.seq > place("after"))
    .order_by(events.c.seq)
    .limit(500)
)
_LAST_EVENT_SEQ = Statement(select(func.max(events.c.seq)))
_NEW_CREDENTIAL = Statement(insert(credentials))
_DELETE_CREDENTIAL = Statement(delete(credentials).where(credentials.c.id == place("of")))
_CREDENTIALS = Statement(select(credentials).order_by(credentials.c.id))


def _conditions(query: HistoryQuery, table: Table = jobs) -> list[ColumnElement[bool]]:
    """Return the conditions of a query on the columns of `table`, except its job ids."""
    where: list[ColumnElement[bool]] = []
    if query.before_id is not None:
        where.append(table.c.id < query.before_id)
    if query.users:
        where.append(table.c.user.in_(query.users))
    if query.names:
        where.append(table.c.name.in_(query.names))
    if query.end_s is not None:
        where.append(table.c.submitted_at_s <= query.end_s)
    if query.states and table is jobs:
        where.append(jobs.c.state.in_(query.states))
    if query.start_s is not None and table is jobs:
        where.append(or_(jobs.c.ended_at_s.is_(None), jobs.c.ended_at_s >= query.start_s))
    return where


def _ids_of(submission: Any) -> range:
    return range(submission.id, submission.last_id + 1)


def _cpus(shares: str) -> int:
    return sum(share[1] for share in json.loads(shares))


# ----- writing a batch

_TO_JSON = json.JSONEncoder(separators=(",", ":")).encode


def _put(connection: Connection, statement: Statement, row_of: Callable[[Any], Row], changed: Iterable[Any]) -> None:
    if changed:
        statement.run_many(connection, map(row_of, changed))


def _replace(
    connection: Connection,
    delete_one: Statement,
    insert_one: Statement,
    row_of: Callable[[Any], Row],
    one_by_key: dict[Any, Any],
) -> None:
    """Write the value of each key; None: only delete the old one."""
    for key, one in one_by_key.items():
        delete_one.run(connection, {"of": key})
        if one is not None:
            insert_one.run(connection, row_of(one))


def _submission(job: Job) -> JobId:
    """Return the id of the job's submission: its own, or that of its array's first task."""
    return job.id if job.array_job_id is None else job.array_job_id


def _unchanged(tasks: Sequence[Job], batch: WriteBatch) -> set[int]:
    """Return the new jobs that the rest of the batch has not changed."""
    return {task.id for task in tasks if batch.jobs.get(task.id) is task}


def _put_specs(connection: Connection, specs: Mapping[int, JobSpec], key: SealingKey) -> dict[int, str]:
    """Write the specifications; return the macs of their environments, by id."""
    environments = {env: env_row(env, key) for env in {spec.env for spec in specs.values()} if env}
    macs = {spec_id: environments[spec.env]["mac"] for spec_id, spec in specs.items() if spec.env}
    _NEW_ENVIRONMENT.run_many(connection, environments.values())
    _NEW_SPEC.run_many(connection, [spec_row(spec_id, spec, macs.get(spec_id, "")) for spec_id, spec in specs.items()])
    return macs


def _attempts_over(changed: Iterable[Job], events: Iterable[JobEvent]) -> list[Row]:
    """Return the attempts that have released their last node, with their end.

    Their steps without a reported end have ended with the attempt: no report will come.
    """
    lost = {event.job_id for event in events if isinstance(event, NodeLost)}
    over: list[Row] = []
    for job in changed:
        again = job.state is JobState.PENDING and job.attempt > 0
        if job.allocated_at_s is not None and (again or job.state in FINAL):
            state = JobState.NODE_FAIL if job.id in lost else JobState.CANCELLED if again else job.state
            of = {"of_job": job.id, "of_attempt": job.attempt - again}
            over.append(of | {"state": state.value, "ended_at_s": job.ended_at_s})
    return over


def _facts(batch: WriteBatch) -> list[tuple[str, str]]:
    facts = [(PARTITION + name, state.value) for name, state in batch.partitions.items()]
    facts += [(ADOPTED + token, "") for token in batch.adopted]
    facts += [(ENERGY_MARK + node, mark) for node, mark in batch.energy_marks.items()]
    return [*facts, (CLOCK, batch.clock)] if batch.clock else facts


def _meta_row(fact: tuple[str, str]) -> Row:
    return {"key": fact[0], "value": fact[1]}


def _script_row(script: tuple[str, bytes]) -> Row:
    return {"sha256": script[0], "text": script[1]}


def _put_uses(connection: Connection, batch: WriteBatch) -> None:
    _put(connection, _ADD_ENERGY, EnergyUse._asdict, batch.energies)
    _put(connection, _ADD_GPU_USE, GpuUse._asdict, batch.gpu_uses)
    _put(connection, _ADD_SERVICE_USE, ServiceUse._asdict, batch.service_uses)
    _put(connection, _ADD_SERVICE_CHARGE, ServiceUse._asdict, [use for use in batch.service_uses if use.charged_s])


def _event_row(event: JobEvent | ClusterEvent) -> Row:
    if isinstance(event, ClusterEvent):
        return {"at_s": event.at_s, "job_id": NO_JOB, "kind": event.kind, "data": _TO_JSON(event.to_data())}
    kind, data = type(event).__name__, _TO_JSON(to_data(event))
    return {"at_s": event.at_s, "job_id": event.job_id, "kind": kind, "data": data}


def _bench_row(run: BenchRun) -> Row:
    return {"at_s": run.at_s, "node": run.node, "data": run_text(run)}


def _link_row(run: LinkRun) -> Row:
    return {"at_s": run.at_s, "one": run.one, "other": run.other, "data": link_text(run)}


def _node_event_row(event: NodeEvent) -> Row:
    kind, data = type(event).__name__, _TO_JSON(node_event_to_data(event))
    return {"at_s": event.at_s, "node": event.node, "kind": kind, "data": data}


def _request_row(request: NotedRequest) -> Row:
    return request._asdict() | {"job_ids": json.dumps(request.job_ids), "answer": ""}


def _answer_row(answer: tuple[tuple[int, str], str]) -> Row:
    (uid, request_id), text = answer
    return {"of_uid": uid, "of_request": request_id, "answer": text}
