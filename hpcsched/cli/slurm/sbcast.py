"""sbcast and sgather: copy a file to all nodes of a job, or from all of them.

They need no share: a file is the standard input, or the output, of a step on its node. Source: sbcast(1), sgather(1).
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcnode.commands import hrun
from hpcsched import client
from hpcsched.cli.slurm import run_face
from hpcsched.commands.options import ELSEWHERE, HELP, VERSION, Command, Face, Option, UsageError, Words
from hpcsched.errors import RequestError
from hpcsched.listing.text import clean
from hpcsched.model.hostlist import expand_hostlist

SBCAST = Face(
    Command(
        "sbcast",
        ("[OPTIONS] SOURCE DESTINATION",),
        "Copy a file to all nodes of the job that this runs in.",
        (
            Option("force", "f", help="overwrite an existing file"),
            Option("jobid", "j", "ID", "the job; default: the one in which this command runs"),
            Option("preserve", "p", help="keep mode and times"),
            Option("verbose", "v", help="print more"),
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


def _job_of(words: Words, refusal: str) -> str:
    """Return the id of the job: the named one, or the one that this runs in.

    Raises RequestError.
    """
    job_id = words.last("jobid") or os.environ.get("SLURM_JOB_ID", "")
    if not job_id:
        raise RequestError(refusal)
    return job_id


def _work(words: Words) -> int:
    if len(words.operands) != 2:
        raise UsageError("cannot copy: give source and destination: sbcast SOURCE DESTINATION")
    source, destination = words.operands
    job_id = _job_of(words, "cannot copy: not in a job; give one with --jobid")
    try:
        step = hrun.step_words(
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


# ----- sgather: the node's name is appended to the name of each file


SGATHER = Face(
    Command(
        "sgather",
        ("[OPTIONS] SOURCE DESTINATION",),
        "Copy a file from each node of the job that this runs in to DESTINATION.NODE here.",
        (
            Option("force", "f", help="overwrite existing files"),
            Option("jobid", "j", "ID", "the job; default: the one in which this command runs"),
            Option("keep", "k", help="do not append the node's name (for a job on one node)"),
            Option("preserve", "p", help="keep mode and times"),
            Option("verbose", "v", help="name each file"),
            HELP,
            VERSION,
        ),
        accepted=(
            *ELSEWHERE,
            Option("compress", "C"),
            Option("fanout", "F", "N"),
            Option("size", "s", "SIZE"),
            Option("timeout", "t", "SECONDS"),
        ),
    ),
    "sgather: error",
)


def sgather(argv: Sequence[str] | None = None) -> int:
    """Run sgather and return its exit status."""
    return run_face(SGATHER, _gather, argv)


def _gather(words: Words) -> int:
    if len(words.operands) != 2:
        raise UsageError("cannot gather: name the file and where it shall be: sgather SOURCE DESTINATION")
    source, destination = words.operands
    job_id = _job_of(words, "cannot gather: this runs in no job; say which with --jobid")
    nodes = _nodes_of(job_id)
    if words.has("keep") and len(nodes) > 1:
        raise UsageError(f"cannot keep the name {destination[:100]!r}: job {job_id} has {len(nodes)} nodes")
    targets = {node: Path(destination if words.has("keep") else f"{destination}.{node}") for node in nodes}
    there = [path for path in targets.values() if path.exists()]
    if there and not words.has("force"):
        raise RequestError(f"cannot write {clean(there[0])}: it is there already; -f writes over it")
    for node, path in targets.items():
        _fetch(job_id, node, source, path)
        if words.has("preserve"):
            mode, modified_s = _run_on(job_id, node, ["stat", "-c", "%a %Y", "--", source]).decode().split()
            path.chmod(int(mode, 8) & 0o777)
            os.utime(path, (int(modified_s), int(modified_s)))
        if words.has("verbose"):
            print(f"sgather: {node}:{clean(source)} -> {clean(path)}", file=sys.stderr)
    return 0


def _nodes_of(job_id: str) -> list[str]:
    own = os.environ.get("SLURM_JOB_NODELIST", "")
    if own and job_id == os.environ.get("SLURM_JOB_ID"):
        return expand_hostlist(own)
    nodes: list[str] = client.call("GET", client.job_path(job_id))["jobs"][0]["nodes"]
    if not nodes:
        raise RequestError(f"cannot gather from job {job_id}: it has no nodes")
    return nodes


def _fetch(job_id: str, node: str, source: str, path: Path) -> None:
    """Write the node's file to `path`, completely or not at all."""
    part = path.with_name(f".{path.name}.sgather")
    try:
        with open(part, "wb") as stream:
            _run_on(job_id, node, ["cat", "--", source], stream.fileno())
        os.replace(part, path)
    except OSError as error:
        raise RequestError(f"cannot write {clean(path)}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def _run_on(job_id: str, node: str, command: Sequence[str], stdout: int | None = None) -> bytes:
    """Run a command on one node of the job; return its output, unless it goes to `stdout`.

    Raises RequestError.
    """
    import subprocess  # slow to import

    step = [f"--jobid={job_id}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--overlap", "--quiet", *command]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hpcnode.commands.hrun", *step],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE,
    )
    if done.returncode != 0:
        why = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise RequestError(f"cannot read {clean(command[-1])} on {node}: {clean(why[0])}")
    return done.stdout or b""
