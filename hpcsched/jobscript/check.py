"""Checks of a job specification that are the same on every cluster.

`build_spec` makes specifications that pass; the controller checks each again, because a client may send anything.
`hpcsched.model.codec` has checked the types before. Knows no nodes, partitions or accounts. Every check is linear in its
input; sizes are checked first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import lt

from hpcsched.errors import RequestError
from hpcsched.jobscript.script import check_script
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
    short,
    why_not_a_variable,
)
from hpcsched.model.hostlist import MAX_NAMES
from hpcsched.model.ids import NODE_NAME
from hpcsched.model.job import MAX_COMPONENTS
from hpcsched.model.node import ANY_GPU, GpuRequest
from hpcsched.model.spec import ArraySpec, Dependency, DependencyKind, JobSpec, SignalSpec
from hpcsched.model.units import MAX_SIGNAL, UNLIMITED_S, format_time_s

MAX_TEXT = 4_096
MAX_NAME = 1_024
MAX_ARGS_BYTES = 512 << 10
MAX_GPUS = 100_000
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
        ("priority", spec.priority, 0, MAX_PRIORITY),
    ):
        if value is not None:
            _check_range(option, value, low, high)
    check_time_min(spec.time_min_s, spec.time_limit_s)
    _check_together(spec)


def _check_together(spec: JobSpec) -> None:
    """Raise RequestError if two numbers of `spec` exclude each other."""
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
