"""The ways to sum over ranks with MPI, and which is the fastest for messages of which size here.

A *way* sums a flat tensor over all ranks.  Which ways there are depends on where the ranks are: on one host, on hosts of one
rank each, or both; which is best is measured, in well under a second, because it depends on MPI, links and cores.
Rules: all ranks choose alike; what is chosen leaves the same bits on all ranks (MPI's own all-reduce is tried for that, and
left out if it does not). Of three ranks or more some ways sum in different orders, and a run shall end with the same bits
however fast its links were at first: there the choice is by size alone, but between `ring` and `wire`, which sum alike.
What is small is MPI's there, whose order depends on sizes and on who is where, not on what was measured.
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

TRIED_BYTES = (1 << 10, 16 << 10, 256 << 10, 2 << 20)
BUDGET_S = 0.6
REPEATS = 4
WORTH = 0.9  # another way is taken if it needs so much less time
ALIKE = ("ring", "wire")  # sum in the same order
GATHERED_BYTES = 256 << 10  # more than this is never gathered whole


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
    """Ranks of a host meet in a window; the hosts' leaders go round the ring, and hand the sum to the others."""

    def __init__(self, window: SharedMemory | None, ring: Algorithm | None) -> None:
        self._window = window  # None: alone on its host
        self._ring = ring  # None: not a leader

    def all_reduce(self, flat_L: torch.Tensor) -> None:
        if self._window is not None:
            self._window.all_reduce(flat_L)
        if self._ring is not None:
            self._ring.all_reduce(flat_L)
        if self._window is not None:
            self._window.broadcast(flat_L)


class Leaders:
    """One rank of each host: what is small is gathered over MPI, the rest goes round our own connections."""

    def __init__(self, ring: Ring, wire: TcpRing) -> None:
        self._ring, self._wire = ring, wire

    def all_reduce(self, flat_L: torch.Tensor) -> None:
        small = flat_L.numel() * flat_L.element_size() <= SMALL_BYTES
        by_wire = not small and self._wire.sums(flat_L.dtype)
        (self._wire if by_wire else self._ring).all_reduce(flat_L)


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """For messages up to `up_to_bytes` (None: any), `name` is the fastest way; `seconds` of each way that was tried."""

    up_to_bytes: int | None
    name: str
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        size = "larger" if self.up_to_bytes is None else f"up to {self.up_to_bytes >> 10} KiB"
        tried = ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in self.seconds.items())
        return f"{size}: {self.name} ({tried or 'not tried'})"


def algorithms_for(
    mpi: Any, comm: Any, hosts: Hosts, window: SharedMemory | None, wire: TcpRing | None
) -> dict[str, Algorithm]:
    """Return the ways that there are, the one to use untried first. `wire`: our own connections, on leaders."""
    if hosts.count == 1:
        assert window is not None
        return {"window": window, "mpi": OwnAllreduce(mpi, comm)}
    if hosts.count == comm.Get_size():
        assert hosts.leaders is not None
        ways: dict[str, Algorithm] = {"wire": wire} if wire is not None else {}
        return ways | {
            "ring": Ring(mpi, hosts.leaders, small_bytes=0),
            "gather": Ring(mpi, hosts.leaders, small_bytes=GATHERED_BYTES),
            "mpi": OwnAllreduce(mpi, comm),
        }
    return {
        "two levels": TwoLevels(window, _of_leaders(mpi, hosts, wire, patient=False)),
        "mpi": OwnAllreduce(mpi, comm),
    }


def algorithm_beside(mpi: Any, comm: Any, hosts: Hosts, window: SharedMemory | None, wire: TcpRing | None) -> Algorithm:
    """Return the way to sum in a thread, while the rank computes: one that sleeps while it waits."""
    if hosts.count == 1:
        assert window is not None
        return window
    if hosts.count == comm.Get_size():
        assert hosts.leaders is not None
        return Ring(mpi, hosts.leaders, small_bytes=0, patient=True)
    return TwoLevels(window, _of_leaders(mpi, hosts, wire, patient=True))


def _of_leaders(mpi: Any, hosts: Hosts, wire: TcpRing | None, *, patient: bool) -> Algorithm | None:
    if hosts.leaders is None:
        return None
    ring = Ring(mpi, hosts.leaders, patient=patient)
    return ring if wire is None else Leaders(ring, wire)


