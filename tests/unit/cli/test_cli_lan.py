"""`hpcsched node discover` and `hpcsched node wake`: what they read, what they believe, and what they send."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import node

from hpcsched.cli.admin import hpcsched_command, run
from hpcsched.cli.admin.lan import (
    NewMachine,
    from_arp,
    from_known_hosts,
    from_mdns,
    from_mdns_answer,
    from_scan,
    new_machines,
)
from hpcsched.config.keys import BadValue, mac_address
from hpcsched.config.load import render_node
from hpcsched.errors import RequestError
from hpcsched.launch.wake_on_lan import magic_packet

MAC = "52:54:00:12:34:56"
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHVZF4l5bhNmVmZVp3ym9tR0pXoV4cRyEGQf8NUZzr3H"


@pytest.fixture
def config_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "etc"
    (directory / "nodes.d").mkdir(parents=True)
    (directory / "hpcsched.toml").write_text(f'[controller]\nstate_dir = "{tmp_path}/state"\n')
    values = {"host_key": HOST_KEY, "cpus": 2, "memory": "2G"}
    for name, more in (("n1", {"mac": MAC}), ("n2", {})):
        (directory / "nodes.d" / f"{name}.toml").write_text(render_node(name, {"host": name, **values, **more}))
    monkeypatch.setenv("HPCSCHED_CONFIG", str(directory))
    monkeypatch.setenv("HOME", str(tmp_path))
    return directory


# ----- waking


def test_a_node_is_woken_by_the_packet_of_its_card(config_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
        card.bind(("127.0.0.1", 0))
        card.settimeout(30)
        to = f"127.0.0.1:{card.getsockname()[1]}"
        assert run(hpcsched_command, "hpcsched", ["node", "wake", "n1", "--to", to]) == 0
        data = card.recv(2048)
    assert data == b"\xff" * 6 + bytes.fromhex("525400123456") * 16
    assert f"sent the packet for {MAC} to 127.0.0.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["n2"], "hpcsched node probe n2"),
        (["n9"], "no node of that name"),
        (["n1", "--to", "::1"], "IPv4"),
        (["n1", "--to", "127.0.0.1:99999"], "IPv4"),
        (["n1", "--mac", "01:00:5e:00:00:01"], "wants the address of a network card"),
    ],
)
def test_a_wake_that_cannot_be_says_why(
    config_dir: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    assert run(hpcsched_command, "hpcsched", ["node", "wake", *words]) == 1
    assert why in capsys.readouterr().err


NETWORK = """
import socket, subprocess, sys
for words in ("link add v0 type veth peer name v1", "addr add 10.9.9.1/24 brd + dev v0", "link set v1 up", "link set v0 up"):
    subprocess.run(["ip", *words.split()], check=True)
