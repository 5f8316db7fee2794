"""Change jobs after their submission (``hctl update``).

Each change is checked and recorded as one event. `respecify` changes what the job requested in its specification.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any

from hpcnode.wire.gate import MAX_DIGITS
from hpcsched.auth.authorize import Action, Identity, allows, authorize
from hpcsched.controller.preemption import check_size, keep_within
from hpcsched.controller.requests.jobs import Outcome, each_job
from hpcsched.controller.requests.reservations import check_use
from hpcsched.controller.requests.submission import (
    check_cheap_by,
    check_deadline,
    check_dependency,
    check_rank,
    dependency_circle,
    find_partitions,
    let_in,
    possible_partitions,
    settle,
)
from hpcsched.errors import RequestError
from hpcsched.jobscript.build import DIRECT, check_spec, check_time_min
from hpcsched.jobscript.options import find_option
from hpcsched.jobscript.signing import check_signed, read_signature
from hpcsched.jobscript.values import MAX_COUNT, MAX_NICE, MAX_PRIORITY, parse_dependency, short
from hpcsched.lifecycle.events import Changed
from hpcsched.lifecycle.job import can, ran_s
from hpcsched.model.codec import spec_to_json
from hpcsched.model.dates import parse_when
from hpcsched.model.frozen import replace
from hpcsched.model.job import Job, JobState
from hpcsched.model.spec import JobSpec
from hpcsched.model.units import UNLIMITED_S, format_time_s, nearest, parse_time_s, whole_number
from hpcsched.state.cluster import ClusterState
from hpcsched.state.transaction import Transaction

# ----- change what a job requested at submission: ``scontrol update JobId=12 Name=x
# MinMemoryNode=4G``
#
# The values are parsed like those of the submission options, and the result is checked like a
# submission. Fields that affect placement can be changed only while the job waits. The size limits
# of an elastic job can be changed at any time.


ANY_TIME = frozenset({"name", "comment", "mail_user", "mail_type", "requeue"})
# Changed field: the option that its value is parsed as.
OPTIONS = {
    "name": "job-name", "cheap_by": "cheap-by", "comment": "comment", "mail_user": "mail-user", "mail_type": "mail-type",
    "requeue": "requeue", "constraint": "constraint", "cpus_per_task": "cpus-per-task", "exclude": "exclude",
    "gres": "gres", "licenses": "licenses", "mem": "mem", "mem_per_cpu": "mem-per-cpu", "mincpus": "mincpus",
    "nodelist": "nodelist", "ntasks": "ntasks", "ntasks_per_node": "ntasks-per-node", "num_cpus": "ntasks",
    "num_nodes": "nodes", "prefer": "prefer", "switches": "switches", "tmp": "tmp", "work_dir": "chdir",
}  # fmt: skip
SIGNED = "signed"  # sent by `hctl sign`
_EMPTY: Mapping[str, Any] = {"nodelist": (), "exclude": (), "licenses": ()}  # for an empty value


def respecify(tx: Transaction, job: Job, changes: Mapping[str, str], by_uid: int, made: dict[int, int]) -> Job:
    """Change the job's specification.

    `made` maps an old specification to the new one, so that tasks of an array share it.

    Raises: RequestError for a value that cannot be parsed, a field that can no longer be changed,
    or a job that could never start.
    """
    any_time = {*ANY_TIME, "num_nodes"} if job.spec.elastic else ANY_TIME
    for name in changes:
        if job.state is not JobState.PENDING and name not in any_time:
            raise RequestError(f"cannot change {name} of job {job.display_id}: it is {job.state}")
    fields: dict[str, Any] = {}
    for name, text in changes.items():
        fields |= _fields(name, text, replace(job.spec, **fields), tx.now_s)
    spec = replace(job.spec, **fields)
    check_spec(spec)
    if "cheap_by" in changes and spec.cheap_by_s is not None:
        check_cheap_by(spec.cheap_by_s, job.time_limit_s, max(tx.now_s, job.not_before_s or 0))
    if spec.signed:
        now_s = tx.now_s if SIGNED in changes else None
        check_signed(spec, user=job.user, uid=job.uid, cluster=tx.cluster.config.name, now_s=now_s)
    if job.state is JobState.PENDING:
        _check_place(tx, replace(job, spec=spec))
    whole = spec_to_json(spec)
    changed = tx.respecify(job, {name: whole[name] for name in fields}, by_uid=by_uid, spec_id=made.get(job.spec_id))
    made[job.spec_id] = changed.spec_id
    return changed


def _fields(name: str, text: str, spec: JobSpec, now_s: float) -> dict[str, Any]:
    """Return the fields of the specification `spec` that a change sets."""
    if name == SIGNED:
        return {"signed": text, "signed_until_s": read_signature(text).expires_s}
    if name == "cheap_by":
        return {"cheap_by_s": None if text.lower() in ("", "none") else int(parse_when(text, now_s))}
    option = OPTIONS[name]
    if not text and name in _EMPTY:
        return {name: _EMPTY[name]}
    value = find_option(option).parse(text)
    match name:
        case "gres":
            return {"gpus_per_node": value.gpus, "shards_per_node": value.shards}
        case "num_cpus":  # as many tasks as need these CPUs
            return {"ntasks": -(-value // spec.cpus_per_task)}
        case "num_nodes":
            return {"nodes_min": value[0], "nodes_max": value[1], "nodes_given": True}
        case "mem":
            return {"mem_per_node_mib": value, "mem_per_cpu_mib": None}
        case "mem_per_cpu":
            return {"mem_per_cpu_mib": value, "mem_per_node_mib": None}
        case "cpus_per_task":
            return {"cpus_per_task": value, "cpus_per_task_given": True}
        case "switches":
            return {"switches": value[0], "switches_wait_s": value[1]}
        case "mail_type":
            return {name: tuple(value)}
        case "work_dir" if not value.startswith("/"):
            raise RequestError(f"cannot have a job run in {value[:60]!r}: the path is not absolute")
        case "work_dir":
            return {"work_dir": value}
        case _:
            return {DIRECT[option]: value}


def _check_place(tx: Transaction, job: Job) -> None:
    """Reject a job that can never start in the partitions it waits for."""
    cluster = tx.cluster
    spec = replace(job.spec, account=job.account, qos=job.qos, time_limit_s=job.time_limit_s)
    partitions = find_partitions(cluster, job.partition)
    reservation = cluster.reservations.get(job.reservation)
    let_in(cluster, job.user, spec, possible_partitions(cluster, spec, partitions, job.time_limit_s, reservation))


CHANGES = frozenset((
    "time_limit", "end_time", "partition", "nice", "priority", "begin", "array_task_throttle", "dependency",
    "deadline", "reservation", "account", "qos", "time_min", "site_factor",
))  # fmt: skip


def update(tx: Transaction, identity: Identity, references: Iterable[str], changes: dict[str, str]) -> Outcome:
    """Change the named jobs; `CHANGES` lists the fields that may be changed."""
    unknown = set(changes) - CHANGES - OPTIONS.keys() - {SIGNED}
    if unknown or not changes:
        known = sorted(CHANGES | OPTIONS.keys())
        near = nearest(min(unknown), known) if unknown else ""
        wrong = ", ".join(sorted(unknown)) or "nothing"
        raise RequestError(f"cannot change {wrong}{near or ': can change ' + ', '.join(known)}")

    def update_job(tx: Transaction, job: Job, outcome: Outcome) -> None:
        if not can(job, Changed):
            raise RequestError(f"cannot change job {job.display_id}: it is {job.state}")
        if "work_dir" in changes:  # its script may run what it finds there, as its user
            authorize(identity, Action.RUN_STEP, job, f"change the directory of job {job.display_id}")
        anew = {name: text for name, text in changes.items() if name in OPTIONS or name == SIGNED}
        rest = {name: text for name, text in changes.items() if name in CHANGES}
        changed = _changed_event(tx, identity, job, rest) if rest else None
        size = anew.get("num_nodes") if job.state is not JobState.PENDING else None
        bounds = check_size(job, size) if size is not None else None
        if size is not None and not job.spec.elastic:
            del anew["num_nodes"]
        if anew:
            job = respecify(tx, job, anew, identity.uid, outcome.spec_ids)
        if changed is not None:
            job = tx.record(changed)
        if bounds is not None:
            keep_within(tx, job, *bounds, identity.uid)

    return each_job(tx, identity, references, {}, Action.UPDATE, update_job, "change")


def _time_limit_s(job: Job, text: str) -> int | None:
    """Return the requested time limit: ``2:00:00``, or a change such as ``+30``.

    0: no limit, as in Slurm.
    """
    if text[:1] not in "+-" or not text:
        return parse_time_s(text) or None
    if job.time_limit_s is None:
        raise RequestError(f"cannot change the time limit of job {job.display_id} by {text}: it has none")
    by_s = parse_time_s(text[1:]) or 0
    limit_s = job.time_limit_s + (by_s if text[0] == "+" else -by_s)
    if limit_s <= 0:
        raise RequestError(
            f"cannot change the time limit of job {job.display_id} by {text}: nothing would be left of it"
        )
    return limit_s


def _limit_until(job: Job, text: str, now_s: float) -> str:
    """Return the time limit with which the running job ends at the given time."""
    if job.state is not JobState.RUNNING:
        raise RequestError(f"cannot change the end of job {job.display_id}: it is {job.state}; change its time limit")
    end_s = parse_when(text, now_s)
    if end_s <= now_s:
        raise RequestError(f"cannot end job {job.display_id} at {short(text)}: that is past")
    return f"0:{ceil(ran_s(job, now_s) + end_s - now_s)}"


def _changed_event(tx: Transaction, identity: Identity, job: Job, changes: dict[str, str]) -> Changed:  # noqa: C901
    values: dict[str, Any] = {}
    if "begin" in changes:
        _must_wait(job, "change the begin time of")
        values["not_before_s"] = parse_when(changes["begin"], tx.now_s)
    begin_s = max(tx.now_s, values.get("not_before_s", job.not_before_s) or 0)
    if "end_time" in changes:
        changes = {**changes, "time_limit": _limit_until(job, changes["end_time"], tx.now_s)}
    if "time_limit" in changes:
        limit_s = _time_limit_s(job, changes["time_limit"])
        if (
            not allows(identity, Action.FAVOR, job)
            and job.time_limit_s is not None
            and (limit_s is None or limit_s > job.time_limit_s)
        ):
            _check_raise(tx.cluster, identity, job, limit_s)
        values["time_limit_s"] = limit_s or UNLIMITED_S
    if "time_min" in changes:
        _must_wait(job, "change the least time of")
        values["time_min_s"] = 0 if changes["time_min"] in ("", "none") else parse_time_s(changes["time_min"]) or 0
    if not changes.keys().isdisjoint(("time_min", "time_limit")):
        least_s = values.get("time_min_s", job.time_min_s) or None
        check_time_min(least_s, values.get("time_limit_s", job.time_limit_s))
    if not changes.keys().isdisjoint(("partition", "account", "qos")):
        values |= _new_place(tx.cluster, job, changes)
    if "nice" in changes:
        values["nice"] = _integer("nice", changes["nice"], at_least=-MAX_NICE, at_most=MAX_NICE)
        check_rank(identity, values["nice"], None)
    if "priority" in changes:
        authorize(identity, Action.FAVOR, what="set a priority")
        values["priority_set"] = _integer("priority", changes["priority"], at_most=MAX_PRIORITY)
    if "site_factor" in changes:
        authorize(identity, Action.FAVOR, what="set a site factor")
        values["site"] = _integer("site_factor", changes["site_factor"], at_least=-MAX_NICE, at_most=MAX_NICE)
    if "array_task_throttle" in changes:
        if job.array_job_id is None:
            raise RequestError(f"cannot throttle job {job.display_id}: it is not an array")
        values["array_limit"] = _integer("array_task_throttle", changes["array_task_throttle"])
    if "dependency" in changes:
        values |= _new_dependency(tx.cluster, identity, job, changes["dependency"])
    if "reservation" in changes:
        values["reservation"] = _new_reservation(tx, job, changes["reservation"])
    if "deadline" in changes:
        values["deadline_at_s"] = _new_deadline(tx, job, changes["deadline"])
    deadline_s = values.get("deadline_at_s", job.deadline_at_s)
    if deadline_s and not values.keys().isdisjoint(("deadline_at_s", "time_limit_s", "time_min_s", "not_before_s")):
        limit_s = values.get("time_limit_s", job.time_limit_s) if job.spec.time_limit_s is not None else None
        limit_s = values.get("time_min_s", job.time_min_s) or limit_s
        check_deadline(deadline_s, limit_s, begin_s)
    return Changed(job_id=job.id, at_s=tx.now_s, by_uid=identity.uid, **values)


def _check_raise(cluster: ClusterState, identity: Identity, job: Job, limit_s: int | None) -> None:
    """Reject a time limit that the user may not set.

    A user may not raise the limit of a started job, nor exceed the limits of its partitions and accounts.
    """
    if job.state is not JobState.PENDING:
        authorize(identity, Action.FAVOR, what=f"raise the time limit of job {job.display_id} once it has started")
    partitions = [cluster.partitions[name] for name in job.partition.split(",") if name in cluster.partitions]
    for partition in partitions:
        if partition.max_time_s is not None and (limit_s is None or limit_s > partition.max_time_s):
            most = format_time_s(partition.max_time_s)
            what = f"raise the time limit of job {job.display_id} above {most}, the most in partition {partition.name}"
            authorize(identity, Action.FAVOR, what=what)
    spec = replace(job.spec, account=job.account, qos=job.qos, time_limit_s=limit_s or UNLIMITED_S)
    let_in(cluster, job.user, spec, partitions)


def _new_dependency(cluster: ClusterState, identity: Identity, job: Job, text: str) -> dict[str, Any]:
    _must_wait(job, "change the dependency of")
    terms, any_one = parse_dependency(text)
    check_dependency(cluster, identity, terms)
    circle = dependency_circle(cluster, job, terms)
    if circle:
        way = " which waits for ".join(f"job {waiting.display_id}" for waiting in circle)
        raise RequestError(f"cannot have job {job.display_id} wait for {way}: that is a circle, none could ever start")
    return {"dependency": terms, "dependency_any": any_one}


def _new_place(cluster: ClusterState, job: Job, changes: dict[str, str]) -> dict[str, str]:
    """Return the job's new partition, account and QOS.

    Raises: RequestError if the job could never start with them.
    """
    values: dict[str, str] = {}
    spec = replace(job.spec, account=job.account, qos=job.qos, time_limit_s=job.time_limit_s)
    if "account" in changes or "qos" in changes:
        _must_wait(job, "change the account or QOS of")
        spec = _new_charge(cluster, job, changes)
        values = {"account": spec.account, "qos": spec.qos}
    if "partition" not in changes:
        let_in(
            cluster,
            job.user,
            spec,
            [cluster.partitions[name] for name in job.partition.split(",") if name in cluster.partitions],
        )
        return values
    _must_wait(job, "move")
    reservation = cluster.reservations.get(changes.get("reservation", job.reservation))
    wanted = find_partitions(cluster, changes["partition"])
    found = let_in(cluster, job.user, spec, possible_partitions(cluster, spec, wanted, job.time_limit_s, reservation))
    return {**values, "partition": ",".join(partition.name for partition in found)}


def _new_charge(cluster: ClusterState, job: Job, changes: dict[str, str]) -> JobSpec:
    """Return the job's specification with its new account and QOS."""
    wanted = replace(job.spec, account=changes.get("account", job.account), qos=changes.get("qos", job.qos))
    if "account" in changes and "qos" not in changes and cluster.config.accounting.quality(job.qos) is None:
        wanted = replace(wanted, qos="")
    return replace(settle(cluster, job.user, wanted), time_limit_s=job.time_limit_s)


