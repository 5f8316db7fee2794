"""``sinfo --json`` and ``scontrol show node|partition --json``: in the names of Slurm's OpenAPI, as far as we have what they
name. The values are the API's JSON objects."""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.cli.output import print_json
from hpcsched.cli.slurm.face import SLURM_VERSION
from hpcsched.cli.slurm.openapi import limit_minutes, meta, number
from hpcsched.cli.slurm.records import node_state, tres_of_node, tres_of_nodes, why_out_of_use
from hpcsched.client import Json


def print_nodes(nodes: Sequence[Json]) -> None:
    """Print the nodes."""
    print_json({"meta": meta(), "nodes": [_node(node) for node in nodes], "warnings": [], "errors": []})


def print_partitions(partitions: Sequence[Json], nodes: Sequence[Json]) -> None:
    """Print the partitions; `nodes` are all there are."""
    by_name = {node["name"]: node for node in nodes}
    shown = [_partition(one, [by_name[name] for name in one["nodes"] if name in by_name]) for one in partitions]
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


def _partition(one: Json, nodes: list[Json]) -> Json:
    return {
        "name": one["name"],
        "nodes": {"allowed_allocation": "", "configured": one["node_list"], "total": len(nodes)},
        "accounts": {"allowed": ",".join(one["allow_accounts"]), "deny": ""},
        "groups": {"allowed": ""},
        "qos": {"allowed": ",".join(one["allow_qos"]), "deny": "", "assigned": ""},
        "tres": {"billing_weights": "", "configured": tres_of_nodes(one, nodes)},
        "cpus": {"task_binding": 0, "total": one["cpus"]},
        "defaults": {
            "time": limit_minutes(one["default_time_s"]) if one["default_time_s"] else number(None),
            "job": "",
        },
        "maximums": {"nodes": {"set": True, "infinite": True, "number": 0}, "time": limit_minutes(one["max_time_s"])},
        "minimums": {"nodes": 0},
        "priority": {"job_factor": one["priority_job_factor"], "tier": one["priority_tier"]},
        "partition": {"state": ["UP" if one["up"] else "DOWN"]},
        "flags": ["DEFAULT"] if one["default"] else [],
    }
