"""The interface of a group of ranks, and the group of one.

Rules, for every backend: collectives are called by all ranks in the same order; tensors are contiguous; after
`all_reduce` every rank holds the same bits, so that replicas which start equal stay equal.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hpctrain.errors import TrainError

MOST_BUCKET_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """How the sum of much is best cut: into buckets of so many bytes, and whether beside backward or after it."""

    bucket_bytes: int
    beside: bool
    bytes_per_s: float = 0.0  # of the link between hosts, both ways at once; 0: not measured

    def __str__(self) -> str:
        link = f", over links of {self.bytes_per_s / 1e6:.0f} MB/s" if self.bytes_per_s else ""
        when = "beside" if self.beside else "after"
        return f"in buckets of up to {self.bucket_bytes >> 10} KiB, {when} the backward pass{link}"


class Communicator(Protocol):
    """A group of ranks that compute together."""

    name: str
    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by its sum over all ranks; bit-identical on all of them."""

    def begin(self, tensor: torch.Tensor, then: Callable[[], None] | None = None, *, own_part: bool = False) -> Work:
        """Sum like `all_reduce`, in the background; `then` is called there when the sum is there.

        All ranks begin the same sums in the same order, and wait for them before any other exchange.
        `own_part`: this rank's part alone (see `ring.split`) has to be the sum; what is in the others then, nobody says.
        """

    def run(self, call: Callable[[], None]) -> Work:
        """Make a call that exchanges (`all_to_all` and so on) in the background, in the order of all that is begun so."""

    def pace(self) -> BucketPlan:
        """How the sum of much is best cut."""

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat CPU tensor that is quick to exchange; all ranks call it with the same values."""

    def describe(self) -> list[str]:
        """How ranks exchange, in words: a few lines for a log."""

    elastic: bool  # ranks may be lost, and the others go on
    generation: int  # how often the group has changed
    changing: bool  # all are to meet anew after this step, with other ranks maybe; any of them may say so

    def meet(self) -> None:
        """Come together with those who take part now; before, and after a `PeerLost`, nothing can be exchanged.

        Rank and size may be others then.  A group that never changes has met when it is made.
        """

    def stepped(self, step: int, step_s: float) -> None:
        """Take note that this rank has taken a step, for whoever watches the group."""

    def plan(self) -> object:
        """What was measured and chosen here, as a JSON value; None: nothing was. It decides in which order numbers are summed."""

    def follow(self, plan: object) -> None:
        """Go by what another life of the run has chosen, where that is possible here; all ranks call it alike."""

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Replace `tensor` on every rank by the one of `root`."""

    def all_to_all(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        """Give each rank its piece (bytes), and return those for this rank: as long as its own piece for itself."""

    def all_gather(self, piece: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        """Every rank's piece (bytes), by rank; `lengths` are those of all."""

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def all_gather_object(self, value: object) -> list[Any]:
        """Every rank's (small, picklable) value, by rank."""

    def abort(self, code: int) -> None:
        """End all ranks at once; does not return."""

    def close(self) -> None:
        """Leave the group in an orderly way; all ranks do so."""


class Plain:
    """What most groups have in common: they never change, nobody watches them, nothing is measured and chosen."""

    elastic = False
    generation = 0
    changing = False

    def meet(self) -> None:
        """All have met."""

    def stepped(self, step: int, step_s: float) -> None:
        """Nobody watches."""

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Plain memory."""
        return torch.empty(length, dtype=dtype)

    def plan(self) -> object:
        """Nothing was chosen."""

    def follow(self, plan: object) -> None:
        """Nothing to choose."""


class SingleCommunicator(Plain):
    """The group of one: nothing to send."""

    name = "single"
    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The sum over one rank is the tensor."""

    def begin(self, tensor: torch.Tensor, then: Callable[[], None] | None = None, *, own_part: bool = False) -> Work:
        """The sum is there."""
        if then is not None:
            then()
        return done()

    def run(self, call: Callable[[], None]) -> Work:
        """Nobody to wait for: it is made at once."""
        call()
        return done()

    def pace(self) -> BucketPlan:
        """Nothing to cut, and nothing to do beside."""
        return BucketPlan(bucket_bytes=MOST_BUCKET_BYTES, beside=False)

    def describe(self) -> list[str]:
        """Nothing is exchanged."""
        return ["one rank"]

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """The tensor of the only rank is there already."""

    def all_to_all(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        """The piece for oneself."""
        return pieces

    def all_gather(self, piece: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        """The only piece."""
        return [piece]

    def barrier(self) -> None:
        """Nobody to wait for."""

    def all_gather_object(self, value: object) -> list[Any]:
        """The only value."""
        return [value]

    def abort(self, code: int) -> None:
        """End this process."""
        os._exit(code)

    def close(self) -> None:
        """Nothing to leave."""


def check_contiguous(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose elements do not lie in one piece."""
    if not tensor.is_contiguous():
        raise TrainError(
            f"cannot exchange a tensor of shape {tuple(tensor.shape)}: it is not contiguous, call .contiguous()"
        )


class Work:
    """A sum that is under way."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: Exception | None = None

    def wait(self) -> None:
        """Return when the sum is there.

        Raises:
            TrainError: it will never be.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error

    def end(self, error: Exception | None = None) -> None:
        """Let the one who waits go on: with the sum, or with the reason why there is none."""
        self._error = error
        self._over.set()


def done() -> Work:
    """Return what is over already."""
    work = Work()
    work.end()
    return work


class Background:
    """One thread; it starts with the first call."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Work] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, call: Callable[[], None]) -> Work:
        """Make a call after those that were begun before it; after one that failed none is made."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
            self._thread.start()
        work = Work()
        self._calls.put((call, work))
        return work

    def close(self) -> None:
        """End the thread after what was begun."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        failed: Exception | None = None
        while (item := self._calls.get()) is not None:
            call, work = item
            if failed is None:
                try:
                    call()
                except Exception as error:  # the outermost edge of a thread: it is raised where the sum is waited for
                    failed = error if isinstance(error, TrainError) else TrainError(f"cannot sum: {error!r}")
            work.end(failed)
