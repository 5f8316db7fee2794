"""The hosts of the ranks, their order in a ring, and TCP connections between neighbours.

Ranks share a host if they share memory, name and network: namespaces of one kernel that stand for several hosts count as
several.  One rank of each host, its leader, communicates with other hosts.
Every host listens for a moment, and sends its addresses and a secret over MPI.  The connecting side shows the secret and gets
another one, so that an address that several hosts have (a bridge of containers, loopback) leads to the right host or to none.
It confirms at last that it is still there: after a late answer it has already tried again on another connection.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.comm.tcp_ring import TcpRing

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
        names = reach.allgather(identity())
        self.here = reach.Split(names.index(identity()), comm.Get_rank())
        reach.Free()
        self.is_leader = self.here.Get_rank() == 0
        leaders = comm.Split(0 if self.is_leader else mpi.UNDEFINED, comm.Get_rank())
        self.count: int = self.here.bcast(leaders.Get_size() if self.is_leader else None)
        self.leaders = self._in_order(leaders) if self.is_leader else None
        self.order: list[int] = self.here.bcast(self._order if self.is_leader else None)

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
    both = comm.allgather(mine)
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
    """Return the partner in round `round_number` of a tournament (the circle method; even size)."""
    last = size - 1
    if rank == last:
        return round_number * (size // 2) % last
    partner = (round_number - rank) % last
    return last if partner == rank else partner


MEET_S = 5.0
TRY_S = 1.0
NAP_S = 0.02
SECRET_BYTES = 16
STILL_HERE = b"\1"
BUFFER_BYTES = 4 << 20
SIOCGIFADDR = 0x8915
VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "lo")  # interfaces to try last


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The addresses, port and secrets of a listening host."""

    addresses: tuple[str, ...]
    port: int
    secret: bytes
    answer: bytes


def connect_ring(mpi: Any, comm: Any) -> TcpRing | None:
    """Connect the ranks of `comm`, one per host, in a ring. All of them call it.

    None: some could not connect.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    with socket.create_server(("", 0), backlog=16) as listener:
        offer = Offer(
            addresses=tuple(own_addresses()),
            port=listener.getsockname()[1],
            secret=os.urandom(SECRET_BYTES),
            answer=os.urandom(SECRET_BYTES),
        )
        offers = comm.allgather(offer)
        found: list[socket.socket] = []
        until_s = time.monotonic() + MEET_S
        waiter = threading.Thread(target=await_left, args=(listener, offer, until_s, found))
        waiter.start()
        right = reach(offers[(rank + 1) % size], until_s)
        waiter.join()
    met = right is not None and bool(found)
    if comm.allreduce(int(met), mpi.MIN):
        assert right is not None
        for connection in (right, found[0]):
            tune(connection)
        return TcpRing(rank, size, to_right=right, from_left=found[0])
    if right is not None:
        right.close()
    for connection in found:
        connection.close()
    return None


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
    """Accept connections until one shows the secret, and put it into `found`."""
    listener.settimeout(NAP_S)
    while not found and not is_given_up() and time.monotonic() < until_s:
        try:
            peer, _ = listener.accept()
        except TimeoutError:
            continue
        if _receive(peer, SECRET_BYTES) == offer.secret and _send(peer, offer.answer) and _receive(peer, 1):
            found.append(peer)
        else:
            peer.close()


def reach(offer: Offer, until_s: float, is_given_up: Callable[[], bool] = lambda: False) -> socket.socket | None:
    """Return a connection to the host that made the offer; tries its addresses in turn."""
    while True:
        for address in offer.addresses:
            if is_given_up() or time.monotonic() > until_s:
                return None
            try:
                peer = socket.create_connection((address, offer.port), TRY_S)
            except OSError:
                continue
            if _send(peer, offer.secret) and _receive(peer, SECRET_BYTES) == offer.answer and _send(peer, STILL_HERE):
                return peer
            peer.close()  # another program's port, or a slow peer
        time.sleep(NAP_S)


def _send(peer: socket.socket, content: bytes) -> bool:
    try:
        peer.sendall(content)
    except OSError:
        return False  # the peer is gone
    return True


def _receive(peer: socket.socket, length: int) -> bytes:
    """Return `length` bytes, or fewer if the peer takes too long or ends."""
    peer.settimeout(TRY_S)
    got = b""
    try:
        while len(got) < length and (part := peer.recv(length - len(got))):
            got += part
    except OSError:
        pass
    return got


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
