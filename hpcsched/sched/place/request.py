"""Resource requests of jobs, normalised once: counts instead of options.

The defaults of the partition are applied. A `Shape` has everything except the time limit. Jobs of equal shape fit on the same
nodes, so the planner tests each shape once. Task counts follow srun(1) and sbatch(1): without ``--nodes``, a job takes as many
nodes as its tasks need; ``-N3 -n2`` means two nodes; ``--ntasks-per-node`` with ``--ntasks`` is a maximum.

Knows nothing of nodes and free resources.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from hpcsched.errors import RequestError
from hpcsched.model.ids import NodeName
from hpcsched.model.node import ANY_GPU, GpuRequest, Partition, Share
from hpcsched.model.spec import JobSpec
from hpcsched.sched.place.features import Constraint, Expression, parse_constraint, parse_features

LicenseCounts = tuple[tuple[str, int], ...]  # (name, count), by name
GpuCounts = tuple[tuple[str, int], ...]  # (type, count) by type; ANY_GPU for those without a type


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The needs of a job, apart from its time limit.

    `ntasks` None: every node runs `tasks_min` tasks, and the job takes up to `nodes_max` nodes. Else it takes the fewest nodes
    that hold `ntasks` tasks, each node at least one and at most `tasks_max` (0: no maximum). The first of these
    memory fields that is set counts: all memory, per node, per cpu. If none is set, each cpu gets an even part of the memory.
    """

    nodes_min: int = 1
    nodes_max: int = 1
    ntasks: int | None = None
    tasks_min: int = 1
    tasks_max: int = 0
    cpus_per_task: int = 1
    mem_all: bool = False
    mem_per_node_mib: int | None = None
    mem_per_cpu_mib: int | None = None
    mem_asked: bool = False  # the user requested memory; else an exclusive job gets all memory of the node
    gpus_per_node: GpuCounts = ()
    gpus_per_task: GpuCounts = ()
    gpus_total: GpuCounts = ()  # at most one type; each node gives at least one GPU
    shards: GpuCounts = ()  # of one GPU of each node; at most one type
    exclusive: bool = False
    overcommit: int = 0  # tasks that share the resources of one task on each node; 0: each task has its own
    features: Expression = ()  # of each node
    alike: tuple[Expression, ...] = ()  # all its nodes satisfy the same one of these
    counts: tuple[tuple[Expression, int], ...] = ()  # a number of nodes satisfies each of these
    prefer: Expression = ()  # nodes that satisfy this are preferred
    mincpus: int = 0  # cpus that a node has, free or not
    tmp_mib: int = 0
    switches: int = 0  # the maximum of switches for its nodes; 0: as few as possible
    contiguous: bool = False  # its nodes are adjacent in the order of nodes
    spread: bool = False  # as many nodes as possible, with tasks spread evenly
    synchronous: bool = False  # the slowest node sets the pace of all
    comm_bound: bool = False  # link speed is the most important property of its nodes
    constraint: str = ""  # `features`, `alike` and `counts` as the user wrote them
    nodelist: tuple[NodeName, ...] = ()
    exclude: tuple[NodeName, ...] = ()
    components: tuple[Shape, ...] = ()  # of a heterogeneous job, each on separate nodes; see `whole_of`

    @property
    def each(self) -> tuple[Shape, ...]:
        """Return the shapes of its components, or itself if it has none."""
        return self.components or (self,)

    @property
    def any_nodes(self) -> bool:
        """Say whether any nodes with room for a share will do, so that a count is enough."""
        return not self.alike and not self.counts and not self.switches and not self.contiguous

    @property
    def cpus_least(self) -> int:
        """Return the least cpus that each of its nodes must have."""
        return self.tasks_min * self.cpus_per_task

    @property
    def tasks_least(self) -> int:
        """Return the least total number of tasks."""
        return self.ntasks if self.ntasks is not None else self.tasks_min * self.nodes_min


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """A shape and a time limit; `time_limit_s` None or 0: no limit."""

    shape: Shape
    time_limit_s: int | None = None


def request_of(spec: JobSpec, partition: Partition, *, time_limit_s: int | None = None) -> ResourceRequest:
    """Return the request of a job of `spec` in `partition`.

    `time_limit_s` overrides the limit in `spec`. Whether any node has these resources is not checked.

    Raises: RequestError if options contradict each other or are malformed.
    """
    limit_s = time_limit_s if time_limit_s is not None else spec.time_limit_s
    return ResourceRequest(shape=shape_of(spec, partition), time_limit_s=time_limit_in(partition, limit_s))


