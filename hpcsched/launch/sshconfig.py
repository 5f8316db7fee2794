"""The route to a node: its configuration and the user's OpenSSH client configuration.

Supported options of ssh_config(5): Host, Match, Include, HostName, User, Port, IdentityFile,
IdentitiesOnly, ProxyJump (also chains), UserKnownHostsFile, HostKeyAlias (for jump hosts).
ProxyCommand and "Match exec" are refused: they would run a local command for each connection, and
its timeouts would not be enforced. So is a file that others may write, as ssh does: its writer
chooses where a route leads. The node's own configuration has precedence.

It reads files. It resolves no names and opens no sockets.
"""

from __future__ import annotations

import getpass
import glob
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko

from hpcsched.errors import ConfigError
from hpcsched.launch.pipe import LinkError
from hpcsched.model.node import NodeSpec

MAX_HOPS = 8
MAX_INCLUDES = 16
_INCLUDE = re.compile(r"\s*include\s*[\s=]\s*(.+?)\s*\Z", re.IGNORECASE)
_JUMP = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][^@\s]*)@)?(?P<host>\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)(?::(?P<port>\d{1,5}))?\Z"
)
_DEFAULT_IDENTITIES = ("id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSettings:
    """Settings that all nodes share. `launch_key` is tried first if it exists."""

    config_file: Path
    launch_key: Path | None
    timeout_s: float
    down_after_s: float = 45.0  # the kernel gives up on unacknowledged data after this time


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One SSH server on the route; the last one is the node."""

    host: str
    port: int
    user: str
    identities: tuple[Path, ...]
    use_agent: bool
    pinned: str  # the node's host key; "" for jump hosts
    known_hosts: tuple[Path, ...]
    known_as: str  # the name to look up there

    @property
    def where(self) -> str:
        return f"{self.user}@{self.host}:{self.port}"


def route_to(spec: NodeSpec, settings: SshSettings) -> tuple[Hop, ...]:
    """Return the servers on the route, the node last. Raises LinkError or ConfigError."""
    config = read_ssh_config(settings.config_file)
    found = _lookup(config, spec.host)
    identities = _identities(found, settings)
    if spec.identity_file is not None:
        identities = (Path(spec.identity_file).expanduser(),)
    node = _hop(
        found,
        spec.host,
        user=spec.user,
        port=spec.port,
        identities=identities,
        use_agent=spec.identity_file is None and found.get("identitiesonly", "no") != "yes",
        pinned=spec.host_key,
    )
    return (*_jumps(config, found, settings, depth=0), node)


def read_ssh_config(path: Path) -> paramiko.SSHConfig:
    """Return the parsed client configuration, empty if there is none. Raises ConfigError."""
    try:
        return paramiko.SSHConfig.from_text("\n".join(_lines(path, depth=0)))
    except FileNotFoundError:
        return paramiko.SSHConfig()
    except (OSError, UnicodeDecodeError, paramiko.SSHException) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _lines(path: Path, depth: int) -> Iterator[str]:
    """Yield the file's lines, with included files expanded (paramiko has no Include)."""
    for line in _text(path).splitlines():
        if _runs_command(line):
            raise ConfigError(
                f"cannot use {path}: 'Match exec' would run a command for each connection; give the controller a file without "
                "it: ssh_config in [controller] of hpcsched.toml"
            )
        match = _INCLUDE.match(line)
        if match is None:
            yield line
            continue
        if depth >= MAX_INCLUDES:
            raise ConfigError(f"cannot read {path}: Include goes deeper than {MAX_INCLUDES} files")
        for pattern in match.group(1).split():
            # ssh_config(5): relative names are below ~/.ssh; here, below the directory of the given
            # file.
            wanted = Path(pattern.strip('"')).expanduser()
            for name in sorted(glob.glob(str(wanted if wanted.is_absolute() else path.parent / wanted))):
                yield from _lines(Path(name), depth + 1)


def _text(path: Path) -> str:
    """Return the text of a file that only its owner may write. Raises ConfigError, OSError."""
    with path.open(encoding="utf-8") as file:
        if os.fstat(file.fileno()).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(f"cannot trust {path}: others may write it; run: chmod go-w {path}")
        return file.read()


def _runs_command(line: str) -> bool:
    """Return whether the line is a ``Match`` with the criterion ``exec``."""
    keyword, *words = line.replace("=", " ").split() or [""]
    if keyword.lower() != "match":
        return False
    while words:
        criterion = words.pop(0).lower().lstrip("!")
        if criterion == "exec":
            return True
        if criterion not in ("all", "canonical", "final"):
            words = words[1:]  # its argument
    return False


def _lookup(config: paramiko.SSHConfig, host: str) -> dict[str, str | list[str]]:
    found = dict(config.lookup(host))
    if found.get("proxycommand"):
        raise LinkError(
            f"cannot reach {host}: ~/.ssh/config gives it a ProxyCommand, which is not supported; use ProxyJump"
        )
    return found


def _hop(
    found: dict[str, str | list[str]],
    name: str,
    *,
    user: str | None,
    port: int | None,
    identities: tuple[Path, ...],
    use_agent: bool,
    pinned: str,
) -> Hop:
    files = str(found.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2")).split()
    host = str(found.get("hostname", name))
    return Hop(
        host=host,
        port=port or int(str(found.get("port", 22))),
        user=user or str(found.get("user", "")) or getpass.getuser(),
        identities=identities,
        use_agent=use_agent,
        pinned=pinned,
        known_hosts=(*(Path(file).expanduser() for file in files), Path("/etc/ssh/ssh_known_hosts")),
        known_as=str(found.get("hostkeyalias", host)),
    )


def _jumps(
    config: paramiko.SSHConfig, found: dict[str, str | list[str]], settings: SshSettings, depth: int
) -> tuple[Hop, ...]:
    """Return the hops of a ProxyJump, in order; the first may have a ProxyJump of its own."""
    chain = str(found.get("proxyjump", "none"))
    if chain.lower() == "none":
        return ()
    if depth >= MAX_HOPS:
        raise LinkError(f"cannot follow ProxyJump {chain}: more than {MAX_HOPS} hops; does one name itself?")
    hops: list[Hop] = []
    for number, word in enumerate(chain.split(",")):
        match = _JUMP.match(word.strip().removeprefix("ssh://"))
        if match is None:
            raise LinkError(f"cannot follow ProxyJump {chain}: {word!r} is not [user@]host[:port]")
        name = match["host"].strip("[]")
        its = _lookup(config, name)
        if number == 0:
            hops += _jumps(config, its, settings, depth + 1)
        hops.append(
            _hop(
                its,
                name,
                user=match["user"],
                port=int(match["port"]) if match["port"] else None,
                identities=_identities(its, settings),
                use_agent=its.get("identitiesonly", "no") != "yes",
                pinned="",
            )
        )
    return tuple(hops)


def _identities(found: dict[str, str | list[str]], settings: SshSettings) -> tuple[Path, ...]:
    named = found.get("identityfile", [])
    files = [Path(name).expanduser() for name in ([named] if isinstance(named, str) else named)]
    if not files:
        files = [Path("~/.ssh").expanduser() / name for name in _DEFAULT_IDENTITIES]
    return (*([settings.launch_key] if settings.launch_key else []), *files)
