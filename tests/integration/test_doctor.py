"""`hpcsched doctor` names many staged faults, with the remedy, in ten seconds at most, and none in a cluster that is well.

A staged fault is a real one: sshds with broken settings, stopped processes, file systems that hang, are full or read-only,
damaged databases, jobs that fail. `NOT_STAGED` has the causes without one, with the reason; these are judged by their text alone
in unit/doctor.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.server
import json
import os
import pickle
import re
import shutil
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_server import GATEWAY, certificate, free_port
from waiting import PATIENCE_S, wait_until

from hpcsched import client, paths
from hpcsched.cli.admin.doctor import diagnose
from hpcsched.cli.admin.node import identity_of
from hpcsched.config.load import load_config, render_node
from hpcsched.doctor import facts as collectors
from hpcsched.doctor.tree import CAUSES, Diagnosis, Walk
from hpcsched.launch import dial_for
from hpcsched.launch.bundle import build_bundle
from hpcsched.launch.visit import asking
from hpcsched.loopback.cluster import (
    LocalCluster,
    LoopbackNode,
    ensure_key,
    find_sshd,
    write_sshd_config,
)
from hpcsched.model.codec import spec_to_json
from hpcsched.model.spec import JobSpec

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: staging most faults needs root"),
    pytest.mark.skipif(find_sshd() is None, reason="NOT TESTED: needs OpenSSH's sshd"),
]
MAX_S = 10.0 * 3  # ten seconds, on a machine that runs other tests too
PYTHON = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHVZF4l5bhNmVmZVp3ym9tR0pXoV4cRyEGQf8NUZzr3H"
LOAD = "HD-413"  # the load of the machine that runs the tests is not ours
NOBODY = 65534
libc = ctypes.CDLL(None, use_errno=True)

NOT_STAGED = {
    "HD-237": "needs a controller that holds jobs while its files change, as in e2e/test_edited_cluster",
    "HD-264": "needs an idle node that was switched off, as in integration/test_power_saving",
    "HD-261": "what is left if no known cause fits the text of a failed connection",
    "HD-325": "the same",
    "HD-413": "an average of five minutes",
    "HD-415": "machines of one file system fail alike, and then the job is blamed",
    "HD-418": "needs the agent of another release",
    "HD-419": "a node's fault is told to the controller; integration/test_disk_spool stages it for the agent",
    "HD-509": "an account that was removed while its jobs waited",
    "HD-512": "needs two minutes in which processes cannot be killed",
    "HD-513": "time limits are in minutes",
    "HD-531": "loopback machines share their accounts",
    "HD-533": "the spool of a node that is full: integration/test_disk_cluster stages it for the controller",
    "HD-541": "what is left if no known cause fits the refusal of a node",
    "HD-543": "the same for loopback machines: an agent that is not root, or a policy",
    "HD-604": "needs a GPU",
    "HD-605": "needs NCCL",
    "HD-608": "needs a file system with quotas",
    "HD-610": "needs a program built on a newer system",
    "HD-612": "needs a broken GPU driver",
    "HD-615": "MPICH starts any number of ranks",
    "HD-616": "needs conda",
}


# ----- what faults are made of


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@contextmanager
def hung(path: Path) -> Iterator[Path]:
    """Mount a file system whose server never answers: FUSE, and nobody reads its requests."""
    path.mkdir(parents=True, exist_ok=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"hung", os.fsencode(path), b"fuse", 0, options):
        pytest.skip(f"NOT TESTED: cannot mount FUSE: {os.strerror(ctypes.get_errno())}")
    try:
        yield path
    finally:
        libc.umount2(os.fsencode(path), 2)
        os.close(device)  # all that wait get an error


@contextmanager
def listening(serve: Callable[[socket.socket], None] | None = None, where: str = "") -> Iterator[int]:
    """Listen at a port of 127.0.0.1, or at a unix socket, and serve connections, or never answer; yield the port."""
    server = socket.socket(socket.AF_UNIX) if where else socket.socket()
    server.bind(where or ("127.0.0.1", 0))
    server.listen(16)
    ended = threading.Event()

    def run() -> None:
        kept = []
        while not ended.is_set():
            with contextlib.suppress(OSError):
                connection = server.accept()[0]
                kept.append(connection)
                if serve is not None and not ended.is_set():
                    serve(connection)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield 0 if where else server.getsockname()[1]
    finally:
        ended.set()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()


class Sshd:
    """An sshd with broken settings, for the account and keys of a loopback machine."""

    def __init__(self, base: Path, node: LoopbackNode, extra: str, keys: Path | None = None) -> None:
        base.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.host_key = ensure_key(base / "host_key")
        write_sshd_config(
            base / "config", port=self.port, user=node.user, host_key=base / "host_key",
            authorized_keys=keys or node.root / "ssh" / "authorized_keys", environment={"LC_ALL": "C"},
        )  # fmt: skip
        text = (base / "config").read_text()
        (base / "config").write_text(extra + "\n" + text)  # the first setting counts
        sshd = find_sshd()
        assert sshd is not None
        self.process = subprocess.Popen([sshd, "-D", "-f", base / "config", "-E", base / "log"])
        wait_until(self._answers, what="sshd")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)


class World:
    """A cluster without a controller, on one machine of its own; each test gets a copy of its files."""

    def __init__(self, base: Path, made: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base = base
        self.patch = monkeypatch
        self.etc = base / "etc"
        shutil.copytree(made.config_dir, self.etc, symlinks=True)
        self.state, self.run, self.share = self.etc / "state", self.etc / "state" / "run", made.share
        assert made.machines is not None
        self.machine: LoopbackNode = made.machines.nodes["c1"]
        self.values = made.node_values(self.machine)
        self.database = self.state / paths.DATABASE_FILE
        self.use(HPCSCHED_CONFIG=str(self.etc))

    def use(self, **variables: str) -> None:
        for name, value in variables.items():
            self.patch.setenv(name, value)

    def node(self, **values: object) -> None:
        """Change the file of the node c1; None removes a key."""
        self.values = {name: value for name, value in {**self.values, **values}.items() if value is not None}
        (self.etc / "nodes.d" / "c1.toml").write_text(render_node("c1", self.values))

    def python(self, text: str) -> str:
        """Return a program in place of Python on the node."""
        path = self.base / "python3"
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    def set(self, section: str, text: str) -> None:
        """Set a key of hpcsched.toml."""
        path = self.etc / paths.CONFIG_FILE
        key = text.partition(" ")[0]
        lines = [line for line in path.read_text().splitlines() if not re.match(rf"#?{key} *=", line)]
        if f"[{section}]" not in lines:
            lines.append(f"[{section}]")
        lines.insert(lines.index(f"[{section}]") + 1, text)
        path.write_text("\n".join(lines) + "\n")

    def sshd(self, extra: str, keys: Path | None = None) -> AbstractContextManager[Sshd]:
        """Start an sshd with these settings first, and let the node's file name it."""
        made = Sshd(self.base / "sshd", self.machine, extra, keys)
        self.node(port=made.port, host_key=made.host_key)
        return contextlib.closing(_Stopping(made))  # type: ignore[arg-type]


