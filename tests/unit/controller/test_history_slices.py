"""A long history is made in slices: others are answered before it is whole."""

from __future__ import annotations

import asyncio
import json

import pytest
from world import ANN, Cluster

from hpcsched.api import breaks


def test_others_are_answered_while_a_long_history_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaks, "SLICE_S", -1.0)  # each job takes longer than a slice
    cluster = Cluster("n1")
    jobs = [cluster.submit() for _ in range(5)]

    async def play() -> int:
        history = asyncio.create_task(cluster.backend().history(ANN, {}))
        others = 0
        while not history.done():
            await asyncio.sleep(0)
            others += 1
        assert [job["id"] for job in json.loads(history.result())["jobs"]] == jobs
        return others

    assert asyncio.run(play()) >= len(jobs)
