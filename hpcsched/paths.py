"""Locations: the configuration directory, and the paths that follow from it.

As root: /etc/hpcsched, /var/lib/hpcsched, /run/hpcsched. As another user: the XDG directories, each with a folder `hpcsched`.
`HPCSCHED_CONFIG` names another configuration directory. Its state and sockets are then below it, so that two clusters of one
user never share them. The keys `state_dir` and `run_dir` of hpcsched.toml override all of this.

A command calls `api_socket` first. That path is computed as text, because importing `pathlib` takes a quarter of Python's
start. The other functions return a Path.

Source: XDG Base Directory Specification.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpcsched.errors import ConfigError

TYPE_CHECKING = False  # for type checkers; importing typing takes a tenth of a command's start
if TYPE_CHECKING:
    from pathlib import Path

CONFIG_FILE = "hpcsched.toml"
NODES_DIR = "nodes.d"
EXTRA_DIR = "conf.d"  # more files like hpcsched.toml
LAUNCH_KEY = "id_ed25519"
SEAL_KEY = "seal.key"  # beside hpcsched.toml, and in no backup
CLUSTER_ID_FILE = "cluster-id"  # beside hpcsched.toml
DATABASE_FILE = "hpcsched.db"  # in the state directory
METRICS_FILE = "metrics.db"  # in the state directory
ALERTS_FILE = "alerts.db"  # in the state directory
API_SOCKET = "api.sock"
STEPS_SOCKET = "steps.sock"

SYSTEM_CONFIG = "/etc/hpcsched"
SYSTEM_STATE = "/var/lib/hpcsched"
SYSTEM_RUN = "/run/hpcsched"


def own_config_dir(environ: Mapping[str, str], uid: int) -> Path:
    """Return the configuration directory that this user would write.

    It is `HPCSCHED_CONFIG`, the system's, or the user's own.
    """
    return _path(_own_config_dir(environ, uid))


def find_config_dir(environ: Mapping[str, str], uid: int) -> Path:
    """Return the configuration directory for this user's commands: their own, or the system's."""
    return _path(_find_config_dir(environ, uid))


def default_state_dir(config_dir: Path, environ: Mapping[str, str]) -> Path:
    """Return the database's directory if hpcsched.toml does not set it."""
    return _path(_default_state_dir(str(config_dir), environ))


def default_run_dir(config_dir: Path, environ: Mapping[str, str]) -> Path:
    """Return the sockets' directory if hpcsched.toml does not set it."""
    return _path(_default_run_dir(str(config_dir), environ))


def absolute(text: str, base: Path) -> Path:
    """Return the path for `text` in a file of the directory `base`.

    ``~`` is expanded. A relative path is below `base`.
    """
    return _path(_absolute(text, str(base)))


def api_socket(environ: Mapping[str, str], uid: int) -> str:
    """Return the path of the controller's API socket, as text."""
    return os.path.join(_find_run_dir(environ, uid), API_SOCKET)


def _path(text: str) -> Path:
    from pathlib import Path

    return Path(text)


def _own_config_dir(environ: Mapping[str, str], uid: int) -> str:
    given = environ.get("HPCSCHED_CONFIG", "")
    if given:
        return given if os.path.isabs(given) else os.path.join(os.getcwd(), given)
    if uid == 0:
        return SYSTEM_CONFIG
    return _xdg(environ, "XDG_CONFIG_HOME", ".config")


def _find_config_dir(environ: Mapping[str, str], uid: int) -> str:
    own = _own_config_dir(environ, uid)
    if environ.get("HPCSCHED_CONFIG") or os.path.exists(os.path.join(own, CONFIG_FILE)):
        return own
    return SYSTEM_CONFIG if os.path.exists(os.path.join(SYSTEM_CONFIG, CONFIG_FILE)) else own


def _default_state_dir(config_dir: str, environ: Mapping[str, str]) -> str:
    if config_dir == SYSTEM_CONFIG:
        return SYSTEM_STATE
    if config_dir == _xdg(environ, "XDG_CONFIG_HOME", ".config"):
        return _xdg(environ, "XDG_STATE_HOME", ".local/state")
    return os.path.join(config_dir, "state")


def _default_run_dir(config_dir: str, environ: Mapping[str, str]) -> str:
    if config_dir == SYSTEM_CONFIG:
        return SYSTEM_RUN
    if config_dir == _xdg(environ, "XDG_CONFIG_HOME", ".config") and environ.get("XDG_RUNTIME_DIR"):
        return _xdg(environ, "XDG_RUNTIME_DIR", "")
    return os.path.join(_default_state_dir(config_dir, environ), "run")


def _find_run_dir(environ: Mapping[str, str], uid: int) -> str:
    config_dir = _find_config_dir(environ, uid)
    path = os.path.join(config_dir, CONFIG_FILE)
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    except FileNotFoundError:
        return _default_run_dir(config_dir, environ)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    controller = _controller_table(path, text) if _may_set_directories(text) else {}
    for key, below in (("run_dir", ""), ("state_dir", "run")):
        value = controller.get(key)
        if isinstance(value, str) and value:
            directory = _absolute(value, config_dir)
            return os.path.join(directory, below) if below else directory
    return _default_run_dir(config_dir, environ)


def _absolute(text: str, base: str) -> str:
    return os.path.join(base, os.path.expanduser(text))


def _may_set_directories(text: str) -> bool:
    """Return whether a line of the file might set one of the directories.

    Only then must the file be parsed, which takes longer.
    """
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return any("run_dir" in line or "state_dir" in line for line in lines)


def _controller_table(path: str, text: str) -> Mapping[str, object]:
    import tomllib  # its import takes milliseconds, so only if the file must be parsed

    try:
        table = tomllib.loads(text).get("controller", {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return table if isinstance(table, dict) else {}


def _xdg(environ: Mapping[str, str], variable: str, below_home: str) -> str:
    value = environ.get(variable, "")
    # The specification says that a relative path here is ignored.
    base = value if value.startswith("/") else os.path.join(environ.get("HOME") or os.path.expanduser("~"), below_home)
    return os.path.join(base, "hpcsched")
