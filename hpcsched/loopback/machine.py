"""One loopback node: its files, keys, port and power supply.

Rules:
- A node is ready when a command was run through SSH with the pinned host key, not after a fixed time.
- A node keeps its port while it is off: a socket here stays bound to it without listening.

Other nodes, and the programs on this one, are not known here.
"""

from __future__ import annotations

import os
import pwd
import select
import socket
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import paramiko
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from paramiko.hostkeys import HostKeyEntry

from hpcsched.errors import RequestError, UnavailableError
from hpcsched.loopback import paramiko_sshd, power, sshd

ServerKind = Literal["sshd", "embedded"]

ANSWER_S = 5.0
SWITCH_S = 30.0
LOG_TAIL_BYTES = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopbackNode:
    """The address, keys and directory of one node."""

    name: str
    host: str
    port: int
    user: str
    identity_file: Path  # the client's private key
    host_key: str  # as in known_hosts, without the name
    root: Path  # the node's own directory, for its agent's spool and sockets
    own_hostname: bool  # `hostname` prints `name` there, not the name of this machine


class Machine:
    """One node's files, its port and, while it is on, its power supply process."""

    def __init__(self, name: str, root: Path, user: str, identity_file: Path, server: ServerKind) -> None:
        self.name, self.root, self.user, self.identity_file = name, root, user, identity_file
        self.boot_id = ""
        self._server = server
        self._ssh_dir = root / "ssh"
        self._log = self._ssh_dir / "log"
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._own_hostname = False
        self._lock = threading.Lock()
        _make_node_directories(root, self._ssh_dir, user)
        self._host_key = ensure_key(self._ssh_dir / "host_key")
        self._authorized_keys = self._ssh_dir / "authorized_keys"
        self._authorized_keys.write_text(_public_key(identity_file) + "\n")
        self._authorized_keys.chmod(0o644)
        self._reservation = _reserve_port()

    @property
    def port(self) -> int:
        return int(self._reservation.getsockname()[1])

    @property
    def node(self) -> LoopbackNode:
        return LoopbackNode(
            name=self.name,
            host="127.0.0.1",
            port=self.port,
            user=self.user,
            identity_file=self.identity_file,
            host_key=self._host_key,
            root=self.root,
            own_hostname=self._own_hostname,
        )

    def power_on(self) -> None:
        """Start the power supply process; `wait_until_ready` waits for it."""
        with self._lock:
            if self._supervisor is not None:
                raise RequestError(f"cannot switch node {self.name!r} on: it is on already")
            self.boot_id = str(uuid.uuid4())
            marks = {
                "HPCNODE_BOOT_ID": self.boot_id,
                "HPCNODE_MACHINE_ID": str(self.root),
                "HPCNODE_SIMULATED": "1",
            }
            command = [sys.executable, "-I", "-S", power.__file__, str(os.getpid()), self.name, str(self._log)]
            self._supervisor = subprocess.Popen(
                [*command, *self._server_command(marks | {"PATH": _node_path()})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **marks},
                start_new_session=True,  # Ctrl-C is for the owner, which then stops us
            )

    def _server_command(self, environment: dict[str, str]) -> list[str]:
        if self._server == "embedded":
            return paramiko_sshd.server_command(
                port=self.port,
                user=self.user,
                host_key=self._ssh_dir / "host_key",
                authorized_keys=self._authorized_keys,
                environment=environment,
            )
        config = self._ssh_dir / "sshd_config"
        sshd.write_sshd_config(
            config,
            port=self.port,
            user=self.user,
            host_key=self._ssh_dir / "host_key",
            authorized_keys=self._authorized_keys,
            environment=environment,
        )
        return sshd.sshd_command(config, self._log)

    def wait_until_ready(self, deadline_s: float) -> None:
        """Wait until the node runs commands through SSH; raise if it does not start."""
        with self._lock:
            self._own_hostname = self._read_line(deadline_s) == "up own"
        while (problem := _ssh_problem(self.node)) is not None:
            if is_hopeless(problem) or not self.processes() or time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"cannot start node {self.name!r} on port {self.port}: {type(problem).__name__}: {problem};"
                    f" its log {self._log} ends:\n{_tail(self._log)}"
                )
            time.sleep(0.01)

    def processes(self) -> list[int]:
        supervisor = self._supervisor
        if supervisor is None:
            return []
        return sorted(pid for pid, state in power.descendants(supervisor.pid).items() if state not in "ZX")

    def request(self, word: str) -> None:
        """Send a request to the power supply process, and wait until it is done."""
        with self._lock:
            if self._supervisor is None:
                raise RequestError(f"cannot {word} node {self.name!r}: it is off")
            self._send(word)
            self._read_line(time.monotonic() + SWITCH_S)

    def ask_to_switch_off(self) -> None:
        """Begin to switch off, so that several nodes do it at the same time.

        `power_off` waits for the end.
        """
        with self._lock:
            if self._supervisor is not None:
                self._send("off")

    def power_off(self) -> None:
        self.ask_to_switch_off()
        with self._lock:
            supervisor, self._supervisor = self._supervisor, None
            if supervisor is None:
                return
            assert supervisor.stdin is not None
            assert supervisor.stdout is not None
            said, _ = supervisor.communicate(timeout=SWITCH_S)
        if supervisor.returncode != 0:
            raise UnavailableError(
                f"cannot switch node {self.name!r} off: its supervisor ended with {supervisor.returncode},"
                f" saying {said.decode().strip()!r}; processes may be left"
            )

    def release(self) -> None:
        """Free the port; the node cannot start again."""
        self._reservation.close()

    def _send(self, word: str) -> None:
        assert self._supervisor is not None
        assert self._supervisor.stdin is not None
        try:
            self._supervisor.stdin.write(word.encode() + b"\n")
            self._supervisor.stdin.flush()
        except BrokenPipeError:
            pass  # it is ending; reading its answer shows how

    def _read_line(self, deadline_s: float) -> str:
        assert self._supervisor is not None
        assert self._supervisor.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self._supervisor.stdout], [], [], left_s)[0]:
                raise UnavailableError(f"cannot wait longer for the supervisor of node {self.name!r}: no answer")
            byte = os.read(self._supervisor.stdout.fileno(), 1)
            if not byte:
                raise UnavailableError(f"cannot use node {self.name!r}: its supervisor has ended; {_tail(self._log)}")
            line += byte
        return line.decode().strip()


