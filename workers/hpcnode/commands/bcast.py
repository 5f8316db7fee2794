"""The step that copies a file to all nodes of a job, for sbcast and ``srun --bcast``.

It needs no share. The file is written beside its target and renamed, so that it is never seen incomplete. Nodes that share the
directory write the same file in turn. Sources: sbcast(1); srun(1), --bcast.
"""

from __future__ import annotations

import os
import shlex
from typing import List, Mapping

OF_NODE = '"_$SLURMD_NODENAME"'


def step_words(
    source: str, target: str, job_id: str, environ: Mapping[str, str], *, force: bool = True, keep_times: bool = False
) -> List[str]:
    """Return hrun's arguments for a step that copies `source` to `target` (shell text).

    Raises OSError.
    """
    facts = os.stat(source)
    beside = target + '".bcast.$SLURMD_NODENAME"'
    script = "cat > %s && chmod %o %s && " % (beside, facts.st_mode & 0o777, beside)
    if keep_times:
        script += "touch -d @%r %s && " % (facts.st_mtime, beside)
    if not force:
        script = "test ! -e %s || { echo %s: File exists >&2; exit 1; }; %s" % (target, target, script)
    script += "mv -f %s %s" % (beside, target)
    nodes = environ.get("SLURM_JOB_NUM_NODES", "") if job_id in ("", environ.get("SLURM_JOB_ID")) else ""
    return [
        *(["--nodes=" + nodes, "--ntasks=" + nodes] if nodes else []),
        *(["--jobid=" + job_id] if job_id else []),
        "--ntasks-per-node=1", "--cpus-per-task=1", "--overlap", "--kill-on-bad-exit=1", "--quiet", "--input=" + source,
        "--output=all", "--error=all", "sh", "-c", script,
    ]  # fmt: skip


def program_path(program: str, environ: Mapping[str, str]) -> str:
    """Return the path of a command's program. Raises FileNotFoundError."""
    if "/" in program:
        return program
    for folder in environ.get("PATH", os.defpath).split(":"):
        path = os.path.join(folder, program)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    raise FileNotFoundError(2, os.strerror(2), program)


def shell_target(destination: str, job_id: str) -> str:
    """Return the target of --bcast=DESTINATION as shell text.

    In a directory the node's name makes it unique.
    """
    if destination and not destination.endswith("/"):
        return shlex.quote(destination)
    return shlex.quote(os.path.join(destination or os.getcwd(), "slurm_bcast_%s.%d" % (job_id, os.getpid()))) + OF_NODE
