"""Control groups (version 2), if we may create them: one for each shepherd and its tasks.

They add what a walk through /proc cannot guarantee: killing a tree whose shepherd is gone, and limiting memory. Without them (a
user without delegation, an old kernel) everything else works.

A process of the shepherd pool enters its group once, and its tasks are born in it, because moving a process takes the kernel
some 10 ms. So a group is killed only if its shepherd is dead, and removed when it is empty.

Sources: Documentation/admin-guide/cgroup-v2.rst (cgroup.procs, cgroup.kill, cgroup.freeze, memory.max, memory.events).
"""

from __future__ import annotations

import os
from typing import List, Optional

FROZEN = "frozen"  # the group below a shepherd's that has its suspended tasks
MAX_ROUNDS = 20


def find_base() -> Optional[str]:
    """Return a directory in which this process may create and enter groups, or None."""
    mount = _mount_point()
    if mount is None:
        return None
    base = os.path.join(mount, "hpcsched") if os.geteuid() == 0 else _own_group(mount)
    if base is None:
        return None
    try:
        os.makedirs(base, exist_ok=True)
    except OSError:
        return None
    return base if _can_use(base) else None


def _mount_point() -> Optional[str]:
    try:
        with open("/proc/self/mounts") as file:
            for line in file:
                fields = line.split()
                if fields[2] == "cgroup2":
                    return fields[1].replace("\\040", " ")
    except OSError:
        return None
    return None


def _own_group(mount: str) -> Optional[str]:
    with open("/proc/self/cgroup") as file:
        for line in file:
            if line.startswith("0::"):
                own = os.path.normpath(mount + line[3:].strip())
                return own if os.access(own, os.W_OK) and os.access(own + "/cgroup.procs", os.W_OK) else None
    return None


def _can_use(base: str) -> bool:
    """Return whether a child can enter a group there, and the kernel can kill groups."""
    path = os.path.join(base, "try-%d" % os.getpid())
    try:
        os.mkdir(path)
    except OSError:
        return False
    child = os.fork()
    if child == 0:
        os._exit(0 if _write(path + "/cgroup.procs", "0") else 1)
    entered = os.waitpid(child, 0)[1] == 0
    usable = entered and os.path.exists(path + "/cgroup.kill")
    os.rmdir(path)
    return usable


def enter_own(base: str) -> Optional[str]:
    """Move this process into a new group of its own.

    Return the group's path, None if that fails.
    """
    path = os.path.join(base, "shepherd-%d-%s" % (os.getpid(), os.urandom(4).hex()))  # pids are reused
    try:
        os.mkdir(path)
    except OSError:
        return None
    return path if _write(path + "/cgroup.procs", "0") else None


def can_limit_memory(path: str) -> bool:
    """Return whether the kernel can limit the memory of this group; enable that if need be."""
    _write(os.path.dirname(path) + "/cgroup.subtree_control", "+memory")
    return os.path.exists(path + "/memory.max")


def limit_memory(path: str, mem_mib: int) -> bool:
    """Limit the group's memory (0: no limit); return whether the kernel enforces a limit."""
    return _write(path + "/memory.max", str(mem_mib << 20) if mem_mib > 0 else "max") and mem_mib > 0


def memory_kills(path: str) -> int:
    """Return how many processes of the group the kernel has killed for memory."""
    for line in _read(path + "/memory.events").splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return 0


def kill(path: str) -> None:
    """Kill all processes of the group, including those that fork meanwhile."""
    _write(path + "/cgroup.kill", "1")


def freeze_others(path: str) -> bool:
    """Freeze all processes of the group except this one, including those that fork meanwhile.

    Return whether that worked.

    A frozen group freezes all groups below it. So the others move to a group below ours, which is frozen already.
    """
    frozen = os.path.join(path, FROZEN)
    try:
        os.makedirs(frozen, exist_ok=True)
    except OSError:
        return False
    if not all([_write(os.path.join(path, name, "cgroup.freeze"), "1") for name in _children(path)]):
        thaw_others(path)
        return False
    for _ in range(MAX_ROUNDS):
        others = [pid for pid in _read(path + "/cgroup.procs").split() if int(pid) != os.getpid()]
        if not others:
            return True
        for pid in others:
            _write(frozen + "/cgroup.procs", pid)  # an ended process is not listed in the next round
    thaw_others(path)
    return False


def thaw_others(path: str) -> None:
    """Thaw the processes that `freeze_others` froze."""
    for name in _children(path):
        _write(os.path.join(path, name, "cgroup.freeze"), "0")


def is_populated(path: str) -> bool:
    """Return whether the group, or a group below it, has living processes."""
    return "populated 1" in _read(path + "/cgroup.events")


def remove(path: str) -> None:
    """Remove the group if it is empty."""
    for name in _children(path):
        remove(os.path.join(path, name))  # a job may have created groups of its own
    try:
        os.rmdir(path)
    except OSError:
        pass  # gone, or not empty yet: `remove_empty` tries again


def remove_empty(base: str) -> None:
    """Remove the cgroups of shepherds that are gone."""
    for name in _children(base):
        path = os.path.join(base, name)
        if name.startswith("shepherd-") and not is_populated(path):
            remove(path)


def _children(path: str) -> List[str]:
    try:
        return [item.name for item in os.scandir(path) if item.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _write(path: str, text: str) -> bool:
    """Write to an existing control file; return whether the kernel accepted it."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, text.encode())
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
