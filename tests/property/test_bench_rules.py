"""Which node is slow: the baseline of a class, a node's own past, and answers that may be anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpcsched.errors import ProtocolError
from hpcsched.metrics.bench import (
    MAX_NAME,
    MAX_TEXT,
    BenchRun,
    NodeRole,
    baseline,
    is_outlier,
    is_same_class,
    measured_nodes,
    roles,
    run_from,
    run_of,
    run_text,
    slow_tests,
    speed_part,
)
from hpcsched.metrics.links import LinkEnd, LinkRun
from hpcsched.model.ids import NodeName
from hpcsched.model.node import Gpu, NodeSpec

SPEEDS = st.lists(st.floats(0.01, 1e6), min_size=3, max_size=30)


def run(node: str, at_s: float, value: float, **more: Any) -> BenchRun:
    known = {"how": "quick", "cpu_model": "x", "cpus": 8, "mem_mib": 1000, "values": {"memory": value}}
    return BenchRun(node=node, at_s=at_s, **known | more)


def a_spec(name: str, **more: Any) -> NodeSpec:
    return NodeSpec(name=NodeName(name), **{"host": name, "host_key": "", "cpus": 8, "mem_mib": 1000} | more)


def slow(node: str, *runs: BenchRun) -> list[tuple[str, str, bool]]:
    return [(one.test, one.versus, one.confirmed) for one in slow_tests(node, runs)]


@given(SPEEDS, st.booleans())
def test_the_baseline_is_between_its_values_and_only_worse_ones_are_dropped(values: list[float], less: bool) -> None:
    usual = baseline(values, less_is_better=less)
    assert usual is not None
    assert min(values) * (1 - 1e-9) <= usual <= max(values) * (1 + 1e-9)
    mean = sum(values) / len(values)
    assert usual <= mean * (1 + 1e-9) if less else usual >= mean * (1 - 1e-9)


@given(SPEEDS, st.floats(0.1, 10.0))
def test_the_unit_does_not_matter(values: list[float], unit: float) -> None:
    usual, scaled = baseline(values), baseline([unit * value for value in values])
    assert usual is not None
    assert scaled is not None
    assert scaled == pytest.approx(unit * usual, rel=0.06)


@given(SPEEDS)
def test_a_node_at_or_above_the_baseline_is_not_slow(values: list[float]) -> None:
    usual = baseline(values)
    assert usual is not None
    for value in values:
        if speed_part(value, usual, less_is_better=False) >= 1:
            assert not is_outlier(value, values)


@given(st.lists(st.floats(99.0, 101.0), min_size=4, max_size=30), st.floats(0.1, 0.85))
def test_one_slow_node_of_equal_ones_is_found_and_no_other(values: list[float], part: float) -> None:
    all_ = [100 * part, *values]
    assert [value for value in all_ if is_outlier(value, all_)] == [100 * part]


def test_two_nodes_are_no_class() -> None:
    assert baseline([1.0, 2.0]) is None
    assert not is_outlier(0.1, [0.1, 100.0])


def test_a_node_that_is_slow_in_its_class_is_confirmed_by_its_second_run() -> None:
    peers = [run(f"n{number}", 1.0, 100.0 + number) for number in range(3)]
    assert slow("bad", *peers, run("bad", 2.0, 80.0)) == [("memory", "class", False)]
    assert slow("bad", *peers, run("bad", 2.0, 80.0), run("bad", 3.0, 81.0)) == [("memory", "class", True)]
    assert slow("bad", *peers, run("bad", 2.0, 80.0), run("bad", 3.0, 100.0)) == []
    assert slow("n1", *peers, run("bad", 2.0, 80.0)) == []


def test_other_hardware_is_another_class() -> None:
    peers = [run(f"n{number}", 1.0, 100.0) for number in range(3)]
    for other in ({"cpus": 4}, {"mem_mib": 800}, {"cpu_model": "y"}, {"gpus": ("a100",)}):
        assert slow("bad", *peers, run("bad", 2.0, 50.0, **other)) == []
    assert is_same_class(peers[0], run("bad", 2.0, 50.0, mem_mib=950))


def test_busy_runs_and_uneven_rounds_are_not_judged_and_judge_none() -> None:
    peers = [run(f"n{number}", 1.0, 100.0) for number in range(3)]
    assert slow("bad", *peers, run("bad", 2.0, 50.0, busy="load")) == []
    assert slow("bad", *peers, run("bad", 2.0, 50.0, spread={"memory": 0.2})) == []
    marked = [run(f"n{number}", 1.0, 100.0, busy="load") for number in range(3)]
    assert slow("bad", *marked, run("bad", 2.0, 50.0)) == []


def test_a_node_that_became_slower_than_it_was_is_found_without_others() -> None:
    past = [run("n1", float(at), 100.0) for at in range(5)]
    assert slow("n1", *past, run("n1", 9.0, 94.0)) == []
    assert slow("n1", *past, run("n1", 9.0, 92.0)) == [("memory", "past", False)]
    assert slow("n1", *past, run("n1", 9.0, 92.0), run("n1", 10.0, 92.0)) == [("memory", "past", True)]
    assert slow("n1", *past[1:], run("n1", 9.0, 50.0)) == []  # four runs say nothing


def test_less_is_better_for_some() -> None:
    past = [run("n1", float(at), 1.0, values={"fsync": 2.0}) for at in range(5)]
    assert slow("n1", *past, run("n1", 9.0, 1.0, values={"fsync": 1.0})) == []
    assert slow("n1", *past, run("n1", 9.0, 1.0, values={"fsync": 4.0})) == [("fsync", "past", False)]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda some: st.lists(some) | st.dictionaries(st.text(), some),
)

NAMES = st.sampled_from(["memory", "fsync", "cpu_all", "x" * 500, "not one", "", "\x1b[2J"])
NAMED = st.dictionaries(NAMES, ANYTHING | st.floats(min_value=-1, max_value=1e13) | st.text())


@given(
    st.dictionaries(
        st.sampled_from(["spread", "notes", "busy", "how", "cpu_model", "throttled", "x"]), ANYTHING | NAMED
    ),
    ANYTHING | NAMED,
)
@example({"spread": {"fsync": 0.5}, "notes": {"memory": "slow\n"}}, {"memory": 7.5})
def test_an_answer_may_be_anything(answer: dict[str, Any], values: object) -> None:
    try:
        made = run_of({**answer, "values": values}, a_spec("n1"), at_s=1.0)
    except ProtocolError:
        return
    assert all(0 < value <= 1e12 for value in made.values.values())
    assert all(0 <= value <= 1e12 for value in made.spread.values())
    assert all(len(name) <= MAX_NAME for name in (*made.values, *made.spread, *made.notes))
    assert all(len(text) <= MAX_TEXT and text.isprintable() for text in (made.busy, made.how, *made.notes.values()))
    assert run_from(run_text(made)) == made
    slow_tests("n1", [made])


@pytest.mark.parametrize("answer", [None, 1, [], {}, {"values": [1]}])
def test_an_answer_without_values_is_refused(answer: object) -> None:
    with pytest.raises(ProtocolError, match="no values"):
        run_of(answer, a_spec("n1"), at_s=1.0)


def test_numbers_that_are_none_are_left_out() -> None:
    values = {
        "a": float("nan"),
        "b": float("inf"),
        "c": -1,
        "d": True,
        "e": "7",
        "f": 2**2000,
        "g": 5,
        "bad name": 1,
        "z": 0,
    }
    made = run_of(json.loads(json.dumps({"values": values})), a_spec("n1"), at_s=1.0)
    assert made.values == {"g": 5.0}


# ----- roles


def a_node(name: str, **more: Any) -> BenchRun:
    return run(name, 1.0, 10.0, **{"values": {"cpu": 1.0, "disk_read": 500.0}} | more)


def a_link(one: str, other: str, mbps: float, kind: str = "wired") -> LinkRun:
    end = LinkEnd(device="x0", kind=kind)
    return LinkRun(one=one, other=other, at_s=1.0, to_mbps=mbps, from_mbps=mbps, near=LinkEnd(kind="wired"), far=end)


def texts(found: dict[str, list[NodeRole]]) -> dict[str, list[str]]:
    return {name: [role.text for role in mine] for name, mine in found.items()}


def test_roles_name_how_a_node_differs_from_the_median() -> None:
    nodes = [
        a_node("n1"),
        a_node("n2", mem_mib=1600),
        a_node("n3", values={"cpu": 1.3, "disk_read": 1200.0}),
        a_node("n4", gpus=("a100",)),
        a_node("n5", values={"cpu": 0.7}),
        a_node("n6", values={"cpu": 9.9}, spread={"cpu": 0.5}),
    ]
    found = roles({node.node: node for node in nodes})
    assert texts(found) == {
        "n2": ["memory-rich: parameter or KV node"],
        "n3": ["fast CPU: jobs of one CPU first", "fast disk: staged data and checkpoints"],
        "n4": ["GPU: training and serving"],
        "n5": ["slow CPU: not in synchronous training with the others"],
    }


def test_nodes_on_slow_links_and_wifi_are_for_jobs_of_one_node() -> None:
    nodes = {name: a_node(name) for name in ("n1", "n2", "n3", "n4")}
    links = [a_link("n1", "n2", 940), a_link("n1", "n3", 90), a_link("n2", "n3", 90), a_link("n1", "n4", 120, "wifi")]
    assert texts(roles(nodes, links)) == {
        "n3": ["slow link: single-node jobs only"],
        "n4": ["Wi-Fi: single-node jobs only"],
    }


def test_two_nodes_have_no_median_to_differ_from() -> None:
    assert roles({"n1": a_node("n1"), "n2": a_node("n2", mem_mib=10**6)}) == {}
    assert roles({}) == {}


# ----- what placement uses


def features(specs: list[NodeSpec], runs: list[BenchRun], links: Sequence[LinkRun] = ()) -> dict[str, tuple[str, ...]]:
    found = measured_nodes(specs, {run.node: run for run in runs}, links)
    return {name: node.features for name, node in found.items()}


def test_measured_parts_and_roles_are_features() -> None:
    specs = [a_spec(f"n{number}") for number in range(1, 6)]
    runs = [
        a_node("n1"),
        a_node("n2", values={"cpu": 1.3, "memory": 5.0}, battery=True),
        a_node("n3", values={"cpu": 0.7}),
        a_node("n4", values={"cpu": 1.0}, spread={"cpu": 0.5}),
    ]
    links = [a_link("n1", "n2", 940), a_link("n1", "n3", 90), a_link("n2", "n3", 90), a_link("n1", "n5", 940, "wifi")]
    assert features(specs, runs, links) == {
        "n1": ("bench.cpu", "bench.disk", "fast-link"),
        "n2": ("bench.cpu", "bench.memory", "fast-cpu", "battery", "fast-link"),
        "n3": ("slow-cpu", "slow-link"),
        "n4": (),
        "n5": ("wifi",),
    }


def test_a_run_of_other_hardware_says_nothing() -> None:
    assert features([a_spec("n1", cpus=4)], [a_node("n1")]) == {}
    assert features([a_spec("n1", mem_mib=2000)], [a_node("n1")]) == {}
    assert features([a_spec("n1", gpus=(Gpu(index=0, type="a100"),))], [a_node("n1")]) == {}
    assert features([a_spec("n2")], [a_node("n1")], [a_link("n1", "n2", 940)]) == {}


def test_the_newer_one_of_the_measured_and_the_configured_speed_counts() -> None:
    measured = run_of({"values": {"cpu": 0.5}}, a_spec("n1", speed=0.4), at_s=1.0)
    for spec, speed in ((a_spec("n1", speed=0.4), 0.5), (a_spec("n1", speed=0.45), 0.0), (a_spec("n1"), 0.0)):
        assert measured_nodes([spec], {"n1": measured}, [])["n1"].cpu_speed == speed


def test_the_rate_of_a_node_is_that_of_its_slowest_gpu() -> None:
    gpus = tuple(Gpu(index=index, type="a100") for index in range(2))
    values = {"gpu0_fp32": 10.0, "gpu1_fp32": 9.0, "gpu0_bf16": 80.0}
    found = run_of({"values": values}, a_spec("n1", gpus=gpus), at_s=1.0)
    assert measured_nodes([a_spec("n1", gpus=gpus)], {"n1": found}, [])["n1"].gemm_gflops == 9.0
    found = run_of({"values": values | {"gpu1_bf16": 70.0}}, a_spec("n1", gpus=gpus), at_s=1.0)
    assert measured_nodes([a_spec("n1", gpus=gpus)], {"n1": found}, [])["n1"].gemm_gflops == 70.0


def test_links_are_in_classes_of_rate_and_then_of_latency() -> None:
    specs = [a_spec(f"n{number}") for number in range(1, 5)]
    links = [
        a_link("n1", "n2", 938.0),
        a_link("n3", "n1", 1000.0),
        a_link("n2", "n3", 95.0),
        replace(a_link("n1", "n4", 940.0), rtt_us=9000.0),
    ]
    measured = measured_nodes(specs, {}, links)
    names = [[name for name, peer in measured.items() if bits & peer.link_bit] for _, bits in measured["n1"].near]
    assert [sorted(some) for some in names] == [["n2", "n3"], ["n2", "n3", "n4"]]
    busy = [replace(link, busy="jobs were running: 1") for link in links]
    assert measured_nodes(specs, {}, busy) == {}
