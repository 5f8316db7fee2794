"""A whole submission: command line, script and environment to a `JobSpec`, for the command and for the controller.

Knows no files and no clock. Dates are in the time zone of the process.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpcsched.errors import RequestError
from hpcsched.jobscript.build import Built, build_spec, script_name
from hpcsched.jobscript.check import check_spec
from hpcsched.jobscript.dependency import with_job_ids
from hpcsched.jobscript.layers import environment_options, is_set, last, merge_layers
from hpcsched.jobscript.options import Use, by_name
from hpcsched.jobscript.scan import CommandLine, Settings
from hpcsched.jobscript.script import foreign_options, read_script, wrap_script
from hpcsched.model.frozen import replace
from hpcsched.model.spec import JobSpec

# ----- the components of a heterogeneous job: sbatch A : B job.sh, ``#SBATCH hetjob`` lines
# The first component has the job's script and all that concerns the job as a whole (partition, account, time limit ...); the
# others say what they need of nodes of their own. As in Slurm what a component says of its nodes is not handed on to the next
# one, and what concerns the script alone counts of the first. Partition, account and the like are one for all of them here.
#
# Source: sbatch(1); "Heterogeneous Job Support" of Slurm's documentation.


OWN = frozenset((
    "constraint", "cpus-per-gpu", "cpus-per-task", "distribution", "exclude", "exclusive", "gpus", "gpus-per-node",
    "gpus-per-task", "gres", "hint", "job-name", "mem", "mem-per-cpu", "mem-per-gpu", "mincpus", "nodelist", "nodes", "ntasks",
    "ntasks-per-node", "overcommit", "prefer", "tmp",
))  # fmt: skip
OF_THE_SCRIPT = frozenset((
    "chdir", "comment", "error", "export", "input", "lease", "mail-type", "mail-user", "open-mode", "output", "requeue", "signal",
))  # fmt: skip


def with_components(
    spec: JobSpec, first: Mapping[str, Sequence[str]], in_script: Sequence[Settings], on_line: Sequence[Settings]
) -> JobSpec:
    """Return `spec`, the first component, with the others; `first` are its options, the rest those of the others by place.

    Raises RequestError for what a component cannot have for itself.
    """
    made: list[JobSpec] = []
    name = spec.name
    for at in range(max(len(in_script), len(on_line))):
        options = merge_layers(*[layer[at] for layer in (in_script, on_line) if at < len(layer)])
        try:
            _check(options, first)
            own = {option: given for option, given in options.items() if option in OWN}
            built = build_spec(own, script=None, default_name=name, work_dir=spec.work_dir, environ={}, now_s=0.0)
        except RequestError as error:
            raise RequestError(f"component {at + 1} of the job: {error}") from None
        name = built.spec.name
        made.append(replace(built.spec, submit_dir=""))
    return replace(spec, components=tuple(made)) if made else spec


def _check(options: Settings, first: Mapping[str, Sequence[str]]) -> None:
    known = by_name()
    for name, given in options.items():
        common = name not in OWN and name not in OF_THE_SCRIPT and known[name].use is Use.JOB
        if common and list(given) != list(first.get(name, ())):
            raise RequestError(
                f"cannot give it its own --{name}: all components have that of the first one; leave it out, or submit a job "
                "of its own"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionWords:
    """What a command was called with. `script`: the text of the file or of standard input, None if --wrap has it."""

    command: str
    argv: tuple[str, ...]
    script: str | None
    script_path: str
    environ: Mapping[str, str]
    work_dir: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The script, and the options of all places, before their values are understood."""

    script: str
    options: Settings
    further: tuple[Settings, ...]  # of the script's other components
    notes: tuple[str, ...]


def read_layers(words: SubmissionWords, line: CommandLine) -> Layers:
    """Return the script and the options of all places; `line` is what `parse_command_line` made of the words.

    Raises RequestError.
    """
    wrapped = last(line.options, "wrap")
    if wrapped is not None and not wrapped.strip():
        raise RequestError("cannot submit: the command of --wrap is empty")
    script = (words.script or "") if wrapped is None else wrap_script(wrapped)
    directives = read_script(script)
    options = merge_layers(directives.options, environment_options(words.environ), line.options)
    if directives.foreign_lines and not is_set(options, "ignore-pbs"):
        options = merge_layers(foreign_options(directives.foreign_lines), options)
    late = [f"line {number} of the script is ignored: it follows a command" for number in directives.late_lines]
    misspelled = [
        f"line {number} of the script is a comment, but looks like a directive: those begin with #SBATCH or #HSUB"
        for number in directives.misspelled_lines
    ]
    return Layers(script=script, options=options, further=directives.further, notes=(*late, *misspelled))


def build_submission(
    words: SubmissionWords,
    line: CommandLine,
    layers: Layers,
    now_s: float,
    find_job: Callable[[str], int] | None = None,
) -> Built:
    """Return the job that the layers ask for, with notes.

    `find_job` returns the id of the job that a name, or ``last``, in a dependency means; without it names are refused.
    Raises RequestError.
    """
    options = layers.options
    if find_job is not None and "dependency" in options:
        options = {**options, "dependency": [with_job_ids(text, find_job) for text in options["dependency"]]}
    built = build_spec(
        options,
        script=layers.script,
        default_name=script_name(line.options, line.script),
        work_dir=words.work_dir,
        environ=words.environ,
        now_s=now_s,
        script_args=line.args,
        script_path=words.script_path if last(line.options, "wrap") is None else "",
        submit_line=shlex.join([words.command, *words.argv]),
        submit_host=words.host,
    )
    spec = with_components(built.spec, options, layers.further, line.further)
    check_spec(spec)
    return Built(spec=spec, notes=(*built.notes, *layers.notes))
