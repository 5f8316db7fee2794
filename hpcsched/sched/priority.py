"""The order in which waiting jobs are looked at: partition tier, priority, submit time, id.

The priority has the shape of Slurm's multifactor plugin: an integer, the sum of weighted factors in 0..1 minus nice. Age,
partition and size count today; `Breakdown` has a place for the others. A fixed priority replaces the sum, 0 holds the job.
Source: priority_multifactor.html of Slurm's documentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpcsched.model.node import Partition
from hpcsched.sched.policy import Policy
from hpcsched.sched.snapshot import PendingJob, Snapshot

HIGHEST = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """What a priority is made of: already weighted, so that the parts add up to `total` (within 1..HIGHEST)."""

    total: int
    site: int = 0
    age: int = 0
    partition: int = 0
    size: int = 0
    assoc: int = 0
    fairshare: int = 0
    qos: int = 0
    tres: int = 0
    nice: int = 0
    fixed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What the factors are measured against: the machine's size and the highest tier of a partition."""

    now_s: float
    cpus: int
    highest_tier: int


def scale_of(snapshot: Snapshot) -> Scale:
    """Return what the factors of a priority in `snapshot` are measured against."""
    return Scale(
        now_s=snapshot.now_s,
        cpus=max(1, sum(node.cpus for node in snapshot.nodes)),
        highest_tier=max((part.priority_tier for part in snapshot.partitions.values()), default=1) or 1,
    )


def breakdown_of(job: PendingJob, partition: Partition | None, scale: Scale, policy: Policy) -> Breakdown:
    """Return the priority of `job` and what it is made of."""
    if job.priority_set is not None:
        return Breakdown(total=job.priority_set, fixed=True)
    since_s = job.since_s if job.since_s is not None else waiting_since_s(job)
    age = int(policy.weight_age * min(1.0, max(0.0, scale.now_s - since_s) / policy.age_max_s))
    tier = partition.priority_tier if partition is not None else 0
    part = int(policy.weight_partition * max(0, tier) / scale.highest_tier)
    size = int(policy.weight_size * _size(job, scale, policy)) if policy.weight_size else 0
    total = policy.weight_site + age + part + size - job.nice
    return Breakdown(
        total=min(HIGHEST, max(1, total)), site=policy.weight_site, age=age, partition=part, size=size, nice=job.nice
    )


def waiting_since_s(job: PendingJob) -> float:
    """Return since when a job that may start has waited, where nobody wrote it down."""
    if job.not_before_s is None:
        return job.submitted_at_s
    return max(job.submitted_at_s, job.not_before_s)


def priority_of(job: PendingJob, part: int, scale: Scale, policy: Policy) -> int:
    """Return `breakdown_of(...).total`, quicker: `part` is the weighted factor of the job's partition."""
    if job.priority_set is not None:
        return job.priority_set
    since_s = job.since_s
    if since_s is None:
        since_s = waiting_since_s(job)
    age = (scale.now_s - since_s) / policy.age_max_s
    total = policy.weight_site + int(policy.weight_age * (0.0 if age < 0.0 else 1.0 if age > 1.0 else age)) + part
    if policy.weight_size:
        total += int(policy.weight_size * _size(job, scale, policy))
    total -= job.nice
    return HIGHEST if total > HIGHEST else 1 if total < 1 else total


def in_order(
    jobs: Iterable[PendingJob], partitions: Mapping[str, Partition], scale: Scale, policy: Policy
) -> list[PendingJob]:
    """Return `jobs` in the order in which they are looked at."""
    tiers = {name: part.priority_tier for name, part in partitions.items()}
    parts = {name: int(policy.weight_partition * max(0, tier) / scale.highest_tier) for name, tier in tiers.items()}
    keyed = [
        (
            -tiers.get(job.partition, 0),
            -priority_of(job, parts.get(job.partition, 0), scale, policy),
            job.submitted_at_s,
            job.id,
            job,
        )
        for job in jobs
    ]
    keyed.sort(key=lambda item: item[:4])
    return [item[4] for item in keyed]


def _size(job: PendingJob, scale: Scale, policy: Policy) -> float:
    """Return the part of the machine's cpus that the job asks for, or what it leaves with `favor_small`."""
    shape = job.request.shape
    tasks = shape.ntasks if shape.ntasks is not None else shape.tasks_min * shape.nodes_min
    part = min(1.0, tasks * shape.cpus_per_task / scale.cpus)
    return 1.0 - part if policy.favor_small else part
