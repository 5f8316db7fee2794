"""Plans with reservations: nothing starts or runs into one, and its own jobs start there and end before it does."""

from __future__ import annotations

from typing import Any

from unit.sched.world import World, world

from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.reservation import Flag, Reservation
from hpcsched.model.spec import Dependency, DependencyKind

DAY = 86_400


def reserved(sketch: World, nodes: str, start_s: int, end_s: int, *flags: Flag, name: str = "r") -> World:
    """Reserve nodes of the sketch."""
    names = tuple(NodeName(node) for node in nodes.split(","))
    one = Reservation(name=name, start_s=start_s, end_s=end_s, nodes=names, users=("ann",), flags=flags)
    sketch.reservations = [*sketch.reservations, one]
    return sketch


def inside(sketch: World, *job_ids: int, name: str = "r") -> World:
    """Have jobs run in a reservation."""
    for job_id in job_ids:
        sketch.change(job_id, reservation=name)
    return sketch


def wait(sketch: World, job_id: int) -> Any:
    return sketch.plan().waits[JobId(job_id)]


def test_a_job_does_not_run_into_a_reservation() -> None:
    def job(limit: str) -> World:
        return reserved(world("1x4", waiting=[f"1: 4c {limit}"]), "n1", 600, 1200)

    assert job("600s").starts() == {1: "n1:4"}
    assert job("601s").starts() == {}
    late = wait(job("601s"), 1)
    assert (str(late.reason), late.expected_start_s) == ("Reservation", 1200.0)
    assert late.detail == "n1 is reserved in 10:00, for 10:00 (r)"


def test_a_job_goes_where_nothing_is_reserved() -> None:
    assert reserved(world("2x4", waiting=["1: 4c 900s"]), "n1", 600, 1200).starts() == {1: "n2:4"}


def test_a_reservation_that_goes_on_keeps_its_nodes() -> None:
    sketch = reserved(world("2x4", waiting=["1: 2 nodes 4c 60s"]), "n2", -100, 500)
    found = wait(sketch, 1)
    assert (str(found.reason), found.expected_start_s) == ("Reservation", 500.0)
    assert found.detail == "n2 is reserved now, for 8:20 (r)"


def test_maintenance_is_called_so() -> None:
    sketch = reserved(world("1x4", waiting=["1: 4c 900s"]), "n1", 600, 1200, Flag.MAINT)
    found = wait(sketch, 1)
    assert str(found.reason) == "ReqNodeNotAvail"
    assert found.detail == "n1 is reserved for maintenance in 10:00, for 10:00 (r)"


def test_a_job_that_waits_for_others_as_well_waits_for_resources() -> None:
    sketch = reserved(world("1x4", running=["9: n1 4c 100s"], waiting=["1: 4c 300s"]), "n1", 600, 1200)
    assert (str(wait(sketch, 1).reason), wait(sketch, 1).expected_start_s) == ("Resources", 100.0)
    longer = reserved(world("1x4", running=["9: n1 4c 100s"], waiting=["1: 4c 501s"]), "n1", 600, 1200)
    assert wait(longer, 1).expected_start_s == 1200.0


def test_a_job_without_a_limit_runs_into_every_reservation() -> None:
    assert reserved(world("1x4", waiting=["1: 4c"]), "n1", 30 * DAY, 31 * DAY).starts() == {}


def test_what_repeats_is_run_into_every_day() -> None:
    def job(limit_s: int) -> World:
        return reserved(world("1x4", waiting=[f"1: 4c {limit_s}s"]), "n1", 600, 1200, Flag.DAILY)

    assert job(601).starts() == {}
    assert wait(job(DAY - 600), 1).expected_start_s == 1200.0
    assert wait(job(DAY - 599), 1).expected_start_s is None
    assert job(300 * DAY).starts() == {}


def test_backfill_behind_a_head_stays_clear_of_reservations() -> None:
    waiting = ["1: 2 nodes 4c 60s", "2: 4c 500s", "3: 4c 601s"]
    sketch = reserved(world("3x4", running=["9: n1,n2 4c 300s"], waiting=waiting), "n3", 600, 1200)
    assert sketch.starts() == {2: "n3:4"}


def test_a_job_of_the_reservation_starts_there_and_only_there() -> None:
    sketch = reserved(world("2x4", waiting=["1: 4c 60s", "2: 4c 60s"]), "n2", -10, 600)
    assert inside(sketch, 1, 2).starts() == {1: "n2:4"}
    assert wait(sketch, 2).expected_start_s == 60.0
    assert inside(reserved(world("2x4", waiting=["1: 2 nodes 4c 60s"]), "n2", -10, 600), 1).reasons() == {
        1: "ReqNodeNotAvail"
    }


def test_a_job_in_a_reservation_starts_with_any_limit_and_ends_with_the_reservation() -> None:
    def job(limit: str) -> World:
        return inside(reserved(world("1x4", waiting=[f"1: 4c {limit}", "2: 4c 60s"]), "n1", -10, 600), 1)

    assert job("600s").starts() == job("601s").starts() == job("").starts() == {1: "n1:4"}
    assert wait(job(""), 2).expected_start_s == 600.0
    reserved(last := job("601s"), "n1", 600, 700, name="next")
    assert last.starts() == {1: "n1:4"}


