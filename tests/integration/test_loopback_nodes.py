"""The loopback nodes with OpenSSH's sshd and with our own server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from other_user import DEBIAN_PYTHON, become, runs
from paramiko.hostkeys import HostKeyEntry
from waiting import PATIENCE_S, wait_until

import hpcsched
from hpcsched.errors import ConfigError, RequestError, UnavailableError
from hpcsched.loopback import cluster as loopback
from hpcsched.loopback.cluster import LoopbackNode, LoopbackNodes, start_nodes

MIB = 1024 * 1024
NOBODY = 65534
REPOSITORY = Path(hpcsched.__file__).parent.parent
# Detaches as daemons do (setsid, fork again) and writes down who it is.
DAEMON = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); f = open('{}', 'w')"
DAEMON += "; f.write(str(os.getpid())); f.close(); time.sleep(600)"
SPAWNS = "import os, sys, time; opening = (os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)"
SPAWNS += "; os.posix_spawn('/bin/true', ['true'], {}, file_actions=[opening]); time.sleep(600)"


@pytest.fixture(scope="module", params=[pytest.param("sshd", marks=pytest.mark.sshd), "embedded"])
def server(request: pytest.FixtureRequest) -> str:
    if request.param == "sshd" and os.environ.get("CI") != "true":  # there, a missing sshd is a failure
        problem = loopback.why_no_sshd(_own_name())
        if problem is not None:
            pytest.skip(f"NOT TESTED behind sshd: {problem}")
    return request.param


@pytest.fixture(scope="module")
def cluster(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackNodes]:
    """Two nodes for the tests that leave them as they were."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEAK", "from the owner")
        nodes = start_nodes(tmp_path_factory.mktemp("nodes"), ["node-a", "node-b"], server=server)
    with nodes:
        yield nodes


@pytest.fixture
def own_cluster(server: str, tmp_path: Path) -> Iterator[LoopbackNodes]:
    """One node for a test that does something to it."""
    with start_nodes(tmp_path / "nodes", ["node-a"], server=server) as nodes:
        yield nodes


def _own_name() -> str:
    return subprocess.run(["id", "-un"], capture_output=True, text=True, check=False).stdout.strip()


@contextlib.contextmanager
def connected(node: LoopbackNode, **changes: str) -> Iterator[paramiko.SSHClient]:
    pin = HostKeyEntry.from_line(f"[{node.host}]:{node.port} {node.host_key}")
    with paramiko.SSHClient() as client:
        client.get_host_keys().add(pin.hostnames[0], pin.key.get_name(), pin.key)
        login = {"username": node.user, "key_filename": str(node.identity_file)} | changes
        client.connect(node.host, node.port, allow_agent=False, look_for_keys=False, timeout=PATIENCE_S, **login)
        client.get_transport().sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield client


def start(client: paramiko.SSHClient, command: str) -> paramiko.Channel:
    channel = client.get_transport().open_session(timeout=PATIENCE_S)
    channel.settimeout(PATIENCE_S)
    channel.exec_command(command)
    return channel


def read_all(receive) -> bytes:
    return b"".join(iter(lambda: receive(MIB), b""))


