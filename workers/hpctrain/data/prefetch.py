"""Load samples in a thread while the ranks compute.

Does not know steps: the loop passes the next indexes.
Rules: the bits do not depend on what was loaded ahead.  At most `ahead` pieces and `limit_bytes` are held, but always one
piece.  An error in a source is raised where its samples are taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from hpctrain.data.sources import Source
from hpctrain.data.torchdata import TorchSource

LIMIT_BYTES = 1 << 29

Span = tuple[int, int]


class Prefetcher:
    """Loads a source's samples as tensors on a device, `ahead` pieces per worker in advance.

    0: none.
    """

    def __init__(self, source: Source, device: torch.device, ahead: int, limit_bytes: int = LIMIT_BYTES) -> None:
        self._source, self._device = source, device
        workers = 1
        if isinstance(source, TorchSource):  # without workers it uses this process's random generators
            workers = source.workers
            source.begin()
        self.ahead, self._limit_bytes = ahead * workers, limit_bytes
        self._pool = ThreadPoolExecutor(workers, "data") if self.ahead > 0 else None
        self._expected: list[Span] = []
        self._ready: dict[Span, Future[Any]] = {}
        self._piece_bytes = 0  # of the largest piece so far
        self.waited_s = 0.0

    def expect(self, spans: Iterable[Span]) -> None:
        """Set the samples that are taken next, in their order; other loaded samples are dropped."""
        self._expected = list(spans)
        self._fill()

    def take(self, low: int, high: int) -> Any:
        """Return the samples [low, high) as tensors on the device."""
        started_s = time.perf_counter()
        if (low, high) in self._expected:
            self._expected.remove((low, high))
        coming = self._ready.pop((low, high), None)
        value = coming.result() if coming is not None else self._load((low, high))
        self._piece_bytes = max(self._piece_bytes, bytes_of(value))
        self._fill()
        moved = moved_to(value, self._device)
        self.waited_s += time.perf_counter() - started_s
        return moved

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _fill(self) -> None:
        if self._pool is None:
            return
        most = 1  # until the size of a piece is known
        if self._piece_bytes:
            most = max(1, min(self.ahead, self._limit_bytes // self._piece_bytes))
        wanted = self._expected[:most]
        for span in self._ready.keys() - set(wanted):
            self._ready.pop(span).cancel()
        for span in wanted:
            if span not in self._ready:
                self._ready[span] = self._pool.submit(self._load, span)

    def _load(self, span: Span) -> Any:
        value = as_tensors(self._source[span[0] : span[1]])
        return pinned(value) if self._device.type == "cuda" else value


def as_tensors(value: Any) -> Any:
    """Convert arrays to tensors, also within tuples, lists and dicts; other values stay."""
    if isinstance(value, np.ndarray):
        if not value.flags.writeable or not value.flags.c_contiguous:
            value = value.copy(order="C")
        return torch.from_numpy(value)
    return _each(value, as_tensors)


def moved_to(value: Any, device: torch.device) -> Any:
    """Move tensors to a device, also within tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if not isinstance(value, (Mapping, tuple, list)) and callable(getattr(value, "to", None)):
        return value.to(device)  # an object from a collate_fn
    return _each(value, lambda part: moved_to(part, device))


def pinned(value: Any) -> Any:
    """Pin the memory of tensors, so that a GPU reads them without a copy."""
    return value.pin_memory() if isinstance(value, torch.Tensor) else _each(value, pinned)


def bytes_of(value: Any) -> int:
    """Return the bytes of all tensors."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(bytes_of(part) for part in value.values())
    return sum(bytes_of(part) for part in value) if isinstance(value, (tuple, list)) else 0


def _each(value: Any, change: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: change(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [change(part) for part in value]
        return (
            type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        )  # a named tuple takes positional arguments
    return value
