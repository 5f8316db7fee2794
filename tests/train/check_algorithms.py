"""Runs on every rank: each algorithm to sum against a reference that each rank computes for itself.

With `--hosts N` the ranks pretend to be on N hosts, dealt out in turn.
"""

from __future__ import annotations

import sys

import torch
from check_ring import DTYPES, LENGTHS, check
from mpi4py import MPI

from hpctrain.comm import hosts as hosts_module
from hpctrain.comm.hosts import Hosts, connect_ring
from hpctrain.comm.mpi import algorithms_for, choose, for_halves, pick
from hpctrain.comm.ring import HALVES
from hpctrain.comm.shared_memory import SharedMemory


class InShared:
    """Sums in memory that the ranks share."""

    def __init__(self, shared_memory: SharedMemory) -> None:
        self._shared_memory = shared_memory
        self._kept = {dtype: shared_memory.empty(max(LENGTHS), dtype) for dtype in DTYPES}

    def all_reduce(self, flat_L: torch.Tensor) -> None:
        shared = self._kept[flat_L.dtype][: flat_L.numel()]
        shared.copy_(flat_L)
        self._shared_memory.all_reduce(shared)
        flat_L.copy_(shared)


def main() -> None:
    comm = MPI.COMM_WORLD
    pretended = int(sys.argv[1])
    name = hosts_module.identity()
    hosts_module.identity = lambda: (*name[:2], str(comm.rank % pretended))
    hosts = Hosts(MPI, comm)
    assert hosts.count == min(pretended, comm.size), hosts.count
    shared_memory = SharedMemory(MPI, hosts.here, segment_bytes=4096) if hosts.here.size > 1 else None
    tcp_ring = connect_ring(MPI, hosts.leaders) if hosts.count > 1 and hosts.leaders is not None else None
    algorithms = dict(algorithms_for(MPI, comm, hosts, shared_memory, tcp_ring)) if comm.size > 1 else {}
    if shared_memory is not None and hosts.count == 1:
        algorithms["shared"] = InShared(shared_memory)
    for name, algorithm in algorithms.items():
        for length in LENGTHS * 2:
            for dtype in DTYPES:
                if not (name == "mpi" or (name == "tcp_ring" and comm.size > 2)) or dtype not in HALVES:
                    check(algorithm, comm, length, dtype, roundings=2 if name == "two levels" else 1)
    if comm.size > 1:
        choices = choose(MPI, comm, {name: algorithm for name, algorithm in algorithms.items() if name != "shared"})
        names = [pick(choices, torch.empty(length), for_halves(algorithms)) for length in (1, 5000, 10**6, 10**7)]
        assert len(set(map(tuple, comm.allgather(names)))) == 1
        halves = {
            pick(choices, torch.empty(length, dtype=torch.bfloat16), for_halves(algorithms)) for length in (5, 10**7)
        }
        assert not halves & {"mpi", "tcp_ring"}, halves
        if comm.size > 2 and hosts.count > 1:
            assert names[0] == "mpi", names  # how often ranks wait for each other is all that counts
    if comm.rank == 0:
        print(f"checked {' '.join(algorithms)} on {comm.size}")


if __name__ == "__main__":
    main()