class _Stopping:
    def __init__(self, made: Sshd) -> None:
        self.made = made

    def close(self) -> None:
        self.made.stop()


class OwnPython(LocalCluster):
    """A cluster whose nodes have a Python that all users can run."""

    def node_values(self, node: LoopbackNode) -> dict[str, object]:
        return super().node_values(node) | {"python": PYTHON}


@pytest.fixture(scope="module")
def short() -> Iterator[Path]:
    """A directory with a short path, which other accounts may enter."""
    path = Path(tempfile.mkdtemp(prefix="dr-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def made(short: Path) -> Iterator[LocalCluster]:
    """The files and the machine of the cluster without a controller."""
    cluster = OwnPython(short / "cold", ("c1",), settings={"controller": {"confine": ["none"]}})
    cluster.start_machines()
    cluster.write_config()
    # Children of this process import nothing then.
    import hpcsched.launch.ssh
    import hpcsched.launch.visit
    import hpcsched.store.store  # noqa: F401

    yield cluster
    assert cluster.machines is not None
    cluster.machines.stop()


@pytest.fixture
def world(short: Path, made: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    base = Path(tempfile.mkdtemp(prefix="w-", dir=short))
    base.chmod(0o755)
    yield World(base, made, monkeypatch)
    shutil.rmtree(base, ignore_errors=True)


def examined(subject: str = "") -> Walk:
    """Return what the doctor says; it does not hang."""
    began_s = time.monotonic()
    walk = diagnose(subject, os.environ)
    assert time.monotonic() - began_s < MAX_S
    return walk


def examined_by_nobody(subject: str = "") -> Walk:
    """Return what the doctor says to an account without any right."""

    def work(_note: Any) -> str:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.environ["HOME"] = "/nonexistent"
        return pickle.dumps(examined(subject)).hex()

    fact = collectors.ask({"nobody": (30.0, work)})["nobody"]
    assert not fact.kind, fact.error
    walk: Walk = pickle.loads(bytes.fromhex(fact.value))  # noqa: S301 -- of our own child
    return walk


def examined_with_accounts(subject: str, passwd: Path) -> Walk:
    """Return what the doctor says on a head with other accounts."""

    def work(_note: Any) -> str:
        assert libc.unshare(0x20000) == 0
        assert libc.mount(None, b"/", None, 0x44000, None) == 0  # nothing of it is seen outside
        assert libc.mount(os.fsencode(passwd), b"/etc/passwd", None, 0x1000, None) == 0
        return pickle.dumps(examined(subject)).hex()

    fact = collectors.ask({"head": (30.0, work)})["head"]
    assert not fact.kind, fact.error
    walk: Walk = pickle.loads(bytes.fromhex(fact.value))  # noqa: S301 -- of our own child
    return walk


def the(walk: Walk, cause: str) -> Diagnosis:
    """Return the finding; the walk must have found this cause first, and name a remedy."""
    ids = [finding.rule.id for finding in walk.findings if finding.rule.id != LOAD]
    assert ids[:1] == [cause], (ids, [finding.detail for finding in walk.findings])
    finding = next(finding for finding in walk.findings if finding.rule.id == cause)
    assert not re.search(r"\{\w+\}", finding.fix)
    return finding


# ----- faults of the head, each in a copy of the cluster's files: the remedy has the second word

Stage = Callable[[World], AbstractContextManager[Any]]
HEAD: dict[str, tuple[Stage, str]] = {}
WAY: dict[str, tuple[Stage, str]] = {}


def stages(table: dict[str, tuple[Stage, str]], cause: str, remedy: str) -> Callable[[Any], Any]:
    def note(function: Any) -> Any:
        table[cause] = (contextmanager(function), remedy)
        return function

    return note


@stages(HEAD, "HD-201", "hpcsched init")
def no_configuration(world: World) -> Iterator[None]:
    world.use(HPCSCHED_CONFIG=str(world.base / "nothing"))
    yield


@stages(HEAD, "HD-203", "hctl reconfigure")
def a_mistake_in_the_configuration(world: World) -> Iterator[None]:
    with open(world.etc / paths.CONFIG_FILE, "a") as file:
        file.write("[controller\n")
    yield


@stages(HEAD, "HD-204", "umount -l")
def configuration_that_hangs(world: World) -> Iterator[None]:
    with hung(world.base / "mount") as path:
        world.use(HPCSCHED_CONFIG=str(path))
        yield


@stages(HEAD, "HD-205", "HPCSCHED_CONFIG=/etc/hpcsched")
def own_cluster_hides_the_system_s(world: World) -> Iterator[None]:
    world.patch.setattr(paths, "SYSTEM_CONFIG", str(world.etc))
    world.patch.setattr(paths, "own_config_dir", None)
    own = world.base / "config" / "hpcsched"
    shutil.copytree(world.etc, own)
    world.patch.delenv("HPCSCHED_CONFIG")
    world.patch.setattr(paths, "_own_config_dir", lambda _environ, _uid: str(own))
    yield


@stages(HEAD, "HD-210", "hpcsched restore")
def no_state_directory(world: World) -> Iterator[None]:
    shutil.rmtree(world.state)
    yield


@stages(HEAD, "HD-211", "chown -R 0")
def state_of_another_account(world: World) -> Iterator[None]:
    os.chown(world.state, NOBODY, NOBODY)
    yield


@contextmanager
def state_on_tmpfs(world: World, options: str) -> Iterator[Path]:
    kept = {path.name: path.read_bytes() for path in world.state.iterdir() if path.is_file()}
    with mounted(world.state, options) as path:
        for name, data in kept.items():
            (path / name).write_bytes(data)
        yield path


@stages(HEAD, "HD-212", "mount -o remount,rw")
def read_only_state(world: World) -> Iterator[None]:
    with state_on_tmpfs(world, "size=80m,mode=700") as path:
        subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        yield


@stages(HEAD, "HD-213", "du -xh")
def full_state(world: World) -> Iterator[None]:
    with state_on_tmpfs(world, "size=8m,mode=700") as path, contextlib.suppress(OSError):
        (path / "fill").write_bytes(bytes(9 << 20))
    with state_on_tmpfs(world, "size=8m,mode=700") as path:
        with contextlib.suppress(OSError):
            (path / "fill").write_bytes(bytes(9 << 20))
        yield


@stages(HEAD, "HD-214", "du -x --inodes")
def no_inodes_for_the_state(world: World) -> Iterator[None]:
    with state_on_tmpfs(world, "size=80m,nr_inodes=60,mode=700"):
        yield


@stages(HEAD, "HD-215", "dmesg")
def state_that_hangs(world: World) -> Iterator[None]:
    with hung(world.state):
        yield


@stages(HEAD, "HD-220", "hpcsched restore")
def no_database(world: World) -> Iterator[None]:
    for path in world.state.glob("hpcsched.db*"):
        path.unlink()
    yield


@stages(HEAD, "HD-221", "hpcsched restore")
def damaged_database(world: World) -> Iterator[None]:
    data = bytearray(world.database.read_bytes())
    data[8192:40960] = os.urandom(32768)
    world.database.write_bytes(data)
    yield


@stages(HEAD, "HD-222", "pip install --upgrade hpcsched")
def database_of_a_newer_version(world: World) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(world.database)) as database:
        database.execute("PRAGMA user_version = 99")
    yield


@stages(HEAD, "HD-223", "hpcsched restore")
def database_of_another_cluster(world: World) -> Iterator[None]:
    from hpcsched.store.engine import open_database
    from hpcsched.store.store import Store

    with contextlib.closing(Store(open_database(world.database))) as store:
        store.put_cluster_id("aaaaaaaaaaaaaaaa")
    (world.etc / paths.CLUSTER_ID_FILE).write_text("bbbbbbbbbbbbbbbb\n")
    yield


@stages(HEAD, "HD-230", "hpcsched up")
def no_controller(_world: World) -> Iterator[None]:
    yield


@stages(HEAD, "HD-232", "hpcsched down; hpcsched up")
def a_controller_that_never_answers(world: World) -> Iterator[None]:
    world.run.mkdir(exist_ok=True)
    with listening(where=str(world.run / "api.sock")):
        yield


@stages(HEAD, "HD-235", "hctl security")
def a_socket_of_another_account(world: World) -> Iterator[None]:
    world.run.mkdir(exist_ok=True)
    for path in (world.state, world.run):
        path.chmod(0o777)
    code = "import socket,sys; s=socket.socket(1); s.bind(sys.argv[1]); s.listen(); print(flush=True); sys.stdin.read()"
    server = subprocess.Popen(
        [PYTHON, "-c", code, str(world.run / "api.sock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=NOBODY, group=NOBODY, extra_groups=[],
    )  # fmt: skip
    assert server.stdout is not None
    server.stdout.readline()
    yield
    server.communicate()


@stages(HEAD, "HD-250", "umount -l")
def a_share_that_hangs(world: World) -> Iterator[None]:
    with hung(world.base / "share") as path, answering(world):
        world.set("cluster", f'share = "{path}"')
        yield


@contextmanager
def answering(world: World, **more: object) -> Iterator[None]:
    """Have something in the place of a controller that answers pings, so that nothing is wrong but what is staged."""
    answer: dict[str, object] = {"hpcsched": collectors.hpcsched.__version__, "nodes": [], "cluster": "demo"}
    answer = json.dumps(answer | more).encode()
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(4096)
            connection.sendall(reply)

    world.run.mkdir(exist_ok=True)
    with listening(serve, str(world.run / "api.sock")):
        yield


@stages(HEAD, "HD-251", "mount ")
def no_share(world: World) -> Iterator[None]:
    with answering(world):
        world.set("cluster", f'share = "{world.base}/nothing"')
        yield


@stages(HEAD, "HD-252", "remount,rw")
def read_only_share(world: World) -> Iterator[None]:
    with mounted(world.base / "share", "size=80m") as path, answering(world):
        subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        world.set("cluster", f'share = "{path}"')
        yield


@stages(HEAD, "HD-253", "du -xh")
def full_share(world: World) -> Iterator[None]:
    with mounted(world.base / "share", "size=1m") as path, answering(world):
        (path / "fill").write_bytes(bytes((1 << 20) - 8192))
        world.set("cluster", f'share = "{path}"')
        yield


def backups(newest_at_s: float, why: str) -> dict[str, object]:
    """Return what a controller says of its backups, ten days after its start."""
    told = {"newest_at_s": newest_at_s, "why": why, "every_s": 21600, "to": ["/mnt/a", "/mnt/b"]}
    return {"backup": told, "now_s": 1e9, "started_at_s": 1e9 - 864000}


@stages(HEAD, "HD-255", "hpcsched backup --scheduled")
def no_backup_yet(world: World) -> Iterator[None]:
    with answering(world, **backups(0.0, "")):
        yield


@stages(HEAD, "HD-256", "hpcsched backup --scheduled")
def an_old_backup(world: World) -> Iterator[None]:
    with answering(world, **backups(1e9 - 86400, "")):
        yield


@stages(HEAD, "HD-257", "findmnt -T /mnt/b")
def a_directory_of_backups_that_is_not_mounted(world: World) -> Iterator[None]:
    with answering(world, **backups(0.0, "cannot back up into /mnt/b: there is no such directory")):
        yield


@stages(HEAD, "HD-258", "hpcsched restore --drill /mnt/a")
def a_backup_with_a_wrong_checksum(world: World) -> Iterator[None]:
    with answering(world, **backups(1e9 - 60, "cannot restore from /mnt/a: its checksum is wrong")):
        yield


@stages(HEAD, "HD-238", "df -h")
def scripts_of_the_head_that_wait(world: World) -> Iterator[None]:
    with answering(world, scripts=["the prolog on the head waits: No space left on device"]):
        yield


@stages(HEAD, "HD-236", "hpcsched down; hpcsched up")
def commands_of_another_version(world: World) -> Iterator[None]:
    with answering(world):
        world.patch.setattr(collectors.hpcsched, "__version__", "99.0")
        yield


@stages(HEAD, "HD-240", "timedatectl")
def a_clock_that_was_set_back(world: World) -> Iterator[None]:
    with answering(world):
        os.utime(world.database, (time.time() + 3600,) * 2)
        yield


@stages(HEAD, "HD-241", "hpcsched init --force")
def no_launch_key(world: World) -> Iterator[None]:
    with answering(world):
        world.node(identity_file=None)
        yield


@stages(HEAD, "HD-242", "chmod 600")
def a_launch_key_that_others_may_read(world: World) -> Iterator[None]:
    with answering(world):
        world.node(identity_file=None)
        shutil.copy(str(world.machine.identity_file), world.etc / paths.LAUNCH_KEY)
        (world.etc / paths.LAUNCH_KEY).chmod(0o644)
        yield


@stages(HEAD, "HD-260", "hpcsched node add")
def no_nodes(world: World) -> Iterator[None]:
    with answering(world):
        (world.etc / "nodes.d" / "c1.toml").unlink()
        yield


@pytest.mark.parametrize("cause", HEAD)
def test_a_fault_of_the_head_is_named_with_its_remedy(world: World, cause: str) -> None:
    stage, remedy = HEAD[cause]
    with stage(world):
        assert remedy in the(examined(), cause).fix


def test_a_plain_user_learns_what_is_closed_to_it(world: World) -> None:
    (world.etc / paths.CONFIG_FILE).chmod(0o600)
    assert "chmod go+rX" in the(examined_by_nobody(), "HD-202").fix
    (world.etc / paths.CONFIG_FILE).chmod(0o644)
    # Nobody may look into the state directory, where the socket is.
    world.run.mkdir(exist_ok=True)
    with listening(where=str(world.run / "api.sock")):
        walk = examined_by_nobody()
        assert "chmod go+x" in the(walk, "HD-234").fix
        assert any("only the controller's account" in text for text in walk.unseen)


BY_NOBODY = {"HD-202", "HD-234"}


# ----- a client on another machine

CLIENT: dict[str, tuple[Stage, str]] = {}


@stages(CLIENT, "HD-101", "HPCSCHED_URL=https://")
def a_bad_address(world: World) -> Iterator[None]:
    world.use(HPCSCHED_URL="ftp://head.lab")
    yield


TOKEN = "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJhbm4ifQ.c2lnbmF0dXJlLXRoYXQtaXMtd3Jvbmc"  # noqa: S105 - of nobody


@stages(CLIENT, "HD-102", "getent hosts no.such.host.invalid")
def a_gateway_without_an_address(world: World) -> Iterator[None]:
    world.use(HPCSCHED_URL="https://no.such.host.invalid:6820", HPCSCHED_TOKEN=TOKEN)
    yield


@stages(CLIENT, "HD-103", "hpcsched gateway")
def no_gateway(world: World) -> Iterator[None]:
    world.use(HPCSCHED_URL=f"http://127.0.0.1:{free_port()}", HPCSCHED_TOKEN=TOKEN)
    yield


@stages(CLIENT, "HD-104", "nc -vz")
def a_gateway_that_hangs(world: World) -> Iterator[None]:
    with listening() as port:
        world.use(HPCSCHED_URL=f"http://127.0.0.1:{port}", HPCSCHED_TOKEN=TOKEN)
        yield


@stages(CLIENT, "HD-105", "HPCSCHED_CA_FILE")
def a_gateway_with_another_certificate(world: World) -> Iterator[None]:
    shown = certificate(world.base, "gateway")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown, shown.with_suffix(".key"))

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            context.wrap_socket(connection, server_side=True).close()

    with listening(serve) as port:
        world.use(HPCSCHED_URL=f"https://127.0.0.1:{port}", HPCSCHED_TOKEN=TOKEN)
        yield


@stages(CLIENT, "HD-106", "hctl token create")
def no_token(world: World) -> Iterator[None]:
    world.use(HPCSCHED_URL="https://127.0.0.1:6820", HPCSCHED_TOKEN_FILE=str(world.base / "nothing"), HPCSCHED_TOKEN="")
    yield


@stages(CLIENT, "HD-107", "HPCSCHED_URL")
def another_web_server(world: World) -> Iterator[None]:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802 - its name in http.server
            self.send_response(404)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        world.use(HPCSCHED_URL=f"http://127.0.0.1:{server.server_port}", HPCSCHED_TOKEN=TOKEN)
        yield
        server.shutdown()


@contextmanager
def gateway(base: Path) -> Iterator[int]:
    """Run the gateway of the present configuration, without TLS."""
    port = free_port()
    with open(base / "gateway.log", "wb") as log:
        server = subprocess.Popen(
            [Path(sys.executable).parent / "hpcsched", "gateway", "--insecure-loopback", "--port", str(port)],
            stdout=log, stderr=log,
        )  # fmt: skip

    def answers() -> bool:
        assert server.poll() is None, (base / "gateway.log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    try:
        wait_until(answers, what="the gateway")
        yield port
    finally:
        server.terminate()
        server.wait(PATIENCE_S)


@stages(CLIENT, "HD-108", "hpcsched doctor")
def a_gateway_without_its_controller(world: World) -> Iterator[None]:
    pytest.importorskip("starlette")
    world.set("gateway", f'user = "{GATEWAY}"')
    with gateway(world.base) as port:
        world.use(HPCSCHED_URL=f"http://127.0.0.1:{port}", HPCSCHED_TOKEN=TOKEN)
        yield


@pytest.mark.parametrize("cause", CLIENT)
def test_a_fault_of_a_client_is_named_with_its_remedy(world: World, cause: str) -> None:
    stage, remedy = CLIENT[cause]
    with stage(world):
        assert remedy in the(examined(), cause).fix


# ----- the way to a node


@stages(WAY, "HD-301", "getent hosts no.such.host.invalid")
def an_unknown_name(world: World) -> Iterator[None]:
    world.node(host="no.such.host.invalid")
    yield


@stages(WAY, "HD-303", "systemctl enable --now ssh")
def a_closed_port(world: World) -> Iterator[None]:
    world.node(port=free_port())
    yield


@stages(WAY, "HD-306", "MaxStartups")
def a_port_that_says_nothing(world: World) -> Iterator[None]:
    with listening() as port:
        world.node(port=port)
        yield


@stages(WAY, "HD-307", "ss -tlnp")
def a_port_of_another_program(world: World) -> Iterator[None]:
    def serve(connection: socket.socket) -> None:
        with connection:
            connection.sendall(b"220 mail.lab ESMTP\r\n")

    with listening(serve) as port:
        world.node(port=port)
        yield


@stages(WAY, "HD-308", "hpcsched node rekey c1")
def another_host_key(world: World) -> Iterator[None]:
    world.node(host_key=OTHER_KEY)
    yield


@stages(WAY, "HD-309", "hpcsched key | ssh -p")
def a_key_that_is_not_let_in(world: World) -> Iterator[None]:
    (world.base / "none").touch(0o644)
    with world.sshd("", world.base / "none"):
        yield


@stages(WAY, "HD-310", "chmod 600")
def a_private_key_that_others_may_read(world: World) -> Iterator[None]:
    key = world.base / "key"
    shutil.copy(str(world.machine.identity_file), key)
    key.chmod(0o644)
    world.node(identity_file=str(key))
    yield


@stages(WAY, "HD-311", "pubkeyauthentication")
def a_login_with_passwords_only(world: World) -> Iterator[None]:
    with world.sshd("PubkeyAuthentication no\nPasswordAuthentication yes\n"):
        yield


@stages(WAY, "HD-312", "ProxyJump, not ProxyCommand")
def a_proxy_command(world: World) -> Iterator[None]:
    (world.base / "ssh_config").write_text("Host 127.0.0.1\n  ProxyCommand nc %h %p\n")
    world.set("controller", f'ssh_config = "{world.base}/ssh_config"')
    yield


@stages(WAY, "HD-313", "AllowTcpForwarding")
def a_jump_host_that_does_not_forward(world: World) -> Iterator[None]:
    jump = Sshd(world.base / "jump", world.machine, "AllowTcpForwarding no\n")
    (world.base / "known").write_text(f"[127.0.0.1]:{jump.port} {jump.host_key}\n")
    (world.base / "ssh_config").write_text(
        f"Host 127.0.0.1\n  UserKnownHostsFile {world.base}/known\n  IdentityFile {world.machine.identity_file}\n"
        f"Host node.lab\n  HostName 127.0.0.1\n  ProxyJump {world.machine.user}@127.0.0.1:{jump.port}\n"
    )
    world.node(host="node.lab", port=22)
    world.set("controller", f'ssh_config = "{world.base}/ssh_config"')
    yield
    jump.stop()


@stages(WAY, "HD-314", "usermod -s")
def an_account_that_may_not_log_in(world: World) -> Iterator[None]:
    with world.sshd("ForceCommand /usr/sbin/nologin\n"):
        yield


@stages(WAY, "HD-315", "head -c 300")
def start_up_files_that_print(world: World) -> Iterator[None]:
    with world.sshd("ForceCommand yes noise | head -c 900000; exec $SSH_ORIGINAL_COMMAND\n"):
        yield


@stages(WAY, "HD-316", "~/.bashrc.off")
def start_up_files_that_hang(world: World) -> Iterator[None]:
    with world.sshd("ForceCommand sleep 30\n"):
        yield


@stages(WAY, "HD-317", "apt-get install python3")
def no_python(world: World) -> Iterator[None]:
    world.node(python="/nowhere/python3")
    yield


@stages(WAY, "HD-318", "set python in")
def an_old_python(world: World) -> Iterator[None]:
    old = "import sys\nsys.version_info = (3, 6, 9, 'final', 0)\nexec(sys.argv[-1])\n"
    (world.base / "old.py").write_text(old)
    world.node(python=world.python(f'#!/bin/sh\nexec {PYTHON} {world.base}/old.py "$@"\n'))
    yield


@stages(WAY, "HD-319", "df -h")
def a_full_disk_for_the_agent(world: World) -> Iterator[None]:
    with mounted(world.base / "full", "size=64k,mode=755") as path, world.sshd(""):
        world.node(root=str(path / "agent"))
        yield


@stages(WAY, "HD-320", "findmnt -T")
def a_read_only_disk_for_the_agent(world: World) -> Iterator[None]:
    with mounted(world.base / "ro", "size=1m,mode=755") as path, world.sshd(""):
        subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        world.node(root=str(path / "agent"))
        yield


@stages(WAY, "HD-321", "chmod go-w")
def a_directory_that_others_may_write(world: World) -> Iterator[None]:
    root = world.base / "open"
    root.mkdir()
    root.chmod(0o777)
    world.node(root=str(root / "agent"))
    yield


@stages(WAY, "HD-322", "kill -CONT")
def a_stopped_agent(world: World) -> Iterator[None]:
    world.node(root=str(world.base / "agent"))
    assert not examined("c1").has("HD-322")
    pids = agents_of(world.base / "agent")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    end_agents(world.base / "agent")


def agents_of(root: Path) -> list[int]:
    """Return the agents whose root this is: processes with that word on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if os.fsencode(root) in words and b"attach" not in words:
                found.append(int(entry.name))
    return found


def end_agents(root: Path) -> None:
    for pid in agents_of(root):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def connect_as_controller(world: World) -> None:
    """Connect to the only node as a controller does; the doctor leaves no trace there."""
    config = load_config(world.etc)
    (spec,) = config.nodes
    dial, bundle, identity = dial_for(spec, config), build_bundle(), identity_of(config)
    with asking(spec, dial=dial, bundle=bundle, identity=identity, timeout_s=PATIENCE_S, visit=False):
        pass


@stages(WAY, "HD-323", "stop the other head")
def an_agent_of_another_cluster(world: World) -> Iterator[None]:
    root = world.base / "agent"
    world.node(root=str(root))
    from hpcsched.store.engine import PUT_META, open_database

    connect_as_controller(world)
    assert not examined("c1").has("HD-323")
    shutil.copy(world.database, world.base / "backup.db")
    with contextlib.closing(open_database(world.database)) as database:
        PUT_META.run(database, {"key": "incarnation", "value": "f" * 16})
    assert not examined("c1").has("HD-323")
    connect_as_controller(world)
    for path in world.state.glob("hpcsched.db*"):
        path.unlink()
    shutil.copy(world.base / "backup.db", world.database)
    yield
    end_agents(root)


@stages(WAY, "HD-324", "hpcsched key --bundle")
def a_policy_without_this_agent(world: World) -> Iterator[None]:
    (world.base / "etc-hpcsched").mkdir()
    policy = world.base / "etc-hpcsched" / "node.json"
    policy.write_text('{"bundles": [], "root": ""}')
    for part in ("upper", "work"):
        (world.base / part).mkdir()
    script = (
        f"mount -t tmpfs none {world.base}/work && mkdir {world.base}/work/u {world.base}/work/w && "
        f"mount -t overlay o -o lowerdir=/etc,upperdir={world.base}/work/u,workdir={world.base}/work/w /etc && "
        f'mkdir -p /etc/hpcsched && cp {policy} /etc/hpcsched/node.json && exec {PYTHON} "$@"'
    )
    world.node(python=world.python(f"#!/bin/sh\nexec unshare --mount sh -c '{script}' sh \"$@\"\n"))
    yield


@pytest.mark.parametrize("cause", WAY)
def test_a_fault_of_the_way_to_a_node_is_named_with_its_remedy(world: World, cause: str) -> None:
    stage, remedy = WAY[cause]
    with stage(world):
        assert remedy in the(examined("c1"), cause).fix


def test_a_node_is_examined_though_the_state_of_the_head_hangs_or_is_gone(world: World) -> None:
    with hung(world.state):
        assert the(examined("c1"), "HD-215")
    shutil.rmtree(world.state)
    assert "hpcsched restore" in the(examined("c1"), "HD-220").fix


def test_an_unknown_node_is_named(world: World) -> None:
    finding = the(examined("c\x1b[31m2"), "HD-300")
    assert finding.detail == "the nodes are: c1"


BY_NAME = {"HD-300"}


# Networks of their own: a name server that does not answer, packets that are dropped, a network without a route.
IN_A_NETWORK = {
    "HD-302": ("c1.lab", "resolvectl"),
    "HD-304": ("10.9.9.2", "ufw allow"),
    "HD-305": ("10.9.8.1", "ip route get"),
}
NETWORK = """
ip link set lo up
ip link add lan type veth peer name far; ip addr add 10.9.9.1/24 dev lan; ip link set lan up; ip link set far up
ip neigh add 10.9.9.2 lladdr 02:00:00:00:00:02 dev lan
ip route add unreachable 10.9.8.0/24
echo 'nameserver 127.0.0.53' > "$1/resolv.conf"; mount --bind "$1/resolv.conf" /etc/resolv.conf
cd "$1"; shift
exec "$@"
"""
SILENT = """
import json, os, socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); sock.bind(("127.0.0.53", 53))
sys.path[:0] = json.loads(sys.argv[2])
from hpcsched.cli.admin.doctor import diagnose
from hpcsched.doctor.facts import ask
def look(name):
    began_s = time.monotonic()
    walk = diagnose(name, os.environ)
    return [[f.rule.id, f.fix] for f in walk.findings], time.monotonic() - began_s
found = ask({name: (30.0, lambda note, name=name: look(name)) for name in sys.argv[3:]})
print(json.dumps({name: fact.value for name, fact in found.items()}))
"""


def test_networks_that_do_not_answer_are_named_in_time(world: World) -> None:
    if shutil.which("ip") is None or subprocess.run(["unshare", "--net", "true"], check=False).returncode:
        pytest.skip("NOT TESTED: needs network namespaces")
    for number, (host, _) in enumerate(IN_A_NETWORK.values()):
        text = render_node(f"w{number}", world.values | {"host": host, "port": 22})
        (world.etc / "nodes.d" / f"w{number}.toml").write_text(text)
    names = [f"w{number}" for number in range(len(IN_A_NETWORK))]
    done = subprocess.run(
        [
            *("unshare", "--net", "--mount", "sh", "-ec", NETWORK, "sh", world.base, sys.executable, "-c", SILENT),
            *("-", json.dumps(sys.path), *names),
        ],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name, (cause, (_, remedy)) in zip(names, IN_A_NETWORK.items(), strict=True):
        findings, took_s = found[name]
        assert [each[0] for each in findings] == [cause], name
        assert remedy in findings[0][1]
        assert took_s < MAX_S


# ----- a node that answers: an odd machine has many faults at once

CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t which, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(which, at);
    if (which == CLOCK_REALTIME) at->tv_sec += 100;
    return status;
}
"""
ODD_NODE = {
    "HD-401": "timedatectl set-ntp",
    "HD-402": "hinfo -N",
    "HD-403": "du -xh",
    "HD-404": "du -x --inodes",
    "HD-405": "/tmp",
    "HD-406": "mount ",
    "HD-407": "umount -l",
    "HD-408": "usermod -u",
    "HD-409": "set-timezone",
    "HD-410": "mpirun --version",
    "HD-411": "hctl show node c1",
    "HD-412": "kill -KILL",
    "HD-414": "set python in",
    "HD-416": "LimitNOFILE",
    "HD-417": "/dev/shm",
}


def test_all_faults_of_an_odd_machine_are_named(world: World) -> None:
    base = world.base
    (base / "clock.c").write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", base / "clock.so", base / "clock.c", "-ldl"], check=True)
    (base / "bin").mkdir()
    for directory, version in (("bin", "mpirun (Open MPI) 9.9.9"), ("here", "mpirun (Open MPI) 4.1.4")):
        (base / directory).mkdir(exist_ok=True)
        (base / directory / "mpirun").write_text(f"#!/bin/sh\necho '{version}'\n")
        (base / directory / "mpirun").chmod(0o755)
    world.use(PATH=f"{base}/here:{os.environ['PATH']}")
    for name, uid in (("passwd", 2345), ("passwd.head", 1500)):
        (base / name).write_text(Path("/etc/passwd").read_text() + f"doctorsuser:x:{uid}:{uid}::/:/bin/sh\n")
    (base / "closed").mkdir(0o700)
    (base / "closed" / "python3").symlink_to(os.path.realpath(PYTHON))
    script = (
        f"mount -t tmpfs -o size=8m none /dev/shm && mount -t tmpfs none {world.share} && "
        f"mount --bind {base}/passwd /etc/passwd && ulimit -n 256 && cd / && "
        f"mount -t tmpfs -o size=8m none /tmp && umount -l /sys/fs/cgroup && "
        f'export TZ=Asia/Tokyo PATH={base}/bin:$PATH LD_PRELOAD={base}/clock.so && exec {base}/closed/python3 "$@"'
    )
    world.set("controller", 'confine = ["cpus", "gpus"]')
    with mounted(base / "small", "size=64m,nr_inodes=150,mode=755") as root:
        world.node(
            python=world.python(f"#!/bin/sh\nexec unshare --mount sh -c '{script}' sh \"$@\"\n"),
            root=str(root / "agent"), cpus=4000,
        )  # fmt: skip
        left = subprocess.Popen(
            ["sleep", "60"], env={"HPCSCHED_JOB_ID": "99999", "HPCSCHED_AGENT_ROOT": str(root / "agent")}
        )
        with hung(base / "hung"), world.sshd(""):
            walk = examined_with_accounts("c1", base / "passwd.head")
        left.kill()
        left.wait()
        end_agents(root / "agent")
    found = {finding.rule.id: finding.fix for finding in walk.findings if finding.rule.id != LOAD}
    assert {cause for cause, remedy in ODD_NODE.items() if remedy in found.get(cause, "")} == set(ODD_NODE)
    assert set(found) <= set(ODD_NODE)


# ----- a cluster that is well, and one whose controller and nodes are disturbed


@pytest.fixture(scope="module")
def cluster(short: Path) -> Iterator[LocalCluster]:
    settings = {
        "controller": {
            "confine": ["none"],
            "node_down_after_s": 2,
            "heartbeat_s": 0.5,
            "allow_uid_below": 0,
            "run_dir": str(short / "run"),  # which the gateway's account may enter
        },
        "gateway": {"user": GATEWAY},
        "partitions.shut": {"nodes": "all", "up": False},
    }
    with (
        mounted(short / "full", "size=128k,mode=777"),
        OwnPython(short / "live", ("n1", "n2"), settings=settings) as cluster,
    ):
        yield cluster


@pytest.fixture
def live(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> LocalCluster:
    monkeypatch.setenv("HPCSCHED_CONFIG", str(cluster.config_dir))
    return cluster


def well(walk: Walk) -> list[tuple[str, str]]:
    return [(finding.rule.id, finding.detail) for finding in walk.findings if finding.rule.id != LOAD] + [
        ("", text) for text in walk.unseen
    ]


def test_nothing_is_found_in_a_cluster_that_is_well(live: LocalCluster) -> None:
    for subject in ("", "n1", "n2"):
        assert well(examined(subject)) == []
    done = live.run("hpcsched", "doctor", "--json", check=False)
    answer = json.loads(done.stdout)
    assert [one["id"] for one in answer["findings"] if one["id"] != LOAD] == []
    assert answer["not_checked"] == []
    walk = examined_by_nobody("n1")  # which cannot log in to nodes
    assert {finding.rule.id for finding in walk.findings} <= {LOAD}


def test_nothing_is_found_from_another_machine(
    live: LocalCluster, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette")
    token = live.run("hctl", "token", "create", "--scope=read").stdout.strip()
    monkeypatch.setenv("HPCSCHED_TOKEN", token)
    job = submit(live, "exit 3", "far")
    wait_until(lambda: state_of(live, job) == "FAILED", what="the job")
    with gateway(short) as port:
        monkeypatch.setenv("HPCSCHED_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("HPCSCHED_CONFIG", "/nowhere")
        assert well(examined("")) == []
        walk = examined("n1")  # a gateway has no agent asked
        assert ([each for each in walk.findings if each.rule.id != LOAD], len(walk.unseen)) == ([], 1)
        assert the(examined("n9"), "HD-300")
        assert the(examined(job), "HD-542")


LIVE = {
    "HD-231": "kill -CONT",
    "HD-233": "hpcsched up",
    "HD-262": "hctl resume n2",
    "HD-263": "hpcsched doctor n2",
}


def test_a_stopped_controller_is_named(live: LocalCluster) -> None:
    pid = client.controller_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        finding = the(examined(), "HD-231")
        assert f"{LIVE['HD-231']} {pid}" in finding.fix
        walk = examined("1")  # a job cannot be asked about: the cause is the cluster's
        assert the(walk, "HD-231")
        assert walk.unseen
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_controller_without_its_socket_is_named(live: LocalCluster) -> None:
    path = live.api_socket
    path.rename(path.with_suffix(".away"))
    try:
        assert LIVE["HD-233"] in the(examined(), "HD-233").fix
    finally:
        path.with_suffix(".away").rename(path)


def test_drained_nodes_are_named_by_who_drained_them(live: LocalCluster) -> None:
    for by, cause in (("ann", "HD-262"), ("hhealth", "HD-263")):
        live.api("POST", "/v1/nodes/drain", {"nodes": "n2", "why": "its fan \x1b]0;x\x07", "by": by})
        for subject in ("", "n2"):
            assert LIVE[cause] in the(examined(subject), cause).fix
        shown = live.run("hpcsched", "doctor", check=False)
        assert shown.returncode == (cause == "HD-263" or LOAD in shown.stdout)
        assert "\x1b" not in shown.stdout
        live.api("POST", "/v1/nodes/resume", {"nodes": "n2"})


# ----- jobs: all are submitted at once

ENDED: dict[str, tuple[dict[str, Any], str, str]] = {  # cause: changes of the request, script, a part of the remedy
    "HD-520": ({"time_limit_s": 1}, "sleep 60", "hsub --time=TIME"),
    "HD-521": ({}, f"{PYTHON} -c 'x = bytearray(b\"x\") * (300 << 20)'", "hsub --mem=SIZE"),
    "HD-522": ({}, "kill -KILL $$", "hacct --eff"),
    "HD-523": ({}, "kill -SEGV $$", "hlogs --err"),
    "HD-524": ({}, "kill -ILL $$", "lscpu"),
    "HD-530": ({"work_dir": "/no/such/dir"}, "true", "mkdir -p /no/such/dir"),
    "HD-532": ({"stdout": "/proc/none/out"}, "true", "ls -ld /proc/none"),
    "HD-534": ({}, "#!/no/such/interpreter\ntrue", "ls -l /no/such/interpreter"),
    "HD-535": ({}, "printf '#!/bin/sh\\r\\ntrue\\r\\n' > crlf; chmod +x crlf; ./crlf", "sed -i"),
    "HD-536": ({}, "nosuchprogram --now", "command -v nosuchprogram"),
    "HD-537": ({}, "echo x > data; chmod -x data; exec ./data", "HD-537/data"),
    "HD-538": ({"work_dir": "FULL"}, "head -c 999999 /dev/zero; exit 1", "df -h"),
    "HD-542": ({}, "echo the end is near >&2; exit 3", "hlogs --err"),
    "HD-601": ({}, f"{PYTHON} -c 'import nosuchmodule'", "pip install nosuchmodule"),
    "HD-602": ({}, f"{PYTHON} -c 'import ctypes; ctypes.CDLL(\"libnosuch.so.1\")'", "grep libnosuch.so.1"),
    "HD-603": ({}, "set -e; module load gcc", "modules.sh"),
    "HD-606": ({}, f"{PYTHON} -c 'from socket import *; a=create_server((\"\", 0)); create_server(a.getsockname())'", "ss -t"),
    "HD-607": ({"work_dir": "FULL", "stdout": "SHARE/607"}, "set -e; head -c 999999 /dev/zero > x", "df -h"),
    "HD-609": ({}, "set -e; setpriv --reuid 65534 --clear-groups cat /etc/shadow", "ls -ld /etc/shadow"),
    "HD-611": ({}, f"ulimit -n 16; {PYTHON} -c 'x=[open(\"/dev/null\") for _ in range(99)]'", "ulimit -n"),
    "HD-613": ({}, f"{PYTHON} -c 'bytearray(1<<60)'", "hsub --mem=SIZE"),
    "HD-614": ({}, "set -e; cat /no/such/file", "ls -ld /no/such/file"),
}  # fmt: skip
WAITING: dict[str, tuple[list[str], str]] = {
    "HD-501": (["--hold"], "hctl release"),
    "HD-504": (["--nodelist=n2"], "hinfo -N"),
    "HD-505": (["--exclusive"], "hwhy"),
    "HD-506": (["--begin=now+1hour"], "hwhy"),
    "HD-507": (["--partition=shut"], "hctl show partition shut"),
}
OTHER_JOBS = {
    "HD-500": "an unknown number",
    "HD-502": "a dependency on a job that failed",
    "HD-503": "the second task of an array",
    "HD-508": "a reservation that begins before the job would end",
    "HD-510": "a node that was switched off",
    "HD-511": "hctl suspend",
    "HD-539": "a node that was switched off and fenced",
    "HD-540": "hcancel",
}


def submit(live: LocalCluster, script: str, name: str, **changes: Any) -> str:
    """Submit a script as it is, and return the job's number."""
    folder = live.share / name
    folder.mkdir(exist_ok=True)
    text = script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"
    places = {"FULL": str(live.base.parent / "full"), "SHARE": str(live.share)}
    for key, value in changes.items():
        if isinstance(value, str):
            changes[key] = re.sub("FULL|SHARE", lambda match: places[match[0]], value)
    made = {"work_dir": str(folder), "mem_per_node_mib": 50, "env": (("PATH", os.environ["PATH"]),), **changes}
    spec = JobSpec(name=name, script=text, script_path=str(folder / "job.sh"), **made)
    answer = live.api("POST", "/v1/submit", {"request_id": "", "jobs": [spec_to_json(spec)]})
    return str(answer["jobs"][0]["job_id"])


def state_of(live: LocalCluster, job: str) -> str:
    states = [each["state"] for each in live.api("GET", f"/v1/job/{job}")["jobs"]]
    return str(states[0])


ACTIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


def test_a_job_that_failed_is_explained_with_the_remedy(live: LocalCluster) -> None:
    jobs = {cause: submit(live, script, cause, **changes) for cause, (changes, script, _) in ENDED.items()}
    wait_until(lambda: not [job for job in jobs.values() if state_of(live, job) in ACTIVE], what="the jobs to end")
    wrong = {}
    for cause, (_, _, remedy) in ENDED.items():
        found = [(one.rule.id, one.fix) for one in examined(jobs[cause]).findings]
        if not (found and found[0][0] == cause and remedy in found[0][1]):
            wrong[cause] = found
    assert wrong == {}


def test_a_waiting_job_is_explained_with_the_remedy(live: LocalCluster) -> None:
    live.api("POST", "/v1/nodes/drain", {"nodes": "n2", "why": "test", "by": "ann"})
    failed = submit(live, "exit 1", "failed")

    def hsub(*options: str) -> str:
        return live.run("hsub", "--parsable", "--mem=50M", *options, "--wrap", "sleep 300").stdout.strip()

    array = hsub("--array=0-1%1")
    wait_until(lambda: state_of(live, failed) == "FAILED", what="a job to fail")
    jobs = {cause: hsub(*options) for cause, (options, _) in WAITING.items()}
    words = ["StartTime=now+30minutes", "Duration=60", "Nodes=n1", "Users=nobody", "Flags=IGNORE_JOBS"]
    live.run("hctl", "create", "reservation", "ReservationName=later", *words)
    reserved = hsub("--time=60", "--nodelist=n1", "--nice=-100000")
    never = hsub(f"--dependency=afterok:{failed}", "--kill-on-invalid-dep=no")
    wait_until(lambda: state_of(live, f"{array}_0") == "RUNNING", what="the array")
    try:
        for cause, job in jobs.items():
            assert WAITING[cause][1] in the(examined(job), cause).fix
        assert f"hctl update {never} dependency=" in the(examined(never), "HD-502").fix
        assert "hwhy" in the(examined(f"{array}_1"), "HD-503").fix
        assert f"hctl update {reserved} timelimit=" in the(examined(reserved), "HD-508").fix
        assert the(examined("99999"), "HD-500")
        live.run("hctl", "suspend", f"{array}_0")
        wait_until(lambda: state_of(live, f"{array}_0") == "SUSPENDED", what="the suspension")
        assert f"hctl resume {array}_0" in the(examined(f"{array}_0"), "HD-511").fix
    finally:
        live.api("POST", "/v1/nodes/resume", {"nodes": "n2"})
        live.run("hctl", "delete", "reservation", "later", check=False)
        live.run("hcancel", "--user=root", check=False)
    wait_until(lambda: state_of(live, f"{array}_0") == "CANCELLED", what="the end")
    assert "hctl story" in the(examined(f"{array}_0"), "HD-540").fix


def test_a_lost_node_is_explained_and_so_are_its_jobs(live: LocalCluster) -> None:
    machines = live.machines
    assert machines is not None
    job = submit(live, "sleep 300", "lost", nodelist=("n2",), requeue=False)
    wait_until(lambda: state_of(live, job) == "RUNNING", what="the job")
    machines.power_off("n2")

    def refused() -> bool:  # the connection is lost first, and a new one is refused then
        nodes = live.api("GET", "/v1/nodes")["nodes"]
        return any(each["link"] == "down" and "refused" in each["link_why"] for each in nodes)

    wait_until(refused, what="its loss")
    assert "hctl fence n2" in the(examined(job), "HD-510").fix
    for subject in ("", "n2"):
        finding = the(examined(subject), "HD-303")
        assert (finding.at, "systemctl enable --now ssh" in finding.fix) == ("n2", True)
    live.run("hctl", "fence", "n2", "test")
    wait_until(lambda: state_of(live, job) == "NODE_FAIL", what="the end of the job")
    assert f"hctl requeue {job}" in the(examined(job), "HD-539").fix


def test_every_cause_has_a_staged_fault_or_a_reason() -> None:
    staged = {
        *HEAD,
        *CLIENT,
        *WAY,
        *IN_A_NETWORK,
        *ODD_NODE,
        *LIVE,
        *ENDED,
        *WAITING,
        *OTHER_JOBS,
        *BY_NOBODY,
        *BY_NAME,
    }
    assert staged | NOT_STAGED.keys() == CAUSES.keys()
    assert staged & NOT_STAGED.keys() == set()
    assert len(staged) >= 40
    assert all(NOT_STAGED.values())
