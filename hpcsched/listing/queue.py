"""The queue as lines of text: its columns, and in which order.

What squeue and hqueue print.

Rendered by the controller, so that only the text has to travel and a row that has not changed is not written again. A job is
the JSON object of the API. Source: squeue(1), -o, -O, --sort, --array, --long.
"""

from __future__ import annotations

import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from operator import itemgetter

from hpcsched.errors import UsageError
from hpcsched.listing import formats
from hpcsched.listing.formats import Cell, FormatField, Look, cell_text, format_lines, header_text
from hpcsched.listing.jobs import (
    ACTIVE_STATES,
    ENDED_STATES,
    Job,
    array_text,
    checkpoint_text,
    cpu_use_text,
    end_s,
    exit_text,
    goodput_text,
    gpu_use_text,
    gres_of_node,
    id_text,
    is_waiting,
    loss_text,
    memory_asked,
    memory_use_text,
    nodes_or_reason,
    rate_text,
    reason,
    shown_state,
    start_s,
    step_text,
    time_left,
    training,
    tres_text,
    why,
)
from hpcsched.listing.text import DIM, GREEN, RED, YELLOW, columns
from hpcsched.model.units import format_mem, format_time_s

TYPE_CHECKING = False  # type checkers know the name; typing's own costs a command a tenth of its start
if TYPE_CHECKING:
    from typing import Any

# ----- the columns: each with its own name, squeue's letter, header and long names, and how it is written


_MAX_PRIORITY = 2**32 - 1


def _of(key: str, none: str = "") -> Callable[[Job, Look], str]:
    def text(job: Job, look: Look) -> str:
        value = job.get(key)
        return none if value is None or value == "" else str(value)

    return text


def _always(text: str) -> Callable[[Job, Look], str]:
    """Return the writer of what is the same for every job here."""
    return lambda job, look: text


def _listed(key: str) -> Callable[[Job, Look], str]:
    return lambda job, look: ",".join(job.get(key) or ()) or ""


def _group(job: Job) -> str:
    import grp  # these two only where a group is asked for
    import pwd

    try:
        return grp.getgrgid(pwd.getpwnam(job["user"]).pw_gid).gr_name
    except KeyError:
        return str(job["uid"])


def _gid(job: Job) -> str:
    import pwd

    try:
        return str(pwd.getpwnam(job["user"]).pw_gid)
    except KeyError:
        return str(job["uid"])


def _licenses(job: Job) -> str:
    return ",".join(f"{name}:{count}" for name, count in (job.get("licenses") or {}).items()) or "(null)"


def _share(job: Job) -> str:
    return f"{(job['priority'] or 0) / _MAX_PRIORITY:.14f}"


def _pending_s(job: Job, look: Look) -> str:
    until_s = job["started_at_s"] or job["ended_at_s"] or look.now_s
    return str(int(max(0, until_s - job["submitted_at_s"])))


def _soon(job: Job) -> str:
    """Return when a waiting job is expected to start, to the minute.

    With the date, so that the text does not depend on today.
    """
    at_s = job["expected_start_s"] if is_waiting(job) else None
    return "-" if at_s is None else time.strftime("%m-%dT%H:%M", time.localtime(at_s))


