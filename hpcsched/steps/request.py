"""Parse and check a step's request: the texts of a `StepRequest`.

It also makes the request of a job for hrun outside an allocation. It knows options, but neither placement nor messages to
nodes. It keeps no state.

Rules: the texts come from a user. Every value is checked here, and a rejected value is reported with what was expected. Options
that only hrun uses are accepted and ignored. Unknown options are rejected.

Source: srun(1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hpcnode.commands import options as stepoptions
from hpcnode.wire import gate, protocol
from hpcsched.errors import RequestError
from hpcsched.jobscript.values import (
    Gres,
    parse_array,
    parse_count,
    parse_dependency,
    parse_distribution,
    parse_distribution_text,
    parse_gpus,
    parse_gres,
    parse_hints,
    parse_licenses,
    parse_limit_s,
    parse_nice,
    parse_node_memory,
    parse_node_names,
    parse_nodes,
    parse_open_mode,
    parse_priority,
    parse_signal_spec,
    parse_switches,
)
from hpcsched.model.dates import parse_when
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job
from hpcsched.model.node import GpuRequest
from hpcsched.model.spec import JobSpec, SignalSpec
from hpcsched.model.units import parse_mem_mib, parse_time_s
from hpcsched.steps.layout import StepShape, lay_out

T = TypeVar("T")

MAX_ENV_BYTES = 4 << 20

# Options of a step. Those without a reader above are used by hrun only, or by the job made for the
# step.
KNOWN_OPTIONS = frozenset(
    [
        "account",
        "begin",
        "chdir",
        "comment",
        "components",
        "constraint",
        "contiguous",
        "cpu-bind",
        "cpus-per-task",
        "deadline",
        "dependency",
        "distribution",
        "error",
        "exact",
        "exclude",
        "exclusive",
        "export",
        "gpus",
        "gpus-per-node",
        "gpus-per-task",
        "gres",
        "het-group",
        "hint",
        "hold",
        "hosts",
        "immediate",
        "input",
        "job-name",
        "jobid",
        "kill-on-bad-exit",
        "label",
        "licenses",
        "mem",
        "mem-per-cpu",
        "mincpus",
        "mpi",
        "nice",
        "no-shell",
        "nodelist",
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "open-mode",
        "output",
        "overcommit",
        "overlap",
        "partition",
        "parts",
        "prefer",
        "preserve-env",
        "priority",
        "qos",
        "remote-shell",
        "reservation",
        "shell",
        "signal",
        "spread-job",
        "switches",
        "task-epilog",
        "task-prolog",
        "test-only",
        "time",
        "time-min",
        "tmp",
        "unbuffered",
        "wait",
        "wait-for-children",
    ]
)

PART_OPTIONS = frozenset({"nodes", "ntasks", "cpus-per-task", "ntasks-per-node", "nodelist", "exclude", "het-group"})
COMPONENT_OPTIONS = frozenset(stepoptions.OF_A_COMPONENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """A step's request, parsed. GPU counts: None if the user gave none."""

    name: str
    shape: StepShape
    cpus_given: bool = False  # --cpus-per-task was given
    overlap: bool = False
    mem_mib: int | None = None  # on each node
    mem_per_cpu_mib: int | None = None
    gpus_total: int | None = None
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    limit_s: float | None = None
    signal: SignalSpec | None = None  # sent before that limit; None also if the step's own job sends it
    distribution: str = "block"  # as in SLURM_DISTRIBUTION; `shape` has its effect
    task_prolog: str = ""
    task_epilog: str = ""
    wait_for_children: bool = False
    stdout: str = ""
    stderr: str = ""
    stdin: str = ""
    append: bool = False
    label: bool = False
    kill_on_bad_exit: bool = False
    remote_shell: bool = False
    # Task and node variables of the step command's environment override the real values.
    preserve_env: bool = False


