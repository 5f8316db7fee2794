"""`hpcsched node wake`, `node discover`: machines that are switched off, or no nodes yet.

A machine is woken by a magic packet with the address of its network card, which `node add` and
`node probe` write into its file. Candidates for nodes are found in what this machine knows already,
and by asking mDNS; ports are tried only on demand. Nothing is logged in to, and nothing is added.

What other machines answer is not trusted: it is bounded, and cleaned before it is shown.

Sources: RFC 6762 (mDNS), RFC 6763 (DNS-SD), RFC 1035.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import click

from hpcsched import client
from hpcsched.cli.admin.sync import node
from hpcsched.cli.output import print_json
from hpcsched.config.keys import BadValue, host, mac_address
from hpcsched.config.load import Config, load_config
from hpcsched.errors import NotFoundError, RequestError, UnavailableError
from hpcsched.launch.wake_on_lan import interfaces, is_ipv4, send_magic
from hpcsched.listing.text import clean, columns
from hpcsched.model.node import Link, NodeSpec
from hpcsched.model.units import nearest, parse_time_s
from hpcsched.paths import find_config_dir

LOOK_S = 0.3


# ----- waking


@node.command()
@click.argument("name")
@click.option("--mac", metavar="MAC", default="", help="Address of its network card. Default: that of the node's file.")
@click.option(
    "--to", metavar="ADDRESS[:PORT]", default="", help="Send to this address. Default: all networks of the head."
)
@click.option("--wait", metavar="TIME", help="Wait so long until the node answers the controller.")
def wake(name: str, mac: str, to: str, wait: str | None) -> None:
    """Switch on a node by a magic packet (Wake-on-LAN)."""
    config = load_config(find_config_dir(os.environ, os.getuid()))
    spec = _spec_of(config, name)
    try:
        mac = mac_address(mac) or spec.mac
    except BadValue as error:
        raise RequestError(f"cannot wake {name}: --mac {error}") from None
    if not mac:
        raise RequestError(
            f"cannot wake {name}: the address of its network card is not known. When it is up: hpcsched node probe {name}; or "
            "give it with --mac, or as mac = in its file"
        )
    limit_s = parse_time_s(wait, whole_minutes=False) if wait is not None else 0
    for where in send_magic(mac, to):
        click.echo(f"sent the packet for {mac} to {where}")
    if limit_s != 0:
        _await(name, limit_s)
        click.echo(f"{name} is up")


def _spec_of(config: Config, name: str) -> NodeSpec:
    known = [str(spec.name) for spec in config.nodes]
    found = next((spec for spec in config.nodes if spec.name == name), None)
    if found is None:
        raise NotFoundError(f"cannot wake {name[:60]!r}: there is no node of that name{nearest(name, known)}")
    return found


def _await(name: str, limit_s: float | None) -> None:
    until_s = None if limit_s is None else time.monotonic() + limit_s
    while True:
        views = {view["name"]: view for view in client.call("GET", "/v1/nodes")["nodes"]}
        view = views.get(name, {"link": "", "link_why": "it was removed"})
        if view["link"] == Link.UP:
            return
        if until_s is not None and time.monotonic() > until_s:
            raise UnavailableError(
                f"{name} does not answer: {clean(view['link_why'])}. Is Wake-on-LAN on in its firmware, and for its network "
                "card (ethtool: Wake-on g)? A card on Wi-Fi is rarely woken"
            )
        time.sleep(LOOK_S)


# ----- candidates

MOST_CANDIDATES = 1024
MOST_SCANNED = 1024  # addresses: a /22
AT_ONCE = 64
CONNECT_S = 1.0
BANNER_BYTES = 255
MOST_FILE_BYTES = 1 << 20
MDNS = ("224.0.0.251", 5353)
MDNS_S = 1.5
MOST_ANSWERS = 256
MOST_RECORDS = 64  # of an answer
MOST_JUMPS = 16  # of a compressed name
_SERVICES = ("_ssh._tcp.local", "_sftp-ssh._tcp.local", "_workstation._tcp.local")
_A, _PTR, _SRV = 1, 12, 33


@dataclass(slots=True)
class NewMachine:
    """A machine that may become a node."""

    host: str
    port: int = 22
    mac: str = ""
    found_by: list[str] = field(default_factory=list)
    says: str = ""  # its SSH server, when it was asked

    @property
    def target(self) -> str:
        """Return the argument of `hpcsched node add`."""
        return self.host if self.port == 22 else f"{self.host}:{self.port}"


@node.command()
@click.option("--scan", metavar="NETWORK", default="", help="Try port 22 of all addresses, at most a /22: 10.0.0.0/24.")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=22, show_default=True, help="The port that --scan tries."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def discover(scan: str, port: int, as_json: bool) -> None:
    """Find machines that could become nodes. It adds none, and logs in to none.

    It looks into known_hosts and the table of neighbours, and asks mDNS.
    """
    config = load_config(find_config_dir(os.environ, os.getuid()))
    known_hosts = [Path("~/.ssh/known_hosts").expanduser(), Path("/etc/ssh/ssh_known_hosts")]
    found = [*from_known_hosts(known_hosts), *from_arp(Path("/proc/net/arp")), *from_mdns(MDNS, MDNS_S)]
    if scan:
        found += from_scan(scan, port)
    candidates = new_machines(found, config.nodes, [one.address for one in interfaces()])
    if as_json:
        names = ("host", "port", "mac", "found_by", "says", "target")
        print_json({"version": 1, "candidates": [{name: getattr(one, name) for name in names} for one in candidates]})
        return
    if not candidates:
        click.echo(
            "No new machines found." + ("" if scan else " To try a network: hpcsched node discover --scan 10.0.0.0/24")
        )
        return
    rows = [[one.target, one.mac or "-", ",".join(one.found_by), clean(one.says)] for one in candidates]
    click.echo(columns(["HOST", "MAC", "FOUND BY", "SERVER"], rows), nl=False)
    for one in candidates:
        click.echo(f"to add: hpcsched node add {one.target}")


def new_machines(found: Iterable[NewMachine], nodes: Sequence[NodeSpec], own: Iterable[str]) -> list[NewMachine]:
    """Return the candidates that are neither nodes nor this machine, each once."""
    taken = {*own, "localhost", "127.0.0.1", "::1", socket.gethostname()}
    taken |= {spec.host for spec in nodes}
    places = {(spec.host, spec.port or 22) for spec in nodes}
    macs = {spec.mac for spec in nodes if spec.mac}
    machines: dict[tuple[str, int], NewMachine] = {}
    for one in found:
        is_node = (one.host, one.port) in places or (one.host in taken and one.port == 22) or one.mac in macs
        if is_node or len(machines) >= MOST_CANDIDATES:
            continue
        known = machines.setdefault((one.host, one.port), one)
        known.found_by = list(dict.fromkeys([*known.found_by, *one.found_by]))
        known.mac, known.says = known.mac or one.mac, known.says or one.says
    return list(machines.values())


def from_known_hosts(paths: Iterable[Path]) -> Iterator[NewMachine]:
    """Yield the hosts of known_hosts that can be read: hashed names and patterns cannot."""
    for path in paths:
        for line in _text(path).splitlines():
            words = line.split()
            if len(words) < 3 or line.startswith(("#", "@")):
                continue
            for name in words[0].split(",")[:8]:
                bare, _, port = name.removeprefix("[").partition("]:") if name.startswith("[") else (name, "", "22")
                if _is_host(bare) and port.isdigit() and len(port) < 6:
                    yield NewMachine(bare, int(port), found_by=["known_hosts"])


def from_arp(path: Path) -> Iterator[NewMachine]:
    """Yield the neighbours that have answered, from /proc/net/arp."""
    for line in _text(path).splitlines()[1:]:
        words = line.split()
        if len(words) >= 6 and is_ipv4(words[0]) and words[2].startswith("0x") and words[3] != "00:00:00:00:00:00":
            yield NewMachine(words[0], mac=words[3].lower(), found_by=[f"neighbour on {clean(words[5])[:15]}"])


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MOST_FILE_BYTES).decode("utf-8", "replace")
    except OSError:  # it need not be there
        return ""


def _is_host(text: str) -> bool:
    try:
        host(text)
    except BadValue:
        return False
    return True


def from_mdns(group: tuple[str, int], limit_s: float) -> list[NewMachine]:
    """Return the machines that offer SSH by mDNS, as they answer within `limit_s`."""
    query = struct.pack("!6H", 0, 0, len(_SERVICES), 0, 0, 0)
    query += b"".join(_encoded(name) + struct.pack("!2H", _PTR, 1) for name in _SERVICES)
    found: list[NewMachine] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
        sources = [one.address for one in interfaces()]
        until_s, answers = time.monotonic() + limit_s, 0
        for source in sources:
            try:
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(source))
                sock.sendto(query, group)
            except OSError:  # this network has no route for it
                continue
        while answers < MOST_ANSWERS and (left_s := until_s - time.monotonic()) > 0:
            if select.select([sock], [], [], left_s)[0]:
                data, sender = sock.recvfrom(9000)
                answers += 1
                found += from_mdns_answer(data, sender[0])
    return found


def from_mdns_answer(data: bytes, sender: str) -> list[NewMachine]:
    """Return the machine that an mDNS answer is of; [] if it offers no SSH or is malformed."""
    try:
        records = list(_records(data))
    except (struct.error, IndexError, ValueError):
        return []
    offers = [name for name, kind, _ in records if kind == _PTR and name.lower() in _SERVICES]
    if not offers:
        return []
    ports = [struct.unpack_from("!H", data, at + 4)[0] for name, kind, at in records if kind == _SRV and "ssh" in name]
    return [NewMachine(sender, ports[0] if ports and ports[0] else 22, found_by=["mDNS"])]


def _records(data: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield name, type and the place of the content of each record. Raises on malformed data."""
    _, flags, questions, *counts = struct.unpack_from("!6H", data)
    if not flags & 0x8000:
        return
    at = 12
    for _ in range(min(questions, MOST_RECORDS)):
        _, at = _name(data, at)
        at += 4
    for _ in range(min(sum(counts), MOST_RECORDS)):
        name, at = _name(data, at)
        kind, _, _, size = struct.unpack_from("!HHIH", data, at)
        if at + 10 + size > len(data):
            raise ValueError("cut off")
        yield name, kind, at + 10
        at += 10 + size


