"""Counts of each limit: by running jobs, and by the jobs that a pass starts.

`why_not` tests whether a job would break a limit; `started` counts the job. So limits also hold
within one pass. If the resources of a job depend on its nodes, it is tested twice: first with the
least that it can get, then with its actual resources. An elastic job that grows is not another job;
limits for one job apply to all of it.

A limit on resource-minutes counts past usage (`UsageLedger.used`). It also counts the possible
usage of running jobs until their time limits, as if they had used it already. So a job that starts
can end within the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcsched.model.accounting import LICENSE, NO_LIMITS, Account, Accounting, Barred, Qos, UserRules, barred
from hpcsched.model.ids import JobId
from hpcsched.model.job import Reason
from hpcsched.model.node import Partition
from hpcsched.model.units import MINUTE_S, known_limit_s
from hpcsched.sched.decisions import Wait
from hpcsched.sched.explain.reasons import at_array_limit
from hpcsched.sched.explain.sentences import listed
from hpcsched.sched.limits.rules import (
    EACH_USER,
    SUBMISSION,
    TIMED,
    Holder,
    Kind,
    LimitRule,
    Whose,
    minutes,
    never_text,
    now_text,
    rules_of,
    why_never,
)
from hpcsched.sched.limits.tres import Held, held_by, least_there, with_billing
from hpcsched.sched.place.request import Shape
from hpcsched.sched.queue.usage import factor_of, weights_of
from hpcsched.sched.snapshot import PendingJob, RunningJob, Snapshot

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


class Quota:
    """The limits of one snapshot, and how much of each is used."""

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
        self.any = _has_rules(snapshot)
        self.bounded = _has_limits(snapshot)
        if self.bounded:
            self._growing = {job.id: job for job in snapshot.running if job.elastic is not None}
            for job in snapshot.running:
                # A suspended job gets its cpus back, so they count meanwhile, as in Slurm.
                shares = job.lent_shares or job.shares
                self._count(job, held_by(shares, self._nodes, job.licenses), _limit_s(job))

    def why_not(self, job: PendingJob) -> Wait | None:
        """Return the wait for a limit that `job` breaks with the least that it can get.

        None: it breaks none.
        """
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

    def why_not_with(self, job: PendingJob, held: Held) -> Wait | None:
        """Return the wait for a limit that `job` breaks with exactly `held`; None if none."""
        if not self.any:
            return None
        scope = self._scope_of(job)
        return self._breach(job, scope, self._with_billing(held, job.partition)) if scope.rules else None

    def started(self, job: PendingJob, held: Held) -> None:
        """Count `job`, which the pass starts with `held`."""
        if self.bounded:
            self._count(job, held, known_limit_s(job.request.time_limit_s))
            self._memo.clear()

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
            used_s = 0.0
            for row in self._snapshot.ledger.used:
                mine = {
                    Holder.QOS: row.qos == rule.name,
                    Holder.USER: row.user == rule.name,
                    Holder.ACCOUNT: self._accounting.is_part_of(row.account, (rule.name,)),
                    Holder.PARTITION: False,
                }[rule.holder]
                used_s += dict(row.amounts).get(rule.resource, 0.0) if mine else 0.0
            self._minutes_used[key] = used_s / MINUTE_S
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
    return any(one.limits != NO_LIMITS for one in limited)


class LimitCounts:
    """The limits of arrays, and the limits in `Quota`, during one pass.

    For each job: `why_not` before it is tried, `why_not_there` when its nodes are known, `started`
    when it starts.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._array_tasks: dict[JobId | None, int] = {}
        self._quota = Quota(snapshot)
        for job in snapshot.running:
            if job.array_job_id is not None:
                self._array_tasks[job.array_job_id] = self._array_tasks.get(job.array_job_id, 0) + 1

    @property
    def limited(self) -> bool:
        """Say whether any limit is set, so that the resources of jobs must be known."""
        return self._quota.bounded

    def why_not(self, job: PendingJob) -> Wait | None:
        """Return the wait for a limit that keeps `job` waiting on any nodes; None if none."""
        if job.array_limit and self._array_tasks.get(job.array_job_id, 0) >= job.array_limit:
            return at_array_limit(job.array_limit)
        return self._quota.why_not(job)

    def why_not_there(self, job: PendingJob, held: Held) -> Wait | None:
        """Return the wait for a limit that `job` breaks with `held`; None if it breaks none."""
        return self._quota.why_not_with(job, held)

    def started(self, job: PendingJob, held: Held) -> None:
        """Count `job`, which the pass starts."""
        self._quota.started(job, held)
        if job.array_limit:
            self._array_tasks[job.array_job_id] = self._array_tasks.get(job.array_job_id, 0) + 1
