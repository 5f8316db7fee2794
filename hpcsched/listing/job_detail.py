"""One job in lines for people: what it is, what it waits for, where its output is. A job is the API's JSON object."""

from __future__ import annotations

from hpcsched.listing.jobs import (
    Job,
    checkpoint_text,
    end_s,
    exit_text,
    goodput_text,
    is_of_earlier_attempt,
    is_waiting,
    loss_text,
    rate_text,
    reason,
    training,
    why,
)
from hpcsched.listing.states import ENDED_STATES
from hpcsched.listing.text import clean, when_text
from hpcsched.model.job import exit_words
from hpcsched.model.units import format_mem, format_time_s


def detail_lines(job: Job, now_s: float) -> list[str]:
    """Return the job in lines of a name and a value each; empty values are left out."""
    facts = [
        ("state", _state(job)),
        ("why", why(job) if why(job) != reason(job) else ""),
        ("start", _start(job, now_s)),
        ("end" if job["state"] in ENDED_STATES else "time", _end(job, now_s)),
        ("training", _training(job, now_s)),
        ("checkpoint", checkpoint_text(job, now_s) if (job.get("training") or {}).get("checkpoint_step") else ""),
        ("note", (job.get("training") or {}).get("note", "")),
        ("again", _again(job)),
        ("preempted", f"by job {job['preempted_by']}" if job.get("preempted_by") else ""),
        ("suspended", format_time_s(job["suspended_s"]) if job.get("suspended_s") else ""),
        ("nodes", job["node_list"]),
        ("asks for" if is_waiting(job) else "has", _resources(job)),
        ("limit", format_time_s(job["time_limit_s"])),
        ("partition", job["partition"]),
        ("account", job["account"]),
        ("depends on", job["dependency"]),
        ("deadline", when_text(job["deadline_at_s"], now_s) if job.get("deadline_at_s") else ""),
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


def _state(job: Job) -> str:
    if job["state"] in ENDED_STATES:
        words = exit_words(job["exit_code"] or 0, job["exit_signal"] or 0)
        return f"{job['state']} (exit code {exit_text(job)}{': ' + words if words else ''}{_because(job)})"
    return job["state"] + (f" ({reason(job)})" if reason(job) != "None" else "")


def _because(job: Job) -> str:
    return f", {reason(job)}" if reason(job) not in ("None", "NonZeroExitCode") else ""


def _start(job: Job, now_s: float) -> str:
    if not is_waiting(job):
        return when_text(job["started_at_s"], now_s) if job["started_at_s"] is not None else ""
    expected_s = job["expected_start_s"]
    if expected_s is None:
        return "not known yet"
    in_text = f" (in {format_time_s(expected_s - now_s)})" if expected_s > now_s else " (now)"
    return f"about {when_text(expected_s, now_s)}{in_text}"


def _end(job: Job, now_s: float) -> str:
    if is_waiting(job) or job["started_at_s"] is None:
        return when_text(job["ended_at_s"], now_s) if job["ended_at_s"] is not None else ""
    ran = f"ran {format_time_s(job['elapsed_s'])}"
    if job["ended_at_s"] is not None:
        return f"{when_text(job['ended_at_s'], now_s)} ({ran})"
    latest_s = end_s(job)
    runs = format_time_s(job["elapsed_s"])
    return f"{runs}, ends at {when_text(latest_s, now_s)} at the latest" if latest_s is not None else runs


def _training(job: Job, now_s: float) -> str:
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
