"""The link to a node through real SSH servers, to a stand-in for the agent that can do tricks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pwd
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest
from fake_node import fake_bundle
from link_harness import TIMES, linked, local_spec, settings_with, spec_of
from waiting import wait_until

from hpcnode.wire import protocol
from hpcsched.launch import hostkeys
from hpcsched.launch.hostkeys import make_key
from hpcsched.launch.link import LinkTimes
from hpcsched.launch.pipe import Abort
from hpcsched.launch.ssh import peek_host_key
from hpcsched.loopback import cluster as loopback
from hpcsched.loopback.cluster import LoopbackNode, LoopbackNodes, start_nodes
from hpcsched.model.node import NodeSpec

MIB = 1 << 20
OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHVZF4l5bhNmVmZVp3ym9tR0pXoV4cRyEGQf8NUZzr3H"
QUICK = LinkTimes(connect_s=2, heartbeat_s=0.1, down_after_s=1, retry_first_s=0.05, retry_most_s=0.5)


SERVERS = [pytest.param("sshd", marks=pytest.mark.sshd), "embedded"]
Clusters = Callable[[str], LoopbackNodes]


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """What returns two nodes behind the named server, for the tests that leave them as they were."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(server: str) -> LoopbackNodes:
            base_dir = tmp_path_factory.mktemp(server)
            return stack.enter_context(start_nodes(base_dir, ["a", "b"], server=server))  # type: ignore[arg-type]

        yield start


@pytest.fixture(params=SERVERS)
def nodes(request: pytest.FixtureRequest, clusters: Clusters) -> LoopbackNodes:
    return clusters(usable(request.param))


@pytest.fixture(params=SERVERS)
def own_nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoopbackNodes]:
    """One node for a test that does something to it."""
    with start_nodes(tmp_path / "nodes", ["a"], server=usable(request.param)) as nodes:  # type: ignore[arg-type]
        yield nodes


@pytest.fixture(params=[*SERVERS, "local"])
def spec(request: pytest.FixtureRequest, clusters: Clusters, tmp_path: Path) -> NodeSpec:
    """A node with a fresh root, whichever way leads there."""
    root = tmp_path / "root"
    if request.param == "local":
        return local_spec(root)
    return spec_of(clusters(usable(request.param)).nodes["a"], root=str(root))


def usable(server: str) -> str:
    if server == "sshd" and os.environ.get("CI") != "true":  # there, a missing sshd is a failure
        problem = loopback.why_no_sshd(pwd.getpwuid(os.geteuid()).pw_name)
        if problem is not None:
            pytest.skip(f"NOT TESTED behind sshd: {problem}")
    return server


def behave(spec: NodeSpec, words: str) -> None:
    Path(spec.root).mkdir(mode=0o700, exist_ok=True)
    (Path(spec.root) / "behaviour").write_text(words)


def starts(spec: NodeSpec) -> list[list[str]]:
    """What each start of the stand-in noted: pid, isolated, its pyz."""
    return [line.split() for line in (Path(spec.root) / "starts").read_text().splitlines()]


def write_python(path: Path, lines: str) -> str:
    path.write_text(f'#!/bin/sh\n{lines}\nexec python3 "$@"\n')
    path.chmod(0o755)
    return str(path)


async def why_down(spec: NodeSpec, times: LinkTimes = TIMES, **changes: object) -> str:
    async with linked(spec, times=times, **changes) as (_, listener):  # type: ignore[arg-type]
        return await listener.wait_down()


def test_the_bundle_goes_there_once_and_greets(spec: NodeSpec) -> None:
    async def run(bundle_changes: bytes) -> protocol.Welcome:
        async with linked(spec, bundle=fake_bundle(bundle_changes)) as (link, listener):
            assert not link.up
            welcome = await listener.wait_up()
            assert link.up
            return welcome

    welcome = asyncio.run(run(b""))
    assert (welcome.node, welcome.epoch, welcome.facts["root"]) == (spec.name, 1, spec.root)
    (pyz,) = Path(spec.root).glob("*.pyz")
    assert starts(spec)[0][1:] == ["1", pyz.name]  # isolated, and run from where it was put
    assert pyz.read_bytes() == fake_bundle().data
    assert not pyz.stat().st_mode & 0o022
    stamp = pyz.stat().st_mtime_ns
    asyncio.run(run(b""))
    assert pyz.stat().st_mtime_ns == stamp
    asyncio.run(run(b"# another\n"))
    assert len(list(Path(spec.root).glob("*.pyz"))) == 2