from hpcsched.launch.wake_on_lan import interfaces, magic_packet, send_magic
card = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
card.bind(("10.9.9.255", 9))
card.settimeout(30)
assert [tuple(one) for one in interfaces()] == [("v0", "10.9.9.1", "10.9.9.255")], interfaces()
print(send_magic("%s"))
assert card.recv(2048) == magic_packet("%s")
"""


def test_the_packet_goes_to_the_broadcast_address_of_each_network() -> None:
    in_network = ["unshare", "--net", "--user", "--map-root-user"]
    if subprocess.run([*in_network, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody make networks")
    done = subprocess.run(
        [*in_network, sys.executable, "-c", NETWORK % (MAC, MAC)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['255.255.255.255 from 10.9.9.1', '10.9.9.255 from 10.9.9.1']"


def test_addresses_of_cards_are_spelled_in_one_way() -> None:
    assert mac_address("52-54-00-AB-34-56") == "52:54:00:ab:34:56"
    assert mac_address("") == ""
    for wrong in ("00:00:00:00:00:00", "52:54:00:12:34", "ff:ff:ff:ff:ff:ff", 7, "52:54:00:12:34:56\n"):
        with pytest.raises(BadValue):
            mac_address(wrong)
    assert len(magic_packet(MAC)) == 102


# ----- candidates


def test_known_hosts_without_hashes_patterns_and_markers(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(
        f"gpu1,10.0.0.7 {HOST_KEY}\n[gpu2.lab]:2222 {HOST_KEY}\n|1|aa=|bb= {HOST_KEY}\n*.lab {HOST_KEY}\n"
        f"@revoked bad {HOST_KEY}\n# a comment of words\n-oProxyCommand=x {HOST_KEY}\n[x]:99999999 {HOST_KEY}\nshort\n"
    )
    found = [one.target for one in from_known_hosts([path, tmp_path / "none"])]
    assert found == ["gpu1", "10.0.0.7", "gpu2.lab:2222"]


def test_neighbours_that_have_answered(tmp_path: Path) -> None:
    path = tmp_path / "arp"
    path.write_text(
        "IP address       HW type     Flags       HW address            Mask     Device\n"
        "10.0.0.7         0x1         0x2         52:54:00:AA:00:01     *        eth0\n"
        "10.0.0.8         0x1         0x0         00:00:00:00:00:00     *        eth0\n"
        "rubbish\n"
    )
    assert list(from_arp(path)) == [NewMachine("10.0.0.7", mac="52:54:00:aa:00:01", found_by=["neighbour on eth0"])]


def label(name: str) -> bytes:
    return b"".join(bytes([len(part)]) + part.encode() for part in name.split(".")) + b"\0"


def answer(*, port: int = 2222, service: str = "_ssh._tcp.local") -> bytes:
    """Return what a machine that offers SSH answers; the name of its service is compressed."""
    target = b"\x04gpu3" + struct.pack("!H", 0xC000 | 12)
    pointer = label(service) + struct.pack("!HHIH", 12, 1, 120, len(target)) + target
    content = struct.pack("!3H", 0, 0, port) + label("gpu3.local")
    server = b"\x04gpu3\xc0\x0c" + struct.pack("!HHIH", 33, 1, 120, len(content)) + content
    return struct.pack("!6H", 0, 0x8400, 0, 1, 0, 1) + pointer + server


def test_a_machine_that_offers_ssh_by_mdns_is_found() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as machine:
        machine.bind(("127.0.0.1", 0))
        machine.settimeout(30)

        def respond() -> None:
            query, asker = machine.recvfrom(9000)
            assert label("_ssh._tcp.local") in query
            for data in (b"\0" * 3, answer(), answer(service="_ipp._tcp.local")):
                machine.sendto(data, asker)

        thread = threading.Thread(target=respond)
        thread.start()
        found = from_mdns(machine.getsockname(), 3.0)
        thread.join()
    assert found == [NewMachine("127.0.0.1", 2222, found_by=["mDNS"])]


@pytest.mark.parametrize("cut", range(0, len(answer()), 5))
def test_a_malformed_answer_is_no_machine(cut: int) -> None:
    assert from_mdns_answer(answer()[:cut], "10.0.0.9") == []
    loop = struct.pack("!6H", 0, 0x8400, 0, 1, 0, 0) + struct.pack("!H", 0xC00C) + b"\0" * 10
    assert from_mdns_answer(loop, "10.0.0.9") == []
    assert from_mdns_answer(struct.pack("!6H", 0, 0x8400, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF), "10.0.0.9") == []


def test_a_scan_lists_servers_of_ssh_and_cleans_what_they_say(
    config_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.2", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"SSH-2.0-x\x1b[2Jy" + b"z" * 5000 + b"\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        words = ["node", "discover", "--scan", "127.0.0.2/31", "--port", str(port), "--json"]
        assert run(hpcsched_command, "hpcsched", words) == 0
        thread.join()
    found = [one for one in json.loads(capsys.readouterr().out)["candidates"] if "scan" in one["found_by"]]
    assert [one["target"] for one in found] == [f"127.0.0.2:{port}"]
    assert found[0]["says"].startswith("SSH-2.0-x?[2Jyzz")
    assert len(found[0]["says"]) <= 255


def test_a_scan_is_bounded() -> None:
    for wrong in ("10.0.0.0/21", "2001:db8::/64", "10.0.0.0/24; x", ""):
        with pytest.raises(RequestError):
            from_scan(wrong, 22)


def test_nodes_and_this_machine_are_no_candidates() -> None:
    spec = node("n1").spec
    nodes = [replace(spec, host="gpu1", mac=MAC), replace(spec, host="gpu2", port=2222)]
    found = [
        NewMachine("gpu1"), NewMachine("gpu2", 2222), NewMachine("10.0.0.7", mac=MAC), NewMachine("10.0.0.1"),
        NewMachine("gpu4", found_by=["known_hosts"]), NewMachine("gpu4", found_by=["scan"], says="SSH-2.0-x"),
    ]  # fmt: skip
    (one,) = new_machines(found, nodes, ["10.0.0.1"])
    assert (one.host, one.found_by, one.says) == ("gpu4", ["known_hosts", "scan"], "SSH-2.0-x")
