"""One end listens, the other measures, briefly and on loopback; interfaces are trees of files."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bench.hosts import can_make_hosts, hosts, space_of

from hpcnode.agent import link_speed


@pytest.fixture
def listener() -> Iterator[int]:
    """Listen for a peer with the key "right" in a thread; return the port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=link_speed.serve, args=(listening, "right"))
        thread.start()
        yield listening.getsockname()[1]
        link = link_speed.measure("127.0.0.1", listening.getsockname()[1], "right")  # whatever came before
        thread.join()
    assert min(link["up_mbps"], link["down_mbps"], link["rtt_us"]) > 0
    assert link["rtt_p99_us"] >= link["rtt_us"]
    assert link["near"]["device"] == link["far"]["device"] == "lo"
    assert link["mtu"] > 1000
    assert link["lost"] < 0.1


def test_a_peer_with_another_key_is_refused(listener: int) -> None:
    for wrong in ("wrong", "", "r" * 500):
        with pytest.raises(ValueError, match="does not know the key|closed"):
            link_speed.measure("127.0.0.1", listener, wrong)


def test_connections_that_say_nothing_or_rubbish_keep_no_peer_waiting(listener: int) -> None:
    silent = [socket.create_connection(("127.0.0.1", listener)) for _ in range(2 * link_speed.MOST_UNPROVEN)]
    for number, one in enumerate(silent[1::2]):
        try:
            one.sendall(b"GET / HTTP/1.1\r\n" * (1 + number % 9))
        except OSError:
            pass  # closed already, which is as good
    silent[0].close()


def test_a_proof_that_was_heard_is_of_no_use_again(listener: int) -> None:
    with socket.create_connection(("127.0.0.1", listener)) as first:
        nonce = first.recv(32)
        proof = link_speed._proof("right", b"peer", nonce, b"n" * 32)
    with socket.create_connection(("127.0.0.1", listener)) as second:
        second.settimeout(10)
        assert second.recv(32) != nonce
        second.sendall(b"n" * 32 + proof)
        assert second.recv(32) == b""


def answered(by: Callable[[socket.socket], None]) -> int:
    """Listen with a program of another kind for one connection; return its port."""
    listening = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listening, listening.accept()[0] as connection:
            by(connection)

    threading.Thread(target=run, daemon=True).start()
    port: int = listening.getsockname()[1]
    return port


def test_a_listener_without_the_key_is_not_measured() -> None:
    def pretend(connection: socket.socket) -> None:
        connection.sendall(b"n" * 32)
        connection.recv(64)
        connection.sendall(b"p" * 32)
        connection.recv(1)

    with pytest.raises(ValueError, match="does not know the key"):
        link_speed.measure("127.0.0.1", answered(pretend), "right")


def test_a_listener_that_sends_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed, "LONGEST_STREAM_S", 0.2)

    def flood(connection: socket.socket) -> None:
        try:
            while True:
                connection.sendall(bytes(1 << 16))
        except OSError:
            pass

    with (
        socket.create_connection(("127.0.0.1", answered(flood)), 10) as connection,
        pytest.raises(ValueError, match="too long"),
    ):
        link_speed._counted(connection)
    with (
        socket.create_connection(("127.0.0.1", answered(flood)), 10) as connection,
        pytest.raises(ValueError, match="report is too long"),
    ):
        link_speed._line(connection)


def test_the_port_is_known_before_a_peer_connects_and_serves_once() -> None:
    port = link_speed.link_facts("right", "", 0)["link_port"]
    assert link_speed.link_facts("right", "127.0.0.1", port)["link"]["down_mbps"] >= 1
    with pytest.raises(OSError):
        link_speed.measure("127.0.0.1", port, "right")


def test_the_listener_ends_without_a_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        link_speed.serve(listening, "right", for_s=0.05)


# ----- interfaces


def a_device(net: Path, name: str, *, files: dict[str, str] | None = None, folders: tuple[str, ...] = ()) -> None:
    (net / name).mkdir(parents=True)
    for file, text in (files or {}).items():
        (net / name / file).write_text(text)
    for folder in folders:
        (net / name / folder).mkdir()


@pytest.mark.parametrize("mark", ["wireless", "phy80211"])
def test_a_device_with_a_radio_is_wifi(tmp_path: Path, mark: str) -> None:
    a_device(tmp_path, "wlp2s0", files={"speed": "-1\n", "mtu": "1500\n"}, folders=(mark, "device"))
    assert link_speed.interface("wlp2s0", str(tmp_path)) == {"device": "wlp2s0", "kind": "wifi", "mtu": 1500}


def test_a_card_is_wired_and_a_bridge_is_what_is_below_it(tmp_path: Path) -> None:
    a_device(tmp_path, "eth0", files={"speed": "1000\n", "mtu": "9000", "duplex": "half\n"}, folders=("device",))
    a_device(tmp_path, "br0", files={"mtu": "9000"}, folders=("lower_eth0", "lower_veth1"))
    a_device(tmp_path, "veth1", files={"speed": "10000\n"})
    a_device(tmp_path, "loop", folders=("lower_loop",))
    found = link_speed.interface("eth0", str(tmp_path))
    assert found == {"device": "eth0", "kind": "wired", "speed_mbps": 1000, "mtu": 9000, "duplex": "half"}
    assert link_speed.interface("br0", str(tmp_path))["kind"] == "wired"
    assert link_speed.interface("veth1", str(tmp_path))["kind"] == "virtual"
    assert link_speed.interface("loop", str(tmp_path))["kind"] == "virtual"
    assert link_speed.interface("gone", str(tmp_path)) == {"device": "gone", "kind": "virtual"}


def test_rubbish_in_the_tree_is_left_out(tmp_path: Path) -> None:
    files = {"speed": "9" * 40, "mtu": "many", "duplex": "unknown\n"}
    a_device(tmp_path, "eth0", files=files, folders=("device",))
    assert link_speed.interface("eth0", str(tmp_path)) == {"device": "eth0", "kind": "wired"}


def test_the_kernel_names_the_interface_to_an_address() -> None:
    assert link_speed.device_to("127.0.0.1") == "lo"
    assert link_speed.device_to("::ffff:127.0.0.1") == "lo"
    assert link_speed.interface_to("no address") == {}


SERVE = (
    "import socket; from hpcnode.agent import link_speed as l; s = l._listener(); print(s.getsockname()[1], flush=True)"
)


@pytest.mark.netns
def test_a_slow_link_is_measured_as_slow_as_it_is(tmp_path: Path) -> None:
    if not can_make_hosts():
        pytest.skip("SLOW LINKS NOT TESTED: that needs root, and ip of iproute2")
    environ = os.environ | {"PYTHONPATH": str(Path(link_speed.__file__).parents[2])}
    with hosts(2, 20, tmp_path) as addresses:
        enter = [["ip", "netns", "exec", space_of(tmp_path, at), sys.executable, "-c"] for at in range(2)]
        listening = [*enter[1], f"{SERVE}; l.serve(s, 'right')"]
        with subprocess.Popen(listening, stdout=subprocess.PIPE, text=True, env=environ) as serving:
            assert serving.stdout is not None
            port = serving.stdout.readline().strip()
            measuring = (
                f"import json; from hpcnode.agent import link_speed as l; "
                f"print(json.dumps(l.measure('{addresses[1]}', {port}, 'right')))"
            )
            done = subprocess.run([*enter[0], measuring], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    link = json.loads(done.stdout)
    assert 10 < link["up_mbps"] < 21
    assert 10 < link["down_mbps"] < 21
    assert link["near"] == link["far"] | {"device": "eth0"}
    assert link["mtu"] == 1500
