"""Power budgets and cheap hours in the plan: who waits, why, until when, and what that saves."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest
from unit.sched.world import World, world
from zones import zone_fixture

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.node import Circuit
from hpcsched.model.tariff import Tariff, price_of
from hpcsched.sched.decisions import Plan
from hpcsched.sched.energy import cheap_start
from hpcsched.sched.explain import explain, in_words
from hpcsched.sched.plan import plan
from hpcsched.sched.policy import Backfill, Policy
from hpcsched.sched.preempt import full_plan
from hpcsched.sched.priority import breakdown_of, scale_of
from hpcsched.sched.snapshot import Snapshot

NIGHT = Tariff(kwh=price_of({"default": 0.4, "22:00-06:00": 0.2}))
HOUR_S = 3600.0


utc = zone_fixture("UTC")


def powered(sketch: World, *circuits: Circuit, gpu_power: int = 0) -> Snapshot:
    """Nodes take 100 W when they are idle, 40 W more for each of four cpus, and 300 W for each GPU."""
    snapshot = sketch.snapshot()
    nodes = [
        replace(node, idle_watts=100.0, peak_watts=100.0 + 40 * node.cpus, gpu_watts=300.0) for node in snapshot.nodes
    ]
    pending = [replace(job, gpu_power=gpu_power) for job in snapshot.pending]
    return replace(snapshot, nodes=tuple(nodes), circuits=circuits, pending=tuple(pending))


def started(made: Plan) -> list[int]:
    return [int(start.job_id) for start in made.starts]


# ----- power


def test_a_job_waits_for_power_though_nodes_are_free() -> None:
    sketch = world("2x4", running=["1: n1 4c 60s"], waiting=["2: 4c 30s", "3: 2c 30s"])
    made = plan(powered(sketch, Circuit(budget_watts=200 + 240)), sketch.policy)
    assert started(made) == [3]
    wait = made.waits[JobId(2)]
    assert (str(wait.reason), wait.expected_start_s) == ("PowerNotAvail", 60)
    assert wait.detail == "needs 160 W, of which 80 of 240 W for jobs are free now"


def test_the_idle_power_of_all_nodes_is_taken_off_first() -> None:
    sketch = world("2x4", waiting=["2: 1c 30s"])
    assert started(plan(powered(sketch, Circuit(budget_watts=239)), sketch.policy)) == []
    assert started(plan(powered(sketch, Circuit(budget_watts=240)), sketch.policy)) == [2]


def test_a_circuit_counts_only_its_own_nodes() -> None:
    sketch = world("2x4", waiting=["2: n1 4c 30s", "3: n2 4c 30s"])
    circuit = Circuit(name="rack", budget_watts=150, nodes=(NodeName("n1"),))
    made = plan(powered(sketch, circuit), sketch.policy)
    assert started(made) == [3]
    assert made.waits[JobId(2)].detail == "needs 160 W of circuit 'rack', of which 50 of 50 W for jobs are free now"


def test_a_limit_of_its_gpus_lets_a_job_fit_into_the_budget() -> None:
    sketch = world("1x4/2xa100", waiting=["2: 1c 2g 30s"])
    circuit = Circuit(budget_watts=100 + 600)
    assert started(plan(powered(sketch, circuit), sketch.policy)) == []
    assert started(plan(powered(sketch, circuit, gpu_power=250), sketch.policy)) == [2]


def test_with_a_lower_budget_than_what_runs_no_job_starts_until_it_fits() -> None:
    sketch = world("3x4", running=["1: n1 4c 60s", "4: n2 4c 90s"], waiting=["2: 1c 30s"])
    made = plan(powered(sketch, Circuit(budget_watts=300 + 100)), sketch.policy)
    assert started(made) == []
    assert made.waits[JobId(2)].expected_start_s == 90


@pytest.mark.parametrize("backfill", list(Backfill))
def test_a_backfilled_job_leaves_the_head_its_power(backfill: Backfill) -> None:
    waiting = ["2: 2 nodes 4c 30s", "3: 2c 61s", "4: 2c 60s"]
    sketch = world("3x4", running=["1: n1 4c 60s"], waiting=waiting, backfill=backfill)
    made = plan(powered(sketch, Circuit(budget_watts=300 + 350)), sketch.policy)
    assert 3 not in started(made)
    assert made.waits[JobId(2)].expected_start_s in (60, None)


def test_a_suspended_job_resumes_only_with_power() -> None:
    sketch = world("2x4", running=["1: n1 4c 60s", "2: n2 2c 60s"])
    snapshot = powered(sketch, Circuit(budget_watts=200 + 200))
    first, second = snapshot.running
    lent = replace(first, runs=False, shares=tuple(replace(s, cpus=0) for s in first.shares), lent_shares=first.shares)
    assert full_plan(replace(snapshot, running=(lent, second)), sketch.policy).resumes == ()
    wider = replace(snapshot, running=(lent, second), circuits=(Circuit(budget_watts=200 + 240),))
    assert full_plan(wider, sketch.policy).resumes == (1,)


# ----- cheap hours


def evening(sketch: World, by_h: float, *, hour: int = 20, tariff: Tariff = NIGHT) -> Snapshot:
    """The world at 20:00; waiting jobs with numbers from 10 want to end within some hours."""
    now_s = datetime(2026, 11, 27, hour).timestamp()
    moved = replace(sketch, now_s=now_s)
    moved.jobs = [
        replace(job, started_at_s=now_s, allocated_at_s=now_s) if job.started_at_s is not None else job
        for job in sketch.jobs
    ]
    snapshot = moved.snapshot()
    cheap = [replace(job, cheap_by_s=now_s + by_h * HOUR_S) if job.id >= 10 else job for job in snapshot.pending]
    return replace(snapshot, pending=tuple(replace(job, since_s=None) for job in cheap), tariff=tariff)


def test_a_job_waits_for_the_cheap_hours_and_says_what_that_saves() -> None:
    sketch = world("1x4", waiting=["10: 1c 7200s"])
    snapshot = evening(sketch, 12)
    made = plan(snapshot, sketch.policy)
    wait = made.waits[JobId(10)]
    assert (str(wait.reason), wait.expected_start_s) == ("BeginTime", snapshot.now_s + 2 * HOUR_S)
    assert wait.detail == "it starts at 22:00, when energy is cheap, which saves 50% of the price of its energy"


@pytest.mark.parametrize(("by_h", "starts_in_h"), [(12, 2), (4, 2), (3.5, 1.5), (2.0, 0), (1.0, 0)])
def test_a_job_waits_no_longer_than_lets_it_end_in_time(by_h: float, starts_in_h: float) -> None:
    sketch = world("1x4", waiting=["10: 1c 7200s"])
    snapshot = evening(sketch, by_h)
    made = plan(snapshot, sketch.policy)
    if starts_in_h:
        assert made.waits[JobId(10)].expected_start_s == snapshot.now_s + starts_in_h * HOUR_S
    else:
        assert started(made) == [10]


def test_a_job_does_not_wait_for_hours_in_which_running_jobs_hold_its_nodes() -> None:
    sketch = world("1x4", running=["1: n1 3c 36000s"], waiting=["10: 1c 7200s", "11: 4c 7200s"])
    made = plan(evening(sketch, 9), sketch.policy)
    assert str(made.waits[JobId(10)].reason) == "BeginTime"
    assert str(made.waits[JobId(11)].reason) == "Resources"


def test_a_job_that_was_eligible_waits_for_no_price_any_more() -> None:
    sketch = world("1x4", waiting=["10: 1c 28800s"])
    snapshot = evening(sketch, 60, hour=23)
    assert str(plan(snapshot, sketch.policy).waits[JobId(10)].reason) == "BeginTime"  # tomorrow is cheaper
    eligible = replace(snapshot, pending=tuple(replace(job, since_s=snapshot.now_s) for job in snapshot.pending))
    assert started(plan(eligible, sketch.policy)) == [10]


@pytest.mark.parametrize(
    "tariff", [Tariff(), Tariff(kwh=price_of(0.3)), Tariff(kwh=price_of({"default": 0, "1:00-2:00": 1}))]
)
def test_without_cheaper_hours_a_job_starts_at_once(tariff: Tariff) -> None:
    sketch = world("1x4", waiting=["10: 1c 7200s"])
    assert started(plan(evening(sketch, 24, tariff=tariff), sketch.policy)) == [10]


@pytest.mark.parametrize("backfill", list(Backfill))
def test_jobs_behind_a_job_that_waits_for_its_price_start(backfill: Backfill) -> None:
    sketch = world("1x4", waiting=["2: 4c 3600s", "10: 4c 3600s nice=-5"], backfill=backfill)
    assert started(plan(evening(sketch, 12), sketch.policy)) == [2]


@pytest.mark.parametrize("backfill", list(Backfill))
def test_later_jobs_leave_a_job_its_cheap_hours(backfill: Backfill) -> None:
    waiting = ["10: 4c 7200s", "2: 4c 7260s nice=5", "3: 4c 7200s nice=6"]
    made = plan(evening(world("1x4", waiting=waiting, backfill=backfill), 12), Policy(weight_age=0, backfill=backfill))
    assert started(made) == ([] if backfill is Backfill.NONE else [3])
    assert made.waits[JobId(10)].expected_start_s == datetime(2026, 11, 27, 22).timestamp()


@pytest.mark.parametrize("backfill", list(Backfill))
def test_a_job_of_higher_priority_may_take_the_cheap_hours(backfill: Backfill) -> None:
    sketch = world("1x4", waiting=["10: 4c 7200s", "2: 4c 14400s nice=-5"], backfill=backfill)
    assert started(plan(evening(sketch, 12), sketch.policy)) == [2]


def test_behind_a_waiting_job_no_cheap_hours_are_reserved() -> None:
    running, waiting = ["1: n1 4c 3600s"], ["2: n1 4c 3600s nice=-5", "10: n2 4c 7200s", "3: n2 4c 14400s nice=5"]
    sketch = world("2x4", running=running, waiting=waiting, backfill=Backfill.EASY)
    made = plan(evening(sketch, 12), sketch.policy)
    assert started(made) == [3]
    assert str(made.waits[JobId(10)].reason) == "BeginTime"


@pytest.mark.parametrize("backfill", list(Backfill))
def test_when_its_cheap_hours_begin_a_job_starts_before_jobs_that_waited_longer(backfill: Backfill) -> None:
    sketch = world("1x4", waiting=["10: 4c 28800s", "2: 4c 60s nice=5"], backfill=backfill)
    snapshot = evening(sketch, 12, hour=22)
    cheap, other = sorted(snapshot.pending, key=lambda job: -job.id)
    waited = replace(other, since_s=snapshot.now_s - 7 * 86_400)
    assert started(plan(replace(snapshot, pending=(cheap, waited)), sketch.policy)) == [10]


def test_a_job_that_missed_its_cheap_hours_is_not_delayed_by_later_jobs() -> None:
    running = ["1: n1 2c 36000s"]
    sketch = world("1x4", running=running, waiting=["10: 4c 7200s", "2: 2c 36060s nice=5", "3: 2c 36000s nice=5"])
    made = plan(evening(sketch, 9), sketch.policy)
    assert started(made) == [3]
    assert made.waits[JobId(10)].expected_start_s == evening(sketch, 9).now_s + 10 * HOUR_S


def test_a_job_ages_while_it_waits_for_its_price_only() -> None:
    sketch = world("1x4", waiting=["10: 4c 7200s", "11: 4c 7200s"])
    first, second = evening(sketch, 12).pending
    begins_later = replace(second, free_to_go=False)
    snapshot = evening(sketch, 12)
    ages = [
        breakdown_of(job, snapshot.partitions[job.partition], scale_of(snapshot), Policy(weight_age=1000)).age
        for job in (first, begins_later)
    ]
    assert ages == [1000, 0]


def test_some_milliseconds_after_the_cheap_hours_begin_a_job_starts() -> None:
    """It must not wait for the next night because this one has begun."""
    at_s = datetime(2026, 11, 27, 22).timestamp()
    assert cheap_start(NIGHT, 8 * HOUR_S, at_s + 0.003, at_s + 60 * HOUR_S) is None
    found = cheap_start(NIGHT, 8 * HOUR_S, at_s - 1, at_s + 60 * HOUR_S)
    assert found is None or found.start_s == at_s


def test_hwhy_says_what_a_later_start_would_save() -> None:
    sketch = world("1x4", running=["1: n1 4c 3600s"], waiting=["2: 4c 7200s"])
    snapshot = evening(sketch, 0)
    nodes = tuple(replace(node, idle_watts=400.0, peak_watts=2000.0) for node in snapshot.nodes)
    snapshot = replace(snapshot, nodes=nodes)
    found = explain(snapshot, sketch.policy, full_plan(snapshot, sketch.policy), JobId(2))
    assert found is not None
    assert found.cheaper == "Starting at 22:00 would save 0.80 EUR (--cheap-by)."
    assert found.cheaper in in_words(found, snapshot.now_s)
