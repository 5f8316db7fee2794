"""Facts of a job in a word or two: the reason for its state, its times, its memory.

A job is the JSON object of the API. Knows neither columns nor which jobs are listed.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.listing.states import ENDED_STATES
from hpcsched.model.units import format_mem, format_time_s

TYPE_CHECKING = False  # type checkers know the name; typing's own costs a command a tenth of its start
if TYPE_CHECKING:
    from typing import Any

Job = dict[str, "Any"]


def is_waiting(job: Job) -> bool:
    """Say whether the job has not started yet."""
    return job["state"] == "PENDING"


def reason(job: Job) -> str:
    """Return the one-word reason: why the job waits, or how it came to its end."""
    return job["reason"] or "None"


def nodes_or_reason(job: Job) -> str:
    """Return squeue's last column: where the job runs, or in parentheses why it does not; or both, if it waits for a node."""
    if reason(job) == "NodeDown" and job["node_list"]:
        return f"{job['node_list']} (NodeDown)"
    failed = job["state"] in ENDED_STATES and reason(job) != "None"
    if is_waiting(job) or (failed and job["state"] != "COMPLETED" and not job["node_list"]):
        return f"({reason(job)})"
    return job["node_list"]


def why(job: Job) -> str:
    """Return the reason in words, as far as there is one."""
    return job["reason_detail"] or ("" if reason(job) == "None" else reason(job))


def exit_text(job: Job) -> str:
    """Return Slurm's ``code:signal``."""
    return f"{job['exit_code'] or 0}:{job['exit_signal'] or 0}"


def memory_asked(job: Job) -> str:
    """Return the memory that was asked for, on each node or, if it was asked for so, for each cpu."""
    if job.get("mem_per_cpu_mib"):  # of the controller before this one: none
        return format_mem(job["mem_per_cpu_mib"])
    if job["mem_mib"] is None:
        return "0"
    return format_mem(job["mem_mib"] // (max(1, job["num_nodes"]) if job["node_list"] else 1))


def memory_in_all(job: Job) -> str:
    """Return the memory of the whole job, on all of its nodes."""
    if not job["node_list"] and job.get("mem_per_cpu_mib"):
        return format_mem(job["mem_per_cpu_mib"] * job["num_cpus"])
    return format_mem((job["mem_mib"] or 0) * (1 if job["node_list"] else max(1, job["num_nodes"])))


def start_s(job: Job) -> float | None:
    """Return when the job has started, or when it is expected to."""
    return job["expected_start_s"] if is_waiting(job) else job["started_at_s"]


def end_s(job: Job) -> float | None:
    """Return when the job has ended, or when its time limit ends it, or its reservation or deadline before that."""
    if job["ended_at_s"] is not None or job["started_at_s"] is None:
        return job["ended_at_s"]
    ends_s = [job["cut_at_s"]] if job.get("cut_at_s") is not None else []
    if job["time_limit_s"] is not None:
        ends_s.append(job["started_at_s"] + job.get("suspended_s", 0.0) + job["time_limit_s"])
    return min(ends_s, default=None)


def training(job: Job) -> Job:
    """Return the progress that a training job has reported; empty: none.

    The words of an earlier attempt say nothing of this one's speed and end.
    """
    told = job.get("training") or {}  # of the controller before this one: none
    if is_of_earlier_attempt(job):
        told = told | dict.fromkeys(("loss", "samples_per_s", "steps_per_s", "ends_at_s"))
    return told


def is_of_earlier_attempt(job: Job) -> bool:
    """Return whether the known progress is that of an earlier attempt, and this one has not reported yet."""
    told = job.get("training") or {}
    return told.get("attempt", job.get("attempt")) != job.get("attempt")


def step_text(job: Job) -> str:
    """Return the step that a training job has done, of how many."""
    told = training(job)
    if not told:
        return "N/A"
    return f"{told['step']}/{told['total_steps']}" if told["total_steps"] else str(told["step"])


def loss_text(job: Job) -> str:
    """Return the last loss that a training job has told."""
    loss = training(job).get("loss")
    return "N/A" if loss is None else f"{loss:.4g}"


def rate_text(job: Job) -> str:
    """Return a training job's samples per second."""
    rate = training(job).get("samples_per_s")
    return "N/A" if rate is None else f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def goodput_text(job: Job) -> str:
    """Return which part of a training job's time went into steps that count."""
    share = training(job).get("goodput")
    return "N/A" if share is None else f"{share:.1%}"


def checkpoint_text(job: Job, now_s: float) -> str:
    """Return the step of a training job's last checkpoint and its age."""
    told = training(job)
    if not told.get("checkpoint_step"):
        return "N/A"
    at_s = told["checkpoint_at_s"]
    return str(told["checkpoint_step"]) + (f" ({format_time_s(max(0, now_s - at_s))} ago)" if at_s is not None else "")


def time_left(job: Job) -> str:
    """Return how much of its time limit the job has left."""
    if job["time_limit_s"] is None:
        return "UNLIMITED"
    return format_time_s(max(0, job["time_limit_s"] - job["elapsed_s"]))


def gres_of_node(job: Job) -> str:
    """Return the GPUs, or shards of them, on each node."""
    nodes = max(1, job["num_nodes"])
    if job.get("shards"):
        return f"gres/shard:{-(-job['shards'] // nodes)}"
    return f"gres/gpu:{-(-job['gpus'] // nodes)}" if job["gpus"] else "N/A"


def tres_text(job: Job, *, billing: bool = False) -> str:
    """Return what the job has, or asks for as long as it waits, as ``cpu=8,mem=4G,node=2,gres/gpu=2``."""
    parts = [f"cpu={job['num_cpus']}", f"mem={memory_in_all(job)}", f"node={job['num_nodes']}"]
    parts += [f"billing={job['num_cpus']}"] if billing else []
    counts = (("gpu", job["gpus"]), ("shard", job.get("shards", 0)))
    return ",".join(parts + [f"gres/{name}={count}" for name, count in counts if count])


def array_text(job: Job) -> str:
    """Return the array part of an id: the index of a task, or all indices of a folded row."""
    return job.get("folded", "").strip("[]") or ("N/A" if job["array_task_id"] is None else str(job["array_task_id"]))


def id_text(job: Job) -> str:
    """Return the number by which people call the job: ``12``, ``10_3``, of a folded line ``10_[3-9%2]``."""
    return f"{job['array_job_id']}_{job['folded']}" if job.get("folded") else job["display_id"]


def index_ranges(indices: Sequence[int]) -> str:
    """Return indices as ``3-9,12``."""
    spans: list[list[int]] = []
    for index in sorted(indices):
        if spans and spans[-1][1] == index - 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
