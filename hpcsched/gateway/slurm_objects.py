"""Jobs, nodes and partitions as slurmrestd shows them, and its job description as a job.

Pure. Slurm's OpenAPI plug-ins v0.0.40 to v0.0.44 differ little in these objects; a field that not all of them have is left
out. As slurmrestd does, it ignores ``#SBATCH`` lines of the script. Fields of a description that have no effect here are named in
``warnings``; those that ask for something that is not possible here are refused.

Source: the OpenAPI specifications of Slurm 23.11 to 25.11.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from hpcnode.commands import slurm_text
from hpcsched.errors import (
    HpcschedError,
    NotFoundError,
    PermissionDeniedError,
    RequestError,
    UnauthenticatedError,
    UnavailableError,
)
from hpcsched.jobscript.build import build_spec
from hpcsched.jobscript.options import Settings
from hpcsched.model.frozen import replace
from hpcsched.model.spec import JobSpec
from hpcsched.model.units import signal_name

Json = dict[str, Any]

VERSIONS = ("v0.0.40", "v0.0.41", "v0.0.42", "v0.0.43", "v0.0.44")
RELEASE = ("25", "11", "0")  # of Slurm, whose paths and objects these are
UNKNOWN_FAILURE = -1
MAX_VARIABLES = 2_000

# Slurm's words for an error, and its number.
_NUMBER_OF: Mapping[str, int] = {
    "Unable to contact slurm controller (connect failure)": 1800,
    "Rate limit exceeded, please retry momentarily": 1804,
    "Invalid partition name specified": 2000,
    "Access/permission denied": 2002,
    "Slurm temporarily unable to accept job, sleeping and retrying": 2007,
    "Job script not specified": 2009,
    "Requested node configuration is not available": 2014,
    "Invalid job id specified": 2017,
    "Invalid node name specified": 2018,
    "Job/step already completing or completed": 2021,
    "Requested operation not supported on this system": 2036,
    "Job dependency problem": 2038,
    "Invalid account or account/partition combination specified": 2045,
    "Invalid license specification": 2048,
    "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)": 2050,
    "Requested time limit is invalid (missing or exceeds some limit)": 2051,
    "Requested reservation is invalid": 2053,
    "Invalid qos specification": 2066,
    "Required partition not available (inactive or drain)": 2070,
    "Invalid job array specification": 2081,
    "Query empty or not RFC7320 compliant": 9000,
    "Failure during parsing": 9001,
    "Jobs description entry not found, empty or not dictionary or list": 9002,
    "Unable to find requested URL": 9006,
    "Authentication failure": 9008,
}
INVALID_JOB, INVALID_NODE = "Invalid job id specified", "Invalid node name specified"
INVALID_PARTITION, INVALID_RESERVATION = "Invalid partition name specified", "Requested reservation is invalid"
# Part of our text: Slurm's words, for what is wrong with a request besides the job in it.
_OF_REQUESTS = (
    ("the body must be", "Jobs description entry not found, empty or not dictionary or list"),
    ("the request has no script", "Job script not specified"),
    ("already ended", "Job/step already completing or completed"),
    ("cannot take the field", "Failure during parsing"),
    ("cannot read", "Failure during parsing"),
    ("the parameter", "Query empty or not RFC7320 compliant"),
)

# Field of a description: our option, where the value is the option's text.
_TEXTS = {
    "account": "account", "array": "array", "comment": "comment", "constraints": "constraint", "dependency": "dependency",
    "distribution": "distribution", "licenses": "licenses", "mail_user": "mail-user", "name": "job-name", "nodes": "nodes",
    "partition": "partition", "prefer": "prefer", "qos": "qos", "reservation": "reservation", "standard_error": "error",
    "standard_input": "input", "standard_output": "output",
}  # fmt: skip
_NUMBERS = {
    "cpus_per_task": "cpus-per-task", "minimum_cpus_per_node": "mincpus", "nice": "nice", "priority": "priority",
    "tasks": "ntasks", "tasks_per_node": "ntasks-per-node", "time_limit": "time", "time_minimum": "time-min",
    "temporary_disk_per_node": "tmp", "memory_per_node": "mem", "memory_per_cpu": "mem-per-cpu", "required_switches": "switches",
}  # fmt: skip
_MIB = ("temporary_disk_per_node", "memory_per_node", "memory_per_cpu")
_FLAGS = {"contiguous": "contiguous", "hold": "hold", "overcommit": "overcommit"}
_LISTS = {"excluded_nodes": "exclude", "required_nodes": "nodelist", "mail_type": "mail-type"}
_OTHERS = frozenset({
    "argv", "begin_time", "current_working_directory", "deadline", "environment", "exclusive", "kill_warning_delay",
    "kill_warning_flags", "kill_warning_signal", "maximum_nodes", "minimum_nodes", "open_mode", "requeue", "script", "shared",
    "tres_per_job", "tres_per_node", "tres_per_task",
})  # fmt: skip
_FORBIDDEN = {
    "user_id": "the token says who asks", "group_id": "the token says who asks",
    "hetjob_group": "use hsub for heterogeneous jobs", "crontab": "use scrontab", "container": "there are no containers",
    "burst_buffer": "there are no burst buffers", "reboot": "nodes are not rebooted for jobs",
}  # fmt: skip
_TIME_LIMIT_S = 60


def answer(body: Json, *, errors: Sequence[Json] = (), warnings: Sequence[str] = ()) -> Json:
    """Return an answer as slurmrestd builds it."""
    major, minor, micro = RELEASE
    meta = {
        "plugin": {"type": "openapi/slurmctld", "name": "hpcsched", "data_parser": "", "accounting_storage": ""},
        "client": {"source": "", "user": "", "group": ""},
        "command": [],
        "slurm": {
            "version": {"major": major, "micro": micro, "minor": minor},
            "release": ".".join(RELEASE),
            "cluster": "",
        },
    }
    told = [{"description": text, "source": "hpcsched"} for text in warnings]
    return {**body, "meta": meta, "errors": list(errors), "warnings": told}


def error_of(error: HpcschedError, source: str, missing: str = INVALID_JOB) -> tuple[int, Json]:
    """Return the HTTP status of an error, and the error as slurmrestd shows it.

    `missing`: Slurm's words if something was not found; "" to take those for a job that was refused.
    """
    status, words = 500, ""
    match error:
        case UnauthenticatedError():
            status, words = 401, "Authentication failure"
        case PermissionDeniedError():
            status, words = 403, "Access/permission denied"
        case NotFoundError():
            status, words = 404, missing or slurm_text.of_job(str(error))
        case RequestError():
            status = 400
            words = next((words for part, words in _OF_REQUESTS if part in str(error)), "") or slurm_text.of_job(
                str(error)
            )
        case UnavailableError():
            status, words = 503, "Unable to contact slurm controller (connect failure)"
    return status, error_object(str(error), words, source)


def error_object(why: str, words: str, source: str) -> Json:
    """Return an error as slurmrestd shows it; `words`: Slurm's for it, "" if it has none."""
    shown = words or "Unspecified error"
    return {
        "description": why,
        "error_number": _NUMBER_OF.get(shown, UNKNOWN_FAILURE),
        "error": shown,
        "source": source,
    }


