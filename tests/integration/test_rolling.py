"""`hpcsched rolling` on a cluster of two nodes behind sshd: in turn, without jobs, rebooted, stopped at the first failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_until

from hpcsched import client
from hpcsched.cli.admin import rolling
from hpcsched.cli.admin.rolling import (
    OPEN,
    NodeFailedError,
    NodeProgress,
    Orders,
    Phase,
    RemoteShell,
    Roll,
    Roller,
    RollFile,
)
from hpcsched.config.keys import LOCAL_HOST
from hpcsched.config.load import load_config
from hpcsched.loopback.cluster import LocalCluster
from hpcsched.sched.policy import Policy
from hpcsched.sched.snapshot import Snapshot, snapshot_to_json

pytestmark = pytest.mark.timeout(400)
GATED = "while [ ! -e {gate} ]; do sleep 0.05; done"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="hpc") as directory:
        Path(directory).chmod(0o755)
        with LocalCluster(Path(directory), names=("n1", "n2")) as started:
            yield started


class Rolls:
    """Rolls whose progress is below `place`."""

    def __init__(self, cluster: LocalCluster, place: Path) -> None:
        self.cluster, self.place = cluster, place

    def words(self, *words: str) -> list[str]:
        return ["hpcsched", "rolling", "--state", str(self.place / "roll"), *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.cluster.run(*self.words(*words), check=False, timeout_s=PATIENCE_S)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["env", "--default-signal=INT", *self.words(*words)],
            env=self.cluster.env, cwd=self.place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def phases(self) -> dict[str, str]:
        found = json.loads(self.run("--status", "--json").stdout)["nodes"]
        return {name: node["phase"] for name, node in found.items()}


@pytest.fixture
def rolls(cluster: LocalCluster, tmp_path: Path) -> Rolls:
    return Rolls(cluster, tmp_path)


def view(cluster: LocalCluster, name: str) -> dict[str, Any]:
    (found,) = [view for view in cluster.api("GET", "/v1/nodes")["nodes"] if view["name"] == name]
    return dict(found)


def states(cluster: LocalCluster) -> list[str]:
    return [view["state"] for view in cluster.api("GET", "/v1/nodes")["nodes"]]


def test_a_command_runs_on_one_node_after_the_other(cluster: LocalCluster, rolls: Rolls, tmp_path: Path) -> None:
    order = tmp_path / "order"
    script = f'echo begin >> {order}; test "$0" = "a b" && echo end >> {order}; echo done'
    done = rolls.run("--", "sh", "-c", script, "a b")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 nodes done" in done.stdout
    assert order.read_text().split() == ["begin", "end"] * 2
    assert states(cluster) == ["IDLE", "IDLE"]
    assert [(tmp_path / f"roll/n{number}.out").read_text().splitlines()[-1] for number in (1, 2)] == ["done"] * 2
    assert (tmp_path / "roll").stat().st_mode & 0o777 == 0o700


def test_the_first_failure_ends_the_roll_and_is_taken_up_again(
    cluster: LocalCluster, rolls: Rolls, tmp_path: Path
) -> None:
    assert "cannot go on" in rolls.run("--continue").stderr
    mended = tmp_path / "mended"
    failed = rolls.run("--", "test", "-e", str(mended))
    assert failed.returncode == 1
    assert "the command ended with status 1; see " in failed.stderr
    assert sorted(rolls.phases().values()) == ["failed", "to do"]
    assert sorted(states(cluster)) == ["DRAINED", "IDLE"]
    assert "cannot begin: the last roll (test -e " in rolls.run("--", "true").stderr
    mended.touch()
    assert rolls.run("--continue").returncode == 0
    assert states(cluster) == ["IDLE", "IDLE"]
    assert "cannot go on" in rolls.run("--continue").stderr


def test_a_node_waits_for_its_job_and_for_a_job_that_only_it_can_run(
    cluster: LocalCluster, rolls: Rolls, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    running, waiting = (
        cluster.run("hsub", "--parsable", "-w", "n1", "--exclusive", "--wrap", GATED.format(gate=gate)).stdout.strip()
        for _ in range(2)
    )
    wait_until(lambda: view(cluster, "n1")["jobs"] == [int(running)], what="the job to run")
    with rolls.start("--", "true") as process:
        assert process.stdout is not None
        said: list[str] = []
        for line in process.stdout:
            said.append(line)
            if "not taken now" in line:
                break
        assert f"n1: not taken now, because job {waiting} waits for it\n" in said
        assert "n2: running\n" in said
        assert not view(cluster, "n1")["drained"]
        gate.touch()
        rest = process.stdout.read()
        assert process.wait(PATIENCE_S) == 0, rest
    assert cluster.api("GET", f"/v1/job/{waiting}")["jobs"][0]["state"] == "COMPLETED"
    assert states(cluster) == ["IDLE", "IDLE"]


def test_jobs_are_requeued_on_request(cluster: LocalCluster, rolls: Rolls, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = cluster.run("hsub", "--parsable", "-w", "n1", "--wrap", GATED.format(gate=gate)).stdout.strip()
    wait_until(lambda: view(cluster, "n1")["jobs"] == [int(job)], what="the job to run")
    done = rolls.run("--nodes", "n1", "--requeue", "--", "true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"n1: 1 job requeued: {job}" in done.stdout
    gate.touch()
    wait_until(lambda: cluster.api("GET", f"/v1/job/{job}")["jobs"][0]["state"] == "COMPLETED", what="it to run again")
    assert cluster.api("GET", f"/v1/job/{job}")["jobs"][0]["attempt"] == 1


def test_a_reboot_is_proved_by_another_boot_id(cluster: LocalCluster, rolls: Rolls, tmp_path: Path) -> None:
    marker = tmp_path / "reboots"
    before = view(cluster, "n2")["boot_id"]
    words = ("--nodes", "n2", "--reboot", "--reboot-command", f"touch {marker}", "--check", f"test -e {marker}")
    machines = cluster.machines
    assert machines is not None

    def reboot() -> None:
        wait_until(marker.exists, what="the command that reboots")
        machines.power_off("n2")
        machines.power_on("n2")

    thread = threading.Thread(target=reboot)
    thread.start()
    done = rolls.run(*words, "--", "true")
    thread.join()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "n2: rebooting" in done.stdout
    assert f"n2: rebooted, kernel still {os.uname().release}\n" in done.stdout
    assert view(cluster, "n2")["boot_id"] != before
    assert states(cluster) == ["IDLE", "IDLE"]
    stayed = rolls.run("--nodes", "n2", "--reboot", "--reboot-command", "true", "--boot-limit", "1s", "--", "true")
    assert "it has not booted again" in stayed.stderr
    cluster.run("hctl", "resume", "n2")
    refused = rolls.run(
        "--state", str(tmp_path / "other"), "--nodes", "n2", "--reboot", "--reboot-command", "false", "--", "true"
    )
    assert "the command that reboots it ended with status 1" in refused.stderr
    cluster.run("hctl", "resume", "n2")


def test_a_reboot_that_was_noted_and_not_sent_is_sent(cluster: LocalCluster, rolls: Rolls, tmp_path: Path) -> None:
    marker = tmp_path / "reboots"
    words = ("--nodes", "n2", "--reboot", "--reboot-command", f"touch {marker}", "--boot-limit", "1s")
    assert "it has not booted again" in rolls.run(*words, "--", "true").stderr
    marker.unlink()
    progress = tmp_path / "roll/roll.json"
    roll = json.loads(progress.read_text())
    roll["nodes"]["n2"] |= {"phase": "rebooting", "boot_id": view(cluster, "n2")["boot_id"]}
    progress.write_text(json.dumps(roll))
    assert "it has not booted again" in rolls.run("--continue").stderr
    assert marker.exists()
    cluster.run("hctl", "resume", "n2")


def test_a_command_that_takes_too_long_here_ends_with_what_it_started(cluster: LocalCluster, tmp_path: Path) -> None:
    config = load_config(cluster.config_dir)
    here = replace(config, nodes=[replace(spec, host=LOCAL_HOST) for spec in config.nodes])
    shell, output = RemoteShell(here, Orders(command=("true",))), tmp_path / "out"
    with pytest.raises(NodeFailedError, match="takes too long"):
        shell.run("n1", "sleep 1000 & echo $!; wait", 1, output, threading.Event())
    stat = Path(f"/proc/{int(output.read_text().splitlines()[-1])}/stat")
    wait_until(lambda: not stat.exists() or ") Z " in stat.read_text(), what="the child to end")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_roll_goes_on_where_it_was(
    how: signal.Signals, cluster: LocalCluster, rolls: Rolls, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with rolls.start("--", "sh", "-c", f"echo $$ > {tmp_path}/pid; {GATED.format(gate=gate)}") as process:
        wait_until(lambda: sorted(rolls.phases().values()) == ["running", "to do"], what="the first node")
        wait_until((tmp_path / "pid").exists, what="the command")
        assert "another 'hpcsched rolling' is at work" in rolls.run("--continue").stderr
        process.send_signal(how)
        process.wait(PATIENCE_S)
    assert sorted(rolls.phases().values()) == ["running", "to do"]
    assert sorted(states(cluster)) == ["DRAINED", "IDLE"]
    gate.touch()
    done = rolls.run("--continue")
    assert done.returncode == 0, done.stdout + done.stderr
    assert states(cluster) == ["IDLE", "IDLE"]


class Killed(BaseException):
    """The roll's process ends here."""


