"""Which spool this is: an id that no other directory has, on this machine or on another one.

    ROOT/spool/identity   {"id": 32 random hex digits, "upgraded": whether a version without identities has used the spool before}

The controller remembers for each launch the spool that it was sent to. The inventory of another spool proves nothing about
it: the launch may still run, at a directory or on a machine to which the node's name does not lead any more.

A copied directory, and one that several machines see through a network file system, are other spools: so the machine's id and
the file's inode are parts of the identity, and nothing needs to be written anew. `hardware` says which machine this is by more
than /etc/machine-id, which is equal on machines that were copied from one image. It is empty where nothing else can be found out
(in a container, say). The controller keeps hashes of these values, never the values.

Rules: the file is made once, by link(2). It is whole or absent after a crash at any moment, and never replaced.
Source: machine-id(5).
"""

from __future__ import annotations

import os
from typing import Any, Dict, Iterator, List, Mapping, Optional

from hpcnode.os.durable import read_object, sync_folder, to_bytes, write_all

NAME = "identity"
MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")
NETWORK = "/sys/class/net"
PRODUCT_UUID = "/sys/class/dmi/id/product_uuid"


def identity_of(spool: str, environ: Mapping[str, str]) -> Dict[str, Any]:
    """Return the identity of the spool directory; make it if there is none. Raises OSError."""
    path = os.path.join(spool, NAME)
    record = read_object(path)
    if record is None:
        make_identity(spool)
        record = read_object(path) or {}
    return {
        "id": record.get("id", ""),
        "upgraded": record.get("upgraded", False),
        "inode": os.stat(path).st_ino,
        "machine": machine_id(environ),
        "hardware": hardware(environ),
    }


def make_identity(spool: str) -> None:
    """Make the file, durably; one that another process has made meanwhile stays. Raises OSError."""
    path = os.path.join(spool, NAME)
    upgraded = os.path.exists(os.path.join(os.path.dirname(spool), "epochs"))
    data = to_bytes({"id": os.urandom(16).hex(), "upgraded": upgraded})
    temporary = "%s.%s" % (path, os.urandom(8).hex())
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            os.link(temporary, path, follow_symlinks=False)
        except FileExistsError:
            pass
        except OSError:
            os.rename(temporary, path)  # a file system without second names; the agent's lock keeps others away
    finally:
        _unlink(temporary)
    sync_folder(spool)


def machine_id(environ: Mapping[str, str]) -> str:
    """Return what /etc/machine-id says, or the host's name where there is none.

    HPCNODE_MACHINE_ID is for machines that are simulated on one.
    """
    if environ.get("HPCNODE_MACHINE_ID"):
        return environ["HPCNODE_MACHINE_ID"]
    for path in MACHINE_IDS:
        found = _read(path)
        if found:
            return found
    return "host " + os.uname().nodename


def hardware(environ: Mapping[str, str]) -> List[str]:
    """Return what the firmware and the network devices say of the machine; empty if nothing does."""
    if environ.get("HPCNODE_MACHINE_ID"):
        return ["simulated"]
    return [mark for mark in (_read(PRODUCT_UUID), *sorted(_addresses())) if mark]


def _addresses() -> Iterator[str]:
    """Yield the addresses of network devices that are more than software."""
    try:
        names = os.listdir(NETWORK)
    except OSError:
        return
    for name in names:
        if os.path.exists(os.path.join(NETWORK, name, "device")):
            yield _read(os.path.join(NETWORK, name, "address")) or ""


def _read(path: str) -> Optional[str]:
    try:
        with open(path) as file:
            return file.readline(256).strip()
    except (OSError, ValueError):
        return None


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
