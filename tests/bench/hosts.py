"""Several hosts on one machine: network namespaces on a bridge, each link shaped to a rate by `tbf`. Needs root and iproute2.

Ranks of MPICH start in them through a remote shell that enters the namespace instead of another machine.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

SUBNET = "10.213.7"
# MPICH takes ranks of one kernel for one host, whatever their network: only TCP, as between machines.
TCP_ONLY = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}


def can_make_hosts() -> bool:
    """Return whether this process may make network namespaces."""
    return os.geteuid() == 0 and subprocess.run(["ip", "-V"], capture_output=True, check=False).returncode == 0


@contextmanager
def hosts(count: int, mbit_per_s: int, folder: Path) -> Iterator[list[str]]:
    """Make `count` namespaces on links of a rate, and give their addresses. `folder` gets the remote shell."""
    tag = _tag(folder)
    bridge = f"{tag}b"
    spaces = [space_of(folder, at) for at in range(count)]
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for at, space in enumerate(spaces):
            _add(space, f"{tag}v{at}", bridge, f"{SUBNET}.{at + 1}", mbit_per_s)
        shell = folder / "enter"
        shell.write_text(_shell(tag))
        shell.chmod(shell.stat().st_mode | stat.S_IXUSR)
        yield [f"{SUBNET}.{at + 1}" for at in range(count)]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def space_of(folder: Path, at: int) -> str:
    """Return the name of the namespace that is host `at`, counted from 0."""
    return f"{_tag(folder)}n{at}"


def set_link(folder: Path, at: int, state: str) -> None:
    """Set the link of host `at` "up" or "down": a cable that is pulled, of which the host itself is not told."""
    _run("ip", "link", "set", f"{_tag(folder)}v{at}", state)


def mpirun(addresses: Sequence[str], folder: Path, *arguments: str | Path) -> list[str]:
    """Return the command that runs Python with these arguments, a rank on each address."""
    first = space_of(folder, 0)
    launcher = ["-launcher", "ssh", "-launcher-exec", str(folder / "enter"), "-iface", "eth0"]
    where = [*launcher, "-hosts", ",".join(addresses), "-ppn", "1"]
    return ["ip", "netns", "exec", first, *_mpirun(len(addresses), where, arguments)]


def mpirun_here(count: int, *arguments: str | Path) -> list[str]:
    """Return the command that runs Python with these arguments on `count` ranks of this host."""
    return _mpirun(count, [], arguments)


def run(command: Sequence[str], extra: Mapping[str, str] | None = None, limit_s: float = 300.0) -> str:
    """Run `command` to its end and return what it printed."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"} | dict(extra or {})
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} failed: {done.stdout}{done.stderr}")
    return done.stdout


def _mpirun(count: int, where: Sequence[str], arguments: Sequence[str | Path]) -> list[str]:
    program = str(Path(sys.executable).with_name("mpirun"))
    return [program, *where, "-n", str(count), sys.executable, *map(str, arguments)]


def _tag(folder: Path) -> str:
    """What the names of interfaces begin with: another for each folder, as the kernel takes its time to forget a name."""
    return f"hb{zlib.crc32(str(folder).encode()):08x}"


def _add(space: str, veth: str, bridge: str, address: str, mbit_per_s: int) -> None:
    _run("ip", "netns", "add", space)
    _run("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", space)
    _run("ip", "link", "set", veth, "master", bridge, "up")
    inside = ("ip", "-n", space)
    _run(*inside, "link", "set", "lo", "up")
    _run(*inside, "addr", "add", f"{address}/24", "dev", "eth0")
    _run(*inside, "link", "set", "eth0", "up")
    shape = ("tbf", "rate", f"{mbit_per_s}mbit", "burst", "256kb", "latency", "50ms")
    _run("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", *shape)


def _shell(tag: str) -> str:
    """What hydra takes for ssh: the last arguments are the address and the command."""
    return f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
address=$1
shift
exec ip netns exec {tag}n$((${{address##*.}} - 1)) sh -c "$*"
"""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
