"""The queue for whoever asks: what the API's first routes need, and all that is there when a controller has just started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcsched.api.breaks import Breaks
from hpcsched.api.identity import Asker
from hpcsched.api.jobview import job_view
from hpcsched.controller.queuerows import QueueRows
from hpcsched.controller.queueview import queue_text, selected
from hpcsched.model.job import Job
from hpcsched.store.world import World

Json = dict[str, Any]


class Reading:
    """`hpcsched.api.app.Reader` over the ledger."""

    def __init__(self, world: World, clock: Callable[[], float]) -> None:
        self._world = world
        self._clock = clock
        self._rows = QueueRows(world)

    def admins(self) -> tuple[str, ...]:
        return self._world.config.controller.admins

    def selected(self, asker: Asker, query: dict[str, str]) -> list[Job]:
        """Return the jobs that a query asks for, as our own commands ask. Raises NotFoundError, RequestError."""
        return selected(self._world, asker, {"state": "ALL", "strict": "1"} | query)

    async def jobs(self, asker: Asker, query: dict[str, str]) -> Json:
        now_s = self._clock()
        breaks, views = Breaks(), []
        for job in self.selected(asker, query):
            views.append(job_view(job, self._world, asker, now_s))
            if breaks.due():
                await breaks.take()
        return {"now_s": now_s, "jobs": views}

    async def queue(self, asker: Asker, query: dict[str, str]) -> str:
        return await queue_text(self._world, self._rows, asker, query, self._clock())
