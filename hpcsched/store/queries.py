"""Infrequent statements, in SQLAlchemy Core, on the store's own connection.

Reads at the start and writes of each tick are not here: they must not wait for SQLAlchemy, whose
import takes as long as reading all jobs (man/adr/0012). `hpcsched.store.store` imports this module
on first use.

Rules: only `hpcsched.store.engine` begins and ends transactions. A statement belongs to the open
transaction, if there is one. Database errors are raised as for all other statements: as the
driver's `sqlite3.Error`.

Sources: SQLAlchemy on engines over an existing connection (``creator``, `StaticPool`), on its
dialect's transactions, and on the event ``handle_error``.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from typing import Any, NamedTuple

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    ExceptionContext,
    Integer,
    and_,
    cast,
    create_engine,
    delete,
    event,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.sqlite import insert as insert_or
from sqlalchemy.pool import StaticPool

from hpcsched.lifecycle.events import JobEvent, from_data
from hpcsched.lifecycle.node import NodeDown, NodeEvent, NodeUp, node_event_from_data
from hpcsched.model.cron import Crontab
from hpcsched.model.job import ACTIVE, Job, JobState, RankFailure
from hpcsched.model.reservation import Reservation
from hpcsched.model.trigger import Trigger
from hpcsched.state.transaction import StepRecord
from hpcsched.store import columns
from hpcsched.store.rows import (
    ADOPTED,
    HistoryQuery,
    crontab_row,
    failure_of,
    failure_row,
    job_of,
    reservation_row,
    specs_of,
    step_of,
    trigger_row,
)
from hpcsched.store.schema import (
    crontabs,
    events,
    failures,
    jobs,
    meta,
    node_events,
    nodes,
    reservations,
    specs,
    steps,
    triggers,
)


class Outage(NamedTuple):
    """A period without answers from a node, in Unix seconds; `end_s` None: not ended."""

    node: str
    start_s: float
    end_s: float | None


class Seldom:
    """The statements, over a connection that the caller opens and closes."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = _over(connection)

    def history_ids(self, query: HistoryQuery) -> list[int]:
        """Return the ids of the matching jobs, in order, at most `query.limit` (the newest)."""
        found = select(jobs.c.id).where(*_conditions(query)).order_by(jobs.c.id.desc()).limit(query.limit)
        return list(self._connection.scalars(found).all())[::-1]

    def jobs(self, job_ids: Iterable[int]) -> list[Job]:
        """Return these jobs, by id."""
        found = select(jobs).where(_in(jobs.c.id, job_ids)).order_by(jobs.c.id)
        used = select(specs.c.id, specs.c.spec).where(specs.c.id.in_(found.with_only_columns(jobs.c.spec_id)))
        by_id = specs_of((key, text) for key, text in self._connection.execute(used).all())
        # Field access is faster than with SQLAlchemy's rows.
        rows = map(columns.Jobs._make, self._connection.execute(found).all())
        return [job_of(row, by_id[row.spec_id]) for row in rows]

    def steps(self, job_ids: Iterable[int]) -> list[StepRecord]:
        """Return the steps of these jobs, all attempts, in order."""
        found = map(step_of, self._connection.execute(select(steps).where(_in(steps.c.job_id, job_ids))).all())
        return sorted(found, key=lambda step: (step.job_id, step.attempt, step.step != "batch", step.step.zfill(9)))

    def last_step(self, job_id: int, attempt: int) -> int:
        """Return the highest step number of the attempt, -1 if it has none."""
        names = self._connection.scalars(
            select(steps.c.step).where(steps.c.job_id == job_id, steps.c.attempt == attempt)
        ).all()
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def events(self, job_id: int) -> list[JobEvent]:
        """Return the job's events in order (for an array task: also the array's submission)."""
        array_id = select(jobs.c.array_job_id).where(jobs.c.id == job_id).scalar_subquery()
        own = and_(events.c.job_id == job_id, or_(events.c.kind != "Submitted", array_id.is_(None)))
        submission = and_(events.c.job_id == array_id, events.c.kind == "Submitted")
        rows = self._connection.execute(select(events).where(own | submission).order_by(events.c.seq)).all()
        return [from_data(row.kind, row.job_id, row.at_s, json.loads(row.data)) for row in rows]

    def node_events(self, node: str) -> list[NodeEvent]:
        """Return the node's events in order."""
        found = select(node_events).where(node_events.c.node == node).order_by(node_events.c.seq)
        rows = self._connection.execute(found).all()
        return [node_event_from_data(row.kind, row.node, row.at_s, json.loads(row.data)) for row in rows]

    def outages(self, after_s: float, before_s: float) -> list[Outage]:
        """Return the outages of nodes between the two times; an unfinished one has no end."""
        kinds = (NodeDown.__name__, NodeUp.__name__)
        found = select(node_events.c.node, node_events.c.kind, node_events.c.at_s).where(node_events.c.kind.in_(kinds))
        down_s: dict[str, float] = {}
        outages = []
        for node, kind, at_s in self._connection.execute(found.order_by(node_events.c.seq)):
            if kind == NodeDown.__name__:
                down_s.setdefault(node, at_s)  # a second event of a node that is down: only its cause has changed
            elif node in down_s:
                outages.append(Outage(node, down_s.pop(node), at_s))
        outages += [Outage(node, start_s, None) for node, start_s in down_s.items()]
        return [
            outage
            for outage in outages
            if outage.start_s < before_s and (outage.end_s is None or outage.end_s > after_s)
        ]

    def failures(self, job_id: int, attempt: int) -> list[RankFailure]:
        """Return the failures of ranks in this attempt, the first cause first."""
        found = select(failures).where(failures.c.job_id == job_id, failures.c.attempt == attempt)
        in_order = found.order_by(failures.c.echo, failures.c.at_s, failures.c.rank)
        return [failure_of(row) for row in self._connection.execute(in_order).all()]

    def put_failures(self, told: Iterable[RankFailure]) -> None:
        """Write failures of ranks; only the first report of a rank counts."""
        self._connection.execute(insert_or(failures).on_conflict_do_nothing(), [failure_row(one) for one in told])

    def put_reservation(self, name: str, reservation: Reservation | None) -> None:
        """Write the reservation of that name; None deletes it."""
        self._connection.execute(delete(reservations).where(reservations.c.name == name))
        if reservation is not None:
            self._connection.execute(insert(reservations), reservation_row(reservation))

    def put_crontab(self, uid: int, crontab: Crontab | None) -> None:
        """Write the crontab of that user; None deletes it."""
        self._connection.execute(delete(crontabs).where(crontabs.c.uid == uid))
        if crontab is not None:
            self._connection.execute(insert(crontabs), crontab_row(crontab))

    def put_trigger(self, number: int, trigger: Trigger | None) -> None:
        """Write the trigger of that number; None deletes it."""
        self._connection.execute(delete(triggers).where(triggers.c.id == number))
        if trigger is not None:
            self._connection.execute(insert(triggers), trigger_row(trigger))

    def put_adopted(self, tokens: Iterable[str]) -> None:
        """Write the tokens from before a restore whose jobs continue."""
        rows = [{"key": ADOPTED + token, "value": ""} for token in tokens]
        self._connection.execute(insert_or(meta).on_conflict_do_nothing(), rows)

    def counts(self) -> tuple[str, int, int, int, float]:
        """Return incarnation, jobs, unfinished jobs, highest job id and time of the last event."""
        begun = [state.value for state in (JobState.PENDING, *ACTIVE)]
        incarnation = self._connection.scalars(select(meta.c.value).where(meta.c.key == "incarnation")).one()
        known, last = self._connection.execute(
            select(func.count(), func.coalesce(func.max(jobs.c.id), 0)).select_from(jobs)
        ).one()
        unfinished = self._connection.scalars(
            select(func.count()).select_from(jobs).where(jobs.c.state.in_(begun))
        ).one()
        given = select(func.coalesce(func.max(cast(meta.c.value, Integer)), 0)).where(meta.c.key == "last_job_id")
        at_s = self._connection.scalars(select(func.coalesce(func.max(events.c.at_s), 0))).one()
        return incarnation, known, unfinished, max(last, self._connection.scalars(given).one()), float(at_s)

    def mark_restored(self, facts: dict[str, str]) -> None:
        """Write the facts of a restored incarnation, and delete the old ones: no node is seen."""
        replacing = insert_or(meta)
        self._connection.execute(
            replacing.on_conflict_do_update(index_elements=["key"], set_={"value": replacing.excluded.value}),
            [{"key": key, "value": value} for key, value in facts.items()],
        )
        # It becomes the database of the cluster for which it is restored.
        self._connection.execute(delete(meta).where(meta.c.key == "cluster_id"))
        self._connection.execute(delete(meta).where(meta.c.key.startswith(ADOPTED, autoescape=True)))
        self._connection.execute(update(nodes).values(boot_id=""))


