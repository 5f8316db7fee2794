"""All-reduce among the ranks of one host, through shared memory.

A tensor from `empty` is in shared memory: each rank sums its chunk directly from the others' and writes the result to all,
without a copy.  Other tensors pass through slots in segments that stay in the cache: each rank copies the parts of its
segment that the others need, sums its own chunk, and copies the finished chunks of the others.
Does not know hosts: the caller decides which ranks share the memory.
Rules:
- One rank sums a chunk, in the order of ranks, and the others copy it: all ranks end with the same bits.
- float16 and bfloat16 are summed in float32 and rounded once (again where hosts sum their ranks' sums).
- Ranks publish their progress in counters in the shared memory, one writer each; `Win.Sync` orders them with the data, as
  the standard's unified memory model requires.  A waiting rank spins only briefly and then sleeps, to free the core.
- Three slots per rank: a rank that writes segment i has seen all others finish segment i-2, so the slot of i-3 is free.
Sources: MPI-4.1, 12.7 "Memory Model"; Graham and Shipman, "MPI support for multi-core architectures", EuroPVM/MPI 2008.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from hpctrain.comm.ring import HALVES, HalfSum

SEGMENT_BYTES = 512 << 10
WHOLE_BYTES = 16 << 10  # up to this size every rank sums everything, with one synchronization instead of two
SLOTS = 3
LINE_BYTES = 64  # each counter has its own cache line
LAID, SUMMED = 0, 1
SPINS = 2000
NAP_S = 20e-6
BLOCK_BYTES = 256 << 10  # of a direct sum: written to the others while in the cache
_PLAIN = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
}


class _Area:
    """Shared memory of equal size for each rank."""

    def __init__(self, mpi: Any, comm: Any, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._win = mpi.Win.Allocate_shared(size_bytes, 1, comm=comm)
        self.memories = [np.frombuffer(self._win.Shared_query(at)[0], np.uint8)[:size_bytes] for at in range(comm.size)]
        self.address = self.memories[comm.rank].ctypes.data
        self.memories[comm.rank][:] = 0  # first touch: places the page near this rank

    def free(self) -> None:
        self.memories = []
        self._win.Free()


class SharedMemory:
    """The shared memory of the ranks of `comm`, all on one host.

    They create and free it together.
    """

    def __init__(self, mpi: Any, comm: Any, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        self._segment_bytes = segment_bytes
        head_bytes = 2 * LINE_BYTES
        self._win = mpi.Win.Allocate_shared(head_bytes + SLOTS * segment_bytes, 1, comm=comm)
        self._win.Lock_all(mpi.MODE_NOCHECK)
        memories = [self._win.Shared_query(rank)[0] for rank in range(self._size)]
        self._counters = [np.frombuffer(memory, np.uint8)[:head_bytes].data.cast("B").cast("q") for memory in memories]
        self._slots = [
            [np.frombuffer(memory, np.uint8)[head_bytes + at * segment_bytes :][:segment_bytes] for at in range(SLOTS)]
            for memory in memories
        ]
        self._others = [counter for rank, counter in enumerate(self._counters) if rank != self._rank]
        self._mine = self._counters[self._rank]
        for which in (LAID, SUMMED):
            self._mine[which * LINE_BYTES // 8] = 0
        self._turn = 0
        self._mpi, self._comm = mpi, comm
        self._areas: list[_Area] = []
        self._views: dict[tuple[Any, int], list[np.ndarray]] = {}
        self._half_sum = HalfSum()
        self._win.Sync()
        comm.Barrier()

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in shared memory; all ranks call it with the same values.

        Ranks may only exchange the same part of it with each other.
        """
        area = _Area(self._mpi, self._comm, length * dtype.itemsize)
        self._areas.append(area)
        return torch.from_numpy(area.memories[self._rank]).view(dtype)[:length]

    def all_reduce(self, flat_L: torch.Tensor) -> None:
        """Sum `flat_L` (one dimension, CPU, contiguous) over all ranks, in place.

        All ranks call it.
        """
        size_bytes = flat_L.numel() * flat_L.element_size()
        if self._size == 1 or size_bytes == 0:
            return
        kind = _PLAIN.get(flat_L.dtype)
        mine = (flat_L if kind is not None else flat_L.view(torch.int16)).detach().numpy()
        if size_bytes <= min(WHOLE_BYTES, self._segment_bytes):
            self._sum_whole(mine, flat_L.dtype)
        elif parts := self._direct(flat_L.data_ptr(), size_bytes):
            self._sum_directly([part.view(mine.dtype) for part in parts], flat_L.dtype)
        else:
            self._sum_in_segments(mine, flat_L.dtype)

    def broadcast(self, flat_L: torch.Tensor) -> None:
        """Copy the bytes of rank 0 to every rank; all ranks call it."""
        mine = flat_L.detach().view(torch.uint8).numpy()
        for low in range(0, mine.size, self._segment_bytes):
            piece = mine[low : low + self._segment_bytes]
            turn = self._next()
            slot = self._slots[0][(turn - 1) % SLOTS][: piece.size]
            if self._rank == 0:
                slot[:] = piece
            self._signal(LAID, turn)
            if self._rank != 0:
                self._wait_for(self._counters[0], LAID, turn)
                piece[:] = slot
            self._signal(SUMMED, turn)

    def free(self) -> None:
        """Free the memory; all ranks call it."""
        self._slots, self._counters, self._others, self._views = [], [], [], {}
        self._mine.release()
        self._win.Unlock_all()
        self._win.Free()
        for area in self._areas:
            area.free()

    def _sum_whole(self, mine: np.ndarray, dtype: torch.dtype) -> None:
        """Write all of this rank's data to its slot, and sum the slots of all ranks."""
        turn = self._next()
        slots = self._slots_of(mine.dtype, (turn - 1) % SLOTS)
        length = mine.size
        slots[self._rank][:length] = mine
        self._signal(LAID, turn)
        self._wait(LAID, turn)
        self._add([slot[:length] for slot in slots], mine, dtype)
        self._signal(SUMMED, turn)

    def _direct(self, address: int, size_bytes: int) -> list[np.ndarray]:
        """Return the memory of all ranks at this rank's `address`; empty if it is not shared."""
        for area in self._areas:
            low = address - area.address
            if low >= 0 and low + size_bytes <= area.size_bytes:
                return [memory[low : low + size_bytes] for memory in area.memories]
        return []

    def _sum_directly(self, parts: list[np.ndarray], dtype: torch.dtype) -> None:
        """Sum this rank's chunk over all ranks, and write it to all."""
        turn = self._next()
        self._signal(LAID, turn)
        self._wait(LAID, turn)
        step = BLOCK_BYTES // parts[0].itemsize
        start, stop = self._chunk(parts[0].size, self._rank)
        for low in range(start, stop, step):
            blocks = [part[low : min(low + step, stop)] for part in parts]
            result = blocks[self._rank]
            self._add(blocks, result, dtype)
            for rank, block in enumerate(blocks):
                if rank != self._rank:
                    block[:] = result
        self._signal(SUMMED, turn)
        self._wait(SUMMED, turn)

    def _sum_in_segments(self, mine: np.ndarray, dtype: torch.dtype) -> None:
        step = self._segment_bytes // mine.itemsize
        bounds = range(0, mine.size, step)
        first = self._turn
        self._lay(mine[:step])
        for i, low in enumerate(bounds):
            if low + step < mine.size:
                self._lay(mine[low + step : low + 2 * step])
            self._finish(mine[low : low + step], first + i + 1, dtype)

    def _lay(self, segment: np.ndarray) -> None:
        """Write the parts of a segment that the others need to the slot."""
        turn = self._next()
        slot = self._slots_of(segment.dtype, (turn - 1) % SLOTS)[self._rank]
        low, high = self._chunk(segment.size, self._rank)
        if low:
            slot[:low] = segment[:low]
        if high < segment.size:
            slot[high : segment.size] = segment[high:]
        self._signal(LAID, turn)

    def _finish(self, segment: np.ndarray, turn: int, dtype: torch.dtype) -> None:
        """Sum this rank's chunk of a segment, and copy the chunks that the others have summed."""
        slots = self._slots_of(segment.dtype, (turn - 1) % SLOTS)
        low, high = self._chunk(segment.size, self._rank)
        self._wait(LAID, turn)
        if low < high:
            parts = [slot[low:high] for slot in slots]
            result = parts[self._rank]
            parts[self._rank] = segment[low:high]
            self._add(parts, result, dtype)
        self._signal(SUMMED, turn)
        segment[low:high] = slots[self._rank][low:high]
        for rank in range(self._size):
            if rank != self._rank:
                low, high = self._chunk(segment.size, rank)
                self._wait_for(self._counters[rank], SUMMED, turn)
                segment[low:high] = slots[rank][low:high]

    def _add(self, parts: list[np.ndarray], result: np.ndarray, dtype: torch.dtype) -> None:
        """Sum `parts` in their order into `result`, which may be one of them."""
        if dtype in HALVES:
            halves = [torch.from_numpy(part).view(dtype) for part in parts]
            self._half_sum.sum(halves, torch.from_numpy(result).view(dtype))
            return
        if len(parts) == 2:
            np.add(parts[0], parts[1], out=result)
            return
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        result[:] = total

    def _chunk(self, length: int, rank: int) -> tuple[int, int]:
        return length * rank // self._size, length * (rank + 1) // self._size

    def _slots_of(self, kind: Any, at: int) -> list[np.ndarray]:
        """Return the slots of all ranks as numbers of a kind."""
        views = self._views.get((kind, at))
        if views is None:
            views = self._views[kind, at] = [slots[at].view(kind) for slots in self._slots]
        return views

    # ----- the progress of the ranks

    def _next(self) -> int:
        """Return the number of the next segment, once its slot is free."""
        self._turn += 1
        if self._turn > 2:
            self._wait(SUMMED, self._turn - 2)
        return self._turn

    def _signal(self, which: int, turn: int) -> None:
        self._win.Sync()
        self._mine[which * LINE_BYTES // 8] = turn

    def _wait(self, which: int, turn: int) -> None:
        for counter in self._others:
            self._wait_for(counter, which, turn)

    def _wait_for(self, counter: memoryview, which: int, turn: int) -> None:
        at = which * LINE_BYTES // 8
        spins = 0
        while counter[at] < turn:
            spins += 1
            if spins > SPINS:
                time.sleep(NAP_S)
        self._win.Sync()
