"""Compute the usage ledger, for plans and in full for users: decayed usage and factors.

Factors are recomputed every few seconds at most. They change slowly, and scanning all running jobs
for each plan would cost more than the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hpcsched.auth.authorize import Action, Identity, authorize
from hpcsched.errors import RateLimitError, RequestError
from hpcsched.model.accounting import BILLING, Account, Accounting, Association, Qos, UserRules
from hpcsched.model.units import nearest
from hpcsched.sched.fairshare import (
    UsageKey,
    UsedResources,
    at,
    by_association,
    factors_of,
    plus,
    running_use,
    weights_of,
)
from hpcsched.sched.limits import spent_text
from hpcsched.sched.snapshot import UsageLedger
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction

REFRESH_S = 5.0
SPENT_WAIT_S = 60.0  # usage decays slowly: a client need not ask more often


class UsageLedgerCache:
    """Builds the usage ledger of a cluster, and caches the factors for a while."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._made_at_s = float("-inf")
        self._factors: tuple[tuple[Association, float], ...] = ()

    def ledger(self, now_s: float, *, fairshare: bool) -> UsageLedger:
        """Return the ledger for a plan at `now_s`; without `fairshare` the factors are not needed."""
        accounting = self._cluster.config.accounting
        if not fairshare:
            self._factors = ()
        elif not 0.0 <= now_s - self._made_at_s < REFRESH_S:
            factors = factors_of(accounting, charged(self._cluster, now_s))
            self._factors, self._made_at_s = tuple(factors.items()), now_s
        used = bounded_use(self._cluster, now_s)
        return UsageLedger(accounting=accounting, fairshare=self._factors, used=used)

    def forget(self) -> None:
        """Discard the cache."""
        self._made_at_s = float("-inf")


def _bounds_usage(accounting: Accounting) -> bool:
    """Return whether any limit is on accumulated usage."""
    holders: tuple[Account | UserRules | Qos, ...] = (*accounting.accounts, *accounting.users, *accounting.qos)
    return any(holder.limits.grp_tres_mins for holder in holders)


def bounded_use(cluster: ClusterState, now_s: float) -> tuple[UsedResources, ...]:
    """Return the decayed usage of ended jobs for limits on it; () if there is no such limit."""
    accounting = cluster.config.accounting
    if not _bounds_usage(accounting):
        return ()
    return tuple(at(row, now_s, accounting.half_life_s) for row in cluster.usage.values())


def used_now(cluster: ClusterState, now_s: float) -> list[UsedResources]:
    """Return the decayed usage of all users at `now_s`, including running jobs."""
    accounting = cluster.config.accounting
    rows = {key: at(used, now_s, accounting.half_life_s) for key, used in cluster.usage.items()}
    for job in cluster.active_jobs():
        weights = weights_of(accounting, cluster.partitions.get(job.partition))
        account, user = accounting.association_of(job.user, job.account)
        key = (account, user, job.qos)
        known = rows.get(key) or UsedResources(account=account, user=user, qos=job.qos, at_s=now_s)
        rows[key] = plus(known, running_use(job, now_s, accounting, weights, cluster.gpu_types(job)))
    return list(rows.values())


def charged(cluster: ClusterState, now_s: float) -> dict[Association, float]:
    """Return the charge of each association; 0 for those that only have waiting jobs."""
    accounting = cluster.config.accounting
    found = by_association(used_now(cluster, now_s))
    for job_id in cluster.pending:
        job = cluster.jobs[job_id]
        found.setdefault(accounting.association_of(job.user, job.account), 0.0)
    return found


# ----- tokens of services: their users take over a part of what the replicas cost


def move_charge(tx: Transaction, payer: UsageKey, association: Association, billing_s: float) -> None:
    """Charge an association with `billing_s` more, and `payer` with as much less."""
    tx.add_usage(payer, ((BILLING, -billing_s),), tx.now_s)
    tx.add_usage((*association, ""), ((BILLING, billing_s),), tx.now_s)


def check_unspent(cluster: ClusterState, account: str, user: str, now_s: float) -> None:
    """Raise RateLimitError if the user or the account has reached a limit on billing-minutes."""
    accounting = cluster.config.accounting
    account, user = accounting.association_of(user, account)
    if why := spent_text(accounting, bounded_use(cluster, now_s), account, user):
        raise RateLimitError(f"cannot ask the model: {why}; usage decays, or ask an admin", SPENT_WAIT_S)


# ----- reset usage: an admin's ``hctl reset usage``, as ``sacctmgr modify ... set RawUsage=0``
#
# The usage of ended jobs becomes 0. The usage of a running job is charged when it ends, and its
# past part cannot be separated from its clocks. So an equal negative usage is recorded. Both decay
# alike, so their sum is the usage from now on. Job records (hacct) do not change.


def reset(tx: Transaction, identity: Identity, accounts: Sequence[str], users: Sequence[str]) -> list[tuple[str, str]]:
    """Reset the usage of these users in these accounts and the accounts below them.

    Empty `accounts` means all accounts, empty `users` all users. Return the associations that had
    usage.
    """
    authorize(identity, Action.RESET_USAGE)
    cluster = tx.cluster
    rows = used_now(cluster, tx.now_s)
    accounting = cluster.config.accounting
    _must_be("account", accounts, {account.name for account in accounting.accounts} | {row.account for row in rows})
    _must_be("user", users, _known_users(cluster, rows))
    found: dict[tuple[str, str], None] = {}
    for row in rows:
        if (accounts and not accounting.is_part_of(row.account, accounts)) or (users and row.user not in users):
            continue
        tx.add_usage(row.key, tuple((name, -amount) for name, amount in row.amounts), tx.now_s)
        found[row.account, row.user] = None
    return list(found)


def _known_users(cluster: ClusterState, rows: Sequence[UsedResources]) -> set[str]:
    accounting = cluster.config.accounting
    named = {user for account in accounting.accounts for user in account.users}
    return named | {rules.name for rules in accounting.users} | {row.user for row in rows}


def _must_be(what: str, names: Sequence[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            there = ", ".join(sorted(filter(None, known))) or "none"
            raise RequestError(
                f"cannot reset the usage of {what} {name[:63]!r}: there is none{nearest(name, sorted(known))}; "
                f"known are {there}"
            )
