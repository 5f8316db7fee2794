"""The interface of a group of ranks, the group of one, and sums in the background.

Rules for every backend: all ranks call collectives in the same order; tensors are contiguous; after `all_reduce` every rank
has the same bits, so that replicas that start equal stay equal.
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
from hpctrain.values import decode, encode

MOST_BUCKET_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """Buckets for a gradient: the largest size, and whether to overlap with backward."""

    bucket_bytes: int
    beside: bool
    bytes_per_s: float = 0.0  # of the link between hosts, in both directions at once; 0: not measured

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
        """Sum like `all_reduce`, in the background; `then` is called there after the sum.

        All ranks begin the same sums in the same order, and wait for them before any other exchange.
        `own_part`: only this rank's part (see `ring.split`) has to be the sum; the other parts are undefined.
        """

    def run(self, call: Callable[[], None]) -> Work:
        """Run a call with collectives (such as `all_to_all`) in the background, in order."""

    def bucket_plan(self) -> BucketPlan:
        """Return the best buckets for a gradient."""

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat CPU tensor that is fast to exchange.

        All ranks call it with the same values.
        """

    def describe(self) -> list[str]:
        """Return a few lines of text: how ranks exchange."""

    elastic: bool  # ranks may be lost, and the others continue
    generation: int  # the number of changes of the group
    changing: bool  # the group changes after this step; any rank may set it

    def rendezvous(self) -> None:
        """Meet the ranks of the next generation; needed first, and after a `PeerLost`.

        Rank and size may change.  In a group that never changes this does nothing.
        """

    def report_step(self, step: int, step_s: float) -> None:
        """Report to the roster, if there is one, that this rank has taken a step."""

    def plan(self) -> object:
        """Return the measured choices as a JSON value, or None; they decide the order of sums."""

    def follow(self, plan: object) -> None:
        """Use an earlier attempt's choices where possible; all ranks call it with the same plan."""

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Replace `tensor` on every rank by the one of `root`."""

    def all_to_all(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send each rank its piece (bytes); return those for this rank, of its own length."""

    def all_gather(self, piece: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        """Return every rank's piece (bytes), by rank; `lengths` are those of all."""

    def barrier(self) -> None:
        """Wait until every rank has called it."""

    def all_gather_object(self, value: object) -> list[Any]:
        """Return every rank's (small) value, by rank; see `hpctrain.values`."""

    def abort(self, code: int) -> None:
        """End all ranks at once; does not return."""

    def close(self) -> None:
        """Leave the group; all ranks call it."""


class Plain:
    """The common part of most groups: they never change, and measure nothing."""

    elastic = False
    generation = 0
    changing = False

    def rendezvous(self) -> None:
        """Do nothing: all ranks have met."""

    def report_step(self, step: int, step_s: float) -> None:
        """Do nothing: no roster."""

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ordinary memory."""
        return torch.empty(length, dtype=dtype)

    def plan(self) -> object:
        """Return None: no choices."""

    def follow(self, plan: object) -> None:
        """Do nothing: no choices."""

    def abort(self, code: int) -> None:
        """End this process; the launcher (torchrun, hrun) then ends those of other ranks."""
        os._exit(code)


def gather_over(comm: Communicator, value: object) -> list[Any]:
    """Return every rank's value, by rank, over the group's exchange of tensors."""
    mine = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    lengths = torch.zeros(comm.size, dtype=torch.int64)
    lengths[comm.rank] = mine.numel()
    comm.all_reduce(lengths)
    return [decode(part.numpy().tobytes()) for part in comm.all_gather(mine, lengths.tolist())]


class SingleCommunicator(Plain):
    """The group of one rank."""

    name = "single"
    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Do nothing: the sum over one rank is the tensor."""

    def begin(self, tensor: torch.Tensor, then: Callable[[], None] | None = None, *, own_part: bool = False) -> Work:
        """Call `then`; the sum is the tensor."""
        if then is not None:
            then()
        return done()

    def run(self, call: Callable[[], None]) -> Work:
        """Run the call now."""
        call()
        return done()

    def bucket_plan(self) -> BucketPlan:
        """Return one bucket, after the backward pass."""
        return BucketPlan(bucket_bytes=MOST_BUCKET_BYTES, beside=False)

    def describe(self) -> list[str]:
        """Return no lines."""
        return ["one rank"]

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Do nothing."""

    def all_to_all(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the piece of this rank."""
        return pieces

    def all_gather(self, piece: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        """Return the piece of this rank."""
        return [piece]

    def barrier(self) -> None:
        """Do nothing."""

    def all_gather_object(self, value: object) -> list[Any]:
        """Return the value of this rank."""
        return [value]

    def close(self) -> None:
        """Do nothing."""


def check_contiguous(tensor: torch.Tensor) -> None:
    """Raise TrainError if a tensor is not contiguous."""
    if not tensor.is_contiguous():
        raise TrainError(
            f"cannot exchange a tensor of shape {tuple(tensor.shape)}: it is not contiguous; call .contiguous()"
        )


class Work:
    """A sum that is under way."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: Exception | None = None

    def wait(self) -> None:
        """Wait until the sum is done.

        Raises:
            TrainError: the sum failed.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error

    def end(self, error: Exception | None = None) -> None:
        """Finish the sum, or fail it with an error, and wake waiting threads."""
        self._error = error
        self._over.set()


def done() -> Work:
    """Return a sum that is done."""
    work = Work()
    work.end()
    return work


class Background:
    """One thread that runs calls in order; it starts with the first call."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Work] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, call: Callable[[], None]) -> Work:
        """Run a call after earlier ones; after a failed call, the later ones fail too."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
            self._thread.start()
        work = Work()
        self._calls.put((call, work))
        return work

    def close(self) -> None:
        """End the thread after the calls that were begun."""
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
                except Exception as error:  # top of the thread: `wait` raises it
                    failed = error if isinstance(error, TrainError) else TrainError(f"cannot sum: {error!r}")
            work.end(failed)
