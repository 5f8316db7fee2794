"""The controller's key starts the agent on a node, and nothing else: the line of `hpcsched key` in authorized_keys."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

from hpcsched.config.load import load_config
from hpcsched.launch import bundle as bundles
from hpcsched.launch import dial_for
from hpcsched.launch.bundle import authorized_line, build_bundle
from hpcsched.launch.hostkeys import CERTIFICATE_S, PRINCIPAL, certificate_of, make_key
from hpcsched.launch.link import ControllerIdentity
from hpcsched.launch.visit import visit
from hpcsched.loopback.cluster import LocalCluster, LoopbackNode, why_no_sshd

pytestmark = pytest.mark.skipif(
    why_no_sshd("root" if os.getuid() == 0 else os.environ.get("USER", "nobody")) is not None,
    reason="NOT TESTED: OpenSSH's sshd reads the line, and there is none",
)


class Restricted(LocalCluster):
    """A cluster whose nodes let in only the launch key, by the line of `hpcsched key`."""

    def node_values(self, node: LoopbackNode) -> dict[str, object]:
        key = self.base / "launch_key"
        if not key.exists():
            make_key(key, "launch key")
        values = super().node_values(node)
        line = authorized_line(key.with_name("launch_key.pub").read_text().strip(), str(values["python"]))
        (node.root / "ssh" / "authorized_keys").write_text(line + "\n")
        return values | {"identity_file": str(key), "python": "/not/used"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Restricted]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        with Restricted(
            Path(directory), names=("n1",), server="sshd", settings={"controller": {"kill_wait_s": 1}}
        ) as made:
            yield made


@pytest.fixture
def stolen(cluster: Restricted) -> Iterator[paramiko.Transport]:
    """A connection of somebody who has the controller's key."""
    assert cluster.machines is not None
    node = cluster.machines.nodes["n1"]
    with paramiko.Transport((node.host, node.port)) as transport:
        transport.start_client(timeout=20)
        transport.auth_publickey(node.user, paramiko.PKey.from_path(cluster.base / "launch_key"))
        yield transport


def what_it_prints(transport: paramiko.Transport, command: str) -> bytes:
    channel = transport.open_session(timeout=20)
    channel.settimeout(20)
    channel.exec_command(command)
    channel.shutdown_write()
    printed = b"".join(iter(lambda: channel.recv(65536), b""))
    assert channel.recv_exit_status() != 0
    return printed


def test_the_controller_can_work_with_the_line(cluster: Restricted) -> None:
    assert cluster.run("hrun", "-n1", "echo", "it works").stdout == "it works\n"


@pytest.mark.parametrize(
    "command", ["id", "/bin/sh -c id", "cat /etc/passwd", "python3 -c 'print(1)'", "true; id", "scp -t /tmp"]
)
def test_c6_another_command_is_not_run(stolen: paramiko.Transport, command: str) -> None:
    assert what_it_prints(stolen, command) == b""


def test_c6_a_shell_and_a_terminal_are_refused(stolen: paramiko.Transport) -> None:
    with pytest.raises(paramiko.SSHException):
        stolen.open_session(timeout=20).get_pty()
    channel = stolen.open_session(timeout=20)
    channel.settimeout(20)
    channel.invoke_shell()
    channel.sendall(b"id; echo shell\n")
    channel.shutdown_write()
    assert b"".join(iter(lambda: channel.recv(65536), b"")) == b""


def test_c6_file_transfer_is_refused(cluster: Restricted, stolen: paramiko.Transport, tmp_path: Path) -> None:
    channel = stolen.open_session(timeout=20)
    channel.settimeout(20)
    channel.invoke_subsystem("sftp")
    channel.sendall(b"\0\0\0\5\1\0\0\0\3")  # SSH_FXP_INIT
    channel.shutdown_write()
    assert channel.recv(65536) == b""
    assert cluster.machines is not None
    node, key = cluster.machines.nodes["n1"], cluster.base / "launch_key"
    if shutil.which("sftp"):
        options = [f"-oPort={node.port}", f"-oIdentityFile={key}", "-oBatchMode=yes", "-oStrictHostKeyChecking=no",
                   "-oUserKnownHostsFile=/dev/null"]  # fmt: skip
        command = ["sftp", *options, f"{node.user}@{node.host}:/etc/passwd", str(tmp_path)]
        assert subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60).returncode != 0
        assert list(tmp_path.iterdir()) == []


def test_c6_nothing_is_forwarded(cluster: Restricted, stolen: paramiko.Transport) -> None:
    assert cluster.machines is not None
    port = cluster.machines.nodes["n1"].port
    with pytest.raises(paramiko.ChannelException, match="prohibited"):
        stolen.open_channel("direct-tcpip", ("127.0.0.1", port), ("127.0.0.1", 0), timeout=20)
    with pytest.raises(paramiko.SSHException):
        stolen.request_port_forward("127.0.0.1", 0)
    with pytest.raises(paramiko.SSHException):
        stolen.open_session(timeout=20).request_x11()


def logs_in(cluster: Restricted, key: Path) -> bool:
    assert cluster.machines is not None
    node = cluster.machines.nodes["n1"]
    with paramiko.Transport((node.host, node.port)) as transport:
        transport.start_client(timeout=20)
        try:
            transport.auth_publickey(node.user, paramiko.PKey.from_path(key))
        except paramiko.AuthenticationException:
            return False
        return True


