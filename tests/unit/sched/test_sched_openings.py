"""When enough nodes could hold a share: by counting spans, against trying every time one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.sched.world import world

from hpcsched.model.reservation import without
from hpcsched.sched.place.groups import Floors, Openings
from hpcsched.sched.place.request import Shape
from hpcsched.sched.place.timeline import Timeline
from hpcsched.sched.policy import Policy

NODES = 4
SHARE = Shape(cpus_per_task=2, mem_per_node_mib=0)

takings = st.lists(
    st.tuples(st.integers(0, NODES - 1), st.integers(0, 12), st.integers(1, 8), st.integers(1, 3)), max_size=14
)
searches = st.lists(st.tuples(st.integers(1, NODES), st.integers(1, 9)), min_size=1, max_size=8)


def timeline() -> Timeline:
    return Timeline(world(f"{NODES}x4", running=["1: n1,n2 3c 5s", "2: n3 4c 9s"]).snapshot(), Policy())


def by_trying(line: Timeline, count: int, length_s: int) -> float:
    times_s = sorted({at_s for profile in line.profiles for at_s in profile.times_s})
    for at_s in times_s:
        rooms = [profile.free_over(at_s, at_s + length_s) for profile in line.profiles]
        if sum(room[0] >= SHARE.cpus_per_task for room in rooms) >= count:
            return at_s
    return float("inf")


@given(takings, searches)
@settings(max_examples=200, deadline=None)
def test_the_earliest_time_is_that_of_trying_every_time(
    taken: list[tuple[int, int, int, int]], wanted: list[tuple[int, int]]
) -> None:
    line = timeline()
    openings = Openings(line, SHARE, range(NODES), {})
    for at in range(max(len(taken), len(wanted))):
        if at < len(taken):
            node, start_s, length_s, cpus = taken[at]
            if line.profiles[node].free_over(start_s, start_s + length_s)[0] >= cpus:
                line.reserve(node, start_s, start_s + length_s, (cpus, 0, ()))
        count, length_s = wanted[at % len(wanted)]
        openings.catch_up()
        start_s = openings.earliest(count, length_s)
        assert start_s == by_trying(line, count, length_s)
        if start_s < float("inf"):
            able = openings.able(start_s, length_s)
            assert len(able) == len(set(able)) >= count
            rooms = [line.profiles[node].free_over(start_s, start_s + length_s) for node in able]
            assert all(room[0] >= SHARE.cpus_per_task for room in rooms)


def test_a_closed_node_is_not_open_though_it_is_free() -> None:
    openings = Openings(timeline(), SHARE, [3], {3: [(0.0, 2.0), (10.0, 20.0)]})
    assert openings.until_s == {}
    assert openings.earliest(1, 8.0) == 2.0
    assert openings.earliest(1, 9.0) == 20.0


def test_a_search_for_more_begins_where_one_for_less_ended() -> None:
    floors = Floors()
    floors.remember(2, 10.0, 100.0)
    floors.remember(2, 20.0, 300.0)
    floors.remember(2, 15.0, 400.0)  # later: more was taken meanwhile
    assert floors.floor(2, 9.0) == float("-inf")
    assert floors.floor(1, 50.0) == float("-inf")
    assert (floors.floor(2, 10.0), floors.floor(5, 14.0)) == (100.0, 100.0)
    assert (floors.floor(2, 15.0), floors.floor(2, 99.0)) == (400.0, 400.0)


def test_intervals_are_cut_out_of_intervals() -> None:
    assert without([(0.0, 10.0), (20.0, 30.0)], [(5.0, 6.0), (9.0, 22.0), (40.0, 50.0)]) == [
        (0.0, 5.0),
        (6.0, 9.0),
        (22.0, 30.0),
    ]
    assert without([(1.0, 2.0)], [(0.0, 5.0)]) == []
