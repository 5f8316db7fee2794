"""A job's values: all of them at once are what each is by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jobs import partition
from unit.controller.world import ANN, BOB, Cluster

from hpcsched.api.identity import Asker
from hpcsched.api.jobview import VALUES, JobView, job_view
from hpcsched.model.spec import Dependency, DependencyKind, GpuRequest


@pytest.mark.parametrize("asker", [ANN, BOB])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stdout": "%x-%j.out", "stderr": "errors", "stdin": "in.%%", "comment": "mine"},
        {"hold": True, "dependency": (Dependency(kind=DependencyKind.AFTER_ANY, job_ids=(1,)),)},
    ],
)
def test_all_values_of_a_job_are_what_each_is_by_itself(asker: Asker, fields: dict[str, Any]) -> None:
    cluster = Cluster("n1")
    cluster.submit(hold=True)
    job = cluster.job(cluster.submit(**fields))
    whole = job_view(job, cluster.world, asker, cluster.now_s)
    assert list(whole.items()) == [(name, JobView(job, cluster.world, asker, cluster.now_s)[name]) for name in VALUES]


def test_where_a_jobs_output_goes_is_shown_with_its_name_filled_in() -> None:
    cluster = Cluster("n1")
    plain = cluster.job(cluster.submit(stdout="/out/all", stderr="errors", work_dir="/home/ann"))
    named = cluster.job(cluster.submit(stdout="%x-%j.out", stdin="in.%%", name="fit", work_dir="/home/ann"))
    shown = [job_view(job, cluster.world, ANN, cluster.now_s) for job in (plain, named)]
    assert [[view[name] for name in ("stdout", "stderr", "stdin")] for view in shown] == [
        ["/out/all", "/home/ann/errors", ""],
        [f"/home/ann/fit-{named.id}.out", f"/home/ann/fit-{named.id}.out", "/home/ann/in.%"],
    ]


def test_what_a_waiting_job_asks_for_is_shown_where_it_has_nothing_yet() -> None:
    cluster = Cluster("n1")
    other = replace(partition("n1"), name="high", priority_tier=7)
    cluster.world.partitions = {**cluster.world.partitions, "high": other}
    job = cluster.job(cluster.submit(hold=True))
    spec = replace(
        job.spec,
        nodes_min=2,
        gpus_per_node=(GpuRequest(type="", count=3),),
        shards_per_node=(GpuRequest(type="", count=2),),
    )
    asking = replace(job, spec=spec, partition="main,high")
    view = job_view(asking, cluster.world, ANN, cluster.now_s)
    assert (view["gpus"], view["shards"], view["priority_tier"]) == (6, 4, 7)
    plain = job_view(job, cluster.world, ANN, cluster.now_s)
    assert (plain["gpus"], plain["shards"], plain["priority_tier"], plain["dependency"]) == (0, 0, 1, "")
