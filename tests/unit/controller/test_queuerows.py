"""squeue's rows are kept from look to look: only what has changed is written again, and all of that."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from jobs import T0
from unit.controller.cluster import ANN, BOB, Cluster

from hpcsched.api import connection_limits
from hpcsched.controller.requests import jobs as requests
from hpcsched.controller.views import queue
from hpcsched.controller.views.queue import QueueRows, queue_text
from hpcsched.model.job import Hold, Reason
from hpcsched.model.spec import ArraySpec
from hpcsched.sched.decisions import Wait

DEFAULT = {"format": "%i %P %j %u %t %M %D %R"}
QUERIES: tuple[dict[str, str], ...] = (
    DEFAULT,
    DEFAULT | {"array": "1", "state": "ALL", "order": "-t,j"},
    {"format": "%i %L %S %V %Q %k", "order": "-i", "noheader": "1"},
    {"format": "JobID:8,PendingTime:10,Reason", "long": "1", "time_format": "relative"},
    {
        "format": "id,name,st,why,eta,priority",
        "state": "ALL",
        "fit": "1",
        "colour": "1",
        "order": "phase",
        "others": "1",
    },
)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The jobs whose rows were written."""
    jobs: list[int] = []
    row_of = queue.row_of

    def noted(view: Any, *rest: Any, **more: Any) -> Any:
        jobs.append(int(view.job.id))
        return row_of(view, *rest, **more)

    monkeypatch.setattr(queue, "row_of", noted)
    return jobs


def text_of(cluster: Cluster, kept: QueueRows, query: dict[str, str], now_s: float = T0, identity: Any = ANN) -> str:
    return asyncio.run(queue_text(cluster.state, kept, identity, query, now_s))


def look(cluster: Cluster, kept: QueueRows, query: dict[str, str], now_s: float = T0, identity: Any = ANN) -> str:
    """Return the text, which must be as if nothing had been kept."""
    text = text_of(cluster, kept, query, now_s, identity)
    assert text == text_of(cluster, QueueRows(cluster.state), query, now_s, identity)
    return text


def test_whatever_happens_the_rows_are_as_if_nothing_had_been_kept() -> None:
    cluster = Cluster("n1")
    kept = [QueueRows(cluster.state) for _ in QUERIES]
    running = cluster.submit(cpus_per_task=cluster.state.nodes["n1"].spec.cpus)  # type: ignore[index]
    cluster.tick()
    waiting = cluster.submit(comment="secret")
    cluster.submit(array=ArraySpec(indices=(1, 2, 5), limit=2))
    changes = [
        lambda: cluster.tick(1.0),
        lambda: cluster.run(running),
        lambda: cluster.ask(lambda tx: requests.hold(tx, ANN, [str(waiting)])),
        lambda: cluster.state.waits.__setitem__(waiting, Wait(reason=Reason.LICENSES, detail="none is free")),
        lambda: setattr(cluster.state, "priorities", {waiting: 77}),
        lambda: cluster.state.put(replace(cluster.job(waiting), time_limit_s=77)),
        lambda: cluster.end(running),
        lambda: cluster.tick(1.0),
        lambda: cluster.ask(lambda tx: requests.cancel(tx, ANN, [str(waiting)], {})),
    ]
    for at, change in enumerate(changes):
        change()
        for query, rows in zip(QUERIES, kept, strict=True):
            for identity in (ANN, BOB):
                look(cluster, rows, query, T0 + 10 * at, identity)


def test_only_what_has_changed_is_written_again(written: list[int]) -> None:
    cluster = Cluster("n1")
    kept = QueueRows(cluster.state)
    ids = [cluster.submit(hold=True) for _ in range(4)]
    text_of(cluster, kept, DEFAULT, T0)
    assert sorted(written) == ids
    written.clear()
    text_of(cluster, kept, DEFAULT | {"noheader": "1"}, T0 + 60)
    assert written == []
    cluster.ask(lambda tx: requests.release(tx, ANN, [str(ids[2])]))
    assert cluster.job(ids[2]).hold is Hold.NONE
    written.clear()
    text_of(cluster, kept, DEFAULT, T0 + 61)
    assert written == [ids[2]]
    cluster.state.partitions = dict(cluster.state.partitions)  # the configuration was read again
    written.clear()
    text_of(cluster, kept, DEFAULT, T0 + 62)
    assert sorted(written) == ids


def test_an_array_s_waiting_tasks_are_one_row_written_once(written: list[int]) -> None:
    cluster = Cluster("n1")
    cluster.submit(hold=True, array=ArraySpec(indices=tuple(range(50)), limit=7))
    text = look(cluster, QueueRows(cluster.state), {"format": "%i", "noheader": "1"})
    assert text == "1_[0-49%7]\n"
    assert len(written) == 2  # once in each of the two looks


def test_few_layouts_are_kept() -> None:
    cluster = Cluster("n1")
    kept = QueueRows(cluster.state)
    cluster.submit(hold=True)
    for width in range(1, 20):
        text_of(cluster, kept, {"format": f"%{width}i"}, T0)
    assert len(kept._cached) == queue.MOST_CACHED


def test_a_row_that_shows_nothing_of_the_next_plan_is_sorted_again_and_not_rewritten(written: list[int]) -> None:
    cluster = Cluster("n1")
    kept = QueueRows(cluster.state)
    ids = [cluster.submit(begin_at_s=int(T0) + 86_400) for _ in range(3)]
    query = {"format": "%i %r", "order": "-p", "noheader": "1"}

    def plan(reason: Reason, *priorities: int) -> str:
        wait = {"reason": reason, "detail": f"{priorities}", "expected_start_s": T0 + priorities[0]}
        cluster.state.waits = {job_id: Wait(**wait) for job_id in ids}
        cluster.state.priorities = dict(zip(ids, priorities, strict=True))
        return text_of(cluster, kept, query)

    assert plan(Reason.PRIORITY, 1, 2, 3) == "3 Priority\n2 Priority\n1 Priority\n"
    written.clear()
    assert plan(Reason.PRIORITY, 30, 10, 20) == "1 Priority\n3 Priority\n2 Priority\n"
    assert written == []
    assert plan(Reason.RESOURCES, 30, 10, 20) == "1 Resources\n3 Resources\n2 Resources\n"
    assert sorted(written) == ids


def test_others_are_answered_while_many_rows_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "SLICE_S", 0.0)
    cluster = Cluster("n1")
    for _ in range(5):
        cluster.submit(hold=True)
    heard: list[str] = []

    async def both() -> None:
        async def ask(name: str, query: dict[str, str]) -> None:
            await queue_text(cluster.state, QueueRows(cluster.state), ANN, query, T0)
            heard.append(name)

        await asyncio.gather(ask("all", DEFAULT), ask("one", DEFAULT | {"id": "1"}))

    asyncio.run(both())
    assert heard == ["one", "all"]
