"""Records of jobs, nodes, partitions, steps and licences in Slurm's terms.

For ``hctl show`` and ``scontrol show``, and as JSON with Slurm's names.

Text is ``Name=value`` words, with scontrol's names and in its order. As in scontrol, a value that is unknown or hidden is
``(null)`` or ``N/A``. Clients parse what ``scontrol show`` prints, and some depend on the lines: features that do not exist here
have the value that Slurm shows if they are unused. The values are the API's JSON objects.

All records of a job are written from one table of its fields: name, value, text, and name in Slurm's OpenAPI. A layout is a line
of names; ``?`` before a name leaves the field out if it has no value, ``Shown=Field`` shows it under another name.

Sources: scontrol(1) "show"; scontrol of Slurm 22.05; data_parser v0.0.39 (Slurm 23.02).
"""

from __future__ import annotations

import grp
import pwd
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence

from hpcsched.cli.output import print_json
from hpcsched.client import Json
from hpcsched.commands.options import SLURM_VERSION
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
from hpcsched.listing.text import clean, date_text
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.units import format_mem, format_time_s

Words = Sequence[tuple[str, object]]  # one line


class Verbatim(str):
    """A value that is written as it is, even if it is empty."""


def record_text(lines: Sequence[Words], *, one_line: bool) -> str:
    """Return the words as lines, indented under the first one, or all on one line."""
    texts = [" ".join(f"{name}={_value(value)}" for name, value in words) for words in lines if words]
    return " ".join(texts) if one_line else "\n   ".join(texts) + "\n"


def _value(value: object) -> str:
    if isinstance(value, Verbatim):
        return clean(value)
    if isinstance(value, bool):
        return "1" if value else "0"
    return "(null)" if value in (None, "") else clean(value)


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
    JobField("Licenses", lambda job: ",".join(f"{name}:{count}" for name, count in (job.get("licenses") or {}).items())),
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
    unconfined = f" NotEnforced={','.join(share['not_enforced'])}" if share.get("not_enforced") else ""
    return (
        "Nodes",
        f"{share['node']} CPUs={share['cpus']} Mem={share['mem_mib']} Tasks={share['tasks']}{gpus}{unconfined}",
    )


def _detailed_share(share: Json) -> Words:
    gpus = f"gpu:{len(share['gpus'])}(IDX:{','.join(map(str, share['gpus']))})" if share["gpus"] else ""
    last = share["cpus"] - 1
    cpus = "0" if last <= 0 else f"0-{last}"
    return [("  Nodes", share["node"]), ("CPU_IDs", cpus), ("Mem", share["mem_mib"]), ("GRES", Verbatim(gpus))]


# ----- nodes, partitions, licences and the configuration: ``hctl show``


_CAPABILITY = (("Switch", "switch"), ("Speed", "speed"), ("LinkMbps", "link_mbps"), ("TmpDisk", "tmp_mib"))


def node_lines(node: Json) -> list[Words]:
    """Return the lines of a node, similar to ``scontrol show node``."""
    state = node["state"] + ("+DRAIN" if node["drained"] and node["state"] == "DOWN" else "")
    lines: list[Words] = [
        [("NodeName", node["name"]), ("State", state), ("NodeAddr", node["host"]), ("Port", node["port"] or 22)],
        [("CPUAlloc", node["cpus_alloc"]), ("CPUTot", node["cpus"])],
        [("RealMemory", node["mem_mib"]), ("AllocMem", node["mem_alloc_mib"])],
        _gres(node),
        [("AvailableFeatures", ",".join(node["features"])), ("Weight", node["weight"])],
        [(word, node[key]) for word, key in _CAPABILITY if node.get(key)],
        [("Partitions", ",".join(node["partitions"])), ("Jobs", ",".join(map(str, node["jobs"])))],
        [("Link", node["link"]), ("LinkSince", date_text(node["link_since_s"] or None, "Unknown"))],
        [("BootId", node["boot_id"]), ("Version", node["agent_version"])],
    ]
    abilities = node.get("abilities") or ()
    if abilities:
        lines.append([("Enforces", ",".join(each["word"] for each in abilities if each["can"]) or "none")])
    lines += [
        [("CannotEnforce", f"{each['word']}: {each['why_not']}")]
        for each in abilities
        if each["word"] in node["not_enforced"]
    ]
    if node.get("reservation"):
        lines.append([("ReservationName", node["reservation"])])
    if node["link_why"]:
        lines.append([("LinkReason", node["link_why"])])
    if node.get("power_since_s"):
        by = f" by {node['power_by']}" if node["power_by"] else ""
        lines.append([("Power", f"{node['power']}{by} since {date_text(node['power_since_s'])}")])
    if node.get("power_why"):
        lines.append([("PowerReason", node["power_why"])])
    if node["drained"]:
        lines.append([("Reason", f"{node['drained_why']} [{node['drained_by']}@{date_text(node['drained_at_s'])}]")])
    return lines


