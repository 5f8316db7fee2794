"""`attach` starts an agent, replaces an agent of another bundle, and connects to it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_client import Controller, NodeUnderTest, launch_of, new_token, script_of
from waiting import PATIENCE_S, wait_until

from hpcnode.os import process
from hpcnode.wire import protocol
from hpcsched.launch.bundle import build_bundle


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hpcnode-test-", dir="/tmp"))
    path.chmod(0o711)
    node = NodeUnderTest(root=path)
    yield path
    node.stop()
    shutil.rmtree(path, ignore_errors=True)


class Attached(Controller):
    """A controller at the far end of `attach`'s stdin and stdout."""

    def __init__(self, root: Path, *program: str, epoch: int = 1) -> None:
        self.process = subprocess.Popen(
            [*program, "attach", "--root", str(root), "--cluster", "c", "--node", "n1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "HPCNODE_SIMULATED": "1"},
        )
        self.node = NodeUnderTest(root=root)
        self.epoch = epoch
        self.messages = []
        self.closed = False
        self._framer = protocol.Framer()
        self.send(protocol.Hello(protocol.VERSION, "c", "feedc0de", epoch, "n1"))
        self.welcome = self.wait(lambda m: isinstance(m, (protocol.Welcome, protocol.Goodbye)))

    def send(self, message: protocol.Message, blob: bytes = b"") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(protocol.encode(message, blob))
        self.process.stdin.flush()

    def pump(self, timeout_s: float) -> bool:
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 20)
        self.closed = not data
        self.messages += list(self._framer.feed(data))
        return bool(data)

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        self.process.wait(PATIENCE_S)


def source() -> list[str]:
    import hpcnode

    return [sys.executable, "-I", "-S", str(Path(hpcnode.__file__).parent)]


def bundle(root: Path, version: str = "") -> list[str]:
    """Put a bundle into the root, as if it had come there a day ago; another one for each `version`."""
    import hpcnode

    package = Path(hpcnode.__file__).parent
    sources = {str(path.relative_to(package.parent)): path.read_bytes() for path in package.rglob("*.py")}
    built = build_bundle(sources | {"hpcnode/version.txt": version.encode()})
    path = root / f"hpcnode-{built.sha256[:16]}.pyz"
    path.write_bytes(built.data)
    os.utime(path, (time.time() - 86_400, time.time() - 86_400))
    return [sys.executable, "-I", "-S", str(path)]


def test_attach_starts_an_agent_that_outlives_it(root: Path) -> None:
    controller = Attached(root, *source())
    token = controller.launch("sleep 0.2; exit 3")
    controller.wait_status(token, protocol.STARTED)
    controller.close()
    again = Attached(root, *source())
    assert again.welcome.pid == controller.welcome.pid
    ended = [r for r in again.welcome.inventory if r["status"] == protocol.ENDED] or [again.final(token)]
    assert (ended[0]["codes"] if isinstance(ended[0], dict) else ended[0].codes) == [3]
    assert os.getsid(again.welcome.pid) == again.welcome.pid
    again.close()


def test_an_agent_of_another_bundle_is_replaced_under_running_jobs(root: Path) -> None:
    old = Attached(root, *source())
    assert old.welcome.agent_version == "source"
    token = old.launch(
        "echo $$ >> $HPCSCHED_AGENT_ROOT/pids; while [ ! -e go ]; do sleep 0.05; done", work_dir=str(root)
    )
    old.wait_status(token, protocol.STARTED)
    wait_until(lambda: (root / "pids").exists())
    new = Attached(root, *bundle(root))
    assert new.welcome.pid != old.welcome.pid
    assert len(new.welcome.agent_version) == 16
    assert [r["status"] for r in new.welcome.inventory] == [protocol.STARTED]
    assert new.welcome.agent_version in (root / "bin" / "hrun").read_text()
    (root / "go").touch()
    assert new.final(token).codes == [0]
    assert len((root / "pids").read_text().split()) == 1
    old.close()
    new.close()


def test_an_old_bundle_stays_while_a_shepherd_runs_from_it(root: Path) -> None:
    first = bundle(root, "1")
    old = Attached(root, *first)
    token = old.launch("while [ ! -e go ]; do sleep 0.05; done", work_dir=str(root))
    old.wait_status(token, protocol.STARTED)
    new = Attached(root, *bundle(root, "2"))
    assert new.welcome.pid != old.welcome.pid
    assert Path(first[-1]).exists()
    (root / "go").touch()
    assert new.final(token).codes == [0]
    wait_until(lambda: not process.is_named(first[-1].encode()))
    third = bundle(root, "3")
    newest = Attached(root, *third)
    assert [path.name for path in root.glob("hpcnode-*.pyz")] == [Path(third[-1]).name]
    for one in (old, new, newest):
        one.close()


def test_an_agent_that_hangs_is_replaced_too(root: Path) -> None:
    old = Attached(root, *source())
    os.kill(old.welcome.pid, signal.SIGSTOP)
    new = Attached(root, *bundle(root))
    assert new.welcome.pid != old.welcome.pid
    old.close()
    new.close()


def test_an_agent_that_answers_no_connection_is_replaced(root: Path) -> None:
    old = Attached(root, *source())
    token = old.launch("while [ ! -e go ]; do sleep 0.05; done", work_dir=str(root))
    old.wait_status(token, protocol.STARTED)
    os.kill(old.welcome.pid, signal.SIGSTOP)
    new = Attached(root, *source())
    assert new.welcome.pid != old.welcome.pid
    (root / "go").touch()
    assert new.final(token).codes == [0]
    old.close()
    new.close()


def test_attach_passes_on_much_both_ways(root: Path) -> None:
    controller = Attached(root, *bundle(root))
    data = os.urandom(6_000_000)
    (root / "data").write_bytes(data)
    controller.send(protocol.ReadFile(1, "", str(root / "data"), 2_000_000, 4_000_000))
    controller.wait(lambda m: isinstance(m, protocol.FileData))
    blob = next(b for m, b in controller.messages if isinstance(m, protocol.FileData))
    assert blob == data[2_000_000:6_000_000]
    token = new_token()
    script = script_of(f"# {'x' * 3_000_000}\nexit 4")
    controller.send(launch_of(token), script)
    assert controller.final(token).codes == [4]
    controller.close()


def test_attach_says_that_it_was_the_agent_that_ended(root: Path) -> None:
    controller = Attached(root, *source())
    pid = controller.welcome.pid
    os.kill(pid, signal.SIGKILL)
    assert controller.process.stderr is not None
    assert f"the agent has ended or was killed (see {root}/log)" in controller.process.stderr.read().decode()
    assert controller.process.wait(PATIENCE_S) == 1
    controller.close()


def test_attach_says_why_there_is_no_agent(root: Path) -> None:
    (root / "spool").write_text("in the way")
    done = subprocess.run(
        [*source(), "attach", "--root", str(root), "--cluster", "c", "--node", "n1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert b"spool" in done.stderr


def test_a_root_with_a_long_path_has_its_socket_elsewhere(root: Path) -> None:
    deep = root / ("d" * 80) / ("e" * 80)
    deep.mkdir(parents=True)
    controller = Attached(deep, *source())
    token = controller.launch(argv=["sh", "-c", f"test -S $HPCSCHED_SOCKET && echo $HPCSCHED_SOCKET > {root}/out"])
    assert controller.final(token).codes == [0]
    sock = Path((root / "out").read_text().strip())
    assert len(str(sock)) < 108
    controller.close()
    NodeUnderTest(root=deep).stop()
    sock.unlink()
