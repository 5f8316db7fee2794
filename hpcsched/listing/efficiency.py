"""What a job used of what it was given, and one line of advice for the next request.

`hacct --eff` and the mail at the end of a job show it. A job is the JSON object of the API's history,
with its steps. CPU time is that of all steps; memory is that of the largest step, assuming equal
tasks, as in seff. Only ended jobs have an efficiency, and running ones that were sampled (`use`).
"""

from __future__ import annotations

import math

from hpcsched.listing.jobs import ENDED_STATES
from hpcsched.model.units import format_mem, format_time_s

TYPE_CHECKING = False  # type checkers know the name; typing's own costs a command a tenth of its start
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

SHORT_S = 10  # a shorter run is all start-up
BUSY = 0.5  # of the CPUs: less than this is worth a note
ROOMY = 0.3  # of the memory: less than this is worth a note
SPARE = 1.25  # memory to request, as a multiple of the used memory
SMALL_MIB = 512  # ignore savings below this
LATE = 0.25  # of the time limit: less than this is worth a note, because shorter jobs start sooner
LONG_S = 3600


def time_part(job: Json) -> float | None:
    """Return the used fraction of the time limit; None without a limit."""
    return job["elapsed_s"] / job["time_limit_s"] if job["time_limit_s"] and job["started_at_s"] else None


def cpu_part(job: Json) -> float | None:
    """Return the fraction of CPU time that was busy; None if it is not known."""
    used_s = _busy_s(job)
    given_s = job["elapsed_s"] * job["num_cpus"]
    return None if used_s is None or given_s <= 0 else used_s / given_s


def mem_part(job: Json) -> float | None:
    """Return the used fraction of the memory.

    None if it is not known, or the job had all memory of its nodes.
    """
    used_mib = _used_mib(job)
    return None if used_mib is None or not job["mem_mib"] else used_mib / job["mem_mib"]


def part_text(part: float | None) -> str:
    """Return a fraction as ``37%``."""
    return "" if part is None else f"{part * 100:.0f}%"


def advice(job: Json) -> str:
    """Return advice for the next request in one line.

    "" for a job that has not ended or never ran.
    """
    if job["started_at_s"] is None or not (job["state"] in ENDED_STATES or job.get("use")):
        return ""
    nodes = max(1, job["num_nodes"])
    if job["state"] == "OUT_OF_MEMORY":
        given = (job["mem_mib"] or 0) // nodes
        wanted = _round_mib(max(2 * given, SPARE * (_used_mib(job) or 0) / nodes))
        return f"took more than the {format_mem(given)} that it had on each node: --mem={format_mem(wanted)}"
    if job["state"] == "TIMEOUT":
        limit = format_time_s(job["time_limit_s"])
        return f"was ended at its limit of {limit}: a longer --time, or checkpoints and --requeue"
    if job["elapsed_s"] < SHORT_S:
        return "ran too shortly to tell"
    found = [text for text in (_about_cpus(job), _about_memory(job, nodes), _about_time(job)) if text]
    if job.get("use"):
        return "; ".join([*found, f"it runs: hwhy --slow {job['display_id']} tells more"])
    return "; ".join(found) or ("used what it was given" if cpu_part(job) is not None else "nothing was measured")


def _busy_s(job: Json) -> float | None:
    if job.get("use"):
        return float(job["use"]["cpu_s"])
    steps = [step for step in _last_steps(job) if step["cpu_user_s"] is not None]
    return sum(step["cpu_user_s"] + (step["cpu_system_s"] or 0.0) for step in steps) if steps else None


def _used_mib(job: Json) -> float | None:
    if job.get("use"):
        return float(job["use"]["memory_bytes"]) / (1 << 20)
    sizes = [step["max_rss_kib"] * step["ntasks"] / 1024 for step in _last_steps(job) if step["max_rss_kib"]]
    return max(sizes, default=None)


def _last_steps(job: Json) -> list[Json]:
    return [step for step in job["steps"] if step.get("attempt", job["attempt"]) == job["attempt"]]


def _about_cpus(job: Json) -> str:
    part = cpu_part(job)
    if part is None or part >= BUSY:
        return ""
    if job["gpus"]:
        return f"its {job['num_cpus']} cpus were busy for {part_text(part)} of the time, as may be with GPUs"
    busy = part * job["num_cpus"]
    if job["num_cpus"] == 1 or math.ceil(busy) >= job["num_cpus"]:
        return f"its cpu was busy for {part_text(part)} of the time: it waited for files, the network or others"
    return f"of its {job['num_cpus']} cpus {busy:.1f} were busy: ask for {max(1, math.ceil(busy))}"


def _about_memory(job: Json, nodes: int) -> str:
    part, used_mib = mem_part(job), _used_mib(job)
    if part is None or used_mib is None or part > ROOMY or job["mem_mib"] / nodes < SMALL_MIB:
        return ""
    wanted = _round_mib(SPARE * used_mib / nodes)
    given = format_mem(job["mem_mib"] // nodes)
    return f"used {format_mem(math.ceil(used_mib / nodes))} of {given} on a node: --mem={format_mem(wanted)}"


def _about_time(job: Json) -> str:
    part = time_part(job)
    if part is None or part > LATE or job["time_limit_s"] < LONG_S or job["state"] != "COMPLETED":
        return ""
    return f"took {format_time_s(job['elapsed_s'])} of {format_time_s(job['time_limit_s'])}: a shorter --time starts sooner"


def _round_mib(mib: float) -> int:
    """Return a round size: a multiple of 100M, or of 1G above 1G."""
    step = 100 if mib < 1024 else 1024
    return math.ceil(mib / step) * step


def efficiency_line(job: Json) -> str:
    """Return the used parts and the advice in one line; "" if there is nothing to say."""
    parts = (("of its time limit", time_part(job)), ("of its CPUs", cpu_part(job)), ("of its memory", mem_part(job)))
    used = ", ".join(f"{part_text(part)} {what}" for what, part in parts if part is not None)
    return "; ".join(text for text in (f"used {used}" if used else "", advice(job)) if text)
