"""The queue for whoever asks: what the API's first routes need, and all that is there when a controller has just started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcsched.api.identity import Asker, is_account
from hpcsched.api.views import job_view
from hpcsched.controller.queuerows import QueueRows
from hpcsched.controller.queueview import queue_text
from hpcsched.controller.references import find_jobs, matches
from hpcsched.errors import RequestError
from hpcsched.model.job import Job, JobState
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

    def jobs(self, asker: Asker, query: Json) -> Json:
        unknown = set(query) - {"state", "user", "id", "partition", "name"}
        if unknown:
            raise RequestError(f"cannot list jobs by {', '.join(sorted(unknown))}")
        found = self._selected(asker, query)
        now_s = self._clock()
        return {"now_s": now_s, "jobs": [job_view(job, self._world, asker, now_s) for job in found]}

    def _selected(self, asker: Asker, query: Json) -> list[Job]:
        world = self._world
        if query.get("id"):
            found = {job.id: job for ref in _references(query["id"]) for job in find_jobs(world, ref, asker.uid)}
            jobs = list(found.values())
        else:
            jobs = list(world.jobs.values())
        states = set(query.get("state", "").upper().split(",")) - {""}
        if states and not states & {"ALL", "ACTIVE"}:
            unknown = states - {state.value for state in JobState}
            if unknown:
                raise RequestError(f"Invalid job state specified: {', '.join(sorted(unknown))}")
            jobs = [job for job in jobs if job.state.value in states]
        filters = {key: query[key] for key in ("user", "partition", "name") if query.get(key)}
        self._check_users(filters.get("user", ""))
        return [job for job in jobs if matches(job, filters)] if filters else jobs

    def _check_users(self, text: str) -> None:
        """Refuse the name of a user of whom nobody has heard: it is more likely mistyped than idle."""
        for name in text.split(",") if text else ():
            if not is_account(name) and not any(job.user == name for job in self._world.jobs.values()):
                raise RequestError(f"Invalid user: {name}")

    def queue(self, asker: Asker, query: dict[str, str]) -> str:
        return queue_text(self._world, self._rows, asker, query, self._clock())


def _references(text: str) -> list[str]:
    """Return the references in a comma-separated list; a comma inside brackets separates nothing."""
    found, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            found.append(text[start:i])
            start = i + 1
    found.append(text[start:])
    return [reference for reference in found if reference]
