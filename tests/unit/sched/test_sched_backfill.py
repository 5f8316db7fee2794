"""EASY backfill: what may start behind a job that waits, and what would delay it."""

from __future__ import annotations

import pytest
from unit.sched.world import world

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import Reason
from hpcsched.model.node import Partition, Share
from hpcsched.model.units import UNLIMITED_S
from hpcsched.sched.policy import Backfill

RUNNING = ["1: n1 4c 3600s"]  # until 11 o'clock, say
BIG = "2: 3 nodes 4c 600s"


def test_a_small_job_that_ends_before_the_big_one_can_start_does_start() -> None:
    plan = world("3x4", running=RUNNING, waiting=[BIG, "3: 4c 3600s"])
    assert plan.starts() == {3: "n2:4"}
    assert plan.plan().waits[JobId(2)].expected_start_s == 3600


def test_one_second_more_would_delay_the_big_one() -> None:
    plan = world("3x4", running=RUNNING, waiting=[BIG, "3: 4c 3601s"])
    assert plan.starts() == {}
    assert plan.reasons() == {2: "Resources", 3: "Priority"}


def test_what_the_head_does_not_need_may_be_taken_for_long() -> None:
    waiting = ["2: 4 nodes 4c 600s", "3: 4c 99999s", "4: 4c 99999s"]
    plan = world("5x4", running=["1: n1,n2 4c 3600s"], waiting=waiting)
    assert plan.starts() == {3: "n5:4"}  # five nodes at 3600, four for the head: one is extra


def test_the_head_is_promised_nodes_that_are_busy_now() -> None:
    plan = world("3x4", running=["1: n1 4c 60s", "5: n2 4c 60s"], waiting=["2: 2 nodes 4c 600s", "3: 4c 99999s"])
    assert plan.starts() == {3: "n3:4"}


def test_without_backfill_nothing_starts_behind_the_head() -> None:
    plan = world("3x4", running=RUNNING, waiting=[BIG, "3: 1c 60s"], backfill=Backfill.NONE)
    assert plan.starts() == {}
    assert plan.reasons() == {2: "Resources", 3: "Priority"}


def test_without_backfill_partitions_that_share_no_node_go_on() -> None:
    parts = {"a": "n1,n2", "b": "n2", "c": "n3"}
    waiting = ["2: 2 nodes 4c p=a 60s", "3: 1c p=b 60s", "4: 1c p=c 60s"]
    plan = world("3x4", running=RUNNING, waiting=waiting, partitions=parts, backfill=Backfill.NONE)
    assert plan.starts() == {4: "n3:1"}


def test_a_backfilled_job_of_another_partition_does_not_delay_the_head_either() -> None:
    parts = {"a": "n1,n2", "b": "n2"}
    short, long = "3: 4c p=b 3600s", "3: 4c p=b 3601s"
    assert world("2x4", RUNNING, ["2: 2 nodes 4c 60s", short], parts).starts() == {3: "n2:4"}
    assert world("2x4", RUNNING, ["2: 2 nodes 4c 60s", long], parts).starts() == {}


def test_of_two_heads_on_the_same_nodes_the_second_comes_after_the_first() -> None:
    both = (NodeName("n1"), NodeName("n2"))
    parts = [Partition(name="a", nodes=both, default=True, priority_tier=2), Partition(name="b", nodes=both)]
    plan = world("2x4", RUNNING, ["2: 2 nodes 4c 60s", "3: 2 nodes 4c p=b 60s"], parts).plan()
    assert [plan.waits[JobId(job)].expected_start_s for job in (2, 3)] == [3600, 3660]


def test_memory_and_gpus_are_kept_for_the_head_too() -> None:
    busy = ["1: n1 1c 600M 1g 60s"]
    assert world("1x8/1000/2xa", busy, ["2: 1c 900M 60s", "3: 1c 100M 999s"]).starts() == {3: "n1:1"}
    assert world("1x8/1000/2xa", busy, ["2: 1c 900M 60s", "3: 1c 101M 999s"]).starts() == {}
    assert world("1x8/1000/2xa", busy, ["2: 1c 2g 1M 60s", "3: 1c 1g 1M 61s"]).starts() == {}
    assert world("1x8/1000/2xa", busy, ["2: 1c 2g 1M 60s", "3: 1c 1g 1M 60s"]).starts() == {3: "n1:1"}


