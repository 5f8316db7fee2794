"""The history for whoever asks: jobs, ended ones too, with their steps, as the text of a JSON object made in slices."""

from __future__ import annotations

from typing import Any

from hpcsched.api.breaks import Breaks
from hpcsched.api.identity import Asker
from hpcsched.api.jobview import job_view, jobs_text, json_text
from hpcsched.api.views import step_view, training_view
from hpcsched.errors import RequestError
from hpcsched.store.store import HistoryQuery, Store
from hpcsched.store.world import World

Json = dict[str, Any]


async def history_text(store: Store, world: World, asker: Asker, query: Json, now_s: float) -> bytes:
    """Return the jobs that `query` asks for, those that have not ended as they are now. Raises RequestError."""
    jobs = store.history(_history_query(query))
    steps: dict[int, list[Json]] = {}
    for step in store.load_steps(job.id for job in jobs):
        steps.setdefault(step.job_id, []).append(step_view(step))
    told = store.load_training(job.id for job in jobs)
    breaks, texts = Breaks(), []
    for job in jobs:
        view = job_view(world.jobs.get(job.id, job), world, asker, now_s)
        view["steps"] = steps.get(job.id, [])
        if view["training"] is None and asker.owns(job):
            view["training"] = training_view(told.get(job.id))
        texts.append(json_text(view))
        if breaks.due():
            await breaks.take()
    return jobs_text(now_s, texts)


def _history_query(query: Json) -> HistoryQuery:
    def words(name: str) -> tuple[str, ...]:
        return tuple(word for word in query.get(name, "").split(",") if word)

    unknown = set(query) - {"id", "user", "state", "name", "start_s", "end_s", "limit"}
    if unknown:
        raise RequestError(f"cannot search the history by {', '.join(sorted(unknown))}")
    try:
        return HistoryQuery(
            job_ids=tuple(int(word.split("_")[0].split(".")[0]) for word in words("id")),
            users=words("user"),
            states=tuple(word.upper() for word in words("state")),
            names=words("name"),
            start_s=float(query["start_s"]) if query.get("start_s") else None,
            end_s=float(query["end_s"]) if query.get("end_s") else None,
            limit=min(int(query.get("limit") or 10_000), 100_000),
        )
    except ValueError as error:
        raise RequestError(f"cannot search the history: {error}") from None
