"""Limits of accounts, users, QOS and partitions: the rules, and how much of each is used.

A *rule* is one number that one *holder* (an account, a user, a QOS, a partition) sets. A limit that an account sets for each of
its users applies unless a user, or a nearer account, sets another limit. ``grp_`` limits apply at each account up to the root.
Limits of partitions use the names of QOS limits, like Slurm's partition QOS.

`LimitCounts` counts running jobs, and the jobs that a pass starts, so limits also hold within one pass. If the resources of a
job depend on its nodes, it is tested twice: first with the least that it can get, then with its actual resources. An elastic
job that grows is not another job; limits for one job apply to all of it.

A limit on resource-minutes counts past usage (`UsageLedger.used`). It also counts the possible usage of running jobs until
their time limits, as if they had used it already. So a job that starts can end within the limit. Source: resource_limits.html,
qos.html, job_reason_codes.html of Slurm's documentation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hpcsched.model.accounting import (
    BILLING,
    CPU,
    GPU,
    LICENSE,
    MEM,
    NO_LIMITS,
    NODE,
    Account,
    Accounting,
    Barred,
    Limits,
    Qos,
    Tres,
    UserRules,
    barred,
)
from hpcsched.model.ids import JobId
from hpcsched.model.job import Reason
from hpcsched.model.node import Partition
from hpcsched.model.units import MINUTE_S, format_mem, format_time_s, known_limit_s
from hpcsched.sched.decisions import Wait
from hpcsched.sched.fairshare import UsedResources, factor_of, weights_of
from hpcsched.sched.place.request import Shape
from hpcsched.sched.sentences import listed, plural
from hpcsched.sched.snapshot import PendingJob, RunningJob, Snapshot
from hpcsched.sched.tres import Held, held_by, least_there, with_billing


class Kind(Enum):
    MAX_SUBMIT = "max_submit_jobs"
    GRP_SUBMIT = "grp_submit_jobs"
    WALL = "max_wall_s"
    PER_JOB = "max_tres_per_job"
    JOB_MINUTES = "max_tres_mins_per_job"
    MAX_JOBS = "max_jobs"
    GRP_JOBS = "grp_jobs"
    PER_USER = "max_tres_per_user"
    GRP = "grp_tres"
    GRP_MINUTES = "grp_tres_mins"


EACH_USER = frozenset({Kind.MAX_SUBMIT, Kind.MAX_JOBS, Kind.PER_USER})  # counted for each user of the holder separately
SUBMISSION = frozenset({Kind.MAX_SUBMIT, Kind.GRP_SUBMIT})  # checked only at submission
TIMED = frozenset({Kind.WALL, Kind.JOB_MINUTES, Kind.GRP_MINUTES})
GROUP = frozenset({Kind.GRP_SUBMIT, Kind.GRP_JOBS, Kind.GRP, Kind.GRP_MINUTES})


class Holder(Enum):
    QOS = "QOS"
    PARTITION = "partition"
    USER = "user"
    ACCOUNT = "account"


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRule:
    """One limit of a holder: at most `most` of `resource` ("": of jobs, or of seconds)."""

    kind: Kind
    holder: Holder
    name: str
    most: float
    resource: str = ""

    @property
    def reason(self) -> Reason:
        """Return Slurm's reason for a job that waits for this limit."""
        return _reason(self)

    @property
    def where(self) -> str:
        """Return the holder as text: ``QOS 'high'``."""
        return f"{self.holder.value} {self.name!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Whose:
    """The fields of a job that select its rules."""

    partition: str
    account: str
    user: str
    qos: str


