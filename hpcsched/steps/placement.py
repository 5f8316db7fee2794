"""Place a step in its job, beside the steps that already run.

It knows shares and the step's request. It keeps no state.

Rules: concurrent steps never share a CPU. They never share a GPU that one of them requested by
number. Overlapping steps (srun's --overlap) are exempt. A step that requests no GPUs sees all GPUs
that the job has on its nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpcsched.errors import RequestError
from hpcsched.model.ids import NodeName
from hpcsched.model.job import Job
from hpcsched.model.resources import Share
from hpcsched.steps.layout import NodeTasks, lay_out
from hpcsched.steps.request import StepOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A step's part of one node; other steps cannot use the `held_*` resources meanwhile."""

    tasks: NodeTasks
    cpus: int
    mem_mib: int
    gpus: tuple[int, ...]
    held_cpus: int
    held_gpus: tuple[int, ...]


def place_step(job: Job, options: StepOptions, busy: Sequence[Place]) -> tuple[Place, ...] | None:
    """Return the step's place in `job` beside the `busy` places of its running steps.

    None: the step must wait.

    Raises: RequestError: it would not fit even if no other step of the job ran.
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


def _places(
    shares: Sequence[Share],
    layout: Sequence[NodeTasks],
    options: StepOptions,
    used_gpus: Mapping[NodeName, set[int]],
) -> tuple[Place, ...]:
    by_node = {share.node: share for share in shares}
    places = []
    left = options.gpus_total
    for part in layout:
        share = by_node[part.node]
        cpus = min(part.cpus or part.count * options.shape.cpus_per_task, share.cpus)
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
