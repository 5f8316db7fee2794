"""The rows of the queue's text, kept from one look to the next: only those of jobs that have changed are written again.

A job that waits or is over reads the same at any time, unless it changes, or what the last plan said of it, as far as its row
shows that; a row that needed the present time (a watched `Look` notices) is written at each look. Each plan gives most jobs
another priority: by that a kept row is sorted anew. Of the tasks of an array that wait the first one's row stands for all, and
is written at each look as well.

To write ten thousand rows takes a tenth of a second: others are answered in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from hpcsched.api.breaks import Breaks
from hpcsched.api.identity import Asker
from hpcsched.api.jobview import JobView
from hpcsched.listing.formats import Look
from hpcsched.listing.jobs import index_ranges
from hpcsched.listing.queue import Listing, Row, ranks_of, row_of
from hpcsched.model.job import ACTIVE, Job, JobState
from hpcsched.store.world import World

MOST_KEPT = 4  # layouts and who asks
_SAID = ("reason", "reason_detail", "expected_start_s", "priority")  # of a job that waits: what a plan may change


class _Kept(NamedTuple):
    """A row, and what it was written of: of what a plan has `said`, that which it shows."""

    job: Job
    wait: object
    priority: int | None
    said: tuple[tuple[str, Any], ...]
    row: Row


class _Watched(Look):
    """A look that remembers whether its time was asked for."""

    @property
    def now_s(self) -> float:  # type: ignore[override]
        self.__dict__["timed"] = True
        return self[0]


class QueueRows:
    """The rows of the last few layouts."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kept: dict[tuple[object, ...], dict[int, _Kept]] = {}
        self._settings: tuple[object, ...] = ()

    async def rows(
        self, jobs: Iterable[Job], listing: Listing, layout: tuple[object, ...], asker: Asker, look: Look
    ) -> list[Row]:
        """Return the rows that show `jobs`; `layout` says what `listing` was made of."""
        kept = self._table((*layout, asker, look.time_format))
        singles, folds = (list(jobs), []) if listing.array else _folded(jobs)
        breaks, rows = Breaks(), []
        for job in singles:
            rows.append(self._row(job, listing, kept, asker, look))
            if breaks.due():
                await breaks.take()
        for tasks in folds:
            view = JobView(tasks[0], self._world, asker, look.now_s)
            view["folded"] = _indices(tasks)
            rows.append(row_of(view, listing, look))
        return rows

    def _table(self, key: tuple[object, ...]) -> dict[int, _Kept]:
        settings = (self._world.config, self._world.partitions)
        if len(self._settings) != 2 or any(a is not b for a, b in zip(settings, self._settings, strict=True)):
            self._kept, self._settings = {}, settings
        table = self._kept.pop(key, {})
        if len(table) > 2 * len(self._world.jobs):  # most are of jobs that have been forgotten
            table = {}
        while len(self._kept) >= MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = table  # the last one used is the last to go
        return table

    def _row(self, job: Job, listing: Listing, table: dict[int, _Kept], asker: Asker, look: Look) -> Row:
        world = self._world
        view = JobView(job, world, asker, look[0])
        if job.state in ACTIVE:
            return row_of(view, listing, look)
        wait, priority = world.waits.get(job.id), world.priorities.get(job.id)
        known = table.get(job.id)
        if known is not None and known.job is not job:
            known = None
        if known is not None and known.wait is wait and known.priority == priority:
            return known.row
        if known is not None and all([view[name] == value for name, value in known.said]):
            row = known.row._replace(ranks=ranks_of(view, listing, look))
            table[job.id] = known._replace(wait=wait, priority=priority, row=row)
            return row
        return self._written(view, wait, priority, listing, table, look)

    def _written(
        self,
        view: JobView,
        wait: object,
        priority: int | None,
        listing: Listing,
        table: dict[int, _Kept],
        look: Look,
    ) -> Row:
        watched = _Watched(*look)
        row = row_of(view, listing, watched, ranked=False)
        said = tuple([(name, view[name]) for name in _SAID if name in view])
        if listing.order:
            row = row._replace(ranks=ranks_of(view, listing, watched))
        if "timed" not in watched.__dict__:
            table[view.job.id] = _Kept(view.job, wait, priority, said, row)
        return row


def _folded(jobs: Iterable[Job]) -> tuple[list[Job], list[list[Job]]]:
    """Return the jobs that have a row of their own, and the waiting tasks of arrays that have one together.

    Those that have run before stay alone.
    """
    singles: list[Job] = []
    groups: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        if job.array_task_id is None or job.state is not JobState.PENDING or job.restarts or job.attempt:
            singles.append(job)
        else:
            key = (job.array_job_id, job.partition, job.hold, job.nice, job.time_limit_s)
            groups.setdefault(key, []).append(job)
    singles += [tasks[0] for tasks in groups.values() if len(tasks) == 1]
    return singles, [tasks for tasks in groups.values() if len(tasks) > 1]


def _indices(tasks: list[Job]) -> str:
    limit = tasks[0].array_limit
    return f"[{index_ranges([task.array_task_id or 0 for task in tasks])}{f'%{limit}' if limit else ''}]"
