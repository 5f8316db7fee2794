"""Which nodes make up a gang: of the right kinds, close to each other, of like speed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.sched.world import World, refusal_of, world

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.node import MeasuredNode
from hpcsched.sched.place.gang import MOST_FIRST, _Choice, _linked, _reached
from hpcsched.sched.place.node_fit import Seat
from hpcsched.sched.place.request import request_of
from hpcsched.sched.snapshot import NodeView

KINDS = "2x4+a 2x4+b 1x4+a+b"  # n1 n2 are a, n3 n4 b, n5 both


def on(sketch: World) -> str:
    """Return the nodes that job 9 gets; empty if it waits."""
    return " ".join(share.node for start in sketch.plan().starts if start.job_id == 9 for share in start.shares)


def got(nodes: str, job: str, running: tuple[str, ...] = (), **changes: object) -> str:
    return on(world(nodes, running=running, waiting=[f"9: {job}"]).change(9, **changes))


@pytest.mark.parametrize(
    ("job", "nodes"),
    [
        ("+[a*2&b*1]", "n1 n2 n3"),  # the counts say how many nodes
        ("+[a*3&b*1]", "n1 n2 n3 n5"),
        ("+[a*3&b*2]", "n1 n2 n3 n4 n5"),  # the one that is both counts once: where it is needed
        ("+[a*3&b*3]", ""),
        ("3 nodes +[a*1&b*1]", "n1 n2 n3"),
        ("4 nodes +b*3", "n1 n3 n4 n5"),
        ("2 nodes +[(a&b)*1]", "n1 n5"),
        ("3 nodes +[b|a]", "n3 n4 n5"),  # in the order written
        ("4 nodes +[a|b]", ""),
        ("2 nodes +a&[b|c]", ""),
        ("1 nodes +a&[c|b]", "n5"),
    ],
)
def test_kinds_of_nodes(job: str, nodes: str) -> None:
    assert got(KINDS, job) == nodes


def test_a_node_of_two_kinds_moves_to_the_other_when_that_lets_one_in() -> None:
    assert got("1x4+a+b 1x4+a", "+[a*1&b*1]") == "n1 n2"
    assert got("1x4+a+b 1x4+b+c 1x4+a", "+[a*1&b*1&c*1]") == "n1 n2 n3"


def test_kinds_are_met_whatever_runs_or_nothing_starts() -> None:
    assert got(KINDS, "+[a*2&b*2]", running=("1: n2 1c 60s",)) == "n1 n2 n3 n4"
    assert got(KINDS, "+[a*2&b*2] 4c", running=("1: n2 1c 60s", "2: n3 1c 60s")) == ""


def test_a_job_waits_for_its_kinds_and_starts_when_they_are_free() -> None:
    sketch = world(KINDS, running=["1: n1,n2 4c 60s"], waiting=["9: +[a*2&b*1] 4c"])
    assert sketch.plan().waits[JobId(9)].expected_start_s == 60.0


def test_kinds_that_the_nodes_cannot_be_all_at_once_are_never_waited_for() -> None:
    sketch = world("1x4+a+b 1x4", waiting=["9: +[a*1&b*1]", "10: 1c"])
    assert sketch.reasons() == {9: "ReqNodeNotAvail"}
    assert "no nodes that are all of that together" in sketch.plan().waits[JobId(9)].detail


def test_tasks_and_kinds_together() -> None:
    assert got("1x2+a 1x8+a 1x2+b", "2 nodes 10 tasks +[a*1&b*1]", ntasks_per_node=None) == "n2 n3"


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ("+[a*4&b*1]", "cannot give job four nodes of a kind of [a*4&b*1]: partition 'main' has 3"),
        ("4 nodes +[a|b]", "cannot give job four nodes of one kind of [a|b]: partition 'main' has at most 3"),
        ("+[a*3&b*3]", "partition 'main' has 5"),
    ],
)
def test_what_never_can_be_is_refused_with_the_number(job: str, why: str) -> None:
    sketch = world(KINDS, waiting=[f"9: {job}"])
    request = request_of(sketch.job(9).spec, sketch.partitions[0])
    said = refusal_of(request, sketch.nodes, sketch.partitions[0])
    assert said is not None
    assert why in said


def test_preferred_nodes_are_taken_if_they_are_free() -> None:
    assert got(KINDS, "1 nodes", prefer="b") == "n3"
    assert got(KINDS, "1 nodes 4c", prefer="b", running=("1: n3,n4,n5 1c 60s",)) == "n1"


# ----- switches


RACKS = "3x4@s1 2x4@s2 4x4@s3"  # n1-n3, n4 n5, n6-n9


def test_a_gang_lies_on_the_fewest_switches_and_on_the_tightest_of_them() -> None:
    assert got(RACKS, "2 nodes") == "n4 n5"
    assert got(RACKS, "3 nodes") == "n1 n2 n3"
    assert got(RACKS, "4 nodes") == "n6 n7 n8 n9"
    assert got(RACKS, "5 nodes") == "n4 n5 n6 n7 n8"
    assert got(RACKS, "7 nodes") == "n1 n2 n3 n6 n7 n8 n9"


def test_more_nodes_are_worth_more_than_few_switches() -> None:
    assert got("2x4@s1 3x4@s2", "2-4 nodes") == "n1 n2 n3 n4"


def test_tasks_lie_close_on_as_many_nodes_as_they_need() -> None:
    assert got("1x4@s1 2x4@s2 1x4@s1", "8 tasks", running=("1: n2 1c 60s",)) == "n1 n4"


def test_a_job_that_wants_few_switches_waits_for_them_for_its_time() -> None:
    sketch = world(RACKS, running=["1: n6 4c 600s"], waiting=["9: 4 nodes"])
    sketch.change(9, switches=1, eligible_at_s=0.0, switches_wait_s=100)
    assert on(sketch) == ""
    assert sketch.plan().waits[JobId(9)].expected_start_s == 600.0
    sketch.now_s = 100.0
    assert on(sketch) == "n4 n5 n7 n8"


def test_a_job_without_a_time_of_its_own_waits_for_switches_as_the_policy_says() -> None:
    sketch = world(RACKS, waiting=["9: 5 nodes"], max_switch_wait_s=30.0)
    sketch.change(9, switches=1, eligible_at_s=0.0)
    assert on(sketch) == ""
    assert "ReqNodeNotAvail" not in sketch.reasons().values()  # with time it will do with two
    sketch.now_s = 30.0
    assert on(sketch) == "n4 n5 n6 n7 n8"


# ----- capability


def test_a_synchronous_job_gets_nodes_of_like_speed_the_fastest_that_do() -> None:
    nodes = "1x4~1.0 2x4~2.0 1x4~1.05 1x4~1.9 1x4"
    assert got(nodes, "2 nodes") == "n1 n2"
    assert got(nodes, "2 nodes", hints=("synchronous",)) == "n2 n3"
    assert got(nodes, "3 nodes", hints=("synchronous",)) == "n2 n3 n5"
    assert got(nodes, "2 nodes 4c", hints=("synchronous",), running=("1: n3,n5 1c 60s",)) == "n1 n4"
    assert got(nodes, "6 nodes", hints=("synchronous",)) == "n1 n2 n3 n4 n5 n6"  # rather unlike than not at all


def test_a_job_bound_by_communication_avoids_slow_links() -> None:
    sketch = world("3x4", waiting=["9: 2 nodes"]).change(9, hints=("comm_bound",))
    for name, link_mbps in (("n1", 100), ("n2", 1000), ("n3", 10_000)):
        node = next(node for node in sketch.nodes if node.name == name)
        sketch.change_node(name, spec=replace(node.spec, link_mbps=link_mbps))
    assert on(sketch) == "n2 n3"
    assert on(sketch.change(9, hints=())) == "n1 n2"


def test_links_that_were_measured_a_little_differently_are_alike() -> None:
    sketch = world("3x4", waiting=["9: 2 nodes"]).change(9, hints=("comm_bound",))
    for name, link_mbps, weight in (("n1", 1000, 1), ("n2", 941, 1), ("n3", 1003, 5)):
        node = next(node for node in sketch.nodes if node.name == name)
        sketch.change_node(name, spec=replace(node.spec, link_mbps=link_mbps, weight=weight))
    assert on(sketch) == "n1 n2"


def test_floors_of_a_node_count_whatever_is_free() -> None:
    assert got("1x2 1x8", "1c", mincpus=4, running=("1: n2 6c 60s",)) == "n2"
    sketch = world("2x4", waiting=["9: 1c"]).change(9, tmp_mib=100)
    assert on(sketch) == "n1"  # its size is not known
    for name, tmp_mib in (("n1", 99), ("n2", 100)):
        node = next(node for node in sketch.nodes if node.name == name)
        sketch.change_node(name, spec=replace(node.spec, tmp_mib=tmp_mib))
    assert on(sketch) == "n2"


def test_who_waits_for_nodes_that_are_free_but_do_not_go_together_is_told_so() -> None:
    def detail(job: str, **changes: object) -> str:
        sketch = world("2x4+a@s1 2x4+b@s2", ["1: n4 4c 60s"], [f"2: {job} 60s"]).change(2, **changes)
        return sketch.plan().waits[2].detail.partition("; ")[2]

    assert detail("3 nodes 1c", switches=1) == "3 are free, but not on 1 switch"
    assert detail("3 nodes 9 tasks", switches=1) == "there is room for 12, but not on 1 switch"
    assert detail("2 nodes 1c +[b*2]") == "3 are free, but not as [b*2] asks for"
    assert detail("4 nodes 1c", switches=2) == "3 are free"


def test_contiguous_nodes_follow_each_other() -> None:
    taken = ("1: n2 4c 60s", "2: n5 3c 60s")
    assert got("7x4", "3 nodes 2c", taken, contiguous=True) == ""  # n1, n3 n4, n6 n7
    assert got("7x4", "2 nodes 2c", taken, contiguous=True) == "n3 n4"
    assert got("7x4", "1-3 nodes 2c", taken, contiguous=True) == "n3 n4"
    assert got("7x4", "3 nodes 1c", taken, contiguous=True) == "n3 n4 n5"
    assert got("7x4", "9 tasks 1c", taken, contiguous=True) == "n3 n4 n5"  # the fewest that do
    assert got("7x4", "5 tasks 1c", taken, contiguous=True, nodes_given=True, nodes_min=1, nodes_max=2) == "n3 n4"
    assert got("7x4", "2 nodes 2c", taken, contiguous=True, nodelist=("n7",)) == "n6 n7"
    sketch = world("7x4", running=list(taken), waiting=["9: 3 nodes 2c"]).change(9, contiguous=True)
    assert sketch.plan().waits[JobId(9)].detail.endswith("5 are free, but not next to each other")
    assert sketch.plan().waits[JobId(9)].expected_start_s == 60.0


def test_a_spread_job_gets_as_many_nodes_as_it_may_have() -> None:
    def parts(job: str, **changes: object) -> list[tuple[str, int]]:
        sketch = world("3x4", waiting=[f"9: {job}"]).change(9, spread=True, **changes)
        return [(share.node, share.tasks) for start in sketch.plan().starts for share in start.shares]

    assert got("3x4", "2 tasks 1c") == "n1"
    assert parts("2 tasks 1c") == [("n1", 1), ("n2", 1)]
    assert parts("7 tasks 1c") == [("n1", 3), ("n2", 2), ("n3", 2)]
    assert parts("7 tasks 1c", nodes_given=True, nodes_min=1, nodes_max=2) == [("n1", 4), ("n2", 3)]
    assert parts("2 tasks 1c", contiguous=True) == [("n1", 1), ("n2", 1)]
    assert got("3x4", "4 tasks 2c", ("1: n2 3c 60s",), spread=True) == "n1 n3"


# ----- measured links, where no switches are configured


def linked(nodes: str, classes: dict[str, int], job: str, usual: int = 1, **changes: object) -> str:
    """Return where job 9 starts; `classes` has the links that are not `usual`: {"n1-n2": 3}."""
    sketch = world(nodes, waiting=[f"9: {job}"]).change(9, **changes)
    for node in sketch.nodes:
        levels: dict[int, int] = {}
        for at, other in enumerate(sketch.nodes):
            pair = "-".join(sorted((node.name, other.name)))
            if other.name != node.name and (level := classes.get(pair, usual)):
                levels[level] = levels.get(level, 0) | 1 << at
        steps = tuple(
            (least, sum(bits for level, bits in levels.items() if level >= least))
            for least in sorted(levels, reverse=True)
        )
        own = 1 << [other.name for other in sketch.nodes].index(node.name)
        sketch.change_node(node.name, measured=MeasuredNode(near=steps, link_bit=own))
    return on(sketch)


def test_the_set_with_the_best_slowest_link_is_taken() -> None:
    assert linked("4x4", {}, "2 nodes 4c") == "n1 n2"
    assert linked("4x4", {"n2-n4": 3}, "2 nodes 4c") == "n2 n4"
    assert linked("4x4", {"n1-n2": 3, "n1-n4": 2, "n2-n4": 2}, "3 nodes 4c") == "n1 n2 n4"
    assert linked("4x4", {"n1-n2": 0, "n1-n3": 0}, "3 nodes 4c") == "n2 n3 n4"


def test_links_do_not_keep_a_job_from_starting() -> None:
    assert linked("3x4", {"n1-n2": 0, "n1-n3": 0}, "3 nodes 4c") == "n1 n2 n3"
    assert linked("2x4", {"n1-n2": 0}, "2 nodes 4c") == "n1 n2"
    assert linked("4x4", {"n2-n4": 3}, "2 nodes 4c n1") == "n1 n2"


def _plainly_linked(seats: list[Seat], required: frozenset[int], count: int, choice: _Choice) -> list[Seat] | None:
    """Return what `_linked` has to return, by intersections of all that the chosen seats reach."""
    able = [seat for seat in seats if seat.view.near]
    if len(able) < count:
        return None
    if required:
        able.sort(key=lambda seat: seat.node not in required)
    for least in sorted({level for seat in able for level, _ in seat.view.near}, reverse=True):
        for first in able[: 1 if required else MOST_FIRST]:
            some, reached = [first], _reached(first, least)
            for seat in able:
                if seat.view.link_bit & reached and len(some) < 2 * count:
                    some.append(seat)
                    reached &= _reached(seat, least)
            chosen = choice(some) if len(some) >= count else None
            if chosen is not None:
                return chosen
    return None


@given(data=st.data(), size=st.integers(2, 24), count=st.integers(2, 8))
def test_gangs_are_those_of_a_plain_search_over_measured_links(data: st.DataObject, size: int, count: int) -> None:
    pairs = list(itertools.combinations(range(size), 2))
    classes = data.draw(st.lists(st.sampled_from([0, 1, 2, 2, 5]), min_size=len(pairs), max_size=len(pairs)))
    order = data.draw(st.permutations(range(size)))
    refused = data.draw(st.frozensets(st.integers(0, size - 1), max_size=3))
    required = data.draw(st.frozensets(st.integers(0, size - 1), max_size=2))
    level_of = dict(zip(pairs, classes, strict=True))
    reached: list[dict[int, int]] = [{} for _ in range(size)]
    for (one, other), level in level_of.items():
        if level:
            reached[one][other] = reached[other][one] = level
    near = [
        tuple(
            (least, sum(1 << peer for peer, level in peers.items() if level >= least))
            for least in sorted(set(peers.values()), reverse=True)
        )
        for peers in reached
    ]
    seats = [
        Seat(
            (at,),
            node,
            1,
            0,
            NodeView(name=NodeName(f"n{node}"), cpus=4, mem_mib=100, near=near[node], link_bit=1 << node),
        )
        for at, node in enumerate(order)
    ]

    def choice(some: Sequence[Seat]) -> list[Seat] | None:
        able = [seat for seat in some if seat.node not in refused]
        return able[:count] if len(able) >= count else None

    assert _linked(seats, required, count, choice) == _plainly_linked(seats, required, count, choice)


def test_configured_switches_count_instead_of_links() -> None:
    assert linked("2x4@a 2x4@b", {"n1-n3": 3}, "2 nodes 4c") == "n1 n2"


def test_an_odd_node_is_named_by_the_job_and_its_best_peer_is_found() -> None:
    assert linked("4x4", {"n1-n2": 3, "n3-n4": 2}, "2 nodes 4c n3") == "n3 n4"


def test_synchronous_jobs_with_gpus_get_gpus_of_similar_measured_rates() -> None:
    sketch = world("4x4/1xa100~1.0", waiting=["9: 2 nodes 1g"]).change(9, hints=("synchronous",))
    assert on(sketch) == "n1 n2"
    for name, rate in (("n1", 50.0), ("n2", 90.0), ("n3", 60.0), ("n4", 88.0)):
        sketch.change_node(name, measured=MeasuredNode(gemm_gflops=rate))
    assert on(sketch) == "n2 n4"


def test_a_measured_speed_counts_instead_of_that_of_the_file() -> None:
    sketch = world("4x4~1.0", waiting=["9: 2 nodes"]).change(9, hints=("synchronous",))
    for name, speed in (("n1", 0.5), ("n3", 0.6)):
        sketch.change_node(name, measured=MeasuredNode(cpu_speed=speed))
    assert on(sketch) == "n2 n4"


def test_features_of_an_assessment_are_required_or_preferred() -> None:
    sketch = world("3x4", waiting=["9: 1 nodes +fast-cpu", "8: 1 nodes 4c"]).change(8, prefer="fast-link&bench.cpu")
    assert on(sketch) == ""
    sketch.change_node("n2", measured=MeasuredNode(features=("bench.cpu", "fast-cpu")))
    sketch.change_node("n3", measured=MeasuredNode(features=("bench.cpu", "fast-link")))
    assert sketch.starts() == {8: "n3:4", 9: "n2:1"}
