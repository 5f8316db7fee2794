"""Who is waited for, what ranks are worth together, and where the time of a step goes."""

from __future__ import annotations

import pytest
import torch

from hpctrain import batch as phases_module
from hpctrain.batch import Phases
from hpctrain.exchange.balance import WARM_STEPS, RankTimes, Scaling, TimesSinceMeeting


def fed(step_s: float, own_s: tuple[float, ...], wait_s: tuple[float, ...], steps: int = 100) -> Scaling:
    scaling = Scaling([f"h{rank}" for rank in range(len(own_s))])
    for _ in range(WARM_STEPS):
        scaling.note(1000.0, RankTimes(own_s=own_s, data_s=own_s, wait_s=own_s))  # does not count
    for _ in range(steps):
        times = RankTimes(own_s=own_s, data_s=tuple(0.1 * own for own in own_s), wait_s=wait_s)
        scaling.note(step_s, times)
    return scaling


def test_the_others_wait_for_the_rank_that_waits_least() -> None:
    scaling = fed(0.100, (0.050, 0.090, 0.060), (0.045, 0.005, 0.035))
    assert scaling.straggler() == "the others wait for rank 1 on h1: 35 ms of a step's 100"
    assert scaling.summary() == (
        "scaling: 3 ranks compute 66.7 % of the time; limited by waiting for rank 1 on h1, 23.3 % "
        "(the exchange 5.0 %, work between steps 5.0 %); of the computing, getting data 10.0 %"
    )


def test_a_slow_link_is_not_blamed_on_a_rank() -> None:
    scaling = fed(0.100, (0.059, 0.060), (0.041, 0.040))
    assert scaling.straggler() == ""
    assert "limited by the exchange, 40.0 %" in scaling.summary()


def test_steps_between_two_meetings_count_like_any() -> None:
    apart = TimesSinceMeeting()
    apart.add(0.050, 0.010, 0.120)  # at the meeting before
    apart.add(0.070, 0.030, 0.0)
    assert apart.means() == pytest.approx((0.060, 0.020, 0.060))
    scaling = Scaling(["h0", "h1"])
    for _ in range(WARM_STEPS + 10):
        scaling.note(0.060, None)
        scaling.note(0.180, RankTimes(own_s=(0.060, 0.060), data_s=(0.0, 0.0), wait_s=(0.060, 0.050)))
    assert "2 ranks compute 50.0 % of the time; limited by the exchange, 41.7 %" in scaling.summary()


def test_a_single_rank_does_not_wait() -> None:
    scaling = fed(0.100, (0.090,), (0.0,))
    assert scaling.straggler() == ""
    assert scaling.summary().startswith("scaling: the rank computes 90.0 % of the time; limited by work between")
    assert Scaling(["h0"]).summary() == ""


def test_a_straggler_that_recovers_is_forgotten() -> None:
    scaling = fed(0.100, (0.050, 0.090), (0.045, 0.005))
    assert scaling.straggler()
    for _ in range(100):
        scaling.note(0.060, RankTimes(own_s=(0.05, 0.05), data_s=(0.0, 0.0), wait_s=(0.01, 0.01)))
    assert scaling.straggler() == ""


def test_a_steps_own_time_is_divided_at_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(phases_module.time, "perf_counter", lambda: now_s[0])
    model = torch.nn.Linear(1, 1)
    phases = Phases(model)
    model(torch.zeros(1))  # a validation between steps
    for _ in range(2):  # the second step does not remember the first
        phases.begin()
        for _ in range(2):  # two pieces
            now_s[0] += 1
            model(torch.zeros(1))
            now_s[0] += 10
            model(torch.zeros(1))  # a second time in one forward
            phases.backward_begins()
            now_s[0] += 100
            phases.backward_ended()
        assert phases.end() == (2, 20, 200)
    phases.close()
    assert not model._forward_pre_hooks


def test_no_rank_is_named_before_a_step_was_counted() -> None:
    assert Scaling(["n1", "n2"]).straggler() == ""
