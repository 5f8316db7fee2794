"""Processes as Linux tells of them: who they are, what is below them, and how to signal exactly the one that was meant.

A process is (pid, start time in ticks, boot id). A pid alone never drives a kill: it may have come round again.
Everything that asks /proc, pidfds or prctl is here (cgroups are in `cgroup`), so that another system can be added beside it.
It does not know what jobs are.

Sources: proc(5), pidfd_open(2), prctl(2), setsid(2), clock_gettime(2).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import signal
import time
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Set

NO_PROCESS = frozenset({errno.EAGAIN, errno.ENOMEM})  # of fork(2): this node, or our account on it, can have no more

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
PR_SET_CHILD_SUBREAPER = 36


class Identity(NamedTuple):
    """One process, for ever: a pid that comes round again has another start time or another boot id."""

    pid: int
    ticks: int
    boot_id: str


class Stat(NamedTuple):
    """What /proc/PID/stat says that we need."""

    state: str
    parent: int
    session: int
    ticks: int
    rss_pages: int


def boot_clock_s() -> float:
    """Return seconds since boot, time asleep included: what limits and leases are counted on."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id(environ: Mapping[str, str]) -> str:
    """Return this boot's id. `HPCNODE_BOOT_ID` overrides it where one machine poses as several."""
    given = environ.get("HPCNODE_BOOT_ID")
    if given:
        return given
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def read_stat(pid: int) -> Optional[Stat]:
    """Return what /proc says of `pid`, or None if there is no such process."""
    try:
        text = read_file("/proc/%d/stat" % pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(b")")[2].split()  # the name in front may hold anything
    return Stat(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]), int(fields[21]))


def read_file(path: str) -> bytes:
    """Return what a small file of /proc says. Raises OSError. Not by `open`, which asks four things before it reads."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def identify(pid: int, boot: str) -> Optional[Identity]:
    """Return the identity of a process that exists now, or None."""
    stat = read_stat(pid)
    return None if stat is None else Identity(pid, stat.ticks, boot)


def is_alive(who: Identity, boot: str) -> bool:
    """Return whether this very process still runs (a zombie does not)."""
    if who.boot_id != boot:
        return False
    stat = read_stat(who.pid)
    return stat is not None and stat.ticks == who.ticks and stat.state not in "ZX"


def send_signal(who: Identity, boot: str, signum: int) -> bool:
    """Signal this very process; return whether it was there."""
    if who.boot_id != boot:
        return False
    try:
        pidfd = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return False
    except OSError:
        pidfd = -1  # a kernel before 5.3: the comparison below is then as near as one gets
    try:
        if not is_alive(who, boot):
            return False
        if pidfd < 0:
            os.kill(who.pid, signum)
        else:
            signal.pidfd_send_signal(pidfd, signum)
        return True
    except ProcessLookupError:
        return False
    finally:
        if pidfd >= 0:
            os.close(pidfd)


def all_processes() -> Dict[int, Stat]:
    """Return every process that /proc shows."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = read_stat(int(name))
            if stat is not None:
                found[int(name)] = stat
    return found


def is_named(words: bytes) -> bool:
    """Return whether a process, other than this one, has `words` in its command line."""
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and int(name) != os.getpid() and words in read_file("/proc/%s/cmdline" % name):
                return True
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            pass  # it has ended, or is hidden from us: then it is none of ours
    return False


def descendants(roots: Iterable[int], table: Optional[Mapping[int, Stat]] = None) -> List[int]:
    """Return the living processes below `roots` (not themselves), parents before their children."""
    known = all_processes() if table is None else table
    below: Dict[int, List[int]] = {}
    for pid, stat in known.items():
        below.setdefault(stat.parent, []).append(pid)
    found: List[int] = []
    seen: Set[int] = set(roots)
    todo = list(seen)
    while todo:
        for pid in below.get(todo.pop(), ()):
            if pid not in seen:
                seen.add(pid)
                todo.append(pid)  # below a zombie too: its threads may live on
                if known[pid].state not in "ZX":
                    found.append(pid)
    return found


def quick_descendants(root: int) -> List[int]:
    """Return the processes below `root` by the kernel's lists of children: cheap, but one may be missed meanwhile."""
    found: List[int] = []
    todo = [root]
    while todo:
        children = children_of(todo.pop())
        found += children
        todo += children
    return found


