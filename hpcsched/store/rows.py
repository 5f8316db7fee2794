"""The tables, and conversion of jobs, nodes and other values to rows and back.

Times are Unix seconds. Lists and composite values are JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from sqlalchemy import BigInteger, Column, Float, ForeignKey, Index, Integer, LargeBinary, MetaData, Table, Text

from hpcsched.auth.tokens import Credential, CredentialKind, Scope
from hpcsched.lifecycle.events import (
    Submitted,
    dependency_from_data,
    dependency_to_data,
    share_from_data,
    share_to_data,
)
from hpcsched.lifecycle.job import submitted_jobs
from hpcsched.model.codec import spec_from_json, spec_to_short_json, value_from_json, value_to_json
from hpcsched.model.cron import CronEntry, Crontab
from hpcsched.model.frozen import copies, replace
from hpcsched.model.ids import JobId, NodeName
from hpcsched.model.job import ExitStatus, Hold, Job, JobState, RankFailure, Reason, Refusal, TrainingStatus
from hpcsched.model.node import Node, Share, reach_of
from hpcsched.model.reservation import Flag, Reservation
from hpcsched.model.service import Service
from hpcsched.model.spec import JobSpec
from hpcsched.model.trigger import Trigger, TriggerEvent
from hpcsched.sched.fairshare import UsedResources
from hpcsched.state.transaction import StepRecord
from hpcsched.store.sealing import SealingKey

# ----- tables

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
    sqlite_with_rowid=False,
)

# Environments of jobs, each once: they are most of a specification, and jobs of a user share them.
environments = Table(
    "environments",
    metadata,
    Column("mac", Text, primary_key=True),  # keyed hash of the text (hpcsched.store.sealing)
    Column("key_id", Text, nullable=False),
    Column("sealed", LargeBinary, nullable=False),  # JSON of JobSpec.env, encrypted
)

specs = Table(
    "specs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("spec", Text, nullable=False),  # without its environment and fields that have their default
    # "": an empty environment. A mac without a row: the environment of an ended job, dropped.
    Column("env_mac", Text, nullable=False),
)

scripts = Table(
    "scripts",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("text", LargeBinary, nullable=False),
)

# Waiting jobs that have not changed since they were submitted: they have no row in `jobs`. A row here
# is a job, or all tasks of an array, of which those that have changed are in `jobs`.
submissions = Table(
    "submissions",
    metadata,
    Column("id", Integer, primary_key=True),  # of the job, or of the array's first task
    Column("last_id", Integer, nullable=False),
    Column("spec_id", Integer, ForeignKey("specs.id"), nullable=False),
    Column("name", Text, nullable=False),  # of the spec, repeated here for searches of the history
    Column("uid", Integer, nullable=False),
    Column("user", Text, nullable=False),
    Column("submitted_at_s", Float, nullable=False),
    Column("partition", Text, nullable=False),
    Column("time_limit_s", Integer),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("spec_id", Integer, ForeignKey("specs.id"), nullable=False),
    Column("array_job_id", Integer),
    Column("array_task_id", Integer),
    Column("name", Text, nullable=False),  # of the spec, repeated here for searches of the history
    Column("uid", Integer, nullable=False),
    Column("user", Text, nullable=False),
    Column("account", Text, nullable=False),
    Column("submitted_at_s", Float, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("reason_detail", Text, nullable=False),
    Column("hold", Text, nullable=False),
    Column("priority_set", Integer),
    Column("nice", Integer, nullable=False),
    Column("time_limit_s", Integer),
    Column("partition", Text, nullable=False),
    Column("eligible_at_s", Float),
    Column("not_before_s", Float),
    Column("attempt", Integer, nullable=False),
    Column("token", Text, nullable=False),
    Column("shares", Text, nullable=False),
    Column("held_nodes", Text, nullable=False),
    Column("claimed_nodes", Text, nullable=False),
    Column("lease_s", Float),
    Column("allocated_at_s", Float),
    Column("started_at_s", Float),
    Column("ended_at_s", Float),
    Column("exit_code", Integer),
    Column("exit_signal", Integer),
    Column("outcome", Text),
    Column("requeue_wanted", Integer, nullable=False),
    Column("ended_by_uid", Integer),
    Column("restarts", Integer, nullable=False),
    Column("suspended_at_s", Float),
    Column("suspended_s", Float),
    Column("suspended_for", Integer),
    Column("preempted_by", Integer),
    Column("save_s", Float),
    Column("reserved_shares", Text, nullable=False),
    Column("leaving", Text, nullable=False),
    Column("joining", Text, nullable=False),
    Column("left_nodes", Text, nullable=False),
    Column("wanted_nodes", Text, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("charged_until_s", Float),
    Column("charged_cpu_s", Float, nullable=False),
    Column("charged_mem_mib_s", Float, nullable=False),
    Column("charged_gpu_s", Float, nullable=False),
    # Changes since submission; NULL: as in the spec.
    Column("partition_asked", Text, nullable=False),
    Column("dependency_set", Text),
    Column("array_limit_set", Integer),
    Column("deadline_set_s", Integer),
    Column("reservation_set", Text),
    Column("account_set", Text),
    Column("qos_set", Text),
    Column("time_min_set_s", Integer),
    Column("asked_limit_s", Integer),  # before the limit was lowered
    Column("site", Integer, nullable=False),  # the admin's addition to the priority
    Column("aged_s", Float, nullable=False),
    Column("barred_nodes", Text, nullable=False),
    Column("wanted_at_s", Float),
    Column("deaths", Integer, nullable=False),  # attempts that ended because a rank was killed
    Column("saved_step", Integer, nullable=False),  # of the last checkpoint of those attempts
    Column("refusals", Text, nullable=False),  # JSON of hpcsched.model.job.Refusal
    Index("jobs_by_state", "state"),
    Index("jobs_by_end", "ended_at_s"),
    Index("jobs_by_array", "array_job_id"),
)

events = Table(
    "events",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("at_s", Float, nullable=False),
    Column("job_id", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("data", Text, nullable=False),
    Index("events_by_job", "job_id"),
)

node_events = Table(
    "node_events",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("at_s", Float, nullable=False),
    Column("node", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("data", Text, nullable=False),
    Index("node_events_by_node", "node"),
)

# Assessments of nodes: the last of each node, see `store._FORGET_BENCHES`.
benches = Table(
    "benches",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("at_s", Float, nullable=False),
    Column("node", Text, nullable=False),
    Column("data", Text, nullable=False),  # JSON, as `hpcsched.metrics.bench.BenchRun`
    Index("benches_by_node", "node"),
)

# Links between nodes: the last of each pair, see `store._FORGET_LINKS`.
links = Table(
    "links",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("at_s", Float, nullable=False),
    Column("one", Text, nullable=False),
    Column("other", Text, nullable=False),
    Column("data", Text, nullable=False),  # JSON, as `hpcsched.metrics.links.LinkRun`
    Index("links_by_pair", "one", "other"),
)

nodes = Table(
    "nodes",
    metadata,
    Column("name", Text, primary_key=True),
    Column("drained", Integer, nullable=False),
    Column("drained_why", Text, nullable=False),
    Column("drained_by", Text, nullable=False),
    Column("drained_at_s", Float),
    Column("boot_id", Text, nullable=False),
    Column("machine_id", Text, nullable=False),
    Column("link_since_s", Float, nullable=False),
    Column("link_why", Text, nullable=False),
    Column("spool", Text, nullable=False),
    Column("hardware", Text, nullable=False),
    Column("reach", Text, nullable=False),  # JSON of the address part of its description
    Column("launch_failures", Text, nullable=False),  # JSON of hpcsched.model.node.LaunchFailure
    Column("has_orphans", Integer, nullable=False),
)

# Whether nodes are switched on, of those that have been switched off or on.
powers = Table(
    "powers",
    metadata,
    Column("node", Text, primary_key=True),
    Column("power", Text, nullable=False),
    Column("since_s", Float, nullable=False),
    Column("by_whom", Text, nullable=False),
    Column("why", Text, nullable=False),
)

steps = Table(
    "steps",
    metadata,
    Column("job_id", Integer, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("step", Text, primary_key=True),  # "batch" or a number
    Column("name", Text, nullable=False),
    Column("nodes", Text, nullable=False),
    Column("ntasks", Integer, nullable=False),
    Column("started_at_s", Float),
    Column("ended_at_s", Float),
    Column("state", Text, nullable=False),
    Column("exit_code", Integer),
    Column("exit_signal", Integer),
    Column("cpu_user_s", Float),
    Column("cpu_system_s", Float),
    Column("max_rss_kib", Integer),  # of the task with the highest value
    Column("disk_read_bytes", BigInteger),
    Column("disk_write_bytes", BigInteger),
    Column("kept", Text),  # JSON of hpcsched.steps.service
    sqlite_with_rowid=False,
)

requests = Table(
    "requests",
    metadata,
    Column("uid", Integer, primary_key=True),
    Column("request_id", Text, primary_key=True),
    Column("job_ids", Text, nullable=False),  # of a submission
    Column("at_s", Float, nullable=False),
    Column("content", Text, nullable=False),  # hash of another change, "" of a submission
    Column("answer", Text, nullable=False),  # JSON of another change's answer, "" if it is not known
    Index("requests_of_user", "uid", "at_s"),
    sqlite_with_rowid=False,
)

audit = Table(
    "audit",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("at_s", Float, nullable=False),
    Column("uid", Integer, nullable=False),
    Column("user", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("object", Text, nullable=False),
    Column("before", Text, nullable=False),
    Column("after", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("hash", Text, nullable=False),
)

usage = Table(
    "usage",
    metadata,
    Column("account", Text, primary_key=True),
    Column("user", Text, primary_key=True),
    Column("qos", Text, primary_key=True),
    Column("at_s", Float, nullable=False),
    Column("amounts", Text, nullable=False),
    sqlite_with_rowid=False,
)

training = Table(
    "training",
    metadata,
    Column("job_id", Integer, primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("at_s", Float, nullable=False),
    Column("step", Integer, nullable=False),
    Column("total_steps", Integer, nullable=False),
    Column("loss", Float),
    Column("samples_per_s", Float, nullable=False),
    Column("steps_per_s", Float, nullable=False),
    Column("checkpoint_step", Integer, nullable=False),
    Column("checkpoint_at_s", Float),
    Column("note", Text, nullable=False),
    Column("goodput", Float),
    Column("directory", Text, nullable=False),
)

energies = Table(
    "energies",
    metadata,
    Column("job_id", Integer, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("node", Text, primary_key=True),
    Column("source", Text, primary_key=True),
    Column("joules", Float, nullable=False),
    sqlite_with_rowid=False,
)

gpu_uses = Table(
    "gpu_uses",
    metadata,
    Column("job_id", Integer, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("node", Text, primary_key=True),
    Column("seen_s", Float, nullable=False),
    Column("busy_s", Float, nullable=False),
    sqlite_with_rowid=False,
)

# What users asked of served models, day by day; see `hpcsched.model.accounting.ServiceUse`.
service_uses = Table(
    "service_uses",
    metadata,
    Column("service", Text, primary_key=True),
    Column("user", Text, primary_key=True),
    Column("account", Text, primary_key=True),
    Column("day", Integer, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

# Billing seconds of these tokens, where users were charged; a table of its own, because databases gain tables, not columns.
service_charges = Table(
    "service_charges",
    metadata,
    Column("service", Text, primary_key=True),
    Column("user", Text, primary_key=True),
    Column("account", Text, primary_key=True),
    Column("day", Integer, primary_key=True),
    Column("charged_s", Float, nullable=False),
    sqlite_with_rowid=False,
)

failures = Table(
    "failures",
    metadata,
    Column("job_id", Integer, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("ranks", Integer, nullable=False),
    Column("node", Text, nullable=False),
    Column("at_s", Float, nullable=False),
    Column("echo", Integer, nullable=False),
    Column("text", Text, nullable=False),
    sqlite_with_rowid=False,
)

reservations = Table(
    "reservations",
    metadata,
    Column("name", Text, primary_key=True),
    Column("start_s", Integer, nullable=False),  # of the present or next occurrence
    Column("end_s", Integer, nullable=False),
    Column("nodes", Text, nullable=False),
    Column("users", Text, nullable=False),
    Column("accounts", Text, nullable=False),
    Column("partition", Text, nullable=False),
    Column("features", Text, nullable=False),
    Column("node_count", Integer, nullable=False),
    Column("flags", Text, nullable=False),
    Column("made_by", Text, nullable=False),
    Column("made_at_s", Float, nullable=False),
)

crontabs = Table(
    "crontabs",
    metadata,
    Column("uid", Integer, primary_key=True),
    Column("user", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("entries", Text, nullable=False),  # JSON, as `hpcsched.model.cron.Entry`
)

triggers = Table(
    "triggers",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("value", Text, nullable=False),  # JSON, as `hpcsched.model.trigger.Trigger`
)

services = Table(
    "services",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),  # JSON, as `hpcsched.model.service.Service`
    sqlite_with_rowid=False,
)

# Credentials of the API over the network: hashes, never secrets.
credentials = Table(
    "credentials",
    metadata,
    Column("id", Text, primary_key=True),
    Column("value", Text, nullable=False),  # JSON, as `hpcsched.auth.tokens.Credential`
)

# ----- rows

_TO_JSON = json.JSONEncoder(separators=(",", ":")).encode

Env = tuple[tuple[str, str], ...]

# ----- a job: columns that store an attribute unchanged, and columns that store it as text

AS_THEY_ARE = (
    "id", "spec_id", "array_job_id", "array_task_id", "uid", "user", "submitted_at_s", "reason_detail", "priority_set",
    "nice", "time_limit_s", "partition", "partition_asked", "eligible_at_s", "not_before_s", "attempt", "token", "lease_s",
    "allocated_at_s", "started_at_s", "ended_at_s", "ended_by_uid", "restarts", "suspended_at_s", "suspended_s",
    "suspended_for", "preempted_by", "save_s", "wanted_at_s", "generation", "charged_until_s", "charged_cpu_s",
    "charged_mem_mib_s", "charged_gpu_s", "array_limit_set", "deadline_set_s", "reservation_set", "account_set", "qos_set",
    "time_min_set_s", "asked_limit_s", "site", "aged_s", "deaths", "saved_step",
)  # fmt: skip
COUNTED_AS_THEY_ARE = (
    "id", "spec_id", "array_job_id", "array_task_id", "uid", "user", "submitted_at_s", "partition", "ended_at_s",
    "suspended_s", "account_set", "qos_set",
)  # fmt: skip
COUNTED = (*COUNTED_AS_THEY_ARE, "state", "shares")
SHARES = ("shares", "reserved_shares", "leaving", "joining")
NODE_LISTS = ("held_nodes", "claimed_nodes", "left_nodes", "wanted_nodes", "barred_nodes")
_plain_values, _shares, _node_lists = attrgetter(*AS_THEY_ARE), attrgetter(*SHARES), attrgetter(*NODE_LISTS)


def job_row(job: Job) -> dict[str, Any]:
    """Return the row of table `jobs` for `job`."""
    row: dict[str, Any] = dict(zip(AS_THEY_ARE, _plain_values(job), strict=True))
    for name, shares in zip(SHARES, _shares(job), strict=True):
        row[name] = _shares_text(shares) if shares else "[]"
    for name, nodes in zip(NODE_LISTS, _node_lists(job), strict=True):
        row[name] = json.dumps(nodes) if nodes else "[]"
    row["name"] = job.spec.name
    row["account"] = job.account
    row["state"] = job.state.value
    row["reason"] = job.reason.value
    row["hold"] = job.hold.value
    row["exit_code"], row["exit_signal"] = (job.exit.code, job.exit.signal) if job.exit else (None, None)
    row["outcome"] = job.outcome.value if job.outcome else None
    row["requeue_wanted"] = int(job.requeue_wanted)
    row["dependency_set"] = _dependency_text(job)
    row["refusals"] = json.dumps(job.refusals) if job.refusals else "[]"
    return row


def _shares_text(shares: tuple[Share, ...]) -> str:
    return json.dumps([share_to_data(share) for share in shares])


def _dependency_text(job: Job) -> str | None:
    if job.dependency_set is None:
        return None
    return json.dumps([job.dependency_any_set, dependency_to_data(job.dependency_set)], separators=(",", ":"))


def jobs_of(rows: Iterable[Any], specs: Mapping[int, JobSpec]) -> list[Job]:
    """Return the jobs of rows of table `jobs`."""
    return [_job_of(row, specs[row.spec_id]) for row in rows]


def _job_of(row: Any, spec: JobSpec) -> Job:
    values: dict[str, Any] = dict(zip(AS_THEY_ARE, _plain_values(row), strict=True))
    for name, text in zip(SHARES, _shares(row), strict=True):
        values[name] = () if text == "[]" else tuple(map(share_from_data, json.loads(text)))
    for name, text in zip(NODE_LISTS, _node_lists(row), strict=True):
        values[name] = () if text == "[]" else tuple(map(NodeName, json.loads(text)))
    if row.exit_code is not None:
        values["exit"] = ExitStatus(code=row.exit_code, signal=row.exit_signal)
    if row.outcome is not None:
        values["outcome"] = JobState(row.outcome)
    if row.dependency_set is not None:
        any_one, terms = json.loads(row.dependency_set)
        values["dependency_any_set"] = any_one
        values["dependency_set"] = None if terms is None else dependency_from_data(terms)
    if row.refusals != "[]":
        values["refusals"] = tuple(Refusal(*refusal) for refusal in json.loads(row.refusals))
    values["spec"] = spec
    values["state"] = JobState(row.state)
    values["reason"] = Reason(row.reason)
    values["hold"] = Hold(row.hold)
    values["requeue_wanted"] = bool(row.requeue_wanted)
    return Job(**values)


def counted_jobs_of(rows: Sequence[Any], specs: Mapping[int, JobSpec]) -> list[Job]:
    """Return what reports count of jobs, from their columns `COUNTED`.

    Their other fields have their defaults. That is enough to replay their events. To make whole jobs takes several times as long.
    """
    if not rows:
        return []
    first = dict(zip(COUNTED_AS_THEY_ARE, rows[0], strict=False))
    plain = Job(**first, spec=specs[rows[0].spec_id])
    names = (*COUNTED_AS_THEY_ARE, "state", "shares", "spec")
    return copies(
        plain, names, ((*known, JobState(state), _shares_of(shares), specs[known[1]]) for *known, state, shares in rows)
    )


@lru_cache(maxsize=256)
def _shares_of(text: str) -> tuple[Share, ...]:
    """Return the shares in the JSON `text`. Many jobs of a history have equal ones."""
    return tuple(map(share_from_data, json.loads(text)))


def submission_row(tasks: Sequence[Job]) -> dict[str, Any]:
    """Return the row of table `submissions` for a new job, or for all tasks of a new array."""
    first = tasks[0]
    return {
        "id": first.id,
        "last_id": tasks[-1].id,
        "spec_id": first.spec_id,
        "name": first.spec.name,
        "uid": first.uid,
        "user": first.user,
        "submitted_at_s": first.submitted_at_s,
        "partition": first.partition,
        "time_limit_s": first.time_limit_s,
    }


def submitted_of(row: Any, spec: JobSpec, ids: Sequence[int]) -> Sequence[Job]:
    """Return these jobs of a row of table `submissions`, as they were submitted."""
    event = Submitted(
        job_id=JobId(row.id),
        at_s=row.submitted_at_s,
        spec_id=row.spec_id,
        uid=row.uid,
        user=row.user,
        partition=row.partition,
        time_limit_s=row.time_limit_s,
    )
    return submitted_jobs(event, spec, ids)


def env_row(env: Env, key: SealingKey) -> dict[str, Any]:
    """Return the row of table `environments`."""
    return sealed_row(json.dumps(env).encode(), key)


def sealed_row(text: bytes, key: SealingKey) -> dict[str, Any]:
    """Return the row of table `environments` for the JSON text of an environment."""
    mac = key.mac(text)
    return {"mac": mac, "key_id": key.id, "sealed": key.seal(mac, text)}


def env_of(text: bytes) -> Env:
    """Return the environment of its JSON text."""
    return tuple([(name, value) for name, value in json.loads(text)])


def spec_row(spec_id: int, spec: JobSpec, env_mac: str) -> dict[str, Any]:
    """Return the row of table `specs`."""
    own = spec_to_short_json(replace(spec, env=()))
    return {"id": spec_id, "spec": _TO_JSON(own), "env_mac": env_mac}


def specs_of(rows: Iterable[Any], environments: Mapping[str, Env]) -> dict[int, JobSpec]:
    """Return the specifications by id; equal ones (a script submitted repeatedly) are shared.

    An environment that is not in `environments` is left empty.
    """
    specs: dict[int, JobSpec] = {}
    known: dict[tuple[str, str], JobSpec] = {}
    for spec_id, text, env_mac in rows:
        spec = known.get((text, env_mac))
        if spec is None:
            spec = spec_from_json(json.loads(text))
            env = environments.get(env_mac)
            spec = known[text, env_mac] = replace(spec, env=env) if env else spec
        specs[spec_id] = spec
    return specs


def node_row(node: Node) -> dict[str, Any]:
    """Return the row of table `nodes`: the state that must outlive the controller.

    The spec is not in it: it comes from the configuration.
    """
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
        "has_orphans": int(node.has_orphans),
    }


def power_row(node: Node) -> dict[str, Any]:
    """Return the row of table `powers`."""
    return {
        "node": node.name,
        "power": node.power.value,
        "since_s": node.power_since_s,
        "by_whom": node.power_by,
        "why": node.power_why,
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
    """Return the usage of a row of table `usage`."""
    amounts = tuple((name, float(amount)) for name, amount in json.loads(row.amounts).items())
    return UsedResources(account=row.account, user=row.user, qos=row.qos, at_s=row.at_s, amounts=amounts)


def training_row(training: TrainingStatus) -> dict[str, Any]:
    """Return the row of table `training`."""
    return {name: getattr(training, name) for name in TrainingStatus.__dataclass_fields__}


def training_of(row: Any) -> TrainingStatus:
    """Return the status of a row of table `training`."""
    return TrainingStatus(**{name: getattr(row, name) for name in TrainingStatus.__dataclass_fields__})


def failure_row(failure: RankFailure) -> dict[str, Any]:
    """Return the row of table `failures`."""
    return {name: getattr(failure, name) for name in RankFailure.__dataclass_fields__} | {"echo": int(failure.echo)}


def failure_of(row: Any) -> RankFailure:
    """Return the failure of a row of table `failures`."""
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


def service_row(service: Service) -> dict[str, Any]:
    """Return the row of table `services`."""
    return {"name": service.name, "value": _TO_JSON(value_to_json(service))}


def service_of(row: Any) -> Service:
    """Return the service of a row of table `services`."""
    return value_from_json(Service, json.loads(row.value))


def trigger_of(row: Any) -> Trigger:
    """Return the trigger of a row of table `triggers`."""
    values = json.loads(row.value)
    return Trigger(**values | {"event": TriggerEvent(values["event"]), "program": tuple(values["program"])})


def credential_row(credential: Credential) -> dict[str, Any]:
    """Return the row of table `credentials`."""
    values = {name: getattr(credential, name) for name in Credential.__dataclass_fields__}
    return {"id": credential.id, "value": _TO_JSON(values)}


def credential_of(row: Any) -> Credential:
    """Return the credential of a row of table `credentials`."""
    values = json.loads(row.value)
    values["kind"] = CredentialKind(values["kind"])
    values["scopes"] = tuple(map(Scope, values["scopes"]))
    return Credential(**values)
