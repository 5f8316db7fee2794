"""Which ranks form the next generation of a group, and which part each of them gets.

Pure: members of the roster with their facts come in, a choice with the split goes out. Plans are made by `plan`.
Rules, in this order:
- A lost rank's part goes to a waiting rank; all others keep theirs, so that they need not load anything.
- Without a waiting rank the model is planned anew for those that are left, if it fits.
- If it does not fit, there is no generation until more ranks come.
- A rank that comes to an incomplete group is taken in by a new plan; to a complete one it is a spare.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcserve.config import ModelConfig
from hpcserve.errors import ServeError
from hpcserve.plan import LinkFacts, LinkTable, ModelDoesNotFit, PlanGoal, ServeLoad, ServeNode, make_plan, model_shape
from hpcserve.split import ModelPart, ModelSplit, Span, even, spans_of
from hpcserve.steps import BLOCK_POSITIONS
from hpctrain.elastic.roster import Member, MemberChoice, Message

MOST_LINKS = 1000
ONE_HOST = LinkFacts(latency_s=30e-6, rate_bytes_s=3e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """What the user asked for; `shape` "tensor" or "pipeline" takes the place of the planner."""

    ranks: int
    kind: str
    load: ServeLoad
    goal: PlanGoal = PlanGoal.LATENCY
    shape: str = "auto"

    @property
    def blocks(self) -> int:
        """The blocks of the KV cache on each rank."""
        return -(-self.load.kv_tokens(self.load.streams) // BLOCK_POSITIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """The ranks of a generation by member number, and their parts."""

    numbers: tuple[int, ...]
    split: ModelSplit
    candidates: int  # the ranks among which they were chosen
    tokens_s: float = 0.0  # predicted for one stream; 0: unknown


class GroupArrangement:
    """The arrangement of a roster (`hpctrain.elastic.roster`) whose members serve a model."""

    def __init__(self, config: ModelConfig, settings: GroupSettings, report: Callable[[str], None]) -> None:
        self._config, self._settings, self._report = config, settings, report
        self._last: GroupPlan | None = None  # of the generation that was formed last
        self._plans: dict[frozenset[int], GroupPlan | None] = {}
        self._measured: dict[int, float] = {}  # bytes of weights that a member reads a second
        self._links: dict[frozenset[int], LinkFacts] = {}  # measured between two members

    def __call__(self, inside: Sequence[Member], ready: Sequence[Member], patient: bool) -> MemberChoice | None:
        """Choose the members of the next generation by the rules above."""
        candidates = [*inside, *ready][: self._settings.ranks]
        if not candidates or (patient and len(candidates) < self._settings.ranks):
            return None
        plan = self._kept(inside, ready) or self._planned(candidates)
        if plan is None:
            return None
        by_number = {member.number: member for member in (*inside, *ready)}
        return MemberChoice(
            members=[by_number[number] for number in plan.numbers],
            facts={
                "split": plan.split.to_json(),
                "kind": self._settings.kind,
                "blocks": self._settings.blocks,
                "candidates": plan.candidates,
                "tokens_s": plan.tokens_s,
                "measure": self._unmeasured([by_number[number] for number in plan.numbers]),
            },
        )

    @property
    def tokens_s(self) -> float:
        """The predicted tokens/s of one stream with what is known now; 0: unknown."""
        return self._last.tokens_s if self._last is not None else 0.0

    def learn_links(self, rows: object) -> None:
        """Use links that the last generation has measured: rows of two ranks, s, bytes/s."""
        numbers = self.numbers
        for row in rows[:MOST_LINKS] if isinstance(rows, list) else ():
            match row:
                case [int(low), int(high), float(latency_s), float(rate)] if 0 <= low < high < len(numbers):
                    if positive(latency_s) and positive(rate):
                        link = LinkFacts(latency_s=latency_s, rate_bytes_s=rate)
                        self._links[frozenset((numbers[low], numbers[high]))] = link
                        self._plans.clear()

    def _unmeasured(self, members: Sequence[Member]) -> list[list[int]]:
        """Return the pairs of ranks of different hosts whose links are not measured yet."""
        if self._settings.shape != "auto":
            return []
        return [
            [one, other]
            for one, other in itertools.combinations(range(len(members)), 2)
            if not is_one_host(members[one], members[other])
            and frozenset((members[one].number, members[other].number)) not in self._links
        ]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The members of the generation that was formed last, by rank."""
        return self._last.numbers if self._last is not None else ()

    def resize(self, ranks: int) -> None:
        """Form groups of so many ranks from now on."""
        self._settings = replace(self._settings, ranks=ranks)

    def formed(self, news: Message) -> None:
        """Record the generation that a message to its members announces."""
        facts: Any = news
        self._last = GroupPlan(
            numbers=tuple(member["number"] for member in facts["members"]),
            split=ModelSplit.from_json(facts["split"]),
            candidates=facts["candidates"],
            tokens_s=facts["tokens_s"],
        )

    def learn(self, step_s: Mapping[int, float], members: Sequence[Member]) -> bool:
        """Plan anew with members' seconds for a token; return whether the plan changes."""
        last = self._last
        if last is None:
            return False
        for rank, number in enumerate(last.numbers):
            if step_s.get(number, 0) > 0:
                size = part_bytes(self._config, last.split.part(rank), self._settings.kind)
                self._measured[number] = size / step_s[number]
        self._plans.clear()
        found = self._planned([member for member in members if member.number in last.numbers])
        if found is None:
            return False
        if (found.numbers, found.split) == (last.numbers, last.split):
            self._last = replace(last, tokens_s=found.tokens_s)
            return False
        self._last = None
        return True

    def _kept(self, inside: Sequence[Member], ready: Sequence[Member]) -> GroupPlan | None:
        """Return the last plan, with waiting ranks in the place of lost ones; None: plan anew."""
        last = self._last
        if last is None or min(self._settings.ranks, len(inside) + len(ready)) > last.candidates:
            return None
        here = {member.number for member in (*inside, *ready)}
        waiting = [member for member in ready if member.number not in last.numbers]
        numbers = list(last.numbers)
        for rank, number in enumerate(numbers):
            if number not in here:
                spare = next((one for one in waiting if self._fits(one, last.split.part(rank))), None)
                if spare is None:
                    return None
                waiting.remove(spare)
                numbers[rank] = spare.number
        return replace(last, numbers=tuple(numbers))

    def _fits(self, member: Member, part: ModelPart) -> bool:
        """Return whether a part fits the memory of a waiting rank."""
        free = node_facts(member).free_bytes
        return part_bytes(self._config, part, self._settings.kind, self._settings.blocks) <= free

    def _planned(self, candidates: Sequence[Member]) -> GroupPlan | None:
        key = frozenset(member.number for member in candidates)
        if key not in self._plans:
            if len(self._plans) > 64:
                self._plans.clear()
            try:
                self._plans[key] = self._made(candidates)
            except ModelDoesNotFit as error:
                self._report(f"the group waits for more ranks: {error}")
                self._plans[key] = None
        return self._plans[key]

    def _node(self, member: Member) -> ServeNode:
        """Return a member as the planner sees it.

        With what it measured when it joined, or what it did since.
        """
        rate = self._measured.get(member.number) or positive(member.offer.get("kernel_bytes_s"))
        return replace(node_facts(member), kernel_bytes_s={self._settings.kind: rate} if rate else {})

    def _made(self, candidates: Sequence[Member]) -> GroupPlan:
        settings = self._settings
        if settings.shape != "auto":
            split = even_split(self._config, len(candidates), settings.shape)
            numbers = tuple(member.number for member in candidates)
            return GroupPlan(numbers=numbers, split=split, candidates=len(candidates))
        nodes = [self._node(member) for member in candidates]
        made = make_plan(
            model_shape(self._config),
            settings.kind,
            nodes,
            links_between(candidates, self._links),
            settings.load,
            settings.goal,
        )
        best = next((one for one in made.candidates if len(one.replicas) == 1), None)
        if best is None:
            raise ModelDoesNotFit("cannot fit the model into one group")
        replica = best.replicas[0]
        for name, why in made.left_out.items():
            self._report(f"{name} is not used: {why}")
        return GroupPlan(
            numbers=tuple(int(name.rpartition("#")[2]) for name in replica.nodes),
            split=replica.split,
            candidates=len(candidates),
            tokens_s=1 / replica.alone_s,
        )