def children_of(pid: int) -> List[int]:
    """Return the children of a process, [] if it is gone."""
    found: List[int] = []
    try:
        for task in os.listdir("/proc/%d/task" % pid):
            with open("/proc/%d/task/%s/children" % (pid, task), "rb") as file:
                found += [int(word) for word in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        pass  # gone; or a kernel without these lists
    return found


def name_of(pid: int) -> str:
    """Return what the kernel calls a process (comm), "" if it is gone."""
    try:
        with open("/proc/%d/comm" % pid) as file:
            return file.read().rstrip("\n")
    except OSError:
        return ""


def set_name(name: str) -> None:
    """Have the kernel, and so ps and top, call this process `name` (its first 15 characters)."""
    try:
        with open("/proc/self/comm", "w") as file:
            file.write(name)
    except OSError:
        pass  # a /proc that cannot be written: then ps shows the interpreter's name


def signal_all(pids: Iterable[int], signum: int) -> int:
    """Signal each of the pids that exists, and return how many were reached. For processes just seen, below ourselves."""
    reached = 0
    for pid in pids:
        try:
            os.kill(pid, signum)
            reached += 1
        except (ProcessLookupError, PermissionError):
            pass  # PermissionError: it became another user by a set-uid program; nothing we can do as this one
    return reached


def stop_all_below_us() -> None:
    """Stop every process below, also those that fork meanwhile, within a bounded number of rounds."""
    seen: Set[int] = set()
    for _ in range(20):
        pids = set(descendants([os.getpid()])) - seen
        if not pids:
            return
        signal_all(pids, signal.SIGSTOP)
        seen |= pids


def signal_group(pid: int, signum: int) -> None:
    """Signal the process group, if it is there."""
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        pass


def remains_of(sessions: Iterable[int], since_ticks: int, uid: int, marker: bytes) -> List[int]:
    """Return what seems left of a step whose shepherd is gone: its sessions, what bears its marker, and all below.

    `marker` is a ``NAME=value`` of the environment that each task was started with. Only processes of `uid` that are
    not older than the step are looked at, so that what a user writes into an environment reaches only his own.
    """
    table = all_processes()
    wanted = set(sessions)
    roots = [
        pid
        for pid, stat in table.items()
        if stat.ticks >= since_ticks
        and stat.state not in "ZX"
        and _owner(pid) == uid
        and (stat.session in wanted or marker in _environment(pid))
    ]
    return roots + descendants(roots, table)


def _owner(pid: int) -> int:
    try:
        return os.stat("/proc/%d" % pid).st_uid
    except FileNotFoundError:
        return -1


def _environment(pid: int) -> List[bytes]:
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []  # gone meanwhile, or not ours to read: then the session has to do


def environment_of(pid: int) -> Dict[bytes, bytes]:
    """Return the environment that the process was started with, {} if it is not ours to read."""
    return dict(item.split(b"=", 1) for item in _environment(pid) if b"=" in item)


@functools.lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc().prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, "prctl %d: %s" % (option, os.strerror(code)))


def return_free_memory() -> None:
    """Give the heap's free pages back to the system, where the C library can: a fork need not copy what maps them."""
    trim = getattr(_libc(), "malloc_trim", None)  # glibc's; musl has none
    if trim is not None:
        trim(0)


def become_subreaper() -> None:
    """Make orphans below this process its children instead of init's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    """Make set-uid programs and file capabilities without effect, here and below, for ever."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Not inherited, and undone by a change of user."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def proportional_memory_kib(pid: int) -> int:
    """Return the memory of the process with shared pages divided among those that share them."""
    try:
        with open("/proc/%d/smaps_rollup" % pid, "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return 0


def open_descriptors() -> List[int]:
    """Return the descriptors that this process has open."""
    return [int(name) for name in os.listdir("/proc/self/fd")]


def close_all_but(kept: Iterable[int]) -> None:
    """Close every descriptor above 2 that is not kept."""
    wanted = set(kept)
    for fd in open_descriptors():
        if fd > 2 and fd not in wanted:
            try:
                os.close(fd)
            except OSError:
                pass  # the one that listed the directory