# fmt: off
FIELDS = (
    FormatField("id", "i", "JOBID", lambda job, look: id_text(job), True, ("jobarrayid",)),
    FormatField("rawid", "A", "JOBID", _of("id"), True, ("jobid",)),
    FormatField("array", "F", "ARRAY_JOB_ID", lambda job, look: str(job["array_job_id"] or job["id"]), True, ("arrayjobid",)),
    FormatField("task", "K", "ARRAY_TASK_ID", lambda job, look: array_text(job), True, ("arraytaskid",)),
    FormatField("hetjob", "", "HET_JOB_ID", _of("het_job_id", "N/A"), True, ("hetjobid",)),
    FormatField("hetoffset", "", "HET_JOB_OFFSET", _of("het_offset", "N/A"), True, ("hetjoboffset",)),
    FormatField("hetids", "", "HET_JOB_ID_SET", _of("het_job_ids", "N/A"), False, ("hetjobidset",)),
    FormatField("partition", "P", "PARTITION", _of("partition"), True, ("partition",)),
    FormatField("name", "j", "NAME", _of("name"), True, ("name",)),
    FormatField("user", "u", "USER", _of("user"), True, ("username",)),
    FormatField("uid", "U", "UID", _of("uid"), True, ("userid",)),
    FormatField("group", "g", "GROUP", lambda job, look: _group(job), False, ("groupname",)),
    FormatField("gid", "G", "GROUP", lambda job, look: _gid(job), True, ("groupid",)),
    FormatField("account", "a", "ACCOUNT", _of("account", "(null)"), False, ("account",)),
    FormatField("st", "t", "ST", _of("state_short"), True, ("statecompact",)),
    FormatField("state", "T", "STATE", lambda job, look: shown_state(job), True, ("state",)),
    FormatField("time", "M", "TIME", lambda job, look: format_time_s(job["elapsed_s"]), True, ("timeused",)),
    FormatField("limit", "l", "TIME_LIMIT", lambda job, look: format_time_s(job["time_limit_s"]), True, ("timelimit",)),
    FormatField("left", "L", "TIME_LEFT", lambda job, look: time_left(job), True, ("timeleft",)),
    FormatField("nodes", "D", "NODES", _of("num_nodes"), True, ("numnodes",)),
    FormatField("cpus", "C", "CPUS", _of("num_cpus"), True, ("numcpus",)),
    FormatField("tasks", "", "TASKS", _of("num_tasks"), True, ("numtasks",)),
    FormatField("cpuspertask", "", "CPUS_PER_TASK", _of("cpus_per_task"), True, ("cpus-per-task",)),
    FormatField("mincpus", "c", "MIN_CPUS", _of("mincpus", "1"), True, ("mincpus",)),
    FormatField("mem", "m", "MIN_MEMORY", lambda job, look: memory_asked(job), True, ("minmemory",)),
    FormatField("tmp", "d", "MIN_TMP_DISK", lambda job, look: format_mem(job.get("tmp_mib") or 0), True, ("mintmpdisk",)),
    FormatField("gres", "b", "TRES_PER_NODE", lambda job, look: gres_of_node(job), False, ("tres-per-node", "gres")),
    FormatField("gpus", "", "GPUS", _of("gpus"), True),
    FormatField("tres", "", "TRES_ALLOC", lambda job, look: tres_text(job, billing=True), False, ("tres-alloc", "tres")),
    FormatField("nodelist", "N", "NODELIST", _of("node_list"), False, ("nodelist", "nodes")),
    FormatField("where", "R", "NODELIST(REASON)", lambda job, look: nodes_or_reason(job), False, ("reasonlist",)),
    FormatField("reason", "r", "REASON", lambda job, look: reason(job), False, ("reason",)),
    FormatField("why", "", "WHY", lambda job, look: why(job)),
    FormatField("eta", "", "ETA", lambda job, look: look.date(job["expected_start_s"])),
    FormatField("within", "", "LIMIT", lambda job, look: format_time_s(job["time_limit_s"]), True),
    FormatField("starts", "", "ETA", lambda job, look: _soon(job)),
    FormatField("start", "S", "START_TIME", lambda job, look: look.date(start_s(job)), False, ("starttime",)),
    FormatField("end", "e", "END_TIME", lambda job, look: look.date(end_s(job)), False, ("endtime",)),
    FormatField("submitted", "V", "SUBMIT_TIME", lambda job, look: look.date(job["submitted_at_s"]), False, ("submittime",)),
    FormatField("eligible", "", "ELIGIBLE_TIME", lambda job, look: look.date(job["eligible_at_s"]), False,
          ("eligibletime", "accruetime")),
    FormatField("deadline", "", "DEADLINE", lambda job, look: look.date(job.get("deadline_at_s")), False, ("deadline",)),
    FormatField("waited", "", "PENDING_TIME", _pending_s, True, ("pendingtime",)),
    FormatField("exit", "", "EXIT_CODE", lambda job, look: exit_text(job) if job["state"] in ENDED_STATES else "N/A", False,
          ("exit-code", "exitcode")),
    FormatField("qos", "q", "QOS", _of("qos", "normal"), False, ("qos",)),
    FormatField("priority", "Q", "PRIORITY", _of("priority", "0"), True, ("prioritylong",)),
    FormatField("share", "p", "PRIORITY", lambda job, look: _share(job), True, ("priority",)),
    FormatField("nice", "y", "NICE", _of("nice"), True, ("nice",)),
    FormatField("dependency", "E", "DEPENDENCY", _of("dependency", "(null)"), False, ("dependency",)),
    FormatField("reservation", "v", "RESERVATION", _of("reservation", "(null)"), False, ("reservation",)),
    FormatField("features", "f", "FEATURES", _of("constraint", "(null)"), False, ("feature", "features")),
    FormatField("prefer", "", "PREFER", _of("prefer", "(null)"), False, ("prefer",)),
    FormatField("licenses", "W", "LICENSES", lambda job, look: _licenses(job), False, ("licenses",)),
    FormatField("asked", "n", "REQ_NODES", _listed("asked_nodes"), False, ("reqnodes",)),
    FormatField("excluded", "x", "EXC_NODES", _listed("excluded_nodes"), False, ("excnodes",)),
    FormatField("scheduled", "Y", "SCHEDNODES", _always("(null)"), False, ("schednodes",)),
    FormatField("batchhost", "B", "EXEC_HOST", lambda job, look: job["nodes"][0] if job["nodes"] else "n/a", False,
          ("batchhost",)),
    FormatField("submithost", "", "ALLOC_SID", _of("submit_host", "N/A"), False, ("allocsid", "allocnodes")),
    FormatField("shared", "h", "OVER_SUBSCRIBE", lambda job, look: "NO" if job["exclusive"] else "OK", False,
          ("oversubscribe", "shared")),
    FormatField("contiguous", "O", "CONTIGUOUS", lambda job, look: str(int(bool(job.get("contiguous")))), True, ("contiguous",)),
    FormatField("sockets", "H", "SOCKETS_PER_NODE", _always("*"), True, ("sockets",)),
    FormatField("cores", "I", "CORES_PER_SOCKET", _always("*"), True, ("cores",)),
    FormatField("threads", "J", "THREADS_PER_CORE", _always("*"), True, ("threads",)),
    FormatField("sct", "z", "S:C:T", _always("*:*:*"), True, ("sct",)),
    FormatField("corespec", "X", "CORE_SPEC", _always("N/A"), True, ("corespec",)),
    FormatField("wckey", "w", "WCKEY", _always("(null)"), False, ("wckey",)),
    FormatField("comment", "k", "COMMENT", _of("comment", "(null)"), False, ("comment",)),
    FormatField("command", "o", "COMMAND", _of("command", "(null)"), False, ("command",)),
    FormatField("dir", "Z", "WORK_DIR", _of("work_dir", "(null)"), False, ("workdir",)),
    FormatField("stdin", "", "STDIN", _of("stdin", "/dev/null"), False, ("stdin",)),
    FormatField("stdout", "", "STDOUT", _of("stdout", "(null)"), False, ("stdout",)),
    FormatField("stderr", "", "STDERR", _of("stderr", "(null)"), False, ("stderr",)),
    FormatField("step", "", "STEP", lambda job, look: step_text(job), True),
    FormatField("loss", "", "LOSS", lambda job, look: loss_text(job), True),
    FormatField("rate", "", "SAMPLES/S", lambda job, look: rate_text(job), True),
    FormatField("trained", "", "TRAINED", lambda job, look: look.date(training(job).get("ends_at_s"))),
    FormatField("goodput", "", "GOODPUT", lambda job, look: goodput_text(job), True),
    FormatField("checkpoint", "", "CHECKPOINT", lambda job, look: checkpoint_text(job, look.now_s)),
    FormatField("cpuuse", "", "CPU%", lambda job, look: cpu_use_text(job), True),
    FormatField("memuse", "", "MEMORY", lambda job, look: memory_use_text(job), True),
    FormatField("gpuuse", "", "GPU%", lambda job, look: gpu_use_text(job), True),
    FormatField("restarts", "", "RESTARTS", _of("restarts"), True, ("restartcnt",)),
    FormatField("requeue", "", "REQUEUE", lambda job, look: "1" if job["requeue"] else "0", True, ("requeue",)),
)
# fmt: on