def _gres(node: Json) -> Words:
    """Return the GPUs of a node, those in use, and their types."""
    gpus = node["gpus"]
    if not gpus:
        return [("Gres", None)]
    gres, used = f"gpu:{len(gpus)}", f"gpu:{node['gpus_alloc']}"
    if (shards := sum(gpu.get("shards", 1) for gpu in gpus)) > len(gpus):
        gres += f",shard:{shards}"
        used += f",shard:{node['shards_alloc']}"
    types = ",".join(f"{gpu['index']}:{gpu['type']}" for gpu in gpus)
    return [("Gres", gres), ("GresUsed", used), ("GresTypes", types)]


def _all_or(names: list[str]) -> str:
    return ",".join(names) or "ALL"


def partition_lines(partition: Json) -> list[Words]:
    """Return the lines of a partition, similar to ``scontrol show partition``."""
    counts = ",".join(f"{state}:{count}" for state, count in sorted(partition["state_counts"].items()))
    # fmt: off
    return [
        [("PartitionName", partition["name"])],
        [("Default", "YES" if partition["default"] else "NO"),
         ("State", partition["state"])],
        [("MaxTime", limit_text(partition["max_time_s"])),
         ("DefaultTime", "NONE" if partition["default_time_s"] is None else limit_text(partition["default_time_s"]))],
        [("AllowAccounts", _all_or(partition["allow_accounts"])), ("AllowQos", _all_or(partition["allow_qos"]))],
        [("PriorityJobFactor", partition["priority_job_factor"]), ("PriorityTier", partition["priority_tier"])],
        [("Nodes", partition["node_list"])],
        [("TotalCPUs", partition["cpus"]), ("AllocCPUs", partition["cpus_alloc"]), ("TotalNodes", len(partition["nodes"]))],
        [("NodeStates", counts)],
    ]
    # fmt: on


def license_lines(license: Json) -> list[Words]:
    """Return the lines of a licence, like ``scontrol show licenses``."""
    return [
        [("LicenseName", license["name"])],
        [("Total", license["total"]), ("Used", license["used"]), ("Free", license["free"])],
    ]


def circuit_lines(circuit: Json) -> list[Words]:
    """Return the lines of a circuit with its power budget."""
    measured = circuit["measured_watts"]
    taken = "N/A" if measured is None else f"{measured:.0f}"
    lines: list[Words] = [
        [
            ("CircuitName", circuit["name"]),
            ("BudgetWatts", f"{circuit['budget_watts']:g}"),
            ("Nodes", circuit["nodes"]),
        ],
        [
            ("JobWatts", circuit["total_watts"]),
            ("UsedWatts", circuit["used_watts"]),
            ("FreeWatts", circuit["free_watts"]),
        ],
        [
            ("TakenWatts", taken),
            ("Source", "+".join(circuit["sources"]) or "none"),
            ("OfNodes", circuit["measured_nodes"]),
        ],
    ]
    return lines + ([[("NotDeclared", circuit["unknown"])]] if circuit["unknown"] else [])


def config_text(config: Json) -> str:
    """Return the configuration as ``name = value`` lines; tables in it as ``table.name``."""
    flat = dict(_flat(config, ""))
    width = max(map(len, flat), default=0)
    return "".join(f"{name:<{width}} = {clean(value)}\n" for name, value in sorted(flat.items()))


