"""srun: `hrun` under Slurm's name, on the head and on the nodes of a job.

It differs in its messages, in the version that it reports (MPI launchers check it), and in that SLURM_JOB_ID alone selects the
job: some clients delete all other variables of the scheduler.

Sources: srun(1) of Slurm 23.02; the use of srun in Open MPI, MPICH and snakemake's job step plugin.
"""

from __future__ import annotations

import os
import sys
from typing import Dict, List, Mapping, Optional, Sequence

from hpcnode import paths
from hpcnode.commands import hrun, slurm_text

SLURM_VERSION = "23.02.7"
FACE = hrun.CommandStyle("srun", "slurm " + SLURM_VERSION, 1, slurm_text.of_step, is_slurm=True)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run srun with these arguments (default: the command line) and return its exit code."""
    return _run(list(sys.argv[1:] if argv is None else argv), with_job(os.environ))


def main_on_node(root: str, argv: Sequence[str]) -> int:
    """Run srun on a node, in a job, with the agent of `root`."""
    environ = with_job(os.environ)
    environ.setdefault("HPCSCHED_SOCKET", paths.socket_path(root))
    return _run(list(argv), environ)


def with_job(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return `environ` with our variable of the job, if only Slurm's is set."""
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "")
    own = {"HPCSCHED_JOB_ID": job_id} if job_id and not environ.get("HPCSCHED_JOB_ID") else {}
    return {**environ, **own}


def _run(words: List[str], environ: Mapping[str, str]) -> int:
    if ":" in words:
        from hpcnode.commands import hetero_step  # rarely needed

        return hetero_step.run(words, FACE, environ)
    return hrun.main(words, FACE, environ)