def test_a_job_that_gets_its_nodes_late_is_promised_what_is_left_of_the_reservation() -> None:
    waiting = ["1: 3c 400s", "2: 4c 400s", "3: 1c 500s", "4: 1c 400s"]
    sketch = reserved(world("1x4", waiting=waiting), "n1", -10, 600)
    assert inside(sketch, 1, 2, 3, 4).starts() == {1: "n1:3", 4: "n1:1"}
    assert wait(sketch, 2).expected_start_s == 400.0


def test_a_job_that_waits_for_a_reservations_end_delays_no_promise_in_it() -> None:
    waiting = ["1: 4c 400s", "2: 4c 300s", "3: 4c 400s"]
    sketch = inside(reserved(world("1x4", running=["9: n1 4c 100s"], waiting=waiting), "n1", -10, 600), 2, 3)
    assert [wait(sketch, job_id).expected_start_s for job_id in (1, 2)] == [600.0, 100.0]
    late = inside(reserved(world("1x4", running=["9: n1 4c 500s"], waiting=waiting), "n1", -10, 600), 2)
    assert [wait(late, job_id).expected_start_s for job_id in (1, 2)] == [600.0, 500.0]


def test_a_job_that_could_begin_only_after_its_reservation_gets_no_promise() -> None:
    sketch = reserved(world("1x4", waiting=["1: 4c 700s", "2: 4c 400s"]), "n1", -10, 600)
    assert inside(sketch, 1, 2).starts() == {1: "n1:4"}
    assert wait(sketch, 2).expected_start_s is None


def test_a_job_waits_for_its_reservation_to_begin_and_again_for_its_next_day() -> None:
    before = inside(reserved(world("1x4", waiting=["1: 4c 60s"]), "n1", 600, 1200), 1)
    assert before.starts() == {}
    assert (str(wait(before, 1).reason), wait(before, 1).expected_start_s) == ("Reservation", 600)
    assert wait(before, 1).detail == "its reservation 'r' begins in 10:00"
    daily = inside(reserved(world("1x4", waiting=["1: 4c 60s"]), "n1", -600, -30, Flag.DAILY), 1)
    assert wait(daily, 1).expected_start_s == DAY - 600


def test_a_job_whose_reservation_is_gone_waits_for_somebody_to_decide() -> None:
    sketch = inside(world("1x4", waiting=["1: 4c 60s"]), 1)
    assert sketch.reasons() == {1: "ReservationDeleted"}
    assert inside(reserved(world("1x4", waiting=["1: 4c 60s"]), "n1", -60, -1), 1).reasons() == {
        1: "ReservationDeleted"
    }


def test_jobs_outside_and_inside_share_no_cpu() -> None:
    waiting = ["1: 2c 60s", "2: 2c 60s", "3: 2c 60s"]
    sketch = inside(reserved(world("2x4", waiting=waiting), "n1", 0, 600), 2)
    assert sketch.starts() == {2: "n1:2", 1: "n2:2", 3: "n2:2"}
    before = inside(reserved(world("1x4", running=["9: n1 3c 90s"], waiting=["1: 2c 60s"]), "n1", 0, 600), 1)
    assert wait(before, 1).expected_start_s == 90.0


def test_a_node_in_two_reservations_is_open_to_both_only_if_one_overrides() -> None:
    def both(*flags: Flag) -> World:
        sketch = reserved(world("2x4", waiting=["1: 4c 300s"]), "n1", -10, 600, *flags)
        return inside(reserved(sketch, "n1", 200, 400, Flag.MAINT, name="m"), 1)

    assert both().starts() == {}
    assert wait(both(), 1).expected_start_s is None
    assert str(wait(both(), 1).reason) == "ReqNodeNotAvail"
    assert both(Flag.OVERLAP).starts() == {1: "n1:4"}


def test_holds_and_dependencies_count_in_reservations_too() -> None:
    sketch = inside(reserved(world("1x4", waiting=["1: 1c 60s", "2: 1c 60s", "3: 1c 60s"]), "n1", 0, 600), 1, 2, 3)
    sketch.change(1, priority_set=0)
    sketch.change(2, dependency=(Dependency(kind=DependencyKind.AFTER_OK, job_ids=(3,)),))
    assert sketch.starts() == {3: "n1:1"}
    assert sketch.reasons() == {1: "JobHeldUser", 2: "Dependency"}


def test_a_singleton_waits_for_one_of_its_name_in_a_reservation() -> None:
    sketch = reserved(world("2x4", waiting=["1: 1c 60s", "2: 1c 60s"]), "n1", 100, 600)
    inside(sketch, 1).change(2, dependency=(Dependency(kind=DependencyKind.SINGLETON),))
    assert sketch.reasons() == {1: "Reservation", 2: "Dependency"}


def test_an_array_limit_holds_for_what_starts_in_the_same_plan() -> None:
    sketch = inside(reserved(world("1x4", waiting=["1: 1c 60s", "2: 1c 60s"]), "n1", 0, 600), 1)
    for job_id in (1, 2):
        sketch.change(job_id, array_job_id=JobId(1), array_task_id=job_id, array_limit_set=1)
    assert sketch.starts() == {1: "n1:1"}
    assert sketch.reasons() == {2: "JobArrayTaskLimit"}