def _only_long() -> tuple[FormatField, ...]:
    """Return columns of Slurm's --Format that are always empty here.

    Tools that show all columns ask for them.
    """
    nothing = {
        "N/A": "admin_comment system_comment associd batchflag boardsperblock burstbuffer burstbufferstate cluster "
        "clusterfeature container delayboot derivedec lastschedeval maxcpus maxnodes mcslabel mem-per-tres mintime network "
        "ntperboard ntpercore ntpernode ntpersocket origin originraw preempttime profile reboot reqswitch resizetime resvport "
        "selectjobinfo siblingsactive siblingsactiveraw siblingsviable siblingsviableraw sperboard statereason tres-bind "
        "tres-freq tres-per-job tres-per-socket tres-per-step tres-per-task cpus-per-tres wait4switch"
    }
    return tuple(
        FormatField("", "", name.upper().replace("-", "_"), _always(text), False, (name,))
        for text, names in nothing.items()
        for name in names.split()
    )


def parse_format(text: str) -> list[Cell]:
    """Return the places of a format, of names or of percent signs.

    Raises UsageError for an unknown column.
    """
    return formats.parse_percent(text, FIELDS) if "%" in text else formats.parse_names(text, FIELDS)


def parse_long_format(text: str) -> list[Cell]:
    """Return the places of a format as -O takes it. Raises UsageError."""
    return formats.parse_long(text, (*FIELDS, *_only_long()))