def test_c6_a_key_with_a_certificate_is_let_in_for_ten_minutes(cluster: Restricted) -> None:
    assert cluster.machines is not None
    keys = cluster.machines.nodes["n1"].root / "ssh" / "authorized_keys"
    before, folder = keys.read_text(), cluster.base / "ca"
    folder.mkdir()
    authority, key, other = folder / "ca", folder / "launch", folder / "other_ca"
    line = authorized_line(make_key(authority, "authority"), sys.executable, "", PRINCIPAL)
    assert line.startswith('cert-authority,principals="hpcsched",restrict,command="exec ')
    public, certificate, now_s = make_key(key, "launch key"), folder / "launch-cert.pub", time.time()
    make_key(other, "another authority")
    keys.write_text(line + "\n")
    try:
        assert not logs_in(cluster, key)
        certificate.write_text(certificate_of(public, authority, "lab", now_s))
        assert logs_in(cluster, key)
        certificate.write_text(certificate_of(public, authority, "lab", now_s - CERTIFICATE_S - 1))
        assert not logs_in(cluster, key)
        certificate.write_text(certificate_of(public, other, "lab", now_s))
        assert not logs_in(cluster, key)
    finally:
        keys.write_text(before)


def test_hpcsched_ca_signs_the_launch_key(tmp_path: Path) -> None:
    env = {**os.environ, "HPCSCHED_CONFIG": str(tmp_path / "etc")}
    hpcsched = str(Path(sys.executable).parent / "hpcsched")
    for words in (["init"], ["ca", "init", "--from", "192.0.2.1"], ["ca", "sign"]):
        done = subprocess.run([hpcsched, *words], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
    key = paramiko.PKey.from_path(tmp_path / "etc" / "id_ed25519")
    assert key.public_blob is not None
    assert key.public_blob.key_type == "ssh-ed25519-cert-v01@openssh.com"
    assert stat.S_IMODE((tmp_path / "etc" / "ca_ed25519").stat().st_mode) == 0o600
    if shutil.which("ssh-keygen"):
        shown = subprocess.run(
            ["ssh-keygen", "-Lf", tmp_path / "etc" / "id_ed25519-cert.pub"], capture_output=True, text=True
        )
        assert "Principals: \n                hpcsched\n" in shown.stdout
        assert "Extensions: (none)" in shown.stdout


def test_c6_an_authority_that_others_can_read_or_no_key_signs_nothing(tmp_path: Path) -> None:
    authority = tmp_path / "ca"
    make_key(authority, "authority")
    public = make_key(tmp_path / "launch", "launch key")
    assert certificate_of(public, authority, "lab", time.time())
    authority.chmod(0o644)
    with pytest.raises(PermissionError, match="other users can read or write it; run: chmod 600"):
        certificate_of(public, authority, "lab", time.time())
    other = tmp_path / "rsa"
    rsa = paramiko.RSAKey.generate(2048)
    rsa.write_private_key_file(str(other), password="secret")
    other.chmod(0o600)
    with pytest.raises(ValueError):
        certificate_of(public, other, "lab", time.time())
    with pytest.raises(ValueError, match="Ed25519"):
        certificate_of(f"ssh-rsa {rsa.get_base64()}", make_private(authority), "lab", time.time())


def make_private(path: Path) -> Path:
    path.chmod(0o600)
    return path


def test_hpcsched_ca_says_what_is_missing(tmp_path: Path) -> None:
    env = {**os.environ, "HPCSCHED_CONFIG": str(tmp_path / "etc")}
    hpcsched = str(Path(sys.executable).parent / "hpcsched")

    def said(*words: str) -> str:
        return subprocess.run([hpcsched, *words], capture_output=True, text=True, env=env).stderr

    assert said("init") == ""
    assert "ca_ed25519 is not there; make it: hpcsched ca init" in said("ca", "sign")
    assert said("ca", "init") == ""
    public = tmp_path / "etc" / "id_ed25519.pub"
    public.rename(public.with_name("moved"))
    assert f"{public} is not there; make it: ssh-keygen -y -f {public.with_suffix('')} > {public}" in said("ca", "sign")


def test_a_newer_agent_gets_there_through_the_line(cluster: Restricted, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(cluster.config_dir)
    (spec,) = config.nodes
    sources = dict(bundles._sources(bundles.files("hpcnode"), "hpcnode"))
    newer = build_bundle({**sources, "hpcnode/newer.py": b"# of the next version\n"})
    assert newer.sha256 != build_bundle().sha256
    cluster.down()
    try:
        identity = ControllerIdentity(cluster=config.name, incarnation="0" * 16, epoch=10**6)
        found = visit(spec, dial=dial_for(spec, config), bundle=newer, identity=identity, timeout_s=60, probe=None)
        assert newer.sha256.startswith(found.welcome.agent_version)
    finally:
        assert cluster.machines is not None
        shutil.rmtree(cluster.machines.nodes["n1"].root / "agent" / "spool", ignore_errors=True)


def test_the_line_has_what_sshd_needs(cluster: Restricted) -> None:
    line = cluster.run("hpcsched", "key", "--python", "/opt/python/bin/python3", "--from", "192.0.2.0/24", check=False)
    assert line.returncode != 0  # this cluster was made without init
    made = authorized_line("ssh-ed25519 AAAA x", "/opt/python/bin/python3", "192.0.2.0/24,head")
    assert made.startswith('restrict,from="192.0.2.0/24,head",command="exec /opt/python/bin/python3 -E -s -S -c ')
    assert made.endswith('" ssh-ed25519 AAAA x')
    assert "\n" not in made
    assert len(made) < 16384  # SSH_MAX_PUBKEY_BYTES of older servers
    assert stat.S_IMODE((cluster.base / "launch_key").stat().st_mode) == 0o600
