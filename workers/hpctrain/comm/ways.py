"""The ways to sum over ranks with MPI, and which is the fastest for messages of which size here.

A *way* sums a flat tensor over all ranks.  Which ways there are depends on where the ranks are: on one host, on hosts of one
rank each, or both; which is best is measured, in well under a second, because it depends on MPI, links and cores.
Rules: all ranks choose alike; what is chosen leaves the same bits on all ranks (MPI's own all-reduce is tried for that, and
left out if it does not). Of three ranks or more the ways sum in different orders, and a run shall end with the same bits
however fast its links were in its first second: there the choice is by size alone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hpctrain.comm.halves import HALVES
from hpctrain.comm.hosts import Hosts
from hpctrain.comm.ring import SMALL_BYTES, Ring
from hpctrain.comm.window import Window

TRIED_BYTES = (1 << 10, 16 << 10, 256 << 10, 4 << 20)
BUDGET_S = 0.6
REPEATS = 4
GATHERED_BYTES = 256 << 10  # more than this is never gathered whole


class Way(Protocol):
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

    def __init__(self, window: Window | None, ring: Ring | None) -> None:
        self._window = window  # None: alone on its host
        self._ring = ring  # None: not a leader

    def all_reduce(self, flat_L: torch.Tensor) -> None:
        if self._window is not None:
            self._window.all_reduce(flat_L)
        if self._ring is not None:
            self._ring.all_reduce(flat_L)
        if self._window is not None:
            self._window.broadcast(flat_L)


@dataclass(frozen=True, slots=True)
class Choice:
    """For messages up to `up_to_bytes` (None: any), `name` is the fastest way; `seconds` of each way that was tried."""

    up_to_bytes: int | None
    name: str
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        size = "larger" if self.up_to_bytes is None else f"up to {self.up_to_bytes >> 10} KiB"
        tried = ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in self.seconds.items())
        return f"{size}: {self.name} ({tried or 'not tried'})"


def ways_for(mpi: Any, comm: Any, hosts: Hosts, window: Window | None) -> dict[str, Way]:
    """This will name the ways that there are, the one to use untried first."""
    if hosts.count == 1:
        assert window is not None
        return {"window": window, "mpi": OwnAllreduce(mpi, comm)}
    if hosts.count == comm.Get_size():
        assert hosts.leaders is not None
        ring: dict[str, Way] = {"ring": Ring(mpi, hosts.leaders, small_bytes=0)}
        return ring | {
            "gather": Ring(mpi, hosts.leaders, small_bytes=GATHERED_BYTES),
            "mpi": OwnAllreduce(mpi, comm),
        }
    leaders = Ring(mpi, hosts.leaders) if hosts.leaders is not None else None
    return {"two levels": TwoLevels(window, leaders), "mpi": OwnAllreduce(mpi, comm)}


def choose(mpi: Any, comm: Any, ways: Mapping[str, Way]) -> list[Choice]:
    """This will measure the ways at some sizes, until its time is up, and say which to take; all ranks take part."""
    choices = []
    usual = next(iter(ways))
    if comm.Get_size() > 2:
        small = [Choice(SMALL_BYTES, "gather", {})] if "gather" in ways else []
        return [*small, Choice(None, usual, {})]
    began_s = time.perf_counter()
    for size_bytes in TRIED_BYTES:
        spent_s = comm.allreduce(time.perf_counter() - began_s, mpi.MAX)
        if spent_s > BUDGET_S:
            break
        seconds = {
            name: _measure(mpi, comm, way, size_bytes)
            for name, way in ways.items()
            if name != "gather" or size_bytes <= GATHERED_BYTES
        }
        if "mpi" in seconds and not _agrees(comm, ways["mpi"], size_bytes):
            del seconds["mpi"]
        best = min(seconds, key=lambda name: seconds[name])
        choices.append(Choice(4 * size_bytes, best if seconds[best] < 0.9 * seconds[usual] else usual, seconds))
    last = choices[-1].name if len(choices) == len(TRIED_BYTES) else usual
    return [*choices, Choice(None, last if last != "gather" else usual, {})]


def pick(choices: list[Choice], flat_L: torch.Tensor, usual: str) -> str:
    """This will name the way for a tensor. MPI does not know halves, nor is trusted to sum them in float32."""
    size_bytes = flat_L.numel() * flat_L.element_size()
    chosen = next(one.name for one in choices if one.up_to_bytes is None or size_bytes <= one.up_to_bytes)
    return usual if chosen == "mpi" and flat_L.dtype in HALVES else chosen


def _measure(mpi: Any, comm: Any, way: Way, size_bytes: int) -> float:
    """Seconds that the slowest rank takes; the same on all ranks."""
    flat_L = torch.ones(size_bytes // 4)
    times_s = []
    for _ in range(REPEATS):
        comm.Barrier()
        started_s = time.perf_counter()
        way.all_reduce(flat_L)
        times_s.append(time.perf_counter() - started_s)
        flat_L.fill_(1.0)
    return comm.allreduce(min(times_s[1:]), mpi.MAX)


def _agrees(comm: Any, way: Way, size_bytes: int) -> bool:
    """Whether all ranks end with the same bits."""
    flat_L = torch.rand(size_bytes // 4, generator=torch.Generator().manual_seed(comm.Get_rank()))
    way.all_reduce(flat_L)
    return len(set(comm.allgather(hashlib.sha256(flat_L.numpy()).digest()))) == 1
