"""A share as an NFS client shows it, with faults: several mounts of one small FUSE file system, each with a client's caches.

What it does as NFS does: data stays with the client until fsync or close, which is where errors come out; other clients have what
was closed before they opened; listings and names that are missing are remembered, until the client changes that directory
itself; a file that is removed while it is open gets another name first (silly rename).
Faults, each by chance: writes that are short, fail, or fail later; ESTALE; link, rename and creation that are done although they
say that they failed, or are not done.  At the n-th request the process that asks can be killed or stopped.
Not like NFS: no lease is ever lost, and the server itself does not forget what it was given.

Sources: RFC 1813, nfs(5), "Data and metadata coherence".
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import select
import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from losing_disk import ROOT, _Failure, _Inode, _libc, _name, _receive, _send, _Server  # noqa: E402

DIRECT_IO = 1  # of FUSE: the kernel keeps nothing
LATE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
AT_ONCE = (errno.ENOSPC, errno.EIO, errno.ESTALE)


class ShareDisk:
    """The share and its mounts, seen from the test."""

    def __init__(self, top: Path, clients: int) -> None:
        self.paths = [top / f"client-{number}" for number in range(clients)]
        for path in self.paths:
            path.mkdir(parents=True)
        ours, theirs = socket.socketpair()
        self._control = ours
        command = [sys.executable, __file__, str(theirs.fileno()), *map(str, self.paths)]
        self._server = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        theirs.close()
        self._ask("hello")

    def faults(self, client: int, rate: float, seed: int) -> None:
        """Let requests of a client fail by chance; rate 0: none."""
        self._ask("faults", client, rate, seed)

    def strike(self, client: int, pid: int, at: int, number: int) -> None:
        """Send a process a signal at its so-manieth request from now on."""
        self._ask("strike", client, pid, at, number)

    def crash(self, client: int) -> None:
        """The client's machine loses power: what it has not given to the server is gone, and its caches are."""
        self._ask("crash", client)

    def injected(self) -> dict[str, int]:
        """How many faults of which kind there have been."""
        return self._ask("injected")  # type: ignore[no-any-return]

    def _ask(self, *words: Any) -> Any:
        _send(self._control, words)
        return _receive(self._control)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in self.paths:
            _libc().umount2(os.fsencode(path), 2)  # MNT_DETACH
        self._control.close()
        self._server.wait()


# ----- the server's process


