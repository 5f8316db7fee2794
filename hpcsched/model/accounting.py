"""Accounts, their users, qualities of service, limits and licences.

They are as the configuration describes them.

An *association* is a user in an account: what fair share and limits are about. Accounts form a tree below an unnamed root.
Without configured accounts, every user is an association of the root, with equal shares, and the account of a job is only a
label. Knows nothing of what has been used (`hpcsched.sched.fairshare`) or of what runs (`hpcsched.sched.limits`).

*TRES* (trackable resources) are counted under Slurm's names: cpu, mem (MiB), node, gres/gpu, gres/gpu:TYPE, billing,
license/NAME. Sources: sacctmgr(1), tres.html and qos.html of Slurm's documentation.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from hpcsched.errors import RequestError
from hpcsched.model.units import nearest

Tres = tuple[tuple[str, int], ...]  # resource and count, each resource once
Association = tuple[str, str]  # account ("": the root) and user

EVERYBODY = "*"  # in an account's users: all users without an account
NORMAL = "normal"  # the QOS of jobs that name none, if it is configured
CPU, MEM, NODE, GPU, BILLING, LICENSE = "cpu", "mem", "node", "gres/gpu", "billing", "license/"
TOKENS = PROMPT, COMPLETION = "prompt", "completion"  # of requests to served models


class Fairness(StrEnum):
    """How fair-share factors follow from shares and usage."""

    FAIR_TREE = "fair-tree"
    CLASSIC = "classic"


class PreemptMode(StrEnum):
    """What is done to a preempted job."""

    OFF = "off"
    REQUEUE = "requeue"
    CANCEL = "cancel"
    CHECKPOINT = "checkpoint"  # signal, grace time, then requeue
    SUSPEND = "suspend"


class PreemptType(StrEnum):
    """Which jobs outrank others."""

    NONE = "none"
    QOS = "qos"  # as their QOS say
    PARTITION = "partition"  # by their partitions' priority_tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits; None or empty: no limit. ``max_``: for each user or job.

    ``grp_``: for all of them together.

    Of an account: its users' jobs there, and for ``grp_`` those of its subaccounts too. Of a user: in all accounts.
    """

    max_jobs: int | None = None  # of a user, running
    max_submit_jobs: int | None = None  # of a user, waiting and running
    max_wall_s: int | None = None  # the time limit of a job
    max_tres_per_job: Tres = ()
    max_tres_per_user: Tres = ()  # held at once
    max_tres_mins_per_job: Tres = ()  # with the time limit
    grp_jobs: int | None = None
    grp_submit_jobs: int | None = None
    grp_tres: Tres = ()
    grp_tres_mins: Tres = ()  # past usage, which decays, plus what running jobs may use


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """[accounts.NAME]. `parent` "": directly below the root."""

    name: str
    parent: str = ""
    shares: int = 1
    users: tuple[str, ...] = ()
    coordinators: tuple[str, ...] = ()
    priority: int = 0
    qos: tuple[str, ...] = ()  # QOS that may be used; empty: those of the parent, in the end the normal one
    default_qos: str = ""
    limits: Limits = NO_LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRules:
    """[users.NAME]: differences from the defaults. `account_shares`: shares by account."""

    name: str
    default_account: str = ""
    shares: int = 1
    account_shares: tuple[tuple[str, int], ...] = ()
    priority: int | None = None  # None: the account's
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    limits: Limits = NO_LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Qos:
    """[qos.NAME].

    Its jobs may preempt those of the QOS in `preempt`; the rest of the preempt keys is about being preempted.
    """

    name: str
    priority: int = 0
    usage_factor: float = 1.0
    preempt: tuple[str, ...] = ()
    preempt_mode: PreemptMode | None = None  # None: as the cluster's
    grace_time_s: float = 0.0
    exempt_time_s: float = 0.0
    limits: Limits = NO_LIMITS


class EnergyUse(NamedTuple):
    """Energy that an attempt of a job caused on a node.

    `source`: see `hpcsched.metrics.energy`.
    """

    job_id: int
    attempt: int
    node: str
    source: str
    joules: float


class GpuUse(NamedTuple):
    """GPU-seconds that an attempt held on a node while it was sampled, and the busy part."""

    job_id: int
    attempt: int
    node: str
    seen_s: float
    busy_s: float


