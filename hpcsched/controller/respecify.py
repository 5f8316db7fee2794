"""What a job asked for when it was submitted, asked for anew: ``scontrol update JobId=12 Name=x MinMemoryNode=4G``.

The values are read as those of the options of the same meaning, and what the job asks for then is checked as a submission is.
What decides on its place can be changed while it waits only; the bounds of an elastic job's size at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcsched.controller.admission import let_in
from hpcsched.controller.requests import find_partitions, possible_partitions
from hpcsched.errors import RequestError
from hpcsched.jobscript.build import DIRECT
from hpcsched.jobscript.check import check_spec
from hpcsched.jobscript.options import find_option
from hpcsched.model.codec import spec_to_json
from hpcsched.model.frozen import replace
from hpcsched.model.job import Job, JobState
from hpcsched.model.spec import JobSpec
from hpcsched.store.world import Transaction

ANY_TIME = frozenset({"name", "comment", "mail_user", "mail_type", "requeue"})
OPTIONS = {  # what is changed: the option that it is read as
    "name": "job-name",
    "comment": "comment",
    "mail_user": "mail-user",
    "mail_type": "mail-type",
    "requeue": "requeue",
    "constraint": "constraint",
    "cpus_per_task": "cpus-per-task",
    "exclude": "exclude",
    "gres": "gres",
    "licenses": "licenses",
    "mem": "mem",
    "mem_per_cpu": "mem-per-cpu",
    "mincpus": "mincpus",
    "nodelist": "nodelist",
    "ntasks": "ntasks",
    "ntasks_per_node": "ntasks-per-node",
    "num_cpus": "ntasks",
    "num_nodes": "nodes",
    "prefer": "prefer",
    "switches": "switches",
    "tmp": "tmp",
    "work_dir": "chdir",
}
_EMPTY: Mapping[str, Any] = {"nodelist": (), "exclude": (), "licenses": ()}  # of an empty value


def respecify(tx: Transaction, job: Job, changes: Mapping[str, str], by_uid: int, made: dict[int, int]) -> Job:
    """Have the job ask for this from now on. `made` keeps which specification came of which: tasks of an array share theirs.

    Raises RequestError for what cannot be read, cannot be changed any more, or can never start.
    """
    any_time = {*ANY_TIME, "num_nodes"} if job.spec.elastic else ANY_TIME
    for name in changes:
        if job.state is not JobState.PENDING and name not in any_time:
            raise RequestError(f"cannot change {name} of job {job.display_id}: it is {job.state}")
    fields: dict[str, Any] = {}
    for name, text in changes.items():
        fields |= _fields(name, text, replace(job.spec, **fields))
    spec = replace(job.spec, **fields)
    check_spec(spec)
    if job.state is JobState.PENDING:
        _check_place(tx, replace(job, spec=spec))
    said = spec_to_json(spec)
    changed = tx.respecify(job, {name: said[name] for name in fields}, by_uid=by_uid, spec_id=made.get(job.spec_id))
    made[job.spec_id] = changed.spec_id
    return changed


def _fields(name: str, text: str, spec: JobSpec) -> dict[str, Any]:
    """Return the fields of the specification `spec` that a change sets."""
    option = OPTIONS[name]
    if not text and name in _EMPTY:
        return {name: _EMPTY[name]}
    value = find_option(option).parse(text)
    match name:
        case "gres":
            return {"gpus_per_node": value.gpus, "shards_per_node": value.shards}
        case "num_cpus":  # as many tasks as need them
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
    """Refuse what can never start in the partitions that the job waits for."""
    world = tx.world
    spec = replace(job.spec, account=job.account, qos=job.qos, time_limit_s=job.time_limit_s)
    partitions = find_partitions(world, job.partition)
    reservation = world.reservations.get(job.reservation)
    let_in(world, job.user, spec, possible_partitions(world, spec, partitions, job.time_limit_s, reservation))
