"""Jobs, nodes and steps to rows and back: the explicit mapping, column by column."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcsched.lifecycle.events import dependency_from_data, dependency_to_data, share_from_data, share_to_data
from hpcsched.model.codec import SpecReader
from hpcsched.model.cron import CronEntry, Crontab
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import ExitStatus, Hold, Job, JobState, Reason, Refusal
from hpcsched.model.node import Node, reach_of
from hpcsched.model.reservation import Flag, Reservation
from hpcsched.model.resources import Share
from hpcsched.model.spec import JobSpec
from hpcsched.model.training import RankFailure, TrainingStatus
from hpcsched.model.trigger import Trigger, TriggerEvent
from hpcsched.sched.queue.usage import UsedResources
from hpcsched.state.transaction import StepRecord

ADOPTED = "adopted:"  # keys of the table meta
PARTITION = "partition:"  # the state that an admin gave it


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryQuery:
    """What `hacct` asks for; None or empty: no restriction. Times bound the job's life, as sacct's -S and -E do."""

    job_ids: tuple[int, ...] = ()
    users: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    start_s: float | None = None
    end_s: float | None = None
    limit: int = 10_000


def job_row(job: Job) -> dict[str, Any]:
    """Return the row of table `jobs` for `job`."""
    return {
        "id": job.id,
        "spec_id": job.spec_id,
        "array_job_id": job.array_job_id,
        "array_task_id": job.array_task_id,
        "name": job.spec.name,
        "uid": job.uid,
        "user": job.user,
        "account": job.account,
        "submitted_at_s": job.submitted_at_s,
        "state": job.state.value,
        "reason": job.reason.value,
        "reason_detail": job.reason_detail,
        "hold": job.hold.value,
        "priority_set": job.priority_set,
        "nice": job.nice,
        "time_limit_s": job.time_limit_s,
        "partition": job.partition,
        "partition_asked": job.partition_asked,
        "eligible_at_s": job.eligible_at_s,
        "not_before_s": job.not_before_s,
        "attempt": job.attempt,
        "token": job.token,
        "shares": _shares_text(job.shares),
        "held_nodes": json.dumps(job.held_nodes) if job.held_nodes else "[]",
        "claimed_nodes": json.dumps(job.claimed_nodes) if job.claimed_nodes else "[]",
        "lease_s": job.lease_s,
        "allocated_at_s": job.allocated_at_s,
        "started_at_s": job.started_at_s,
        "ended_at_s": job.ended_at_s,
        "exit_code": job.exit.code if job.exit else None,
        "exit_signal": job.exit.signal if job.exit else None,
        "outcome": job.outcome.value if job.outcome else None,
        "requeue_wanted": int(job.requeue_wanted),
        "ended_by_uid": job.ended_by_uid,
        "restarts": job.restarts,
        "suspended_at_s": job.suspended_at_s,
        "suspended_s": job.suspended_s,
        "suspended_for": job.suspended_for,
        "preempted_by": job.preempted_by,
        "save_s": job.save_s,
        "reserved_shares": _shares_text(job.reserved_shares),
        "leaving": _shares_text(job.leaving),
        "joining": _shares_text(job.joining),
        "left_nodes": json.dumps(job.left_nodes) if job.left_nodes else "[]",
        "wanted_nodes": json.dumps(job.wanted_nodes) if job.wanted_nodes else "[]",
        "wanted_at_s": job.wanted_at_s,
        "generation": job.generation,
        "charged_until_s": job.charged_until_s,
        "charged_cpu_s": job.charged_cpu_s,
        "charged_mem_mib_s": job.charged_mem_mib_s,
        "charged_gpu_s": job.charged_gpu_s,
        "dependency_set": _dependency_text(job),
        "array_limit_set": job.array_limit_set,
        "deadline_set_s": job.deadline_set_s,
        "reservation_set": job.reservation_set,
        "account_set": job.account_set,
        "qos_set": job.qos_set,
        "time_min_set_s": job.time_min_set_s,
        "asked_limit_s": job.asked_limit_s,
        "site": job.site,
        "aged_s": job.aged_s,
        "barred_nodes": json.dumps(job.barred_nodes) if job.barred_nodes else "[]",
        "deaths": job.deaths,
        "saved_step": job.saved_step,
        "refusals": json.dumps(job.refusals) if job.refusals else "[]",
    }


def _shares_text(shares: tuple[Share, ...]) -> str:
    return json.dumps([share_to_data(share) for share in shares]) if shares else "[]"


def _shares_of(text: str) -> tuple[Share, ...]:
    return () if text == "[]" else tuple(map(share_from_data, json.loads(text)))


def _dependency_text(job: Job) -> str | None:
    if job.dependency_set is None:
        return None
    return json.dumps([job.dependency_any_set, dependency_to_data(job.dependency_set)], separators=(",", ":"))


def job_of(row: Any, spec: JobSpec) -> Job:
    """Return the job of a row of table `jobs`."""
    any_set, terms_set = (False, None) if row.dependency_set is None else json.loads(row.dependency_set)
    return Job(
        id=JobId(row.id),
        spec_id=row.spec_id,
        spec=spec,
        uid=row.uid,
        user=row.user,
        submitted_at_s=row.submitted_at_s,
        array_job_id=None if row.array_job_id is None else JobId(row.array_job_id),
        array_task_id=row.array_task_id,
        state=JobState(row.state),
        reason=Reason(row.reason),
        reason_detail=row.reason_detail,
        hold=Hold(row.hold),
        priority_set=row.priority_set,
        nice=row.nice,
        time_limit_s=row.time_limit_s,
        partition=row.partition,
        partition_asked=row.partition_asked,
        eligible_at_s=row.eligible_at_s,
        not_before_s=row.not_before_s,
        attempt=row.attempt,
        token=row.token,
        shares=_shares_of(row.shares),
        held_nodes=() if row.held_nodes == "[]" else tuple(NodeName(name) for name in json.loads(row.held_nodes)),
        claimed_nodes=() if row.claimed_nodes == "[]" else tuple(map(NodeName, json.loads(row.claimed_nodes))),
        lease_s=row.lease_s,
        allocated_at_s=row.allocated_at_s,
        started_at_s=row.started_at_s,
        ended_at_s=row.ended_at_s,
        exit=None if row.exit_code is None else ExitStatus(code=row.exit_code, signal=row.exit_signal),
        outcome=None if row.outcome is None else JobState(row.outcome),
        requeue_wanted=bool(row.requeue_wanted),
        ended_by_uid=row.ended_by_uid,
        restarts=row.restarts,
        suspended_at_s=row.suspended_at_s,
        suspended_s=row.suspended_s,
        suspended_for=None if row.suspended_for is None else JobId(row.suspended_for),
        preempted_by=None if row.preempted_by is None else JobId(row.preempted_by),
        save_s=row.save_s,
        reserved_shares=_shares_of(row.reserved_shares),
        leaving=_shares_of(row.leaving),
        joining=_shares_of(row.joining),
        left_nodes=() if row.left_nodes == "[]" else tuple(map(NodeName, json.loads(row.left_nodes))),
        wanted_nodes=() if row.wanted_nodes == "[]" else tuple(map(NodeName, json.loads(row.wanted_nodes))),
        wanted_at_s=row.wanted_at_s,
        generation=row.generation,
        charged_until_s=row.charged_until_s,
        charged_cpu_s=row.charged_cpu_s,
        charged_mem_mib_s=row.charged_mem_mib_s,
        charged_gpu_s=row.charged_gpu_s,
        dependency_set=None if terms_set is None else dependency_from_data(terms_set),
        dependency_any_set=any_set,
        array_limit_set=row.array_limit_set,
        deadline_set_s=row.deadline_set_s,
        reservation_set=row.reservation_set,
        account_set=row.account_set,
        qos_set=row.qos_set,
        time_min_set_s=row.time_min_set_s,
        asked_limit_s=row.asked_limit_s,
        site=row.site,
        aged_s=row.aged_s,
        barred_nodes=() if row.barred_nodes == "[]" else tuple(map(NodeName, json.loads(row.barred_nodes))),
        deaths=row.deaths,
        saved_step=row.saved_step,
        refusals=() if row.refusals == "[]" else tuple(Refusal(*one) for one in json.loads(row.refusals)),
    )


def submitted_job_of(row: Sequence[Any], spec: JobSpec, same: dict[str, str]) -> Job:
    """Return the job of the columns `SUBMITTED`, of a row whose others are as in `AS_SUBMITTED`.

    `same`: names that have been seen, so that each is kept once.
    """
    job_id, spec_id, array_job_id, array_task_id, uid, user, at_s, hold, priority, nice, limit_s, partition, *times = (
        row
    )
    return Job(
        id=job_id,
        spec_id=spec_id,
        spec=spec,
        uid=uid,
        user=same.setdefault(user, user),
        submitted_at_s=at_s,
        array_job_id=array_job_id,
        array_task_id=array_task_id,
        hold=_HOLDS[hold],
        priority_set=priority,
        nice=nice,
        time_limit_s=limit_s,
        partition=same.setdefault(partition, partition),
        eligible_at_s=times[0],
        not_before_s=times[1],
    )


SUBMITTED = (
    "id", "spec_id", "array_job_id", "array_task_id", "uid", "user", "submitted_at_s", "hold", "priority_set", "nice",
    "time_limit_s", "partition", "eligible_at_s", "not_before_s",
)  # fmt: skip
_HOLDS = {hold.value: hold for hold in Hold}
_SAMPLE = Job(id=JobId(1), spec_id=1, spec=JobSpec(name="", script="", work_dir=""), uid=0, user="", submitted_at_s=0.0)
AS_SUBMITTED = {
    column: value for column, value in job_row(_SAMPLE).items() if column not in (*SUBMITTED, "name", "account")
}  # the columns of a job to which nothing has happened; what a spec has as well is not looked at


def specs_of(rows: Iterable[tuple[int, str]]) -> dict[int, JobSpec]:
    """Return the specifications by their ids; equal ones, as of a script that is submitted again and again, are one."""
    read = SpecReader().read
    return {spec_id: read(text) for spec_id, text in rows}


def node_row(node: Node) -> dict[str, Any]:
    """Return the row of table `nodes`: what must outlive the controller (the spec comes from the configuration)."""
    return {
        "name": node.name,
        "drained": int(node.drained),
        "drained_why": node.drained_why,
        "drained_by": node.drained_by,
        "drained_at_s": node.drained_at_s,
        "boot_id": node.boot_id,
        "machine_id": node.machine_id,
        "link_since_s": node.link_since_s,
        "link_why": node.link_why,
        "spool": node.spool,
        "hardware": node.hardware,
        "reach": json.dumps(reach_of(node.spec)),
        "launch_failures": json.dumps(node.launch_failures),
        "has_strays": int(node.has_strays),
    }


def step_row(step: StepRecord) -> dict[str, Any]:
    """Return the row of table `steps`."""
    names = StepRecord.__dataclass_fields__
    return {name: getattr(step, name) for name in names} | {"nodes": json.dumps(step.nodes)}


def step_of(row: Any) -> StepRecord:
    """Return the step of a row of table `steps`."""
    values = {name: getattr(row, name) for name in StepRecord.__dataclass_fields__}
    return StepRecord(**values | {"nodes": tuple(json.loads(row.nodes))})


def usage_row(used: UsedResources) -> dict[str, Any]:
    """Return the row of table `usage`."""
    return {
        "account": used.account,
        "user": used.user,
        "qos": used.qos,
        "at_s": used.at_s,
        "amounts": json.dumps(dict(used.amounts)),
    }


def used_of(row: Any) -> UsedResources:
    """Return what a row of table `usage` says."""
    amounts = tuple((name, float(amount)) for name, amount in json.loads(row.amounts).items())
    return UsedResources(account=row.account, user=row.user, qos=row.qos, at_s=row.at_s, amounts=amounts)


def training_row(training: TrainingStatus) -> dict[str, Any]:
    """Return the row of table `training`."""
    return {name: getattr(training, name) for name in TrainingStatus.__dataclass_fields__}


def training_of(row: Any) -> TrainingStatus:
    """Return what a row of table `training` says."""
    return TrainingStatus(**{name: getattr(row, name) for name in TrainingStatus.__dataclass_fields__})


def failure_row(failure: RankFailure) -> dict[str, Any]:
    """Return the row of table `failures`."""
    return {name: getattr(failure, name) for name in RankFailure.__dataclass_fields__} | {"echo": int(failure.echo)}


def failure_of(row: Any) -> RankFailure:
    """Return what a row of table `failures` says."""
    return RankFailure(
        **{name: getattr(row, name) for name in RankFailure.__dataclass_fields__} | {"echo": bool(row.echo)}
    )


def reservation_row(reservation: Reservation) -> dict[str, Any]:
    """Return the row of table `reservations`."""
    row = {name: getattr(reservation, name) for name in Reservation.__dataclass_fields__}
    return row | {name: json.dumps(row[name]) for name in _LISTS}


def reservation_of(row: Any) -> Reservation:
    """Return the reservation of a row of table `reservations`."""
    values = {name: getattr(row, name) for name in Reservation.__dataclass_fields__}
    values |= {name: tuple(json.loads(values[name])) for name in _LISTS}
    return Reservation(**values | {"flags": tuple(map(Flag, values["flags"]))})


_LISTS = ("nodes", "users", "accounts", "flags")


def crontab_row(crontab: Crontab) -> dict[str, Any]:
    """Return the row of table `crontabs`."""
    entries = [{name: getattr(one, name) for name in CronEntry.__dataclass_fields__} for one in crontab.entries]
    return {"uid": crontab.uid, "user": crontab.user, "text": crontab.text, "entries": json.dumps(entries)}


def crontab_of(row: Any) -> Crontab:
    """Return the crontab of a row of table `crontabs`."""
    entries = tuple(CronEntry(**values) for values in json.loads(row.entries))
    return Crontab(uid=row.uid, user=row.user, text=row.text, entries=entries)


def trigger_row(trigger: Trigger) -> dict[str, Any]:
    """Return the row of table `triggers`."""
    return {
        "id": trigger.id,
        "value": json.dumps({name: getattr(trigger, name) for name in Trigger.__dataclass_fields__}),
    }


def trigger_of(row: Any) -> Trigger:
    """Return the trigger of a row of table `triggers`."""
    values = json.loads(row.value)
    return Trigger(**values | {"event": TriggerEvent(values["event"]), "program": tuple(values["program"])})
