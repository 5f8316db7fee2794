"""A job's values: all of them at once are what each is by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import partition
from unit.controller.cluster import ANN, BOB, ROOT, Cluster

from hpcnode.wire import protocol
from hpcsched.api.views import VALUES, JobView, job_view
from hpcsched.auth.authorize import Identity
from hpcsched.lifecycle.events import EndRequested
from hpcsched.model.ids import JobId
from hpcsched.model.job import JobState
from hpcsched.model.spec import Dependency, DependencyKind, GpuRequest


@pytest.mark.parametrize("identity", [ANN, BOB])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stdout": "%x-%j.out", "stderr": "errors", "stdin": "in.%%", "comment": "mine"},
        {"hold": True, "dependency": (Dependency(kind=DependencyKind.AFTER_ANY, job_ids=(1,)),)},
    ],
)
def test_all_values_of_a_job_are_what_each_is_by_itself(identity: Identity, fields: dict[str, Any]) -> None:
    cluster = Cluster("n1")
    cluster.submit(hold=True)
    job = cluster.job(cluster.submit(**fields))
    whole = job_view(job, cluster.state, identity, cluster.now_s)
    assert list(whole.items()) == [
        (name, JobView(job, cluster.state, identity, cluster.now_s)[name]) for name in VALUES
    ]


def test_where_a_jobs_output_goes_is_shown_with_its_name_filled_in() -> None:
    cluster = Cluster("n1")
    plain = cluster.job(cluster.submit(stdout="/out/all", stderr="errors", work_dir="/home/ann"))
    named = cluster.job(cluster.submit(stdout="%x-%j.out", stdin="in.%%", name="fit", work_dir="/home/ann"))
    shown = [job_view(job, cluster.state, ANN, cluster.now_s) for job in (plain, named)]
    assert [[view[name] for name in ("stdout", "stderr", "stdin")] for view in shown] == [
        ["/out/all", "/home/ann/errors", ""],
        [f"/home/ann/fit-{named.id}.out", f"/home/ann/fit-{named.id}.out", "/home/ann/in.%"],
    ]


def test_what_a_waiting_job_asks_for_is_shown_where_it_has_nothing_yet() -> None:
    cluster = Cluster("n1")
    other = replace(partition("n1"), name="high", priority_tier=7)
    cluster.state.partitions = {**cluster.state.partitions, "high": other}
    job = cluster.job(cluster.submit(hold=True))
    spec = replace(
        job.spec,
        nodes_min=2,
        gpus_per_node=(GpuRequest(type="", count=3),),
        shards_per_node=(GpuRequest(type="", count=2),),
    )
    asking = replace(job, spec=spec, partition="main,high")
    view = job_view(asking, cluster.state, ANN, cluster.now_s)
    assert (view["gpus"], view["shards"], view["priority_tier"]) == (6, 4, 7)
    plain = job_view(job, cluster.state, ANN, cluster.now_s)
    assert (plain["gpus"], plain["shards"], plain["priority_tier"], plain["dependency"]) == (0, 0, 1, "")


def told(cluster: Cluster, identity: Identity, job_id: int) -> str:
    """Return all that the API's routes tell `identity` of the cluster's jobs, and of this one, as one text."""
    backend = cluster.backend()
    wide = "%.200r|%.200R|%.200Z|%.200o"

    async def ask() -> list[object]:
        return [
            backend.job(identity, str(job_id)),
            await backend.jobs(identity, {}),
            await backend.jobs(identity, {"state": "all"}),
            await backend.queue(identity, {"state": "all"}),
            await backend.queue(identity, {"state": "all", "format": wide}),
            await backend.why(identity, str(job_id)),
            await backend.history(identity, {}),
            await backend.snapshot(identity),
            await backend.nodes(identity, {}),
            backend.priorities(identity, {}),
        ]

    return repr(asyncio.run(ask()))


WHY = "cannot open output file /home/ann/secret/x.out: Permission denied"


def waits_again(cluster: Cluster, job_id: JobId) -> None:
    requeued = EndRequested(
        job_id=job_id,
        at_s=cluster.now_s,
        outcome=JobState.CANCELLED,
        by_uid=0,
        why=WHY,
        requeue=True,
        not_before_s=cluster.now_s + 60,
    )
    cluster.ask(lambda tx: tx.record(requeued))
    cluster.end(job_id, code=143)
    cluster.gone(job_id, "n1")


def is_ending(cluster: Cluster, job_id: JobId) -> None:
    ended = EndRequested(job_id=job_id, at_s=cluster.now_s, outcome=JobState.CANCELLED, by_uid=0, why=WHY)
    cluster.ask(lambda tx: tx.record(ended))


def has_failed(cluster: Cluster, job_id: JobId) -> None:
    cluster.says("n1", cluster.report(job_id, protocol.REFUSED, why=WHY))
    cluster.gone(job_id, "n1")


@pytest.mark.parametrize("happens", [waits_again, is_ending, has_failed])
def test_the_words_of_a_reason_are_the_owners_and_admins(
    happens: Callable[[Cluster, JobId], None], tmp_path: Path
) -> None:
    cluster = Cluster("n1", path=tmp_path / "db")
    job_id = cluster.submit(ANN, requeue=False)
    if happens is not has_failed:
        cluster.run(job_id)
    happens(cluster, job_id)
    assert cluster.job(job_id).reason_detail
    assert "/home/ann/secret" in cluster.job(job_id).reason_detail
    for identity, seen in ((ANN, True), (ROOT, True), (BOB, False)):
        assert ("/home/ann/secret" in told(cluster, identity, job_id)) == seen
