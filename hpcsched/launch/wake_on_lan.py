"""Wake machines by a magic packet with the address of their network card (Wake-on-LAN).

Knows no node and no configuration. Sources: netdevice(7), AMD publication 20213 (magic packet).
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from typing import NamedTuple

from hpcsched.errors import RequestError, UnavailableError

WAKE_PORT = 9
PACKETS = 3  # of each: UDP may lose some
_SIOCGIFADDR, _SIOCGIFBRDADDR = 0x8915, 0x8919


class Interface(NamedTuple):
    """An interface of this machine with an IPv4 address; `broadcast` "": it has none."""

    name: str
    address: str
    broadcast: str


def interfaces() -> list[Interface]:
    """Return the interfaces of this machine that have an IPv4 address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            address, broadcast = (_address(sock, name, what) for what in (_SIOCGIFADDR, _SIOCGIFBRDADDR))
            if address:
                found.append(Interface(name, address, "" if broadcast in ("0.0.0.0", address) else broadcast))  # noqa: S104
    return found


def _address(sock: socket.socket, name: str, what: int) -> str:
    try:
        answer = fcntl.ioctl(sock.fileno(), what, struct.pack("256s", name.encode()[:15]))
    except OSError:  # the interface has no such address
        return ""
    return socket.inet_ntoa(answer[20:24])


def magic_packet(mac: str) -> bytes:
    """Return the packet that wakes the network card of this address."""
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "")) * 16


def send_magic(mac: str, to: str = "") -> list[str]:
    """Send the packet to `to`, ADDRESS[:PORT], or into all networks of this machine.

    Return where it was sent. Raises RequestError, UnavailableError.
    """
    if to:
        address, _, port = to.partition(":")
        if not is_ipv4(address) or (port and not (port.isdigit() and len(port) < 6 and 0 < int(port) < 65536)):
            raise RequestError(
                f"cannot send to {to[:60]!r}: give an IPv4 address, for example 192.168.1.255 or 10.0.0.7:9"
            )
        targets = [("", (address, int(port or WAKE_PORT)))]
    else:
        targets = [
            (one.address, (address, WAKE_PORT))
            for one in interfaces()
            for address in ("255.255.255.255", one.broadcast)
            if one.broadcast and address
        ]
    sent, why = [], "no interface has a broadcast address"
    for source, target in targets:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                if source:
                    sock.bind((source, 0))
                for _ in range(PACKETS):
                    sock.sendto(magic_packet(mac), target)
            sent.append(f"{target[0]} from {source}" if source else target[0])
        except OSError as error:
            why = f"{target[0]}: {error.strerror}"
    if not sent:
        raise UnavailableError(f"cannot send the packet: {why}; say where to with --to ADDRESS")
    return sent


def is_ipv4(text: str) -> bool:
    """Return whether the text is an IPv4 address."""
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True