def run(node: LoopbackNode, command: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    """Run one command over a connection of its own: status, stdout, stderr."""
    with connected(node) as client:
        channel = start(client, command)
        feeder = threading.Thread(target=_feed, args=(channel, stdin))
        feeder.start()
        out, err = read_all(channel.recv), read_all(channel.recv_stderr)
        feeder.join()
        return channel.recv_exit_status(), out, err


def _feed(channel: paramiko.Channel, data: bytes) -> None:
    for begin in range(0, len(data), MIB):  # in pieces: sendall copies all that is left for every packet
        channel.sendall(data[begin : begin + MIB])
    channel.shutdown_write()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def owner_of(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except FileNotFoundError:
        return None


def start_daemon(nodes: LoopbackNodes, name: str, pid_file: Path) -> int:
    """Start a daemon on the node, through a connection that has ended on return; return its pid."""
    code = DAEMON.format(pid_file)
    assert run(nodes.nodes[name], f'python3 -c "{code}" < /dev/null > /dev/null 2>&1')[0] == 0
    return int(wait_until(lambda: pid_file.exists() and pid_file.read_text(), what="the daemon's pid"))


# -- commands


def test_a_command_gets_its_stdin_and_gives_output_errors_and_status(cluster: LoopbackNodes) -> None:
    ended = run(cluster.nodes["node-a"], "cat; echo oops >&2; exit 7", b"one\0two\r\n\xff")
    assert ended == (7, b"one\0two\r\n\xff", b"oops\n")


def test_twenty_megabytes_go_through_both_ways_unchanged(cluster: LoopbackNodes) -> None:
    data = hashlib.shake_256(b"seed").digest(20 * MIB)
    status, out, err = run(cluster.nodes["node-a"], "cat", data)
    assert (status, err) == (0, b"")
    assert hashlib.sha256(out).digest() == hashlib.sha256(data).digest()


def test_output_follows_the_end_of_input(cluster: LoopbackNodes) -> None:
    status, out, _ = run(cluster.nodes["node-a"], "wc -c; echo after", b"x" * 3 * MIB)
    assert (status, out) == (0, f"{3 * MIB}\nafter\n".encode())


def test_the_end_of_output_comes_before_the_end_of_the_command(cluster: LoopbackNodes) -> None:
    with connected(cluster.nodes["node-a"]) as client:
        channel = start(client, "echo ready; exec >&- 2>&-; read line; exit 5")
        assert read_all(channel.recv) == b"ready\n"
        assert not channel.exit_status_ready()
        channel.sendall(b"go\n")
        assert channel.recv_exit_status() == 5


def test_many_commands_run_at_once_on_one_connection(cluster: LoopbackNodes) -> None:
    with connected(cluster.nodes["node-a"]) as client:
        channels = [start(client, f"read line; echo {number} $line; exit {number}") for number in range(20)]
        for channel in reversed(channels):
            channel.sendall(b"go\n")
        said = [(read_all(channel.recv), channel.recv_exit_status()) for channel in channels]
    assert said == [(f"{number} go\n".encode(), number) for number in range(20)]


def test_a_burst_of_quick_commands_all_report_their_status(cluster: LoopbackNodes) -> None:
    with connected(cluster.nodes["node-a"]) as client:
        assert [start(client, f"exit {n % 3}").recv_exit_status() for n in range(20)] == [n % 3 for n in range(20)]


def test_a_client_that_does_not_read_holds_the_command_back(cluster: LoopbackNodes) -> None:
    with connected(cluster.nodes["node-a"]) as client:
        channel = start(client, f"echo $$; exec head -c {32 * MIB} /dev/zero")
        pid_line, _, first_zeros = channel.recv(20).partition(b"\n")
        pid = int(pid_line)
        readings = [0, 1]

        def written_and_held_back() -> bool:
            fields = Path(f"/proc/{pid}/io").read_text().split()
            readings.append(int(fields[fields.index("wchar:") + 1]))
            return readings[-1] >= MIB and readings[-1] == readings[-2] == readings[-3]

        wait_until(written_and_held_back, what="the command to be held back")
        assert readings[-1] < 12 * MIB
        assert len(first_zeros + read_all(channel.recv)) == 32 * MIB
        assert channel.recv_exit_status() == 0


def test_death_by_signal_is_no_exit_status(cluster: LoopbackNodes) -> None:
    assert run(cluster.nodes["node-a"], "kill -9 $$") == (-1, b"", b"")


def test_the_environment_names_the_boot_and_has_nothing_of_the_owner(cluster: LoopbackNodes) -> None:
    _, out, _ = run(cluster.nodes["node-a"], "echo $HPCNODE_BOOT_ID $HPCNODE_SIMULATED [$LEAK]; pwd")
    home = os.path.realpath(pwd.getpwuid(os.getuid()).pw_dir)  # the account's, whatever $HOME says here
    assert out.decode() == f"{cluster.boot_id('node-a')} 1 []\n{home}\n"
    assert cluster.boot_id("node-a") != cluster.boot_id("node-b")


def test_python3_is_found_without_any_profile(cluster: LoopbackNodes) -> None:
    command = "env -i PATH=\"$PATH\" python3 -c 'import sys; print(sys.version_info >= (3, 9))'"
    assert run(cluster.nodes["node-a"], command)[1] == b"True\n"


def test_nodes_with_a_host_name_of_their_own_say_it(cluster: LoopbackNodes) -> None:
    names = {name: run(node, "uname -n")[1].decode().strip() for name, node in cluster.nodes.items()}
    if cluster.nodes["node-a"].own_hostname:
        assert names == {"node-a": "node-a", "node-b": "node-b"}
    else:
        assert set(names.values()) == {socket.gethostname()}


# -- who may come in


def test_another_key_is_refused(cluster: LoopbackNodes) -> None:
    node = cluster.nodes["node-a"]
    stranger = str(node.root / "ssh" / "host_key")  # a good key, which nobody has authorized
    with pytest.raises(paramiko.AuthenticationException), connected(node, key_filename=stranger):
        pass


def test_another_user_is_refused(cluster: LoopbackNodes) -> None:
    with pytest.raises(paramiko.AuthenticationException), connected(cluster.nodes["node-a"], username="daemon"):
        pass


def test_the_private_keys_are_for_their_owner_only(cluster: LoopbackNodes) -> None:
    node = cluster.nodes["node-a"]
    assert node.identity_file.stat().st_mode & 0o777 == 0o600
    assert (node.root / "ssh" / "host_key").stat().st_mode & 0o777 == 0o600


def write_ssh_config(nodes: LoopbackNodes, path: Path) -> None:
    """Write an OpenSSH client config, so that `ssh -F path NAME` reaches the nodes.

    Host keys go next to it.
    """
    known_hosts = path.with_name(path.name + ".known_hosts")
    known = [f"[{node.host}]:{node.port} {node.host_key}\n" for node in nodes.nodes.values()]
    known_hosts.write_text("".join(known))
    path.write_text("\n".join(host_block(node, known_hosts.absolute()) for node in nodes.nodes.values()))


def host_block(node: LoopbackNode, known_hosts: Path) -> str:
    settings = {
        "HostName": node.host,
        "Port": node.port,
        "User": node.user,
        "IdentityFile": quoted(node.identity_file),
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": quoted(known_hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
    }
    return f"Host {node.name}\n" + "".join(f"    {key} {value}\n" for key, value in settings.items())


def quoted(path: Path) -> str:
    return f'"{path}"' if any(c.isspace() for c in str(path)) else str(path)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="NOT TESTED: no OpenSSH client here")
def test_openssh_reaches_the_nodes_by_name_also_through_each_other(cluster: LoopbackNodes, tmp_path: Path) -> None:
    config = tmp_path / "config"
    write_ssh_config(cluster, config)
    for way in (["node-b"], ["-J", "node-a", "node-b"]):
        ended = subprocess.run(
            ["ssh", "-F", config, *way, "echo $HPCNODE_BOOT_ID; cat; exit 3"],
            input=b"x" * MIB, capture_output=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert (ended.returncode, ended.stderr) == (3, b"")
        assert ended.stdout == cluster.boot_id("node-b").encode() + b"\n" + b"x" * MIB


# -- connections that end


def test_a_vanished_client_ends_no_detached_process(own_cluster: LoopbackNodes) -> None:
    server_pid = wait_until(lambda: _only_process(own_cluster), what="the first connection's processes to end")
    threads_before = _threads(server_pid)
    pids: list[list[int]] = []
    with connected(own_cluster.nodes["node-a"]) as client:
        for _ in range(5):
            channel = start(client, "trap '' PIPE; setsid sleep 600 & echo $! $$; read line; exit 0")
            pids.append([int(word) for word in channel.makefile().readline().split()])
        client.get_transport().sock.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: not any(is_running(shell) for _, shell in pids), what="the shells to see the end of stdin")
    assert all(is_running(sleeper) for sleeper, _ in pids)
    wait_until(lambda: _threads(server_pid) <= threads_before, what="the connection's threads to end")
    expected = sorted([server_pid, *(sleeper for sleeper, _ in pids)])
    wait_until(lambda: own_cluster.processes("node-a") == expected, what="the rest to end")


def _only_process(nodes: LoopbackNodes) -> int:
    pids = nodes.processes("node-a")
    return pids[0] if len(pids) == 1 else 0


def _threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def test_a_daemon_survives_its_connection_and_dies_with_the_power(own_cluster: LoopbackNodes, tmp_path: Path) -> None:
    daemon = start_daemon(own_cluster, "node-a", tmp_path / "pid")
    assert daemon in own_cluster.processes("node-a")
    own_cluster.power_off("node-a")
    assert not is_running(daemon)
    assert own_cluster.processes("node-a") == []


# -- power


def test_a_node_comes_back_as_the_same_machine_booted_anew(own_cluster: LoopbackNodes) -> None:
    node, boot = own_cluster.nodes["node-a"], own_cluster.boot_id("node-a")
    own_cluster.power_off("node-a")
    own_cluster.power_off("node-a")
    with pytest.raises(OSError):
        socket.create_connection((node.host, node.port), timeout=5)
    own_cluster.power_on("node-a")
    assert own_cluster.boot_id("node-a") != boot
    assert run(node, "echo $HPCNODE_BOOT_ID")[1].decode().strip() == own_cluster.boot_id("node-a")


def test_power_off_wins_against_a_process_that_keeps_forking(own_cluster: LoopbackNodes, tmp_path: Path) -> None:
    code = "import os, time\nwhile True:\n if os.fork(): os._exit(0)\n os.setsid(); time.sleep(0.001)"
    script = tmp_path / "runner.py"
    script.write_text(code)
    assert run(own_cluster.nodes["node-a"], f"python3 {script} < /dev/null > /dev/null 2>&1 &")[0] == 0
    wait_until(lambda: len(own_cluster.processes("node-a")) > 1, what="the runner")
    own_cluster.power_off("node-a")
    assert _pids_that_mention(str(script)) == []


def _pids_that_mention(text: str) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if text.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
    return found


def test_a_frozen_node_holds_its_connections_and_goes_on_when_thawed(
    own_cluster: LoopbackNodes, tmp_path: Path
) -> None:
    daemon = start_daemon(own_cluster, "node-a", tmp_path / "pid")
    with connected(own_cluster.nodes["node-a"]) as client:
        channel = start(client, "kill -STOP $$; exit 4")  # stopped by its own hand, before the node is frozen
        echo = start(client, "cat")
        echo.sendall(b"here")
        assert echo.recv(100) == b"here"  # a shell that is frozen before its child runs cat would be in state D
        wait_until(lambda: "T" in _states(own_cluster), what="the stopped shell")
        own_cluster.freeze("node-a")
        assert daemon in own_cluster.processes("node-a")
        wait_until(lambda: set(_states(own_cluster)) == {"T"}, what="all to stand still")
        own_cluster.thaw("node-a")
        echo.sendall(b"still here")
        assert echo.recv(100) == b"still here"
        assert _states(own_cluster).count("T") == 1
        assert not channel.exit_status_ready()


def _states(nodes: LoopbackNodes) -> list[str]:
    return [state for pid in nodes.processes("node-a") if (state := _state(pid))]


def _state(pid: int) -> str:
    """The letter of proc(5), "" if it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_a_process_that_could_not_stop_at_a_freeze_stops_later(own_cluster: LoopbackNodes, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with connected(own_cluster.nodes["node-a"]) as client:
        # vfork(2): it cannot be interrupted before its child runs the program, and the child waits for a writer
        start(client, f'exec {sys.executable} -c "{SPAWNS}" {fifo}')
        wait_until(
            lambda: sorted(map(_state, _pids_that_mention(str(fifo)))) == ["D", "S"],
            what="the one that waits for its child",
        )
        own_cluster.freeze("node-a")
        (child,) = [pid for pid in _pids_that_mention(str(fifo)) if _state(pid) != "D"]
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: set(_states(own_cluster)) == {"T"}, what="all to stand still")


def test_a_frozen_node_can_be_switched_off(own_cluster: LoopbackNodes) -> None:
    own_cluster.freeze("node-a")
    pids = own_cluster.processes("node-a")
    own_cluster.power_off("node-a")
    assert not any(is_running(pid) for pid in pids)


def test_stop_leaves_no_process_and_may_be_called_again(own_cluster: LoopbackNodes, tmp_path: Path) -> None:
    start_daemon(own_cluster, "node-a", tmp_path / "pid")
    pids = own_cluster.processes("node-a") + _pids_that_mention(str(own_cluster.nodes["node-a"].root))
    assert len(pids) >= 3
    own_cluster.stop()
    own_cluster.stop()
    assert [pid for pid in pids if is_running(pid)] == []


OWNER = """
import json, sys, threading
from pathlib import Path
from hpcsched.loopback.cluster import start_nodes

def start():
    global nodes
    nodes = start_nodes(Path(sys.argv[1]), ["n1", "n2"], server=sys.argv[2])

starter = threading.Thread(target=start)  # the nodes must not die with the thread that started them
starter.start()
starter.join()
node = nodes.nodes["n1"]
print(json.dumps({"port": node.port, "own_hostname": node.own_hostname}), flush=True)
import paramiko
client = paramiko.SSHClient()
client.set_missing_host_key_policy(paramiko.WarningPolicy())
client.connect(node.host, node.port, node.user, key_filename=str(node.identity_file), look_for_keys=False)
said = client.exec_command("id -u; uname -n; echo $HPCNODE_BOOT_ID; (setsid sleep 600 > /dev/null 2>&1 &)")[1].read()
print(json.dumps(said.decode().split()), flush=True)
print(json.dumps(nodes.processes("n1") + nodes.processes("n2")), flush=True)
for line in sys.stdin:
    if line == "stop\\n":
        nodes.stop()
        print(json.dumps(nodes.processes("n1")), flush=True)
"""


def _say_and_hear(owner: subprocess.Popen[str], *, say: str = ""):
    if say:
        owner.stdin.write(say + "\n")
        owner.stdin.flush()
    line = owner.stdout.readline()
    assert line, "the owner ended early"
    return json.loads(line)


def test_the_nodes_die_with_an_owner_that_is_killed(server: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path / "nodes"), server]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        _, _, pids = (_say_and_hear(owner) for _ in range(3))
        pids += _pids_that_mention(str(tmp_path / "nodes"))
        pids = [pid for pid in pids if pid != owner.pid and is_running(pid)]  # not the shell that has just ended
        assert len(pids) >= 5
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(is_running(pid) for pid in pids), what="the nodes to end")


# -- as a plain user


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="not root: everything here was tested as a plain user already")
def test_a_plain_user_can_have_nodes_too(server: str, tmp_path: Path) -> None:
    with _nobodys_directory() as base_dir, _as_nobody(server, base_dir, tmp_path) as owner:
        facts = _say_and_hear(owner)
        uid, hostname, boot_id = _say_and_hear(owner)
        pids = [pid for pid in _say_and_hear(owner) if is_running(pid)]  # not the shell that has just ended
        assert uid == str(NOBODY)
        assert hostname == ("n1" if facts["own_hostname"] else socket.gethostname())
        assert boot_id
        assert len(pids) >= 3
        assert {owner_of(pid) for pid in pids} <= {NOBODY, None}
        assert not (base_dir / "start-up file was read").exists()
        assert _say_and_hear(owner, say="stop") == []
        assert [pid for pid in pids if is_running(pid)] == []


@contextlib.contextmanager
def _nobodys_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hpcsched-nobody-"))
    try:
        os.chown(path, NOBODY, NOBODY)
        yield path
    finally:
        shutil.rmtree(path)


@contextlib.contextmanager
def _as_nobody(server: str, base_dir: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run OWNER as nobody, who for this once has a shell to log in with."""
    packages = Path(paramiko.__file__).parent.parent
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{REPOSITORY}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"}
    drop = become(NOBODY)
    interpreter = _interpreter_for_nobody(environment)
    passwd = tmp_path / "passwd"
    shell = shutil.which("bash") or "/bin/sh"
    # Under a name of its own: nss-systemd calls the account "nobody" locked where /etc/shadow cannot be read.
    passwd.write_text(f"root:x:0:0::/root:/bin/sh\nsomebody:x:{NOBODY}:{NOBODY}::{base_dir}:{shell}\n")
    (base_dir / ".bashrc").write_text("touch ~/'start-up file was read'\n")
    passwd.chmod(0o644)
    mount = ["unshare", "--mount", "sh", "-c", f'mount --bind "{passwd}" /etc/passwd && exec "$@"', "sh"]
    if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("NOT TESTED as a plain user: this root may not mount anything")
    command = [*mount, *drop, interpreter, "-c", OWNER, str(base_dir / "nodes"), server]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd="/"
    ) as owner:
        yield owner
        owner.stdin.close()