def node_facts(member: Member) -> ServeNode:
    """Return a member as the planner sees it; its facts come from the rank."""
    facts: Any = member.offer
    known = {name: facts[name] for name in ("read_bytes_s", "flops_s", "cores") if positive(facts.get(name))}
    return ServeNode(
        name=f"{facts.get('node', '?')}#{member.number}", free_bytes=int(facts.get("free_bytes", 1 << 62)), **known
    )


def links_between(members: Sequence[Member], measured: Mapping[frozenset[int], LinkFacts]) -> LinkTable:
    """Return the links between members.

    Those on one host share memory; others are as measured, or taken as 1 Gbit/s.
    """
    pairs: dict[frozenset[str], LinkFacts] = {}
    for one, other in itertools.combinations(members, 2):
        link = ONE_HOST if is_one_host(one, other) else measured.get(frozenset((one.number, other.number)))
        if link is not None:
            pairs[frozenset((node_facts(one).name, node_facts(other).name))] = link
    return LinkTable(pairs=pairs)


def is_one_host(one: Member, other: Member) -> bool:
    """Return whether two members share memory."""
    return one.offer.get("host") == other.offer.get("host")


def positive(value: object) -> float:
    """Return a number that a rank reported; 0 for anything else than a positive number."""
    return float(value) if isinstance(value, int | float) and 0 < value < float("inf") else 0.0


