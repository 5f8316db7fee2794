"""sacct: `hacct` with Slurm's columns and widths; root sees the jobs of all users, and a day begins at midnight."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from hpcsched.cli import hacct
from hpcsched.cli.errors import FAILED
from hpcsched.cli.render.acct_fields import HistoryColumn, field_names, slurms_columns
from hpcsched.cli.render.slurm_json import print_accounting
from hpcsched.cli.slurm import own_cluster, run_face
from hpcsched.client import Json
from hpcsched.commands.options import HELP, VERSION, Command, Option, Words, split_list
from hpcsched.commands.slurm import ELSEWHERE, Face, with_names
from hpcsched.errors import NotFoundError, RequestError
from hpcsched.listing.jobs import index_ranges
from hpcsched.listing.states import parse_states

BRIEF = "JobID,State,ExitCode"
LONG = (
    "JobID,JobIDRaw,JobName,Partition,MaxVMSize,MaxVMSizeNode,MaxVMSizeTask,AveVMSize,MaxRSS,MaxRSSNode,MaxRSSTask,AveRSS,"
    "MaxPages,MaxPagesNode,MaxPagesTask,AvePages,MinCPU,MinCPUNode,MinCPUTask,AveCPU,NTasks,AllocCPUS,Elapsed,State,ExitCode,"
    "AveCPUFreq,ReqCPUFreqMin,ReqCPUFreqMax,ReqCPUFreqGov,ReqMem,ConsumedEnergy,MaxDiskRead,MaxDiskReadNode,MaxDiskReadTask,"
    "AveDiskRead,MaxDiskWrite,MaxDiskWriteNode,MaxDiskWriteTask,AveDiskWrite,ReqTRES,AllocTRES,TRESUsageInAve,TRESUsageInMax"
)

# fmt: off
FACE = Face(Command(
    "sacct",
    ("[OPTIONS]",),
    "Show jobs and their steps from the history.",
    (
        *with_names(hacct.COMMAND.options, "accounts allocations allusers delimiter endtime format helpformat jobs json name "
                    "nodelist noheader parsable parsable2 partition qos starttime state units user"),
        Option("array", help="show each waiting task of an array on a line of its own"),
        Option("brief", "b", help=f"show {BRIEF}"),
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


def _run(work: Callable[[Words], int], argv: Sequence[str] | None) -> int:
    def shaped(words: Words) -> int:
        if "format" not in words.given and os.environ.get("SACCT_FORMAT"):
            words.given["format"] = [os.environ["SACCT_FORMAT"]]
        for option, text in (("brief", BRIEF), ("long", LONG)):
            if words.has(option):
                words.given.setdefault("format", [text])
        known = {name.lower() for name in field_names(_columns())}
        for name in (word.partition("%")[0] for word in split_list(",".join(words.given.get("format", ())))):
            if name.lower() not in known:
                raise RequestError(f'Invalid field requested: "{name[:60]}"')
        if "RUNNING" in parse_states(words.listed("state")):
            words.given["state"].append(",".join(_RUNNING))
        try:
            return int(work(words))
        except NotFoundError as error:
            print(f"sacct: fatal: Bad job/step specified: {str(error).partition(': ')[2]}", file=sys.stderr)
            return FAILED

    return run_face(FACE, shaped, argv)


def _columns() -> Sequence[HistoryColumn]:
    return slurms_columns(_cluster())


def _cluster() -> str:
    return os.environ.get("SLURM_CLUSTER_NAME", "")


def _midnight_s(now_s: float) -> float:
    return time.mktime((*time.localtime(now_s)[:3], 0, 0, 0, 0, 0, -1))


def _print_json(answer: Json) -> None:
    print_accounting(answer, own_cluster())


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
    one = tasks[0]
    limit = f"%{one['array_limit']}" if one["array_limit"] else ""
    indices = index_ranges([task["array_task_id"] for task in tasks])
    return one | {"id": one["array_job_id"], "display_id": f"{one['array_job_id']}_[{indices}{limit}]"}


STYLE = hacct.HistoryStyle(
    _run,
    columns=_columns,
    fixed=True,
    since_s=_midnight_s,
    everybody=os.getuid() == 0,
    print_json=_print_json,
    jobs=_slurms,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return hacct.main(argv, STYLE)
