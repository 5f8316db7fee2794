"""Which nodes are switched off to save power and which are switched on, for any cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hpcsched.model.ids import NodeName
from hpcsched.model.node import Power
from hpcsched.sched.power import PowerNode, PowerPlan, PowerRules, power_plan

NOW = 100_000.0
RULES = PowerRules(suspend_timeout_s=120.0, resume_timeout_s=600.0, min_on_s=1800.0)
NAMES = [NodeName(f"n{i}") for i in range(6)]
times = st.floats(0.0, NOW)
Keep = Mapping[frozenset[NodeName], int]


@st.composite
def a_node(draw: st.DrawFn, name: NodeName) -> PowerNode:
    power = draw(st.sampled_from([Power.ON, Power.ON, Power.ON, *Power]))
    return PowerNode(
        name=name,
        power=power,
        since_s=draw(times),
        answers=draw(st.sampled_from([True, True, False])) if power in (Power.ON, Power.POWERING_DOWN) else False,
        drained=draw(st.sampled_from([False, False, False, True])),
        idle_since_s=draw(st.none() | times),
        wanted_at_s=draw(st.none() | st.none() | st.floats(0.0, 2 * NOW)),
        suspend_after_s=draw(st.sampled_from([0.0, 60.0, 3600.0])),
        is_by_hand=draw(st.booleans()),
    )


clusters = st.tuples(*[a_node(name) for name in NAMES])
keeps = st.dictionaries(st.frozensets(st.sampled_from(NAMES), min_size=1), st.integers(1, 3), max_size=2)


def planned(nodes: tuple[PowerNode, ...], keep: Keep = {}) -> PowerPlan:  # noqa: B006 - only read
    return power_plan(nodes, keep, RULES, NOW)


@given(clusters, keeps)
def test_no_node_gets_two_orders_and_only_in_its_state(nodes: tuple[PowerNode, ...], keep: Keep) -> None:
    plan = planned(nodes, keep)
    every = [*plan.suspend, *plan.resume, *plan.off, *plan.still_on, *plan.not_back]
    assert len(every) == len(set(every))
    by_name = {node.name: node for node in nodes}
    assert {by_name[name].power for name in plan.suspend} <= {Power.ON}
    assert {by_name[name].power for name in plan.resume} <= {Power.POWERED_DOWN}
    assert {by_name[name].power for name in (*plan.off, *plan.still_on)} <= {Power.POWERING_DOWN}
    assert {by_name[name].power for name in plan.not_back} <= {Power.POWERING_UP}


@given(clusters, keeps)
def test_only_a_node_that_is_idle_long_enough_is_switched_off(nodes: tuple[PowerNode, ...], keep: Keep) -> None:
    plan = planned(nodes, keep)
    for node in nodes:
        if node.name in plan.suspend:
            assert node.answers
            assert not node.drained
            assert node.suspend_after_s
            assert node.idle_since_s is not None
            assert NOW - node.idle_since_s >= node.suspend_after_s
            assert not node.since_s or NOW - node.since_s >= RULES.min_on_s
            assert node.wanted_at_s is None or node.wanted_at_s > NOW + RULES.resume_timeout_s


@given(clusters, keeps)
def test_partitions_keep_as_many_nodes_on_as_they_say(nodes: tuple[PowerNode, ...], keep: Keep) -> None:
    plan = planned(nodes, keep)
    on = {node.name for node in nodes if node.is_on} - set(plan.suspend) - set(plan.not_back) | set(plan.resume)
    free = {
        node.name for node in nodes if node.power is Power.POWERED_DOWN and not node.drained and not node.is_by_hand
    }
    for group, count in keep.items():
        assert len(on & group) >= count or not free & group - set(plan.resume)
        if len(on & group) < count:
            assert not group & set(plan.suspend)


@given(clusters)
def test_a_node_that_a_job_holds_is_on_or_switched_on(nodes: tuple[PowerNode, ...]) -> None:
    held = [replace(node, wanted_at_s=NOW, idle_since_s=None) for node in nodes]
    plan = planned(tuple(held))
    assert not plan.suspend
    assert set(plan.resume) == {node.name for node in nodes if node.power is Power.POWERED_DOWN}


@given(clusters, keeps)
def test_a_plan_that_is_carried_out_leads_to_no_other_one(nodes: tuple[PowerNode, ...], keep: Keep) -> None:
    """A node that is switched on is not switched off again at once, nor the other way round."""
    plan, after = planned(nodes, keep), []
    for node in nodes:
        if node.name in plan.suspend:
            node = replace(node, power=Power.POWERED_DOWN, since_s=NOW, answers=False, idle_since_s=None)
        elif node.name in plan.resume:
            node = replace(node, power=Power.ON, since_s=NOW, answers=True, idle_since_s=0.0)
        elif node.name in (*plan.still_on, *plan.not_back):
            node = replace(node, power=Power.ON, since_s=NOW)
        elif node.name in plan.off:
            node = replace(node, power=Power.POWERED_DOWN, since_s=NOW)
        after.append(node)
    again = planned(tuple(after), keep)
    assert not set(again.resume) & set(plan.suspend)
    assert not set(again.suspend) & set(plan.resume)


@given(clusters, keeps)
def test_the_next_time_is_when_something_changes_at_last(nodes: tuple[PowerNode, ...], keep: Keep) -> None:
    next_s = planned(nodes, keep).next_s
    assert next_s is None or next_s > NOW
    due = [node for node in nodes if node.power is Power.POWERING_UP and node.since_s + RULES.resume_timeout_s > NOW]
    for node in due:
        assert next_s is not None
        assert next_s <= node.since_s + RULES.resume_timeout_s