def test_a_damaged_bundle_is_sent_again(spec: NodeSpec) -> None:
    async def run() -> None:
        async with linked(spec) as (_, listener):
            await listener.wait_up()

    asyncio.run(run())
    (pyz,) = Path(spec.root).glob("*.pyz")
    pyz.write_bytes(pyz.read_bytes()[:-100])
    asyncio.run(run())
    assert pyz.read_bytes() == fake_bundle().data


def test_messages_and_blobs_go_both_ways_in_order(spec: NodeSpec) -> None:
    async def run() -> None:
        async with linked(spec) as (link, listener):
            await listener.wait_up()
            sizes = [0, 1, 5 * MIB, 3, 100_000]
            for number, size in enumerate(sizes):
                assert link.send(protocol.Probe(request=number), bytes(size))
            for number, size in enumerate(sizes):
                message, _ = await listener.wait_message()
                assert (message.request, message.facts["got"]) == (number, size)
            # What it writes to stderr meanwhile, more than any window holds, is in nobody's way.
            for number in range(8):
                assert link.send(protocol.ReadFile(request=number, user="", path="", offset=MIB, limit=MIB))
            for number in range(8):
                message, blob = await listener.wait_message()
                assert (message.request, len(blob)) == (number, MIB)
                assert blob[:1000] == bytes(i % 251 for i in range(1000))

    asyncio.run(run())


def test_nothing_is_sent_while_it_is_not_up(spec: NodeSpec) -> None:
    async def run() -> None:
        async with linked(spec) as (link, listener):
            assert link.send(protocol.Probe(request=1)) is False
            await listener.wait_up()
            link.close()
            assert link.send(protocol.Probe(request=2)) is False

    asyncio.run(run())


def test_no_thread_outlives_its_link(spec: NodeSpec) -> None:
    async def run() -> None:
        async with linked(spec) as (_, listener):
            await listener.wait_up()

    before = set(threading.enumerate())
    asyncio.run(run())
    wait_until(lambda: set(threading.enumerate()) <= before, what="its threads to end")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("complain", "cannot start the agent on {}: it ended with status 3: the spool is on fire"),
        ("goodbye", "cannot use node {}: its agent says: epoch 1 is lower than 7"),
        ("garbage", "cannot understand the agent on {}: cannot read a frame"),
    ],
)
def test_what_the_agent_says_against_it_is_passed_on(spec: NodeSpec, words: str, why: str) -> None:
    behave(spec, words)
    assert asyncio.run(why_down(spec)).startswith(why.format(spec.name))


def test_an_agent_that_ends_is_started_again(spec: NodeSpec) -> None:
    async def run() -> None:
        async with linked(spec) as (link, listener):
            first = await listener.wait_up()
            link.send(protocol.CloseStream(stream=1))
            assert await listener.wait_down() == f"lost the agent of {spec.name}: it ended with status 5: told to go"
            second = await listener.wait_up()
            assert second.pid != first.pid

    asyncio.run(run())


def test_an_agent_that_is_silent_is_given_up(spec: NodeSpec) -> None:
    behave(spec, "mute")

    async def run() -> None:
        async with linked(spec, times=replace(QUICK, connect_s=60)) as (_, listener):
            await listener.wait_up()
            assert await listener.wait_down() == "no sign of life for 1 s"

    asyncio.run(run())


def test_an_idle_agent_that_answers_pings_stays(spec: NodeSpec) -> None:
    times = LinkTimes(connect_s=60, heartbeat_s=0.05, down_after_s=1.5)

    async def run() -> None:
        async with linked(spec, times=times) as (link, listener):
            await listener.wait_up()
            with pytest.raises(TimeoutError):  # nothing is said for longer than a silent one would be kept
                await asyncio.wait_for(listener.wait_down(), 2)
            assert link.up

    asyncio.run(run())


