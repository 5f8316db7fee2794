"""Machines on loopback: starts N nodes that answer to SSH as real ones do, switches them off and on, and ends them.

Each node (`machine`) is a process tree of its own below a supervisor (`supervise`), with its own port, host key,
directory, boot id and, where the kernel allows it, host name. In front stands OpenSSH's sshd (`sshd`) or our own server
(`embedded`). Whatever ends this process ends the nodes: no tree outlives its owner.
This module does not know what runs on the nodes: it sees accounts, keys and processes.
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
    """A set of nodes that this process owns; leaving the `with` block stops them."""

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
        """Switch all nodes off and give their ports back; a second call does nothing."""
        _stop_machines(list(self._machines.values()))

    def power_off(self, name: str) -> None:
        """Kill everything on the node at once, as a pulled plug does; return when nothing is left."""
        self._machine(name).power_off()

    def power_on(self, name: str) -> None:
        """Start the node again: same port and host key, new boot id, nothing running; return when it answers."""
        machine = self._machine(name)
        machine.power_on()
        machine.wait_until_ready(time.monotonic() + READY_S)

    def freeze(self, name: str) -> None:
        """Stop everything on the node where it stands (SIGSTOP): connections stay open, and nobody answers."""
        self._machine(name).request("freeze")

    def thaw(self, name: str) -> None:
        """Let what `freeze` stopped go on."""
        self._machine(name).request("thaw")

    def processes(self, name: str) -> list[int]:
        """Return the pids of all that runs on the node, its SSH server included, its power supply not."""
        return self._machine(name).processes()

    def boot_id(self, name: str) -> str:
        """Return the boot id that sessions on the node see now, or saw last."""
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

    `user` is the account that logs in, by default the one that runs this; only root can name another.
    `auto` takes OpenSSH's sshd where it can let that account in, else the embedded server.

    Raises: RequestError (names, user), ConfigError (sshd demanded and unusable), UnavailableError (a node that does
    not start).
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
    """Write an OpenSSH client config, so that `ssh -F path NAME` reaches the nodes; host keys go next to it."""
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
        own = f"uid{os.geteuid()}"  # containers run under numbers that nobody has named
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
    with contextlib.ExitStack() as todo:  # all of it, even where one fails
        for machine in machines:
            todo.callback(machine.release)
            todo.callback(machine.power_off)
