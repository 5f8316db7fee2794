"""Processes on Linux: identity, descendants, signals.

A process is (pid, start time in ticks, boot id). A pid alone is never enough to kill, because pids are reused. All uses of /proc,
pidfds and prctl are here (those of cgroups are in `cgroup`), so that another system can be added.

Sources: proc(5), pidfd_open(2), prctl(2), setsid(2), clock_gettime(2), clone(2), wait4(2).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import resource
import signal
import time
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

NO_PROCESS = frozenset({errno.EAGAIN, errno.ENOMEM})  # of fork(2): this node or account cannot have more processes

ANY_CHILD = 0x40000000  # __WALL: also children whose exit signal is not SIGCHLD
SYS_CLONE3 = 435  # on every architecture but alpha
CLONE_ARGS_WORDS = 11  # of 8 bytes; the fifth is the exit signal, the last one a cgroup
CLONE_PARENT = 0x8000  # the child is a child of our parent
CLONE_INTO_CGROUP = 0x200000000

END_LOOK_S = 0.02  # between two looks at whether a program has ended

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
PR_SET_CHILD_SUBREAPER = 36


class ProcessIdentity(NamedTuple):
    """One process, uniquely: a reused pid has another start time or boot id."""

    pid: int
    ticks: int
    boot_id: str


class Stat(NamedTuple):
    """The needed fields of /proc/PID/stat."""

    state: str
    parent: int
    session: int
    ticks: int
    rss_pages: int


def boot_clock_s() -> float:
    """Return seconds since boot, including sleep; limits and leases use this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id(environ: Mapping[str, str]) -> str:
    """Return this boot's id. `HPCNODE_BOOT_ID` overrides it if one machine poses as several."""
    given = environ.get("HPCNODE_BOOT_ID")
    if given:
        return given
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def read_stat(pid: int) -> Optional[Stat]:
    """Return the stat of `pid`, None if there is no such process."""
    try:
        text = read_file("/proc/%d/stat" % pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(b")")[2].split()  # the name before may have any characters
    return Stat(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]), int(fields[21]))


def read_file(path: str) -> bytes:
    """Return the content of a small file of /proc.

    Raises OSError. `open` would make four more system calls.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def identify(pid: int, boot: str) -> Optional[ProcessIdentity]:
    """Return the identity of a process that exists now, or None."""
    stat = read_stat(pid)
    return None if stat is None else ProcessIdentity(pid, stat.ticks, boot)


def is_alive(identity: ProcessIdentity, boot: str) -> bool:
    """Return whether this very process still runs (a zombie does not)."""
    if identity.boot_id != boot:
        return False
    stat = read_stat(identity.pid)
    return stat is not None and stat.ticks == identity.ticks and stat.state not in "ZX"


def send_signal(identity: ProcessIdentity, boot: str, signum: int) -> bool:
    """Signal this very process; return whether it was there."""
    return identity.boot_id == boot and _reach(identity.pid, identity.ticks, signum)


def _reach(pid: int, ticks: int, signum: int) -> bool:
    """Signal the process with this pid and start time; return whether it was there."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:
        pidfd = -1  # a kernel before 5.3: the check below has a short race then
    try:
        stat = read_stat(pid)
        if stat is None or stat.ticks != ticks:
            return False
        if pidfd < 0:
            os.kill(pid, signum)
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
    """Return whether another process has `words` in its command line."""
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and int(name) != os.getpid() and words in read_file("/proc/%s/cmdline" % name):
                return True
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            pass  # ended, or hidden from us: then it is not ours
    return False


def descendants(roots: Iterable[int], table: Optional[Mapping[int, Stat]] = None) -> Dict[int, int]:
    """Return the living processes below `roots`: pid -> start time in ticks.

    Parents come first. Those set apart are left out.
    """
    known = all_processes() if table is None else table
    below: Dict[int, List[int]] = {}
    for pid, stat in known.items():
        below.setdefault(stat.parent, []).append(pid)
    found: Dict[int, int] = {}
    seen: Set[int] = set(roots)
    todo = list(seen)
    seen |= _apart
    while todo:
        for pid in below.get(todo.pop(), ()):
            if pid not in seen:
                seen.add(pid)
                todo.append(pid)  # below a zombie, too: its threads may still live
                if known[pid].state not in "ZX":
                    found[pid] = known[pid].ticks
    return found