class FakeNodes:
    """A controller with two nodes; a process that uses it or the roll's file can be killed before or after each use."""

    def __init__(self, kill_at: int) -> None:
        self.drained = {"n1": "", "n2": ""}
        self.boots = {"n1": 1, "n2": 1}
        self.commands: list[tuple[str, str]] = []
        self.is_dead = False
        self._left = kill_at

    def use(self, call: Callable[[], Any]) -> Any:
        self._tick()
        found = call()
        self._tick()
        return found

    def killable(self, write: Callable[[Roll], None]) -> Callable[[Roll], None]:
        return lambda roll: self.use(lambda: write(roll))

    def _tick(self) -> None:
        self._left -= 1
        self.is_dead |= self._left == 0
        if self.is_dead:
            raise Killed

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        if self.is_dead:
            raise Killed
        if path == "/v1/snapshot":
            return {"snapshot": snapshot_to_json(Snapshot(now_s=0.0, nodes=(), partitions={}), Policy())}
        if body is None:
            return {"nodes": [self.view(name) for name in self.drained]}
        self.use(lambda: self.drained.update({body["nodes"]: body["why"] if path == "/v1/nodes/drain" else ""}))
        return {}

    def view(self, name: str) -> dict[str, Any]:
        why = self.drained[name]
        facts = {"facts": {"kernel": "6.1"}, "jobs": [], "link": "up", "boot_id": str(self.boots[name])}
        return {"name": name, "drained": bool(why), "drained_by": "root", "drained_why": why, **facts}

    def run(self, name: str, command: str, *more: object) -> int:
        assert self.drained[name].startswith("rolling")
        self.use(lambda: self.commands.append((name, command)))
        self.boots[name] += command == "reboot"
        return 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_roll_that_is_killed_at_any_step_goes_on_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling, "LOOK_S", 0.001)
    points = 0
    for kill_at in count(1):
        nodes = FakeNodes(kill_at)
        file = RollFile(tmp_path / f"roll-{kill_at}")
        monkeypatch.setattr(client, "call", nodes.call)
        shell: Any = nodes
        lives = 0
        with file.held():
            write = file.write
            monkeypatch.setattr(file, "write", nodes.killable(write))
            write(Roll(Orders(command=("true",), reboot="reboot"), {name: NodeProgress() for name in nodes.drained}))
            while lives == 0 or (roll := file.read()) is None or roll.in_phase(*OPEN):
                found = file.read()
                assert found is not None
                lives += 1
                nodes.is_dead = False
                with suppress(Killed):
                    Roller(found, file, shell, lambda line: None).run()
        roll = file.read()
        assert roll is not None
        assert {node.phase for node in roll.nodes.values()} == {Phase.DONE}, (kill_at, roll)
        assert nodes.drained == {"n1": "", "n2": ""}, kill_at
        for name in nodes.drained:
            assert 1 <= nodes.commands.count((name, "true")) <= 2, (kill_at, nodes.commands)
            assert nodes.boots[name] >= 2
        if lives == 1:
            break
        points += 1
    assert points > 30


