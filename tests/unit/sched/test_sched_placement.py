"""Which nodes and which parts of them a job gets."""

from __future__ import annotations

from itertools import product

import pytest
from unit.sched.world import world

from hpcsched.model.ids import JobId
from hpcsched.model.node import GpuRequest, NodeSpec, Share
from hpcsched.sched.place.gpus import GpuSlot, gpus_taken, has_gpus


def shares(nodes: str, job: str, running: tuple[str, ...] = (), **changes: object) -> list[Share]:
    """Return what job 9 gets; empty if it waits."""
    sketch = world(nodes, running=running, waiting=[f"9: {job}"]).change(9, **changes)
    starts = sketch.plan().starts
    return list(starts[0].shares) if starts else []


def on(nodes: str, job: str, running: tuple[str, ...] = (), **changes: object) -> str:
    return " ".join(f"{share.node}:{share.cpus}/{share.tasks}" for share in shares(nodes, job, running, **changes))


def test_one_task_each_then_filled_in_order() -> None:
    assert on("3x4", "3 nodes 5 tasks") == "n1:3/3 n2:1/1 n3:1/1"
    assert on("3x4", "3 nodes 9 tasks") == "n1:4/4 n2:4/4 n3:1/1"


def test_tasks_without_a_node_count_take_the_fewest_nodes() -> None:
    assert on("3x4", "4 tasks") == "n1:4/4"
    assert on("3x4", "5 tasks") == "n1:4/4 n2:1/1"
    assert on("3x4", "13 tasks") == ""


def test_more_nodes_than_tasks_are_not_taken() -> None:
    assert on("3x4", "3 nodes 2 tasks") == "n1:1/1 n2:1/1"


def test_tasks_per_node() -> None:
    assert on("3x4", "2 nodes 2 per-node 2c") == "n1:4/2 n2:4/2"
    assert on("3x4", "4 tasks 2 per-node") == "n1:2/2 n2:2/2"  # beside --ntasks a maximum
    assert on("3x4", "2 nodes 3 per-node 2c") == ""


def test_a_range_of_nodes_is_filled_when_it_helps() -> None:
    assert on("3x4", "1-2 nodes") == "n1:1/1 n2:1/1"
    assert on("3x4", "2-8 nodes") == "n1:1/1 n2:1/1 n3:1/1"
    assert on("3x4", "1-3 nodes 4 tasks") == "n1:4/4"  # four tasks need no second node
    assert on("3x4", "2-3 nodes 4c", running=("1: n1 1c 60s",)) == "n2:4/1 n3:4/1"


def test_the_tightest_node_is_taken() -> None:
    assert on("3x4", "2c", running=("1: n2 2c 60s", "2: n3 1c 60s")) == "n2:2/1"
    assert on("1x8 1x4 1x2", "2c") == "n3:2/1"


def test_the_tightest_node_that_finishes_a_gang_is_taken() -> None:
    assert on("1x8 1x4 1x2", "10 tasks") == "n1:8/8 n3:2/2"


def test_nodes_with_gpus_are_left_to_those_who_need_them() -> None:
    assert on("1x4/1000/2xa 1x8", "1c") == "n2:1/1"


def test_a_node_of_lower_weight_goes_first() -> None:
    heavy = world("2x4", waiting=["1: 1c 60s"])
    spec = heavy.nodes[0].spec
    heavy.change_node("n1", spec=NodeSpec(name=spec.name, host="h", host_key="k", cpus=4, mem_mib=1000, weight=5))
    assert heavy.starts() == {1: "n2:1"}


def test_the_node_list_is_had_whole_and_filled_up() -> None:
    assert on("4x4", "n3") == "n3:1/1"
    assert on("4x4", "n3,n2") == "n2:1/1 n3:1/1"
    assert on("4x4", "3 nodes n4") == "n1:1/1 n2:1/1 n4:1/1"
    assert on("4x4", "n3 4c", running=("1: n3 1c 60s",)) == ""
    assert on("4x4", "6 tasks n3") == "n1:4/4 n3:2/2"