class ServiceUse(NamedTuple):
    """What a user has asked of a served model on a day, counted from 1970.

    `charged_s`: billing seconds that the user was charged for the tokens, and the owner of the service was not.
    """

    service: str
    user: str
    account: str
    day: int
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    charged_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """The accounting configuration.

    `billing`: weight of each resource for a second (memory: per GiB). `token_billing`: billing seconds of a token of each kind in
    `TOKENS` that a user asks of another user's service.
    """

    accounts: tuple[Account, ...] = ()
    users: tuple[UserRules, ...] = ()
    qos: tuple[Qos, ...] = ()
    licenses: tuple[tuple[str, int], ...] = ()
    billing: tuple[tuple[str, float], ...] = ((CPU, 1.0),)
    token_billing: tuple[tuple[str, float], ...] = ()
    fairness: Fairness = Fairness.FAIR_TREE
    half_life_s: float | None = 7 * 86400.0  # None: usage does not decay
    damping: float = 1.0  # of the classic formula

    def account(self, name: str) -> Account | None:
        return next((account for account in self.accounts if account.name == name), None)

    def rules(self, user: str) -> UserRules | None:
        return next((rules for rules in self.users if rules.name == user), None)

    def quality(self, name: str) -> Qos | None:
        return next((qos for qos in self.qos if qos.name == name), None)

    def lineage(self, name: str) -> Iterator[Account]:
        """Yield the account and its ancestors, nearest first."""
        account = self.account(name)
        while account is not None:
            yield account
            account = self.account(account.parent)

    def is_part_of(self, name: str, among: Container[str]) -> bool:
        """Say whether the account, or one of its ancestors, is in `among`.

        An unknown account has no ancestors.
        """
        return name in among or any(account.name in among for account in self.lineage(name))

    def accounts_of(self, user: str) -> list[str]:
        """Return the accounts that `user` belongs to, in the order of the configuration."""
        named = [account.name for account in self.accounts if user in account.users]
        return named or [account.name for account in self.accounts if EVERYBODY in account.users]

    def coordinators(self) -> dict[str, frozenset[str]]:
        """Return the accounts of each coordinator, with the accounts below these."""
        found: dict[str, frozenset[str]] = {}
        for account in self.accounts:
            for user in {user for above in self.lineage(account.name) for user in above.coordinators}:
                found[user] = found.get(user, frozenset()) | {account.name}
        return found

    def default_account(self, user: str) -> str:
        """Return the account of a job of `user` that names none; "" if there is none."""
        rules = self.rules(user)
        if rules is not None and rules.default_account:
            return rules.default_account
        return next(iter(self.accounts_of(user)), "")

    def shares_of(self, user: str, account: str) -> int:
        """Return the raw shares of an association."""
        rules = self.rules(user)
        return 1 if rules is None else dict(rules.account_shares).get(account, rules.shares)

    def association_of(self, user: str, account: str) -> Association:
        """Return the association that is charged for a job.

        A job without an account has the default one.
        """
        return (account or self.default_account(user), user) if self.accounts else ("", user)


NO_ACCOUNTING = Accounting()


class Barred(StrEnum):
    """The property of a job that excludes it from a partition."""

    ACCOUNT = "account"
    QOS = "QOS"


def barred(
    accounting: Accounting, allow_accounts: Container[str], allow_qos: Container[str], account: str, qos: str
) -> Barred | None:
    """Return the account or QOS that excludes a job, None if it is allowed."""
    if allow_accounts and not accounting.is_part_of(account, allow_accounts):
        return Barred.ACCOUNT
    return Barred.QOS if allow_qos and qos not in allow_qos else None


def resolve(accounting: Accounting, user: str, account: str, qos: str) -> tuple[str, str]:
    """Return the account and QOS of a job of `user` that asks for these; "": the default.

    Without configured accounts, any account name is accepted; without configured QOS, only the normal QOS. Raises RequestError.
    """
    if accounting.accounts:
        account = _account(accounting, user, account)
    if accounting.accounts or accounting.qos:
        qos = _qos(accounting, user, account, qos)
    return account, qos


def _account(accounting: Accounting, user: str, account: str) -> str:
    own = accounting.accounts_of(user)
    account = account or accounting.default_account(user)
    if account in own:
        return account
    why = "Invalid account or account/partition combination specified"
    if not account:
        raise RequestError(f"cannot submit a job: {why}: {user} is in no account; ask an admin")
    known = f"{user} is in {', '.join(own) or 'none'}{nearest(account, own)}"
    raise RequestError(f"cannot charge account {account[:63]!r}: {why}: {known}")


def _qos(accounting: Accounting, user: str, account: str, qos: str) -> str:
    names = [known.name for known in accounting.qos]
    default, listed = _default_and_listed_qos(accounting, user, account)
    if not qos:
        return default or (NORMAL if NORMAL in listed and NORMAL in names else "")
    if qos in names and (qos in listed or qos == default):
        return qos
    if qos == NORMAL and NORMAL not in names and NORMAL in listed:  # Slurm always has a QOS of that name
        return NORMAL if not names else ""
    raise _qos_error(accounting, user, account, qos)


def _default_and_listed_qos(accounting: Accounting, user: str, account: str) -> tuple[str, tuple[str, ...]]:
    """Return the user's default QOS in the account, "" for none, and all allowed QOS.

    The user's own settings count, else those of the nearest account that has any. As in Slurm, a user may use only listed
    QOS; without a list that is the normal one.
    """
    rules = accounting.rules(user)
    levels: list[UserRules | Account] = [rules] if rules is not None else []
    levels += accounting.lineage(account)
    default = next((level.default_qos for level in levels if level.default_qos), "")
    return default, next((level.qos for level in levels if level.qos), (NORMAL,))


def _qos_error(accounting: Accounting, user: str, account: str, qos: str) -> RequestError:
    """Return the error for a QOS that the user may not use, with those that the user may."""
    names = [known.name for known in accounting.qos]
    cannot = f"cannot use QOS {qos[:63]!r}: Invalid qos specification"
    if not names:
        return RequestError(f"{cannot}: none is configured; leave it out, or ask an admin for one")
    default, listed = _default_and_listed_qos(accounting, user, account)
    allowed = tuple(dict.fromkeys(name for name in (*listed, default) if name in names))
    may = f"{user} may use {', '.join(allowed) or 'no QOS by name'}"
    if qos not in names:
        return RequestError(f"{cannot}: there is no such QOS{nearest(qos, names)}; {may}")
    where = f"[accounts.{account}]" if accounting.accounts else f"[users.{user}]"
    return RequestError(f"{cannot}: {may}; an admin opens it by adding {qos!r} to qos in {where} of hpcsched.toml")
