"""The order of waiting jobs: partition tier, priority, submit time, id.

The priority is that of Slurm's multifactor plugin: an integer, the sum of weighted factors in 0..1 minus nice.

    age          time during which only other jobs kept it waiting, relative to age_max_s
    fair-share   see `fairshare`
    size         mean of the requested parts of all nodes and of all cpus
                 (or only the part of the cpus, per minute of the time limit)
    partition    its priority_job_factor, relative to the highest one
    QOS          its priority, relative to the highest one
    association  priority of the user or account, relative to the highest one
    TRES         requested part of each resource or licence that has a weight
    site         the same for all jobs, plus the value that an admin adds to this job

A fixed priority replaces the sum; 0 holds the job. Source: priority_multifactor.html of Slurm's documentation.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from hpcsched.model.accounting import NO_ACCOUNTING, Accounting, Association
from hpcsched.model.ids import JobId
from hpcsched.model.node import Partition
from hpcsched.model.units import MINUTE_S, known_limit_s
from hpcsched.sched.policy import Policy
from hpcsched.sched.snapshot import PendingJob, Snapshot
from hpcsched.sched.tres import all_of, least_of

HIGHEST = 2**32 - 1
STEP_JOBS = 1000  # jobs that get their priority in one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The weighted parts of a priority. Their sum is `total`, which is limited to 1..HIGHEST."""

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
    factors: tuple[tuple[str, float], ...] = ()  # unweighted, 0..1, by the names above
    fixed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The reference values of factors.

    They are the size of the cluster, the highest factor of a partition, and past usage.
    """

    now_s: float
    nodes: int
    cpus: int
    highest_factor: int
    whole: Mapping[str, float] = field(default_factory=dict)
    fairshare: Mapping[Association, float] = field(default_factory=dict)
    accounting: Accounting = NO_ACCOUNTING


def scale_of(snapshot: Snapshot) -> Scale:
    """Return the reference values of the factors in `snapshot`."""
    return Scale(
        now_s=snapshot.now_s,
        nodes=max(1, len(snapshot.nodes)),
        cpus=max(1, sum(node.cpus for node in snapshot.nodes)),
        highest_factor=max((part.priority_job_factor for part in snapshot.partitions.values()), default=1) or 1,
        whole=all_of(snapshot.nodes, snapshot.ledger.accounting.licenses),
        fairshare=dict(snapshot.ledger.fairshare),
        accounting=snapshot.ledger.accounting,
    )


def breakdown_of(job: PendingJob, partition: Partition | None, scale: Scale, policy: Policy) -> Breakdown:
    """Return the priority of `job` with its parts."""
    if job.priority_set is not None:
        return Breakdown(total=job.priority_set, fixed=True)
    tres = _tres(job, scale, policy)
    factors = {
        "age": _age(job, scale, policy),
        "partition": (partition.priority_job_factor if partition is not None else 0) / scale.highest_factor,
        "size": _size(job, scale, policy),
        "fairshare": _fairshare(job, scale),
        "qos": _qos(job, scale),
        "assoc": _assoc(job, scale),
        **{name: part for name, _, part in tres},
    }
    site = policy.weight_site + job.site
    age = int(policy.weight_age * factors["age"])
    of_partition = int(policy.weight_partition * factors["partition"])
    size = int(policy.weight_size * factors["size"])
    assoc = int(policy.weight_assoc * factors["assoc"])
    fairshare = int(policy.weight_fairshare * factors["fairshare"])
    qos = int(policy.weight_qos * factors["qos"])
    of_tres = sum(int(weight * part) for _, weight, part in tres)
    total = site + age + of_partition + size + assoc + fairshare + qos + of_tres - job.nice
    return Breakdown(
        total=min(HIGHEST, max(1, total)),
        site=site,
        age=age,
        partition=of_partition,
        size=size,
        assoc=assoc,
        fairshare=fairshare,
        qos=qos,
        tres=of_tres,
        nice=job.nice,
        factors=tuple(factors.items()),
    )


def _age(job: PendingJob, scale: Scale, policy: Policy) -> float:
    """Return the age factor: the time during which only other jobs kept the job waiting.

    0 if another condition still keeps it waiting.
    """
    since_s = _accrues_from_s(job, policy)
    if since_s is None:
        return 0.0
    return min(1.0, max(0.0, scale.now_s - since_s) / policy.age_max_s)


def _accrues_from_s(job: PendingJob, policy: Policy) -> float | None:
    """Return the start of the age of `job`; None if it does not age.

    A job that waits for nothing but cheap hours ages: it could have started at its submission.
    """
    ages_always = policy.accrue_always or (job.cheap_by_s is not None and job.free_to_go)
    return job.submitted_at_s if ages_always else job.since_s


def priority_of(job: PendingJob, part: int, scale: Scale, policy: Policy) -> int:
    """Return `breakdown_of(...).total`, but faster.

    `part`: the weighted factors that `_shared` returns.
    """
    if job.priority_set is not None:
        return job.priority_set
    since_s = _accrues_from_s(job, policy)
    age = 0.0 if since_s is None else (scale.now_s - since_s) / policy.age_max_s
    total = policy.weight_site + int(policy.weight_age * (0.0 if age < 0.0 else 1.0 if age > 1.0 else age)) + part
    if policy.weight_size:
        total += int(policy.weight_size * _size(job, scale, policy))
    if policy.weights_tres:
        total += sum(int(weight * part) for _, weight, part in _tres(job, scale, policy))
    total += job.site - job.nice
    return HIGHEST if total > HIGHEST else 1 if total < 1 else total


def without_age(job: PendingJob, priority: int, scale: Scale, policy: Policy) -> int:
    """Return `priority` of `job` without its age. A fixed priority is not changed."""
    return priority if job.priority_set is not None else priority - int(policy.weight_age * _age(job, scale, policy))


def in_order(
    jobs: Iterable[PendingJob],
    partitions: Mapping[str, Partition],
    scale: Scale,
    policy: Policy,
    found: dict[JobId, int] | None = None,
) -> list[PendingJob]:
    """Return `jobs` in the order in which they are considered.

    Their priorities are added to `found`.
    """
    steps = order_in_steps(jobs, partitions, scale, policy, found)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            ordered: list[PendingJob] = end.value
            return ordered


def order_in_steps(
    jobs: Iterable[PendingJob],
    partitions: Mapping[str, Partition],
    scale: Scale,
    policy: Policy,
    found: dict[JobId, int] | None = None,
) -> Generator[None, None, list[PendingJob]]:
    """Return the same as `in_order`, in steps; the step that sorts takes longest."""
    tiers = {name: part.priority_tier for name, part in partitions.items()}
    factors = {name: part.priority_job_factor for name, part in partitions.items()}
    shared: dict[tuple[str, str, str, str], int] = {}
    keyed = []
    for number, job in enumerate(jobs, 1):
        if number % STEP_JOBS == 0:
            yield
        whose = (job.partition, job.account, job.user, job.qos)
        part = shared.get(whose)
        if part is None:
            part = shared[whose] = _shared(job, factors.get(job.partition, 0), scale, policy)
        rank = -priority_of(job, part, scale, policy)
        keyed.append((-tiers.get(job.partition, 0), rank, job.submitted_at_s, job.id, job))
    yield
    keyed.sort(key=_ORDER)
    yield
    if found is not None:
        found.update(
            [(item[3], -item[1]) for item in reversed(keyed)]
        )  # of a job in several partitions, the highest counts
        yield
    return [item[4] for item in keyed]


_ORDER = itemgetter(0, 1, 2, 3)


def _shared(job: PendingJob, factor: int, scale: Scale, policy: Policy) -> int:
    """Return the weighted factors of jobs of one user, account, QOS and partition."""
    part = int(policy.weight_partition * (factor / scale.highest_factor))
    if policy.weight_fairshare:
        part += int(policy.weight_fairshare * _fairshare(job, scale))
    if policy.weight_qos:
        part += int(policy.weight_qos * _qos(job, scale))
    if policy.weight_assoc:
        part += int(policy.weight_assoc * _assoc(job, scale))
    return part


def _fairshare(job: PendingJob, scale: Scale) -> float:
    """Return the fair-share factor of the association; 1 if it has no usage yet."""
    if not scale.fairshare:
        return 0.0
    return scale.fairshare.get(scale.accounting.association_of(job.user, job.account), 1.0)


def _qos(job: PendingJob, scale: Scale) -> float:
    qos = scale.accounting.quality(job.qos)
    highest = max((each.priority for each in scale.accounting.qos), default=0)
    return qos.priority / highest if qos is not None and highest else 0.0


def _assoc(job: PendingJob, scale: Scale) -> float:
    """Return the priority of the user or account, relative to the highest one configured.

    The priority of the user takes precedence.
    """
    accounting = scale.accounting
    rules, account = accounting.rules(job.user), accounting.account(job.account)
    own = account.priority if account is not None else 0
    if rules is not None and rules.priority is not None:
        own = rules.priority
    highest = max(
        max((each.priority for each in accounting.accounts), default=0),
        max((each.priority or 0 for each in accounting.users), default=0),
    )
    return own / highest if highest else 0.0


def _tres(job: PendingJob, scale: Scale, policy: Policy) -> list[tuple[str, float, float]]:
    """Return the weighted resources: name, weight, and the part of the cluster requested."""
    if not policy.weights_tres:
        return []
    asked = least_of(job.request.shape, job.licenses)
    return [
        (name, weight, min(1.0, asked.get(name, 0) / scale.whole[name]) if scale.whole.get(name) else 0.0)
        for name, weight in policy.weights_tres
    ]


def _size(job: PendingJob, scale: Scale, policy: Policy) -> float:
    """Return the part of the cluster that the job requests: the mean of nodes and cpus.

    With `favor_small`, return the rest. With `small_relative_to_time`, return the part of the cpus
    only, per minute of the time limit.
    """
    shape = job.request.shape
    cpus = sum(component.tasks_least * component.cpus_per_task for component in shape.each) / scale.cpus
    if policy.small_relative_to_time:
        limit_s = known_limit_s(job.request.time_limit_s) or policy.default_time_limit_s
        part = min(1.0, cpus / max(1.0, limit_s / MINUTE_S))
    else:
        part = min(1.0, (shape.nodes_min / scale.nodes + cpus) / 2)
    return 1.0 - part if policy.favor_small else part