class _Client(_Server):
    """One mount: a client's caches before the inodes that all have."""

    def __init__(self, fuse_fd: int, inodes: dict[int, _Inode]) -> None:
        super().__init__(fuse_fd, socket.socketpair()[0])
        self._inodes = inodes
        self._dirty: dict[int, list[tuple[int, bytes]]] = {}  # what the server has not got, by inode
        self._late: dict[int, int] = {}  # the error that fsync or close will have
        self._open_count: dict[int, int] = {}
        self._listed: dict[int, dict[str, int]] = {}  # directories as this client remembers them
        self._rng, self._rate = random.Random(0), 0.0
        self._left, self._struck, self._signal = 0, 0, 0
        self.injected: dict[str, int] = {}
        self._calls |= {18: self._release, 25: self._flush, 27: self._opendir}

    def answer(self) -> bool:
        """Answer one request; False: it is unmounted."""
        return self._answer()

    def fail(self, rate: float, seed: int) -> None:
        self._rate, self._rng = rate, random.Random(seed)

    def strike(self, pid: int, at: int, number: int) -> None:
        self._struck, self._left, self._signal = pid, at, number

    def crash(self) -> None:
        self._dirty.clear()
        self._late.clear()
        self._listed.clear()

    def _change(self, *op: Any) -> None:
        """The log of changes is not kept."""
        self._log = []

    def _fault(self, kind: str, share: float = 1.0) -> bool:
        """Count a request, and say whether it is to fail."""
        if self._left > 0:
            self._left -= 1
            if self._left == 0:
                try:
                    os.kill(self._struck, self._signal)
                except ProcessLookupError:
                    pass
        if self._rng.random() >= self._rate * share:
            return False
        self.injected[kind] = self.injected.get(kind, 0) + 1
        return True

    def _names(self, node: int) -> dict[str, int]:
        """A directory as this client believes it to be."""
        if node not in self._listed:
            self._listed[node] = dict(self._inodes[node].names)
        return self._listed[node]

    def _changed(self, node: int) -> None:
        self._listed.pop(node, None)

    def _lookup(self, node: int, body: bytes, _uid: int, _gid: int) -> bytes:
        if self._fault("ESTALE at lookup", 0.2):
            raise _Failure(errno.ESTALE)
        name = _name(body)
        ino = self._names(node).get(name)
        if ino is None:
            raise _Failure(errno.ENOENT)
        if self._inodes[node].names.get(name) != ino:  # another client has removed it
            self._changed(node)
            raise _Failure(errno.ESTALE)
        return self._entry(ino)

    def _getattr(self, node: int, _body: bytes, _uid: int, _gid: int) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(node)

    def _entry(self, ino: int) -> bytes:
        return struct.pack("<QQQQII", ino, 0, 0, 0, 0, 0) + self._attributes(ino)

    def _create(self, node: int, body: bytes, uid: int, gid: int) -> bytes:
        fails = self._fault("creation")
        done = not fails or self._rng.random() < 0.5
        if done:
            answer = super()._create(node, body, uid, gid)
            self._changed(node)
        if fails:
            raise _Failure(self._rng.choice(AT_ONCE))
        ino = struct.unpack_from("<Q", answer)[0]
        self._open_count[ino] = self._open_count.get(ino, 0) + 1
        return answer[:-16] + struct.pack("<QII", 0, DIRECT_IO, 0)

    def _mkdir(self, node: int, body: bytes, uid: int, gid: int) -> bytes:
        answer = super()._mkdir(node, body, uid, gid)
        self._changed(node)
        return answer

    def _open(self, node: int, body: bytes, _uid: int, _gid: int) -> bytes:
        if self._fault("ESTALE at open", 0.2):
            raise _Failure(errno.ESTALE)
        self._open_count[node] = self._open_count.get(node, 0) + 1
        return struct.pack("<QII", 0, DIRECT_IO, 0)

    def _opendir(self, _node: int, _body: bytes, _uid: int, _gid: int) -> bytes:
        return struct.pack("<QII", 0, 0, 0)

    def _release(self, node: int, _body: bytes, _uid: int, _gid: int) -> bytes:
        if node in self._open_count:
            self._open_count[node] -= 1
        return b""

    def _write(self, node: int, body: bytes, _uid: int, _gid: int) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        data = body[40 : 40 + size]
        if self._fault("write"):
            kind = self._rng.choice(("short", "late", "at once"))
            if kind == "at once":
                raise _Failure(self._rng.choice(AT_ONCE))
            if kind == "late":
                self._late[node] = self._rng.choice(LATE)
                return struct.pack("<II", size, 0)  # and lost
            data = data[: max(1, size // 2)]
        self._dirty.setdefault(node, []).append((offset, data))
        return struct.pack("<II", len(data), 0)

    def _given(self, node: int) -> None:
        """Give the server what this client has of a file, or fail with what went wrong before."""
        error = self._late.pop(node, 0)
        content = self._inodes[node].data
        for offset, data in self._dirty.pop(node, []):
            if len(content) < offset:
                content.extend(bytes(offset - len(content)))
            content[offset : offset + len(data)] = data
        if error:
            raise _Failure(error)

    def _flush(self, node: int, _body: bytes, _uid: int, _gid: int) -> bytes:
        if node in self._dirty and self._fault("close"):
            self._late[node] = self._rng.choice(LATE)
            self._dirty.pop(node, None)
        self._given(node)
        return b""

    def _fsync(self, node: int, _body: bytes, _uid: int, _gid: int) -> bytes:
        if stat.S_ISDIR(self._inodes[node].mode):
            if self._fault("fsync of the directory"):
                raise _Failure(errno.EIO)
            return b""
        if self._fault("fsync"):
            self._late[node] = self._rng.choice(LATE)
            self._dirty.pop(node, None)
        self._given(node)
        return b""

    def _read(self, node: int, body: bytes, _uid: int, _gid: int) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        content = bytearray(self._inodes[node].data)
        for low, data in self._dirty.get(node, []):
            content.extend(bytes(max(0, low - len(content))))
            content[low : low + len(data)] = data
        return bytes(content[offset : offset + size])

    def _unlink(self, node: int, body: bytes, uid: int, gid: int) -> bytes:
        name = _name(body)
        ino = self._inodes[node].names.get(name)
        if ino is not None and self._open_count.get(ino, 0) > 0 and not name.startswith(".nfs"):
            self._inodes[node].names[f".nfs{ino:016x}"] = ino  # another name for who has it open
            self._inodes[ino].nlink += 1
        try:
            return super()._unlink(node, body, uid, gid)
        finally:
            self._changed(node)

    def _link(self, node: int, body: bytes, uid: int, gid: int) -> bytes:
        fails = self._fault("link")
        done = not fails or self._rng.random() < 0.5
        self._changed(node)
        answer = super()._link(node, body, uid, gid) if done else b""
        if fails:
            raise _Failure(errno.EEXIST if done else self._rng.choice(AT_ONCE))
        return answer

    def _move(self, folder: int, new_folder: int, names: bytes) -> bytes:
        fails = self._fault("rename")
        done = not fails or self._rng.random() < 0.5
        self._changed(folder)
        self._changed(new_folder)
        if done:
            old = os.fsdecode(names.split(b"\0")[0])
            if old not in self._inodes[folder].names:
                raise _Failure(errno.ENOENT)
            super()._move(folder, new_folder, names)
        if fails:
            raise _Failure(errno.EIO)
        return b""

    def _readdir(self, node: int, body: bytes, uid: int, gid: int) -> bytes:
        real = self._inodes[node].names
        self._inodes[node].names = self._names(node)
        try:
            return super()._readdir(node, body, uid, gid)
        finally:
            self._inodes[node].names = real


def main() -> None:
    """Serve on the control socket of the first argument; the others are where to mount."""
    control = socket.socket(fileno=int(sys.argv[1]))
    inodes: dict[int, _Inode] = {}
    clients: dict[int, _Client] = {}
    for path in sys.argv[2:]:
        fuse_fd = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)  # a request ends with the process that asked
        options = f"fd={fuse_fd},rootmode=40000,user_id=0,group_id=0,allow_other"
        if _libc().mount(b"share", os.fsencode(path), b"fuse.share", 6, options.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        client = _Client(fuse_fd, inodes)
        clients[fuse_fd] = client
    inodes[ROOT] = _Inode(mode=stat.S_IFDIR | 0o755, nlink=2)
    several = list(clients.values())
    while True:
        ready, _, _ = select.select([*clients, control], [], [])
        for fd in ready:
            if fd is control:
                try:
                    word, *args = _receive(control)
                except EOFError:
                    return
                _send(control, _obey(several, word, args))
            elif not clients[fd].answer():
                del clients[fd]


def _obey(clients: list[_Client], word: str, args: list[Any]) -> Any:
    if word == "injected":
        return {kind: sum(one.injected.get(kind, 0) for one in clients) for one in clients for kind in one.injected}
    if word != "hello":
        number, *rest = args
        {"faults": clients[number].fail, "strike": clients[number].strike, "crash": clients[number].crash}[word](*rest)
    return None


if __name__ == "__main__":
    main()
