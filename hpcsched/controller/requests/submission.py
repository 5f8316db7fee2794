"""Submit jobs: find where they can run, check accounts, licences and limits, queue them.

A function here either records events and returns the answer, or raises and leaves nothing behind:
the tick undoes it.

An accepted job has in its specification the account and the QOS that it will be charged to. A job
that exceeds a limit only because of other jobs is accepted and waits. A job that breaks a limit by
itself, or exceeds a limit on the number of jobs, is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields

from hpcsched import paths
from hpcsched.api.connection_limits import AnswerPauses
from hpcsched.api.identity import why_refused
from hpcsched.auth.authorize import Action, Identity, allows, authorize
from hpcsched.controller.requests.reservations import check_use
from hpcsched.errors import ConflictError, HpcschedError, PermissionDeniedError, RequestError
from hpcsched.jobscript.build import check_spec, check_time_min
from hpcsched.jobscript.signing import check_signed
from hpcsched.model.accounting import Accounting, Barred, barred, resolve
from hpcsched.model.frozen import replace
from hpcsched.model.job import FINAL, Job
from hpcsched.model.node import Partition
from hpcsched.model.reservation import Reservation
from hpcsched.model.spec import Dependency, JobSpec
from hpcsched.model.units import UNLIMITED_S, format_time_s, known_limit_s, nearest
from hpcsched.sched.fairshare import factor_of, weights_of
from hpcsched.sched.limits import EACH_USER, SUBMISSION, Holder, Kind, LimitRule, Whose, never_text, rules_of, why_never
from hpcsched.sched.place.feasible import impossible_shape, too_long
from hpcsched.sched.place.request import ResourceRequest, Shape, request_of
from hpcsched.sched.snapshot import LEAST_LIMIT_S, NodeView, node_view
from hpcsched.sched.tres import least_there, with_billing
from hpcsched.state.cluster import ClusterState, set_apart
from hpcsched.state.transaction import Transaction

_OF_THE_COMMAND = frozenset(
    (
        "env",
        "script_path",
        "submit_line",
        "submit_dir",
        "submit_host",
        "begin_at_s",
        "deadline_at_s",
        "cheap_by_s",
        "script_bytes",
        "signed",
        "signed_until_s",
    )  # fmt: skip
)
_SETTLED = frozenset(("account", "qos"))  # set by default if the job names none
_SHOWN = {"script_sha256": "script"}
SHOWN = 3  # differences shown
_COMPARED = tuple(field.name for field in fields(JobSpec) if field.name not in _OF_THE_COMMAND)

Seen = Callable[[int, str], Mapping[int, JobSpec] | None]


def submit(
    tx: Transaction,
    identity: Identity,
    request_id: str,
    specs: list[JobSpec],
    seen: Seen,
    looks: PartitionLooks | None = None,
) -> list[dict[str, int]]:
    """Queue the jobs; return each job's id and number of tasks.

    A repeated request id gets its jobs again. `seen` looks a request id up among the committed
    ones: it returns the jobs of that request with their specs. `looks`: what `looked_at` found.
    """
    known = None
    if request_id:
        known = tx.requested(identity.uid, request_id) or seen(identity.uid, request_id)
    if known is not None:
        return jobs_again(request_id, known, [set_apart(spec)[0] for spec in specs])
    authorize(identity, Action.SUBMIT)
    check_account(tx.cluster, identity)
    answers: list[dict[str, int]] = []
    if looks is None or not looks.holds_for(tx.cluster):
        looks = PartitionLooks(tx.cluster)
    for number, spec in enumerate(specs):
        try:
            jobs = _submitted(tx, identity, spec, looks)
        except RequestError as error:
            error.at = number
            raise
        answers.append({"job_id": jobs[0].id, "tasks": len(jobs)})
    if request_id:
        tx.note_request(identity.uid, request_id, [answer["job_id"] for answer in answers])
    return answers


def _submitted(tx: Transaction, identity: Identity, spec: JobSpec, looks: PartitionLooks) -> list[Job]:
    check_rank(identity, spec.nice, spec.priority)
    if any(one.script_sha256 or one.script_bytes for one in (spec, *spec.components)):
        raise RequestError(
            "cannot submit the job: script_sha256 and script_bytes are set by the controller; send the script"
        )
    if spec.signed:
        cluster = tx.cluster.config.name
        check_signed(spec, user=identity.user, uid=identity.uid, cluster=cluster, now_s=tx.now_s)
    spec = settle(tx.cluster, identity.user, spec)
    check_share_of_queue(tx.cluster, identity, spec)
    partitions, limit_s = place_of(tx.cluster, identity, spec, tx.now_s, looks)
    names = ",".join(partition.name for partition in partitions)
    scripts, large = tx.cluster.scripts, tx.cluster.large_texts
    large_before = large.bytes_of(identity.uid)
    before_bytes = scripts.unended_bytes(identity.uid)
    jobs = tx.submit(spec, uid=identity.uid, user=identity.user, partition=names, time_limit_s=limit_s)
    most_bytes = tx.cluster.config.scheduler.max_scripts_per_user << 20
    if most_bytes < scripts.unended_bytes(identity.uid) != before_bytes:
        raise RequestError(
            f"cannot submit the job: the scripts of your waiting and running jobs have {before_bytes >> 10} KiB, this one has "
            f"{-(-jobs[0].spec.script_bytes >> 10)} KiB more, and max_scripts_per_user is {most_bytes >> 20} MiB; wait until "
            "jobs have ended, or submit one script with different arguments (equal scripts count once)"
        )
    if most_bytes < large.bytes_of(identity.uid) != large_before:
        raise RequestError(
            f"cannot submit the job: the large environments, arguments and command lines of your jobs have "
            f"{large_before >> 10} KiB, and max_scripts_per_user is {most_bytes >> 20} MiB; wait until "
            "some have ended a while ago, use --export=NONE, or submit an array (its tasks count once)"
        )
    return jobs


def check_rank(identity: Identity, nice: int, priority: int | None) -> None:
    """Refuse options that would put a job ahead of other users' jobs.

    A priority of 0 is allowed, because it only holds the job.
    """
    if nice < 0:
        authorize(identity, Action.FAVOR, what="give a negative nice")
    if priority:
        authorize(identity, Action.FAVOR, what="set a priority")


def place_of(
    cluster: ClusterState, identity: Identity, spec: JobSpec, now_s: float, looks: PartitionLooks | None = None
) -> tuple[list[Partition], int | None]:
    """Return the requested partitions in which the job can run, and its time limit.

    Raises: RequestError if the job can never run here.
    """
    partitions, reservation = _requested(cluster, identity, spec, now_s)
    limit_s = time_limit_s(cluster, spec, partitions)
    check_time_min(spec.time_min_s, limit_s)
    limits, tasks = cluster.config.scheduler, len(spec.array.indices) if spec.array is not None else 1
    if tasks > limits.max_array_size:
        raise RequestError(f"cannot submit an array of {tasks} tasks: max_array_size is {limits.max_array_size}")
    queued = len(cluster.pending) + len(cluster.active)
    if queued + tasks > limits.max_jobs:
        raise RequestError(f"cannot submit more jobs: {queued} wait or run, and max_jobs is {limits.max_jobs}")
    check_dependency(cluster, identity, spec.dependency)
    if spec.deadline_at_s is not None:
        least_s = spec.time_min_s if spec.time_min_s is not None else spec.time_limit_s
        check_deadline(spec.deadline_at_s, least_s, max(now_s, spec.begin_at_s or 0))
    if spec.cheap_by_s is not None:
        check_cheap_by(spec.cheap_by_s, limit_s, max(now_s, spec.begin_at_s or 0))
    partitions = possible_partitions(cluster, spec, partitions, spec.time_limit_s, reservation, looks)
    return admit(cluster, identity.user, spec, partitions, limit_s)


def _requested(
    cluster: ClusterState, identity: Identity, spec: JobSpec, now_s: float
) -> tuple[list[Partition], Reservation | None]:
    """Return the partitions and the reservation that a job names."""
    check_spec(spec)
    reservation = check_use(cluster, identity.user, spec.account, spec.reservation, now_s) if spec.reservation else None
    return find_partitions(cluster, spec.partition or (reservation.partition if reservation else "")), reservation


async def looked_at(cluster: ClusterState, identity: Identity, specs: list[JobSpec], now_s: float) -> PartitionLooks:
    """Try the jobs of a request on the nodes, in slices, before the tick that submits them.

    A thousand different jobs on a thousand nodes take seconds. Errors are left to `submit`.
    """
    looks, breaks = PartitionLooks(cluster), AnswerPauses()
    for spec in specs:
        with suppress(HpcschedError):
            partitions, reservation = _requested(cluster, identity, spec, now_s)
            possible_partitions(cluster, spec, partitions, spec.time_limit_s, reservation, looks)
        await breaks.between()
    return looks


class PartitionLooks:
    """Why jobs can never run in partitions.

    Jobs of one request that ask for the same are tried once.
    """

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._config = cluster.config
        self._views: dict[tuple[str, str], list[NodeView]] = {}
        self._found: dict[tuple[Shape, str, str], str | None] = {}

    def holds_for(self, cluster: ClusterState) -> bool:
        """Return whether the nodes and partitions are still those of the configuration."""
        return cluster is self._cluster and cluster.config is self._config

    def why_not(self, request: ResourceRequest, partition: Partition, reservation: Reservation | None) -> str | None:
        """Return why a job with `request` can never run there; None if it can."""
        place = partition.name, reservation.name if reservation is not None else ""
        why = too_long(request, partition)
        if why is None:
            key = request.shape, *place
            if key not in self._found:
                nodes = self._nodes(place, partition, reservation)
                self._found[key] = impossible_shape(request.shape, nodes, partition)
            why = self._found[key]
        return f"in reservation {place[1]!r}: {why}" if why is not None and reservation is not None else why

    def _nodes(self, place: tuple[str, str], partition: Partition, reservation: Reservation | None) -> list[NodeView]:
        if place not in self._views:
            names = [name for name in partition.nodes if reservation is None or name in reservation.nodes]
            nodes = self._cluster.nodes
            self._views[place] = [node_view(nodes[name]) for name in names if name in nodes]
        return self._views[place]


def possible_partitions(
    cluster: ClusterState,
    spec: JobSpec,
    partitions: Sequence[Partition],
    limit_s: int | None,
    reservation: Reservation | None = None,
    looks: PartitionLooks | None = None,
) -> list[Partition]:
    """Return those of `partitions` in which a job of `spec` can run (in `reservation`).

    If there is none, the job is refused with the reason of the first partition.
    """
    looks = looks or PartitionLooks(cluster)
    refused: list[str] = []
    found = []
    for partition in partitions:
        why = looks.why_not(request_of(spec, partition, time_limit_s=limit_s), partition, reservation)
        refused += [why] if why is not None else []
        found += [partition] if why is None else []
    if not found:
        raise RequestError(refused[0])
    return found


def find_partitions(cluster: ClusterState, names: str) -> list[Partition]:
    """Return the partitions of these names (``a,b``; "" is the default partition)."""
    if not cluster.partitions:
        raise RequestError("cannot submit a job: no partition is configured; add a node with 'hpcsched node add'")
    wanted = list(dict.fromkeys(filter(None, names.split(","))))
    for name in wanted:
        if name not in cluster.partitions:
            known = ", ".join(cluster.partitions)
            raise RequestError(
                f"cannot submit to partition {name!r}: invalid partition name specified; there are: {known}"
            )
    found = [cluster.partitions[name] for name in wanted] or [cluster.default_partition()]
    for partition in found:
        if not partition.state.takes_jobs:
            raise RequestError(
                f"cannot submit to partition {partition.name!r}: Required partition not available (inactive or drain): "
                f"it is {partition.state}"
            )
    return found


def time_limit_s(cluster: ClusterState, spec: JobSpec, partitions: Sequence[Partition]) -> int | None:
    """Return the time limit of a job of `spec`, in seconds.

    This is its own limit, or the shortest default of its partitions.
    """
    if spec.time_limit_s is not None:
        return spec.time_limit_s
    limits = [limit_s for partition in partitions if (limit_s := default_limit_s(cluster, partition)) is not None]
    return min(limits, default=None)


def default_limit_s(cluster: ClusterState, partition: Partition) -> int | None:
    """Return the time limit of a job that names none, in seconds."""
    if partition.default_time_s is not None:
        return partition.default_time_s
    limits = [
        limit for limit in (cluster.config.scheduler.default_time_limit, partition.max_time_s) if limit is not None
    ]
    return min(limits) if limits else None


def check_account(cluster: ClusterState, identity: Identity) -> None:
    """Reject jobs that would run as root or a system account, unless that is allowed.

    Raises: RequestError.
    """
    below = cluster.config.controller.allow_uid_below
    if below == 0 or not any(node.root_agent for node in cluster.nodes.values()):
        return
    why = why_refused(identity.uid, below)
    if why:
        config = cluster.config.config_dir / paths.CONFIG_FILE
        raise PermissionDeniedError(
            f"cannot submit the job: jobs of {identity.user} are refused on this cluster, because {why}, and they would run with "
            f"that account's rights on every node. Submit it as an ordinary user: sudo -u USER hsub ... To allow jobs of root "
            f"and of system accounts, set allow_uid_below = 0 in the section [controller] of {config}, and run: hctl reconfigure"
        )


def settle(cluster: ClusterState, user: str, spec: JobSpec) -> JobSpec:
    """Return `spec` with the account and QOS that a job of `user` gets.

    Raises: RequestError if the user may not use them.
    """
    accounting = cluster.config.accounting
    account, qos = resolve(accounting, user, spec.account, spec.qos)
    _check_licenses(accounting, spec)
    if (account, qos) == (spec.account, spec.qos):
        return spec
    return replace(spec, account=account, qos=qos)


def admit(
    cluster: ClusterState, user: str, spec: JobSpec, partitions: Sequence[Partition], limit_s: int | None
) -> tuple[list[Partition], int | None]:
    """Return the `partitions` whose limits admit the job, and its time limit in seconds.

    If the job names no time limit, it gets the longest allowed one.

    Raises: RequestError if limits can never let it start, or it exceeds a limit on the number of jobs.
    """
    found: list[tuple[Partition, int | None]] = []
    refused: list[str] = []
    for partition in partitions:
        rules = rules_of(cluster.config.accounting, partition, _whose(partition, user, spec))
        within_s = limit_s if spec.time_limit_s is not None else _within_walls(rules, limit_s)
        why = _why_never(cluster, spec, partition, rules, within_s) or _why_too_many(cluster, user, spec, rules)
        if why is None:
            found.append((partition, within_s))
        else:
            refused.append(why)
    if not found:
        raise RequestError(refused[0])
    limits = [within_s for _, within_s in found if within_s is not None]
    return [partition for partition, _ in found], min(limits, default=None)


def check_share_of_queue(cluster: ClusterState, identity: Identity, spec: JobSpec) -> None:
    """Reject a job with which one user would exceed the scheduler's max_submit_jobs.

    A user or an account with its own max_submit_jobs is checked against that one instead.
    """
    if identity.uid in (0, os.getuid()):
        return
    scheduler = cluster.config.scheduler
    most = scheduler.max_submit_jobs or max(1, scheduler.max_jobs // 10)
    tasks, there = _tasks(spec), cluster.queued[identity.user]
    if there + tasks <= most:
        return
    whose = Whose(partition="", account=spec.account, user=identity.user, qos=spec.qos)
    rules = rules_of(cluster.config.accounting, None, whose)
    if any(rule.kind is Kind.MAX_SUBMIT and rule.holder in (Holder.USER, Holder.ACCOUNT) for rule in rules):
        return
    more = f"{tasks} more are" if tasks > 1 else "one more is"
    raise RequestError(
        f"cannot submit the job: {there} jobs of user {identity.user!r} wait or run, and {more} too many: one user may have "
        f"{most}. Wait until some have ended, or ask an admin to set max_submit_jobs in hpcsched.toml, below [scheduler] or "
        "for a user or an account"
    )


def _tasks(spec: JobSpec) -> int:
    return len(spec.array.indices) if spec.array is not None else 1


def let_in(cluster: ClusterState, user: str, spec: JobSpec, partitions: Sequence[Partition]) -> list[Partition]:
    """Return the `partitions` whose limits let the job start if nothing else runs.

    Raises: RequestError if there is none.
    """
    accounting, limit_s = cluster.config.accounting, spec.time_limit_s
    why = {
        part: _why_never(cluster, spec, part, rules_of(accounting, part, _whose(part, user, spec)), limit_s)
        for part in partitions
    }
    first = next(iter(why.values()), None)
    if first is not None and all(why.values()):
        raise RequestError(first)
    return [partition for partition, never in why.items() if never is None]


def _why_never(
    cluster: ClusterState, spec: JobSpec, partition: Partition, rules: Sequence[LimitRule], limit_s: int | None
) -> str | None:
    """Return which rule the job breaks by itself, in a sentence, or None."""
    accounting = cluster.config.accounting
    out = barred(accounting, partition.allow_accounts, partition.allow_qos, spec.account, spec.qos)
    if out is not None:
        return _barred_text(partition, out, spec)
    if not rules:
        return None
    factor, known_s = factor_of(accounting, spec.qos), known_limit_s(limit_s)
    shape = request_of(spec, partition, time_limit_s=limit_s).shape
    nodes = [node_view(cluster.nodes[name]) for name in partition.nodes if name in cluster.nodes]
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


def _within_walls(rules: Sequence[LimitRule], limit_s: int | None) -> int | None:
    walls = [int(rule.most) for rule in rules if rule.kind is Kind.WALL]
    return min([*walls, *([limit_s] if limit_s is not None else [])], default=None)


def _why_too_many(cluster: ClusterState, user: str, spec: JobSpec, rules: Sequence[LimitRule]) -> str | None:
    """Return why the job exceeds a limit on the number of jobs, or None.

    All waiting and running jobs are counted, but only if the limit may be exceeded.
    """
    tasks = _tasks(spec)
    for rule in rules:
        if rule.kind not in SUBMISSION:
            continue
        each = rule.kind in EACH_USER
        most_there = cluster.queued[user] if each else len(cluster.pending) + len(cluster.active)
        if most_there + tasks <= rule.most:
            continue
        there = sum(
            1
            for job_id in (*cluster.pending, *cluster.active)
            if (not each or cluster.jobs[job_id].user == user) and _counts(cluster, cluster.jobs[job_id], rule)
        )
        if there + tasks > rule.most:
            whose = f"each user {rule.most:g}" if each else f"{rule.most:g}"
            more = f"{tasks} more are" if tasks > 1 else "one more is"
            text = f"{rule.where} allows {whose} jobs that wait or run; there are {there}, and {more} too many"
            return _refusal(rule, text)
    return None


def _counts(cluster: ClusterState, job: Job, rule: LimitRule) -> bool:
    """Return whether `job` belongs to the holder of the rule."""
    match rule.holder:
        case Holder.QOS:
            return job.qos == rule.name
        case Holder.PARTITION:
            return rule.name in job.partition.split(",")
        case Holder.USER:
            return job.user == rule.name
        case Holder.ACCOUNT:
            accounting = cluster.config.accounting
            account, _ = accounting.association_of(job.user, job.account)
            return accounting.is_part_of(account, (rule.name,))


def _refusal(rule: LimitRule, text: str) -> str:
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


# ----- conditions that a job waits for: the jobs exist, there is no cycle, the deadline is possible
#
# Checked when a job is submitted and when it is changed. `hpcsched.sched.queues` evaluates
# dependencies later.


def check_dependency(cluster: ClusterState, identity: Identity, terms: Iterable[Dependency]) -> None:
    """Reject terms that name an unknown job, array or array task, or one that is private."""
    for term in terms:
        for job_id in term.job_ids:
            if not any(allows(identity, Action.VIEW_JOBS, job) for job in cluster.numbered(job_id)):
                raise RequestError(f"cannot depend on job {job_id}: there is no such job (Job dependency problem)")
            if term.task is not None and not _named(cluster, term, job_id):
                raise RequestError(
                    f"cannot depend on job {job_id}_{term.task}: job {job_id} has no such task (Job dependency problem)"
                )


def dependency_circle(cluster: ClusterState, job: Job, terms: Iterable[Dependency]) -> list[Job]:
    """Return the cycle of waiting jobs that `terms` would create, with `job` last.

    Empty if there is no cycle.
    """
    came_from: dict[int, Job | None] = {}
    to_see: list[tuple[Job, Job | None]] = [(waited, None) for waited in _waited_for(cluster, terms)]
    while to_see:
        waited, parent = to_see.pop()
        if waited.id in came_from or waited.state in FINAL:
            continue
        came_from[waited.id] = parent
        if waited.id == job.id:
            way = [waited]
            while (before := came_from[way[-1].id]) is not None:
                way.append(before)
            return way[::-1]
        to_see += [(other, waited) for other in _waited_for(cluster, waited.dependency)]
    return []


def check_cheap_by(by_s: float, limit_s: int | None, from_s: float) -> None:
    """Reject a time by which a job that starts at `from_s` or later cannot end.

    Raises RequestError.
    """
    known_s = known_limit_s(limit_s)
    if known_s is None:
        raise RequestError("cannot find cheap hours for a job of unlimited time: give --time, or leave out --cheap-by")
    if from_s + known_s > by_s:
        left = f"{format_time_s(int(by_s - from_s))} is left" if by_s > from_s else "no time is left"
        raise RequestError(f"cannot end by --cheap-by: the time limit is {format_time_s(known_s)}, and {left}")


def check_deadline(deadline_s: float, limit_s: int | None, from_s: float) -> None:
    """Reject a deadline that a job which starts at `from_s` or later cannot meet.

    `limit_s`: the requested time limit. A limit that was not requested is cut to the time left until the deadline.
    """
    if limit_s is not None and limit_s >= UNLIMITED_S:
        raise RequestError("cannot keep a deadline for a job of unlimited time: give --time, or leave it out")
    if from_s + (limit_s or LEAST_LIMIT_S) > deadline_s:
        left = f"{format_time_s(int(deadline_s - from_s))} is left" if deadline_s > from_s else "no time is left"
        why = left if limit_s is None else f"the job may run for {format_time_s(limit_s)}, and {left}"
        raise RequestError(f"cannot end by the deadline: {why} (Incorrect deadline)")


def _waited_for(cluster: ClusterState, terms: Iterable[Dependency]) -> list[Job]:
    return [job for term in terms for job_id in term.job_ids for job in _named(cluster, term, job_id)]


def _named(cluster: ClusterState, term: Dependency, job_id: int) -> list[Job]:
    jobs = cluster.numbered(job_id)
    return jobs if term.task is None else [job for job in jobs if job.array_task_id == term.task]


# ----- repeated request ids: return the jobs of the first request if the same is requested, else
# refuse
#
# A client that got no answer repeats its request with the same id. The repeated request may differ
# only in where and when the command ran: the environment, the path of the script, and computed
# dates (``--begin=now+1hour``).


def jobs_again(request_id: str, made: Mapping[int, JobSpec], specs: Sequence[JobSpec]) -> list[dict[str, int]]:
    """Return the ids and task counts of the jobs that this request id made.

    `made` maps job ids to their specs. `specs` are the specs of the repeated request, without their
    scripts.

    Raises: ConflictError if `specs` differ from those of `made`.
    """
    ids = ", ".join(map(str, made))
    if not made:
        raise _repeated(request_id, "another change")
    if len(made) != len(specs):
        raise _repeated(request_id, f"job {ids}, and {len(specs)} are asked for now")
    for (job_id, before), now in zip(made.items(), specs, strict=True):
        if differing := [_SHOWN.get(name, name) for name in _COMPARED if _differs(name, before, now)]:
            raise _repeated(
                request_id,
                f"job {job_id}, which differs in its {', '.join(differing[:SHOWN])}",
            )
    return [{"job_id": job_id, "tasks": task_count(spec)} for job_id, spec in made.items()]


def task_count(spec: JobSpec) -> int:
    """Return how many tasks a job of `spec` has; 1 if it is not an array."""
    return 1 if spec.array is None else len(spec.array.indices)


def _differs(name: str, before: JobSpec, now: JobSpec) -> bool:
    wanted = getattr(now, name)
    return wanted != getattr(before, name) and not (name in _SETTLED and not wanted)


def _repeated(request_id: str, what: str) -> ConflictError:
    return ConflictError(
        f"cannot submit under request id {request_id!r}: it has already made {what}; for another job give another id, or none"
    )