def _over(connection: sqlite3.Connection) -> Connection:
    """Return `connection` for SQLAlchemy; it is not changed, and its opener closes it."""
    engine = create_engine(
        "sqlite+pysqlite://", creator=lambda: connection, poolclass=StaticPool, pool_reset_on_return=None
    )
    engine.dialect.do_begin = engine.dialect.do_commit = engine.dialect.do_rollback = _leave_open  # type: ignore[method-assign]  # of this one alone
    event.listen(engine, "handle_error", _raise_the_driver_s)
    return engine.connect()


def _leave_open(dbapi_connection: Any) -> None:
    """Leave transactions to the owner of the connection."""


def _raise_the_driver_s(context: ExceptionContext) -> None:
    if isinstance(context.original_exception, sqlite3.Error):
        raise context.original_exception


def _conditions(query: HistoryQuery) -> list[ColumnElement[bool]]:
    where: list[ColumnElement[bool]] = []
    if query.job_ids:
        where.append(_in(jobs.c.id, query.job_ids) | _in(jobs.c.array_job_id, query.job_ids))
    if query.users:
        where.append(_in(jobs.c.user, query.users))
    if query.states:
        where.append(_in(jobs.c.state, query.states))
    if query.names:
        where.append(_in(jobs.c.name, query.names))
    if query.start_s is not None:
        where.append(jobs.c.ended_at_s.is_(None) | (jobs.c.ended_at_s >= query.start_s))
    if query.end_s is not None:
        where.append(jobs.c.submitted_at_s <= query.end_s)
    return where


def _in(column: Column[Any], listed: Iterable[object]) -> ColumnElement[bool]:
    """Return the condition that the column is in `listed`.

    `listed` is bound as one value, so that its length is not limited.
    """
    return column.in_(select(func.json_each(json.dumps(list(listed))).table_valued("value").c.value))
