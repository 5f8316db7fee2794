"""What holds up the queue although resources are free: licences, reservations, fragments."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from cluster import ANN, BOB, ROOT, Cluster, Identity

from hpcsched.auth.authorize import HIDEABLE
from hpcsched.controller.requests import reservations
from hpcsched.controller.views.findings import others_cpus


def findings(cluster: Cluster, identity: Identity = ROOT) -> list[dict[str, Any]]:
    backend = cluster.backend()
    backend._clock = lambda: cluster.now_s
    return asyncio.run(backend.slow_queue(identity))["findings"]  # type: ignore[no-any-return]


def test_free_resources_in_pieces_are_named_with_the_job_that_needs_more() -> None:
    cluster = Cluster("n1", "n2")
    for _ in range(2):
        cluster.submit(ANN, exclusive=False, ntasks=1, cpus_per_task=1, nodelist=(f"n{_ + 1}",))
    cluster.tick()
    wide = cluster.submit(BOB, cpus_per_task=2, mem_per_node_mib=1)
    cluster.tick()
    (found,) = findings(cluster)
    assert found["cause"] == "fragmentation"
    assert f"2 CPUs and 4000M of memory are free, in pieces on 2 nodes; job {wide} needs 2 CPUs" in found["text"]
    assert str(wide) in found["remedy"]


def test_a_licence_that_is_in_use_is_named_with_its_holders() -> None:
    cluster = Cluster("n1", "n2")
    licences = replace(cluster.state.config.accounting, licenses=(("matlab", 1),))
    cluster.state.config = replace(cluster.state.config, accounting=licences)
    cluster.submit(ANN, licenses=(("matlab", 1),))
    cluster.tick()
    cluster.submit(BOB, licenses=(("matlab", 1),))
    cluster.tick()
    (found,) = findings(cluster)
    assert found["cause"] == "licence"
    assert "1 jobs wait for licence matlab while 3 CPUs are free: 1 of 1 are in use (ann 1)" in found["text"]


def test_a_reservation_that_keeps_nodes_idle_is_named_with_its_owner() -> None:
    cluster = Cluster("n1", "n2")
    words = {"StartTime": "now", "Duration": "60", "Users": "ann", "Nodes": "n1"}
    cluster.ask(lambda tx: reservations.create(tx, ROOT, "course", words))
    cluster.submit(BOB, cpus_per_task=2)
    cluster.tick(1.0)
    assert findings(cluster) == []  # nobody waits
    cluster.submit(BOB, cpus_per_task=2)
    cluster.tick()
    (found,) = findings(cluster)
    assert found["cause"] == "reservation"
    assert "reservation course keeps n1 for ann until" in found["text"]
    assert "2 of its 2 CPUs are idle, and 1 jobs wait" in found["text"]


def test_a_queue_that_waits_for_jobs_is_well_and_a_private_one_is_not_judged() -> None:
    cluster = Cluster("n1")
    for _ in range(3):
        cluster.submit(ANN, cpus_per_task=2)
    cluster.tick()
    assert findings(cluster) == []
    backend = cluster.backend()
    hidden = replace(BOB, hidden=frozenset(HIDEABLE.values()))
    assert "[privacy]" in asyncio.run(backend.slow_queue(hidden))["text"]


def test_cpus_of_a_jobs_other_part_on_the_same_machine_are_no_load_from_outside() -> None:
    cluster = Cluster("n1", "n2")
    job = cluster.job(cluster.submit(ANN, nodes_min=2, ntasks=2, cpus_per_task=1, exclusive=False))
    cluster.submit(BOB, ntasks=1, cpus_per_task=1, nodelist=("n1",), exclusive=False)
    cluster.tick()
    job = cluster.job(job.id)
    assert [others_cpus(cluster.state, job, share) for share in job.shares] == [1, 0]
    for name, node in cluster.state.nodes.items():
        cluster.state.nodes[name] = replace(node, machine_id="both")
    assert [others_cpus(cluster.state, job, share) for share in job.shares] == [2, 2]
