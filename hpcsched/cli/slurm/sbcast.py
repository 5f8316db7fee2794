"""sbcast: copies a file to all nodes of the job that it runs in, by a step that writes what it is fed.

Needs no share. Written beside its place and renamed, so that nobody sees a half of it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from hpcnode import hrun
from hpcsched.cli.options import HELP, VERSION, Command, Option, UsageError, Words
from hpcsched.cli.slurm.face import ELSEWHERE, Face, run_face
from hpcsched.errors import RequestError
from hpcsched.listing.text import clean

FACE = Face(
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
    return run_face(FACE, _work, argv)


def _work(words: Words) -> int:
    if len(words.operands) != 2:
        raise UsageError("cannot copy: name the file and where it shall be: sbcast SOURCE DESTINATION")
    source, destination = words.operands
    job_id = words.last("jobid") or os.environ.get("SLURM_JOB_ID", "")
    if not job_id:
        raise RequestError("cannot copy: this runs in no job; say which with --jobid")
    try:
        facts = os.stat(source)
    except OSError as error:
        raise RequestError(f"cannot read {clean(source)}: {error.strerror}") from None
    target = shlex.quote(destination)
    script = f"cat > {target}.sbcast && chmod {facts.st_mode & 0o777:o} {target}.sbcast && "
    if words.has("preserve"):
        script += f"touch -d @{facts.st_mtime} {target}.sbcast && "
    if not words.has("force"):
        script = f"test ! -e {target} || {{ echo {target}: File exists >&2; exit 1; }}; {script}"
    script += f"mv -f {target}.sbcast {target}"
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    count = [f"--nodes={nodes}", f"--ntasks={nodes}"] if nodes else []
    step = [
        *count,
        "--ntasks-per-node=1",
        "--overlap",
        "--kill-on-bad-exit=1",
        f"--jobid={job_id}",
        f"--input={source}",
    ]
    return hrun.main([*step, "--quiet", "sh", "-c", script])