def read_options(request: protocol.StepRequest, job: Job) -> StepOptions:
    """Return the request of a step of `job`.

    Raises: RequestError: unknown or unreadable options, no command, a relative directory, an invalid environment.
    """
    _check_command(request)
    given = _Given(request.options)
    per_node, gres = given.value("gpus-per-node", parse_gpus), given.value("gres", parse_gres)
    if gres is not None and gres.shards:
        _check_shards(gres.shards, job)
        gres = None  # the step sees the GPU of which the job has a part
    options = StepOptions(
        name=_name(request, given),
        shape=_shape(given, job),
        cpus_given=bool(given.text("cpus-per-task")),
        overlap=given.flag("overlap"),
        mem_mib=given.value("mem", parse_mem_mib),
        mem_per_cpu_mib=given.value("mem-per-cpu", parse_mem_mib),
        gpus_total=_count(given.value("gpus", parse_gpus)),
        gpus_per_node=_count(gres.gpus if per_node is None and gres is not None else per_node),
        gpus_per_task=_count(given.value("gpus-per-task", parse_gpus)),
        limit_s=given.value("time", parse_time_s),
        signal=given.value("signal", parse_signal_spec) if request.job_id else None,
        distribution=given.value("distribution", parse_distribution_text) or "block",
        task_prolog=given.text("task-prolog"),
        task_epilog=given.text("task-epilog"),
        wait_for_children=given.flag("wait-for-children"),
        stdout=given.text("output"),
        stderr=given.text("error"),
        stdin=given.text("input"),
        append=given.value("open-mode", parse_open_mode) == "append",
        label=given.flag("label"),
        kill_on_bad_exit=given.flag("kill-on-bad-exit"),
        remote_shell=given.flag("remote-shell"),
        preserve_env=given.flag("preserve-env"),
    )
    options = options if given.text("cpus-per-task") else _with_fitting_cpus(options, job)
    asked = any(given.text(name) for name in ("gpus", "gpus-per-node", "gpus-per-task", "gres"))
    return options if asked else _with_own_gpus(options, job)


def read_allocation(request: protocol.StepRequest, now_s: float) -> JobSpec:
    """Return the job, without a batch step, in which `request` can run as a step.

    Raises: RequestError: as `read_options`.
    """
    _check_command(request)
    given = _Given(request.options)
    if given.text("het-group") not in ("", "0"):
        raise RequestError(
            "cannot start tasks in another --het-group than 0: that is for steps of a job of sbatch A : B"
        )
    name = _name(request, given)
    dependency, dependency_any = given.value("dependency", parse_dependency) or ((), False)
    return JobSpec(
        name=name,
        script="",
        work_dir=request.work_dir,
        submit_line=" ".join(("hrun", *request.argv))[:1000],
        account=given.text("account"),
        partition=given.text("partition"),
        qos=given.text("qos"),
        reservation=given.text("reservation"),
        comment=given.text("comment"),
        time_limit_s=given.value("time", parse_limit_s),
        begin_at_s=_when(given, "begin", now_s),
        deadline_at_s=_when(given, "deadline", now_s),
        time_min_s=given.value("time-min", parse_limit_s),
        hold=given.flag("hold"),
        nice=given.value("nice", parse_nice) or 0,
        priority=given.value("priority", parse_priority),
        licenses=given.value("licenses", parse_licenses) or (),
        dependency=dependency,
        dependency_any=dependency_any,
        signal=given.value("signal", parse_signal_spec),
        no_shell=given.flag("no-shell"),
        distribution=given.value("distribution", parse_distribution_text) or "",
        requeue=False,
        components=tuple(
            JobSpec(
                name=component.text("job-name") or name,
                script="",
                work_dir=request.work_dir,
                **_asked_of_nodes(component),
            )
            for component in _listed(given.text("components"), COMPONENT_OPTIONS)
        ),
        **_asked_of_nodes(given),
    )


def _asked_of_nodes(given: _Given) -> dict[str, Any]:
    """Return the fields of a job's or component's specification that describe its nodes."""
    nodes = given.value("nodes", parse_nodes)
    low, high = nodes or (1, 1)
    gres = given.value("gres", parse_gres) or Gres()
    switches, switches_wait_s = given.value("switches", parse_switches) or (0, None)
    return {
        "nodes_min": low,
        "nodes_max": high,
        "nodes_given": nodes is not None,
        "ntasks": given.value("ntasks", parse_count),
        "ntasks_per_node": given.value("ntasks-per-node", parse_count),
        "cpus_per_task": given.value("cpus-per-task", parse_count) or 1,
        "cpus_per_task_given": bool(given.text("cpus-per-task")),
        "mem_per_node_mib": given.value("mem", parse_node_memory),
        "mem_per_cpu_mib": given.value("mem-per-cpu", parse_mem_mib),
        "gpus_per_node": given.value("gpus-per-node", parse_gpus) or gres.gpus,
        "shards_per_node": gres.shards,
        "gpus_total": given.value("gpus", parse_gpus) or (),
        "gpus_per_task": given.value("gpus-per-task", parse_gpus) or (),
        "exclusive": given.flag("exclusive"),
        "overcommit": given.flag("overcommit"),
        "nodelist": given.value("nodelist", parse_node_names) or (),
        "exclude": given.value("exclude", parse_node_names) or (),
        "constraint": given.text("constraint"),
        "prefer": given.text("prefer"),
        "mincpus": given.value("mincpus", parse_count) or 0,
        "tmp_mib": given.value("tmp", parse_mem_mib) or 0,
        "switches": switches,
        "switches_wait_s": switches_wait_s,
        "hints": given.value("hint", parse_hints) or (),
        "contiguous": given.flag("contiguous"),
        "spread": given.flag("spread-job"),
    }


