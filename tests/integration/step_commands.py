"""hrun and hrsh as processes, and a small controller of the test's own behind a real unix socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from waiting import PATIENCE_S

from hpcnode.wire import protocol
from hpcnode.wire.protocol import Output, StepEnded, StepRequest, StepStarted

M = TypeVar("M")
PYTHON = os.environ.get("HPCSCHED_TEST_NODE_PYTHON", sys.executable)  # nodes may have one as old as 3.9
HERE = protocol.Address(node="", stream=1)


class Controller:
    """The other end: accepts one connection, and sends the test's messages."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen(1)
        self.listener.settimeout(PATIENCE_S)
        self.path = path
        self.connection: socket.socket | None = None
        self._framer = protocol.Framer()
        self._came: list[tuple[protocol.Message, bytes]] = []

    def take(self, kind: type[M], wanted: Callable[[M], bool] = lambda message: True) -> tuple[M, bytes]:
        """Return the next message of this kind (that is wanted); others that come before it are kept."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            for at, (message, blob) in enumerate(self._came):
                if isinstance(message, kind) and wanted(message):
                    del self._came[at]
                    return message, blob
            self._receive()
        raise AssertionError(f"no {kind.__name__} came, but {self._came}")

    def _receive(self) -> None:
        if self.connection is None:
            self.connection, _ = self.listener.accept()
            self.connection.settimeout(PATIENCE_S)
        data = self.connection.recv(1 << 16)
        assert data, f"the client closed the connection; still unread: {self._came}"
        self._came += self._framer.feed(data)

    def say(self, message: protocol.Message, blob: bytes = b"") -> None:
        assert self.connection is not None
        self.connection.sendall(protocol.encode(message, blob))

    def output(self, task: int, text: bytes, *, fd: int = 1, offset: int = 0, eof: bool = False) -> None:
        self.say(Output(to=HERE, token=f"token{task}", task=task, fd=fd, offset=offset, eof=eof), text)

    def start(self, tasks: int = 2) -> StepRequest:
        """Take the request, and start one task on each of nodes n1, n2, ..."""
        request, _ = self.take(StepRequest)
        self.say(StepStarted(job_id=12, step=3, tasks=[(f"n{i + 1}", i, 1, f"token{i}") for i in range(tasks)]))
        return request

    def end(self, *codes: int, signals: tuple[int, ...] = (), close: tuple[int, ...] = (1, 2)) -> None:
        """Close the tasks' output and end the step."""
        for task in range(len(codes)):
            for fd in close:
                self.output(task, b"", fd=fd, offset=0, eof=True)
        self.say(StepEnded(codes=list(codes), signals=list(signals or [0] * len(codes))))

    def hang_up(self) -> None:
        """End this connection as a killed agent does."""
        assert self.connection is not None
        self.connection.close()
        self.connection, self._framer = None, protocol.Framer()

    def came(self, kind: type[M]) -> list[M]:
        """Return received messages of this kind that were not taken."""
        return [message for message, _ in self._came if isinstance(message, kind)]

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.listener.close()


class Running:
    """A command under test."""

    def __init__(
        self, module: str, args: tuple[str, ...], env: dict[str, str], cwd: Path, changes: str = "pass"
    ) -> None:
        """Start `module`'s main, after `changes` to it (named `m`): a busy machine must not run into its short times."""
        code = f"import sys, {module} as m; {changes}; sys.exit(m.main())"
        self.process = subprocess.Popen(
            [PYTHON, "-c", code, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd=cwd,
        )

    def feed(self, data: bytes) -> None:
        """Write to its input, and keep that open."""
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def finish(self, stdin: bytes = b"") -> tuple[int, str, str]:
        """Wait for its end; return exit code, output, errors."""
        out, err = self.process.communicate(stdin, timeout=PATIENCE_S)
        return self.process.returncode, out.decode(), err.decode()