def test_a_node_is_measured_before_it_is_resumed(cluster: LocalCluster, rolls: Rolls) -> None:
    done = rolls.run("--nodes", "n1", "--bench", "--", "true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [run["node"] for run in cluster.api("GET", "/v1/benches")["benches"]] == ["n1"]
    assert states(cluster) == ["IDLE", "IDLE"]


def test_nodes_that_somebody_else_drained_are_left_out(cluster: LocalCluster, rolls: Rolls) -> None:
    cluster.run("hctl", "drain", "n2", "fan broken")
    done = rolls.run("--", "true")
    assert done.returncode == 0
    assert "n2: left out: it is drained already, by root: fan broken" in done.stdout
    assert "1 of 2 nodes done, 1 left out" in done.stdout
    assert view(cluster, "n2")["drained_why"] == "fan broken"
    cluster.run("hctl", "resume", "n2")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "cannot roll without a command"),
        (("--nodes", "n9", "--", "true"), "there is no node of that name"),
        (("--nodes", "n[1-99999999]", "--", "true"), "cannot"),
        (("--limit", "soon", "--", "true"), "cannot read time"),
        (("--at-once", "0", "--", "true"), "0 is not in the range"),
    ],
)
def test_wrong_words_begin_nothing(words: tuple[str, ...], why: str, rolls: Rolls) -> None:
    refused = rolls.run(*words)
    assert refused.returncode != 0
    assert why in refused.stderr
    assert rolls.phases() == {}


def test_a_damaged_file_of_progress_is_said(rolls: Rolls, tmp_path: Path) -> None:
    (tmp_path / "roll").mkdir()
    for text in ("", "[]", '{"orders": 3}', '{"orders": {"command": ["x"]}, "nodes": {"n1": {"phase": "odd"}}}'):
        (tmp_path / "roll/roll.json").write_text(text)
        assert "cannot read the progress in" in rolls.run("--continue").stderr
