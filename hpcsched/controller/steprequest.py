"""What a step asks for: the texts of a `StepRequest` read and checked against the job, and its place beside others.

It knows shares and options, but no tokens, messages to nodes or origins; it keeps nothing.

Rules: the texts come from a user, so every value is checked here and refused with what was expected. Steps that run at
the same time use no cpu twice, and no GPU twice that one of them asked for by number, unless they overlap (srun's
--overlap). A step that asks for no GPUs sees all that the job has on its nodes.

Source: srun(1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcnode import protocol
from hpcsched.errors import RequestError
from hpcsched.launch.layout import NodeTasks, StepShape, lay_out
from hpcsched.model.hostlist import expand_hostlist
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job
from hpcsched.model.resources import Share
from hpcsched.model.units import parse_mem_mib, parse_time_s

MAX_ENV_BYTES = 4 << 20
_STEP_PATTERN = re.compile(r"%(\d{0,2})([A-Za-z%])")

# Options that a step may bring along although they mean something only to hrun, or to the job that is made for it.
_ELSEWHERE = {
    "account", "chdir", "cpu-bind", "export", "immediate", "jobid", "mpi", "partition", "qos", "wait", "constraint",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """A step's request, read. GPU counts: None where the user did not say."""

    name: str
    shape: StepShape
    overlap: bool = False
    mem_mib: int | None = None  # on each node
    mem_per_cpu_mib: int | None = None
    gpus_total: int | None = None
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    limit_s: float | None = None
    stdout: str = ""
    stderr: str = ""
    stdin: str = ""
    append: bool = False
    label: bool = False
    kill_on_bad_exit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A step's part of one node; `held_*` is what it keeps from other steps meanwhile."""

    tasks: NodeTasks
    cpus: int
    mem_mib: int
    gpus: tuple[int, ...]
    held_cpus: int
    held_gpus: tuple[int, ...]


def read_options(request: protocol.StepRequest, job: Job) -> StepOptions:
    """Return what `request` asks for as a step of `job`.

    Raises:
        RequestError: unknown or unreadable options, no command, a relative directory, an environment that cannot be.
    """
    _check_command(request)
    given = dict(request.options)
    take = _Taker(given)
    nodes_min, nodes_max = _node_range(take.text("nodes"))
    shape = StepShape(
        nodes_min=nodes_min,
        nodes_max=nodes_max,
        ntasks=take.number("ntasks"),
        cpus_per_task=take.number("cpus-per-task") or _default_cpus(job),
        ntasks_per_node=take.number("ntasks-per-node"),
        nodelist=_names(take.text("nodelist")),
        exclude=_names(take.text("exclude")),
        overcommit=take.flag("overcommit"),
    )
    gres = _gpu_count("gres", take.text("gres"))
    per_node = _gpu_count("gpus-per-node", take.text("gpus-per-node"))
    options = StepOptions(
        name=take.text("job-name") or request.argv[0].rsplit("/", 1)[-1][:200],
        shape=shape,
        overlap=take.flag("overlap"),
        mem_mib=take.read("mem", parse_mem_mib),
        mem_per_cpu_mib=take.read("mem-per-cpu", parse_mem_mib),
        gpus_total=_gpu_count("gpus", take.text("gpus")),
        gpus_per_node=gres if per_node is None else per_node,
        gpus_per_task=_gpu_count("gpus-per-task", take.text("gpus-per-task")),
        limit_s=take.read("time", parse_time_s),
        stdout=take.text("output"),
        stderr=take.text("error"),
        stdin=take.text("input"),
        append=take.text("open-mode") == "append",
        label=take.flag("label"),
        kill_on_bad_exit=take.flag("kill-on-bad-exit"),
    )
    take.accept("exact", "exclusive")  # steps share a job exactly in any case
    unknown = sorted(set(given) - take.known - _ELSEWHERE)
    if unknown:
        raise RequestError(f"cannot start the step: unknown option {unknown[0][:60]!r}")
    if "cpus-per-task" not in given:
        options = _with_fitting_cpus(options, job)
    return options


def place_step(job: Job, options: StepOptions, busy: Sequence[Place]) -> tuple[Place, ...] | None:
    """Return the step's place in `job` beside the `busy` places of its running steps; None: it has to wait.

    Raises:
        RequestError: it would not fit if the job ran nothing else.
    """
    full = lay_out(job.shares, options.shape)
    alone = _places(job.shares, full, options, {})
    if options.overlap:
        return alone
    used_cpus: dict[NodeName, int] = {}
    used_gpus: dict[NodeName, set[int]] = {}
    for place in busy:
        node = place.tasks.node
        used_cpus[node] = used_cpus.get(node, 0) + place.held_cpus
        used_gpus.setdefault(node, set()).update(place.held_gpus)
    free = [replace(share, cpus=max(0, share.cpus - used_cpus.get(share.node, 0))) for share in job.shares]
    try:
        layout = lay_out(free, options.shape)
        if sum(part.count for part in layout) != sum(part.count for part in full):
            return None
        return _places(job.shares, layout, options, used_gpus)
    except RequestError:
        return None