def test_unlimited_jobs_do_not_starve_the_head_by_turns() -> None:
    for limit in ("", f" {UNLIMITED_S}s"):
        plan = world("2x4", running=["1: n1 4c"], waiting=["2: 2 nodes 4c 60s", f"3: 4c{limit}"])
        plan.now_s = 10.0
        assert plan.starts() == {}
        assert plan.plan().waits[JobId(2)].expected_start_s is None  # nobody knows


def test_a_job_past_its_limit_is_about_to_end() -> None:
    late = world("2x4", running=["1: n1 4c 60s"], waiting=["2: 2 nodes 4c 60s", "3: 4c 30s", "4: 4c 31s"])
    late.now_s = 100.0
    assert late.plan().waits[JobId(2)].expected_start_s == 130
    assert late.starts() == {3: "n2:4"}


def test_jobs_behind_get_an_estimate_as_far_as_the_policy_says() -> None:
    waiting = [f"{job}: 4c 60s" for job in range(2, 9)]
    waits = world("1x4", running=["1: n1 4c 60s"], waiting=waiting, estimate_depth=3).plan().waits
    assert [waits[JobId(job)].expected_start_s for job in range(2, 9)] == [60, 120, 180, 240, None, None, None]


@pytest.mark.parametrize(("depth", "started"), [(0, True), (6, True), (5, False)])
def test_backfill_looks_only_as_deep_as_the_policy_says(depth: int, started: bool) -> None:
    too_big = [f"{job}: 1c 60{job}M 60s" for job in range(3, 8)]  # five shapes that do not fit
    queue = world("1x4", ["1: n1 1c 500M 60s"], ["2: 4c 60s", *too_big, "9: 1c 1M 60s"], backfill_depth=depth)
    assert (queue.starts() == {9: "n1:1"}) is started


def test_a_shape_that_failed_for_its_length_still_fits_when_shorter() -> None:
    queue = world("3x4", running=RUNNING, waiting=[BIG, "3: 4c 9999s", "4: 4c 60s", "5: 4c 9999s", "6: 4c 3600s"])
    assert queue.starts() == {4: "n2:4", 6: "n3:4"}
    assert {wait.reason for job, wait in queue.plan().waits.items() if job != 2} == {Reason.PRIORITY}


def test_two_heads_promised_the_same_second_are_both_kept() -> None:
    running = ["1: n1 3c 60s", "2: n2,n3 6c 60s"]
    waiting = ["3: 4c p=a 100s", "4: 1c p=a 999s", "5: 8c p=b 100s", "6: 1c p=a 999s", "7: 1c p=a 999s"]
    plan = world("1x4 2x8", running, waiting, {"a": "n1,n2,n3", "b": "n1,n2,n3"})
    assert [plan.plan().waits[JobId(job)].expected_start_s for job in (3, 5)] == [60, 60]
    assert plan.starts() == {4: "n2:1", 6: "n2:1"}  # n3 is kept for job 5


@pytest.mark.parametrize("limit_s", [0, UNLIMITED_S])
def test_a_job_without_end_takes_what_it_gets(limit_s: int) -> None:
    sketch = world("1x4", waiting=["1: 3c", "2: 3c"]).change(1, time_limit_s=limit_s).change(2, time_limit_s=limit_s)
    assert sketch.starts() == {1: "n1:3"}


@pytest.mark.parametrize("job", ["3: 2g 1c 100s", "3: 2g 1 tasks 100s"])
def test_a_job_does_not_change_its_gpus_while_it_runs(job: str) -> None:
    """Two GPUs of type a are free until 60, then two of type b: never the same two for long enough before 60."""
    sketch = world(
        "1x8/1000/2xa/2xb",
        running=["1: n1 5c 10M 60s"],
        waiting=["2: 2g:a 4c 10M 100s", f"{job} 10M"],
        backfill=Backfill.CONSERVATIVE,
    ).change(1, shares=(Share(node=NodeName("n1"), cpus=5, mem_mib=10, gpus=(2, 3)),))
    assert sketch.starts() == {}
    assert sketch.plan().waits[JobId(3)].expected_start_s == 60