def test_a_missing_listed_node_is_named() -> None:
    sketch = world("4x4", running=["1: n3 1c 60s"], waiting=["9: n3,n2 4c 60s"])
    assert sketch.plan().waits[JobId(9)].detail.endswith("; n3 is not free")


def test_excluded_nodes_are_not_taken() -> None:
    assert on("3x4", "2 nodes", exclude=("n1",)) == "n2:1/1 n3:1/1"
    assert on("3x4", "3 nodes", exclude=("n1",)) == ""


def test_features() -> None:
    assert on("2x4+a 2x4+a+b", "+a&b") == "n3:1/1"
    assert on("2x4+a 2x4+a+b", "3 nodes +b") == ""
    assert on("1x4 1x4+a 1x4+b", "2 nodes +a|b") == "n2:1/1 n3:1/1"


def test_exclusive_takes_whole_empty_nodes() -> None:
    assert on("2x4", "1c exclusive", running=("1: n1 1c 60s",)) == "n2:4/1"
    assert shares("1x4/1000/2xa", "1c exclusive")[0] == Share(node="n1", cpus=4, mem_mib=1000, gpus=(0, 1), tasks=1)
    assert on("1x4", "1c exclusive", running=("1: n1 1c 60s",)) == ""


def test_nothing_starts_beside_an_exclusive_job() -> None:
    sketch = world("1x4", waiting=["1: 1c exclusive 60s", "2: 1c 60s"])
    assert sketch.starts() == {1: "n1:4"}


@pytest.mark.parametrize(
    ("job", "changes", "mem_mib"),
    [
        ("1c", {}, 250),  # an even part of the node's
        ("2c", {}, 500),
        ("1c 300M", {}, 300),
        ("1c 0M", {}, 1000),
        ("2c", {"mem_per_cpu_mib": 70}, 140),
        ("4 tasks", {"mem_per_cpu_mib": 70}, 280),
        ("4 tasks 300M", {}, 300),  # per node, however many tasks
        ("1c exclusive", {}, 1000),
        ("1c 300M exclusive", {}, 300),
    ],
)
def test_memory(job: str, changes: dict[str, object], mem_mib: int) -> None:
    assert [share.mem_mib for share in shares("1x4", job, **changes)] == [mem_mib]


def test_memory_is_shared_out_once() -> None:
    assert on("1x4", "1c 600M", running=("1: n1 1c 500M 60s",)) == ""
    assert on("1x4", "1c 500M", running=("1: n1 1c 500M 60s",)) == "n1:1/1"
    assert on("1x4", "1c 0M", running=("1: n1 1c 1M 60s",)) == ""


def test_memory_per_cpu_limits_the_tasks_of_a_node() -> None:
    assert on("2x4", "4 tasks", mem_per_cpu_mib=400) == "n1:2/2 n2:2/2"


def test_gpus_by_type_and_index() -> None:
    mixed = "1x8/1000/2xa/2xb"
    assert [share.gpus for share in shares(mixed, "2g:b")] == [(2, 3)]
    assert [share.gpus for share in shares(mixed, "1g", running=("1: n1 1c 1g 60s",))] == [
        (1,)
    ]  # from the type with fewest left
    assert [share.gpus for share in shares(mixed, "3g")] == [(0, 1, 2)]
    assert shares(mixed, "3g:a") == []
    assert shares(mixed, "1g:c") == []


def test_gpus_per_task_limit_the_tasks_of_a_node() -> None:
    one_each = (GpuRequest(count=1),)
    got = shares("2x8/1000/2xa", "3 tasks", gpus_per_task=one_each)
    assert [(share.node, share.tasks, share.gpus) for share in got] == [("n1", 2, (0, 1)), ("n2", 1, (0,))]


def test_a_total_of_gpus_takes_the_fewest_nodes_and_spreads_evenly() -> None:
    def total(count: int, job: str = "1c") -> list[tuple[str, tuple[int, ...]]]:
        got = shares("3x8/1000/4xa", job, gpus_total=(GpuRequest(count=count),))
        return [(share.node, share.gpus) for share in got]

    assert total(4) == [("n1", (0, 1, 2, 3))]
    assert total(6) == [("n1", (0, 1, 2)), ("n2", (0, 1, 2))]
    assert total(6, "3 nodes") == [("n1", (0, 1)), ("n2", (0, 1)), ("n3", (0, 1))]
    assert total(13) == []