def rules_of(accounting: Accounting, partition: Partition | None, whose: Whose) -> tuple[LimitRule, ...]:
    """Return the rules of such jobs, in the order QOS, partition, user, accounts."""
    rules: list[LimitRule] = []
    qos = accounting.quality(whose.qos)
    if qos is not None:
        rules += _all(qos.limits, Holder.QOS, qos.name)
    if partition is not None:
        rules += _all(partition.limits, Holder.PARTITION, partition.name)
    lines = list(accounting.lineage(whose.account))
    taken: set[tuple[Kind, str]] = set()
    own = accounting.rules(whose.user)
    holders = [(own.limits, Holder.USER, own.name)] if own is not None else []
    holders += [(account.limits, Holder.ACCOUNT, account.name) for account in lines]
    for limits, holder, name in holders:
        for rule in _all(limits, holder, name):
            if rule.kind in GROUP or (rule.kind, rule.resource) not in taken:
                rules.append(rule)
        taken |= {(rule.kind, rule.resource) for rule in _all(limits, holder, name)}
    return tuple(rules)


def _all(limits: Limits, holder: Holder, name: str) -> Iterator[LimitRule]:
    for kind in Kind:
        value: int | Tres | None = getattr(limits, kind.value)
        if isinstance(value, tuple):
            for resource, most in value:
                yield LimitRule(kind=kind, holder=holder, name=name, most=most, resource=resource)
        elif value is not None:
            yield LimitRule(kind=kind, holder=holder, name=name, most=value)


def why_never(
    rules: tuple[LimitRule, ...], held: Mapping[str, float], limit_s: float | None, factor: float
) -> LimitRule | None:
    """Return the rule that a job with `held` and this time limit breaks by itself.

    None: it breaks none. `factor`: the usage factor of its QOS, for limits on past usage.
    """
    return next((rule for rule in rules if _alone(rule, held, limit_s, factor) > rule.most), None)


def _alone(rule: LimitRule, held: Mapping[str, float], limit_s: float | None, factor: float) -> float:
    """Return the amount that the job alone adds to the limited quantity."""
    match rule.kind:
        case Kind.WALL:
            return limit_s if limit_s is not None else float("inf")
        case Kind.JOB_MINUTES:
            return minutes(held.get(rule.resource, 0.0), limit_s)
        case Kind.GRP_MINUTES:
            return minutes(held.get(rule.resource, 0.0) * factor, limit_s)
        case Kind.PER_JOB | Kind.PER_USER | Kind.GRP:
            return held.get(rule.resource, 0.0)
        case _:
            return 1


def minutes(amount: float, limit_s: float | None) -> float:
    """Return the resource-minutes of `amount` until the time limit; infinite without a limit."""
    if not amount:
        return 0.0
    return amount * limit_s / MINUTE_S if limit_s is not None else float("inf")


def never_text(rule: LimitRule, held: Mapping[str, float], limit_s: float | None, factor: float) -> str:
    """Return the sentence about a job that breaks `rule` by itself."""
    asked = _alone(rule, held, limit_s, factor)
    each = "each user" if rule.kind in EACH_USER else "all jobs together" if rule.kind in GROUP else "a job"
    if rule.kind is Kind.WALL:
        has = "none" if limit_s is None else format_time_s(limit_s)
        return f"{rule.where} allows {each} a time limit of {format_time_s(rule.most)}, and this one has {has}"
    if not rule.resource:
        return f"{rule.where} allows {each} {plural(int(rule.most), 'job')}"
    if asked == float("inf"):
        return f"{rule.where} allows {each} {amount_text(rule, rule.most)}, and this job has no time limit; see --time"
    return (
        f"{rule.where} allows {each} {amount_text(rule, rule.most)}, and this job asks for {amount_text(rule, asked)}"
    )


def now_text(rule: LimitRule, user: str, have: float, more: float) -> str:
    """Return the sentence about a job that needs `more` while other jobs use `have`."""
    jobs = f"{user}'s jobs" if rule.kind in EACH_USER else "its jobs"
    bound = "each user" if rule.kind in EACH_USER else "all jobs together"
    if rule.kind in (Kind.MAX_JOBS, Kind.GRP_JOBS):
        return f"{rule.where} allows {bound} {plural(int(rule.most), 'running job')}, and {int(have)} run"
    verb = "have used, or may yet use," if rule.kind is Kind.GRP_MINUTES else "have"
    return (
        f"{rule.where} allows {bound} {amount_text(rule, rule.most)}; {jobs} {verb} {amount_text(rule, have)}, "
        f"and this one needs {amount_text(rule, more)}"
    )


