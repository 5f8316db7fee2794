"""What the pictures show, before it is drawn."""

from __future__ import annotations

import pytest
from unit.sim.traces import PROCS, job

from hpcsched.sim.plot import bars_of, busiest_s, utilization_over
from hpcsched.sim.policies import Simulation, simulate
from hpcsched.sim.swf import Trace


def simulation() -> Simulation:
    jobs = (job(1, 0, 100, 5), job(2, 0, 50, 5), job(3, 0, 50, 5))
    return simulate(Trace(name="t", jobs=jobs, procs=PROCS), "fcfs")


def test_all_work_is_in_the_curve() -> None:
    _, parts = utilization_over(simulation(), bins=7)
    assert sum(parts) / 7 == pytest.approx(1)


def test_bars_lie_on_free_processors() -> None:
    bars = bars_of(simulation(), 0, 1000)
    assert [bar[:4] for bar in bars] == [(0, 100, 0, 5), (0, 50, 5, 5), (50, 100, 5, 5)]


def test_the_busiest_span_is_that_of_the_longest_waits() -> None:
    assert busiest_s(simulation(), span_s=40) == 40
