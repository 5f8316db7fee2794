"""Nodes that are set aside for a while: nobody else starts into it, runs into it or is promised a start in it."""

from __future__ import annotations

from dataclasses import replace

from unit.sched.world import World, world

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.reservation import ReservedInterval, closed_to
from hpcsched.sched.decisions import Plan
from hpcsched.sched.plan import plan

INDEX = {NodeName("n1"): 0, NodeName("n2"): 1}
NOON = ReservedInterval(name="noon", nodes=(NodeName("n1"),), start_s=100.0, end_s=200.0)


def planned(sketch: World, *blocks: ReservedInterval, inside: tuple[int, ...] = ()) -> Plan:
    snapshot = sketch.snapshot()
    pending = [replace(job, reservation="noon") if job.id in inside else job for job in snapshot.pending]
    return plan(replace(snapshot, pending=tuple(pending), reserved_intervals=blocks), sketch.policy)


def test_a_reserved_node_is_closed_to_others_during_it_and_to_its_jobs_otherwise() -> None:
    infinite = float("inf")
    assert closed_to("", [NOON], INDEX) == {0: [(100.0, 200.0)]}
    assert closed_to("noon", [NOON], INDEX) == {
        0: [(-infinite, 100.0), (200.0, infinite)],
        1: [(-infinite, infinite)],
    }


def test_a_job_that_would_run_into_a_block_waits_until_it_is_over() -> None:
    made = planned(world("1x4", waiting=["2: 4c 101s", "3: 4c 100s"]), NOON)
    assert [start.job_id for start in made.starts] == [3]
    assert made.waits[JobId(2)].expected_start_s == 200


def test_a_job_takes_another_node_rather_than_wait() -> None:
    made = planned(world("2x4", waiting=["2: 4c 101s", "3: 4c 100s"]), NOON)
    assert {start.job_id: start.shares[0].node for start in made.starts} == {2: "n2", 3: "n1"}


def test_a_job_that_was_let_in_starts_within_the_block_and_ends_in_it() -> None:
    sketch = world("2x4", waiting=["2: 4c 60s", "3: 4c 101s"])
    made = planned(sketch, NOON, inside=(2, 3))
    assert made.starts == ()
    assert made.waits[JobId(2)].expected_start_s == 100
    sketch.now_s = 140.0
    assert [start.job_id for start in planned(sketch, NOON, inside=(2, 3)).starts] == [2]
    assert made.waits[JobId(3)].expected_start_s is None


def test_tasks_are_not_spread_over_a_node_that_is_about_to_be_closed() -> None:
    waiting = ["2: 5 tasks 101s", "3: 5 tasks 60s"]
    made = planned(world("2x4", running=["1: n2 3c 50s"], waiting=waiting), NOON)
    assert made.starts[0].job_id == 3
    assert made.waits[JobId(2)].expected_start_s == 200
