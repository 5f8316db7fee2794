"""Fair share: the usage of users relative to their shares, and the resulting factor.

The factor, 0..1, is part of the priority.

*Fair Tree* ranks users. At each account, the children are ordered by LF = S / U. S is the fraction
of the siblings' shares, U the fraction of the siblings' usage. LF is infinite without usage, and 0
without shares. The tree is walked in that order, depth first. The first user gets 1, the last of n
gets 1 / n. So all users of an account with a higher LF precede all users of a sibling with a lower
LF. Ties: users of equal LF have one rank; accounts of equal LF are merged; if a user and an account
have equal LF, the best user of the account has the rank of the user.

*Classic*: F = 2^(-UE / S / damping). S is the fraction of the whole cluster that the shares down
the tree give. UE is the effective usage: the usage of the user, plus the user's fraction of the
shares times the usage of the rest of the account.

*Usage* is in resource-seconds that decay: halved after each half-life. Decay is exact and needs no timer: an amount known at one
time is known at any later time, and the usage of a running job since its start is an integral in closed form,

    use over d seconds, seen at their end = rate * (h / ln 2) * (1 - 2^(-d / h)).

So usage is stored only when resources are given back: by `charge_of`, in the commit of that event, and therefore exactly once.
The usage of running jobs is added when usage is read. Slurm multiplies by a constant every five minutes instead; both
methods have the same limit. Billing follows Slurm's TRESBillingWeights, times the usage factor of the QOS.

*Tokens*: whoever asks another user's service takes over a part of what its replicas cost: tokens times their price. The sum of
all usage stays what the resources cost. The owner of a replica counts the tokens itself, so no more is moved than it costs.

Sources: fair_tree.html, classic_fair_share.html, priority_multifactor.html, tres.html of Slurm's documentation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hpcsched.model.accounting import (
    BILLING,
    COMPLETION,
    CPU,
    EVERYBODY,
    GPU,
    LICENSE,
    MEM,
    NODE,
    PROMPT,
    Accounting,
    Association,
    Fairness,
    ServiceUse,
)
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job
from hpcsched.model.node import Partition, Share
from hpcsched.model.units import MIB_PER_GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """An account with its children, or a user in an account (`user` is set).

    `usage` includes all children.
    """

    account: str
    user: str = ""
    shares: int = 1
    usage: float = 0.0
    children: tuple[Branch, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareUsage:
    """A row of the tree of accounts and users.

    `norm_shares` and `effective_usage` are relative to siblings (Fair Tree) or to the cluster
    (classic).
    """

    account: str
    user: str
    depth: int
    shares: int
    norm_shares: float
    usage: float
    norm_usage: float  # part of all usage
    effective_usage: float
    level_fs: float  # infinite: no usage yet
    fairshare: float | None  # None: an account in a Fair Tree has none

    @property
    def association(self) -> Association:
        return self.account, self.user


def share_usages(accounting: Accounting, charged: Mapping[Association, float]) -> list[ShareUsage]:
    """Return the rows of the tree, root first, each account before its children.

    `charged`: the charged usage of each association. An association with 0 is in the tree too.
    """
    root = tree_of(accounting, charged)
    if accounting.fairness is Fairness.CLASSIC:
        return list(_classic(root, root.usage, accounting.damping))
    factors = fair_tree(root)
    return [replace(line, fairshare=factors.get(line.association) if line.user else None) for line in _levels(root)]


def factors_of(accounting: Accounting, charged: Mapping[Association, float]) -> dict[Association, float]:
    """Return the fair-share factor of each association."""
    if accounting.fairness is Fairness.FAIR_TREE:
        return fair_tree(tree_of(accounting, charged))
    return {line.association: line.fairshare or 0.0 for line in share_usages(accounting, charged) if line.user}


def tree_of(accounting: Accounting, charged: Mapping[Association, float]) -> Branch:
    """Return the tree of accounts and users with their charged usage.

    If a user has left an account, its usage there still counts, but it has no shares there.
    """
    users: dict[str, list[Branch]] = {}
    for account in accounting.accounts:
        for user in account.users:
            if user != EVERYBODY and (account.name, user) not in charged:
                users.setdefault(account.name, []).append(_user(accounting, account.name, user, 0.0))
    for (name, user), usage in charged.items():
        users.setdefault(name, []).append(_user(accounting, name, user, usage))
    return _account(accounting, "", 1, users)


def _account(accounting: Accounting, name: str, shares: int, users: Mapping[str, list[Branch]]) -> Branch:
    below = [_account(accounting, sub.name, sub.shares, users) for sub in accounting.accounts if sub.parent == name]
    removed = []
    if not name:  # the usage of accounts that are no longer configured counts at the root
        known = {"", *(account.name for account in accounting.accounts)}
        removed = [replace(user, shares=0) for other, own in users.items() if other not in known for user in own]
    own = sorted([*users.get(name, ()), *removed], key=lambda branch: (branch.user, branch.account))
    children = (*own, *below)
    return Branch(account=name, shares=shares, usage=sum(child.usage for child in children), children=children)


def _user(accounting: Accounting, account: str, user: str, usage: float) -> Branch:
    member = not accounting.accounts or account in accounting.accounts_of(user)
    shares = accounting.shares_of(user, account) if member else 0
    return Branch(account=account, user=user, shares=shares, usage=usage)


# ----- Fair Tree


def fair_tree(root: Branch) -> dict[Association, float]:
    """Return the factor of each user below `root`: its rank divided by the number of users."""
    ranks: dict[Association, int] = {}
    count = sum(1 for _ in _users(root))
    _rank(_with_fs(root), count, count, ranks)
    return {association: rank / count for association, rank in ranks.items()}


def _rank(siblings: Sequence[tuple[float, Branch]], free: int, tied: int, ranks: dict[Association, int]) -> int:
    """Assign ranks from `free` downwards; return the next free rank.

    `tied`: the rank of the first siblings (>= `free`).
    """
    for _, group in groupby(sorted(siblings, key=lambda item: -item[0]), key=lambda item: item[0]):
        branches = [branch for _, branch in group]
        users = [branch for branch in branches if branch.user]
        for branch in users:
            ranks[branch.account, branch.user] = tied
        merged = [child for branch in branches if not branch.user for child in _with_fs(branch)]
        free -= len(users)
        free = _rank(merged, free, tied, ranks)
        tied = free
    return free


def _with_fs(parent: Branch) -> list[tuple[float, Branch]]:
    """Return the children with their LF."""
    shares = sum(child.shares for child in parent.children)
    return [(_level_fs(child, shares, parent.usage), child) for child in parent.children]


def _level_fs(child: Branch, shares: int, usage: float) -> float:
    if child.shares == 0:
        return 0.0
    if child.usage <= 0.0:
        return math.inf
    return (child.shares / shares) / (child.usage / usage)


def _users(branch: Branch) -> Iterator[Branch]:
    if branch.user:
        yield branch
    for child in branch.children:
        yield from _users(child)


def _levels(branch: Branch, parent: Branch | None = None, total: float = 0.0, depth: int = 0) -> Iterator[ShareUsage]:
    """Yield the rows of the tree, without factors."""
    shares = sum(child.shares for child in parent.children) if parent else branch.shares
    usage = parent.usage if parent else branch.usage
    total = total if parent else branch.usage
    yield ShareUsage(
        account=branch.account,
        user=branch.user,
        depth=depth,
        shares=branch.shares,
        norm_shares=branch.shares / shares if shares else 0.0,
        usage=branch.usage,
        norm_usage=branch.usage / total if total else 0.0,
        effective_usage=branch.usage / usage if usage else 0.0,
        level_fs=_level_fs(branch, shares, usage),
        fairshare=None,
    )
    for child in branch.children:
        yield from _levels(child, branch, total, depth + 1)


# ----- the classic formula


def classic_factor(effective_usage: float, norm_shares: float, damping: float = 1.0) -> float:
    """Return 2^(-UE / S / damping); 0 without shares."""
    return 2.0 ** (-effective_usage / norm_shares / damping) if norm_shares > 0.0 else 0.0


def _classic(
    branch: Branch, total: float, damping: float, parent: ShareUsage | None = None, siblings: int = 1
) -> Iterator[ShareUsage]:
    level_shares = branch.shares / siblings if siblings else 0.0
    used = branch.usage / total if total else 0.0
    effective = used
    if parent is not None and parent.depth > 0:
        effective += (parent.effective_usage - used) * level_shares
    norm_shares = level_shares * (parent.norm_shares if parent else 1.0)
    line = ShareUsage(
        account=branch.account,
        user=branch.user,
        depth=parent.depth + 1 if parent else 0,
        shares=branch.shares,
        norm_shares=norm_shares,
        usage=branch.usage,
        norm_usage=used,
        effective_usage=effective,
        level_fs=math.inf if not effective else norm_shares / effective,
        fairshare=classic_factor(effective, norm_shares, damping),
    )
    yield line
    below = sum(child.shares for child in branch.children)
    for child in branch.children:
        yield from _classic(child, total, damping, line, below)


Amounts = tuple[tuple[str, float], ...]  # resource and resource-seconds
UsageKey = tuple[str, str, str]  # account, user and QOS
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
    def key(self) -> UsageKey:
        return self.account, self.user, self.qos


def decay(elapsed_s: float, half_life_s: float | None) -> float:
    """Return the weight, 0..1, of a second of usage `elapsed_s` ago."""
    return 1.0 if half_life_s is None else 2.0 ** (-max(0.0, elapsed_s) / half_life_s)


def integral(length_s: float, half_life_s: float | None) -> float:
    """Return the decayed usage of one unit during the last `length_s` seconds."""
    length_s = max(0.0, length_s)
    if half_life_s is None:
        return length_s
    return -half_life_s / math.log(2) * math.expm1(-length_s / half_life_s * math.log(2))


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
    return _use_of(job, integral(now_s - _since_s(job, now_s), accounting.half_life_s), accounting, weights, types)


def billing_per_s(job: Job, accounting: Accounting, weights: Weights, types: GpuTypes) -> float:
    """Return the billing of one second of the resources that `job` still holds."""
    return dict(_use_of(job, 1.0, accounting, weights, types)).get(BILLING, 0.0)


def _use_of(job: Job, lasted_s: float, accounting: Accounting, weights: Weights, types: GpuTypes) -> Amounts:
    """Return the usage of what `job` still holds, for a number of seconds."""
    shares = [share for share in job.shares if share.node in job.held_nodes]
    if not shares or job.suspended_at_s is not None:
        return ()
    used_s = lasted_s * factor_of(accounting, job.qos)
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


# ----- tokens of services

CREDIT_S = 3600.0  # a request may be charged so long after its replica has worked for it


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCredit:
    """Billing seconds of a service's replicas that only `payer` has paid so far."""

    payer: UsageKey
    at_s: float
    billing_s: float = 0.0


def accrued(credit: ServiceCredit | None, payer: UsageKey, per_s: float, now_s: float) -> ServiceCredit:
    """Return the credit at `now_s` of replicas that cost `per_s`; a new payer has none."""
    if credit is None or credit.payer != payer:
        return ServiceCredit(payer=payer, at_s=now_s)
    more_s = per_s * max(0.0, now_s - credit.at_s)
    return ServiceCredit(payer=payer, at_s=now_s, billing_s=min(credit.billing_s + more_s, per_s * CREDIT_S))


def token_price(use: ServiceUse, token_billing: Weights) -> float:
    """Return the billing seconds of the tokens that a user has asked for."""
    prompt, completion = token_billing.get(PROMPT, 0.0), token_billing.get(COMPLETION, 0.0)
    return use.prompt_tokens * prompt + use.completion_tokens * completion
