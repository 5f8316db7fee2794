"""Priorities: integers whose parts add up, as Slurm's multifactor plugin has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.sched.world import world

from hpcsched.model.accounting import Accounting
from hpcsched.model.node import Partition
from hpcsched.sched.policy import Policy
from hpcsched.sched.priority import HIGHEST, Breakdown, breakdown_of, in_order, priority_of, scale_of
from hpcsched.sched.snapshot import PendingJob, UsageLedger

DAY_S = 86400.0
POLICY = Policy(weight_site=10_000, weight_age=700, weight_partition=100, weight_size=50)


def broken_down(policy: Policy = POLICY, now_s: float = 3.5 * DAY_S, **changes: object) -> Breakdown:
    sketch = world("2x4", waiting=["1: 1 nodes 1c"])
    sketch.partitions = [
        replace(sketch.partitions[0], priority_tier=7),
        Partition(name="top", nodes=(), priority_job_factor=4),
    ]
    sketch.now_s = now_s
    snapshot = sketch.snapshot()
    job = replace(snapshot.pending[0], **{"submitted_at_s": 0.0, "since_s": 0.0, **changes})  # type: ignore[arg-type]
    return breakdown_of(job, snapshot.partitions[job.partition], scale_of(snapshot), policy)


def test_the_parts_add_up() -> None:
    parts = broken_down(nice=30)
    assert (parts.site, parts.age, parts.partition, parts.size, parts.nice) == (10_000, 350, 25, 15, 30)
    assert parts.total == 10_000 + 350 + 25 + 15 - 30
    assert dict(parts.factors)["size"] == (1 / 2 + 1 / 8) / 2  # a node of two, a cpu of eight


def test_age_counts_from_when_only_resources_were_missing_and_is_capped() -> None:
    assert broken_down(since_s=2.5 * DAY_S).age == 100
    assert broken_down(since_s=None).age == 0  # it waited for a dependency, say, until this very plan
    assert broken_down(now_s=70 * DAY_S).age == 700
    assert broken_down(since_s=9 * DAY_S).age == 0  # a clock that was set back makes nobody negative


def test_a_site_factor_of_the_jobs_own_is_added() -> None:
    assert broken_down(site=-70).site == 10_000 - 70
    assert broken_down(site=-70).total == broken_down().total - 70


def test_age_counts_from_the_submission_if_the_site_wants_that() -> None:
    policy = replace(POLICY, accrue_always=True)
    assert broken_down(policy, since_s=None, submitted_at_s=2.5 * DAY_S).age == 100


def test_size_may_be_the_cpus_for_each_minute_of_the_limit() -> None:
    policy = replace(POLICY, weight_size=80_000, small_relative_to_time=True, default_time_limit_s=120)
    assert broken_down(policy).size == 5_000  # one cpu of eight, for the two minutes that a job without limit is given
    assert broken_down(replace(policy, favor_small=True)).size == 75_000


def test_small_jobs_may_be_favoured_instead() -> None:
    assert broken_down(replace(POLICY, favor_small=True)).size == 34
    assert broken_down(replace(POLICY, weight_size=16, favor_small=True)).size == 11


def test_a_weight_of_a_licence_is_worth_the_part_of_all_that_the_job_asks_for() -> None:
    sketch = world("2x4", waiting=["1: 1c"]).change(1, licenses=(("matlab", 1),))
    ledger = UsageLedger(accounting=Accounting(licenses=(("matlab", 4), ("ansys", 1))))
    snapshot = replace(sketch.snapshot(), ledger=ledger)
    policy = replace(POLICY, weights_tres=(("license/matlab", 1000.0), ("license/ansys", 10.0), ("cpu", 80.0)))
    parts = breakdown_of(snapshot.pending[0], snapshot.partitions["main"], scale_of(snapshot), policy)
    assert parts.tres == 250 + 0 + 10


def test_age_does_not_count_while_a_job_waits_for_a_dependency() -> None:
    sketch = world("1x4", waiting=["1: 1c", "2: 1c"], weight_age=1000)
    sketch.now_s = 3 * DAY_S
    sketch.change(1, submitted_at_s=0.0, eligible_at_s=None).change(2, submitted_at_s=DAY_S, eligible_at_s=2 * DAY_S)
    snapshot = sketch.snapshot()
    ordered = in_order(snapshot.pending, snapshot.partitions, scale_of(snapshot), sketch.policy)
    assert [job.id for job in ordered] == [2, 1]


def test_a_fixed_priority_is_taken_as_it_is() -> None:
    assert broken_down(priority_set=77) == Breakdown(total=77, fixed=True)


def test_the_total_stays_within_slurms_range() -> None:
    assert broken_down(nice=10**12).total == 1
    assert broken_down(nice=-(10**12)).total == HIGHEST


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nice": 7},
        {"priority_set": 3},
        {"since_s": None},
        {"since_s": 5.0},
        {"nice": 10**12},
        {"nice": -(10**12)},
        {"site": 9},
    ],
)
def test_the_quick_way_agrees_with_the_breakdown(changes: dict[str, object]) -> None:
    snapshot = world("2x4", waiting=["1: 2 nodes 2c"]).snapshot()
    job: PendingJob = replace(snapshot.pending[0], **changes)  # type: ignore[arg-type]
    scale = replace(scale_of(snapshot), now_s=DAY_S)
    parts = breakdown_of(job, snapshot.partitions["main"], scale, POLICY)
    assert priority_of(job, POLICY.weight_partition, scale, POLICY) == parts.total


def test_the_order_is_tier_priority_time_id() -> None:
    high = Partition(name="high", nodes=(), priority_tier=9)
    sketch = world("1x4", waiting=["5: p=high nice=100", "4: 1c", "3: 1c nice=1", "2: 1c", "1: 1c"])
    sketch.partitions.append(high)
    sketch.change(1, submitted_at_s=8.0).change(2, submitted_at_s=3.0).change(4, submitted_at_s=3.0)
    snapshot = sketch.snapshot()
    ordered = in_order(snapshot.pending, snapshot.partitions, scale_of(snapshot), Policy(weight_age=0))
    assert [job.id for job in ordered] == [5, 2, 4, 1, 3]
