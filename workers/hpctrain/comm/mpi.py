"""A group of ranks over mpi4py.

Our shared memory and rings for tensors, MPI's own calls for the rest.

Finds MPI, and tells what is missing.  CUDA tensors travel through a copy on the host, for a GPU rank among CPU ranks, or GPUs
without a common NCCL: copied, summed and copied back while the device computes.  Copies go to page-locked memory that is reused;
they run on their own streams, so that the backward pass continues.
Rules: a copy waits only for earlier computation.  `wait` makes the stream, not the host, wait for the copy back.  Sums begin
in the order of the calls.

An *algorithm* sums a flat tensor over all ranks.  The choice depends on where the ranks are: on one host, on hosts of one
rank each, or both.  The fastest is measured, in well under a second, because it depends on MPI, links and cores.
Rules: all ranks choose the same; an algorithm leaves the same bits on all ranks (MPI's own all-reduce is tested for that,
and left out if it does not).  With three ranks or more, algorithms sum in different orders, but a run must end with the same
bits however fast its links were at first: so there the choice is by size alone, except between `ring` and `tcp_ring`, which
sum in the same order.  Small messages use MPI there, whose order depends on sizes and hosts, not on measurements.

Sources: PyTorch, "CUDA semantics" (streams, `record_stream`, pinned memory).
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hpctrain.comm.base import (
    MOST_BUCKET_BYTES,
    Background,
    BucketPlan,
    Plain,
    SingleCommunicator,
    Work,
    check_contiguous,
)
from hpctrain.comm.hosts import Hosts, connect_ring
from hpctrain.comm.ring import HALVES, SMALL_BYTES, Ring
from hpctrain.comm.shared_memory import SharedMemory
from hpctrain.comm.tcp_ring import TcpRing
from hpctrain.env import INSTALL_HINTS, RankInfo
from hpctrain.errors import MissingPackageError, TrainError
from hpctrain.values import broadcast_over_mpi, gather_over_mpi

# ----- buckets for the gradient, by the speed of the link between hosts
# On one host the sum takes less time than a thread beside the backward pass would cost: one bucket, summed after it.
# Between hosts the link should be busy from the first gradient on, and done soon after the last: a bucket has the bytes of
# `BUCKET_S` seconds, in powers of four, so that two measurements of one link give the same order of sums.


BUCKET_S = 0.008
LEAST_BUCKET_BYTES = 256 << 10
FIRST_BYTES, SECOND_BYTES = 128 << 10, 1 << 20
PATIENCE_S = 0.1


def bucket_plan_of(mpi: Any, hosts: Hosts, between: Algorithm | None) -> BucketPlan:
    """Measure how fast the leaders sum over `between`, and return the buckets for it.

    All ranks call it.
    """
    if hosts.count == 1:
        return BucketPlan(bucket_bytes=MOST_BUCKET_BYTES, beside=False)
    bytes_per_s = 0.0
    if hosts.leaders is not None:
        assert between is not None
        size_bytes, seconds = FIRST_BYTES, measure(mpi, hosts.leaders, between, FIRST_BYTES)
        if seconds * SECOND_BYTES / FIRST_BYTES < PATIENCE_S:
            size_bytes, seconds = SECOND_BYTES, measure(mpi, hosts.leaders, between, SECOND_BYTES)
        bytes_per_s = 2 * (hosts.count - 1) / hosts.count * size_bytes / seconds
    bytes_per_s = broadcast_over_mpi(hosts.here, bytes_per_s)
    return BucketPlan(bucket_bytes=bucket_bytes(bytes_per_s), beside=True, bytes_per_s=bytes_per_s)


def bucket_bytes(bytes_per_s: float) -> int:
    """Return the size of a bucket for a link of that speed."""
    power = round(math.log(max(1.0, bytes_per_s * BUCKET_S), 4))
    return min(MOST_BUCKET_BYTES, max(LEAST_BUCKET_BYTES, 4**power))


# Old MPI libraries have 32-bit counts, so one broadcast call carries at most this much.
BROADCAST_BYTES = 64 << 20
SWAP_TAG = 79


def load_mpi() -> Any:
    """Start MPI, and return mpi4py's module.

    Raises:
        MissingPackageError: mpi4py or an MPI library is missing.
    """
    try:
        from mpi4py import MPI  # noqa: PLC0415 (importing it calls MPI_Init)
    except ModuleNotFoundError:
        raise MissingPackageError(
            f"cannot use MPI: mpi4py is not installed; install with: {INSTALL_HINTS['mpi4py']}"
        ) from None
    except (ImportError, RuntimeError) as error:
        raise MissingPackageError(
            f"cannot use MPI: mpi4py finds no MPI library ({error}); install with: {INSTALL_HINTS['mpi4py']}"
        ) from None
    return MPI


class MpiCommunicator(Plain):
    """All ranks that one mpirun started."""

    name = "mpi"

    def __init__(self, place: RankInfo) -> None:
        self._mpi = load_mpi()
        world = self._mpi.COMM_WORLD
        if place.world > 1 and world.Get_size() != place.world:
            library = self._mpi.Get_library_version().splitlines()[0].strip()
            raise TrainError(
                f"cannot use MPI: the launcher started {place.world} ranks, but the MPI library sees "
                f"{world.Get_size()}; mpirun and mpi4py's library ({library}) are "
                "of different MPIs: use the mpirun in the directory of python"
            )
        self._comm = world.Dup()
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self._closed = False
        self._hosts = Hosts(self._mpi, self._comm)
        self._shared_memory = SharedMemory(self._mpi, self._hosts.here) if self._hosts.here.Get_size() > 1 else None
        self._algorithms: dict[str, Algorithm] = {}
        self.choices: list[AlgorithmChoice] = []
        self._tcp_ring: TcpRing | None = None
        if self._hosts.count > 1 and self._hosts.leaders is not None:
            self._tcp_ring = connect_ring(self._mpi, self._hosts.leaders)
        if self.size > 1:
            self._algorithms = algorithms_for(self._mpi, self._comm, self._hosts, self._shared_memory, self._tcp_ring)
            self.choices = choose(self._mpi, self._comm, self._algorithms)
        self._for_halves = for_halves(self._algorithms)
        self._background = Background()
        self._staging: Staging | None = None
        self._bucket_plan = SingleCommunicator().bucket_plan()
        if self.size > 1:
            self._beside = algorithm_beside(self._mpi, self._comm, self._hosts, self._shared_memory, self._tcp_ring)
            self._bucket_plan = bucket_plan_of(self._mpi, self._hosts, self._tcp_ring or self._beside)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks, in place."""
        check_contiguous(tensor)
        if self.size == 1 or tensor.numel() == 0:
            return
        host = tensor.detach().cpu()  # no copy if it is on the CPU
        flat_L = host.view(-1)
        self._algorithms[pick(self.choices, flat_L, self._for_halves)].all_reduce(flat_L)
        if host.device != tensor.device:
            tensor.copy_(host)

    def begin(self, tensor: torch.Tensor, then: Callable[[], None] | None = None, *, own_part: bool = False) -> Work:
        """Sum in the background: over TcpRing if each rank is a host, else in a thread."""
        check_contiguous(tensor)
        if tensor.device.type != "cpu":
            if self._staging is None:
                self._staging = Staging(Cuda(tensor.device), self._begin_on_host)
            return self._staging.begin(tensor, then)
        return self._begin_on_host(tensor.detach().view(-1), then, own_part=own_part)

    def _begin_on_host(self, flat_L: torch.Tensor, then: Callable[[], None] | None, *, own_part: bool = False) -> Work:
        if self._tcp_ring is not None and self._hosts.count == self.size and self._tcp_ring.sums(flat_L.dtype):
            # Parts are numbered by rank, not by the order of hosts in the ring.
            return self._tcp_ring.begin(flat_L, then, own_part=own_part and self._hosts.order == list(range(self.size)))
        return self._background.begin(lambda: self._sum_beside(flat_L, then))

    def _sum_beside(self, flat_L: torch.Tensor, then: Callable[[], None] | None) -> None:
        if self.size > 1 and flat_L.numel():
            self._beside.all_reduce(flat_L)
        if then is not None:
            then()

    def run(self, call: Callable[[], None]) -> Work:
        """Run a call in a thread."""
        return self._background.begin(call)

    def bucket_plan(self) -> BucketPlan:
        """Return the buckets for the measured link between hosts."""
        return self._bucket_plan

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor that is summed without a copy: shared by the ranks of a host."""
        return (
            torch.empty(length, dtype=dtype)
            if self._shared_memory is None
            else self._shared_memory.empty(length, dtype)
        )

    def describe(self) -> list[str]:
        """Return lines of text: the hosts, and the algorithm for each message size."""
        where = f"{self.size} ranks on {self._hosts.count} host{'s' * (self._hosts.count != 1)}"
        order = f", ring of hosts {' '.join(map(str, self._hosts.order))}" if self._hosts.count > 2 else ""
        return [where + order, *map(str, self.choices), f"gradients: {self._bucket_plan}" + self._sums_beside()]

    def _sums_beside(self) -> str:
        if not self._bucket_plan.beside:
            return ""
        over = (
            "our own connections" if self._tcp_ring is not None else "MPI, because hosts do not reach each other by TCP"
        )
        return f", between hosts over {over}"

    def plan(self) -> object:
        """Return the algorithm per size, and the numbers of ranks and hosts, as JSON values."""
        where = [self.size, self._hosts.count]
        return {"where": where, "algorithms": [[choice.up_to_bytes, choice.name] for choice in self.choices]}

    def follow(self, plan: object) -> None:
        """Use an earlier plan if ranks and hosts are the same, to continue to the same bits."""
        match plan:
            case {"where": [self.size, self._hosts.count], "algorithms": [*algorithms]} if algorithms and all(
                n in self._algorithms for _, n in algorithms
            ):
                self.choices = [AlgorithmChoice(up_to_bytes, name, {}) for up_to_bytes, name in algorithms]

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Copy the tensor of `root` to every rank."""
        check_contiguous(tensor)
        host = tensor.detach().cpu().view(-1)
        for piece in host.view(torch.uint8).split(BROADCAST_BYTES):
            self._comm.Bcast([piece.numpy(), self._mpi.BYTE], root)
        if tensor.device.type != "cpu":
            tensor.copy_(host.view(tensor.shape))

    def all_to_all(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return each rank's piece for this one."""
        mine = pieces[self.rank]
        found = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)]
        self._swap({rank: piece for rank, piece in enumerate(pieces) if rank != self.rank}, found)
        return found

    def all_gather(self, piece: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        """Return each rank's piece."""
        found = [
            piece if rank == self.rank else torch.empty(length, dtype=torch.uint8)
            for rank, length in enumerate(lengths)
        ]
        self._swap({rank: piece for rank in range(self.size) if rank != self.rank}, found)
        return found

    def _swap(self, outgoing: dict[int, torch.Tensor], incoming: list[torch.Tensor]) -> None:
        """Send a piece to each rank and receive one from each, nearest neighbours first."""
        requests = []
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            requests.append(self._comm.Irecv([incoming[source].numpy(), self._mpi.BYTE], source, SWAP_TAG))
            requests.append(self._comm.Isend([outgoing[target].numpy(), self._mpi.BYTE], target, SWAP_TAG))
        self._mpi.Request.Waitall(requests)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._comm.Barrier()

    def all_gather_object(self, value: object) -> list[Any]:
        """Return every rank's value, by rank."""
        return gather_over_mpi(self._comm, value)

    def abort(self, code: int) -> None:
        """End all ranks at once."""
        self._mpi.COMM_WORLD.Abort(code)
        os._exit(code)

    def close(self) -> None:
        """Free the group; MPI itself ends with the process."""
        if not self._closed:
            self._closed = True
            if self._staging is not None:
                self._staging.close()
            self._background.close()
            if self._tcp_ring is not None:
                self._tcp_ring.close()
            if self._shared_memory is not None:
                self._shared_memory.free()
            self._hosts.free()
            self._comm.Free()


Begin = Callable[[torch.Tensor, Callable[[], None] | None], Work]


class Copy(Protocol):
    """A copy that is under way."""

    def wait(self) -> None:
        """Wait on the host until the copy is done."""

    def join(self) -> None:
        """Make later work of the device wait for the copy."""


class Device(Protocol):
    """Copies between a device and its host."""

    def memory(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory on the host for a flat tensor."""

    def fetch(self, source: torch.Tensor, into_host: torch.Tensor) -> Copy:
        """Copy to the host, after earlier work of the device."""

    def put(self, host: torch.Tensor, into: torch.Tensor) -> Copy:
        """Copy to the device."""


class Staged(Work):
    """A sum of a tensor on a device."""

    fetching: Work  # at its end `summing` is set, and at the end of that `back`
    summing: Work
    back: Copy

    def __init__(self, then: Callable[[], None] | None) -> None:
        super().__init__()
        self._then = then

    def wait(self) -> None:
        self.fetching.wait()
        self.summing.wait()
        self.back.join()
        if self._then is not None:
            self._then()


class Staging:
    """Sums tensors of one device on its host; `begin` sums in the background."""

    def __init__(self, device: Device, begin: Begin) -> None:
        self._device, self._begin = device, begin
        self._memory: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._background = Background()

    def begin(self, tensor: torch.Tensor, then: Callable[[], None] | None = None) -> Work:
        """Sum `tensor` (contiguous, on the device) over all ranks; `then` is called in `wait`."""
        flat_L = tensor.detach().view(-1)
        host_L = self._host_of(flat_L)
        fetched, work = self._device.fetch(flat_L, host_L), Staged(then)
        work.fetching = self._background.begin(lambda: self._sum(fetched, host_L, flat_L, work))
        return work

    def close(self) -> None:
        """End the thread."""
        self._background.close()

    def _sum(self, fetched: Copy, host_L: torch.Tensor, flat_L: torch.Tensor, work: Staged) -> None:
        fetched.wait()

        def put_back() -> None:
            work.back = self._device.put(host_L, flat_L)

        work.summing = self._begin(host_L, put_back)

    def _host_of(self, flat_L: torch.Tensor) -> torch.Tensor:
        key = (flat_L.data_ptr(), flat_L.numel(), flat_L.dtype)
        host_L = self._memory.get(key)
        if host_L is None:
            host_L = self._memory[key] = self._device.memory(flat_L)
        return host_L


class Cuda:
    """A CUDA device, with a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def memory(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)

    def fetch(self, source: torch.Tensor, into_host: torch.Tensor) -> Copy:
        self._out.wait_stream(torch.cuda.current_stream(source.device))
        return _copy(self._out, source, source, into_host)

    def put(self, host: torch.Tensor, into: torch.Tensor) -> Copy:
        return _copy(self._in, into, host, into)


class _CudaCopy:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        self._event.synchronize()

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


def _copy(stream: torch.cuda.Stream, there: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> Copy:
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        there.record_stream(stream)
        event = torch.cuda.Event()
        event.record(stream)
    return _CudaCopy(event, there.device)


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
