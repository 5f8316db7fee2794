"""The figures of a schedule, worked out by hand."""

from __future__ import annotations

import pytest
from unit.sim.traces import job

from hpcsched.sim.policies import bounded_slowdown, jain, metrics_of


def test_short_jobs_count_as_ten_seconds() -> None:
    assert bounded_slowdown(0, 1) == 1
    assert bounded_slowdown(99, 1) == 10
    assert bounded_slowdown(100, 100) == 2


def test_the_figures_of_two_jobs() -> None:
    jobs = [job(1, 0, 100, 4, user=1), job(2, 10, 20, 8, user=2)]
    figures = metrics_of(jobs, [0, 100], 10)
    assert figures.bounded_slowdown_mean == pytest.approx((1 + 110 / 20) / 2)
    assert (figures.wait_mean_s, figures.wait_max_s, figures.makespan_s) == (45, 90, 120)
    assert figures.utilization == pytest.approx((400 + 160) / 1200)
    assert figures.user_slowdowns == {1: 1, 2: 5.5}
    assert figures.user_fairness_jain == pytest.approx(6.5**2 / (2 * (1 + 5.5**2)))


def test_no_jobs_have_no_figures() -> None:
    assert metrics_of([], [], 10).bounded_slowdown_mean == 0
    assert jain([]) == 1
    assert jain([3, 3, 3]) == pytest.approx(1)
