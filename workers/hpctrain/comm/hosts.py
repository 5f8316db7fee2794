"""Which ranks share a host, and in which order the hosts stand in the ring.

Ranks share a host if they share memory, name and network: namespaces of one kernel that stand for several hosts count as
several.  One rank of each host, its leader, talks to the other hosts.
Rules: the order is that of ranks unless links differ; then the slowest link that is used is as fast as it can be.  Every rank
derives the same from the same gathered facts.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PROBE_BYTES = 256 << 10
PROBES = 3
UNLIKE = 1.5  # links whose speeds are within this factor count as alike
MOST_ORDERED = 8  # hosts; with more all orders are too many to look at
TAG = 78


class Hosts:
    """The ranks of this host (`here`), and on leaders one communicator of all leaders in the ring's order (`leaders`)."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        reach = comm.Split_type(mpi.COMM_TYPE_SHARED)
        names = reach.allgather(identity())
        self.here = reach.Split(names.index(identity()), comm.Get_rank())
        reach.Free()
        self.is_leader = self.here.Get_rank() == 0
        leaders = comm.Split(0 if self.is_leader else mpi.UNDEFINED, comm.Get_rank())
        self.count: int = self.here.bcast(leaders.Get_size() if self.is_leader else None)
        self.leaders = self._in_order(leaders) if self.is_leader else None
        self.order: list[int] = self.here.bcast(self._order if self.is_leader else None)

    def free(self) -> None:
        """This will free the communicators; all ranks call it."""
        self.here.Free()
        if self.leaders is not None:
            self.leaders.Free()

    def _in_order(self, leaders: Any) -> Any:
        """The leaders, so numbered that neighbours are joined by fast links."""
        self._order = list(range(leaders.Get_size()))
        if 3 < leaders.Get_size() <= MOST_ORDERED:  # rings of three have the same links in any order
            self._order = best_ring(link_speeds(self._mpi, leaders))
        ordered = leaders.Split(0, self._order.index(leaders.Get_rank()))
        leaders.Free()
        return ordered


def identity() -> tuple[str, str, str]:
    """This will name the host that this process is on: boot, name and network."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    return (
        boot.read_text().strip() if boot.exists() else "",
        socket.gethostname(),
        os.readlink(network) if network.is_symlink() else "",
    )


def link_speeds(mpi: Any, comm: Any) -> list[list[float]]:
    """This will measure bytes per second between each two ranks of `comm`, in rounds in which every rank has one partner."""
    size, rank = comm.Get_size(), comm.Get_rank()
    mine = [0.0] * size
    outgoing, incoming = np.zeros(PROBE_BYTES, np.uint8), np.zeros(PROBE_BYTES, np.uint8)
    for turn in range(1, size + size % 2):
        partner = _partner(rank, turn, size + size % 2)
        comm.Barrier()
        if partner >= size or partner == rank:
            continue
        best_s = float("inf")
        for _ in range(PROBES):
            started_s = time.perf_counter()
            comm.Sendrecv([outgoing, mpi.BYTE], partner, TAG, [incoming, mpi.BYTE], partner, TAG)
            best_s = min(best_s, time.perf_counter() - started_s)
        mine[partner] = PROBE_BYTES / best_s
    both = comm.allgather(mine)
    return [[min(both[a][b], both[b][a]) for b in range(size)] for a in range(size)]


def best_ring(speeds: Sequence[Sequence[float]]) -> list[int]:
    """This will order ranks in a ring whose slowest link is fastest; as they are if that gains little."""
    size = len(speeds)
    plain = list(range(size))

    def slowest(order: Sequence[int]) -> float:
        return min(speeds[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True))

    best = max(([0, *rest] for rest in itertools.permutations(range(1, size))), key=slowest)
    return best if slowest(best) > UNLIKE * slowest(plain) else plain


def _partner(rank: int, turn: int, size: int) -> int:
    """The partner in round `turn` of a tournament of an even number of players (the circle method)."""
    last = size - 1
    if rank == last:
        return turn * (size // 2) % last
    partner = (turn - rank) % last
    return last if partner == rank else partner
