"""srun A : B: several programs as one step, whose tasks are numbered through, each part with nodes and cpus of its own.

The step is asked for with the numbers of its parts; which program a task runs is settled where it starts, by a shell command
that all of them run; each part may have output files and variables of its own. What else the parts say (labels, memory ...)
concerns the step, so that only the first says it.

Source: "Heterogeneous Job Steps" of Slurm's documentation.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Dict, List, Mapping, Sequence, Tuple

from hpcnode.commands import hrun, multi_prog, options
from hpcnode.commands.output import STREAMS

MAX_TASKS = 100_000
# What a part may say for itself.
OWN = (
    "nodes",
    "ntasks",
    "cpus-per-task",
    "ntasks-per-node",
    "nodelist",
    "exclude",
    "het-group",
)


def run(words: Sequence[str], face: hrun.Face, environ: Mapping[str, str]) -> int:
    """Run the step that the words ask for and return its exit code."""
    try:
        values, command = as_one(words, environ)
    except (options.UsageError, multi_prog.MultiProgError) as error:
        text = error.text(face.name) if isinstance(error, options.UsageError) else str(error)
        sys.stderr.write("%s: error: %s\n" % (face.name, text))
        return face.usage_code
    return hrun.start(values, command, face, environ)


def as_one(words: Sequence[str], environ: Mapping[str, str]) -> Tuple[options.Values, List[str]]:
    """Return the options and the command of the step that ``A : B`` asks for. Raises UsageError, MultiProgError."""
    common: options.Values = {}
    parts: List[Dict[str, str]] = []
    files: List[Dict[str, str]] = []
    exports: List[str] = []
    commands = []
    parsed = [options.parse(part) for part in _split(words)]
    for number, (values, _) in enumerate(parsed, start=1):
        command = next(
            (command for _, command in parsed[number - 1 :] if command), None
        )  # its own, or that of the next
        if command is None:
            raise options.UsageError("part %d of the step has no command, nor has one behind it" % number)
        own = {name: str(values.pop(name)) for name in OWN if name in values}
        own["ntasks"] = str(_tasks(own, number, environ))
        files.append({"ntasks": own["ntasks"], **_files(values, number)})
        exports.append(str(values.pop("export", "")))
        common = values if number == 1 else common
        strange = [name for name, value in values.items() if common.get(name) != value]
        if strange:
            raise options.UsageError(
                "cannot give part %d of the step its own --%s: the parts of srun A : B may differ in their programs and in %s"
                % (number, strange[0], ", ".join("--" + name for name in (*OWN, *STREAMS, "export")))
            )
        parts.append(own)
        commands.append(command)
    common.setdefault("job-name", os.path.basename(commands[0][0]))
    export, variables = _exports(exports)
    asked = any("cpus-per-task" in own for own in parts)
    programs = [
        (int(own["ntasks"]), {**(_cpus(own) if asked else {}), **env}, command)
        for own, env, command in zip(parts, variables, commands)
    ]
    said = {**common, **export, **_allocation(parts), "parts": json.dumps(parts)}
    if any(len(one) > 1 for one in files):
        said["part-files"] = json.dumps(files)
    return said, multi_prog.command_for(programs)


def _files(values: options.Values, number: int) -> Dict[str, str]:
    """Take the files of a part out of its options."""
    files = {name: str(values.pop(name)) for name in STREAMS if name in values}
    for name, text in files.items():
        if text.isdigit():
            raise options.UsageError(
                "cannot read --%s=%s of part %d: a file is needed, all or none" % (name, text, number)
            )
    return files


def _exports(texts: Sequence[str]) -> Tuple[options.Values, List[Dict[str, str]]]:
    """Return the --export of the step, if there is one, and the variables that each part sets itself.

    `texts` are the parts' --export, "" where there is none.
    """
    variables: List[Dict[str, str]] = []
    shared = set()
    for text in texts:
        words = [word for word in text.split(",") if word]
        variables.append(dict(word.split("=", 1) for word in words if "=" in word))
        shared.add(",".join(word for word in words if "=" not in word) or ("NONE" if words else ""))
    strange = [name for part in variables for name in part if not name.isidentifier()]
    if strange:
        raise options.UsageError("cannot set %s for a part of the step: that is no variable's name" % strange[0][:60])
    given = shared - {""}
    if len(given) > 1 or ("" in shared and given - {"ALL"}):
        raise options.UsageError(
            "cannot give the parts of the step --export=%s: they may differ in the variables that they set (NAME=VALUE)"
            % " and ".join(sorted(text or "ALL" for text in shared))
        )
    return {"export": given.pop()} if given else {}, variables


def _cpus(own: Mapping[str, str]) -> Dict[str, str]:
    """Return what the tasks of a part find of their cpus in the environment."""
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
    """Return how many tasks a part has: --ntasks, or --ntasks-per-node (default: 1) on each of its nodes.

    In a heterogeneous job a part that does not say has the nodes and tasks of its component.
    """
    group = own.get("het-group", str(number - 1))
    if "HPCSCHED_HET_SIZE" in environ and not group.isdigit():
        raise options.UsageError(
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
        raise options.UsageError("cannot read --%s=%s of part %d: a number is needed" % (name, text[:40], number))
    return int(text)


def _allocation(parts: Sequence[Mapping[str, str]]) -> options.Values:
    """Return the numbers of the job that is made for the step where it is not in one: enough for all of its parts."""
    values: options.Values = {"ntasks": str(sum(int(part["ntasks"]) for part in parts))}
    if any("nodes" in part for part in parts):
        values["nodes"] = str(sum(int(part.get("nodes", "1").partition("-")[0]) for part in parts))
    cpus = [int(part["cpus-per-task"]) for part in parts if part.get("cpus-per-task", "").isdigit()]
    return {**values, "cpus-per-task": str(max(cpus))} if cpus else values
