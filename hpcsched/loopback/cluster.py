"""A whole cluster on this machine, for the demo and for tests.

All files are below one directory. A cluster ends with its object. Commands run as a user runs them: as programs, with
HPCSCHED_CONFIG set to this cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import paramiko
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from paramiko.hostkeys import HostKeyEntry

from hpcsched import client, paths
from hpcsched.config.load import load_config, render_config, render_node
from hpcsched.errors import ConfigError, RequestError, UnavailableError
from hpcsched.launch import as_controller
from hpcsched.loopback import paramiko_sshd, power
from hpcsched.store.engine import create_database

COMMAND_TIMEOUT_S = 120.0
# Variables of another cluster, or of a job around us: defaults of options, columns, the job's id.
FOREIGN_VARIABLES = (
    "HPCSCHED_", "SLURM_", "SLURMD_", "HSUB_", "SBATCH_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SPRIO_",
    "SSHARE_", "SRUN_", "SCONTROL_",
)  # fmt: skip


class LocalCluster:
    """Nodes `names` with `cpus` cpus each, and a controller, below `base`.

    The end of the `with` block ends all.
    """

    def __init__(
        self,
        base: Path,
        names: Sequence[str] = ("n1", "n2", "n3"),
        *,
        cpus: int = 2,
        mem_mib: int = 2048,
        server: Literal["auto", "sshd", "embedded"] = "auto",
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self.base = base
        self.share = base / "share"
        self.config_dir = base / "etc"
        self._names = names
        self._cpus, self._mem_mib = cpus, mem_mib
        self._server = server
        self._settings = dict(settings or {})
        self.machines: LoopbackNodes | None = None

    @property
    def env(self) -> dict[str, str]:
        """The environment in which commands use this cluster."""
        bin_dir = str(Path(sys.executable).parent)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN_VARIABLES)}
        return inherited | {
            "HPCSCHED_CONFIG": str(self.config_dir),
            "PATH": bin_dir + os.pathsep + os.environ.get("PATH", os.defpath),
        }

    @property
    def server(self) -> str:
        """The kind of SSH server: sshd or embedded."""
        return self.machines.server if self.machines is not None else self._server

    def start_machines(self) -> LoopbackNodes:
        """Switch on all nodes."""
        self.machines = start_nodes(self.base / "nodes", self._names, server=self._server)
        return self.machines

    def write_config(self) -> None:
        """Write the configuration that `hpcsched init` and `hpcsched node add` would write."""
        if self.machines is None:
            raise UnavailableError("cannot write the configuration: the nodes have not been started")
        for directory in (self.share, self.config_dir, self.config_dir / paths.NODES_DIR):
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            directory.chmod(0o755)
        chosen: dict[str, Mapping[str, object]] = {
            "cluster": {"name": "demo", "share": str(self.share)},
            "partitions.main": {"nodes": "all", "default": True},
            "alerts": {"on": False},  # one process less; who tries them switches them on
        }
        if os.getuid() == 0:
            chosen["controller"] = {"allow_uid_below": 0}  # root may submit jobs as root here
        for section, values in self._settings.items():
            chosen[section] = {**chosen.get(section, {}), **values}
        (self.config_dir / paths.CONFIG_FILE).write_text(render_config(chosen))
        for node in self.machines.nodes.values():
            text = render_node(node.name, self.node_values(node))
            (self.config_dir / paths.NODES_DIR / f"{node.name}.toml").write_text(text)
        self._make_database()

    def _make_database(self) -> None:
        config = load_config(self.config_dir)
        state_dir, account = config.controller.state_dir, config.controller.account()
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if account is not None and os.getuid() == 0:
            for path in (state_dir, *(Path(spec.identity_file) for spec in config.nodes if spec.identity_file)):
                os.chown(path, account.pw_uid, account.pw_gid)
        with as_controller(config):
            create_database(state_dir / paths.DATABASE_FILE)

    def node_values(self, node: LoopbackNode) -> dict[str, object]:
        """Return the entry of a node in nodes.d."""
        return {
            "host": node.host,
            "port": node.port,
            "user": node.user,
            "identity_file": str(node.identity_file),
            "host_key": node.host_key,
            "cpus": self._cpus,
            "memory": f"{self._mem_mib}M",
            "root": str(node.root / "agent"),
            "python": sys.executable,
        }

    def start(self) -> Self:
        """Start nodes and controller, and wait until every node answers."""
        try:
            self.start_machines()
            self.write_config()
            self.up()
            self.wait_for_nodes()
        except BaseException:
            self.stop()
            raise
        return self

    def up(self) -> None:
        """Start the controller."""
        self.run("hpcsched", "up")

    def down(self) -> None:
        """Stop the controller; jobs continue."""
        self.run("hpcsched", "down")

    def stop(self) -> None:
        """End the controller, then the nodes and all their processes."""
        try:
            if (self.config_dir / paths.CONFIG_FILE).exists():
                self.run("hpcsched", "down", check=False)
        finally:
            if self.machines is not None:
                self.machines.stop()

    def remove(self) -> None:
        """Delete the cluster's directory."""
        shutil.rmtree(self.base, ignore_errors=True)

    def wait_for_nodes(self, timeout_s: float = 60.0) -> None:
        """Wait until every node answers the controller."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            nodes = self.api("GET", "/v1/nodes")["nodes"]
            if all(node["link"] == "up" for node in nodes):
                return
            if time.monotonic() > deadline_s:
                why = "; ".join(f"{node['name']}: {node['link_why']}" for node in nodes if node["link"] != "up")
                raise UnavailableError(f"cannot start the cluster: nodes do not answer: {why}")
            time.sleep(0.05)

    def api(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request to the controller's API."""
        return client.call(method, path, body, where=self.api_socket)

    @property
    def api_socket(self) -> Path:
        """The controller's socket."""
        return Path(paths.api_socket({"HPCSCHED_CONFIG": str(self.config_dir)}, os.getuid()))

    def run(
        self,
        *command: str,
        check: bool = True,
        stdin: str = "",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a user of this cluster.

        With `check`, raise UnavailableError if it fails.
        """
        result = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            cwd=cwd or (self.share if self.share.exists() else self.base),
            env=self.env | dict(env or {}),
            timeout=timeout_s,
        )
        if check and result.returncode != 0:
            raise UnavailableError(
                f"{' '.join(command)} ended with status {result.returncode}:\n{result.stdout}{result.stderr}"
            )
        return result

    def json(self, *command: str) -> Any:
        """Run a command and return its JSON output."""
        return json.loads(self.run(*command).stdout)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


# ----- the nodes
# Each node (`Machine`) is a process tree below its power supply (`power`), with its own port, host key, directory, boot id and,
# if the kernel allows it, host name. Its SSH server is OpenSSH's sshd or our own (`paramiko_sshd`). Of the system's own sshd
# only the program is used. If this process ends in any way, the nodes end. A node is ready when a command was run through SSH
# with the pinned host key, not after a fixed time. While it is off, a socket here stays bound to its port without listening.
# Sources: sshd(8), sshd_config(5).


READY_S = 60.0


class LoopbackNodes:
    """The nodes of this process; the end of the `with` block stops them."""

    def __init__(self, machines: dict[str, Machine], server: ServerKind) -> None:
        self._machines = machines
        self.server: ServerKind = server
        self.nodes: dict[str, LoopbackNode] = {name: machine.node for name, machine in machines.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Switch off all nodes and free their ports; a second call does nothing."""
        _stop_machines(list(self._machines.values()))

    def power_off(self, name: str) -> None:
        """Kill all processes of the node at once, like a power failure.

        Return when nothing is left.
        """
        self._machine(name).power_off()

    def power_on(self, name: str) -> None:
        """Start the node again, with the same port and host key and a new boot id.

        Return when it answers.
        """
        machine = self._machine(name)
        machine.power_on()
        machine.wait_until_ready(time.monotonic() + READY_S)

    def freeze(self, name: str) -> None:
        """Stop all processes of the node (SIGSTOP): connections stay open without answers."""
        self._machine(name).request("freeze")

    def thaw(self, name: str) -> None:
        """Resume the processes that `freeze` stopped."""
        self._machine(name).request("thaw")

    def processes(self, name: str) -> list[int]:
        """Return the pids of the node's processes, with its SSH server, without its power supply."""
        return self._machine(name).processes()

    def boot_id(self, name: str) -> str:
        """Return the present, or last, boot id of the node."""
        return self._machine(name).boot_id

    def _machine(self, name: str) -> Machine:
        try:
            return self._machines[name]
        except KeyError:
            known = ", ".join(self._machines)
            raise RequestError(f"cannot find node {name!r}: the nodes are {known}") from None


def start_nodes(
    base_dir: Path,
    names: Sequence[str],
    *,
    server: Literal["auto", "sshd", "embedded"] = "auto",
    user: str | None = None,
) -> LoopbackNodes:
    """Start one node per name below `base_dir` and return them when all answer to SSH.

    `user` is the account for logins, by default our own; only root can choose another. `auto` uses OpenSSH's sshd if it can
    log in that account, else the embedded server.

    Raises: RequestError (names, user), ConfigError (sshd requested but unusable), UnavailableError (a node does not start).
    """
    _check_names(names)
    account = _account(user)
    kind = _server_kind(server, account)
    base_dir = base_dir.absolute()
    base_dir.mkdir(parents=True, exist_ok=True)
    identity_file = base_dir / "client_key"
    ensure_key(identity_file)
    machines: dict[str, Machine] = {}
    try:
        for name in names:
            machines[name] = Machine(name, base_dir / name, account, identity_file, kind)
            machines[name].power_on()
        deadline_s = time.monotonic() + READY_S
        for machine in machines.values():
            machine.wait_until_ready(deadline_s)
    except BaseException:
        _stop_machines(list(machines.values()))
        raise
    return LoopbackNodes(machines, kind)


def _check_names(names: Sequence[str]) -> None:
    if isinstance(names, str) or not names or len(set(names)) != len(names):
        raise RequestError(f"cannot start nodes {names!r}: a list of different names is needed")
    for name in names:
        if not name.isascii() or not name.replace("-", "").isalnum() or not name[0].isalnum() or len(name) > 63:
            raise RequestError(f"cannot start node {name!r}: a host name has letters, digits and '-', 63 at most")


def _account(user: str | None) -> str:
    try:
        own = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        own = f"uid{os.geteuid()}"  # containers may run under a uid without a name
    if user is not None and user != own and os.geteuid() != 0:
        raise RequestError(f"cannot start nodes for user {user!r}: only root can, and this is {own!r}")
    return user or own


def _server_kind(server: Literal["auto", "sshd", "embedded"], user: str) -> ServerKind:
    if server == "embedded":
        return "embedded"
    problem = why_no_sshd(user)
    if problem is None:
        return "sshd"
    if server == "sshd":
        raise ConfigError(f"cannot start nodes with sshd: {problem}; or ask for the embedded server")
    return "embedded"


def _stop_machines(machines: list[Machine]) -> None:
    for machine in machines:
        machine.ask_to_switch_off()
    with contextlib.ExitStack() as todo:  # all of them, even if one fails
        for machine in machines:
            todo.callback(machine.release)
            todo.callback(machine.power_off)


ServerKind = Literal["sshd", "embedded"]

# ----- one node: its files, keys, port and power supply


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
            marks = {"HPCNODE_BOOT_ID": self.boot_id, "HPCNODE_MACHINE_ID": str(self.root), "HPCNODE_SIMULATED": "1"}
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
        write_sshd_config(
            config,
            port=self.port,
            user=self.user,
            host_key=self._ssh_dir / "host_key",
            authorized_keys=self._authorized_keys,
            environment=environment,
        )
        return sshd_command(config, self._log)

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
            printed, _ = supervisor.communicate(timeout=SWITCH_S)
        if supervisor.returncode != 0:
            raise UnavailableError(
                f"cannot switch node {self.name!r} off: its supervisor ended with {supervisor.returncode},"
                f" saying {printed.decode().strip()!r}; processes may be left"
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


# ----- OpenSSH's sshd


# Sessions must not run the account's real start-up files: version managers take locks in the home directory, and switching off
# the node would kill them with the lock held. For sshd, bash reads ~/.bashrc only in an outermost shell; zsh always reads
# ~/.zshenv unless ZDOTDIR is elsewhere.
NO_START_UP = {"SHLVL": "1", "ZDOTDIR": "/nonexistent"}

RUN_DIR = Path("/run/sshd")
SEARCH_PATH = os.pathsep.join([os.defpath, "/usr/sbin", "/usr/local/sbin", "/sbin"])

CONFIG = """\
AddressFamily inet
ListenAddress 127.0.0.1:{port}
HostKey {host_key}
AuthorizedKeysFile {authorized_keys}
AllowUsers {user}
PidFile none
LogLevel VERBOSE
UsePAM no
StrictModes no
UseDNS no
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PermitUserRC no
X11Forwarding no
PrintMotd no
MaxSessions 1000
MaxStartups 1000
Subsystem sftp internal-sftp
SetEnv {environment}
"""


def find_sshd() -> str | None:
    """Return the absolute path of sshd, or None."""
    return shutil.which("sshd") or shutil.which("sshd", path=SEARCH_PATH)


def why_no_sshd(user: str) -> str | None:
    """Return why sshd cannot log in `user` on this machine, and what to do; None if it can."""
    if find_sshd() is None:
        return "sshd is not installed (Debian: apt-get install openssh-server)"
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return f"there is no account {user!r} in the password database, and sshd wants one"
    if os.path.basename(account.pw_shell) in ("nologin", "false"):
        return f"the account {user!r} has the login shell {account.pw_shell}, with which it can run nothing"
    if os.geteuid() == 0 and _is_locked(user):
        return f"the account {user!r} is locked (a '!' before its password in /etc/shadow)"
    return None


def _is_locked(user: str) -> bool:
    try:
        lines = Path("/etc/shadow").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith(f"{user}:!") for line in lines)


def write_sshd_config(
    path: Path, *, port: int, user: str, host_key: Path, authorized_keys: Path, environment: dict[str, str]
) -> None:
    """Write the configuration of one node's sshd; `environment` is added to every session."""
    text = CONFIG.format(
        port=port,
        user=user,
        host_key=_quoted_word(str(host_key)),
        authorized_keys=_quoted_word(str(authorized_keys).replace("%", "%%")),
        environment=" ".join(_quoted_word(f"{name}={value}") for name, value in (NO_START_UP | environment).items()),
    )
    if _version() >= (9, 8):
        text += "PerSourcePenalties no\n"  # a refused login must not block the next one
    path.write_text(text)


def _quoted_word(word: str) -> str:
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _version() -> tuple[int, int]:
    sshd = find_sshd()
    assert sshd is not None
    # Before 9.2 sshd has no -V, but its error message has the version.
    version = subprocess.run([sshd, "-V"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", version.stderr + version.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def sshd_command(config: Path, log: Path) -> list[str]:
    """Return the command that runs sshd in the foreground.

    As root, create the directory that it requires.
    """
    sshd = find_sshd()
    assert sshd is not None
    if os.geteuid() == 0:
        RUN_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
    return [sshd, "-D", "-f", str(config), "-E", str(log)]
