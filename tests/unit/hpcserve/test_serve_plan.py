"""Plans of a served model: parts are complete, memory is never exceeded, and the best of all splits is found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcserve.errors import ServeError
from hpcserve.plan import (
    FFN_COLUMNS,
    GIB,
    VOCAB_ROWS,
    LinkFacts,
    LinkTable,
    ModelDoesNotFit,
    ModelShape,
    PlanGoal,
    PlanTask,
    ServeLoad,
    ServeNode,
    StageWidths,
    ideal_shares,
    make_plan,
    order,
    replan,
    shares,
    stage_s,
    stage_widths,
)

LLAMA = ModelShape(layers=22, width=2048, heads=32, kv_groups=4, head_dim=64, ffn=5632, vocab=32000)
SMALL = ModelShape(layers=4, width=1024, heads=6, kv_groups=3, head_dim=64, ffn=5 * FFN_COLUMNS, vocab=4 * VOCAB_ROWS)
LARGE = ModelShape(layers=80, width=8192, heads=64, kv_groups=8, head_dim=128, ffn=28672, vocab=128000)
SHARED_MEMORY = LinkTable(default=LinkFacts(latency_s=30e-6, rate_bytes_s=5e9))


def node(name: str, free_gib: float = 8, gbps: float = 38) -> ServeNode:
    """Return the facts of a node."""
    return ServeNode(name=name, free_bytes=int(free_gib * GIB), read_bytes_s=gbps * 1e9)


def nodes_of(*frees: float) -> list[ServeNode]:
    """Return nodes that differ in their memory only."""
    return [node(f"n{index}", free) for index, free in enumerate(frees)]


some_nodes = st.lists(st.tuples(st.floats(0.3, 3), st.floats(2, 60)), min_size=1, max_size=4).map(
    lambda facts: [node(f"n{index}", free, gbps) for index, (free, gbps) in enumerate(facts)]
)
some_links = st.tuples(st.floats(1e-5, 5e-3), st.floats(1e7, 5e9)).map(
    lambda facts: LinkTable(default=LinkFacts(latency_s=facts[0], rate_bytes_s=facts[1]))
)
some_loads = st.integers(1, 12).map(lambda streams: ServeLoad(streams=streams))
goals = st.sampled_from(list(PlanGoal))


@settings(max_examples=12)
@given(some_nodes, some_links, some_loads, goals, st.sampled_from(["fp32", "bf16", "int8", "int4"]))
def test_parts_are_complete_and_memory_is_never_exceeded(nodes, links, load, goal, kind):
    try:
        plan = make_plan(LLAMA, kind, nodes, links, load, goal)
    except ModelDoesNotFit:
        return
    for one in plan.candidates:
        assert len(set(one.nodes)) == len(one.nodes)
        assert sum(replica.streams for replica in one.replicas) == load.streams
        for replica in one.replicas:
            replica.split.check(layers=22, kv_groups=4, ffn=5632, vocab=32000)
            assert len(replica.nodes) == replica.split.size
            for need in replica.memory:
                assert need.total_bytes <= need.free_bytes, need
    assert set(plan.left_out) == {one.name for one in nodes} - set(plan.candidates[0].nodes)


@settings(max_examples=8)
@given(some_nodes, some_links, some_loads, goals)
def test_more_nodes_never_make_the_best_worse(nodes, links, load, goal):
    best = None
    for count in range(1, len(nodes) + 1):
        try:
            plan = make_plan(LLAMA, "int8", nodes[:count], links, load, goal)
        except ModelDoesNotFit:
            assert best is None
            continue
        found = order(goal, plan.candidates[0])
        assert best is None or found[0] <= best[0] + 1e-9 * abs(best[0])
        best = found


def compositions(total: int, count: int) -> list[tuple[int, ...]]:
    """Return all ways to write a number as a sum of `count` numbers from 0."""
    return [one for one in itertools.product(range(total + 1), repeat=count) if sum(one) == total]


def small_task(streams: int) -> PlanTask:
    """Return the task to serve the small model to so many streams."""
    load = ServeLoad(streams=streams)
    return PlanTask(shape=SMALL, kind="int8", links=SHARED_MEMORY, load=load, goal=PlanGoal.LATENCY)


def every_width(nodes: tuple[ServeNode, ...]) -> Iterator[StageWidths]:
    """Yield all ways to share the small model among nodes, also those that leave a node idle."""
    for groups in compositions(3, len(nodes)):
        for columns in compositions(5, len(nodes)):
            for vocab in compositions(4, len(nodes)):
                yield StageWidths(
                    nodes=nodes,
                    layers=4,
                    groups=list(groups),
                    columns=[count * FFN_COLUMNS for count in columns],
                    vocab=[count * VOCAB_ROWS for count in vocab],
                )


@settings(max_examples=20)
@given(st.lists(st.floats(2, 60), min_size=2, max_size=3), st.integers(1, 64))
def test_tensor_widths_are_the_best_of_all(speeds, streams):
    task, nodes = small_task(streams), tuple(node(f"n{index}", 8, speed) for index, speed in enumerate(speeds))
    best = min(stage_s(task, widths, True, True, streams) for widths in every_width(nodes))
    stages = [stage for count in range(1, len(nodes) + 1) for stage in itertools.combinations(nodes, count)]
    widths = [
        stage_widths(task, stage, 4, True, True, streams, streams) for stage in stages
    ]  # an idle node is left out
    found = min(stage_s(task, one, True, True, streams) for one in widths if one is not None)
    assert found <= best * (1 + 1e-9)


@given(
    st.integers(1, 30),
    st.lists(
        st.tuples(st.floats(0.1, 9), st.integers(0, 12), st.sampled_from([0.0, 3.0, 16.0])), min_size=1, max_size=4
    ),
)
@example(1, [(1.0, 2, 0.0), (0.5, 0, 3.0)])
@example(10, [(1.0, 10, 0.0), (1.0, 10, 16.0), (1.0, 10, 5.0)])
@settings(max_examples=60)
def test_shares_are_the_smallest_maximum(units, places):
    costs, caps, base = zip(*places, strict=True)
    found = shares(units, costs, caps, base)
    if sum(caps) < units:
        assert found is None
        return
    assert sum(found) == units
    assert all(count <= cap for count, cap in zip(found, caps, strict=True))

    def worst(counts):
        return max(start + count * cost for start, count, cost in zip(base, counts, costs, strict=True) if count)

    every = itertools.product(*(range(cap + 1) for cap in caps))
    assert worst(found) <= min(worst(one) for one in every if sum(one) == units) * (1 + 1e-9)
    assert sum(ideal_shares(units, costs, caps, base)) == pytest.approx(units)


@pytest.mark.parametrize("slow", [19.0, 25.0, 38.0], ids=["2:1", "3:2", "equal"])
def test_unequal_nodes_reach_most_of_the_sum_of_their_speeds(slow):
    def gap_s(*nodes):
        return make_plan(LLAMA, "bf16", nodes, SHARED_MEMORY, ServeLoad()).candidates[0].gap_s

    fast_s, slow_s = gap_s(node("a")), gap_s(node("b", 8, slow))
    assert 1 / gap_s(node("a"), node("b", 8, slow)) >= 0.85 * (1 / fast_s + 1 / slow_s)


@pytest.mark.parametrize(
    ("kind", "streams", "measured_ms"),
    [("bf16", 1, 67), ("bf16", 8, 96), ("bf16", 16, 137), ("int8", 1, 37), ("int8", 8, 61.5), ("int8", 16, 86.5)],
    ids=["bf16-1", "bf16-8", "bf16-16", "int8-1", "int8-8", "int8-16"],
)
def test_predictions_are_near_measured_steps_of_one_core(kind, streams, measured_ms):
    load = ServeLoad(streams=streams, prompt_tokens=16, answer_tokens=16)
    best = make_plan(LLAMA, kind, [node("a", 8, 38.5)], SHARED_MEMORY, load).candidates[0]
    assert best.gap_s * 1000 == pytest.approx(measured_ms, rel=0.10)


@pytest.mark.parametrize(
    "frees", [(1.6, 1.6), (1.2, 1.2, 1.2), (2.0, 0.9)], ids=["two of 1.6", "three of 1.2", "uneven"]
)
def test_a_model_larger_than_any_node_is_split(frees):
    plan = make_plan(LLAMA, "bf16", nodes_of(*frees), SHARED_MEMORY, ServeLoad())
    assert len(plan.candidates[0].nodes) == len(frees)


@pytest.mark.parametrize(("kind", "share"), [("int8", 0.53), ("int4", 0.33)], ids=["int8", "int4"])
def test_quantized_weights_take_half_or_a_third_of_the_memory(kind, share):
    def weights_bytes(kind):
        plan = make_plan(LLAMA, kind, nodes_of(8), SHARED_MEMORY, ServeLoad())
        return plan.candidates[0].replicas[0].memory[0].weights_bytes

    assert weights_bytes(kind) < share * weights_bytes("bf16")


def test_a_slow_node_is_left_out_with_a_reason():
    nodes = [node("a"), node("b"), node("c", 8, 0.5), node("d", 0.2)]
    plan = make_plan(LLAMA, "bf16", nodes, LinkTable(), ServeLoad())
    assert set(plan.candidates[0].nodes) == {"a", "b"}
    assert "instead of" in plan.left_out["c"]
    assert "0.2 GiB free" in plan.left_out["d"]


def test_slow_links_lead_to_one_node_or_a_pipeline():
    slow = LinkTable(default=LinkFacts(latency_s=0.003))
    assert make_plan(LLAMA, "bf16", nodes_of(8, 8), slow, ServeLoad()).candidates[0].name == "one node"
    split = make_plan(LLAMA, "bf16", nodes_of(1.6, 1.6), slow, ServeLoad()).candidates[0]
    assert split.name == "pipeline 2"
    load = ServeLoad(streams=16)
    throughput = make_plan(LLAMA, "int8", nodes_of(1.4, 1.4), slow, load, PlanGoal.THROUGHPUT).candidates[0]
    assert throughput.name == "pipeline 2"


def test_links_of_a_pair_count_for_its_groups_only():
    bad = LinkFacts(latency_s=0.05)
    links = LinkTable(default=LinkFacts(latency_s=0.0001), pairs={frozenset({"n0", "n1"}): bad})
    best = make_plan(LLAMA, "bf16", nodes_of(8, 8, 8), links, ServeLoad()).candidates[0]
    assert not {"n0", "n1"} <= set(best.nodes)
    assert len(best.nodes) == 2


def test_the_worst_link_counts_and_unknown_pairs_are_as_the_default():
    slow, fast = LinkFacts(latency_s=0.01), LinkFacts(latency_s=1e-5, rate_bytes_s=5e9)
    links = LinkTable(pairs={frozenset("ab"): fast, frozenset("bc"): slow})
    assert links.worst("ab") == fast
    assert links.worst("ac") == LinkFacts()
    assert links.worst("abc") == slow


def test_a_refusal_names_what_would_fit():
    with pytest.raises(ModelDoesNotFit) as refused:
        make_plan(LLAMA, "bf16", nodes_of(1.0, 0.9), SHARED_MEMORY, ServeLoad())
    words = str(refused.value)
    assert "n0 has 1 GiB free" in words
    assert "--quantize int8" in words
    assert "one more node of 1.5 GiB" in words


def test_a_refusal_of_a_large_model_names_the_node_that_is_missing():
    words = r"it needs 4\d GiB with int4 weights on one node; .*It fits with one more node of 2\d(\.5)? GiB"
    with pytest.raises(ModelDoesNotFit, match=words):
        make_plan(LARGE, "int4", nodes_of(8, 8, 8), SHARED_MEMORY, ServeLoad())


def test_a_refusal_names_a_shorter_context():
    load = ServeLoad(streams=1, context_tokens=200_000)
    with pytest.raises(ModelDoesNotFit, match="a context of 50000 tokens"):
        make_plan(LLAMA, "int4", nodes_of(2.5), SHARED_MEMORY, load)


@pytest.mark.parametrize("goal", list(PlanGoal), ids=str)
def test_a_hundred_nodes_are_planned(goal):
    nodes = [node(f"n{index}", 1 + index % 9, 8 + index % 31) for index in range(100)]
    plan = make_plan(LLAMA, "int8", nodes, LinkTable(), ServeLoad(streams=64), goal)
    assert plan.candidates[0].tokens_s > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "int2"}, "int2"),
        ({"nodes": []}, "one or more nodes"),
        ({"nodes": [node("a"), node("a")]}, "each once"),
        ({"nodes": [node("a", 8, 0)]}, "no bandwidth"),
        ({"shape": replace(LLAMA, kv_groups=5)}, "whole numbers"),
        ({"load": ServeLoad(context_tokens=300)}, "no room"),
        ({"load": ServeLoad(streams=0)}, "from 1"),
        ({"links": LinkTable(default=LinkFacts(rate_bytes_s=0))}, "between nodes has a latency of .* a rate of 0"),
        (
            {"links": LinkTable(pairs={frozenset("ab"): LinkFacts(latency_s=-1)})},
            "between a and b has a latency of -1 s",
        ),
    ],
    ids=["kind", "no node", "twice", "no speed", "groups", "context", "streams", "link of zero", "link of a pair"],
)
def test_facts_that_make_no_sense_are_refused(change, words):
    facts = {"shape": LLAMA, "kind": "bf16", "nodes": [node("a")], "links": LinkTable(), "load": ServeLoad()}
    with pytest.raises(ServeError, match=words):
        make_plan(**{**facts, **change})


@pytest.mark.parametrize(
    ("measured", "again"),
    [
        ([], False),
        ([50], False),
        ([50, 120], False),
        ([100, 50], False),
        ([50, 60], True),
        ([100, 130, 140], True),
        ([50, 60, 100], False),
    ],
    ids=["none", "once", "once more", "now", "twice slower", "twice faster", "right again"],
)
def test_a_wrong_prediction_leads_to_a_new_plan_the_second_time(measured, again):
    assert replan(100, measured) is again
