"""What becomes of a queue: small worlds that go on by themselves."""

from __future__ import annotations

from dataclasses import replace

from unit.sched.world import World, world

from hpcsched.model.ids import NodeName
from hpcsched.model.job import Hold, Reason
from hpcsched.model.reservation import Reservation
from hpcsched.model.spec import Dependency, DependencyKind
from hpcsched.sched.experience import Experience
from hpcsched.sched.snapshot import NodeView, Snapshot
from hpcsched.sim.forecast import Forecast, forecast, with_nodes, without_nodes


def queue() -> World:
    """One node of four cpus: job 1 has two until 100, job 2 wants all, 3 and 4 a half each."""
    return world(nodes="1x4", running=["1: n1 2c 100s"], waiting=["2: 4c 600s", "3: 2c 100s", "4: 2c 300s"])


def after(made: World, snapshot: Snapshot | None = None, *, predict: bool = False) -> Forecast:
    return forecast(snapshot if snapshot is not None else made.snapshot(), made.policy, predict=predict)


def test_jobs_start_as_the_plans_say_one_after_the_other() -> None:
    found = after(queue())
    assert found.starts_s == {3: 0.0, 2: 100.0, 4: 700.0}
    assert (found.empty_at_s, found.ended_at_s, found.left) == (700.0, 1000.0, {})
    assert found.utilization == 1.0
    assert sorted(found.waits_s) == [0.0, 100.0, 700.0]


def test_with_more_nodes_they_start_earlier_and_without_one_never() -> None:
    made = queue()
    more = with_nodes(made.snapshot(), [NodeView(name=NodeName("new1"), cpus=4, mem_mib=1000)])
    assert after(made, more).starts_s == {2: 0.0, 3: 0.0, 4: 100.0}
    none = after(made, without_nodes(made.snapshot(), {NodeName("n1")}))
    assert none.starts_s == {}
    assert {wait.reason for wait in none.left.values()} == {Reason.NODES_UNAVAILABLE}


def test_what_runs_on_nodes_that_are_removed_does_not_count_as_use_of_the_others() -> None:
    made = world(nodes="2x4", running=["1: n1 4c 900s", "2: n2 4c 100s"], waiting=["3: 2c 100s", "4: 4c 100s"])
    found = after(made, without_nodes(made.snapshot(), {NodeName("n1")}))
    assert (found.starts_s, found.utilization) == ({3: 100.0, 4: 200.0}, 0.75)


def test_jobs_may_last_as_long_as_their_users_last_ones() -> None:
    made = queue()
    snapshot = replace(made.snapshot(), experience=Experience(longest_runs_s={1000: 20.0}))
    assert after(made, snapshot, predict=True).starts_s == {3: 0.0, 2: 20.0, 4: 40.0}
    assert after(made, snapshot).starts_s == {3: 0.0, 2: 100.0, 4: 700.0}


def test_dependencies_begin_times_and_holds_are_followed() -> None:
    made = queue()
    made.change(2, dependency=(Dependency(kind=DependencyKind.AFTER_OK, job_ids=(4,)),))
    made.change(4, not_before_s=250.0).change(3, hold=Hold.USER)
    found = after(made)
    assert found.starts_s == {4: 250.0, 2: 550.0}
    assert {job_id: wait.reason for job_id, wait in found.left.items()} == {3: Reason.HELD_USER}


def test_what_starts_may_be_what_another_waits_for() -> None:
    made = world(nodes="1x4", waiting=["3: 2c 100s", "4: 2c 300s"])
    made.change(4, dependency=(Dependency(kind=DependencyKind.AFTER, job_ids=(3,)),))
    assert after(made).starts_s == {3: 0.0, 4: 0.0}


def test_a_reservation_is_over_when_it_is_over() -> None:
    made = queue()
    made.reservations = [Reservation(name="r", start_s=50, end_s=5000, nodes=(NodeName("n1"),), users=("bob",))]
    assert after(made).starts_s == {2: 5000.0, 3: 5600.0, 4: 5600.0}
