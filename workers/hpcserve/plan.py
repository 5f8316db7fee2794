"""Plans how nodes share a model: candidates, their predicted speed and memory, and why.

Pure: the facts of model, nodes, links and load come in, a `ServePlan` goes out. Does not know how facts are measured
(`measure`) nor how ranks start. Rules: memory is a hard limit; a rank waits for its stage after attention and after the FFN,
so each of both is shared by speed on its own, KV groups coarsely and FFN columns finely; a node that slows the model down is
left out. All nodes of a small cluster are tried in all combinations, of a large one the fastest in regular ones.

A step of `rows` tokens reads all weights of a part once, and computes each for each row. Both times add up: a batched kernel
that waits for memory cannot use the time to compute.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from hpcserve.config import ModelConfig
from hpcserve.errors import ServeError
from hpcserve.split import ModelPart, ModelSplit, spans_of

GIB = 1024**3
BASE_BYTES = 300_000_000  # Python, torch and its buffers
FFN_COLUMNS = 32  # the unit of FFN widths: a group of int4 weights
VOCAB_ROWS = 64
PREFILL_TOKENS = 256  # of a prompt in one step
WIRE_BYTES = 4  # of a value between ranks
MOST_TENSOR_RANKS = 16
MOST_TRIED = 4  # nodes of which all combinations are tried
REGULAR_SIZES = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256)  # of groups of more nodes
WRONG_SHARE = 0.25  # a prediction is wrong if the measurement differs by more

Stage = tuple["ServeNode", ...]
Replica = tuple[Stage, ...]


class PlanGoal(StrEnum):
    """What the best candidate is best at."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    ENERGY = "energy"


class KernelFacts(NamedTuple):
    """Bytes of a kind's weight and row, and how well its kernels use memory and cores."""

    weight_bytes: float
    row_bytes: float
    read_share: float
    flops_share: float


KERNELS: Mapping[str, KernelFacts] = {
    "fp32": KernelFacts(4, 0, 0.50, 0.4),
    "bf16": KernelFacts(2, 0, 0.88, 1.0),
    "int8": KernelFacts(1, 8, 0.82, 1.4),
    "int4": KernelFacts(0.625, 0, 0.48, 0.3),
}


