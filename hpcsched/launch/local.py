"""Connect to a node that is this machine: the same bootstrap and agent, without SSH.

For a head that also computes (host = "local" in its file), and for tests of the controller alone.
The agent runs under the controller's account, in its own session: it outlives the controller, as it
does behind SSH.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess

from hpcsched.launch.bundle import bootstrap_argv
from hpcsched.launch.pipe import Abort, Dial, LinkError, LinkProgress, Pipe
from hpcsched.model.node import NodeSpec

STDERR_TAIL_BYTES = 600
EXIT_WAIT_S = 2.0


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
