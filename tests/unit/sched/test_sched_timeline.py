"""What a node has free over time: steps up where jobs end, dips where room is reserved."""

from __future__ import annotations

from unit.sched.world import world

from hpcsched.sched.place.timeline import NodeProfile, Timeline
from hpcsched.sched.policy import Policy


def test_a_node_gets_freer_as_jobs_end() -> None:
    snapshot = world("1x8/1000/2xa", running=["1: n1 2c 100M 1g 60s", "2: n1 3c 200M 90s"]).snapshot()
    profile = Timeline(snapshot, Policy()).profiles[0]
    assert profile.times_s == [0, 60, 90]
    assert profile.rooms == [(3, 700, (1,)), (5, 800, (2,)), (8, 1000, (2,))]
    assert profile.free_over(0, 1000) == (3, 700, (1,))  # what is free now is free all along
    assert profile.free_over(60, 1000) == (5, 800, (2,))


def test_a_reservation_makes_a_dip() -> None:
    profile = NodeProfile(0.0, (4, 10, ()))
    profile.take(50, 80, (3, 5, ()))
    profile.dips = True
    assert profile.free_over(0, 50) == (4, 10, ())  # ends as the dip begins
    assert profile.free_over(0, 51) == (1, 5, ())
    assert profile.free_over(79, 80) == (1, 5, ())
    assert profile.free_over(80, 999) == (4, 10, ())
    profile.take(70, 90, (1, 1, ()))
    assert profile.free_over(0, 999) == (0, 4, ())


def test_starts_give_the_lowest_free_gpus_of_the_type() -> None:
    timeline = Timeline(world("1x8/1000/2xa/2xb", running=["1: n1 1c 1g 60s"]).snapshot(), Policy())
    assert timeline.start(0, 100.0, (1, 1, (1, 1))).gpus == (1, 2)
    assert timeline.start(0, 100.0, (1, 1, (0, 1))).gpus == (3,)
    assert timeline.profiles[0].rooms[0] == (5, 998, (0, 0))


def test_a_job_on_a_node_that_is_gone_or_smaller_now_does_no_harm() -> None:
    sketch = world("2x4", running=["1: n2 4c 60s", "2: n1 4c 60s"], waiting=["3: 1c 60s"])
    sketch.nodes = world("1x2").nodes
    assert sketch.starts() == {}
    assert sketch.plan().waits[3].expected_start_s == 60  # type: ignore[index]