def quick_descendants(root: int) -> List[int]:
    """Return the processes below `root` by the kernel's lists, which may miss a new one."""
    found: List[int] = []
    todo = [root]
    while todo:
        children = children_of(todo.pop())
        found += children
        todo += children
    return found


def children_of(pid: int) -> List[int]:
    """Return the children of a process that are not set apart, [] if it is gone."""
    found: List[int] = []
    try:
        for task in os.listdir("/proc/%d/task" % pid):
            with open("/proc/%d/task/%s/children" % (pid, task), "rb") as file:
                found += [int(word) for word in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        pass  # gone, or a kernel without these lists
    return [pid for pid in found if pid not in _apart] if _apart else found


def is_traced_zombie(pid: int) -> bool:
    """Return whether a process has ended, with all its threads, and its tracer has not looked."""
    try:
        text = read_file("/proc/%d/status" % pid)
    except OSError:
        return False
    facts = dict(line.split(b":", 1) for line in text.splitlines() if b":" in line)
    is_dead = facts.get(b"State", b"").split()[:1] == [b"Z"] and facts.get(b"Threads", b"").strip() in (b"0", b"1")
    return is_dead and facts.get(b"TracerPid", b"0").strip() != b"0"


def name_of(pid: int) -> str:
    """Return the kernel's name of a process (comm), "" if it is gone."""
    try:
        with open("/proc/%d/comm" % pid) as file:
            return file.read().rstrip("\n")
    except OSError:
        return ""


def set_name(name: str) -> None:
    """Set this process's name (comm) for ps and top to the first 15 characters of `name`."""
    try:
        with open("/proc/self/comm", "w") as file:
            file.write(name)
    except OSError:
        pass  # /proc is read-only: ps shows the interpreter's name then


def signal_all(processes: Mapping[int, int], signum: int) -> None:
    """Signal each of these that still exists: pid -> start time in ticks.

    A pid may be reused between a look at all processes, which takes long if there are many, and the signal.
    """
    for pid, ticks in processes.items():
        try:
            _reach(pid, ticks, signum)
        except PermissionError:
            pass  # a set-uid program made it another user's


def stop_all_below(root: int) -> Dict[int, int]:
    """Stop all processes below one, including new ones, in a bounded number of rounds.

    Return them: pid -> start time in ticks.
    """
    seen: Dict[int, int] = {}
    for _ in range(20):
        new = {pid: ticks for pid, ticks in descendants([root]).items() if seen.get(pid) != ticks}
        if not new:
            break
        signal_all(new, signal.SIGSTOP)
        seen.update(new)
    return seen


def signal_group(pid: int, signum: int) -> None:
    """Signal the process group, if it exists."""
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        pass


def remains_of(tasks: Sequence[ProcessIdentity], uid: int, marker: bytes) -> Dict[int, int]:
    """Return what remains of a step whose shepherd is gone: pid -> start time in ticks.

    These are the sessions of its tasks, processes with its marker, and all processes below.
    `marker` is a ``NAME=value`` in the environment of each task. Only processes of `uid` that are not older than the step are
    considered, so a forged environment affects only the user's own processes.
    """
    table = all_processes()
    since_ticks = min((task.ticks for task in tasks), default=0)
    # If another process has the pid of a task, nothing is left of the session: until then the kernel reuses no such pid.
    wanted = {task.pid for task in tasks if task.pid not in table or table[task.pid].ticks == task.ticks}
    roots = {
        pid: stat.ticks
        for pid, stat in table.items()
        if stat.ticks >= since_ticks
        and stat.state not in "ZX"
        and _owner(pid) == uid
        and (stat.session in wanted or marker in _environment(pid))
    }
    return {**roots, **descendants(roots, table)}


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
        return []  # gone, or not readable: then only the session counts


def environment_of(pid: int) -> Dict[bytes, bytes]:
    """Return the environment that the process was started with, {} if it is not readable."""
    return dict(item.split(b"=", 1) for item in _environment(pid) if b"=" in item)


# ----- forks that os.fork cannot do

_apart: Set[int] = set()  # children of this process that belong to no step


def set_apart(pid: int) -> None:
    """Leave a child of this process out of all lists of processes below it."""
    _apart.add(pid)


def end_apart(pid: int) -> bool:
    """Note that a child has ended; return whether it was set apart."""
    if pid not in _apart:
        return False
    _apart.discard(pid)
    return True


def has_usual_child() -> bool:
    """Return whether this process has a child whose exit signal is SIGCHLD."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def clone(exit_signal: int, flags: int = 0, cgroup_fd: int = 0) -> int:
    """Fork by clone3; return 0 in the child. This process must have one thread.

    With CLONE_PARENT, the exit signal is our own and `exit_signal` must be 0. Raises OSError.
    """
    words = (ctypes.c_uint64 * CLONE_ARGS_WORDS)()
    words[0], words[4], words[10] = flags, exit_signal, cgroup_fd
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_python().syscall(SYS_CLONE3, ctypes.byref(words), ctypes.c_size_t(ctypes.sizeof(words))))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    code = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(code, "cannot fork: %s" % os.strerror(code))
    return pid


@functools.lru_cache(maxsize=1)
def _python() -> ctypes.PyDLL:
    return ctypes.PyDLL(None, use_errno=True)  # keeps Python's lock: the child continues with it


@functools.lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc().prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, "prctl %d: %s" % (option, os.strerror(code)))


def return_free_memory() -> None:
    """Return free pages of the heap to the system, so that forks need not map them."""
    trim = getattr(_libc(), "malloc_trim", None)  # glibc's; musl has none
    if trim is not None:
        trim(0)


def leave_no_core_file() -> None:
    """Leave no core file if this process or a child crashes: it has environments of jobs.

    The hard limit stays, so a job can raise its limit.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def become_subreaper() -> None:
    """Make orphans below this process its children instead of init's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    """Disable set-uid programs and file capabilities irrevocably, here and below."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends.

    A change of user undoes this; children do not inherit it.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def proportional_memory_kib(pid: int) -> int:
    """Return the memory of the process in KiB, with shared pages divided among their users."""
    try:
        with open("/proc/%d/smaps_rollup" % pid, "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return 0


def end_of(pid: int, end_s: float) -> int:
    """Return the status of a child's end, which is killed at `end_s` (monotonic).

    All processes below it are killed with it.
    """
    done, status = os.waitpid(pid, os.WNOHANG)
    while not done:
        if time.monotonic() > end_s:
            os.kill(pid, signal.SIGSTOP)  # once it has ended, nothing tells what it started
            below = stop_all_below(pid)
            os.kill(pid, signal.SIGKILL)
            signal_all(below, signal.SIGKILL)
        time.sleep(END_LOOK_S)
        done, status = os.waitpid(pid, os.WNOHANG)
    return status


def output_of(argv: Sequence[str], limit_s: float) -> Tuple[Optional[int], str]:
    """Run a program; return its exit status and what it prints. Call it in a child.

    None: the program is not there, or takes too long.
    """
    import subprocess  # see `agent` on the cost of imports

    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None, ""
    return done.returncode, done.stdout.decode("utf-8", "replace")


def open_descriptors() -> List[int]:
    """Return the descriptors that this process has open."""
    return [int(name) for name in os.listdir("/proc/self/fd")]


def close_all_but(kept: Iterable[int]) -> None:
    """Close all descriptors above 2 except these."""
    wanted = set(kept)
    for fd in open_descriptors():
        if fd > 2 and fd not in wanted:
            try:
                os.close(fd)
            except OSError:
                pass  # the one that listed the directory