class _Given:
    """The given options, read by name."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        unknown = sorted(set(options) - KNOWN_OPTIONS)
        if unknown:
            raise RequestError(f"cannot start the step: unknown option {unknown[0][:60]!r}")
        self._options = options

    def text(self, name: str) -> str:
        value = self._options.get(name, "")
        if not isinstance(value, str) or "\0" in value:
            raise RequestError(f"cannot read --{name}: it needs a value")
        return value

    def flag(self, name: str) -> bool:
        value = self._options.get(name, False)
        if not isinstance(value, bool):
            raise RequestError(f"cannot read --{name}: it is on or off")
        return value

    def value(self, name: str, parse: Callable[[str], T]) -> T | None:
        text = self.text(name)
        return parse(text) if text else None


def request_bytes(request: protocol.StepRequest) -> int:
    """Return the size of a request in bytes, about."""
    texts = (*request.argv, *request.env, *request.env.values(), *map(str, request.options.values()))
    return sum(map(len, texts)) + 64 * len(texts)


def _check_command(request: protocol.StepRequest) -> None:
    if not request.argv or not request.argv[0]:
        raise RequestError("cannot start a step: it has no command")
    if any("\0" in word for word in (*request.argv, request.work_dir)):
        raise RequestError("cannot start a step: NUL in its command or directory")
    if not request.work_dir.startswith("/"):
        raise RequestError(f"cannot start a step in {request.work_dir[:200]!r}: the path is not absolute")
    size = 0
    for name, value in request.env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise RequestError(f"cannot start a step: {name[:60]!r} cannot be a variable of its environment")
        size += len(name) + len(value)
    if size > MAX_ENV_BYTES:
        raise RequestError(f"cannot start a step: its environment has {size} bytes, {MAX_ENV_BYTES} are the most")


def _name(request: protocol.StepRequest, given: _Given) -> str:
    return given.text("job-name") or request.argv[0].rsplit("/", 1)[-1][:200]


def _shape(given: _Given, job: Job) -> StepShape:
    """Return the step's shape. Its parts (srun A : B), if any, are lists of options as JSON."""
    given_parts = _listed(given.text("parts"), PART_OPTIONS)
    groups = [
        _groups(part, job, at if given_parts else _named_group(part, job))
        for at, part in enumerate(given_parts or [given])
    ]
    shape = replace(_simple_shape(given, _default_cpus(job, groups[0][0])), component=groups[0][0])
    hosts = tuple(host for host in given.text("hosts").split(",") if host)
    if given_parts:
        parts = [
            replace(_simple_shape(part, _default_cpus(job, at) if at is not None else 1), component=at)
            for part, components in zip(given_parts, groups, strict=True)
            for at in components
        ]
    else:
        parts = _parts_by_component(shape, groups[0], job, own_cpus=bool(given.text("cpus-per-task")))
    return replace(
        shape,
        hosts=parse_node_names(",".join(hosts)) and tuple(NodeName(host) for host in hosts),
        parts=tuple(replace(part, overcommit=shape.overcommit, plane=shape.plane) for part in parts),
    )


def _parts_by_component(
    shape: StepShape, components: Sequence[int | None], job: Job, *, own_cpus: bool
) -> list[StepShape]:
    """Return one part for each component, if one program runs in several."""
    if len(components) <= 1:
        return []
    if own_cpus:
        return [replace(shape, component=at) for at in components]
    return [replace(shape, component=at, cpus_per_task=_default_cpus(job, at)) for at in components]


