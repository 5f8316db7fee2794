"""hpty: runs a task's command on a pseudo-terminal, for `hrun --pty`.

Usage: hpty ROWSxCOLUMNS COMMAND [ARGUMENT...]

It connects the step's pipes with the pseudo-terminal. It reads `frame`s of hrun: typed data, and the size of the window when it
changes. Task 0 gets the terminal; other tasks run without one.

Rules: it ends as the command does. The end of input is typed as the terminal's end-of-file character. SIGTERM hangs up the
terminal, because an interactive shell ignores SIGTERM.

Sources: pty(7), ioctl_tty(2), termios(3).
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import struct
import sys
import termios
from typing import Iterator, List, NoReturn, Optional, Sequence, Tuple

TYPED, WINDOW = b"d", b"w"
_HEADER = struct.Struct("!cI")
WINDOW_SIZE = struct.Struct("!HH")
_PASSED_ON = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
CHUNK = 64 << 10


def frame(kind: bytes, data: bytes) -> bytes:
    """Return a frame of hrun: typed data, or the size of the window."""
    return _HEADER.pack(kind, len(data)) + data


def window_frame(fd: int) -> bytes:
    """Return the frame with the size of the terminal `fd`."""
    rows, columns = size_of(fd)
    return frame(WINDOW, WINDOW_SIZE.pack(rows, columns))


def size_of(fd: int) -> Tuple[int, int]:
    """Return rows and columns of the terminal `fd`, (24, 80) if it is not a terminal."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        return 24, 80
    return rows or 24, columns or 80


class Frames:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Tuple[bytes, bytes]]:
        """Yield (kind, body) of each frame that is complete after `data`."""
        self._data += data
        while len(self._data) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._data)
            if len(self._data) < _HEADER.size + length:
                return
            body = bytes(self._data[_HEADER.size : _HEADER.size + length])
            del self._data[: _HEADER.size + length]
            yield kind, body


def main(argv: Sequence[str]) -> int:
    """Run the command and end as it does."""
    size, command = argv[0], list(argv[1:])
    if os.environ.get("SLURM_PROCID", "0") != "0":
        _execute(command)
    rows, columns = (int(word) for word in size.split("x"))
    master, slave = os.openpty()
    _resize(master, rows, columns)
    child = os.fork()
    if child == 0:
        _become(command, slave)
    os.close(slave)
    return _Terminal(child, master).run()


class _Terminal:
    """The command's terminal while the command runs."""

    def __init__(self, child: int, master: int) -> None:
        self._child = child
        self._master = master
        self._frames = Frames()
        self._typed = bytearray()
        self._has_input = True
        self._signals: List[int] = []
        self._wakeup, wakeup_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wakeup_in, warn_on_full_buffer=False)
        for number in (*_PASSED_ON, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda got, _frame: self._signals.append(got))
        os.set_blocking(master, False)

    def run(self) -> int:
        status: Optional[int] = None
        while status is None:
            reads = [self._master, self._wakeup]
            if self._has_input and len(self._typed) < CHUNK:
                reads.append(0)
            ready, writable, _ = select.select(reads, [self._master] if self._typed else [], [])
            if self._wakeup in ready:
                os.read(self._wakeup, 512)
            if 0 in ready:
                self._take_input()
            if writable:
                self._type()
            if self._master in ready and not self._show():
                status = os.waitpid(self._child, 0)[1]
            else:
                pid, ended = os.waitpid(self._child, os.WNOHANG)
                status = ended if pid else None
            self._pass_signals()
        while self._show():  # its last output
            pass
        return _end_as(status)

    def _take_input(self) -> None:
        data = os.read(0, CHUNK)
        if not data:
            self._has_input = False
            self._typed += b"\x04"
        for kind, body in self._frames.feed(data):
            if kind == TYPED:
                self._typed += body
            elif kind == WINDOW:
                _resize(self._master, *WINDOW_SIZE.unpack(body))

    def _type(self) -> None:
        try:
            del self._typed[: os.write(self._master, self._typed[:1024])]
        except BlockingIOError:
            pass
        except OSError:
            self._typed.clear()

    def _show(self) -> bool:
        """Copy the terminal's output; return False if there is none, or it was closed."""
        try:
            data = memoryview(os.read(self._master, CHUNK))
        except OSError:  # EIO: no process has the terminal open any more
            return False
        while data:
            data = data[os.write(1, data) :]
        return True

    def _pass_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGCHLD:
                continue
            try:
                os.killpg(self._child, signal.SIGHUP if number == signal.SIGTERM else number)
                os.killpg(self._child, signal.SIGCONT)
            except ProcessLookupError:
                pass


def _become(command: List[str], slave: int) -> NoReturn:
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for fd in (0, 1, 2):
        os.dup2(slave, fd)
    _execute(command)


def _execute(command: List[str]) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, ("hpcsched: error: cannot execute %s: %s\n" % (command[0], error.strerror)).encode())
        os._exit(min(error.errno or 125, 125))


def _resize(fd: int, rows: int, columns: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _end_as(status: int) -> int:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return os.WEXITSTATUS(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
