"""srun: `hrun` under Slurm's name, and several programs as one step (srun A : B).

It differs in its messages, in the version that it reports (MPI launchers check it), and in that SLURM_JOB_ID alone selects the
job: some clients delete all other variables of the scheduler.

The tasks of srun A : B are numbered consecutively; each part has its own nodes and cpus. The request has the numbers of
all parts. All tasks run one shell command, which selects the program of the task. Each part may have its own output files and
variables. All other options (label, mem ...) are those of the step, so only the first part has them.

Sources: srun(1) of Slurm 23.02; the use of srun in Open MPI, MPICH and snakemake's job step plugin; "Heterogeneous Job Steps" of
Slurm's documentation.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from hpcnode import paths
from hpcnode.commands import hrun, options, slurm_text
from hpcnode.commands.output import STREAMS

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
        return _run_parts(words, environ)
    return hrun.main(words, FACE, environ)


MAX_TASKS = 100_000
# Options that each part may have.
OWN = (
    "nodes",
    "ntasks",
    "cpus-per-task",
    "ntasks-per-node",
    "nodelist",
    "exclude",
    "het-group",
)


def _run_parts(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run srun A : B and return its exit code."""
    from hpcnode.commands import multi_prog  # rarely needed

    try:
        values, command = as_one(words, environ)
    except (options.OptionError, multi_prog.MultiProgError) as error:
        text = error.text(FACE.name) if isinstance(error, options.OptionError) else str(error)
        sys.stderr.write("%s: error: %s\n" % (FACE.name, text))
        return FACE.usage_code
    return hrun.start(values, command, FACE, environ)


class Part(NamedTuple):
    """One part of ``A : B``."""

    own: Dict[str, str]  # its options of OWN; `ntasks` is always there
    files: Dict[str, str]  # its options of STREAMS
    export: str  # "" if it has no --export
    command: List[str]


def as_one(words: Sequence[str], environ: Mapping[str, str]) -> Tuple[options.Values, List[str]]:
    """Return the options and the command of the step ``A : B``.

    Raises OptionError, MultiProgError.
    """
    from hpcnode.commands import multi_prog  # rarely needed

    parsed = [options.parse(part) for part in _split(words)]
    commands = _commands([command for _, command in parsed])
    common: options.Values = {}
    parts: List[Part] = []
    for number, (values, _) in enumerate(parsed, start=1):
        own = {name: str(values.pop(name)) for name in OWN if name in values}
        own["ntasks"] = str(_tasks(own, number, environ))
        files = _files(values, number)
        parts.append(Part(own, files, str(values.pop("export", "")), commands[number - 1]))
        common = values if number == 1 else common
        _check_same(values, common, number)
    common.setdefault("job-name", os.path.basename(commands[0][0]))
    export = _export([part.export for part in parts])
    said = {**common, **export, **_allocation([part.own for part in parts])}
    said["parts"] = json.dumps([part.own for part in parts])
    if any(part.files for part in parts):
        said["part-files"] = json.dumps([{"ntasks": part.own["ntasks"], **part.files} for part in parts])
    return said, multi_prog.command_for(_programs(parts))


def _programs(parts: Sequence[Part]) -> List[Tuple[int, Dict[str, str], List[str]]]:
    """Return number of tasks, variables and command of each part. Raises OptionError."""
    sets_cpus = any("cpus-per-task" in part.own for part in parts)
    programs = []
    for part in parts:
        variables = {**(_cpus(part.own) if sets_cpus else {}), **_variables(part.export)}
        programs.append((int(part.own["ntasks"]), variables, part.command))
    return programs


def _commands(given: Sequence[List[str]]) -> List[List[str]]:
    """Return the command of each part: its own, or that of the next part that has one.

    Raises OptionError.
    """
    commands: List[List[str]] = []
    for number in range(len(given), 0, -1):
        following = commands[0] if commands else []
        command = given[number - 1] or following
        if not command:
            raise options.OptionError(
                "part %d of the step has no command, and no later part has one" % _first_without(given)
            )
        commands.insert(0, command)
    return commands


def _first_without(given: Sequence[List[str]]) -> int:
    """Return the number of the first part that neither has a command nor is followed by one."""
    return max((number for number, command in enumerate(given, start=1) if command), default=0) + 1


