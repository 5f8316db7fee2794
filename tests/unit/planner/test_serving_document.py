"""The facts of a cluster for plans of served models: which nodes, what of them, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from hpcsched.errors import NotFoundError, RequestError
from hpcsched.metrics.bench import BenchRun
from hpcsched.metrics.links import LinkRun
from hpcsched.model.accounting import Account, Accounting
from hpcsched.planner.serving import chosen, serving_document, why_no_jobs

VALUES = {"memory": 38.0, "cpus": 4.0, "gemm_bf16": 900.0}


def view(name: str, **more: Any) -> dict[str, Any]:
    """Return a node as the API gives it."""
    facts = {"mem_mib": 8192, "mem_alloc_mib": 0, "cpus": 4, "state": "IDLE", "drained": False, "facts": None}
    return {"name": name, **facts, **more}


def run(name: str, at_s: float = 1.0, busy: str = "", **values: float) -> BenchRun:
    """Return an assessment of a node."""
    return BenchRun(
        node=name, at_s=at_s, how="quick", cpu_model="x", cpus=4, mem_mib=8192, busy=busy, values=values or VALUES
    )


def link(one: str, other: str, **more: Any) -> LinkRun:
    """Return a measured link of 1 Gbit/s."""
    return LinkRun(
        **{"one": one, "other": other, "at_s": 1.0, "rtt_us": 400.0, "to_mbps": 940.0, "from_mbps": 900.0} | more
    )


def document(*views: dict[str, Any], named: bool = False, **more: Any) -> dict[str, Any]:
    """Return the document of nodes that are all measured, unless `more` says otherwise."""
    given = {"runs": [run(one["name"]) for one in views], "links": [], "why_not": {}} | more
    return serving_document(views, named=named, **given)


def test_a_node_has_its_free_memory_its_bandwidth_and_its_speed() -> None:
    found = document(view("n1", mem_alloc_mib=2048), view("n2", facts={"mem_free_mib": 1024}))
    assert found["notes"] == []
    assert found["nodes"] == [
        {"name": "n1", "free": 6.0, "bw": 38.0, "cores": 4, "flops": 900.0},
        {"name": "n2", "free": 1.0, "bw": 38.0, "cores": 4, "flops": 900.0},
    ]


@pytest.mark.parametrize(
    ("values", "gflops", "notes"),
    [
        ({"gemm_bf16": 900.0, "gemm_fp32": 400.0}, 900.0, 0),
        ({"gemm_fp32": 400.0}, 1000.0, 0),
        ({"cpus": 2.0}, 800.0, 1),
        ({}, None, 1),
    ],
    ids=["bf16", "fp32", "hashes", "nothing"],
)
def test_the_speed_is_measured_or_a_guess_that_is_said(
    values: dict[str, float], gflops: float | None, notes: int
) -> None:
    found = document(view("n1"), runs=[run("n1", memory=20.0, **values)])
    assert found["nodes"][0].get("flops") == gflops
    assert len(found["notes"]) == notes


def test_the_last_run_beside_no_other_work_counts() -> None:
    runs = [run("n1", 1.0, memory=10.0), run("n1", 2.0, memory=20.0), run("n1", 3.0, "load", memory=5.0)]
    assert document(view("n1"), runs=runs)["nodes"][0]["bw"] == 20.0
    busy = document(view("n1"), runs=runs[2:])
    assert busy["nodes"][0]["bw"] == 5.0
    assert any("n1 had other work" in note for note in busy["notes"])


def test_a_link_has_half_its_round_trip_and_its_slower_direction() -> None:
    links = [link("n1", "n2"), link("n2", "n3", alone_mbps=500.0), link("n1", "n9")]
    found = document(view("n1"), view("n2"), view("n3"), links=links)
    assert found["links"] == [
        {"nodes": ["n1", "n2"], "ms": 0.2, "gbit": 0.9},
        {"nodes": ["n2", "n3"], "ms": 0.2, "gbit": 0.5},
    ]


@pytest.mark.parametrize(
    "more", [{"why": "no route"}, {"to_mbps": 0.0}, {"rtt_us": 0.0}], ids=["failed", "link of zero", "no latency"]
)
def test_a_link_that_carries_nothing_is_unknown(more: dict[str, Any]) -> None:
    assert document(view("n1"), view("n2"), links=[link("n1", "n2", **more)])["links"] == []


def test_nodes_that_cannot_be_used_are_left_out_and_said() -> None:
    views = [view("n1"), view("n2"), view("n3"), view("n4", mem_alloc_mib=8192), view("n5")]
    runs = [run(name) for name in ("n1", "n4", "n5")]
    found = document(*views, runs=runs, why_not={"n5": "its state is drained"})
    assert [one["name"] for one in found["nodes"]] == ["n1"]
    assert found["notes"] == [
        "n[2-3]: its memory bandwidth is not measured ('hpcsched node bench' measures it): not considered",
        "n4: jobs hold all of its memory: not considered",
        "n5: its state is drained: not considered",
    ]


def test_a_named_node_without_measurements_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(
        RequestError, match=r"'n2': its memory bandwidth is not measured .*node bench.*--nodes n2:free="
    ):
        document(view("n1"), view("n2"), runs=[run("n1")], named=True)


@pytest.mark.parametrize("views", [[], [view("n1")]], ids=["no node", "none measured"])
def test_a_cluster_without_a_usable_node_is_an_error(views: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="cannot plan: no node can be used: .*--nodes n1:free=GIB"):
        document(*views, runs=[])


def test_nodes_are_chosen_by_name_and_unknown_names_are_refused() -> None:
    views = [view("n1"), view("n2"), view("n3")]
    assert [one["name"] for one in chosen(views, [])] == ["n1", "n2", "n3"]
    assert [one["name"] for one in chosen(views, ["n3", "n1", "n3"])] == ["n3", "n1"]
    with pytest.raises(NotFoundError, match="'n7': there is no node of that name"):
        chosen(views, ["n1", "n7"])


def test_only_nodes_on_which_a_job_of_the_user_can_start_are_used() -> None:
    views = [
        view("n1"),
        view("n2", drained=True, state="DRAINED"),
        view("n3", state="DOWN"),
        view("n4"),
        view("n5"),
        view("n6"),
        view("n7", drained=True, state="POWERED_DOWN"),
        view("n8", state="POWERED_DOWN"),
    ]
    partitions = [
        {"nodes": ["n1", "n2", "n3", "n7", "n8"], "up": True, "allow_accounts": []},
        {"nodes": ["n4"], "up": True, "allow_accounts": ["physics"]},
        {"nodes": ["n5"], "up": True, "allow_accounts": ["biology"]},
        {"nodes": ["n6"], "up": False, "allow_accounts": []},
    ]
    accounting = Accounting(
        accounts=(
            Account(name="physics", parent="", users=()),
            Account(name="optics", parent="physics", users=("ada",)),
            Account(name="biology", parent="", users=("bob",)),
        )
    )
    found = why_no_jobs(views, partitions, accounting, "ada")
    assert sorted(found) == ["n2", "n3", "n5", "n6", "n7"]
    assert found["n2"] == found["n7"] == "its state is drained"
    assert found["n5"] == "no open partition with it takes your jobs"