def _interpreter_for_nobody(environment: dict[str, str]) -> str:
    for interpreter in (sys.executable, DEBIAN_PYTHON):
        if os.path.exists(interpreter) and runs(
            NOBODY, interpreter, first="import hpcsched.loopback.cluster", env=environment
        ):
            return interpreter
    pytest.skip(f"NOT TESTED as a plain user: no Python that nobody may run imports {REPOSITORY}/hpcsched")


# -- refusals


def test_sshd_that_is_asked_for_and_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "find_sshd", lambda: None)
    with pytest.raises(ConfigError, match="apt-get install openssh-server"):
        start_nodes(tmp_path, ["n1"], server="sshd")


def test_without_sshd_the_embedded_server_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "find_sshd", lambda: None)
    with start_nodes(tmp_path, ["n1"]) as nodes:
        assert nodes.server == "embedded"
        assert run(nodes.nodes["n1"], "echo hello")[1] == b"hello\n"


@pytest.mark.parametrize("names", [[], "ab", ["a", "a"], ["../x"], ["a b"], ["-a"], ["a" * 64]])
def test_names_that_are_no_host_names_are_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(RequestError, match="cannot start node"):
        start_nodes(tmp_path, names)


def test_an_unknown_node_is_refused_with_the_known_ones(cluster: LoopbackNodes) -> None:
    with pytest.raises(RequestError, match="'node-c': the nodes are node-a, node-b"):
        cluster.power_off("node-c")


@pytest.mark.sshd
@pytest.mark.skipif(loopback.why_no_sshd(_own_name()) is not None, reason="NOT TESTED: no sshd that works here")
@pytest.mark.parametrize(
    ("extra", "why"),
    [("NoSuchOption yes", "NoSuchOption"), ("PubkeyAuthentication no", "BadAuthenticationType")],
    ids=["does not start", "lets nobody in"],
)
def test_a_node_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str, why: str
) -> None:
    monkeypatch.setattr(loopback, "CONFIG", f"{extra}\n{loopback.CONFIG}")
    with pytest.raises(UnavailableError, match=f"(?s)cannot start node 'n1' on port.*{why}"):
        start_nodes(tmp_path, ["n1"], server="sshd")
    assert _pids_that_mention(str(tmp_path)) == []
