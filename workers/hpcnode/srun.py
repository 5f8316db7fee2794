"""srun: `hrun` under Slurm's name, on the head and on the nodes of a job.

It differs in what is said, in the version that it announces (MPI launchers ask for it before they use srun), and in that
SLURM_JOB_ID alone says which job it is in: some clients delete every other variable of the scheduler's before they call it.

Sources: srun(1) of Slurm 23.02; what Open MPI, MPICH and snakemake's job step plugin do with it.
"""

from __future__ import annotations

import os
import sys
from typing import Dict, List, Mapping, Optional, Sequence

from hpcnode import hrun, place, stepoptions

SLURM_VERSION = "23.02.7"
FACE = hrun.Face("srun", "slurm " + SLURM_VERSION, 1)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run srun with these words (default: the command line's) and return its exit code."""
    return _run(list(sys.argv[1:] if argv is None else argv), with_job(os.environ))


def main_on_node(root: str, argv: Sequence[str]) -> int:
    """Run srun on a node, in a job: the agent is the one of `root`, whatever is left of the environment."""
    environ = with_job(os.environ)
    environ.setdefault("HPCSCHED_SOCKET", place.socket_path(root))
    return _run(list(argv), environ)


def with_job(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return `environ` with our own variable of the job, if only Slurm's is there."""
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "")
    own = {"HPCSCHED_JOB_ID": job_id} if job_id and not environ.get("HPCSCHED_JOB_ID") else {}
    return {**environ, **own}


def _run(words: List[str], environ: Mapping[str, str]) -> int:
    if ":" in words:
        from hpcnode import multiprog  # few need it

        try:
            words = as_one(words)
        except (stepoptions.UsageError, multiprog.MultiProgError) as error:
            sys.stderr.write("srun: error: %s\n" % error)
            return 1
    return hrun.main(words, FACE, environ)


def as_one(words: Sequence[str]) -> List[str]:
    """Return the words that start ``A : B``: one step whose first tasks run A and the next ones B. Raises UsageError.

    The parts differ in their programs and numbers of tasks alone: what else they say must be said by the first.
    """
    from hpcnode import multiprog

    common: stepoptions.Values = {}
    programs = []
    for number, part in enumerate(_parts(words), start=1):
        values, command = stepoptions.parse(part)
        count = str(values.pop("ntasks", "1"))
        if not command:
            raise stepoptions.UsageError("part %d of the step has no command" % number)
        if not count.isdigit() or not 1 <= int(count) <= 100_000:
            raise stepoptions.UsageError("cannot read --ntasks=%s: a number of tasks is needed" % count[:40])
        common = values if number == 1 else common
        own = [name for name, value in values.items() if common.get(name) != value]
        if own or "het-group" in values:
            raise stepoptions.UsageError(
                "cannot give part %d of the step its own --%s: the parts of srun A : B may differ in --ntasks and their "
                "programs alone here" % (number, own[0] if own else "het-group")
            )
        programs.append((int(count), command))
    common.setdefault("job-name", os.path.basename(programs[0][1][0]))
    options = ["--" + name if value is True else "--%s=%s" % (name, value) for name, value in common.items()]
    return [*options, "--ntasks=%d" % sum(count for count, _ in programs), *multiprog.command_for(programs)]


def _parts(words: Sequence[str]) -> List[List[str]]:
    parts: List[List[str]] = [[]]
    for word in words:
        if word == ":":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts
