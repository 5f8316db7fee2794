"""The queue for whoever asks: what the API's first routes need, and all that is there when a controller has just started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpcsched.api.breaks import Breaks
from hpcsched.api.identity import Asker
from hpcsched.api.jobview import job_view, jobs_text, json_text
from hpcsched.controller.queuerows import QueueRows
from hpcsched.controller.queueview import queue_text, selected
from hpcsched.model.job import Job
from hpcsched.store.world import World


class Reading:
    """`hpcsched.api.app.Reader` over the ledger. `under_way`: so many answers are being made."""

    def __init__(self, world: World, clock: Callable[[], float]) -> None:
        self._world = world
        self._clock = clock
        self._rows = QueueRows(world)
        self.under_way = 0

    def admins(self) -> tuple[str, ...]:
        return self._world.config.controller.admins

    def selected(self, asker: Asker, query: dict[str, str]) -> list[Job]:
        """Return the jobs that a query asks for, as our own commands ask. Raises NotFoundError, RequestError."""
        return selected(self._world, asker, {"state": "ALL", "strict": "1"} | query)

    async def jobs(self, asker: Asker, query: dict[str, str]) -> bytes:
        """Return the jobs as the text of a JSON object. Raises as `selected` does."""
        with self._counted():
            now_s = self._clock()
            breaks, texts = Breaks(), []
            for job in self.selected(asker, query):
                texts.append(json_text(job_view(job, self._world, asker, now_s)))
                if breaks.due():
                    await breaks.take()
            return jobs_text(now_s, texts)

    async def queue(self, asker: Asker, query: dict[str, str]) -> str:
        """Return the jobs as lines of text. Raises as `selected` does, and UsageError."""
        with self._counted():
            return await queue_text(self._world, self._rows, asker, query, self._clock())

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
