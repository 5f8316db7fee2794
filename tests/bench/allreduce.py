"""Runs on every rank: seconds of an all-reduce over torch's Gloo, MPI's own, and ours, in turns in one run.

Usage: allreduce.py WHO,... BYTES...  with WHO of gloo, mpi and ours.  Rank 0 prints one JSON line: {who: {bytes: [seconds ...]}},
each the time of the slowest rank.  What is large lies where gradients lie: in memory from `Communicator.empty`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from mpi4py import MPI

from hpctrain.comm import connect

ROUNDS = 5
ROUND_S = 0.3  # about so long is a round of one size, and at most MOST operations
MOST = 200
LARGE_BYTES = 1 << 20


def main() -> None:
    """Measure."""
    world = MPI.COMM_WORLD
    os.sched_setaffinity(0, {world.rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    comm = connect("mpi", os.environ)
    kinds = sys.argv[1].split(",")
    if "gloo" in kinds:
        address = world.bcast(os.environ.get("BENCH_ADDRESS", "127.0.0.1"))
        store = dist.TCPStore(address, 29556, world.size, is_master=world.rank == 0)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    found: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    for size_bytes in map(int, sys.argv[2:]):
        length = size_bytes // 4
        flat = comm.empty(length, torch.float32) if size_bytes >= LARGE_BYTES else torch.empty(length)
        plain = torch.empty(length)
        operations: dict[str, Callable[[], object]] = {
            "gloo": lambda plain=plain: dist.all_reduce(plain),
            "mpi": lambda plain=plain: world.Allreduce(MPI.IN_PLACE, plain.numpy()),
            "ours": lambda flat=flat: comm.all_reduce(flat),
        }
        for kind in kinds:
            flat.fill_(0.0)
            plain.fill_(0.0)
            operations[kind]()
            once_s = measure(world, operations[kind], 1)
            repeats = max(1, min(MOST, int(ROUND_S / once_s)))
            found[kind][str(size_bytes)] = [measure(world, operations[kind], repeats) for _ in range(ROUNDS)]
    if world.rank == 0:
        print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    comm.barrier()
    comm.close()


def measure(world: MPI.Comm, operation: Callable[[], object], repeats: int) -> float:
    """Seconds per operation, of the slowest rank."""
    world.Barrier()
    started_s = time.perf_counter()
    for _ in range(repeats):
        operation()
    return world.allreduce((time.perf_counter() - started_s) / repeats, MPI.MAX)


if __name__ == "__main__":
    main()
