"""hacct, sacct and seff: jobs and their steps from the history: how they ended, how long they ran, what they used.

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
from hpcsched.cli.render.acct_fields import (
    HistoryColumn,
    HistoryRow,
    columns_of,
    cpu_part,
    field_names,
    job_rows,
    mem_part,
    slurms_columns,
)
from hpcsched.cli.render.records import print_accounting
from hpcsched.cli.slurm import own_cluster, run_face
from hpcsched.client import Json
from hpcsched.commands.options import FAILED, HELP, VERSION, Command, Option, UsageError, Words, split_list
from hpcsched.commands.slurm import ELSEWHERE, INVALID_JOB, Face, with_names
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.listing.jobs import index_ranges, parse_states
from hpcsched.listing.text import clean, columns, fitted
from hpcsched.model.dates import parse_when
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.units import format_time_s

DEFAULT_FIELDS = "JobID,JobName,Partition,Account,AllocCPUS,State,ExitCode"
OUR_FIELDS = f"{DEFAULT_FIELDS},Start,End,Elapsed,Meaning"
EFFICIENCY = "JobID,JobName,State,Elapsed,TimeEff,CPUEff,MemEff,Advice"
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
    fields = EFFICIENCY if words.has("eff") else style.fields
    shown = columns_of(",".join(words.given.get("format", [fields])), style.columns())
    if style.fixed:
        shown = [column if column.width else column._replace(width=column.slurms) for column in shown]
    shown = _in_units(shown, words.last("units"))
    answer = _ask(words, time.time(), style)
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
    return not words.has("allocations") and (words.has("format") or not words.has("eff"))


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


def _ask(words: Words, now_s: float, style: HistoryStyle) -> Json:
    """Return the API's answer with the requested jobs, in the order of their ids."""
    references = words.listed("jobs")
    wanted = [_known(reference) for reference in references]
    named = bool(references) or words.has("allusers") or words.has("user") or style.everybody
    since_s = None if references else style.since_s(now_s)
    if words.has("starttime"):
        since_s = parse_when(words.last("starttime"), now_s, past=True)
    path = client.query(
        "/v1/history",
        id=",".join(sorted({reference.partition("_")[0].partition("+")[0] for reference in wanted})),
        user=",".join(map(_user_name, words.listed("user")) if named else [client.my_name()]),
        state=",".join(parse_states(words.listed("state"))),
        name=",".join(words.listed("name")),
        start_s=since_s,
        end_s=parse_when(words.last("endtime"), now_s, past=True) if words.has("endtime") else None,
    )
    answer = client.call("GET", path)
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
    jobs = client.call("GET", client.query("/v1/history", id=number))["jobs"]
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