class ModelDoesNotFit(ServeError):
    """No candidate fits the nodes' memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a model that decide how it is split."""

    layers: int
    width: int
    heads: int
    kv_groups: int
    head_dim: int
    ffn: int
    vocab: int
    ffn_matrices: int = 3  # gate, up and down; 2 without a gate
    experts: int = 1
    experts_used: int = 1  # by one token

    def group_weights(self) -> int:
        """Return the weights of one KV group of one layer: q, k, v and o."""
        return self.width * self.head_dim * (2 * self.heads // self.kv_groups + 2)

    def column_weights(self) -> int:
        """Return the weights of one FFN column of one layer, of all experts."""
        return self.width * self.ffn_matrices * self.experts

    def columns_read(self, rows: int) -> int:
        """Return the weights of one FFN column that a step of `rows` tokens reads."""
        return self.width * self.ffn_matrices * min(self.experts, rows * self.experts_used)

    def weights(self) -> int:
        """Return the weights of the model's matrices, embedding and output separately."""
        layer = self.kv_groups * self.group_weights() + self.ffn * self.column_weights()
        return self.layers * layer + 2 * self.vocab * self.width


def model_shape(config: ModelConfig) -> ModelShape:
    """Return the numbers of a model that decide how it is split."""
    return ModelShape(
        layers=config.layers,
        width=config.hidden,
        heads=config.heads,
        kv_groups=config.kv_groups,
        head_dim=config.head_dim,
        ffn=config.ffn,
        vocab=config.vocab,
        ffn_matrices=3 if config.gated else 2,
        experts=max(1, config.experts),
        experts_used=max(1, config.experts_per_token),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeNode:
    """One node as the planner sees it.

    `read_bytes_s` is what it reads while the other ranks read.
    """

    name: str
    free_bytes: int
    read_bytes_s: float = 20e9
    flops_s: float = 480e9  # of bf16 kernels
    cores: int = 1
    watts: float = 0.0  # of the busy node; 0: unknown
    layer_s: float = 0.00017  # of a step outside of matrices, for each layer
    kernel_bytes_s: Mapping[str, float] = field(default_factory=dict, hash=False)  # measured, by kind of weights

    def weight_s(self, kind: str, rows: int) -> float:
        """Return the time for one weight in a step of `rows` tokens."""
        kernel = KERNELS[kind]
        rate = self.kernel_bytes_s.get(kind) or self.read_bytes_s * kernel.read_share
        return kernel.weight_bytes / rate + 2 * (rows - 1) / (self.flops_s * kernel.flops_share)

    def power(self) -> float:
        """Return the watts of the busy node, guessed by its cores if unknown."""
        return self.watts or 20 + 8 * self.cores


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """A link between two ranks: one way, for a small message, and its rate."""

    latency_s: float = 0.0002
    rate_bytes_s: float = 117e6

    def send_s(self, size: float) -> float:
        """Return the time until `size` bytes have arrived."""
        return self.latency_s + size / self.rate_bytes_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable:
    """The links between nodes: one for all, and those of pairs that differ."""

    default: LinkFacts = LinkFacts()
    pairs: Mapping[frozenset[str], LinkFacts] = field(default_factory=dict)
    known: dict[frozenset[str], LinkFacts] = field(default_factory=dict, init=False, repr=False, compare=False)  # worst

    def worst(self, names: Iterable[str]) -> LinkFacts:
        """Return the highest latency and the lowest rate between any two of `names`."""
        if not self.pairs:
            return self.default
        among = frozenset(names)
        if among not in self.known:
            links = [self.pairs.get(frozenset(pair), self.default) for pair in itertools.combinations(among, 2)]
            self.known[among] = LinkFacts(
                latency_s=max((link.latency_s for link in links), default=self.default.latency_s),
                rate_bytes_s=min((link.rate_bytes_s for link in links), default=self.default.rate_bytes_s),
            )
        return self.known[among]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLoad:
    """The requests that are expected: how many at once, and how long."""

    streams: int = 1
    prompt_tokens: int = 256
    answer_tokens: int = 256
    context_tokens: int = 2048  # the longest request that must fit

    def kv_tokens(self, streams: int) -> int:
        """Return the positions that the cache of a replica holds."""
        return max(self.context_tokens, streams * (self.prompt_tokens + self.answer_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTask:
    """What all candidates of a plan have in common."""

    shape: ModelShape
    kind: str
    links: LinkTable
    load: ServeLoad
    goal: PlanGoal

    def matrix_bytes(self, weights: float) -> float:
        """Return the bytes of matrices with so many weights, with the scales of their rows."""
        kernel = KERNELS[self.kind]
        return weights * (kernel.weight_bytes + kernel.row_bytes / self.shape.width)

    @property
    def plain_bytes(self) -> int:
        """Bytes of a key's or value's number, and of an embedding's that is not quantized."""
        return 4 if self.kind == "fp32" else 2

    @property
    def embedding_bytes(self) -> float:
        """Bytes of an embedding's number: int8 in quantized kinds, with a scale for each row."""
        return self.plain_bytes if self.kind in ("fp32", "bf16") else 1 + 4 / self.shape.width


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWidths:
    """What the ranks of a stage hold of each of its layers, and of the vocabulary."""

    nodes: Stage
    layers: int
    groups: list[int]
    columns: list[int]
    vocab: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What one rank needs of its node's memory."""

    node: str
    weights_bytes: int
    kv_bytes: int
    work_bytes: int  # activations, or a layer while it is loaded, and the process itself
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        """All that the rank needs."""
        return self.weights_bytes + self.kv_bytes + self.work_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """One copy of the model on its nodes, and what it does for `streams` requests at once."""

    nodes: tuple[str, ...]  # by rank
    stages: tuple[StageWidths, ...]
    task: PlanTask
    streams: int
    gap_s: float  # between two tokens of a stream
    first_token_s: float
    tokens_s: float
    watts: float

    @property
    def alone_s(self) -> float:
        """The time between two tokens of a stream that is the only one."""
        return path_s(self.task, self.stages, 1, step_times(self.task, self.stages, 1))

    @property
    def split(self) -> ModelSplit:
        """The parts of the ranks."""
        return split_of(self.task, self.stages)

    @property
    def memory(self) -> tuple[RankMemory, ...]:
        """What the ranks need."""
        return tuple(memory_of(self.task, self.stages, self.streams))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCandidate:
    """One way to share the model, with its predictions."""

    name: str
    replicas: tuple[ReplicaPlan, ...]
    gap_s: float
    first_token_s: float
    tokens_s: float
    joules: float  # for each token

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes in use."""
        return tuple(name for replica in self.replicas for name in replica.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    """The candidates, the best first, and why nodes are left out."""

    goal: PlanGoal
    kind: str
    candidates: tuple[PlanCandidate, ...]
    left_out: Mapping[str, str]
    why: str


def make_plan(
    shape: ModelShape,
    kind: str,
    nodes: Sequence[ServeNode],
    links: LinkTable,
    load: ServeLoad,
    goal: PlanGoal = PlanGoal.LATENCY,
) -> ServePlan:
    """Return all candidates that fit, the best for `goal` first.

    Raises:
        ModelDoesNotFit: none fits; the message says what would.
        ServeError: the facts make no sense.
    """
    check_facts(shape, kind, nodes, load)
    check_links(links)
    task = PlanTask(shape=shape, kind=kind, links=links, load=load, goal=goal)
    tried = sorted(candidates(task, nodes), key=functools.partial(order, goal))
    if not tried:
        raise ModelDoesNotFit(refusal(task, nodes))
    shown: dict[tuple[str, int], PlanCandidate] = {}
    for one in tried:
        shown.setdefault((one.name, len(one.nodes)), one)
    best = tried[0]
    left_out = {
        node.name: why_left_out(task, node, best, tried) for node in sorted(nodes, key=lambda node: node.name)
        if node.name not in best.nodes
    }  # fmt: skip
    return ServePlan(
        goal=goal,
        kind=kind,
        candidates=tuple(shown.values()),
        left_out=left_out,
        why=why_best(goal, list(shown.values())),
    )


def replan(predicted: float, measured: Sequence[float]) -> bool:
    """Return whether the last two measurements both differ from the prediction by over 25 %."""
    return len(measured) > 1 and all(abs(one - predicted) > WRONG_SHARE * predicted for one in measured[-2:])


def check_facts(shape: ModelShape, kind: str, nodes: Sequence[ServeNode], load: ServeLoad) -> None:
    """Check what the planner was given.

    Raises:
        ServeError: a number is not usable.
    """
    if kind not in KERNELS:
        raise ServeError(f"cannot plan: weights of kind '{kind}'; known are {', '.join(KERNELS)}")
    names = [node.name for node in nodes]
    if not names or len(set(names)) < len(names):
        raise ServeError("cannot plan: name one or more nodes, each once")
    numbers = [shape.layers, shape.width, shape.heads, shape.kv_groups, shape.head_dim, shape.ffn, shape.vocab]
    numbers += [load.streams, load.prompt_tokens, load.answer_tokens, load.context_tokens]
    if min(numbers) < 1 or shape.heads % shape.kv_groups:
        raise ServeError("cannot plan: sizes of the model and of the load are whole numbers from 1")
    if load.context_tokens < load.prompt_tokens + load.answer_tokens:
        raise ServeError(
            f"cannot plan: a context of {load.context_tokens} tokens has no room for a prompt of {load.prompt_tokens} "
            f"and an answer of {load.answer_tokens} tokens"
        )
    for node in nodes:
        if not (node.read_bytes_s > 0 and node.flops_s > 0 and math.isfinite(node.read_bytes_s + node.flops_s)):
            raise ServeError(f"cannot plan: node '{node.name}' has no bandwidth or speed")


def check_links(links: LinkTable) -> None:
    """Check the links that the planner was given.

    Raises:
        ServeError: a link carries nothing, or its latency is not a number.
    """
    named = [("between nodes", links.default)]
    named += [(f"between {' and '.join(sorted(pair))}", link) for pair, link in links.pairs.items()]
    for where, one in named:
        if not (one.rate_bytes_s > 0 and one.latency_s >= 0 and math.isfinite(one.rate_bytes_s + one.latency_s)):
            raise ServeError(
                f"cannot plan: the link {where} has a latency of {one.latency_s:g} s and a rate of {one.rate_bytes_s:g} bytes/s"
            )


# ----- which nodes form replicas and stages


def candidates(task: PlanTask, nodes: Sequence[ServeNode]) -> list[PlanCandidate]:
    """Return one candidate for each arrangement of nodes that fits."""
    known: dict[tuple[Replica, int], ReplicaPlan | None] = {}

    def planned(replica: Replica, streams: int) -> ReplicaPlan | None:
        if (replica, streams) not in known:
            known[replica, streams] = best_replica(task, replica, streams)
        return known[replica, streams]

    found = []
    for arrangement in dict.fromkeys(arrangements(task, nodes)):
        streams = shares_of_streams(task, arrangement)
        replicas = [planned(replica, share) for replica, share in zip(arrangement, streams, strict=True)]
        whole = [replica for replica in replicas if replica is not None]
        if len(whole) == len(arrangement):
            found.append(candidate_of(whole))
    return found


def arrangements(task: PlanTask, nodes: Sequence[ServeNode]) -> Iterator[tuple[Replica, ...]]:
    """Yield ways to make replicas of stages of nodes."""
    by_speed = sorted(nodes, key=lambda node: (node.weight_s(task.kind, 1), -node.free_bytes, node.name))
    by_memory = largest_first(nodes)
    for some in {tuple(by_speed[:MOST_TRIED]), tuple(by_memory[:MOST_TRIED])}:
        yield from all_arrangements(task, some)
    if len(nodes) > MOST_TRIED:
        yield from regular_arrangements(task, by_speed)
        if len(nodes) <= MOST_TENSOR_RANKS:
            yield from regular_arrangements(task, by_memory)


def largest_first(nodes: Sequence[ServeNode]) -> list[ServeNode]:
    """Return nodes by their free memory."""
    return sorted(nodes, key=lambda node: (-node.free_bytes, node.name))


def all_arrangements(task: PlanTask, nodes: Sequence[ServeNode]) -> Iterator[tuple[Replica, ...]]:
    """Yield all arrangements of all subsets of a few nodes, up to the order of replicas."""
    for count in range(1, len(nodes) + 1):
        for some in itertools.combinations(nodes, count):
            for groups in partitions(some):
                if len(groups) > task.load.streams:
                    continue
                options = [
                    [stages for stages in partitions(group) if len(stages) <= task.shape.layers] for group in groups
                ]
                yield from itertools.product(*options)


def partitions(nodes: Sequence[ServeNode]) -> Iterator[tuple[Stage, ...]]:
    """Yield all ways to put nodes into groups, in the order of the nodes."""
    if not nodes:
        yield ()
        return
    for rest in partitions(nodes[:-1]):
        yield (*rest, (nodes[-1],))
        for index, group in enumerate(rest):
            yield (*rest[:index], (*group, nodes[-1]), *rest[index + 1 :])


def regular_arrangements(task: PlanTask, nodes: Sequence[ServeNode]) -> Iterator[tuple[Replica, ...]]:
    """Yield arrangements of the first nodes of a list in groups of about the same size."""
    sizes = regular_sizes(len(nodes))
    for used, replicas, stages in itertools.product(sizes, sizes, sizes):
        if (
            replicas * stages <= used
            and used <= replicas * stages * MOST_TENSOR_RANKS
            and replicas <= task.load.streams
            and stages <= task.shape.layers
        ):
            yield tuple(dealt(group, stages) for group in dealt(nodes[:used], replicas))


def regular_sizes(most: int) -> list[int]:
    """Return how many nodes, groups or stages regular arrangements of `most` nodes have."""
    return [*(count for count in REGULAR_SIZES if count < most), most]


def dealt(nodes: Sequence[ServeNode], count: int) -> tuple[Stage, ...]:
    """Deal nodes to `count` groups, forth and back, so that their sums are similar."""
    groups: list[list[ServeNode]] = [[] for _ in range(count)]
    for index, node in enumerate(nodes):
        turn, place = divmod(index, count)
        groups[count - 1 - place if turn % 2 else place].append(node)
    return tuple(tuple(group) for group in groups)


def shares_of_streams(task: PlanTask, replicas: Sequence[Replica]) -> list[int]:
    """Return how many of the load's streams each replica gets, by the speed of its nodes."""
    speeds = [sum(1 / node.weight_s(task.kind, 1) for stage in replica for node in stage) for replica in replicas]
    more = shares(
        task.load.streams - len(replicas), [1 / speed for speed in speeds], [task.load.streams] * len(replicas)
    )
    return [1 + (more[index] if more else 0) for index in range(len(replicas))]


# ----- one replica: layers for stages, widths for the ranks of a stage


def best_replica(task: PlanTask, replica: Replica, streams: int) -> ReplicaPlan | None:
    """Return the best way to split the model over these stages, or None if none fits."""
    turns = range(len(replica)) if sum(map(len, replica)) <= MOST_TRIED else [0]
    ways = [(*replica[turn:], *replica[:turn]) for turn in turns]
    plans = [plan for stages in ways for plan in replica_plans(task, stages, streams)]
    return min(plans, key=lambda plan: order(task.goal, candidate_of([plan])), default=None)


def replica_plans(task: PlanTask, stages: Replica, streams: int) -> Iterator[ReplicaPlan]:
    """Yield plans of stages in this order: layers balanced, and most on the fastest."""
    rows = math.ceil(streams / min(len(stages), streams))
    ends = [(index == 0, index == len(stages) - 1) for index in range(len(stages))]
    costs = [sum_of_speeds(task, stage, rows) for stage in stages]
    caps = [most_layers(task, stage, first, last, streams) for stage, (first, last) in zip(stages, ends, strict=True)]
    layer = task.shape.kv_groups * task.shape.group_weights() + task.shape.ffn * task.shape.column_weights()
    head = [0.0] * (len(stages) - 1) + [task.shape.vocab * task.shape.width * costs[-1]]
    choices = [
        shares(task.shape.layers, [cost * layer for cost in costs], caps, head, least=1),
        filled(task.shape.layers, costs, caps),
    ]
    for layers in {tuple(choice) for choice in choices if choice}:
        widths = [
            stage_widths(task, stage, count, first, last, streams, rows)
            for stage, count, (first, last) in zip(stages, layers, ends, strict=True)
        ]
        whole = [one for one in widths if one is not None]
        if len(whole) == len(stages):
            yield replica_plan(task, whole, streams)


def sum_of_speeds(task: PlanTask, stage: Stage, rows: int) -> float:
    """Return the time for one weight if all nodes of a stage share it."""
    if len(stage) == 1:
        return stage[0].weight_s(task.kind, rows)
    return 1 / sum(1 / node.weight_s(task.kind, rows) for node in stage)


def filled(units: int, costs: Sequence[float], caps: Sequence[int]) -> list[int] | None:
    """Return counts that use the cheapest places first, one or more each; None: no room."""
    if min(caps) < 1 or sum(caps) < units or units < len(caps):
        return None
    counts = [1] * len(caps)
    rest = units - len(caps)
    for index in sorted(range(len(caps)), key=lambda index: costs[index]):
        more = min(rest, caps[index] - 1)
        counts[index] += more
        rest -= more
    return counts


def shares(
    units: int,
    costs: Sequence[float],
    caps: Sequence[int],
    base: Sequence[float] | None = None,
    least: int = 0,
) -> list[int] | None:
    """Share `units` so that the largest base + count * cost, of counts above 0, is minimal.

    None if there is no room.
    """
    base = base or [0.0] * len(costs)
    if sum(caps) < units or min(caps) < least or units < least * len(costs):
        return None
    if len(costs) == 1:
        return [units]
    counts = [max(least, int(part * (1 - 1e-9))) for part in ideal_shares(units, costs, caps, base)]
    while sum(counts) > units:  # `least` may ask for more than the ideal shares
        index = max(
            (index for index, count in enumerate(counts) if count > least),
            key=lambda index: base[index] + counts[index] * costs[index],
        )
        counts[index] -= 1
    heap = [
        (start + (count + 1) * cost, index)
        for index, (count, cost, start, cap) in enumerate(zip(counts, costs, base, caps, strict=True))
        if count < cap
    ]
    heapq.heapify(heap)
    for _ in range(units - sum(counts)):
        _, index = heapq.heappop(heap)
        counts[index] += 1
        if counts[index] < caps[index]:
            heapq.heappush(heap, (base[index] + (counts[index] + 1) * costs[index], index))
    return counts


def ideal_shares(
    units: int, costs: Sequence[float], caps: Sequence[int], base: Sequence[float]
) -> list[float]:  # fmt: skip
    """Return how `units`, if they could be divided, fill places to one level."""
    counts = [0.0] * len(costs)
    active = set(range(len(costs)))
    left = float(units)
    while active:
        level = (left + sum(base[index] / costs[index] for index in active)) / sum(1 / costs[index] for index in active)
        parts = {index: (level - base[index]) / costs[index] for index in active}
        held = {index: min(max(0.0, part), float(caps[index])) for index, part in parts.items()}
        # With too much held the level falls, and empty places stay empty; else it rises, and full ones stay full.
        falls = sum(held.values()) > left
        settled = [index for index in active if (parts[index] < 0 if falls else parts[index] > caps[index])]
        for index in settled or active:
            counts[index] = held[index]
        if not settled:
            break
        left -= sum(counts[index] for index in settled)
        active.difference_update(settled)
    return counts


class UnitBytes(NamedTuple):
    """The memory of one unit of a part, over all layers of the stage."""

    group: float
    columns: float
    vocab: float


def unit_bytes(task: PlanTask, layers: int, first: bool, last: bool, streams: int) -> UnitBytes:
    """Return the memory of a KV group with its cache, of FFN columns, of vocabulary."""
    shape = task.shape
    cache = 2 * shape.head_dim * task.plain_bytes * task.load.kv_tokens(streams)
    return UnitBytes(
        group=layers * (task.matrix_bytes(shape.group_weights()) + cache),
        columns=layers * task.matrix_bytes(shape.column_weights()) * FFN_COLUMNS,
        vocab=VOCAB_ROWS * shape.width * (first * task.embedding_bytes + last * task.matrix_bytes(1)),
    )


def work_bytes(task: PlanTask, last: bool, streams: int) -> int:
    """Return the memory of a rank beside weights and cache."""
    shape = task.shape
    step = PREFILL_TOKENS * (8 * shape.width + 3 * shape.ffn) * 4 + last * streams * shape.vocab * 8
    loading = 2 * max(shape.ffn, shape.width) * shape.width * 2  # the largest matrix as it was read, and converted
    return BASE_BYTES + max(step, loading)


def most_layers(task: PlanTask, stage: Stage, first: bool, last: bool, streams: int) -> int:
    """Return how many layers fit the memory of a stage's nodes together."""
    unit = unit_bytes(task, 1, first, last, streams)
    room = -math.ceil(task.shape.vocab / VOCAB_ROWS) * unit.vocab
    room += sum(max(0, node.free_bytes - work_bytes(task, last, streams)) for node in stage)
    layer = task.shape.kv_groups * unit.group + math.ceil(task.shape.ffn / FFN_COLUMNS) * unit.columns
    return max(0, min(task.shape.layers, int(room / layer)))


def stage_widths(
    task: PlanTask, stage: Stage, layers: int, first: bool, last: bool, streams: int, rows: int
) -> StageWidths | None:
    """Return the widths of a stage's ranks, or None if they do not fit.

    Attention, FFN and output are waited for one after the other, so each has its best shares by itself. If memory is short,
    the part that is shared first gets its best shares: several orders are tried.
    """
    totals = [task.shape.kv_groups, math.ceil(task.shape.ffn / FFN_COLUMNS), math.ceil(task.shape.vocab / VOCAB_ROWS)]
    weights = [node.weight_s(task.kind, rows) for node in stage]
    costs = (group_times(task, stage, weights, rows), weights, weights)
    unit = unit_bytes(task, layers, first, last, streams)
    work = work_bytes(task, last, streams)
    free = [node.free_bytes - work for node in stage]
    best = [shares(total, cost, [total] * len(stage)) or [] for total, cost in zip(totals, costs, strict=True)]
    if all(
        unit.group * g + unit.columns * f + unit.vocab * v <= left for g, f, v, left in zip(*best, free, strict=True)
    ):
        return useful_widths(task, stage, layers, best)
    orders = ((0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 0, 2), (1, 2, 0))
    tight = (tight_shares(totals, unit, costs, free, turn) for turn in orders)
    found = (useful_widths(task, stage, layers, counts) for counts in tight if counts)
    return min(
        (one for one in found if one is not None),
        key=lambda one: stage_s(task, one, first, last, rows),
        default=None,
    )


def group_times(
    task: PlanTask, stage: Stage, weights: Sequence[float], rows: int, positions: int | None = None
) -> list[float]:
    """Return the time of one KV group of a layer, with its cache, on each node of a stage.

    `weights` are the nodes' times for one weight. Each row sees `positions`, by default the prompt and half of the answer.
    """
    shape, load = task.shape, task.load
    seen = load.prompt_tokens + load.answer_tokens // 2 if positions is None else positions
    cache = 2 * shape.head_dim * task.plain_bytes * seen * min(rows, load.streams)
    group = shape.group_weights()
    return [group * cost + 2 * cache / node.read_bytes_s for cost, node in zip(weights, stage, strict=True)]


def tight_shares(
    totals: Sequence[int],
    unit: UnitBytes,
    costs: Sequence[Sequence[float]],
    free: Sequence[float],
    turn: Sequence[int],
) -> list[list[int]] | None:
    """Share groups, columns and vocabulary in this order within the memory that is left.

    None if there is too little.
    """
    room = list(free)
    counts: list[list[int]] = [[], [], []]
    for item in turn:
        size = max(unit[item], 1e-9)
        shared = shares(totals[item], costs[item], [max(0, min(totals[item], int(left / size))) for left in room])
        if shared is None:
            return None
        counts[item] = shared
        room = [left - count * size for left, count in zip(room, shared, strict=True)]
    return counts


def useful_widths(task: PlanTask, stage: Stage, layers: int, counts: Sequence[Sequence[int]]) -> StageWidths | None:
    """Return widths from counts of units; None: a rank would have nothing of the layers."""
    if not all(map(any, zip(counts[0], counts[1], strict=True))):
        return None
    return StageWidths(
        nodes=stage,
        layers=layers,
        groups=list(counts[0]),
        columns=in_units(counts[1], FFN_COLUMNS, task.shape.ffn),
        vocab=in_units(counts[2], VOCAB_ROWS, task.shape.vocab),
    )


def in_units(counts: Sequence[int], unit: int, total: int) -> list[int]:
    """Return widths of `counts` units whose sum is `total`: the last unit may be smaller."""
    ends = [min(end * unit, total) for end in itertools.accumulate(counts, initial=0)]
    return [stop - start for start, stop in itertools.pairwise(ends)]


# ----- predictions


def stage_s(
    task: PlanTask, widths: StageWidths, first: bool, last: bool, rows: int, positions: int | None = None
) -> float:
    """Return the time of a stage for a step of `rows` tokens that see `positions` each."""
    shape, nodes = task.shape, widths.nodes
    weights = [node.weight_s(task.kind, rows) for node in nodes]
    attention = max(map(operator.mul, widths.groups, group_times(task, nodes, weights, rows, positions)))
    ffn = shape.columns_read(rows) * max(map(operator.mul, widths.columns, weights))
    layer = attention + ffn + max(node.layer_s for node in nodes)
    output = shape.width * max(map(operator.mul, widths.vocab, weights)) if last else 0.0
    if len(nodes) == 1:
        return widths.layers * layer + output
    link = task.links.worst(node.name for node in nodes)
    sums_s = (2 * widths.layers + first) * sum_s(link, len(nodes), rows * shape.width * WIRE_BYTES)
    return widths.layers * layer + output + sums_s


def sum_s(link: LinkFacts, ranks: int, size: float) -> float:
    """Return the time to sum `size` bytes over ranks: each to each if small, else in a ring."""
    return min(link.send_s((ranks - 1) * size), 2 * (ranks - 1) * link.send_s(size / ranks))


def step_times(task: PlanTask, stages: Sequence[StageWidths], rows: int, positions: int | None = None) -> list[float]:
    """Return the time of each stage for a step."""
    last = len(stages) - 1
    return [
        stage_s(task, widths, index == 0, index == last, rows, positions) for index, widths in enumerate(stages)
    ]  # fmt: skip


def path_s(
    task: PlanTask, stages: Sequence[StageWidths], wanted: int, times: Sequence[float], rows: int | None = None
) -> float:
    """Return the time of a step from its begin until the leader has `wanted` rows of logits.

    `times` are those of the stages; the step has `rows` tokens, by default the wanted ones.
    """
    if len(stages) == len(stages[0].nodes) == 1:
        return times[0]
    link = task.links.worst(node.name for widths in stages for node in widths.nodes)
    hops_s = (len(stages) - 1) * link.send_s((rows or wanted) * task.shape.width * WIRE_BYTES)
    missing = task.shape.vocab - (stages[0].vocab[0] if len(stages) == 1 else 0)
    return sum(times) + hops_s + link.send_s(wanted * missing * 4) + link.latency_s


def replica_plan(task: PlanTask, stages: Sequence[StageWidths], streams: int) -> ReplicaPlan:
    """Return the plan of a replica with its predictions."""
    load = task.load
    depth = min(len(stages), streams)
    rows = math.ceil(streams / depth)
    times = step_times(task, stages, rows)
    gap_s = max(path_s(task, stages, rows, times), depth * max(times))
    chunk = min(PREFILL_TOKENS, load.prompt_tokens)
    chunks = load.prompt_tokens / chunk
    prefill = step_times(task, stages, chunk, load.prompt_tokens // 2)
    busy_s = chunks * (max(prefill) if streams >= len(stages) else sum(prefill))
    return ReplicaPlan(
        nodes=tuple(node.name for widths in stages for node in widths.nodes),
        stages=tuple(stages),
        task=task,
        streams=streams,
        gap_s=gap_s,
        first_token_s=path_s(task, stages, min(chunk, streams), prefill, chunk) + (chunks - 1) * max(prefill),
        tokens_s=streams * load.answer_tokens / (load.answer_tokens * gap_s + streams * busy_s),
        watts=sum(node.power() for widths in stages for node in widths.nodes),
    )


def split_of(task: PlanTask, stages: Sequence[StageWidths]) -> ModelSplit:
    """Return the split that these widths are."""
    layers = spans_of([widths.layers for widths in stages])
    split = ModelSplit(
        stages=tuple(
            tuple(
                ModelPart(layers=span, kv_groups=groups, ffn=columns, vocab=vocab)
                for groups, columns, vocab in zip(
                    spans_of(widths.groups), spans_of(widths.columns), spans_of(widths.vocab), strict=True
                )
            )
            for span, widths in zip(layers, stages, strict=True)
        )
    )
    shape = task.shape
    split.check(layers=shape.layers, kv_groups=shape.kv_groups, ffn=shape.ffn, vocab=shape.vocab)
    return split


def memory_of(task: PlanTask, stages: Sequence[StageWidths], streams: int) -> Iterator[RankMemory]:
    """Yield what each rank needs."""
    shape = task.shape
    cache = 2 * shape.head_dim * task.plain_bytes * task.load.kv_tokens(streams)
    for index, widths in enumerate(stages):
        first, last = index == 0, index == len(stages) - 1
        for place, node in enumerate(widths.nodes):
            layer = widths.groups[place] * shape.group_weights() + widths.columns[place] * shape.column_weights()
            rows = widths.vocab[place] * shape.width
            yield RankMemory(
                node=node.name,
                weights_bytes=math.ceil(
                    task.matrix_bytes(widths.layers * layer + last * rows) + first * rows * task.embedding_bytes
                ),
                kv_bytes=widths.layers * widths.groups[place] * cache,
                work_bytes=work_bytes(task, last, streams),
                free_bytes=node.free_bytes,
            )


def candidate_of(replicas: Sequence[ReplicaPlan]) -> PlanCandidate:
    """Return the candidate that these replicas are; its times are means over the streams."""
    streams = sum(replica.streams for replica in replicas)
    rate = sum(replica.tokens_s for replica in replicas)
    return PlanCandidate(
        name=name_of(replicas),
        replicas=tuple(replicas),
        gap_s=sum(replica.streams * replica.gap_s for replica in replicas) / streams,
        first_token_s=sum(replica.streams * replica.first_token_s for replica in replicas) / streams,
        tokens_s=rate,
        joules=sum(replica.watts for replica in replicas) / rate,
    )


def name_of(replicas: Sequence[ReplicaPlan]) -> str:
    """Return the name of a candidate's kind, as `2 replicas of tensor 2`."""
    kinds = {name_of_split([len(widths.nodes) for widths in replica.stages]) for replica in replicas}
    if len(replicas) == 1:
        return kinds.pop()
    return f"{len(replicas)} replicas" + ("" if kinds == {"one node"} else f" of {', '.join(sorted(kinds))}")


def name_of_split(sizes: Sequence[int]) -> str:
    """Return the name of stages of these sizes, as `pipeline of tensor 2, 1`."""
    if sum(sizes) == 1:
        return "one node"
    if len(sizes) == 1:
        return f"tensor {sizes[0]}"
    if max(sizes) == 1:
        return f"pipeline {len(sizes)}"
    return f"pipeline of tensor {', '.join(map(str, sizes))}"


def order(goal: PlanGoal, one: PlanCandidate) -> tuple[float, ...]:
    """Return the key by which candidates are sorted, the best first."""
    answer_s = one.first_token_s + 256 * one.gap_s
    match goal:
        case PlanGoal.LATENCY:
            return answer_s, len(one.nodes), -one.tokens_s
        case PlanGoal.THROUGHPUT:
            return -one.tokens_s, len(one.nodes), answer_s
        case PlanGoal.ENERGY:
            return one.joules, -one.tokens_s, answer_s


# ----- reasons


def figures(goal: PlanGoal, one: PlanCandidate) -> str:
    """Return the figure of a candidate that the goal is about."""
    match goal:
        case PlanGoal.LATENCY:
            return f"{one.gap_s * 1000:.3g} ms for each token"
        case PlanGoal.THROUGHPUT:
            return f"{one.tokens_s:.3g} tokens/s"
        case PlanGoal.ENERGY:
            return f"{one.joules:.3g} J for each token"


def why_best(goal: PlanGoal, shown: Sequence[PlanCandidate]) -> str:
    """Return why the first candidate is chosen."""
    best = shown[0]
    said = f"{best.name} on {', '.join(best.nodes)}: {figures(goal, best)}"
    if len(shown) == 1:
        return f"{said}; nothing else fits"
    return f"{said}; next is {shown[1].name} on {', '.join(shown[1].nodes)} with {figures(goal, shown[1])}"


def why_left_out(task: PlanTask, node: ServeNode, best: PlanCandidate, tried: Sequence[PlanCandidate]) -> str:
    """Return why the best candidate does not use a node."""
    least = work_bytes(task, False, 1)
    if node.free_bytes <= least:
        return f"has {gib(node.free_bytes)} free, a rank needs {gib(least)} before it holds any weights"
    with_it = next((one for one in tried if node.name in one.nodes), None)
    if with_it is None:
        return f"has {gib(node.free_bytes)} free: no split that uses it fits"
    return f"the best with it, {with_it.name}, has {figures(task.goal, with_it)} instead of {figures(task.goal, best)}"


def refusal(task: PlanTask, nodes: Sequence[ServeNode]) -> str:
    """Return what is missing in numbers, and what would fit."""
    streams = task.load.streams
    have = ", ".join(f"{node.name} has {gib(node.free_bytes)} free" for node in list(nodes)[:8])
    have += f", and {len(nodes) - 8} more nodes" if len(nodes) > 8 else ""
    said = (
        f"cannot fit the model: it needs {gib(whole_bytes(task, streams))} with {task.kind} weights on one node; {have}"
    )
    fits = [
        f"--quantize {kind}"
        for kind in ("int8", "int4")
        if KERNELS[kind].weight_bytes < KERNELS[task.kind].weight_bytes and can_fit(replace(task, kind=kind), nodes)
    ]
    fits += fewer_tokens(task, nodes)
    fits += one_more_node(task, nodes)
    return f"{said}. It fits with {' or '.join(fits)}" if fits else f"{said}. Use a smaller model or more nodes"


def whole_bytes(task: PlanTask, streams: int) -> int:
    """Return the memory of the whole model on one node."""
    shape = task.shape
    unit = unit_bytes(task, shape.layers, True, True, streams)
    parts = (
        shape.kv_groups * unit.group + shape.ffn / FFN_COLUMNS * unit.columns + shape.vocab / VOCAB_ROWS * unit.vocab
    )
    return int(parts) + work_bytes(task, True, streams)


def can_fit(task: PlanTask, nodes: Sequence[ServeNode]) -> bool:
    """Return whether one replica fits an arrangement that uses much of the nodes' memory."""
    by_memory = largest_first(nodes)
    few = [some for count in range(1, MOST_TRIED + 1) for some in itertools.combinations(by_memory[:MOST_TRIED], count)]
    counts = regular_sizes(len(nodes))
    ways = itertools.chain(
        (tuple((node,) for node in by_memory[:count]) for count in counts if count <= task.shape.layers),
        (dealt(by_memory[:count], -(-count // MOST_TENSOR_RANKS)) for count in counts),
        (stages for some in few for stages in partitions(some) if len(stages) <= task.shape.layers),
    )
    return any(best_replica(task, stages, task.load.streams) is not None for stages in ways)


def fewer_tokens(task: PlanTask, nodes: Sequence[ServeNode]) -> list[str]:
    """Return the shorter context, or the fewer streams, that would fit."""
    load = task.load
    for streams in dict.fromkeys((load.streams, 1)):
        context = load.context_tokens
        while context > 256:
            context //= 2
            some = min(load.prompt_tokens, context // 2)
            less = replace(load, streams=streams, context_tokens=context, prompt_tokens=some, answer_tokens=some)
            if can_fit(replace(task, load=less), nodes):
                more = "" if streams == load.streams else " and 1 stream"
                return [f"a context of {context} tokens{more}"]
    return []


def one_more_node(task: PlanTask, nodes: Sequence[ServeNode]) -> list[str]:
    """Return the memory of one more node with which the model would fit."""

    def fits_with(halves: int) -> bool:
        more = replace(nodes[0], name="one more node", free_bytes=halves * GIB // 2)
        return can_fit(task, [*nodes, more])

    sizes = range(1, 2 * math.ceil(whole_bytes(task, task.load.streams) / GIB) + 1)
    at = bisect.bisect_left(sizes, True, key=fits_with)
    return [f"one more node of {sizes[at] / 2:g} GiB"] if at < len(sizes) else []


def gib(size: float) -> str:
    """Return a size in GiB, as users read it."""
    return f"{size / GIB:.2g} GiB" if size < 10 * GIB else f"{size / GIB:.0f} GiB"
