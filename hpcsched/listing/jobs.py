"""A job in words: state, reason, times, memory, progress, and a description in lines.

A job is the JSON object of the API. Knows neither columns nor which jobs are listed. Source: squeue(1), job states.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.errors import UsageError
from hpcsched.listing.text import clean, when_text
from hpcsched.model.units import format_mem, format_time_s

TYPE_CHECKING = False  # type checkers know the name; typing's own costs a command a tenth of its start
if TYPE_CHECKING:
    from typing import Any

Job = dict[str, "Any"]


ENDED_STATES = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE", "BOOT_FAIL"}
)
ACTIVE_STATES = frozenset({"CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING"})
STATE_CODES = {
    "PD": "PENDING", "CF": "CONFIGURING", "R": "RUNNING", "S": "SUSPENDED", "CG": "COMPLETING", "CD": "COMPLETED",
    "F": "FAILED", "CA": "CANCELLED", "TO": "TIMEOUT", "NF": "NODE_FAIL", "OOM": "OUT_OF_MEMORY", "PR": "PREEMPTED",
    "DL": "DEADLINE", "BF": "BOOT_FAIL", "SE": "SPECIAL_EXIT",
}  # fmt: skip
SPECIAL_EXIT = "SPECIAL_EXIT"  # what a waiting job shows that was requeued so


def shown_state(job: Job) -> str:
    """Return the state of a job, the JSON object of the API, as its users see it."""
    return SPECIAL_EXIT if job["state"] == "PENDING" and job.get("hold") == "special" else job["state"]


def parse_states(words: Sequence[str]) -> list[str]:
    """Return the names of states, given by name or short code in either case.

    Empty for ``all``. Raises UsageError.
    """
    states = []
    for word in words:
        state = STATE_CODES.get(word.upper(), word.upper())
        if state == "ALL":
            return []
        if state not in STATE_CODES.values():
            known = ", ".join(f"{name} ({code})" for code, name in STATE_CODES.items())
            raise UsageError(f"Invalid job state specified: {word[:60]}; there are {known}")
        states.append(state)
    return states


def is_waiting(job: Job) -> bool:
    """Return whether the job has not started yet."""
    return job["state"] == "PENDING"


def reason(job: Job) -> str:
    """Return the one-word reason why the job waits or why it ended."""
    return job["reason"] or "None"


def nodes_or_reason(job: Job) -> str:
    """Return squeue's last column: the nodes of the job, or why it does not run.

    A reason is in parentheses.

    Both if it waits for a node that is down.
    """
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
    """Return the requested memory, per node or, if it was requested so, per CPU."""
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
    """Return when the job ended, or when its time limit, reservation or deadline ends it."""
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
    report = job.get("training") or {}  # of the controller before this one: none
    if is_of_earlier_attempt(job):
        report = report | dict.fromkeys(("loss", "samples_per_s", "steps_per_s", "ends_at_s"))
    return report


def is_of_earlier_attempt(job: Job) -> bool:
    """Return whether the last report of progress came from an earlier attempt."""
    report = job.get("training") or {}
    return report.get("attempt", job.get("attempt")) != job.get("attempt")


def step_text(job: Job) -> str:
    """Return the step that a training job has done, of how many."""
    report = training(job)
    if not report:
        return "N/A"
    return f"{report['step']}/{report['total_steps']}" if report["total_steps"] else str(report["step"])


def loss_text(job: Job) -> str:
    """Return the last loss that a training job has report."""
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
    report = training(job)
    if not report.get("checkpoint_step"):
        return "N/A"
    at_s = report["checkpoint_at_s"]
    return str(report["checkpoint_step"]) + (
        f" ({format_time_s(max(0, now_s - at_s))} ago)" if at_s is not None else ""
    )


def cpu_use_text(job: Job) -> str:
    """Return which part of its CPUs a job keeps busy now."""
    busy = (job.get("use") or {}).get("busy_cpus")
    return "N/A" if busy is None or not job["num_cpus"] else f"{busy / job['num_cpus']:.0%}"


def memory_use_text(job: Job) -> str:
    """Return the memory that a job's processes use."""
    use = job.get("use")
    return "N/A" if not use else format_mem(round(use["memory_bytes"]) >> 20)


def gpu_use_text(job: Job) -> str:
    """Return how busy a job's GPUs are."""
    ratio = (job.get("use") or {}).get("gpu_ratio")
    return "N/A" if ratio is None else f"{ratio:.0%}"


