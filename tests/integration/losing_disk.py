"""A file system in memory that notes every change in order, forgets what was not fsynced, and fails when it is told to.

`LosingDisk` mounts it (FUSE, as root) and serves it in a process of its own. Its log has every change, fsync and mark; what
a power failure after any of them may leave behind is built from that by `remains`, under the least that POSIX promises: data
of a file is safe after fsync of the file, a name after fsync of its directory, and nothing else.

Source: linux/fuse.h, protocol 7.31.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import random
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

ROOT = 1
Op = tuple[Any, ...]
Left = Literal["all", "synced", "some"]


class LosingDisk:
    """The mounted file system, seen from the test."""

    def __init__(self, mountpoint: Path) -> None:
        self.path = mountpoint
        mountpoint.mkdir(exist_ok=True)
        ours, theirs = socket.socketpair()
        self._control = ours
        command = [sys.executable, "-I", __file__, str(mountpoint), str(theirs.fileno())]
        self._server = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        theirs.close()
        self._ask("hello")

    def mark(self, text: str) -> None:
        """Record a promise in the log."""
        self._ask("mark", text)

    def log(self) -> list[Op]:
        """Return all changes."""
        return self._ask("log")  # type: ignore[no-any-return]

    def fail(self, error: int, *, after: int = 0, times: int = 1 << 60) -> None:
        """Let changes fail with `error`: `after` ones still succeed, then `times` do not."""
        self._ask("fail", error, after, times)

    def heal(self) -> int:
        """Let all succeed again; return how many have failed."""
        return self._ask("heal")  # type: ignore[no-any-return]

    def stop(self) -> None:
        """Answer nothing more, as a server that is switched off."""
        self._server.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Answer what was asked meanwhile."""
        self._server.send_signal(signal.SIGCONT)

    def _ask(self, *words: Any) -> Any:
        _send(self._control, words)
        return _receive(self._control)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _libc().umount2(os.fsencode(self.path), 2)  # MNT_DETACH
        self._control.close()
        self._server.wait()


def why_not() -> str:
    """Return why the file system cannot be mounted here, "" if it can."""
    if os.geteuid() != 0:
        return "needs root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"needs FUSE: {error}"
    return ""


def remains(log: Sequence[Op], left: Left, rng: random.Random, target: Path) -> list[str]:
    """Build in `target` what is left when the power fails at the end of `log`, and return the marks made until then.

    Of what was not synced, `all` is left, or none (`synced`), or each change by chance (`some`).
    """
    files: dict[int, bytearray] = {}
    folders: dict[int, dict[str, int]] = {ROOT: {}}
    marks: list[str] = []
    synced = _synced(log)
    for number, (kind, *args) in enumerate(log):
        if kind == "mark":
            marks.append(args[0])
        elif kind == "make":
            files.setdefault(args[0], bytearray())
        elif kind == "folder":
            folders.setdefault(args[0], {})
        elif kind != "fsync" and (left == "all" or number in synced or (left == "some" and rng.random() < 0.5)):
            _apply(files, folders, kind, args)
    _write(target, ROOT, files, folders)
    return marks


def _synced(log: Sequence[Op]) -> set[int]:
    """Return the numbers of the changes that an fsync has made durable."""
    safe: set[int] = set()
    waiting: dict[int, list[int]] = {}
    for number, (kind, *args) in enumerate(log):
        if kind == "fsync":
            safe.update(waiting.pop(args[0], ()))
        elif kind in ("data", "size", "name", "unname", "rename"):
            waiting.setdefault(args[0], []).append(number)
    return safe


def _apply(files: dict[int, bytearray], folders: dict[int, dict[str, int]], kind: str, args: Sequence[Any]) -> None:
    if kind == "data":
        _, offset, data = args
        content = files[args[0]]
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(data)] = data
    elif kind == "size":
        content = files[args[0]]
        content[args[1] :] = bytes(max(0, args[1] - len(content)))
    elif kind == "name":
        folders[args[0]][args[1]] = args[2]
    elif kind == "unname":
        folders[args[0]].pop(args[1], None)
    elif kind == "rename":
        old_folder, old, new_folder, new, ino = args
        if folders[old_folder].get(old) == ino:
            del folders[old_folder][old]
        folders[new_folder][new] = ino


