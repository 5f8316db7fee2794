"""Connections of step commands to the sockets of agents and of the controller.

A request has the user's environment and input, so the kernel must say that the server is trusted before anything is sent.

Sources: unix(7).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from typing import Mapping, Optional

from hpcnode.os.trust import is_made_by

AGENT_BACK_S = 20.0  # limit for an agent to be restarted after an upgrade or a kill


def connect_to_agent(path: str) -> socket.socket:
    """Return a connection to this node's agent; wait for an agent that is being restarted.

    Raises OSError.
    """
    deadline_s = time.monotonic() + AGENT_BACK_S
    while True:
        try:
            return connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() >= deadline_s:
                raise
        time.sleep(0.05)


def connect(path: str, timeout_s: Optional[float] = None) -> socket.socket:
    """Return a connection to the unix socket at `path`, of any length.

    Raises PermissionError if its server is not trusted, OSError.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        _connect(sock, path)
        _check_server(sock, path)
    except OSError:
        sock.close()
        raise
    return sock


def _connect(sock: socket.socket, path: str) -> None:
    try:
        sock.connect(path)
    except OSError as error:
        if "too long" not in str(error):
            raise
        directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)  # an address has 107 bytes at most
        try:
            sock.connect("/proc/self/fd/%d/%s" % (directory, os.path.basename(path)))
        finally:
            os.close(directory)


def _check_server(sock: socket.socket, path: str) -> None:
    uid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    if uid in (0, os.getuid()) or os.path.basename(os.path.dirname(path)) == "hpcnode-%d" % uid:  # see `paths`
        return
    if not is_made_by(path, uid):
        raise PermissionError(
            errno.EPERM,
            "it is served by uid %d, which is neither root nor you, nor the owner of a safe directory" % uid,
        )


# ----- the controller's socket for step commands, on the head node
# The rules are those of the head's `paths` module (a test compares the two): `HPCSCHED_CONFIG`, else the user's configuration,
# else the system's. `run_dir` or `state_dir` of hpcsched.toml override the directory that follows from that. Nodes have no
# hpcsched and sometimes no tomllib, so the rules are repeated here.


STEPS_SOCKET = "steps.sock"
_SYSTEM_CONFIG = "/etc/hpcsched"
_SYSTEM_RUN = "/run/hpcsched"


class NotFound(Exception):
    """The socket cannot be located; the text is the reason."""


def steps_socket(environ: Mapping[str, str], uid: int) -> str:
    """Return the path of the controller's socket for step commands. Raises NotFound."""
    return os.path.join(_run_dir(environ, uid), STEPS_SOCKET)


def _run_dir(environ: Mapping[str, str], uid: int) -> str:
    config_dir = _config_dir(environ, uid)
    path = os.path.join(config_dir, "hpcsched.toml")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return _default_run_dir(config_dir, environ)
    except (OSError, ValueError) as error:
        raise NotFound("cannot read %s: %s" % (path, error)) from None
    if "run_dir" in text or "state_dir" in text:
        controller = _controller_table(path, text)
        for key, below in (("run_dir", ""), ("state_dir", "run")):
            value = controller.get(key)
            if isinstance(value, str) and value:
                return os.path.join(config_dir, os.path.expanduser(value), below).rstrip("/")
    return _default_run_dir(config_dir, environ)


def _controller_table(path: str, text: str) -> Mapping[str, object]:
    try:
        import tomllib  # Python 3.11, which the head has; slow to import
    except ImportError:
        raise NotFound("cannot read %s with this Python: run hrun in a job, or on the head node" % path) from None
    try:
        table = tomllib.loads(text).get("controller", {})
    except tomllib.TOMLDecodeError as error:
        raise NotFound("cannot read %s: %s" % (path, error)) from None
    return table if isinstance(table, dict) else {}


def _config_dir(environ: Mapping[str, str], uid: int) -> str:
    given = environ.get("HPCSCHED_CONFIG", "")
    if given:
        return os.path.abspath(given)
    own = _SYSTEM_CONFIG if uid == 0 else _xdg(environ, "XDG_CONFIG_HOME", ".config")
    if os.path.exists(os.path.join(own, "hpcsched.toml")):
        return own
    return _SYSTEM_CONFIG if os.path.exists(os.path.join(_SYSTEM_CONFIG, "hpcsched.toml")) else own


def _default_run_dir(config_dir: str, environ: Mapping[str, str]) -> str:
    if config_dir == _SYSTEM_CONFIG:
        return _SYSTEM_RUN
    if config_dir != _xdg(environ, "XDG_CONFIG_HOME", ".config"):
        return os.path.join(config_dir, "state", "run")
    if environ.get("XDG_RUNTIME_DIR"):
        return _xdg(environ, "XDG_RUNTIME_DIR", "")
    return os.path.join(_xdg(environ, "XDG_STATE_HOME", ".local/state"), "run")


def _xdg(environ: Mapping[str, str], variable: str, below_home: str) -> str:
    value = environ.get(variable, "")
    base = value if value.startswith("/") else os.path.join(environ.get("HOME") or os.path.expanduser("~"), below_home)
    return os.path.join(base.rstrip("/"), "hpcsched")
