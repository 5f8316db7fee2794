"""Answer history queries: jobs, including ended ones, with steps, as JSON made in parts.

A search may read every job ever submitted. This takes SQLite longer than other requests should
wait, so a thread reads through its own connection.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hpcsched.api.connection_limits import Breaks
from hpcsched.api.identity import Asker
from hpcsched.api.jobview import job_view, jobs_text, json_text
from hpcsched.api.views import step_view, training_view
from hpcsched.errors import RequestError
from hpcsched.model.job import MAX_COMPONENTS, Job, TrainingStatus, components_of
from hpcsched.model.text import number, whole_number
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import StepRecord
from hpcsched.store.engine import open_read_only
from hpcsched.store.rows import HistoryQuery
from hpcsched.store.store import Store

PART_JOBS = 500  # read at a time

Json = dict[str, Any]
_NOT_OF_A_NUMBER = re.compile(r"[_.+]")


class _HistorySlice(NamedTuple):
    """Some of the jobs, with their steps and other rows."""

    jobs: list[Job]
    steps: list[StepRecord]
    training: dict[int, TrainingStatus]


def outages_of(database: Path, query: Json) -> list[Json]:
    """Return the outages of nodes between `start_s` and `end_s` of the query. Raises RequestError, UnavailableError."""
    try:
        after_s, before_s = (number(query[name], name) for name in ("start_s", "end_s"))
    except KeyError as missing:
        raise RequestError(f"cannot read outages: the query has no {missing.args[0]}") from None
    except ValueError as error:
        raise RequestError(f"cannot read outages: {error}") from None
    store = Store(open_read_only(database))
    try:
        return [outage._asdict() for outage in store.outages(after_s, before_s)]
    finally:
        store.close()


async def history_text(database: Path, cluster: ClusterState, asker: Asker, query: Json, now_s: float) -> bytes:
    """Return the jobs that match `query`; unfinished jobs are shown in their present state.

    Raises: RequestError, and UnavailableError if the database cannot be read.
    """
    wanted = _history_query(query)
    breaks, texts = Breaks(), []
    loop = asyncio.get_running_loop()
    store = Store(open_read_only(database))
    thread = ThreadPoolExecutor(1, "history")
    try:
        ids = await loop.run_in_executor(thread, _ids, store, wanted)
        for at in range(0, len(ids), PART_JOBS):
            part = await loop.run_in_executor(thread, _read, store, ids[at : at + PART_JOBS])
            for view in _views(part, cluster, asker, now_s):
                texts.append(json_text(view))
                if breaks.due():
                    await breaks.take()
    finally:
        thread.submit(store.close)  # after its present read, if the client has disconnected
        thread.shutdown(wait=False)
    return jobs_text(now_s, texts)


def _ids(store: Store, query: HistoryQuery) -> list[int]:
    """Return the ids of the requested jobs.

    A number may be that of a component of a heterogeneous job.
    """
    found = store.history_ids(query)
    for job_id in set(query.job_ids).difference(found):
        before = store.history_ids(replace(query, job_ids=tuple(range(job_id - MAX_COMPONENTS + 1, job_id))))
        found += [job.id for job in store.jobs(before) if job_id <= job.id + len(job.spec.components)]
    return sorted(set(found))


def _read(store: Store, ids: Sequence[int]) -> _HistorySlice:
    return _HistorySlice(store.jobs(ids), store.load_steps(ids), store.load_training(ids))


def _views(part: _HistorySlice, cluster: ClusterState, asker: Asker, now_s: float) -> Iterator[Json]:
    steps: dict[int, list[Json]] = {}
    for step in part.steps:
        steps.setdefault(step.job_id, []).append(step_view(step))
    for job in part.jobs:
        for one in components_of(cluster.jobs.get(job.id, job)):
            view = job_view(one, cluster, asker, now_s)
            view["steps"] = [step for step in steps.get(job.id, []) if one.component is None or _is_in(step, one)]
            if view["training"] is None and asker.owns(job):
                view["training"] = training_view(part.training.get(job.id))
            yield view


def _is_in(step: Json, component: Job) -> bool:
    """Return whether a step of a heterogeneous job ran in that component.

    Also true if it is not known in which component the step ran.
    """
    names = {share.node for share in component.shares}
    return not names.isdisjoint(step["nodes"]) or not (step["nodes"] or component.component)


def _history_query(query: Json) -> HistoryQuery:
    def words(name: str) -> tuple[str, ...]:
        return tuple(word for word in query.get(name, "").split(",") if word)

    unknown = set(query) - {"id", "user", "state", "name", "start_s", "end_s", "limit"}
    if unknown:
        raise RequestError(f"cannot search the history by {', '.join(sorted(unknown))}")
    return HistoryQuery(
        job_ids=tuple(whole_number(_NOT_OF_A_NUMBER.split(word)[0], "a job id") for word in words("id")),
        users=words("user"),
        states=tuple(word.upper() for word in words("state")),
        names=words("name"),
        start_s=number(query["start_s"], "start_s") if query.get("start_s") else None,
        end_s=number(query["end_s"], "end_s") if query.get("end_s") else None,
        limit=max(0, min(whole_number(query.get("limit") or "10000", "limit"), 100_000)),
    )
