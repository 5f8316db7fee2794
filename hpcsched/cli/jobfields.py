"""The columns of a job: each with its name, squeue's letter and header, and how it is written.

A format is either names with commas (``id,name,state,why,eta``) or squeue's (``%.18i %.9P``): a percent sign, a width if
the column shall have one (cut if longer; with a dot before it right-justified), a letter; other text stands for itself.
A job is the JSON object of the API. Knows neither tables nor which jobs are asked for. Source: squeue(1) -o.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hpcsched.cli.options import UsageError, nearest, split_list
from hpcsched.cli.output import clean, date_text, fitted
from hpcsched.cli.states import ENDED_STATES
from hpcsched.model.units import format_mem, format_time_s

Job = dict[str, Any]


class Field(NamedTuple):
    """A column. `text` writes it of a job as seen at a time (Unix seconds)."""

    name: str
    letter: str  # "" if squeue has none for it
    header: str
    text: Callable[[Job, float], str]
    right: bool = False


class Cell(NamedTuple):
    """A place in a format: a column in a width (0: as wide as it is), or, without a column, text that stands for itself."""

    field: Field | None
    literal: str = ""
    width: int = 0
    right: bool = False


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


def memory_of_node(job: Job) -> str:
    """Return the memory on each node."""
    if job["mem_mib"] is None:
        return "0"
    return format_mem(job["mem_mib"] // (max(1, job["num_nodes"]) if job["node_list"] else 1))


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


def _time_left(job: Job) -> str:
    if job["time_limit_s"] is None:
        return "UNLIMITED"
    return format_time_s(max(0, job["time_limit_s"] - job["elapsed_s"]))


def _gres(job: Job) -> str:
    nodes = max(1, job["num_nodes"])
    if job.get("shards"):
        return f"gres/shard:{-(-job['shards'] // nodes)}"
    return f"gres/gpu:{-(-job['gpus'] // nodes)}" if job["gpus"] else "N/A"


def _of(key: str, none: str = "") -> Callable[[Job, float], str]:
    return lambda job, now_s: none if job[key] is None or job[key] == "" else str(job[key])


def _array_text(job: Job) -> str:
    """Return the array's part of an id: a task's index, of a folded line those that it stands for."""
    return job.get("folded") or ("N/A" if job["array_task_id"] is None else str(job["array_task_id"]))


def _id_text(job: Job) -> str:
    return f"{job['array_job_id']}_{job['folded']}" if job.get("folded") else job["display_id"]


# fmt: off
FIELDS = (
    Field("id", "i", "JOBID", lambda job, now_s: _id_text(job), right=True),
    Field("rawid", "A", "JOBID", _of("id"), right=True),
    Field("array", "F", "ARRAY_JOB_ID", lambda job, now_s: str(job["array_job_id"] or job["id"]), right=True),
    Field("task", "K", "ARRAY_TASK_ID", lambda job, now_s: _array_text(job), right=True),
    Field("partition", "P", "PARTITION", _of("partition"), right=True),
    Field("name", "j", "NAME", _of("name"), right=True),
    Field("user", "u", "USER", _of("user"), right=True),
    Field("uid", "U", "UID", _of("uid"), right=True),
    Field("account", "a", "ACCOUNT", _of("account", "(null)")),
    Field("st", "t", "ST", _of("state_short"), right=True),
    Field("state", "T", "STATE", _of("state"), right=True),
    Field("time", "M", "TIME", lambda job, now_s: format_time_s(job["elapsed_s"]), right=True),
    Field("limit", "l", "TIME_LIMIT", lambda job, now_s: format_time_s(job["time_limit_s"]), right=True),
    Field("left", "L", "TIME_LEFT", lambda job, now_s: _time_left(job), right=True),
    Field("nodes", "D", "NODES", _of("num_nodes"), right=True),
    Field("cpus", "C", "CPUS", _of("num_cpus"), right=True),
    Field("tasks", "", "TASKS", _of("num_tasks"), right=True),
    Field("mem", "m", "MIN_MEMORY", lambda job, now_s: memory_of_node(job), right=True),
    Field("gres", "b", "TRES_PER_NODE", lambda job, now_s: _gres(job)),
    Field("gpus", "", "GPUS", _of("gpus"), right=True),
    Field("nodelist", "N", "NODELIST", _of("node_list")),
    Field("where", "R", "NODELIST(REASON)", lambda job, now_s: nodes_or_reason(job)),
    Field("reason", "r", "REASON", lambda job, now_s: reason(job)),
    Field("why", "", "WHY", lambda job, now_s: why(job)),
    Field("eta", "", "ETA", lambda job, now_s: date_text(job["expected_start_s"])),
    Field("start", "S", "START_TIME", lambda job, now_s: date_text(start_s(job))),
    Field("end", "e", "END_TIME", lambda job, now_s: date_text(end_s(job))),
    Field("submitted", "V", "SUBMIT_TIME", lambda job, now_s: date_text(job["submitted_at_s"])),
    Field("exit", "", "EXIT_CODE", lambda job, now_s: exit_text(job) if job["state"] in ENDED_STATES else "N/A"),
    Field("qos", "q", "QOS", _of("qos", "normal")),
    Field("priority", "Q", "PRIORITY", _of("priority", "0"), right=True),
    Field("nice", "y", "NICE", _of("nice"), right=True),
    Field("dependency", "E", "DEPENDENCY", _of("dependency", "(null)")),
    Field("reservation", "v", "RESERVATION", _of("reservation", "(null)")),
    Field("features", "f", "FEATURES", _of("constraint", "(null)")),
    Field("batchhost", "B", "EXEC_HOST", lambda job, now_s: job["nodes"][0] if job["nodes"] else "n/a"),
    Field("comment", "k", "COMMENT", _of("comment", "(null)")),
    Field("command", "o", "COMMAND", _of("command", "(null)")),
    Field("dir", "Z", "WORK_DIR", _of("work_dir", "(null)")),
    Field("stdout", "", "STDOUT", _of("stdout", "(null)")),
    Field("stderr", "", "STDERR", _of("stderr", "(null)")),
    Field("restarts", "", "RESTARTS", _of("restarts"), right=True),
)
# fmt: on


def parse_format(text: str) -> list[Cell]:
    """Return the places of a format. Raises UsageError for a column that there is not."""
    return _parse_percent(text) if "%" in text else [_named(word) for word in split_list(text)]


def _named(word: str) -> Cell:
    for field in FIELDS:
        if field.name == word.lower():
            return Cell(field, right=field.right)
    names = [field.name for field in FIELDS]
    hint = f"did you mean {' or '.join(near)}?" if (near := nearest(word.lower(), names)) else ", ".join(names)
    raise UsageError(f"cannot show column {word[:60]!r}: no such column; {hint}")


def _parse_percent(text: str) -> list[Cell]:
    cells = []
    at = 0
    while at < len(text):
        percent = text.find("%", at)
        if percent < 0:
            cells.append(Cell(None, text[at:]))
            break
        if percent > at:
            cells.append(Cell(None, text[at:percent]))
        cell, at = _percent_cell(text, percent + 1)
        cells.append(cell)
    return cells


def _percent_cell(text: str, at: int) -> tuple[Cell, int]:
    """Return the place whose percent sign stands before `at`, and where it ends."""
    if text.startswith("%", at):
        return Cell(None, "%"), at + 1
    right = text.startswith(".", at)
    start = at + right
    end = start
    while end < len(text) and text[end].isascii() and text[end].isdigit():
        end += 1
    letter = text[end : end + 1]
    for field in FIELDS:
        if letter and field.letter == letter:
            return Cell(field, "", int(text[start:end][:4] or 0), right), end + 1
    letters = " ".join(sorted(field.letter for field in FIELDS if field.letter))
    raise UsageError(f"cannot show column {'%' + letter!r}: no such column; there are {letters}")


def cell_text(cell: Cell, job: Job, now_s: float) -> str:
    """Return what stands in `cell` for `job`, in its width."""
    if cell.field is None:
        return cell.literal
    return _in_width(cell, clean(cell.field.text(job, now_s)))


def header_text(cell: Cell) -> str:
    """Return what stands in `cell` in the line of headers."""
    return cell.literal if cell.field is None else _in_width(cell, cell.field.header)


def _in_width(cell: Cell, text: str) -> str:
    return fitted(text, cell.width, right=cell.right) if cell.width else text


def format_lines(cells: Sequence[Cell], jobs: Sequence[Job], now_s: float, *, header: bool) -> list[str]:
    """Return the lines of a format with widths, as squeue prints them."""
    lines = ["".join(map(header_text, cells))] if header else []
    return lines + ["".join([cell_text(cell, job, now_s) for cell in cells]) for job in jobs]


def fold_arrays(jobs: Sequence[Job]) -> list[Job]:
    """Return `jobs` with the waiting tasks of an array as one: ``10_[3-9%2]``. Those that have run before stay alone."""
    folded: list[Job] = []
    first: dict[tuple[Any, ...], tuple[int, list[int]]] = {}
    for job in jobs:
        if not is_waiting(job) or job["array_task_id"] is None or job["restarts"] or job["attempt"]:
            folded.append(job)
            continue
        key = (job["array_job_id"], job["partition"], job["hold"], job["nice"], job["time_limit_s"])
        if key not in first:
            first[key] = (len(folded), [])
            folded.append(job)
        first[key][1].append(job["array_task_id"])
    for at, indices in first.values():
        limit = folded[at].get("array_limit")
        text = f"[{index_ranges(indices)}{f'%{limit}' if limit else ''}]"
        if len(indices) > 1:
            folded[at] = folded[at] | {"folded": text}
    return folded


def index_ranges(indices: Sequence[int]) -> str:
    """Return indices as ``3-9,12``."""
    spans: list[list[int]] = []
    for index in sorted(indices):
        if spans and spans[-1][1] == index - 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