def _name(data: bytes, at: int) -> tuple[str, int]:
    """Return the name at a place, and the place after it."""
    labels, after, jumps = [], 0, 0
    while size := data[at]:
        if size >= 0xC0:
            after, jumps = after or at + 2, jumps + 1
            if jumps > MOST_JUMPS:
                raise ValueError("a name that does not end")
            at = (size & 0x3F) << 8 | data[at + 1]
            continue
        labels.append(data[at + 1 : at + 1 + size].decode("utf-8", "replace"))
        at += 1 + size
        if len(labels) > 128:
            raise ValueError("a name that does not end")
    return ".".join(labels), after or at + 1


def _encoded(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def from_scan(network: str, port: int) -> list[NewMachine]:
    """Return the machines of a network on which an SSH server answers. Raises RequestError."""
    try:
        addresses = ipaddress.ip_network(network, strict=False)
    except ValueError:
        raise RequestError(f"cannot scan {network[:60]!r}: give a network as 10.0.0.0/24") from None
    if addresses.num_addresses > MOST_SCANNED:
        raise RequestError(f"cannot scan {addresses}: it has more than {MOST_SCANNED} addresses; scan a /22 or less")
    hosts = [str(address) for address in addresses.hosts()]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        banners = threads.map(lambda address: _banner(address, port), hosts)
        pairs = zip(hosts, banners, strict=True)
        return [NewMachine(address, port, found_by=["scan"], says=says) for address, says in pairs if says]


def _banner(address: str, port: int) -> str:
    """Return what the SSH server of an address says of itself; "": there is none."""
    until_s, data = time.monotonic() + 2 * CONNECT_S, b""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as sock:
            while b"\n" not in data and len(data) < BANNER_BYTES and time.monotonic() < until_s:
                part = sock.recv(BANNER_BYTES - len(data))
                if not part:
                    break
                data += part
    except OSError:
        pass  # nothing there, or nothing said: what came counts
    line = data.partition(b"\n")[0].decode("ascii", "replace").strip()
    return clean(line) if line.startswith("SSH-") else ""