def _detail_use(job: Job) -> str:
    """Return what a running job uses now."""
    use = job.get("use")
    if not use:
        return ""
    parts = [] if use["busy_cpus"] is None else [f"{use['busy_cpus']:.1f} of {job['num_cpus']} CPUs"]
    parts.append(f"{memory_use_text(job)} of memory")
    parts += [] if use["gpu_ratio"] is None else [f"GPUs {gpu_use_text(job)} busy"]
    return ", ".join(parts) + f"; hwhy --slow {job['display_id']} judges it"


def steps_per_kwh(job: Job, uses: Sequence[Job]) -> float | None:
    """Return the training steps that a kilowatt-hour gave; None without steps or energy.

    Steps that a later attempt has repeated count once, and their energy counts each time. `uses`: as the API's history has them.
    """
    step, joules = (job.get("training") or {}).get("step"), sum(use["joules"] for use in uses)
    return step / (joules / 3.6e6) if step and joules > 0 else None


def energy_text(uses: Sequence[Job], currency: str, job: Job | None = None) -> str:
    """Return energy with its sources, and with price and CO2 if these are known.

    `uses`: as the API's history has them. Of a training `job` it also has the steps for each kilowatt-hour.
    """
    joules = sum(use["joules"] for use in uses)
    costs, grams = ([use[key] for use in uses if use.get(key) is not None] for key in ("cost", "co2_g"))
    amount = f"{joules / 3.6e6:.3g} kWh" if joules >= 3600 else f"{joules:.0f} J"
    parts = [f"{amount} ({'+'.join(sorted({str(use['source']) for use in uses}))})"]
    parts += [f"{sum(costs):.2f} {currency}".rstrip()] if costs else []
    parts += [f"{sum(grams) / 1000:.3g} kg CO2"] if grams else []
    steps = steps_per_kwh(job or {}, uses)
    return ", ".join([*parts, f"{steps:,.0f} steps per kWh"] if steps is not None else parts)


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
    """Return the allocated or requested TRES: ``cpu=8,mem=4G,node=2,gres/gpu=2``."""
    parts = [f"cpu={job['num_cpus']}", f"mem={memory_in_all(job)}", f"node={job['num_nodes']}"]
    parts += [f"billing={job['num_cpus']}"] if billing else []
    counts = (("gpu", job["gpus"]), ("shard", job.get("shards", 0)))
    return ",".join(parts + [f"gres/{name}={count}" for name, count in counts if count])


def array_text(job: Job) -> str:
    """Return the array part of an id: the index of a task, or all indices of a folded row."""
    return job.get("folded", "").strip("[]") or ("N/A" if job["array_task_id"] is None else str(job["array_task_id"]))


def id_text(job: Job) -> str:
    """Return the id that users see: ``12``, ``10_3``, or ``10_[3-9%2]`` of a folded line."""
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


def detail_lines(job: Job, now_s: float) -> list[str]:
    """Return the job in lines of a name and a value each; empty values are left out."""
    facts = [
        ("state", _detail_state(job)),
        ("why", why(job) if why(job) != reason(job) else ""),
        ("start", _detail_start(job, now_s)),
        ("end" if job["state"] in ENDED_STATES else "time", _detail_end(job, now_s)),
        ("training", _detail_training(job, now_s)),
        ("checkpoint", checkpoint_text(job, now_s) if (job.get("training") or {}).get("checkpoint_step") else ""),
        ("note", (job.get("training") or {}).get("note", "")),
        ("again", _again(job)),
        ("preempted", f"by job {job['preempted_by']}" if job.get("preempted_by") else ""),
        ("suspended", format_time_s(job["suspended_s"]) if job.get("suspended_s") else ""),
        ("nodes", job["node_list"]),
        ("asks for" if is_waiting(job) else "has", _resources(job)),
        ("uses", _detail_use(job)),
        ("limit", format_time_s(job["time_limit_s"])),
        ("partition", job["partition"]),
        ("account", job["account"]),
        ("depends on", job["dependency"]),
        ("deadline", when_text(job["deadline_at_s"], now_s) if job.get("deadline_at_s") else ""),
        ("cheap by", when_text(job["cheap_by_s"], now_s) if job.get("cheap_by_s") else ""),
        ("GPU power", f"{job['gpu_power']} W each" if job.get("gpu_power") else ""),
        ("in", f"reservation {job['reservation']}" if job.get("reservation") else ""),
        ("features", job["constraint"]),
        ("prefers", job.get("prefer", "")),
        ("switches", str(job["switches"]) if job.get("switches") else ""),
        ("hints", ", ".join(job.get("hints", ()))),
        ("submitted", when_text(job["submitted_at_s"], now_s)),
        ("restarts", str(job["restarts"]) if job["restarts"] else ""),
        ("command", job["submit_line"] or job["command"] or ""),
        ("directory", job["work_dir"] or ""),
        ("output", job["stdout"] or ""),
        ("errors", (job["stderr"] or "") if job["stderr"] != job["stdout"] else ""),
        ("comment", job["comment"] or ""),
    ]
    title = f"job {job['display_id']}  {clean(job['name'])}  of {clean(job['user'])}"
    return [title, *(f"  {name:<10} {clean(value)}" for name, value in facts if value)]


