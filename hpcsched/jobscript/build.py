"""Build a `JobSpec` from options, and a job from command line, script and environment.

Defaults, contradictions, and fields that follow from several options. Knows no cluster (the controller checks that nodes,
partitions and accounts exist), no files and no clock. Dates are in the time zone of the process. Rules follow sbatch: more nodes
than tasks become as many nodes as tasks; options without effect are accepted with a note.

`check_spec` has the checks of a specification that are the same on every cluster. The controller repeats them, because a client
may send anything; `hpcsched.model.codec` has checked the types before. Each is linear in its input, and checks sizes first.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import lt
from typing import Any

from hpcnode.os import rlimits
from hpcsched.errors import RequestError
from hpcsched.jobscript.options import (
    CommandLine,
    Settings,
    Use,
    by_name,
    environment_options,
    is_set,
    last,
    merge_layers,
)
from hpcsched.jobscript.script import check_script, foreign_options, read_script, wrap_script
from hpcsched.jobscript.values import (
    GPU_TYPE,
    HINTS,
    MAIL_TYPES,
    MAX_ARRAY_INDEX,
    MAX_ARRAY_TASKS,
    MAX_COUNT,
    MAX_DEPENDENCIES,
    MAX_ENV_BYTES,
    MAX_LICENSES,
    MAX_NICE,
    MAX_PRIORITY,
    MAX_VARIABLES,
    Export,
    exported,
    parse_dependency,
    parse_distribution_text,
    short,
    why_not_a_variable,
    with_job_ids,
)
from hpcsched.model.dates import parse_when
from hpcsched.model.frozen import replace
from hpcsched.model.hostlist import MAX_NAMES
from hpcsched.model.ids import NODE_NAME
from hpcsched.model.job import MAX_COMPONENTS
from hpcsched.model.node import ANY_GPU, GpuRequest
from hpcsched.model.spec import ArraySpec, Dependency, DependencyKind, JobSpec, SignalSpec
from hpcsched.model.units import MAX_SIGNAL, UNLIMITED_S, format_time_s, parse_time_s
from hpcsched.sched.place.features import parse_constraint, parse_features

# Option: field, where the value read is the field's.
DIRECT = {
    "account": "account", "array": "array", "comment": "comment", "constraint": "constraint",
    "contiguous": "contiguous", "cpus-per-task": "cpus_per_task", "error": "stderr", "elastic": "elastic",
    "exclude": "exclude", "exclusive": "exclusive", "gpus": "gpus_total", "gpus-per-node": "gpus_per_node",
    "gpu-power": "gpu_power", "gpus-per-task": "gpus_per_task", "hint": "hints", "hold": "hold", "distribution": "distribution",
    "input": "stdin", "job-name": "name", "kill-on-invalid-dep": "kill_on_invalid_dep", "lease": "lease",
    "licenses": "licenses", "mail-user": "mail_user", "mem": "mem_per_node_mib", "mem-per-cpu": "mem_per_cpu_mib",
    "mincpus": "mincpus", "nice": "nice", "nodelist": "nodelist", "ntasks": "ntasks",
    "ntasks-per-node": "ntasks_per_node", "open-mode": "open_mode", "output": "stdout", "overcommit": "overcommit",
    "partition": "partition", "prefer": "prefer", "priority": "priority", "qos": "qos", "requeue": "requeue",
    "reservation": "reservation", "signal": "signal", "spread-job": "spread", "time": "time_limit_s",
    "time-min": "time_min_s", "tmp": "tmp_mib",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A specification, and what the user may want to know about it."""

    spec: JobSpec
    notes: tuple[str, ...] = ()