def test_noise_before_the_agent_speaks_is_skipped(spec: NodeSpec, tmp_path: Path) -> None:
    python = write_python(tmp_path / "noisy", "echo 'Welcome to the machine'; printf 'no newline'; echo oops >&2")
    noisy = NodeSpec(**{f: getattr(spec, f) for f in spec.__slots__} | {"python": python})

    async def run() -> None:
        async with linked(noisy) as (_, listener):
            await listener.wait_up()

    asyncio.run(run())


def test_endless_noise_is_given_up(nodes: LoopbackNodes, tmp_path: Path) -> None:
    python = write_python(tmp_path / "endless", "exec yes")
    said = asyncio.run(why_down(spec_of(nodes.nodes["a"], python=python)))
    assert "its shell printed" in said
    assert "ran no command" in said


def test_a_missing_python_is_named(nodes: LoopbackNodes) -> None:
    said = asyncio.run(why_down(spec_of(nodes.nodes["a"], python="/no/python3")))
    assert said.startswith("cannot start the agent on a: it ended with status 12")
    assert "/no/python3" in said
    assert "install Python 3.9 or newer there, or set python in a.toml" in said


def test_a_root_where_others_may_write_is_refused(spec: NodeSpec) -> None:
    Path(spec.root).mkdir()
    Path(spec.root).chmod(0o777)
    assert f"cannot use {spec.root}: others may write" in asyncio.run(why_down(spec))


def test_an_idle_connection_does_not_poll(nodes: LoopbackNodes) -> None:
    """paramiko looks at its socket ten times a second unless it is told otherwise."""

    async def run() -> list[float]:
        async with linked(spec_of(nodes.nodes["a"])) as (_, listener):
            await listener.wait_up()
            transports = [thread for thread in threading.enumerate() if isinstance(thread, paramiko.Transport)]
            return [transport.sock.gettimeout() for transport in transports]

    assert min(asyncio.run(run())) >= 10


def test_f3_a_changed_host_key_is_refused_with_both_fingerprints(nodes: LoopbackNodes, tmp_path: Path) -> None:
    node = nodes.nodes["a"]
    said = asyncio.run(why_down(spec_of(node, host_key=OTHER_KEY, root=str(tmp_path / "root"))))
    assert "its host key has changed" in said
    assert hostkeys.fingerprint_of(hostkeys.blob_of(OTHER_KEY)) in said
    assert hostkeys.fingerprint_of(hostkeys.blob_of(node.host_key)) in said
    assert not (tmp_path / "root").exists()


def test_a_host_without_a_key_of_the_pinned_kind_is_refused(nodes: LoopbackNodes) -> None:
    rsa = "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAgQC7"
    said = asyncio.run(why_down(spec_of(nodes.nodes["a"], host_key=rsa)))
    assert "no longer has a host key of type ssh-rsa" in said


