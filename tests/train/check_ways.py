"""Runs on every rank: each way to sum against a reference that each rank computes for itself.

With `--hosts N` the ranks pretend to be on N hosts, dealt out in turn.
"""

from __future__ import annotations

import sys

import torch
from check_ring import DTYPES, LENGTHS, check
from mpi4py import MPI

from hpctrain.comm import hosts as hosts_module
from hpctrain.comm.algorithms import algorithms_for, choose, for_halves, pick
from hpctrain.comm.hosts import Hosts, connect_ring
from hpctrain.comm.ring import HALVES
from hpctrain.comm.shared_memory import SharedMemory


class InShared:
    """Sums in memory that the ranks share."""

    def __init__(self, window: SharedMemory) -> None:
        self._window = window
        self._kept = {dtype: window.empty(max(LENGTHS), dtype) for dtype in DTYPES}

    def all_reduce(self, flat_L: torch.Tensor) -> None:
        shared = self._kept[flat_L.dtype][: flat_L.numel()]
        shared.copy_(flat_L)
        self._window.all_reduce(shared)
        flat_L.copy_(shared)


def main() -> None:
    comm = MPI.COMM_WORLD
    pretended = int(sys.argv[1])
    name = hosts_module.identity()
    hosts_module.identity = lambda: (*name[:2], str(comm.rank % pretended))
    hosts = Hosts(MPI, comm)
    assert hosts.count == min(pretended, comm.size), hosts.count
    window = SharedMemory(MPI, hosts.here, segment_bytes=4096) if hosts.here.size > 1 else None
    wire = connect_ring(MPI, hosts.leaders) if hosts.count > 1 and hosts.leaders is not None else None
    ways = dict(algorithms_for(MPI, comm, hosts, window, wire)) if comm.size > 1 else {}
    if window is not None and hosts.count == 1:
        ways["shared"] = InShared(window)
    for name, way in ways.items():
        for length in LENGTHS * 2:
            for dtype in DTYPES:
                if not (name == "mpi" or (name == "wire" and comm.size > 2)) or dtype not in HALVES:
                    check(way, comm, length, dtype, roundings=2 if name == "two levels" else 1)
    if comm.size > 1:
        choices = choose(MPI, comm, {name: way for name, way in ways.items() if name != "shared"})
        names = [pick(choices, torch.empty(length), for_halves(ways)) for length in (1, 5000, 10**6, 10**7)]
        assert len(set(map(tuple, comm.allgather(names)))) == 1
        halves = {pick(choices, torch.empty(length, dtype=torch.bfloat16), for_halves(ways)) for length in (5, 10**7)}
        assert not halves & {"mpi", "wire"}, halves
        if comm.size > 2 and hosts.count > 1:
            assert names[0] == "mpi", names  # how often ranks wait for each other is all that counts
    if comm.rank == 0:
        print(f"checked {' '.join(ways)} on {comm.size}")


if __name__ == "__main__":
    main()