def shape_of(spec: JobSpec, partition: Partition) -> Shape:
    """Return the shape of a job of `spec` in `partition`.

    Raises: RequestError, see `request_of`.
    """
    if spec.components:
        return whole_of([_shape_of(component, partition) for component in (spec, *spec.components)])
    return _shape_of(spec, partition)


def whole_of(components: Sequence[Shape]) -> Shape:
    """Return the shape of a heterogeneous job as a whole.

    It has the sums of the counts of its components, and their least requirements.
    """
    return Shape(
        nodes_min=sum(component.nodes_min for component in components),
        nodes_max=sum(component.nodes_max for component in components),
        ntasks=sum(component.tasks_least for component in components),
        cpus_per_task=min(component.cpus_least for component in components),
        mem_asked=any(component.mem_asked for component in components),
        nodelist=tuple(dict.fromkeys([name for component in components for name in component.nodelist])),
        components=tuple(components),
    )


def _shape_of(spec: JobSpec, partition: Partition) -> Shape:
    if spec.overcommit and (spec.ntasks is not None or spec.ntasks_per_node is not None):
        return _overcommitted(spec, partition)
    per_node, per_task, total = _gpus(spec.gpus_per_node), _gpus(spec.gpus_per_task), _gpus(spec.gpus_total)
    if len(total) > 1:
        raise RequestError("cannot spread GPUs of several types over a job: use --gpus-per-node or --gpus-per-task")
    ntasks = _ntasks(spec, per_task, total)
    nodes_min, nodes_max = _node_counts(spec, ntasks, per_node, per_task, total)
    constraint = parse_constraint(spec.constraint)
    nodes_min, nodes_max = _with_kinds(spec, constraint, nodes_min, nodes_max)
    if partition.max_nodes is not None and nodes_min <= partition.max_nodes:
        nodes_max = min(nodes_max, partition.max_nodes)
    if ntasks is None:
        tasks_min = tasks_max = spec.ntasks_per_node or 1
    else:
        tasks_min, tasks_max = 1, spec.ntasks_per_node or 0
    asked = spec.mem_per_node_mib is not None or spec.mem_per_cpu_mib is not None
    return Shape(
        nodes_min=nodes_min,
        nodes_max=nodes_max,
        ntasks=ntasks,
        tasks_min=tasks_min,
        tasks_max=tasks_max,
        cpus_per_task=max(1, spec.cpus_per_task),
        mem_all=spec.mem_per_node_mib == 0 or spec.mem_per_cpu_mib == 0,
        mem_per_node_mib=spec.mem_per_node_mib,
        mem_per_cpu_mib=spec.mem_per_cpu_mib if asked else partition.default_mem_per_cpu_mib,
        mem_asked=asked,
        gpus_per_node=per_node,
        gpus_per_task=per_task,
        gpus_total=() if per_node or per_task else total,
        shards=_gpus(spec.shards_per_node),
        exclusive=spec.exclusive,
        features=constraint.every,
        alike=constraint.alike,
        counts=constraint.counts,
        prefer=parse_features(spec.prefer),
        mincpus=spec.mincpus,
        tmp_mib=spec.tmp_mib,
        switches=spec.switches,
        contiguous=spec.contiguous,
        spread=spec.spread,
        synchronous="synchronous" in spec.hints,
        comm_bound="comm_bound" in spec.hints,
        constraint=spec.constraint.strip(),
        nodelist=tuple(dict.fromkeys(spec.nodelist)),
        exclude=tuple(sorted(set(spec.exclude))),
    )


def _overcommitted(spec: JobSpec, partition: Partition) -> Shape:
    """Return the shape of a job with --overcommit: as if it had one task on each node.

    With --ntasks, --ntasks-per-node does not count, as in Slurm.
    """
    if spec.ntasks is not None and spec.nodes_given:
        low, high = _given_node_counts(replace(spec, ntasks_per_node=None), spec.ntasks, 1)
        spec = replace(spec, nodes_min=low, nodes_max=high)
    tasks = spec.ntasks if spec.ntasks is not None else spec.nodes_min * (spec.ntasks_per_node or 1)
    shape = _shape_of(replace(spec, overcommit=False, ntasks=None, ntasks_per_node=None), partition)
    return replace(shape, overcommit=tasks)