def part_bytes(config: ModelConfig, part: ModelPart, kind: str, blocks: int = 0) -> int:
    """Return about the bytes of a part's weights, and of its cache of so many blocks."""
    shape = model_shape(config)
    each = {"fp32": 4.0, "bf16": 2.0, "int8": 1.01, "int4": 0.625}[kind]
    layer = len(part.kv_groups) * shape.group_weights() + len(part.ffn) * shape.column_weights()
    ends = len(part.vocab) * shape.width * (part.layers.start == 0 or part.layers.stop == shape.layers)
    cache = 2 * len(part.layers) * len(part.kv_groups) * shape.head_dim * blocks * BLOCK_POSITIONS
    weights = each * (len(part.layers) * layer + ends)
    return int(weights + cache * (4 if kind == "fp32" else 2))


def spare_parts(
    config: ModelConfig, split: ModelSplit, kind: str, blocks: int, *, first: int, free: int
) -> list[ModelPart]:
    """Return the parts that a spare loads in advance, from that of rank `first` on.

    These are as many as fit into `free` bytes beside one cache of `blocks` blocks.
    """
    parts = [split.part((first + rank) % split.size) for rank in range(split.size)]
    sizes = [part_bytes(config, part, kind) for part in parts]
    cache = max(part_bytes(config, part, kind, blocks) - size for part, size in zip(parts, sizes, strict=True))
    needed = itertools.accumulate(sizes)
    return [part for part, size in zip(parts, needed, strict=True) if size + cache <= free]


def even_split(config: ModelConfig, ranks: int, shape: str) -> ModelSplit:
    """Return equal parts: one stage of all ranks ("tensor"), or one for each ("pipeline").

    Raises:
        ServeError: the model has too few layers or columns.
    """
    if shape == "pipeline":
        if ranks > config.layers:
            raise ServeError(f"cannot make {ranks} stages of {config.layers} layers: use fewer ranks")
        whole = (Span(0, config.kv_groups), Span(0, config.ffn), Span(0, config.vocab))
        return ModelSplit(
            stages=tuple(
                (ModelPart(layers=span, kv_groups=whole[0], ffn=whole[1], vocab=whole[2]),)
                for span in spans_of(even(config.layers, ranks))
            )
        )
    spans = [spans_of(even(length, ranks)) for length in (config.kv_groups, config.ffn, config.vocab)]
    return ModelSplit(
        stages=(
            tuple(
                ModelPart(layers=Span(0, config.layers), kv_groups=groups, ffn=ffn, vocab=vocab)
                for groups, ffn, vocab in zip(*spans, strict=True)
            ),
        )
    )
