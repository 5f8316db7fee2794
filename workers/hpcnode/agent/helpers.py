"""Helpers: children that do one thing which may block, such as reading a user's file.

The agent's loop never waits for them.

A child's answer is one frame on a pipe. A child that takes too long is killed. Launches and connections are not known here.
"""

from __future__ import annotations

import errno
import heapq
import os
import re
import signal
import stat
from typing import Callable, Dict, Iterable, Tuple

from hpcnode.os import account as user
from hpcnode.os import process
from hpcnode.os.loop import READ, Loop
from hpcnode.wire import protocol

MAX_CHILDREN = 64
MAX_OF_ONE = 8  # that one account, or one kind of question, has: a share of its own may hang
DEADLINE_S = 20.0
MAX_READ_BYTES = 4 << 20
MAX_LISTED = 1000
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_PROBE_NAME = re.compile(re.escape(protocol.PROBE_PREFIX) + r"[0-9a-f]{16}\Z")

Answer = Tuple[protocol.Message, bytes]


class Helpers:
    """The children of the agent that do one thing each."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._running: Dict[str, int] = {}  # by whom they are for

    def ask(
        self,
        work: Callable[[], Answer],
        failed: Callable[[str], Answer],
        deliver: Callable[[Answer], object],
        deadline_s: float = DEADLINE_S,
        of: str = "",
    ) -> None:
        """Do `work` in a child and call `deliver` with its answer, or with `failed(reason)`.

        `of`: the account that it is for, "" for the controller's own questions.
        """
        if self._running.get(of, 0) >= MAX_OF_ONE or sum(self._running.values()) >= MAX_CHILDREN:
            deliver(failed("too many requests at once"))
            return
        late = "no answer within %g s" % deadline_s
        ask_child(
            self._loop,
            lambda: _frame_of(work, failed),
            lambda answer: self._over(of, answer, lambda: failed(late), deliver),
            deadline_s,
        )
        self._running[of] = self._running.get(of, 0) + 1

    def do(self, work: Callable[[], None]) -> None:
        """Do `work` in a child without answer and deadline; if fork fails, do it here."""
        try:
            pid = os.fork()
        except OSError:
            work()
            return
        if pid == 0:
            try:
                process.close_all_but([])
                work()
            finally:
                os._exit(0)

    def _over(self, of: str, data: bytes, late: Callable[[], Answer], deliver: Callable[[Answer], object]) -> None:
        self._running[of] -= 1
        if not self._running[of]:
            del self._running[of]
        frames = list(protocol.Framer().feed(data))
        deliver(frames[0] if frames else late())


class _Child:
    """Collects the output of one child."""

    def __init__(self, loop: Loop, pid: int, pipe: int, deadline_s: float, deliver: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._pid = pid
        self._pipe = pipe
        self._deliver = deliver
        self._data = bytearray()
        os.set_blocking(pipe, False)
        loop.watch(pipe, READ, self._ready)
        self._timer = loop.later(deadline_s, self._too_late)

    def _ready(self, _events: int) -> None:
        try:
            data = os.read(self._pipe, 1 << 20)
        except BlockingIOError:
            return
        self._data += data
        if not data:
            self._close()

    def _too_late(self) -> None:
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._data.clear()
        self._close()

    def _close(self) -> None:
        self._timer.cancel()
        self._loop.watch(self._pipe, 0, self._ready)
        os.close(self._pipe)
        self._deliver(bytes(self._data))


def ask_child(
    loop: Loop,
    work: Callable[[], bytes],
    deliver: Callable[[bytes], None],
    deadline_s: float,
    keep: Iterable[int] = (),
) -> None:
    """Do `work` in a child of its own session, and deliver its answer.

    It has the descriptors `keep`. No answer: it was killed, or took too long. Raises OSError if this node cannot fork.
    """
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
    except OSError:
        os.close(read_end)
        os.close(write_end)
        raise
    if pid == 0:
        _work_in_child(work, write_end, keep)
    os.close(write_end)
    _Child(loop, pid, read_end, deadline_s, deliver)


def _work_in_child(work: Callable[[], bytes], write_end: int, keep: Iterable[int]) -> None:
    try:
        os.setsid()
        process.close_all_but([write_end, *keep])
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        data = memoryview(work())
        while data:
            data = data[os.write(write_end, data) :]
        os.close(write_end)  # a thread that hangs would keep it open beyond our end
    finally:
        os._exit(0)


def _frame_of(work: Callable[[], Answer], failed: Callable[[str], Answer]) -> bytes:
    try:
        answer = work()
    except (OSError, ValueError, user.UserError) as error:
        answer = failed(getattr(error, "strerror", None) or str(error))
    return protocol.encode(*answer)


def read_file(order: protocol.ReadFile, account: user.UserAccount) -> Answer:
    """Read a part of a regular file as its user. Call it in a child: it becomes the user."""
    user.become(account)
    fd = open_beneath(order.beneath, order.path) if order.beneath else os.open(order.path, _READ)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("not a regular file")
    offset = order.offset if order.offset >= 0 else max(0, info.st_size + order.offset)
    data = os.pread(fd, max(0, min(order.limit, MAX_READ_BYTES)), offset)
    return protocol.FileData(order.request, offset, info.st_size), data


def list_files(order: protocol.ListFiles, account: user.UserAccount) -> Answer:
    """List files of a directory as its user. Call it in a child: it becomes the user."""
    user.become(account)
    fd, limit = open_beneath(order.beneath, order.path), max(0, min(order.limit, MAX_LISTED))
    with os.scandir(fd) as found:
        names = ((_utf8(entry.name), entry.name) for entry in found)
        first = heapq.nsmallest(limit + 1, (pair for pair in names if pair[0] > order.after))
    shown = [_listed(fd, text, name) for text, name in first[:limit]]
    return protocol.FileList(order.request, shown, len(first) > limit), b""


def _listed(directory: int, text: str, name: str) -> Tuple[str, str, int, float]:
    try:
        info = os.lstat(name, dir_fd=directory)
    except OSError:  # it is gone meanwhile
        return text, "other", 0, 0.0
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "link"))
    kind = next((kind for is_kind, kind in kinds if is_kind(info.st_mode)), "other")
    return text, kind if text == name else "other", info.st_size, info.st_mtime


def _utf8(name: str) -> str:
    """Return the name; if it is not UTF-8, with escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def open_beneath(directory: str, path: str) -> int:
    """Open a file or directory below a directory.

    No part of the path may be a symbolic link, or "..". A descriptor is opened for each part, so that nobody can exchange one for
    a link meanwhile.

    Raises OSError, ValueError.
    """
    parts = path.split("/") if path else []
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError("not a path below the directory")
    fd = os.open(directory, _READ | os.O_DIRECTORY)
    for at, part in enumerate(parts, 1):
        above = fd
        try:
            fd = os.open(part, _READ | os.O_NOFOLLOW | (os.O_DIRECTORY if at < len(parts) else 0), dir_fd=above)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and stat.S_ISLNK(os.lstat(part, dir_fd=above).st_mode):
                raise ValueError("it is a symbolic link, or behind one; links are not followed here") from None
            raise
        finally:
            os.close(above)
    return fd


def compare_probe(order: protocol.CompareProbe) -> Answer:
    """Compare a share probe with its writer's checksum. Call it in a child: a share may hang.

    The agent may be root and the share writable for everyone, so only files that look like a probe are read.
    """
    if not _PROBE_NAME.match(order.name):
        raise ValueError("not the name of a share probe")
    directory = os.open(order.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(order.name, flags, dir_fd=directory)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1 or info.st_size != protocol.PROBE_BYTES:
        raise ValueError("it is not the share probe: not a regular file of %d bytes" % protocol.PROBE_BYTES)
    if info.st_uid not in (0, order.uid):
        raise ValueError("the share probe belongs to uid %d there, and to uid %d here" % (info.st_uid, order.uid))
    import hashlib  # in a child; see `agent` on the cost of imports

    same = hashlib.sha256(os.read(fd, protocol.PROBE_BYTES)).hexdigest() == order.sha256
    return protocol.ProbeCompared(order.request, same), b""