def test_a_key_that_is_not_let_in_is_named(
    nodes: LoopbackNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    wrong = tmp_path / "key"
    make_key(wrong, "wrong")
    said = asyncio.run(why_down(spec_of(nodes.nodes["a"], identity_file=str(wrong))))
    assert "it refused every key; tried" in said
    assert f"{wrong} (SHA256:" in said
    assert "authorized_keys" in said
    said = asyncio.run(why_down(spec_of(nodes.nodes["a"], identity_file="/no/key")))
    assert "tried none" in said


@pytest.fixture
def ssh_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if shutil.which("ssh-agent") is None:
        pytest.skip("there is no ssh-agent here")
    path = tmp_path / "agent.sock"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        wait_until(path.exists, what="the SSH agent")
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.mark.usefixtures("ssh_agent")
def test_keys_of_the_ssh_agent_are_tried(nodes: LoopbackNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # there are no keys in it
    node = nodes.nodes["a"]
    spec = spec_of(node, identity_file=None)
    assert "tried none" in asyncio.run(why_down(spec))
    make_key(tmp_path / "other", "other")
    for key in (tmp_path / "other", node.identity_file):
        subprocess.run(["ssh-add", "-q", key], check=True)

    async def run(spec: NodeSpec) -> None:
        async with linked(spec) as (_, listener):
            await listener.wait_up()

    asyncio.run(run(spec))
    # An encrypted file stands for the key that the agent has open.
    locked = tmp_path / "locked"
    shutil.copy(node.identity_file, locked)
    locked.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-f", locked, "-P", "", "-N", "secret"], check=True, capture_output=True)
    public = subprocess.run(["ssh-keygen", "-y", "-f", node.identity_file], check=True, capture_output=True).stdout
    locked.with_name("locked.pub").write_bytes(public)
    asyncio.run(run(spec_of(node, identity_file=str(locked))))
    subprocess.run(["ssh-add", "-q", "-D"], check=True)
    said = asyncio.run(why_down(spec_of(node, identity_file=str(locked))))
    assert f"tried {locked} (damaged, or encrypted and not in the SSH agent: " in said


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_may_read_is_not_used(nodes: LoopbackNodes, tmp_path: Path, mode: int) -> None:
    key = tmp_path / "key"
    shutil.copy(nodes.nodes["a"].identity_file, key)
    key.chmod(mode)
    said = asyncio.run(why_down(spec_of(nodes.nodes["a"], identity_file=str(key))))
    assert f"tried {key} (others may read it, its mode is {mode:04o}; run: chmod 600 {key})" in said


@pytest.mark.sshd
def test_a_restricted_key_is_enough(tmp_path: Path) -> None:
    with start_nodes(tmp_path / "nodes", ["a"], server=usable("sshd")) as nodes:  # type: ignore[arg-type]
        node = nodes.nodes["a"]
        keys = node.root / "ssh" / "authorized_keys"
        keys.write_text("restrict " + keys.read_text())

        async def run() -> None:
            async with linked(spec_of(node)) as (_, listener):
                await listener.wait_up()

        asyncio.run(run())
        settings = settings_with(write_jump(tmp_path, node))
        said = asyncio.run(why_down(spec_of(node, host="target", port=node.port), settings=settings))
        assert f"cannot reach 127.0.0.1:{node.port} from {node.user}@" in said  # it forwards no ports


def write_jump(path: Path, gate: LoopbackNode) -> Path:
    """Write a client configuration in which `target` is reached through `gate`, and return its path."""
    (path / "known").write_text(f"[{gate.host}]:{gate.port} {gate.host_key}\n")
    (path / "config").write_text(
        f"Host target\n HostName 127.0.0.1\n ProxyJump gate\n"
        f"Host gate\n HostName {gate.host}\n Port {gate.port}\n User {gate.user}\n"
        f" IdentityFile {gate.identity_file}\n UserKnownHostsFile {path / 'known'}\n"
    )
    return path / "config"


def test_no_server_no_route_no_name(nodes: LoopbackNodes) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        said = asyncio.run(why_down(spec_of(nodes.nodes["a"], port=port)))
    assert said == f"cannot reach 127.0.0.1:{port}: Connection refused"
    said = asyncio.run(why_down(spec_of(nodes.nodes["a"], host="no.such.host.invalid")))
    assert said.startswith("cannot find host 'no.such.host.invalid'")


def test_a_server_that_says_nothing_runs_into_the_time_limit(nodes: LoopbackNodes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        spec = spec_of(nodes.nodes["a"], port=port)
        said = asyncio.run(why_down(spec, QUICK))
    assert said == f"cannot reach a: no answer within 2 s while logging in to {spec.user}@127.0.0.1:{port}"


def test_a_frozen_node_is_down_and_comes_back(own_nodes: LoopbackNodes) -> None:
    async def run() -> None:
        spec = spec_of(own_nodes.nodes["a"])
        async with linked(spec, times=QUICK) as (link, listener):
            await listener.wait_up(after_downs=True)
            own_nodes.freeze("a")
            assert "no sign of life" in await listener.wait_down()
            assert not link.up
            said = await listener.wait_down()
            assert said.startswith("cannot reach a: no answer within 2 s while ")
            own_nodes.thaw("a")
            await listener.wait_up(after_downs=True)

    asyncio.run(run())


def test_a_node_that_takes_nothing_is_cut_off(own_nodes: LoopbackNodes) -> None:
    async def run() -> None:
        async with linked(spec_of(own_nodes.nodes["a"])) as (link, listener):
            await listener.wait_up()
            own_nodes.freeze("a")
            sent = 0
            while link.send(protocol.Probe(request=sent), bytes(4 * MIB)):
                sent += 1
            assert 8 <= sent <= 40
            assert await listener.wait_down() == "it takes nothing: 64 MiB wait to be sent"
            own_nodes.thaw("a")
            await listener.wait_up()

    asyncio.run(run())


def test_power_off_and_on(own_nodes: LoopbackNodes) -> None:
    async def run() -> None:
        async with linked(spec_of(own_nodes.nodes["a"])) as (_, listener):
            await listener.wait_up()
            own_nodes.power_off("a")
            assert (await listener.wait_down()).startswith("lost the agent of a: ")
            assert "cannot reach" in await listener.wait_down()
            own_nodes.power_on("a")
            await listener.wait_up()

    asyncio.run(run())


def test_ssh_config_says_how_to_get_there(nodes: LoopbackNodes, tmp_path: Path) -> None:
    node = nodes.nodes["a"]
    (tmp_path / "more.d").mkdir()
    (tmp_path / "more.d" / "one").write_text(
        f"Host nick\n HostName {node.host}\n Port {node.port}\n User {node.user}\n IdentityFile {node.identity_file}\n"
    )
    (tmp_path / "config").write_text("Include more.d/*\nHost *\n User nobody-of-this-name\n Port 1\n")
    spec = spec_of(node, host="nick", port=None, user=None, identity_file=None)

    async def run() -> None:
        async with linked(spec, settings=settings_with(tmp_path / "config")) as (_, listener):
            await listener.wait_up()

    asyncio.run(run())


def jump_config(nodes: LoopbackNodes, path: Path, known_host_key: str) -> Path:
    config = write_jump(path, nodes.nodes["b"])
    jump = nodes.nodes["b"]
    (path / "known").write_text(f"[{jump.host}]:{jump.port} {known_host_key}\n" if known_host_key else "")
    return config


def test_proxy_jump(nodes: LoopbackNodes, tmp_path: Path) -> None:
    config = jump_config(nodes, tmp_path, nodes.nodes["b"].host_key)

    async def run() -> None:
        async with linked(spec_of(nodes.nodes["a"], host="target"), settings=settings_with(config)) as (link, listener):
            await listener.wait_up()
            link.send(protocol.ReadFile(request=1, user="", path="", offset=0, limit=3 * MIB))
            _, blob = await listener.wait_message()
            assert len(blob) == 3 * MIB

    before = set(threading.enumerate())
    asyncio.run(run())
    wait_until(lambda: set(threading.enumerate()) <= before, what="the threads of both connections to end")


@pytest.mark.parametrize(
    ("known", "why"), [("", "no known_hosts file has a key for it"), (OTHER_KEY, "known_hosts has SHA256:")]
)
def test_f3_a_jump_host_must_be_known(nodes: LoopbackNodes, tmp_path: Path, known: str, why: str) -> None:
    settings = settings_with(jump_config(nodes, tmp_path, known))
    said = asyncio.run(why_down(spec_of(nodes.nodes["a"], host="target"), settings=settings))
    assert said.startswith("cannot trust ")
    assert why in said


def test_peek_sees_the_key_without_logging_in(nodes: LoopbackNodes, tmp_path: Path) -> None:
    node = nodes.nodes["a"]
    key = peek_host_key(spec_of(node, identity_file="/no/key"), settings_with(), Abort())
    assert hostkeys.spelled(key) == node.host_key
    through = peek_host_key(
        spec_of(node, host="target"), settings_with(jump_config(nodes, tmp_path, nodes.nodes["b"].host_key)), Abort()
    )
    assert hostkeys.spelled(through) == node.host_key
