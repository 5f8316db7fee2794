"""The link between two nodes: round-trip time, rates, loss, path MTU, and both interfaces.

    rtt_us rtt_p99_us   of one byte over TCP; median and 99th percentile
    up_mbps down_mbps   payload in Mbit/s, to the listening node and from it; 941 of 1000 on Ethernet
    lost                part of the segments to the listening node that were sent again
    mtu                 of the path, as TCP found it; 0: not known
    near far            the interfaces of the measuring and the listening node, see `interface_to`

One node listens on a port that the kernel chooses, for one peer and at most LISTEN_S. A peer proves the key of this one
measurement: each end sends a nonce, and the HMAC of both nonces by the key. Others get a nonce, and are closed. All sizes and
times are bounded, also if the other end is hostile. The first part of a transfer does not count, because TCP starts slowly.

Sources: RFC 5681 (slow start); RFC 2104 (HMAC); tcp(7) (TCP_INFO, TCP_NOTSENT_LOWAT); rtnetlink(7).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import time
from typing import Any, Dict, List, Optional, Tuple

from hpcnode.os import process

LISTEN_S = 20  # from listening to the end of all
CONNECT_S = 3.0
PATIENCE_S = 4.0  # for each answer of the other end
STREAM_S, WARM_UP_S = 0.45, 0.15
LONGEST_STREAM_S = 4 * STREAM_S
PINGS, LEAST_PINGS, PINGS_S = 300, 10, 0.25
NONCE_BYTES = PROOF_BYTES = 32
MOST_UNPROVEN = 32  # connections at a time; the oldest is closed
CHUNK_BYTES = 1 << 18
UNSENT_BYTES = 1 << 17  # in the send buffer: more would be sent long after the time is over on a slow link
MAX_REPORT_BYTES = 1 << 10
PING, UPLOAD = b"p", b"u"


def link_facts(key: str, host: str, port: int) -> Dict[str, Any]:
    """Return the `link_port` of a new listener, or the `link` to the one at `host`.

    Raises OSError, ValueError.
    """
    return {"link": measure(host, port, key)} if host else {"link_port": listen(key)}


def listen(key: str) -> int:
    """Fork a listener for a peer with the key; return its port. Raises OSError."""
    with _listener() as listener:
        port: int = listener.getsockname()[1]
        if os.fork() == 0:
            try:
                os.setsid()
                signal.alarm(LISTEN_S)
                process.close_all_but([listener.fileno()])
                serve(listener, key)
            finally:
                os._exit(0)
    return port


def _listener() -> socket.socket:
    """Return a socket that listens on all addresses of this node, IPv4 and IPv6."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError:
            pass  # the kernel has IPv6 disabled
    return socket.create_server(("", 0))


# ----- the listening node


def serve(listener: socket.socket, key: str, for_s: float = LISTEN_S) -> None:
    """Answer the pings of one peer with the key, count what it sends, and send as long.

    Raises OSError, ValueError.
    """
    connection = _proven(listener, key, time.monotonic() + for_s)
    if connection is None:
        return
    with connection:
        for _ in range(PINGS + 1):
            word = _exactly(connection, 1)
            if word != PING:
                break
            connection.sendall(PING)
        if word != UPLOAD:
            raise ValueError("the peer does not speak this protocol")
        report = {"mbps": _counted(connection), "far": interface_to(connection.getpeername()[0])}
        connection.sendall(json.dumps(report).encode()[: MAX_REPORT_BYTES - 1] + b"\n")
        _stream(connection)


def _proven(listener: socket.socket, key: str, until_s: float) -> Optional[socket.socket]:
    """Return the first connection that proves the key, None if none does in time.

    A connection that says nothing does not keep others waiting.
    """
    unproven: Dict[socket.socket, Tuple[bytes, bytes]] = {}  # our nonce, what came
    try:
        while until_s > time.monotonic():
            ready, _, _ = select.select([listener, *unproven], [], [], max(0.0, until_s - time.monotonic()))
            for one in ready:
                if one is listener:
                    _greet(listener, unproven)
                elif one in unproven:
                    nonce, came = unproven.pop(one)
                    came = came + _received(one, NONCE_BYTES + PROOF_BYTES - len(came))
                    if _is_proof(key, nonce, came):
                        one.settimeout(PATIENCE_S)
                        one.sendall(_proof(key, b"listener", nonce, came[:NONCE_BYTES]))
                        return one
                    if 0 < len(came) < NONCE_BYTES + PROOF_BYTES:
                        unproven[one] = (nonce, came)
                    else:
                        one.close()
        return None
    finally:
        for one in unproven:
            one.close()


