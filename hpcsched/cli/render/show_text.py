"""Nodes, partitions, steps and the configuration as ``Name=value`` words, with scontrol's names and in its order.

As in scontrol, a value that is unknown or hidden is ``(null)`` or ``N/A``. Clients parse what ``scontrol show`` prints, and some
depend on the lines: features that do not exist here have the value that Slurm shows if they are unused. The values are the
API's JSON objects. Sources: scontrol(1) "show"; scontrol of Slurm 22.05.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.client import Json
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


def _limit(seconds: float | None) -> str:
    return format_time_s(seconds, full=True)


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
    if node.get("reservation"):
        lines.append([("ReservationName", node["reservation"])])
    if node["link_why"]:
        lines.append([("LinkReason", node["link_why"])])
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


def license_lines(one: Json) -> list[Words]:
    """Return the lines of a licence, like ``scontrol show licenses``."""
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


# ----- ``scontrol show``: all of Slurm's words, in Slurm's order


_STATES = {"UNKNOWN": "UNKNOWN", "DRAINED": "IDLE+DRAIN", "MAINT": "IDLE+MAINTENANCE"}


def node_state(node: Json) -> str:
    """Return the state of a node in scontrol's words: ``IDLE+DRAIN``."""
    if node["drained"] and node["link"] == "down":
        return "DOWN+DRAIN"
    if node["state"] == "DRAINING":
        return "MIXED+DRAIN" if node["cpus_alloc"] < node["cpus"] else "ALLOCATED+DRAIN"
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
    return [
        [("NodeName", node["name"]), ("Arch", facts.get("arch", "x86_64")), ("CoresPerSocket", node["cpus"])],
        [("CPUAlloc", node["cpus_alloc"]), ("CPUEfctv", node["cpus"]), ("CPUTot", node["cpus"]), ("CPULoad", "N/A")],
        [("AvailableFeatures", features)],
        [("ActiveFeatures", features)],
        [("Gres", f"gpu:{gpus}" if gpus else None)],
        [("NodeAddr", node["host"]), ("NodeHostName", node["name"]), ("Version", "23.02.7")],
        [("OS", "Linux")],
        [
            ("RealMemory", mem_mib),
            ("AllocMem", node["mem_alloc_mib"]),
            ("FreeMem", "N/A"),
            ("Sockets", 1),
            ("Boards", 1),
        ],
        [
            ("State", node_state(node)),
            ("ThreadsPerCore", 1),
            ("TmpDisk", node.get("tmp_mib") or 0),
            ("Weight", node["weight"]),
            ("Owner", "N/A"),
            ("MCS_label", "N/A"),
        ],
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


def why_out_of_use(node: Json) -> tuple[str, str, float | None]:
    """Return why a node is drained or down, who drained it, and since when.

    "" if it is in use.
    """
    if node["drained"]:
        return node["drained_why"], node["drained_by"], node["drained_at_s"]
    return (node["link_why"], "slurm", node["link_since_s"] or None) if node["state"] == "DOWN" else ("", "", None)


def scontrol_partition_lines(partition: Json, nodes: list[Json]) -> list[Words]:
    """Return the lines of a partition; `nodes` are its nodes."""
    limit = "UNLIMITED" if partition["max_time_s"] is None else format_time_s(partition["max_time_s"], full=True)
    usual = "NONE" if partition["default_time_s"] is None else format_time_s(partition["default_time_s"], full=True)
    return [
        [("PartitionName", partition["name"])],
        [
            ("AllowGroups", "ALL"),
            ("AllowAccounts", ",".join(partition["allow_accounts"]) or "ALL"),
            ("AllowQos", ",".join(partition["allow_qos"]) or "ALL"),
        ],
        [("AllocNodes", "ALL"), ("Default", "YES" if partition["default"] else "NO"), ("QoS", "N/A")],
        [
            ("DefaultTime", usual),
            ("DisableRootJobs", "NO"),
            ("ExclusiveUser", "NO"),
            ("GraceTime", 0),
            ("Hidden", "NO"),
        ],
        [
            ("MaxNodes", "UNLIMITED"),
            ("MaxTime", limit),
            ("MinNodes", 0),
            ("LLN", "NO"),
            ("MaxCPUsPerNode", "UNLIMITED"),
        ],
        [("Nodes", partition["node_list"])],
        [
            ("PriorityJobFactor", partition["priority_job_factor"]),
            ("PriorityTier", partition["priority_tier"]),
            ("RootOnly", "NO"),
            ("ReqResv", "NO"),
            ("OverSubscribe", "NO"),
        ],
        [("OverTimeLimit", "NONE"), ("PreemptMode", "OFF")],
        [
            ("State", partition.get("state") or ("UP" if partition["up"] else "DOWN")),
            ("TotalCPUs", partition["cpus"]),
            ("TotalNodes", len(nodes)),
            ("SelectTypeParameters", "NONE"),
        ],
        [("JobDefaults", None)],
        [("DefMemPerNode", "UNLIMITED"), ("MaxMemPerNode", "UNLIMITED")],
        [("TRES", Verbatim(tres_of_nodes(partition, nodes)))],
    ]


def step_lines(step: Json) -> list[Words]:
    """Return the lines of a running step."""
    job = step["job"]
    nodes = compress_hostlist(step["nodes"])
    cpus = sum(share["cpus"] for share in job["shares"] if share["node"] in step["nodes"])
    return [
        [
            ("StepId", step["id"]),
            ("UserId", job["uid"]),
            ("StartTime", date_text(step["started_at_s"], "Unknown")),
            ("TimeLimit", format_time_s(job["time_limit_s"], full=True)),
        ],
        [("State", step["state"]), ("Partition", job["partition"]), ("NodeList", nodes), ("Gres", Verbatim(""))],
        [
            ("Nodes", len(step["nodes"])),
            ("CPUs", cpus),
            ("Tasks", step["ntasks"]),
            ("Name", step["name"] or step["step"]),
            ("Network", None),
        ],
        [("TRES", Verbatim(f"cpu={cpus},node={len(step['nodes'])}"))],
        [("ResvPorts", None)],
        [("CPUFreqReq", "Default"), ("Dist", "Block")],
    ]