def used_minutes(rule: LimitRule, accounting: Accounting, rows: Iterable[UsedResources]) -> float:
    """Return the resource-minutes of the rule's holder in these rows of decayed usage."""
    used_s = 0.0
    for row in rows:
        mine = {
            Holder.QOS: row.qos == rule.name,
            Holder.USER: row.user == rule.name,
            Holder.ACCOUNT: accounting.is_part_of(row.account, (rule.name,)),
            Holder.PARTITION: False,
        }[rule.holder]
        used_s += dict(row.amounts).get(rule.resource, 0.0) if mine else 0.0
    return used_s / MINUTE_S


def spent_text(accounting: Accounting, rows: Sequence[UsedResources], account: str, user: str) -> str:
    """Return which limit on billing-minutes a user has reached, in words; "" if none."""
    for rule in rules_of(accounting, None, Whose(partition="", account=account, user=user, qos="")):
        if rule.kind is Kind.GRP_MINUTES and rule.resource == BILLING:
            used = used_minutes(rule, accounting, rows)
            if used >= rule.most:
                return f"{rule.where} allows {amount_text(rule, rule.most)}, and {amount_text(rule, used)} are used"
    return ""


def amount_text(rule: LimitRule, amount: float) -> str:
    """Return an amount of the rule's resource as text: ``8 cpus``, ``120 GPU-minutes``."""
    timed = rule.kind in (Kind.GRP_MINUTES, Kind.JOB_MINUTES)
    number = f"{amount:.0f}"
    if timed:
        return f"{number} {_NOUNS.get(rule.resource, rule.resource)}-minutes"
    if rule.resource == MEM:
        return f"{format_mem(int(amount))} memory"
    if rule.resource.startswith(LICENSE):
        return f"{plural(int(amount), 'licence')} {rule.resource.removeprefix(LICENSE)}"
    if rule.resource.startswith(GPU + ":"):
        return plural(int(amount), f"{rule.resource.removeprefix(GPU + ':')} GPU")
    return f"{number} billing" if rule.resource == BILLING else plural(int(amount), _NOUNS[rule.resource])


_NOUNS = {CPU: "cpu", MEM: "MiB", NODE: "node", GPU: "GPU", BILLING: "billing"}


# ----- Slurm's wait reasons: of QOS and partitions, and of associations (accounts and users)

_GRP = {CPU: "GrpCpuLimit", MEM: "GrpMemLimit", NODE: "GrpNodeLimit", GPU: "GrpGRES", BILLING: "GrpBilling",
        LICENSE: "GrpLicense"}  # fmt: skip
_GRP_MINUTES = {CPU: "GrpCPUMinutesLimit", MEM: "GrpMemMinutes", GPU: "GrpGRESMinutes", BILLING: "GrpBillingMinutes"}
_QOS_MAX = {CPU: "MaxCpu", MEM: "MaxMemory", NODE: "MaxNode", GPU: "MaxGRES", BILLING: "MaxBilling",
            LICENSE: "MaxLicense"}  # fmt: skip
_ASSOC_MAX = _QOS_MAX | {MEM: "MaxMem"}
_QOS_JOBS = {
    Kind.MAX_SUBMIT: "MaxSubmitJobPerUserLimit",
    Kind.MAX_JOBS: "MaxJobsPerUserLimit",
    Kind.GRP_SUBMIT: "GrpSubmitJobsLimit",
    Kind.GRP_JOBS: "GrpJobsLimit",
    Kind.WALL: "MaxWallDurationPerJobLimit",
}
_ASSOC_JOBS = _QOS_JOBS | {Kind.MAX_SUBMIT: "MaxSubmitJobLimit", Kind.MAX_JOBS: "MaxJobsLimit"}
_PER = {Kind.PER_JOB: "PerJob", Kind.PER_USER: "PerUser", Kind.JOB_MINUTES: "MinutesPerJob"}