def _new_reservation(tx: Transaction, job: Job, name: str) -> str:
    """Return the name of the job's new reservation, "" for none."""
    _must_wait(job, "change the reservation of")
    if name:
        reservation = check_use(tx.cluster, job.user, job.account, name, tx.now_s)
        possible_partitions(
            tx.cluster, job.spec, find_partitions(tx.cluster, job.partition), job.time_limit_s, reservation
        )
    return name


def _new_deadline(tx: Transaction, job: Job, text: str) -> int:
    """Return the job's new deadline; 0, for ``none``, removes it."""
    _must_wait(job, "change the deadline of")
    if text.lower() in ("", "none", "0"):
        return 0
    return int(parse_when(text, tx.now_s))


def _must_wait(job: Job, what: str) -> None:
    if job.state is not JobState.PENDING:
        raise RequestError(f"cannot {what} job {job.display_id}: it is {job.state}")


def _integer(name: str, text: str, *, at_least: int = 0, at_most: int = MAX_COUNT) -> int:
    word = text.strip()
    digits = word.lstrip("+-")
    if not (digits.isascii() and digits.isdigit()):
        raise RequestError(f"cannot set {name} to {short(text)}: it is not a whole number")
    if len(digits) > MAX_DIGITS or not at_least <= (number := whole_number(word, name)) <= at_most:
        raise RequestError(f"cannot set {name} to {short(text)}: it must be {at_least} to {at_most}")
    return number
