"""Nodes, partitions and steps as ``scontrol show`` prints them: all of Slurm's words, in Slurm's order.

Clients parse the ``name=value`` words, and some depend on the lines. Features that do not exist here have the value that Slurm
shows if they are unused. The values are the API's JSON objects. Source: scontrol of Slurm 22.05.
"""

from __future__ import annotations

from hpcsched.cli.render.show_text import Verbatim, Words
from hpcsched.client import Json
from hpcsched.listing.text import date_text
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.units import format_mem, format_time_s

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


def node_lines(node: Json) -> list[Words]:
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


def partition_lines(partition: Json, nodes: list[Json]) -> list[Words]:
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
