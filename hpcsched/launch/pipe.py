"""The connection of a link: bytes in, bytes out, an end with a reason.

`Dial` opens one: `ssh` over a network, `local_dial` on this machine. Both block. A link runs them
in its own threads and ends them from outside through `Abort`.

`local_dial` runs the same bootstrap and agent, without SSH, for a head that also computes (host =
"local" in its file). The agent runs under the controller's account, in its own session: it outlives
the controller, as it does behind SSH.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Protocol

from hpcsched.errors import UnavailableError
from hpcsched.launch.bundle import bootstrap_argv
from hpcsched.model.node import NodeSpec

STDERR_TAIL_BYTES = 600
EXIT_WAIT_S = 2.0


class LinkError(UnavailableError):
    """The node cannot be reached, or is lost; the text says why and what to do."""


class Pipe(Protocol):
    """Bytes to and from the command that runs on the node."""

    def receive(self, limit: int) -> bytes:
        """Wait for at most `limit` bytes and return them; b"" is the end."""

    def send_all(self, data: bytes) -> None:
        """Wait until all of `data` is accepted. Raises OSError once the pipe has ended."""

    def epitaph(self) -> str:
        """Return, after the end, how the command ended and its last output."""

    def close(self) -> None:
        """End the command and free its resources."""


class Abort:
    """Ends a connection or an attempt from any thread, without waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._enders: list[Callable[[], None]] = []
        self._done = False

    def also(self, end: Callable[[], None]) -> None:
        """Call `end` at the abort, or now if it has already happened. `end` must not block."""
        with self._lock:
            if not self._done:
                self._enders.append(end)
                return
        end()

    def now(self) -> None:
        """Abort. A second call does nothing."""
        with self._lock:
            self._done = True
            enders, self._enders = self._enders, []
        for end in reversed(enders):
            end()


class LinkProgress(Protocol):
    """Receives the current stage, for the text of a timeout; each stage has the whole limit."""

    def __call__(self, stage: str) -> None: ...


class Dial(Protocol):
    """Opens a pipe to the bootstrap on a node. Raises LinkError."""

    def __call__(self, abort: Abort, progress: LinkProgress) -> Pipe: ...


def local_dial(spec: NodeSpec) -> Dial:
    """Return the Dial that opens a pipe to the bootstrap on this machine, for the node `spec`."""

    def dial(abort: Abort, progress: LinkProgress) -> Pipe:
        progress("starting Python")
        ours, theirs = socket.socketpair()  # unlike a pipe, a shutdown wakes all waiting readers and writers
        try:
            process = subprocess.Popen(
                bootstrap_argv(spec.python),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C at the controller's terminal must not end it
            )
        except OSError as error:
            ours.close()
            raise LinkError(f"cannot run {spec.python} for node {spec.name}: {error.strerror}") from None
        finally:
            theirs.close()
        pipe = LocalPipe(ours, process)
        abort.also(pipe.shut_down)
        return pipe

    return dial


class LocalPipe:
    """A child's stdin and stdout as one socket."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        self._sock = sock
        self._process = process
        self._stderr = b""
        self._ready = select.poll()
        self._ready.register(sock, select.POLLIN)
        self._ready.register(process.stderr, select.POLLIN)

    def receive(self, limit: int) -> bytes:
        while not self._poll_stdout():
            self._drain_stderr()
        try:
            return self._sock.recv(limit)
        except ConnectionError:
            return b""  # it ended before it read all our data

    def send_all(self, data: bytes) -> None:
        self._sock.sendall(data)

    def epitaph(self) -> str:
        try:
            how = f"it ended with status {self._process.wait(EXIT_WAIT_S)}"
        except subprocess.TimeoutExpired:
            how = "it closed its output"
        self._drain_stderr()
        last = self._stderr.decode("utf-8", "replace").strip()
        return f"{how}: {last}" if last else how

    def close(self) -> None:
        """End the child, which is only `attach`: its agent is in a session of its own."""
        self.shut_down()
        self._sock.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def shut_down(self) -> None:
        """Wake all threads that wait for it."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # already closed

    def _poll_stdout(self) -> bool:
        """Wait for data; return whether it is on stdout."""
        return any(fd == self._sock.fileno() for fd, _ in self._ready.poll())

    def _drain_stderr(self) -> None:
        """Keep the end of stderr. If it is not read, its writer blocks."""
        assert self._process.stderr is not None
        while (data := self._process.stderr.read(65536)) is not None:
            if not data:
                self._forget_stderr()
                return
            self._stderr = (self._stderr + data)[-STDERR_TAIL_BYTES:]

    def _forget_stderr(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(KeyError):  # it has already ended
            self._ready.unregister(self._process.stderr)
