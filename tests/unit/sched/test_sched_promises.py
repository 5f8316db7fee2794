"""Promised starts from plan to plan, and room that is kept in one place for a job that asked for several."""

from __future__ import annotations

from dataclasses import replace

from unit.sched.world import World, spec_of, world

from hpcsched.model.accounting import Accounting, Limits, UserRules
from hpcsched.sched.decisions import Plan
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Backfill
from hpcsched.sched.scheduling_pass import SchedulingPass
from hpcsched.sched.snapshot import UsageLedger


def next_plan(sketch: World, before: Plan, now_s: float, ended: tuple[int, ...] = ()) -> Plan:
    sketch.now_s = now_s
    sketch.jobs = [job for job in sketch.jobs if job.id not in ended]
    return plan(replace(sketch.snapshot(), promises=before.promises), sketch.policy)


def promised(made: Plan) -> dict[int, float]:
    return {job_id: promise.start_s for job_id, promise in made.promises.items()}


def expected(made: Plan) -> dict[int, float | None]:
    return {job_id: wait.expected_start_s for job_id, wait in made.waits.items()}


def full() -> World:
    """Return a node whose halves are free at 100 and at 50; 10 has to wait for both, 11 fits in between."""
    running = ["1: n1 2c 100s", "2: n1 2c 50s"]
    return world("1x4", running=running, waiting=["10: 3c 100s", "11: 2c 50s"], backfill=Backfill.CONSERVATIVE)


def test_a_job_that_moves_up_delays_no_promise_to_another() -> None:
    sketch = full()
    first = sketch.plan()
    assert promised(first) == {10: 100.0, 11: 50.0}
    made = next_plan(sketch, first, 10.0, ended=(1,))
    assert [start.job_id for start in made.starts] == [11]
    assert promised(made) == {10: 100.0}
    made = next_plan(full(), replace(first, promises={}), 10.0, ended=(1,))
    assert promised(made) == {10: 50.0, 11: 150.0}  # what comes of it if promises are made anew


def test_what_is_due_starts_before_a_job_of_higher_priority_that_came_later() -> None:
    sketch = full()
    first = sketch.plan()
    sketch.jobs.append(replace(sketch.job(11), spec_id=12, id=12, nice=-1000))
    made = next_plan(sketch, first, 50.0, ended=(2,))
    assert [start.job_id for start in made.starts] == [11]
    assert promised(made) == {10: 100.0, 12: 200.0}


def test_a_promise_that_is_late_is_remembered_as_it_was_made() -> None:
    sketch = full()
    first = sketch.plan()
    late = next_plan(sketch, first, 50.0)
    assert (expected(late)[11], promised(late)[11]) == (80.0, 50.0)
    assert [start.job_id for start in next_plan(sketch, late, 52.0, ended=(2,)).starts] == [11]


def test_a_job_that_asks_for_something_else_is_promised_anew() -> None:
    sketch = full()
    first = sketch.plan()
    sketch.change(11, time_limit_s=60)
    assert promised(next_plan(sketch, first, 10.0)) == {10: 100.0, 11: 200.0}


def test_a_promise_on_a_node_that_went_away_is_made_anew_elsewhere() -> None:
    sketch = world(
        "2x4", running=["1: n1 4c 50s", "2: n2 4c 80s"], waiting=["10: 4c 30s"], backfill=Backfill.CONSERVATIVE
    )
    first = sketch.plan()
    assert promised(first) == {10: 50.0}
    sketch.change_node("n1", drained=True)
    assert promised(next_plan(sketch, first, 10.0)) == {10: 80.0}


def test_nothing_is_kept_in_a_partition_for_a_job_that_starts_in_another() -> None:
    sketch = world(
        "2x4",
        running=["1: n1 4c 100s p=a"],
        waiting=["10: 4c 500s p=a,b", "11: 4c 50s p=a"],
        partitions={"a": "n1", "b": "n2"},
    )
    made = sketch.plan()
    assert [(start.job_id, start.partition) for start in made.starts] == [(10, "b")]
    assert expected(made) == {11: 100.0}


def test_room_is_kept_in_the_partition_where_a_job_can_start_first() -> None:
    sketch = world(
        "2x4",
        running=["1: n1 4c 100s p=a", "2: n2 4c 30s p=b"],
        waiting=["10: 4c 500s p=a,b", "11: 4c 50s p=a"],
        partitions={"a": "n1", "b": "n2"},
    )
    assert expected(sketch.plan()) == {10: 30.0, 11: 100.0}


def test_who_is_asked_about_again_is_kept_what_was_kept_for_it_for_later() -> None:
    sketch = world("1x4", waiting=["10: 4c 100s"], backfill=Backfill.DEFAULT)
    snapshot = sketch.snapshot()
    current, job = SchedulingPass(snapshot, sketch.policy), snapshot.pending[0]
    assert current.reserve_from(job, 50.0)
    assert current.reserve_from(job, 50.0)
    slot = current.placement.slots.of(job)
    assert slot is not None
    assert slot.start_s == 50.0


def test_a_promise_to_a_job_that_is_over_its_limit_by_now_lapses() -> None:
    sketch = full()
    first = sketch.plan()
    snapshot = replace(sketch.snapshot(), promises=first.promises)
    ledger = UsageLedger(accounting=Accounting(users=(UserRules(name="ann", limits=Limits(max_jobs=2)),)))
    made = plan(replace(snapshot, ledger=ledger), sketch.policy)
    assert (made.promises, str(made.waits[10].reason)) == ({}, "AssocMaxJobsLimit")


def test_who_is_kept_out_by_a_promise_to_another_is_told_so() -> None:
    sketch = world("2x4", ["1: n1 4c 100s"], ["10: 2 nodes 4c 50s"], backfill=Backfill.CONSERVATIVE)
    first = sketch.plan()
    sketch.jobs.append(replace(sketch.job(10), spec_id=11, id=11, nice=-1000, spec=spec_of("4c 500s")))
    made = next_plan(sketch, first, 10.0)
    assert made.waits[11].detail == "needs 1 node with 4 cpus; 1 is free, but promised to job 10"
    sketch.jobs[-1] = replace(sketch.jobs[-1], spec=spec_of("4 tasks 500s"))
    made = next_plan(sketch, first, 10.0)
    assert made.waits[11].detail.endswith("there is room for 4, but promised to job 10")
