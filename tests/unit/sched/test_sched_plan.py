"""Which jobs start, in which order they are looked at, and what the others are told."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from unit.sched.world import world

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Hold, JobState, Reason
from hpcsched.model.node import Link, Partition, PartitionState, Share
from hpcsched.model.spec import ArraySpec, Dependency, DependencyKind
from hpcsched.sched.decisions import Start


def test_a_job_that_fits_starts() -> None:
    plan = world("3x4", waiting=["1: 2 nodes 4c 60s"]).plan()
    shares = tuple(Share(node=NodeName(name), cpus=4, mem_mib=1000) for name in ("n1", "n2"))
    assert plan.starts == (Start(job_id=JobId(1), shares=shares, partition="main"),)
    assert plan.waits == {}


def test_a_gang_gets_all_of_its_nodes_or_none() -> None:
    small = world("3x4", running=["1: n2 1c 60s"], waiting=["2: 3 nodes 4c 60s"])
    assert small.starts() == {}
    wait = small.plan().waits[JobId(2)]
    assert wait.reason is Reason.RESOURCES
    assert wait.detail == "needs 3 nodes with 4 cpus each; 2 are free"
    assert wait.expected_start_s == 60


def test_first_come_first_served_among_equals() -> None:
    queue = world("1x4", waiting=["7: 4c 60s", "3: 4c 60s"]).change(3, submitted_at_s=5.0)
    assert queue.starts() == {7: "n1:4"}
    assert queue.change(3, submitted_at_s=-1.0).starts() == {3: "n1:4"}  # by id when submitted at once


def test_nice_makes_way_and_a_fixed_priority_wins() -> None:
    queue = world("1x4", waiting=["1: 4c nice=10 60s", "2: 4c 60s", "3: 4c nice=2000000 60s"])
    assert queue.starts() == {2: "n1:4"}
    assert queue.change(3, priority_set=2**31).starts() == {3: "n1:4"}


def test_a_partition_of_a_higher_tier_goes_first() -> None:
    nodes = (NodeName("n1"),)
    low, high = Partition(name="low", nodes=nodes, default=True), Partition(name="high", nodes=nodes, priority_tier=2)
    queue = world("1x4", waiting=["1: 4c p=low 60s", "2: 4c p=high nice=999999 60s"], partitions=[low, high])
    assert queue.starts() == {2: "n1:4"}


def test_jobs_stay_in_their_partition() -> None:
    apart = world("2x4", waiting=["1: 4c p=b 60s", "2: 4c p=b 60s", "3: 4c 60s"], partitions={"a": "n1", "b": "n2"})
    assert apart.starts() == {1: "n2:4", 3: "n1:4"}
    assert apart.reasons() == {2: "Resources"}


def test_each_partition_has_its_own_head() -> None:
    busy = ["1: n1 4c 60s", "2: n2 4c 90s"]
    waiting = ["3: 4c 10s", "4: 4c p=b 10s", "5: 4c 10s", "6: 4c p=b 10s"]
    apart = world("2x4", running=busy, waiting=waiting, partitions={"a": "n1", "b": "n2"})
    assert apart.reasons() == {3: "Resources", 4: "Resources", 5: "Priority", 6: "Priority"}
    waits = apart.plan().waits
    assert [waits[JobId(job)].expected_start_s for job in (3, 4, 5, 6)] == [60, 90, 70, 100]
    assert waits[JobId(5)].detail == "behind job 3 in partition 'a'"


def test_a_partition_that_is_down_or_gone_starts_nothing() -> None:
    closed = world("1x4", waiting=["1: 1c 60s", "2: 1c p=gone 60s"])
    closed.partitions = [replace(closed.partitions[0], state=PartitionState.DOWN)]
    assert closed.starts() == {}
    assert {job: str(wait.reason) for job, wait in closed.plan().waits.items()} == {
        1: "PartitionDown",
        2: "PartitionDown",
    }
    assert "'gone' is not in the configuration" in closed.plan().waits[JobId(2)].detail


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"link": Link.DOWN, "link_why": "no answer"}, "n3 is down (no answer)"),
        ({"link": Link.UNKNOWN}, "n3 has not been heard of yet"),
        ({"drained": True, "drained_why": "disk full"}, "n3 is drained (disk full)"),
    ],
)
def test_a_node_that_is_away_is_not_used_and_named(change: dict[str, object], words: str) -> None:
    away = world("3x4", waiting=["1: 3 nodes 1c 60s", "2: 2 nodes 4c 60s"]).change_node("n3", **change)
    assert away.starts() == {2: "n1:4 n2:4"}  # the first keeps nobody waiting meanwhile
    wait = away.plan().waits[JobId(1)]
    assert wait.reason is Reason.NODES_UNAVAILABLE
    assert wait.detail == f"needs 3 nodes with 1 cpu each; of the 3 nodes of partition 'main' {words}"


def test_what_waits_for_an_absent_node_does_not_hide_behind_the_head() -> None:
    away = world("2x4", running=["1: n1 4c 60s"], waiting=["2: 4c 60s", "3: n2 1c 60s"])
    away.change_node("n2", drained=True)
    assert away.reasons() == {2: "Resources", 3: "ReqNodeNotAvail"}


def test_a_node_that_comes_back_is_used() -> None:
    away = world("1x4", waiting=["1: 1c 60s"]).change_node("n1", link=Link.DOWN)
    assert away.starts() == {}
    assert away.change_node("n1", link=Link.UP).starts() == {1: "n1:1"}


def test_held_jobs_wait_and_say_by_whom() -> None:
    held = world("1x4", waiting=["1: 1c 60s", "2: 1c 60s", "3: 1c 60s"])
    held.change(1, hold=Hold.USER).change(2, hold=Hold.ADMIN).change(3, priority_set=0)
    assert held.starts() == {}
    assert held.reasons() == {1: "JobHeldUser", 2: "JobHeldAdmin", 3: "JobHeldUser"}


def test_a_job_waits_for_its_begin_time() -> None:
    later = world("1x4", waiting=["1: 1c 60s"]).change(1, not_before_s=100.0)
    wait = later.plan().waits[JobId(1)]
    assert (wait.reason, wait.expected_start_s) == (Reason.BEGIN_TIME, 100)
    later.now_s = 100.0
    assert later.starts() == {1: "n1:1"}


def test_an_array_runs_no_more_tasks_than_its_limit() -> None:
    tasks = world("1x8", running=["10: n1 1c 60s"], waiting=[f"{job}: 1c 60s" for job in (11, 12, 13)])
    for index, job in enumerate((10, 11, 12, 13)):
        tasks.change(job, array_job_id=JobId(10), array_task_id=index, array=ArraySpec(indices=(0, 1, 2, 3), limit=2))
    assert tasks.starts() == {11: "n1:1"}
    assert tasks.reasons() == {12: "JobArrayTaskLimit", 13: "JobArrayTaskLimit"}


def test_a_task_over_its_arrays_limit_keeps_nobody_waiting() -> None:
    tasks = world("1x2", running=["10: n1 1c 60s"], waiting=["11: 1c 60s", "12: 1c 60s"])
    tasks.change(11, array_job_id=JobId(10), array_task_id=1, array=ArraySpec(indices=(0, 1), limit=1))
    tasks.change(10, array_job_id=JobId(10), array_task_id=0)
    assert tasks.starts() == {12: "n1:1"}


def test_a_job_of_two_partitions_starts_in_the_one_that_has_room() -> None:
    two = {"a": "n1", "b": "n2"}
    assert world("2x4", waiting=["1: 4c 60s p=a,b"], partitions=two).plan().starts[0].partition == "a"
    busy = world("2x4", running=["9: n1 4c 500s"], waiting=["1: 4c 60s p=a,b"], partitions=two)
    (start,) = busy.plan().starts
    assert (start.partition, start.shares[0].node) == ("b", "n2")


def test_a_job_of_two_partitions_is_expected_where_it_can_start_first_and_waits_once() -> None:
    two = {"a": "n1", "b": "n2"}
    full = world("2x4", ["8: n1 4c 500s", "9: n2 4c 100s"], ["1: 4c 60s p=a,b", "2: 4c 60s p=b"], two)
    made = full.plan()
    assert made.starts == ()
    assert made.waits[JobId(1)].expected_start_s == 100.0
    assert made.waits[JobId(2)].reason == "Priority"


def test_a_job_of_two_partitions_of_which_one_is_down_waits_for_the_other() -> None:
    parts = [
        Partition(name="a", nodes=("n1",), state=PartitionState.DOWN),
        Partition(name="b", nodes=("n2",), default=True),
    ]
    assert world("2x4", waiting=["1: 4c 60s p=a,b"], partitions=parts).starts() == {1: "n2:4"}
    full = world("2x4", ["9: n2 4c 100s"], ["1: 4c 60s p=a,b"], parts)
    assert full.plan().waits[JobId(1)].expected_start_s == 100.0
    closed = [replace(part, state=PartitionState.DOWN) for part in parts]
    assert world("2x4", waiting=["1: 4c 60s p=a,b"], partitions=closed).reasons() == {1: "PartitionDown"}


def test_a_job_whose_dependency_is_not_met_keeps_nobody_waiting() -> None:
    chain = world("1x4", running=["1: n1 1c 60s"], waiting=["2: 4c 60s", "3: 3c 600s"])
    chain.change(2, dependency=(Dependency(kind=DependencyKind.AFTER_OK, job_ids=(1,)),))
    assert chain.starts() == {3: "n1:3"}
    assert chain.reasons() == {2: "Dependency"}


def test_a_job_that_is_being_ended_still_holds_its_nodes() -> None:
    ending = world("1x4", running=["1: n1 4c 600s"], waiting=["2: 4c 60s"]).change(1, state=JobState.COMPLETING)
    assert ending.starts() == {}
    assert ending.plan().waits[JobId(2)].expected_start_s == ending.policy.overdue_s


def test_a_job_of_which_only_some_nodes_are_done_holds_the_others() -> None:
    ending = world("2x4", running=["1: n1,n2 4c 600s"], waiting=["2: 4c 60s"])
    ending.change(1, state=JobState.COMPLETING, held_nodes=(NodeName("n2"),))
    assert ending.starts() == {2: "n1:4"}


def test_every_waiting_job_is_in_the_plan_once() -> None:
    mixed = world(
        "2x4",
        running=["1: n1 2c 60s"],
        waiting=[f"{job}: {1 + job % 3} nodes {job % 5 + 1}c 60s" for job in range(2, 40)],
    )
    mixed.change(7, hold=Hold.USER)
    plan = mixed.plan()
    assert sorted([start.job_id for start in plan.starts] + list(plan.waits)) == list(range(2, 40))


def test_an_empty_world_gives_an_empty_plan() -> None:
    assert world("1x4").plan().starts == ()
    nothing = world("1x4", waiting=["1: 1c 60s"], partitions=[Partition(name="main", nodes=(), default=True)])
    assert nothing.reasons() == {1: "ReqNodeNotAvail"}


def test_e1_a_pass_leaves_no_garbage_in_circles() -> None:
    """Each pass has the views of all jobs: they would stay in memory until a collection of old objects."""
    queue = world(
        "3x4",
        running=["1: n2 1c 60s"],
        waiting=["2: 3 nodes 4c 60s", "3: 1c 30s", "4: 2 nodes 4c 600s", "5: 1c 900s"],
    )
    queue.plan()
    gc.collect()
    gc.disable()
    try:
        queue.plan()
        assert gc.collect() == 0
    finally:
        gc.enable()
