"""hacct, sacct and seff: jobs and steps from the history, with end, duration and usage.

The grammar is sacct's. Columns are as wide as their content unless a width is given (``State%20``, ``%-20`` aligns left);
--parsable2 is for programs.
"""

from __future__ import annotations

import grp
import os
import pwd
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Sequence

from hpcsched import client
from hpcsched.cli.output import print_json, run_command
from hpcsched.cli.slurm import own_cluster, run_face
from hpcsched.cli.slurm.records import print_accounting
from hpcsched.client import Json
from hpcsched.commands.options import (
    ELSEWHERE,
    FAILED,
    HELP,
    INVALID_JOB,
    VERSION,
    Command,
    Face,
    Option,
    UsageError,
    Words,
    nearest,
    split_list,
    with_names,
)
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.listing import queue
from hpcsched.listing.efficiency import advice, cpu_part, mem_part, part_text, time_part
from hpcsched.listing.formats import Look
from hpcsched.listing.jobs import (
    ENDED_STATES,
    exit_text,
    goodput_text,
    index_ranges,
    loss_text,
    memory_in_all,
    parse_states,
    rate_text,
    step_text,
    steps_per_kwh,
)
from hpcsched.listing.text import clean, columns, date_text, fitted, sized
from hpcsched.model.dates import parse_when
from hpcsched.model.hostlist import compress_hostlist, expand_hostlist
from hpcsched.model.job import exit_words
from hpcsched.model.units import format_mem, format_time_s

DEFAULT_FIELDS = "JobID,JobName,Partition,Account,AllocCPUS,State,ExitCode"
OUR_FIELDS = f"{DEFAULT_FIELDS},Start,End,Elapsed,Meaning"
EFFICIENCY = "JobID,JobName,State,Elapsed,TimeEff,CPUEff,MemEff,Advice"
ENERGY = "JobID,JobName,User,State,Elapsed,EnergyWh,EnergySource,EnergyCost,EnergyCO2"
OF_ENERGY = (
    "consumedenergy", "consumedenergyraw", "energywh", "energysource", "energycost", "energyco2", "trainstepsperkwh"
)  # fmt: skip
DAY_S = 86_400

COMMAND = Command(
    "hacct",
    ("[OPTIONS]",),
    "Show jobs and their steps from the history: the jobs named with --jobs, or yours of the last day.",
    (
        Option("accounts", "A", "LIST", "show jobs of these accounts", aliases=("account",)),
        Option("allocations", "X", help="show jobs without their steps"),
        Option("allusers", "a", help="show the jobs of all users"),
        Option("delimiter", "", "TEXT", "separate columns with TEXT instead of |, with --parsable or --parsable2"),
        Option("eff", help="show how much of its time, CPUs and memory each job used, and what to request next time"),
        Option("energy", help="show the energy that each job caused, its source, price and CO2"),
        Option("endtime", "E", "TIME", "show jobs submitted before TIME: now, 16:00, 2027-01-20T12:34"),
        Option("format", "o", "LIST", "show these columns, optionally with widths: JobID,State%20,NodeList"),
        Option("helpformat", "e", help="list the columns"),
        Option("jobs", "j", "LIST", "show these jobs: 12, 10_3, 10_[1-3], 'last'"),
        Option("json", help="print jobs and steps as JSON, version 1"),
        Option("name", "", "LIST", "show jobs with these names"),
        Option("nodelist", "N", "HOSTS", "show jobs that ran on some of these nodes: n[1-3],m7"),
        Option("noheader", "n", help="do not print headers"),
        Option("parsable", "p", help="end each column with |", aliases=("parseable",)),
        Option("parsable2", "P", help="separate columns with |", aliases=("parseable2",)),
        Option("partition", "r", "LIST", "show jobs in these partitions"),
        Option("qos", "q", "LIST", "show jobs with these QOS"),
        Option(
            "starttime", "S", "TIME", "show jobs that had not ended by TIME: now-2days, 2027-01-20; default: now-1day"
        ),
        Option("state", "s", "LIST", "show jobs in these states: COMPLETED,FAILED or CD,F"),
        Option("units", "", "UNIT", "print memory sizes in K, M, G or T"),
        Option("user", "u", "LIST", "show jobs of these users", aliases=("uid",)),
        HELP,
        VERSION,
    ),
)


class HistoryStyle(namedtuple("HistoryStyle", "fields columns fixed since_s everybody print_json jobs")):
    """The differences between hacct and sacct."""

    __slots__ = ()

    fields: str  # the default columns
    columns: Callable[[], Sequence[HistoryColumn]]  # other columns than those of hacct, if any
    fixed: bool  # columns have the widths of sacct, not of their content
    since_s: Callable[[float], float]  # the start of the default period
    everybody: bool  # without a user, show the jobs of all users
    print_json: Callable[[Json], object]
    jobs: Callable[[list[Json], Words], list[Json]]  # the jobs found, as they are shown


def _with_names(jobs: list[Json], words: Words) -> list[Json]:
    """Return the jobs with the names of the accounts that cancelled them."""
    return [{**job, "ended_by": _ended_by(job)} for job in jobs]


def _ended_by(job: Json) -> str | None:
    uid = job.get("ended_by_uid")
    if uid is None or uid == job["uid"]:
        return None if uid is None else str(job["user"])
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


