"""Usage of jobs, in resource-seconds that decay: halved after each half-life.

Decay is exact and needs no timer: an amount known at one time is known at any later time, and the usage of a running job since
its start is an integral in closed form,

    use over d seconds, seen at their end = rate * (h / ln 2) * (1 - 2^(-d / h)).

So usage is stored only when resources are given back: by `charge_of`, in the commit of that event, and therefore exactly once.
The usage of running jobs is added when usage is read. Slurm multiplies by a constant every five minutes instead; both
methods have the same limit. Billing follows Slurm's TRESBillingWeights, times the usage factor of the QOS.

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
    """The usage of one user in one account and QOS, decayed to `at_s`.

    It is one row of the table `usage`.
    """

    account: str
    user: str
    qos: str
    at_s: float
    amounts: Amounts = ()

    @property
    def key(self) -> tuple[str, str, str]:
        return self.account, self.user, self.qos


def decay(elapsed_s: float, half_life_s: float | None) -> float:
    """Return the weight, 0..1, of a second of usage `elapsed_s` ago."""
    return 1.0 if half_life_s is None else 2.0 ** (-max(0.0, elapsed_s) / half_life_s)


def integral(lasting_s: float, half_life_s: float | None) -> float:
    """Return the decayed usage of one unit during the last `lasting_s` seconds."""
    lasting_s = max(0.0, lasting_s)
    if half_life_s is None:
        return lasting_s
    return -half_life_s / math.log(2) * math.expm1(-lasting_s / half_life_s * math.log(2))


def at(used: UsedResources, now_s: float, half_life_s: float | None) -> UsedResources:
    """Return `used` decayed to `now_s`; unchanged if the clock was set back."""
    if now_s <= used.at_s:
        return used
    factor = decay(now_s - used.at_s, half_life_s)
    amounts = tuple((name, amount * factor) for name, amount in used.amounts)
    return UsedResources(account=used.account, user=used.user, qos=used.qos, at_s=now_s, amounts=amounts)


def plus(used: UsedResources, amounts: Amounts) -> UsedResources:
    """Return `used` plus `amounts`, both of the same time."""
    total = dict(used.amounts)
    for name, amount in amounts:
        total[name] = total.get(name, 0.0) + amount
    return UsedResources(
        account=used.account, user=used.user, qos=used.qos, at_s=used.at_s, amounts=tuple(total.items())
    )


def charge_of(
    before: Job, after: Job, at_s: float, accounting: Accounting, weights: Weights, types: GpuTypes
) -> Amounts:
    """Return the usage to charge for the change from `before` to `after` at `at_s`.

    It is decayed to `at_s`; () if there is nothing to charge. The resources were held from the last
    charge until `at_s`, or until the end of the job if that is reported now.
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
    licenses = (
        () if after.held_nodes and not all_charged else before.spec.licenses
    )  # licences are given back with the last node
    counted_s = lasted_s * _counted(len(before.held_nodes) if all_charged else released, licenses, weights)
    per_gpu = gpu_weight(before.shares, weights, types)
    return _amounts(cpu_s * factor, mem_mib_s * factor, gpu_s * factor, counted_s * factor, weights, per_gpu)


def running_use(job: Job, now_s: float, accounting: Accounting, weights: Weights, types: GpuTypes) -> Amounts:
    """Return the decayed usage of the resources that `job` still holds."""
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
    """Return the billing of one second of a number of nodes and of these licences."""
    return nodes * weights.get(NODE, 0.0) + sum(count * weights.get(LICENSE + name, 0.0) for name, count in licenses)


def _since_s(job: Job, now_s: float) -> float:
    """Return the time since which the resources of `job` have not been charged."""
    return next((at_s for at_s in (job.charged_until_s, job.allocated_at_s) if at_s is not None), now_s)


def factor_of(accounting: Accounting, qos: str) -> float:
    """Return the usage factor of `qos`."""
    quality = accounting.quality(qos)
    return 1.0 if quality is None else quality.usage_factor


def weights_of(accounting: Accounting, partition: Partition | None) -> dict[str, float]:
    """Return the billing weight of each resource in `partition`."""
    return dict(partition.billing if partition is not None and partition.billing else accounting.billing)


def gpu_weight(shares: Iterable[Share], weights: Weights, types: GpuTypes) -> float:
    """Return the mean billing weight of the GPUs of these shares.

    The weight of each type counts, or the plain weight if the type has none.
    """
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
    """Return the total charged usage of each association.

    `rows` must be decayed to the same time.
    """
    charged: dict[Association, float] = {}
    for row in rows:
        key = (row.account, row.user)
        charged[key] = charged.get(key, 0.0) + dict(row.amounts).get(BILLING, 0.0)
    return {key: max(0.0, amount) for key, amount in charged.items()}  # a reset may leave a rounding error
