"""A whole submission: the words of the command line, the script and the environment to a `JobSpec`.

The same for a command that makes the specification itself and for the controller, to which `hsub` may hand all three as they
are: importing what reads them takes a command longer than all the rest of it. Knows no files and no clock. What the
controller cannot do in a command's place (wait, answer questions, know the user's time zone) it refuses by
an error, and the command then does it itself.
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
from hpcsched.jobscript.scan import CommandLine, Settings, parse_command_line
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


# --wait and these are the command's own business; a date means what the user's time zone makes of it.
_NOT_REMOTE = (
    "help", "version", "dry-run", "test-only", "wait", "each", "json", "request-id", "begin", "deadline", "clusters",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionWords:
    """What a command was called with. `script` None: its text is that of --wrap."""

    command: str
    argv: tuple[str, ...]
    script: str | None
    script_path: str
    environ: Mapping[str, str]
    work_dir: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What became of the words: the options of all layers, and the job that they ask for."""

    options: Mapping[str, Sequence[str]]
    built: Built


def read_submission(
    words: SubmissionWords, line: CommandLine, now_s: float, find_job: Callable[[str], int] | None = None
) -> Submission:
    """Return the job that `words` ask for; `line` is what `parse_command_line` made of them.

    `find_job` returns the id of the job that a name, or ``last``, in a dependency means; without it names are refused.
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
    if find_job is not None and "dependency" in options:
        options["dependency"] = [with_job_ids(text, find_job) for text in options["dependency"]]
    built = build_spec(
        options,
        script=script,
        default_name=script_name(line.options, line.script),
        work_dir=words.work_dir,
        environ=words.environ,
        now_s=now_s,
        script_args=line.args,
        script_path=words.script_path if wrapped is None else "",
        submit_line=shlex.join([words.command, *words.argv]),
        submit_host=words.host,
    )
    spec = with_components(built.spec, options, directives.further, line.further)
    check_spec(spec)
    late = [f"line {number} of the script is not read: it stands behind a command" for number in directives.late_lines]
    misspelled = [
        f"line {number} of the script is a comment, but looks like a directive: those begin with #SBATCH or #HSUB"
        for number in directives.misspelled_lines
    ]
    return Submission(options=options, built=Built(spec=spec, notes=(*built.notes, *late, *misspelled)))


def read_remote(words: SubmissionWords, now_s: float) -> Submission:
    """Return the job that `words` ask for, in the command's place. Raises RequestError."""
    line = parse_command_line(words.argv)
    if words.script is None and last(line.options, "wrap") is None:
        raise RequestError("cannot submit: neither a script nor --wrap")
    found = read_submission(words, line, now_s)
    for name in _NOT_REMOTE:
        if any(name in options for options in (found.options, *line.further)):
            raise RequestError(f"cannot submit the words of a command with --{name}: it has to read them itself")
    return found


def words_from_json(obj: object) -> SubmissionWords:
    """Return the words that a command has sent. Raises RequestError."""
    if not isinstance(obj, dict) or set(obj) - {field for field in SubmissionWords.__dataclass_fields__}:
        raise RequestError('cannot submit: "words" has unknown fields, or is no object')
    argv, environ = obj.get("argv"), obj.get("environ")
    if not isinstance(argv, list) or not all(isinstance(word, str) for word in argv):
        raise RequestError('cannot submit: "argv" is no list of words')
    if not isinstance(environ, dict) or not all(isinstance(value, str) for value in environ.values()):
        raise RequestError('cannot submit: "environ" is no object of texts')
    texts = {name: obj.get(name, "") for name in ("command", "script_path", "work_dir", "host")}
    script = obj.get("script")
    if not all(isinstance(text, str) for text in texts.values()) or not isinstance(script, str | None):
        raise RequestError('cannot submit: a field of "words" is no text')
    return SubmissionWords(argv=tuple(argv), environ=environ, script=script, **texts)


def manners(submission: Submission) -> dict[str, bool]:
    """Return what the options, of all layers, say of how the command answers."""
    options = submission.options
    return {
        "quiet": is_set(options, "quiet"),
        "verbose": "verbose" in options,
        "parsable": is_set(options, "parsable"),
    }
