"""TCP connections between neighbours in the ring of hosts.

Every host listens for a moment and says over MPI at which addresses, with a secret; who connects shows the secret and is
shown another, so that an address that several hosts have (a bridge of containers, loopback) leads to the right one or to none.
Who connects says at last that it is still there: who was answered too late has tried again, on another connection.
Rules: all or none: if one pair cannot meet, nobody has connections, and MPI's are used.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.comm.tcp_ring import Wire

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
    """Where a host listens."""

    addresses: tuple[str, ...]
    port: int
    secret: bytes
    answer: bytes


def connect_ring(mpi: Any, comm: Any) -> Wire | None:
    """This will connect the ranks of `comm`, one on each host, in a ring; all of them call it. None: some could not meet."""
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
        for one in (right, found[0]):
            tune(one)
        return Wire(rank, size, to_right=right, from_left=found[0])
    if right is not None:
        right.close()
    for one in found:
        one.close()
    return None


def own_addresses() -> list[str]:
    """This will list this host's IPv4 addresses, those of real networks first."""
    return list(interfaces())


def interfaces() -> dict[str, str]:
    """This will name the interface of each of this host's IPv4 addresses, those of real networks first."""
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in sorted(socket.if_nameindex(), key=lambda one: one[1].startswith(VIRTUAL)):
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            names[socket.inet_ntoa(answer[20:24])] = name
    return names


def await_left(
    listener: socket.socket,
    offer: Offer,
    until_s: float,
    found: list[socket.socket],
    is_given_up: Callable[[], bool] = lambda: False,
) -> None:
    """Put the connection of the one who knows the secret into `found`."""
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
    """The connection to the one who made an offer; each of its addresses is tried again and again."""
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
            peer.close()  # somebody else's port, or one who is slow
        time.sleep(NAP_S)


def _send(peer: socket.socket, content: bytes) -> bool:
    try:
        peer.sendall(content)
    except OSError:
        return False  # it is gone
    return True


def _receive(peer: socket.socket, length: int) -> bytes:
    """So many bytes, or fewer if the peer takes too long or ends."""
    peer.settimeout(TRY_S)
    got = b""
    try:
        while len(got) < length and (part := peer.recv(length - len(got))):
            got += part
    except OSError:
        pass
    return got


def tune(one: socket.socket) -> None:
    """Set what suits a steady stream between neighbours; what the system refuses stays as it is."""
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for algorithm in _STEADY:
        try:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm)
        except OSError:
            continue
        return


# Pacing by timers (BBR) costs the core that computes more than it gives on a short link.
_STEADY: Sequence[bytes] = (b"cubic", b"reno")
