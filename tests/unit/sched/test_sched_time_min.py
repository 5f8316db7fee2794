"""--time-min: a job whose time limit may be lowered starts where all of it does not fit, with as much as there is."""

from __future__ import annotations

from dataclasses import replace

from unit.sched.test_sched_promises import next_plan
from unit.sched.world import World, world

from hpcsched.model.ids import NodeName
from hpcsched.model.reservation import Reservation
from hpcsched.sched.policy import Backfill
from hpcsched.sched.scheduling_pass import longest

HOUR_S = 3600


def limits(sketch: World) -> dict[int, int | None]:
    return {start.job_id: start.time_limit_s for start in sketch.plan().starts}


def half_free(**policy: object) -> World:
    """Return a node of which half is free, all of it in an hour, when job 2 needs it."""
    running, waiting = ["1: n1 2c 3600s"], ["2: 4c 600s", "3: 2c 7200s"]
    return world("1x4", running=running, waiting=waiting, **policy)


def test_it_starts_ahead_of_its_turn_for_as_long_as_it_delays_nobody() -> None:
    assert limits(half_free()) == {}
    assert limits(half_free().change(3, time_min_s=600)) == {3: HOUR_S}
    assert limits(half_free().change(3, time_min_s=HOUR_S)) == {3: HOUR_S}
    assert limits(half_free().change(3, time_min_s=HOUR_S + 1)) == {}
    assert limits(half_free(backfill=Backfill.NONE).change(3, time_min_s=600)) == {}


def test_what_it_gets_beyond_the_least_is_whole_minutes() -> None:
    assert limits(half_free().change(3, time_min_s=610)) == {3: HOUR_S - 50}


def test_one_that_fits_as_it_is_keeps_its_limit() -> None:
    assert limits(world("1x4", waiting=["1: 2c 7200s"]).change(1, time_min_s=60)) == {1: None}


def test_it_starts_before_a_reservation_begins() -> None:
    sketch = world("1x4", waiting=["1: 4c 7200s"]).change(1, time_min_s=60)
    sketch.reservations = [
        Reservation(name="r", start_s=1800, end_s=9000, nodes=(NodeName("n1"),), users=("ben",), made_by="root")
    ]
    assert limits(sketch) == {1: 1800}
    assert limits(sketch.change(1, time_min_s=1801)) == {}


def test_it_is_promised_its_least_time_alone_and_gets_more_when_it_starts() -> None:
    """Two halves: one is free at 100, the other never is; between them 3 has 1000 s until 2 comes."""
    running = ["1: n1 2c 100s"]
    sketch = world("1x2", running=running, waiting=["2: 2c 7200s"], backfill=Backfill.CONSERVATIVE)
    sketch.change(2, time_min_s=60)
    sketch.reservations = [
        Reservation(name="r", start_s=1000, end_s=9000, nodes=(NodeName("n1"),), users=("ben",), made_by="root")
    ]
    first = sketch.plan()
    assert first.promises[2].start_s == 100.0
    made = next_plan(sketch, first, 100.0, ended=(1,))
    assert [(start.job_id, start.time_limit_s) for start in made.starts] == [(2, 900)]


def test_one_that_is_promised_a_start_starts_earlier_with_more_than_was_kept_for_it() -> None:
    sketch = world("1x2", running=["1: n1 2c 100s"], waiting=["2: 2c 7200s"], backfill=Backfill.CONSERVATIVE)
    first = sketch.change(2, time_min_s=60).plan()
    made = next_plan(sketch, first, 50.0, ended=(1,))
    assert [(start.job_id, start.time_limit_s) for start in made.starts] == [(2, None)]


def test_a_deadline_leaves_less_than_the_limit_and_no_less_than_the_least() -> None:
    sketch = world("1x4", waiting=["1: 4c 7200s"]).change(1, time_min_s=600, deadline_at_s=1200)
    assert limits(sketch) == {1: 1200}
    assert sketch.change(1, deadline_at_s=599).reasons() == {1: "DeadLine"}


def test_with_preemption_what_was_lowered_counts_as_that() -> None:
    sketch = half_free().change(3, time_min_s=600)
    sketch.jobs.append(replace(sketch.job(2), id=4, spec=replace(sketch.job(3).spec, time_min_s=None, cpus_per_task=1)))
    assert [(start.job_id, start.time_limit_s) for start in sketch.full_plan().starts] == [(3, HOUR_S)]


def test_the_latest_end_that_fits_is_found_by_halving() -> None:
    asked: list[float] = []

    def fits(end_s: float) -> str | None:
        asked.append(end_s)
        return f"until {end_s:g}" if end_s <= 6400 else None

    assert longest(fits, 100.0, 100_000.0) == ("until 6400", 6400.0)
    assert len(asked) < 14
    assert longest(fits, 7000.0, 100_000.0) is None
    assert longest(fits, 100.0, 130.0) == ("until 130", 130.0)
