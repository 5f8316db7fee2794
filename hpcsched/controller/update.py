"""What may be changed of jobs after their submission: ``hctl update``, each change checked and turned into one event.

What a job asked for in its specification is asked for anew by `respecify`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Any

from hpcsched.api.identity import Asker
from hpcsched.controller.admission import let_in, settle
from hpcsched.controller.dependencies import check_deadline, check_dependency, dependency_circle
from hpcsched.controller.requests import Outcome, check_rank, each_job, find_partitions, possible_partitions
from hpcsched.controller.reserving import check_use
from hpcsched.controller.resizing import check_size, keep_within
from hpcsched.controller.respecify import OPTIONS, respecify
from hpcsched.errors import RequestError
from hpcsched.jobscript.check import check_time_min
from hpcsched.jobscript.dependency import parse_dependency
from hpcsched.jobscript.values import MAX_COUNT, MAX_NICE, MAX_PRIORITY, short
from hpcsched.lifecycle.clocks import ran_s
from hpcsched.lifecycle.events import Changed
from hpcsched.lifecycle.job import can
from hpcsched.model.dates import parse_when
from hpcsched.model.frozen import replace
from hpcsched.model.job import Job, JobState
from hpcsched.model.nearest import nearest
from hpcsched.model.spec import JobSpec
from hpcsched.model.units import UNLIMITED_S, parse_time_s
from hpcsched.store.world import Transaction, World

CHANGES = frozenset(
    {
        "time_limit",
        "end_time",
        "partition",
        "nice",
        "priority",
        "begin",
        "array_task_throttle",
        "dependency",
        "deadline",
        "reservation",
        "account",
        "qos",
        "time_min",
        "site_factor",
    }
)


def update(tx: Transaction, asker: Asker, references: Iterable[str], changes: dict[str, str]) -> Outcome:
    """Change what may be changed of the named jobs: see `CHANGES`."""
    unknown = set(changes) - CHANGES - OPTIONS.keys()
    if unknown or not changes:
        known = sorted(CHANGES | OPTIONS.keys())
        near = nearest(min(unknown), known) if unknown else ""
        wrong = ", ".join(sorted(unknown)) or "nothing"
        raise RequestError(f"cannot change {wrong}{near or ': can change ' + ', '.join(known)}")
    made: dict[int, int] = {}

    def one(job: Job, outcome: Outcome) -> None:
        if not can(job, Changed):
            raise RequestError(f"cannot change job {job.display_id}: it is {job.state}")
        anew = {name: text for name, text in changes.items() if name in OPTIONS}
        rest = {name: text for name, text in changes.items() if name in CHANGES}
        changed = _changed_event(tx, asker, job, rest) if rest else None
        size = anew.get("num_nodes") if job.state is not JobState.PENDING else None
        bounds = check_size(job, size) if size is not None else None
        if size is not None and not job.spec.elastic:
            del anew["num_nodes"]
        if anew:
            job = respecify(tx, job, anew, asker.uid, made)
        if changed is not None:
            job = tx.record(changed)
        if bounds is not None:
            keep_within(tx, job, *bounds, asker.uid)

    return each_job(tx, asker, references, {}, "change", one)


def _time_limit_s(job: Job, text: str) -> int | None:
    """Return the time limit that is asked for: ``2:00:00``, or so much more or less: ``+30``. 0 is no limit, as in Slurm."""
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
    """Return the time limit with which the job that runs ends then."""
    if job.state is not JobState.RUNNING:
        raise RequestError(f"cannot change the end of job {job.display_id}: it is {job.state}; change its time limit")
    end_s = parse_when(text, now_s)
    if end_s <= now_s:
        raise RequestError(f"cannot end job {job.display_id} at {short(text)}: that is past")
    return f"0:{ceil(ran_s(job, now_s) + end_s - now_s)}"


def _changed_event(tx: Transaction, asker: Asker, job: Job, changes: dict[str, str]) -> Changed:
    values: dict[str, Any] = {}
    if "begin" in changes:
        _must_wait(job, "change the begin time of")
        values["not_before_s"] = parse_when(changes["begin"], tx.now_s)
    begin_s = max(tx.now_s, values.get("not_before_s", job.not_before_s) or 0)
    if "end_time" in changes:
        changes = {**changes, "time_limit": _limit_until(job, changes["end_time"], tx.now_s)}
    if "time_limit" in changes:
        limit_s = _time_limit_s(job, changes["time_limit"])
        if not asker.admin and job.time_limit_s is not None and (limit_s is None or limit_s > job.time_limit_s):
            asker.must_be_admin(f"raise the time limit of job {job.display_id}")
        values["time_limit_s"] = limit_s or UNLIMITED_S
    if "time_min" in changes:
        _must_wait(job, "change the least time of")
        values["time_min_s"] = 0 if changes["time_min"] in ("", "none") else parse_time_s(changes["time_min"]) or 0
    if not changes.keys().isdisjoint(("time_min", "time_limit")):
        least_s = values.get("time_min_s", job.time_min_s) or None
        check_time_min(least_s, values.get("time_limit_s", job.time_limit_s))
    if not changes.keys().isdisjoint(("partition", "account", "qos")):
        values |= _new_place(tx.world, job, changes)
    if "nice" in changes:
        values["nice"] = _integer("nice", changes["nice"], at_least=-MAX_NICE, at_most=MAX_NICE)
        check_rank(asker, values["nice"], None)
    if "priority" in changes:
        asker.must_be_admin("set a priority")
        values["priority_set"] = _integer("priority", changes["priority"], at_most=MAX_PRIORITY)
    if "site_factor" in changes:
        asker.must_be_admin("set a site factor")
        values["site"] = _integer("site_factor", changes["site_factor"], at_least=-MAX_NICE, at_most=MAX_NICE)
    if "array_task_throttle" in changes:
        if job.array_job_id is None:
            raise RequestError(f"cannot throttle job {job.display_id}: it is no array")
        values["array_limit"] = _integer("array_task_throttle", changes["array_task_throttle"])
    if "dependency" in changes:
        values |= _new_dependency(tx.world, job, changes["dependency"])
    if "reservation" in changes:
        values["reservation"] = _new_reservation(tx, job, changes["reservation"])
    if "deadline" in changes:
        values["deadline_at_s"] = _new_deadline(tx, job, changes["deadline"])
    deadline_s = values.get("deadline_at_s", job.deadline_at_s)
    if deadline_s and not values.keys().isdisjoint(("deadline_at_s", "time_limit_s", "time_min_s", "not_before_s")):
        limit_s = values.get("time_limit_s", job.time_limit_s) if job.spec.time_limit_s is not None else None
        limit_s = values.get("time_min_s", job.time_min_s) or limit_s
        check_deadline(deadline_s, limit_s, begin_s)
    return Changed(job_id=job.id, at_s=tx.now_s, by_uid=asker.uid, **values)


def _new_dependency(world: World, job: Job, text: str) -> dict[str, Any]:
    _must_wait(job, "change the dependency of")
    terms, any_one = parse_dependency(text)
    check_dependency(world, terms)
    circle = dependency_circle(world, job, terms)
    if circle:
        way = " which waits for ".join(f"job {one.display_id}" for one in circle)
        raise RequestError(f"cannot have job {job.display_id} wait for {way}: that is a circle, none could ever start")
    return {"dependency": terms, "dependency_any": any_one}


def _new_place(world: World, job: Job, changes: dict[str, str]) -> dict[str, str]:
    """Return the partition, account and QOS that a job has from now on; what can never start with them is refused."""
    values: dict[str, str] = {}
    spec = replace(job.spec, account=job.account, qos=job.qos, time_limit_s=job.time_limit_s)
    if "account" in changes or "qos" in changes:
        _must_wait(job, "change the account or QOS of")
        spec = _new_charge(world, job, changes)
        values = {"account": spec.account, "qos": spec.qos}
    if "partition" not in changes:
        let_in(
            world,
            job.user,
            spec,
            [world.partitions[name] for name in job.partition.split(",") if name in world.partitions],
        )
        return values
    _must_wait(job, "move")
    reservation = world.reservations.get(changes.get("reservation", job.reservation))
    wanted = find_partitions(world, changes["partition"])
    found = let_in(world, job.user, spec, possible_partitions(world, spec, wanted, job.time_limit_s, reservation))
    return {**values, "partition": ",".join(partition.name for partition in found)}


def _new_charge(world: World, job: Job, changes: dict[str, str]) -> JobSpec:
    """Return what a job asks for, with the account and QOS that it has from now on."""
    wanted = replace(job.spec, account=changes.get("account", job.account), qos=changes.get("qos", job.qos))
    if "account" in changes and "qos" not in changes and world.config.accounting.quality(job.qos) is None:
        wanted = replace(wanted, qos="")
    return replace(settle(world, job.user, wanted), time_limit_s=job.time_limit_s)


def _new_reservation(tx: Transaction, job: Job, name: str) -> str:
    """Return the name of the reservation that a job is to run in from now on, "" for none."""
    _must_wait(job, "change the reservation of")
    if name:
        reservation = check_use(tx.world, job.user, job.account, name, tx.now_s)
        possible_partitions(tx.world, job.spec, find_partitions(tx.world, job.partition), job.time_limit_s, reservation)
    return name


def _new_deadline(tx: Transaction, job: Job, text: str) -> int:
    """Return the new deadline of a job; 0, for ``none``, if it is to have none any more."""
    _must_wait(job, "change the deadline of")
    if text.lower() in ("", "none", "0"):
        return 0
    return int(parse_when(text, tx.now_s))


def _must_wait(job: Job, what: str) -> None:
    if job.state is not JobState.PENDING:
        raise RequestError(f"cannot {what} job {job.display_id}: it is {job.state}")


def _integer(name: str, text: str, *, at_least: int = 0, at_most: int = MAX_COUNT) -> int:
    try:
        number = int(text)
    except ValueError:
        raise RequestError(f"cannot set {name} to {short(text)}: it is not a whole number") from None
    if not at_least <= number <= at_most:
        raise RequestError(f"cannot set {name} to {short(text)}: it must be {at_least} to {at_most}")
    return number
