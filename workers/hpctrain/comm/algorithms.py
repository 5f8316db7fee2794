"""Algorithms to sum over ranks with MPI, and the fastest one for each message size.

An *algorithm* sums a flat tensor over all ranks.  The choice depends on where the ranks are: on one host, on hosts of one
rank each, or both.  The fastest is measured, in well under a second, because it depends on MPI, links and cores.
Rules: all ranks choose the same; an algorithm leaves the same bits on all ranks (MPI's own all-reduce is tested for that,
and left out if it does not).  With three ranks or more, algorithms sum in different orders, but a run must end with the same
bits however fast its links were at first: so there the choice is by size alone, except between `ring` and `tcp_ring`, which
sum in the same order.  Small messages use MPI there, whose order depends on sizes and hosts, not on measurements.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hpctrain.comm.hosts import Hosts
from hpctrain.comm.ring import HALVES, SMALL_BYTES, Ring
from hpctrain.comm.shared_memory import SharedMemory
from hpctrain.comm.tcp_ring import TcpRing
from hpctrain.values import gather_over_mpi

TRIED_BYTES = (1 << 10, 16 << 10, 256 << 10, 2 << 20)
BUDGET_S = 0.6
REPEATS = 4
WORTH = 0.9  # another algorithm is taken if it needs only this fraction of the time
ALIKE = ("ring", "tcp_ring")  # these sum in the same order
GATHERED_BYTES = 256 << 10  # larger messages are never gathered whole


class Algorithm(Protocol):
    """A way to sum over all ranks."""

    def all_reduce(self, flat_L: torch.Tensor) -> None:
        """Replace `flat_L` (one dimension, CPU, contiguous) by its sum over all ranks, in place."""


class OwnAllreduce:
    """MPI's own all-reduce."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm

    def all_reduce(self, flat_L: torch.Tensor) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, flat_L.detach().numpy())


class TwoLevels:
    """Ranks of a host sum in shared memory.

    Their leaders sum over a ring, and broadcast the sum on the host.
    """

    def __init__(self, shared_memory: SharedMemory | None, ring: Algorithm | None) -> None:
        self._shared_memory = shared_memory  # None: alone on its host
        self._ring = ring  # None: not a leader

    def all_reduce(self, flat_L: torch.Tensor) -> None:
        if self._shared_memory is not None:
            self._shared_memory.all_reduce(flat_L)
        if self._ring is not None:
            self._ring.all_reduce(flat_L)
        if self._shared_memory is not None:
            self._shared_memory.broadcast(flat_L)


class Leaders:
    """One rank per host: small messages are gathered by MPI, others use TcpRing."""

    def __init__(self, ring: Ring, tcp_ring: TcpRing) -> None:
        self._ring, self._tcp_ring = ring, tcp_ring

    def all_reduce(self, flat_L: torch.Tensor) -> None:
        small = flat_L.numel() * flat_L.element_size() <= SMALL_BYTES
        by_tcp = not small and self._tcp_ring.sums(flat_L.dtype)
        (self._tcp_ring if by_tcp else self._ring).all_reduce(flat_L)


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """For messages up to `up_to_bytes` (None: any) `name` is the fastest.

    `seconds` of each one measured.
    """

    up_to_bytes: int | None
    name: str
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        size = "larger" if self.up_to_bytes is None else f"up to {self.up_to_bytes >> 10} KiB"
        tried = ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in self.seconds.items())
        return f"{size}: {self.name} ({tried or 'not measured'})"


def algorithms_for(
    mpi: Any, comm: Any, hosts: Hosts, shared_memory: SharedMemory | None, tcp_ring: TcpRing | None
) -> dict[str, Algorithm]:
    """Return the algorithms by name, the default one first.

    `tcp_ring`: our own connections, on leaders.
    """
    if hosts.count == 1:
        assert shared_memory is not None
        return {"shared_memory": shared_memory, "mpi": OwnAllreduce(mpi, comm)}
    if hosts.count == comm.Get_size():
        assert hosts.leaders is not None
        algorithms: dict[str, Algorithm] = {"tcp_ring": tcp_ring} if tcp_ring is not None else {}
        return algorithms | {
            "ring": Ring(mpi, hosts.leaders, small_bytes=0),
            "gather": Ring(mpi, hosts.leaders, small_bytes=GATHERED_BYTES),
            "mpi": OwnAllreduce(mpi, comm),
        }
    return {
        "two levels": TwoLevels(shared_memory, _of_leaders(mpi, hosts, tcp_ring, patient=False)),
        "mpi": OwnAllreduce(mpi, comm),
    }


def algorithm_beside(
    mpi: Any, comm: Any, hosts: Hosts, shared_memory: SharedMemory | None, tcp_ring: TcpRing | None
) -> Algorithm:
    """Return the algorithm to sum in a thread while the rank computes.

    It sleeps while it waits.
    """
    if hosts.count == 1:
        assert shared_memory is not None
        return shared_memory
    if hosts.count == comm.Get_size():
        assert hosts.leaders is not None
        return Ring(mpi, hosts.leaders, small_bytes=0, patient=True)
    return TwoLevels(shared_memory, _of_leaders(mpi, hosts, tcp_ring, patient=True))