# ----- which jobs, in which order, and how wide


# In the order in which Slurm numbers them, by which it sorts.
_STATE_ORDER = (
    "PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL",
    "DEADLINE", "OUT_OF_MEMORY", "CONFIGURING", "COMPLETING",
)  # fmt: skip
_NUMBERS = {
    "rawid": "id", "time": "elapsed_s", "limit": "time_limit_s", "nodes": "num_nodes", "cpus": "num_cpus", "mem": "mem_mib",
    "priority": "priority", "share": "priority", "nice": "nice", "tasks": "num_tasks", "uid": "uid", "gpus": "gpus",
    "submitted": "submitted_at_s",
}  # fmt: skip
_FAR = float("inf")
MAX_CELLS = 500  # of a format: the controller writes them for other users, too
# How a table becomes narrower: a column is cut to so many characters, or (0) left out.
NARROWER = (
    ("name", 16), ("partition", 0), ("name", 8), ("nodes", 0), ("cpus", 0), ("where", 16), ("starts", 0), ("within", 0),
    ("where", 8),
)  # fmt: skip
# Those that run, that wait, that have ended: an order, not a column.
_PHASE = FormatField("phase", "", "", lambda job, look: str(_phase(job)))


class Listing(
    namedtuple(
        "Listing",
        "cells order array header dated fit colour fold width",
        defaults=(False, True, False, False, False, False, 0),
    )
):
    """How the jobs shall be written.

    `order`: fields to sort by, with whether each is turned around.
    """

    __slots__ = ()

    cells: Sequence[Cell]
    order: Sequence[tuple[FormatField, bool]]
    array: bool  # each waiting task of an array on its line
    header: bool
    dated: bool  # with a line that says when
    fit: bool  # a table: columns as wide as they need to be
    fold: bool  # the ended tasks of an array are on one line, too
    colour: bool  # a table's lines in the colour of the job's state
    width: int  # a table leaves columns out to be no wider, 0: it may be as wide as it is


def make_listing(text: str, *, long: bool, order: str, fit: bool = False, width: int = 0, **layout: bool) -> Listing:
    """Return the listing with the format `text`. Raises UsageError.

    The format has long names, or percent signs, or names.
    """
    cells = parse_long_format(text) if long else parse_format(text)
    if len(cells) > MAX_CELLS:
        raise UsageError(f"cannot show {len(cells)} columns and texts between them: the most is {MAX_CELLS}")
    return Listing(cells, parse_order(order), fit=fit and not long and "%" not in text, width=width, **layout)


def parse_order(text: str) -> list[tuple[FormatField, bool]]:
    """Return the fields of ``P,t,-p``: squeue's letters, or names. Raises UsageError."""
    keys = []
    for word in filter(None, text.split(",")):
        name = word.lstrip("+-")
        field = next((known for known in (*FIELDS, _PHASE) if name and name in (known.letter, known.name)), None)
        if field is None:
            raise UsageError(
                f"Invalid sort specification: {word[:60]}; write squeue's letters or columns: -S name or -S -time"
            )
        keys.append((field, word.startswith("-")))
    return keys


class QueueRow(namedtuple("QueueRow", "place ranks cells colour")):
    """A job's line, and its keys for sorting.

    `ranks` has one key for each field of the listing's order, then `place`.
    """

    __slots__ = ()

    place: tuple[int, int]
    ranks: Sequence[object]
    cells: Sequence[str]  # of a table; else one, the whole line
    colour: str


