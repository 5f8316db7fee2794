"""Continuous batching: which tokens the next step computes.

Of which sequences, and in which blocks of the KV cache.

Does not know torch, clocks or threads: `now_s` and the seconds that steps took are arguments.

Rules. Sequences are ranked by arrival; a level of priority is worth `PRIORITY_S` seconds, so that nothing starves. Each step
has first the sequences that decode, then parts of prompts. While sequences decode, those parts are small enough for the step
to take at most `gap_factor` times what it takes without them, by measured costs, and at most `step_s`. If blocks run out, the
lowest-ranked sequence is preempted: its blocks are freed, and its tokens are computed again later. Full blocks stay in a prefix
cache until their place is needed; a block that is shared or cached is never written. Only requests with the same salt share
blocks, so that the time to the first token does not tell a user what others asked. With a pipeline, `depth` steps are under
way at once; each decoding sequence is in one of them.

Sources: Orca (OSDI 2022), vLLM (SOSP 2023), Sarathi-Serve (OSDI 2024).
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpcserve.errors import InvalidRequest, OverloadedError
from hpcserve.requests import EngineLoad, GenerateRequest
from hpcserve.steps import BLOCK_POSITIONS, ForwardStep, StepRow

PRIORITY_S = 30.0  # a request of one level more is served as if it had come so much earlier
HIGHEST_PRIORITY = 1000
SMALLEST_CHUNK = 4  # tokens of prompts that a step computes however much slower that makes it
LEAST_ALONE = 64  # tokens of prompts in a step without decoding sequences
SCORED_CHUNK = 64  # positions of a prompt whose logits one step returns; each is a vocabulary of floats


class BlockPool:
    """The blocks of the KV cache: how many sequences use each, and which prefix it holds.

    A block is free, used by one or more sequences, or idle: it has no user, but a known content. Idle blocks become free, the
    least recently used first, when no other is free.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = bytearray(b"\1" * count)
        self._free_count = count
        self._users = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._by_content: dict[bytes, int] = {}
        self._contents: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """The number of blocks that can be taken."""
        return self._free_count + len(self._idle)

    def find(self, contents: Sequence[bytes]) -> list[int]:
        """Return the blocks that hold the longest known prefix of these contents."""
        found = []
        for content in contents:
            block = self._by_content.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks have no user."""
        return sum(not self._users[block] for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Add a user to blocks that `find` returned."""
        for block in blocks:
            self._idle.pop(block, None)
            self._users[block] += 1

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Return `count` blocks for one user.

        They follow the block `after`, or each other, if possible."""
        while self._free_count < count:
            block, _ = self._idle.popitem(last=False)
            del self._by_content[self._contents.pop(block)]
            self._make_free(block)
        taken: list[int] = []
        block = self.count if after is None else after + 1
        while len(taken) < count:
            if block >= self.count or not self._free[block]:
                block = self._start_of_run(count - len(taken))
            self._free[block] = 0
            self._users[block] = 1
            taken.append(block)
            block += 1
        self._free_count -= count
        return taken

    def remember(self, block: int, content: bytes) -> None:
        """Record the content of a full block, unless another block has it already."""
        if block not in self._contents and self._by_content.setdefault(content, block) == block:
            self._contents[block] = content

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a user of each block; those of a sequence's end are reused first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._contents:
                self._idle[block] = None
            else:
                self._make_free(block)

    def _make_free(self, block: int) -> None:
        self._free[block] = 1
        self._free_count += 1

    def _start_of_run(self, need: int) -> int:
        """Return the middle of the longest run of free blocks: both neighbours can grow."""
        longest = max(map(len, self._free.split(b"\0")))
        start = self._free.find(b"\1" * longest)
        return start + min(longest // 2, max(0, longest - need))


class StepCosts:
    """What a step takes by its number of tokens, learned from the steps that were done.

    Means are kept by powers of two of the tokens; costs between them are interpolated. Outside the known numbers a step is
    assumed to take proportionally longer or shorter, so that none takes longer than it is allowed to. A mean that is not
    measured any more fades, so that one slow step does not count forever.
    """

    WEIGHT = 0.2  # of a new measurement
    FADE = 0.999

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # tokens and seconds

    def knows(self, tokens: int) -> bool:
        """Return whether a step of about so many tokens was measured."""
        return tokens.bit_length() in self._means

    def observe(self, tokens: int, took_s: float) -> None:
        """Add a measured step."""
        size = tokens.bit_length()
        for other, (mean_tokens, mean_s) in self._means.items():
            if other > size:
                self._means[other] = (mean_tokens, mean_s * self.FADE)
        old_tokens, old_s = self._means.get(size, (tokens, took_s))
        self._means[size] = (
            old_tokens + self.WEIGHT * (tokens - old_tokens),
            old_s + self.WEIGHT * (took_s - old_s),
        )

    def predict_s(self, tokens: int) -> float | None:
        """Return what a step of so many tokens takes; None before the first measurement."""
        if not self._means or tokens < 1:
            return None
        points = sorted(self._means.values())
        below = [point for point in points if point[0] <= tokens]
        above = [point for point in points if point[0] > tokens]
        if not below:
            return above[0][1] * tokens / above[0][0]
        (low, low_s) = below[-1]
        if not above:
            return low_s * tokens / low
        (high, high_s) = above[0]
        return low_s + max(0.0, high_s - low_s) * (tokens - low) / (high - low)

    def most_tokens(self, limit_s: float, most: int) -> int:
        """Return the most tokens, at most `most`, that are expected to take at most `limit_s`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            took_s = self.predict_s(middle)
            if took_s is not None and took_s <= limit_s:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """What bounds the steps and the queue."""

    blocks: int
    context_tokens: int
    depth: int = 1  # steps under way at once
    running: int = 32  # sequences that hold blocks
    waiting: int = 256
    step_tokens: int = 512
    gap_factor: float = 2.0  # of the time of a step without prompts
    step_s: float = math.inf  # the longest step with parts of prompts, unless their smallest take longer
    alone_s: float = 1.0  # the longest step otherwise: new and cancelled requests wait for its end


