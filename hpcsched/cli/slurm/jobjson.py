"""``squeue --json``, ``scontrol show job --json`` and ``sacct --json``: jobs in the names of Slurm's OpenAPI (data_parser
v0.0.39, that of Slurm 23.02), as far as we have what they name. The values are the API's JSON objects."""

from __future__ import annotations

from hpcsched.cli.output import print_json
from hpcsched.cli.slurm.openapi import limit_minutes, meta, number
from hpcsched.cli.slurm.records import ids
from hpcsched.client import Json
from hpcsched.listing.jobs import end_s, gres_of_node, start_s, tres_text


def print_jobs(answer: Json) -> int:
    """Print the jobs of the API's answer as squeue does; return the exit status."""
    print_json({"meta": meta(), "jobs": [_job(job) for job in answer["jobs"]], "warnings": [], "errors": []})
    return 0


def _job(job: Json) -> Json:
    _, group = ids(job["user"], job["uid"])
    return {
        "account": job["account"],
        "array_job_id": number(job["array_job_id"] or 0),
        "array_task_id": number(job["array_task_id"]),
        "array_task_string": job.get("folded", ""),
        "batch_host": job["nodes"][0] if job["nodes"] else "",
        "command": job["command"] or "",
        "comment": job["comment"] or "",
        "cpus": number(job["num_cpus"]),
        "cpus_per_task": number(job["cpus_per_task"]),
        "current_working_directory": job["work_dir"] or "",
        "deadline": number(job.get("deadline_at_s") or 0),
        "dependency": job["dependency"],
        "eligible_time": number(job["eligible_at_s"] or 0),
        "end_time": number(end_s(job) or 0),
        "exit_code": _exit(job),
        "features": job["constraint"],
        "group_id": int(group.rpartition("(")[2].rstrip(")")),
        "group_name": group.partition("(")[0],
        "het_job_id": number(job.get("het_job_id") or 0),
        "het_job_id_set": job.get("het_job_ids") or "",
        "het_job_offset": number(job.get("het_offset") or 0),
        "hold": job["hold"] != "none",
        "job_id": job["id"],
        "job_resources": {
            "nodes": job["node_list"],
            "allocated_cores": job["num_cpus"],
            "allocated_hosts": len(job["nodes"]),
            "allocated_nodes": [
                {"nodename": one["node"], "cpus_used": one["cpus"], "memory_allocated": one["mem_mib"]}
                for one in job["shares"]
            ],
        },
        "job_state": job["state"],
        "memory_per_node": number(job["mem_mib"]),
        "name": job["name"],
        "nice": job["nice"],
        "node_count": number(job["num_nodes"]),
        "nodes": job["node_list"],
        "partition": job["partition"],
        "priority": number(job["priority"] or 0),
        "qos": job["qos"] or "normal",
        "required_nodes": ",".join(job.get("asked_nodes") or ()),
        "requeue": job["requeue"],
        "restart_cnt": job["restarts"],
        "resv_name": job.get("reservation") or "",
        "standard_error": job["stderr"] or "",
        "standard_input": job["stdin"] or "/dev/null",
        "standard_output": job["stdout"] or "",
        "start_time": number(start_s(job) or 0),
        "state_description": job["reason_detail"],
        "state_reason": job["reason"] or "None",
        "submit_time": number(job["submitted_at_s"]),
        "tasks": number(job["num_tasks"]),
        "time_limit": limit_minutes(job["time_limit_s"]),
        "tres_alloc_str": tres_text(job, billing=True) if job["node_list"] else "",
        "tres_per_node": gres_of_node(job) if job["gpus"] else "",
        "tres_req_str": tres_text(job, billing=True),
        "user_id": job["uid"],
        "user_name": job["user"],
    }


def _exit(one: Json) -> Json:
    code, signum = one["exit_code"] or 0, one["exit_signal"] or 0
    status = "SIGNALED" if signum else "ERROR" if code else "SUCCESS" if one["ended_at_s"] else "PENDING"
    return {"status": status, "return_code": number(code), "signal": {"signal_id": signum, "name": ""}}


def print_accounting(answer: Json, cluster: str) -> None:
    """Print the jobs of the history as sacct does."""
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
        "derived_exit_code": _exit(job),
        "exit_code": _exit(job),
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
        "time": {
            "elapsed": int(job["elapsed_s"]),
            "eligible": int(job["eligible_at_s"] or 0),
            "end": int(job["ended_at_s"] or 0),
            "start": int(job["started_at_s"] or 0),
            "submission": int(job["submitted_at_s"]),
            "suspended": int(job.get("suspended_s") or 0),
            "limit": limit_minutes(job["time_limit_s"]),
        },
        "tres": {"allocated": _tres(job) if job["nodes"] else [], "requested": _tres(job)},
        "user": job["user"],
        "working_directory": job["work_dir"] or "",
    }


def _tres(job: Json) -> list[Json]:
    kinds = (("cpu", "", job["num_cpus"]), ("mem", "", job["mem_mib"]), ("node", "", job["num_nodes"]))
    counted = (*kinds, ("gres", "gpu", job["gpus"]))
    return [{"type": kind, "name": name, "count": count} for kind, name, count in counted if count]


def _step(job: Json, step: Json) -> Json:
    return {
        "step": {"id": {"job_id": job["id"], "step_id": str(step["step"])}, "name": step["name"] or step["step"]},
        "state": step["state"],
        "exit_code": _exit(step),
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
