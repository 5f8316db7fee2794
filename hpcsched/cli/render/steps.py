"""Running steps, for hqueue and squeue --steps and scontrol show step. A step is the JSON object of the history."""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched import client
from hpcsched.client import Json
from hpcsched.commands.options import Words
from hpcsched.listing.formats import FormatField, Look, format_lines, parse_percent
from hpcsched.listing.states import ACTIVE_STATES
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.units import format_time_s

FORMAT = "%.15i %.8j %.9P %.8u %.9M %N"

FIELDS = (
    FormatField("id", "i", "STEPID", lambda step, look: step["id"]),
    FormatField("task", "A", "TASKS", lambda step, look: str(step["ntasks"])),
    FormatField("name", "j", "NAME", lambda step, look: step["name"] or step["step"]),
    FormatField("partition", "P", "PARTITION", lambda step, look: step["job"]["partition"]),
    FormatField("user", "u", "USER", lambda step, look: step["job"]["user"]),
    FormatField("uid", "U", "UID", lambda step, look: str(step["job"]["uid"])),
    FormatField("limit", "l", "TIME_LIMIT", lambda step, look: format_time_s(step["job"]["time_limit_s"])),
    FormatField(
        "time", "M", "TIME", lambda step, look: format_time_s(look.now_s - (step["started_at_s"] or look.now_s))
    ),
    FormatField("nodelist", "N", "NODELIST", lambda step, look: compress_hostlist(step["nodes"])),
    FormatField("start", "S", "START_TIME", lambda step, look: look.date(step["started_at_s"])),
)


def running_steps(wanted: Sequence[str]) -> tuple[float, list[Json]]:
    """Return the current time and the running steps.

    `wanted` selects jobs and steps: ``12``, ``12.0``, ``10_3.batch``.
    """
    ids = sorted({word.partition(".")[0].partition("_")[0].partition("+")[0] for word in wanted})
    states = ",".join(sorted(ACTIVE_STATES))
    answer = client.call("GET", client.query("/v1/history", id=",".join(ids), state=states))
    found = []
    for job in answer["jobs"]:
        for step in job["steps"]:
            name = f"{job['display_id']}.{step['step']}"
            whole = (
                str(job["id"]),
                str(job["array_job_id"]),
                str(job.get("het_job_id")),
                f"{job['id']}.{step['step']}",
            )
            names = (name, job["display_id"], *whole)
            is_meant = not wanted or any(word in names for word in wanted)
            if is_meant and step["ended_at_s"] is None and step["attempt"] == job["attempt"]:
                found.append({**step, "id": name, "job": job})
    return answer["now_s"], found


def print_steps(words: Words, *, text: str = "") -> int:
    """Print the requested steps like squeue --steps."""
    now_s, steps = running_steps([word for word in words.listed("steps") if word])
    users = words.listed("user")
    shown = [step for step in steps if not users or step["job"]["user"] in users or str(step["job"]["uid"]) in users]
    cells = parse_percent(text or words.last("format") or FORMAT, FIELDS)
    for line in format_lines(cells, shown, Look(now_s), header=not words.has("noheader")):
        print(line)
    return 0
