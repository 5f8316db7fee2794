"""The power supply of one loopback node: runs its SSH server, and ends its processes.

Run as `power.py OWNER_PID HOSTNAME LOG COMMAND...`; it needs the standard library only, and ignores site packages. It answers
one-word requests on stdin with one line each on stdout: `freeze`, `thaw`, `off`. Before that it prints one line: `up own` if the
node has its own host name, else `up shared`.

Rules:
- It is the subreaper of all processes below, so a daemon that detaches (double fork, setsid) stays a descendant.
- `off` first stops all processes, so that none can fork away, then kills them, repeatedly until nothing is left.
- It does the same when its owner ends in any way: it watches the owner's pidfd and the end of stdin. (PR_SET_PDEATHSIG would also
  fire when only the *thread* that started us ends, so it is used for our own child only.)
- Processes are found by their ancestry in /proc, never by name.

SSH and the programs of the node are not known here. Sources: prctl(2), pidfd_open(2), unshare(2), user_namespaces(7),
mount_namespaces(7), proc(5).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
MS_REC, MS_SLAVE = 0x4000, 0x80000
STOPPED_STATES = frozenset("TtZX")
SETTLE_S = 1.0
KILL_S = 20.0


def descendants(root_pid: int) -> dict[int, str]:
    """Return pid -> state letter (proc(5)) of every process below `root_pid`.

    Zombies are included, `root_pid` is not.
    """
    below: dict[int, list[tuple[int, str]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _parent_and_state(int(name))):
            below.setdefault(stat[0], []).append((int(name), stat[1]))
    found: dict[int, str] = {}
    todo = [root_pid]
    while todo:
        children = below.get(todo.pop(), [])
        found.update(children)
        todo += [pid for pid, _ in children]
    return found


def _parent_and_state(pid: int) -> tuple[int, str] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()  # the name before may have any characters
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[1]), fields[0].decode()


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each pid that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def stop_all_below() -> set[int]:
    """Stop all descendants, including new ones, and return the pids that this call stopped.

    A process that waits in the kernel (D) cannot fork, and stops when that wait ends.
    """
    stopped: set[int] = set()
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        states = descendants(os.getpid())
        running = [pid for pid, state in states.items() if state not in STOPPED_STATES]
        signal_all(running, signal.SIGSTOP)
        if all(states[pid] == "D" for pid in running) or time.monotonic() > deadline_s:
            return stopped | set(running)
        stopped.update(running)
        time.sleep(0.001)


def reap() -> bool:
    """Collect ended children; return whether any child, living or dead, is left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def kill_all_below() -> list[int]:
    """Kill all descendants; return the pids that did not end in time (stuck in the kernel)."""
    deadline_s = time.monotonic() + KILL_S
    while reap():
        if time.monotonic() > deadline_s:
            return sorted(descendants(os.getpid()))
        stop_all_below()
        signal_all(descendants(os.getpid()), signal.SIGKILL)  # zombies, too: their threads may still live
        time.sleep(0.001)
    return []


def take_own_hostname(hostname: str) -> bool:
    """Enter a UTS namespace with this host name, if the kernel allows it.

    Return whether it did.
    """
    if not _succeeds_in_a_child(lambda: _enter_uts_namespace(hostname)):
        return False
    _enter_uts_namespace(hostname)
    return True


def keep_own_mounts() -> None:
    """Enter a mount namespace, if possible, so that mounts of the node end with it."""
    if os.geteuid() == 0 and _succeeds_in_a_child(_enter_mount_namespace):
        _enter_mount_namespace()


def _enter_mount_namespace() -> None:
    _unshare(CLONE_NEWNS)
    _libc_call("mount", None, b"/", None, ctypes.c_ulong(MS_REC | MS_SLAVE), None)


def _succeeds_in_a_child(attempt: Callable[[], None]) -> bool:
    # A process cannot leave a half-made user namespace, so a child tries first.
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            attempt()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _enter_uts_namespace(hostname: str) -> None:
    if os.geteuid() == 0:
        _unshare(CLONE_NEWUTS)
    else:
        uid, gid = os.geteuid(), os.getegid()
        _unshare(CLONE_NEWUSER | CLONE_NEWUTS)
        _write("/proc/self/setgroups", "deny")  # user_namespaces(7): before gid_map, for the unprivileged
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    socket.sethostname(hostname)


def _libc_call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _unshare(flags: int) -> None:
    _libc_call("unshare", flags)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _die_with_parent() -> None:
    _libc_call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def start_server(command: list[str], log_path: str) -> subprocess.Popen[bytes]:
    """Start the node's SSH server; append its output to the log."""
    with open(log_path, "ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has one thread
        )


def owner_watch(owner_pid: int) -> int | None:
    """Return a descriptor that is readable when the owner ends, None without pidfds."""
    try:
        return os.pidfd_open(owner_pid)
    except ProcessLookupError:
        raise SystemExit("the owner is gone already") from None
    except (OSError, AttributeError):
        return None  # an old kernel or a strict sandbox: then only the end of stdin counts


def serve_requests(watched: list[int], wake: int) -> None:
    """Answer requests on stdin until `off`, a signal, or the end of stdin or owner."""
    stopped: set[int] = set()
    pending = b""
    while True:
        ready = select.select([0, wake, *watched], [], [])[0]
        if wake in ready and any(number != signal.SIGCHLD for number in os.read(wake, 512)):
            return
        if wake in ready:
            reap()
        if any(fd in ready for fd in watched):
            return
        if 0 not in ready:
            continue
        data = os.read(0, 512)
        *requests, pending = (pending + data).split(b"\n")
        if not data or b"off" in requests:
            return
        for request in requests:
            if request == b"freeze":
                stopped |= stop_all_below()
            elif request == b"thaw":
                signal_all(stopped & descendants(os.getpid()).keys(), signal.SIGCONT)
                stopped = set()
            _answer("done")


def _answer(line: str) -> None:
    try:
        os.write(1, line.encode() + b"\n")
    except BrokenPipeError:
        pass  # no reader any more; the request is carried out nevertheless


def _wakeup_descriptor() -> int:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return read_end


def main(argv: list[str]) -> int:
    """Run one node until it is switched off; return 0 if nothing is left of it."""
    owner_pid, hostname, log_path, *command = argv
    watch = owner_watch(int(owner_pid))
    own = take_own_hostname(hostname)
    keep_own_mounts()
    _libc_call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake = _wakeup_descriptor()
    server = start_server(command, log_path)
    _answer("up own" if own else "up shared")
    serve_requests([] if watch is None else [watch], wake)
    left = kill_all_below()
    server.returncode = -signal.SIGKILL  # reaped above
    _answer("off " + " ".join(map(str, left)))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
