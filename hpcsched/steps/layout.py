"""Assign the tasks of a step to the nodes of its job.

The default is Slurm's block distribution: every node gets one task, then the nodes are filled in the job's order, as far as
their CPUs allow. A cyclic distribution gives tasks to the nodes in turn, `plane=N` gives N at a time. An arbitrary one names
the node of each task. The parts of a step (srun A : B) are laid out one after the other, on separate nodes if there are enough.
The module does not know other steps: for a step beside others, the caller passes shares with only the free CPUs.

Rules: ranks ascend on each node. In a block distribution they are contiguous, and ascend in the job's order of nodes. A step
that can never fit into these shares raises RequestError with the numbers.

Source: srun(1), ``--distribution=block``; `-N3 -n5` on nodes of 4 CPUs gives 3,1,1 on Slurm 22.05.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hpcsched.errors import RequestError
from hpcsched.model.hostlist import compress_hostlist
from hpcsched.model.ids import NodeName
from hpcsched.model.node import Share

MAX_TASKS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The size of a requested step. `None`: not given, derived from other values or the job."""

    nodes_min: int | None = None
    nodes_max: int | None = None  # None: as nodes_min
    ntasks: int | None = None
    cpus_per_task: int = 1
    ntasks_per_node: int | None = None  # a maximum if ntasks is given, else an exact number
    nodelist: tuple[NodeName, ...] = ()  # all of them must take part
    exclude: tuple[NodeName, ...] = ()
    overcommit: bool = False  # more tasks than CPUs are allowed
    plane: int | None = None  # number of tasks that each node gets in turn (1: cyclic); None: block
    hosts: tuple[NodeName, ...] = ()  # the node of each task
    component: int | None = None  # component of a heterogeneous job to run in; None: any
    # Rank numbers continue across parts; other fields of the whole are ignored.
    parts: tuple[StepShape, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTasks:
    """The ranks first_rank .. first_rank+count-1 on `node`, or `scattered` if it is not empty.

    `cpus` is the total of these tasks; 0: as many for each task as the step's shape says.
    """

    node: NodeName
    first_rank: int
    count: int
    scattered: tuple[int, ...] = ()
    cpus: int = 0

    @property
    def ranks(self) -> Sequence[int]:
        """Return the ranks on the node, ascending."""
        return self.scattered or range(self.first_rank, self.first_rank + self.count)


def lay_out(shares: Sequence[Share], shape: StepShape) -> tuple[NodeTasks, ...]:
    """Return the tasks of each node that takes part, in the order of `shares`.

    Raises:
        RequestError: the shares cannot hold such a step.
    """
    if shape.parts:
        return _lay_out_parts(shares, shape.parts)
    if shape.component is not None:
        shares = _of_component(shares, shape.component)
    _check_numbers(shape)
    if shape.hosts:
        return _lay_out_hosts(shares, shape)
    candidates = _candidates(shares, shape)
    room = {share.node: _room(share, shape) for share in candidates}
    usable = [share for share in candidates if room[share.node] > 0]
    _check_named(shape, room)
    ntasks, low, high = _sizes(candidates, shape)
    if len(usable) < low:
        raise RequestError(_too_few_nodes(shares, candidates, shape, low))
    chosen = _choose(usable, shape, room, ntasks, low, high)
    return _distribute(chosen, shape, [room[share.node] for share in chosen], ntasks)


def _distribute(
    shares: Sequence[Share], shape: StepShape, most: list[int], ntasks: int | None
) -> tuple[NodeTasks, ...]:
    """Return the tasks of each of `shares`, at most `most`; `ntasks` None: the default."""
    if ntasks is None:
        counts = [_default_tasks(share, shape, count) for share, count in zip(shares, most, strict=True)]
        return _number(shares, counts) if shape.plane is None else _deal(shares, counts, sum(counts), shape.plane)
    if shape.plane is not None and sum(most) >= ntasks:
        return _deal(shares, most, ntasks, shape.plane)
    dealt = _block(most, ntasks, [share.cpus // shape.cpus_per_task for share in shares])
    if dealt is None:
        raise RequestError(_too_many_tasks(shares, shape, ntasks, sum(most)))
    return _number(shares, dealt)


def _lay_out_parts(shares: Sequence[Share], parts: Sequence[StepShape]) -> tuple[NodeTasks, ...]:
    """Return the tasks of all parts.

    Each part gets unused nodes, or shares used ones if too few are left.
    """
    ranks: dict[NodeName, list[int]] = {share.node: [] for share in shares}
    cpus = dict.fromkeys(ranks, 0)
    total = 0
    for number, part in enumerate(parts, start=1):
        free = [replace(share, cpus=max(0, share.cpus - cpus[share.node])) for share in shares]
        try:
            if part.component is not None:
                layout = lay_out(free, part)
            else:
                layout = _beside(free, [share for share in free if not ranks[share.node]], part)
        except RequestError as error:
            raise RequestError(f"part {number} of the step: {error}") from None
        for tasks in layout:
            ranks[tasks.node] += [total + rank for rank in tasks.ranks]
            cpus[tasks.node] += tasks.count * part.cpus_per_task
        total += sum(tasks.count for tasks in layout)
    return _gathered(ranks, cpus)


def _of_component(shares: Sequence[Share], number: int) -> list[Share]:
    """Return the shares of one component of a heterogeneous job."""
    found = [share for share in shares if share.component == number]
    if not found:
        most = max(share.component for share in shares)
        raise RequestError(f"cannot start the step in component {number}: the job's components are 0 to {most}")
    return found


def _beside(free: Sequence[Share], untouched: Sequence[Share], part: StepShape) -> tuple[NodeTasks, ...]:
    if untouched:
        try:
            return lay_out(untouched, part)
        except RequestError:
            pass  # it may fit beside other parts
    return lay_out(free, part)


def _lay_out_hosts(shares: Sequence[Share], shape: StepShape) -> tuple[NodeTasks, ...]:
    """Return the tasks on the nodes that the request names for each task."""
    hosts = shape.hosts[: shape.ntasks]
    if shape.ntasks is not None and len(hosts) < shape.ntasks:
        raise RequestError(f"cannot give the step {_count(shape.ntasks, 'task')}: its list has {len(hosts)} hosts")
    held = {share.node: share for share in shares}
    ranks: dict[NodeName, list[int]] = {share.node: [] for share in shares}
    for rank, node in enumerate(hosts):
        if node not in held:
            raise RequestError(f"cannot start the step on {node}: the job has {compress_hostlist(sorted(held))}")
        ranks[node].append(rank)
    for node, mine in ranks.items():
        if not shape.overcommit and len(mine) * shape.cpus_per_task > held[node].cpus:
            raise RequestError(
                f"cannot give the step {_count(len(mine), 'task')} on {node}: the job has {_count(held[node].cpus, 'cpu')} there"
            )
    return _gathered(ranks, {})


def _gathered(ranks: Mapping[NodeName, list[int]], cpus: Mapping[NodeName, int]) -> tuple[NodeTasks, ...]:
    return tuple(
        NodeTasks(
            node=node,
            first_rank=mine[0],
            count=len(mine),
            scattered=() if mine[-1] - mine[0] == len(mine) - 1 else tuple(mine),
            cpus=cpus.get(node, 0),
        )
        for node, mine in ranks.items()
        if mine
    )


def tasks_per_node_text(counts: Sequence[int]) -> str:
    """Return Slurm's SLURM_TASKS_PER_NODE: ``2(x2),1`` for 2, 2 and 1."""
    runs = [(count, len(list(group))) for count, group in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)


def _check_numbers(shape: StepShape) -> None:
    numbers = {
        "nodes": shape.nodes_min,
        "ntasks": shape.ntasks,
        "cpus-per-task": shape.cpus_per_task,
        "ntasks-per-node": shape.ntasks_per_node,
    }
    for name, value in numbers.items():
        if value is not None and not 1 <= value <= MAX_TASKS:
            raise RequestError(f"cannot start the step: --{name} is {value}, it must be 1 to {MAX_TASKS}")
    if shape.nodes_min is not None and shape.nodes_max is not None and shape.nodes_max < shape.nodes_min:
        raise RequestError(f"cannot start the step: --nodes={shape.nodes_min}-{shape.nodes_max} ends before it begins")


def _candidates(shares: Sequence[Share], shape: StepShape) -> list[Share]:
    held = {share.node for share in shares}
    foreign = [name for name in (*shape.nodelist, *shape.exclude) if name not in held]
    if any(name in shape.nodelist for name in foreign):
        names = compress_hostlist([name for name in foreign if name in shape.nodelist])
        raise RequestError(f"cannot start the step on {names}: the job has {compress_hostlist(sorted(held))}")
    both = sorted(set(shape.nodelist) & set(shape.exclude))
    if both:
        raise RequestError(f"cannot start the step on {compress_hostlist(both)}: it is excluded as well")
    only_named = shape.nodelist and shape.nodes_min is None
    return [
        share
        for share in shares
        if share.node not in shape.exclude and (not only_named or share.node in shape.nodelist)
    ]


def _room(share: Share, shape: StepShape) -> int:
    """Return the number of tasks that fit into the share."""
    room = MAX_TASKS if shape.overcommit else share.cpus // shape.cpus_per_task
    if shape.ntasks_per_node is None:
        return room
    if shape.ntasks is None and room < shape.ntasks_per_node:
        return 0
    return min(room, shape.ntasks_per_node)


def _check_named(shape: StepShape, room: dict[NodeName, int]) -> None:
    for name in shape.nodelist:
        if not room[name]:
            needed = _count(_cpus_of_node(shape), "cpu")
            raise RequestError(f"cannot start the step on {name}: it needs {needed}, the job has fewer there")


def _sizes(candidates: Sequence[Share], shape: StepShape) -> tuple[int | None, int, int]:
    """Return the number of tasks, the minimum and the maximum number of nodes.

    Number of tasks None: as many as the nodes can take.
    """
    named = len(set(shape.nodelist))
    low = shape.nodes_min or (len(candidates) if shape.ntasks is None else 1)
    high = shape.nodes_max or shape.nodes_min or len(candidates)
    if shape.ntasks is not None:  # with fewer tasks than nodes, the other nodes run nothing
        low, high = min(low, shape.ntasks), min(high, shape.ntasks)
    if named > high:
        raise RequestError(f"cannot start the step on {_count(high, 'node')}: its node list has {named}")
    low = max(low, named, 1)
    return shape.ntasks, low, max(high, low)


def _choose(
    usable: Sequence[Share], shape: StepShape, room: dict[NodeName, int], ntasks: int | None, low: int, high: int
) -> list[Share]:
    """Return the participating nodes: the named ones first, then the others in order.

    If these are too small, return the largest ones.
    """
    named = [share for share in usable if share.node in shape.nodelist]
    others = [share for share in usable if share.node not in shape.nodelist]
    take = min(high, len(usable)) - len(named)
    picked = others[:take]
    if ntasks is not None and sum(room[share.node] for share in (*named, *picked)) < ntasks:
        picked = sorted(others, key=lambda share: -room[share.node])[:take]
    names = {share.node for share in (*named, *picked)}
    return [share for share in usable if share.node in names]


def _default_tasks(share: Share, shape: StepShape, room: int) -> int:
    return shape.ntasks_per_node or max(1, min(share.tasks, room))


def _block(room: Sequence[int], ntasks: int, cpus: Sequence[int]) -> list[int] | None:
    """Return the number of tasks on each node, or None if they do not fit.

    As in Slurm: first one task for each node. Then nodes are filled in order, while each task has
    its own CPUs. Then the remaining tasks are spread.
    """
    left = ntasks - len(room)
    if left < 0:
        return None
    counts = []
    for places, own in zip(room, cpus, strict=True):
        more = max(0, min(left, min(places, own) - 1))
        counts.append(1 + more)
        left -= more
    open_ = [at for at, places in enumerate(room) if counts[at] < places]
    while left and open_:
        for at in open_[:left]:
            counts[at] += 1
        left -= min(left, len(open_))
        open_ = [at for at in open_ if counts[at] < room[at]]
    return None if left else counts


def _number(chosen: Sequence[Share], counts: Sequence[int]) -> tuple[NodeTasks, ...]:
    placed = []
    first_rank = 0
    for share, count in zip(chosen, counts, strict=True):
        placed.append(NodeTasks(node=share.node, first_rank=first_rank, count=count))
        first_rank += count
    return tuple(placed)


def _deal(chosen: Sequence[Share], room: Sequence[int], ntasks: int, plane: int) -> tuple[NodeTasks, ...]:
    """Return `ntasks` tasks, given to the nodes in turn, `plane` at a time, while they fit."""
    ranks: list[list[int]] = [[] for _ in chosen]
    rank = 0
    while rank < ntasks:
        for mine, places in zip(ranks, room, strict=True):
            take = min(plane, places - len(mine), ntasks - rank)
            mine.extend(range(rank, rank + take))
            rank += take
    if not all(ranks):
        filled = sum(1 for mine in ranks if mine)
        raise RequestError(
            f"cannot give the step {_count(len(chosen), 'node')}: {_count(ntasks, 'task')}, {plane} at a time, need {filled}"
        )
    return _gathered({share.node: mine for share, mine in zip(chosen, ranks, strict=True)}, {})


def _too_few_nodes(shares: Sequence[Share], candidates: Sequence[Share], shape: StepShape, low: int) -> str:
    if low > len(candidates):
        excluded = len(shares) - len(candidates)
        note = f", {excluded} of them excluded" if excluded else ""
        return f"cannot give the step {low} nodes: the job has {_count(len(shares), 'node')}{note}"
    sizes = ", ".join(str(share.cpus) for share in candidates[:20])
    return (
        f"cannot give the step {_count(low, 'node')} with {_count(_cpus_of_node(shape), 'cpu')} on each: "
        f"the job's nodes have {sizes} cpus"
    )


def _cpus_of_node(shape: StepShape) -> int:
    return shape.cpus_per_task * (shape.ntasks_per_node or 1 if shape.ntasks is None else 1)


def _too_many_tasks(chosen: Sequence[Share], shape: StepShape, ntasks: int, places: int) -> str:
    what = _count(ntasks, "task")
    if shape.cpus_per_task > 1:
        what += f" of {shape.cpus_per_task} cpus"
    where = f"{_count(sum(share.cpus for share in chosen), 'cpu')} on {_count(len(chosen), 'node')}"
    if shape.ntasks_per_node is not None and places == shape.ntasks_per_node * len(chosen):
        nodes = _count(len(chosen), "node")
        return f"cannot give the step {what}: {shape.ntasks_per_node} on each of {nodes} are {places}"
    return f"cannot give the step {what}: the job has {where}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
