"""`hpcsched init` and `hpcsched node` as a user types them, with real SSH servers for the machines."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_node import fake_bundle
from waiting import PATIENCE_S, wait_until

from hpcsched.cli.admin import hpcsched_command, node, run
from hpcsched.config.load import load_config
from hpcsched.errors import ConfigError
from hpcsched.launch.hostkeys import blob_of, fingerprint_of
from hpcsched.loopback.cluster import LoopbackNodes, start_nodes
from hpcsched.paths import default_state_dir

OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHVZF4l5bhNmVmZVp3ym9tR0pXoV4cRyEGQf8NUZzr3H"
WRONG = "SHA256:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


class Shell:
    """Runs commands of one cluster in this process, and keeps what they print."""

    def __init__(self, config_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.config_dir = config_dir
        self._capsys = capsys

    def __call__(self, *words: object, status: int = 0) -> str:
        """Return what the command printed, stderr included; its exit status must be `status`."""
        self._capsys.readouterr()
        code = run(hpcsched_command, "hpcsched", [str(word) for word in words])
        said = self._capsys.readouterr()
        assert code == status, said.out + said.err
        return said.out + said.err


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("HPCSCHED_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr(node, "build_bundle", fake_bundle)
    return Shell(tmp_path / "config", capsys)


@pytest.fixture
def cluster(shell: Shell, tmp_path: Path) -> Shell:
    (tmp_path / "share").mkdir()
    shell("init", "--share", tmp_path / "share", "--name", "lab")
    return shell


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackNodes]:
    with start_nodes(tmp_path_factory.mktemp("nodes"), ["a", "b"]) as nodes:
        yield nodes


def target(nodes: LoopbackNodes, name: str = "a") -> str:
    node = nodes.nodes[name]
    return f"{node.user}@{node.host}:{node.port}"


def access(nodes: LoopbackNodes, name: str = "a") -> list[str]:
    node = nodes.nodes[name]
    return ["--identity", str(node.identity_file), "--root", str(node.root / "agent")]


def shown_by(nodes: LoopbackNodes, name: str = "a") -> str:
    return fingerprint_of(blob_of(nodes.nodes[name].host_key))


def test_init_makes_what_it_says(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    said = shell("init", "--share", tmp_path / "share", "--name", "lab")
    config = load_config(shell.config_dir)
    assert (config.name, config.share) == ("lab", str(tmp_path / "share"))
    database = config.controller.state_dir / "hpcsched.db"
    key = config.launch_key
    for path in (shell.config_dir / "hpcsched.toml", shell.config_dir / "nodes.d", key, database):
        assert path.exists()
        assert str(path) in said
    assert key.with_name("id_ed25519.pub").read_text().strip() in said
    assert "hpcsched key | ssh user@host" in said
    assert "hpcsched node add user@host" in said
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(database.stat().st_mode) == 0o600
    assert stat.S_IMODE(config.controller.state_dir.stat().st_mode) == 0o700
    done = subprocess.run(["ssh-keygen", "-y", "-f", key], capture_output=True, text=True, check=False)
    assert done.stdout.split()[:2] == key.with_name("id_ed25519.pub").read_text().split()[:2]


def test_init_overwrites_nothing(shell: Shell) -> None:
    shell("init", "--name", "first")
    config = load_config(shell.config_dir)
    key = config.launch_key.read_bytes()
    assert "hpcsched.toml is there already; --force writes it anew" in shell("init", "--name", "second", status=1)
    assert load_config(shell.config_dir).name == "first"
    shell("init", "--name", "second", "--force")
    assert load_config(shell.config_dir).name == "second"
    assert 'name = "first"' in (shell.config_dir / "hpcsched.toml.old").read_text()
    assert config.launch_key.read_bytes() == key
    assert "name = 'a/b'" in shell("init", "--name", "a/b", "--force", status=1)
    assert load_config(shell.config_dir).name == "second"


@pytest.mark.parametrize(("share", "why"), [("relative", "absolute path"), ("/no/such/dir", "no such directory")])
def test_init_refuses_a_share_that_is_none(shell: Shell, share: str, why: str) -> None:
    assert why in shell("init", "--share", share, status=1)
    assert not shell.config_dir.exists()


def test_add_pins_the_key_and_says_what_it_found(cluster: Shell, nodes: LoopbackNodes) -> None:
    said = cluster(
        *("node", "add", target(nodes), "--name", "n1", *access(nodes)),
        *("--accept-fingerprint", shown_by(nodes), "--features", "fast,big", "--cpus", "2", "--partition", "main"),
    )
    assert shown_by(nodes) in said
    assert "cpus     2 (it has 6)" in said
    assert "memory   5000M" in said
    assert "GPUs     a100" in said
    assert "20.0 GiB free" in said
    assert "Python 3.9.2" in said
    assert "is the same there" in said
    assert "\n!" not in said
    assert "the controller is not running" in said
    (spec,) = load_config(cluster.config_dir).nodes
    node = nodes.nodes["a"]
    assert (spec.name, spec.host, spec.port, spec.user) == ("n1", node.host, node.port, node.user)
    assert (spec.cpus, spec.mem_mib, [g.type for g in spec.gpus], spec.features) == (2, 5000, ["a100"], ("fast", "big"))
    assert (spec.host_key, spec.identity_file) == (node.host_key, str(node.identity_file))
    assert list((Path(load_config(cluster.config_dir).share)).iterdir()) == []  # the probe file is gone


def test_f3_unasked_no_key_is_believed(cluster: Shell, nodes: LoopbackNodes) -> None:
    said = cluster("node", "add", target(nodes), *access(nodes), status=1)
    assert f"--accept-fingerprint {shown_by(nodes)}" in said
    assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in said
    said = cluster("node", "add", target(nodes), *access(nodes), "--accept-fingerprint", WRONG, status=1)
    assert f"its host key is {shown_by(nodes)}, not {WRONG}" in said
    assert load_config(cluster.config_dir).nodes == ()
    cluster("node", "add", target(nodes), *access(nodes), "--yes")
    assert [spec.name for spec in load_config(cluster.config_dir).nodes] == ["127-0-0-1"]


def test_a_person_is_asked(cluster: Shell, nodes: LoopbackNodes) -> None:
    words = ["hpcsched", "node", "add", target(nodes), *access(nodes)]
    code = f"import sys; sys.argv = {words!r}; from hpcsched.cli.admin import main; main()"
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.set_blocking(ours, False)
    shown = bytearray()

    def has_shown(text: str) -> bool:
        with contextlib.suppress(OSError):  # nothing there at the moment, or for ever
            shown.extend(os.read(ours, 4096))
        return text.encode() in shown

    wait_until(lambda: has_shown("[y/N]"), what="the question")
    assert shown_by(nodes).encode() in shown
    os.write(ours, b"n\n")
    assert process.wait(timeout=PATIENCE_S) == 1
    wait_until(lambda: has_shown("you rejected its key"), what="the end of the matter")
    os.close(ours)
    assert load_config(cluster.config_dir).nodes == ()


def test_no_double_names_nor_hosts(cluster: Shell, nodes: LoopbackNodes) -> None:
    cluster("node", "add", target(nodes), "--name", "n1", *access(nodes), "--yes")
    again = cluster("node", "add", target(nodes, "b"), "--name", "n1", *access(nodes, "b"), "--yes", status=1)
    assert "cannot add n1: there is a node of that name" in again
    again = cluster("node", "add", target(nodes), "--name", "n2", *access(nodes), "--yes", status=1)
    assert "it is the node n1 already" in again
    assert len(load_config(cluster.config_dir).nodes) == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["user@host:x"], "cannot read 'user@host:x'"),
        (["-oProxyCommand=x@h"], "No such option"),
        (["--", "-oProxyCommand=x@h"], "a user name"),
        (["u@h;reboot"], "a host name"),
        (["u@h", "--name", "a.b"], "cannot name a node 'a.b'"),
        (["u@h", "--name", ""], "cannot name a node ''"),
        (["u@_h_"], "cannot name a node '_h_'"),
        (["u@h", "--memory", "lots"], "cannot read memory size"),
        (["u@h", "--gpus", "a b"], "GPU types"),
        (["u@no.such.host.invalid", "--yes"], "cannot find host 'no.such.host.invalid'"),
    ],
)
def test_bad_words_are_refused(cluster: Shell, words: list[str], why: str) -> None:
    status = 2 if why == "No such option" else 1
    assert why in cluster("node", "add", *words, status=status)
    assert load_config(cluster.config_dir).nodes == ()


def test_what_is_wrong_there_is_marked(cluster: Shell, nodes: LoopbackNodes) -> None:
    root = nodes.nodes["b"].root / "odd"
    root.mkdir(mode=0o700)
    (root / "behaviour").write_text("late elsewhere")
    key = nodes.nodes["b"].identity_file
    said = cluster("node", "add", target(nodes, "b"), "--name", "b", "--identity", key, "--root", root, "--yes")
    behind = re.search(r"^! clock +(\S+) s behind", said, re.MULTILINE)
    assert behind is not None, said
    assert float(behind[1]) == pytest.approx(100, abs=30), "as far as one can tell from here"
    assert "! share " in said
    assert "there is another directory than here" in said


def test_an_unknown_partition_is_refused(cluster: Shell, nodes: LoopbackNodes) -> None:
    said = cluster("node", "add", target(nodes), *access(nodes), "--yes", "--partition", "gpu", status=1)
    assert "cannot add it to partition 'gpu': there are main" in said
    assert load_config(cluster.config_dir).nodes == ()


def test_a_node_whose_agent_does_not_start_is_not_written(cluster: Shell, nodes: LoopbackNodes, tmp_path: Path) -> None:
    root = nodes.nodes["b"].root / "bad"
    root.mkdir(mode=0o700)
    (root / "behaviour").write_text("complain")
    key = nodes.nodes["b"].identity_file
    said = cluster("node", "add", target(nodes, "b"), "--identity", key, "--root", root, "--yes", status=1)
    assert "the spool is on fire" in said
    assert load_config(cluster.config_dir).nodes == ()


def test_this_machine_can_be_a_node(cluster: Shell, tmp_path: Path) -> None:
    cluster("node", "add", "local", "--root", tmp_path / "root")
    (spec,) = load_config(cluster.config_dir).nodes
    assert (spec.name, spec.host, spec.host_key) == ("local", "local", "")


def test_list_and_remove(cluster: Shell, nodes: LoopbackNodes) -> None:
    assert "hpcsched node add" in cluster("node", "list")
    cluster("node", "add", target(nodes), "--name", "n1", *access(nodes), "--yes")
    head, line = cluster("node", "list").splitlines()
    assert head.split() == ["NAME", "HOST", "CPUS", "MEMORY", "GPUS", "PARTITIONS", "STATE"]
    assert line.split() == ["n1", target(nodes), "6", "5000M", "a100", "main", "unknown"]
    listed = json.loads(cluster("node", "list", "--json"))
    assert listed["version"] == 1
    assert listed["nodes"][0]["gpus"] == ["a100"]
    assert "no node of that name" in cluster("node", "remove", "n2", status=1)
    toml = cluster.config_dir / "hpcsched.toml"
    toml.write_text(toml.read_text().replace('nodes = "all"', 'nodes = "n1"'))
    assert "names the node 'n1'" in cluster("node", "remove", "n1", status=1)
    assert len(load_config(cluster.config_dir).nodes) == 1
    toml.write_text(toml.read_text().replace('nodes = "n1"', 'nodes = "all"'))
    cluster("node", "remove", "n1")
    assert load_config(cluster.config_dir).nodes == ()
    assert list((cluster.config_dir / "nodes.d").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070ti"),
        ("NVIDIA RTX A6000", "a6000"),
        ("Tesla T4", "t4"),
        ("Quadro", "gpu"),
    ],
)
def test_gpus_get_short_types(name: str, kind: str) -> None:
    assert node.gpu_type(name) == kind


def left_of(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_a_state_directory_that_others_may_read_is_refused_before_any_write(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    state = default_state_dir(shell.config_dir, os.environ)
    state.mkdir(parents=True)
    state.chmod(0o755)
    before = left_of(tmp_path)
    assert f"run: chmod 700 {state}" in shell("init", "--name", "lab", status=1)
    assert left_of(tmp_path) == before
    state.chmod(0o700)
    said = shell("init", "--name", "lab")
    line = shell("key").strip()
    assert line.startswith('restrict,command="exec python3 ')
    assert " ".join(line.split()[-3:]) in said
    assert "hpcsched key shows the line" in shell("init", status=1)


@pytest.mark.parametrize("fails", ["make_key", "create_database"])
def test_an_init_that_fails_leaves_nothing_behind(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    before = left_of(tmp_path)

    def fail(path: Path, *_: object) -> None:
        path.write_text("half of it")
        raise ConfigError("cannot write: No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(f"hpcsched.cli.admin.init.{fails}", fail)
        assert "No space left" in shell("init", "--name", "lab", status=1)
    assert left_of(tmp_path) == before
    shell("init", "--name", "lab")
    kept = (shell.config_dir / "hpcsched.toml").read_text()
    shell("init", "--name", "other", "--force")
    shell("init", "--name", "a b", "--force", status=1)
    assert (shell.config_dir / "hpcsched.toml.old").read_text() == kept


def test_a_machine_that_was_set_up_anew_is_rekeyed_and_its_file_is_else_as_it_was(
    cluster: Shell, nodes: LoopbackNodes
) -> None:
    cluster("node", "add", target(nodes), "--name", "a", *access(nodes), "--yes", "--features", "fast,blue")
    path = cluster.config_dir / "nodes.d/a.toml"
    right = path.read_text()
    pinned = re.search(r'^host_key = "(.*)"$', right, re.MULTILINE)
    assert pinned is not None
    path.write_text(right.replace(pinned[1], OTHER_KEY) + "# a note\n")
    assert "rekey a" in cluster("node", "add", target(nodes), "--name", "a", *access(nodes), "--yes", status=1)
    refused = cluster("node", "rekey", "a", "--accept-fingerprint", WRONG, status=1)
    assert "cannot trust" in refused
    assert OTHER_KEY in path.read_text()
    assert "it reads this at its start" in cluster("node", "rekey", "a", "--accept-fingerprint", shown_by(nodes))
    assert path.read_text() == right + "# a note\n"
    assert "nothing has changed" in cluster("node", "rekey", "a", "--yes")
    assert "there are: a" in cluster("node", "rekey", "nosuch", "--yes", status=1)