def _write(target: Path, ino: int, files: dict[int, bytearray], folders: dict[int, dict[str, int]]) -> None:
    target.mkdir(mode=0o700, exist_ok=True)
    for name, child in folders[ino].items():
        if child in folders:
            _write(target / name, child, files, folders)
        elif child in files:
            (target / name).write_bytes(files[child])


# ----- the server's process


@dataclass(slots=True)
class _Inode:
    mode: int
    uid: int = 0
    gid: int = 0
    nlink: int = 1
    time_s: int = 0
    data: bytearray = field(default_factory=bytearray)
    names: dict[str, int] = field(default_factory=dict)


class _Failure(Exception):
    pass


class _Server:
    """Answers the kernel's requests, one at a time."""

    def __init__(self, fuse_fd: int, control: socket.socket) -> None:
        self._fuse_fd, self._control = fuse_fd, control
        self._inodes = {ROOT: _Inode(mode=stat.S_IFDIR | 0o755, nlink=2, time_s=int(time.time()))}
        self._log: list[Op] = []
        self._error, self._after, self._times, self._failed = 0, 0, 0, 0
        self._calls: dict[int, Callable[..., bytes]] = {
            1: self._lookup, 3: self._getattr, 4: self._setattr, 8: self._mknod, 9: self._mkdir, 10: self._unlink,
            11: self._unlink, 12: self._rename, 13: self._link, 14: self._open, 15: self._read, 16: self._write,
            17: self._statfs, 18: self._nothing, 20: self._fsync, 25: self._nothing, 26: self._init, 27: self._open,
            28: self._readdir, 29: self._nothing, 30: self._fsync, 34: self._nothing, 35: self._create,
            45: self._rename2,
        }  # fmt: skip

    def serve(self) -> None:
        """Serve until it is unmounted or the test has gone."""
        while True:
            ready, _, _ = select.select([self._fuse_fd, self._control], [], [])
            if self._control in ready and not self._obey():
                return
            if self._fuse_fd in ready and not self._answer():
                return

    def _obey(self) -> bool:
        try:
            word, *args = _receive(self._control)
        except EOFError:
            return False
        answer: Any = None
        if word == "mark":
            self._log.append(("mark", args[0]))
        elif word == "log":
            answer = list(self._log)
        elif word == "fail":
            self._error, self._after, self._times = args
            self._failed = 0
        elif word == "heal":
            self._error, answer = 0, self._failed
        _send(self._control, answer)
        return True

    def _answer(self) -> bool:
        try:
            request = os.read(self._fuse_fd, 1 << 20)
        except OSError as error:
            return error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN)
        _, opcode, unique, node, uid, gid, _, _ = struct.unpack_from("<IIQQIIII", request)
        if opcode in (2, 42, 36):  # FORGET, BATCH_FORGET, INTERRUPT: not answered
            return True
        call = self._calls.get(opcode)
        code, answer = -errno.ENOSYS, b""
        if call is not None:
            try:
                code, answer = 0, call(node, request[40:], uid, gid)
            except _Failure as failure:
                code = -failure.args[0]
        try:
            os.write(self._fuse_fd, struct.pack("<IiQ", 16 + len(answer), code, unique) + answer)
        except FileNotFoundError:
            pass  # whoever asked was killed meanwhile
        return True

    def _change(self, *op: Any) -> None:
        """Record a change before it is made, or fail it."""
        if self._error:
            if self._after > 0:
                self._after -= 1
            elif self._times > 0:
                self._times -= 1
                self._failed += 1
                raise _Failure(self._error)
        self._log.append(op)

    # ----- requests

    def _init(self, _node: int, body: bytes, _uid: int, _gid: int) -> bytes:
        major, minor, readahead, _flags = struct.unpack_from("<IIII", body)
        big_writes = 1 << 5
        return struct.pack(
            "<IIIIHHIIHHI7I", 7, min(minor, 31), readahead, big_writes, 16, 12, 131072, 1, 0, 0, 0, *[0] * 7
        )

    def _lookup(self, node: int, body: bytes, _uid: int, _gid: int) -> bytes:
        ino = self._inodes[node].names.get(_name(body))
        if ino is None:
            raise _Failure(errno.ENOENT)
        return self._entry(ino)

    def _getattr(self, node: int, _body: bytes, _uid: int, _gid: int) -> bytes:
        return struct.pack("<QII", 3600, 0, 0) + self._attributes(node)

    def _setattr(self, node: int, body: bytes, _uid: int, _gid: int) -> bytes:
        (valid, _, _, size, _, _, _, _, _, _, _, mode, _, uid, gid, _) = struct.unpack_from("<IIQQQQQQIIIIIIII", body)
        inode = self._inodes[node]
        if valid & 8:
            self._change("size", node, size)
            inode.data[size:] = bytes(max(0, size - len(inode.data)))
        if valid & 1:
            inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(mode)
        inode.uid = uid if valid & 2 else inode.uid
        inode.gid = gid if valid & 4 else inode.gid
        return self._getattr(node, b"", 0, 0)

    def _new(self, parent: int, name: str, mode: int, uid: int, gid: int) -> int:
        if name in self._inodes[parent].names:
            raise _Failure(errno.EEXIST)
        ino = len(self._inodes) + 1
        self._change("name", parent, name, ino)
        self._log.insert(-1, ("folder" if stat.S_ISDIR(mode) else "make", ino))
        self._inodes[ino] = _Inode(mode=mode, uid=uid, gid=gid, time_s=int(time.time()))
        self._inodes[parent].names[name] = ino
        return ino

    def _mknod(self, node: int, body: bytes, uid: int, gid: int) -> bytes:
        mode, _, umask, _ = struct.unpack_from("<IIII", body)
        return self._entry(self._new(node, _name(body[16:]), mode & ~umask, uid, gid))

    def _mkdir(self, node: int, body: bytes, uid: int, gid: int) -> bytes:
        mode, umask = struct.unpack_from("<II", body)
        return self._entry(self._new(node, _name(body[8:]), stat.S_IFDIR | (mode & ~umask), uid, gid))

    def _create(self, node: int, body: bytes, uid: int, gid: int) -> bytes:
        _, mode, umask, _ = struct.unpack_from("<IIII", body)
        ino = self._new(node, _name(body[16:]), mode & ~umask, uid, gid)
        return self._entry(ino) + struct.pack("<QII", 0, 0, 0)

    def _unlink(self, node: int, body: bytes, _uid: int, _gid: int) -> bytes:
        name = _name(body)
        ino = self._inodes[node].names.get(name)
        if ino is None:
            raise _Failure(errno.ENOENT)
        if self._inodes[ino].names:
            raise _Failure(errno.ENOTEMPTY)
        if not self._error:  # a full disk takes this one
            self._log.append(("unname", node, name))
        else:
            self._log.append(("unname", node, name))
        del self._inodes[node].names[name]
        self._inodes[ino].nlink -= 1
        return b""

    def _rename(self, node: int, body: bytes, _uid: int, _gid: int) -> bytes:
        (new_folder,) = struct.unpack_from("<Q", body)
        return self._move(node, new_folder, body[8:])

    def _rename2(self, node: int, body: bytes, _uid: int, _gid: int) -> bytes:
        new_folder, flags, _ = struct.unpack_from("<QII", body)
        if flags:
            raise _Failure(errno.EINVAL)
        return self._move(node, new_folder, body[16:])

    def _move(self, folder: int, new_folder: int, names: bytes) -> bytes:
        old, new = (os.fsdecode(name) for name in names.split(b"\0")[:2])
        ino = self._inodes[folder].names[old]
        self._change("rename", folder, old, new_folder, new, ino)
        del self._inodes[folder].names[old]
        self._inodes[new_folder].names[new] = ino
        return b""

    def _link(self, node: int, body: bytes, _uid: int, _gid: int) -> bytes:
        (ino,) = struct.unpack_from("<Q", body)
        name = _name(body[8:])
        if name in self._inodes[node].names:
            raise _Failure(errno.EEXIST)
        self._change("name", node, name, ino)
        self._inodes[node].names[name] = ino
        self._inodes[ino].nlink += 1
        return self._entry(ino)

    def _open(self, _node: int, _body: bytes, _uid: int, _gid: int) -> bytes:
        return struct.pack("<QII", 0, 0, 0)

    def _read(self, node: int, body: bytes, _uid: int, _gid: int) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        return bytes(self._inodes[node].data[offset : offset + size])

    def _write(self, node: int, body: bytes, _uid: int, _gid: int) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        data = body[40 : 40 + size]
        self._change("data", node, offset, data)
        content = self._inodes[node].data
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        content[offset : offset + size] = data
        return struct.pack("<II", size, 0)

    def _fsync(self, node: int, _body: bytes, _uid: int, _gid: int) -> bytes:
        if self._error != errno.ENOSPC:
            self._change("fsync", node)
        else:
            self._log.append(("fsync", node))
        return b""

    def _statfs(self, _node: int, _body: bytes, _uid: int, _gid: int) -> bytes:
        free = 0 if self._error == errno.ENOSPC else 1 << 20
        return struct.pack("<QQQQQIIII6I", 1 << 21, free, free, 1 << 20, free, 4096, 255, 4096, 0, *[0] * 6)

    def _readdir(self, node: int, body: bytes, _uid: int, _gid: int) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        entries = b""
        for number, (name, ino) in enumerate(list(self._inodes[node].names.items())):
            if number < offset:
                continue
            raw = os.fsencode(name)
            kind = stat.S_IFMT(self._inodes[ino].mode) >> 12
            entry = struct.pack("<QQII", ino, number + 1, len(raw), kind) + raw
            entry += bytes(-len(entry) % 8)
            if len(entries) + len(entry) > size:
                break
            entries += entry
        return entries

    def _nothing(self, _node: int, _body: bytes, _uid: int, _gid: int) -> bytes:
        return b""

    def _entry(self, ino: int) -> bytes:
        return struct.pack("<QQQQII", ino, 0, 3600, 3600, 0, 0) + self._attributes(ino)

    def _attributes(self, ino: int) -> bytes:
        inode = self._inodes[ino]
        size = len(inode.data)
        times = (inode.time_s,) * 3
        return struct.pack(
            "<QQQQQQIIIIIIIIII",
            ino, size, (size + 511) // 512, *times, 0, 0, 0, inode.mode, inode.nlink, inode.uid, inode.gid, 0, 4096, 0,
        )  # fmt: skip


def _name(body: bytes) -> str:
    return os.fsdecode(body.split(b"\0", 1)[0])


def _send(sock: socket.socket, obj: Any) -> None:
    data = pickle.dumps(obj)
    sock.sendall(struct.pack("<Q", len(data)) + data)


def _receive(sock: socket.socket) -> Any:
    (size,) = struct.unpack("<Q", _exactly(sock, 8))
    return pickle.loads(_exactly(sock, size))  # noqa: S301 - of our own other half


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Mount at the first argument; the second is the number of the control socket."""
    mountpoint, control = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    fuse_fd = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)  # a request ends with the process that asked
    options = f"fd={fuse_fd},rootmode=40000,user_id=0,group_id=0,allow_other"
    no_suid, no_dev = 2, 4
    if _libc().mount(b"losing", os.fsencode(mountpoint), b"fuse.losing", no_suid | no_dev, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), mountpoint)
    _Server(fuse_fd, control).serve()


if __name__ == "__main__":
    main()
