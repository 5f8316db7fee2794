"""A long history is searched and made beside everything else: others are answered before it is whole."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from cluster import ANN, Cluster
from waiting import PATIENCE_S, played

from hpcsched.api import connection_limits
from hpcsched.controller.views import history
from hpcsched.store.store import HistoryQuery, Store


@played
async def test_others_are_answered_while_a_long_history_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connection_limits, "SLICE_S", -1.0)  # each job takes longer than a slice
    monkeypatch.setattr(history, "PART_JOBS", 2)
    cluster = Cluster("n1", path=tmp_path / "h.db")
    jobs = [cluster.submit() for _ in range(5)]
    made = asyncio.create_task(cluster.backend().history(ANN, {}))
    others = 0
    while not made.done():
        await asyncio.sleep(0)
        others += 1
    assert [job["id"] for job in json.loads(made.result())["jobs"]] == jobs
    assert others >= len(jobs)


@played
async def test_others_are_answered_while_the_database_is_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    others_go_on, search = threading.Event(), Store.history_ids

    def slow_search(store: Store, query: HistoryQuery) -> list[int]:
        assert others_go_on.wait(PATIENCE_S)
        return search(store, query)

    monkeypatch.setattr(Store, "history_ids", slow_search)
    cluster = Cluster("n1", path=tmp_path / "h.db")
    job_id = cluster.submit()
    made = asyncio.create_task(cluster.backend().history(ANN, {"user": "ann"}))
    await asyncio.sleep(0)
    others_go_on.set()
    assert [job["id"] for job in json.loads(await made)["jobs"]] == [job_id]
