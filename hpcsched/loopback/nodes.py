"""Machines on loopback: start N nodes with SSH, switch them off and on, end them.

Each node (`machine`) is a process tree below its power supply (`power`), with its own port, host key, directory, boot id and, if
the kernel allows it, host name. Its SSH server is OpenSSH's (`sshd`) or our own (`paramiko_sshd`). If this process ends in any
way, the nodes end. The programs on the nodes are not known here.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from hpcsched.errors import ConfigError, RequestError
from hpcsched.loopback import sshd
from hpcsched.loopback.machine import LoopbackNode, Machine, ServerKind, ensure_key

__all__ = ["LoopbackNode", "LoopbackNodes", "start_nodes", "write_ssh_config"]

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


def write_ssh_config(nodes: LoopbackNodes, path: Path) -> None:
    """Write an OpenSSH client config, so that `ssh -F path NAME` reaches the nodes.

    Host keys go next to it.
    """
    known_hosts = path.with_name(path.name + ".known_hosts")
    known = [f"[{node.host}]:{node.port} {node.host_key}\n" for node in nodes.nodes.values()]
    known_hosts.write_text("".join(known))
    path.write_text("\n".join(_host_block(node, known_hosts.absolute()) for node in nodes.nodes.values()))


def _host_block(node: LoopbackNode, known_hosts: Path) -> str:
    settings = {
        "HostName": node.host,
        "Port": node.port,
        "User": node.user,
        "IdentityFile": _quoted(node.identity_file),
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": _quoted(known_hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
    }
    return f"Host {node.name}\n" + "".join(f"    {key} {value}\n" for key, value in settings.items())


def _quoted(path: Path) -> str:
    return f'"{path}"' if any(c.isspace() for c in str(path)) else str(path)


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
    problem = sshd.why_no_sshd(user)
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
