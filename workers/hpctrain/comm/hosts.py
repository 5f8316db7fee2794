"""The hosts of the ranks, their order in a ring, and TCP connections between neighbours.

Ranks share a host if they share memory, name and network: namespaces of one kernel that stand for several hosts count as
several.  One rank of each host, its leader, communicates with other hosts.
Every host listens for a moment, and sends its addresses and a secret over MPI.  Both sides prove that they have it, and the
job's key (`hpctrain.peers`), so that an address that several hosts have (a bridge of containers, loopback) leads to the right
host or to none.  The connecting side's proof is last: after a late answer it has already tried again on another connection.
Rules: the order is that of ranks unless links differ; then the slowest link in use is as fast as possible.  Every rank
computes the order from the same facts.  All or none: if one pair cannot connect, MPI's connections are used.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from hpctrain.comm.tcp_ring import TcpRing
from hpctrain.peers import job_key, keyed, prove_as_guest, prove_as_host, tunnel
from hpctrain.values import broadcast_over_mpi, gather_over_mpi, travels

PROBE_BYTES = 256 << 10
PROBES = 3
UNLIKE = 1.5  # links whose speeds differ by less than this factor count as equal
MOST_ORDERED = 8  # hosts; with more hosts there are too many orders
TAG = 78


class Hosts:
    """The ranks of this host (`here`), and on leaders all leaders in ring order (`leaders`)."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        reach = comm.Split_type(mpi.COMM_TYPE_SHARED)
        names = gather_over_mpi(reach, identity())
        self.here = reach.Split(names.index(identity()), comm.Get_rank())
        reach.Free()
        self.is_leader = self.here.Get_rank() == 0
        leaders = comm.Split(0 if self.is_leader else mpi.UNDEFINED, comm.Get_rank())
        self.count: int = broadcast_over_mpi(self.here, leaders.Get_size() if self.is_leader else None)
        self.leaders = self._in_order(leaders) if self.is_leader else None
        self.order: list[int] = broadcast_over_mpi(self.here, self._order if self.is_leader else None)

    def free(self) -> None:
        """Free the communicators; all ranks call it."""
        self.here.Free()
        if self.leaders is not None:
            self.leaders.Free()

    def _in_order(self, leaders: Any) -> Any:
        """Return the leaders, numbered so that neighbours have fast links."""
        self._order = list(range(leaders.Get_size()))
        if 3 < leaders.Get_size() <= MOST_ORDERED:  # rings of three have the same links in any order
            self._order = best_ring(link_speeds(self._mpi, leaders))
        ordered = leaders.Split(0, self._order.index(leaders.Get_rank()))
        leaders.Free()
        return ordered


def identity() -> tuple[str, str, str]:
    """Return the identity of this process's host: boot, name and network."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    return (
        boot.read_text().strip() if boot.exists() else "",
        socket.gethostname(),
        os.readlink(network) if network.is_symlink() else "",
    )


def link_speeds(mpi: Any, comm: Any) -> list[list[float]]:
    """Return bytes per second between each two ranks (ranks, ranks), measured in pairs."""
    size, rank = comm.Get_size(), comm.Get_rank()
    mine = [0.0] * size
    outgoing, incoming = np.zeros(PROBE_BYTES, np.uint8), np.zeros(PROBE_BYTES, np.uint8)
    for round_number in range(1, size + size % 2):
        partner = _partner(rank, round_number, size + size % 2)
        comm.Barrier()
        if partner >= size or partner == rank:
            continue
        best_s = float("inf")
        for _ in range(PROBES):
            started_s = time.perf_counter()
            comm.Sendrecv([outgoing, mpi.BYTE], partner, TAG, [incoming, mpi.BYTE], partner, TAG)
            best_s = min(best_s, time.perf_counter() - started_s)
        mine[partner] = PROBE_BYTES / best_s
    both = gather_over_mpi(comm, mine)
    return [[min(both[a][b], both[b][a]) for b in range(size)] for a in range(size)]


def best_ring(speeds: Sequence[Sequence[float]]) -> list[int]:
    """Return the order of ranks in a ring whose slowest link is fastest.

    Unchanged if that gains little.
    """
    size = len(speeds)
    plain = list(range(size))

    def slowest(order: Sequence[int]) -> float:
        return min(speeds[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True))

    best = max(([0, *rest] for rest in itertools.permutations(range(1, size))), key=slowest)
    return best if slowest(best) > UNLIKE * slowest(plain) else plain


def _partner(rank: int, round_number: int, size: int) -> int:
    """Return the partner in a round of a tournament (the circle method; even size)."""
    last = size - 1
    if rank == last:
        return round_number * (size // 2) % last
    partner = (round_number - rank) % last
    return last if partner == rank else partner


MEET_S = 5.0
TRY_S = 1.0
NAP_S = 0.02
SECRET_BYTES = 16
SIOCGIFADDR = 0x8915
VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "lo")  # interfaces to try last


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The addresses and port of a listening host, and the key of both ends."""

    addresses: tuple[str, ...]
    port: int
    key: bytes
    encrypted: bool = False