def _flat(table: Json, prefix: str) -> list[tuple[str, object]]:
    items: list[tuple[str, object]] = []
    for name, value in table.items():
        items += (
            _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, _config_value(value))]
        )
    return items


def _config_value(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "(none)"
    return "(none)" if value in (None, "") else value


# ----- ``scontrol show``: all of Slurm's words, in Slurm's order


_STATES = {"UNKNOWN": "UNKNOWN", "DRAINED": "IDLE+DRAIN", "MAINT": "IDLE+MAINTENANCE"}


def state_by_jobs(node: Json) -> str:
    """Return the state that a node has by the jobs that hold it."""
    return "IDLE" if not node["cpus_alloc"] else "MIXED" if node["cpus_alloc"] < node["cpus"] else "ALLOCATED"


def node_state(node: Json) -> str:
    """Return the state of a node in scontrol's words: ``IDLE+DRAIN``."""
    if node["state"].startswith("POWER"):
        return f"{state_by_jobs(node)}{'+DRAIN' if node['drained'] else ''}+{node['state']}"
    if node["drained"] and node["link"] == "down":
        return "DOWN+DRAIN"
    if node["state"] == "DRAINING":
        return state_by_jobs(node) + "+DRAIN"
    return _STATES.get(node["state"], str(node["state"]))


def tres_of_node(node: Json) -> tuple[str, str]:
    """Return the TRES of a node, all and allocated: ``cpu=8,mem=4G,billing=8,gres/gpu=2``."""
    gpus = len(node["gpus"])
    whole = [f"cpu={node['cpus']}", f"mem={format_mem(node['mem_mib'])}", f"billing={node['cpus']}"]
    whole += [f"gres/gpu={gpus}"] if gpus else []
    alloc = [f"cpu={node['cpus_alloc']}"] if node["cpus_alloc"] else []
    alloc += [f"mem={format_mem(node['mem_alloc_mib'])}"] if node["mem_alloc_mib"] else []
    alloc += [f"gres/gpu={node['gpus_alloc']}"] if node["gpus_alloc"] else []
    return ",".join(whole), ",".join(alloc)


def tres_of_nodes(partition: Json, nodes: list[Json]) -> str:
    """Return the TRES of a partition; `nodes` are its nodes."""
    mem_mib, gpus = sum(node["mem_mib"] for node in nodes), sum(len(node["gpus"]) for node in nodes)
    tres = f"cpu={partition['cpus']},mem={format_mem(mem_mib)},node={len(nodes)},billing={partition['cpus']}"
    return tres + (f",gres/gpu={gpus}" if gpus else "")


def scontrol_node_lines(node: Json) -> list[Words]:
    """Return the lines of a node."""
    facts = node.get("facts") or {}
    gpus = len(node["gpus"])
    features = ",".join(node["features"])
    mem_mib = node["mem_mib"]
    tres, alloc = tres_of_node(node)
    why, by, at_s = why_out_of_use(node)
    # fmt: off
    return [
        [("NodeName", node["name"]), ("Arch", facts.get("arch", "x86_64")), ("CoresPerSocket", node["cpus"])],
        [("CPUAlloc", node["cpus_alloc"]), ("CPUEfctv", node["cpus"]), ("CPUTot", node["cpus"]), ("CPULoad", "N/A")],
        [("AvailableFeatures", features)],
        [("ActiveFeatures", features)],
        [("Gres", f"gpu:{gpus}" if gpus else None)],
        [("NodeAddr", node["host"]), ("NodeHostName", node["name"]), ("Version", "23.02.7")],
        [("OS", "Linux")],
        [("RealMemory", mem_mib), ("AllocMem", node["mem_alloc_mib"]), ("FreeMem", "N/A"), ("Sockets", 1), ("Boards", 1)],
        [("State", node_state(node)), ("ThreadsPerCore", 1), ("TmpDisk", node.get("tmp_mib") or 0),
         ("Weight", node["weight"]), ("Owner", "N/A"), ("MCS_label", "N/A")],
        [("Partitions", ",".join(node["partitions"]))],
        [("BootTime", "None"), ("SlurmdStartTime", date_text(node["link_since_s"] or None, "None"))],
        [("LastBusyTime", date_text(node["link_since_s"] or None, "None"))],
        [("CfgTRES", Verbatim(tres))],
        [("AllocTRES", Verbatim(alloc))],
        [("CapWatts", "n/a")],
        [("CurrentWatts", 0), ("AveWatts", 0)],
        [("ExtSensorsJoules", "n/s"), ("ExtSensorsWatts", 0), ("ExtSensorsTemp", "n/s")],
        [("ReservationName", node["reservation"])] if node.get("reservation") else (),
        [("Reason", f"{why} [{by}@{date_text(at_s, 'Unknown')}]")] if why else (),
    ]
    # fmt: on


def why_out_of_use(node: Json) -> tuple[str, str, float | None]:
    """Return why a node is drained or down, who drained it, and since when.

    "" if it is in use.
    """
    if node["drained"]:
        return node["drained_why"], node["drained_by"], node["drained_at_s"]
    return (node["link_why"], "slurm", node["link_since_s"] or None) if node["state"] == "DOWN" else ("", "", None)


def scontrol_partition_lines(partition: Json, all_nodes: Sequence[Json]) -> list[Words]:
    """Return the lines of a partition."""
    nodes = [node for node in all_nodes if node["name"] in partition["nodes"]]
    limit = "UNLIMITED" if partition["max_time_s"] is None else format_time_s(partition["max_time_s"], full=True)
    usual = "NONE" if partition["default_time_s"] is None else format_time_s(partition["default_time_s"], full=True)
    # fmt: off
    return [
        [("PartitionName", partition["name"])],
        [("AllowGroups", "ALL"), ("AllowAccounts", ",".join(partition["allow_accounts"]) or "ALL"),
         ("AllowQos", ",".join(partition["allow_qos"]) or "ALL")],
        [("AllocNodes", "ALL"), ("Default", "YES" if partition["default"] else "NO"), ("QoS", "N/A")],
        [("DefaultTime", usual), ("DisableRootJobs", "NO"), ("ExclusiveUser", "NO"), ("GraceTime", 0), ("Hidden", "NO")],
        [("MaxNodes", "UNLIMITED"), ("MaxTime", limit), ("MinNodes", 0), ("LLN", "NO"), ("MaxCPUsPerNode", "UNLIMITED")],
        [("Nodes", partition["node_list"])],
        [("PriorityJobFactor", partition["priority_job_factor"]), ("PriorityTier", partition["priority_tier"]),
         ("RootOnly", "NO"), ("ReqResv", "NO"), ("OverSubscribe", "NO")],
        [("OverTimeLimit", "NONE"), ("PreemptMode", "OFF")],
        [("State", partition["state"]), ("TotalCPUs", partition["cpus"]),
         ("TotalNodes", len(nodes)), ("SelectTypeParameters", "NONE")],
        [("JobDefaults", None)],
        [("DefMemPerNode", "UNLIMITED"), ("MaxMemPerNode", "UNLIMITED")],
        [("TRES", Verbatim(tres_of_nodes(partition, nodes)))],
    ]
    # fmt: on


def step_lines(step: Json) -> list[Words]:
    """Return the lines of a running step."""
    job = step["job"]
    nodes = compress_hostlist(step["nodes"])
    cpus = sum(share["cpus"] for share in job["shares"] if share["node"] in step["nodes"])
    # fmt: off
    return [
        [("StepId", step["id"]), ("UserId", job["uid"]), ("StartTime", date_text(step["started_at_s"], "Unknown")),
         ("TimeLimit", format_time_s(job["time_limit_s"], full=True))],
        [("State", step["state"]), ("Partition", job["partition"]), ("NodeList", nodes), ("Gres", Verbatim(""))],
        [("Nodes", len(step["nodes"])), ("CPUs", cpus), ("Tasks", step["ntasks"]), ("Name", step["name"] or step["step"]),
         ("Network", None)],
        [("TRES", Verbatim(f"cpu={cpus},node={len(step['nodes'])}"))],
        [("ResvPorts", None)],
        [("CPUFreqReq", "Default"), ("Dist", "Block")],
    ]
    # fmt: on


# ----- JSON with the names of Slurm's OpenAPI: jobs


def meta() -> Json:
    """Return the head of each answer."""
    major, micro, minor = SLURM_VERSION.split(".")
    return {
        "plugin": {"type": "openapi/v0.0.39", "name": "Slurm OpenAPI v0.0.39", "data_parser": "data_parser/v0.0.39"},
        "command": sys.argv,
        "Slurm": {"version": {"major": int(major), "micro": int(minor), "minor": int(micro)}, "release": SLURM_VERSION},
    }


def print_jobs(answer: Json) -> int:
    """Print the jobs of the API's answer like squeue; return the exit status."""
    print_json({"meta": meta(), "jobs": [job_json(job) for job in answer["jobs"]], "warnings": [], "errors": []})
    return 0


def print_accounting(answer: Json, cluster: str) -> None:
    """Print the jobs of the history like sacct."""
    jobs = [_accounted(job, cluster) for job in answer["jobs"]]
    print_json({"meta": meta(), "jobs": jobs, "warnings": [], "errors": []})


def _accounted(job: Json, cluster: str) -> Json:
    _, group = ids(job["user"], job["uid"])
    return {
        "account": job["account"],
        "comment": {"administrator": "", "job": job["comment"] or "", "system": ""},
        "allocation_nodes": len(job["nodes"]),
        "array": {"job_id": job["array_job_id"] or 0, "task_id": number(job["array_task_id"]), "task": ""},
        "cluster": cluster,
        "constraints": job["constraint"],
        "derived_exit_code": exit_status(job),
        "exit_code": exit_status(job),
        "group": group.partition("(")[0],
        "het": {"job_id": job.get("het_job_id") or 0, "job_offset": number(job.get("het_offset"))},
        "job_id": job["id"],
        "name": job["name"],
        "nodes": job["node_list"] or "None assigned",
        "partition": job["partition"],
        "priority": number(job["priority"] or 0),
        "qos": job["qos"] or "normal",
        "required": {"CPUs": job["num_cpus"], "memory_per_node": number(job["mem_mib"])},
        "restart_cnt": job["restarts"],
        "state": {"current": job["state"], "reason": job["reason"] or "None"},
        "steps": [_step(job, step) for step in job["steps"]],
        "submit_line": job["submit_line"] or "",
        "time": _times(job),
        "tres": {"allocated": _counted_tres(job) if job["nodes"] else [], "requested": _counted_tres(job)},
        "user": job["user"],
        "working_directory": job["work_dir"] or "",
    }


def _times(job: Json) -> Json:
    return {
        "elapsed": int(job["elapsed_s"]),
        "eligible": int(job["eligible_at_s"] or 0),
        "end": int(job["ended_at_s"] or 0),
        "start": int(job["started_at_s"] or 0),
        "submission": int(job["submitted_at_s"]),
        "suspended": int(job.get("suspended_s") or 0),
        "limit": limit_minutes(job["time_limit_s"]),
    }


def _counted_tres(job: Json) -> list[Json]:
    kinds = (("cpu", "", job["num_cpus"]), ("mem", "", job["mem_mib"]), ("node", "", job["num_nodes"]))
    counted = (*kinds, ("gres", "gpu", job["gpus"]))
    return [{"type": kind, "name": name, "count": count} for kind, name, count in counted if count]


def _step(job: Json, step: Json) -> Json:
    return {
        "step": {"id": {"job_id": job["id"], "step_id": str(step["step"])}, "name": step["name"] or step["step"]},
        "state": step["state"],
        "exit_code": exit_status(step),
        "nodes": {"count": len(step["nodes"]), "list": step["nodes"]},
        "tasks": {"count": step["ntasks"]},
        "time": {
            "start": int(step["started_at_s"] or 0),
            "end": int(step["ended_at_s"] or 0),
            "user": {"seconds": int(step["cpu_user_s"] or 0)},
            "system": {"seconds": int(step["cpu_system_s"] or 0)},
        },
        "statistics": {"memory": {"max_kib": step["max_rss_kib"] or 0}},
    }


# ----- JSON of nodes and partitions: ``sinfo --json`` and ``scontrol show node|partition --json``


def print_nodes(nodes: Sequence[Json]) -> None:
    """Print the nodes."""
    print_json({"meta": meta(), "nodes": [_node(node) for node in nodes], "warnings": [], "errors": []})


def print_partitions(partitions: Sequence[Json], nodes: Sequence[Json]) -> None:
    """Print the partitions; `nodes` are all nodes of the cluster."""
    by_name = {node["name"]: node for node in nodes}
    shown = [
        _partition(partition, [by_name[name] for name in partition["nodes"] if name in by_name])
        for partition in partitions
    ]
    print_json({"meta": meta(), "partitions": shown, "warnings": [], "errors": []})


def _node(node: Json) -> Json:
    facts = node.get("facts") or {}
    why, by, at_s = why_out_of_use(node)
    gpus = len(node["gpus"])
    tres, tres_used = tres_of_node(node)
    return {
        "architecture": facts.get("arch", "x86_64"),
        "boards": 1,
        "boot_time": 0,
        "comment": "",
        "cores": node["cpus"],
        "cpu_load": number(None),
        "free_mem": number(None),
        "cpus": node["cpus"],
        "effective_cpus": node["cpus"],
        "features": list(node["features"]),
        "active_features": list(node["features"]),
        "gres": f"gpu:{gpus}" if gpus else "",
        "gres_drained": "N/A",
        "gres_used": f"gpu:{node['gpus_alloc']}" if gpus else "",
        "last_busy": int(node["link_since_s"] or 0),
        "mcs_label": "",
        "name": node["name"],
        "address": node["host"],
        "hostname": node["name"],
        "state": node_state(node).split("+"),
        "operating_system": "Linux",
        "owner": "",
        "partitions": list(node["partitions"]),
        "port": node["port"] or 22,
        "real_memory": node["mem_mib"],
        "reason": why,
        "reason_changed_at": int(at_s or 0),
        "reason_set_by_user": by,
        "reservation": node.get("reservation") or "",
        "alloc_memory": node["mem_alloc_mib"],
        "alloc_cpus": node["cpus_alloc"],
        "alloc_idle_cpus": node["cpus"] - node["cpus_alloc"],
        "tres": tres,
        "tres_used": tres_used,
        "tres_weighted": float(node["cpus_alloc"]),
        "slurmd_start_time": int(node["link_since_s"] or 0),
        "sockets": 1,
        "threads": 1,
        "temporary_disk": node.get("tmp_mib") or 0,
        "weight": node["weight"],
        "version": SLURM_VERSION,
    }


def _partition(partition: Json, nodes: list[Json]) -> Json:
    return {
        "name": partition["name"],
        "nodes": {"allowed_allocation": "", "configured": partition["node_list"], "total": len(nodes)},
        "accounts": {"allowed": ",".join(partition["allow_accounts"]), "deny": ""},
        "groups": {"allowed": ""},
        "qos": {"allowed": ",".join(partition["allow_qos"]), "deny": "", "assigned": ""},
        "tres": {"billing_weights": "", "configured": tres_of_nodes(partition, nodes)},
        "cpus": {"task_binding": 0, "total": partition["cpus"]},
        "defaults": {
            "time": limit_minutes(partition["default_time_s"]) if partition["default_time_s"] else number(None),
            "job": "",
        },
        "maximums": {
            "nodes": {"set": True, "infinite": True, "number": 0},
            "time": limit_minutes(partition["max_time_s"]),
        },
        "minimums": {"nodes": 0},
        "priority": {"job_factor": partition["priority_job_factor"], "tier": partition["priority_tier"]},
        "partition": {"state": [partition["state"]]},
        "flags": ["DEFAULT"] if partition["default"] else [],
    }
