"""Sums of tensors on a device through the host.

Copied, summed and copied back while the device computes.

For a GPU rank among CPU ranks, or GPUs without a common NCCL.  Copies to the host go to page-locked memory that is reused;
they run on their own streams, so that the backward pass continues.  Does not know how the host sums.
Rules: a copy waits only for earlier computation.  `wait` makes the stream, not the host, wait for the copy back.  Sums begin
in the order of the calls.
Sources: PyTorch, "CUDA semantics" (streams, `record_stream`, pinned memory).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from hpctrain.comm.base import Background, Work

Begin = Callable[[torch.Tensor, Callable[[], None] | None], Work]


class Copy(Protocol):
    """A copy that is under way."""

    def wait(self) -> None:
        """Wait on the host until the copy is done."""

    def join(self) -> None:
        """Make later work of the device wait for the copy."""


class Device(Protocol):
    """Copies between a device and its host."""

    def memory(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory on the host for a flat tensor."""

    def fetch(self, source: torch.Tensor, into_host: torch.Tensor) -> Copy:
        """Copy to the host, after earlier work of the device."""

    def put(self, host: torch.Tensor, into: torch.Tensor) -> Copy:
        """Copy to the device."""


class Staged(Work):
    """A sum of a tensor on a device."""

    fetching: Work  # at its end `summing` is set, and at the end of that `back`
    summing: Work
    back: Copy

    def __init__(self, then: Callable[[], None] | None) -> None:
        super().__init__()
        self._then = then

    def wait(self) -> None:
        self.fetching.wait()
        self.summing.wait()
        self.back.join()
        if self._then is not None:
            self._then()


class Staging:
    """Sums tensors of one device on its host; `begin` sums in the background."""

    def __init__(self, device: Device, begin: Begin) -> None:
        self._device, self._begin = device, begin
        self._memory: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._background = Background()

    def begin(self, tensor: torch.Tensor, then: Callable[[], None] | None = None) -> Work:
        """Sum `tensor` (contiguous, on the device) over all ranks; `then` is called in `wait`."""
        flat_L = tensor.detach().view(-1)
        host_L = self._host_of(flat_L)
        fetched, work = self._device.fetch(flat_L, host_L), Staged(then)
        work.fetching = self._background.begin(lambda: self._sum(fetched, host_L, flat_L, work))
        return work

    def close(self) -> None:
        """End the thread."""
        self._background.close()

    def _sum(self, fetched: Copy, host_L: torch.Tensor, flat_L: torch.Tensor, work: Staged) -> None:
        fetched.wait()

        def put_back() -> None:
            work.back = self._device.put(host_L, flat_L)

        work.summing = self._begin(host_L, put_back)

    def _host_of(self, flat_L: torch.Tensor) -> torch.Tensor:
        key = (flat_L.data_ptr(), flat_L.numel(), flat_L.dtype)
        host_L = self._memory.get(key)
        if host_L is None:
            host_L = self._memory[key] = self._device.memory(flat_L)
        return host_L


class Cuda:
    """A CUDA device, with a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def memory(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)

    def fetch(self, source: torch.Tensor, into_host: torch.Tensor) -> Copy:
        self._out.wait_stream(torch.cuda.current_stream(source.device))
        return _copy(self._out, source, source, into_host)

    def put(self, host: torch.Tensor, into: torch.Tensor) -> Copy:
        return _copy(self._in, into, host, into)


class _CudaCopy:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        self._event.synchronize()

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


def _copy(stream: torch.cuda.Stream, there: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> Copy:
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        there.record_stream(stream)
        event = torch.cuda.Event()
        event.record(stream)
    return _CudaCopy(event, there.device)
