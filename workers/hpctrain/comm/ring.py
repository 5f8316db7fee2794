"""All-reduce as a ring on MPI point-to-point messages: reduce-scatter, then all-gather.

Works on torch's memory without a copy; does not know buckets, gradients or devices.
Rules:
- Only one rank reduces a chunk, and the result is passed around, so all ranks end with the same bits.
- Chunks travel in segments of about 1 MiB that fit the cache: the sum of one overlaps the transfer of the next.
- Buffers are reused: touching new memory costs more than the transfer.
- float16 and bfloat16 go pairwise to the chunk's owner, which sums in float32 in rank order and rounds once: as many
  bytes as a ring, without a rounding per hop.
- A patient ring sleeps while it waits: MPI's own wait spins, and takes the core from the rank's computation.
- Small messages are gathered whole, and every rank sums them in rank order: one latency, and the same bits.
Sources: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

# ----- the sum of half precision: in float32, in the given order, rounded once


HALVES = (torch.float16, torch.bfloat16)


class HalfSum:
    """Sums half precision with a reused buffer; touching new memory costs more."""

    def __init__(self) -> None:
        self._total = torch.empty(0, dtype=torch.float32)

    def sum(self, parts: Sequence[torch.Tensor], into_L: torch.Tensor) -> None:
        """Put the sum of `parts` into `into_L`, which may be one of them."""
        if self._total.numel() < into_L.numel():
            self._total = torch.empty(into_L.numel(), dtype=torch.float32)
        total = self._total[: into_L.numel()]
        total.copy_(parts[0])
        for part in parts[1:]:
            total += part
        into_L.copy_(total)


SEGMENT_BYTES = 1 << 20
SMALL_BYTES = 16 << 10
TAG = 77
SHORTEST_NAP_S, LONGEST_NAP_S = 20e-6, 200e-6


class Ring:
    """All-reduce over one MPI communicator, with its reused buffers."""

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        segment_bytes: int = SEGMENT_BYTES,
        small_bytes: int = SMALL_BYTES,
        patient: bool = False,
    ) -> None:
        self._mpi = mpi
        self._wait = self._nap if patient else mpi.Request.Waitall
        self._comm = comm
        self._size: int = comm.Get_size()
        self._rank: int = comm.Get_rank()
        self._segment_bytes = segment_bytes
        self._small_bytes = small_bytes
        self._segments = [torch.empty(segment_bytes, dtype=torch.uint8) for _ in range(2)]
        self._gathered = torch.empty(0, dtype=torch.uint8)
        self._half_sum = HalfSum()

    def all_reduce(self, flat_L: torch.Tensor) -> None:
        """Sum `flat_L` (one dimension, CPU, contiguous) over all ranks, in place.

        All ranks call it.
        """
        if self._size == 1 or flat_L.numel() == 0:
            return
        if flat_L.numel() * flat_L.element_size() <= self._small_bytes:
            self._gather_and_sum(flat_L)
            return
        chunks = split(flat_L, self._size)
        if flat_L.dtype in HALVES:
            self._reduce_pairwise(chunks)
        else:
            self._reduce_ring(chunks)
        self._gather_ring(chunks, first=self._rank)

    def _gather_and_sum(self, flat_L: torch.Tensor) -> None:
        mine = _bytes_of(flat_L)
        need = mine.size * self._size
        if self._gathered.numel() < need:
            self._gathered = torch.empty(need, dtype=torch.uint8)
        gathered = self._gathered[:need]
        self._comm.Allgather([mine, self._mpi.BYTE], [gathered.numpy(), self._mpi.BYTE])
        parts_RL = gathered.view(flat_L.dtype).view(self._size, -1)
        if flat_L.dtype in HALVES:
            self._half_sum.sum(list(parts_RL), flat_L)
            return
        total_L = parts_RL[0].clone()
        for part_L in parts_RL[1:]:
            total_L += part_L
        flat_L.copy_(total_L)

    def _reduce_ring(self, chunks: list[torch.Tensor]) -> None:
        """Add the left neighbour's partial sum in each round; at the end rank r owns chunk r."""
        n, rank = self._size, self._rank
        for turn in range(n - 1):
            outgoing = chunks[(rank - turn - 1) % n]
            incoming = chunks[(rank - turn - 2) % n]
            sends = self._send(outgoing, to=(rank + 1) % n)
            self._receive_and_add(incoming, source=(rank - 1) % n)
            self._wait(sends)

    def _receive_and_add(self, chunk: torch.Tensor, source: int) -> None:
        pieces = self._pieces(chunk)
        landings = [self._segments[i % 2][: piece.numel() * piece.element_size()] for i, piece in enumerate(pieces)]
        receives = [self._receive(landing, source) for landing in landings[:2]]
        for i, piece in enumerate(pieces):
            self._wait([receives[i]])
            piece.add_(landings[i].view(piece.dtype))
            if i + 2 < len(pieces):
                receives.append(self._receive(landings[i + 2], source))

    def _reduce_pairwise(self, chunks: list[torch.Tensor]) -> None:
        """Send each chunk to its owner, which sums in float32, in rank order, and rounds once."""
        n, rank = self._size, self._rank
        mine = chunks[rank]
        item_bytes = mine.numel() * mine.element_size()
        if self._gathered.numel() < item_bytes * n:
            self._gathered = torch.empty(item_bytes * n, dtype=torch.uint8)
        parts = [self._gathered[r * item_bytes : (r + 1) * item_bytes].view(mine.dtype) for r in range(n)]
        parts[rank] = mine
        requests = []
        for turn in range(1, n):
            source, target = (rank - turn) % n, (rank + turn) % n
            requests += [self._receive(piece, source) for piece in self._pieces(parts[source])]
            requests += self._send(chunks[target], to=target)
        self._wait(requests)
        self._half_sum.sum(parts, mine)

    def _gather_ring(self, chunks: list[torch.Tensor], first: int) -> None:
        """Pass the finished chunks around; this rank starts with its chunk `first`."""
        n, rank = self._size, self._rank
        for turn in range(n - 1):
            incoming = chunks[(first - turn - 1) % n]
            requests = [self._receive(piece, (rank - 1) % n) for piece in self._pieces(incoming)]
            requests += self._send(chunks[(first - turn) % n], to=(rank + 1) % n)
            self._wait(requests)

    def _nap(self, requests: list[Any]) -> None:
        """Wait for requests in short sleeps; longer ones would let the link run dry."""
        nap_s = SHORTEST_NAP_S
        while not self._mpi.Request.Testall(requests):
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, LONGEST_NAP_S)

    def _send(self, chunk: torch.Tensor, to: int) -> list[Any]:
        byte = self._mpi.BYTE
        return [self._comm.Isend([_bytes_of(piece), byte], to, TAG) for piece in self._pieces(chunk)]

    def _receive(self, piece: torch.Tensor, source: int) -> Any:
        return self._comm.Irecv([_bytes_of(piece), self._mpi.BYTE], source, TAG)

    def _pieces(self, chunk: torch.Tensor) -> list[torch.Tensor]:
        """Return the chunk in segments.

        An empty chunk has none, because both ends know its length.
        """
        if chunk.numel() == 0:
            return []
        return list(chunk.split(max(1, self._segment_bytes // chunk.element_size())))


def split(flat_L: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [flat_L[low:high] for low, high in spans(flat_L.numel(), count)]


def spans(length: int, count: int) -> list[tuple[int, int]]:
    """Cut [0, length) into `count` parts of about the same length."""
    return list(pairwise(length * i // count for i in range(count + 1)))


def _bytes_of(flat_L: torch.Tensor) -> np.ndarray:
    return flat_L.detach().view(torch.uint8).numpy()
