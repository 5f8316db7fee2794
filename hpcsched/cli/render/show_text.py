"""Jobs, nodes and partitions as ``Name=value`` words, with scontrol's names and in its order.

What is not known or not shown to the asker is ``(null)`` or ``N/A``, as there. The values are the API's JSON objects.
Source: scontrol(1) "show"; its output.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.cli.output import clean, date_text
from hpcsched.client import Json
from hpcsched.listing.jobs import (
    end_s,
    exit_text,
    goodput_text,
    loss_text,
    memory_asked,
    rate_text,
    reason,
    start_s,
    step_text,
    training,
)
from hpcsched.listing.states import shown_state
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.units import format_time_s

Words = Sequence[tuple[str, object]]  # one line


def record_text(lines: Sequence[Words], *, one_line: bool) -> str:
    """Return the words, as lines indented under the first one, or all on one line."""
    texts = [" ".join(f"{name}={_value(value)}" for name, value in words) for words in lines if words]
    return " ".join(texts) if one_line else "\n   ".join(texts) + "\n"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return "(null)" if value in (None, "") else clean(value)


def job_lines(job: Json) -> list[Words]:
    """Return a job as ``scontrol show job`` does."""
    array: Words = ()
    if job["array_job_id"] is not None:
        array = [("ArrayJobId", job["array_job_id"]), ("ArrayTaskId", job["array_task_id"])]
    nodes = job["nodes"]
    return [
        [("JobId", job["id"]), *array, *het_words(job), ("JobName", job["name"])],
        [("HetJobIdSet", job["het_job_ids"])] if job.get("het_job_ids") else (),
        [("UserId", f"{job['user']}({job['uid']})"), ("Account", job["account"]), ("QOS", job["qos"] or "normal")],
        [("Priority", 0 if job["hold"] != "none" else job["priority"]), ("Nice", job["nice"])],
        [("SiteFactor", job["site"])] if job.get("site") else (),
        [("JobState", shown_state(job)), ("Reason", reason(job)), ("Dependency", job["dependency"])],
        [("ReasonText", job["reason_detail"])] if job["reason_detail"] else (),
        [("PreemptedBy", job["preempted_by"])] if job.get("preempted_by") else (),
        _elastic(job),
        [("Requeue", job["requeue"]), ("Restarts", job["restarts"]), ("ExitCode", exit_text(job))],
        [
            ("RunTime", format_time_s(job["elapsed_s"], full=True)),
            ("TimeLimit", _limit(job["time_limit_s"])),
            ("TimeMin", _limit(job["time_min_s"]) if job.get("time_min_s") else "N/A"),
        ],
        [
            ("SubmitTime", date_text(job["submitted_at_s"])),
            ("EligibleTime", date_text(job["eligible_at_s"], "Unknown")),
        ],
        [("AccrueTime", date_text(job.get("accrued_from_s"), "Unknown"))],
        [
            ("StartTime", date_text(start_s(job), "Unknown")),
            ("EndTime", date_text(end_s(job), "Unknown")),
            ("Deadline", date_text(job.get("deadline_at_s"), "N/A")),
        ],
        [("Reservation", job["reservation"])] if job.get("reservation") else (),
        [("Partition", job["partition"]), ("NodeList", job["node_list"]), ("BatchHost", nodes[0] if nodes else None)],
        [
            ("NumNodes", job["num_nodes"]),
            ("NumCPUs", job["num_cpus"]),
            ("NumTasks", job["num_tasks"]),
            ("CPUs/Task", job["cpus_per_task"]),
            ("MinMemoryNode", memory_asked(job)),
        ],
        [("TresPerJob", f"gres/gpu:{job['gpus']}")] if job["gpus"] else (),
        [("Licenses", licenses_text(job["licenses"]))] if job.get("licenses") else (),
        [("TresPerJob", f"gres/shard:{job['shards']}")] if job.get("shards") else (),
        *([share] for share in map(_share, job["shares"])),
        *_training(job),
        [("OverSubscribe", "NO" if job["exclusive"] else "OK"), ("Features", job["constraint"])],
        [("Prefer", job["prefer"])] if job.get("prefer") else (),
        [("ReqSwitch", job["switches"])] if job.get("switches") else (),
        [("Hint", ",".join(job["hints"]))] if job.get("hints") else (),
        [("Command", job["command"])],
        [("WorkDir", job["work_dir"])],
        [("Comment", job["comment"])] if job["comment"] else (),
        [("StdErr", job["stderr"])],
        [("StdIn", job["stdin"] or "/dev/null")],
        [("StdOut", job["stdout"])],
    ]


def het_words(job: Json) -> Words:
    """Return of which heterogeneous job it is which component."""
    if job.get("het_job_id") is None:
        return ()
    return [("HetJobId", job["het_job_id"]), ("HetJobOffset", job["het_offset"])]


def _elastic(job: Json) -> Words:
    """Return between how many nodes a job may be moved, and which ones it has been asked to keep."""
    if not job.get("elastic"):
        return ()
    least, most = job["elastic"]
    wanted = [("WantedNodes", compress_hostlist(job["wanted_nodes"]))] if job.get("wanted_nodes") else []
    return [("ElasticNodes", f"{least}-{most}"), *wanted]


def _training(job: Json) -> list[Words]:
    """Return how far a training job is, as its program says; scontrol has no words for that."""
    told = training(job)
    if not told:
        return []
    kept = told["checkpoint_step"]
    return [
        [("TrainStep", step_text(job)), ("TrainLoss", loss_text(job)), ("TrainSamplesPerSec", rate_text(job))],
        [("TrainEnd", date_text(told["ends_at_s"], "Unknown")), ("TrainTold", date_text(told["at_s"]))],
        [("TrainGoodput", goodput_text(job))] if told.get("goodput") is not None else (),
        [("Checkpoint", kept), ("CheckpointTime", date_text(told["checkpoint_at_s"], "Unknown"))] if kept else (),
        [("TrainNote", told["note"])] if told["note"] else (),
    ]


def _share(share: Json) -> tuple[str, object]:
    gpus = f" GRES=gpu(IDX:{','.join(map(str, share['gpus']))})" if share["gpus"] else ""
    if share.get("shards"):
        gpus = f" GRES=shard:{share['shards']}(IDX:{share['gpus'][0]})"
    return "Nodes", f"{share['node']} CPUs={share['cpus']} Mem={share['mem_mib']} Tasks={share['tasks']}{gpus}"


def _limit(seconds: float | None) -> str:
    return format_time_s(seconds, full=True)


_CAPABILITY = (("Switch", "switch"), ("Speed", "speed"), ("LinkMbps", "link_mbps"), ("TmpDisk", "tmp_mib"))


def node_lines(node: Json) -> list[Words]:
    """Return a node much as ``scontrol show node`` does."""
    state = node["state"] + ("+DRAIN" if node["drained"] and node["state"] == "DOWN" else "")
    gres = f"gpu:{len(node['gpus'])}" if node["gpus"] else None
    used = f"gpu:{node['gpus_alloc']}"
    if gres and (shards := sum(gpu.get("shards", 1) for gpu in node["gpus"])) > len(node["gpus"]):
        gres += f",shard:{shards}"
        used += f",shard:{node['shards_alloc']}"
    types = ",".join(f"{gpu['index']}:{gpu['type']}" for gpu in node["gpus"])
    lines: list[Words] = [
        [("NodeName", node["name"]), ("State", state), ("NodeAddr", node["host"]), ("Port", node["port"] or 22)],
        [("CPUAlloc", node["cpus_alloc"]), ("CPUTot", node["cpus"])],
        [("RealMemory", node["mem_mib"]), ("AllocMem", node["mem_alloc_mib"])],
        [("Gres", gres), ("GresUsed", used), ("GresTypes", types)] if gres else [("Gres", gres)],
        [("AvailableFeatures", ",".join(node["features"])), ("Weight", node["weight"])],
        [(word, node[key]) for word, key in _CAPABILITY if node.get(key)],
        [("Partitions", ",".join(node["partitions"])), ("Jobs", ",".join(map(str, node["jobs"])))],
        [("Link", node["link"]), ("LinkSince", date_text(node["link_since_s"] or None, "Unknown"))],
        [("BootId", node["boot_id"]), ("Version", node["agent_version"])],
    ]
    if node.get("reservation"):
        lines.append([("ReservationName", node["reservation"])])
    if node["link_why"]:
        lines.append([("LinkReason", node["link_why"])])
    if node["drained"]:
        lines.append([("Reason", f"{node['drained_why']} [{node['drained_by']}@{date_text(node['drained_at_s'])}]")])
    return lines


def _all_or(names: list[str]) -> str:
    return ",".join(names) or "ALL"


def partition_lines(partition: Json) -> list[Words]:
    """Return a partition much as ``scontrol show partition`` does."""
    counts = ",".join(f"{state}:{count}" for state, count in sorted(partition["state_counts"].items()))
    return [
        [("PartitionName", partition["name"])],
        [
            ("Default", "YES" if partition["default"] else "NO"),
            ("State", partition.get("state") or ("UP" if partition["up"] else "DOWN")),
        ],
        [
            ("MaxTime", _limit(partition["max_time_s"])),
            ("DefaultTime", "NONE" if partition["default_time_s"] is None else _limit(partition["default_time_s"])),
        ],
        [("AllowAccounts", _all_or(partition["allow_accounts"])), ("AllowQos", _all_or(partition["allow_qos"]))],
        [("PriorityJobFactor", partition["priority_job_factor"]), ("PriorityTier", partition["priority_tier"])],
        [("Nodes", partition["node_list"])],
        [
            ("TotalCPUs", partition["cpus"]),
            ("AllocCPUs", partition["cpus_alloc"]),
            ("TotalNodes", len(partition["nodes"])),
        ],
        [("NodeStates", counts)],
    ]


def licenses_text(licenses: Json) -> str:
    """Return licences as ``--licenses`` has them."""
    return ",".join(f"{name}:{count}" for name, count in licenses.items())


def license_lines(one: Json) -> list[Words]:
    """Return a licence as ``scontrol show licenses`` does."""
    return [[("LicenseName", one["name"])], [("Total", one["total"]), ("Used", one["used"]), ("Free", one["free"])]]


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