def build_spec(
    options: Mapping[str, Sequence[str]],
    *,
    script: str | None,
    default_name: str,
    work_dir: str,
    environ: Mapping[str, str],
    now_s: float,
    script_args: Sequence[str] = (),
    script_path: str = "",
    submit_line: str = "",
    submit_host: str = "",
) -> Built:
    """Return the job that `options` (merged by `merge_layers`) ask for.

    `script` None is an allocation without one. `work_dir` is where the command runs: `--chdir` and relative names start
    there. `default_name` names a job that has no name: the script's, ``wrap`` or ``sbatch``. Raises RequestError.
    """
    if script is not None:
        check_script(script)
    values = _read(options)
    notes = [f"--{name} has no effect: {by_name()[name].help}" for name in options if by_name()[name].use is Use.NOTED]
    env, env_notes = exported(values.get("export", Export(everything=True)), environ)
    if "propagate" in values:
        env[rlimits.VARIABLE] = rlimits.chosen(env.get(rlimits.VARIABLE, ""), values["propagate"])
    fields = _fields_of(values, work_dir, now_s)
    fields.setdefault("name", default_name)
    notes += [*_time_notes(options, values), *_set_nodes(fields, values)]
    _set_gpus(fields, values)
    spec = JobSpec(
        script=script or "",
        script_args=tuple(script_args),
        script_path=script_path,
        env=tuple(env.items()),
        submit_line=submit_line,
        submit_dir=work_dir,
        submit_host=submit_host,
        **fields,
    )
    spec = _with_gpu_parts(spec, values)
    if spec.elastic and spec.nodes_min == spec.nodes_max:  # while it runs, an update may make it so
        raise RequestError(ELASTIC_NEEDS)
    check_spec(spec)
    return Built(spec=spec, notes=(*notes, *env_notes))


def _fields_of(values: Mapping[str, Any], work_dir: str, now_s: float) -> dict[str, Any]:
    """Return the fields of a job that follow from one option each. Raises RequestError."""
    fields: dict[str, Any] = {field: values[name] for name, field in DIRECT.items() if name in values}
    fields["cpus_per_task_given"] = "cpus-per-task" in values
    fields["mail_type"] = tuple(dict.fromkeys(event for events in values.get("mail-type", ()) for event in events))
    fields["work_dir"] = posixpath.join(work_dir, values["chdir"]) if "chdir" in values else work_dir
    if "begin" in values:
        fields["begin_at_s"] = int(parse_when(values["begin"], now_s))
    if "deadline" in values:
        fields["deadline_at_s"] = int(parse_when(values["deadline"], now_s))
    if "cheap-by" in values:
        fields["cheap_by_s"] = int(parse_when(values["cheap-by"], now_s))
    if "dependency" in values:
        fields["dependency"], fields["dependency_any"] = parse_dependency(values["dependency"])
    parse_constraint(values.get("constraint", ""))
    parse_features(values.get("prefer", ""))
    if "switches" in values:
        fields["switches"], fields["switches_wait_s"] = values["switches"]
    return fields


def _time_notes(options: Mapping[str, Sequence[str]], values: Mapping[str, Any]) -> list[str]:
    """Return notes on a time limit that is rounded up, and on a signal at the start."""
    limit_s = values.get("time")
    if limit_s is None:
        return []
    notes = []
    if parse_time_s(options["time"][-1], whole_minutes=False) != limit_s:
        notes.append(f"the time limit is rounded up to whole minutes: {format_time_s(limit_s)}")
    sent = values.get("signal")
    if sent is not None and 0 < limit_s <= sent.before_s:
        notes.append(
            f"the signal of --signal is due {sent.before_s} s before the time limit of {format_time_s(limit_s)}: "
            "the job gets it when it starts"
        )
    return notes


