"""The rows of squeue's text, kept from one look to the next: only those of jobs that have changed are written again.

A job that waits or is over reads the same at any time, unless it changes, or what the last plan said of it; a row that needed the
present time (a watched `Look` notices) is written at each look. Of the tasks of an array that wait the first one's row stands
for all, and is written at each look as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from hpcsched.api.identity import Asker
from hpcsched.api.views import job_view
from hpcsched.listing.formats import Look
from hpcsched.listing.jobs import index_ranges
from hpcsched.listing.queue import Listing, Row, row_of
from hpcsched.model.job import ACTIVE, Job, JobState
from hpcsched.store.world import World

MOST_KEPT = 4  # layouts and who asks


class _Kept(NamedTuple):
    """A row, and what it was written of."""

    job: Job
    said: tuple[Any, ...]
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

    def rows(
        self, jobs: Iterable[Job], listing: Listing, layout: tuple[object, ...], asker: Asker, look: Look
    ) -> list[Row]:
        """Return the rows that show `jobs`; `layout` says what `listing` was made of."""
        kept = self._table((*layout, asker, look.time_format))
        singles, folds = (list(jobs), []) if listing.array else _folded(jobs)
        rows = [self._row(job, listing, kept, asker, look) for job in singles]
        for tasks in folds:
            rows.append(row_of(self._view(tasks[0], asker, look) | {"folded": _indices(tasks)}, listing, look))
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
        if job.state in ACTIVE:
            return row_of(self._view(job, asker, look), listing, look)
        world = self._world
        said = (world.waits.get(job.id), world.priorities.get(job.id))
        known = table.get(job.id)
        if known is not None and known.job is job and known.said == said:
            return known.row
        watched = _Watched(*look)
        row = row_of(self._view(job, asker, look), listing, watched)
        if "timed" not in watched.__dict__:
            table[job.id] = _Kept(job, said, row)
        return row

    def _view(self, job: Job, asker: Asker, look: Look) -> dict[str, Any]:
        return job_view(job, self._world, asker, look[0])


def _folded(jobs: Iterable[Job]) -> tuple[list[Job], list[list[Job]]]:
    """Return the jobs that have a row of their own, and the waiting tasks of arrays that have one together.

    Those that have run before stay alone, as in `hpcsched.listing.jobs.fold_arrays`.
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