def _greet(listener: socket.socket, unproven: Dict[socket.socket, Tuple[bytes, bytes]]) -> None:
    connection, _ = listener.accept()
    _prepare(connection)
    connection.setblocking(False)
    nonce = os.urandom(NONCE_BYTES)
    if len(unproven) >= MOST_UNPROVEN:
        oldest = next(iter(unproven))
        del unproven[oldest]
        oldest.close()
    try:
        connection.send(nonce)
    except OSError:
        connection.close()
        return
    unproven[connection] = (nonce, b"")


def _received(connection: socket.socket, most: int) -> bytes:
    """Return what came, b"" at the end of the connection."""
    try:
        return connection.recv(most)
    except OSError:
        return b""


def _is_proof(key: str, nonce: bytes, came: bytes) -> bool:
    import hmac  # in a child; see `agent` on the cost of imports

    theirs, proof = came[:NONCE_BYTES], came[NONCE_BYTES:]
    return len(proof) == PROOF_BYTES and hmac.compare_digest(proof, _proof(key, b"peer", nonce, theirs))


def _proof(key: str, side: bytes, nonce: bytes, peers: bytes) -> bytes:
    import hmac  # in a child; see `agent` on the cost of imports

    return hmac.new(key.encode(), side + nonce + peers, "sha256").digest()


# ----- the measuring node


def measure(host: str, port: int, key: str) -> Dict[str, Any]:
    """Return what the module names of the link to the listener at `host`.

    Raises OSError, ValueError.
    """
    with socket.create_connection((host, port), CONNECT_S) as connection:
        connection.settimeout(PATIENCE_S)
        _prepare(connection)
        _prove(connection, key)
        rtts_us = _pings(connection)
        connection.sendall(UPLOAD)
        sent = _stream(connection)
        connection.shutdown(socket.SHUT_WR)
        try:
            line = _line(connection)
        except socket.timeout:
            raise ValueError("small packets pass and large ones do not: compare the MTU of both ends") from None
        info = tcp_info(connection)
        report = json.loads(line)
        down = _counted(connection)
    found: Dict[str, Any] = {
        "rtt_us": _quantile(rtts_us, 0.5),
        "rtt_p99_us": _quantile(rtts_us, 0.99),
        "up_mbps": report["mbps"],
        "down_mbps": down,
        "lost": round(info["retransmitted"] * info["mss"] / max(sent, 1), 5),
        "mtu": info["mtu"],
        "near": interface_to(host_of(host, port)),
        "far": report["far"],
    }
    return found


def host_of(host: str, port: int) -> str:
    """Return the address of a host name. Raises OSError."""
    return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])


def _prove(connection: socket.socket, key: str) -> None:
    nonce = _exactly(connection, NONCE_BYTES)
    ours = os.urandom(NONCE_BYTES)
    connection.sendall(ours + _proof(key, b"peer", nonce, ours))
    import hmac  # in a child; see `agent` on the cost of imports

    try:
        answer = _exactly(connection, PROOF_BYTES)
    except (OSError, ValueError):
        answer = b""
    if not hmac.compare_digest(answer, _proof(key, b"listener", nonce, ours)):
        raise ValueError("the program at this port does not know the key of this measurement")


def _pings(connection: socket.socket) -> List[float]:
    until_s = time.monotonic() + PINGS_S
    found: List[float] = []
    while len(found) < PINGS and (len(found) < LEAST_PINGS or time.monotonic() < until_s):
        began_s = time.perf_counter()
        connection.sendall(PING)
        _exactly(connection, 1)
        found.append(1e6 * (time.perf_counter() - began_s))
    return found


# ----- both


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def _stream(connection: socket.socket) -> int:
    """Send zeros for STREAM_S; return how many bytes."""
    zeros = memoryview(bytes(CHUNK_BYTES))
    sent, until_s = 0, time.monotonic() + STREAM_S
    while time.monotonic() < until_s:
        sent += connection.send(zeros)
    return sent