def expand_step_pattern(pattern: str, *, job: Job, step: int, node: NodeName, node_rank: int) -> str:
    """Return `pattern` with all but the task's number filled in (%t stays, and so does %%)."""
    facts: dict[str, str] = {
        "j": str(job.id),
        "A": str(job.array_job_id or job.id),
        "a": str(job.array_task_id if job.array_task_id is not None else 4294967294),
        "J": f"{job.id}.{step}",
        "s": str(step),
        "x": job.spec.name,
        "u": job.user,
        "N": node,
        "n": str(node_rank),
    }

    def fill(match: re.Match[str]) -> str:
        value = facts.get(match[2])
        if value is None:
            return match[0]
        value = re.sub(r"[/\x00-\x1f]", "_", value).replace("%", "%%")
        return value.zfill(int(match[1])) if match[1] and value.isdigit() else value

    return _STEP_PATTERN.sub(fill, pattern)


class _Taker:
    """Reads options by name, and remembers which names there are."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self.known: set[str] = set()

    def text(self, name: str) -> str:
        self.known.add(name)
        value = self._given.get(name, "")
        if not isinstance(value, str) or "\0" in value:
            raise RequestError(f"cannot read --{name}: it needs a value")
        return value

    def accept(self, *names: str) -> None:
        self.known.update(names)

    def flag(self, name: str) -> bool:
        self.known.add(name)
        value = self._given.get(name, False)
        if not isinstance(value, bool):
            raise RequestError(f"cannot read --{name}: it is on or off")
        return value

    def number(self, name: str) -> int | None:
        text = self.text(name)
        if text and not re.fullmatch(r"[0-9]{1,9}", text):
            raise RequestError(f"cannot read --{name}={text[:60]!r}: a number is needed")
        return int(text) if text else None

    def read(self, name: str, parse: Callable[[str], int | None]) -> int | None:
        text = self.text(name)
        return parse(text) if text else None


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


def _default_cpus(job: Job) -> int:
    return job.spec.cpus_per_task if job.spec.cpus_per_task_given else 1


def _with_fitting_cpus(options: StepOptions, job: Job) -> StepOptions:
    """Return `options` with the job's cpus per task, or with one cpu where that cannot be."""
    try:
        lay_out(job.shares, options.shape)
    except RequestError:
        return replace(options, shape=replace(options.shape, cpus_per_task=1))
    return options


def _node_range(text: str) -> tuple[int | None, int | None]:
    match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", text)
    if text and match is None:
        raise RequestError(f"cannot read --nodes={text[:60]!r}: a number or min-max is needed")
    if match is None:
        return None, None
    return int(match[1]), int(match[2]) if match[2] else None


def _names(text: str) -> tuple[NodeName, ...]:
    return tuple(NodeName(name) for name in expand_hostlist(text)) if text else ()


def _gpu_count(option: str, text: str) -> int | None:
    """Return the GPUs in `2`, `a100:2`, `gpu`, `gpu:a100:2` or `none`; which type is settled with the job's nodes."""
    if not text:
        return None
    if text == "none":
        return 0
    words = text.split(":")
    if option == "gres" and words.pop(0) != "gpu":
        raise RequestError(f"cannot give a step --gres={text[:60]!r}: only gpu is known")
    count = words.pop() if words and words[-1].isdigit() else "1"
    if len(words) > 1 or len(count) > 6 or (option != "gres" and words == [text]):
        raise RequestError(f"cannot read --{option}={text[:60]!r}: a number or type:number is needed")
    return int(count)


def _places(
    shares: Sequence[Share],
    layout: Sequence[NodeTasks],
    options: StepOptions,
    used_cpus: Mapping[NodeName, int],
    used_gpus: Mapping[NodeName, set[int]],
) -> tuple[Place, ...]:
    by_node = {share.node: share for share in shares}
    places = []
    left = options.gpus_total
    for part in layout:
        share = by_node[part.node]
        cpus = min(part.count * options.shape.cpus_per_task, share.cpus)
        free = [gpu for gpu in share.gpus if gpu not in used_gpus.get(part.node, ())]
        wanted = _gpus_wanted(options, part.count)
        if wanted is None and left is not None:
            wanted = min(left, len(free))
            left -= wanted
        if wanted is not None and wanted > len(free):
            raise RequestError(
                f"cannot give the step {wanted} GPUs on {part.node}: the job has {len(share.gpus)} there"
            )
        places.append(
            Place(
                tasks=part,
                cpus=cpus,
                mem_mib=_memory(options, share, cpus),
                gpus=share.gpus if wanted is None else tuple(free[:wanted]),
                held_cpus=0 if options.overlap else cpus,
                held_gpus=() if options.overlap or wanted is None else tuple(free[:wanted]),
            )
        )
    if left:
        held = sum(len(share.gpus) for share in shares)
        raise RequestError(f"cannot give the step {options.gpus_total} GPUs: the job has {held}")
    return tuple(places)


def _gpus_wanted(options: StepOptions, count: int) -> int | None:
    if options.gpus_per_task is not None:
        return options.gpus_per_task * count
    return options.gpus_per_node


def _memory(options: StepOptions, share: Share, cpus: int) -> int:
    wanted = options.mem_mib
    if wanted is None and options.mem_per_cpu_mib is not None:
        wanted = options.mem_per_cpu_mib * cpus
    if wanted is not None and share.mem_mib and wanted > share.mem_mib:
        raise RequestError(f"cannot give the step {wanted} MiB on {share.node}: the job has {share.mem_mib} MiB there")
    return wanted or share.mem_mib
