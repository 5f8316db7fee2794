"""May this job be submitted by this user? Account, QOS, licences and limits, before anything is recorded.

What passes has the account and the QOS that it will be charged to in its specification. A job over a limit that others'
jobs may leave later is taken and waits; one that breaks a limit by itself, or is one too many, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.errors import RequestError
from hpcsched.model.accounting import Accounting, Barred, barred, resolve
from hpcsched.model.frozen import replace
from hpcsched.model.job import Job
from hpcsched.model.nearest import nearest
from hpcsched.model.node import Partition
from hpcsched.model.spec import JobSpec
from hpcsched.model.units import known_limit_s
from hpcsched.sched.limits import (
    EACH_USER,
    SUBMISSION,
    Holder,
    Kind,
    Rule,
    Whose,
    never_text,
    rules_of,
    why_never,
)
from hpcsched.sched.request import request_of
from hpcsched.sched.snapshot import node_view
from hpcsched.sched.tres import least_there, with_billing
from hpcsched.sched.usage import factor_of, weights_of
from hpcsched.store.world import World


def settle(world: World, user: str, spec: JobSpec) -> JobSpec:
    """Return `spec` with the account and QOS that a job of `user` gets. Raises RequestError if it may not have them."""
    accounting = world.config.accounting
    account, qos = resolve(accounting, user, spec.account, spec.qos)
    _check_licenses(accounting, spec)
    if (account, qos) == (spec.account, spec.qos):
        return spec
    return replace(spec, account=account, qos=qos)


def admit(
    world: World, user: str, spec: JobSpec, partitions: Sequence[Partition], limit_s: int | None
) -> tuple[list[Partition], int | None]:
    """Return those of `partitions` whose limits let the job in, and its time limit: the longest there is, if it names none.

    Raises RequestError if limits can never let it start, or it is one job too many.
    """
    found: list[tuple[Partition, int | None]] = []
    refused: list[str] = []
    for partition in partitions:
        rules = rules_of(world.config.accounting, partition, _whose(partition, user, spec))
        within_s = limit_s if spec.time_limit_s is not None else _within_walls(rules, limit_s)
        why = _why_never(world, spec, partition, rules, within_s) or _why_too_many(world, user, spec, rules)
        if why is None:
            found.append((partition, within_s))
        else:
            refused.append(why)
    if not found:
        raise RequestError(refused[0])
    limits = [within_s for _, within_s in found if within_s is not None]
    return [partition for partition, _ in found], min(limits, default=None)


def let_in(world: World, user: str, spec: JobSpec, partitions: Sequence[Partition]) -> list[Partition]:
    """Return those of `partitions` whose limits let the job start, if nothing else runs. Refuse it if there is none."""
    accounting, limit_s = world.config.accounting, spec.time_limit_s
    why = {
        part: _why_never(world, spec, part, rules_of(accounting, part, _whose(part, user, spec)), limit_s)
        for part in partitions
    }
    first = next(iter(why.values()), None)
    if first is not None and all(why.values()):
        raise RequestError(first)
    return [partition for partition, never in why.items() if never is None]


def _why_never(
    world: World, spec: JobSpec, partition: Partition, rules: Sequence[Rule], limit_s: int | None
) -> str | None:
    """Return which rule a job breaks by itself, in a sentence, or None."""
    accounting = world.config.accounting
    out = barred(accounting, partition.allow_accounts, partition.allow_qos, spec.account, spec.qos)
    if out is not None:
        return _barred_text(partition, out, spec)
    factor, known_s = factor_of(accounting, spec.qos), known_limit_s(limit_s)
    shape = request_of(spec, partition, time_limit_s=limit_s).shape
    nodes = [node_view(world.nodes[name]) for name in partition.nodes if name in world.nodes]
    held = with_billing(least_there(shape, nodes, spec.licenses), weights_of(accounting, partition))
    never = why_never(tuple(rules), held, known_s, factor)
    return None if never is None else _refusal(never, never_text(never, held, known_s, factor))


def _barred_text(partition: Partition, out: Barred, spec: JobSpec) -> str:
    own, allowed, option = {
        Barred.ACCOUNT: (spec.account, partition.allow_accounts, "-A"),
        Barred.QOS: (spec.qos, partition.allow_qos, "-q"),
    }[out]
    has = f"this one's is {own!r}" if own else "this one has none"
    slurms = (
        "Invalid account or account/partition combination" if out is Barred.ACCOUNT else "Invalid qos specification"
    )
    return (
        f"cannot run the job in partition {partition.name!r}: {slurms}: it takes only jobs of the {out} "
        f"{' or '.join(allowed)}, and {has}; choose another with {option}, or another partition with -p"
    )


def _whose(partition: Partition, user: str, spec: JobSpec) -> Whose:
    return Whose(partition=partition.name, account=spec.account, user=user, qos=spec.qos)


def _within_walls(rules: Sequence[Rule], limit_s: int | None) -> int | None:
    walls = [int(rule.most) for rule in rules if rule.kind is Kind.WALL]
    return min([*walls, *([limit_s] if limit_s is not None else [])], default=None)


def _why_too_many(world: World, user: str, spec: JobSpec, rules: Sequence[Rule]) -> str | None:
    """Say why a job is one too many, or None. All that wait and run are looked at, but only where somebody set a limit."""
    tasks = len(spec.array.indices) if spec.array is not None else 1
    for rule in rules:
        if rule.kind not in SUBMISSION:
            continue
        each = rule.kind in EACH_USER
        there = sum(
            1
            for job_id in (*world.pending, *world.active)
            if (not each or world.jobs[job_id].user == user) and _counts(world, world.jobs[job_id], rule)
        )
        if there + tasks > rule.most:
            whose = f"each user {rule.most:g}" if each else f"{rule.most:g}"
            more = f"{tasks} more are" if tasks > 1 else "one more is"
            text = f"{rule.where} allows {whose} jobs that wait or run; there are {there}, and {more} too many"
            return _refusal(rule, text)
    return None


def _counts(world: World, job: Job, rule: Rule) -> bool:
    """Say whether `job` is one of the rule's holder."""
    match rule.holder:
        case Holder.QOS:
            return job.qos == rule.name
        case Holder.PARTITION:
            return rule.name in job.partition.split(",")
        case Holder.USER:
            return job.user == rule.name
        case Holder.ACCOUNT:
            accounting = world.config.accounting
            account, _ = accounting.association_of(job.user, job.account)
            return accounting.is_part_of(account, (rule.name,))


def _refusal(rule: Rule, text: str) -> str:
    return f"cannot submit the job: Job violates accounting/QOS policy: {rule.reason}: {text}"


def _check_licenses(accounting: Accounting, spec: JobSpec) -> None:
    there = dict(accounting.licenses)
    for name, count in spec.licenses:
        if name not in there:
            known = ", ".join(there) or "none"
            raise RequestError(
                f"cannot give job licence {name!r}: Invalid license specification{nearest(name, there)}; there are: {known}"
            )
        if count > there[name]:
            raise RequestError(
                f"cannot give job {count} licences {name!r}: Invalid license specification; the cluster has {there[name]}"
            )
