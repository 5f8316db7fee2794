"""Past jobs on other machines, and the weeks ahead: small cases worked out by hand, and a real log."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from unit.sim.traces import PROCS, traces
from zones import zone_fixture

from hpcsched.planner import capacity
from hpcsched.planner.capacity import (
    DAY_S,
    Arrival,
    EasyNodes,
    PlanNode,
    Room,
    ahead,
    backtest,
    band_of,
    day_of,
    days_of,
    is_idle,
    memory_bound,
    midnight_s,
    quantile,
    replayed,
    short_limits,
    with_memory,
    without_idle,
)
from hpcsched.sched.pool import EasyPool
from hpcsched.sim.policies import replay
from hpcsched.sim.swf import TraceJob, read_trace

KTH = Path(__file__).parents[2] / "golden" / "traces" / "KTH-SP2.swf.gz"


def job(submit_s: float, run_s: float, **asked: object) -> Arrival:
    """Return a job of one node with one cpu and 1000 MiB, whose limit is its run."""
    usual = {"limit_s": run_s, "nodes": 1, "cpus": 1, "mem_mib": 1000}
    return Arrival(submit_s=submit_s, run_s=run_s, **(usual | asked))  # type: ignore[arg-type]


def starts(machines: tuple[PlanNode, ...], *jobs: Arrival) -> list[float]:
    return replay(jobs, EasyNodes(machines, jobs))


SMALL, BIG = PlanNode("small", 4, 8000), PlanNode("big", 8, 32000, 2, "a100")


@given(traces())
@settings(max_examples=200, deadline=None)
def test_on_one_node_every_start_is_that_of_the_pool(drawn: list[TraceJob]) -> None:
    drawn = [each._replace(asked_s=max(1, each.asked_s)) for each in drawn]
    pool = EasyPool(PROCS, [each.procs for each in drawn], [each.asked_s for each in drawn])
    jobs = [Arrival(each.submit_s, each.run_s, each.asked_s, 1, each.procs, 0) for each in drawn]
    assert starts((PlanNode("pool", PROCS, 0),), *jobs) == replay(drawn, pool)


def test_a_job_takes_the_node_that_it_fills_most_and_waits_for_memory_and_gpus() -> None:
    jobs = (
        job(0, 100, mem_mib=20000),  # only the big node has as much
        job(1, 100, gpus=2, gpu_type="a100", mem_mib=12000),  # fits beside it
        job(2, 50, gpus=1),  # no GPU is free until 101
        job(3, 50),  # backfilled on the small node
    )
    assert starts((SMALL, BIG), *jobs) == [0, 1, 101, 3]


def test_a_later_job_does_not_delay_the_first_that_waits() -> None:
    jobs = (job(0, 100, cpus=3), job(1, 10, cpus=4), job(2, 200), job(3, 90))
    assert starts((SMALL,), *jobs) == [0, 100, 110, 3]


def test_a_job_on_several_nodes_needs_all_of_them_at_once() -> None:
    machines = (SMALL, SMALL._replace(name="other"))
    jobs = (job(0, 100, cpus=2), job(1, 30, nodes=2, cpus=3), job(2, 10, cpus=2))
    assert starts(machines, *jobs) == [0, 100, 2]


class CountedNodes(EasyNodes):
    """Counts how often the nodes are searched for a place."""

    searches = 0

    def _seats(self, room: Room, job: Arrival) -> tuple[int, ...] | None:
        self.searches += 1
        return super()._seats(room, job)


@pytest.mark.parametrize("sizes", [1, 300])
def test_a_replay_of_one_users_many_jobs_has_its_bound(monkeypatch: pytest.MonkeyPatch, sizes: int) -> None:
    """Each end would have the scheduler search all nodes for each job that waits."""
    monkeypatch.setattr(capacity, "MOST_LOOKS", 60_000)
    monkeypatch.setattr(capacity, "MOST_NODE_LOOKS", 60_000)
    hostile = [job(0.0, 10.0 + at, cpus=3, mem_mib=3000 + at % sizes, nodes=2) for at in range(300)]
    engine = CountedNodes((SMALL, SMALL._replace(name="other"), BIG), hostile)
    assert min(replay(hostile, engine)) == 0.0
    assert engine.searches < 300 * (capacity.LEAST_SIZES if sizes == 1 else 60)


def test_partitions_keep_jobs_from_nodes() -> None:
    machines = (SMALL._replace(partitions=frozenset({"a"})), BIG._replace(partitions=frozenset({"b"})))
    jobs = (job(0, 100, cpus=4, partition="a"), job(1, 10, partition="a"), job(2, 10, partition="b"))
    assert starts(machines, *jobs) == [0, 100, 2]


def test_waits_count_by_partition_and_user_and_jobs_that_never_fit_are_left_out() -> None:
    jobs = [
        job(0, 100, cpus=4, user="ann", partition="a"),
        job(10, 100, cpus=4, user="ben", partition="a", gpus=0),
        job(20, 10, cpus=9, user="ben", partition="a"),
    ]
    found = replayed((SMALL,), jobs, 0, 200)
    assert (found.waits.jobs, found.waits.prompt, found.waits.mean_s, found.left_out) == (2, 1, 45.0, 1)
    assert found.by_user["ben"].mean_s == 90.0
    assert found.by_partition["a"].jobs == 2
    assert found.utilization == 1.0
    assert replayed((SMALL, SMALL), jobs, 0, 200).waits.mean_s == 0.0


def test_without_jobs_all_figures_are_0() -> None:
    found = replayed((SMALL,), [], 0, 100)
    assert (found.waits.jobs, found.waits.mean_s, found.utilization, found.gpu_utilization) == (0, 0.0, 0.0, 0.0)


berlin = zone_fixture("CET-1CEST,M3.5.0,M10.5.0/3", autouse=False)


@pytest.mark.usefixtures("berlin")
def test_days_are_those_of_local_time_also_when_the_clocks_change() -> None:
    before = time.mktime((2026, 3, 28, 9, 0, 0, 0, 0, -1))
    after = time.mktime((2026, 3, 30, 9, 0, 0, 0, 0, -1))
    assert after - before == 2 * DAY_S - 3600
    days = days_of([job(before, 1), job(after, 1)], True)
    assert [[each.submit_s for each in jobs] for jobs in days.values()] == [[9 * 3600.0], [9 * 3600.0]]
    first = day_of(before, True)
    assert midnight_s(first + 2, True) - midnight_s(first + 1, True) == 23 * 3600.0


def weeks(count: int, *, per_day: int = 1, run_s: float = 3600.0) -> dict[int, list[Arrival]]:
    """Return days with equal jobs on Mondays to Fridays (of ordinals, 1 is a Monday)."""
    return {day: [job(36000.0, run_s, cpus=4)] * per_day for day in range(1, 7 * count + 1) if day % 7 not in (6, 0)}


def test_weeks_ahead_have_the_weekdays_of_the_weeks_before() -> None:
    days = weeks(8, per_day=3)
    found = ahead(((SMALL,), (SMALL, SMALL._replace(name="more"))), days, 57, False, count=14, draws=5)
    assert {draw[0].waits.jobs for draw in found.draws} == {30}
    assert found.band(0) == (3600.0, 3600.0, 3600.0)  # 0, 1 and 2 hours
    assert found.gain(1).median == 2400.0
    assert found.gain(0) == (0.0, 0.0, 0.0)


def test_the_same_seed_gives_the_same_draws() -> None:
    days = {day: [job(0.0, 60.0 * day, cpus=4)] * (day % 5) for day in range(1, 57)}
    one, same, other = (ahead(((SMALL,),), days, 57, False, count=7, draws=8, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.band(0).low < one.band(0).high
    assert one != other


def test_too_little_history_gives_no_forecast() -> None:
    with pytest.raises(ValueError, match="14 days of history are too few"):
        ahead(((SMALL,),), weeks(2), 15, False)


def test_a_month_like_those_before_is_within_the_band() -> None:
    tested = backtest((SMALL,), (SMALL, BIG), weeks(21, per_day=2), False, draws=5)
    assert tested == (2, 2, 2, 2)
    assert backtest((SMALL,), (SMALL, BIG), weeks(6), False).windows == 0


def test_the_bands_hold_on_a_real_log() -> None:
    """Of the KTH's year: 80 % bands, 70 to 90 % of the periods within, and the gain of a tenth more in its direction."""
    trace = read_trace(KTH)
    jobs = [Arrival(each.submit_s, each.run_s, each.asked_s, 1, each.procs, 0) for each in trace.jobs]
    pool = PlanNode("pool", trace.procs, 0)
    tested = backtest((pool,), (pool._replace(cpus=110),), days_of(jobs, False), False, draws=40)
    assert tested.windows == 9
    assert 6 <= tested.wait_within <= 8
    assert 6 <= tested.gain_within <= 8
    assert tested.sign_right == 9


