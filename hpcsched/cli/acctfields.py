"""The columns of hacct, by sacct's names, and the rows that a job is: the job itself, its batch step, its other steps.

A job or a step is the JSON object of the API's history. Knows neither tables nor which jobs are asked for. Source:
sacct(1), "Job Accounting Fields".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hpcsched.cli.jobfields import exit_text, memory_of_node
from hpcsched.cli.options import UsageError, nearest, split_list
from hpcsched.cli.output import date_text
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.units import format_time_s

Json = dict[str, Any]


class Row(NamedTuple):
    """A line: a job (`step` None), or one of its steps."""

    job: Json
    step: Json | None


class Column(NamedTuple):
    """A column as it is asked for; `width` 0 is as wide as it needs to be."""

    name: str
    text: Callable[[Row], str]
    right: bool
    width: int = 0


def job_rows(job: Json, *, steps: bool) -> list[Row]:
    """Return the rows of a job: with its `steps`, those of its last attempt, the batch step first."""
    mine = [step for step in job["steps"] if step.get("attempt", job["attempt"]) == job["attempt"]] if steps else []
    mine.sort(key=lambda step: -1 if step["step"] == "batch" else int(step["step"]))
    return [Row(job, None), *(Row(job, step) for step in mine)]


def columns_of(text: str) -> list[Column]:
    """Return the columns that a list of names, each with a width or without, asks for. Raises UsageError."""
    return [_column(word) for word in split_list(text)]


def field_names() -> list[str]:
    """Return the names of all columns."""
    return [column.name for column in _COLUMNS]


def _column(word: str) -> Column:
    name, percent, width = word.partition("%")
    for column in _COLUMNS:
        if column.name.lower() == name.strip().lower():
            if not percent:
                return column
            digits = width.lstrip("-+")
            if not (digits.isascii() and digits.isdigit() and 0 < int(digits[:5]) <= 4096):
                raise UsageError(f"cannot show column {word[:60]!r}: the width must be a number, as {column.name}%20")
            return column._replace(width=int(digits), right=not width.startswith("-"))
    near = nearest(name.lower(), [column.name.lower() for column in _COLUMNS])
    hint = f"did you mean {' or '.join(near)}?" if near else "see hacct --helpformat"
    raise UsageError(f"cannot show column {word[:60]!r}: no such column; {hint}")


# ----- how a row is written


def _id(row: Row) -> str:
    return row.job["display_id"] + (f".{row.step['step']}" if row.step else "")


def _raw_id(row: Row) -> str:
    return str(row.job["id"]) + (f".{row.step['step']}" if row.step else "")


def _state(row: Row) -> str:
    state = str(row.step["state"] if row.step else row.job["state"])
    by_uid = row.job.get("ended_by_uid")
    return f"CANCELLED by {by_uid}" if state == "CANCELLED" and by_uid is not None and not row.step else state


def _exit(row: Row) -> str:
    return exit_text(row.step or row.job)


def _nodes(row: Row) -> list[str]:
    return row.step["nodes"] if row.step else row.job["nodes"]


def _node_list(row: Row) -> str:
    return compress_hostlist(_nodes(row)) or "None assigned"


def _start_s(row: Row) -> float | None:
    return (row.step or row.job)["started_at_s"]


def _end_s(row: Row) -> float | None:
    return (row.step or row.job)["ended_at_s"]


def _elapsed_s(row: Row) -> float:
    if row.step is None:
        return row.job["elapsed_s"]
    start_s, end_s = _start_s(row), _end_s(row)
    if start_s is None:
        return 0.0
    if end_s is None:  # the step still runs: as long as its job, less the time before it
        end_s = (row.job["started_at_s"] or start_s) + row.job["elapsed_s"]
    return max(0.0, end_s - start_s)


def _cpu_s(row: Row, *keys: str) -> float:
    """Return the cpu time of a step, of a job that of its steps."""
    steps = [row.step] if row.step else [one.step for one in job_rows(row.job, steps=True)[1:] if one.step]
    return sum(step[key] or 0.0 for step in steps for key in keys)


def _cpu_text(seconds: float) -> str:
    """Return cpu time as sacct does: ``MM:SS.mmm`` under an hour, else ``H:M:S``."""
    if seconds >= 3600:
        return format_time_s(seconds, full=True)
    minutes, millis = divmod(round(seconds * 1000), 60_000)
    return f"{minutes:02}:{millis // 1000:02}.{millis % 1000:03}"


def _max_rss(row: Row) -> str:
    return f"{row.step['max_rss_kib']}K" if row.step and row.step["max_rss_kib"] else ""


def _of_job(key: str, none: str = "") -> Callable[[Row], str]:
    """Return the writer of a value that a step has of its job."""
    return lambda row: none if row.job[key] in (None, "") else str(row.job[key])


def _only_job(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row.step or row.job[key] in (None, "") else str(row.job[key])


def _alloc_cpus(row: Row) -> str:
    if not row.job["nodes"]:
        return "0"
    if row.step is None:
        return str(row.job["num_cpus"])
    on_nodes = sum(share["cpus"] for share in row.job["shares"] if share["node"] in row.step["nodes"])
    return str(
        on_nodes if row.step["step"] == "batch" else min(on_nodes, row.step["ntasks"] * row.job["cpus_per_task"])
    )


def _name(row: Row) -> str:
    return str(row.step["name"] or row.step["step"]) if row.step else str(row.job["name"])


def _reason(row: Row) -> str:
    return "" if row.step else row.job["reason"] or "None"


def _tres(row: Row) -> str:
    if row.step or not row.job["nodes"]:
        return ""
    job = row.job
    parts = [f"cpu={job['num_cpus']}", f"mem={job['mem_mib']}M", f"node={job['num_nodes']}"]
    shards = job.get("shards", 0)  # of the controller before this one: none
    parts += [f"gres/{name}={count}" for name, count in (("gpu", job["gpus"]), ("shard", shards)) if count]
    return ",".join(parts)


_COLUMNS = (
    Column("Account", _of_job("account"), True),
    Column("AllocCPUS", _alloc_cpus, True),
    Column("AllocTRES", _tres, True),
    Column("Comment", _only_job("comment"), True),
    Column("Elapsed", lambda row: format_time_s(_elapsed_s(row), full=True), True),
    Column("ElapsedRaw", lambda row: str(int(_elapsed_s(row))), True),
    Column("Eligible", lambda row: date_text(row.job["eligible_at_s"], "Unknown"), True),
    Column("End", lambda row: date_text(_end_s(row), "Unknown"), True),
    Column("ExitCode", _exit, True),
    Column("JobID", _id, False),
    Column("JobIDRaw", _raw_id, False),
    Column("JobName", _name, True),
    Column("MaxRSS", _max_rss, True),
    Column("NCPUS", _alloc_cpus, True),
    Column("NNodes", lambda row: str(len(_nodes(row)) or row.job["num_nodes"]), True),
    Column("NodeList", _node_list, True),
    Column("NTasks", lambda row: str(row.step["ntasks"]) if row.step else "", True),
    Column("Partition", _only_job("partition"), True),
    Column("PreemptedBy", lambda row: "" if row.step else str(row.job.get("preempted_by") or ""), True),
    Column("Priority", _only_job("priority"), True),
    Column("QOS", _only_job("qos"), True),
    Column("Reason", _reason, True),
    Column("ReqMem", lambda row: "" if row.step else memory_of_node(row.job), True),
    Column("Reservation", _only_job("reservation"), True),
    Column("Restarts", _only_job("restarts"), True),
    Column("Start", lambda row: date_text(_start_s(row), "Unknown"), True),
    Column("State", _state, True),
    Column("Submit", lambda row: date_text(row.job["submitted_at_s"], "Unknown"), True),
    Column("SubmitLine", _only_job("submit_line"), True),
    Column(
        "Suspended", lambda row: "" if row.step else format_time_s(row.job.get("suspended_s", 0.0), full=True), True
    ),
    Column("SystemCPU", lambda row: _cpu_text(_cpu_s(row, "cpu_system_s")), True),
    Column("Timelimit", lambda row: "" if row.step else format_time_s(row.job["time_limit_s"], full=True), True),
    Column("TotalCPU", lambda row: _cpu_text(_cpu_s(row, "cpu_user_s", "cpu_system_s")), True),
    Column("UID", _only_job("uid"), True),
    Column("User", _only_job("user"), True),
    Column("UserCPU", lambda row: _cpu_text(_cpu_s(row, "cpu_user_s")), True),
    Column("WorkDir", _only_job("work_dir"), True),
)
