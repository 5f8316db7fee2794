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
from hpcsched.errors import HpcschedError, NotFoundError, PermissionDeniedError, RequestError, UnavailableError
from hpcsched.jobscript.build import build_spec
from hpcsched.jobscript.options import Settings
from hpcsched.model.frozen import replace
from hpcsched.model.spec import JobSpec
from hpcsched.model.units import signal_name

Json = dict[str, Any]

VERSIONS = ("v0.0.40", "v0.0.41", "v0.0.42", "v0.0.43", "v0.0.44")
RELEASE = ("25", "11", "0")  # of Slurm, whose paths and objects these are
INVALID_JOB_ID, ACCESS_DENIED, NO_CONTACT, UNKNOWN_FAILURE = 2017, 2002, 1800, -1
MAX_VARIABLES = 2_000

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


def error_of(error: HpcschedError, source: str) -> tuple[int, Json]:
    """Return the HTTP status of an error, and the error as slurmrestd shows it."""
    status, number, words = 500, UNKNOWN_FAILURE, slurm_text.of_job(str(error))
    match error:
        case PermissionDeniedError():
            status, number, words = 403, ACCESS_DENIED, "Access/permission denied"
        case NotFoundError():
            status, number, words = 404, INVALID_JOB_ID, "Invalid job id specified"
        case RequestError():
            status = 400
        case UnavailableError():
            status, number, words = 503, NO_CONTACT, "Unable to contact slurm controller (connect failure)"
    return status, {"description": str(error), "error_number": number, "error": words, "source": source}


# ----- what is shown


def number(value: float | None) -> Json:
    """Return a number that may be missing."""
    return {"set": value is not None, "infinite": False, "number": 0 if value is None else int(value)}


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
    "RESERVED": ["IDLE", "RESERVED"],
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
