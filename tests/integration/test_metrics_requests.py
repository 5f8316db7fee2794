"""Requests for the history of metrics: who may see whose, what may be asked, and what is said of what is not there."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import played

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "controller"))
from cluster import ANN, BOB, ROOT, Cluster  # noqa: E402

from hpcsched.auth.authorize import HIDEABLE, Identity, Role  # noqa: E402
from hpcsched.controller.views.backend import ControllerBackend  # noqa: E402
from hpcsched.errors import (  # noqa: E402
    HpcschedError,
    NotFoundError,
    PermissionDeniedError,
    RequestError,
    UnavailableError,
)
from hpcsched.metrics.series import TABLE, Column, JobRow, NodeSample  # noqa: E402
from hpcsched.model.ids import JobId, NodeName  # noqa: E402
from hpcsched.model.job import JobState  # noqa: E402
from hpcsched.recorder import Recorder, RecorderSettings  # noqa: E402

ALL = frozenset(HIDEABLE.values())
EVE = Identity(uid=77, user="eve", role=Role.USER)
COLUMNS = (Column(TABLE["node_load1"], ()), Column(TABLE["node_network_receive_bytes_total"], ("eth0",)))
OF_JOB = (Column(TABLE["job_cpu_seconds_total"], ()), Column(TABLE["job_processes"], ()))


def private(identity: Identity) -> Identity:
    return replace(identity, hidden=ALL)


Scene = Callable[[ControllerBackend, float], Awaitable[None]]


def with_history(scene: Scene) -> Callable[[Path], None]:
    """Make a test of a scene: jobs 1 of ann on n1 and 2 of bob on n2, with a recorded history of five minutes."""

    @played
    async def test(tmp_path: Path) -> None:
        cluster = Cluster("n1", "n2", path=tmp_path / "hpcsched.db")
        cluster.submit(ANN, name="of-ann", exclusive=True)
        cluster.submit(BOB, name="of-bob", exclusive=True)
        cluster.tick()
        settings = RecorderSettings(database=str(tmp_path / "metrics.db"), keep_s=(2e5, 1e6, 4e7), max_bytes=1 << 30)
        recorder = Recorder(settings)
        recorder.start()
        while recorder.pid is None:
            await asyncio.sleep(0.01)
        backend = cluster.backend()
        backend._recorder = recorder
        now_s = (
            time.time() // 10 * 10 + 5
        )  # as far as can be from the recorder's steps, which begin at multiples of 10 s
        backend._clock = lambda: now_s
        for step in range(30):
            for number, node in enumerate(("n1", "n2", "gone"), start=1):
                row = JobRow(job_id=JobId(number), attempt=0, columns=OF_JOB, values=(step * 5.0, 3))
                recorder.record(
                    NodeSample(
                        node=NodeName(node),
                        boot_id="b",
                        received_at_s=now_s - 300 + step * 10,
                        columns=COLUMNS,
                        values=(0.5, 1000 * step),
                        jobs=(row,) if number < 3 else (),
                    )
                )
        try:
            await scene(backend, now_s)
        finally:
            await recorder.close()

    return test


async def history(backend: ControllerBackend, identity: Identity, target: str, series: str, **more: str) -> Any:
    return json.loads(await backend.metrics_history(identity, {"target": target, "series": series} | more))


async def refused(asked: Awaitable[Any], kind: type[HpcschedError], *words: str) -> str:
    with pytest.raises(kind) as caught:
        await asked
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


@with_history
async def test_a_node_and_a_job_have_a_history(backend: ControllerBackend, now_s: float) -> None:
    answer = await history(backend, ANN, "n1", "load1,network_receive")
    assert [row["key"] for row in answer["series"]] == ["node_load1", "node_network_receive_bytes_total:eth0"]
    assert {value for value in answer["series"][0]["values"] if value is not None} == {0.5}
    rates = [value for value in answer["series"][1]["values"] if value is not None]
    assert rates
    assert all(90 < rate < 110 for rate in rates)
    job = await history(backend, ANN, "1", "cpu", step_s="60")
    assert (job["kind"], job["target"]) == ("job", "job 1")
    named = await history(backend, ANN, "of-ann", "cpu", step_s="60")
    assert named["series"] == job["series"]


@with_history
async def test_what_is_not_there_is_refused_with_the_nearest_names(backend: ControllerBackend, now_s: float) -> None:
    await refused(history(backend, ANN, "n3", "load1"), NotFoundError, "did you mean", "n1")
    await refused(history(backend, ANN, "n1", "lode1"), NotFoundError, "did you mean node_load1")
    await refused(history(backend, ANN, "999", "cpu"), NotFoundError, "999")
    await refused(history(backend, ANN, "n1", ""), RequestError, "series")
    await refused(history(backend, ANN, "n1", "load1", of="p99"), RequestError, "mean, max and min")
    await refused(history(backend, ANN, "n1", "load1", from_s="9", to_s="8"), RequestError, "before")
    await refused(history(backend, ANN, "n1", "load1", from_s="x"), RequestError, "from_s")
    await refused(history(backend, ANN, "n1", "load1", from_s="0", step_s="1"), RequestError, "steps of")
    await refused(history(backend, ANN, "n1", "load1", step_s="nan"), RequestError)
    await refused(history(backend, ANN, "n1", ",".join(["load1"] * 200)), RequestError)
    backend._recorder = None
    await refused(history(backend, ANN, "n1", "load1"), UnavailableError, "[metrics] history")


@with_history
async def test_a4_the_history_of_what_is_private_does_not_exist_for_others(
    backend: ControllerBackend, now_s: float
) -> None:
    assert (await history(backend, private(ANN), "1", "cpu", step_s="60"))["series"]
    assert (await history(backend, private(ANN), "n1", "load1"))["series"]
    assert (await history(backend, private(ROOT), "gone", "load1"))["series"]
    for identity, target in ((ANN, "2"), (ANN, "of-bob"), (ANN, "n2"), (ANN, "gone"), (EVE, "1"), (EVE, "n1")):
        text = await refused(history(backend, private(identity), target, "load1"), NotFoundError)
        if target == "n2":  # as if there were no such node
            unknown = await refused(history(backend, private(identity), "n9", "load1"), NotFoundError)
            assert text.replace("n2", "n9") == unknown
    for identity, names in ((private(ANN), ["n1"]), (private(EVE), []), (private(ROOT), ["gone", "n1", "n2"])):
        assert json.loads(await backend.metrics_series(identity, {}))["names"] == names
    assert json.loads(await backend.metrics_series(EVE, {}))["names"] == ["gone", "n1", "n2"]


@with_history
async def test_the_series_of_a_node_are_listed_with_their_meaning(backend: ControllerBackend, now_s: float) -> None:
    series = json.loads(await backend.metrics_series(ANN, {"target": "n1"}))["series"]
    assert [row["name"] for row in series] == ["node_load1", "node_network_receive_bytes_total"]
    assert series[1]["help"] == TABLE["node_network_receive_bytes_total"].help


@with_history
async def test_what_slows_a_job_down_is_judged_from_its_own_samples(backend: ControllerBackend, now_s: float) -> None:
    cluster = backend._cluster
    for number in (1, 2):
        job = cluster.jobs[JobId(number)]
        cluster.jobs[JobId(number)] = replace(job, state=JobState.RUNNING, started_at_s=now_s - 300)
    well = await backend.slow(ANN, "1")
    assert well["findings"] == []
    assert well["looks"] >= 20
    assert "nothing slows job 1 down" in well["text"]
    for step in range(12):
        row = JobRow(job_id=JobId(2), attempt=0, columns=OF_JOB, values=(150.0, 0))
        backend._recorder.record(  # type: ignore[union-attr]
            NodeSample(
                node=NodeName("n2"),
                boot_id="b",
                received_at_s=now_s + step * 10,
                columns=COLUMNS,
                values=(0, 0),
                jobs=(row,),
            )
        )
    backend._clock = lambda: now_s + 120
    cluster.jobs[JobId(2)] = replace(cluster.jobs[JobId(2)], started_at_s=now_s - 1)
    (found,) = (await backend.slow(BOB, "2"))["findings"]
    assert (found["cause"], found["node"]) == ("held and empty", "n2")
    await refused(backend.slow(ANN, "2"), PermissionDeniedError, "job 2")
    await refused(backend.slow(private(EVE), "2"), NotFoundError)
    cluster.jobs[JobId(2)] = replace(cluster.jobs[JobId(2)], started_at_s=now_s + 110)
    assert "cannot tell yet" in (await backend.slow(BOB, "2"))["text"]
    cluster.jobs[JobId(2)] = replace(cluster.jobs[JobId(2)], state=JobState.COMPLETED)
    await refused(backend.slow(BOB, "2"), RequestError, "it is COMPLETED", "hacct --eff -j 2")


@with_history
async def test_a_job_on_two_nodes_is_judged_on_each_by_the_samples_of_that_node(
    backend: ControllerBackend, now_s: float
) -> None:
    cluster = backend._cluster
    one, two = (cluster.jobs[JobId(number)] for number in (1, 2))
    nodes = (NodeName("n1"), NodeName("n2"))
    both = replace(
        one, shares=one.shares + two.shares, held_nodes=nodes, state=JobState.RUNNING, started_at_s=now_s - 300
    )
    cluster.jobs[JobId(1)] = both
    for step in range(30):
        row = JobRow(job_id=JobId(1), attempt=0, columns=OF_JOB, values=(0.0, 0))
        backend._recorder.record(  # type: ignore[union-attr]
            NodeSample(
                node=NodeName("n2"),
                boot_id="c",
                received_at_s=now_s + step * 10,
                columns=COLUMNS,
                values=(0, 0),
                jobs=(row,),
            )
        )
    backend._clock = lambda: now_s + 290
    found = (await backend.slow(ANN, "1"))["findings"]
    assert [(one["cause"], one["node"]) for one in found] == [("held and empty", "n2")]
