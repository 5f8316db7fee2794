"""What a job needs, from what its user wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.sched.world import spec_of

from hpcsched.errors import RequestError
from hpcsched.model.ids import NodeName
from hpcsched.model.node import GpuRequest, Partition
from hpcsched.sched.place.request import Shape, request_of

MAIN = Partition(name="main", nodes=())


def shape(words: str, partition: Partition = MAIN, **changes: object) -> Shape:
    return request_of(replace(spec_of(words), **changes), partition).shape  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "nodes", "ntasks", "per_node"),
    [
        ("", (1, 1), None, (1, 1)),
        ("3 nodes", (3, 3), None, (1, 1)),
        ("2-4 nodes 2 per-node", (2, 4), None, (2, 2)),
        ("2 per-node", (1, 1), None, (2, 2)),
        ("5 tasks", (1, 5), 5, (1, 0)),
        ("5 tasks 2 per-node", (3, 5), 5, (1, 2)),
        ("3 nodes 5 tasks", (3, 3), 5, (1, 0)),
        ("3 nodes 2 tasks", (2, 2), 2, (1, 0)),
        ("1-4 nodes 6 tasks 2 per-node", (3, 4), 6, (1, 2)),
        ("n1,n2", (2, 2), None, (1, 1)),
        ("3 nodes n1,n2", (3, 3), None, (1, 1)),
    ],
)
def test_counts(words: str, nodes: tuple[int, int], ntasks: int | None, per_node: tuple[int, int]) -> None:
    got = shape(words)
    assert (got.nodes_min, got.nodes_max) == nodes
    assert got.ntasks == ntasks
    assert (got.tasks_min, got.tasks_max) == per_node


def test_more_tasks_than_the_nodes_may_run_are_refused() -> None:
    with pytest.raises(RequestError, match=r"cannot give job 5 tasks: --nodes=2 with --ntasks-per-node=2 allows 4"):
        shape("2 nodes 5 tasks 2 per-node")


def test_a_partition_caps_a_range_of_nodes() -> None:
    small = replace(MAIN, max_nodes=3)
    assert shape("2-8 nodes", small).nodes_max == 3
    assert shape("5 nodes", small).nodes_max == 5  # impossible, which is for `feasible` to say


@pytest.mark.parametrize(
    ("asked", "default", "maximum", "limit"),
    [(60, 10, 99, 60), (None, 10, 99, 10), (None, None, 99, 99), (None, 10, None, 10), (None, 200, 99, 99)],
)
def test_time_limits(asked: int | None, default: int | None, maximum: int | None, limit: int | None) -> None:
    partition = replace(MAIN, default_time_s=default, max_time_s=maximum)
    assert request_of(replace(spec_of(""), time_limit_s=asked), partition).time_limit_s == limit


def test_an_updated_limit_replaces_the_one_submitted() -> None:
    assert request_of(spec_of("60s"), MAIN, time_limit_s=5).time_limit_s == 5


def test_memory_of_the_partition_serves_those_who_ask_for_none() -> None:
    partition = replace(MAIN, default_mem_per_cpu_mib=7)
    assert (shape("", partition).mem_per_cpu_mib, shape("", partition).mem_asked) == (7, False)
    assert shape("100M", partition).mem_per_cpu_mib is None
    assert shape("0M", partition).mem_all
    assert shape("", partition, mem_per_cpu_mib=3).mem_per_cpu_mib == 3


def test_gpus_are_summed_by_type_named_ones_first() -> None:
    asked = (GpuRequest(count=1), GpuRequest(count=1, type="B"), GpuRequest(count=2), GpuRequest(count=1, type="a"))
    assert shape("", gpus_per_node=asked).gpus_per_node == (("a", 1), ("b", 1), ("", 3))


def test_a_total_of_gpus_sets_what_else_is_open() -> None:
    eight, two, one = (GpuRequest(count=8),), (GpuRequest(count=2),), (GpuRequest(count=1),)
    by_node = shape("", gpus_total=eight, gpus_per_node=two)
    assert (by_node.nodes_min, by_node.nodes_max, by_node.gpus_total) == (4, 4, ())
    by_task = shape("", gpus_total=eight, gpus_per_task=one)
    assert (by_task.ntasks, by_task.gpus_total) == (8, ())
    alone = shape("", gpus_total=eight)
    assert (alone.nodes_min, alone.nodes_max, alone.gpus_total) == (1, 8, (("", 8),))
    with pytest.raises(RequestError, match="several types"):
        shape("", gpus_total=(GpuRequest(count=1, type="a"), GpuRequest(count=1, type="b")))


def test_lists_of_nodes_lose_their_doubles() -> None:
    twice = (NodeName("n2"), NodeName("n1"), NodeName("n2"))
    got = shape("", nodelist=twice, exclude=twice)
    assert (got.nodelist, got.exclude, got.nodes_min) == (("n2", "n1"), ("n1", "n2"), 2)