def choose(mpi: Any, comm: Any, ways: Mapping[str, Algorithm]) -> list[AlgorithmChoice]:
    """Measure the ways at some sizes, until its time is up, and say which to take; all ranks take part."""
    usual = next(iter(ways))
    if comm.Get_size() > 2:
        small = [AlgorithmChoice(SMALL_BYTES, name, {}) for name in _for_small(comm, ways)]
        alike = {name: way for name, way in ways.items() if name in ALIKE}
        last = measured(mpi, comm, alike, TRIED_BYTES[-1:])[-1:] if len(alike) > 1 else []
        return [
            *small,
            *([AlgorithmChoice(None, one.name, one.seconds) for one in last] or [AlgorithmChoice(None, usual, {})]),
        ]
    choices = measured(mpi, comm, ways, TRIED_BYTES)
    name = choices[-1].name
    goes_on = name != "gather" and (name in ALIKE or len(choices) == len(TRIED_BYTES))
    return [*choices, AlgorithmChoice(None, name if goes_on else usual, {})]


def _for_small(comm: Any, ways: Mapping[str, Algorithm]) -> list[str]:
    """The way for what is small, of three ranks or more: no bytes count, but how often ranks wait for each other."""
    if "window" in ways:
        return []  # nothing is faster
    if _agrees(comm, ways["mpi"], SMALL_BYTES):
        return ["mpi"]
    return ["gather"] if "gather" in ways else []


def measured(mpi: Any, comm: Any, ways: Mapping[str, Algorithm], sizes_bytes: tuple[int, ...]) -> list[AlgorithmChoice]:
    """Measure ways at sizes that grow, and stop at one that would take too long; the first is always measured."""
    choices: list[AlgorithmChoice] = []
    usual = next(iter(ways))
    began_s = time.perf_counter()
    for size_bytes in sizes_bytes:
        if choices:
            growth = size_bytes / sizes_bytes[len(choices) - 1]
            spent_s = comm.allreduce(time.perf_counter() - began_s, mpi.MAX)
            if spent_s + REPEATS * growth * sum(choices[-1].seconds.values()) > BUDGET_S:
                break
        seconds = {
            name: measure(mpi, comm, way, size_bytes)
            for name, way in ways.items()
            if name != "gather" or size_bytes <= GATHERED_BYTES
        }
        if "mpi" in seconds and not _agrees(comm, ways["mpi"], size_bytes):
            del seconds["mpi"]
        choices.append(AlgorithmChoice(4 * size_bytes, _best(seconds, usual), seconds))
    return choices


def _best(seconds: Mapping[str, float], usual: str) -> str:
    """The fastest; the usual one if that gains little."""
    best = min(seconds, key=lambda name: seconds[name], default=usual)
    return best if best == usual or seconds[best] < WORTH * seconds[usual] else usual


def for_halves(ways: Mapping[str, Algorithm]) -> str:
    """Return the way that sums any number of halves in float32. MPI does not know them, nor is trusted to do so."""
    return next((name for name in ways if name not in ("mpi", "wire")), "")


def pick(choices: list[AlgorithmChoice], flat_L: torch.Tensor, halves: str) -> str:
    """Return the way for a tensor; `halves` is the one for these."""
    size_bytes = flat_L.numel() * flat_L.element_size()
    chosen = next(one.name for one in choices if one.up_to_bytes is None or size_bytes <= one.up_to_bytes)
    return halves if chosen in ("mpi", "wire") and flat_L.dtype in HALVES else chosen


def measure(mpi: Any, comm: Any, way: Algorithm, size_bytes: int) -> float:
    """Return the seconds that the slowest rank takes; the same on all ranks. What takes long is measured less often."""
    flat_L = torch.ones(size_bytes // 4)
    times_s: list[float] = []
    while len(times_s) < 2 or (len(times_s) < REPEATS and sum(times_s) < BUDGET_S / 10):
        comm.Barrier()
        started_s = time.perf_counter()
        way.all_reduce(flat_L)
        times_s.append(comm.allreduce(time.perf_counter() - started_s, mpi.MAX))
        flat_L.fill_(1.0)
    return min(times_s[1:])


def _agrees(comm: Any, way: Algorithm, size_bytes: int) -> bool:
    """Whether all ranks end with the same bits."""
    flat_L = torch.rand(size_bytes // 4, generator=torch.Generator().manual_seed(comm.Get_rank()))
    way.all_reduce(flat_L)
    return len(set(comm.allgather(hashlib.sha256(flat_L.numpy().data).digest()))) == 1
