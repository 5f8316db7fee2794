"""What might block is done in a child: reading a user's file, asking the GPUs. The agent's loop never waits for it.

A child's answer is one frame on a pipe; it is killed when it takes too long. It knows neither launches nor connections.
"""

from __future__ import annotations

import os
import re
import signal
import stat
from typing import Callable, Tuple

from hpcnode.os import account as user
from hpcnode.os import process
from hpcnode.os.loop import READ, Loop
from hpcnode.wire import protocol

MAX_CHILDREN = 16
DEADLINE_S = 20.0
MAX_READ_BYTES = 4 << 20

_PROBE_NAME = re.compile(re.escape(protocol.PROBE_PREFIX) + r"[0-9a-f]{16}\Z")

Answer = Tuple[protocol.Message, bytes]


class Helpers:
    """The children that do one thing each."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._running = 0

    def ask(
        self, work: Callable[[], Answer], failed: Callable[[str], Answer], tell: Callable[[Answer], object]
    ) -> None:
        """Do `work` in a child and call `tell` with its answer, or with what `failed` makes of the reason."""
        if self._running >= MAX_CHILDREN:
            tell(failed("too many requests at once"))
            return
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            _work_in_child(work, failed, write_end)
        os.close(write_end)
        self._running += 1
        _Child(self._loop, pid, read_end, lambda answer: self._over(answer, failed, tell))

    def do(self, work: Callable[[], None]) -> None:
        """Do `work` in a child, without an answer and without a deadline; when a child cannot be had, do it here."""
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

    def _over(self, data: bytes, failed: Callable[[str], Answer], tell: Callable[[Answer], object]) -> None:
        self._running -= 1
        frames = list(protocol.Framer().feed(data))
        tell(frames[0] if frames else failed("no answer within %g s" % DEADLINE_S))


class _Child:
    """Collects what one child writes."""

    def __init__(self, loop: Loop, pid: int, pipe: int, tell: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._pid = pid
        self._pipe = pipe
        self._tell = tell
        self._data = bytearray()
        os.set_blocking(pipe, False)
        loop.watch(pipe, READ, self._ready)
        self._timer = loop.later(DEADLINE_S, self._too_late)

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
        self._tell(bytes(self._data))


def _work_in_child(work: Callable[[], Answer], failed: Callable[[str], Answer], write_end: int) -> None:
    try:
        os.setpgid(0, 0)
        process.close_all_but([write_end])
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        try:
            answer = work()
        except (OSError, ValueError, user.UserError) as error:
            answer = failed(getattr(error, "strerror", None) or str(error))
        data = memoryview(protocol.encode(*answer))
        while data:
            data = data[os.write(write_end, data) :]
    finally:
        os._exit(0)


def read_file(order: protocol.ReadFile, account: user.UserAccount) -> Answer:
    """Read a part of a regular file as its user. To be called in a child: it becomes the user."""
    user.become(account)
    fd = os.open(order.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("not a regular file")
    offset = order.offset if order.offset >= 0 else max(0, info.st_size + order.offset)
    data = os.pread(fd, max(0, min(order.limit, MAX_READ_BYTES)), offset)
    return protocol.FileData(order.request, offset, info.st_size), data


def compare_probe(order: protocol.CompareProbe) -> Answer:
    """Compare a share probe with what its writer expects. To be called in a child: a share may hang.

    The agent may be root and the share may be writable for everyone, so nothing but a probe is opened for its content.
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
    import hashlib  # in a child: see `agent` for what an import costs

    same = hashlib.sha256(os.read(fd, protocol.PROBE_BYTES)).hexdigest() == order.sha256
    return protocol.ProbeCompared(order.request, same), b""
