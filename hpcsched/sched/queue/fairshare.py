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

Sources: fair_tree.html, classic_fair_share.html of Slurm's documentation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hpcsched.model.accounting import EVERYBODY, Accounting, Association, Fairness


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
    gone = []
    if not name:  # the usage of accounts that are no longer configured counts at the root
        known = {"", *(account.name for account in accounting.accounts)}
        gone = [replace(user, shares=0) for other, own in users.items() if other not in known for user in own]
    own = sorted([*users.get(name, ()), *gone], key=lambda branch: (branch.user, branch.account))
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