def _check_same(values: options.Values, common: options.Values, number: int) -> None:
    """Raise OptionError if a part has another value of an option of the whole step."""
    different = [name for name, value in values.items() if common.get(name) != value]
    if different:
        raise options.OptionError(
            "cannot give part %d of the step its own --%s: the parts of srun A : B may differ in their programs and in %s"
            % (number, different[0], ", ".join("--" + name for name in (*OWN, *STREAMS, "export")))
        )


def _files(values: options.Values, number: int) -> Dict[str, str]:
    """Remove the files of a part from its options, and return them."""
    files = {name: str(values.pop(name)) for name in STREAMS if name in values}
    for name, text in files.items():
        if text.isdigit():
            raise options.OptionError(
                "cannot read --%s=%s of part %d: a file is needed, all or none" % (name, text, number)
            )
    return files


def _variables(export: str) -> Dict[str, str]:
    """Return the variables that an --export sets itself. Raises OptionError."""
    variables = dict(word.split("=", 1) for word in export.split(",") if "=" in word)
    for name in variables:
        if not name.isidentifier():
            raise options.OptionError(
                "cannot set %s for a part of the step: that is not the name of a variable" % name[:60]
            )
    return variables


def _export(texts: Sequence[str]) -> options.Values:
    """Return the --export of the step, from those of its parts ("": none). Raises OptionError."""
    shared = {_without_variables(text) for text in texts}
    given = shared - {""}
    if len(given) > 1 or ("" in shared and given - {"ALL"}):
        raise options.OptionError(
            "cannot give the parts of the step --export=%s: they may differ in the variables that they set (NAME=VALUE)"
            % " and ".join(sorted(text or "ALL" for text in shared))
        )
    return {"export": given.pop()} if given else {}


def _without_variables(export: str) -> str:
    """Return an --export without its NAME=VALUE; NONE if nothing else is left of it."""
    words = [word for word in export.split(",") if word]
    return ",".join(word for word in words if "=" not in word) or ("NONE" if words else "")


def _cpus(own: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables of a part's cpus."""
    cpus = own.get("cpus-per-task", "1")
    return {"HPCSCHED_CPUS_PER_TASK": cpus, "SLURM_CPUS_PER_TASK": cpus}


def _split(words: Sequence[str]) -> List[List[str]]:
    parts: List[List[str]] = [[]]
    for word in words:
        if word == ":":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _tasks(own: Mapping[str, str], number: int, environ: Mapping[str, str]) -> int:
    """Return the number of tasks of a part: --ntasks, or --ntasks-per-node on each node.

    In a heterogeneous job, a part without these options has the nodes and tasks of its component.
    """
    group = own.get("het-group", str(number - 1))
    if "HPCSCHED_HET_SIZE" in environ and not group.isdigit():
        raise options.OptionError(
            "cannot start part %d of the step in --het-group=%s: a part runs in one component" % (number, group[:40])
        )
    nodes = own.get("nodes") or environ.get("HPCSCHED_NNODES_HET_GROUP_" + group, "1")
    if not own.keys() & {"nodes", "ntasks", "ntasks-per-node"}:
        return sum(_counts(environ.get("HPCSCHED_TASKS_PER_NODE_HET_GROUP_" + group, "1")))
    if "ntasks" not in own and nodes.isdigit():
        return int(nodes) * _count(own.get("ntasks-per-node", "1"), "ntasks-per-node", number)
    return _count(own.get("ntasks", nodes), "ntasks" if "ntasks" in own else "nodes", number)


def _counts(text: str) -> List[int]:
    """Return the numbers of ``2(x2),1``."""
    found: List[int] = []
    for run in text.split(","):
        count, _, times = run.partition("(x")
        found += [int(count)] * int(times.rstrip(")") or 1)
    return found


def _count(text: str, name: str, number: int) -> int:
    if not text.isdigit() or not 1 <= int(text) <= MAX_TASKS:
        raise options.OptionError("cannot read --%s=%s of part %d: a number is needed" % (name, text[:40], number))
    return int(text)


def _allocation(parts: Sequence[Mapping[str, str]]) -> options.Values:
    """Return the size of a job that is made for the step: enough for all parts."""
    values: options.Values = {"ntasks": str(sum(int(part["ntasks"]) for part in parts))}
    if any("nodes" in part for part in parts):
        values["nodes"] = str(sum(int(part.get("nodes", "1").partition("-")[0]) for part in parts))
    cpus = [int(part["cpus-per-task"]) for part in parts if part.get("cpus-per-task", "").isdigit()]
    return {**values, "cpus-per-task": str(max(cpus))} if cpus else values
