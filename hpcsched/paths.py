"""Where things are: the configuration directory, and what else follows from it.

As root: /etc/hpcsched, /var/lib/hpcsched, /run/hpcsched. As a plain user: the XDG directories, each with a folder
`hpcsched`. `HPCSCHED_CONFIG` names another configuration directory; its state and sockets then lie below it, so that
two clusters of one user never meet. The keys `state_dir` and `run_dir` of hpcsched.toml win over all of that.

Commands use this module before they know anything else, so it imports little; a command asks `api_socket`.

Source: XDG Base Directory Specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcsched.errors import ConfigError

CONFIG_FILE = "hpcsched.toml"
NODES_DIR = "nodes.d"
LAUNCH_KEY = "id_ed25519"
DATABASE_FILE = "hpcsched.db"  # in the state directory
API_SOCKET = "api.sock"
STEPS_SOCKET = "steps.sock"

SYSTEM_CONFIG = Path("/etc/hpcsched")
SYSTEM_STATE = Path("/var/lib/hpcsched")
SYSTEM_RUN = Path("/run/hpcsched")


def own_config_dir(environ: Mapping[str, str], uid: int) -> Path:
    """Return the configuration directory that this user would write: `HPCSCHED_CONFIG`, the system's or their own."""
    given = environ.get("HPCSCHED_CONFIG", "")
    if given:
        return Path(given).absolute()
    if uid == 0:
        return SYSTEM_CONFIG
    return _xdg(environ, "XDG_CONFIG_HOME", ".config")


def find_config_dir(environ: Mapping[str, str], uid: int) -> Path:
    """Return the configuration directory that this user's commands read: their own, or else the system's."""
    own = own_config_dir(environ, uid)
    if environ.get("HPCSCHED_CONFIG") or (own / CONFIG_FILE).exists():
        return own
    return SYSTEM_CONFIG if (SYSTEM_CONFIG / CONFIG_FILE).exists() else own


def default_state_dir(config_dir: Path, environ: Mapping[str, str]) -> Path:
    """Return where the database lies if hpcsched.toml does not say it."""
    if config_dir == SYSTEM_CONFIG:
        return SYSTEM_STATE
    if config_dir == _xdg(environ, "XDG_CONFIG_HOME", ".config"):
        return _xdg(environ, "XDG_STATE_HOME", ".local/state")
    return config_dir / "state"


def default_run_dir(config_dir: Path, environ: Mapping[str, str]) -> Path:
    """Return where the sockets lie if hpcsched.toml does not say it."""
    if config_dir == SYSTEM_CONFIG:
        return SYSTEM_RUN
    if config_dir == _xdg(environ, "XDG_CONFIG_HOME", ".config") and environ.get("XDG_RUNTIME_DIR"):
        return _xdg(environ, "XDG_RUNTIME_DIR", "")
    return default_state_dir(config_dir, environ) / "run"


def find_run_dir(environ: Mapping[str, str], uid: int) -> Path:
    """Return the directory of the controller's sockets, for a command: reads no more of the file than that key."""
    config_dir = find_config_dir(environ, uid)
    path = config_dir / CONFIG_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return default_run_dir(config_dir, environ)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    controller = _controller_table(path, text) if _may_set_directories(text) else {}
    for key, below in (("run_dir", ""), ("state_dir", "run")):
        value = controller.get(key)
        if isinstance(value, str) and value:
            return absolute(value, config_dir) / below
    return default_run_dir(config_dir, environ)


def api_socket(environ: Mapping[str, str], uid: int) -> Path:
    """Return the path of the controller's API socket."""
    return find_run_dir(environ, uid) / API_SOCKET


def absolute(text: str, base: Path) -> Path:
    """Return the path that `text` in a file of the directory `base` means: ``~`` expanded, relative below `base`."""
    path = Path(text).expanduser()
    return path if path.is_absolute() else base / path


def _may_set_directories(text: str) -> bool:
    """Say whether a line of the file might set one of the directories: then it has to be parsed, which takes longer."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return any("run_dir" in line or "state_dir" in line for line in lines)


def _controller_table(path: Path, text: str) -> Mapping[str, object]:
    import tomllib  # costs a command some milliseconds, so only where the text needs it

    try:
        table = tomllib.loads(text).get("controller", {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return table if isinstance(table, dict) else {}


def _xdg(environ: Mapping[str, str], variable: str, below_home: str) -> Path:
    value = environ.get(variable, "")
    # The specification: a relative path here is to be ignored.
    base = Path(value) if value.startswith("/") else _home(environ) / below_home
    return base / "hpcsched"


def _home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME", "")
    return Path(home) if home else Path.home()