NATIVE = HistoryStyle(
    fields=OUR_FIELDS,
    columns=tuple,
    fixed=False,
    since_s=lambda now_s: now_s - DAY_S,
    everybody=False,
    print_json=print_json,
    jobs=_with_names,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(COMMAND, lambda words: _work(words, NATIVE), argv)


def _work(words: Words, style: HistoryStyle) -> int:
    if words.operands:
        raise UsageError(f"cannot understand {words.operands[0][:60]!r}: to see one job write -j JOB")
    if words.has("helpformat"):
        sys.stdout.write("\n".join(field_names(style.columns())) + "\n")
        return 0
    fields = EFFICIENCY if words.has("eff") else ENERGY if words.has("energy") else style.fields
    shown = columns_of(",".join(words.given.get("format", [fields])), style.columns())
    if style.fixed:
        shown = [column if column.width else column._replace(width=column.slurms) for column in shown]
    shown = _in_units(shown, words.last("units"))
    needs_energy = any(column.name.lower() in OF_ENERGY for column in shown)
    answer = _ask(words, time.time(), style, energy=1 if needs_energy else None)
    answer["jobs"] = style.jobs(answer["jobs"], words)
    if words.has("json"):
        style.print_json(answer)
        return 0
    rows = [row for job in answer["jobs"] for row in job_rows(job, steps=_wants_steps(words))]
    rows = _of_steps(rows, words.listed("jobs"))
    header = not words.has("noheader")
    if words.has("parsable") or words.has("parsable2"):
        sys.stdout.write(_parsable(shown, rows, words, header))
    else:
        sys.stdout.write(_table(shown, rows, header, style))
    return 0


def _of_steps(rows: list[HistoryRow], references: Sequence[str]) -> list[HistoryRow]:
    """Return only the rows of the named steps, if steps are named: ``12.0``."""
    jobs = {reference for reference in references if "." not in reference}
    named = {tuple(reference.split(".", 1)) for reference in references if "." in reference}
    if not named or jobs:
        return rows
    return [
        row for row in rows if row.step and (_names(row.job) & {job for job, step in named if step == row.step["step"]})
    ]


def _names(job: Json) -> set[str]:
    return {str(job["id"]), job["display_id"]}


def _wants_steps(words: Words) -> bool:
    return not words.has("allocations") and (words.has("format") or not (words.has("eff") or words.has("energy")))


_SIZES = ("MaxRSS", "AveRSS", "ReqMem", "AveDiskRead", "AveDiskWrite", "MaxDiskRead", "MaxDiskWrite")
_UNITS = "KMGTP"


def _in_units(shown: Sequence[HistoryColumn], unit: str) -> list[HistoryColumn]:
    """Return the columns with memory sizes in `unit`; "" leaves them unchanged."""
    if not unit:
        return list(shown)
    letter = unit[:1].upper()
    if letter not in _UNITS or len(unit) > 1:
        raise UsageError(f"cannot write sizes in {unit[:20]!r}: the units are {', '.join(_UNITS)}")
    return [
        column._replace(text=_in_unit(column.text, letter)) if column.name in _SIZES else column for column in shown
    ]


def _in_unit(text: Callable[[HistoryRow], str], letter: str) -> Callable[[HistoryRow], str]:
    return lambda row: _converted(text(row), letter)


def _converted(size: str, letter: str) -> str:
    if not size or size[-1] not in _UNITS:
        return size
    kib = float(size[:-1]) * 1024 ** _UNITS.index(size[-1])
    size_in = kib / 1024 ** _UNITS.index(letter)
    return (f"{size_in:.0f}" if size_in == int(size_in) else f"{size_in:.2f}") + letter


def _ask(words: Words, now_s: float, style: HistoryStyle, *, energy: int | None) -> Json:
    """Return the API's answer with the requested jobs, in the order of their ids."""
    references = words.listed("jobs")
    wanted = [_known(reference) for reference in references]
    named = bool(references) or words.has("allusers") or words.has("user") or style.everybody
    since_s = None if references else style.since_s(now_s)
    if words.has("starttime"):
        since_s = parse_when(words.last("starttime"), now_s, past=True)
    answer = client.history(
        id=",".join(sorted({reference.partition("_")[0].partition("+")[0] for reference in wanted})),
        user=",".join(map(_user_name, words.listed("user")) if named else [client.my_name()]),
        state=",".join(parse_states(words.listed("state"))),
        name=",".join(words.listed("name")),
        energy=energy,
        start_s=since_s,
        end_s=parse_when(words.last("endtime"), now_s, past=True) if words.has("endtime") else None,
    )
    jobs = [job for job in answer["jobs"] if not wanted or any(_is_meant(job, reference) for reference in wanted)]
    return {**answer, "jobs": sorted(_filtered(jobs, words), key=lambda job: job["id"])}


def _user_name(word: str) -> str:
    """Return the name of the account; `text` may be a uid."""
    if not word.isdigit():
        return word
    try:
        return pwd.getpwuid(int(word)).pw_name
    except KeyError:
        return word


def _filtered(jobs: list[Json], words: Words) -> list[Json]:
    """Return the jobs with one of the requested accounts, partitions, QOS and nodes."""
    for option, key in (("accounts", "account"), ("partition", "partition"), ("qos", "qos")):
        if wanted := words.listed(option):
            jobs = [job for job in jobs if not set(str(job[key]).split(",")).isdisjoint(wanted)]
    if words.has("nodelist"):
        nodes = set(expand_hostlist(",".join(words.given["nodelist"])))
        jobs = [job for job in jobs if not nodes.isdisjoint(job["nodes"])]
    return jobs


def _known(reference: str) -> str:
    """Return the reference as ``12``, ``10_3``, ``10_[1-3]`` or ``12+1``.

    The controller resolves a name or 'last'.
    """
    number = reference.split(".")[0].removesuffix("+0")
    if number.partition("_")[0].partition("+")[0].isdigit():
        return number
    jobs = client.call("GET", client.query("/v1/jobs", id=reference))["jobs"]
    return str(jobs[0]["array_job_id"] or jobs[0].get("het_job_id") or jobs[0]["id"])


def _is_meant(job: Json, reference: str) -> bool:
    number, underscore, tasks = reference.partition("_")
    if not underscore:
        return number in (*_names(job), str(job["array_job_id"]), str(job.get("het_job_id")))
    index = job["array_task_id"]
    return str(job["array_job_id"]) == number and index is not None and _is_among(index, tasks.strip("[]"))


def _is_among(index: int, ranges: str) -> bool:
    for part in ranges.partition("%")[0].split(","):
        low, _, high = part.partition("-")
        if low.isdigit() and int(low) <= index <= int(high if high.isdigit() else low):
            return True
    return False


def _parsable(shown: Sequence[HistoryColumn], rows: Sequence[HistoryRow], words: Words, header: bool) -> str:
    between = words.last("delimiter", "|")
    end = between if words.has("parsable") and not words.has("parsable2") else ""
    lines = [[column.name for column in shown]] if header else []
    lines += [[clean(column.text(row)) for column in shown] for row in rows]
    return "".join(between.join(line) + end + "\n" for line in lines)


def _table(shown: Sequence[HistoryColumn], rows: Sequence[HistoryRow], header: bool, style: HistoryStyle) -> str:
    cells = [[_in_width(column, clean(column.text(row))) for column in shown] for row in rows]
    headers = [_in_width(column, column.name) for column in shown] if header else []
    if style.fixed:  # every column ends with a space, including the last one
        lines = [headers, ["-" * column.width for column in shown], *cells] if header else cells
        return "".join("".join(f"{cell} " for cell in line) + "\n" for line in lines)
    right = [at for at, column in enumerate(shown) if column.right]
    return columns(headers, cells, right=right, rule=True)


def _in_width(column: HistoryColumn, text: str) -> str:
    """Return `text` in the width of the column, if it has one, or cut to its greatest width.

    Like in sacct, truncated text ends in a +.
    """
    most = column.width or column.most
    cut = text if not most or len(text) <= most else text[: most - 1] + "+"
    return fitted(cut, column.width, right=column.right) if column.width else cut


# ----- sacct: Slurm's columns and widths; root sees the jobs of all users, and a day begins at midnight


SACCT_BRIEF = "JobID,State,ExitCode"
SACCT_LONG = (
    "JobID,JobIDRaw,JobName,Partition,MaxVMSize,MaxVMSizeNode,MaxVMSizeTask,AveVMSize,MaxRSS,MaxRSSNode,MaxRSSTask,AveRSS,"
    "MaxPages,MaxPagesNode,MaxPagesTask,AvePages,MinCPU,MinCPUNode,MinCPUTask,AveCPU,NTasks,AllocCPUS,Elapsed,State,ExitCode,"
    "AveCPUFreq,ReqCPUFreqMin,ReqCPUFreqMax,ReqCPUFreqGov,ReqMem,ConsumedEnergy,MaxDiskRead,MaxDiskReadNode,MaxDiskReadTask,"
    "AveDiskRead,MaxDiskWrite,MaxDiskWriteNode,MaxDiskWriteTask,AveDiskWrite,ReqTRES,AllocTRES,TRESUsageInAve,TRESUsageInMax"
)

# fmt: off
SACCT = Face(Command(
    "sacct",
    ("[OPTIONS]",),
    "Show jobs and their steps from the history.",
    (
        *with_names(COMMAND.options, "accounts allocations allusers delimiter endtime format helpformat jobs json name "
                    "nodelist noheader parsable parsable2 partition qos starttime state units user"),
        Option("array", help="show each waiting task of an array on a line of its own"),
        Option("brief", "b", help=f"show {SACCT_BRIEF}"),
        Option("long", "l", help="show nearly all columns"),
        HELP,
        VERSION,
    ),
    accepted=(*ELSEWHERE, Option("allclusters", "L"), Option("associations", "x", "LIST"),
              Option("duplicates", "D"), Option("truncate", "T"), Option("verbose", "v"), Option("completion", "c"),
              Option("whole-hetjob", "", "YES", bare=""), Option("use-local-uid"), Option("wckeys", "W", "LIST"),
              Option("yaml"), Option("usage"), Option("gid", "g", "LIST", aliases=("group",)), Option("flags", "F", "LIST"),
              Option("batch-script", "B"), Option("env-vars"), Option("federated"), Option("nnodes", "i", "N"),
              Option("ncpus", "I", "N"), Option("reason", "R", "LIST"), Option("file", "f", "FILE")),
), "sacct: error: slurmdbd")
# fmt: on


def sacct(argv: Sequence[str] | None = None) -> int:
    """Run sacct and return its exit status."""
    return run_face(SACCT, _work_sacct, argv)


def _work_sacct(words: Words) -> int:
    if "format" not in words.given and os.environ.get("SACCT_FORMAT"):
        words.given["format"] = [os.environ["SACCT_FORMAT"]]
    for option, text in (("brief", SACCT_BRIEF), ("long", SACCT_LONG)):
        if words.has(option):
            words.given.setdefault("format", [text])
    known = {name.lower() for name in field_names(_sacct_columns())}
    for name in (word.partition("%")[0] for word in split_list(",".join(words.given.get("format", ())))):
        if name.lower() not in known:
            raise RequestError(f'Invalid field requested: "{name[:60]}"')
    if "RUNNING" in parse_states(words.listed("state")):
        words.given["state"].append(",".join(_RUNNING))
    try:
        return _work(words, SACCT_STYLE)
    except NotFoundError as error:
        print(f"sacct: fatal: Bad job/step specified: {str(error).partition(': ')[2]}", file=sys.stderr)
        return FAILED


def _sacct_columns() -> Sequence[HistoryColumn]:
    return slurms_columns(os.environ.get("SLURM_CLUSTER_NAME", ""))


def _midnight_s(now_s: float) -> float:
    return time.mktime((*time.localtime(now_s)[:3], 0, 0, 0, 0, 0, -1))


def _slurms(jobs: list[Json], words: Words) -> list[Json]:
    """Return the jobs with the states of Slurm's accounting.

    Waiting tasks of an array are one: ``10_[3-9%2]``.
    """
    made = [job | {"state": _RUNNING.get(job["state"], job["state"])} for job in jobs]
    folds: dict[int, list[Json]] = {}
    for job in () if words.has("array") else made:
        if job["state"] == "PENDING" and job["array_task_id"] is not None and not job["restarts"]:
            folds.setdefault(job["array_job_id"], []).append(job)
    first = {tasks[0]["id"]: _folded(tasks) for tasks in folds.values() if len(tasks) > 1}
    rest = {job["id"] for tasks in folds.values() for job in tasks[1:]}
    return [first.get(job["id"], job) for job in made if job["id"] not in rest]


_RUNNING = {"CONFIGURING": "RUNNING", "COMPLETING": "RUNNING"}  # what sacct knows of a job that has not ended


def _folded(tasks: list[Json]) -> Json:
    first = tasks[0]
    limit = f"%{first['array_limit']}" if first["array_limit"] else ""
    indices = index_ranges([task["array_task_id"] for task in tasks])
    return first | {"id": first["array_job_id"], "display_id": f"{first['array_job_id']}_[{indices}{limit}]"}


SACCT_STYLE = HistoryStyle(
    fields=DEFAULT_FIELDS,
    columns=_sacct_columns,
    fixed=True,
    since_s=_midnight_s,
    everybody=os.getuid() == 0,
    print_json=lambda answer: print_accounting(answer, own_cluster()),
    jobs=_slurms,
)


# ----- seff: the figures of --eff in the format of Slurm's ``contribs/seff``


SEFF = Face(
    Command(
        "seff",
        ("[Options] <Jobid>",),
        "Show how much of its cpus and memory a job used.",
        (
            Option("debug", "d", help="show the job's record as the controller has it as well"),
            HELP,
            Option("version", "v", help="show the version"),
        ),
        accepted=(VERSION,),
    ),
    "seff: error",
)
_SEFF_UNITS = ("KB", "MB", "GB", "TB", "PB", "EB")


def seff(argv: Sequence[str] | None = None) -> int:
    """Run seff and return its exit status."""
    return run_face(SEFF, _work_seff, argv)


def _work_seff(words: Words) -> int:
    if len(words.operands) != 1:
        raise UsageError("cannot tell which job: name one: seff JOBID")
    job = _seff_job(words.operands[0])
    if words.has("debug"):
        print(f"Slurm data: {clean(job)}\n")
    print("\n".join(seff_lines(job, own_cluster())))
    return 0


def _seff_job(reference: str) -> Json:
    number, _, task = reference.partition("_")
    if not number.isdigit() or (task and not task.isdigit()):
        raise NotFoundError(f"{INVALID_JOB}: {reference[:60]}")
    jobs = client.history(id=number)["jobs"]
    wanted = [job for job in jobs if reference in (str(job["id"]), job["display_id"])] or jobs
    if not wanted:
        raise NotFoundError(f"{INVALID_JOB}: {reference}")
    return wanted[0]


def seff_lines(job: Json, cluster: str) -> list[str]:
    """Return the seff_lines for a job of the API's history."""
    found = [f"Job ID: {job['id']}"]
    if job["array_job_id"] is not None:
        found.append(f"Array Job ID: {job['array_job_id']}_{job['array_task_id']}")
    found += [f"Cluster: {cluster}", f"User/Group: {job['user']}/{_group_of(job['uid'])}", _state_line(job)]
    cores, nodes = job["num_cpus"], max(1, job["num_nodes"])
    if cores == 1:
        found.append("Cores: 1")
    else:
        found += [f"Nodes: {nodes}", f"Cores per node: {cores // nodes}"]
    if job["started_at_s"] is None:
        return [*found, f"Efficiency not available for jobs in the {job['state']} state."]
    walltime_s = job["elapsed_s"] * cores
    cpu = cpu_part(job) or 0.0
    memory, most_kib = mem_part(job) or 0.0, (job["mem_mib"] or 0) * 1024
    estimated = " (estimated maximum)" if (job["num_tasks"] or 1) > 1 else ""
    found += [
        f"CPU Utilized: {_clock(cpu * walltime_s)}",
        f"CPU Efficiency: {cpu:.2%} of {_clock(walltime_s)} core-walltime",
        f"Job Wall-clock time: {_clock(job['elapsed_s'])}",
        f"Memory Utilized: {_size_text(memory * most_kib)}{estimated}",
        f"Memory Efficiency: {memory:.2%} of {_size_text(most_kib)}",
    ]
    if job["ended_at_s"] is None:
        found.append("WARNING: Efficiency statistics may be misleading for RUNNING jobs.")
    return found


def _group_of(uid: int) -> str:
    try:
        return grp.getgrgid(pwd.getpwuid(uid).pw_gid).gr_name
    except KeyError:
        return str(uid)


def _state_line(job: Json) -> str:
    if job["exit_code"] is None:
        return f"State: {job['state']}"
    code = f"signal {job['exit_signal']}" if job["exit_signal"] else f"exit code {job['exit_code']}"
    return f"State: {job['state']} ({code})"


def _clock(seconds: float) -> str:
    return format_time_s(round(seconds), full=True)


def _size_text(kib: float) -> str:
    for unit in _SEFF_UNITS[:-1]:
        if kib < 1024:
            return f"{kib:.2f} {unit}"
        kib /= 1024
    return f"{kib:.2f} {_SEFF_UNITS[-1]}"


# ----- columns with sacct's names, and the rows of a job and its steps
# A job or a step is the JSON object of the API's history.
# Source: sacct(1), "Job Accounting Fields".


class HistoryRow(namedtuple("HistoryRow", "job step")):
    """One line: a job (`step` is None), or one of its steps."""

    __slots__ = ()

    job: Json
    step: Json | None


class HistoryColumn(namedtuple("HistoryColumn", "name text right width slurms most", defaults=(0, 10, 0))):
    """A requested column.

    `width` 0 is as wide as the content, but at most `most` if that is not 0; `slurms` is sacct's default width.
    """

    __slots__ = ()

    name: str
    text: Callable[[HistoryRow], str]
    right: bool
    width: int
    slurms: int
    most: int


def job_rows(job: Json, *, steps: bool) -> list[HistoryRow]:
    """Return the rows of a job.

    With `steps` also the steps of its last attempt, the batch step first.
    """
    mine = [step for step in job["steps"] if step.get("attempt", job["attempt"]) == job["attempt"]] if steps else []
    mine.sort(key=lambda step: -1 if step["step"] == "batch" else int(step["step"]))
    return [HistoryRow(job, None), *(HistoryRow(job, step) for step in mine)]


def columns_of(text: str, known: Sequence[HistoryColumn] = ()) -> list[HistoryColumn]:
    """Return the columns for a list of names with optional widths. Raises UsageError."""
    return [_column(word, known or _COLUMNS) for word in split_list(text)]


def field_names(known: Sequence[HistoryColumn] = ()) -> list[str]:
    """Return the names of all columns."""
    return [column.name for column in known or _COLUMNS]


def _column(word: str, known: Sequence[HistoryColumn]) -> HistoryColumn:
    name, width, right = sized(word)
    for column in known:
        if column.name.lower() == name.lower():
            return column._replace(width=width, right=right) if width else column
    near = nearest(name.lower(), [column.name.lower() for column in known])
    hint = f"did you mean {' or '.join(near)}?" if near else "see hacct --helpformat"
    raise UsageError(f"cannot show column {word[:60]!r}: no such column; {hint}")


# ----- the text of a row


def _id(row: HistoryRow) -> str:
    return row.job["display_id"] + (f".{row.step['step']}" if row.step else "")


def _raw_id(row: HistoryRow) -> str:
    return str(row.job["id"]) + (f".{row.step['step']}" if row.step else "")


def _state(row: HistoryRow) -> str:
    state = str(row.step["state"] if row.step else row.job["state"])
    by = row.job.get("ended_by", row.job.get("ended_by_uid"))  # a name, if the command has looked it up
    return f"CANCELLED by {by}" if state == "CANCELLED" and by is not None and not row.step else state


def _nodes(row: HistoryRow) -> list[str]:
    return row.step["nodes"] if row.step else row.job["nodes"]


def _start_s(row: HistoryRow) -> float | None:
    return (row.step or row.job)["started_at_s"]


def _end_s(row: HistoryRow) -> float | None:
    return (row.step or row.job)["ended_at_s"]


def _elapsed_s(row: HistoryRow) -> float:
    if row.step is None:
        return row.job["elapsed_s"]
    start_s, end_s = _start_s(row), _end_s(row)
    if start_s is None:
        return 0.0
    if end_s is None:  # a running step has run as long as its job, minus the time before its start
        end_s = (row.job["started_at_s"] or start_s) + row.job["elapsed_s"]
    return max(0.0, end_s - start_s)


def _cpu_s(row: HistoryRow, *keys: str) -> float:
    """Return the CPU time of a step, or for a job the sum of its steps, in seconds."""
    steps = [row.step] if row.step else [line.step for line in job_rows(row.job, steps=True)[1:] if line.step]
    return sum(step[key] or 0.0 for step in steps for key in keys)


def _cpu_text(seconds: float) -> str:
    """Return CPU time like sacct: ``MM:SS.mmm`` below an hour, else ``H:M:S``."""
    if seconds >= 3600:
        return format_time_s(seconds, full=True)
    minutes, millis = divmod(round(seconds * 1000), 60_000)
    return f"{minutes:02}:{millis // 1000:02}.{millis % 1000:03}"


def _max_rss(row: HistoryRow) -> str:
    return f"{row.step['max_rss_kib']}K" if row.step and row.step["max_rss_kib"] else ""


def _of_job(key: str, none: str = "") -> Callable[[HistoryRow], str]:
    """Return a writer for a value that steps have in common with their job."""
    return lambda row: none if row.job[key] in (None, "") else str(row.job[key])


def _only_job(key: str) -> Callable[[HistoryRow], str]:
    return lambda row: "" if row.step or row.job[key] in (None, "") else str(row.job[key])


def _alloc_cpus(row: HistoryRow) -> str:
    if not row.job["nodes"]:
        return "0"
    if row.step is None:
        return str(row.job["num_cpus"])
    on_nodes = sum(share["cpus"] for share in row.job["shares"] if share["node"] in row.step["nodes"])
    return str(
        on_nodes if row.step["step"] == "batch" else min(on_nodes, row.step["ntasks"] * row.job["cpus_per_task"])
    )


def _name(row: HistoryRow) -> str:
    return str(row.step["name"] or row.step["step"]) if row.step else str(row.job["name"])


def _meaning(row: HistoryRow) -> str:
    """Return the meaning of the exit status, and the cause of the end if it is known."""
    if row.step:
        return exit_words(row.step["exit_code"] or 0, row.step["exit_signal"] or 0)
    cancelled = row.job["state"] == "CANCELLED"  # the state says it all
    words = "" if cancelled else exit_words(row.job["exit_code"] or 0, row.job["exit_signal"] or 0)
    known = row.job["reason_detail"] if row.job["state"] in ENDED_STATES else ""
    return "; ".join(filter(None, (words, known)))


def _trained(row: HistoryRow, key: str) -> str:
    return str((row.job.get("training") or {}).get(key) or "")


def _tres(row: HistoryRow) -> str:
    """Return the TRES of a job or step in alphabetical order, like sacct."""
    job = row.job
    if not job["nodes"]:
        return ""
    if row.step is None:
        return _in_order(_amounts(job, job["mem_mib"] or 0))
    mem_mib = sum(share["mem_mib"] for share in job["shares"] if share["node"] in row.step["nodes"])
    nodes = len(row.step["nodes"])
    return _in_order({"cpu": _alloc_cpus(row), "mem": format_mem(mem_mib), "node": str(nodes)})


def _req_tres(row: HistoryRow) -> str:
    if row.step:
        return ""
    return _in_order(_amounts(row.job, 0) | {"mem": memory_in_all(row.job)})


def _amounts(job: Json, mem_mib: int) -> dict[str, str]:
    cpus = str(job["num_cpus"])
    amounts = {"billing": cpus, "cpu": cpus, "mem": format_mem(mem_mib), "node": str(job["num_nodes"])}
    shards = job.get("shards", 0)  # missing in the answer of an older controller
    return amounts | {f"gres/{name}": str(count) for name, count in (("gpu", job["gpus"]), ("shard", shards)) if count}


def _in_order(amounts: dict[str, str]) -> str:
    return ",".join(f"{name}={amount}" for name, amount in sorted(amounts.items()))


def _cpu_time_s(row: HistoryRow) -> float:
    return _elapsed_s(row) * int(_alloc_cpus(row))


def _waited_s(row: HistoryRow) -> float:
    until_s = row.job["started_at_s"] or row.job["ended_at_s"]
    since_s = row.job["eligible_at_s"] or row.job["submitted_at_s"]
    return max(0.0, until_s - since_s) if until_s is not None and row.step is None else 0.0


def _derived_exit(row: HistoryRow) -> str:
    """Return the highest exit code of the job's steps except the batch step."""
    steps = [line.step for line in job_rows(row.job, steps=True)[1:] if line.step and line.step["step"] != "batch"]
    return f"{max((step['exit_code'] or 0 for step in steps), default=0)}:0"


def _time(seconds: float) -> str:
    return format_time_s(seconds, full=True)


def _job_text(text: Callable[[Json], str]) -> Callable[[HistoryRow], str]:
    return lambda row: "" if row.step else text(row.job)


def _group(job: Json, *, number: bool) -> str:
    name = "gid" if number else "group"
    return next(field for field in queue.FIELDS if field.name == name).text(job, Look(0.0))


def _moved(key: str, *, each: bool = False) -> Callable[[HistoryRow], str]:
    """Return a writer for the bytes moved by a step, or on average by `each` of its tasks."""

    def text(row: HistoryRow) -> str:
        count = row.step.get(key) if row.step else None  # missing in the answer of an older controller
        return "" if count is None or row.step is None else size_text(count / (row.step["ntasks"] if each else 1))

    return text


def size_text(count: float) -> str:
    """Return a number of bytes like sacct: ``512``, ``3.50M``, ``50M``."""
    size, unit = float(count), ""
    for larger in "KMGTP":
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return (f"{size:.0f}" if size == int(size) else f"{size:.2f}") + unit


def _tres_usage(row: HistoryRow, *, tasks: int, out: bool = False) -> str:
    """Return a step's usage like sacct's TRESUsage columns.

    CPU time and bytes are divided by `tasks`; the memory is that of one task.
    """
    step = row.step
    if not step or step["cpu_user_s"] is None:
        return ""
    moved = step.get("disk_write_bytes" if out else "disk_read_bytes")
    disk = [] if moved is None else [f"fs/disk={moved // tasks}"]
    if out:
        return ",".join(disk)
    memory = [f"mem={step['max_rss_kib']}K"] if step["max_rss_kib"] else []
    return ",".join([f"cpu={_time(_cpu_s(row, 'cpu_user_s', 'cpu_system_s') / tasks)}", *disk, *memory])


def _usage(*, each: bool, out: bool = False) -> Callable[[HistoryRow], str]:
    return lambda row: _tres_usage(row, tasks=max(1, row.step["ntasks"]) if each and row.step else 1, out=out)


def _average_cpu(row: HistoryRow) -> str:
    if not row.step or row.step["cpu_user_s"] is None:
        return ""
    return _time(_cpu_s(row, "cpu_user_s", "cpu_system_s") / max(1, row.step["ntasks"]))


# ----- energy: of all attempts; "" if nothing was measured


def _joules_of(row: HistoryRow) -> float | None:
    uses = row.job.get("energy")
    return sum(use["joules"] for use in uses) if uses and row.step is None else None


def _joules(text: Callable[[float], str]) -> Callable[[HistoryRow], str]:
    def written(row: HistoryRow) -> str:
        joules = _joules_of(row)
        return "" if joules is None else text(joules)

    return written


def _priced(key: str, shape: str) -> Callable[[HistoryRow], str]:
    """Return a writer for the price or the CO2 of the energy; "" without this key of [cost]."""

    def written(row: HistoryRow) -> str:
        uses = (row.job.get("energy") or ()) if row.step is None else ()
        known = [use[key] for use in uses if use.get(key) is not None]
        return format(sum(known), shape) if known else ""

    return written


def _energy_source(row: HistoryRow) -> str:
    return "" if row.step else "+".join(sorted({use["source"] for use in row.job.get("energy") or ()}))


def _steps_per_kwh(row: HistoryRow) -> str:
    """Return the training steps for each kilowatt-hour, "" without steps or energy."""
    found = None if row.step else steps_per_kwh(row.job, row.job.get("energy") or ())
    return "" if found is None else f"{found:.0f}"


def _large_text(value: float) -> str:
    """Return a number like sacct's ConsumedEnergy: ``512``, ``3.50K``, ``1.20M``."""
    for unit in ("", "K", "M", "G"):
        if value < 1000:
            return f"{value:.0f}" if not unit else f"{value:.2f}{unit}"
        value /= 1000
    return f"{value:.2f}T"


def _flags(job: Json) -> str:
    return "SchedBackfill" if job["started_at_s"] is not None else ""


def _part(part: Callable[[Json], float | None]) -> Callable[[HistoryRow], str]:
    return lambda row: "" if row.step else part_text(part(row.job))


# fmt: off
_COLUMNS = (
    HistoryColumn("Account", _of_job("account"), True),
    HistoryColumn("Advice", lambda row: "" if row.step else advice(row.job), False),
    HistoryColumn("AllocCPUS", _alloc_cpus, True),
    HistoryColumn("AllocNodes", lambda row: str(len(_nodes(row))), True),
    HistoryColumn("AllocTRES", _tres, True),
    HistoryColumn("AveCPU", _average_cpu, True),
    HistoryColumn("AveDiskRead", _moved("disk_read_bytes", each=True), True, slurms=14),
    HistoryColumn("AveDiskWrite", _moved("disk_write_bytes", each=True), True, slurms=14),
    HistoryColumn("AveRSS", _max_rss, True),
    HistoryColumn("Comment", _only_job("comment"), True, slurms=14),
    HistoryColumn("Constraints", _only_job("constraint"), True, slurms=18),
    HistoryColumn("CPUEff", _part(cpu_part), True),
    HistoryColumn("CPUTime", lambda row: _time(_cpu_time_s(row)), True),
    HistoryColumn("CPUTimeRAW", lambda row: str(int(_cpu_time_s(row))), True),
    HistoryColumn("ConsumedEnergy", _joules(lambda joules: _large_text(joules)), True, slurms=14),
    HistoryColumn("ConsumedEnergyRaw", _joules(lambda joules: f"{joules:.0f}"), True, slurms=17),
    HistoryColumn("DerivedExitCode", lambda row: "" if row.step else _derived_exit(row), True, slurms=15),
    HistoryColumn("Elapsed", lambda row: _time(_elapsed_s(row)), True),
    HistoryColumn("ElapsedRaw", lambda row: str(int(_elapsed_s(row))), True),
    HistoryColumn("Eligible", lambda row: date_text(row.job["eligible_at_s"], "Unknown"), True, slurms=19),
    HistoryColumn("End", lambda row: date_text(_end_s(row), "Unknown"), True, slurms=19),
    HistoryColumn("EnergyCO2", _priced("co2_g", ".0f"), True),
    HistoryColumn("EnergyCost", _priced("cost", ".4f"), True),
    HistoryColumn("EnergySource", _energy_source, False),
    HistoryColumn("EnergyWh", _joules(lambda joules: f"{joules / 3600:.2f}"), True),
    HistoryColumn("ExitCode", lambda row: exit_text(row.step or row.job), True, slurms=8),
    HistoryColumn("Flags", _job_text(_flags), True, slurms=15),
    HistoryColumn("GID", _job_text(lambda job: _group(job, number=True)), True, slurms=6),
    HistoryColumn("Group", _job_text(lambda job: _group(job, number=False)), True, slurms=9),
    HistoryColumn("JobID", _id, False, slurms=12),
    HistoryColumn("JobIDRaw", _raw_id, False, slurms=12),
    HistoryColumn("JobName", _name, True),
    HistoryColumn("MaxDiskRead", _moved("disk_read_bytes", each=True), True, slurms=12),
    HistoryColumn("MaxDiskWrite", _moved("disk_write_bytes", each=True), True, slurms=12),
    HistoryColumn("MaxRSS", _max_rss, True),
    HistoryColumn("Meaning", _meaning, False, most=60),
    HistoryColumn("MemEff", _part(mem_part), True),
    HistoryColumn("NCPUS", _alloc_cpus, True),
    HistoryColumn("NNodes", lambda row: str(len(_nodes(row)) or row.job["num_nodes"]), True, slurms=8),
    HistoryColumn("NodeList", lambda row: compress_hostlist(_nodes(row)) or "None assigned", True, slurms=15),
    HistoryColumn("NTasks", lambda row: str(row.step["ntasks"]) if row.step else "", True, slurms=8),
    HistoryColumn("Partition", _only_job("partition"), True),
    HistoryColumn("Planned", lambda row: "" if row.step else _time(_waited_s(row)), True),
    HistoryColumn("PreemptedBy", lambda row: "" if row.step else str(row.job.get("preempted_by") or ""), True),
    HistoryColumn("Priority", _only_job("priority"), True),
    HistoryColumn("QOS", _only_job("qos"), True),
    HistoryColumn("Reason", lambda row: "" if row.step else row.job["reason"] or "None", True, slurms=22),
    HistoryColumn("ReqCPUS", lambda row: str(row.job["num_cpus"]) if row.step is None else _alloc_cpus(row), True, slurms=8),
    HistoryColumn("ReqMem", lambda row: "" if row.step else memory_in_all(row.job), True),
    HistoryColumn("ReqNodes", lambda row: str(row.job["num_nodes"]) if row.step is None else "", True, slurms=8),
    HistoryColumn("ReqTRES", _req_tres, True),
    HistoryColumn("Reservation", _only_job("reservation"), True, slurms=20),
    HistoryColumn("Reserved", lambda row: "" if row.step else _time(_waited_s(row)), True),
    HistoryColumn("Restarts", _only_job("restarts"), True),
    HistoryColumn("Start", lambda row: date_text(_start_s(row), "Unknown"), True, slurms=19),
    HistoryColumn("State", _state, True),
    HistoryColumn("Submit", lambda row: date_text(row.job["submitted_at_s"], "Unknown"), True, slurms=19),
    HistoryColumn("SubmitLine", _only_job("submit_line"), True, slurms=20),
    HistoryColumn("Suspended", _job_text(lambda job: _time(job.get("suspended_s", 0.0))), True),
    HistoryColumn("SystemCPU", lambda row: _cpu_text(_cpu_s(row, "cpu_system_s")), True),
    HistoryColumn("TimeEff", _part(time_part), True),
    HistoryColumn("Timelimit", _job_text(lambda job: format_time_s(job["time_limit_s"], full=True)), True),
    HistoryColumn("TimelimitRaw", _job_text(lambda job: str((job["time_limit_s"] or 0) // 60 or "UNLIMITED")), True),
    HistoryColumn("TotalCPU", lambda row: _cpu_text(_cpu_s(row, "cpu_user_s", "cpu_system_s")), True),
    HistoryColumn("TRESUsageInAve", _usage(each=True), True, slurms=14),
    HistoryColumn("TRESUsageInMax", _usage(each=True), True, slurms=14),
    HistoryColumn("TRESUsageInTot", _usage(each=False), True, slurms=14),
    HistoryColumn("TRESUsageOutAve", _usage(each=True, out=True), True, slurms=15),
    HistoryColumn("TRESUsageOutMax", _usage(each=True, out=True), True, slurms=15),
    HistoryColumn("TRESUsageOutTot", _usage(each=False, out=True), True, slurms=15),
    HistoryColumn("TrainCheckpoint", lambda row: "" if row.step else _trained(row, "checkpoint_step"), True),
    HistoryColumn("TrainGoodput", lambda row: "" if row.step else goodput_text(row.job).replace("N/A", ""), True),
    HistoryColumn("TrainLoss", lambda row: "" if row.step else loss_text(row.job).replace("N/A", ""), True),
    HistoryColumn("TrainSamplesPerSec", lambda row: "" if row.step else rate_text(row.job).replace("N/A", ""), True),
    HistoryColumn("TrainSteps", lambda row: "" if row.step else step_text(row.job).replace("N/A", ""), True),
    HistoryColumn("TrainStepsPerKWh", _steps_per_kwh, True),
    HistoryColumn("UID", _only_job("uid"), True, slurms=6),
    HistoryColumn("User", _only_job("user"), True, slurms=9),
    HistoryColumn("UserCPU", lambda row: _cpu_text(_cpu_s(row, "cpu_user_s")), True),
    HistoryColumn("WorkDir", _only_job("work_dir"), True, slurms=20),
)

# Columns of sacct without a counterpart here: known, but empty.
_EMPTY = (
    "AdminComment AssocID AveCPUFreq AvePages AveVMSize BlockID "
    "Container DBIndex Extra FailedNode JobExtra Layout Licenses MaxDiskReadNode MaxDiskReadTask "
    "MaxDiskWriteNode MaxDiskWriteTask MaxPages MaxPagesNode MaxPagesTask MaxRSSNode MaxRSSTask MaxVMSize "
    "MaxVMSizeNode MaxVMSizeTask McsLabel MinCPU MinCPUNode MinCPUTask PlannedCPU PlannedCPURAW QOSRAW ReqCPUFreq "
    "ReqCPUFreqGov ReqCPUFreqMax ReqCPUFreqMin ReqGRES AllocGRES ReservationId SystemComment TRESUsageInMaxNode "
    "TRESUsageInMaxTask TRESUsageInMin TRESUsageInMinNode TRESUsageInMinTask "
    "TRESUsageOutMaxNode TRESUsageOutMaxTask TRESUsageOutMin TRESUsageOutMinNode TRESUsageOutMinTask WCKey "
    "WCKeyID"
)
# fmt: on
_OTHERS = (
    HistoryColumn("Cluster", lambda row: "", True),
    *(HistoryColumn(name, lambda row: "", True) for name in _EMPTY.split()),
)


def slurms_columns(cluster: str) -> tuple[HistoryColumn, ...]:
    """Return all columns of sacct, and ours; `cluster` is the name of the cluster."""
    others = [other._replace(text=lambda row: cluster) if other.name == "Cluster" else other for other in _OTHERS]
    return tuple(sorted((*_COLUMNS, *others), key=lambda column: column.name.lower()))
