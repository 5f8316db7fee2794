"""JSON of the commands with Slurm's names: jobs, nodes and partitions in the names of Slurm's OpenAPI.

That is data_parser v0.0.39, of Slurm 23.02; fields without a counterpart here are left out. The values are the API's JSON
objects.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hpcsched.cli.output import print_json
from hpcsched.cli.render.job_fields import exit_status, ids, job_json, limit_minutes, number
from hpcsched.cli.render.show_text import node_state, tres_of_node, tres_of_nodes, why_out_of_use
from hpcsched.client import Json
from hpcsched.commands.slurm import SLURM_VERSION

# ----- jobs


def meta() -> Json:
    """Return the head of each answer."""
    major, micro, minor = SLURM_VERSION.split(".")
    return {
        "plugin": {"type": "openapi/v0.0.39", "name": "Slurm OpenAPI v0.0.39", "data_parser": "data_parser/v0.0.39"},
        "command": sys.argv,
        "Slurm": {
            "version": {"major": int(major), "micro": int(minor), "minor": int(micro)},
            "release": SLURM_VERSION,
        },
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
        "tres": {"allocated": _tres(job) if job["nodes"] else [], "requested": _tres(job)},
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


def _tres(job: Json) -> list[Json]:
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


# ----- nodes and partitions: ``sinfo --json`` and ``scontrol show node|partition --json``


def print_nodes(nodes: Sequence[Json]) -> None:
    """Print the nodes."""
    print_json({"meta": meta(), "nodes": [_node(node) for node in nodes], "warnings": [], "errors": []})


def print_partitions(partitions: Sequence[Json], nodes: Sequence[Json]) -> None:
    """Print the partitions; `nodes` are all nodes of the cluster."""
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
        "partition": {"state": [one.get("state") or ("UP" if one["up"] else "DOWN")]},
        "flags": ["DEFAULT"] if one["default"] else [],
    }