def row_of(job: Job, listing: Listing, look: Look, *, ranked: bool = True) -> QueueRow:
    """Return the row of `job`, with its `ranks` if it is `ranked`.

    An array's waiting tasks may be one job (``folded``).
    """
    place = (job["array_job_id"] or job["id"], job["array_task_id"] or 0)
    cells = [cell_text(cell, job, look) for cell in listing.cells]
    colour = _colour(job["state"]) if listing.colour else ""
    return QueueRow(
        place, ranks_of(job, listing, look) if ranked else (), cells if listing.fit else ("".join(cells),), colour
    )


def ranks_of(job: Job, listing: Listing, look: Look) -> list[object]:
    """Return by what the row of `job` is sorted."""
    return [_rank(field, job, look) for field, _ in listing.order]


def _rank_at(at: int) -> Callable[[QueueRow], Any]:
    return lambda row: row[1][at]


def queue_text(rows: Sequence[QueueRow], listing: Listing, look: Look) -> str:
    """Return `rows` as text with headers, in the order of `listing`, then by number."""
    made = sorted(rows, key=itemgetter(0))
    for at, (_, reverse) in reversed(list(enumerate(listing.order))):
        made.sort(key=_rank_at(at), reverse=reverse)
    if listing.fit:
        return _fitted(made, listing)
    lines = [time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(look.now_s))] if listing.dated else []
    lines += format_lines(listing.cells, (), look, header=listing.header)
    lines += [row[2][0] for row in made]
    return "".join([f"{line}\n" for line in lines])


def _fitted(rows: Sequence[QueueRow], listing: Listing) -> str:
    """Return `rows` in columns as wide as their contents, within the width of `listing`."""
    headers: Sequence[str] = [header_text(cell) for cell in listing.cells] if listing.header else []
    right: Sequence[bool] = [cell.right for cell in listing.cells]
    colours = [row.colour for row in rows] if listing.colour else ()
    cells: Sequence[Sequence[str]] = [row[2] for row in rows]
    if listing.width and rows:
        names = [cell.field.name for cell in listing.cells if cell.field is not None]
        headers, cells, right = _narrowed(names, headers, cells, right, listing.width)
    return columns(headers, cells, right=[at for at, is_right in enumerate(right) if is_right], colours=colours)


def _narrowed(
    names: Sequence[str], headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], width: int
) -> tuple[Sequence[str], Sequence[Sequence[str]], Sequence[bool]]:
    """Return headers, rows and sides of a table that is at most `width` wide.

    It is narrowed step by step.

    What is cut ends with a ``+``.
    """
    lines = [headers, *rows] if headers else list(rows)
    texts = {name: list(column) for name, column in zip(names, zip(*lines, strict=True), strict=True)}
    widths = {name: max(map(len, column)) for name, column in texts.items()}
    for name, least in NARROWER:
        over = sum(widths.values()) + len(widths) - 1 - width
        if over <= 0:
            break
        if name in texts and least:
            widths[name] = min(widths[name], max(least, widths[name] - over))
            most = widths[name]
            texts[name] = [text if len(text) <= most else text[: most - 1] + "+" for text in texts[name]]
        elif name in texts:
            del texts[name], widths[name]
    first, *others = zip(*texts.values(), strict=True)
    shown = [is_right for name, is_right in zip(names, right, strict=True) if name in texts]
    return (first, others, shown) if headers else ((), [first, *others], shown)


def _phase(job: Job) -> int:
    return 0 if job["state"] in ACTIVE_STATES else 2 if job["state"] in ENDED_STATES else 1


def _colour(state: str) -> str:
    match state:
        case "RUNNING" | "COMPLETING":
            return GREEN
        case "PENDING" | "CONFIGURING" | "SUSPENDED":
            return YELLOW
        case "COMPLETED" | "CANCELLED":
            return DIM
        case _:
            return RED


def _rank(field: FormatField, job: Job, look: Look) -> object:
    match field.name:
        case "id":
            return (job["array_job_id"] or job["id"], job["array_task_id"] or 0)
        case "phase":
            return _phase(job)
        case "st" | "state":
            return _STATE_ORDER.index(job["state"])
        case "start" | "eta":
            return _known(start_s(job))
        case "end":
            return _known(end_s(job))
        case "left":
            return _known(None if job["time_limit_s"] is None else job["time_limit_s"] - job["elapsed_s"])
        case "priority" | "share":
            return job["priority"] or 0
        case name if name in _NUMBERS:
            return _known(job[_NUMBERS[name]])
        case _:
            return cell_text(Cell(field), job, look)


def _known(value: float | None) -> float:
    return _FAR if value is None else value
