"""A node's disk in memory, behind the names of `os` that the spool uses.

A power failure takes what was not fsynced: of a file's bytes all, none or a first part; of a directory's names each by
itself, in any order, but a name is always either the old file or the new one (rename is atomic). So it is worse than real
file systems are. A full disk refuses new names and takes only a first part of what is written.
Each change is a crash point before it and (for fsync and rename) after it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import stat
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from hpcnode import lease, paths, spool
from hpcnode.os import durable

ROOT = "/sim/"


class File:
    """Its bytes, and those that are on the platter."""

    __slots__ = ("data", "synced")

    def __init__(self) -> None:
        self.data = bytearray()
        self.synced = b""


class Folder:
    """Its names, and those that are on the platter."""

    __slots__ = ("names", "synced")

    def __init__(self) -> None:
        self.names: dict[str, File | Folder] = {}
        self.synced: dict[str, File | Folder] = {}


class Disk:
    """One node's disk. Paths are below `ROOT`/NODE."""

    def __init__(self, reached: Callable[[str], None]) -> None:
        self.root = Folder()
        self.full = False
        self.fail_in: int | None = None  # writes until one fails for want of room
        self.full_in: int | None = None  # writes until it is full
        self.refused = 0  # writes that found no room
        self._reached = reached

    # ----- names

    def find(self, parts: list[str]) -> File | Folder | None:
        """Return what has this path, None if nothing has."""
        here: File | Folder | None = self.root
        for part in parts:
            here = here.names.get(part) if isinstance(here, Folder) else None
        return here

    def folder(self, parts: list[str]) -> Folder:
        """Return the directory of this path. Raises FileNotFoundError."""
        found = self.find(parts)
        if not isinstance(found, Folder):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/".join(parts))
        return found

    def make_file(self, folder: Folder, name: str) -> File:
        """Make an empty file. Raises OSError if there is no room."""
        self.at("create", name)
        self.need_room()
        file = folder.names[name] = File()
        return file

    def need_room(self) -> None:
        """Raise OSError if there is none."""
        if self.fail_in is not None:
            self.fail_in -= 1
            if self.fail_in < 0:
                self.fail_in = None
                self._refuse()
        if self.full_in is not None:
            self.full_in -= 1
            if self.full_in < 0:
                self.full_in, self.full = None, True
        if self.full:
            self._refuse()

    def _refuse(self) -> None:
        self.refused += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    def at(self, what: str, name: str) -> None:
        """The running process is about to do `what` to `name`, or has done it."""
        self._reached(f"{what} {'ENTRY' if len(name) > 40 else name}")

    def power_failure(self, rng: random.Random) -> None:
        """Lose what was not fsynced, or a part of it."""
        _settle(self.root, rng)


def _settle(folder: Folder, rng: random.Random) -> None:
    names, synced = folder.names, folder.synced
    if names != synced:
        kept: dict[str, File | Folder] = {}
        for name in sorted({*names, *synced}):
            now, before = names.get(name), synced.get(name)
            chosen = now if now is before or rng.random() < 0.5 else before
            if chosen is not None:
                kept[name] = chosen
        folder.names = names = kept
    folder.synced = dict(names)
    for node in names.values():
        if isinstance(node, Folder):
            _settle(node, rng)
        elif bytes(node.data) != node.synced:
            choice = rng.random()
            if choice < 0.4:
                node.data = bytearray(node.synced)
            elif choice < 0.8:
                del node.data[rng.randrange(len(node.data) + 1) :]
            node.synced = bytes(node.data)


class _Path:
    """`os.path`, as far as the spool needs it."""

    join = staticmethod(os.path.join)
    dirname = staticmethod(os.path.dirname)
    abspath = staticmethod(os.path.abspath)

    def __init__(self, system: SimOs) -> None:
        self._system = system

    def exists(self, path: str) -> bool:
        disk, parts = self._system.split(path)
        return disk.find(parts) is not None

    def isdir(self, path: str) -> bool:
        disk, parts = self._system.split(path)
        return isinstance(disk.find(parts), Folder)

    def islink(self, path: str) -> bool:
        return False


