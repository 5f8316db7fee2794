"""A node whose connection is lost again and again gets no jobs until it has stayed connected for a while."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster import ROOT, Cluster

from hpcsched.api.views import node_views
from hpcsched.controller.nodes.power import power_down
from hpcsched.controller.recovery import load_probations, node_of
from hpcsched.controller.requests.jobs import resume_nodes
from hpcsched.model.ids import NodeName
from hpcsched.model.job import JobState
from hpcsched.model.node import Node
from hpcsched.model.probation import DROPS_S, LINK_CHECK

N1 = NodeName("n1")
HOLD_S = 900.0


def watched(drops: int = 3) -> Cluster:
    cluster = Cluster("n1")
    settings = replace(cluster.state.config.controller, link_drops=drops, health_hold=HOLD_S)
    cluster.state.config = replace(cluster.state.config, controller=settings)
    return cluster


def drop(cluster: Cluster, times: int = 1, every_s: float = 60.0, boot_id: str = "boot-1") -> Node:
    """Lose the connection, so many times; it is back each time."""
    for _ in range(times):
        cluster.tick(every_s)
        cluster.controller.node_down(N1, "lost the agent")
        cluster.tick()
        cluster.welcome("n1", boot_id=boot_id)
    return cluster.state.nodes[N1]


def test_a_node_whose_link_flaps_is_drained_and_returns_when_it_is_steady() -> None:
    cluster = watched()
    assert not drop(cluster, 2).drained
    node = drop(cluster)
    assert (node.drained, node.drained_by) == (True, LINK_CHECK)
    assert "lost 3 times in 30:00" in node.drained_why
    assert "hctl resume n1" in node.drained_why
    job_id = cluster.submit()
    cluster.tick(HOLD_S - 1)
    assert cluster.job(job_id).state is JobState.PENDING
    assert "returns at" in node_views(cluster.state, cluster.now_s)[0]["drained_why"]
    cluster.tick(1.0)
    cluster.tick()
    assert cluster.job(job_id).held_nodes == (N1,)
    assert cluster.replayed_node("n1").probation == cluster.state.nodes[N1].probation


def test_another_drop_begins_the_quiet_time_again_and_another_drain_doubles_it() -> None:
    cluster = watched()
    drop(cluster, 3)
    drop(cluster, every_s=HOLD_S - 1)
    cluster.tick(HOLD_S - 1)
    assert cluster.state.nodes[N1].drained
    cluster.tick(1.0)
    assert not cluster.state.nodes[N1].drained
    drop(cluster, 3)
    cluster.tick(2 * HOLD_S - 1)
    assert cluster.state.nodes[N1].drained
    cluster.tick(1.0)
    assert not cluster.state.nodes[N1].drained


def test_drops_that_are_long_ago_or_one_loss_told_twice_do_not_count() -> None:
    cluster = watched()
    assert not drop(cluster, 6, every_s=DROPS_S / 2).drained
    cluster.tick(DROPS_S)
    for why in ("lost", "no route", "refused", "timeout"):
        cluster.controller.node_down(N1, why)
        cluster.tick()
    assert not cluster.state.nodes[N1].drained


@pytest.mark.parametrize("drops", [0, 4])
def test_the_rule_counts_as_configured(drops: int) -> None:
    assert not drop(watched(drops), 3).drained


def test_a_resume_by_a_person_forgets_the_drops() -> None:
    cluster = watched()
    drop(cluster, 3)
    cluster.ask(lambda tx: resume_nodes(tx, ROOT, "n1", ""))
    assert not drop(cluster, 2).drained
    assert drop(cluster).drained
    cluster.tick(HOLD_S)  # not doubled
    assert not cluster.state.nodes[N1].drained


def test_a_node_that_is_switched_off_does_not_flap() -> None:
    cluster = watched(1)
    node = cluster.state.nodes[N1]
    cluster.state.nodes[N1] = replace(node, spec=replace(node.spec, host="h", mac="52:54:00:12:34:56"))
    cluster.ports.switch_power = lambda name: None  # type: ignore[attr-defined]
    cluster.ask(lambda tx: power_down(tx, ROOT, "n1"))
    assert not drop(cluster, boot_id="boot-2").drained


def test_a_controller_that_starts_again_knows_the_drops() -> None:
    cluster = watched()
    drop(cluster, 2)
    row = cluster.store.load_nodes()["n1"]
    cluster.state.nodes[N1] = node_of(cluster.state.nodes[N1].spec, row)
    load_probations(cluster.state, cluster.store, cluster.now_s)
    assert drop(cluster).drained
