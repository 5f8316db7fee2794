"""The SSH server of a loopback node where OpenSSH's sshd is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcsched.errors import ConfigError


def server_command(
    *, port: int, user: str, host_key: Path, authorized_keys: Path, environment: Mapping[str, str]
) -> list[str]:
    """Return the command that runs the server in the foreground."""
    raise ConfigError("cannot start nodes with the embedded server: it is not there yet; install openssh-server")
