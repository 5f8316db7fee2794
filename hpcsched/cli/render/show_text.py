"""Jobs, nodes and partitions as ``Name=value`` words, with scontrol's names and in its order.

As in scontrol, a value that is unknown or hidden is ``(null)`` or ``N/A``. The values are the API's JSON objects.
Source: scontrol(1) "show"; its output.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.cli.output import clean, date_text
from hpcsched.client import Json
from hpcsched.model.units import format_time_s

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
