"""squeue's rows are kept from look to look: only what has changed is written again, and all of that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jobs import T0
from world import ANN, BOB, Cluster

from hpcsched.controller import queuerows, requests
from hpcsched.controller.queuerows import QueueRows
from hpcsched.controller.queueview import queue_text
from hpcsched.model.job import Hold, Reason
from hpcsched.model.spec import ArraySpec
from hpcsched.sched.eligible import Wait

DEFAULT = {"format": "%i %P %j %u %t %M %D %R"}
QUERIES: tuple[dict[str, str], ...] = (
    DEFAULT,
    DEFAULT | {"array": "1", "state": "ALL", "order": "-t,j"},
    {"format": "%i %L %S %V %Q %k", "order": "-i", "noheader": "1"},
    {"format": "JobID:8,PendingTime:10,Reason", "long": "1", "time_format": "relative"},
)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The jobs whose rows were written."""
    jobs: list[int] = []
    job_view = queuerows.job_view

    def noted(job: Any, *rest: Any) -> dict[str, Any]:
        jobs.append(int(job.id))
        return job_view(job, *rest)

    monkeypatch.setattr(queuerows, "job_view", noted)
    return jobs


def look(cluster: Cluster, kept: QueueRows, query: dict[str, str], now_s: float = T0, asker: Any = ANN) -> str:
    """Return the text, which must be as if nothing had been kept."""
    text = queue_text(cluster.world, kept, asker, query, now_s)
    assert text == queue_text(cluster.world, QueueRows(cluster.world), asker, query, now_s)
    return text


def test_whatever_happens_the_rows_are_as_if_nothing_had_been_kept() -> None:
    cluster = Cluster("n1")
    kept = [QueueRows(cluster.world) for _ in QUERIES]
    running = cluster.submit(cpus_per_task=cluster.world.nodes["n1"].spec.cpus)  # type: ignore[index]
    cluster.tick()
    waiting = cluster.submit(comment="secret")
    cluster.submit(array=ArraySpec(indices=(1, 2, 5), limit=2))
    changes = [
        lambda: cluster.tick(1.0),
        lambda: cluster.run(running),
        lambda: cluster.ask(lambda tx: requests.hold(tx, ANN, [str(waiting)])),
        lambda: cluster.world.waits.__setitem__(waiting, Wait(reason=Reason.LICENSES, detail="none is free")),
        lambda: setattr(cluster.world, "priorities", {waiting: 77}),
        lambda: cluster.world.put(replace(cluster.job(waiting), time_limit_s=77)),
        lambda: cluster.end(running),
        lambda: cluster.tick(1.0),
        lambda: cluster.ask(lambda tx: requests.cancel(tx, ANN, [str(waiting)], {})),
    ]
    for at, change in enumerate(changes):
        change()
        for query, rows in zip(QUERIES, kept, strict=True):
            for asker in (ANN, BOB):
                look(cluster, rows, query, T0 + 10 * at, asker)


def test_only_what_has_changed_is_written_again(written: list[int]) -> None:
    cluster = Cluster("n1")
    kept = QueueRows(cluster.world)
    ids = [cluster.submit(hold=True) for _ in range(4)]
    queue_text(cluster.world, kept, ANN, DEFAULT, T0)
    assert sorted(written) == ids
    written.clear()
    queue_text(cluster.world, kept, ANN, DEFAULT | {"noheader": "1"}, T0 + 60)
    assert written == []
    cluster.ask(lambda tx: requests.release(tx, ANN, [str(ids[2])]))
    assert cluster.job(ids[2]).hold is Hold.NONE
    written.clear()
    queue_text(cluster.world, kept, ANN, DEFAULT, T0 + 61)
    assert written == [ids[2]]
    cluster.world.partitions = dict(cluster.world.partitions)  # the configuration was read again
    written.clear()
    queue_text(cluster.world, kept, ANN, DEFAULT, T0 + 62)
    assert sorted(written) == ids


def test_an_array_s_waiting_tasks_are_one_row_written_once(written: list[int]) -> None:
    cluster = Cluster("n1")
    cluster.submit(hold=True, array=ArraySpec(indices=tuple(range(50)), limit=7))
    text = look(cluster, QueueRows(cluster.world), {"format": "%i", "noheader": "1"})
    assert text == "1_[0-49%7]\n"
    assert len(written) == 2  # once in each of the two looks


def test_few_layouts_are_kept() -> None:
    cluster = Cluster("n1")
    kept = QueueRows(cluster.world)
    cluster.submit(hold=True)
    for width in range(1, 20):
        queue_text(cluster.world, kept, ANN, {"format": f"%{width}i"}, T0)
    assert len(kept._kept) == queuerows.MOST_KEPT
