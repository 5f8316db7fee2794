"""Licences: counted over the whole cluster, now and in time to come."""

from __future__ import annotations

from dataclasses import replace

from unit.sched.world import World, world

from hpcsched.model.accounting import NO_ACCOUNTING
from hpcsched.model.ids import JobId
from hpcsched.sched.decisions import Plan
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Backfill
from hpcsched.sched.scheduling_pass import FreeLicenses
from hpcsched.sched.snapshot import UsageLedger

ONE, TWO = (("matlab", 1),), (("matlab", 2),)


def planned(sketch: World, total: int, **wanted: tuple[tuple[str, int], ...]) -> Plan:
    snapshot = sketch.snapshot()
    pending = [replace(job, licenses=wanted.get(f"job{job.id}", ())) for job in snapshot.pending]
    running = [replace(job, licenses=wanted.get(f"job{job.id}", ())) for job in snapshot.running]
    ledger = UsageLedger(accounting=replace(NO_ACCOUNTING, licenses=(("matlab", total),)))
    changed = replace(snapshot, pending=tuple(pending), running=tuple(running), ledger=ledger)
    return plan(changed, sketch.policy)


def test_what_is_held_comes_back_in_time() -> None:
    counted = FreeLicenses(0.0, {"a": 3, "b": 1}, [((("a", 2),), 50.0)])
    assert counted.earliest((("a", 1), ("b", 1)), 10.0, 0.0) == 0.0
    assert counted.earliest((("a", 2),), 10.0, 0.0) == 50.0
    counted.take((("b", 1),), 55.0, 70.0)
    assert counted.earliest((("a", 2), ("b", 1)), 10.0, 0.0) == 70.0
    assert counted.earliest((("a", 2), ("b", 1)), 5.0, 0.0) == 50.0
    assert counted.earliest((("c", 1),), 10.0, 0.0) == float("inf")


def test_a_job_waits_for_a_licence_though_nodes_are_free() -> None:
    sketch = world("1x4", running=["1: n1 1c 60s"], waiting=["2: 1c 30s", "3: 1c 30s"])
    made = planned(sketch, 2, job1=ONE, job2=TWO)
    assert [start.job_id for start in made.starts] == [3]
    assert made.waits[JobId(2)].expected_start_s == 60


def test_starts_of_one_plan_count_too() -> None:
    made = planned(world("1x4", waiting=["2: 1c 30s", "3: 1c 30s"]), 1, job2=ONE, job3=ONE)
    assert [start.job_id for start in made.starts] == [2]
    assert made.waits[JobId(3)].expected_start_s == 30


def test_a_backfilled_job_does_not_take_the_licence_that_the_head_will_need() -> None:
    waiting = ["2: 1c 30s", "3: 1c 60s", "4: 1c 61s"]
    sketch = world("1x4", running=["1: n1 1c 60s"], waiting=waiting, backfill=Backfill.EASY)
    made = planned(sketch, 2, job1=ONE, job2=TWO, job3=ONE, job4=ONE)
    assert [start.job_id for start in made.starts] == [3]