def connect_ring(mpi: Any, comm: Any) -> TcpRing | None:
    """Connect the ranks of `comm`, one per host, in a ring. All of them call it.

    None: some could not connect.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    with socket.create_server(("", 0), backlog=16) as listener:
        offer = Offer(
            addresses=tuple(own_addresses()),
            port=listener.getsockname()[1],
            key=os.urandom(SECRET_BYTES),
        )
        # MPI's own connections may be overheard: the job's key is not sent over them.
        offers = [replace(one, key=keyed(job_key(os.environ), one.key)) for one in gather_over_mpi(comm, offer)]
        found: list[socket.socket] = []
        until_s = time.monotonic() + MEET_S
        waiter = threading.Thread(target=await_left, args=(listener, offers[rank], until_s, found))
        waiter.start()
        right = reach(offers[(rank + 1) % size], until_s)
        waiter.join()
    met = right is not None and bool(found)
    if all(gather_over_mpi(comm, met)):
        assert right is not None
        return TcpRing(rank, size, to_right=right, from_left=found[0])
    if right is not None:
        right.close()
    for connection in found:
        connection.close()
    return None


def bound_store(address: str, size: int | None, timeout: timedelta) -> dist.TCPStore:
    """Return a store of torch that listens on one address.

    By itself it listens on all, and it asks no key of anybody.
    """
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, size, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def own_addresses() -> list[str]:
    """Return this host's IPv4 addresses, those of real networks first."""
    return list(interfaces())


def interfaces() -> dict[str, str]:
    """Return the interface of each IPv4 address of this host, real networks first."""
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in sorted(socket.if_nameindex(), key=lambda interface: interface[1].startswith(VIRTUAL)):
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # the interface has no address
            names[socket.inet_ntoa(answer[20:24])] = name
    return names


def await_left(
    listener: socket.socket,
    offer: Offer,
    until_s: float,
    found: list[socket.socket],
    is_given_up: Callable[[], bool] = lambda: False,
) -> None:
    """Accept connections until one proves that it has the key, and put it into `found`."""
    listener.settimeout(NAP_S)
    while not found and not is_given_up() and time.monotonic() < until_s:
        try:
            peer, _ = listener.accept()
        except TimeoutError:
            continue
        peer.settimeout(TRY_S)
        session = prove_as_host(peer, offer.key, encrypted=offer.encrypted)
        if session is not None:
            tune(peer)
            found.append(tunnel(peer, session))
        else:
            peer.close()


def reach(
    offer: Offer, until_s: float, is_given_up: Callable[[], bool] = lambda: False, hello: bytes = b""
) -> socket.socket | None:
    """Return a connection to the host that made the offer; tries its addresses in turn.

    `hello` is sent before the proof, to a host that accepts several connections.
    """
    while True:
        for address in offer.addresses:
            if is_given_up() or time.monotonic() > until_s:
                return None
            try:
                peer = socket.create_connection((address, offer.port), TRY_S)
            except OSError:
                continue
            with suppress(OSError):  # another program's port, or a slow peer
                peer.sendall(hello)
                session = prove_as_guest(peer, offer.key, encrypted=offer.encrypted)
                if session is not None:
                    tune(peer)
                    return tunnel(peer, session)
            peer.close()
        time.sleep(NAP_S)


def tune(connection: socket.socket) -> None:
    """Set options for a steady stream between neighbours.

    An option that the system refuses is skipped.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for algorithm in _STEADY:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm)
        except OSError:
            continue
        return


# BBR paces by timers, which costs the computing core more than it gains on a short link.
_STEADY: Sequence[bytes] = (b"cubic", b"reno")
