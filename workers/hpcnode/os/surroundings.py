"""What jobs find on a machine besides hardware: time zone, accounts, mounts, limits, MPI.

The head and its nodes compare these. Each is bounded: a mount that hangs costs MOUNT_S. Names of accounts leave the machine
as hashes only, because everybody may see the facts of a node.

Sources: proc(5), passwd(5), statvfs(3), getrlimit(2).
"""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import time
from typing import Any, Dict, List, Tuple

from hpcnode.os import process

MOUNT_S = 1.0  # for all mounts together
MPI_S = 2.0
MAX_MOUNTS = 32
MAX_ACCOUNTS = 2000
FIRST_USER, NOBODY = 1000, 65534
_KINDS = "nfs nfs4 cifs smb3 smbfs lustre ceph beegfs gpfs glusterfs afs 9p ncpfs fuse"
_FUSE_KINDS = "fuse.sshfs fuse.ceph fuse.glusterfs fuse.s3fs fuse.rclone"
NETWORK = frozenset((_KINDS + " " + _FUSE_KINDS).split())


def surroundings(root: str) -> Dict[str, Any]:
    """Return what jobs find on this machine. Unknown facts are missing.

    `root`: the agent's directory.
    """
    now_s = time.time()
    found: Dict[str, Any] = {
        "zone_s": time.localtime(now_s).tm_gmtoff,
        "zone": zone_name(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "accounts": {hash_of(name): uid for name, uid in accounts().items()},
        "mounts": network_mounts(),
        "mpi": mpi_version(),
        "limits": limits(),
        **software(),
    }
    try:
        info = os.statvfs(root)
        found.update(inodes=info.f_files, inodes_free=info.f_favail)
    except OSError:
        pass
    try:
        info = os.statvfs("/dev/shm")  # noqa: S108 - only its free space is looked at
        found["shm_free_mib"] = info.f_bavail * info.f_frsize >> 20
    except OSError:
        pass
    return found


def limits() -> Dict[str, int]:
    """Return the highest limits that a process can set; -1: none."""
    names = {
        "open files": "NOFILE",
        "locked memory": "MEMLOCK",
        "core files": "CORE",
        "stack": "STACK",
    }
    found = {}
    for name, word in names.items():
        value = resource.getrlimit(getattr(resource, "RLIMIT_" + word))[1]
        found[name] = -1 if value == resource.RLIM_INFINITY else value
    return found


def software(root: str = "/") -> Dict[str, str]:
    """Return versions and settings that programs depend on. Unknown ones are missing."""
    found = {}
    try:
        found["libc"] = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        pass  # another C library
    for name, path, pattern in (
        ("system", "etc/os-release", r'^PRETTY_NAME="?([^"\n]+)'),
        ("driver", "proc/driver/nvidia/version", r"Kernel Module\s+(?:for \S+\s+)?([0-9.]+)"),
        ("cuda", "usr/local/cuda/version.json", r'"cuda"\s*:\s*{[^}]*"version"\s*:\s*"([0-9.]+)"'),
        ("governor", "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", r"(\w+)"),
        ("huge_pages", "sys/kernel/mm/transparent_hugepage/enabled", r"\[(\w+)\]"),
    ):
        try:
            with open(os.path.join(root, path), errors="replace") as file:
                match = re.search(pattern, file.read(1 << 16), re.MULTILINE)
        except OSError:
            continue
        if match:
            found[name] = match.group(1)[:100]
    return found


def mpi_version() -> str:
    """Return what mpirun prints first about its version; "" if it is not there or hangs."""
    _status, output = process.output_of(["mpirun", "--version"], MPI_S)
    lines = [line.strip() for line in output[:4096].splitlines()]
    version = next((line for line in lines if line.startswith("Version:")), "")  # of MPICH, after a line without it
    return " ".join(" ".join(filter(None, [lines[0] if lines else "", version])).split())[:100]


def zone_name() -> str:
    """Return the name of the time zone, such as Europe/Berlin; "" if it is not known."""
    target = os.path.realpath("/etc/localtime")
    _, found, name = target.partition("/zoneinfo/")
    return name if found else ""


def accounts(path: str = "/etc/passwd") -> Dict[str, int]:
    """Return the accounts of ordinary users in a file. No name service is asked."""
    found: Dict[str, int] = {}
    try:
        with open(path, errors="replace") as file:
            for line in file.readlines(1 << 20)[:MAX_ACCOUNTS]:
                words = line.split(":")
                uid = (
                    int(words[2]) if len(words) > 2 and words[2].isdigit() and len(words[2]) < 11 else 0
                )  # int: bounded
                if FIRST_USER <= uid < NOBODY:
                    found[words[0]] = uid
    except OSError:
        pass
    return found


def hash_of(name: str) -> str:
    """Return the hash by which two machines compare an account's name."""
    import hashlib  # in a child; see `agent` on the cost of imports

    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def accounts_by_hash() -> Dict[str, Tuple[str, int]]:
    """Return names and uids of this machine's accounts by the hashes that machines compare."""
    return {hash_of(name): (name, uid) for name, uid in accounts().items()}


def network_mounts(path: str = "/proc/self/mounts") -> List[Dict[str, str]]:
    """Return the mounts of other machines and programs: point, kind, state (ok, hung, stale)."""
    rows: List[Tuple[str, str]] = []
    try:
        with open(path, errors="surrogateescape") as file:
            for line in file:
                words = line.split()
                if len(words) > 2 and words[2] in NETWORK:
                    rows.append((words[1].replace("\\040", " "), words[2]))
    except OSError:
        pass
    rows = rows[-MAX_MOUNTS:]
    states = states_of([point for point, _ in rows])
    return [
        {"point": os.fsencode(point).decode("utf-8", "replace"), "kind": kind, "state": state}
        for (point, kind), state in zip(rows, states)
    ]


def states_of(points: List[str], limit_s: float = MOUNT_S) -> List[str]:
    """Return the state of each mount. A child looks at each, and is abandoned if it hangs."""
    pipes = [_asked(point) for point in points]
    answers = {fd: "hung" for fd, _ in pipes}
    waiting, until_s = set(answers), time.monotonic() + limit_s
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, until_s - time.monotonic()))
        if not ready:
            break
        for fd in ready:
            answers[fd] = "stale" if os.read(fd, 1) == b"s" else "ok"
            waiting.discard(fd)
    for fd, pid in pipes:
        os.close(fd)
        if answers[fd] == "hung":
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(pid, os.WNOHANG if answers[fd] == "hung" else 0)
        except ChildProcessError:
            pass
    return [answers[fd] for fd, _ in pipes]


def _asked(point: str) -> Tuple[int, int]:
    """Fork a child that looks at a mount; return the pipe of its answer, and its pid."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return ours, pid
    answer = b"s"
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.statvfs(point)
        answer = b"o"
    except PermissionError:
        answer = b"o"  # it answers
    except OSError:
        pass
    finally:
        os.write(theirs, answer)
        os._exit(0)