def _of_leaders(mpi: Any, hosts: Hosts, tcp_ring: TcpRing | None, *, patient: bool) -> Algorithm | None:
    if hosts.leaders is None:
        return None
    ring = Ring(mpi, hosts.leaders, patient=patient)
    return ring if tcp_ring is None else Leaders(ring, tcp_ring)


def choose(mpi: Any, comm: Any, algorithms: Mapping[str, Algorithm]) -> list[AlgorithmChoice]:
    """Measure the algorithms at some sizes in limited time, and return the choices.

    All ranks call it.
    """
    usual = next(iter(algorithms))
    if comm.Get_size() > 2:
        small = [AlgorithmChoice(SMALL_BYTES, name, {}) for name in _for_small(comm, algorithms)]
        alike = {name: algorithm for name, algorithm in algorithms.items() if name in ALIKE}
        last = measured(mpi, comm, alike, TRIED_BYTES[-1:])[-1:] if len(alike) > 1 else []
        return [
            *small,
            *(
                [AlgorithmChoice(None, choice.name, choice.seconds) for choice in last]
                or [AlgorithmChoice(None, usual, {})]
            ),
        ]
    choices = measured(mpi, comm, algorithms, TRIED_BYTES)
    name = choices[-1].name
    serves_larger = name != "gather" and (name in ALIKE or len(choices) == len(TRIED_BYTES))
    return [*choices, AlgorithmChoice(None, name if serves_larger else usual, {})]


def _for_small(comm: Any, algorithms: Mapping[str, Algorithm]) -> list[str]:
    """Return the algorithm for small messages of three ranks or more, where latency decides."""
    if "shared_memory" in algorithms:
        return []  # nothing is faster
    if _agrees(comm, algorithms["mpi"], SMALL_BYTES):
        return ["mpi"]
    return ["gather"] if "gather" in algorithms else []


def measured(
    mpi: Any, comm: Any, algorithms: Mapping[str, Algorithm], sizes_bytes: tuple[int, ...]
) -> list[AlgorithmChoice]:
    """Measure growing sizes until one takes too long; the first size is always measured."""
    choices: list[AlgorithmChoice] = []
    usual = next(iter(algorithms))
    began_s = time.perf_counter()
    for size_bytes in sizes_bytes:
        if choices:
            growth = size_bytes / sizes_bytes[len(choices) - 1]
            spent_s = max(gather_over_mpi(comm, time.perf_counter() - began_s))
            if spent_s + REPEATS * growth * sum(choices[-1].seconds.values()) > BUDGET_S:
                break
        seconds = {
            name: measure(mpi, comm, algorithm, size_bytes)
            for name, algorithm in algorithms.items()
            if name != "gather" or size_bytes <= GATHERED_BYTES
        }
        if "mpi" in seconds and not _agrees(comm, algorithms["mpi"], size_bytes):
            del seconds["mpi"]
        choices.append(AlgorithmChoice(4 * size_bytes, _best(seconds, usual), seconds))
    return choices


def _best(seconds: Mapping[str, float], usual: str) -> str:
    """Return the fastest, or the usual one if that gains little."""
    best = min(seconds, key=lambda name: seconds[name], default=usual)
    return best if best == usual or seconds[best] < WORTH * seconds[usual] else usual


def for_halves(algorithms: Mapping[str, Algorithm]) -> str:
    """Return the algorithm that sums half precision in float32; MPI does not support it."""
    return next((name for name in algorithms if name not in ("mpi", "tcp_ring")), "")


def pick(choices: list[AlgorithmChoice], flat_L: torch.Tensor, halves: str) -> str:
    """Return the algorithm for a tensor; `halves` is the one for half precision."""
    size_bytes = flat_L.numel() * flat_L.element_size()
    chosen = next(choice.name for choice in choices if choice.up_to_bytes is None or size_bytes <= choice.up_to_bytes)
    return halves if chosen in ("mpi", "tcp_ring") and flat_L.dtype in HALVES else chosen


def measure(mpi: Any, comm: Any, algorithm: Algorithm, size_bytes: int) -> float:
    """Return the seconds of the slowest rank, equal on all ranks.

    Slow cases are measured less often.
    """
    flat_L = torch.ones(size_bytes // 4)
    times_s: list[float] = []
    while len(times_s) < 2 or (len(times_s) < REPEATS and sum(times_s) < BUDGET_S / 10):
        comm.Barrier()
        started_s = time.perf_counter()
        algorithm.all_reduce(flat_L)
        times_s.append(max(gather_over_mpi(comm, time.perf_counter() - started_s)))
        flat_L.fill_(1.0)
    return min(times_s[1:])


def _agrees(comm: Any, algorithm: Algorithm, size_bytes: int) -> bool:
    """Return whether all ranks end with the same bits."""
    flat_L = torch.rand(size_bytes // 4, generator=torch.Generator().manual_seed(comm.Get_rank()))
    algorithm.all_reduce(flat_L)
    return len(set(gather_over_mpi(comm, hashlib.sha256(flat_L.numpy().data).digest()))) == 1
