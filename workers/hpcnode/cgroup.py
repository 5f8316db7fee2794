"""Control groups (version 2), where we may make them: one for the tasks of each step.

They make two things sure that a walk through /proc cannot: killing a tree whose shepherd is gone, and limiting memory.
Where there are none (a plain user without delegation, an old kernel) everything else works without them.
Rules: a group is named by its step's nonce, holds only tasks (never the shepherd), and is removed when it is empty.

Sources: Documentation/admin-guide/cgroup-v2.rst (cgroup.procs, cgroup.kill, memory.max, memory.events).
"""

from __future__ import annotations

import os
from typing import List, Optional


def find_base() -> Optional[str]:
    """Return a directory in which this process may make groups and move its children there, or None."""
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
    """Try it in a child: a group can be made, entered and killed."""
    path = os.path.join(base, "try-%d" % os.getpid())
    try:
        os.mkdir(path)
    except OSError:
        return False
    child = os.fork()
    if child == 0:
        try:
            with open(path + "/cgroup.procs", "w") as file:
                file.write("0")
        except OSError:
            os._exit(1)
        os._exit(0)
    entered = os.waitpid(child, 0)[1] == 0
    usable = entered and os.path.exists(path + "/cgroup.kill")
    os.rmdir(path)
    return usable


def make(base: str, name: str, mem_mib: int) -> str:
    """Make the group of a step and return its path; limit its memory where the kernel lets us."""
    path = os.path.join(base, name)
    try:
        os.mkdir(path)
    except FileExistsError:
        pass  # a shepherd before us died before it had started anything
    if mem_mib > 0:
        _write(base + "/cgroup.subtree_control", "+memory")
        if _write(path + "/memory.max", str(mem_mib << 20)):
            _write(path + "/memory.oom.group", "1")
    return path


def limits_memory(path: str) -> bool:
    """Return whether the group has a memory limit of its own."""
    return _read(path + "/memory.max").strip() not in ("", "max")


def ran_out_of_memory(path: str) -> bool:
    """Return whether the kernel killed something of the group for its memory."""
    for line in _read(path + "/memory.events").splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill" and int(count) > 0:
            return True
    return False


def kill(path: str) -> None:
    """Kill everything in the group, also what forks meanwhile."""
    _write(path + "/cgroup.kill", "1")


def members(path: str) -> List[int]:
    """Return the pids in the group, [] if it is gone."""
    return [int(word) for word in _read(path + "/cgroup.procs").split()]


def is_populated(path: str) -> bool:
    """Return whether anything lives in the group or below it."""
    return "populated 1" in _read(path + "/cgroup.events")


def remove(path: str) -> None:
    """Remove the group if it is empty."""
    for name in _children(path):
        remove(os.path.join(path, name))  # a job may have made groups of its own, where it could
    try:
        os.rmdir(path)
    except OSError:
        pass  # gone, or not empty yet: the one who cares asks again


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
    try:
        with open(path, "w") as file:
            file.write(text)
        return True
    except OSError:
        return False
