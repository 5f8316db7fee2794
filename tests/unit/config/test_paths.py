"""Which directories a user's commands and the controller take."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched import paths
from hpcsched.config.load import load_config
from hpcsched.errors import ConfigError

PLAIN = 1000


def test_root_has_the_system_directories() -> None:
    assert paths.own_config_dir({}, 0) == Path("/etc/hpcsched")
    assert paths.default_state_dir(Path("/etc/hpcsched"), {}) == Path("/var/lib/hpcsched")
    assert paths.default_run_dir(Path("/etc/hpcsched"), {}) == Path("/run/hpcsched")


def test_a_plain_user_has_the_xdg_directories() -> None:
    home = {"HOME": "/home/u"}
    assert paths.own_config_dir(home, PLAIN) == Path("/home/u/.config/hpcsched")
    own = paths.own_config_dir(home, PLAIN)
    assert paths.default_state_dir(own, home) == Path("/home/u/.local/state/hpcsched")
    assert paths.default_run_dir(own, home) == Path("/home/u/.local/state/hpcsched/run")
    session = home | {"XDG_RUNTIME_DIR": "/run/user/1000", "XDG_CONFIG_HOME": "/c", "XDG_STATE_HOME": "/s"}
    own = paths.own_config_dir(session, PLAIN)
    assert own == Path("/c/hpcsched")
    assert paths.default_state_dir(own, session) == Path("/s/hpcsched")
    assert paths.default_run_dir(own, session) == Path("/run/user/1000/hpcsched")


def test_a_relative_xdg_directory_is_ignored() -> None:
    assert paths.own_config_dir({"HOME": "/h", "XDG_CONFIG_HOME": "c"}, PLAIN) == Path("/h/.config/hpcsched")


def test_a_cluster_of_its_own_keeps_all_below_its_directory() -> None:
    environ = {"HPCSCHED_CONFIG": "/x", "XDG_RUNTIME_DIR": "/run/user/0", "HOME": "/h"}
    for uid in (0, PLAIN):
        assert paths.own_config_dir(environ, uid) == Path("/x")
        assert paths.api_socket(environ, uid) == "/x/state/run/api.sock"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[controller]\nrun_dir = '/r'\n",
        "[controller]\nrun_dir = 'r'\n",
        "[controller]\nstate_dir = '/s'\n",
        "[controller]\nstate_dir = 's'\nrun_dir = '~/r'\n",
        "# run_dir = 'no'\n",
    ],
)
def test_a_command_finds_the_socket_where_the_controller_puts_it(tmp_path: Path, text: str) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "hpcsched.toml").write_text(text)
    environ = {"HPCSCHED_CONFIG": str(tmp_path), "HOME": "/h"}
    assert paths.api_socket(environ, PLAIN) == str(load_config(tmp_path, environ).api_socket)


def test_a_plain_user_without_a_cluster_uses_the_system_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "SYSTEM_CONFIG", str(tmp_path / "etc"))
    environ = {"HOME": str(tmp_path)}
    own = tmp_path / ".config" / "hpcsched"
    assert paths.find_config_dir(environ, PLAIN) == own  # neither exists
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "hpcsched.toml").touch()
    assert paths.find_config_dir(environ, PLAIN) == tmp_path / "etc"
    assert paths.api_socket(environ, PLAIN) == f"/run/hpcsched/{paths.API_SOCKET}"
    own.mkdir(parents=True)
    (own / "hpcsched.toml").touch()
    assert paths.find_config_dir(environ, PLAIN) == own


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "hpcsched.toml").write_text("run_dir = [\n")
    with pytest.raises(ConfigError, match=r"hpcsched\.toml"):
        paths.api_socket({"HPCSCHED_CONFIG": str(tmp_path)}, PLAIN)
