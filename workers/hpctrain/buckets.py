"""Gradients in flat buckets, exchanged in backward order.

Each parameter's `.grad` is a view into a bucket, so autograd writes where the exchange reads: nothing is copied.
Does not know weights or batches: who wants an average scales the loss before `backward`.
Rules: buckets are launched in the same order on every rank, whatever order autograd finishes in; a parameter that got
no gradient counts as zero.  Overlapping or not gives the same bits.
Sources: Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", VLDB 2020.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from hpctrain.comm import Communicator
from hpctrain.compress import Compressor, Exact

BUCKET_BYTES = 4 << 20


class GradientBuckets:
    """The gradients of a model's trainable parameters, and their sum over the ranks."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        comm: Communicator,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = False,
    ) -> None:
        self._compressor: Compressor = Exact(comm)
        self._groups = _group(list(parameters), bucket_bytes)
        self.flats = [_flatten(group, comm) for group in self._groups]
        self._waiting = [len(group) for group in self._groups]
        self._launched = 0
        self._futures: list[Future[float]] = []
        self._pool = ThreadPoolExecutor(1, "exchange") if overlap and comm.size > 1 else None
        if self._pool is not None:
            self._hook()

    def compress(self, compressor: Compressor) -> None:
        """This will send gradients by another way from the next exchange on."""
        self._compressor = compressor

    def shapes(self, index: int) -> list[torch.Size]:
        """This will give the shapes of a bucket's parameters, in their order."""
        return [parameter.shape for parameter in self._groups[index]]

    def zero(self) -> None:
        """This will set all gradients to zero, for the next backward pass."""
        for flat in self.flats:
            flat.zero_()
        self._waiting = [len(group) for group in self._groups]
        self._launched = 0

    def exchange(self) -> tuple[float, float]:
        """This will make every gradient the sum over all ranks; all ranks call it after `backward`.

        Returns seconds spent in the exchange and seconds that this call waited.
        """
        started_s = time.perf_counter()
        if self._pool is None:
            exchange_s = sum(self._reduce(index) for index in range(len(self.flats)))
        else:
            self._launch(up_to=len(self.flats))
            exchange_s = sum(future.result() for future in self._futures)
            self._futures.clear()
        return exchange_s, time.perf_counter() - started_s

    def close(self) -> None:
        """This will end the exchange's thread."""
        if self._pool is not None:
            self._pool.shutdown()

    def _reduce(self, index: int) -> float:
        started_s = time.perf_counter()
        self._compressor.sum(index, self.flats[index])
        return time.perf_counter() - started_s

    def _hook(self) -> None:
        for index, group in enumerate(self._groups):
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))

    def _arrived(self, index: int) -> None:
        self._waiting[index] -= 1
        ready = self._launched
        while ready < len(self._waiting) and self._waiting[ready] <= 0:
            ready += 1
        self._launch(up_to=ready)

    def _launch(self, up_to: int) -> None:
        assert self._pool is not None
        for index in range(self._launched, up_to):
            self._futures.append(self._pool.submit(self._reduce, index))
        self._launched = max(self._launched, up_to)


def _group(parameters: list[torch.nn.Parameter], bucket_bytes: int) -> list[list[torch.nn.Parameter]]:
    """Parameters from last to first (backward's order), cut where a bucket is full or the kind of number changes."""
    groups: list[list[torch.nn.Parameter]] = []
    kind, filled_bytes = None, 0
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        size_bytes = parameter.numel() * parameter.element_size()
        if kind != (parameter.dtype, parameter.device) or filled_bytes + size_bytes > bucket_bytes:
            groups.append([])
            kind, filled_bytes = (parameter.dtype, parameter.device), 0
        groups[-1].append(parameter)
        filled_bytes += size_bytes
    return groups


def _flatten(group: list[torch.nn.Parameter], comm: Communicator) -> torch.Tensor:
    length, like = sum(p.numel() for p in group), group[0]
    if like.device.type == "cpu":
        flat = comm.empty(length, like.dtype).zero_()
    else:
        flat = torch.zeros(length, dtype=like.dtype, device=like.device)
    low = 0
    for parameter in group:
        parameter.grad = flat[low : low + parameter.numel()].view_as(parameter)
        low += parameter.numel()
    return flat
