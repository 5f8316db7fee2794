"""Ranks without a model: the next token follows from the tokens that the blocks hold, so that a wrong block shows."""

from __future__ import annotations

import queue
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hpcserve.errors import GroupLost
from hpcserve.steps import BLOCK_POSITIONS, ForwardStep

VOCABULARY = 48


def toy_logits(context: Sequence[int], memory: int | None = None) -> torch.Tensor:
    """Return the logits of the token that follows; with `memory` only so many tokens decide."""
    recent = tuple(context if memory is None else context[-memory:])
    key = zlib.crc32(np.array(recent, dtype="<u4").tobytes())
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=key)).normal(size=VOCABULARY) * 3).float()


def toy_tokens(prompt: Sequence[int], count: int, memory: int | None = None) -> list[int]:
    """Return the tokens that follow, each the most likely one."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(toy_logits(tokens, memory).argmax()))
    return tokens[len(prompt) :]


class ToyRunner:
    """A `StepRunner` whose cache is a dictionary; steps are computed when they are begun."""

    def __init__(self, *, depth: int = 1, memory: int | None = None) -> None:
        self.depth = depth
        self.memory = memory
        self.steps: list[ForwardStep] = []
        self.cache: dict[tuple[int, int], int] = {}
        self.gate: queue.Queue[None] | None = None  # if there is one, each result waits for an entry
        self.lost = False
        self._results: deque[Any] = deque()

    def begin(self, plan: ForwardStep) -> None:
        """Compute a step."""
        plan = ForwardStep.from_bytes(plan.to_bytes())
        self.steps.append(plan)
        assert len(self.steps) - 1 == plan.number
        assert len(self._results) < self.depth
        logits, hidden = [], []
        for row in plan.rows:
            for index, token in enumerate(row.tokens):
                self.cache[place(row.blocks, row.start + index)] = token
        for row in plan.rows:
            end = row.start + len(row.tokens)
            context = [self.cache[place(row.blocks, position)] for position in range(end)]
            assert tuple(context[row.start :]) == row.tokens, "two rows wrote the same block"
            logits += [toy_logits(context[:stop], self.memory) for stop in range(end - row.logits + 1, end + 1)]
            if row.hidden:
                hidden.append(torch.tensor([[float(token), 1.0] for token in row.tokens]))
        stacked = torch.stack(logits) if logits else torch.empty(0, VOCABULARY)
        self._results.append((stacked, hidden) if hidden else stacked)

    def result(self) -> Any:
        """Return the logits of the oldest step."""
        if self.gate is not None:
            self.gate.get()
        if self.lost:
            raise GroupLost("cannot continue: rank 1 is lost")
        return self._results.popleft()


def place(blocks: Sequence[int], position: int) -> tuple[int, int]:
    """Return where a position is kept."""
    return blocks[position // BLOCK_POSITIONS], position % BLOCK_POSITIONS
