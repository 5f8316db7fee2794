"""The fields of a job: name, value, text, and name in Slurm's OpenAPI. One table, from which all records are written:
``hctl show job``, ``scontrol show job``, ``squeue --json`` and ``scontrol show job --json``.

A job is the API's JSON object. Knows no terminal. Rules: a layout is a line of names; ``?`` before a name leaves the field out
if it has no value, ``Shown=Field`` shows it under another name.
Sources: scontrol of Slurm 22.05, "show job"; data_parser v0.0.39 (Slurm 23.02).
"""

from __future__ import annotations

import grp
import pwd
from collections import namedtuple
from collections.abc import Callable, Sequence

from hpcsched.cli.render.show_text import Verbatim, Words
from hpcsched.client import Json
from hpcsched.listing.jobs import (
    end_s,
    exit_text,
    goodput_text,
    gres_of_node,
    loss_text,
    memory_asked,
    rate_text,
    reason,
    shown_state,
    start_s,
    step_text,
    training,
    tres_text,
)
from hpcsched.listing.text import date_text
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.units import format_mem, format_time_s

# ----- values, and how they are written


def of(key: str, none: object = None) -> Callable[[Json], object]:
    """Return the getter of a key of the API; `none` replaces a missing or empty value."""
    return lambda job: none if job.get(key) in (None, "") else job[key]


def fixed(value: object) -> Callable[[Json], object]:
    """Return the getter of a value that is the same for every job."""
    return lambda job: value


def plain(value: object) -> object:
    """Return the value as it is."""
    return value


def moment(none: str) -> Callable[[object], object]:
    """Return the writer of a time in seconds since the epoch."""
    return lambda value: date_text(value, none)  # type: ignore[arg-type]


def number(value: float | None) -> Json:
    """Return a number as Slurm's OpenAPI writes one that may be missing or unlimited."""
    return {"set": value is not None, "infinite": False, "number": int(value or 0)}