def _counted(connection: socket.socket, warm_up_s: float = WARM_UP_S) -> float:
    """Return the Mbit/s that arrive until the other end stops.

    Raises OSError, ValueError.
    """
    buffer = bytearray(CHUNK_BYTES)
    came, first_s, last_s = 0, 0.0, 0.0
    counted_from_s: Optional[float] = None  # None: TCP still warms up
    while True:
        count = connection.recv_into(buffer)
        if not count:
            break
        last_s = time.monotonic()
        first_s = first_s or last_s
        if last_s - first_s > LONGEST_STREAM_S:
            raise ValueError("the other end sends for too long")
        if counted_from_s is not None:
            came += count
        elif last_s - first_s >= warm_up_s:
            counted_from_s = last_s
    if counted_from_s is None or last_s <= counted_from_s:
        raise ValueError("too little came through within %g s" % STREAM_S)
    return max(0.01, round(came * 8 / 1e6 / (last_s - counted_from_s), 2))


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Return this many bytes. Raises OSError, ValueError if the connection ends before."""
    came = b""
    while len(came) < size:
        more = connection.recv(size - len(came))
        if not more:
            raise ValueError("the other end closed the connection")
        came += more
    return came


def _line(connection: socket.socket) -> bytes:
    """Return the report of the listener. Raises OSError, ValueError."""
    came = b""
    while not came.endswith(b"\n"):
        if len(came) >= MAX_REPORT_BYTES:
            raise ValueError("its report is too long")
        came += _exactly(connection, 1)
    return came


def _quantile(values: List[float], part: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, round(part * (len(ordered) - 1)))], 1)


_TCP_INFO = struct.Struct("8B24I")


def tcp_info(connection: socket.socket) -> Dict[str, int]:
    """Return segment size, path MTU and segments sent again, as the kernel counts them."""
    raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    words = _TCP_INFO.unpack(raw.ljust(_TCP_INFO.size, b"\0"))[8:]
    return {"mss": words[2], "mtu": words[13], "retransmitted": words[23]}


# ----- which interface leads to a peer, and what it is

_RTM_GETROUTE, _NLM_F_REQUEST, _RTA_DST, _RTA_OIF, _RTM_NEWROUTE = 26, 1, 1, 4, 24
WIFI, WIRED, VIRTUAL = "wifi", "wired", "virtual"
MOST_LOWER = 8


def interface_to(address: str, net: str = "/sys/class/net") -> Dict[str, Any]:
    """Return what is known of the interface that leads to an address.

    device, kind (wired, wifi, virtual), speed_mbps, mtu, duplex. Unknown facts are missing.
    """
    try:
        return interface(device_to(address), net)
    except (OSError, ValueError, struct.error):
        return {}


def interface(device: str, net: str = "/sys/class/net") -> Dict[str, Any]:
    """Return the facts of an interface. A bridge, bond or VLAN is what is below it."""
    found: Dict[str, Any] = {"device": device, "kind": _kind(device, net)}
    speed, mtu, duplex = (_text("%s/%s/%s" % (net, device, name)) for name in ("speed", "mtu", "duplex"))
    for name, text in (("speed_mbps", speed), ("mtu", mtu)):  # Wi-Fi has no speed, or -1
        number = int(text) if text.isdigit() and len(text) < 10 else 0  # int: bounded
        if number:
            found[name] = number
    if duplex in ("half", "full"):
        found["duplex"] = duplex
    return found


def _kind(device: str, net: str, depth: int = 0) -> str:
    path = os.path.join(net, device)
    if any(os.path.exists(os.path.join(path, name)) for name in ("wireless", "phy80211")):
        return WIFI
    if os.path.exists(os.path.join(path, "device")):
        return WIRED
    try:
        lower = sorted(name[6:] for name in os.listdir(path) if name.startswith("lower_"))[:MOST_LOWER]
    except OSError:
        lower = []
    kinds = {_kind(name, net, depth + 1) for name in lower} if depth < 3 else set()
    return WIFI if WIFI in kinds else WIRED if WIRED in kinds else VIRTUAL


def device_to(address: str) -> str:
    """Return the interface by which the kernel would send to an IP address.

    Raises OSError, ValueError.
    """
    mapped = address[7:] if address.startswith("::ffff:") and "." in address else address
    bare = mapped.partition("%")[0]
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    target = socket.inet_pton(family, bare)
    body = struct.pack("8BI", family, 8 * len(target), *([0] * 6), 0)
    body += struct.pack("HH", 4 + len(target), _RTA_DST) + target
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.settimeout(1.0)
        kernel.send(struct.pack("IHHII", 16 + len(body), _RTM_GETROUTE, _NLM_F_REQUEST, 1, 0) + body)
        answer = kernel.recv(1 << 14)
    length, kind = struct.unpack_from("IH", answer)
    at = 16 + 12
    while kind == _RTM_NEWROUTE and at + 8 <= min(length, len(answer)):
        size, attribute = struct.unpack_from("HH", answer, at)
        if attribute == _RTA_OIF:
            return socket.if_indextoname(struct.unpack_from("I", answer, at + 4)[0])
        at += max(4, (size + 3) & ~3)
    raise ValueError("no route leads to %s" % address)


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read(100).strip()
    except (OSError, ValueError):
        return ""
