"""When and how exactly ranks exchange gradients: the option `--sync`.

exact (the default), bf16, fp16, int8, topk[:SHARE], powersgd[:RANK]: every step, in so many bits (see `compress`).
local:H[:COMPRESSION]: every H steps.  auto: the first steps are exact and measured; then bf16 or int8 if a step waits for
the exchange.  It prints its choice and the reason.  It never chooses local steps, but tells if they would pay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from hpctrain.comm import Communicator
from hpctrain.comm.base import MOST_BUCKET_BYTES
from hpctrain.errors import TrainError
from hpctrain.exchange.buckets import GradientBuckets
from hpctrain.exchange.compress import NAMES, Compressor, Exact, compressor

# ----- local steps: ranks train alone for H steps, then move together (DiLoCo)
# Each rank's weights have moved from a common point, the *anchor*.  The mean of these moves serves as a gradient of the anchor,
# and an outer SGD with Nesterov momentum moves it.  So ranks exchange once in H steps, at the price of a different course of
# training: it is never chosen silently.  Does not know the inner optimizer.  Rules: after an exchange all ranks have the same
# weights, to the bit; the moves may be compressed (see `compress`).  Sources: Douillard et al., "DiLoCo: distributed
# low-communication training of language models", 2023.


# The paper's 0.7 and 0.9 are for many ranks and many exchanges.  With few exchanges the momentum of the steep first moves is
# still felt at the end (`make bench BENCH=local`).
OUTER_LR = 0.8
MOMENTUM = 0.5
PIECE_NUMBERS = 1 << 20


class LocalSteps:
    """The anchor and the outer momentum of a model's trainable parameters."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], comm: Communicator, compressor: Compressor, every: int
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._compressor = compressor
        self.every = every
        length = sum(p.numel() for p in self._parameters)
        self._anchor_L = self._joined(torch.empty(length))
        self._momentum_L = torch.zeros(length)
        self._way_L = comm.empty(length, torch.float32)

    def due(self, step: int) -> bool:
        """Return whether the ranks exchange after this step (from 1)."""
        return step % self.every == 0

    @torch.no_grad()
    def exchange(self, weight: float) -> None:
        """Move all ranks to the next anchor; all ranks call it.

        `weight`: this rank's fraction of all samples since the last exchange; the weights of all ranks add up to 1.
        """
        torch.sub(self._anchor_L, self._joined(self._way_L), out=self._way_L).mul_(weight)
        for index, low in enumerate(range(0, self._way_L.numel(), PIECE_NUMBERS)):
            self._compressor.sum(index, self._way_L[low : low + PIECE_NUMBERS])
        self._momentum_L.mul_(MOMENTUM).add_(self._way_L)
        self._anchor_L.sub_(self._way_L.add_(self._momentum_L, alpha=MOMENTUM), alpha=OUTER_LR)
        low = 0
        for parameter in self._parameters:
            parameter.copy_(self._anchor_L[low : low + parameter.numel()].view_as(parameter))
            low += parameter.numel()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint saves: equal on all ranks."""
        return {"anchor": self._anchor_L, "momentum": self._momentum_L}

    def _joined(self, into_L: torch.Tensor) -> torch.Tensor:
        low = 0
        for parameter in self._parameters:
            into_L[low : low + parameter.numel()] = parameter.detach().reshape(-1)
            low += parameter.numel()
        return into_L


MEASURED_STEPS = 5
WORTH = 0.1  # fraction of a step spent waiting for the exchange; below it fewer bits do not pay
LARGEST_H = 1000


@dataclass(slots=True)
class Sync:
    """How a run exchanges: gradients in each step, or (`local`) weights every H steps."""

    name: str
    buckets: GradientBuckets
    comm: Communicator
    local: LocalSteps | None = None
    _measured: list[tuple[float, float]] = field(default_factory=list)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint saves besides weights and moments; equal on all ranks."""
        return {} if self.local is None else {f"outer.{name}": part for name, part in self.local.tensors().items()}

    def advice(self) -> str:
        """Return a line if the user's choice costs precision without saving time, else ""."""
        lossy = self.local is None and self.name not in ("exact", "auto")
        if not lossy or self.comm.size == 1 or self.comm.bucket_plan().beside:
            return ""
        return f"sync {self.name}: loses bits and saves no time among ranks of one host; omit --sync there"

    def measured(self, compute_s: float, waited_s: float) -> str:
        """Record a step's seconds, and return the decision of `auto` as text, or "".

        All ranks call it, in every step.
        """
        if self.name != "auto" or len(self._measured) >= MEASURED_STEPS:
            return ""
        self._measured.append((compute_s, waited_s))
        if len(self._measured) < MEASURED_STEPS:
            return ""
        parts = sorted(self._measured[1:])  # the first step warms up
        middle = parts[len(parts) // 2]
        size = self.comm.size
        facts = torch.zeros(2 * size, dtype=torch.float64)
        facts[self.comm.rank], facts[size + self.comm.rank] = middle
        self.comm.all_reduce(facts)
        # The slowest rank waits for the exchange alone; the others also wait for that rank, which fewer bits would not change.
        compute_s, waited_s = float(facts[:size].max()), float(facts[size:].min())
        name, why = decide(compute_s, waited_s)
        link = self.comm.bucket_plan().bytes_per_s
        over = f" over a link of {link / 1e6:.0f} MB/s" if link else ""
        if name != "exact":
            self.buckets.compress(compressor(name, self.comm, self.buckets.shapes))
        return f"sync {name}: {why}{over}"


def make_sync(name: str, parameters: list[torch.nn.Parameter], comm: Communicator, *, overlap: bool | None) -> Sync:
    """Return the way to exchange that `--sync` names; all ranks call it.

    Raises:
        TrainError: the name is unknown.
    """
    kind, _, rest = name.partition(":")
    if kind not in (*NAMES, "local", "auto"):
        raise TrainError(
            f"cannot sync by {name!r}: use {', '.join(NAMES)}, topk:SHARE, powersgd:RANK, local:H[:COMPRESSION] or auto"
        )
    every, inner = 0, name
    if kind == "local":
        number, _, inner = rest.partition(":")
        every = int(number) if number.isascii() and number.isdigit() else 0
        inner = inner or "exact"
        if not 1 <= every <= LARGEST_H:
            raise TrainError(
                f"cannot sync by {name!r}: write local:H with H steps from 1 to {LARGEST_H}, e.g. local:50"
            )
    bucket_bytes = comm.bucket_plan().bucket_bytes
    if name in ("bf16", "fp16"):  # buckets of the link's best size, after rounding
        bucket_bytes = min(2 * bucket_bytes, MOST_BUCKET_BYTES)
    buckets = GradientBuckets(parameters, comm, bucket_bytes, overlap=False if every else overlap)
    chosen: Compressor = Exact(comm) if inner == "auto" else compressor(inner, comm, buckets.shapes)
    if not every:
        buckets.compress(chosen)
        return Sync(name, buckets, comm)
    if inner.startswith("powersgd"):
        raise TrainError("cannot sync by local steps with powersgd: the exchanged weights have no matrices; use int8")
    return Sync(name, buckets, comm, LocalSteps(parameters, comm, chosen, every))


def decide(compute_s: float, waited_s: float) -> tuple[str, str]:
    """Return the precision of the exchange, and the reason, by the times of a step."""
    step = f"a step computes {1e3 * compute_s:.0f} ms and waits {1e3 * waited_s:.0f} ms for the exchange"
    if waited_s <= WORTH * compute_s:
        return "exact", f"{step}, too little to send fewer bits"
    if waited_s / 2 <= WORTH * compute_s:
        return "bf16", f"{step}: half the bits, with error feedback"
    hint = ""
    if waited_s / 4 > compute_s:
        hint = (
            f"; local steps would help more: --sync local:{min(LARGEST_H, round(20 * waited_s / compute_s / 4))}:int8"
        )
    return "int8", f"{step}: a quarter of the bits, with error feedback{hint}"
