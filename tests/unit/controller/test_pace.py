"""When planning has its turn."""

from __future__ import annotations

import pytest
from unit.controller.cluster import Cluster

from hpcsched.controller.planning import PAUSE_MAX_S, Pace


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_planning_takes_a_quarter_of_the_time() -> None:
    clock = Clock()
    pace = Pace(clock, clock)
    spent_s, began_s = 0.0, clock.now_s
    for turn_s, whole in [(0.02, False), (0.01, False), (0.03, True)] * 20:
        clock.now_s += pace.begin_turn()
        assert pace.begin_turn() == 0.0
        clock.now_s += turn_s
        spent_s += pace.turn_s()
        pace.end_turn(whole=whole)
    clock.now_s += pace.begin_turn()
    # And what it leaves to others between the slices of a plan.
    assert spent_s == pytest.approx((clock.now_s - began_s - 20 * 0.03) / 4)


def test_a_turn_that_comes_too_early_is_told_when_it_is_time() -> None:
    clock = Clock()
    pace = Pace(clock, clock)
    assert pace.begin_turn() == 0.0
    clock.now_s += 0.1
    assert pace.end_turn(whole=True) == pytest.approx(0.3)
    clock.now_s += 0.1
    assert pace.begin_turn() == pytest.approx(0.2)
    clock.now_s += 0.2
    assert pace.begin_turn() == pytest.approx(0.0)


def test_a_long_plan_does_not_make_the_next_one_wait_for_ever() -> None:
    clock = Clock()
    pace = Pace(clock, clock)
    pace.begin_turn()
    clock.now_s += 60.0
    assert pace.end_turn(whole=True) == PAUSE_MAX_S


def test_time_in_which_the_machine_did_other_work_is_not_waited_for() -> None:
    clock, processor = Clock(), Clock()
    pace = Pace(clock, processor)
    pace.begin_turn()
    clock.now_s += 0.4
    processor.now_s += 0.02
    assert pace.end_turn(whole=True) == pytest.approx(0.06)


def test_what_is_made_for_a_plan_counts_as_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, clock, begun = Cluster("n1"), Clock(), []
    monkeypatch.setattr(cluster.ports, "monotonic_s", clock)
    cluster.controller._pace = Pace(clock, clock)
    snapshot = cluster.controller.snapshot

    def slow(*args: object) -> object:
        clock.now_s += 0.01
        begun.append(clock.now_s)
        return snapshot(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cluster.controller, "snapshot", slow)
    cluster.submit(hold=True)
    cluster.submit(hold=True)
    assert len(begun) == 1
    assert cluster.ports.wakes[-1] == pytest.approx(0.03)
    clock.now_s += 0.031
    cluster.tick()
    assert len(begun) == 2