def test_quantiles_are_interpolated() -> None:
    assert quantile([1.0, 2.0, 3.0], 0.25) == 1.5
    assert quantile([7.0], 0.9) == 7.0
    assert band_of([0.0, 10.0]) == (5.0, 1.0, 9.0)


def test_jobs_that_only_hold_their_cpus_are_idle() -> None:
    held = job(0, 7200, cpus=4, cpu_used_s=10.0)
    assert is_idle(held)
    assert not is_idle(held._replace(cpu_used_s=2000.0))
    assert not is_idle(held._replace(cpu_used_s=None))
    assert not is_idle(held._replace(run_s=600.0))
    assert without_idle([held, job(0, 1)]) == [job(0, 1)]


def test_memory_is_named_where_it_shortens_the_waits() -> None:
    jobs = [job(0, 100, mem_mib=6000), job(1, 100, mem_mib=6000)]
    assert memory_bound((SMALL,), jobs, 0, 200) == ["small"]
    assert with_memory((SMALL, BIG), ["small"]) == (SMALL._replace(mem_mib=16000), BIG)
    assert memory_bound((SMALL,), [job(0, 100, cpus=4), job(1, 100, cpus=4)], 0, 200) == []


def test_short_limits_are_not_below_a_minute_nor_above_what_was_asked() -> None:
    asked = [job(0, 1000, limit_s=9000), job(0, 10, limit_s=9000), job(0, 10, limit_s=20)]
    assert [each.limit_s for each in short_limits(asked)] == [1250.0, 60.0, 20]
