"""The daemon's policy `default`: who is tried first behind the heads, and who is not overtaken any more."""

from __future__ import annotations

from dataclasses import replace

from unit.sched.world import World, world

from hpcsched.sched.behind import old_after_s
from hpcsched.sched.plan import Plan, plan
from hpcsched.sched.policy import Backfill
from hpcsched.sched.predict import Experience

# Four cpus, two of them busy until 1000: job 2 is the head, and for the two that are free others compete.
SKETCH = {"nodes": "1x4", "running": ["1: n1 2c 1000s"]}


def sketch(*waiting: str, **policy: object) -> World:
    return world(**SKETCH, waiting=["2: 4c 600s", *waiting], backfill=Backfill.DEFAULT, **policy)


def planned(made: World, runs_s: dict[int, float] | None = None, longest_wait_s: float = 0.0) -> Plan:
    experience = Experience(longest_runs_s=runs_s or {}, longest_wait_s=longest_wait_s)
    return plan(replace(made.snapshot(), experience=experience), made.policy)


def started(made: World, runs_s: dict[int, float] | None = None, longest_wait_s: float = 0.0) -> list[int]:
    return [start.job_id for start in planned(made, runs_s, longest_wait_s).starts]


def two_users(now_s: float = 100.0) -> World:
    """Job 3 of ann and job 4 of bob, alike and as old: there is room for one."""
    made = sketch("3: 2c 800s", "4: 2c 800s")
    made.change(3, uid=1, eligible_at_s=0.0).change(4, uid=2, eligible_at_s=0.0)
    made.now_s = now_s
    return made


def test_whose_jobs_are_short_comes_first_behind_the_head() -> None:
    assert started(two_users()) == [3]  # nobody is known: in the order of the line
    assert started(two_users(), {1: 700.0, 2: 60.0}) == [4]
    assert started(two_users(), {1: 60.0, 2: 700.0}) == [3]


def test_of_jobs_that_have_only_just_come_the_shortest_is_first() -> None:
    assert started(two_users(now_s=0.0), {1: 700.0, 2: 60.0}) == [4]


def test_what_runs_proves_a_prediction_wrong() -> None:
    made = two_users(now_s=300.0).change(1, uid=2, time_limit_s=2000)  # bob's job 1 runs for 300 s by now
    assert started(made, {1: 200.0, 2: 60.0}) == [3]


def test_whoever_waits_moves_up() -> None:
    made = two_users(now_s=3000.0).change(1, time_limit_s=6000).change(4, eligible_at_s=2990.0)
    assert started(made, {1: 700.0, 2: 300.0}) == [3]  # it has waited four times as long as it takes to run


def test_nobody_overtakes_the_old_and_they_are_promised_a_start() -> None:
    made = two_users(now_s=5000.0).change(1, time_limit_s=6000).change(4, eligible_at_s=4000.0)
    short = {1: 700.0, 2: 10.0}
    assert started(made, short, longest_wait_s=20_000.0) == [4]  # nobody is old before 10000 s
    assert started(made, short, longest_wait_s=9_000.0) == [3]


def test_an_old_one_that_does_not_fit_keeps_its_room() -> None:
    # Of six cpus two are free until 2000; the head takes all then, until 2600. Job 3, which needs three and would
    # follow, is in the way of job 4 only if it is old and so has a promise.
    made = world(
        nodes="2x4",
        running=["1: n1 4c 2000s", "9: n2 2c 500s"],
        waiting=["2: 2 nodes 4c 600s", "3: 3c 1400s", "4: 2c 1900s"],
        backfill=Backfill.DEFAULT,
    )
    made.change(3, eligible_at_s=-4000.0).change(4, eligible_at_s=-10.0)
    assert started(made, longest_wait_s=100_000.0) == [4]
    assert started(made) == []
    assert planned(made).waits[3].expected_start_s == 500.0


def test_the_young_are_promised_nothing() -> None:
    made = sketch("3: 3c 100s", "4: 3c 100s", estimate_depth=0)
    made.change(3, eligible_at_s=0.0)
    waits = planned(made).waits
    assert waits[2].expected_start_s == 1000.0
    assert waits[3].expected_start_s is None


def test_a_higher_tier_comes_first_however_short_others_are() -> None:
    made = sketch("3: 2c 800s p=low", "4: 2c 800s", partitions={"main": "n1", "low": "n1"})
    made.partitions[0] = replace(made.partitions[0], priority_tier=5)
    made.change(3, uid=1).change(4, uid=2).change(2, partition="main,low")
    assert started(made, {1: 1.0, 2: 800.0}) == [4]


def test_nobody_is_overtaken_for_longer_than_age_max() -> None:
    made = sketch(age_max_s=7200.0)
    at = lambda longest_s: old_after_s(  # noqa: E731
        replace(made.snapshot(), experience=Experience(longest_wait_s=longest_s)), made.policy
    )
    assert [at(0.0), at(10_000.0), at(1e9)] == [3600.0, 5000.0, 7200.0]
