"""Priorities: integers whose parts add up, as Slurm's multifactor plugin has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.sched.world import world

from hpcsched.model.node import Partition
from hpcsched.sched.policy import Policy
from hpcsched.sched.priority import HIGHEST, Breakdown, breakdown_of, in_order, priority_of, scale_of
from hpcsched.sched.snapshot import PendingJob

DAY_S = 86400.0
POLICY = Policy(weight_site=10_000, weight_age=700, weight_partition=100, weight_size=50)


def broken_down(policy: Policy = POLICY, now_s: float = 3.5 * DAY_S, **changes: object) -> Breakdown:
    sketch = world("2x4", waiting=["1: 2 nodes 2c"])
    sketch.partitions = [
        replace(sketch.partitions[0], priority_tier=1),
        Partition(name="top", nodes=(), priority_tier=4),
    ]
    sketch.now_s = now_s
    snapshot = sketch.snapshot()
    job = replace(snapshot.pending[0], **{"submitted_at_s": 0.0, **changes})  # type: ignore[arg-type]
    return breakdown_of(job, snapshot.partitions[job.partition], scale_of(snapshot), policy)


def test_the_parts_add_up() -> None:
    parts = broken_down(nice=30)
    assert (parts.site, parts.age, parts.partition, parts.size, parts.nice) == (10_000, 350, 25, 25, 30)
    assert parts.total == 10_000 + 350 + 25 + 25 - 30


def test_age_counts_from_when_only_resources_were_missing_and_is_capped() -> None:
    assert broken_down(since_s=2.5 * DAY_S).age == 100
    assert broken_down(not_before_s=1.5 * DAY_S).age == 200
    assert broken_down(now_s=70 * DAY_S).age == 700
    assert broken_down(since_s=9 * DAY_S).age == 0  # a clock that was set back makes nobody negative


def test_small_jobs_may_be_favoured_instead() -> None:
    assert broken_down(replace(POLICY, favor_small=True)).size == 25
    assert broken_down(replace(POLICY, weight_size=8, favor_small=True)).size == 4


def test_a_fixed_priority_is_taken_as_it_is() -> None:
    assert broken_down(priority_set=77) == Breakdown(total=77, fixed=True)


def test_the_total_stays_within_slurms_range() -> None:
    assert broken_down(nice=10**12).total == 1
    assert broken_down(nice=-(10**12)).total == HIGHEST


@pytest.mark.parametrize(
    "changes", [{}, {"nice": 7}, {"priority_set": 3}, {"since_s": 5.0}, {"nice": 10**12}, {"nice": -(10**12)}]
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