def is_hopeless(problem: Exception) -> bool:
    """Return whether a retry is useless. A slow or vanished server has not refused the key."""
    if isinstance(problem, paramiko.AuthenticationException):
        return not any(word in str(problem) for word in ("timeout", "shut down"))
    return isinstance(problem, paramiko.BadHostKeyException)


def _make_node_directories(root: Path, ssh_dir: Path, user: str) -> None:
    ssh_dir.mkdir(parents=True, exist_ok=True)
    root.chmod(0o755)
    ssh_dir.chmod(0o755)  # sshd reads the authorized keys as the user, so our umask must not matter
    if os.geteuid() == 0 and user != "root":
        account = pwd.getpwnam(user)
        os.chown(root, account.pw_uid, account.pw_gid)


def ensure_key(path: Path) -> str:
    """Create an Ed25519 key pair at `path` (0600) and `path.pub` if it is missing.

    Return the public key.
    """
    if not path.exists():
        private = Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(private)
        path.with_name(path.name + ".pub").write_text(_public_key(path) + "\n")
    return _public_key(path)


def _public_key(path: Path) -> str:
    key = paramiko.Ed25519Key.from_private_key_file(str(path))
    return f"{key.get_name()} {key.get_base64()}"


def _reserve_port() -> socket.socket:
    # Bound and not listening: only a server that sets SO_REUSEADDR, too, can get the port.
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    return reservation


def _node_path() -> str:
    # The default of sshd, and our interpreter's directory, which may have the only Python.
    interpreter = os.path.dirname(os.path.realpath(sys.executable))
    return f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{interpreter}"


def _ssh_problem(node: LoopbackNode) -> Exception | None:
    """Log in with the pinned host key and run a command.

    Return the error, None if there was none.
    """
    pin = HostKeyEntry.from_line(f"[{node.host}]:{node.port} {node.host_key}")
    with paramiko.SSHClient() as client:
        client.get_host_keys().add(pin.hostnames[0], pin.key.get_name(), pin.key)
        try:
            client.connect(
                node.host,
                node.port,
                node.user,
                key_filename=str(node.identity_file),
                allow_agent=False,
                look_for_keys=False,
                timeout=ANSWER_S,
            )
            _run_nothing(client)
        except (OSError, EOFError, paramiko.SSHException) as error:
            return error
    return None


def _run_nothing(client: paramiko.SSHClient) -> None:
    channel = client.get_transport().open_session(timeout=ANSWER_S)
    channel.settimeout(ANSWER_S)
    channel.exec_command("exit 0")
    if not channel.status_event.wait(ANSWER_S):
        raise paramiko.SSHException("'exit 0' did not end there (does a start-up file of the account wait?)")
    if channel.recv_exit_status() != 0:
        raise paramiko.SSHException(f"'exit 0' ended with {channel.recv_exit_status()} there")


def _tail(path: Path) -> str:
    if not path.exists():
        return "(no log)"
    return path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
