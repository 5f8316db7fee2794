"""A small controller for tests of a node: starts a real agent and records its messages.

It acknowledges nothing by itself and keeps all messages, so that a test can say what must and must not have come.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from other_user import PROGRAM, become, program_of, python_of
from waiting import PATIENCE_S, wait_until

from hpcnode.spool import LINES
from hpcnode.wire import protocol

PYTHON = os.environ.get("HPCSCHED_TEST_NODE_PYTHON", sys.executable)
INCARNATION = "feedc0de"
AS_ROOT = os.geteuid() == 0
FINAL = {protocol.ENDED, protocol.REVOKED, protocol.REFUSED, protocol.LOST}


def new_token(job: int = 1, attempt: int = 0, step: str = "batch", node: str = "n1") -> str:
    """Return a token that was never used."""
    return f"{INCARNATION}.{job}.{attempt}.{step}.{node}.{secrets.token_hex(16)}"


def fill_done_log(root: Path) -> None:
    """Leave room for one more line in the done log of the node below `root`."""
    path = root / "spool" / "done_log"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    lines = path.read_text().split("\n") if path.exists() else []
    known = sum(bool(line.strip()) for line in lines)
    with open(path, "a", encoding="ascii") as file:
        file.write(f"\nj {INCARNATION} 999999 0" * (LINES - 1 - known) + "\n")


@dataclass
class NodeUnderTest:
    """One node: its root directory and the agents that run there one after the other."""

    root: Path
    user: str = ""  # another account that the agent runs as; needs root
    node: str = "n1"
    idle_s: float = 60.0
    environ: Mapping[str, str] = field(default_factory=dict)
    agent: subprocess.Popen[bytes] | None = None
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.root / "agent.sock"

    def command(self, *words: str) -> list[str]:
        """Return how a part of the program is run, as the node's account."""
        if not self.user:
            return [PYTHON, "-I", "-S", str(PROGRAM), *words]
        uid = pwd.getpwnam(self.user).pw_uid
        return [*become(uid), python_of(uid), "-I", "-S", str(program_of(uid)), *words]

    def names(self) -> list[str]:
        return ["--root", str(self.root), "--cluster", "c", "--node", self.node, "--idle-s", str(self.idle_s)]

    def start(self, crash_at: str = "", **environ: str) -> None:
        """Start an agent and wait until its socket answers (or it has crashed where it was told to)."""
        read_end, write_end = os.pipe()
        env = {"PATH": os.environ["PATH"], "HPCNODE_SIMULATED": "1", **self.environ, **environ}
        if crash_at:
            env["HPCNODE_CRASH_AT"] = crash_at
        with open(self.root / "log", "ab") as log:
            self.agent = subprocess.Popen(
                self.command("agent", *self.names(), "--ready-fd", str(write_end)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write_end,),
                start_new_session=True,
                env=env,
            )
        self.agents.append(self.agent)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as file:
            self.said = file.readline().decode()

    def kill(self) -> None:
        """Kill the agent, not its shepherds."""
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait(PATIENCE_S)

    def shepherds(self) -> dict[str, int]:
        """Return token -> pid of the shepherds whose start is recorded."""
        found = {}
        for path in (self.root / "spool").glob("*/started"):
            found[path.parent.name] = json.loads(path.read_text())["shepherd"][0]
        return found

    def job_processes(self) -> list[int]:
        """Return every process that was started for a job of this node."""
        return [pid for pid, _, env in self._running() if f"HPCSCHED_AGENT_ROOT={self.root}".encode() in env]

    def processes(self) -> list[int]:
        """Return every process of this node: agents, shepherds, jobs."""
        mine = str(self.root).encode()
        ours = [pid for pid, command, _ in self._running() if mine in command and b"agent" in command]
        return ours + self.job_processes()

    def _running(self) -> Iterator[tuple[int, list[bytes], list[bytes]]]:
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError):
                command = Path("/proc", name, "cmdline").read_bytes()
                if command:  # else a zombie
                    yield int(name), command.split(b"\0"), Path("/proc", name, "environ").read_bytes().split(b"\0")

    def stop(self) -> None:
        """Kill everything of this node."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.processes() and time.monotonic() < deadline_s:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for agent in self.agents:
                agent.poll()
        for agent in self.agents:
            agent.wait(PATIENCE_S)
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if line.split()[1].startswith(f"{self.root}/") and AS_ROOT:  # of agents that were killed
                subprocess.run(["umount", "-l", line.split()[1]], check=False)


class Controller:
    """One connection to an agent."""

    def __init__(
        self,
        node: NodeUnderTest,
        epoch: int = 1,
        incarnation: str = INCARNATION,
        greet: bool = True,
        start: str = "",
        visit: bool = False,
    ) -> None:
        self.node = node
        self.epoch = epoch
        self.messages: list[tuple[protocol.Message, bytes]] = []
        self.closed = False
        self._framer = protocol.Framer()
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(node.socket))
        if greet:
            self.send(protocol.Hello(protocol.VERSION, "c", incarnation, epoch, node.node, start, visit))
            self.welcome = self.wait(lambda m: isinstance(m, (protocol.Welcome, protocol.Goodbye)))

    def send(self, message: protocol.Message, blob: bytes = b"") -> None:
        self.sock.settimeout(PATIENCE_S)  # `pump` leaves its own
        self.sock.sendall(protocol.encode(message, blob))

    def pump(self, timeout_s: float) -> bool:
        """Read received data; return whether there was any."""
        self.sock.settimeout(max(0.001, timeout_s))
        try:
            data = self.sock.recv(1 << 20)
        except (TimeoutError, BlockingIOError):
            return False
        except ConnectionError:
            data = b""
        if not data:
            self.closed = True
            return False
        self.messages += list(self._framer.feed(data))
        return True

    def wait(self, wanted: Callable[[protocol.Message], bool], timeout_s: float = PATIENCE_S) -> Any:
        """Return the first matching message, of received and of later ones."""
        deadline_s = time.monotonic() + timeout_s
        seen = 0
        while True:
            for message, _ in self.messages[seen:]:
                if wanted(message):
                    return message
            seen = len(self.messages)
            if time.monotonic() > deadline_s or self.closed:
                log = (self.node.root / "log").read_text()[-4000:]
                raise AssertionError(f"it did not come; what came: {self.messages[1:][-20:]}; the agent's log: {log}")
            self.pump(deadline_s - time.monotonic())

    def reports(self, token: str) -> list[protocol.Report]:
        return [m for m, _ in self.messages if isinstance(m, protocol.Report) and m.token == token]

    def wait_status(self, token: str, *statuses: str, timeout_s: float = PATIENCE_S) -> protocol.Report:
        """Return the first report of the token with one of these statuses.

        The start of a batch step that ended at once is not reported by itself: then its end will do.
        """
        wanted = {*statuses, protocol.ENDED} if protocol.STARTED in statuses else statuses
        return self.wait(
            lambda m: isinstance(m, protocol.Report) and m.token == token and m.status in wanted, timeout_s
        )

    def final(self, token: str, timeout_s: float = PATIENCE_S) -> protocol.Report:
        return self.wait_status(token, *FINAL, timeout_s=timeout_s)

    def ack(self, *reports: protocol.Report) -> None:
        self.send(protocol.Ack([report.seq for report in reports]))

    def launch(self, script: str = "", token: str = "", **fields: Any) -> str:
        """Launch a batch script, or a step when only `argv` is given, and return its token."""
        token = token or new_token(step="batch" if script else "0")
        self.send(launch_of(token, epoch=self.epoch, **fields), script_of(script) if script else b"")
        return token

    def close(self) -> None:
        self.sock.close()


class StepCommand(Controller):
    """A connection that does what hrun does."""

    def __init__(self, node: NodeUnderTest, job_id: int = 1, first: protocol.Message | None = None) -> None:
        super().__init__(node, greet=False)
        self.send(first or protocol.StepRequest(protocol.VERSION, job_id, {"ntasks": "1"}, ["true"], "/", {}))


def from_stream(controller: Controller, kind: type) -> protocol.FromStream:
    return controller.wait(lambda m: isinstance(m, protocol.FromStream) and m.message["type"] == kind.__name__)


def script_of(text: str) -> bytes:
    return ("#!/bin/sh\n" + text).encode()


def pids(work: Path, count: int = 1) -> list[int]:
    """Return the processes that have written their numbers to `pids`, once there are so many."""

    def found() -> list[int] | None:
        numbers = [int(word) for word in (work / "pids").read_text().split()] if (work / "pids").exists() else []
        return numbers if len(numbers) >= count else None

    return wait_until(found, what="the processes")


def launch_of(token: str, **fields: Any) -> protocol.Launch:
    """Return a launch for a token, with defaults for missing fields."""
    _, job, attempt, step, _node, _ = token.split(".")
    base = protocol.Launch(
        token=token,
        job_id=int(job),
        attempt=int(attempt),
        step=step,
        epoch=1,
        user="",
        work_dir="/tmp",
        argv=[],
        env={"PATH": "/usr/bin:/bin", "HPCSCHED_JOB_ID": job},
        tasks=protocol.TaskSet(0, 1, 1, 0, 1),
        cpus=1,
        mem_mib=0,
        gpus=[],
        allow_uid_below=0,  # the tests' accounts are root and nobody
    )
    return protocol.changed(base, **fields)


@contextlib.contextmanager
def running_node(root: Path, **fields: Any) -> Iterator[NodeUnderTest]:
    """Start a node's agent below `root`, and remove everything at the end."""
    root.mkdir(parents=True, exist_ok=True)
    node = NodeUnderTest(root=root, **fields)
    if node.user:
        account = pwd.getpwnam(node.user)
        os.chown(root, account.pw_uid, account.pw_gid)
    root.chmod(0o711 if AS_ROOT and not node.user else 0o700)
    try:
        node.start()
        yield node
    finally:
        node.stop()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every account can reach; for the node's root and, in `work`, for what its jobs write.

    Not below /tmp, of which a job may have its own.
    """
    path = Path(tempfile.mkdtemp(prefix="hpcnode-test-", dir="/var/tmp"))
    path.chmod(0o755)
    (path / "work").mkdir()
    (path / "work").chmod(0o777)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def work(place: Path) -> Path:
    return place / "work"