def test_no_gpu_is_given_twice() -> None:
    sketch = world("1x8/1000/4xa", waiting=[f"{job}: 1c 1g 60s" for job in range(1, 7)])
    given = [gpu for start in sketch.plan().starts for gpu in start.shares[0].gpus]
    assert given == [0, 1, 2, 3]


def test_gpus_of_no_named_type_come_from_one_type_if_they_can() -> None:
    pools = (GpuSlot("a"), GpuSlot("b"))
    assert gpus_taken((("", 2),), pools, (4, 2)) == (0, 2)
    assert gpus_taken((("", 5),), pools, (4, 2)) == (4, 1)
    assert gpus_taken((("b", 1), ("", 5)), pools, (4, 2)) == (4, 2)
    assert gpus_taken((("b", 1), ("", 6)), pools, (4, 2)) is None


def parts(nodes: str, *jobs: str) -> list[str]:
    """Return what the jobs get that are all submitted at once: node, GPUs, shards of how many."""
    starts = world(nodes, waiting=jobs).plan().starts
    return [
        f"{start.job_id}@{share.node} {','.join(map(str, share.gpus))} {share.shards}/{share.shards_of}"
        for start in starts
        for share in start.shares
    ]


def test_several_jobs_share_a_gpu_by_shards() -> None:
    got = parts("1x8/2xa100%4", "1: 2shards", "2: 2shards", "3: 3shards", "4: 2shards")
    assert got == ["1@n1 0 2/4", "2@n1 0 2/4", "3@n1 1 3/4"]  # the fourth finds one shard left of a GPU


def test_shards_are_taken_of_the_gpu_that_has_fewest_left_and_enough() -> None:
    assert parts("1x8/2xa100%4", "1: 2shards", "2: 3shards", "3: 1shards") == ["1@n1 0 2/4", "2@n1 1 3/4", "3@n1 1 1/4"]


def test_a_whole_gpu_is_one_that_nobody_shares() -> None:
    assert parts("1x8/2xa100%4", "1: 1shards", "2: 1g", "3: 1g") == ["1@n1 0 1/4", "2@n1 1 0/0"]
    assert parts("1x8/2xa100%4", "1: 1shards", "2: 2g") == ["1@n1 0 1/4"]


def test_all_shards_of_a_gpu_are_the_gpu() -> None:
    assert parts("1x8/2xa100%4", "1: 4shards", "2: 1shards") == ["1@n1 0 0/0", "2@n1 1 1/4"]


def test_gpus_that_are_not_cut_up_have_no_shards() -> None:
    sketch = world("1x8/2xa100", waiting=["1: 1shards"])
    assert sketch.plan().starts == ()
    assert "no node of partition 'main' has shared GPUs" in sketch.plan().waits[JobId(1)].detail


def test_shards_that_a_job_holds_stay_its_own_when_the_gpu_is_cut_up_otherwise() -> None:
    sketch = world("1x8/1xa100%8", waiting=["1: 1g", "2: 5shards", "3: 4shards"])
    held = Share(node=sketch.nodes[0].name, cpus=1, mem_mib=0, gpus=(0,), shards=2, shards_of=4)
    sketch.jobs += world("1x8", running=["9: n1 1c"]).jobs
    sketch.change(9, shares=(held,))
    assert [start.job_id for start in sketch.plan().starts] == [3]


def test_gpus_are_there_whenever_they_can_be_taken() -> None:
    slots = (GpuSlot("x"), GpuSlot("y"), GpuSlot("x", 4, 2))
    asks = [((kind, count),) for kind in ("x", "y", "") for count in (1, 2, 3, 4)] + [(("x", 2), ("", 1))]
    for free in product(range(3), range(2), range(5)):
        for asked in asks:
            assert has_gpus(asked, slots, free) == (gpus_taken(asked, slots, free) is not None)
