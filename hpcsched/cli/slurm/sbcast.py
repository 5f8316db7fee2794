"""sbcast: copies a file to all nodes of its job, through a step that writes its standard input."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from hpcnode.commands import bcast, hrun
from hpcsched.cli.slurm import run_face
from hpcsched.commands.options import HELP, VERSION, Command, Option, UsageError, Words
from hpcsched.commands.slurm import ELSEWHERE, Face
from hpcsched.errors import RequestError
from hpcsched.listing.text import clean

SBCAST = Face(
    Command(
        "sbcast",
        ("[OPTIONS] SOURCE DESTINATION",),
        "Copy a file to all nodes of the job that this runs in.",
        (
            Option("force", "f", help="write over a file that is there"),
            Option("jobid", "j", "ID", "the job, if it is another than the one this runs in"),
            Option("preserve", "p", help="keep mode and times"),
            Option("verbose", "v", help="say more"),
            HELP,
            VERSION,
        ),
        accepted=(
            *ELSEWHERE,
            Option("compress", "C", "LIBRARY", bare=""),
            Option("fanout", "F", "N"),
            Option("size", "s", "SIZE"),
            Option("timeout", "t", "SECONDS"),
            Option("send-libs", "", "YES", bare=""),
            Option("exclude", "", "LIST"),
        ),
    ),
    "sbcast: error",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_face(SBCAST, _work, argv)


def _work(words: Words) -> int:
    if len(words.operands) != 2:
        raise UsageError("cannot copy: give source and destination: sbcast SOURCE DESTINATION")
    source, destination = words.operands
    job_id = words.last("jobid") or os.environ.get("SLURM_JOB_ID", "")
    if not job_id:
        raise RequestError("cannot copy: not in a job; give one with --jobid")
    try:
        step = bcast.step_words(
            source,
            shlex.quote(destination),
            job_id,
            os.environ,
            force=words.has("force"),
            keep_times=words.has("preserve"),
        )
    except OSError as error:
        raise RequestError(f"cannot read {clean(source)}: {error.strerror}") from None
    return hrun.main(step)
