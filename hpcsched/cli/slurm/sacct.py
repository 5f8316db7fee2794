"""sacct: `hacct` in Slurm's shape: its columns and their widths, root sees everybody's jobs, a day begins at midnight."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from hpcsched import client
from hpcsched.cli import hacct
from hpcsched.cli.acctfields import Column, slurms_columns
from hpcsched.cli.options import HELP, VERSION, Command, Option, Words
from hpcsched.cli.slurm.face import ELSEWHERE, Face, run_face, with_names
from hpcsched.client import Json

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
        Option("brief", "b", help=f"show {BRIEF}"),
        Option("long", "l", help="show nearly all columns"),
        HELP,
        VERSION,
    ),
    accepted=(*ELSEWHERE, Option("allclusters", "L"), Option("array"), Option("associations", "x", "LIST"),
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
        return int(work(words))

    return run_face(FACE, shaped, argv)


def _columns() -> Sequence[Column]:
    return slurms_columns(_cluster())


def _cluster() -> str:
    return os.environ.get("SLURM_CLUSTER_NAME", "")


def _midnight_s(now_s: float) -> float:
    return time.mktime((*time.localtime(now_s)[:3], 0, 0, 0, 0, 0, -1))


def _print_json(answer: Json) -> None:
    from hpcsched.cli.slurm.jobjson import print_accounting

    print_accounting(answer, client.call("GET", "/v1/ping")["cluster"])


MANNERS = hacct.Manners(
    _run, columns=_columns, fixed=True, since_s=_midnight_s, everybody=os.getuid() == 0, print_json=_print_json
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return hacct.main(argv, MANNERS)