class SimOs:
    """`os` for the spool: the calls it makes, on the disks of the present world."""

    O_RDONLY, O_WRONLY, O_RDWR, O_CREAT, O_EXCL = os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_EXCL
    O_TRUNC, O_APPEND, O_NOFOLLOW, O_CLOEXEC = os.O_TRUNC, os.O_APPEND, os.O_NOFOLLOW, os.O_CLOEXEC
    O_DIRECTORY, O_NONBLOCK = os.O_DIRECTORY, os.O_NONBLOCK

    def __init__(self) -> None:
        self.disks: dict[str, Disk] = {}
        self.path = _Path(self)
        self._open: dict[int, tuple[Disk, File | Folder, str]] = {}
        self._last_fd = 1000

    def split(self, path: str) -> tuple[Disk, list[str]]:
        """Return the disk that a path is on, and the names that lead there. Raises PermissionError for what is above."""
        parts = path.split("/")
        if len(parts) < 3:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return self.disks[parts[2]], parts[3:]

    def geteuid(self) -> int:
        return 1000

    def chmod(self, path: str, mode: int) -> None:
        self.lstat(path)

    def fchmod(self, fd: int, mode: int) -> None:
        pass

    def lstat(self, path: str) -> SimpleNamespace:
        disk, parts = self.split(path)
        found = disk.find(parts)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return self._status(found)

    def fstat(self, fd: int) -> SimpleNamespace:
        return self._status(self._open[fd][1])

    def _status(self, found: File | Folder) -> SimpleNamespace:
        mode, size = (stat.S_IFREG, len(found.data)) if isinstance(found, File) else (stat.S_IFDIR, 0)
        return SimpleNamespace(st_uid=self.geteuid(), st_nlink=1, st_mode=mode, st_size=size)

    def listxattr(self, path: str, follow_symlinks: bool = True) -> list[str]:
        return []

    def makedirs(self, path: str, mode: int = 0o777, exist_ok: bool = False) -> None:
        disk, parts = self.split(path)
        here = disk.root
        for part in parts:
            found = here.names.get(part)
            if found is None:
                disk.need_room()
                found = here.names[part] = Folder()
            assert isinstance(found, Folder)
            here = found

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        disk, parts = self.split(path)
        parent = disk.folder(parts[:-1])
        disk.at("mkdir", parts[-1])
        if parts[-1] in parent.names:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        disk.need_room()
        parent.names[parts[-1]] = Folder()

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        disk, parts = self.split(path)
        found = disk.find(parts)
        if found is None:
            parent = disk.folder(parts[:-1])
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            found = disk.make_file(parent, parts[-1])
        elif flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        elif flags & os.O_TRUNC and isinstance(found, File):
            found.data = bytearray()
        self._last_fd += 1
        self._open[self._last_fd] = (disk, found, parts[-1] if parts else "root")
        return self._last_fd

    def write(self, fd: int, data: Any) -> int:
        disk, file, name = self._open[fd]
        assert isinstance(file, File)
        disk.at("write", name)
        try:
            disk.need_room()
        except OSError:
            file.data += bytes(data)[: len(data) // 2]
            raise
        file.data += data
        return len(data)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        disk, file, name = self._open[fd]
        assert isinstance(file, File)
        disk.at("write", name)
        if offset + len(data) > len(file.data):
            disk.need_room()
        file.data[offset : offset + len(data)] = data
        return len(data)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        file = self._open[fd][1]
        assert isinstance(file, File)
        return bytes(file.data[offset : offset + length])

    def ftruncate(self, fd: int, length: int) -> None:
        _disk, file, _name = self._open[fd]
        assert isinstance(file, File)
        del file.data[length:]

    def fsync(self, fd: int) -> None:
        disk, node, name = self._open[fd]
        disk.at("fsync", name)
        if isinstance(node, File):
            node.synced = bytes(node.data)
        else:
            node.synced = dict(node.names)
        disk.at("fsynced", name)

    fdatasync = fsync

    def close(self, fd: int) -> None:
        del self._open[fd]

    def rename(self, old: str, new: str) -> None:
        disk, parts = self.split(old)
        source, target, name = disk.folder(parts[:-1]), disk.folder(self.split(new)[1][:-1]), new.rpartition("/")[2]
        disk.at("rename", name)
        if parts[-1] not in source.names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", old)
        target.names[name] = source.names.pop(parts[-1])
        disk.at("renamed", name)

    def truncate(self, path: str, length: int) -> None:
        disk, parts = self.split(path)
        found = disk.find(parts)
        if not isinstance(found, File):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        disk.at("truncate", parts[-1])
        del found.data[length:]

    def listdir(self, path: str) -> list[str]:
        disk, parts = self.split(path)
        return list(disk.folder(parts).names)

    def unlink(self, path: str) -> None:
        disk, parts = self.split(path)
        folder = disk.folder(parts[:-1])
        if parts[-1] not in folder.names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        disk.at("unlink", parts[-1])
        del folder.names[parts[-1]]

    def rmdir(self, path: str) -> None:
        disk, parts = self.split(path)
        disk.at("rmdir", parts[-1])
        if disk.folder(parts).names:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        del disk.folder(parts[:-1]).names[parts[-1]]

    def remove_tree(self, path: str) -> None:
        """As `paths.remove_tree`: a directory with files, which need not exist."""
        with contextlib.suppress(OSError):
            for name in self.listdir(path):
                self.unlink(f"{path}/{name}")
            self.rmdir(path)

    def read(self, path: str | int, mode: str = "r", **_options: Any) -> Any:
        """`open` of a file, or of a descriptor, to be read as a whole."""
        if isinstance(path, int):
            found: File | Folder | None = self._open[path][1]
        else:
            disk, parts = self.split(path)
            found = disk.find(parts)
        if not isinstance(found, File):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        data = bytes(found.data)
        return io.BytesIO(data) if "b" in mode else io.StringIO(data.decode("ascii", "replace"))


@contextlib.contextmanager
def simulated_disks() -> Iterator[SimOs]:
    """Have the spool's modules work on simulated disks instead of the machine's."""
    system = SimOs()
    modules: tuple[Any, ...] = (spool, durable, lease)
    try:
        for module in modules:
            module.os = system
            module.open = system.read
        spool.remove_tree = system.remove_tree
        yield system
    finally:
        for module in modules:
            module.os = os
            del module.open
        spool.remove_tree = paths.remove_tree