# ----- what is shown


def number(value: float | None) -> Json:
    """Return a number that may be missing."""
    return {"set": value is not None, "infinite": False, "number": 0 if value is None else int(value)}


def _fraction(value: float | None) -> Json:
    return {"set": value is not None, "infinite": False, "number": 0.0 if value is None else float(value)}


def _usage(value: float | None) -> Json:
    """Return a number without a bound: None is infinite, as of who has used nothing."""
    return _fraction(value) | {"set": value is not None, "infinite": value is None}


def minutes(value_s: float | None) -> Json:
    """Return a time limit; None: there is none."""
    return {
        "set": value_s is not None,
        "infinite": value_s is None,
        "number": 0 if value_s is None else -int(-value_s // 60),
    }


def exit_object(view: Json) -> Json:
    """Return how a job ended."""
    code, signum = view["exit_code"], view["exit_signal"] or 0
    status = "PENDING" if code is None else "SIGNALED" if signum else "ERROR" if code else "SUCCESS"
    signal = {"id": number(signum), "name": signal_name(signum).removeprefix("SIG") if signum else ""}
    return {"status": [status], "return_code": number(code), "signal": signal}


def job_object(view: Json, cluster: str) -> Json:
    """Return a job of slurmctld. Texts that the asker may not see are empty."""
    has_started = bool(view["nodes"])
    return {
        **_times(view),
        **_wishes(view),
        "account": view["account"],
        "array_job_id": number(view["array_job_id"]),
        "array_task_id": number(view["array_task_id"]),
        "batch_flag": True,
        "batch_host": view["nodes"][0] if has_started else "",
        "cluster": cluster,
        "command": view["command"] or "",
        "comment": view["comment"] or "",
        "cpus": number(view["num_cpus"]),
        "current_working_directory": view["work_dir"] or "",
        "derived_exit_code": exit_object(view),
        "exit_code": exit_object(view),
        "het_job_id": number(view["het_job_id"]),
        "het_job_offset": number(view["het_offset"]),
        "job_id": view["id"],
        "job_state": [view["state"]],
        "name": view["name"],
        "node_count": number(view["num_nodes"]),
        "nodes": view["node_list"],
        "partition": view["partition"],
        "qos": view["qos"] or "normal",
        "restart_cnt": view["restarts"],
        "standard_error": view["stderr"] or "",
        "standard_input": view["stdin"] or "",
        "standard_output": view["stdout"] or "",
        "state_description": view["reason_detail"],
        "state_reason": view["reason"] or "None",
        "tasks": number(view["num_tasks"]),
        "tres_req_str": _tres(view),
        "tres_alloc_str": _tres(view) if has_started else "",
        "user_id": view["uid"],
        "user_name": view["user"],
    }


def _times(view: Json) -> Json:
    """Return the times and time limits of a job."""
    return {
        "accrue_time": number(view["accrued_from_s"]),
        "deadline": number(view["deadline_at_s"]),
        "eligible_time": number(view["eligible_at_s"]),
        "end_time": number(view["ended_at_s"]),
        "start_time": number(view["started_at_s"] or view["expected_start_s"]),
        "submit_time": number(view["submitted_at_s"]),
        "suspend_time": number(None),
        "time_limit": minutes(view["time_limit_s"]),
        "time_minimum": number(None if view["time_min_s"] is None else view["time_min_s"] // 60),
    }


def _wishes(view: Json) -> Json:
    """Return what a job asks for."""
    return {
        "array_max_tasks": number(view["array_limit"]),
        "contiguous": view["contiguous"],
        "cpus_per_task": number(view["cpus_per_task"]),
        "dependency": view["dependency"],
        "excluded_nodes": ",".join(view["excluded_nodes"]),
        "features": view["constraint"],
        "hold": view["hold"] != "none",
        "licenses": ",".join(f"{name}:{count}" for name, count in view["licenses"].items()),
        "max_nodes": number(None),
        "memory_per_cpu": number(view["mem_per_cpu_mib"]),
        "memory_per_node": number(None if view["mem_per_cpu_mib"] else view["mem_mib"]),
        "minimum_cpus_per_node": number(view["mincpus"]),
        "nice": view["nice"],
        "prefer": view["prefer"],
        "priority": number(view["priority"]),
        "requeue": view["requeue"],
        "required_nodes": ",".join(view["asked_nodes"]),
        "resv_name": view["reservation"],
    }


def _tres(view: Json) -> str:
    parts = [
        f"cpu={view['num_cpus']}",
        f"mem={view['mem_mib']}M" if view["mem_mib"] else "",
        f"node={view['num_nodes']}",
    ]
    return ",".join([*filter(None, parts), *([f"gres/gpu={view['gpus']}"] if view["gpus"] else [])])


_STATES_OF_NODES = {
    "IDLE": ["IDLE"], "MIXED": ["MIXED"], "ALLOCATED": ["ALLOCATED"], "DOWN": ["DOWN"], "UNKNOWN": ["UNKNOWN"],
    "DRAINED": ["IDLE", "DRAIN"], "DRAINING": ["MIXED", "DRAIN"], "MAINT": ["IDLE", "MAINTENANCE"],
    "RESERVED": ["IDLE", "RESERVED"], "POWERED_DOWN": ["IDLE", "POWERED_DOWN"], "POWERING_UP": ["IDLE", "POWERING_UP"],
    "POWERING_DOWN": ["IDLE", "POWERING_DOWN"],
}  # fmt: skip


def node_object(view: Json, cluster: str) -> Json:
    """Return a node of slurmctld."""
    is_drained = view["drained"]
    gpus = len(view["gpus"])
    return {
        "active_features": view["features"],
        "address": view["host"],
        "alloc_cpus": view["cpus_alloc"],
        "alloc_idle_cpus": view["cpus"] - view["cpus_alloc"],
        "alloc_memory": view["mem_alloc_mib"],
        "cluster_name": cluster,
        "cpus": view["cpus"],
        "effective_cpus": view["cpus"],
        "features": view["features"],
        "gres": f"gpu:{gpus}" if gpus else "",
        "gres_used": f"gpu:{view['gpus_alloc']}" if gpus else "",
        "hostname": view["name"],
        "name": view["name"],
        "partitions": view["partitions"],
        "port": view["port"] or 22,
        "real_memory": view["mem_mib"],
        "reason": view["drained_why"] if is_drained else view["link_why"] if view["state"] == "DOWN" else "",
        "reason_changed_at": number(view["drained_at_s"] if is_drained else None),
        "reason_set_by_user": view["drained_by"],
        "reservation": view["reservation"],
        "state": _STATES_OF_NODES.get(view["state"], ["UNKNOWN"]),
        "temporary_disk": view["tmp_mib"] or 0,
        "tres": f"cpu={view['cpus']},mem={view['mem_mib']}M" + (f",gres/gpu={gpus}" if gpus else ""),
        "weight": view["weight"],
    }


def partition_object(view: Json, cluster: str) -> Json:
    """Return a partition of slurmctld."""
    return {
        "accounts": {"allowed": ",".join(view["allow_accounts"]), "deny": ""},
        "cluster": cluster,
        "cpus": {"task_binding": 0, "total": view["cpus"]},
        "defaults": {"time": minutes(view["default_time_s"])},
        "maximums": {"time": minutes(view["max_time_s"])},
        "name": view["name"],
        "nodes": {
            "allowed_allocation": "",
            "configured": view["node_list"],
            "total": len(view["nodes"]),
        },
        "partition": {"state": [view["state"].upper()]},
        "priority": {"job_factor": view["priority_job_factor"], "tier": view["priority_tier"]},
        "qos": {"allowed": ",".join(view["allow_qos"]), "deny": "", "assigned": ""},
    }


def ping_object(ping: Json, latency_us: int) -> Json:
    """Return the controller as slurmctld answers a ping; `ping`: its answer to ours."""
    return {
        "hostname": ping["cluster"],
        "pinged": "UP",
        "responding": True,
        "latency": latency_us,
        "mode": "primary",
        "primary": True,
    }


def statistics_object(ping: Json) -> Json:
    """Return the counts of slurmctld that the controller has."""
    counts = ping["counts"]
    return {
        "req_time": number(ping["now_s"]),
        "req_time_start": number(ping["started_at_s"]),
        "job_states_ts": number(ping["now_s"]),
        "jobs_pending": counts.get("PENDING", 0),
        "jobs_running": counts.get("RUNNING", 0),
        "schedule_queue_length": counts.get("PENDING", 0),
    }


def license_object(view: Json) -> Json:
    """Return a licence of slurmctld."""
    named = {"LicenseName": view["name"], "Total": view["total"], "Used": view["used"], "Free": view["free"]}
    return {**named, "Remote": False, "Reserved": 0}


def reservation_object(view: Json) -> Json:
    """Return a reservation of slurmctld."""
    return {
        "accounts": ",".join(view["accounts"]),
        "core_count": view["cpus"],
        "end_time": number(view["end_s"]),
        "features": view["features"],
        "name": view["name"],
        "node_count": len(view["nodes"]),
        "node_list": view["node_list"],
        "partition": view["partition"],
        "start_time": number(view["start_s"]),
        "tres": f"cpu={view['cpus']}",
        "users": ",".join(view["users"]),
    }


def share_object(view: Json, cluster: str, version: str) -> Json:
    """Return a row of the tree of accounts and users."""
    factor, level = view["fairshare"], view["level_fs"]
    is_plain = version in ("v0.0.40", "v0.0.41")  # later ones can say that a number is infinite
    return {
        "id": 0,
        "cluster": cluster,
        "name": view["user"] or view["account"] or "root",
        "parent": view["account"] if view["user"] else "root" if view["account"] else "",
        "partition": "",
        "shares": number(view["shares"]),
        "shares_normalized": _fraction(view["norm_shares"]),
        "effective_usage": view["effective_usage"] if is_plain else _usage(view["effective_usage"]),
        "usage_normalized": _fraction(view["norm_usage"]),
        "usage": int(view["usage"]),
        "fairshare": {"factor": factor, "level": level}
        if is_plain
        else {"factor": _usage(factor), "level": _usage(level)},
        "type": ["USER"] if view["user"] else ["ASSOCIATION"],
    }


def history_object(view: Json, cluster: str) -> Json:
    """Return a job of slurmdbd. Texts that the asker may not see are empty."""
    return {
        "account": view["account"],
        "allocation_nodes": len(view["nodes"]),
        "array": {
            "job_id": view["array_job_id"] or 0,
            "limits": {"max": {"running": {"tasks": view["array_limit"] or 0}}},
            "task_id": number(view["array_task_id"]),
            "task": "",
        },
        "cluster": cluster,
        "comment": {"administrator": "", "job": view["comment"] or "", "system": ""},
        "constraints": view["constraint"],
        "derived_exit_code": exit_object(view),
        "exit_code": exit_object(view),
        "het": {"job_id": view["het_job_id"] or 0, "job_offset": number(view["het_offset"])},
        "job_id": view["id"],
        "name": view["name"],
        "nodes": view["node_list"] or "None assigned",
        "partition": view["partition"],
        "priority": number(view["priority"]),
        "qos": view["qos"] or "normal",
        "required": {
            "CPUs": view["num_cpus"],
            "memory_per_cpu": number(view["mem_per_cpu_mib"]),
            "memory_per_node": number(None if view["mem_per_cpu_mib"] else view["mem_mib"]),
        },
        "restart_cnt": view["restarts"],
        "state": {"current": [view["state"]], "reason": view["reason"] or "None"},
        "steps": [],
        "submit_line": view["submit_line"] or "",
        "time": {
            "elapsed": int(view["elapsed_s"] or 0),
            "eligible": int(view["eligible_at_s"] or 0),
            "end": int(view["ended_at_s"] or 0),
            "start": int(view["started_at_s"] or 0),
            "submission": int(view["submitted_at_s"]),
            "suspended": int(view["suspended_s"] or 0),
            "limit": minutes(view["time_limit_s"]),
        },
        "user": view["user"],
        "working_directory": view["work_dir"] or "",
    }


# ----- what is changed

_CHANGES = {
    "account": "account", "array_max_tasks": "array_task_throttle", "comment": "comment", "constraints": "constraint",
    "cpus_per_task": "cpus_per_task", "dependency": "dependency", "excluded_nodes": "exclude", "licenses": "licenses",
    "mail_user": "mail_user", "memory_per_cpu": "mem_per_cpu", "memory_per_node": "mem",
    "minimum_cpus_per_node": "mincpus", "name": "name", "nice": "nice", "nodes": "num_nodes", "partition": "partition",
    "prefer": "prefer", "priority": "priority", "qos": "qos", "required_nodes": "nodelist", "requeue": "requeue",
    "reservation": "reservation", "tasks": "ntasks", "tasks_per_node": "ntasks_per_node", "time_limit": "time_limit",
    "time_minimum": "time_min",
}  # fmt: skip


def changes_of(described: Json) -> tuple[dict[str, str], bool | None]:
    """Return the changes that a description asks for, and whether to hold the job.

    None: it is left as it is. Raises RequestError for a field that cannot be changed.
    """
    given = {name: value for name, value in described.items() if not _is_empty(value)}
    hold = _flag(given, "hold") if "hold" in given else None
    changes = {}
    for name in given.keys() - {"hold", "job_id"}:
        if name not in _CHANGES:
            raise RequestError(
                f"cannot take the field {name[:60]}: it cannot be changed here; can: {', '.join(sorted(_CHANGES))}"
            )
        changes[_CHANGES[name]] = _change(given, name)
    if not changes and hold is None:
        raise RequestError("cannot change the job: the body must be a description of a job with some fields")
    return changes, hold


def _change(given: Json, name: str) -> str:
    """Return a field's value as ``hctl update`` takes it."""
    if name == "requeue":
        return "1" if _flag(given, name) else "0"
    if name in _LISTS:
        return ",".join(_texts(given, name))
    if name in _NUMBERS or name == "array_max_tasks":
        value = _number(given, name)
        return f"{value}M" if name in _MIB and value.isdigit() else value
    return _text(given, name)


# ----- what is submitted


def submission(body: Json, home: str, now_s: float) -> tuple[JobSpec, list[str]]:
    """Return the job of a request to ``job/submit``, with warnings. Raises RequestError.

    `home`: where it runs if the description does not say. The environment is what the description has.
    """
    described = body.get("job")
    if described is None and isinstance(body.get("jobs"), list) and len(body["jobs"]) == 1:
        described = body["jobs"][0]
    if not isinstance(described, dict):
        raise RequestError('cannot submit: the body must be {"script": text, "job": {...}}, with one job')
    given = {name: value for name, value in described.items() if not _is_empty(value)}
    for name, why in _FORBIDDEN.items():
        if name in given:
            raise RequestError(f"cannot take the field {name}: {why}")
    script = given.get("script", body.get("script"))
    if not isinstance(script, str) or not script:
        raise RequestError("cannot submit: the request has no script")
    options = _options(given)
    args = _texts(given, "argv")
    built = build_spec(
        options,
        script=script,
        default_name="sbatch",
        work_dir=_text(given, "current_working_directory") or home,
        environ=_environment(given),
        now_s=now_s,
        script_args=args[1:],
        submit_line=shlex.join(["slurmrestd", *args[:1]]),
    )
    spec = _with_dates(built.spec, given)
    known = _TEXTS.keys() | _NUMBERS.keys() | _FLAGS.keys() | _LISTS.keys() | _OTHERS
    ignored = [f"the field {name[:60]} has no effect" for name in sorted(given.keys() - known)]
    return spec, [*built.notes, *ignored]


def _is_empty(value: object) -> bool:
    """Return whether a field says nothing, as in a generated client that sends all fields."""
    if isinstance(value, dict) and value.keys() <= {"set", "infinite", "number"} and not value.get("infinite"):
        return not value.get("set", "number" in value)
    return value is None or value in ("", [], {})


def _options(given: Json) -> Settings:
    """Return the options that the fields of a description ask for. Raises RequestError."""
    options: Settings = {option: [_text(given, name)] for name, option in _TEXTS.items() if name in given}
    for name, option in _NUMBERS.items():
        if name in given:
            value = _number(given, name)
            options[option] = [f"{value}M" if name in _MIB and value.isdigit() else value]
    for name, option in _FLAGS.items():
        if _flag(given, name):
            options[option] = ["yes"]
    for name, option in _LISTS.items():
        if name in given:
            options[option] = [",".join(_texts(given, name))]
    if "requeue" in given:
        options["requeue"] = ["yes" if _flag(given, "requeue") else "no"]
    if "minimum_nodes" in given and "nodes" not in given:
        least = _number(given, "minimum_nodes")
        options["nodes"] = [f"{least}-{_number(given, 'maximum_nodes')}" if "maximum_nodes" in given else least]
    shared = {word.lower() for word in [*_texts(given, "exclusive"), *_texts(given, "shared")]}
    if shared & {"true", "user", "none", "exclusive"}:
        options["exclusive"] = [""]
    if "open_mode" in given:
        options["open-mode"] = [_texts(given, "open_mode")[0].lower()]
    for name, option in (
        ("tres_per_job", "gpus"),
        ("tres_per_node", "gpus-per-node"),
        ("tres_per_task", "gpus-per-task"),
    ):
        if name in given:
            options[option] = [_gpus(_text(given, name), name)]
    if "kill_warning_signal" in given:
        delay = f"@{_number(given, 'kill_warning_delay')}" if "kill_warning_delay" in given else ""
        batch = "B:" if "BATCH_JOB" in _texts(given, "kill_warning_flags") else ""
        options["signal"] = [f"{batch}{_text(given, 'kill_warning_signal')}{delay}"]
    return options


def _gpus(text: str, name: str) -> str:
    """Return the GPUs in a TRES text: gres/gpu:a100:2, gres:gpu:2 or gpu=2."""
    bare = text.removeprefix("gres/").removeprefix("gres:")
    if not bare.startswith(("gpu:", "gpu=")) or "," in bare:
        raise RequestError(f"cannot take {name} {text[:60]!r}: there are GPUs only: gres/gpu:2")
    return bare[4:].replace("=", ":")


def _with_dates(spec: JobSpec, given: Json) -> JobSpec:
    if "begin_time" in given:
        spec = replace(spec, begin_at_s=_date(given, "begin_time"))
    if "deadline" in given:
        spec = replace(spec, deadline_at_s=_date(given, "deadline"))
    return spec


def _date(given: Json, name: str) -> int:
    text = _number(given, name)
    if not text.isdigit() or len(text) > 12:
        raise RequestError(f"cannot take the field {name}: {text[:60]!r} is not a Unix time")
    return int(text)


def _environment(given: Json) -> dict[str, str]:
    """Return the environment of a description: a list of NAME=VALUE, or an object."""
    found = given.get("environment", {})
    items = [text.partition("=")[::2] for text in _texts(given, "environment")] if isinstance(found, list) else found
    pairs = items.items() if isinstance(items, Mapping) else items
    if not isinstance(items, list | Mapping) or len(items) > MAX_VARIABLES:
        raise RequestError(
            f"cannot take the field environment: it must be a list of at most {MAX_VARIABLES} NAME=VALUE"
        )
    environ = dict(pairs)
    if not all(isinstance(value, str) for value in environ.values()):
        raise RequestError("cannot take the field environment: a value is not a text")
    return environ


def _text(given: Json, name: str) -> str:
    value = given.get(name, "")
    if not isinstance(value, str):
        raise RequestError(f"cannot take the field {name}: it is not a text")
    return value


def _texts(given: Json, name: str) -> list[str]:
    """Return a list of texts; a text or a truth value stands for a list of one."""
    value = given.get(name, [])
    if isinstance(value, bool):
        return [str(value)]
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise RequestError(f"cannot take the field {name}: it is not a list of texts")
    return found


def _flag(given: Json, name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"cannot take the field {name}: it is not true or false")
    return value


def _number(given: Json, name: str) -> str:
    """Return a number as an option takes it.

    It is given as a number, as its text, or as Slurm's object of a number.
    """
    value = given[name]
    if isinstance(value, dict):
        value = "UNLIMITED" if value.get("infinite") else value.get("number")
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise RequestError(f"cannot take the field {name}: it is not a number")
    return str(value)[:40]