def limit_minutes(seconds: float | None) -> Json:
    """Return a time limit in minutes as Slurm's OpenAPI writes it; None is unlimited."""
    return {"set": True, "infinite": seconds is None, "number": 0 if seconds is None else int(seconds) // 60}


def limit_text(seconds: object) -> str:
    """Return a duration in seconds as ``1-02:03:04``; None is unlimited."""
    return format_time_s(seconds, full=True)  # type: ignore[arg-type]


def number_or_0(value: float | None) -> Json:
    """Return a number as Slurm's OpenAPI writes it; a missing one is 0."""
    return number(value or 0)


def text_or_empty(value: object) -> object:
    """Return the value, "" if it is missing."""
    return "" if value is None else value


def ids(user: str, uid: int) -> tuple[str, str]:
    """Return ``ann(1000)`` and ``users(100)``."""
    try:
        gid = pwd.getpwnam(user).pw_gid
    except KeyError:
        return f"{user}({uid})", f"{uid}({uid})"
    try:
        return f"{user}({uid})", f"{grp.getgrgid(gid).gr_name}({gid})"
    except KeyError:
        return f"{user}({uid})", f"{gid}({gid})"


def exit_status(record: Json) -> Json:
    """Return how a job or a step ended, as Slurm's OpenAPI writes it."""
    code, signum = record["exit_code"] or 0, record["exit_signal"] or 0
    status = "SIGNALED" if signum else "ERROR" if code else "SUCCESS" if record["ended_at_s"] else "PENDING"
    return {"status": status, "return_code": number(code), "signal": {"signal_id": signum, "name": ""}}


def _in_array(key: str) -> Callable[[Json], object]:
    return lambda job: job.get(key) if job["array_job_id"] is not None else None


def _priority(job: Json) -> object:
    return 0 if job["hold"] != "none" else job["priority"]


def _licenses(job: Json) -> str:
    return ",".join(f"{name}:{count}" for name, count in (job.get("licenses") or {}).items())


def _tres(job: Json) -> Verbatim:
    return Verbatim(tres_text(job, billing=True))


def _nodes(key: str) -> Callable[[Json], object]:
    return lambda job: compress_hostlist(job.get(key) or ())


def _report(text: Callable[[Json], object]) -> Callable[[Json], object]:
    """Return the getter of what a training job reported; None if it reported nothing."""
    return lambda job: text(job) if training(job) else None


def _of_checkpoint(key: str) -> Callable[[Json], object]:
    return lambda job: training(job)[key] if training(job).get("checkpoint_step") else None


def _group(job: Json) -> str:
    return ids(job["user"], job["uid"])[1]


def _resources(job: Json) -> Json:
    return {
        "nodes": job["node_list"],
        "allocated_cores": job["num_cpus"],
        "allocated_hosts": len(job["nodes"]),
        "allocated_nodes": [
            {"nodename": share["node"], "cpus_used": share["cpus"], "memory_allocated": share["mem_mib"]}
            for share in job["shares"]
        ],
    }


# ----- the table


class JobField(namedtuple("JobField", "name value text json json_name", defaults=(plain, plain, ""))):
    """One field.

    `value` gets it from a job, `text` writes it in records, `json` in Slurm's OpenAPI as `json_name`.
    """

    __slots__ = ()

    name: str
    value: Callable[[Json], object]
    text: Callable[[object], object]
    json: Callable[..., object]
    json_name: str


# fmt: off
_TABLE = (
    JobField("JobId", of("id"), json_name="job_id"),
    JobField("ArrayJobId", of("array_job_id"), json=number_or_0, json_name="array_job_id"),
    JobField("ArrayTaskId", of("array_task_id"), json=number, json_name="array_task_id"),
    JobField("ArrayTaskThrottle", lambda job: _in_array("array_limit")(job) or None),
    JobField("array_task_string", of("folded", ""), json_name="array_task_string"),
    JobField("HetJobId", of("het_job_id"), json=number_or_0, json_name="het_job_id"),
    JobField("HetJobOffset", of("het_offset"), json=number_or_0, json_name="het_job_offset"),
    JobField("HetJobIdSet", of("het_job_ids"), json=text_or_empty, json_name="het_job_id_set"),
    JobField("JobName", of("name", ""), json_name="name"),
    JobField("UserId", lambda job: f"{job['user']}({job['uid']})"),
    JobField("user_id", of("uid"), json_name="user_id"),
    JobField("user_name", of("user"), json_name="user_name"),
    JobField("GroupId", _group, json=lambda text: int(text.rpartition("(")[2].rstrip(")")), json_name="group_id"),
    JobField("group_name", _group, json=lambda text: text.partition("(")[0], json_name="group_name"),
    JobField("MCS_label", fixed("N/A")),
    JobField("Account", of("account", ""), json_name="account"),
    JobField("QOS", of("qos", "normal"), json_name="qos"),
    JobField("Priority", _priority, lambda value: value or 0),
    JobField("PriorityIfKnown", _priority),
    JobField("priority", of("priority"), json=number_or_0, json_name="priority"),
    JobField("hold", lambda job: job["hold"] != "none", json_name="hold"),
    JobField("Nice", of("nice"), json_name="nice"),
    JobField("SiteFactor", lambda job: job.get("site") or None),
    JobField("JobState", shown_state, json_name="job_state"),
    JobField("Reason", reason),
    JobField("state_reason", of("reason", "None"), json_name="state_reason"),
    JobField("ReasonText", of("reason_detail"), json=text_or_empty, json_name="state_description"),
    JobField("Dependency", of("dependency", ""), json_name="dependency"),
    JobField("PreemptedBy", lambda job: job.get("preempted_by") or None),
    JobField("ElasticNodes", lambda job: "{}-{}".format(*job["elastic"]) if job.get("elastic") else None),
    JobField("WantedNodes", lambda job: _nodes("wanted_nodes")(job) or None if job.get("elastic") else None),
    JobField("Requeue", of("requeue"), json_name="requeue"),
    JobField("Restarts", of("restarts"), json_name="restart_cnt"),
    JobField("BatchFlag", lambda job: bool(job["command"] or job["submit_line"])),
    JobField("Reboot", fixed(0)),
    JobField("ExitCode", exit_text),
    JobField("exit_code", plain, json=exit_status, json_name="exit_code"),
    JobField("RunTime", of("elapsed_s"), limit_text),
    JobField("TimeLimit", of("time_limit_s"), limit_text, limit_minutes, "time_limit"),
    JobField("TimeMin", lambda job: job.get("time_min_s") or None, lambda value: limit_text(value) if value else "N/A"),
    JobField("SubmitTime", of("submitted_at_s"), moment("N/A"), number, "submit_time"),
    JobField("EligibleTime", of("eligible_at_s"), moment("Unknown"), number_or_0, "eligible_time"),
    JobField("AccrueTime", of("accrued_from_s"), moment("Unknown")),
    JobField("StartTime", start_s, moment("Unknown"), number_or_0, "start_time"),
    JobField("EndTime", end_s, moment("Unknown"), number_or_0, "end_time"),
    JobField("Deadline", of("deadline_at_s"), moment("N/A"), number_or_0, "deadline"),
    JobField("SuspendTime", fixed("None")),
    JobField("SecsPreSuspend", lambda job: int(job.get("suspended_s") or 0)),
    JobField("LastSchedEval", of("submitted_at_s"), moment("N/A")),
    JobField("Scheduler", fixed("Backfill")),
    JobField("Reservation", of("reservation"), json=text_or_empty, json_name="resv_name"),
    JobField("Partition", of("partition", ""), json_name="partition"),
    JobField("AllocNode:Sid", lambda job: f"{job.get('submit_host') or 'N/A'}:0"),
    JobField("ReqNodeList", _nodes("asked_nodes")),
    JobField("required_nodes", lambda job: ",".join(job.get("asked_nodes") or ()), json_name="required_nodes"),
    JobField("ExcNodeList", _nodes("excluded_nodes")),
    JobField("NodeList", of("node_list", ""), json_name="nodes"),
    JobField("BatchHost", lambda job: job["nodes"][0] if job["nodes"] else None, json=text_or_empty,
             json_name="batch_host"),
    JobField("job_resources", _resources, json_name="job_resources"),
    JobField("NumNodes", of("num_nodes"), json=number, json_name="node_count"),
    JobField("NumCPUs", of("num_cpus"), json=number, json_name="cpus"),
    JobField("NumTasks", of("num_tasks"), json=number, json_name="tasks"),
    JobField("CPUs/Task", of("cpus_per_task"), json=number, json_name="cpus_per_task"),
    JobField("ReqB:S:C:T", fixed("0:0:*:*")),
    JobField("TRES", lambda job: None if job["node_list"] else _tres(job)),
    JobField("ReqTRES", lambda job: _tres(job) if job["node_list"] else None),
    JobField("AllocTRES", lambda job: _tres(job) if job["node_list"] else None, json=text_or_empty,
             json_name="tres_alloc_str"),
    JobField("tres_req_str", _tres, json_name="tres_req_str"),
    JobField("Socks/Node", fixed("*")),
    JobField("NtasksPerN:B:S:C", lambda job: f"{job['ntasks_per_node'] or 0}:0:*:*"),
    JobField("CoreSpec", fixed("*")),
    JobField("MinCPUsNode", lambda job: max(1, job.get("mincpus") or 0)),
    JobField("MinMemoryCPU", lambda job: memory_asked(job) if job.get("mem_per_cpu_mib") else None),
    JobField("MinMemoryNode", lambda job: None if job.get("mem_per_cpu_mib") else memory_asked(job)),
    JobField("Memory", memory_asked),
    JobField("memory_per_node", of("mem_mib"), json=number, json_name="memory_per_node"),
    JobField("MinTmpDiskNode", lambda job: format_mem(job.get("tmp_mib") or 0)),
    JobField("TresPerJob", lambda job: f"gres/gpu:{job['gpus']}" if job["gpus"] else None),
    JobField("ShardsPerJob", lambda job: f"gres/shard:{job['shards']}" if job.get("shards") else None),
    JobField("TresPerNode", lambda job: gres_of_node(job) if job["gpus"] or job.get("shards") else None),
    JobField("tres_per_node", lambda job: gres_of_node(job) if job["gpus"] else "", json_name="tres_per_node"),
    JobField("Licenses", _licenses),
    JobField("TrainStep", _report(step_text)),
    JobField("TrainLoss", _report(loss_text)),
    JobField("TrainSamplesPerSec", _report(rate_text)),
    JobField("TrainEnd", _report(lambda job: date_text(training(job)["ends_at_s"], "Unknown"))),
    JobField("TrainTold", _report(lambda job: date_text(training(job)["at_s"]))),
    JobField("TrainGoodput", lambda job: goodput_text(job) if training(job).get("goodput") is not None else None),
    JobField("Checkpoint", _of_checkpoint("checkpoint_step")),
    JobField("CheckpointTime", lambda job: date_text(training(job)["checkpoint_at_s"], "Unknown")
             if training(job).get("checkpoint_step") else None),
    JobField("TrainNote", lambda job: training(job).get("note") or None),
    JobField("OverSubscribe", lambda job: "NO" if job["exclusive"] else "OK"),
    JobField("Contiguous", lambda job: int(bool(job.get("contiguous")))),
    JobField("Network", fixed(None)),
    JobField("Features", of("constraint", ""), json_name="features"),
    JobField("DelayBoot", fixed("00:00:00")),
    JobField("Prefer", of("prefer")),
    JobField("ReqSwitch", lambda job: job.get("switches") or None),
    JobField("Hint", lambda job: ",".join(job.get("hints") or ()) or None),
    JobField("Command", of("command"), json=text_or_empty, json_name="command"),
    JobField("WorkDir", of("work_dir"), json=text_or_empty, json_name="current_working_directory"),
    JobField("Comment", of("comment"), json=text_or_empty, json_name="comment"),
    JobField("StdErr", of("stderr"), json=text_or_empty, json_name="standard_error"),
    JobField("StdIn", of("stdin", "/dev/null"), json_name="standard_input"),
    JobField("StdOut", of("stdout"), json=text_or_empty, json_name="standard_output"),
    JobField("Power", fixed(Verbatim(""))),
)
# fmt: on
_FIELDS = {field.name: field for field in _TABLE}
_SHARES = "(shares)"  # in a layout: a line for each node

_HCTL = (
    "JobId ?ArrayJobId ?ArrayTaskId ?HetJobId ?HetJobOffset JobName",
    "?HetJobIdSet",
    "UserId Account QOS",
    "Priority=PriorityIfKnown Nice",
    "?SiteFactor",
    "JobState Reason Dependency",
    "?ReasonText",
    "?PreemptedBy",
    "?ElasticNodes ?WantedNodes",
    "Requeue Restarts ExitCode",
    "RunTime TimeLimit TimeMin",
    "SubmitTime EligibleTime",
    "AccrueTime",
    "StartTime EndTime Deadline",
    "?Reservation",
    "Partition NodeList BatchHost",
    "NumNodes NumCPUs NumTasks CPUs/Task MinMemoryNode=Memory",
    "?TresPerJob",
    "?Licenses",
    "?TresPerJob=ShardsPerJob",
    _SHARES,
    "?TrainStep ?TrainLoss ?TrainSamplesPerSec",
    "?TrainEnd ?TrainTold",
    "?TrainGoodput",
    "?Checkpoint ?CheckpointTime",
    "?TrainNote",
    "OverSubscribe Features",
    "?Prefer",
    "?ReqSwitch",
    "?Hint",
    "Command",
    "WorkDir",
    "?Comment",
    "StdErr",
    "StdIn",
    "StdOut",
)
_SCONTROL = (
    "JobId ?ArrayJobId ?ArrayTaskId ?ArrayTaskThrottle ?HetJobId ?HetJobOffset JobName",
    "?HetJobIdSet",
    "UserId GroupId MCS_label",
    "Priority Nice Account QOS",
    "JobState Reason Dependency",
    "Requeue Restarts BatchFlag Reboot ExitCode",
    "RunTime TimeLimit TimeMin",
    "SubmitTime EligibleTime",
    "AccrueTime=EligibleTime",
    "StartTime EndTime Deadline",
    "SuspendTime SecsPreSuspend LastSchedEval Scheduler",
    "Partition AllocNode:Sid",
    "ReqNodeList ExcNodeList",
    "NodeList",
    "?BatchHost",
    "NumNodes NumCPUs NumTasks CPUs/Task ReqB:S:C:T",
    "?TRES ?ReqTRES",
    "?AllocTRES",
    "Socks/Node NtasksPerN:B:S:C CoreSpec",
    _SHARES,
    "MinCPUsNode ?MinMemoryCPU ?MinMemoryNode MinTmpDiskNode",
    "Features DelayBoot",
    "?Reservation",
    "OverSubscribe Contiguous Licenses Network",
    "Command",
    "WorkDir",
    "?Comment",
    "StdErr",
    "StdIn",
    "StdOut",
    "Power",
    "?TresPerNode",
)


def hctl_lines(job: Json) -> list[Words]:
    """Return the lines of ``hctl show job``."""
    return _lines(job, _HCTL, [[_share(share)] for share in job["shares"]])


def scontrol_lines(job: Json, *, detailed: bool) -> list[Words]:
    """Return the lines of ``scontrol show job``; `detailed`: with a line for each node."""
    return _lines(job, _SCONTROL, [_detailed_share(share) for share in job["shares"] if detailed])


def job_json(job: Json) -> Json:
    """Return the job in the names of Slurm's OpenAPI."""
    return {field.json_name: field.json(field.value(job)) for field in _TABLE if field.json_name}


def _lines(job: Json, layout: Sequence[str], shares: Sequence[Words]) -> list[Words]:
    lines: list[Words] = []
    for names in layout:
        if names == _SHARES:
            lines += shares
            continue
        words = []
        for name in names.split():
            shown, _, actual = name.lstrip("?").partition("=")
            field = _FIELDS[actual or shown]
            value = field.value(job)
            if value not in (None, "") or not name.startswith("?"):
                words.append((shown, field.text(value)))
        lines.append(words)
    return lines


def _share(share: Json) -> tuple[str, object]:
    gpus = f" GRES=gpu(IDX:{','.join(map(str, share['gpus']))})" if share["gpus"] else ""
    if share.get("shards"):
        gpus = f" GRES=shard:{share['shards']}(IDX:{share['gpus'][0]})"
    return "Nodes", f"{share['node']} CPUs={share['cpus']} Mem={share['mem_mib']} Tasks={share['tasks']}{gpus}"


def _detailed_share(share: Json) -> Words:
    gpus = f"gpu:{len(share['gpus'])}(IDX:{','.join(map(str, share['gpus']))})" if share["gpus"] else ""
    last = share["cpus"] - 1
    cpus = "0" if last <= 0 else f"0-{last}"
    return [("  Nodes", share["node"]), ("CPU_IDs", cpus), ("Mem", share["mem_mib"]), ("GRES", Verbatim(gpus))]