def with_overcommit(shape: Shape, shares: tuple[Share, ...]) -> tuple[Share, ...]:
    """Return `shares` with the tasks of a job with --overcommit distributed evenly.

    The first nodes have one task more.
    """
    for number, component in enumerate(shape.each):
        nodes = sum(share.component == number for share in shares)
        if component.overcommit and nodes:
            each, more = divmod(component.overcommit, nodes)
            counts = iter([each + (at < more) for at in range(nodes)])
            shares = tuple(
                [replace(share, tasks=next(counts)) if share.component == number else share for share in shares]
            )
    return shares


def without_nodes(shape: Shape, names: Iterable[NodeName]) -> Shape:
    """Return `shape` with these nodes excluded in addition."""
    more = set(names)
    if not more:
        return shape
    return replace(
        shape,
        exclude=tuple(sorted({*shape.exclude, *more})),
        components=tuple(without_nodes(component, more) for component in shape.components),
    )


def time_limit_in(partition: Partition, limit_s: int | None) -> int | None:
    """Return `limit_s`, or a limit of the partition if it is None.

    That is the default time limit of the partition, else its maximum.
    """
    if limit_s is not None:
        return limit_s
    if partition.default_time_s is None or partition.max_time_s is None:
        return partition.default_time_s if partition.default_time_s is not None else partition.max_time_s
    return min(partition.default_time_s, partition.max_time_s)


def gpu_count(gpus: GpuCounts) -> int:
    """Return the number of GPUs of all types."""
    return sum(count for _, count in gpus)


def gpus_least(shape: Shape) -> GpuCounts:
    """Return the least GPUs that each of its nodes must have."""
    if shape.gpus_total:
        return ((shape.gpus_total[0][0], 1),)
    return shape.gpus_per_node or tuple((kind, count * shape.tasks_min) for kind, count in shape.gpus_per_task)


def _gpus(requests: Collection[GpuRequest]) -> GpuCounts:
    """Return the counts by type, named types before ANY_GPU, in the order of the search."""
    if not requests:
        return ()
    counts: dict[str, int] = {}
    for request in requests:
        if request.count > 0:
            kind = request.type.lower()
            counts[kind] = counts.get(kind, 0) + request.count
    return tuple(sorted(counts.items(), key=lambda item: (item[0] == ANY_GPU, item[0])))


def _ntasks(spec: JobSpec, per_task: GpuCounts, total: GpuCounts) -> int | None:
    if spec.ntasks is None and per_task and total:
        return max(1, gpu_count(total) // gpu_count(per_task))
    return spec.ntasks


def _node_counts(
    spec: JobSpec, ntasks: int | None, per_node: GpuCounts, per_task: GpuCounts, total: GpuCounts
) -> tuple[int, int]:
    """Return the least and the greatest number of nodes of the job."""
    fewest = 1
    if ntasks is not None and spec.ntasks_per_node:
        fewest = -(-ntasks // spec.ntasks_per_node)
    if spec.nodes_given:
        return _given_node_counts(spec, ntasks, fewest)
    if ntasks is not None:
        most = ntasks
    elif total and per_node:
        fewest = most = -(-gpu_count(total) // gpu_count(per_node))
    elif total and not per_task:
        most = gpu_count(total)
    else:
        most = 1
    fewest = max(fewest, len(set(spec.nodelist)))
    return fewest, max(most, fewest)


def _with_kinds(spec: JobSpec, constraint: Constraint, nodes_min: int, nodes_max: int) -> tuple[int, int]:
    """Return the node counts, raised to the total that the kinds of the constraint need."""
    wanted = sum(count for _, count in constraint.counts)
    if wanted > nodes_max and (spec.nodes_given or spec.ntasks is not None):
        raise RequestError(
            f"cannot give job {wanted} nodes of the kinds of {spec.constraint}: it asks for {nodes_max} at the most"
        )
    return max(nodes_min, wanted), max(nodes_max, wanted)


def _given_node_counts(spec: JobSpec, ntasks: int | None, fewest: int) -> tuple[int, int]:
    nodes_min, nodes_max = spec.nodes_min, spec.nodes_max
    if ntasks is None:
        return nodes_min, nodes_max
    if fewest > nodes_max:
        raise RequestError(
            f"cannot give job {ntasks} tasks: --nodes={nodes_max} with --ntasks-per-node={spec.ntasks_per_node} "
            f"allows {nodes_max * (spec.ntasks_per_node or 1)}"
        )
    nodes_min = max(min(nodes_min, ntasks), fewest)  # as in srun: three nodes for two tasks are two nodes
    return nodes_min, max(min(nodes_max, ntasks), nodes_min)
