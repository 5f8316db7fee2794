"""What jobs have used, in resource-seconds that decay: after one half-life a second counts half.

Decay is exact and needs no ticking: an amount that is known as of one time is known as of any later one, and what a running
job has used since its start is an integral in closed form,

    use over d seconds, seen at their end = rate * (h / ln 2) * (1 - 2^(-d / h)).

So only what is given back is ever written down (`charge_of`, in the commit of the very event that gives it back: once,
whatever crashes), and what runs is added when somebody looks. Slurm multiplies by a constant every five minutes instead;
the limits of both are the same. Billing is charged as Slurm's TRESBillingWeights say, all of it times the QOS's usage factor.
Source: priority_multifactor.html, tres.html of Slurm's documentation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpcsched.model.accounting import BILLING, CPU, GPU, LICENSE, MEM, NODE, Accounting, Association
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job
from hpcsched.model.node import Partition
from hpcsched.model.resources import Share
from hpcsched.model.units import MIB_PER_GIB

Amounts = tuple[tuple[str, float], ...]  # resource and resource-seconds
Weights = Mapping[str, float]
GpuTypes = Mapping[NodeName, Mapping[int, str]]  # of each node, by index


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedResources:
    """What one user's jobs in one account and QOS have used, as it counts at `at_s`. One row of the table `usage`."""

    account: str
    user: str
    qos: str
    at_s: float
    amounts: Amounts = ()

    @property
    def key(self) -> tuple[str, str, str]:
        return self.account, self.user, self.qos


def decay(elapsed_s: float, half_life_s: float | None) -> float:
    """Return what a second of use that is `elapsed_s` ago counts."""
    return 1.0 if half_life_s is None else 2.0 ** (-max(0.0, elapsed_s) / half_life_s)


def integral(lasting_s: float, half_life_s: float | None) -> float:
    """Return what the use of one resource for the last `lasting_s` seconds counts now."""
    lasting_s = max(0.0, lasting_s)
    if half_life_s is None:
        return lasting_s
    return -half_life_s / math.log(2) * math.expm1(-lasting_s / half_life_s * math.log(2))


def at(used: UsedResources, now_s: float, half_life_s: float | None) -> UsedResources:
    """Return `used` as it counts at `now_s`; a clock that was set back does not make it more."""
    if now_s <= used.at_s:
        return used
    factor = decay(now_s - used.at_s, half_life_s)
    amounts = tuple((name, amount * factor) for name, amount in used.amounts)
    return UsedResources(account=used.account, user=used.user, qos=used.qos, at_s=now_s, amounts=amounts)


def plus(used: UsedResources, amounts: Amounts) -> UsedResources:
    """Return `used` with `amounts` that count as of the same time."""
    total = dict(used.amounts)
    for name, amount in amounts:
        total[name] = total.get(name, 0.0) + amount
    return UsedResources(
        account=used.account, user=used.user, qos=used.qos, at_s=used.at_s, amounts=tuple(total.items())
    )


def charge_of(
    before: Job, after: Job, at_s: float, accounting: Accounting, weights: Weights, types: GpuTypes
) -> Amounts:
    """Return what an event of `at_s` that made `after` of `before` charges, as it counts then; () if nothing.

    It was used evenly since what was held was last charged, until now, or until its end if that is heard of now.
    """
    cpu_s = after.charged_cpu_s - before.charged_cpu_s
    mem_mib_s = after.charged_mem_mib_s - before.charged_mem_mib_s
    gpu_s = after.charged_gpu_s - before.charged_gpu_s
    if not (cpu_s or mem_mib_s or gpu_s):
        return ()
    until_s = at_s if before.ended_at_s is not None or after.ended_at_s is None else min(at_s, after.ended_at_s)
    lasted_s = until_s - _since_s(before, until_s)
    part = integral(lasted_s, accounting.half_life_s) / lasted_s if lasted_s > 0 else 1.0
    factor = part * decay(at_s - until_s, accounting.half_life_s) * factor_of(accounting, before.qos)
    released = len(set(before.held_nodes) - set(after.held_nodes))
    all_charged = not released or after.charged_until_s != before.charged_until_s
    licenses = () if after.held_nodes and not all_charged else before.spec.licenses  # they go back with the last node
    counted_s = lasted_s * _counted(len(before.held_nodes) if all_charged else released, licenses, weights)
    per_gpu = gpu_weight(before.shares, weights, types)
    return _amounts(cpu_s * factor, mem_mib_s * factor, gpu_s * factor, counted_s * factor, weights, per_gpu)


def running_use(job: Job, now_s: float, accounting: Accounting, weights: Weights, types: GpuTypes) -> Amounts:
    """Return what `job` has used of what it still holds, as it counts now."""
    shares = [share for share in job.shares if share.node in job.held_nodes]
    if not shares or job.suspended_at_s is not None:
        return ()
    used_s = integral(now_s - _since_s(job, now_s), accounting.half_life_s) * factor_of(accounting, job.qos)
    cpu_s = used_s * sum(share.cpus for share in shares)
    mem_mib_s = used_s * sum(share.mem_mib for share in shares)
    gpu_s = used_s * sum(share.gpu_amount for share in shares)
    counted_s = used_s * _counted(len(shares), job.spec.licenses, weights)
    return _amounts(cpu_s, mem_mib_s, gpu_s, counted_s, weights, gpu_weight(shares, weights, types))


def _counted(nodes: int, licenses: Iterable[tuple[str, int]], weights: Weights) -> float:
    """Return what a second of so many nodes and of these licences costs."""
    return nodes * weights.get(NODE, 0.0) + sum(count * weights.get(LICENSE + name, 0.0) for name, count in licenses)


def _since_s(job: Job, now_s: float) -> float:
    """Return from when on what `job` holds has not been charged."""
    return next((at_s for at_s in (job.charged_until_s, job.allocated_at_s) if at_s is not None), now_s)


def factor_of(accounting: Accounting, qos: str) -> float:
    """Return how many times the use under `qos` is charged."""
    quality = accounting.quality(qos)
    return 1.0 if quality is None else quality.usage_factor


def weights_of(accounting: Accounting, partition: Partition | None) -> dict[str, float]:
    """Return what a second of each resource costs in `partition`."""
    return dict(partition.billing if partition is not None and partition.billing else accounting.billing)


def gpu_weight(shares: Iterable[Share], weights: Weights, types: GpuTypes) -> float:
    """Return what a GPU of these shares costs: that of its type if it has a weight, on average."""
    plain = weights.get(GPU, 0.0)
    costs = [
        weights.get(f"{GPU}:{types.get(share.node, {}).get(index, '').lower()}", plain)
        for share in shares
        for index in share.gpus
    ]
    return sum(costs) / len(costs) if costs else plain


def _amounts(
    cpu_s: float, mem_mib_s: float, gpu_s: float, counted_s: float, weights: Weights, per_gpu: float
) -> Amounts:
    billing = cpu_s * weights.get(CPU, 0.0) + mem_mib_s / MIB_PER_GIB * weights.get(MEM, 0.0) + gpu_s * per_gpu
    return (BILLING, billing + counted_s), (CPU, cpu_s), (MEM, mem_mib_s), (GPU, gpu_s)


def by_association(rows: Iterable[UsedResources]) -> dict[Association, float]:
    """Return what each association has been charged in all, of rows that count as of the same time."""
    charged: dict[Association, float] = {}
    for row in rows:
        key = (row.account, row.user)
        charged[key] = charged.get(key, 0.0) + dict(row.amounts).get(BILLING, 0.0)
    return {key: max(0.0, amount) for key, amount in charged.items()}  # what was reset may leave a rounding error