def _named_group(given: _Given, job: Job) -> int:
    """Return the component with the nodes of --nodelist; the first if it names none.

    mpirun names nodes in this way for its daemons.
    """
    named = given.value("nodelist", parse_node_names) or ()
    found = {share.component for share in job.shares if share.node in named}
    return found.pop() if len(found) == 1 else 0


def _groups(given: _Given, job: Job, default: int) -> list[int | None]:
    """Return the components of a heterogeneous job for a step or its part; else [None]."""
    text = given.text("het-group")
    wanted: list[int | None] = [default]
    if text:
        wanted = [*_group_numbers(text)]
    if not job.spec.components:
        if text and wanted != [0]:
            raise RequestError(
                f"cannot start tasks in --het-group={text}: the job has no components but 0. Ask for them where it is submitted "
                "(sbatch A : B), or start one step for each program, with & between them and wait behind"
            )
        return [None]
    most = len(job.spec.components)
    if max(at for at in wanted if at is not None) > most:
        raise RequestError(f"cannot start tasks in --het-group={text or default}: the job's components are 0 to {most}")
    return wanted


def _group_numbers(text: str) -> tuple[int, ...]:
    try:
        return parse_array(text).indices
    except RequestError:
        raise RequestError(f"cannot read --het-group={text[:60]}: write numbers of components, as 0,2-3") from None


def _listed(text: str, known: frozenset[str]) -> list[_Given]:
    """Return the parts of a step, or the components of a job.

    They are JSON lists of options, each of them `known`.
    """
    if not text:
        return []
    try:
        parts = gate.read_json(text.encode())
    except gate.GateError:
        parts = None
    if not isinstance(parts, list) or not all(isinstance(part, dict) and part.keys() <= known for part in parts):
        raise RequestError("cannot start the step: its parts are no list of options that a part may have")
    return [_Given(part) for part in parts]


def _simple_shape(given: _Given, cpus: int) -> StepShape:
    nodes_min, nodes_max = given.value("nodes", parse_nodes) or (None, None)
    return StepShape(
        nodes_min=nodes_min,
        nodes_max=nodes_max,
        ntasks=given.value("ntasks", parse_count),
        cpus_per_task=given.value("cpus-per-task", parse_count) or cpus,
        ntasks_per_node=given.value("ntasks-per-node", parse_count),
        nodelist=given.value("nodelist", parse_node_names) or (),
        exclude=given.value("exclude", parse_node_names) or (),
        overcommit=given.flag("overcommit"),
        plane=given.value("distribution", parse_distribution),
    )


def _check_shards(asked: tuple[GpuRequest, ...], job: Job) -> None:
    wanted, held = _count(asked) or 0, min(share.shards for share in job.shares)
    if wanted > held:
        raise RequestError(f"cannot give the step {wanted} shards of a GPU: the job has {held} on each node")


def _when(given: _Given, name: str, now_s: float) -> int | None:
    text = given.text(name)
    return int(parse_when(text, now_s)) if text else None


def _count(requests: tuple[GpuRequest, ...] | None) -> int | None:
    """Return the number of GPUs; their type was fixed when the job got its nodes."""
    return None if requests is None else sum(request.count for request in requests)


def _with_own_gpus(options: StepOptions, job: Job) -> StepOptions:
    """Return `options` with the job's GPUs per task, if that distributes all GPUs of the job.

    Other steps see all GPUs: one task per node may be a daemon of mpirun, whose ranks must find their GPUs.
    """
    each = _count(job.spec.gpus_per_task)
    if not each:
        return options
    gpus = {share.node: len(share.gpus) for share in job.shares}
    layout = lay_out(job.shares, options.shape)
    if any(part.count * each != gpus[part.node] for part in layout):
        return options
    return replace(options, gpus_per_task=each)


def _default_cpus(job: Job, component: int | None) -> int:
    spec = job.spec.components[component - 1] if component else job.spec
    return spec.cpus_per_task if spec.cpus_per_task_given else 1


def _with_fitting_cpus(options: StepOptions, job: Job) -> StepOptions:
    """Return `options` with the job's CPUs per task, or with one CPU if these do not fit."""
    try:
        lay_out(job.shares, options.shape)
    except RequestError:
        return replace(options, shape=replace(options.shape, cpus_per_task=1))
    return options
