"""Outages of nodes, as `sreport cluster utilization` counts them: from the recorded events of nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from cluster import ROOT, Cluster
from jobs import T0

from hpcsched.errors import RequestError
from hpcsched.model.ids import NodeName


def outages(cluster: Cluster, start_s: float, end_s: float) -> list[tuple[str, float, float | None]]:
    query = {"start_s": str(start_s), "end_s": str(end_s)}
    found: list[dict[str, Any]] = asyncio.run(cluster.backend().outages(ROOT, query))["outages"]
    return [(outage["node"], outage["start_s"] - T0, (outage["end_s"] or T0) - T0 or None) for outage in found]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """n1 was down from 100 s to 300 s; n2 is down since 200 s."""
    made = Cluster("n1", "n2", path=tmp_path / "hpcsched.db")
    made.tick(100 - (made.now_s - T0))
    made.controller.node_down(NodeName("n1"), "no answer")
    made.tick()
    made.controller.node_down(NodeName("n1"), "no route to host")
    made.tick(100)
    made.controller.node_down(NodeName("n2"), "no answer")
    made.tick()
    made.tick(100)
    made.welcome("n1")
    return made


def test_an_outage_lasts_from_the_first_missed_answer_to_the_next_one(cluster: Cluster) -> None:
    assert sorted(outages(cluster, T0, T0 + 1000)) == [("n1", 100, 300), ("n2", 200, None)]


@pytest.mark.parametrize(
    ("start_s", "end_s", "nodes"),
    [(0, 100, []), (0, 101, ["n1"]), (299, 1000, ["n1", "n2"]), (300, 1000, ["n2"]), (0, 201, ["n1", "n2"])],
)
def test_outages_of_other_times_are_left_out(start_s: float, end_s: float, nodes: list[str], cluster: Cluster) -> None:
    assert sorted(node for node, _, _ in outages(cluster, T0 + start_s, T0 + end_s)) == nodes


@pytest.mark.parametrize(
    "query", [{}, {"start_s": "1"}, {"start_s": "x", "end_s": "2"}, {"start_s": "1", "end_s": "nan"}]
)
def test_a_query_without_a_period_is_refused(query: dict[str, str], cluster: Cluster) -> None:
    with pytest.raises(RequestError, match="cannot"):
        asyncio.run(cluster.backend().outages(ROOT, query))
