"""Our ring beside MPI's own all-reduce: `mpirun -n 2 python tests/bench/allreduce.py`.

Prints microseconds per operation for small messages, bus bandwidth 2(n-1)/n * S/t in GB/s for large ones, and the ratio;
both are measured in turns in one run, so the ratio means something on a noisy machine.  Decides nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from mpi4py import MPI

from hpctrain.comm.ring import Ring

SIZES_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
ROUNDS = 7


def main() -> int:
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    ring = Ring(MPI, comm)
    if comm.rank == 0:
        print(f"{'bytes':>10} {'ring':>14} {'MPI':>14} {'MPI/ring time':>14}   {comm.size} ranks")
    for size_bytes in SIZES_BYTES:
        flat = torch.ones(size_bytes // 4)
        buffer = flat.numpy()
        operations = {
            "ring": lambda flat=flat: ring.all_reduce(flat),
            "mpi": lambda buffer=buffer: comm.Allreduce(MPI.IN_PLACE, buffer),
        }
        times_s: dict[str, list[float]] = {name: [] for name in operations}
        repeats = max(1, min(200, (32 << 20) // size_bytes))
        for turn in range(ROUNDS + 1):
            for name, operation in operations.items():
                elapsed_s = measure(comm, operation, repeats)
                if turn:  # the first turn warms up
                    times_s[name].append(elapsed_s)
            flat.fill_(1.0)
        ring_s, mpi_s = (statistics.median(times_s[name]) for name in ("ring", "mpi"))
        if comm.rank == 0:
            shown = [show(size_bytes, seconds, comm.size) for seconds in (ring_s, mpi_s)]
            print(f"{size_bytes:>10} {shown[0]:>14} {shown[1]:>14} {mpi_s / ring_s:>14.2f}", flush=True)
    return 0


def measure(comm: MPI.Comm, operation: Callable[[], object], repeats: int) -> float:
    """Seconds per operation, of the slowest rank."""
    comm.Barrier()
    started_s = time.perf_counter()
    for _ in range(repeats):
        operation()
    return comm.allreduce((time.perf_counter() - started_s) / repeats, MPI.MAX)


def show(size_bytes: int, seconds: float, ranks: int) -> str:
    if size_bytes < 1 << 20:
        return f"{seconds * 1e6:.1f} us"
    return f"{2 * (ranks - 1) / ranks * size_bytes / seconds / 1e9:.2f} GB/s"


if __name__ == "__main__":
    sys.exit(main())
