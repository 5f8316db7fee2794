"""Runs steps on the ranks of a group: what each rank does, and the leader's side.

The leader, rank 0, sends each step to all ranks; each computes its part with its links, and those of the last stage return
their logits. With several stages, several steps are under way at once, each in another stage: the leader computes its part of
all begun steps before it waits for the result of the oldest.
Does not know requests, tokens or the roster. Rules: steps are computed in the order in which they were begun, on every rank;
a rank that fails breaks its links off, so that no other rank waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from hpcserve.errors import GroupLost
from hpcserve.group.links import RankLinks, links_of_threads
from hpcserve.split import ModelPart, ModelSplit
from hpcserve.steps import ForwardStep


class RankModel(Protocol):
    """The part of a model that a rank has, as the runner uses it."""

    part: ModelPart

    def forward(
        self, plan: ForwardStep, hidden: torch.Tensor | None, reduce: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Return the hidden states of all tokens of the step [tokens, D] after this part's layers."""

    def logits(self, hidden: torch.Tensor, plan: ForwardStep) -> torch.Tensor:
        """Return the wanted logits [wanted, vocabulary of the part], float32."""


@dataclass(frozen=True, slots=True)
class RankOutput:
    """What a rank of the last stage computes: logits, and hidden states that are wanted."""

    logits: torch.Tensor
    hidden: torch.Tensor | None


class RankProgram:
    """What one rank does with each step."""

    def __init__(self, model: RankModel, links: RankLinks) -> None:
        self._model, self.links = model, links
        self.decoded = 0  # steps of one token
        self.busy_s = 0.0  # in those, without waiting for other ranks

    def compute(self, step: ForwardStep) -> RankOutput | None:
        """Compute this rank's part of a step; None: the next stage continues."""
        tokens = sum(len(row.tokens) for row in step.rows)
        hidden = self.links.receive_hidden(tokens, step.number)
        began_s = time.perf_counter() - self.links.waited_s
        hidden = self._model.forward(step, hidden, self.links.reduce)
        if tokens == 1:
            self.decoded += 1
            self.busy_s += time.perf_counter() - self.links.waited_s - began_s
        if not self.links.is_last_stage:
            self.links.send_hidden(hidden, step.number)
            return None
        wants_hidden = self.links.place == 0 and any(row.hidden for row in step.rows)
        logits = self._model.logits(hidden, step)
        return RankOutput(logits, torch.cat(rows_with_hidden(hidden, step)).float() if wants_hidden else None)

    def follow(self) -> None:
        """Compute the leader's steps until the group is lost.

        Raises:
            GroupLost: another rank is lost.
        """
        while True:
            step = ForwardStep.from_bytes(self.links.next_step())
            part = self.compute(step)
            if part is not None:
                self.links.send_result(part.logits, step.number)
                if part.hidden is not None:
                    self.links.send_result(part.hidden, step.number)


class GroupRunner:
    """The ranks of a group as the engine uses them, on the leader."""

    def __init__(self, model: RankModel, links: RankLinks) -> None:
        self.program, self._links = RankProgram(model, links), links
        self.depth = len(links.split.stages)
        self._begun: deque[ForwardStep] = deque()  # not computed here yet
        self._computed: deque[tuple[ForwardStep, RankOutput | None]] = deque()
        self._lost: GroupLost | None = None
        self._is_alone = False  # no step was under way when the last one began
        self._single_steps, self._single_s = 0, 0.0

    @property
    def is_lost(self) -> bool:
        """Whether a rank is lost, so that no step will have a result."""
        return self._lost is not None

    def begin(self, plan: ForwardStep) -> None:
        """Begin a step on all ranks; the leader's own part is computed in `result`."""
        try:
            self._links.send_step(plan.to_bytes())
        except GroupLost as error:
            self._lost = error
        self._is_alone = not self._begun and not self._computed
        self._begun.append(plan)

    def result(self) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the logits of the oldest step, and hidden states if rows want them.

        Raises:
            GroupLost: a rank is lost.
        """
        if self._lost is not None:
            raise GroupLost(str(self._lost))
        try:
            return self._result()
        except GroupLost as error:
            self._lost = error
            raise

    def _result(self) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        began_s = time.perf_counter()
        while self._begun:
            step = self._begun.popleft()
            self._computed.append((step, self.program.compute(step)))
        step, mine = self._computed.popleft()
        wanted = sum(row.logits for row in step.rows)
        parts, hidden = [], None
        for rank in self._links.last_stage():
            if rank == self._links.rank:
                assert mine is not None
                logits, states = mine.logits, mine.hidden
            else:
                logits, states = self._received(rank, step, wanted)
            parts.append(logits)
            hidden = states if states is not None else hidden
        if self._is_alone and len(step.rows) == len(step.rows[0].tokens) == 1:
            self._single_steps += 1
            self._single_s += time.perf_counter() - began_s
        whole = parts[0] if len(parts) == 1 else torch.cat([part.to("cpu") for part in parts], dim=1)
        if hidden is None:
            return whole
        return whole, list(hidden.split([len(row.tokens) for row in step.rows if row.hidden]))

    def metrics(self) -> dict[str, float]:
        """Return how long steps of one token took, on all ranks together.

        Steps beside others are not counted.
        """
        return {"single_token_steps_total": self._single_steps, "single_token_step_seconds_total": self._single_s}

    def _received(self, rank: int, step: ForwardStep, wanted: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = sum(len(row.tokens) for row in step.rows)
        logits = self._links.receive_result(rank, wanted, step.number, tokens)
        states = sum(len(row.tokens) for row in step.rows if row.hidden)
        if states and self._links.split.place(rank)[1] == 0:
            return logits, self._links.receive_result(rank, states, step.number, tokens)
        return logits, None


def rows_with_hidden(hidden: torch.Tensor, step: ForwardStep) -> list[torch.Tensor]:
    """Return the hidden states of the rows that want them."""
    rows = hidden.split([len(row.tokens) for row in step.rows])
    return [states for states, row in zip(rows, step.rows, strict=True) if row.hidden]


def local_runner(model: RankModel) -> GroupRunner:
    """Return the runner of a model that one rank holds whole."""
    return GroupRunner(model, links_of_threads(ModelSplit(stages=((model.part,),)))[0])
