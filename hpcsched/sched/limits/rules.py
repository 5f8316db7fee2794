"""Limits that apply to a job, with Slurm's reason and a sentence for each.

A *rule* is one number that one *holder* (an account, a user, a QOS, a partition) sets. A limit that an account sets for each of
its users applies unless a user, or a nearer account, sets another limit. ``grp_`` limits apply at each account up to the
root. Limits of partitions use the names of QOS limits, like Slurm's partition QOS.

Knows nothing of running jobs: `limits.quota` counts them. Source: resource_limits.html, qos.html, job_reason_codes.html of
Slurm's documentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from hpcsched.model.accounting import BILLING, CPU, GPU, LICENSE, MEM, NODE, Accounting, Limits, Tres
from hpcsched.model.job import Reason
from hpcsched.model.node import Partition
from hpcsched.model.units import MINUTE_S, format_mem, format_time_s
from hpcsched.sched.explain.sentences import plural


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
