"""A rank's samples of a step, in one batch or in micro-batches, and their gradients.

Does not know the exchange: the loop says which piece is the last.
Rules: the gradients of all pieces of all ranks add up to the gradient of the mean over the global batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from hpctrain.comm import Communicator
from hpctrain.data.prefetch import Prefetcher
from hpctrain.errors import TrainError

# ----- the time of a rank's own work within a step: data, forward, backward
# Data is the time from the moment when the script gets its batch to the begin of the model's forward pass.  Forward lasts
# until `batch.backward` is called, and includes the loss.  On a GPU these are the times at which kernels were launched;
# kernels that still run show in the wait.  Costs one or two microseconds per step.


DATA, FORWARD, BACKWARD = range(3)


class Phases:
    """A clock of the phases of a step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._seconds = [0.0, 0.0, 0.0]
        self._phase = -1  # between steps: computation there, for example a validation, does not count
        self._since_s = 0.0
        self._hook = model.register_forward_pre_hook(self._forward_begins)

    def begin(self) -> None:
        """Start the clock of a step."""
        self._seconds = [0.0, 0.0, 0.0]
        self._begin_phase(DATA)

    def backward_begins(self) -> None:
        """Record that the loss of a batch is computed."""
        self._begin_phase(BACKWARD)

    def backward_ended(self) -> None:
        """Record that the gradients of a batch are computed; more data may follow."""
        self._begin_phase(DATA)

    def end(self) -> tuple[float, float, float]:
        """End the step, and return its seconds of data, forward and backward."""
        self._begin_phase(-1)
        return self._seconds[DATA], self._seconds[FORWARD], self._seconds[BACKWARD]

    def close(self) -> None:
        """Remove the hook from the model."""
        self._hook.remove()

    def _forward_begins(self, _module: torch.nn.Module, _inputs: Any) -> None:
        if not torch.compiler.is_compiling() and self._phase == DATA:
            self._begin_phase(FORWARD)

    def _begin_phase(self, phase: int) -> None:
        now_s = time.perf_counter()
        if self._phase >= 0:
            self._seconds[self._phase] += now_s - self._since_s
        self._phase, self._since_s = phase, now_s


class Passes:
    """Rejects gradients that do not come from `batch.backward` and so lack its weight."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._inside = False
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._check) for parameter in trained]

    @contextmanager
    def accepted(self) -> Iterator[None]:
        """Accept gradients within this context."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _check(self, _parameter: torch.nn.Parameter) -> None:
        if not self._inside:
            raise TrainError(
                "cannot use gradients of loss.backward(): call batch.backward(loss) instead, once, with all losses added up; "
                "it weights them by this rank's samples"
            )


class Batch:
    """Samples [low, high) of a step by global index: this rank's share or a micro-batch."""

    def __init__(
        self, low: int, high: int, step: int, scale: float, load: Callable[[int, int], Any] | None = None
    ) -> None:
        self.low, self.high, self.step = low, high, step
        self._scale = scale
        self._load = load
        self.loss: float | None = None
        self.phases: Phases | None = None  # a clock, if one is wanted
        self.passes: Passes | None = None  # rejects gradients of other backward passes

    def __len__(self) -> int:
        return self.high - self.low

    @property
    def samples(self) -> Any:
        """The data source's value for these indexes, on this rank's device.

        The first dimension is the sample's.
        """
        if self._load is None:
            raise TrainError(
                "cannot give samples: run.steps(model, optimizer, data=SOURCE) was called without a source"
            )
        return self._load(self.low, self.high)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of `loss`, a scalar: the mean over these samples.

        Called once per batch.
        """
        if self.loss is not None:
            raise TrainError(f"cannot compute gradients of step {self.step} twice: call backward once for each batch")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TrainError(
                f"cannot compute gradients of step {self.step}: batch.backward takes the mean loss over the samples, a tensor of "
                f"one number, and got {what}"
            )
        if not loss.requires_grad:
            raise TrainError(
                f"cannot compute gradients of step {self.step}: the loss does not come from weights that are trained (was it "
                "computed under torch.no_grad, or detached?)"
            )
        whole = loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss
        if self.phases is not None:
            self.phases.backward_begins()
        with torch.autocast(loss.device.type, enabled=False), self.passes.accepted() if self.passes else nullcontext():
            (whole * self._scale).backward()
        self.loss = float(loss.detach())
        if self.phases is not None:
            self.phases.backward_ended()


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """One step: how many samples each rank has, and this rank's pieces."""

    number: int  # from 1
    low: int  # first sample of the step
    counts: list[int]  # of each rank
    rank: int
    pieces: list[Batch] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of samples of all ranks."""
        return sum(self.counts)

    @property
    def part(self) -> float:
        """This rank's fraction of the samples, 0 to 1."""
        return self.counts[self.rank] / self.size

    @property
    def loss(self) -> float:
        """The mean loss over this rank's samples; 0.0 if it has none."""
        return sum((piece.loss or 0.0) * len(piece) for piece in self.pieces) / max(1, self.counts[self.rank])

    def span(self) -> tuple[int, int]:
        """Return the indexes [low, high) of this rank's samples."""
        low = self.low + sum(self.counts[: self.rank])
        return low, low + self.counts[self.rank]


def pieces_of(low: int, high: int, largest: int | None) -> list[tuple[int, int]]:
    """Cut [low, high) into pieces of about the same size, none over `largest`."""
    if high <= low:
        return []
    count = -(-(high - low) // largest) if largest else 1
    bounds = [low + (high - low) * at // count for at in range(count + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


# ----- the loss over validation samples: each rank computes a part


# Takes (part, parts); returns the sum of losses over that part of the validation samples, and their number.
Validation = Callable[[int, int], tuple[float, int]]


@torch.no_grad()
def validation_loss(model: torch.nn.Module, validation: Validation, comm: Communicator) -> float:
    """Return the mean loss over the validation samples.

    All ranks call it and compute a part each.
    """
    training = [module for module in model.modules() if module.training]  # frozen layers may always be in eval mode
    model.eval()
    total, count = validation(comm.rank, comm.size)
    for module in training:
        module.training = True
    facts = torch.tensor([total, float(count)], dtype=torch.float64)
    comm.all_reduce(facts)
    return float(facts[0] / facts[1])


class MeanLoss:
    """A validation: the mean loss over a source of samples, in batches.

    Each rank computes a part.
    """

    def __init__(self, loss_of: Callable[[Any], torch.Tensor], source: Any, batch: int, ahead: int) -> None:
        self._loss_of, self._source, self._batch, self._ahead = loss_of, source, batch, ahead
        self.device = torch.device("cpu")

    def __call__(self, part: int, parts: int) -> tuple[float, int]:
        count = len(self._source)
        low, high = count * part // parts, count * (part + 1) // parts
        spans = pieces_of(low, high, self._batch)
        feed = Prefetcher(self._source, self.device, self._ahead)
        feed.expect(spans)
        total = 0.0
        try:
            for first, last in spans:
                loss = self._loss_of(feed.take(first, last))
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                    raise TrainError(
                        f"cannot validate: the function given to run.mean_loss returned a {type(loss).__name__}, not the mean "
                        "loss over its samples (a tensor of one number)"
                    )
                total += float(loss.detach()) * (last - first)
        finally:
            feed.close()
        return total, high - low