@dataclass(slots=True, eq=False, kw_only=True)
class LiveSequence:
    """A request with its tokens and blocks; changed by the `Batcher` alone."""

    request: GenerateRequest
    rank: tuple[float, int]  # lower first
    arrived_s: float
    tokens: list[int]
    computed: int = 0  # tokens whose keys and values are in the blocks
    planned: int = 0  # the same, when the steps under way are done
    blocks: list[int] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)  # of the full blocks, each with all before it
    remembered: int = 0  # blocks that the prefix cache knows
    flights: int = 0  # steps under way that have it
    last_step: int = -1
    cached_tokens: int = 0
    cancelled: bool = False

    @property
    def generated(self) -> int:
        """The number of tokens after the prompt."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """The number of known tokens that no step has or had."""
        return len(self.tokens) - self.planned


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """A row of a step, and its sequence."""

    sequence: LiveSequence
    row: StepRow
    chooses: bool  # a token follows from its logits
    proposals: int = 0  # its last tokens are guesses, of which the logits decide


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step as the engine begins it, and what its rows are for."""

    step: ForwardStep
    rows: tuple[PlannedRow, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens in it."""
        return sum(len(row.row.tokens) for row in self.rows)


Propose = Callable[[LiveSequence, int], Sequence[int]]  # at most so many guesses of the next tokens


def no_proposals(sequence: LiveSequence, most: int) -> Sequence[int]:
    """Return nothing: decode token by token."""
    return ()


class Batcher:
    """The waiting and running sequences, and the steps made of them."""

    def __init__(self, limits: BatchLimits, *, propose: Propose = no_proposals, prefix_cache: bool = True) -> None:
        self.limits = limits
        self.costs = StepCosts()
        self.preemptions = 0
        self._pool = BlockPool(limits.blocks)
        self._propose = propose
        self._prefix_cache = prefix_cache
        self._waiting: list[LiveSequence] = []  # by rank
        self._running: list[LiveSequence] = []
        self._live: dict[str, LiveSequence] = {}
        self._arrivals = 0
        self._steps = 0
        self._flights = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def longest(self) -> int:
        """The most tokens that a sequence can have."""
        return min(self.limits.context_tokens, self.limits.blocks * BLOCK_POSITIONS)

    def add(self, request: GenerateRequest, now_s: float) -> LiveSequence:
        """Let a request wait for its turn.

        Raises:
            InvalidRequest: it can never fit, or its id is in use.
            OverloadedError: too many requests wait.
        """
        if request.id in self._live:
            raise InvalidRequest(f"cannot start request {request.id!r}: a request with this id is running", param="id")
        if len(request.prompt) + max(request.max_tokens, len(request.sent)) > self.longest:
            raise InvalidRequest(
                f"cannot start request {request.id!r}: {len(request.prompt)} tokens of the prompt and up to"
                f" {request.max_tokens} new ones exceed the {self.longest} tokens that a sequence can have",
                param="max_tokens",
            )
        if len(self._waiting) >= self.limits.waiting:
            raise OverloadedError(f"cannot start request {request.id!r}: {len(self._waiting)} requests wait already")
        priority = max(-HIGHEST_PRIORITY, min(request.priority, HIGHEST_PRIORITY))
        sequence = LiveSequence(
            request=request,
            rank=(now_s - priority * PRIORITY_S, self._arrivals),
            arrived_s=now_s,
            tokens=[*request.prompt, *request.sent],
        )
        self._arrivals += 1
        self._live[request.id] = sequence
        bisect.insort(self._waiting, sequence, key=by_rank)
        return sequence

    def cancel(self, sequence: LiveSequence) -> None:
        """Drop a request, unless it has ended; a step that has it is not waited for."""
        if self._live.get(sequence.request.id) is sequence:
            self._end(sequence)

    def next_step(self) -> PlannedStep | None:
        """Return the next step, or None if there is nothing to compute, or no step can begin now."""
        if self._flights >= self.limits.depth:
            return None
        self._make_room()
        rows = self._decode_rows()
        self._add_prompt_rows(rows)
        if not rows:
            return None
        for row in rows:
            row.sequence.flights += 1
            row.sequence.last_step = self._steps
            row.sequence.planned = row.row.start + len(row.row.tokens)
        step = ForwardStep(number=self._steps, rows=tuple(row.row for row in rows))
        self._steps += 1
        self._flights += 1
        return PlannedStep(step=step, rows=tuple(rows))

    def complete(
        self, step: PlannedStep, chosen: Sequence[Sequence[int]], ended: Collection[str], took_s: float
    ) -> None:
        """Record the oldest step under way as done.

        Args:
            chosen: for each row the tokens that follow: one, and one more for each proposal that was right.
            ended: the ids of requests that need no more tokens.
            took_s: what the step took.
        """
        self._flights -= 1
        self.costs.observe(step.tokens, took_s)
        for planned, tokens in zip(step.rows, chosen, strict=True):
            sequence = planned.sequence
            sequence.flights -= 1
            if sequence.cancelled:
                self._drop(sequence)
                continue
            right = max(0, len(tokens) - 1)
            sequence.computed = planned.row.start + len(planned.row.tokens) - planned.proposals + right
            if planned.chooses:
                sequence.planned = sequence.computed
            sequence.tokens.extend(tokens)
            self._remember(sequence)
            if sequence.request.id in ended:
                self._end(sequence)

    def load(self, now_s: float) -> EngineLoad:
        """Return how busy the sequences keep the engine."""
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used=1 - self._pool.available / self._pool.count,
            queue_wait_s=max((now_s - waiting.arrived_s for waiting in self._waiting), default=0.0),
        )

    def _decode_rows(self) -> list[PlannedRow]:
        """Return a row for each sequence that decodes; for their share, if steps overlap."""
        ready = [sequence for sequence in self._running if sequence.remaining == 1 and not sequence.cancelled]
        # The lowest rank comes first if nothing is under way: then it, or what keeps it from growing, is in the step.
        ready.sort(key=by_last_step if self._flights else by_rank)
        share = -(-len(self._running) // self.limits.depth)
        left = self.limits.step_tokens
        rows = []
        for sequence in sorted(ready[: min(share, left)], key=by_rank):
            if sequence.blocks and self._grow(sequence):
                rows.append(self._row(sequence, 1))
        return self._with_proposals(rows)

    def _with_proposals(self, rows: list[PlannedRow]) -> list[PlannedRow]:
        """Return the rows with guesses of the following tokens, as far as these cost little."""
        base_s = self.costs.predict_s(len(rows))
        if base_s is None:
            return rows
        # A row more of a batch costs less than a step more; above that, guesses slow other streams down.
        left = self.costs.most_tokens(1.3 * base_s, self.limits.step_tokens) - len(rows)
        for index, planned in enumerate(rows):
            sequence = planned.sequence
            room = (len(sequence.blocks) + self._pool.available) * BLOCK_POSITIONS - len(sequence.tokens)
            wanted = sequence.request.max_tokens - sequence.generated - 1
            most = min(left, room, wanted)
            proposals = tuple(self._propose(sequence, most))[:most] if most > 0 and planned.chooses else ()
            if proposals:
                left -= len(proposals)
                self._take_blocks(sequence, len(sequence.tokens) + len(proposals))
                rows[index] = PlannedRow(
                    sequence=sequence,
                    row=StepRow(
                        tokens=planned.row.tokens + proposals,
                        start=planned.row.start,
                        blocks=tuple(sequence.blocks),
                        logits=1 + len(proposals),
                    ),
                    chooses=True,
                    proposals=len(proposals),
                )
        return rows

    def _add_prompt_rows(self, rows: list[PlannedRow]) -> None:
        """Add parts of prompts, the lowest rank first, as far as the step's tokens and time allow."""
        left = self._prompt_tokens(sum(len(row.row.tokens) for row in rows))
        prompts = [sequence for sequence in self._running if sequence.remaining > 1 and not sequence.cancelled]
        prompts.sort(key=by_rank, reverse=True)
        while left > 0:
            waiting = self._waiting[0] if self._waiting else None
            if waiting is not None and (not prompts or waiting.rank < prompts[-1].rank) and self._admit(waiting):
                sequence = waiting
            elif prompts:
                sequence = prompts.pop()
            else:
                return
            planned = self._row(sequence, min(left, sequence.remaining))
            rows.append(planned)
            left -= len(planned.row.tokens)

    def _prompt_tokens(self, decoding: int) -> int:
        """Return how many tokens of prompts a step may have beside so many others."""
        most = self.limits.step_tokens - decoding
        others = any(sequence.flights and sequence.planned >= len(sequence.tokens) for sequence in self._running)
        if (not decoding and not others) or self._continues_streams():
            alone_s = min(self.limits.alone_s, self.limits.step_s)
            return min(most, max(LEAST_ALONE, self.costs.most_tokens(alone_s, most)))
        if decoding and not self.costs.knows(decoding):
            return 0  # one step without prompts, to measure what the others are compared with
        base_s = self.costs.predict_s(max(1, decoding)) or 0.0
        limit_s = min(self.limits.gap_factor * base_s, self.limits.step_s)
        fast = self.costs.most_tokens(limit_s, self.limits.step_tokens) - decoding
        return min(most, max(fast, SMALLEST_CHUNK))

    def _continues_streams(self) -> bool:
        """Return whether streams of a lost generation wait: for longer than others."""
        return any(
            sequence.request.sent and sequence.generated == len(sequence.request.sent)
            for sequence in (*self._waiting, *self._running)
        )

    def _row(self, sequence: LiveSequence, count: int) -> PlannedRow:
        """Return a row for the next tokens of a sequence, at most `count`."""
        request, start = sequence.request, sequence.planned
        scored = request.prompt_logprobs and not request.sent and start < len(request.prompt)
        if scored:
            count = min(count, SCORED_CHUNK)
        tokens = tuple(sequence.tokens[start : start + count])
        last = start + len(tokens) == len(sequence.tokens)
        row = StepRow(
            tokens=tokens,
            start=start,
            blocks=tuple(sequence.blocks),
            logits=len(tokens) if scored else int(last and not request.embed),
            hidden=request.embed,
        )
        return PlannedRow(sequence=sequence, row=row, chooses=last and not request.embed)

    def _make_room(self) -> None:
        """Preempt sequences of a lower priority until the first waiting one can run."""
        while self._waiting and not self._fits(first := self._waiting[0], self._cached(first)):
            victims = [
                running
                for running in self._running
                if running.request.priority < first.request.priority
                and running.rank > first.rank
                and not running.flights
            ]
            if not victims:
                return
            self._preempt(max(victims, key=by_rank))

    def _cached(self, sequence: LiveSequence) -> list[int]:
        """Return the blocks that hold the beginning of a waiting sequence.

        Its last token is always computed, because its logits are needed.
        """
        request = sequence.request
        if request.embed or (request.prompt_logprobs and not request.sent):
            return []  # what is wanted of each position is not in the blocks
        full = (len(sequence.tokens) - 1) // BLOCK_POSITIONS
        self._hash(sequence, full)
        return self._pool.find(sequence.contents[:full])

    def _fits(self, sequence: LiveSequence, cached: Sequence[int]) -> bool:
        """Return whether a waiting sequence can run, and each running one can grow by a block."""
        need = blocks_for(len(sequence.tokens)) - len(cached) + self._pool.idle(cached)
        return len(self._running) < self.limits.running and need + len(self._running) <= self._pool.available

    def _admit(self, sequence: LiveSequence) -> bool:
        """Let the first waiting sequence run with the blocks of all its tokens, if it can."""
        cached = self._cached(sequence)
        if not self._fits(sequence, cached):
            return False
        self._pool.share(cached)
        need = blocks_for(len(sequence.tokens)) - len(cached)
        sequence.blocks = cached + self._pool.take(need, cached[-1] if cached else None)
        sequence.remembered = len(cached)
        sequence.computed = sequence.planned = len(cached) * BLOCK_POSITIONS
        if sequence.last_step < 0:
            sequence.cached_tokens = min(sequence.computed, len(sequence.request.prompt))
        self._waiting.remove(sequence)
        self._running.append(sequence)
        return True

    def _grow(self, sequence: LiveSequence) -> bool:
        """Give a running sequence the blocks of its tokens, and return whether there were enough.

        Running sequences of a higher rank number make room.
        """
        while blocks_for(len(sequence.tokens)) - len(sequence.blocks) > self._pool.available:
            victims = [other for other in self._running if other.rank > sequence.rank and not other.flights]
            if not victims:
                return False
            self._preempt(max(victims, key=by_rank))
        self._take_blocks(sequence, len(sequence.tokens))
        return True

    def _take_blocks(self, sequence: LiveSequence, positions: int) -> None:
        need = blocks_for(positions) - len(sequence.blocks)
        if need > 0:
            sequence.blocks += self._pool.take(need, sequence.blocks[-1])

    def _preempt(self, sequence: LiveSequence) -> None:
        """Take the blocks of a running sequence away; it waits, and is computed again."""
        self.preemptions += 1
        self._running.remove(sequence)
        self._free(sequence)
        bisect.insort(self._waiting, sequence, key=by_rank)

    def _remember(self, sequence: LiveSequence) -> None:
        """Let other sequences use the full blocks of this one."""
        if not self._prefix_cache:
            return
        full = sequence.computed // BLOCK_POSITIONS
        self._hash(sequence, full)
        for index in range(sequence.remembered, full):
            self._pool.remember(sequence.blocks[index], sequence.contents[index])
        sequence.remembered = max(full, sequence.remembered)

    def _hash(self, sequence: LiveSequence, full: int) -> None:
        """Compute the contents of the first full blocks: hashes of their tokens and of all before."""
        while self._prefix_cache and len(sequence.contents) < full:
            start = len(sequence.contents) * BLOCK_POSITIONS
            tokens = np.array(sequence.tokens[start : start + BLOCK_POSITIONS], dtype="<u4").tobytes()
            before = sequence.contents[-1] if sequence.contents else root_content(sequence.request.cache_salt)
            sequence.contents.append(hashlib.blake2b(before + tokens, digest_size=16).digest())

    def _end(self, sequence: LiveSequence) -> None:
        """Forget a request; its blocks are freed when no step under way has them."""
        del self._live[sequence.request.id]
        sequence.cancelled = True
        if sequence in self._running:
            self._drop(sequence)
        else:
            self._waiting.remove(sequence)

    def _drop(self, sequence: LiveSequence) -> None:
        if not sequence.flights:
            self._running.remove(sequence)
            self._free(sequence)

    def _free(self, sequence: LiveSequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.planned = sequence.remembered = 0


def root_content(salt: str) -> bytes:
    """Return what the hashes of blocks begin with; it cannot equal the hash of a block."""
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"salt").digest() if salt else b""


def by_rank(sequence: LiveSequence) -> tuple[float, int]:
    """Return what sequences are sorted by: who comes first is served first."""
    return sequence.rank


def by_last_step(sequence: LiveSequence) -> tuple[int, tuple[float, int]]:
    """Return what sequences are sorted by if they take turns."""
    return sequence.last_step, sequence.rank


def blocks_for(positions: int) -> int:
    """Return how many blocks hold so many positions."""
    return -(-positions // BLOCK_POSITIONS)