def _detail_state(job: Job) -> str:
    if job["state"] in ENDED_STATES:
        from hpcsched.model.job import exit_words  # imports dataclasses, which take as long as Python's start

        words = exit_words(job["exit_code"] or 0, job["exit_signal"] or 0)
        return f"{job['state']} (exit code {exit_text(job)}{': ' + words if words else ''}{_because(job)})"
    return job["state"] + (f" ({reason(job)})" if reason(job) != "None" else "")


def _because(job: Job) -> str:
    return f", {reason(job)}" if reason(job) not in ("None", "NonZeroExitCode") else ""


def _detail_start(job: Job, now_s: float) -> str:
    if not is_waiting(job):
        return when_text(job["started_at_s"], now_s) if job["started_at_s"] is not None else ""
    expected_s = job["expected_start_s"]
    if expected_s is None:
        return "not known yet"
    in_text = f" (in {format_time_s(expected_s - now_s)})" if expected_s > now_s else " (now)"
    return f"about {when_text(expected_s, now_s)}{in_text}"


def _detail_end(job: Job, now_s: float) -> str:
    if is_waiting(job) or job["started_at_s"] is None:
        return when_text(job["ended_at_s"], now_s) if job["ended_at_s"] is not None else ""
    ran = f"ran {format_time_s(job['elapsed_s'])}"
    if job["ended_at_s"] is not None:
        return f"{when_text(job['ended_at_s'], now_s)} ({ran})"
    latest_s = end_s(job)
    runs = format_time_s(job["elapsed_s"])
    return f"{runs}, ends at {when_text(latest_s, now_s)} at the latest" if latest_s is not None else runs


def _detail_training(job: Job, now_s: float) -> str:
    """Return the progress of a training job, as it reports it."""
    reported = training(job)
    if not reported:
        return ""
    parts = [f"step {reported['step']}" + (f" of {reported['total_steps']}" if reported["total_steps"] else "")]
    if is_of_earlier_attempt(job):
        parts.append(f"of attempt {reported['attempt']} (attempt {job['attempt']} has not reported yet)")
    if reported["loss"] is not None:
        parts.append(f"loss {loss_text(job)}")
    if reported["samples_per_s"] is not None:
        parts.append(f"{rate_text(job)} samples/s")
    if reported.get("goodput") is not None:
        parts.append(f"goodput {goodput_text(job)}")
    if reported["ends_at_s"] is not None and reported["ends_at_s"] > now_s and job["state"] not in ENDED_STATES:
        parts.append(
            f"done at {when_text(reported['ends_at_s'], now_s)} (in {format_time_s(reported['ends_at_s'] - now_s)})"
        )
    return ", ".join(parts)


def _again(job: Job) -> str:
    """Return where another attempt of an ended training job resumes."""
    step = (job.get("training") or {}).get("checkpoint_step")
    if not step or job["state"] not in ENDED_STATES or job["state"] == "COMPLETED":
        return ""
    return f"resumes from step {step}: hctl requeue {job['display_id']}"


def _resources(job: Job) -> str:
    parts = [_count(job["num_nodes"], "node"), _count(job["num_tasks"], "task"), _count(job["num_cpus"], "cpu")]
    if job["mem_mib"]:
        parts.append(format_mem(job["mem_mib"]) + (" on each node" if is_waiting(job) else ""))
    if job["gpus"]:
        parts.append(_count(job["gpus"], "GPU"))
    if job.get("shards"):
        parts.append(_count(job["shards"], "GPU shard"))
    if job["exclusive"]:
        parts.append("nodes of its own")
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
