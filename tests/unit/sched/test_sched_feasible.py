"""What can never run is refused with the numbers; what could on an empty, able machine is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.sched.world import refusal_of, spec_of, world

from hpcsched.model.ids import NodeName
from hpcsched.model.node import GpuRequest, Link
from hpcsched.model.units import UNLIMITED_S
from hpcsched.sched.place import feasible
from hpcsched.sched.place.request import request_of

NODES = "3x4/8000 1x8/16000/2xa100+big"


def refusal(words: str, partition: dict[str, object] | None = None, **changes: object) -> str | None:
    sketch = world(NODES)
    main = replace(sketch.partitions[0], **(partition or {}))  # type: ignore[arg-type]
    return refusal_of(request_of(replace(spec_of(words), **changes), main), sketch.nodes, main)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("9 nodes", "nine nodes: partition 'main' has 4"),
        ("20 nodes", "20 nodes: partition 'main' has 4"),
        ("64c", "one node with 64 cpus: no node of partition 'main' has more than 8"),
        ("3 nodes 8c", "three nodes with 8 cpus each: partition 'main' has 1"),
        ("20000M", "one node with 20000M memory: no node of partition 'main' has more than 16000M"),
        ("2 nodes 9000M", "two nodes with 9000M memory each: partition 'main' has 1"),
        ("1g:h100", "one node with 1 h100 GPU: no node of partition 'main' has any h100 GPU"),
        ("3g", "one node with 3 GPUs: no node of partition 'main' has more than 2"),
        ("2 nodes 1g", "two nodes with 1 GPU each: partition 'main' has 1"),
        ("+big&fast", "one node with feature big&fast: no node of partition 'main' has it; there are: big"),
        ("2 nodes +big", "two nodes with feature big: partition 'main' has 1"),
        ("n9", "node n9: partition 'main' does not have it"),
        ("n1 +big", "node n1: it lacks feature big"),
        ("n1,n2 1 nodes", "one node: its node list names 2"),
        ("100 tasks", "100 tasks of 1 cpu: partition 'main' has room for 20"),
        ("8 tasks 1 node 2c", "8 tasks of 2 cpus on 1 node: partition 'main' has room for 4 on 1 node"),
        ("n1 8c", "1 node with 8 cpus, namely n1: n1 has not so much"),
        ("9c +big", "one node with 9 cpus: no node with feature big of partition 'main' has more than 8"),
    ],
)
def test_refusals_have_the_numbers(words: str, said: str) -> None:
    assert refusal(words) == f"cannot give job {said}"


def test_refusals_by_the_partitions_limits() -> None:
    day = {"max_time_s": 86400, "max_nodes": 2}
    assert refusal("90000s", day) == "cannot give job time limit 1-01:00:00: partition 'main' allows 1-00:00:00"
    assert refusal("86400s", day) is None
    assert refusal("", day) is None  # its limit is then the partition's
    assert refusal(f"{UNLIMITED_S}s", day) == "cannot give job time limit UNLIMITED: partition 'main' allows 1-00:00:00"
    assert refusal("3 nodes", day) == "cannot give job three nodes: partition 'main' allows 2 to one job"


def test_refusals_of_exclusions_totals_and_combinations() -> None:
    four = tuple(NodeName(f"n{at}") for at in (1, 2, 3))
    excluded = "cannot give job two nodes: partition 'main' has 4, and the request excludes 3 of them"
    assert refusal("2 nodes", exclude=four) == excluded
    assert refusal("n1", exclude=four) == "cannot give job node n1: the request also excludes it"
    three = refusal("", gpus_total=(GpuRequest(count=3),))
    assert three == "cannot give job 3 GPUs: partition 'main' has at most 2 on 3 nodes"
    per_cpu = refusal("4c", mem_per_cpu_mib=3000, exclude=(NodeName("n4"),))
    more = "no node not excluded of partition 'main' has more than 8000M"
    assert per_cpu == f"cannot give job one node with 12000M memory: {more}"
    apart = refusal("8c 9000M 2 nodes +big|x")
    assert apart == "cannot give job two nodes with feature big|x: partition 'main' has 1"
    tasks = refusal("9 tasks +big")
    assert (
        tasks
        == "cannot give job 9 tasks of 1 cpu, feature big: partition 'main' has room for 8 in nodes with feature big"
    )


@pytest.mark.parametrize(
    "words", ["4 nodes 4c", "8c 2g", "20 tasks", "0M", "n1,n4", "4 nodes exclusive", "+big 8c", "2-9 nodes"]
)
def test_what_can_run_is_not_refused(words: str) -> None:
    assert refusal(words) is None


def test_nodes_that_are_down_or_drained_count_as_able() -> None:
    sketch = world("2x4").change_node("n1", link=Link.DOWN).change_node("n2", drained=True)
    main = sketch.partitions[0]
    assert refusal_of(request_of(spec_of("2 nodes 4c"), main), sketch.nodes, main) is None


@given(
    sizes=st.lists(st.sampled_from((1, 2, 4, 8)), min_size=1, max_size=9),
    tasks=st.integers(1, 30),
    nodes=st.integers(1, 4),
    named=st.booleans(),
)
def test_a_look_at_some_nodes_refuses_what_a_look_at_all_refuses(
    sizes: list[int], tasks: int, nodes: int, named: bool
) -> None:
    sketch = world(" ".join(f"1x{size}" for size in sizes))
    spec = spec_of(f"{min(nodes, tasks)} nodes {tasks} tasks")
    spec = replace(spec, nodelist=(sketch.nodes[-1].name,) if named else ())
    main = sketch.partitions[0]
    found = []
    for some in ((), (1, 3)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(feasible, "SOME_NODES", some)
            found.append(refusal_of(request_of(spec, main), sketch.nodes, main))
    assert found[0] == found[1]
