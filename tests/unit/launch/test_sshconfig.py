"""The route that a node's file and ~/.ssh/config make together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.launch.sshconfig import Hop, SshSettings, route_to
from hpcsched.model.ids import NodeName
from hpcsched.model.node import NodeSpec

KEY = "ssh-ed25519 AAAA"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "me")
    return tmp_path


def route(tmp_path: Path, text: str, launch_key: Path | None = None, **changes: Any) -> tuple[Hop, ...]:
    (tmp_path / "config").write_text(text)
    spec = NodeSpec(**({"name": NodeName("n1"), "host": "h", "host_key": KEY, "cpus": 1, "mem_mib": 1} | changes))
    return route_to(spec, SshSettings(config_file=tmp_path / "config", launch_key=launch_key, timeout_s=5))


def test_without_a_config_it_is_as_openssh_does(tmp_path: Path) -> None:
    (hop,) = route_to(
        NodeSpec(name=NodeName("n1"), host="h", host_key=KEY, cpus=1, mem_mib=1),
        SshSettings(config_file=tmp_path / "none", launch_key=None, timeout_s=5),
    )
    assert (hop.host, hop.port, hop.user, hop.pinned, hop.use_agent) == ("h", 22, "me", KEY, True)
    assert hop.identities == tuple(tmp_path / ".ssh" / name for name in ("id_ed25519", "id_ecdsa", "id_rsa"))
    assert hop.where == "me@h:22"


def test_the_config_fills_in_and_the_node_s_file_wins(tmp_path: Path) -> None:
    text = "Host h\n HostName 192.0.2.1\n User u\n Port 2200\n IdentityFile ~/k1\n IdentityFile ~/k2\n IdentitiesOnly yes\n"
    (hop,) = route(tmp_path, text, launch_key=tmp_path / "launch")
    assert (hop.host, hop.port, hop.user, hop.use_agent) == ("192.0.2.1", 2200, "u", False)
    assert hop.identities == (tmp_path / "launch", tmp_path / "k1", tmp_path / "k2")
    (hop,) = route(tmp_path, text, port=22, user="root", identity_file="~/mine", launch_key=tmp_path / "launch")
    assert (hop.host, hop.port, hop.user, hop.use_agent) == ("192.0.2.1", 22, "root", False)
    assert hop.identities == (tmp_path / "mine",)


def test_included_files(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "a").write_text("Host h\n Port 1111\n")
    (tmp_path / "conf.d" / "b").write_text("Host h\n User fromb\n Port 2222\n")
    (hop,) = route(tmp_path, "include conf.d/*\nHost *\n Port 3333\n")
    assert (hop.port, hop.user) == (1111, "fromb")


def test_a_file_that_includes_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="deeper than 16"):
        route(tmp_path, "Include config\n")


def test_jumps_in_order_with_their_own_settings(tmp_path: Path) -> None:
    text = (
        "Host h\n ProxyJump one,two@[2001:db8::1]:2222\n"
        "Host one\n HostName 192.0.2.1\n User first\n ProxyJump zero:2\n UserKnownHostsFile ~/kh\n HostKeyAlias gate\n"
    )
    hops = route(tmp_path, text)
    assert [hop.where for hop in hops] == ["me@zero:2", "first@192.0.2.1:22", "two@2001:db8::1:2222", "me@h:22"]
    assert [hop.pinned for hop in hops] == ["", "", "", KEY]
    assert (hops[1].known_as, hops[1].known_hosts[0]) == ("gate", tmp_path / "kh")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Host h\n ProxyCommand nc %h %p\n", "ProxyCommand, which is not supported; use ProxyJump"),
        ("Host h\n ProxyJump a\nHost a\n ProxyCommand x\n", "cannot reach a"),
        ("Host h\n ProxyJump h\n", "more than 8 hops; does one name itself"),
        ("Host h\n ProxyJump a b\n", r"not \[user@\]host\[:port\]"),
        ("Host h\n ProxyJump -oX\n", r"not \[user@\]host\[:port\]"),
        ("Host 'h\n", "cannot read .*config"),
    ],
)
def test_what_cannot_be_followed(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(HpcschedError, match=why):
        route(tmp_path, text)


def test_a_proxy_of_none_is_none(tmp_path: Path) -> None:
    assert len(route(tmp_path, "Host h\n ProxyJump none\n ProxyCommand none\n")) == 1


@pytest.mark.parametrize(
    "match", ["Match exec true", "match=Exec true", "Match host x !exec true", "Match all exec true"]
)
def test_f3_a_configuration_runs_no_command(tmp_path: Path, match: str) -> None:
    """As ProxyCommand: each connection would run it, as the controller, without a limit."""
    ran = tmp_path / "ran"
    with pytest.raises(ConfigError, match="'Match exec' would run a command"):
        route(tmp_path, f"{match.replace('true', f'touch {ran}')}\n HostName evil\n")
    assert not ran.exists()
    assert len(route(tmp_path, "Match host exec user exec\n HostName other\n")) == 1


@pytest.mark.parametrize("name", ["config", "more"])
def test_f3_f6_a_configuration_that_others_may_write_leads_nowhere(tmp_path: Path, name: str) -> None:
    for mode, why in ((0o664, "others may write"), (0o646, "others may write"), (0o644, "")):
        (tmp_path / "more").write_text("Host h\n Port 2200\n")
        (tmp_path / "config").write_text("")
        (tmp_path / name).chmod(mode)
        if why:
            with pytest.raises(ConfigError, match=why):
                route(tmp_path, "Include more\n")
        else:
            assert [hop.port for hop in route(tmp_path, "Include more\n")] == [2200]
