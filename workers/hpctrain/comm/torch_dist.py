"""A group of ranks over torch.distributed: Gloo on CPUs, NCCL on GPUs.

Rules: every group has its own prefix in the rendezvous store, so that a restarted group never reads an old address.  Under
mpirun the store's address comes over MPI; else from MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.comm.base import Background, BucketPlan, Plain, Work, check_contiguous, gather_over
from hpctrain.comm.hosts import NAP_S, TRY_S, bound_store, identity, interfaces, own_addresses
from hpctrain.comm.mpi import load_mpi
from hpctrain.env import LauncherKind, RankInfo
from hpctrain.errors import TrainError
from hpctrain.values import broadcast_over_mpi, gather_over_mpi

TIMEOUT = timedelta(minutes=10)
MEET_S = 60.0  # hosts may be slow to start
MEET = timedelta(seconds=MEET_S)
NCCL_BUCKET_BYTES = 25 << 20
GLOO_BUCKET_BYTES = 4 << 20


class _CollectiveWork(Work):
    """A collective of torch.distributed."""

    def __init__(self, asked: dist.Work, then: Callable[[], None] | None) -> None:
        super().__init__()
        self._asked, self._then = asked, then

    def wait(self) -> None:
        self._asked.wait()
        if self._then is not None:
            self._then()


class TorchCommunicator(Plain):
    """A torch.distributed group of all ranks.

    By default NCCL if each rank has its own GPU, else Gloo.
    """

    def __init__(self, backend: str | None, place: RankInfo, environ: Mapping[str, str]) -> None:
        if not dist.is_available() or (backend == "nccl" and not dist.is_nccl_available()):
            raise TrainError(f"cannot use {backend}: this build of torch ({torch.__version__}) does not have it")
        bare_store, rank, size, reached = _store_for(place, environ)
        life = environ.get("TORCHELASTIC_RESTART_COUNT", "0") + "." + environ.get("HPCSCHED_ATTEMPT", "0")
        store = dist.PrefixStore(f"hpctrain.{life}", bare_store)
        self.name = backend or _agreed_backend(store, rank, size, place)
        self._device = _device_for(self.name, place)
        _choose_interface(store, rank, size, reached)
        dist.init_process_group(self.name, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        self.rank = rank
        self.size = size
        self._background = Background()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks, in place; the backend's ring gives every rank the same bits."""
        check_contiguous(tensor)
        there = tensor.detach().to(self._device)
        dist.all_reduce(there)
        if there.device != tensor.device:
            tensor.copy_(there)

    def begin(self, tensor: torch.Tensor, then: Callable[[], None] | None = None, *, own_part: bool = False) -> Work:
        """Sum in the backend's own threads or streams."""
        check_contiguous(tensor)
        if tensor.device != self._device:
            return self._background.begin(lambda: self._sum_then(tensor, then))
        return _CollectiveWork(dist.all_reduce(tensor.detach(), async_op=True), then)

    def _sum_then(self, tensor: torch.Tensor, then: Callable[[], None] | None) -> None:
        self.all_reduce(tensor)
        if then is not None:
            then()

    def run(self, call: Callable[[], None]) -> Work:
        """Run a call in a thread."""
        return self._background.begin(call)

    def bucket_plan(self) -> BucketPlan:
        """Return DDP's bucket size for NCCL, and less for Gloo, to use a slow link early."""
        return BucketPlan(bucket_bytes=NCCL_BUCKET_BYTES if self.name == "nccl" else GLOO_BUCKET_BYTES, beside=True)

    def describe(self) -> list[str]:
        """Return the backend's name and size as text."""
        return [f"{self.size} ranks over {self.name}"]

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Copy the tensor of `root` to every rank."""
        check_contiguous(tensor)
        there = tensor.detach().to(self._device)
        dist.broadcast(there, src=root)
        if there.device != tensor.device:
            tensor.copy_(there)

    def all_to_all(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return each rank's piece for this one."""
        return self._swapped(pieces, [pieces[self.rank].numel()] * self.size)

    def all_gather(self, piece: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        """Return each rank's piece."""
        return self._swapped([piece] * self.size, lengths)

    def _swapped(self, pieces: list[torch.Tensor], lengths: list[int]) -> list[torch.Tensor]:
        """Send a piece to each rank and receive one from each, on the backend's device."""
        found = [torch.empty(length, dtype=torch.uint8, device=self._device) for length in lengths]
        found[self.rank].copy_(pieces[self.rank])
        others = [rank for rank in range(self.size) if rank != self.rank]
        calls = [dist.P2POp(dist.irecv, found[rank], rank) for rank in others]
        calls += [dist.P2POp(dist.isend, pieces[rank].to(self._device), rank) for rank in others]
        for request in dist.batch_isend_irecv(calls) if calls else []:
            request.wait()
        return [part.to(pieces[self.rank].device) for part in found]

    def barrier(self) -> None:
        """Wait for all ranks."""
        flag = torch.zeros(1, device=self._device)
        dist.all_reduce(flag)
        flag.item()

    def all_gather_object(self, value: object) -> list[Any]:
        """Return every rank's value, by rank."""
        return gather_over(self, value)

    def close(self) -> None:
        """Leave the group."""
        self._background.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _agreed_backend(store: dist.Store, rank: int, size: int, place: RankInfo) -> str:
    able = dist.is_nccl_available() and _gpu_of(place) < torch.cuda.device_count()
    store.set(f"own-gpu/{rank}", "yes" if able else "no")
    answers = {store.get(f"own-gpu/{r}") for r in range(size)}
    return "nccl" if answers == {b"yes"} else "gloo"


def _device_for(backend: str, place: RankInfo) -> torch.device:
    if backend != "nccl":
        return torch.device("cpu")
    count, own = torch.cuda.device_count(), _gpu_of(place)
    if own >= count:
        raise TrainError(
            f"cannot use nccl: local rank {place.local_rank} has no GPU of its own; this host shows {count}"
        )
    torch.cuda.set_device(own)
    return torch.device("cuda", own)


def _gpu_of(place: RankInfo) -> int:
    """Return this rank's GPU among those that the process sees.

    The first if the scheduler shows one only.
    """
    return 0 if place.own_gpu else place.local_rank


def _choose_interface(store: dist.Store, rank: int, size: int, reached: str) -> None:
    """Make Gloo offer the address by which hosts reach each other.

    A host's name often leads to loopback.

    `reached`: the address at which this rank reached the first one.
    """
    store.set(f"where/{rank}", json.dumps([*identity(), reached]))
    addresses = [json.loads(store.get(f"where/{r}")) for r in range(size)]
    first_address = next((address for *host, address in addresses if host != addresses[0][:-1]), "")
    if not (first_address and reached):
        return  # one host, or no IPv4
    own_address = first_address if addresses[rank][:-1] == addresses[0][:-1] else _own_address_towards(reached)
    if own_address in (names := interfaces()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[own_address])  # torch has no other setting for it


def _own_address_towards(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # UDP: sends nothing
        return probe.getsockname()[0]


def _store_for(place: RankInfo, environ: Mapping[str, str]) -> tuple[dist.Store, int, int, str]:
    """Return the store, rank, world size and IPv4 address of the store ("": IPv6)."""
    if place.launcher is LauncherKind.MPI:
        return _store_over_mpi()
    if place.launcher is LauncherKind.NOBODY:
        return bound_store("127.0.0.1", 1, TIMEOUT), 0, 1, "127.0.0.1"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise TrainError(
            f"cannot meet the other ranks: {' and '.join(missing)} not set; start under torchrun, hrun or mpirun"
        )
    store, rank, size = next(dist.rendezvous("env://", place.rank, place.world, timeout=TIMEOUT))
    try:
        return store, rank, size, socket.gethostbyname(environ["MASTER_ADDR"])
    except OSError:
        return store, rank, size, ""  # IPv6 only


def _store_over_mpi() -> tuple[dist.Store, int, int, str]:
    """Open a store at an address of the first rank that every host reaches."""
    world = load_mpi().COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    store: dist.Store | None
    where = gather_over_mpi(world, identity())
    secret = os.urandom(16)
    if rank == 0:
        if all(host == where[0] for host in where):
            own = bound_store("127.0.0.1", size, TIMEOUT)
        else:
            own = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        own.set("secret", secret)  # type: ignore[arg-type]  # bytes work; torch's stubs know str only
        broadcast_over_mpi(world, (own_addresses(), own.port, secret))
        store, reached = own, "127.0.0.1"
    else:
        addresses, port, secret = broadcast_over_mpi(world, None)
        store, reached = _reach_store(["127.0.0.1"] if where[rank] == where[0] else addresses, port, secret)
    all_reached = gather_over_mpi(world, reached)
    if store is None or "" in all_reached:
        raise TrainError(
            f"cannot meet over torch.distributed: rank {all_reached.index('')} reaches none of the addresses of rank 0; "
            "let hosts connect to each other on all ports, or use --backend mpi"
        )
    return store, rank, size, reached


def _reach_store(addresses: list[str], port: int, secret: bytes) -> tuple[dist.Store | None, str]:
    """Return the store at the first address that is the right one, and the address."""
    until_s = time.monotonic() + MEET_S
    while True:
        for address in addresses:
            try:
                with socket.create_connection((address, port), TRY_S):
                    pass  # torch's store retries for long
                store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=MEET)
                if store.get("secret") == secret:
                    store.set_timeout(TIMEOUT)
                    return store, address
            except (OSError, dist.DistError):
                continue
        if time.monotonic() > until_s:
            return None, ""
        time.sleep(NAP_S)