def _reason(rule: LimitRule) -> Reason:
    resource = next((name for name in (GPU, LICENSE) if rule.resource.startswith(name)), rule.resource)
    of_qos = rule.holder in (Holder.QOS, Holder.PARTITION)
    side, of_jobs, most = ("QOS", _QOS_JOBS, _QOS_MAX) if of_qos else ("Assoc", _ASSOC_JOBS, _ASSOC_MAX)
    if rule.kind in of_jobs:
        return Reason(side + of_jobs[rule.kind])
    if rule.kind is Kind.GRP_MINUTES:
        return Reason(side + _GRP_MINUTES[resource])
    # Slurm has no limit of an association for each user: it is the GrpTRES of the user's association.
    if rule.kind is Kind.GRP or (rule.kind is Kind.PER_USER and not of_qos):
        return Reason(side + _GRP[resource])
    return Reason(side + most.get(resource, "") + _PER[rule.kind] + ("Limit" if resource in (CPU, NODE) else ""))


_Key = tuple[Holder, str, str]  # holder, its name, and the user if each user is counted separately


@dataclass(slots=True)
class _Count:
    jobs: int = 0
    held: dict[str, float] = field(default_factory=dict)
    minutes: dict[str, float] = field(default_factory=dict)

    def add(self, held: Mapping[str, float], limit_s: float | None, factor: float) -> None:
        self.jobs += 1
        for name, amount in held.items():
            self.held[name] = self.held.get(name, 0.0) + amount
            self.minutes[name] = self.minutes.get(name, 0.0) + minutes(amount * factor, limit_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """The common properties of jobs of one user, account, QOS and partition."""

    rules: tuple[LimitRule, ...]
    timed: bool  # a rule depends on the time limit
    factor: float
    not_allowed: Wait | None  # the wait of all of them, if the account or the QOS was removed


class LimitCounts:
    """The limits of one pass, and how much of each is used.

    For each job: `why_not` before it is tried, `why_not_there` when its nodes are known, `started`
    when it starts. `limited`: a limit is set, so the resources of jobs must be known.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._accounting: Accounting = snapshot.ledger.accounting
        self._nodes = {node.name: node for node in snapshot.nodes}
        self._scopes: dict[tuple[str, str, str, str], _Scope] = {}
        self._counts: dict[_Key, _Count] = {}
        self._least: dict[
            tuple[int, str], tuple[Shape, Held]
        ] = {}  # keeps the shapes alive, because their id() is a key
        self._memo: dict[tuple[int, int, int | None], Wait | None] = {}
        self._minutes_used: dict[tuple[Holder, str, str], float] = {}
        self._growing: dict[JobId, RunningJob] = {}
        self._array_tasks = Counter(job.array_job_id for job in snapshot.running)
        self.any = _has_rules(snapshot)
        self.limited = _has_limits(snapshot)
        if self.limited:
            self._growing = {job.id: job for job in snapshot.running if job.elastic is not None}
            for job in snapshot.running:
                # A suspended job gets its cpus back, so they count meanwhile, as in Slurm.
                shares = job.lent_shares or job.shares
                self._count(job, held_by(shares, self._nodes, job.licenses), _limit_s(job))

    def why_not(self, job: PendingJob) -> Wait | None:
        """Return the wait for a limit that `job` breaks with the least that it can get.

        None: it breaks none.
        """
        if job.array_limit and self._array_tasks.get(job.array_job_id, 0) >= job.array_limit:
            running = f"{plural(job.array_limit, 'task')} of its array run at a time, its own limit"
            return Wait(reason=Reason.ARRAY_LIMIT, detail=running)
        if not self.any:
            return None
        scope = self._scope_of(job)
        if scope.not_allowed is not None or not scope.rules:
            return scope.not_allowed
        shape = job.request.shape
        key = (id(scope), id(shape), job.request.time_limit_s if scope.timed else None)
        if job.licenses or job.id in self._growing:
            return self._breach(job, scope, self._least_of(job))
        if key not in self._memo:
            self._memo[key] = self._breach(job, scope, self._least_of(job))
        return self._memo[key]

    def why_not_there(self, job: PendingJob, held: Held) -> Wait | None:
        """Return the wait for a limit that `job` breaks with exactly `held`; None if none."""
        if not self.any:
            return None
        scope = self._scope_of(job)
        return self._breach(job, scope, self._with_billing(held, job.partition)) if scope.rules else None

    def started(self, job: PendingJob, held: Held) -> None:
        """Count `job`, which the pass starts with `held`."""
        if self.limited:
            self._count(job, held, known_limit_s(job.request.time_limit_s))
            self._memo.clear()
        if job.array_limit:
            self._array_tasks[job.array_job_id] += 1

    def _count(self, job: PendingJob | RunningJob, held: Held, limit_s: float | None) -> None:
        held = self._with_billing(held, job.partition)
        factor = factor_of(self._accounting, job.qos)
        for key in self._keys(job):
            self._counts.setdefault(key, _Count()).add(held, limit_s, factor)

    def _keys(self, job: PendingJob | RunningJob) -> list[_Key]:
        """Return the keys of the counts that `job` adds to."""
        holders = [(Holder.QOS, job.qos), (Holder.PARTITION, job.partition), (Holder.USER, job.user)]
        account = self._account(job)
        holders += [(Holder.ACCOUNT, line.name) for line in self._accounting.lineage(account)]
        return [(holder, name, user) for holder, name in holders for user in ("", job.user)]

    def _account(self, job: PendingJob | RunningJob) -> str:
        return self._accounting.association_of(job.user, job.account)[0]

    def _with_billing(self, held: Held, partition: str) -> Held:
        return with_billing(held, weights_of(self._accounting, self._snapshot.partitions.get(partition)))

    def _scope_of(self, job: PendingJob) -> _Scope:
        key = (job.partition, job.account, job.user, job.qos)
        scope = self._scopes.get(key)
        if scope is None:
            whose = Whose(partition=job.partition, account=self._account(job), user=job.user, qos=job.qos)
            found = rules_of(self._accounting, self._snapshot.partitions.get(job.partition), whose)
            rules = tuple(rule for rule in found if rule.kind not in SUBMISSION)
            scope = self._scopes[key] = _Scope(
                rules=rules,
                timed=any(rule.kind in TIMED for rule in rules),
                factor=factor_of(self._accounting, job.qos),
                not_allowed=self._not_allowed(job),
            )
        return scope

    def _not_allowed(self, job: PendingJob) -> Wait | None:
        """Return the wait of a job whose account or QOS was removed or is no longer allowed.

        An account or QOS can be disallowed by the partition of the job.
        """
        accounting = self._accounting
        account = self._account(job)
        if accounting.accounts and accounting.account(account) is None:
            text = f"there is no account {account!r} any more: an admin can add it" if account else "it has no account"
            return Wait(reason=Reason.INVALID_ACCOUNT, detail=text)
        if accounting.qos and job.qos and accounting.quality(job.qos) is None:
            return Wait(reason=Reason.INVALID_QOS, detail=f"there is no QOS {job.qos!r} any more: an admin can add it")
        partition = self._snapshot.partitions.get(job.partition)
        if partition is None:
            return None
        match barred(accounting, partition.allow_accounts, partition.allow_qos, account, job.qos):
            case Barred.ACCOUNT:
                text = f"partition {partition.name!r} takes only jobs of {listed(partition.allow_accounts)}"
                return Wait(reason=Reason.ACCOUNT_NOT_ALLOWED, detail=f"{text}, and this one is of {account or 'none'}")
            case Barred.QOS:
                text = f"partition {partition.name!r} takes only jobs of QOS {listed(partition.allow_qos)}"
                return Wait(reason=Reason.QOS_NOT_ALLOWED, detail=f"{text}, and this one has {job.qos or 'none'}")
        return None

    def _least_of(self, job: PendingJob) -> Held:
        """Return the least resources that the job can get."""
        shape = job.request.shape
        key = (id(shape), job.partition)
        if key not in self._least:
            partition = self._snapshot.partitions.get(job.partition)
            names = partition.nodes if partition is not None else ()
            nodes = [self._nodes[name] for name in names if name in self._nodes]
            self._least[key] = (shape, least_there(shape, nodes))
        licenses = {LICENSE + name: count for name, count in job.licenses}
        return self._with_billing(self._least[key][1] | licenses, job.partition)

    def _breach(self, job: PendingJob, scope: _Scope, held: Held) -> Wait | None:
        """Return the wait for the first limit that `job` breaks with `held`; None if none."""
        limit_s, factor = known_limit_s(job.request.time_limit_s), scope.factor
        grows = self._growing.get(job.id)
        whole = held if grows is None else self._with(held, grows)
        never = why_never(scope.rules, whole, limit_s, factor)
        if never is not None:
            return Wait(reason=never.reason, detail=never_text(never, whole, limit_s, factor))
        for rule in scope.rules:
            if grows is not None and rule.kind in (Kind.MAX_JOBS, Kind.GRP_JOBS):
                continue
            more = self._more(rule, held, limit_s, factor)
            have = self._have(rule, job.user) if more else 0.0
            if have + more > rule.most:
                return Wait(reason=rule.reason, detail=now_text(rule, job.user, have, more))
        return None

    def _with(self, held: Held, job: RunningJob) -> Held:
        """Return `held` plus the resources that `job` already holds."""
        whole = self._with_billing(held_by(job.shares, self._nodes, job.licenses), job.partition)
        return {name: held.get(name, 0.0) + whole.get(name, 0.0) for name in {**whole, **held}}

    def _more(self, rule: LimitRule, held: Held, limit_s: float | None, factor: float) -> float:
        """Return the amount that the job adds to the limit; 0 for a limit of one job."""
        if rule.kind in (Kind.MAX_JOBS, Kind.GRP_JOBS):
            return 1
        if rule.kind in (Kind.PER_USER, Kind.GRP):
            return held.get(rule.resource, 0.0)
        if rule.kind is Kind.GRP_MINUTES:
            return minutes(held.get(rule.resource, 0.0) * factor, limit_s)
        return 0

    def _have(self, rule: LimitRule, user: str) -> float:
        """Return how much of the limit is used."""
        count = self._counts.get((rule.holder, rule.name, user if rule.kind in EACH_USER else ""), _NOTHING)
        if rule.kind in (Kind.MAX_JOBS, Kind.GRP_JOBS):
            return count.jobs
        if rule.kind is Kind.GRP_MINUTES:
            return count.minutes.get(rule.resource, 0.0) + self._used_minutes(rule)
        return count.held.get(rule.resource, 0.0)

    def _used_minutes(self, rule: LimitRule) -> float:
        """Return the decayed resource-minutes that ended jobs of the holder have used."""
        key = (rule.holder, rule.name, rule.resource)
        if key not in self._minutes_used:
            self._minutes_used[key] = used_minutes(rule, self._accounting, self._snapshot.ledger.used)
        return self._minutes_used[key]


_NOTHING = _Count()


def _limit_s(job: RunningJob) -> float | None:
    return job.ends_at_s - job.began_at_s if job.ends_at_s is not None else None


def _has_rules(snapshot: Snapshot) -> bool:
    """Say whether limits, accounts or QOS can keep a job waiting.

    Accounts and QOS matter only if they were removed or are not allowed.
    """
    accounting, partitions = snapshot.ledger.accounting, snapshot.partitions.values()
    barred_ones = any(partition.allow_accounts or partition.allow_qos for partition in partitions)
    return bool(accounting.accounts or accounting.qos or barred_ones) or _has_limits(snapshot)


def _has_limits(snapshot: Snapshot) -> bool:
    """Say whether any limit is set, so that running jobs must be counted."""
    accounting = snapshot.ledger.accounting
    limited: tuple[Account | UserRules | Qos | Partition, ...] = (
        *accounting.accounts,
        *accounting.users,
        *accounting.qos,
        *snapshot.partitions.values(),
    )
    return any(holder.limits != NO_LIMITS for holder in limited)