def _read(options: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the values of the options by their readers; of one that repeats all of them."""
    known = by_name()
    values: dict[str, Any] = {}
    for name, given in options.items():
        option = known.get(name)
        if option is None or not given:
            raise RequestError(f"cannot understand option --{name[:60]}")
        values[name] = [option.parse(text) for text in given] if option.repeats else option.parse(given[-1])
    return values


def _set_nodes(fields: dict[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Set the counts of nodes: at most one per task, as in sbatch, with a note."""
    if "nodes" not in values:
        return []
    low, high = values["nodes"]
    ntasks = values.get("ntasks")
    notes = []
    if ntasks is not None and ntasks < low:
        notes.append(f"{ntasks} tasks cannot run on {low} nodes: the job asks for {ntasks}")
        low, high = ntasks, ntasks
    fields.update(nodes_min=low, nodes_max=high, nodes_given=True)
    return notes


def _set_gpus(fields: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Let --gres and --gpus-per-node be two spellings of one thing."""
    if "gres" not in values:
        return
    gres = values["gres"]
    if values.get("gpus-per-node", gres.gpus) != gres.gpus:
        raise RequestError("cannot take both --gres and --gpus-per-node: they ask for different GPUs on each node")
    fields["gpus_per_node"] = gres.gpus
    fields["shards_per_node"] = gres.shards


def _with_gpu_parts(spec: JobSpec, values: Mapping[str, Any]) -> JobSpec:
    """Return `spec` with CPUs per task and memory per node from its GPUs.

    The options are --cpus-per-gpu and --mem-per-gpu.
    """
    cpus, mem_mib = values.get("cpus-per-gpu"), values.get("mem-per-gpu")
    if cpus is not None:
        if spec.cpus_per_task_given:
            raise RequestError("cannot take both --cpus-per-gpu and --cpus-per-task: they exclude each other")
        tasks = 1 if spec.gpus_per_task else _tasks_per_node(spec)
        gpus = _gpus_per_task_or_node(spec, "cpus-per-gpu")
        spec = replace(spec, cpus_per_task=-(-cpus * gpus // tasks), cpus_per_task_given=True)
    if mem_mib is not None:
        tasks = _tasks_per_node(spec) if spec.gpus_per_task else 1
        gpus = _gpus_per_task_or_node(spec, "mem-per-gpu")
        spec = replace(spec, mem_per_node_mib=mem_mib * gpus * tasks)
    return spec


def _tasks_per_node(spec: JobSpec) -> int:
    """Return the tasks of each node, as far as the options settle it; else refuse."""
    if spec.ntasks_per_node is not None:
        return spec.ntasks_per_node
    if spec.ntasks is None:
        return 1
    if spec.nodes_given and spec.nodes_min == spec.nodes_max and spec.ntasks % spec.nodes_min == 0:
        return spec.ntasks // spec.nodes_min
    raise RequestError("cannot share out what each GPU asks for: say --nodes and --ntasks-per-node as well")


def _gpus_per_task_or_node(spec: JobSpec, option: str) -> int:
    total = _count(spec.gpus_total)
    if spec.gpus_per_task or spec.gpus_per_node:
        return _count(spec.gpus_per_task or spec.gpus_per_node)
    if total and spec.nodes_given and spec.nodes_min == spec.nodes_max and total % spec.nodes_min == 0:
        return total // spec.nodes_min
    if total:
        raise RequestError(f"cannot take --{option} with --gpus={total}: say --gpus-per-node (and --nodes) instead")
    raise RequestError(f"cannot take --{option} without GPUs: say --gpus-per-node as well")


def _count(requests: tuple[GpuRequest, ...]) -> int:
    return sum(request.count for request in requests)


def script_name(options: Mapping[str, Sequence[str]], script: str | None) -> str:
    """Return the default name of a job: its script's, ``wrap``, or ``sbatch`` for stdin."""
    if last(options, "wrap") is not None:
        return "wrap"
    name = posixpath.basename(script or "")
    return name if name and script not in ("/dev/stdin", "-") else "sbatch"


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
    """Return `spec`, the first component of a heterogeneous job, with the others.

    `first` are its options; `rest` are those of the others, in order.

    Raises RequestError for what a component cannot have for itself.
    """
    made: list[JobSpec] = []
    name = spec.name
    for at in range(max(len(in_script), len(on_line))):
        options = merge_layers(*[layer[at] for layer in (in_script, on_line) if at < len(layer)])
        try:
            _check_component(options, first)
            own = {option: given for option, given in options.items() if option in OWN}
            built = build_spec(own, script=None, default_name=name, work_dir=spec.work_dir, environ={}, now_s=0.0)
        except RequestError as error:
            raise RequestError(f"component {at + 1} of the job: {error}") from None
        name = built.spec.name
        made.append(replace(built.spec, submit_dir=""))
    return replace(spec, components=tuple(made)) if made else spec


def _check_component(options: Settings, first: Mapping[str, Sequence[str]]) -> None:
    known = by_name()
    for name, given in options.items():
        common = name not in OWN and name not in OF_THE_SCRIPT and known[name].use is Use.JOB
        if common and list(given) != list(first.get(name, ())):
            raise RequestError(
                f"cannot give it its own --{name}: all components have that of the first one; leave it out, or submit a job "
                "of its own"
            )


# ----- a whole submission, for the command and for the controller


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionWords:
    """What a command was called with.

    `script`: the text of the file or of standard input, None if --wrap has it.
    """

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
    """Return the script and the options of all sources; `line` is the parsed command line.

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


def without_environment(layers: Layers) -> Layers:
    """Return the layers for a submission from another machine.

    Its variables are for options. A job takes them along if the option export says so.
    """
    if "export" in layers.options:
        return layers
    return Layers(
        script=layers.script,
        options={**layers.options, "export": ["NONE"]},
        further=layers.further,
        notes=layers.notes,
    )


def check_no_service(layers: Layers) -> None:
    """Raise RequestError for a script that is to be a service, which only hsub starts."""
    if "serve" in layers.options:
        raise RequestError("cannot start a service here, because of --serve: submit the script with hsub")


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


MAX_TEXT = 4_096
MAX_NAME = 1_024
MAX_ARGS_BYTES = 512 << 10
MAX_GPUS = 100_000
MAX_GPU_WATTS = 10_000
_TEXTS = (
    "name", "script_path", "work_dir", "submit_line", "submit_dir", "submit_host", "account", "partition", "qos",
    "reservation", "comment",
    "stdout", "stderr", "stdin", "constraint", "prefer", "mail_user",
)  # fmt: skip
_LATEST_S = 253_402_300_799  # 9999-12-31
_WORD_LIST = re.compile(r"[A-Za-z0-9_.,+@-]*\Z")

ELASTIC_NEEDS = "cannot resize the job while it runs: --elastic needs a script and --nodes=MIN-MAX"


def check_spec(spec: JobSpec) -> None:
    """Raise RequestError for the first thing in `spec` that cannot be."""
    _check_texts(spec)
    if spec.script:
        check_script(spec.script)
    _check_args(spec.script_args)
    _check_env(spec.env)
    _check_numbers(spec)
    _check_gpus(spec)
    _check_names("nodelist", spec.nodelist)
    _check_names("exclude", spec.exclude)
    if both := set(spec.nodelist) & set(spec.exclude):
        raise RequestError(f"cannot use node {min(both)}: --nodelist asks for it and --exclude forbids it")
    if spec.array is not None:
        _check_array(spec.array)
    _check_dependencies(spec.dependency)
    _check_licenses(spec.licenses)
    if spec.signal is not None:
        _check_signal(spec.signal)
    if spec.components:
        _check_components(spec)


def _check_components(spec: JobSpec) -> None:
    """Refuse what a heterogeneous job cannot be."""
    if len(spec.components) >= MAX_COMPONENTS:
        raise RequestError(
            f"cannot submit a job of {len(spec.components) + 1} components: the most is {MAX_COMPONENTS}"
        )
    if spec.array is not None:
        raise RequestError(
            "cannot submit an array of heterogeneous jobs: leave out --array, or submit each job by itself"
        )
    if spec.elastic:
        raise RequestError("cannot let a heterogeneous job shrink and grow: leave out --elastic")
    for number, component in enumerate((spec, *spec.components)):
        if number and component.components:
            raise RequestError(f"cannot divide component {number} into components")
        if component.switches:
            raise RequestError(
                f"cannot keep component {number} within switches: leave out --switches, or submit a job of its own"
            )
        if number:
            check_spec(component)


def check_time_min(time_min_s: int | None, time_limit_s: int | None) -> None:
    """Refuse a time limit that is less than what it may be lowered to."""
    if time_min_s is not None and time_limit_s is not None and time_min_s > time_limit_s:
        raise RequestError(
            f"cannot lower the time limit of {format_time_s(time_limit_s)} to --time-min={format_time_s(time_min_s)}: "
            "that is more"
        )


def _check_texts(spec: JobSpec) -> None:
    for field in _TEXTS:
        text = getattr(spec, field)
        if len(text) > MAX_NAME or not text.isprintable():  # else: neither control characters nor surrogates
            _check_text(field, text)
    if not spec.name:
        raise RequestError("cannot submit a job without a name")
    if not spec.work_dir.startswith("/"):
        raise RequestError(f"cannot run in {short(spec.work_dir)}: the directory must be an absolute path")
    for field in ("account", "partition", "qos", "reservation", "mail_user"):
        text = getattr(spec, field)
        if _WORD_LIST.match(text) is None or text.startswith("-"):
            raise RequestError(f"cannot take --{field.replace('_', '-')} {short(text)}: it cannot be such a name")
    _check_word("open-mode", spec.open_mode, ("", "append", "truncate"))
    _check_word("lease", spec.lease, ("keep", "kill"))
    if spec.distribution and parse_distribution_text(spec.distribution) != spec.distribution:
        raise RequestError(f"cannot take --distribution {short(spec.distribution)}: write it as in SLURM_DISTRIBUTION")
    for hint in spec.hints:
        _check_word("hint", hint, HINTS)
    for event in spec.mail_type:
        _check_word("mail-type", event, MAIL_TYPES)


def _check_text(field: str, text: str) -> None:
    most = {"name": MAX_NAME, "submit_line": 1 << 20}.get(field, MAX_TEXT)
    what = "--" + {"stdout": "output", "stderr": "error", "stdin": "input"}.get(field, field.replace("_", "-"))
    if len(text) > most:
        raise RequestError(f"cannot take {what} of {len(text)} characters: the most is {most}")
    if field != "submit_line" and any(char < " " or char == "\x7f" for char in text):
        raise RequestError(f"cannot take {what} {short(text)}: it has control characters")
    if "\0" in text or not _is_utf8(text):
        raise RequestError(f"cannot take {what} {short(text)}: it is not UTF-8 text")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_word(option: str, word: str, known: Iterable[str]) -> None:
    if word not in known:
        raise RequestError(f"cannot take --{option} {short(word)}: write {' or '.join(filter(None, known))}")


def _check_licenses(licenses: tuple[tuple[str, int], ...]) -> None:
    if len(licenses) > MAX_LICENSES or len(dict(licenses)) < len(licenses):
        raise RequestError(f"cannot take --licenses: write each once, and at most {MAX_LICENSES}")
    for name, count in licenses:
        if NODE_NAME.match(name) is None:
            raise RequestError(f"cannot take --licenses {short(name)}: it cannot be such a name")
        _check_range("licenses", count, 1, MAX_COUNT)


def _check_args(args: tuple[str, ...]) -> None:
    size = sum(map(len, args)) + len(args)
    if size > MAX_ARGS_BYTES:
        raise RequestError(f"cannot pass {size} bytes of arguments to the script: the most is {MAX_ARGS_BYTES}")
    for arg in args:
        if "\0" in arg or not _is_utf8(arg):
            raise RequestError(f"cannot pass {short(arg)} to the script: it is not UTF-8 text")


def _check_env(env: tuple[tuple[str, str], ...]) -> None:
    if len(env) > MAX_VARIABLES:
        raise RequestError(f"cannot take {len(env)} variables along: the most is {MAX_VARIABLES}; use --export=NONE")
    size = sum(len(name) + len(value) + 2 for name, value in env)
    if size > MAX_ENV_BYTES:
        raise RequestError(f"cannot take {size} bytes of environment along: the most is {MAX_ENV_BYTES}")
    for name, value in env:
        if why := why_not_a_variable(name, value):
            raise RequestError(f"cannot take the environment along: {why}")
    if len({name for name, _ in env}) < len(env):
        raise RequestError("cannot take the environment along: a variable is there twice")


def _check_numbers(spec: JobSpec) -> None:
    _check_range("nodes", spec.nodes_min, 1, MAX_COUNT)
    _check_range("nodes", spec.nodes_max, spec.nodes_min, MAX_COUNT)
    _check_range("cpus-per-task", spec.cpus_per_task, 1, MAX_COUNT)
    _check_range("nice", spec.nice, -MAX_NICE, MAX_NICE)
    _check_range("mincpus", spec.mincpus, 0, MAX_COUNT)
    _check_range("tmp", spec.tmp_mib, 0, 1 << 53)
    _check_range("gpu-power", spec.gpu_power, 0, MAX_GPU_WATTS)
    _check_range("switches", spec.switches, 0, MAX_COUNT)
    for option, value, low, high in (
        ("switches", spec.switches_wait_s, 0, UNLIMITED_S),
        ("ntasks", spec.ntasks, 1, MAX_COUNT),
        ("ntasks-per-node", spec.ntasks_per_node, 1, MAX_COUNT),
        ("mem", spec.mem_per_node_mib, 0, 1 << 53),
        ("mem-per-cpu", spec.mem_per_cpu_mib, 0, 1 << 53),
        ("time", spec.time_limit_s, 1, UNLIMITED_S),
        ("time-min", spec.time_min_s, 1, UNLIMITED_S),
        ("begin", spec.begin_at_s, 0, _LATEST_S),
        ("deadline", spec.deadline_at_s, 1, _LATEST_S),
        ("cheap-by", spec.cheap_by_s, 1, _LATEST_S),
        ("priority", spec.priority, 0, MAX_PRIORITY),
    ):
        if value is not None:
            _check_range(option, value, low, high)
    check_time_min(spec.time_min_s, spec.time_limit_s)
    _check_together(spec)


def _check_together(spec: JobSpec) -> None:
    """Raise RequestError if two numbers of `spec` exclude each other."""
    has_gpus = any(one.gpus_per_node or one.gpus_total or one.gpus_per_task for one in (spec, *spec.components))
    if spec.gpu_power and not has_gpus:
        raise RequestError("cannot limit the power of GPUs: the job asks for no whole GPUs, as with --gpus-per-node=1")
    if spec.mem_per_node_mib is not None and spec.mem_per_cpu_mib is not None:
        raise RequestError("cannot take both --mem and --mem-per-cpu: they exclude each other")
    _check_task_counts(spec)
    if spec.elastic and not spec.has_script:
        raise RequestError(ELASTIC_NEEDS)
    if spec.elastic and (spec.ntasks is not None or spec.gpus_total):
        raise RequestError(
            "cannot resize the job while it runs: with --elastic say --ntasks-per-node and --gpus-per-node"
        )
    if spec.nodes_given and len(spec.nodelist) > spec.nodes_max:
        raise RequestError(
            f"cannot give job {spec.nodes_max} nodes: --nodelist names {len(spec.nodelist)}, and takes them all"
        )


def _check_task_counts(spec: JobSpec) -> None:
    """Raise RequestError if the nodes of `spec` cannot have all its tasks."""
    per_node, nodes = spec.ntasks_per_node, spec.nodes_max
    most = nodes * per_node if spec.nodes_given and per_node is not None and not spec.overcommit else None
    if spec.ntasks is not None and most is not None and spec.ntasks > most:
        raise RequestError(
            f"cannot give job {spec.ntasks} tasks: --nodes={nodes} with --ntasks-per-node={per_node} allows {most}"
        )


def _check_range(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RequestError(f"cannot take --{option}={value}: it must be {low} to {high}")


def _check_gpus(spec: JobSpec) -> None:
    for option, requests in (
        ("gpus-per-node", spec.gpus_per_node),
        ("gpus", spec.gpus_total),
        ("gpus-per-task", spec.gpus_per_task),
        ("gres", spec.shards_per_node),
    ):
        _check_gpu_requests(option, requests)
    if spec.gpus_per_node and spec.gpus_per_task:
        raise RequestError("cannot take both --gpus-per-node (or --gres) and --gpus-per-task: give one of them")
    if spec.shards_per_node and (spec.gpus_per_node or spec.gpus_per_task or spec.gpus_total):
        raise RequestError("cannot take --gres=shard with --gpus, --gpus-per-node or --gpus-per-task: give one of them")
    if len(spec.shards_per_node) > 1:
        raise RequestError("cannot take --gres=shard of several types: shards come from one GPU of a node")


def _check_gpu_requests(option: str, requests: tuple[GpuRequest, ...]) -> None:
    if len(requests) > 64 or len({request.type for request in requests}) < len(requests):
        raise RequestError(f"cannot take --{option}: a type is named twice, or there are over 64")
    for request in requests:
        if request.type != ANY_GPU and GPU_TYPE.match(request.type) is None:
            raise RequestError(f"cannot take --{option}: {short(request.type)} is not a GPU type")
        if not 1 <= request.count <= MAX_GPUS:
            raise RequestError(f"cannot take --{option}={request.count}: it must be 1 to {MAX_GPUS}")


def _check_names(option: str, names: tuple[str, ...]) -> None:
    if len(names) > MAX_NAMES:
        raise RequestError(f"cannot take --{option} of {len(names)} names: the most is {MAX_NAMES}")
    for name in names:
        if NODE_NAME.match(name) is None:
            raise RequestError(f"cannot take --{option}: {short(name)} cannot be a node's name")


def _check_array(array: ArraySpec) -> None:
    if not 1 <= len(array.indices) <= MAX_ARRAY_TASKS:
        raise RequestError(f"cannot make an array of {len(array.indices)} tasks: it must be 1 to {MAX_ARRAY_TASKS}")
    if not all(map(lt, array.indices, array.indices[1:])):
        raise RequestError("cannot make the array: its indices do not ascend")
    _check_range("array", array.indices[0], 0, MAX_ARRAY_INDEX)
    _check_range("array", array.indices[-1], 0, MAX_ARRAY_INDEX)
    _check_range("array", array.limit, 0, MAX_COUNT)


def _check_dependencies(dependencies: tuple[Dependency, ...]) -> None:
    if sum(len(dependency.job_ids) or 1 for dependency in dependencies) > MAX_DEPENDENCIES:
        raise RequestError(f"cannot make a job depend on more than {MAX_DEPENDENCIES} others")
    for dependency in dependencies:
        if bool(dependency.job_ids) == (dependency.kind is DependencyKind.SINGLETON):
            raise RequestError(f"cannot depend on jobs by {dependency.kind.value}: it takes ids, and singleton none")
        for job_id in dependency.job_ids:
            _check_range("dependency", job_id, 1, 1 << 60)
        if dependency.delay_s and dependency.kind is not DependencyKind.AFTER:
            raise RequestError(f"cannot read dependency {dependency.kind.value}: only after takes +minutes")
        _check_range("dependency", dependency.delay_s, 0, UNLIMITED_S)
        if dependency.task is not None:
            _check_range("dependency", dependency.task, 0, MAX_ARRAY_INDEX)


def _check_signal(signal: SignalSpec) -> None:
    _check_range("signal", signal.signum, 1, MAX_SIGNAL)
    _check_range("signal", signal.before_s, 0, 65_535)
